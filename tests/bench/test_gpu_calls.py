"""Calls for a borrowed GPU: the door takes their commands, they go on where they stopped, their archive is whole."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner

from bench import gpu, gpu_facts, gpu_results
from bench.gpu import GpuCall, GpuStep
from cli.main import door
from harness.base.checkout import ROOT
from harness.core.job import GIB, Budget, Job, Workload
from harness.core.record import read_all
from harness.devices import machine, room
from methods.streaming.placement import calibrate
from tests.support import cli, records, short_calibration
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_gpu import FakeGpu
from tests.support.until import until

CUDA = gpu.cuda(128 * GIB, 139 * GIB)
PYTHON = sys.executable


ENDLESS = "import signal; signal.pause()"


def step(title: str, code: str = "", seconds: float = 60, files: tuple[Path, ...] = ()) -> GpuStep:
    return GpuStep(title, seconds, (PYTHON, "-c", code), files)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    return tmp_path / "results" / "gpu"


def call(results: Path, limit_seconds: float = 120) -> GpuCall:
    return GpuCall(results, results.parent, limit_seconds)


def words(found: GpuStep, option: str) -> str:
    return found.command[len(found.command) - 1 - found.command[::-1].index(option) + 1]


@pytest.fixture(params=[CUDA, gpu.DEMO], ids=["cuda", "demo"])
def steps(request: pytest.FixtureRequest, results: Path) -> list[GpuStep]:
    return gpu.steps(request.param, results)


def test_the_door_takes_every_command(steps: list[GpuStep]) -> None:
    verbs = [one.command[3:] for one in steps if one.command[1:3] == ("-m", "harness")]
    assert len(verbs) >= 20
    for verb, *rest in verbs:
        command: Any = door.commands[verb]
        command.make_context(verb, list(rest))


def test_titles_tell_steps_apart(steps: list[GpuStep]) -> None:
    assert len({one.title for one in steps}) == len(steps)


def test_each_step_tells_the_code_that_its_result_is_of(steps: list[GpuStep]) -> None:
    assert all(one.files and all(file.is_file() for file in one.files) for one in steps)
    (four,) = (one for one in steps if one.title.startswith("four models,") and "off" not in one.command)
    assert [file.stem for file in four.files] == ["hydra", "resident"]


def test_the_headline_comes_before_what_is_deeper_and_the_reference_is_measured_twice_before_both() -> None:
    depths = [int(words(one, "-l")) for one in gpu.steps(CUDA, ROOT) if "-l" in one.command]
    first, headline = depths.index(24), [depths.index(depth) for depth in (48, 32, 78)]
    assert depths[first : first + 2] == [24, 24] and first < min(headline) and headline == sorted(headline)


def test_the_largest_model_is_larger_than_the_whole_device() -> None:
    (beyond,) = (one for one in gpu.steps(CUDA, ROOT) if one.title.startswith("beyond the whole device"))
    layer = Workload(hidden_size=int(words(beyond, "-h")))
    assert int(words(beyond, "-l")) * 16 * layer.layer_params == pytest.approx(139 * GIB * 1.25, rel=0.02)
    assert "--device-memory" not in beyond.command


def test_a_step_in_bf16_is_timed_20_times_beyond_the_clocks_rise() -> None:
    timed = {
        words(one, "--dtype"): int(words(one, "--steps")) - int(words(one, "--warmup"))
        for one in gpu.steps(CUDA, ROOT)
        if "--steps" in one.command
    }
    assert timed == {"bf16": 20, "fp32": 5}
    assert {words(one, "--dtype") for one in gpu.steps(CUDA, ROOT) if "--calibrate" in one.command} == {
        "bf16",
        "fp32",
    }


def test_every_job_on_a_gpu_has_a_limit_and_a_budget_of_the_host() -> None:
    jobs = [one for one in gpu.steps(CUDA, ROOT) if one.command[3:4] == ("run",)]
    assert jobs and all(
        words(one, "--host-memory") == "90GiB" and words(one, "--timeout") == "400" for one in jobs
    )


def test_a_machine_with_less_memory_has_smaller_budgets() -> None:
    assert "--host-memory 56GiB" in gpu.cuda(64 * GIB, 16 * GIB).job


@pytest.mark.parametrize("card_gib", [16, 24, 32, 40, 80])
def test_no_step_asks_for_more_than_the_card_has(card_gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 40 GiB or more is capped at the published 32."""
    FakeGpu(card_gib * GIB, 450 * 2**20, 500 * 2**20).install_nvml(monkeypatch)
    scale = gpu.cuda(128 * GIB, machine.gpu()["gpu_bytes"])
    asked = int(scale.capped.removeprefix("--device-memory ").removesuffix("GiB"))
    room.check_budget(Budget(asked * GIB), "cuda")
    assert asked == 32 or card_gib < 40


