"""Faults of models by their config.json: each breaks one convention of Llama, Qwen or Mistral in transformers' own
modules, as a method that computes layers by code of its own may. bench/faults/planted.py trains them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

from harness.core import hub_config
from harness.core.job import Workload

Breaks = Callable[[Any], None]  # of a HubModel, which computes otherwise from then on


def of(workload: Workload) -> dict[str, Breaks]:
    """Return the faults that the workload's model can have, by name."""
    if workload.config is None:
        return {}
    config = hub_config.parsed(workload.config)
    found = dict(ALL)
    if config.get("num_key_value_heads", workload.num_heads) != workload.num_heads:
        found["queries of the next group of keys"] = _other_groups
    if workload.dtype != "fp32":
        found |= OF_HALVES
    if "llama3" in str(config.get("rope_scaling") or config.get("rope_parameters")):
        found["angles not scaled"] = lambda model: _other_angles(model, rope_type="default")
    if any(name.endswith("q_norm.weight") for name in workload.anatomy.layer):
        found["queries and keys not normalized"] = _without_query_norm
    if any(name.endswith("q_proj.bias") for name in workload.anatomy.layer):
        found["biases of queries left out"] = _without_bias
    return found


def _all(model: Any, name: str) -> Iterator[Any]:
    """Yield the modules of this name in all layers."""
    return (module for path, module in model.named_modules() if path.rpartition(".")[2] == name)


def _interleaved(model: Any) -> None:
    """Rotate neighbours (2 i, 2 i + 1) instead of halves (i, i + size / 2)."""
    import torch

    def rotate(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    for attention in _all(model, "self_attn"):
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
    """Compute the angles of positions by other parameters."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            config = copy.deepcopy(module.config)
            config.rope_parameters = {**config.rope_parameters, **changes}
            other = type(module)(config)
            module.inv_freq, module.attention_scaling = other.inv_freq, other.attention_scaling


def _rounded_angles(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.bfloat16().float()


def _other_groups(model: Any) -> None:
    for attention in _all(model, "self_attn"):
        for name in ("k_proj", "v_proj"):
            _then(getattr(attention, name), lambda y, size=attention.head_dim: y.roll(size, -1))


def _other_scale(model: Any) -> None:
    for attention in _all(model, "self_attn"):
        attention.scaling = model.layers[0].self_attn.config.hidden_size ** -0.5


def _without_query_norm(model: Any) -> None:
    for name in ("q_norm", "k_norm"):
        for norm in _all(model, name):
            norm.forward = lambda x, norm=norm: x * norm.weight


def _without_bias(model: Any) -> None:
    for linear in _all(model, "q_proj"):
        _then(linear, lambda y, linear=linear: y - linear.bias)


def _swapped_gate(model: Any) -> None:
    for mlp in _all(model, "mlp"):
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def _other_activation(model: Any) -> None:
    import torch

    for mlp in _all(model, "mlp"):
        mlp.act_fn = torch.nn.GELU(approximate="tanh")


def _norm_in_half(model: Any) -> None:
    """Multiply by the norm's weight before the rounding instead of after it."""
    import torch

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = lambda x, norm=module: torch.nn.functional.rms_norm(
                x, x.shape[-1:], norm.weight, norm.variance_epsilon
            )


def _then(module: Any, function: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda module, args, y: function(y))


ALL: dict[str, Breaks] = {
    "rotated neighbours": _interleaved,
    "angles of base 10,000": lambda model: _other_angles(model, rope_theta=1e4),
    "scores scaled by the hidden size": _other_scale,
    "gate and up projection swapped": _swapped_gate,
    "tanh GELU for SiLU": _other_activation,
}
OF_HALVES: dict[str, Breaks] = {
    "angles rounded to bf16": _rounded_angles,
    "norm rounded after its weight": _norm_in_half,
}
