"""Finds the largest size that trains. The caller runs the probes.

A size counts the quantity that `search largest` makes larger (SizeAxis): layers, samples of a step, tokens of a sample,
or tokens of a step. Sizes are counted from 1. From one size to the next, the workload gets one layer more, or one
sample more for each micro-batch of each rank, or more tokens. The number of added tokens is a power of two, at most a
32nd of the tokens that should fit, because nobody trains sequences that differ by one token. If only every n-th of
these workloads has a plan, as with pipeline stages, the search counts only those workloads.

The memory that a job needs grows with its size, so there is an edge: smaller sizes pass, larger ones fail. The search
starts at a guess. The first stride is 3 % of the guess. Strides double until the edge lies between two probes; then the
search halves the interval, and at last repeats the probes on both sides of the edge.

Before the search, two small runs may refine the guess: the bytes that they took beyond their plans are extrapolated, by
memory and phase. After that, strides start at one.

Real edges may be blurred (a size both passed and failed) or out of order (a size failed, and a larger size passed).
Then the answer is an interval: every trial up to its lower end passed, every trial from its upper end on failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.core.job import Workload

LAYERS, BATCH, SEQ, TOKENS = AXES = ("layers", "batch", "seq", "tokens")
# The field of the workload that grows along each axis.
GROWN_FIELDS = {LAYERS: "num_layers", BATCH: "batch_size", SEQ: "seq_len", TOKENS: "batch_size"}
SIZE_UNITS = {LAYERS: "layers", BATCH: "samples", SEQ: "tokens a sample", TOKENS: "tokens a step"}
TOKEN_AXES = (SEQ, TOKENS)  # axes on which sizes are `step` tokens apart
FEWEST_SIZES = 32  # least number of sizes from 0 to the tokens that should fit
# first stride as a share of the guess; if the guess is 10 % off, a search takes 5 trials on average
FIRST_STRIDE_SHARE = 0.03
# smallest guess that is refined; for a smaller guess the search is shorter without refinement
SMALLEST_REFINED_GUESS = 8
MAX_TRIALS = 40


def total_micro_batches(micro_batches: int, num_ranks: int) -> int:
    """Return the number of micro-batches in a step, over all ranks; each micro-batch has equally many samples."""
    return micro_batches * num_ranks


@dataclass(frozen=True)
class SizeAxis:
    """Maps sizes to workloads and back.

    `quantity`: one of AXES. `added_samples`: number of samples from one size to the next (total_micro_batches).
    `step`: number of layers or tokens from one size to the next.
    """

    quantity: str
    workload: Workload
    added_samples: int = 1
    step: int = 1

    def with_token_steps(self, size: int) -> SizeAxis:
        """Return this axis with larger steps, which suit a search that expects its answer near this size."""
        tokens = size * self.step // FEWEST_SIZES
        if not tokens:
            return self
        return dataclasses.replace(self, step=1 << (tokens.bit_length() - 1))

    def counting_every(self, num_sizes: int) -> SizeAxis:
        """Return an axis that counts only every `num_sizes`-th size of this axis."""
        if self.quantity == BATCH:
            return dataclasses.replace(self, added_samples=num_sizes * self.added_samples)
        return dataclasses.replace(self, step=num_sizes * self.step)

    def workload_at(self, size: int) -> Workload:
        """Return the workload of a size.

        If the axis counts tokens of a step, small sizes have `added_samples` samples, whose length grows up to
        --seq; larger sizes have more samples. Raises ValueError if the model accepts no such size.
        """
        load = self.workload
        if self.quantity == LAYERS:
            return load.at_depth(size * self.step)
        if self.quantity == SEQ:
            return dataclasses.replace(load, seq_len=size * self.step)
        if self.quantity == BATCH:
            return dataclasses.replace(load, batch_size=size * self.added_samples)
        sizes_above = size - self._full_length_size
        if sizes_above < 0:
            return dataclasses.replace(load, seq_len=size * self.step, batch_size=self.added_samples)
        return dataclasses.replace(load, batch_size=(1 + sizes_above) * self.added_samples)

    def size_of(self, load: Workload) -> int:
        """Return the size of a workload; workload_at() is the inverse. If the workload lies between two sizes, return
        the smaller size."""
        if self.quantity == LAYERS:
            return load.num_layers // self.step
        if self.quantity == SEQ or (self.quantity == TOKENS and load.seq_len < self.workload.seq_len):
            return load.seq_len // self.step
        samples = load.batch_size // self.added_samples
        return samples if self.quantity == BATCH else self._full_length_size - 1 + samples

    @property
    def _full_length_size(self) -> int:
        """Return the least size at which samples have their full length, --seq. At this size, a step has
        `added_samples` samples."""
        return -(-self.workload.seq_len // self.step)

    def amount(self, size: int) -> int:
        """Return a size as a number in the axis's unit (SIZE_UNITS), such as layers or tokens a sample."""
        load = self.workload_at(size)
        amounts = {LAYERS: load.num_layers, BATCH: load.batch_size, SEQ: load.seq_len}
        return amounts.get(self.quantity, load.batch_size * load.seq_len)

    def amount_text(self, size: int) -> str:
        return f"{self.amount(size)} {SIZE_UNITS[self.quantity]}"


