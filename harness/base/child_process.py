"""A module of this project run in a process of its own, with JSON for its arguments: for code that imports torch, or
compiles.

The child's main() reads the arguments with `json.load(sys.stdin)`; its answer is the last line that it prints.
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


def child_environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # PYTHONSAFEPATH: nothing is imported from the folder of the call, which may hold a torch.py of anybody.
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def when_closed(descriptor: int, then: Callable[[], Any]) -> None:
    """Call `then`, in a thread, when whoever holds the other end of this pipe or socket is gone.

    Reads past sys.stdin: a thread that waits in it holds its lock, and a forked child, which closes it, would wait
    forever.
    """

    def wait() -> None:
        with contextlib.suppress(ConnectionError):  # it left without having read all
            while os.read(descriptor, 4096):
                pass
        then()

    threading.Thread(target=wait, daemon=True).start()


def interrupt_here() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def ask(module: str, arguments: Any) -> Any:
    """The module's answer. Raises ValueError with the last line of error output if it fails."""
    code, output, errors = _run(module, arguments, subprocess.PIPE, subprocess.PIPE)
    if code:
        raise ValueError(f"{module} failed: {(errors.strip().splitlines() or ['no error output'])[-1]}")
    try:
        return json.loads(output.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:  # a method that it trains by may end it, in 0, too
        raise ValueError(f"{module} failed: no answer; look for sys.exit() and os._exit() in what it runs") from error


def run_logged(module: str, arguments: Any, log: Path) -> None:
    """Run the module to its end, successful or not; all that it prints goes to the log."""
    with open(log, "w") as file:
        _run(module, arguments, file, file)


def _run(module: str, arguments: Any, output: int | IO[str], errors: int | IO[str]) -> tuple[int, str, str]:
    """In a session of its own: no compiler outlives an interrupted call."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module], stdin=subprocess.PIPE, stdout=output, stderr=errors, text=True,
        env=child_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        told = process.communicate(json.dumps(arguments))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, *told
