"""The gate's probe: trains the same job at a learning rate at which faults show, and compares this training with the
reference's, within honest rounding.

At the published rate, the first twenty steps (warm-up) hardly move a weight, so many faults do not show. A probe
warms up to LEARNING_RATE in three fifths of its steps and then decays to the lowest rate, so its steps straddle both
turns of the schedule. The method trains at this rate. The reference trains at it twice: once plainly, and once with
another rounding. Honest rounding is the distance between these two references. By chance they may end near each other
in some tensor. So if the method is farther away, the reference is trained with further roundings, and the largest
distance counts.

In half precision, AdamW amplifies rounding: the sign of a small element is the rounding's. So there the probe clips the
gradient until its elements are far below AdamW's epsilon. AdamW's step is then linear in the gradient, and the learning
rate may be so high that weight decay takes a hundred times as much as in fp32. In fp16 the loss scale doubles every
other step, so that it overflows, and steps are skipped. The probe is repeated in fp32, in which rounding hides no
fault.

The trainings of a probe are jobs like any other, whose records are in a folder of their own. A probe tests a method's
code, not a size: it has the job's options, placement, micro-batches and dtype, but few layers, among them one of each
kind, and a width, sequence and vocabulary of its own, unless the call asks for more. So jobs of many sizes share one
probe. The probe has samples as long and heads as wide as the run's if all its trainings then take at most a tenth of
the run's operations (COST_SHARE). A new probe is made only for other source code or options of a method, or another
dtype, device or software. A method that trains only at the job's width is probed at that width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.base.checkout import ROOT
from harness.core import hub_config
from harness.core.job import EPSILON, MOST_LAYERS, Job, Workload
from harness.core.record import Gate
from harness.gate.evidence import Trial

LEARNING_RATE = 3.75e-3
# With a clipped gradient: the learning rate, and the root mean square of the gradient's elements. In each step AdamW
# moves an element by about the product of both, divided by EPSILON.
CLIPPED_LEARNING_RATE, CLIPPED_ELEMENT = 50 * LEARNING_RATE, 3e-3 * EPSILON
RATES = (LEARNING_RATE, CLIPPED_LEARNING_RATE)
# in fp16 the loss scale doubles after this many steps: it overflows within a probe's 20 steps
OVERFLOWING_WINDOW = 2
LAYERS, STEPS = 4, 20
MOST_STEPS = 60  # largest number of steps for which a probe's limits are known to hold
# The roundings of methods/shared/roundings.py with which the reference is trained for the floor, in two groups. In fp32
# the second group is trained only if a departure remains with the first group, because further roundings only raise the
# floor. A training with the first rounding takes no longer than the reference's training (results/LOG.md). In half
# precision all six roundings are trained at once, because the first one alone gives a floor that is too low: of 10
# honest trainings, 9 were more than 10 times as far from the reference as the training with the first rounding, and
# none was 2 times as far as the farthest training of the six roundings (bf16, 4 layers of hidden size 64).
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
FEWEST_HEADS = 2  # a wider probe has at least this many heads
COST_SHARE = 0.1  # most operations of all trainings of a wider probe, as a share of the job's own
# Number of models that a probe trains. In fp32: by the method, by the reference, and by the reference with the first
# rounding. In half precision: by the method, by the reference, with each of the six roundings, and the three of fp32.
TRAININGS = {"fp32": 3, "half": 11}
BATCH_TOKENS, FEWEST_TOKENS = 256, 8  # most tokens of a batch, but each sample keeps at least FEWEST_TOKENS


class Extent(NamedTuple):
    """The extent of a probe: its number of steps, and of layers (at most as many as the job has). A method may need
    more layers. `is_full`: True: the probe has the job's width, heads, tokens and vocabulary, whatever it costs."""

    layers: int = LAYERS
    steps: int = STEPS
    is_full: bool = False

    def __bool__(self) -> bool:
        """True if there is a probe: a probe has at least one layer."""
        return self.layers > 0

    def or_more(self, other: Extent) -> Extent:
        is_full = self.is_full or other.is_full
        return Extent(max(self.layers, other.layers), max(self.steps, other.steps), is_full)


NONE = Extent(0, 0)
LEFT_OUT = "the probe was left out"  # text of a verdict without a probe, because the call asked for none
ALL_LAYERS = MOST_LAYERS


def is_left_out(text: str) -> bool:
    """True if the text of a verdict says that the call left the probe out. A record tells it by no other fact."""
    return LEFT_OUT in text


class Probe(NamedTuple):
    """The trials of a probe, the trial in fp32 first. `untested`: what could not be tested, as text. `refused`: why the
    method does not train at the probe's learning rate, although it trained at the job's. `missing`: how many trainings
    of the probe an archive lacks, as text."""

    trials: tuple[Trial, ...] = ()
    untested: str = ""
    refused: str = ""
    missing: str = ""


def roundings_of(dtype: str) -> tuple[tuple[str, ...], ...]:
    """Return the groups of roundings for the floor; the next group is trained if a departure remains."""
    return ROUNDINGS if dtype == "fp32" else ((*ROUNDINGS[0], *ROUNDINGS[1]),)


