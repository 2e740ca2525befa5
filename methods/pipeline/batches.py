"""Splits a user's batches, which are dictionaries, into micro-batches, and refuses losses that micro-batches change.
The weighted mean of the micro-batches' losses is the batch's loss only if the loss is a mean over samples, each
computed by itself.

There are two checks of the loss. In the first step each stage runs its first micro-batch once more, sample by sample,
and compares the results. In every step the last stage compares the numbers of targets over which cross_entropy took its
means in each micro-batch; targets of -100 and the weights of classes change these numbers. The ranks of a step learn
the result of both checks with the sums of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Any]
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative; of the largest value
HALF_TOLERANCE = 5e-2  # fp16 and bf16
# largest relative difference between numbers of targets a sample that counts as rounding
UNEVEN_TOLERANCE = 1e-5


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


class MeanCheck:
    """The checks of a rank's losses. `replica`: the number of the rank's replica. `num_micro_batches`: number of the
    replica's micro-batches in a step."""

    def __init__(self, replica: int, num_replicas: int, num_micro_batches: int) -> None:
        self.replica, self.num_replicas = replica, num_replicas
        self.is_on = num_replicas * num_micro_batches > 1  # one micro-batch is the batch
        self.num_means: int | None = None  # cross_entropy's means in a loss; None: not yet counted
        self.per_sample: list[Tensor] = []  # for each micro-batch: targets a sample
        self.is_mixed = False  # True: a sample's result depends on the other samples

    def note(self, loss: Tensor, size: int) -> None:
        """Count the targets of a micro-batch of `size` samples, before its backward pass."""
        if not self.is_on or self.num_means == 0 or not loss.requires_grad:
            return
        counts = _counts(loss, self.num_means)
        self.num_means = len(counts)
        if counts:
            self.per_sample.append(torch.stack([count.float().reshape(()) for count in counts]) / size)

    def compare(
        self,
        compute: Callable[[Sequence[Any], Mapping[str, Any]], Any],
        received: Sequence[Any],
        inputs: Mapping[str, Any],
        size: int,
    ) -> None:
        """Compare a stage's results of a micro-batch with those of its samples. `compute`: returns the stage's results
        from the tensors of the stage below and the batch's values."""
        if not self.is_on or size < 2:
            return
        below = {str(number): value for number, value in enumerate(received)}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                batch_results = compute(received, inputs)
                sample_results = [
                    compute([values.pop(name) for name in below], values)
                    for values in split_batch({**inputs, **below}, [1] * size)
                ]
            except Exception:  # code that takes no single sample: there is nothing to compare with
                return
        self.is_mixed = any(
            _differ(batch_result, results_of_samples, size)
            for batch_result, *results_of_samples in zip(batch_results, *sample_results, strict=True)
        )

    def take_numbers(self, device: torch.device) -> Tensor:
        """Return this rank's row of numbers, which all ranks sum, and begin a new row. The row tells whether results
        are mixed, and for each replica the least and the greatest number of targets a sample."""
        check_numbers = torch.zeros(1 + 2 * self.num_replicas, device=device)
        check_numbers[0] = float(self.is_mixed)
        if self.per_sample:
            counts = torch.stack(self.per_sample)
            # one number for the counts of several means; it changes even if two counts are exchanged
            numbers = (counts * torch.arange(1, counts.shape[1] + 1, device=counts.device).sqrt()).sum(1)
            check_numbers[1 + 2 * self.replica], check_numbers[2 + 2 * self.replica] = (
                numbers.min(),
                numbers.max(),
            )
        self.per_sample = []
        return check_numbers

    @staticmethod
    def refuse(check_numbers: Tensor) -> None:
        """Raise ValueError if the sum of all ranks' rows shows a loss that micro-batches change."""
        is_mixed, *numbers = check_numbers.tolist()
        least, most = min(numbers), max(numbers)
        if most - least > UNEVEN_TOLERANCE * most:
            raise ValueError(
                f"expected as many targets in each micro-batch's mean, got {least:.6g} to {most:.6g} a sample; try"
                ' reduction="sum", divided by the number of samples times the batch\'s targets a sample'
            )
        if is_mixed:
            raise ValueError(
                "expected a loss that is the mean over samples, each by itself, as micro-batches need, got another; try"
                " one micro-batch, or a sum over the samples divided by their number"
            )


def _counts(loss: Tensor, num_means: int | None) -> list[Tensor]:
    """Return the number of targets, or their weight, of each mean of cross_entropy in the graph of the loss.
    `num_means`: number of these means; None: search the whole graph."""
    nodes: list[Any] = [loss.grad_fn]
    visited: set[Any] = set()
    counts: list[Tensor] = []
    for node in nodes:
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name().startswith("NllLoss") and node._saved_reduction == 1:
            counts.append(node._saved_total_weight)
            if len(counts) == num_means:
                break
        nodes += [other for other, _ in node.next_functions]
    return counts


def _differ(batch_result: Any, sample_results: Sequence[Any], size: int) -> bool:
    """Return whether the result of a micro-batch differs from the results `alone` of its samples, concatenated or, for
    a single number, averaged."""
    if not isinstance(batch_result, Tensor) or not batch_result.is_floating_point():
        return False
    if batch_result.dim() and batch_result.shape[0] == size:
        expected = torch.cat(list(sample_results))
    elif batch_result.numel() == 1:
        expected = torch.stack([value.reshape(batch_result.shape) for value in sample_results]).mean(0)
    else:  # a value that does not have the samples along its first dimension
        return False
    tolerance = TOLERANCES.get(batch_result.dtype, HALF_TOLERANCE)
    scale = max(float(expected.abs().max()), float(batch_result.abs().max())) if batch_result.numel() else 0.0
    return not bool(((batch_result - expected).abs() <= tolerance * scale).all())
