"""The records of one training of the gate's probe, and of those that it is compared with."""

from __future__ import annotations

from typing import NamedTuple

from harness.core.record import Record


class Trial(NamedTuple):
    """The records of a probe in one dtype. `others`: the reference trained with other roundings. `wide`: the reference
    in fp32, if the probe's dtype is another. Neither is needed if the method's bits are the reference's."""

    record: Record
    reference: Record
    others: tuple[Record, ...] = ()
    wide: tuple[Record, ...] = ()

    @property
    def dtype(self) -> str:
        return self.record.job.workload.dtype