def extent_of(trial: Trial, whole: Workload) -> Extent:
    """Return the extent of a trial. `whole`: the workload of the run."""
    load = trial.record.job.workload
    sizes = ("hidden_size", "num_heads", "seq_len", "vocab_size")
    is_full = all(getattr(load, name) == getattr(whole, name) for name in sizes)
    return Extent(load.num_layers, trial.record.job.steps, is_full)


def extent_beneath(verdict: Gate) -> Extent:
    """Return the extent of the probe on which a verdict rests; NONE if it rests on none."""
    evidence = verdict.evidence
    layers, steps = evidence.get("probe_layers"), evidence.get("probe_steps")
    if not layers or not steps:
        return NONE
    return Extent(layers, min(max(STEPS, steps), MOST_STEPS), bool(evidence.get("probe_is_full")))


def rounding(reference: Job, names: Sequence[str]) -> Job:
    """Return the job that trains the reference with the roundings of these names."""
    return dataclasses.replace(reference, method=ROUNDED, options={"names": ",".join(names)})


def workload(load: Workload, dtype: str, steps: int = STEPS) -> Workload:
    """Return the workload at the probe's learning rate, schedule and clipping. It has no dropout, because methods drop
    different elements. It has at least two samples, because rounding depends on the order in which samples are
    summed."""
    is_clipped = dtype != "fp32" and load.clip_norm > 0
    clip_norm = CLIPPED_ELEMENT * math.sqrt(load.num_trained) if is_clipped else load.clip_norm
    return dataclasses.replace(
        load,
        learning_rate=CLIPPED_LEARNING_RATE if is_clipped else LEARNING_RATE,
        clip_norm=clip_norm,
        dropout=0.0,
        lr_warmup_steps=max(1, 3 * steps // 5),
        lr_decay_steps=max(2, steps - 1),
        dtype=dtype,
        batch_size=max(2, load.batch_size),
        loss_scale_window=OVERFLOWING_WINDOW if dtype == "fp16" else None,
    )


def sized(job: Job, extent: Extent) -> Workload:
    """Return the job's workload at the sizes of its probe: its own if the extent is full, else capped() ones. If a
    tenth of the job's cost pays for it, the probe has samples as long as the job's, heads as wide, or both, and as many
    heads as it pays for. Fewer heads need a GPT, because a config.json fixes its number of heads."""
    load, small = job.workload, capped(job.workload)
    if extent.is_full:
        return dataclasses.replace(load, corpus=None, weights=None)
    num_layers = depth_of(load, extent)
    num_trainings = TRAININGS["fp32" if load.dtype == "fp32" else "half"]
    most_flops = COST_SHARE * job.steps * load.flops_per_step / (num_trainings * extent.steps)
    head_size = load.hidden_size // load.num_heads
    wide_loads = []
    for num_heads in _head_counts(load):
        if num_heads * head_size >= HIDDEN_SIZE or num_heads == load.num_heads:
            hidden_size = num_heads * head_size
            wide_loads.append(dataclasses.replace(small, hidden_size=hidden_size, num_heads=num_heads))
    long_loads = [dataclasses.replace(wide, seq_len=load.seq_len) for wide in wide_loads]
    long_small = dataclasses.replace(small, seq_len=load.seq_len)
    for sized_load in (*long_loads, *wide_loads, long_small):
        if sized_load.at_depth(num_layers).flops_per_step <= most_flops:
            return sized_load
    return small


def depth_of(load: Workload, extent: Extent) -> int:
    """Return the number of layers of a probe of this extent, among which is a layer of each kind of the workload's."""
    return min(load.num_layers, max(extent.layers, load.anatomy.num_layers_of_all_kinds))


def _head_counts(load: Workload) -> list[int]:
    """Return the numbers of heads that a wider probe may have, the largest first: each is half of the number before."""
    if load.config is not None:
        return [load.num_heads]
    halvings = [load.num_heads >> shift for shift in range(load.num_heads.bit_length())]
    return [num_heads for num_heads in halvings if num_heads >= FEWEST_HEADS] or [load.num_heads]


def capped(load: Workload) -> Workload:
    """Return the workload at the probe's width, sequence and vocabulary.

    Its weights are drawn from the seed, and its tokens come from the synthetic stream, which has tokens for any
    vocabulary. The batch stays, because options split it into parts; if it has more than four samples, the sequences
    are shorter. A sample that is longer than the model's sliding window is twice as long as the window.
    """
    head_size = min(load.hidden_size // load.num_heads, max(HEAD_SIZE, HIDDEN_SIZE // load.num_heads))
    tokens = min(TOKENS, max(FEWEST_TOKENS, BATCH_TOKENS // load.batch_size))
    config = load.config
    if config is not None and hub_config.is_beyond_window(load.anatomy.fields, load.seq_len):
        config = hub_config.with_window(config, min(load.seq_len, tokens) // 2)
    return dataclasses.replace(
        load,
        hidden_size=head_size * load.num_heads,
        seq_len=min(load.seq_len, tokens),
        vocab_size=min(load.vocab_size, WORDS),
        corpus=None,
        weights=None,
        config=config,
    )
