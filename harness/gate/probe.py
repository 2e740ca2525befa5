"""The gate's probe: trains the same job at a learning rate at which faults show, and compares this training with the
reference's, within honest rounding.

At the published rate, the first twenty steps (warm-up) hardly move a weight, so many faults do not show. The probe's
rate is 0.5, under the same schedule: 1.6e-4 at the first step, 3.1e-3 at the twentieth. The method trains at this rate.
The reference trains at it twice: once plainly, and once with another rounding. Honest rounding is the distance between
these two references. By chance they may end near each other in some tensor. So if the method is farther away, the
reference is trained with further roundings, and the largest distance counts. In half precision, the distance to the
reference in fp32 counts, too, and the probe is repeated in fp32, in which rounding hides no fault.

The trainings of a probe are jobs like any other, whose records are in a folder of their own. A probe tests a method's
code, not a size: it has the job's options, placement, micro-batches and dtype, but a width, sequence and vocabulary of
its own, and few layers unless the call asks for more. So jobs of many sizes share one probe. A new probe is made only
for other source code or options of a method, or another dtype, device or software. A method that trains only at the
job's width is probed at that width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from harness.base.checkout import ROOT
from harness.core.job import MOST_LAYERS, Budget, Job, Workload
from harness.core.record import Record
from harness.gate import departures
from harness.gate.evidence import is_same
from harness.gate.trial import Trial

LEARNING_RATE = 0.5
LAYERS, STEPS = 4, 20
MOST_STEPS = 60  # largest number of steps for which a probe's limits are known to hold
# The roundings of methods/shared/roundings.py with which the reference is trained for the floor. Those in the second
# group are trained only if a departure remains with the first group, because further roundings only raise the floor. No
# departure remained in 279 of 281 probes of honest runs. A training with the first rounding takes no longer than the
# reference's (results/LOG.md).
ROUNDINGS = (
    ("plain-attention",),
    ("single-samples", "samples-reversed", "split-products", "ulp-of-norms", "head-in-blocks"),
)
ROUNDED = "rounded"  # name of the method that trains the reference with other roundings
FOLDER = "probes"  # subfolder of the folder of results that holds the probes' records
METHODS = ROOT / "methods" / "probe"  # folder of the methods that only the probe uses
# The largest sizes of a probe. At these sizes, a probe finds all faults that bench/gate_power.py plants. A head keeps
# at least 8 columns, because GPU kernels take multiples of 8.
HIDDEN_SIZE, HEAD_SIZE, TOKENS, WORDS = 64, 8, 64, 512
BATCH_TOKENS, FEWEST_TOKENS = 256, 8  # most tokens of a batch, but each sample keeps at least FEWEST_TOKENS


class Extent(NamedTuple):
    """The extent of a probe: its number of steps, and of layers (at most as many as the job has). A method may need
    more layers."""

    layers: int = LAYERS
    steps: int = STEPS

    def __bool__(self) -> bool:
        """True if there is a probe: a probe has at least one layer."""
        return self.layers > 0

    def or_more(self, other: Extent) -> Extent:
        return Extent(max(self.layers, other.layers), max(self.steps, other.steps))


NONE = Extent(0, 0)
LEFT_OUT = "the probe was left out"  # text of a verdict without a probe, because the call asked for none
ALL_LAYERS = MOST_LAYERS


class Probe(NamedTuple):
    """The trials of a probe, the trial in fp32 first. `untested`: what could not be tested, as text. `refused`: why the
    method does not train at the probe's learning rate, although it trained at the job's."""

    trials: tuple[Trial, ...] = ()
    untested: str = ""
    refused: str = ""


class Runs(NamedTuple):
    """The functions by which a probe makes and runs its jobs.

    `measure` runs a job and returns its record. `reference_of` returns the job of the reference. `fits` returns the
    largest number of layers at which a job fits. `why_not` returns why a job cannot run, or None. `twin_of` returns the
    same job with another number of layers.
    """

    measure: Callable[[Job], Record]
    reference_of: Callable[[Job], Job]
    fits: Callable[[Job], int]
    why_not: Callable[[Job], str | None]
    twin_of: Callable[[Job, int], Job]


class NoTrial(NamedTuple):
    """The result of a probe that could not train. `why`: the reason, as text. `is_of_the_size_that_trained`: True if
    the probe had the size of the run, so that only its learning rate was different."""

    why: str
    is_of_the_size_that_trained: bool


def extent_of(trial: Trial) -> Extent:
    return Extent(trial.record.job.workload.num_layers, trial.record.job.steps)


def train_probe(job: Job, number: int, extent: Extent, runs: Runs) -> Probe:
    """Train the probe of model `number` of a job. In half precision the probe is repeated in fp32, unless it gives the
    very bits of the reference."""
    found = _trial(job, job.workload.dtype, number, extent, runs)
    trials, untested = ([found], "") if isinstance(found, Trial) else ([], found.why)
    refused = found.why if isinstance(found, NoTrial) and found.is_of_the_size_that_trained else ""
    if job.workload.dtype != "fp32" and not (trials and is_same(trials[0].record, trials[0].reference)):
        wide = _trial(job, "fp32", number, extent, runs)
        if isinstance(wide, Trial):
            trials.insert(0, wide)
        else:
            untested = "; ".join(filter(None, (untested, wide.why)))
    return Probe(tuple(trials), untested, refused)


def _trial(job: Job, dtype: str, number: int, extent: Extent, runs: Runs) -> Trial | NoTrial:
    """Return the trial at the probe's size. If the method does not train at that size, return the trial at the job's
    size. A trial that cannot be made gives a NoTrial."""
    whole = workload(job.workload, dtype)
    small = capped(whole)
    found = _trial_of(small, job, number, extent, runs)
    if small != whole and (isinstance(found, NoTrial) or found.record.status != "ok"):
        return _trial_of(whole, job, number, extent, runs)
    return found


def _trial_of(load: Workload, job: Job, number: int, extent: Extent, runs: Runs) -> Trial | NoTrial:
    """Return the trial at the sizes of `load`, or a NoTrial with the reason why there is none."""
    probed = dataclasses.replace(job, workload=load, steps=extent.steps, warmup=0, trace=None, save=None)
    small, depth, why = _deep_enough(dataclasses.replace(probed, budget=_budget(job, extent)), extent, runs)
    if why:
        is_whole = depth == job.workload.num_layers and load.batch_size == job.workload.batch_size
        return NoTrial(f"no probe in {load.dtype}: {why}", is_whole)
    whole = runs.measure(small)
    record = whole.models()[min(number, len(whole.others))]
    reference = runs.reference_of(record.job)
    theirs = runs.measure(reference)
    if record.status != "ok" or theirs.status != "ok" or is_same(record, theirs):
        return Trial(record, theirs)
    wide = dataclasses.replace(reference, workload=dataclasses.replace(reference.workload, dtype="fp32"))
    trial = Trial(record, theirs, (), (runs.measure(wide),) if load.dtype != "fp32" else ())
    for names in ROUNDINGS:
        asked = dataclasses.replace(rounding(reference, names), budget=Budget(seconds=small.budget.seconds))
        trial = trial._replace(others=(*trial.others, *runs.measure(asked).models()))
        if departures.of_trial(trial) is None:
            break
    return trial


def _budget(job: Job, extent: Extent) -> Budget:
    """Return a budget that gives each step of the probe as much time as a step of the job has. A simulated slow link is
    left out, because it does not change the training."""
    budget = dataclasses.replace(job.budget, link_bytes_per_second=None) if job.device == "sim" else job.budget
    if budget.seconds and job.steps < extent.steps:
        return dataclasses.replace(budget, seconds=math.ceil(budget.seconds * extent.steps / job.steps))
    return budget


def _deep_enough(job: Job, extent: Extent, runs: Runs) -> tuple[Job, int, str]:
    """Double the probe's number of layers until the method can train the job with it. Return the job, its number of
    layers, and an empty text or, if no number works, the reason."""
    most = min(job.workload.num_layers, runs.fits(runs.reference_of(job)))
    depth, why = min(most, extent.layers), "the reference does not fit at any depth"
    while depth >= 1:
        try:
            small = runs.twin_of(job, depth)
            if not (why := runs.why_not(small) or ""):
                return small, depth, ""
        except ValueError as error:  # the method has no model with so few layers
            why = str(error)
        if depth == most:
            break
        depth = min(2 * depth, most)
    return job, depth, why


def rounding(reference: Job, names: Sequence[str]) -> Job:
    """Return the job that trains the reference with the roundings of these names."""
    return dataclasses.replace(reference, method=ROUNDED, options={"names": ",".join(names)})


def workload(load: Workload, dtype: str) -> Workload:
    """Return the workload at the probe's learning rate. It has no dropout, because methods drop different elements. It
    has at least two samples, because rounding depends on the order in which samples are summed."""
    batch_size = max(2, load.batch_size)
    return dataclasses.replace(load, learning_rate=LEARNING_RATE, dropout=0.0, batch_size=batch_size, dtype=dtype)


def capped(load: Workload) -> Workload:
    """Return the workload at the probe's width, sequence and vocabulary.

    Its weights are drawn from the seed, and its tokens come from the synthetic stream, which has tokens for any
    vocabulary. The batch stays, because options split it into parts; if it has more than four samples, the sequences
    are shorter.
    """
    head_size = min(load.hidden_size // load.num_heads, max(HEAD_SIZE, HIDDEN_SIZE // load.num_heads))
    tokens = min(TOKENS, max(FEWEST_TOKENS, BATCH_TOKENS // load.batch_size))
    return dataclasses.replace(
        load, hidden_size=head_size * load.num_heads, seq_len=min(load.seq_len, tokens),
        vocab_size=min(load.vocab_size, WORDS), corpus=None, weights=None,
    )  # fmt: skip
