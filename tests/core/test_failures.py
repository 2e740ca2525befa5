"""Ends of a run, each provoked in a process of its own, and what its record says: status, evidence, one line."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.base import cgroup
from harness.base.checkout import ROOT
from harness.core import failures
from harness.core.job import Budget, Job, Workload
from harness.core.method import Unavailable
from harness.core.record import Record, read_all
from harness.jobs.sweep import Sweep
from harness.plan import run_time
from harness.plan.fit import resolve
from harness.run.launch import launch
from tests.support import forks
from tests.support.cli import run
from tests.support.tiny import TINY, write_ending

MIB = 2**20


class Fate(NamedTuple):
    """What a method does after its first step, and what the record must say."""

    name: str
    lines: str
    status: str
    kind: str  # evidence["class"]
    resource: str
    text: str
    host_mib: int | None = None


def sim(memory: str) -> str:
    text = f"sim {memory} out of memory: tried to allocate 1048576 bytes, 15728640 of 16777216 bytes in use"
    return f"raise torch.OutOfMemoryError({text!r})"


NUMBERS = "step 1: asked for 1.0 MiB, 15.0 MiB of 16.0 MiB in use; "
# Shared memory is no data of the process: RLIMIT_DATA does not see it, the wall does.
FILL = "[pages.write(bytes(2**20)) for pages in [mmap.mmap(-1, 2**30)] for _ in range(1024)]"
THREADS = "import threading\nwhile True: threading.Thread(target=signal.pause, daemon=True).start()"
LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): {}
list(torch.utils.data.DataLoader(Data(), num_workers=1))
"""
WRAPPED = """
try:
    torch.empty(2**50)
except RuntimeError as error:
    raise RuntimeError("can not create optimizer"){}
"""
FALLBACK = """
try:
    import no_such_engine
except ImportError:
    raise ValueError("no fallback either")
"""
TRUNCATED = """
file = tempfile.TemporaryFile(); file.truncate(4096)
pages = mmap.mmap(file.fileno(), 4096); file.truncate(0); pages[0]
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)\nwhile True: time.sleep(0.1)"
KILLED_CHILD = "os.kill(os.getpid(), 9)"
ROWS = (
    Fate(
        "device",
        sim("device"),
        "oom-device",
        "allocator",
        "device",
        NUMBERS + "lower -l, -b, --seq or -w, or raise",
    ),
    Fate(
        "host-account",
        sim("host"),
        "oom-host",
        "allocator",
        "host",
        NUMBERS + "lower -l or -b, or raise --host-mem",
    ),
    Fate(
        "pinned",
        sim("pinned"),
        "oom-host",
        "allocator",
        "pinned",
        NUMBERS + "lower -l or raise --host-memory",
    ),
    Fate("torch-absurd", "torch.empty(2**50)", "oom-host", "allocator", "host", "asked for 4194304.0 GiB"),
    Fate(
        "numpy",
        "import numpy; numpy.empty(2**50)",
        "oom-host",
        "allocator",
        "host",
        "asked for 8388608.0 GiB",
    ),
    Fate("python", "bytearray(2**50)", "oom-host", "allocator", "host", "MemoryError"),
    Fate(
        "rlimit",
        "kept = []\nwhile True: kept.append(torch.ones(2**20))",
        "oom-host",
        "rlimit",
        "host",
        "of 320.0 MiB in use",
        320,
    ),
    Fate(
        "rlimit-python",
        "kept = []\nwhile True: kept.append(bytearray(2**20))",
        "oom-host",
        "rlimit",
        "host",
        "of 320.0 MiB in use",
        320,
    ),
    Fate("rlimit-threads", THREADS, "oom-host", "rlimit", "host", "of 320.0 MiB in use", 320),
    Fate(
        "no-threads",
        'raise RuntimeError("can\'t start new thread")',
        "crash",
        "exception",
        "",
        "can't start new thread at step 1",
    ),
    Fate("kernel-kill", FILL, "oom-host", "kernel-kill", "host", "of 320.0 MiB in use", 320),
    Fate(
        "loader-kernel-kill",
        LOADER.format(FILL),
        "oom-host",
        "kernel-kill",
        "host",
        "a process of this run",
        320,
    ),
    Fate("loader-killed", LOADER.format(KILLED_CHILD), "crash", "exception", "", "DataLoader worker"),
    Fate(
        "loader-memory-error",
        LOADER.format("return bytearray(2**50)"),
        "oom-host",
        "allocator",
        "host",
        "MemoryError",
    ),
    Fate(
        "bad-alloc",
        "ctypes.CDLL('libstdc++.so.6')._ZSt17__throw_bad_allocv()",
        "oom-host",
        "log",
        "host",
        "bad_alloc",
    ),
    Fate("wrapped", WRAPPED.format(""), "oom-host", "swallowed", "host", "can't allocate memory"),
    Fate(
        "wrapped-from",
        WRAPPED.format(" from error"),
        "oom-host",
        "swallowed",
        "host",
        "can't allocate memory",
    ),
    Fate(
        "wrapped-from-none",
        WRAPPED.format(" from None"),
        "oom-host",
        "swallowed",
        "host",
        "can't allocate memory",
    ),
    Fate(
        "disk",
        "file = open('/dev/full', 'w'); file.write('x'); file.flush()",
        "does-not-fit",
        "file system",
        "disk",
        "out of room on the disk at step 1",
    ),
    Fate("import", "import no_such_engine", "unavailable", "import", "import", "no_such_engine"),
    Fate(
        "unavailable",
        "raise Unavailable('needs an engine: pip install it')",
        "unavailable",
        "import",
        "import",
        "pip install it",
    ),
    Fate("import-handled", FALLBACK, "crash", "exception", "", "ValueError: no fallback either"),
    Fate("numeric", "raise ValueError('the loss is NaN')", "crash", "numeric", "", "the loss is NaN"),
    Fate(
        "error",
        "raise RuntimeError('bad\\n luck')",
        "crash",
        "exception",
        "",
        "RuntimeError: bad luck at step 1",
    ),
    Fate(
        "exit-0",
        "os._exit(0)",
        "crash",
        "exit",
        "",
        "exit 0 without a result at step 1; look for sys.exit() and os._exit() in the method's file",
    ),
    Fate("exit-1", "os._exit(1)", "crash", "exit", "", "exit 1 without a result at step 1"),
    Fate(
        "sys-exit",
        "sys.exit(0)",
        "crash",
        "exit",
        "",
        "exit 0 without a result at step 1; look for sys.exit() and os._exit() in the method's file",
    ),
    Fate(
        "sigkill",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "killed",
        "signal",
        "",
        "SIGKILL from outside at step 1",
    ),
    Fate("sigsegv", "ctypes.string_at(0)", "crash", "signal", "", "ended by SIGSEGV at step 1"),
    Fate("sigbus", TRUNCATED, "crash", "signal", "", "ended by SIGBUS at step 1"),
    Fate("interrupt", INTERRUPT, "interrupted", "interrupt", "", "step 1"),
)

# Near another row, or slow.
HEAVY = set(
    "host-account pinned numpy python rlimit-python loader-killed loader-memory-error wrapped-from wrapped-from-none"
    " unavailable numeric error exit-1 sys-exit sigsegv sigbus".split()
)


# Ends that the worker names alone: without the start of its process. The others are of a real one and its parent.
BY_EXCEPTION = set(
    "device host-account pinned torch-absurd numpy python wrapped wrapped-from wrapped-from-none disk import"
    " unavailable import-handled numeric error no-threads".split()
)


class SetForwardClock:
    """In place of the module time: its clock, which a test sets forward."""

    ahead_seconds = 0.0
    time = staticmethod(time.time)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_seconds


def ignored(event: dict[str, Any]) -> None:
    pass


def ended(
    folder: Path,
    lines: str,
    launch: Callable[..., Path] = launch,
    report: Callable[..., None] = ignored,
    **budget: Any,
) -> Record:
    """The record of a method that runs `lines` after its first step."""
    methods = write_ending(folder, lines)
    job = Job("ending", TINY, budget=Budget(**budget), steps=3, warmup=0)
    return Record.read(launch(job, lambda: "key", folder, (methods,), report, lambda key: None))


@pytest.fixture
def memory_group(make_memory_group):
    return make_memory_group(600 * MIB)


@pytest.mark.shows("a run that ends out of memory or otherwise has a record that names its end")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=pytest.mark.heavy if row.name in HEAVY else ()) for row in ROWS],
)
def test_each_end_has_its_name(tmp_path: Path, row: Fate, request: pytest.FixtureRequest) -> None:
    if row.kind == "kernel-kill":
        request.getfixturevalue("memory_group")
    started = forks.launch if row.name in BY_EXCEPTION else launch
    record = ended(tmp_path, row.lines, started, host_bytes=row.host_mib and row.host_mib * MIB)
    assert (record.status, record.losses) == (row.status, [1.5]), record.reason
    assert (record.evidence["class"], record.evidence["resource"]) == (row.kind, row.resource), (
        record.evidence
    )
    assert row.text in record.reason and "\n" not in record.reason


def test_a_crash_names_the_line_of_the_methods_file_and_its_log(tmp_path: Path) -> None:
    methods = write_ending(tmp_path, "import json\njson.loads('{')")
    sizes = "-l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 2".split()
    done = run("-m", "ending", *sizes, "--methods", str(methods), "--results", str(tmp_path / "out"))
    (log,) = (tmp_path / "out").glob("log_*.txt")
    (number,) = [
        n for n, text in enumerate((methods / "ending.py").read_text().splitlines(), 1) if "loads" in text
    ]
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 3 and last.endswith(
        f" at step 1, ending.py line {number}: json.loads('{{'); its log has the traceback ({log})"
    )


def test_a_container_that_kills_is_known_by_its_own_count(tmp_path: Path, memory_group: cgroup.Group) -> None:
    """Parent and worker live in one group with a limit and no budget, as in a container."""
    (record,) = ended_elsewhere({tmp_path: FILL}, lambda: memory_group.enter(os.getpid()))
    assert (record.status, record.evidence["class"]) == ("oom-host", "kernel-kill"), record.reason
    # The kernel may kill a second process before the first has let go of its memory.
    assert record.evidence["oom_kills"] >= 1 and "limits" not in record.evidence
    assert "killed by the kernel" in record.reason and "of 600.0 MiB in use" in record.reason


FULL_SHM = {
    "allocator": "kept = [torch.zeros(2**20).share_memory_() for _ in range(9)]",
    "signal": "file = open('/dev/shm/full', 'w+b'); file.truncate(2**26)\n"
    "pages = mmap.mmap(file.fileno(), 2**26)\nfor place in range(0, 2**26, 4096): pages[place] = 1",
}


@pytest.fixture(scope="module")
def in_full_shm(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """Of both in one process, which has a small /dev/shm of its own."""
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*mount, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount of its own can be made here: {error}")
    return ended_elsewhere(
        {tmp_path_factory.mktemp(kind): lines for kind, lines in FULL_SHM.items()}, prefix=mount
    )


@pytest.mark.parametrize("number", range(len(FULL_SHM)), ids=["message", "sigbus"])
def test_a_full_dev_shm_is_host_memory_of_its_own_kind(in_full_shm: list[Record], number: int) -> None:
    record, kind = in_full_shm[number], list(FULL_SHM)[number]
    assert (record.status, record.evidence["class"], record.evidence["resource"]) == ("oom-host", kind, "shm")
    assert "enlarge /dev/shm" in record.reason


def ended_elsewhere(lines: dict[Path, str], before=None, prefix=()) -> list[Record]:
    """As ended() in each folder, with a parent in a process of its own; `before` runs in it first."""
    folders = [(str(folder), str(write_ending(folder, text))) for folder, text in lines.items()]
    code = f"""
