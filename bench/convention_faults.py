"""Faults of models with a config.json. Each fault changes the modules of transformers so that they break one convention
of Llama, Qwen, GPT-NeoX or Gemma; a method with its own code for layers could make the same mistake.
bench/faults/planted.py trains models with these faults.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

from harness.core import hub_config
from harness.core.job import Workload

Breaks = Callable[[Any], None]  # plants the fault in a HubModel


def of(workload: Workload) -> dict[str, Breaks]:
    """Return the faults that the workload's model can have: the functions that plant them, by name."""
    if workload.config is None:
        return {}
    config, layer = hub_config.parsed(workload.config), workload.anatomy.layer
    tensors, is_gemma = {name.rpartition(".")[0].rpartition(".")[2] for name in layer}, "gemma" in config["model_type"]
    found = dict(ALL)
    if "gate_proj" in tensors:
        found["gate and up projection swapped"] = _swapped("mlp", "gate_proj", "up_proj")
        if not is_gemma:
            found["tanh GELU for SiLU"] = _other_activation
    if "k_proj" in tensors:
        found["keys and values swapped"] = _swapped("self_attn", "k_proj", "v_proj")
        if config.get("num_key_value_heads", workload.num_heads) != workload.num_heads:
            found["queries of the next group of keys"] = _other_groups
    rope = {"rope_theta": config.get("rope_theta", 1e4), **(config.get("rope_parameters") or {})}
    if rope["rope_theta"] != 1e4:
        found["angles of base 10,000"] = lambda model: _other_angles(model, rope_theta=1e4)
    if "llama3" in str(config.get("rope_scaling") or rope):
        found["angles not scaled"] = lambda model: _other_angles(model, rope_type="default")
    if "q_norm" in tensors:
        found["queries and keys not normalized"] = _without_query_norm
        if not is_gemma and layer["self_attn.q_norm.weight"][0] < layer["self_attn.q_proj.weight"][0]:
            found["one norm over all heads"] = _over_all_heads
    if "self_attn.q_proj.bias" in layer:
        found["biases of queries left out"] = _without_bias
    if config["model_type"] == "gpt_neox":
        found["whole heads rotated"] = lambda model: _other_angles(model, partial_rotary_factor=1.0)
        found["attention and MLP one after the other"] = _one_after_the_other
    if is_gemma:
        found["tokens not scaled"] = _unscaled_tokens
    return found


def _all(model: Any, *names: str) -> Iterator[Any]:
    """Yield the modules of all layers that have one of these names."""
    return (module for path, module in model.named_modules() if path.rpartition(".")[2] in names)


def _attentions(model: Any) -> Iterator[Any]:
    return _all(model, "self_attn", "attention")


def _interleaved(model: Any) -> None:
    """Rotate pairs of neighboring elements (2 i and 2 i + 1) instead of pairs from both halves (i and i + size / 2)."""
    import torch

    def rotate(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    for attention in _attentions(model):
        code = sys.modules[type(attention).__module__]
        original = code.rotate_half  # type: ignore[attr-defined]
        forward = attention.forward

        def turned(*args: Any, code: Any = code, original: Any = original, forward: Any = forward, **words: Any) -> Any:
            code.rotate_half = rotate
            try:
                return forward(*args, **words)
            finally:
                code.rotate_half = original

        attention.forward = turned


def _other_angles(model: Any, **changes: Any) -> None:
    """Make the model compute its rotary angles with `changes` to their parameters."""
    for module in _rotary(model):
        config = copy.deepcopy(module.config)
        own = config.rope_parameters
        by_kind = all(isinstance(each, dict) for each in own.values())  # True: parameters per kind of attention
        config.rope_parameters = (
            {kind: {**each, **changes} for kind, each in own.items()} if by_kind else {**own, **changes}
        )
        other = type(module)(config)
        module._buffers.update(other._buffers)
        vars(module).update({name: value for name, value in vars(other).items() if name.endswith("attention_scaling")})


def _rounded_angles(model: Any) -> None:
    for module in _rotary(model):
        for name, frequencies in module._buffers.items():
            module._buffers[name] = frequencies.bfloat16().float()


def _rotary(model: Any) -> Iterator[Any]:
    """Yield the modules that compute rotary angles."""
    return (module for module in model.modules() if any(name.endswith("inv_freq") for name in module._buffers))


def _other_groups(model: Any) -> None:
    for attention in _all(model, "self_attn"):
        for name in ("k_proj", "v_proj"):
            _then(getattr(attention, name), lambda y, size=attention.head_dim: y.roll(size, -1))


def _other_scale(model: Any) -> None:
    for attention in _attentions(model):
        attention.scaling = attention.config.hidden_size**-0.5


def _without_query_norm(model: Any) -> None:
    for norm in _all(model, "q_norm", "k_norm"):
        norm.forward = lambda x, norm=norm: x * norm.weight


def _over_all_heads(model: Any) -> None:
    """Normalize queries and keys, (B, T, heads, head size), over the last two dimensions instead of the last one."""
    import torch

    for norm in _all(model, "q_norm", "k_norm"):
        norm.forward = lambda x, norm=norm: (
            norm.weight * torch.nn.functional.rms_norm(x, x.shape[-2:], None, norm.variance_epsilon)
        )


def _without_bias(model: Any) -> None:
    for linear in _all(model, "q_proj"):
        _then(linear, lambda y, linear=linear: y - linear.bias)


def _swapped(owner: str, one: str, other: str) -> Breaks:
    def swap(model: Any) -> None:
        for module in _all(model, owner):
            children = module._modules
            children[one], children[other] = children[other], children[one]

    return swap


def _one_after_the_other(model: Any) -> None:
    for layer in model.layers:
        layer.use_parallel_residual = False


def _unscaled_tokens(model: Any) -> None:
    for embedding in _all(model, "embed_tokens"):
        embedding.embed_scale.fill_(1)


def _other_activation(model: Any) -> None:
    import torch

    for mlp in _all(model, "mlp"):
        mlp.act_fn = torch.nn.GELU(approximate="tanh")


def _then(module: Any, function: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda module, args, y: function(y))


ALL: dict[str, Breaks] = {
    "rotated neighbours": _interleaved,
    "angles rounded to bf16": _rounded_angles,
    "scores scaled by the hidden size": _other_scale,
}
