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

LAYERS, BATCH, SEQ, TOKENS = OF = ("layers", "batch", "seq", "tokens")
# The field of the workload that grows along each axis.
OPTIONS = {LAYERS: "num_layers", BATCH: "batch_size", SEQ: "seq_len", TOKENS: "batch_size"}
UNITS = {LAYERS: "layers", BATCH: "samples", SEQ: "tokens a sample", TOKENS: "tokens a step"}
STEPPED = (SEQ, TOKENS)  # axes on which sizes are `step` tokens apart
STEPS = 32  # least number of sizes from 0 to the tokens that should fit
# first stride as a share of the guess; if the guess is 10 % off, a search takes 5 trials on average
GALLOP = 0.03
# smallest guess that is refined; for a smaller guess the search is shorter without refinement
REFINED_FROM = 8
MAX_TRIALS = 40


def num_parts(micro_batches: int, num_ranks: int) -> int:
    """Return the number of micro-batches in a step, over all ranks; each micro-batch has equally many samples."""
    return micro_batches * num_ranks


@dataclass(frozen=True)
class SizeAxis:
    """Maps sizes to workloads and back.

    `parts`: number of samples that one size adds (parts_of). `step`: number of layers or tokens from one size to the
    next.
    """

    of: str
    workload: Workload
    parts: int = 1
    step: int = 1

    def fitting(self, number: int) -> SizeAxis:
        """Return this axis with larger steps, which suit a search that expects its answer near the size `number`."""
        tokens = number * self.step // STEPS
        if not tokens:
            return self
        return dataclasses.replace(self, step=1 << (tokens.bit_length() - 1))

    def every(self, number: int) -> SizeAxis:
        """Return an axis that counts only every `number`-th size of this axis."""
        counted = "parts" if self.of == BATCH else "step"
        changes: dict[str, Any] = {counted: number * getattr(self, counted)}
        return dataclasses.replace(self, **changes)

    def grown(self, number: int) -> Workload:
        """Return the workload of a size.

        If the axis counts tokens of a step, small sizes have `parts` samples, whose length grows up to --seq; larger
        sizes have more samples. Raises ValueError if the model accepts no such size.
        """
        load = self.workload
        if self.of == LAYERS:
            return load.at_depth(number * self.step)
        if self.of == SEQ:
            return dataclasses.replace(load, seq_len=number * self.step)
        if self.of == BATCH:
            return dataclasses.replace(load, batch_size=number * self.parts)
        more = number - self._whole
        if more < 0:
            return dataclasses.replace(load, seq_len=number * self.step, batch_size=self.parts)
        return dataclasses.replace(load, batch_size=(1 + more) * self.parts)

    def number(self, load: Workload) -> int:
        """Return the size of a workload, the inverse of grown(). If the workload lies between two sizes, return the
        smaller size."""
        if self.of == LAYERS:
            return load.num_layers // self.step
        if self.of == SEQ or (self.of == TOKENS and load.seq_len < self.workload.seq_len):
            return load.seq_len // self.step
        samples = load.batch_size // self.parts
        return samples if self.of == BATCH else self._whole - 1 + samples

    @property
    def _whole(self) -> int:
        """Return the least size at which samples have their full length, --seq. At this size, a step has `parts`
        samples."""
        return -(-self.workload.seq_len // self.step)

    def amount(self, number: int) -> int:
        """Return a size as a number in the axis's unit (UNITS), such as layers or tokens a sample."""
        load = self.grown(number)
        amounts = {LAYERS: load.num_layers, BATCH: load.batch_size, SEQ: load.seq_len}
        return amounts.get(self.of, load.batch_size * load.seq_len)

    def text(self, number: int) -> str:
        return f"{self.amount(number)} {UNITS[self.of]}"


class SizeOutcome(NamedTuple):
    """The end of one probe, which is a run at one size."""

    passed: bool
    memory: str = ""  # the memory that was too small, such as device; empty if the probe passed
    # why the search must stop, if the probe failed for a reason other than its size; empty otherwise
    stop: str = ""
    evidence: Any = None


class SizeTrial(NamedTuple):
    size: int
    outcome: SizeOutcome


@dataclass
class SizeAnswer:
    """The trials of a search in the order in which they ran, and the answer that follows from them."""

    least: int = 1
    most: int = 2**20
    trials: list[SizeTrial] = field(default_factory=list)
    stopped: str = ""  # why the search stopped without an answer; empty if it did not

    @property
    def passing(self) -> list[int]:
        return [trial.size for trial in self.trials if trial.outcome.passed]

    @property
    def failing(self) -> list[int]:
        return [trial.size for trial in self.trials if not trial.outcome.passed]

    @property
    def first_failing(self) -> int:
        return min(self.failing, default=self.most + 1)

    @property
    def last_passing(self) -> int:
        return max(self.passing, default=self.least - 1)

    @property
    def largest(self) -> int:
        """Return the largest size that passed while no trial at this size or below failed; `least` - 1 if there is
        none."""
        return max((size for size in self.passing if size < self.first_failing), default=self.least - 1)

    @property
    def failed_above(self) -> int | None:
        """Return the smallest size that failed while no trial at this size or above passed; None if there is none."""
        return min((size for size in self.failing if size > self.last_passing), default=None)

    @property
    def is_unlimited(self) -> bool:
        """True if no trial failed, and the largest allowed size passed."""
        return not self.failing and self.last_passing == self.most

    @property
    def is_sharp(self) -> bool:
        """True if the smallest size that failed is the largest size that passed plus one."""
        return not self.stopped and self.failed_above == self.largest + 1

    def mixed(self) -> list[int]:
        """Return the sizes that contradict a sharp edge: failures at or below a size that passed, and passes at or
        above a size that failed."""
        passed = {size for size in self.passing if size >= self.first_failing}
        return sorted(passed | {size for size in self.failing if size <= self.last_passing})


def search(
    probe: Callable[[int], SizeOutcome],
    guess: int,
    *,
    least: int = 1,
    most: int = 2**20,
    repeats: int = 1,
    refine: Callable[[], int] | None = None,
    max_trials: int = MAX_TRIALS,
) -> SizeAnswer:
    """Find the largest size from `least` to `most` that trains.

    `repeats`: number of probes on each side of the edge. If it is above 1, the size after the first failing one is
    probed, too. `refine`: function that returns a better guess after two small runs; None: the guess is not refined.
    The search stops without an answer, and says why, if a probe fails for a reason other than its size, or after
    `max_trials` trials.
    """
    answer = SizeAnswer(least, most)
    guess = max(least, min(guess, most))
    stride = max(1, round(GALLOP * guess))
    if refine is not None and guess >= max(REFINED_FROM, 4 * least):
        for small in (guess // 4, guess // 2):
            if not answer.stopped and not answer.failing:
                _try(answer, probe, small)
        if not answer.stopped and not answer.failing:
            guess, stride = max(least, min(refine(), most)), 1
    while not answer.stopped:
        size, stride = _next(answer, guess, stride, repeats)
        if size is None:
            break
        if len(answer.trials) >= max_trials:
            answer.stopped = f"no edge was found in {max_trials} trials"
            break
        _try(answer, probe, size)
    return answer


def _try(answer: SizeAnswer, probe: Callable[[int], SizeOutcome], size: int) -> None:
    outcome = probe(size)
    if outcome.stop:
        answer.stopped = outcome.stop
    else:
        answer.trials.append(SizeTrial(size, outcome))


def _next(answer: SizeAnswer, guess: int, stride: int, repeats: int) -> tuple[int | None, int]:
    """Return the next size to try, and the stride for the size after that. The size is None if the answer is known."""
    largest_passing, first_failing = answer.largest, answer.first_failing
    last_passing, failed_above = answer.last_passing, answer.failed_above
    if guess not in (*answer.passing, *answer.failing) and last_passing < guess < first_failing:
        return guess, stride
    if first_failing - largest_passing > 1 and largest_passing < answer.least:
        # no size below the first failure has passed: go down
        return max(answer.least, first_failing - stride), 2 * stride
    if failed_above is None and last_passing < answer.most:
        # no size above the last pass has failed: go up
        return min(answer.most, last_passing + stride), 2 * stride
    # some smaller size passed, so go down from the failure by strides, but not below the interval's middle
    if first_failing - largest_passing > 1 and first_failing <= answer.most:
        return max((largest_passing + first_failing) // 2, first_failing - stride), 2 * stride
    if failed_above is not None and failed_above - last_passing > 1:
        return (last_passing + failed_above) // 2, stride
    for size, sizes in ((largest_passing, answer.passing), (failed_above, answer.failing)):
        if size is not None and answer.least <= size and sizes.count(size) < repeats:
            return size, stride
    if (
        repeats <= 1
        or failed_above is None
        or failed_above >= answer.most
        or failed_above + 1 in answer.failing
    ):
        return None, stride
    return failed_above + 1, stride  # probe the size above the failure, too: the failure may be an exception


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
