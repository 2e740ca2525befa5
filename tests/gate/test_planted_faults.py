"""The probe sees planted faults, each in the path of one dtype alone, and names them; what rounds otherwise passes."""

from __future__ import annotations

import functools

import pytest

from bench import gate_power
from harness.core.job import Job, Workload
from harness.core.record import Record
from harness.gate import departures, probe
from harness.gate.departures import Departure
from harness.gate.evidence import Trial
from tests.support.tiny import TINY

DTYPES = ("fp32", "bf16", "fp16")
ROUNDED = ("plain-attention", "single-samples", "split-products")
FAULTS = {
    "a row of a matrix never updated": "layers.1.fc1.weight changed in 99.2% of its elements",
    "the last 16 elements of a matrix never updated": "layers.1.fc1.weight changed in 99.6% of its elements",
    "gradient of a column lost": "layers.1.fc1.weight got a gradient in 96.9% of its elements",
    "the last position's gradient lost": "",
    "no decay in a layer": "as without decay there",
    "no decay in the embedding": "ends.wte.weight: ",
    "no decay": "where biases and norms agree: as without decay",
    "constant rate after the warm-up": "",
    "gradients doubled": "gradient norm",
    "gradient a step stale in a layer": "",
    "clip at half": "",
    "weights a step stale": "",
}
OF_BF16 = {  # in the path of bf16 alone
    "weights not copied every tenth step": "step 10",
    "masters from the weights every tenth step": "",
    "second moment in fp16": "got a gradient in 0.0% of its elements",
    "the last use of a word gives its look-up's gradient": "gradient norm",
}
WHEN_SKIPPED = ["weights decayed in skipped steps", "moments decayed in skipped steps"]


def load_of(dtype: str) -> Workload:
    return probe.workload(probe.capped(TINY), dtype)


@functools.cache
def trained(method: str, dtype: str, **options: str) -> Record:
    record = gate_power.train(Job(method, load_of(dtype), options, steps=probe.STEPS, warmup=0))
    assert record.status == "ok", record.evidence
    return record


def departure_of(dtype: str, **options: str) -> Departure | None:
    others = trained("rounded", dtype, names=",".join(ROUNDED)).models()
    return departures.trial_departure(
        Trial(trained("planted", dtype, **options), trained("resident", dtype), tuple(others))
    )


@pytest.mark.shows("the gate sees a dozen planted faults in each dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_path_of_one_dtype_is_seen_and_named(fault: str, dtype: str) -> None:
    departure = departure_of(dtype, fault=fault)
    # Where matrices of bf16 are multiplied by tiles (AMX), a model without decay departs in its gradient norm first.
    name = "" if (fault, dtype) == ("no decay", "bf16") else FAULTS[fault]
    assert departure is not None and name in departure.text


@pytest.mark.parametrize("fault", OF_BF16)
def test_a_fault_of_bf16_s_copies_and_kernels_is_seen(fault: str) -> None:
    departure = departure_of("bf16", fault=fault, only="bf16")
    assert departure is not None and OF_BF16[fault] in departure.text


@pytest.mark.parametrize("fault", WHEN_SKIPPED)
def test_what_is_decayed_in_steps_that_fp16_skips_is_seen(fault: str) -> None:
    assert len(trained("resident", "fp16").skipped_steps) >= 2
    assert departure_of("fp16", fault=fault) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["products-in-halves", "samples-rotated", "attention-in-double"])
def test_another_rounding_is_no_departure(rounding: str, dtype: str) -> None:
    assert departure_of(dtype, rounding=rounding, adam="plain") is None
