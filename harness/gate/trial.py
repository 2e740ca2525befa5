"""The records of one training of the gate's probe, and of the trainings that it is compared with."""

from __future__ import annotations

from typing import NamedTuple

from harness.core.record import Record


class Trial(NamedTuple):
    """The records of a probe in one dtype. `others`: trainings of the reference with other roundings; empty if the
    method gives the reference's very bits."""

    record: Record
    reference: Record
    others: tuple[Record, ...] = ()

    @property
    def dtype(self) -> str:
        return self.record.job.workload.dtype
