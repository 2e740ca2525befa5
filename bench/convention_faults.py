"""Faults of models with a config.json. Each fault changes the modules of the library transformers so that they break
one convention of a model family. A method with its own code for layers could make the same mistake.
bench/faults/planted.py trains models with these faults.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from bench import routing_faults
from bench.replaced_functions import Breaks, replace_within
from harness.core import hub_config
from harness.core.job import Workload


def of(workload: Workload) -> dict[str, Breaks]:
    """Return the faults that the workload's model can have: by a fault's name, the function that plants it."""
    if workload.config is None:
        return {}
    config, layer = hub_config.parsed(workload.config), workload.anatomy.layer
    kind, tensors = config["model_type"], {name.rpartition(".")[0].rpartition(".")[2] for name in layer}
    is_gemma = "gemma" in kind
    # all but GPT-2 have rotary positions
    found = {**(ALL if kind != "gpt2" else {}), **OF_KINDS.get(kind, {})}
    if is_gemma:
        found |= {
            "tokens not scaled": _unscaled_tokens,
            "norms' weights not counted from one": _weights_from_zero,
        }
        found["GELU for tanh GELU"] = functools.partial(_other_activation, approximate="none")
    elif "down_proj" in tensors:
        found["tanh GELU for SiLU"] = functools.partial(_other_activation, approximate="tanh")
    if "gate_proj" in tensors:
        found["gate and up projection swapped"] = _swapped("mlp", "gate_proj", "up_proj")
    if "k_proj" in tensors:
        found["keys and values swapped"] = _swapped("self_attn", "k_proj", "v_proj")
        if config.get("num_key_value_heads", workload.num_heads) != workload.num_heads:
            found["queries of the next group of keys"] = _other_groups
    found |= routing_faults.of(workload)
    rope = {"rope_theta": config.get("rope_theta", 1e4), **(config.get("rope_parameters") or {})}
    if rope["rope_theta"] != 1e4:
        found["angles of base 10,000"] = lambda model: _other_angles(model, rope_theta=1e4)
    if "llama3" in str(config.get("rope_scaling") or rope):
        found["angles not scaled"] = lambda model: _other_angles(model, rope_type="default")
    if "q_norm" in tensors:
        found["queries and keys not normalized"] = _without_query_norm
        if kind != "olmo2" and not is_gemma:
            found["one norm over all heads"] = _over_all_heads
            found["queries and keys normalized after the rotation"] = _normalized_after_rotation
    if "self_attn.q_proj.bias" in layer:
        found["biases of queries left out"] = _without_bias
    return found


def _all(model: Any, *names: str) -> Iterator[Any]:
    """Yield all modules of the layers whose own name is one of `names`."""
    return (module for path, module in model.named_modules() if path.rpartition(".")[2] in names)


def _attentions(model: Any) -> Iterator[Any]:
    return _all(model, "self_attn", "attention")


def _interleaved(model: Any) -> None:
    """Rotate pairs of neighboring elements (2 i and 2 i + 1) instead of pairs from both halves (i and i + size / 2)."""
    import torch

    def rotate(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    for attention in _attentions(model):
        _let_call(attention, "rotate_half", lambda original: rotate)


def _let_call(attention: Any, name: str, other: Callable[[Any], Any]) -> None:
    """While the module `attention` computes, replace the function `name` of the module's source file by
    other(function)."""
    replace_within(attention, sys.modules[type(attention).__module__], name, other)


def _other_angles(model: Any, **changes: Any) -> None:
    """Make the model compute its rotary angles from parameters with these `changes`."""
    for module in _rotary(model):
        config = copy.deepcopy(module.config)
        own = config.rope_parameters
        by_kind = all(
            isinstance(each, dict) for each in own.values()
        )  # True: each kind of attention has parameters of its own
        config.rope_parameters = (
            {kind: {**each, **changes} for kind, each in own.items()} if by_kind else {**own, **changes}
        )
        other = type(module)(config)
        module._buffers.update(other._buffers)
        vars(module).update(
            {name: value for name, value in vars(other).items() if name.endswith("attention_scaling")}
        )


def _rounded_angles(model: Any) -> None:
    for module in _rotary(model):
        for name, frequencies in module._buffers.items():
            module._buffers[name] = frequencies.bfloat16().float()


def _rotary(model: Any) -> Iterator[Any]:
    """Yield the modules that compute rotary angles."""
    return (
        module for module in model.modules() if any(name.endswith("inv_freq") for name in module._buffers)
    )


def _other_groups(model: Any) -> None:
    for attention in _all(model, "self_attn"):
        for name in ("k_proj", "v_proj"):
            _then(getattr(attention, name), lambda y, size=attention.head_dim: y.roll(size, -1))


def _other_scale(model: Any) -> None:
    for attention in _attentions(model):
        attention.scaling = attention.config.hidden_size**-0.5


def _scale_of_head(model: Any) -> None:
    for attention in _attentions(model):
        attention.scaling = attention.head_dim**-0.5


def _without_query_norm(model: Any) -> None:
    for norm in _all(model, "q_norm", "k_norm"):
        norm.forward = lambda x, norm=norm: x * norm.weight


def _normalized_after_rotation(model: Any) -> None:
    for attention in _attentions(model):
        norms = [attention.q_norm.forward, attention.k_norm.forward]
        attention.q_norm.forward = attention.k_norm.forward = _same

        def other(original: Any, norms: Any = norms) -> Any:
            return lambda *args: tuple(norm(x) for norm, x in zip(norms, original(*args), strict=True))

        _let_call(attention, "apply_rotary_pos_emb", other)


def _same(x: Any) -> Any:
    return x


def _over_each_head(model: Any) -> None:
    """Normalize queries and keys, (B, T, heads * head size), over each head alone."""
    for attention in _attentions(model):
        for norm in (attention.q_norm, attention.k_norm):
            norm.forward = lambda x, size=attention.head_dim, norm=norm: (
                norm.weight * _rms(x.unflatten(-1, (-1, size)), norm.variance_epsilon).flatten(-2)
            )


def _rms(x: Any, epsilon: float, num_dims: int = 1) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-num_dims:], None, epsilon)


def _over_all_heads(model: Any) -> None:
    """Normalize queries and keys, (B, T, heads, head size), over the last two dimensions instead of the last one."""
    for norm in _all(model, "q_norm", "k_norm"):
        norm.forward = lambda x, norm=norm: norm.weight * _rms(x, norm.variance_epsilon, 2)


def _without_bias(model: Any) -> None:
    for linear in _all(model, "q_proj"):
        _then(linear, lambda y, linear=linear: y - linear.bias)


def _swapped(owner: str, one: str, other: str) -> Breaks:
    def swap(model: Any) -> None:
        for module in _all(model, owner):
            children = module._modules
            children[one], children[other] = children[other], children[one]

    return swap


def _rows_of_parts(model: Any) -> None:
    """Read the rows of a fused projection as all queries, then all keys, then all values; the family's order is head by
    head."""
    for attention in _attentions(model):
        heads = attention.config.num_attention_heads
        _then(
            attention.query_key_value,
            lambda y, heads=heads: y.unflatten(-1, (3, heads, -1)).transpose(-3, -2).flatten(-3),
        )


def _swapped_rows(model: Any) -> None:
    """Swap the rows of keys with the rows of values in the fused projection of queries, keys and values."""
    import torch

    for attention in _attentions(model):
        size = attention.num_key_value_heads * attention.head_dim
        _then(
            attention.qkv_proj,
            lambda y, size=size: torch.cat((y[..., : -2 * size], y[..., -2 * size :].roll(size, -1)), dim=-1),
        )


def _swapped_halves(model: Any) -> None:
    for linear in _all(model, "gate_up_proj"):
        _then(linear, lambda y: y.roll(y.shape[-1] // 2, -1))


def _normalized_before(model: Any) -> None:
    """Let each layer normalize the inputs of attention and MLP instead of the outputs."""
    for layer in model.layers:
        for part, norm in (
            (layer.self_attn, layer.post_attention_layernorm),
            (layer.mlp, layer.post_feedforward_layernorm),
        ):
            normalized, norm.forward = norm.forward, _same
            forward = part.forward

            def changed(
                *args: Any, forward: Any = forward, normalized: Any = normalized, **words: Any
            ) -> Any:
                x = words.pop("hidden_states") if "hidden_states" in words else args[0]
                return forward(normalized(x), *args[1:], **words)

            part.forward = changed


def _weights_from_zero(model: Any) -> None:
    """Let norms multiply by their weight instead of by the weight plus 1."""
    for norm in model.modules():
        if hasattr(norm, "_norm"):
            norm.forward = lambda x, norm=norm: (norm._norm(x.float()) * norm.weight.float()).type_as(x)


def _unscaled_tokens(model: Any) -> None:
    for embedding in _all(model, "embed_tokens"):
        embedding.embed_scale.fill_(1)


def _other_activation(model: Any, approximate: str) -> None:
    import torch

    for mlp in _all(model, "mlp"):
        for name in ("act_fn", "activation_fn", "act"):
            if hasattr(mlp, name):
                setattr(mlp, name, torch.nn.GELU(approximate=approximate))


def _with(value: Any, *names: str) -> Breaks:
    """Return a fault that sets the attributes of these names to this value, in all modules and in the modules'
    configurations."""

    def change(model: Any) -> None:
        for module in model.modules():
            for owner in (module, getattr(module, "config", None)):
                for name in names:
                    if hasattr(owner, name):
                        setattr(owner, name, value)

    return change


def _torch_norms(model: Any) -> None:
    """Let norms round only after the product with their weight, instead of before and after the product."""
    import torch

    for norm in model.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.forward = lambda x, norm=norm: torch.nn.functional.rms_norm(
                x, x.shape[-1:], norm.weight, norm.variance_epsilon
            )


def _then(module: Any, function: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda module, args, y: function(y))


ALL: dict[str, Breaks] = {
    "rotated neighbours": _interleaved,
    "angles rounded to bf16": _rounded_angles,
    "scores scaled by the hidden size": _other_scale,
}
OF_KINDS: dict[str, dict[str, Breaks]] = {
    "gpt2": {"GELU for tanh GELU": functools.partial(_other_activation, approximate="none")},
    "gemma2": {
        "scores not capped": _with(None, "attn_logit_softcapping"),
        "logits not capped": _with(None, "final_logit_softcapping"),
        "scores scaled by the head size": _scale_of_head,
    },
    "gemma3_text": {"scores scaled by the head size": _scale_of_head},
    "gpt_neox": {
        "whole heads rotated": lambda model: _other_angles(model, partial_rotary_factor=1.0),
        "attention and MLP one after the other": _with(False, "use_parallel_residual"),
        "rows of queries, keys and values not head by head": _rows_of_parts,
        "tanh GELU for GELU": functools.partial(_other_activation, approximate="tanh"),
    },
    "granite": {
        "tokens not multiplied": _with(1.0, "embedding_multiplier"),
        "residuals not multiplied": _with(1.0, "residual_multiplier"),
        "logits not divided": _with(1.0, "logits_scaling"),
        "scores scaled by the head size": _scale_of_head,
    },
    "olmo2": {"a norm for each head": _over_each_head, "norms before attention and MLP": _normalized_before},
    "phi3": {"keys and values swapped": _swapped_rows, "gate and up projection swapped": _swapped_halves},
    "smollm3": {"every layer rotated": _with(True, "use_rope")},
}
# The entries below are no faults, but other roundings of half precision. The gate passes these roundings, unless the
# method promises the reference's bits.
ROUNDED: dict[str, Breaks] = {"norms rounded after their weight alone": _torch_norms, **routing_faults.TIES}