class SizeOutcome(NamedTuple):
    """The end of one probe, which is a run at one size."""

    has_passed: bool
    memory: str = ""  # the memory that was too small, such as device; empty if the probe passed
    # why the search must stop, if the probe failed for a reason other than its size; empty otherwise
    stop_reason: str = ""
    evidence: Any = None


class SizeTrial(NamedTuple):
    size: int
    outcome: SizeOutcome


@dataclass
class SizeAnswer:
    """The trials of a search in the order in which they ran, and the answer that follows from them."""

    least_size: int = 1
    most_size: int = 2**20
    trials: list[SizeTrial] = field(default_factory=list)
    stop_reason: str = ""  # why the search stopped without an answer; empty if it did not

    @property
    def passing_sizes(self) -> list[int]:
        return [trial.size for trial in self.trials if trial.outcome.has_passed]

    @property
    def failing_sizes(self) -> list[int]:
        return [trial.size for trial in self.trials if not trial.outcome.has_passed]

    @property
    def smallest_failing(self) -> int:
        return min(self.failing_sizes, default=self.most_size + 1)

    @property
    def largest_passing(self) -> int:
        return max(self.passing_sizes, default=self.least_size - 1)

    @property
    def largest_size(self) -> int:
        """Return the largest size that passed while no trial at this size or below failed; `least_size` - 1 if
        there is none."""
        return max(
            (size for size in self.passing_sizes if size < self.smallest_failing), default=self.least_size - 1
        )

    @property
    def failing_size(self) -> int | None:
        """Return the smallest size that failed while no trial at this size or above passed; None if there is none."""
        return min((size for size in self.failing_sizes if size > self.largest_passing), default=None)

    @property
    def is_unlimited(self) -> bool:
        """True if no trial failed, and the largest allowed size passed."""
        return not self.failing_sizes and self.largest_passing == self.most_size

    @property
    def is_sharp(self) -> bool:
        """True if the smallest size that failed is the largest size that passed plus one."""
        return not self.stop_reason and self.failing_size == self.largest_size + 1

    def contradicting_sizes(self) -> list[int]:
        """Return the sizes that contradict a sharp edge: failures at or below a size that passed, and passes at or
        above a size that failed."""
        passes_above = {size for size in self.passing_sizes if size >= self.smallest_failing}
        failures_below = {size for size in self.failing_sizes if size <= self.largest_passing}
        return sorted(passes_above | failures_below)


