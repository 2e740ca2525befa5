"""Calls for a borrowed GPU: the door takes their commands, they go on where they stopped, their archive is whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import torch

from bench import gpu, gpu_facts, gpu_results, gpu_wheels
from bench.gpu import GpuCall, GpuStep, Steps
from harness.base.checkout import ROOT
from harness.cli.main import door
from harness.core.job import GIB, Job, Workload
from harness.core.record import read_all
from methods.streaming import calibrate
from tests.support import records
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_gpu import FakeGpu

CUDA = gpu.cuda(128 * GIB)
PYTHON = sys.executable


def step(title: str, code: str = "", seconds: float = 60, needs: int = 0) -> GpuStep:
    return GpuStep(title, (PYTHON, "-c", code), seconds, needs)


def call(folder: Path, limit_seconds: float = 120) -> GpuCall:
    return GpuCall(folder, folder / "out", limit_seconds)


def words(found: GpuStep, option: str) -> str:
    return found.command[found.command.index(option) + 1]


@pytest.fixture(params=[CUDA, gpu.DEMO], ids=["cuda", "demo"])
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> list[GpuStep]:
    made = Steps(request.param, tmp_path)
    return [one for number in (1, 2, 3) for one in made.of(number)]


def test_the_door_takes_every_command(steps: list[GpuStep], monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = [one.command[3:] for one in steps if one.command[1:3] == ("-m", "harness")]
    assert len(verbs) >= 20
    for verb, *rest in verbs:
        command: Any = door.commands[verb]
        while isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(verb, list(rest))


def test_titles_tell_steps_apart(steps: list[GpuStep]) -> None:
    assert len({one.title for one in steps}) == len(steps)


def test_nothing_deeper_than_48_layers_is_tried_before_those_have_trained() -> None:
    made = Steps(CUDA, Path("results"))
    deep = [
        one for number in (1, 2, 3) for one in made.of(number) if "-l" in one.command and int(words(one, "-l")) > 48
    ]
    assert len(deep) == 5 and {one.needs for one in deep} == {48}


def test_every_job_on_a_gpu_has_a_limit_and_a_budget_of_the_host() -> None:
    made = Steps(CUDA, Path("results"))
    jobs = [one for number in (1, 2, 3) for one in made.of(number) if "-m" in one.command[3:]]
    jobs = [one for one in jobs if one.command[2] == "harness"]
    assert jobs and all(words(one, "--host-memory") == "90GiB" and words(one, "--timeout") == "400" for one in jobs)


def test_a_machine_with_less_memory_has_smaller_budgets() -> None:
    assert "56GiB" in gpu.cuda(64 * GIB).budget


def test_a_done_step_is_not_done_again_unless_the_source_has_changed(tmp_path: Path) -> None:
    one = step("one", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
    for _ in range(2):
        call(tmp_path).run([one])
    assert (tmp_path / "ran").read_text() == "x"
    changed = call(tmp_path)
    changed.source = "another"
    changed.run([one])
    assert (tmp_path / "ran").read_text() == "xx"


def test_what_another_machine_has_shown_is_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = step("one")
    call(tmp_path).run([one])
    FakeGpu(32 * GIB, 0, 0).install_nvml(monkeypatch)
    assert not call(tmp_path).is_done(one)


def test_a_step_that_always_needs_too_long_holds_up_no_other(tmp_path: Path) -> None:
    slow, quick = step("slow", "import time; time.sleep(60)", seconds=0.5), step("quick")
    first = call(tmp_path)
    first.run([slow])
    assert first.tried["slow"].code is None
    assert [one.title for one in call(tmp_path).ordered([slow, quick])] == ["quick", "slow"]


def test_a_failure_is_a_result_and_an_interrupted_step_is_not(tmp_path: Path) -> None:
    made = call(tmp_path)
    ends = [step(f"ends with {code}", f"raise SystemExit({code})") for code in (0, 1, 3, 4, 5, 7, 2, 6, 130)]
    made.run(ends)
    assert [made.is_done(one) for one in ends] == [True] * 6 + [False] * 3


def test_an_ended_step_leaves_no_process(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    made = call(tmp_path)
    made.run([step("parent", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", seconds=3)])
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)  # an ended orphan is there until its new parent looks
    assert not psutil.pid_exists(pid)


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    made = call(tmp_path, limit_seconds=gpu.ENDING_SECONDS + 1)
    made.run([step("late")])
    assert not made.tried


def test_a_step_waits_for_the_depth_that_it_needs(tmp_path: Path) -> None:
    made, deep = call(tmp_path), step("deep", needs=48)
    made.run([deep])
    assert not made.tried
    records.write(tmp_path, records.record(Job("stronghold", Workload(num_layers=48))))
    made.run([deep])
    assert made.is_done(deep)


def test_the_verdict_names_what_is_left_what_went_wrong_and_each_run(tmp_path: Path) -> None:
    made = call(tmp_path)
    (tmp_path / "facts.json").write_text(json.dumps({"launches": {"seconds": 2e-6}}))
    bad, late = step("bad", "raise SystemExit(1)"), step("late")
    made.run([bad])
    job = Job("stronghold", Workload(num_layers=48), steps=6)
    run = records.record(
        job, 2.0, predicted={"step_seconds": 1.5, "device": {"weights": 75}}, peaks={"device_allocated": 100}
    )
    records.write(tmp_path, run)
    told = "\n".join(gpu.verdict(made, [bad, late]))
    assert "late: not begun" in told and "bad: exit code 1" in told and "launches" in told
    assert "2.000 s (0.75 planned), device 100 bytes (0.75 planned)" in told


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Path, Path]:
    """A folder of results, and a tree with a calibration and a kernel."""
    results, tree = tmp_path / "results" / "gpu", tmp_path / "tree"
    for path, size in (
        (results / "log_a.json", 100), (results / "steps" / "one.txt", 100), (results / "trace-a.json", 3000),
        (results / "figures" / "large.png", 2000), (tree / "results" / "calibration.json", 100),
        (tree / ".venv" / "adam" / "adam-1.so", 100),
    ):  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return results, tree


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_archive_puts_back_what_it_took(measured: tuple[Path, Path], tmp_path: Path) -> None:
    results, tree = measured
    assert gpu_results.pack(results, tmp_path / "out", root=tree) == []
    again = tmp_path / "again"
    assert gpu_results.unpack(tmp_path / "out" / "gpu.tar.gz", again / "gpu", again / "tree") == 6
    assert (contents(again / "gpu"), contents(again / "tree")) == (contents(results), contents(tree))


def test_the_archive_keeps_what_is_there(measured: tuple[Path, Path], tmp_path: Path) -> None:
    results, tree = measured
    gpu_results.pack(results, tmp_path, root=tree)
    (results / "log_a.json").write_text("newer")
    assert gpu_results.unpack(tmp_path / "gpu.tar.gz", results, tree) == 0
    assert (results / "log_a.json").read_text() == "newer"


@pytest.mark.parametrize(("most", "left"), [(4500, ["results/trace-a.json"]),
                                            (1500, ["results/trace-a.json", "results/figures/large.png"])])  # fmt: skip
def test_a_full_archive_leaves_traces_first(
    measured: tuple[Path, Path], tmp_path: Path, most: int, left: list[str]
) -> None:
    results, tree = measured
    assert gpu_results.pack(results, tmp_path, most, tree) == left
    assert (tmp_path / "gpu.tar.gz").stat().st_size <= most


@pytest.mark.parametrize("name", ["../outside", "tree/../outside", "/etc/outside", "other/file"])
def test_a_strangers_archive_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with tarfile.open(tmp_path / "gpu.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "file", arcname=name)
    with pytest.raises(ValueError, match="is no archive of results"):
        gpu_results.unpack(tmp_path / "gpu.tar.gz", tmp_path / "results" / "gpu", tmp_path / "tree")


def test_a_broken_archive_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gpu.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        gpu_results.unpack(tmp_path / "gpu.tar.gz", tmp_path)


def test_wheels_are_those_of_the_constraints() -> None:
    assert "deepspeed==0.19.8" in gpu_wheels.pinned(("deepspeed",))
    assert len(gpu_wheels.pinned(gpu_wheels.NAMES)) == len(gpu_wheels.NAMES)
    with pytest.raises(ValueError, match="got apex"):
        gpu_wheels.pinned(("apex",))


def door_call(tmp_path: Path, *words: str, **environment: str) -> list[str]:
    """The words and the variables with which bench/gpu.sh starts Python, for each start a line."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\necho "$@ | $PYTHONPATH | $NCCL_SOCKET_IFNAME"\n')
    stub.chmod(0o755)
    given = {
        **os.environ,
        "PYTHON": str(stub),
        "PYTHONPATH": "/theirs",
        "WHEELS": str(tmp_path / "wheels"),
        **environment,
    }
    command = ["bash", str(ROOT / "bench" / "gpu.sh"), *words]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_door_keeps_the_callers_packages_and_speaks_to_itself(tmp_path: Path) -> None:
    (told,) = door_call(tmp_path, "2", "results/x")
    assert told == f"-m bench.gpu 2 results/x | {ROOT}:/theirs | lo"


