"""Runs a module of this project in a process of its own, because the module may import torch or run a compiler, which
this process should not do.

The module's main() reads its arguments with `json.load(sys.stdin)`. The last line that the module prints is its answer,
as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from harness.base.checkout import ROOT

# Makes torch use huge pages for large CPU tensors. With huge pages a run was 1.16 times as fast on a 2-core EPYC
# (results/LOG.md).
HUGE_PAGES_ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
# Makes CUDA number GPUs by their bus, as NVML does. By default CUDA numbers GPUs from the fastest to the slowest.
GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def child_environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # With PYTHONSAFEPATH, Python imports no modules from the working folder, which may hold a foreign torch.py.
    return {**HUGE_PAGES_ENVIRONMENT, **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def when_closed(descriptor: int, on_close: Callable[[], Any]) -> None:
    """Start a thread that calls `on_close` when the process at the other end of this pipe or socket has ended.

    The thread reads the descriptor, not sys.stdin. A thread that reads sys.stdin holds the lock of sys.stdin, and a
    forked child that closes sys.stdin would wait for this lock forever.
    """

    def wait() -> None:
        with contextlib.suppress(ConnectionError):
            # the other process ended before it read all that this process sent
            while os.read(descriptor, 4096):
                pass
        on_close()

    threading.Thread(target=wait, daemon=True).start()


def interrupt_here() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def limit_memory(limit_bytes: int) -> None:
    """Let this process map at most `limit_bytes` of private memory; a larger allocation raises MemoryError or, in
    torch, RuntimeError."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    soft_limit = limit_bytes if hard_limit == resource.RLIM_INFINITY else min(limit_bytes, hard_limit)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))


def ask(module: str, arguments: Any) -> Any:
    """Run the module with these arguments and return its answer. Raises ValueError if the module fails (the error's
    text has the last line that the module wrote to standard error) or prints no answer."""
    exit_code, output, errors = _run_module(module, arguments, subprocess.PIPE, subprocess.PIPE)
    if exit_code:
        error_lines = errors.strip().splitlines() or ["no error output"]
        raise ValueError(f"{module} failed: {error_lines[-1]}")
    try:
        return json.loads(output.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:
        # a method's code may have ended the process with code 0
        raise ValueError(
            f"{module} failed: no answer; its code must not call sys.exit() or os._exit()"
        ) from error


def run_logged(module: str, arguments: Any, log: Path) -> None:
    """Run the module to its end, and write all that it prints to the file `log`. A failure raises no error."""
    with open(log, "w") as file:
        _run_module(module, arguments, file, file)


def _run_module(
    module: str, arguments: Any, output: int | IO[str], errors: int | IO[str]
) -> tuple[int, str, str]:
    """Run the module in a session of its own; return its exit code and the texts of its two output streams (a text is
    empty if the stream is no pipe). At the end kill the session, so no compiler outlives an interrupted call."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=errors,
        text=True,
        env=GPU_ORDER | child_environment(),
        start_new_session=True,
    )
    try:
        texts = process.communicate(json.dumps(arguments))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, *texts
