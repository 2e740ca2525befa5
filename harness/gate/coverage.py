"""Tells what a verdict covers: the sizes that a probe trained, the facts that a method returned, and what is left
untested."""

from __future__ import annotations

from harness.core.job import WEIGHT_DECAY, Workload
from harness.core.record import Record
from harness.gate import evidence
from harness.gate.evidence import MOMENTS
from harness.gate.probe import Probe

SMALLEST_DECAY = 2**-25  # 1 minus a smaller product of learning rate and weight decay is rounded to 1


def untested_steps(record: Record) -> str:
    """Return, as text, what a run without a probe leaves untested of its updates: weight decay, if it is too small to
    change a weight, and the learning rate of later steps. Empty if nothing is left."""
    load, steps = record.job.workload, record.job.steps
    parts = ["decay"] * (load.learning_rate_at(steps) * WEIGHT_DECAY < SMALLEST_DECAY)
    parts += [f"the learning rate after step {steps}"] * (steps < load.lr_decay_steps)
    return f"{' and '.join(parts)} {'was' if len(parts) == 1 else 'were'} not tested" if parts else ""


def smaller(probed: Workload, whole: Workload) -> str:
    """Return, as text, how much of the run's model a probe trained; empty if it trained all. The probe cannot see a
    fault that shows only with more layers or larger sizes."""
    sizes = {
        "layers": "num_layers",
        "columns": "hidden_size",
        "heads": "num_heads",
        "tokens": "seq_len",
        "words": "vocab_size",
    }
    pairs = {noun: (getattr(probed, name), getattr(whole, name)) for noun, name in sizes.items()}
    pairs["columns of a head"] = (
        probed.hidden_size // probed.num_heads,
        whole.hidden_size // whole.num_heads,
    )
    parts = [f"{part} of {most} {noun}" for noun, (part, most) in pairs.items() if part < most]
    return f" at {', '.join(parts)}" if parts else ""


def told_by(record: Record, probe: Probe) -> tuple[list[str], list[str]]:
    """Return two lists of texts: the facts that the method returns of its training, and notes on facts that were not
    tested because the method does not return them."""
    records = (record, *(trial.record for trial in probe.trials))
    has_norms = all(len(one.grad_norms) == len(one.losses) for one in records)
    has = {name: evidence.has_moments(record, moment) for name, moment in MOMENTS.items()}
    moments = ["both moments"] if all(has.values()) else [name for name in has if has[name]]
    missing = [f"{name} were not tested: the method returns none" for name in has if not has[name]]
    missing += [] if has_norms else ["norms were not tested: the method returns none, or not in every step"]
    return ["losses", *["norms"] * has_norms, "weights", *moments], missing