from pathlib import Path
from harness.run.launch import launch
from harness.core.job import *
for folder, methods in {folders!r}:
    launch(Job("ending", {TINY!r}, steps=3, warmup=0), lambda: "key", Path(folder), (Path(methods),))
"""
    subprocess.run([*prefix, sys.executable, "-c", code], cwd=ROOT, preexec_fn=before, check=True)
    return [record for folder in lines for record in read_all(folder)[0].values()]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("loss = float('nan')", "not-finite"),
        ("try: torch.empty(2**50)\nexcept RuntimeError: return Trained([])", "incomplete"),
    ],
    ids=["nan", "swallowed"],
)
@pytest.mark.cover(0)
def test_a_run_that_ended_and_did_not_train_is_left_to_the_gate(
    tmp_path: Path, lines: str, reason: str
) -> None:
    methods = write_ending(tmp_path, lines)
    (record,) = Sweep(tmp_path, (methods,)).run([resolve(Job("ending", TINY, steps=3, warmup=0), (methods,))])
    assert (record.status, record.gate.verdict, record.gate.reason) == ("ok", "failed", reason)
    assert record.samples_per_second is None


def over(clock: SetForwardClock, seconds: float) -> Callable[[dict[str, Any]], None]:
    """A report that sets a run's clock forward at its first step."""

    def report(event: dict[str, Any]) -> None:
        clock.ahead_seconds += seconds * (event["event"] == "step")

    return report


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetForwardClock:
    clock = SetForwardClock()
    monkeypatch.setattr("harness.run.launch.time", clock)
    return clock


