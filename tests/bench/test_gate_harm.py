"""What is more than a rounding: the recorded figures keep their bar, and the artifact has them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bench import gate_harm, gate_power
from harness.base.checkout import ROOT
from harness.core.record import Gate

FIGURES = json.loads((ROOT / "results" / "gate-harm.json").read_text())


def test_of_the_faults_that_are_more_than_a_rounding_at_least_95_percent_are_seen() -> None:
    rows = FIGURES["faults"].values()
    harmful = [row for row in rows if row["times"] > gate_harm.FACTOR == FIGURES["factor"]]
    assert len(harmful) == FIGURES["harmful"] >= 40
    assert sum(row["seen"] for row in harmful) == FIGURES["seen"] >= 0.95 * len(harmful)


def test_the_figures_are_of_every_fault_in_bf16_s_path_and_of_honest_runs_of_two_seeds() -> None:
    assert FIGURES["faults"].keys() == {case.fault for case in gate_power.path_cases("bf16")}
    names = {f"{name} {seed}" for seed, runs in gate_harm.HONEST.items() for name in runs}
    assert FIGURES["honest"].keys() == names and len(names) >= 20


def test_the_artifact_tells_the_recorded_figures() -> None:
    page = " ".join((ROOT / "ARTIFACT.md").read_text().split())
    assert f"| more than a rounding | {FIGURES['harmful']} | {FIGURES['seen']} |" in page
    assert f"| no more than a rounding | {FIGURES['others']} | {FIGURES['others_seen']} |" in page
    most = FIGURES["most_of_honest"]
    assert (
        f"within {most['learning']:.1e} of their mean, at the published schedule {most['published']:.1e}"
        in page
    )


@pytest.mark.parametrize(("loss", "is_harmful"), [(4.15, False), (4.25, True), (3.75, True)])
def test_a_fault_is_more_than_a_rounding_from_twice_the_farthest_honest_run_on_in_either_direction(
    monkeypatch: pytest.MonkeyPatch, loss: float, is_harmful: bool
) -> None:
    """Two honest runs end at 4.1 and 3.9, whose mean is 4.0."""
    (case,) = (case for case in gate_power.path_cases("bf16") if case.fault == "tanh GELU")
    runs = {"reference": ("resident", {}), "other": ("l2l", {})}
    monkeypatch.setattr(gate_harm, "HONEST", dict.fromkeys(gate_power.SEEDS, runs))
    monkeypatch.setattr(
        gate_power, "outcome", lambda case, records: SimpleNamespace(verdicts={"cpu": Gate()})
    )
    ends = [(gate_harm.of_case(case), loss)]
    ends += [
        (gate_harm.jobs_of(*runs[name], seed), end)
        for name, end in (("reference", 4.1), ("other", 3.9))
        for seed in gate_power.SEEDS
    ]
    records = {
        job.key(): SimpleNamespace(losses=[end] * gate_harm.STEPS)
        for jobs, end in ends
        for job in jobs.values()
    }
    assert gate_harm.figures([case], records)["harmful"] == is_harmful
