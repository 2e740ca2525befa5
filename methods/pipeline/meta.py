"""Replaces a model's tensors on torch's meta device, which have no memory, by tensors with values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def give_memory(model: nn.Module, made: Mapping[str, Tensor]) -> None:
    """Replace the model's tensors without memory by the tensors of the same names in `made`, rounded to the model's
    dtypes. A tensor that `made` lacks stays without memory."""
    # for each tensor, by id: all places that hold it
    places: dict[int, list[tuple[dict[str, Any], str, str]]] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    places.setdefault(id(tensor), []).append((table, leaf, f"{prefix}.{leaf}".lstrip(".")))
    for found in places.values():
        for value in [made[name] for _, _, name in found if name in made][:1]:
            old = found[0][0][found[0][1]]
            value = value.to(old.dtype)
            new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
            for table, leaf, _ in found:
                table[leaf] = new
