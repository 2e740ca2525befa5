"""Budgets and turns: what is refused up front, what is in force, what is left behind, whose turn it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from harness.base import cgroup
from harness.base.checkout import ROOT
from harness.core import failures
from harness.core.job import Budget, Job
from harness.core.record import read_all
from harness.devices import budgets, device_lock, machine, process_memory, room
from tests.support.cli import run
from tests.support.tiny import TINY, WORDS
from tests.support.until import until

MIB = 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--host-memory 64MiB", "the smallest budget is "), ("--host-memory 64TiB", "at most ")],
)
def test_a_budget_that_no_run_could_keep_is_one_line_and_exit_2(
    tmp_path: Path, arguments: str, message: str
) -> None:
    done = run(*WORDS, *arguments.split(), "--device", "cpu", "--results", str(tmp_path / "new"))
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.heavy
def test_the_smallest_budget_that_is_named_suffices_for_a_small_run(tmp_path: Path) -> None:
    refused = run(*WORDS, "--host-memory", "1MiB", "--device", "cpu")
    smallest = refused.stderr.rpartition(" ")[2].strip()
    done = run(
        *WORDS, "--host-memory", smallest, "--device", "cpu", "--steps", "3", "--results", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout
    (record,) = read_all(tmp_path)[0].values()
    assert record.host_peak_bytes <= int(smallest.removesuffix("MiB")) * MIB
    assert record.limits["host"].startswith("RLIMIT_DATA at ")


@pytest.mark.heavy
def test_two_devices_train_in_the_host_memory_that_their_plan_needs_and_the_record_says_no_more(
    make_memory_group: Callable[[int], cgroup.Group], tmp_path: Path
) -> None:
    """The pages that the devices' processes share count once."""
    make_memory_group(64 * MIB)  # skips where no group can be made
    arguments = "-m hydra -l 4 -h 128 --seq 256 -b 4 --heads 4 --devices 2 --device cpu".split()
    row = json.loads(run("plan", *arguments, "--json").stdout)
    needs = 2 * row["device_bytes"] + row["host_bytes"]
    budget = MIB + 2 * room.baseline_bytes("cpu") + needs * room.HEAP_PARTS // (room.HEAP_PARTS - 1)
    arguments += ["--steps", "3", "--no-probe", "--results", str(tmp_path)]
    done = run(*arguments, "--host-memory", f"{budget // MIB}MiB")
    assert done.returncode == 0, done.stdout
    (record,) = (record for record in read_all(tmp_path)[0].values() if record.job.method == "hydra")
    assert needs < record.host_peak_bytes <= budget


THREADS = """
import torch
from harness.core.job import Budget, Job
from harness.devices import budgets, process_memory
from tests.support.tiny import TINY

torch.set_num_threads(8)
budgets.enforce(Job("resident", TINY, budget=Budget(host_bytes=2**31), device="cpu"))
before = process_memory.process_bytes()["VmData"]
(torch.ones(256, 256) @ torch.ones(256, 256)).sum() + torch.ones(2**20).sum()
print(process_memory.process_bytes()["VmData"] - before)
"""