def test_a_job_over_its_time_ends_as_timeout(tmp_path: Path, clock: SetForwardClock) -> None:
    record = ended(tmp_path, "signal.pause()", report=over(clock, 50_000.0), seconds=50_000.0)
    assert (record.status, record.evidence["class"], record.evidence["last_phase"]) == (
        "timeout",
        "deadline",
        "step 1",
    )
    assert "50000 seconds, at step 1" in record.reason and record.losses == [1.5]


def test_what_is_unavailable_says_so_once() -> None:
    failure = failures.of_exception(Unavailable("it needs an engine: pip install it"), "import", {})
    assert (failure.status, failure.reason) == (
        "unavailable",
        "it needs an engine: pip install it (at import)",
    )


@pytest.mark.heavy
def test_a_job_that_gives_no_sign_of_life_ends_as_timeout(
    tmp_path: Path, clock: SetForwardClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_time, "deadline_seconds", lambda job: math.inf)
    silence_seconds = run_time.silence_seconds(Job("ending", TINY))
    record = ended(tmp_path, "signal.pause()", report=over(clock, silence_seconds))
    assert (record.status, record.evidence["class"], record.evidence["last_phase"]) == (
        "timeout",
        "hang",
        "step 1",
    )
    assert f"hangs at step 1: nothing heard for {silence_seconds:g}" in record.reason


