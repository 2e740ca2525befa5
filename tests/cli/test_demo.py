"""The demo: every method, every figure, and a second call that measures nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli import demo
from harness.core import method, native_build
from harness.core.job import Job
from harness.core.record import read_all
from harness.run.prepare import prepare
from methods.engines import deepspeed_config
from papers.figures import case
from tests.papers.report.test_notebook import executed
from tests.support import records
from tests.support.cli import run
from tests.support.tiny import TINY, write_compiling


def test_each_method_is_shown_once_at_the_same_depth() -> None:
    jobs = [planned.job for planned in demo.plans(case.profile_of("demo", None), method.names())]
    assert [job.method for job in jobs] == method.names()
    assert len({job.workload for job in jobs}) == 1


def test_the_demo_leaves_out_what_compiles_for_long_and_says_how_to_add_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed_config, "is_kernel_built", lambda kernel, release=None: False)
    monkeypatch.setattr(native_build, "has_header", lambda name: True)
    monkeypatch.setattr(native_build, "find_compiler", lambda: "g++")
    reasons = demo.left_out(method.names(), "sim")
    assert set(reasons) == {"superoffload", "zenflow", "zero-infinity-nvme"}
    assert "./run.sh setup" in reasons["zenflow"] and "NVIDIA" in reasons["superoffload"]


def test_without_a_header_no_compiler_is_started_and_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed_config, "is_kernel_built", lambda kernel, release=None: False)
    monkeypatch.setattr(native_build, "has_header", lambda name: name != "libaio.h")
    monkeypatch.setattr(native_build, "find_compiler", lambda: "g++")
    trained = method.create("zero-infinity-nvme", {})
    assert trained.to_build() is None and "apt-get install libaio-dev" in (trained.missing("sim") or "")
    assert method.create("zenflow", {}).to_build()


def test_headers_are_found_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_kernel.h").touch()
    assert not native_build.has_header("some_kernel.h")
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}")
    assert native_build.has_header("some_kernel.h")


def test_a_build_that_failed_is_not_tried_again_in_the_same_call(tmp_path: Path) -> None:
    folder = write_compiling(tmp_path, f"open({str(tmp_path / 'tried')!r}, 'a').write('x')")
    events: list[str] = []
    for _ in range(2):
        prepare(Job("compiling", TINY), tmp_path, (folder,), lambda event: events.append(event["event"]))
    assert (tmp_path / "tried").read_text() == "x" and events == ["build", "warning"]


def test_what_another_release_needs_under_the_same_name_is_built_too(tmp_path: Path) -> None:
    lines = f"open({str(tmp_path / 'tried')!r}, 'a').write(self.release)"
    folder = write_compiling(tmp_path, lines)
    for release in ("0.17.5", "0.17.6", "0.17.6"):
        prepare(Job("compiling", TINY, {"release": release}), tmp_path, (folder,), lambda event: None)
    assert (tmp_path / "tried").read_text() == "0.17.50.17.6"


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_the_demo_shows_all_and_the_notebook_shows_it_again(
    tmp_path: Path, compiled_sim: None, read_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginning with the quick one, whose runs are not made again. Its runs end as their plans foretell, without
    training: tests/core/test_method.py trains every method, tests/papers/figures/test_case.py a case of this profile.
    """
    monkeypatch.setattr("harness.jobs.sweep.launch", records.launch)
    quick = run("demo", "--quick", "--results", tmp_path)
    assert quick.returncode == 0, quick.stdout + quick.stderr
    assert {path.stem for path in tmp_path.glob("figures/*.png")} == {
        f"case{number}_demo" for number in (3, 4, 5)
    }
    before = read_all(tmp_path)[0]
    assert {record.job.method for record in before.values()} == {"l2l", "stronghold", "resident"}
    done = run("demo", "--results", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    after = read_all(tmp_path)[0]
    assert before.keys() < after.keys() and len({record.key for record in after.values()}) == len(after)
    without = set(re.findall(r"^left out: (\S+):", done.stderr, re.MULTILINE))  # not built, when it began
    assert without <= {"superoffload", "zenflow", "zero-infinity-nvme"}
    assert {record.job.method for record in after.values()} == set(method.names()) - without
    for number in case.numbers_of_all():
        assert (tmp_path / "figures" / f"case{number}_demo.png").exists()
    assert (tmp_path / "report/index.html").exists()
    # What is recorded needs no run: the notebook shows it all at once.
    logs = set(tmp_path.glob("log_*"))
    outputs = executed(tmp_path)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == len(case.numbers_of_all())
    assert "NOT TESTED: " in "".join(output.get("text", "") for output in outputs)
    assert set(tmp_path.glob("log_*")) == logs