def test_the_door_installs_wheels_where_there_are_some_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_text("")
    installs, calls = door_call(tmp_path, "1")
    folder = installs.split("--target ")[1].split()[0]
    assert "--no-index" in installs and "--no-deps" in installs and installs.split(" | ")[0].endswith("a.whl")
    assert calls == f"-m bench.gpu 1 | {ROOT}:{folder}:/theirs | lo" and not Path(folder).exists()


def test_a_fact_that_fails_is_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> None:
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(gpu_facts, "FACTS", {"first": (fail, ("cpu",)), "second": (lambda device: 1.5, ("cpu",))})
    gpu_facts.main.callback(tmp_path / "facts.json", "cpu")  # type: ignore[misc]
    found = json.loads((tmp_path / "facts.json").read_text())
    assert found["first"] == {"error": "RuntimeError: no driver"} and found["second"] == 1.5


def test_the_facts_of_a_gpu_are_measured_by_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the messages, for which this torch has no NCCL."""
    gpu_of, cuda = FakeGpu(32 * GIB, 0, 500 * 2**20), FakeCuda(1).install(monkeypatch)
    gpu_of.install_nvml(monkeypatch)
    for name, function in gpu_of.functions().items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(gpu_facts, "PINNED", {"cuda": (2**20,)})
    monkeypatch.setattr(gpu_facts, "SHAPES", {"cuda": (1, 4, 64, 32)})
    monkeypatch.setattr(calibrate, "COPY_BYTES", {"cuda": 2**20})
    monkeypatch.setattr(calibrate, "ENOUGH_SECONDS", 0.01)
    monkeypatch.setattr(gpu_facts, "GIB", 2**20)
    with cuda.running():
        gpu_facts.main.callback(tmp_path / "facts.json", "cuda")  # type: ignore[misc]
    found = json.loads((tmp_path / "facts.json").read_text())
    assert [name for name, fact in found.items() if "error" in fact] == ["messages"]
    assert found["memory"]["cuda_total"] == 32 * GIB and found["memory"]["is_expandable"]
    assert list(cuda.broken) == ["a copy that does not block, with host memory that is not page-locked"]


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_the_demo_does_every_step_and_goes_on_from_its_archive(tmp_path: Path) -> None:
    """In a copy of the tree, since it calibrates. Afterwards the archive alone answers the same call at once."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "results", "*_cache"))
    (tree / ".venv").symlink_to(ROOT / ".venv")
    command = ["bash", str(tree / "bench" / "gpu.sh"), "--demo"]
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}

    def done() -> tuple[str, float]:
        started = time.monotonic()
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
        return process.stdout, time.monotonic() - started

    told, seconds = done()
    assert seconds < 480 and "left:\n== went wrong:\n== runs" in told
    records = read_all(tree / "results" / "gpu-demo")[0].values()
    probed = [record.job.workload.num_layers for record in records if record.gate.evidence.get("probe")]
    assert probed == [*gpu.DEMO.headline]
    archive = tmp_path / "out" / "gpu-demo.tar.gz"
    assert archive.stat().st_size < gpu_results.MOST_BYTES
    shutil.rmtree(tree / "results")
    told, seconds = done()
    assert "files put back" in told and seconds < 60
