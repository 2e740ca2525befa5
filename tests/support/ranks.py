"""Runs a function on several ranks of this machine, each forked from a process that has imported torch.

    results = on_ranks(4, "tests.methods.pipeline.trainings:train_all", argument)

The function gets its rank and the argument, and returns what JSON can hold. meet() lets it form groups of other sizes,
one after the other.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.ports import free_ports

NUM_PORTS = 40


def on_ranks(num_ranks: int, function: str, argument: Any = None) -> list[Any]:
    """Each rank's result. Raises AssertionError with the first rank's traceback that fails."""
    with tempfile.TemporaryDirectory() as folder:
        running = forks.PROCESSES.Process(
            target=_fork_ranks, args=(num_ranks, function, argument, Path(folder))
        )
        running.start()
        try:
            running.join()
        finally:
            with contextlib.suppress(ProcessLookupError):
                # ranks that wait for ever outlive the one that forked them
                os.killpg(running.pid, signal.SIGKILL)
            running.join()
        # the first to fail tells first
        assert running.exitcode == 0, (Path(folder) / "errors").read_text()[:5000]
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(num_ranks)]


@contextmanager
def meeting(rank: int, world_size: int, number: int) -> Iterator[bool]:
    """Sets torchrun's variables for the number-th group of the first ranks; false for a rank that is not in it."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.environ["PORTS"].split(",")[number],
    )
    yield rank < world_size


def _fork_ranks(num_ranks: int, function: str, argument: Any, folder: Path) -> None:
    os.setsid()
    for descriptor, name in ((1, os.devnull), (2, folder / "errors")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    os.environ["PORTS"] = ",".join(map(str, free_ports(NUM_PORTS)))
    os.environ["OMP_NUM_THREADS"] = "1"
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                (folder / str(rank)).write_text(json.dumps(called(rank, argument)))
                code = 0
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            time.sleep(2)  # the others may tell more
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
