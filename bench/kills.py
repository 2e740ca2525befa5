"""Kills runs at random moments, and checks that no process and no half-written file is left. Call: python -m
bench.kills [--kills 300]; a kill takes about five seconds.

A third of the kills comes within 200 ms after the last step; the other kills come at any time of the run. Each kill
sends SIGKILL to the parent, the worker or both, or SIGTERM to the parent, or SIGHUP to the parent or both, as a closed
terminal does. Afterwards no process may live on, and no file may be half-written. After one more run, which is not
killed, no other file may be left in the results, in shared memory or in the folder of temporary files.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from harness.base.checkout import ROOT
from harness.core.record import read_all

WORDS = "-m resident -l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 40 --rerun --json".split()  # noqa: SIM905
KINDS = [
    ("parent", signal.SIGKILL),
    ("worker", signal.SIGKILL),
    ("both", signal.SIGKILL),
    ("parent", signal.SIGTERM),
    ("parent", signal.SIGHUP),
    ("both", signal.SIGHUP),
]
LAST_SECONDS = 0.2
END_SECONDS = 90.0  # seconds within which a worker whose parent died writes its record or is killed


class KilledRun:
    """One run in its own session. Sets the event has_begun at the end of the first step, and the event has_trained at
    the end of the last step."""

    def __init__(self, folder: Path, words: Sequence[str] = WORDS) -> None:
        environment = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "HARNESS_LOCKS": str(folder),
            "KILLS": str(folder),
        }
        call = [sys.executable, "-m", "harness", *words, "--results", str(folder / "results")]
        hears = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup's child would ignore it
        self.process = subprocess.Popen(
            call,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=hears,
        )
        self.has_begun, self.has_trained = threading.Event(), threading.Event()
        self.listener = threading.Thread(target=self._listen)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                if step := json.loads(line).get("step"):
                    self.has_begun.set()
                    if step == 40:
                        self.has_trained.set()
        self.has_begun.set()
        self.has_trained.set()

    def kill(self, whom: str, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            workers = psutil.Process(self.process.pid).children(recursive=True) if whom != "parent" else []
            for each in [*([self.process] if whom != "worker" else []), *workers]:
                each.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait()
        self.listener.join()
        return code


def of_these_runs(folder: Path) -> list[int]:
    """Return the ids of the processes whose environment names this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("KILLS") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def left_alive(folder: Path) -> int:
    """Wait until all processes of these runs have ended, but at most END_SECONDS. Return the number of processes that
    still run."""
    end = time.monotonic() + END_SECONDS
    while (alive := of_these_runs(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    return len(alive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    chance, counts = random.Random(asked.seed), collections.Counter[str]()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        shared = {*os.listdir("/dev/shm")}
        began = time.monotonic()
        KilledRun(folder).wait()
        length = time.monotonic() - began
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: print the results so far
            for kill in range(asked.kills):
                (whom, number), call = KINDS[kill % len(KINDS)], KilledRun(folder)
                if kill % 3 == kill // len(KINDS) % 3:
                    # every third kill of each kind comes after the last step
                    call.has_trained.wait()
                    time.sleep(chance.uniform(0, LAST_SECONDS))
                else:
                    time.sleep(chance.uniform(0, length))
                counts["calls that had ended before"] += call.process.poll() is not None
                call.kill(whom, number)
                call.wait()
                counts["processes left"] += left_alive(folder)
                counts["kills"] += 1
                print(f"\r{kill + 1} of {asked.kills}", end="", file=sys.stderr, flush=True)
        code = KilledRun(folder).wait()
        records, torn = read_all(folder / "results")
        for record in records.values():
            counts[f"records: {record.status}"] += 1
            counts["results without a host peak"] += record.is_result and not record.peaks.get(
                "host_anonymous"
            )
        counts["files that are no records"] = len(torn)
        left = {
            "other files left in results": [
                name for name in os.listdir(folder / "results") if name[:4] != "log_"
            ],
            "shared memory left": sorted({*os.listdir("/dev/shm")} - shared),
            "temporary files, folders and sockets left": os.listdir(folder / "tmp"),
        }
        counts.update({told: len(names) for told, names in left.items()})
        counts["exit code of the last call"] = code
    print(f"\na call takes {length:.1f} s")
    for told, number in sorted(counts.items()):
        print(f"{number:6}  {told}", *left.get(told, []))


if __name__ == "__main__":
    main()
