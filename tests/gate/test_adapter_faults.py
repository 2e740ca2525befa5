"""The gate sees each fault that is planted into a training of adapters on frozen weights; what rounds otherwise
passes."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from bench import adapter_faults, gate_power
from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from harness.gate import probe
from harness.gate.evidence import Trial
from harness.gate.probe import Probe
from harness.gate.verdict import judge, with_probe
from tests.support.configured import configured
from tests.support.tiny import TINY

# each dtype and each model once: a floor of roundings for each further pair takes seconds
PAIRS = [("GPT", "fp32")]
PAIRS += [pytest.param(*pair, marks=pytest.mark.heavy) for pair in [("GPT", "fp16"), ("qwen3", "bf16")]]
SIZES = {
    "GPT": dataclasses.replace(TINY, num_layers=4, lora="8"),
    "qwen3": dataclasses.replace(configured("qwen3"), num_layers=4, lora="8"),
}
ROUNDED = "plain-attention,single-samples,split-products"


@functools.cache
def trained(load: Workload, method: str, **options: str) -> Record:
    record = gate_power.train(Job(method, load, options, steps=probe.STEPS, warmup=0))
    assert record.status == "ok", record.evidence
    return dataclasses.replace(record, bit_exact=False)


def verdict(model: str, dtype: str, **options: str) -> Gate:
    """The verdict on a training, as a method's that promises no bits: by its run, then by its probe."""
    load = dataclasses.replace(SIZES[model], dtype=dtype)
    probed = probe.workload(probe.capped(load), dtype)
    others = tuple(trained(probed, "rounded", names=ROUNDED).models())
    trial = Trial(trained(probed, "planted", **options), trained(probed, "resident"), others)
    run = trained(load, "planted", **options)
    return with_probe(judge(run, trained(load, "resident")), run, Probe((trial,)))


@pytest.mark.parametrize(("model", "dtype"), PAIRS)
@pytest.mark.parametrize("fault", adapter_faults.FAULTS)
def test_a_fault_of_adapters_or_of_the_frozen_base_is_seen(fault: str, model: str, dtype: str) -> None:
    assert verdict(model, dtype, fault=fault).verdict == "failed"


@pytest.mark.parametrize(("model", "dtype"), PAIRS)
@pytest.mark.parametrize("rounding", ["products-in-halves", "samples-rotated", "attention-in-double"])
def test_adapters_that_are_rounded_otherwise_pass(rounding: str, model: str, dtype: str) -> None:
    assert verdict(model, dtype, rounding=rounding, adam="plain").passed


def test_a_changed_base_is_named() -> None:
    gate = verdict("GPT", "fp32", fault="the base decayed")
    assert gate.reason == "frozen" and "although it is frozen" in gate.text
