"""A worker forked from a process with torch is as a new one: what it has, how it ends, and who ends with whom."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.base import fork_server
from harness.base.checkout import ROOT
from harness.base.child_process import child_environment
from tests.support import forks
from tests.support.until import until

MODULE = """
import json, os, signal, sys
READ = {read}

def main():
    given = sys.stdin.readline()
    {first}
    print(json.dumps([READ, given, os.environ.get("OWN"), os.getcwd(), sorted(os.sched_getaffinity(0)), "torch" in
          sys.modules, os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler,
          signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, not signal.pthread_sigmask(signal.SIG_BLOCK, [])]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a torch of nothing, whose import takes no seconds: nothing here trains."""
    folder = tmp_path_factory.mktemp("forked")
    (folder / "torch").mkdir()
    for name in ("__init__", "_dynamo"):
        (folder / "torch" / f"{name}.py").touch()
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    variables = child_environment()
    path = f"{variables['PYTHONPATH']}{os.pathsep}{folder}"
    with forks.own_server():
        yield variables | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OWN": "1"}


def ended(folder: Path, environment: dict[str, str], first: str = "pass", read: int = 1) -> tuple[int, str]:
    """The exit code of a worker, and its log."""
    (folder / "forked_module.py").write_text(MODULE.format(first=first, read=read))
    with open(folder / "log", "w") as log:
        worker = fork_server.start("forked_module", (log.fileno(), log.fileno()), environment)
        worker.stdin.write("a line\n")
        worker.stdin.close()
        return worker.wait(), (folder / "log").read_text()


def test_a_worker_has_what_a_new_process_would_have(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(folder, environment)
    monkeypatch.chdir(folder)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        code, log = ended(folder, environment | {"TMPDIR": "/tmp"}, read=2)
    finally:
        os.sched_setaffinity(0, cores)
    assert code == 0
    assert json.loads(log) == [2, "a line\n", "1", str(folder), [min(cores)], True, True, True, True, True]


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getppid(), signal.SIGKILL)", -9),
        ("1 / 0", 1),
        ("sys.exit()", 0),
        ("sys.exit(300)", 44),
        ("sys.exit('why')", 1),
    ],
)
def test_its_end_is_told(folder: Path, environment: dict[str, str], first: str, code: int) -> None:
    exit_code, log = ended(folder, environment, first)
    assert exit_code == code and ("ZeroDivisionError" in log, "why" in log) == (
        first == "1 / 0",
        "why" in first,
    )


def test_descriptors_keep_their_numbers(folder: Path, environment: dict[str, str]) -> None:
    numbers = [os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in "abc"]
    writes = "; ".join(f"os.write({number}, b'{name}')" for number, name in zip(numbers, "abc", strict=True))
    (folder / "forked_module.py").write_text(MODULE.format(first=writes, read=1))
    with open(folder / "log", "w") as log:
        worker = fork_server.start("forked_module", (log.fileno(), log.fileno()), environment, numbers)
    worker.stdin.close()
    for number in numbers:
        os.close(number)
    assert worker.wait() == 0 and [(folder / name).read_text() for name in "abc"] == [*"abc"]


def test_a_fork_holds_no_descriptor_of_another(folder: Path, environment: dict[str, str]) -> None:
    (folder / "waits.py").write_text("import sys\nmain = sys.stdin.read\n")
    with open(folder / "first", "w") as log:
        waits = fork_server.start("waits", (log.fileno(), log.fileno()), environment).started()
    _, log = ended(folder, environment, "print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    waits.stdin.close()
    assert waits.wait() == 0 and log.splitlines()[0] == "[0, 1, 2, 3]"  # the last is of listdir()


def test_another_environment_is_another_process_and_the_one_before_ends(
    folder: Path, environment: dict[str, str]
) -> None:
    ended(folder, environment)
    before: Any = fork_server._server
    _, log = ended(folder, environment | {"OWN": "2"})
    assert '"2"' in log and before.process.poll() is not None


def test_a_worker_has_the_limits_that_its_caller_has_now(folder: Path, environment: dict[str, str]) -> None:
    ended(folder, environment)
    _, most = limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (4096, most))
    try:
        _, log = ended(
            folder, environment, "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)[0])"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    assert log.startswith("4096\n")


def test_a_folder_of_the_call_that_is_gone_meanwhile_is_no_hindrance(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(folder, environment)
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert ended(folder, environment, "os._exit(3)")[0] == 3


def test_one_that_was_killed_is_started_anew(folder: Path, environment: dict[str, str]) -> None:
    ended(folder, environment)
    assert fork_server._server
    fork_server._server.process.kill()
    until(lambda: psutil.Process(fork_server._server.process.pid).status() == psutil.STATUS_ZOMBIE)
    assert ended(folder, environment)[0] == 0


def test_it_ends_with_its_caller(environment: dict[str, str]) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from harness.base import fork_server
fork_server._connection(dict(os.environ), ())
print(fork_server._server.process.pid, flush=True)
signal.pause()
"""
    caller = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert caller.stdout
    process = psutil.Process(int(caller.stdout.readline()))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    process.wait()


def test_a_fork_that_is_killed_before_it_starts_has_no_number(environment: dict[str, str]) -> None:
    """Its end must not be taken for its number, to which a signal would be sent."""
    reader, writer = os.pipe()
    control, of_caller = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        signal.pause()
    forks_of = fork_server.Forks(socket.socketpair()[0])
    end = os.pidfd_open(child)
    forks_of.forks_by_pidfd[end] = child, of_caller
    forks_of.selector.register(end, selectors.EVENT_READ)
    os.kill(child, signal.SIGKILL)
    forks_of.selector.select()
    forks_of._report_end(end)
    os.close(reader)
    with control, open(writer, "w") as stdin, pytest.raises(ConnectionError):
        fork_server.Forked(stdin, control).started()