def test_a_done_step_is_done_again_only_if_its_own_code_has_changed(tmp_path: Path, results: Path) -> None:
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    for file in (mine, other):
        file.write_text("x = 1")
    ran = results / "ran"
    one = step("one", f"open({str(ran)!r}, 'a').write('x')", files=(mine,))

    def again() -> str:
        gpu._hash.cache_clear()  # as a new process
        made = call(results)
        made.run(made.left([one]))
        return ran.read_text()

    assert again() == again() == "x"
    other.write_text("x = 2")
    assert again() == "x"
    mine.write_text("x = 2")
    assert again() == "xx"


@pytest.mark.parametrize("what", ["gpu", "pydantic"])
def test_what_another_machine_or_other_packages_have_shown_is_shown_again(
    results: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    one = step("one")
    call(results).run([one])
    assert call(results).left([one]) == []
    if what == "gpu":
        FakeGpu(32 * GIB, 0, 0).install_nvml(monkeypatch)
    else:
        monkeypatch.setattr(gpu, "version", lambda package: "another")
    assert call(results).left([one]) == [one]


def test_a_step_that_always_needs_too_long_holds_up_no_other(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, quick = step("slow", ENDLESS, seconds=0.5), step("quick")
    call(results).run([slow])
    made = call(results)
    assert made.tried["slow"]["code"] is None
    made.run(made.left([slow, quick]))
    told = capsys.readouterr().out
    assert told.index("quick: done") < told.rindex("slow: ended")


def test_a_step_that_the_calls_end_cuts_off_keeps_its_place(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "ended", lambda command, output, seconds: None)
    call(results, gpu.ENDING_SECONDS + gpu.LEAST_SECONDS + 1e4).run([step("cut", seconds=1e5)])
    assert call(results).tried["cut"] | {"seconds": 0, "source": ""} == {
        "code": None,
        "seconds": 0,
        "times": 0,
        "source": "",
    }


def test_a_call_ends_within_its_limit(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps get what is left of it, less the last one's grace and the archive's time."""
    limits: list[float] = []
    monkeypatch.setattr(gpu, "ended", lambda command, output, seconds: limits.append(seconds))
    call(results, 1e6).run([step("long", seconds=1e9)])
    assert 0 < limits[0] <= 1e6 - gpu.ENDING_SECONDS and gpu.ENDING_SECONDS > gpu.GRACE_SECONDS


def test_a_step_that_ignores_an_interrupt_is_killed_after_its_grace(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = results / "deaf"
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); open({str(deaf)!r}, 'w'); signal.pause()"
    monkeypatch.setattr(gpu, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(gpu.subprocess, "Popen", over_once(deaf.exists))
    assert gpu.ended((PYTHON, "-c", code), subprocess.DEVNULL, 60) is None


def over_once(condition: Callable[[], bool]) -> type[subprocess.Popen]:
    """A process whose limit is over once the condition is met, and not before."""

    class Over(subprocess.Popen):
        limits = iter((True,))

        def wait(self, timeout: float | None = None) -> int:
            if next(self.limits, False):
                until(condition)
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            return super().wait(timeout)

    return Over


def test_an_end_that_another_try_may_change_is_no_result(results: Path) -> None:
    """Out of memory and a failed gate are; a crash, a failed test, a missing package are not."""
    made = call(results)
    ends = [step(f"ends with {code}", f"raise SystemExit({code})") for code in (0, 4, 5, 1, 2, 3, 6, 7, 130)]
    made.run(ends)
    assert made.left(ends) == ends[3:]


def test_tests_that_pytest_could_not_begin_are_left(results: Path) -> None:
    """Its exit codes 4 and 5 are the harness's for out of memory and a failed gate."""
    made = call(results)
    steps = [step(f"tests {code}", f"raise SystemExit({code})")._replace(results=(0,)) for code in (0, 4, 5)]
    made.run(steps)
    assert made.left(steps) == steps[1:]
    assert next(each for each in gpu.steps(gpu.DEMO, results) if each.title == "tests").results == (0,)


def test_an_ended_step_leaves_no_process(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = results / "pid"
    command = ("sh", "-c", f"sleep infinity & echo $! > {file}.part; mv {file}.part {file}; wait")
    monkeypatch.setattr(gpu.subprocess, "Popen", over_once(file.exists))
    assert gpu.ended(command, subprocess.DEVNULL, 60) is None
    pid = int(file.read_text())
    until(lambda: not psutil.pid_exists(pid))  # an ended orphan is there until its new parent looks


def test_without_time_nothing_is_begun(results: Path) -> None:
    made = call(results, limit_seconds=gpu.ENDING_SECONDS + gpu.LEAST_SECONDS - 1)
    made.run([step("late")])
    assert not made.tried


def test_the_verdict_names_what_is_left_what_went_wrong_and_each_run(results: Path) -> None:
    made = call(results)
    (results / "facts.json").write_text(json.dumps({"launches": {"seconds": 2e-6}}))
    bad, late = step("bad", "raise SystemExit(4)"), step("late")
    made.run([bad])
    job = Job("stronghold", Workload(num_layers=48), steps=6)
    run = records.record(
        job, 2.0, predicted={"step_seconds": 1.5, "device": {"weights": 75}}, peaks={"device_allocated": 100}
    )
    records.write(results, run)
    told = "\n".join(made.verdict([bad, late]))
    assert "late: not begun" in told and "bad: exit code 4" in told and "launches" in told
    assert "2.000 s (0.75 planned), device 100 bytes (0.75 planned)" in told


@pytest.mark.parametrize(("second", "told"), [(2.0, "2 runs, the same bits"), (2.5, "2 runs, other bits")])
def test_the_verdict_tells_if_two_runs_of_a_job_had_the_same_bits(
    results: Path, second: float, told: str
) -> None:
    records.write(
        results, *(records.record(Job("resident", Workload()), losses=[loss] * 20) for loss in (2.0, second))
    )
    assert told in call(results).verdict([])[-1]


def test_one_step_can_be_asked_for_by_its_title(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.signal, "signal", lambda kind, handler: None)
    monkeypatch.delenv("OUT", raising=False)
    ran = tmp_path / "ran"
    listed = [step(title, f"open({str(ran)!r}, 'a').write({title!r})") for title in ("one", "two")]
    monkeypatch.setattr(gpu, "steps", lambda scale, results: listed)
    for arguments, told in ((["--only", "two"], "two"), (["--only", "two"], "twotwo"), ([], "twotwoone")):
        CliRunner().invoke(gpu.main, arguments, catch_exceptions=False)
        assert ran.read_text() == told
    refused = CliRunner().invoke(gpu.main, ["--only", "three"])
    assert refused.exit_code == 2 and "got three; try one of one; two" in " ".join(refused.output.split())


def test_without_a_package_that_records_need_nothing_is_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.signal, "signal", lambda kind, handler: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = CliRunner().invoke(gpu.main, [])
    assert refused.exit_code == 2 and "expected pydantic" in refused.output and not list(tmp_path.iterdir())


@pytest.fixture
def measured(results: Path) -> Path:
    """A folder of results, in a tree with a calibration and a kernel."""
    tree = results.parents[1]
    for path, size in (
        (results / "log_a.json", 100),
        (results / "steps" / "one.txt", 100),
        (results / "trace-a.json", 3000),
        (results / "figures" / "large.png", 2000),
        (tree / "results" / "calibration.json", 100),
        (tree / ".venv" / "adam" / "adam-1.so", 100),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return results


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_archive_puts_back_what_it_took(measured: Path, tmp_path: Path) -> None:
    taken = contents(tmp_path)
    assert gpu_results.pack(measured, tmp_path / "out") == []
    assert gpu_results.unpack(tmp_path / "out" / "gpu.tar.gz", tmp_path / "again") == 6
    assert contents(tmp_path / "again") == taken


def test_the_archive_keeps_what_is_there(measured: Path, tmp_path: Path) -> None:
    gpu_results.pack(measured, tmp_path)
    (measured / "log_a.json").write_text("newer")
    assert gpu_results.unpack(tmp_path / "gpu.tar.gz", tmp_path) == 0
    assert (measured / "log_a.json").read_text() == "newer"


@pytest.mark.parametrize(("most", "num_left"), [(4500, 1), (1700, 2)])
def test_a_full_archive_leaves_traces_first(measured: Path, tmp_path: Path, most: int, num_left: int) -> None:
    names = ["results/gpu/trace-a.json", "results/gpu/figures/large.png"]
    assert gpu_results.pack(measured, tmp_path, most) == names[:num_left]
    assert (tmp_path / "gpu.tar.gz").stat().st_size <= most


@pytest.mark.parametrize("name", ["../outside", "results/../methods/a.py", "/etc/outside", "methods/file.py"])
def test_a_strangers_archive_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with tarfile.open(tmp_path / "gpu.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "file", arcname=name)
    with pytest.raises(ValueError, match=r"expected an archive that bench/gpu\.py wrote"):
        gpu_results.unpack(tmp_path / "gpu.tar.gz", tmp_path / "tree")


def test_a_link_in_an_archive_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with tarfile.open(tmp_path / "gpu.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "link", arcname="results/link")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        gpu_results.unpack(tmp_path / "gpu.tar.gz", tmp_path / "tree")


def test_a_broken_archive_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gpu.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        gpu_results.unpack(tmp_path / "gpu.tar.gz", tmp_path)


def door_call(tmp_path: Path, *words: str, **environment: str) -> list[str]:
    """The words and the variables with which bench/gpu.sh starts Python, for each start a line."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\necho "$@ | $PYTHONPATH | $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"\n')
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
    (told,) = door_call(tmp_path, "x", "--limit", "545", GLOO_SOCKET_IFNAME="eth1")
    assert told == f"-m bench.gpu x --limit 545 | {ROOT}:/theirs | lo eth1"


def test_the_door_installs_wheels_where_there_are_some_without_a_network(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_text("")
    installs, calls = door_call(tmp_path)
    folder = installs.split("--target ")[1].split()[0]
    assert "--no-index" in installs and "--no-deps" in installs and installs.split(" | ")[0].endswith("a.whl")
    assert calls == f"-m bench.gpu | {ROOT}:{folder}:/theirs | lo lo" and not Path(folder).exists()


def test_wheels_are_those_of_the_lock(tmp_path: Path) -> None:
    """DeepSpeed from its source, the others for the other machine's Python."""
    (tmp_path / "old.whl").write_text("")
    built, fetched = door_call(tmp_path, "--wheels", str(tmp_path), "rich")
    assert " wheel " in built and "deepspeed==0.19.8" in built and not (tmp_path / "old.whl").exists()
    lock = (ROOT / "requirements" / "run.txt").read_text()
    asked = [word for word in fetched.split() if "==" in word]
    assert (
        len(asked) == 8 and all(f"{each} " in lock for each in asked) and "--python-version 3.12" in fetched
    )
    with pytest.raises(subprocess.CalledProcessError):
        door_call(tmp_path, "--wheels", str(tmp_path), "apex")


def test_a_fact_that_fails_is_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> None:
        raise RuntimeError("no driver\nand more")

    def tell(device: str) -> float:
        return 1.5

    monkeypatch.setattr(gpu_facts, "FACTS", (fail, tell))
    gpu_facts.main.callback(tmp_path / "facts.json", "cpu")  # type: ignore[misc]
    found = json.loads((tmp_path / "facts.json").read_text())
    assert found["fail"] == {"error": "RuntimeError: no driver"} and found["tell"] == 1.5


def test_the_facts_of_a_gpu_are_measured_by_its_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the messages, for which this torch has no NCCL."""
    gpu_of, cuda = FakeGpu(32 * GIB, 0, 500 * 2**20), FakeCuda(1).install(monkeypatch)
    gpu_of.install_nvml(monkeypatch)
    for name, function in gpu_of.functions().items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(gpu_facts, "PINNED_BYTES", {"cuda": 2**20})
    monkeypatch.setattr(gpu_facts, "SHAPES", {"cuda": (1, 4, 64, 32)})
    monkeypatch.setattr(calibrate, "REPEATED_SECONDS", 0.01)
    with cuda.running():
        gpu_facts.main.callback(tmp_path / "facts.json", "cuda")  # type: ignore[misc]
    found = json.loads((tmp_path / "facts.json").read_text())
    assert [name for name, fact in found.items() if "error" in fact] == ["messages"]
    assert found["memory"]["cuda_total"] == 32 * GIB and found["memory"]["is_expandable"]
    assert found["products"]["tf32_by"] == [] and float(found["products"]["relative_error"]) < 1e-5
    assert list(cuda.broken) == []


def in_process(command: Sequence[str], output: Any, seconds: float) -> int:
    """In place of gpu.ended(): a call of the harness is made by this process, other commands by their own."""
    if command[1:3] != ("-m", "harness"):
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    done = cli.run(*command[3:])
    output.write(done.stdout + done.stderr)
    return done.returncode


@pytest.fixture
def demo_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo leaves its results, its archive and what it calibrates, beside links to this project's code."""
    for name in ("bench", "methods", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.signal, "signal", lambda kind, handler: None)
    monkeypatch.setattr(machine, "CALIBRATION", tmp_path / "results" / "calibration.json")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


@pytest.mark.heavy
@pytest.mark.probe
@pytest.mark.timeout(1200)
def test_the_demo_does_every_step_and_goes_on_from_its_archive(
    demo_tree: Path, compiled_sim: None, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainings are forks of a process that has torch, its calibrations are short. Afterwards the archive alone
    answers the same call."""
    listed, steps = gpu.steps(gpu.DEMO, demo_tree / "results" / "gpu-demo"), gpu.steps
    (tests,) = (one for one in listed if one.title == "tests")
    command = (word.replace(str(demo_tree), str(ROOT)) for word in tests.command)
    chosen = tests._replace(command=(*command, "--collect-only"))  # they train for long
    monkeypatch.setattr(
        gpu, "steps", lambda *of: [chosen if one.title == "tests" else one for one in steps(*of)]
    )
    monkeypatch.setattr(gpu, "ended", in_process)
    short_calibration.shorten(monkeypatch)
    monkeypatch.setattr("cli.doctor.ask", short_calibration.ask)
    done = CliRunner().invoke(gpu.main, ["gpu-demo", "--demo", "--limit", "1e6"], catch_exceptions=False)
    assert done.exit_code == 0, done.output[-4000:]
    left, _, rest = done.output.partition("left:\n")[2].partition("== refused or failed:\n")
    refused = [line.rpartition(", ")[0] for line in rest.partition("== runs")[0].splitlines()]
    assert left == "" and refused == ["resident, 6 layers", "zero-offload, 6 layers", "resident, 6 layers"]
    records = read_all(demo_tree / "results" / "gpu-demo")[0].values()
    probed = {record.job.method for record in records if record.gate.evidence.get("probe")}
    assert probed == {*gpu.DEMO.methods}
    archive = demo_tree / "out" / "gpu-demo.tar.gz"
    assert archive.stat().st_size < gpu_results.MOST_BYTES
    shutil.rmtree(demo_tree / "results")
    monkeypatch.setattr(gpu, "ended", None)
    again = CliRunner().invoke(gpu.main, ["gpu-demo", "--demo"], catch_exceptions=False)
    assert again.exit_code == 0 and "files put back" in again.output, again.output