def test_stacks_of_the_threads_of_torch_do_not_count_in_a_budget() -> None:
    """Seven stacks of 8 MiB, mapped and hardly used, and a product's buffers."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 8 * MIB


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of locks that no other test uses. The clock of turns stands still."""
    now = time.time()
    clock = SimpleNamespace(time=lambda: now, strftime=time.strftime, localtime=time.localtime)
    monkeypatch.setattr(device_lock, "time", clock)
    monkeypatch.setenv("HARNESS_LOCKS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["harness-cpu.lock", "harness-cpu.queue", "harness-cpu.holders"])
@pytest.mark.parametrize(
    ("make", "got"),
    [
        (os.mkfifo, "another kind, of user"),
        (os.mkdir, "Is a directory"),
        (lambda path: os.symlink("own", path), "Too many"),
        (lambda path: os.link(path.with_name("own"), path), "one with 2 names, of user"),
    ],
    ids=["pipe", "folder", "link", "second-name"],
)
def test_what_is_no_file_of_locks_is_refused_and_not_waited_for(
    locks: Path, name: str, make, got: str
) -> None:
    (locks / "own").write_text("kept")
    make(locks / name)
    with (
        pytest.raises(ValueError, match=f"{name}: expected a regular file for a lock, got {got}"),
        ExitStack() as turns,
    ):
        turns.enter_context(device_lock.turn(Job("some", TINY), lambda event: None, is_timed=False))
    assert (locks / "own").read_text() == "kept"


def waiting(job: Job, order: list[str], lines: list[str], **terms) -> threading.Thread:
    """A thread that takes a turn once it may."""

    def second() -> None:
        with device_lock.turn(job, lambda event: lines.append(event["text"]), **terms):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    return thread


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_a_turn_is_waited_for_where_either_run_is_timed_and_its_holder_is_named(
    first: bool, second: bool, locks: Path
) -> None:
    job, lines, order = Job("some", TINY), [], []
    with device_lock.turn(job, lines.append, first, 100.0):
        thread = waiting(job, order, lines, is_timed=second)
        until(lambda: lines)
        assert device_lock.wait_seconds(job) == 100
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and device_lock.wait_seconds(job) == 0
    assert lines[0].startswith(
        f"waiting for the cpu device: process {os.getpid()} has it for some, 2 layers since "
    )
    assert lines[0].endswith(", about 100 s more")


def test_untimed_runs_share_a_device_and_know_it(locks: Path) -> None:
    job, lines = Job("some", TINY), []
    with device_lock.turn(job, lines.append, False) as first:
        assert not first.is_shared()
        with device_lock.turn(job, lines.append, False) as second:
            assert second.is_shared()
        assert first.is_shared() and lines == []
    with device_lock.turn(job, lines.append, False) as third:
        assert not third.is_shared()


def test_a_gpu_is_held_alone_by_untimed_runs_too(locks: Path) -> None:
    """Its memory is not divided between them."""
    job, lines, order = Job("some", TINY, device="cuda"), [], []
    with device_lock.turn(job, lines.append, False):
        thread = waiting(job, order, lines, is_timed=False)
        until(lambda: lines)
        assert not order
    thread.join()


def with_gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """NVML's answers on a machine with these GPUs."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(uuids))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", uuids.__getitem__)


@pytest.mark.parametrize("options", [{"world_size": 2}, {"num_devices": 2}])
def test_a_job_of_two_gpus_holds_both(locks: Path, monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    with_gpus(monkeypatch, "GPU-b", "GPU-a", "GPU-c")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with device_lock.turn(Job("some", TINY, options, device="cuda"), print, True, 100.0) as held:
        assert len(held.descriptors) == 2
        for name, is_held in (("1", True), ("GPU-b", True), ("2", False)):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
            assert (device_lock.wait_seconds(Job("some", TINY, device="cuda")) > 0) is is_held


def test_jobs_take_several_gpus_in_one_order(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of two could wait for the other."""
    with_gpus(monkeypatch, "GPU-b", "GPU-a")
    orders = []
    for visible in ("0,1", "1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with device_lock.turn(Job("some", TINY, {"world_size": 2}, device="cuda"), print) as held:
            orders.append([device.path.name for device in held.devices])
    assert orders == [["harness-GPU-a.lock", "harness-GPU-b.lock"]] * 2


def test_untimed_runs_that_come_later_do_not_pass_a_timed_one(locks: Path) -> None:
    job, lines, order = Job("some", TINY), [], []
    with device_lock.turn(job, lines.append, False):
        timed = waiting(job, order, lines)
        until(lambda: lines)
        late = waiting(job, later := [], lines, is_timed=False)
        until(lambda: len(lines) == 2)  # it waits, too
        assert not order and not later
    timed.join()
    late.join()
    assert order and later


def odd_list(**odd: object) -> str:
    """A list that has such a holder."""
    return json.dumps({"holders": [device_lock._holder_entry(1, "some", 1.0) | odd], "entered": 1})


ODD_LISTS = [
    "",
    "{",
    "[]",
    '{"holders": [1], "entered": 1}',
    '{"holders": [], "entered": "x"}',
    odd_list(pid=2**63 - 1),
    odd_list(pid=-1),
    odd_list(since=1e300),
    odd_list(since="x"),
    odd_list(foreseen_seconds=1e300),
    odd_list(job=2000 * "x"),
    odd_list(number=None),
]


@pytest.mark.parametrize("text", ODD_LISTS)
def test_any_list_of_holders_is_read(locks: Path, text: str) -> None:
    (locks / "harness-cpu.holders").write_text(text)
    assert device_lock.wait_seconds(Job("some", TINY)) == 0
    assert device_lock.holders_text(locks / "harness-cpu.lock").startswith("another process has it")
    with device_lock.turn(Job("some", TINY), print, False) as held:
        assert not held.is_shared()


def test_callers_with_temporary_folders_of_their_own_share_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_LOCKS", str(tmp_path))
    before = device_lock.folder()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert device_lock.folder() == before == tmp_path
    monkeypatch.delenv("HARNESS_LOCKS")
    assert device_lock.folder() == Path("/tmp")


def test_any_death_ends_a_turn() -> None:
    code = """
import os
from harness.devices.device_lock import turn
from harness.core.job import *
with turn(Job("some", Workload()), print):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -9
    lines: list = []
    with device_lock.turn(Job("some", TINY), lines.append):
        assert lines == []


@pytest.mark.heavy
def test_a_reader_that_goes_away_interrupts_the_run(tmp_path: Path) -> None:
    arguments = " ".join([*WORDS, "--steps", "20000", "--results", str(tmp_path)])
    done = subprocess.run(
        f"{sys.executable} -m harness {arguments} | head -1",
        cwd=ROOT,
        shell=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1
    (record,) = read_all(tmp_path)[0].values()
    assert (record.status, record.evidence["class"]) == ("interrupted", "interrupt") and record.losses


@pytest.mark.heavy
def test_what_went_on_beside_a_run_is_on_record(tmp_path: Path) -> None:
    assert run(*WORDS, "--steps", "3", "--results", str(tmp_path)).returncode == 0
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["machine"]["load_average"] >= 0


@pytest.mark.parametrize("visible", ["", "-1", "GPU-of-nobody"])
def test_a_gpu_that_is_not_visible_is_none(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine.gpu.cache_clear()
    assert machine.gpu() == {}
    machine.gpu.cache_clear()


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a stand-in for this process's entry in /proc tell these sizes, in MiB."""
    (tmp_path / str(os.getpid())).mkdir()
    monkeypatch.setattr(process_memory, "PROCESSES", tmp_path)

    def tell(**sizes: int) -> None:
        lines = [f"{name}:\t{size * 1024:8} kB" for name, size in sizes.items()]
        (tmp_path / str(os.getpid()) / "status").write_text(
            "\n".join(["Name:\tpython", *lines, "Threads:\t1"])
        )

    return tell


def test_a_kernel_that_tells_less_of_a_process_fails_no_run(kernel: Callable[..., None]) -> None:
    """gVisor's tells no RssAnon."""
    kernel(VmSize=900, VmRSS=300, VmData=500)
    job = Job("some", TINY, budget=Budget(host_bytes=2**30), device="cpu")
    assert budgets.enforce(job) == {"host": "planned, not enforced here ('RssAnon')"}
    assert budgets.lift(job) == {}


@pytest.mark.parametrize(
    ("anonymous", "shared", "is_refused"), [(900, 100, False), (700, 400, True), (300, 800, True)]
)
def test_page_locked_memory_beyond_the_budget_is_out_of_memory_without_a_memory_group(
    kernel: Callable[..., None], anonymous: int, shared: int, is_refused: bool
) -> None:
    """torch page-locks by cudaHostAlloc, in shared memory. Here 60 MiB of a package on a tmpfs are shared, too."""
    job = Job("some", TINY, budget=Budget(host_bytes=1000 * MIB), device="cuda")
    kernel(RssAnon=200, RssShmem=60)
    before = process_memory.process_bytes()
    kernel(RssAnon=anonymous, RssShmem=60 + shared)
    if not is_refused:
        return budgets.check_taken(job, before)
    with pytest.raises(MemoryError) as raised:
        budgets.check_taken(job, before)
    failure = failures.of_exception(raised.value, "drain", {"host_limit_bytes": 1000 * MIB})
    evidence = {"resource": "pinned", "in_use_bytes": (anonymous + shared) * MIB, "limit_bytes": 1000 * MIB}
    assert failure.status == "oom-host" and evidence.items() <= failure.evidence.items()


SHARES = """
import mmap
from dataclasses import dataclass

import torch

from harness.core.job import Plan
from harness.core.method import Method, Step, Trained


@dataclass(frozen=True)
class Shares(Method):
    def plan(self, workload, room):
        return Plan({})

    def train(self, workload, batches, device):
        shared = mmap.mmap(-1, 2**28)
        for _ in range(2**8):
            shared.write(bytes(2**20))
        for _ in batches:
            yield Step(torch.tensor(1.0))
        return Trained([])
"""


def test_a_method_that_hides_memory_from_its_limit_is_out_of_memory(tmp_path: Path) -> None:
    """In a process of its own, whose limit counts private memory alone."""
    (tmp_path / "shares.py").write_text(SHARES)
    code = (
        "import sys; from pathlib import Path; from harness.core.job import *; from harness.run import worker;"
        "from harness.devices import budgets, process_memory; import torch, tests.support.tiny as tiny;"
        "room = process_memory.process_bytes()['RssAnon'] + 2**27;"
        "job = Job('shares', tiny.TINY, budget=Budget(host_bytes=room), steps=2, warmup=0);"
        "print(worker.train_here(job, '', (Path(sys.argv[1]),), lambda event: None).reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert "out of pinned host memory at drain" in done.stdout, done.stdout + done.stderr


def test_limits_end_where_torch_knows_no_cuda() -> None:
    """A job that asks for CUDA of a torch that was built without it: the record tells that, not this."""
    import torch  # noqa: F401

    assert "device_free_bytes" not in budgets.lift(Job("resident", TINY, device="cuda"))