def search(
    probe: Callable[[int], SizeOutcome],
    guess: int,
    *,
    least_size: int = 1,
    most_size: int = 2**20,
    repeats: int = 1,
    refine: Callable[[], int] | None = None,
    max_trials: int = MAX_TRIALS,
) -> SizeAnswer:
    """Find the largest size from `least_size` to `most_size` that trains.

    `repeats`: number of probes on each side of the edge. If it is above 1, the size after the first failing one is
    probed, too. `refine`: function that returns a better guess after two small runs; None: the guess is not refined.
    The search stops without an answer, and says why, if a probe fails for a reason other than its size, or after
    `max_trials` trials.
    """
    answer = SizeAnswer(least_size, most_size)
    guess = max(least_size, min(guess, most_size))
    stride = max(1, round(FIRST_STRIDE_SHARE * guess))
    if refine is not None and guess >= max(SMALLEST_REFINED_GUESS, 4 * least_size):
        for small_size in (guess // 4, guess // 2):
            if not answer.stop_reason and not answer.failing_sizes:
                _run_trial(answer, probe, small_size)
        if not answer.stop_reason and not answer.failing_sizes:
            guess, stride = max(least_size, min(refine(), most_size)), 1
    while not answer.stop_reason:
        size, stride = _next_size(answer, guess, stride, repeats)
        if size is None:
            break
        if len(answer.trials) >= max_trials:
            answer.stop_reason = f"no edge was found in {max_trials} trials"
            break
        _run_trial(answer, probe, size)
    return answer


def _run_trial(answer: SizeAnswer, probe: Callable[[int], SizeOutcome], size: int) -> None:
    outcome = probe(size)
    if outcome.stop_reason:
        answer.stop_reason = outcome.stop_reason
    else:
        answer.trials.append(SizeTrial(size, outcome))


def _next_size(answer: SizeAnswer, guess: int, stride: int, repeats: int) -> tuple[int | None, int]:
    """Return the next size to try, and the stride for the size after that. The size is None if the answer is known."""
    largest_size, smallest_failing = answer.largest_size, answer.smallest_failing
    largest_passing, failing_size = answer.largest_passing, answer.failing_size
    if (
        guess not in (*answer.passing_sizes, *answer.failing_sizes)
        and largest_passing < guess < smallest_failing
    ):
        return guess, stride
    if smallest_failing - largest_size > 1 and largest_size < answer.least_size:
        # no size below the first failure has passed: go down
        return max(answer.least_size, smallest_failing - stride), 2 * stride
    if failing_size is None and largest_passing < answer.most_size:
        # no size above the last pass has failed: go up
        return min(answer.most_size, largest_passing + stride), 2 * stride
    # some smaller size passed, so go down from the failure by strides, but not below the interval's middle
    if smallest_failing - largest_size > 1 and smallest_failing <= answer.most_size:
        return max((largest_size + smallest_failing) // 2, smallest_failing - stride), 2 * stride
    if failing_size is not None and failing_size - largest_passing > 1:
        return (largest_passing + failing_size) // 2, stride
    for size, sizes in ((largest_size, answer.passing_sizes), (failing_size, answer.failing_sizes)):
        if size is not None and answer.least_size <= size and sizes.count(size) < repeats:
            return size, stride
    if repeats <= 1 or failing_size is None or failing_size >= answer.most_size:
        return None, stride
    if failing_size + 1 in answer.failing_sizes:
        return None, stride
    return failing_size + 1, stride  # probe the size above the failure, too: the failure may be an exception


def extrapolate(points: Iterable[tuple[int, dict[str, int]]], size: int) -> int:
    """Return the expected bytes at this size. For each phase, extend the line through its first and last point to this
    size; return the largest value.

    `points`: pairs of a size and the bytes by phase. Within a phase, memory is affine in the size; which phase needs
    the most may change with the size.
    """
    lines: dict[str, list[tuple[int, int]]] = {}
    for point_size, phases in sorted(points, key=lambda point: point[0]):
        for phase, num_bytes in phases.items():
            lines.setdefault(phase, []).append((point_size, num_bytes))
    values = []
    for points_of_phase in lines.values():
        (first_size, first_bytes), (last_size, last_bytes) = points_of_phase[0], points_of_phase[-1]
        slope = (last_bytes - first_bytes) / (last_size - first_size) if last_size > first_size else 0.0
        values.append(last_bytes + slope * (size - last_size))
    return round(max(values, default=0))
