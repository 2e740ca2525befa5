"""The gate's probe: the same job at a rate that trains, beside the reference and what honest rounding amounts to.

At the published rate twenty steps of the warm-up hardly move a weight: much that is wrong does not show. The probe's
rate is 0.5, under the same schedule: 1.6e-4 at the first step, 3.1e-3 at the twentieth. The method trains this, the
reference does, and the reference trains it by several other roundings: how far these are from it is what honest
rounding amounts to here. One of them alone may by chance end near the reference in some tensor, all of them do not. In
half precision the distance to the reference in fp32 counts, too, and the same is done in fp32, where rounding hides
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.core.job import MOST_LAYERS
from harness.core.record import Record
from harness.jobs import departure
from harness.jobs.departure import Departure

LEARNING_RATE = 0.5
LAYERS, STEPS = 4, 20
MOST_STEPS = 60  # for which the limits below are known to hold
# Of methods/shared/roundings.py: what the reference is trained by for the floor.
ROUNDINGS = (
    "single-samples", "samples-reversed", "split-products", "ulp-of-norms", "plain-attention", "head-in-blocks",
)  # fmt: skip
# Times the floor, in any dtype. 324 honest runs of three sizes reached 6.2, planted faults begin at 68 in fp32
# (results/LOG.md); bench/gate_power.py tries it on others.
ALLOWED = 20.0
NAMING = 2.0  # times the floor: the first difference beyond this names the fault of a probe that failed
FAINT = 20.0  # times NAMING: below this the step named may be late, because slow faults begin earlier (results/LOG.md)


class Extent(NamedTuple):
    """How much the probe trains: steps, and layers, if the job has as many. A method may need more layers."""

    layers: int = LAYERS
    steps: int = STEPS

    def __bool__(self) -> bool:
        """Without layers there is no probe."""
        return self.layers > 0

    def or_more(self, other: Extent) -> Extent:
        return Extent(max(self.layers, other.layers), max(self.steps, other.steps))


NONE = Extent(0, 0)
ALL_LAYERS = MOST_LAYERS


class Trial(NamedTuple):
    """The probe in one dtype. `others`: the reference by ROUNDINGS; `wide`: the reference in fp32, if that is another
    dtype. Neither is needed where the method's bits are the reference's."""

    record: Record
    reference: Record
    others: tuple[Record, ...] = ()
    wide: tuple[Record, ...] = ()

    @property
    def dtype(self) -> str:
        return self.record.job.workload.dtype

    @property
    def extent(self) -> Extent:
        return Extent(self.record.job.workload.num_layers, self.record.job.steps)


class Probe(NamedTuple):
    """Trials, the one in fp32 first, and what could not be tested, for people. `refused`: why the method does not train
    at the probe's rate what it trained at another."""

    trials: tuple[Trial, ...] = ()
    untested: str = ""
    refused: str = ""


def find(trial: Trial, is_held_to_bits: bool) -> Departure | None:
    """How the method trained otherwise than rounding allows, or, where it promises so, not to the last bit."""
    record, reference, others, wide = trial
    if departure.is_same(record, reference):
        return None
    if not others and not is_held_to_bits:
        return Departure("weights", "the probe ends at other bits, and there is no measure of rounding")
    floor = departure.floor(reference, others or [reference], wide)
    told = f"{{:.1e}} is {NAMING:g} times what rounding does here"
    naming = floor.times(NAMING)._replace(told=told, faint=FAINT)
    named = departure.departure(record, reference, naming)
    if is_held_to_bits:
        return named or Departure("weights", "its bits are not the reference's, which it promises")
    found = departure.departure(record, reference, floor.times(ALLOWED).of_rounded_betas())
    return found and named


def told(trial: Trial, found: Departure) -> str:
    """The departure in words, and where the tensors are farthest off."""
    place = departure.outstanding(trial.record, trial.reference)
    where = f"; farthest off: {place}" if place and found.reason in ("update", "later", "weights") else ""
    return f"{found.text}{where} (probe in {trial.dtype})"
