"""The quantity that `search largest` makes larger: layers, samples of a step, tokens of a sample, or tokens of a step.

A search counts sizes from 1. From one size to the next, the workload gets one layer more, or one sample more for each
micro-batch of each rank, or more tokens. The number of added tokens is a power of two, at most a 32nd of the tokens
that should fit, because nobody trains sequences that differ by one token. If only every n-th of these workloads has a
plan, as with pipeline stages, the search counts only those workloads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from harness.core.job import Workload

LAYERS, BATCH, SEQ, TOKENS = OF = ("layers", "batch", "seq", "tokens")
# The field of the workload that grows along each axis.
OPTIONS = {LAYERS: "num_layers", BATCH: "batch_size", SEQ: "seq_len", TOKENS: "batch_size"}
UNITS = {LAYERS: "layers", BATCH: "samples", SEQ: "tokens a sample", TOKENS: "tokens a step"}
STEPPED = (SEQ, TOKENS)  # axes on which sizes are `step` tokens apart
STEPS = 32  # least number of sizes from 0 to the tokens that should fit


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
