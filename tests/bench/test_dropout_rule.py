"""The rule for other dropout: its bench tries one case alone, and its recorded figures are the artifact's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import dropout_rule, gate_power
from harness.base.checkout import ROOT
from harness.gate import limits

FIGURES = json.loads((ROOT / "results" / "dropout-rule.json").read_text())
HONEST = [row for row in FIGURES["rows"] if row["name"] not in dropout_rule.FAULTS]


@pytest.fixture
def trained_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of in processes of their own."""
    monkeypatch.setattr(
        dropout_rule, "train_all", lambda jobs, cores: {job.key(): gate_power.train(job) for job in jobs}
    )


def test_another_seed_of_dropout_departs_by_more_than_rounding_and_less_than_the_rule_allows(
    tmp_path: Path, trained_here: None
) -> None:
    """One layer x 32, the smallest size of the bench."""
    told = CliRunner().invoke(
        dropout_rule.main, ["--case", "other seed 3", "--out", str(tmp_path / "out.json")]
    )
    assert told.exit_code == 0, told.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["name"] == "other seed 3" and row["verdict"] == "tolerance"
    assert 0.5 < row["times"] < limits.DROPOUT_MULTIPLE, "dropout takes it about as far as dropout does"


def test_a_case_that_there_is_not_is_a_usage_error_that_names_those_there_are(tmp_path: Path) -> None:
    told = CliRunner().invoke(
        dropout_rule.main, ["--case", "other sead 3", "--out", str(tmp_path / "out.json")]
    )
    assert told.exit_code == 2 and "try one of megatron-lm 1, " in told.output


def test_no_recorded_honest_run_fails_and_the_artifact_has_their_range() -> None:
    assert {row["verdict"] for row in HONEST} == {"tolerance"} and FIGURES[
        "allowed"
    ] == limits.DROPOUT_MULTIPLE
    times = [row["times"] for row in HONEST]
    told = f"{len(HONEST)} honest runs need {min(times):.1f} to {max(times):.1f} times"
    assert told in " ".join((ROOT / "ARTIFACT.md").read_text().split())
