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

Inputs = Mapping[str, Any]  # a batch: the arguments of the model's forward pass by name
MicroBatch = dict[str, Any]  # the same arguments for some of the batch's samples
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
    num_full, last_size = divmod(batch_size // num_replicas, chunk_size)
    return [chunk_size] * num_full + [last_size] * bool(last_size)


def split_batch(inputs: Inputs, sizes: Sequence[int]) -> list[MicroBatch]:
    """Split a batch into micro-batches of these sizes, in samples. Tensors whose first dimension is 1, and values that
    are not tensors, go whole to each micro-batch. Raises ValueError if a tensor has another number of samples."""
    num_samples = sum(sizes)
    micro_batches: list[MicroBatch] = [{} for _ in sizes]
    for name, value in inputs.items():
        is_split = isinstance(value, Tensor) and value.ndim > 0 and (value.shape[0] > 1 or num_samples == 1)
        if is_split and value.shape[0] != num_samples:
            raise ValueError(
                f"step: expected {num_samples} samples of {name} in this process, got {value.shape[0]}"
            )
        slices = value.split(list(sizes)) if is_split else [value] * len(sizes)
        for micro_batch, value_slice in zip(micro_batches, slices, strict=True):
            micro_batch[name] = value_slice
    return micro_batches


def resize_sample(sample: Inputs, num_samples: int) -> MicroBatch:
    def first_samples(value: Any) -> Any:
        is_batch = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] > 1
        return value[:num_samples] if is_batch else value

    return {name: first_samples(value) for name, value in sample.items()}


