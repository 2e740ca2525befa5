"""The gate's power: the recorded figures keep their bars, and a sample of the faults is seen and named here and now."""

from __future__ import annotations

import functools
import json

import pytest

from bench import gate_power
from bench.gate_power import PowerCase
from harness.base.checkout import ROOT
from harness.core import method
from harness.core.record import Gate, Record
from harness.gate import departures
from harness.gate.evidence import Trial
from tests.support.training import STEPS

FIGURES = json.loads((ROOT / "results" / "gate-power.json").read_text())["figures"]
ROWS = [
    pytest.param(row, id=f"{dtype}, {way}") for dtype, ways in FIGURES.items() for way, row in ways.items()
]
HELD_OUT = json.loads((ROOT / "results" / "gate-power-held-out.json").read_text())["figures"]
PROBED = [row for row in ROWS if "without" not in str(row.id)]


@functools.cache
def trained(job_text: str) -> Record:
    return gate_power.train(JOBS[job_text])


JOBS: dict = {}


def outcome_of(case: PowerCase) -> gate_power.Outcome:
    JOBS.update({job.key(): job for job in case.jobs()})
    return gate_power.outcome(case, {job.key(): trained(job.key()) for job in case.jobs()})


@pytest.mark.parametrize("row", PROBED)
def test_of_the_planted_faults_at_least_95_percent_are_seen_and_90_percent_named_rightly(row: dict) -> None:
    assert row["seen"] >= 0.95 * row["faults"] >= 0.95 * 39
    assert row["named"] >= 0.9 * row["seen"]


@pytest.mark.parametrize("row", ROWS)
def test_no_honest_run_fails(row: dict) -> None:
    assert row["failed"] == {} and row["false_alarms"] == 0


def test_the_honest_runs_are_a_hundred_by_all_methods_that_are_exact_and_run_on_a_cpu() -> None:
    assert sum(FIGURES[dtype]["cpu"]["honest"] for dtype in gate_power.DTYPES) >= 100
    tried = {case.method for dtype in gate_power.DTYPES for case in gate_power.honest_cases(dtype)}
    elsewhere = {"zenflow", "superoffload"}  # trains otherwise; runs on GPUs only
    assert set(method.names()) - tried == elsewhere


def test_the_artifact_s_table_is_the_recorded_one() -> None:
    assert gate_power.table(FIGURES) in (ROOT / "ARTIFACT.md").read_text()


@pytest.mark.parametrize("way", gate_power.WAYS)
def test_no_honest_run_of_a_size_and_seeds_held_out_fails(way: str) -> None:
    assert [HELD_OUT[dtype][way]["failed"] for dtype in gate_power.DTYPES] == [{}, {}, {}]


def test_the_artifact_tells_how_many_honest_runs_and_faults_were_held_out() -> None:
    page = " ".join((ROOT / "ARTIFACT.md").read_text().split())
    rows = [HELD_OUT[dtype]["cpu"] for dtype in gate_power.DTYPES]
    fp32, bf16, fp16 = (row["honest"] for row in rows)
    assert fp32 + bf16 + fp16 >= 100
    assert f"0 of {fp32} honest runs in fp32, 0 of {bf16} in bf16 and 0 of {fp16} in fp16" in page
    seen, names = ([str(row[what]) for row in rows] for what in ("seen", "named"))
    faults = [f"{each} of {row['faults']}" for each, row in zip(seen, rows, strict=True)]
    assert f"It sees {faults[0]}, {faults[1]} and {faults[2]} faults" in page
    assert f"and names {names[0]}, {names[1]} and {names[2]} rightly" in page


def test_every_fault_has_a_right_name() -> None:
    method.load("planted", gate_power.FOLDERS)
    from methods import _step_faults  # type: ignore[attr-defined]

    assert _step_faults.FAULTS.keys() == gate_power.RIGHT.keys() and len(_step_faults.FAULTS) == 42


@pytest.mark.parametrize(
    "fault",
    [
        "no decay",
        "gradients doubled",
        "a batch twice",
        *(
            pytest.param(name, marks=pytest.mark.heavy)
            for name in ("norm epsilon 1e-6", "clip off", "moments in bf16")
        ),
    ],
)
def test_a_planted_fault_is_seen_and_named(fault: str) -> None:
    (case,) = gate_power.fault_cases("fp32", [fault])
    found = outcome_of(case)
    for way in ("cpu", "cuda", "bits"):
        assert found.verdicts[way].verdict == "failed", found.verdicts[way].text
        assert found.is_named(way), found.verdicts[way].text


@pytest.mark.heavy
@pytest.mark.parametrize("fault", sorted(set(gate_power.RIGHT) - {"no fp32 master"}))
def test_the_probe_in_fp32_sees_each_planted_fault_and_names_all_but_one(fault: str) -> None:
    (case,) = gate_power.fault_cases("fp32", [fault])
    cases = (case, case.reference(), case.rounded())
    JOBS.update({each.probe("fp32").key(): each.probe("fp32") for each in cases})
    ours, theirs, rounded = (trained(each.probe("fp32").key()) for each in cases)
    found = departures.rounding_departure(Trial(ours, theirs, tuple(rounded.models())), is_held_to_bits=False)
    assert found is not None
    verdict = Gate("failed", found.reason, found.text, {"step": found.step})
    named = gate_power.Outcome(case, {"cpu": verdict}).is_named("cpu")
    assert named is (fault != "tanh GELU"), found.text


def test_honest_rounding_passes_and_says_what_that_rests_on() -> None:
    options = {"rounding": "attention-in-double", "adam": "plain"}
    case = PowerCase("planted", options, {}, "fp32", gate_power.SEEDS[0])
    for way in ("cpu", "cuda"):
        verdict = outcome_of(case).verdicts[way]
        assert verdict.verdict == "tolerance"
        assert verdict.text.endswith(f"; probe: {STEPS} steps in fp32, losses, norms, weights, both moments")


@pytest.mark.heavy
def test_what_half_precision_alone_has_is_seen_there() -> None:
    (case,) = gate_power.fault_cases("bf16", ["no fp32 master"])
    assert outcome_of(case).verdicts["cuda"].verdict == "failed"