@pytest.mark.parametrize(("num_layers", "hidden_size"), [(1, 64), (100, 2048)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_honest_run_meets_the_automatic_limits(num_layers: int, hidden_size: int, device: str) -> None:
    """A step of 100 layers took 25.4 s on the published V100 and would take 14 h at 1 GFLOP/s."""
    job = Job("some", Workload(num_layers=num_layers, hidden_size=hidden_size), device=device)
    slowest = max(26.0, job.workload.flops_per_step / {"cpu": 1e9, "cuda": 5e12}[device])
    assert run_time.silence_seconds(job) >= max(600.0, 2 * slowest)
    assert run_time.deadline_seconds(job) >= max(3600.0, 2 * job.steps * slowest)


# As PyTorch words it, with a cap in force and without.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 107.00 GiB is"
    " free. Including non-PyTorch memory, this process has 32.10 GiB memory in use.{} Of the allocated memory 30.50 GiB"
    " is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
GIB = 2**30


@pytest.mark.parametrize(
    ("text", "memory", "expected"),
    [
        (CUDA.format(" 31.40 GiB allowed;"), {}, ("oom-device", "device", 2 * GIB, 30.5 * GIB, 31.4 * GIB)),
        (CUDA.format(""), {}, ("oom-device", "device", 2 * GIB, 30.5 * GIB, 139.72 * GIB)),
        (
            "CUDA error: out of memory",
            {"device_free_bytes": 0, "device_total_bytes": GIB},
            ("oom-device", "device", None, None, None),
        ),
        (
            "CUDA error: out of memory",
            {"device_free_bytes": GIB // 2, "device_total_bytes": GIB},
            ("oom-host", "pinned", None, None, None),
        ),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            {},
            ("oom-device", "device", None, None, None),
        ),
        ("[Errno 12] Cannot allocate memory", {}, ("oom-host", "host", None, None, None)),
    ],
)
def test_messages_of_cuda_are_known(text: str, memory: dict, expected: tuple) -> None:
    failure = failures.of_exception(RuntimeError(text), "step 2", memory)
    numbers = [failure.evidence.get(f"{name}_bytes") for name in ("asked", "in_use", "limit")]
    assert (failure.status, failure.evidence["resource"]) == expected[:2]
    assert numbers == [None if number is None else int(number) for number in expected[2:]]


@pytest.mark.parametrize(
    ("peak", "system_kills", "status"),
    [(96, 1, "oom-host"), (96, 0, "killed"), (90, 1, "killed"), (90, 0, "killed")],
)
def test_a_kill_with_no_count_of_its_own_is_inferred_from_two_signs(
    peak: int, system_kills: int, status: str
) -> None:
    end = failures.End(
        "step 1", -9, system_oom_kills=system_kills, host_peak_bytes=peak, host_limit_bytes=100
    )
    failure = failures.of_process(end)
    assert failure.status == status
    assert failure.evidence.get("inferred", False) == (status == "oom-host")