def cast_batch(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    return {name: move_value(value, None, dtype) for name, value in inputs.items()}


def move_value(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Return the value on the device (None: where it is). A floating-point tensor is also converted to `dtype`; None:
    it keeps its dtype. A value that is no tensor is returned as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if dtype and value.is_floating_point() else value.dtype)


def check_like_first_batch(inputs: Inputs, first_batch: Inputs) -> None:
    """Raise ValueError unless a batch has the items and shapes of the first one, and the same values of items that are
    no tensors: the trace has fixed these."""
    if missing_names := sorted(first_batch.keys() - inputs.keys()):
        raise ValueError(f"step: the batch lacks {', '.join(missing_names)}, which the first batch had")
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or not isinstance(first_batch.get(name), Tensor):
            _refuse_change(name, value, first_batch)
        shape, expected_shape = _sample_shape(value), _sample_shape(first_batch.get(name))
        if shape != expected_shape and None not in (shape, expected_shape):
            raise ValueError(
                f"step: expected {name} of {expected_shape} for each sample, as in the first batch, got {shape};"
                " try to pad all batches to one shape"
            )


def _refuse_change(name: str, value: Any, first_batch: Inputs) -> None:
    """Raise ValueError if a value other than a tensor is not that of the first batch."""
    if name not in first_batch:
        raise ValueError(
            f"step: expected the items of the first batch, {', '.join(first_batch)}, got {name} as well"
        )
    first_value = first_batch[name]
    if isinstance(value, Tensor) or isinstance(first_value, Tensor) or value != first_value:
        raise ValueError(
            f"step: expected {name} to stay as in the first batch, {_value_text(first_value)}, got"
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
        self.targets_per_sample: list[Tensor] = []  # for each micro-batch: targets a sample
        self.is_mixed = False  # True: a sample's result depends on the other samples

    def count_targets(self, loss: Tensor, num_samples: int) -> None:
        """Count the targets of a micro-batch of `num_samples` samples, before its backward pass."""
        if not self.is_on or self.num_means == 0 or not loss.requires_grad:
            return
        counts = _find_target_counts(loss, self.num_means)
        self.num_means = len(counts)
        if counts:
            self.targets_per_sample.append(
                torch.stack([count.float().reshape(()) for count in counts]) / num_samples
            )

    def compare(
        self,
        compute: Callable[[Sequence[Any], Mapping[str, Any]], Any],
        received: Sequence[Any],
        inputs: Mapping[str, Any],
        num_samples: int,
    ) -> None:
        """Compare a stage's results of a micro-batch with those of its samples. `compute`: returns the stage's results
        from the tensors of the stage below and the batch's values."""
        if not self.is_on or num_samples < 2:
            return
        received_by_number = {str(number): value for number, value in enumerate(received)}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                batch_results = compute(received, inputs)
                sample_results = [
                    compute([values.pop(name) for name in received_by_number], values)
                    for values in split_batch({**inputs, **received_by_number}, [1] * num_samples)
                ]
            except Exception:  # code that takes no single sample: there is nothing to compare with
                return
        self.is_mixed = any(
            _results_differ(batch_result, results_of_samples, num_samples)
            for batch_result, *results_of_samples in zip(batch_results, *sample_results, strict=True)
        )

    def take_numbers(self, device: torch.device) -> Tensor:
        """Return this rank's row of numbers, which all ranks sum, and begin a new row. The row tells whether results
        are mixed, and for each replica the least and the greatest number of targets a sample."""
        check_numbers = torch.zeros(1 + 2 * self.num_replicas, device=device)
        check_numbers[0] = float(self.is_mixed)
        if self.targets_per_sample:
            target_counts = torch.stack(self.targets_per_sample)
            # one number for the counts of several means; it changes even if two counts are exchanged
            weights = torch.arange(1, target_counts.shape[1] + 1, device=target_counts.device).sqrt()
            weighted_counts = (target_counts * weights).sum(1)
            check_numbers[1 + 2 * self.replica] = weighted_counts.min()
            check_numbers[2 + 2 * self.replica] = weighted_counts.max()
        self.targets_per_sample = []
        return check_numbers

    @staticmethod
    def refuse(check_numbers: Tensor) -> None:
        """Raise ValueError if the sum of all ranks' rows shows a loss that micro-batches change."""
        is_mixed, *targets_per_sample = check_numbers.tolist()
        least_targets, most_targets = min(targets_per_sample), max(targets_per_sample)
        if most_targets - least_targets > UNEVEN_TOLERANCE * most_targets:
            raise ValueError(
                f"expected as many targets in each micro-batch's mean, got {least_targets:.6g} to {most_targets:.6g} a"
                ' sample; try reduction="sum", divided by the number of samples times the batch\'s targets a sample'
            )
        if is_mixed:
            raise ValueError(
                "expected a loss that is the mean over samples, each by itself, as micro-batches need, got another; try"
                " one micro-batch, or a sum over the samples divided by their number"
            )


def _find_target_counts(loss: Tensor, num_means: int | None) -> list[Tensor]:
    """Return the number of targets, or their weight, of each mean of cross_entropy in the graph of the loss.
    `num_means`: number of these means; None: search the whole graph."""
    nodes: list[Any] = [loss.grad_fn]
    visited: set[Any] = set()
    target_counts: list[Tensor] = []
    for node in nodes:
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name().startswith("NllLoss") and node._saved_reduction == 1:
            target_counts.append(node._saved_total_weight)
            if len(target_counts) == num_means:
                break
        nodes += [next_node for next_node, _ in node.next_functions]
    return target_counts


def _results_differ(batch_result: Any, sample_results: Sequence[Any], num_samples: int) -> bool:
    """Return whether the result of a micro-batch differs from the results of its samples, concatenated or, for
    a single number, averaged."""
    if not isinstance(batch_result, Tensor) or not batch_result.is_floating_point():
        return False
    if batch_result.dim() and batch_result.shape[0] == num_samples:
        expected_result = torch.cat(list(sample_results))
    elif batch_result.numel() == 1:
        expected_result = torch.stack([value.reshape(batch_result.shape) for value in sample_results]).mean(0)
    else:  # a value that does not have the samples along its first dimension
        return False
    tolerance = TOLERANCES.get(batch_result.dtype, HALF_TOLERANCE)
    scale = 0.0
    if batch_result.numel():
        scale = max(float(expected_result.abs().max()), float(batch_result.abs().max()))
    return not bool(((batch_result - expected_result).abs() <= tolerance * scale).all())
