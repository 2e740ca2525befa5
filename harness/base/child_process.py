"""Runs a module of this project in a process of its own, for code that imports torch or compiles.

The module's main() reads its arguments with `json.load(sys.stdin)`; its answer is the last line that it prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from harness.base.checkout import ROOT

# Huge pages for torch's large CPU tensors: the same run at 1.16 times the speed, 2-core EPYC, results/LOG.md.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
# By default CUDA numbers GPUs from the fastest, NVML by their bus; with this order both number them alike.
GPU_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def child_environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # PYTHONSAFEPATH keeps Python from importing modules of the working folder, which may hold anybody's torch.py.
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def when_closed(descriptor: int, then: Callable[[], Any]) -> None:
    """Call `then`, in a thread, when the process at the other end of this pipe or socket is gone.

    The thread reads the descriptor, not sys.stdin: a thread that waits in sys.stdin holds the lock of sys.stdin, and a
    forked child, which closes sys.stdin, would wait for this lock forever.
    """

    def wait() -> None:
        with contextlib.suppress(ConnectionError):  # the other process ended without reading all that was sent
            while os.read(descriptor, 4096):
                pass
        then()

    threading.Thread(target=wait, daemon=True).start()


def interrupt_here() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def ask(module: str, arguments: Any) -> Any:
    """Run the module and return its answer. Raises ValueError with the last line of its error output if it fails."""
    code, output, errors = _run(module, arguments, subprocess.PIPE, subprocess.PIPE)
    if code:
        raise ValueError(f"{module} failed: {(errors.strip().splitlines() or ['no error output'])[-1]}")
    try:
        return json.loads(output.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:  # a method may have ended the process with code 0
        raise ValueError(f"{module} failed: no answer; its code must not call sys.exit() or os._exit()") from error


def run_logged(module: str, arguments: Any, log: Path) -> None:
    """Run the module to its end, successful or not; all that it prints goes to the log."""
    with open(log, "w") as file:
        _run(module, arguments, file, file)


def _run(module: str, arguments: Any, output: int | IO[str], errors: int | IO[str]) -> tuple[int, str, str]:
    """Run the module in a session of its own. The session ends with this call, so no compiler outlives an interrupted
    call."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module], stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True,
        env=GPU_ORDER | child_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        told = process.communicate(json.dumps(arguments))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, *told
