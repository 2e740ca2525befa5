"""Kills one rank of a run at a random moment, and checks that the record names this rank and that nothing is left.
Call: python -m bench.rank_kills [--kills 50]; a kill takes about fifteen seconds.

Methods take turns. Half of the kills come while the ranks train; the other kills come at any time between a rank's
start and end. The record must name the killed rank, every other process must end, and no temporary file may be left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.kills import KilledRun, left_alive, of_these_runs
from harness.core.record import Record, read_all

SIZES = "-l 4 -h 32 -b 4 --heads 2 --seq 16 --vocab 97 --steps 400 --rerun --json --no-probe".split()  # noqa: SIM905
METHODS = [
    ("zero-offload", 2),
    ("stronghold", 2),
    ("megatron-lm", 2),
    ("varuna", 4),
    ("zero-infinity", 2),
    ("l2l", 4),
    ("fsdp2-offload", 2),
]
START_SECONDS = 120.0


def words_of(name: str, num_ranks: int) -> list[str]:
    stages = ["--option", "num_stages=2"] if name == "varuna" else []
    return ["-m", name, "--ranks", str(num_ranks), *stages, *SIZES]


def ranks_of(folder: Path) -> dict[int, psutil.Process]:
    """Return the processes of ranks in this folder's runs, by rank."""
    found = {}
    for pid in of_these_runs(folder):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.name().startswith("rank "):
                found[int(process.name()[5:])] = process
    return found


def begun(call: KilledRun, folder: Path, num_ranks: int) -> dict[int, psutil.Process]:
    """Wait until all ranks of a run have started; return their processes by rank, or an empty dictionary if they do not
    start within START_SECONDS."""
    end = time.monotonic() + START_SECONDS
    while call.process.poll() is None and time.monotonic() < end:
        if len(found := ranks_of(folder)) == num_ranks:
            return found
        time.sleep(0.02)
    return {}


def life_seconds(words: list[str], folder: Path, num_ranks: int) -> float:
    """Return the seconds that the ranks of an undisturbed run live."""
    call = KilledRun(folder, words)
    ranks = begun(call, folder, num_ranks)
    began = time.monotonic()
    psutil.wait_procs([*ranks.values()])
    if code := call.wait():
        raise SystemExit(f"{' '.join(words)} ended in {code} before anything was killed")
    return time.monotonic() - began


def told(record: Record | None, rank: int, num_ranks: int) -> str:
    """Return what a record says about the end of this rank."""
    if record is None:
        return "no record"
    is_named = record.evidence.get("rank") == rank and record.reason.startswith(
        f"rank {rank} of {num_ranks}: "
    )
    return f"{record.status}, {'its rank named' if is_named else f'another cause: {record.reason:.150}'}"


def newest(folder: Path, before: set[Path], name: str) -> Record | None:
    """Return the record that a run of the method `name` has added to the folder, or None. `before`: the paths of older
    records."""
    there, torn = read_all(folder)
    if torn:
        raise SystemExit(f"files that are no records: {torn}")
    return next(
        (record for path, record in there.items() if path not in before and record.job.method == name), None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    chance, counts = random.Random(asked.seed), collections.Counter[str]()
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rank-kills-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        shared = {*os.listdir("/dev/shm")}
        lives: dict[str, float] = {}
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: print the results so far
            while counts["kills"] < asked.kills:
                method, num_ranks = METHODS[counts["calls"] % len(METHODS)]
                words = words_of(method, num_ranks)
                if method not in lives:
                    lives[method] = life_seconds(words, folder, num_ranks)
                before = {*read_all(folder / "results")[0]}
                call, rank = KilledRun(folder, words), chance.randrange(num_ranks)
                ranks = begun(call, folder, num_ranks)
                if counts["calls"] // len(METHODS) % 2:
                    call.has_begun.wait()
                    time.sleep(chance.uniform(0, 0.3))
                else:
                    time.sleep(chance.uniform(0, lives[method]))
                counts["calls"] += 1
                if rank not in ranks or not ranks[rank].is_running():
                    counts["calls whose rank had ended before"] += 1
                    call.wait()
                    continue
                began = time.monotonic()
                ranks[rank].send_signal(signal.SIGKILL)
                ended = call.wait()
                seconds.append(time.monotonic() - began)
                counts["processes left"] += left_alive(folder)
                counts["kills"] += 1
                counts[f"exit code {ended}"] += 1
                counts[f"records: {told(newest(folder / 'results', before, method), rank, num_ranks)}"] += 1
                print(f"\r{counts['kills']} of {asked.kills}", end="", file=sys.stderr, flush=True)
        left = {
            "other files left in results": [
                name for name in os.listdir(folder / "results") if name[:4] != "log_"
            ],
            "shared memory left": sorted({*os.listdir("/dev/shm")} - shared),
            "temporary files, folders and sockets left": os.listdir(folder / "tmp"),
        }
        counts.update({what: len(names) for what, names in left.items()})
    print(f"\nseconds from a kill to the call's end: at most {max(seconds, default=0.0):.1f}")
    print(json.dumps({name: round(life, 1) for name, life in lives.items()}), "seconds that ranks live")
    for what, number in sorted(counts.items()):
        print(f"{number:6}  {what}", *left.get(what, []))


if __name__ == "__main__":
    main()
