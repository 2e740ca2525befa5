"""Splits a user's batches, which are dictionaries, into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]


def micro_batch_sizes(batch_size: int, chunk_size: int, num_replicas: int) -> list[int]:
    """Return the sizes of a replica's micro-batches, in samples; the last may be smaller. `batch_size`: samples of all
    replicas. Raises ValueError if replicas cannot share the batch evenly, or if `chunk_size` is below 1."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    if batch_size < num_replicas or batch_size % num_replicas:
        below = batch_size // num_replicas * num_replicas
        nearest = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        raise ValueError(
            f"batch_size: expected a multiple of {num_replicas} replicas, got {batch_size}; try {nearest}"
        )
    whole, rest = divmod(batch_size // num_replicas, chunk_size)
    return [chunk_size] * whole + [rest] * bool(rest)


def split_batch(inputs: Inputs, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Split a batch into micro-batches of these sizes, in samples. Tensors whose first dimension is 1, and values that
    are not tensors, go whole to each micro-batch. Raises ValueError if a tensor has another number of samples."""
    total = sum(sizes)
    micro_batches: list[dict[str, Any]] = [{} for _ in sizes]
    for name, value in inputs.items():
        is_split = isinstance(value, Tensor) and value.ndim > 0 and (value.shape[0] > 1 or total == 1)
        if is_split and value.shape[0] != total:
            raise ValueError(
                f"step: expected {total} samples of {name} in this process, got {value.shape[0]}"
            )
        parts = value.split(list(sizes)) if is_split else [value] * len(sizes)
        for micro_batch, part in zip(micro_batches, parts, strict=True):
            micro_batch[name] = part
    return micro_batches


def resized(sample: Inputs, size: int) -> dict[str, Any]:
    def first(value: Any) -> Any:
        is_batch = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] > 1
        return value[:size] if is_batch else value

    return {name: first(value) for name, value in sample.items()}


def cast(inputs: Inputs, dtype: torch.dtype | None) -> dict[str, Any]:
    return {name: moved(value, None, dtype) for name, value in inputs.items()}


def moved(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Return the value on the device (None: where it is). A floating-point tensor is also converted to `dtype`; None:
    it keeps its dtype. A value that is no tensor is returned as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if dtype and value.is_floating_point() else value.dtype)


def check_like_first(inputs: Inputs, first: Inputs) -> None:
    """Raise ValueError unless a batch has the items and shapes of the first one, and the same values of items that are
    no tensors: the trace has fixed these."""
    if missing := sorted(first.keys() - inputs.keys()):
        raise ValueError(f"step: the batch lacks {', '.join(missing)}, which the first batch had")
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or not isinstance(first.get(name), Tensor):
            _refuse_change(name, value, first)
        shape, expected = _sample_shape(value), _sample_shape(first.get(name))
        if shape != expected and None not in (shape, expected):
            raise ValueError(
                f"step: expected {name} of {expected} for each sample, as in the first batch, got {shape};"
                " try to pad all batches to one shape"
            )


def _refuse_change(name: str, value: Any, first: Inputs) -> None:
    """Raise ValueError if a value other than a tensor is not that of the first batch."""
    if name not in first:
        raise ValueError(
            f"step: expected the items of the first batch, {', '.join(first)}, got {name} as well"
        )
    expected = first[name]
    if isinstance(value, Tensor) or isinstance(expected, Tensor) or value != expected:
        raise ValueError(
            f"step: expected {name} to stay as in the first batch, {_value_text(expected)}, got"
            f" {_value_text(value)}; try a tensor"
        )


def _value_text(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Tensor) else repr(value)


def _sample_shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape[1:]) if isinstance(value, Tensor) and value.ndim else None
