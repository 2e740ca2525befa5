"""The demo: every method, every figure, and a second call that measures nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import demo
from harness.core import method
from harness.core.record import read_all
from harness.figures import case
from tests.report.test_notebook import executed


def test_each_method_is_shown_once_at_the_same_depth() -> None:
    jobs = demo.jobs(case.profile_of("demo", None))
    assert [job.method for job in jobs] == method.names()
    assert len({job.workload for job in jobs}) == 1


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_the_demo_shows_all_and_the_notebook_shows_it_again(tmp_path: Path, libaio: None, compiled_sim: None) -> None:
    command = [sys.executable, "-m", "harness", "demo", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=method.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = {record.job.method: record for record in read_all(tmp_path)[0].values()}
    assert set(ended) == set(method.names())
    assert {name for name, record in ended.items() if record.status == "unavailable"} == {"superoffload"}
    for number in case.numbers():
        assert (tmp_path / "figures" / f"case{number}_demo.png").exists()
    assert (tmp_path / "report/index.html").exists()
    # What is recorded needs no run: the notebook shows it all at once.
    there = set(tmp_path.glob("log_*"))
    outputs = executed(tmp_path)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == len(case.numbers())
    assert "NOT TESTED: " in "".join(output.get("text", "") for output in outputs)
    assert set(tmp_path.glob("log_*")) == there
