"""One job by several ranks of this machine: an agent starts them, watches them, and ends them together.

launch.py starts this module instead of worker.py if a job has several ranks. This process is the agent: it relays the
events of this machine's first rank, and hands over the job's record. A rank is a fork that does what worker.py does,
with a share of the host's budget; the rank's own record lies in a folder beside the job's until the agent has read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from harness.base import fork_server
from harness.base.rank_agent import OneRound, Rendezvous, write_all
from harness.core import failures, log_lines
from harness.core.job import Job
from harness.core.record import Record
from harness.devices import machine
from harness.run.timeline import of_ranks, read, write
from harness.run.worker import hand_over, interrupt_once, run

RANK = re.compile(r"\brank (\d+)")  # as a message names it


def folder_of(path: Path) -> Path:
    """Return the folder of the ranks' own records. `path`: the job's record."""
    return path.with_name(f".ranks-{path.stem}")


def num_local_ranks(job: Job) -> int:
    """Return the number of ranks of this machine: all, unless torchrun's variables name several machines."""
    return job.world_size // int(os.environ.get("PET_NNODES", "1"))


class JobAgent(OneRound):
    """The agent of a job's ranks on this machine. The parent sends the job on standard input. The agent interrupts the
    ranks when standard input closes, because the parent is gone."""

    def __init__(self) -> None:
        self.order = json.loads(sys.stdin.readline())
        self.events, locks = self.order["events"], self.order["locks"]
        for lock in locks:
            os.set_inheritable(lock, False)
        super().__init__(self._pass_on, private=[self.events, *locks])
        self.watch(0, self._hear_parent)
        self.job, self.folder = Job.from_dict(self.order["job"]), folder_of(Path(self.order["record"]))

    def train(self) -> dict[int, int]:
        """Run the ranks; return the exit codes of the ranks that failed, as OneRound.run() does."""
        fork_server.import_all(fork_server.IMPORTS)
        num_local = num_local_ranks(self.job)
        if self.job.device == "cuda" and len(machine.visible_gpus()) < num_local:
            reason = f"{num_local} ranks need a GPU each, {len(machine.visible_gpus())} seen here: lower --ranks"
            record = Record(self.job, self.order["key"], "unavailable", reason=reason, started=time.time())
            record.write(self.folder / "0.json")
            return {0: 1}
        there = Rendezvous()
        if num_local < self.job.world_size:
            port, node = int(os.environ["PET_MASTER_PORT"]), int(os.environ["PET_NODE_RANK"])
            there = Rendezvous(os.environ["PET_MASTER_ADDR"], port, node, False, os.environ["PET_RDZV_ID"])
        return self.meet(partial(rank, self.order), num_local, self.job.world_size, there)

    def conclude(self, failed: dict[int, int]) -> None:
        """Write the job's trace and hand over its record; if the first rank that failed left no record, report that
        rank's exit code."""
        traces = {int(path.name.split("-")[1]): read(path) for path in self.folder.glob("trace-*")}
        if self.job.trace and traces:
            write(of_ranks(dict(sorted(traces.items()))), Path(self.job.trace))
        paths = self.folder.glob("*.json")
        ended = {int(path.stem): dataclasses.replace(Record.read(path), job=self.job) for path in paths}
        first = first_to_fail(failed, ended) if failed else None
        if first is not None and first not in ended:
            self._pass_on(first, (json.dumps({"event": "rank", "rank": first, "code": failed[first]}) + "\n").encode())
        elif ended:
            hand_over(self._record(ended, first), self.order)

    def _record(self, ended: dict[int, Record], first: int | None) -> Record:
        """Return the job's record, made from the ranks' records. `first`: the first rank that failed."""
        if first is not None:
            record = ended[first]
            end = failures.of_rank(failures.Failure(record.status, record.reason), first, self.job.world_size)
            return dataclasses.replace(record, **end.changes(record.evidence))
        record = together([ended[rank] for rank in sorted(ended)])
        if self.is_interrupted and record.status != "ok":  # a rank may notice a lost peer before the interrupt
            end = failures.of_stop(failures.End(record.phase, stopped="interrupt"))
            return dataclasses.replace(record, **end.changes({}))
        return record

    def _hear_parent(self) -> None:
        if not os.read(0, 4096):
            self.waiting.unregister(0)
            self.interrupt()

    def _pass_on(self, rank: int, data: bytes) -> None:
        try:
            write_all(self.events, data)
        except BrokenPipeError:
            self.interrupt()


def main() -> None:
    """Entry point of the agent."""
    agent = JobAgent()
    print("\n".join(log_lines.header_lines(agent.job)), flush=True)
    agent.folder.mkdir()
    try:
        agent.conclude(agent.train())
    finally:
        shutil.rmtree(agent.folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


def first_to_fail(failed: dict[int, int], ended: dict[int, Record]) -> int:
    """Return the first rank that failed by itself, not because a peer was lost. A killed rank, which left no record,
    comes before a rank with a record, and a rank comes before the ranks that waited for it. `failed`: exit codes in the
    order seen."""

    def order(rank: int) -> tuple[bool, bool, bool]:
        record = ended.get(rank)
        waited_for = set(map(int, RANK.findall(record.reason))) - {rank} if record else set()
        return record is not None and followed(record), record is not None, not waited_for.isdisjoint(failed)

    return min(failed, key=order)


def followed(record: Record) -> bool:
    """True if this record's rank ended because another rank did."""
    return record.status == "interrupted" or bool(failures.LOST_RANK.search(record.reason))


def together(records: list[Record]) -> Record:
    """Return the first record with every rank's facts, and with the maximum of each peak over all records."""
    names = sorted({name for record in records for name in record.peaks})
    peaks = {name: max(record.peaks.get(name, 0) for record in records) for name in names}
    stated = [rank for record in records for rank in record.machine.get("ranks", [])]
    told: dict[str, Any] = {**records[0].machine, "ranks": stated}
    if stated:
        told["peak_rank"] = max(stated, key=_peak_bytes)["rank"]
    retries = max(record.num_alloc_retries for record in records)
    return dataclasses.replace(records[0], peaks=peaks, num_alloc_retries=retries, machine=told)


def _peak_bytes(stated: dict[str, Any]) -> int:
    """Return a rank's peak of device memory or, if it has no device memory, the peak of its process's resident
    memory."""
    return int(stated.get("device_allocated", stated["resident_peak_bytes"]))


def of_nodes(records: list[Record]) -> Record:
    """Merge the records of a job's machines, rank 0's machine first. If some failed, return the first of them that
    failed by itself, else all records together()."""
    failed = [record for record in records if record.status != "ok"]
    return min(failed, key=followed) if failed else together(records)


def end_all(processes: list[psutil.Process], seconds: float) -> None:
    """Kill the processes that still run, and wait until they are gone or zombies."""
    deadline = time.monotonic() + seconds
    while processes and time.monotonic() < deadline:
        left = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    left.append(process)
        processes = left
        time.sleep(0.01 if left else 0)


def rank(order: dict[str, Any], environment: dict[str, str], tells: int) -> int:
    """Run one rank; return its exit code. After SIGINT the rank still finishes its record."""
    os.environ |= environment
    signal.signal(signal.SIGINT, interrupt_once)
    number, local, local_ranks = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    job = Job.from_dict(order["job"])
    if job.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = machine.visible_gpus()[local]
    if local:  # the log is the first rank's
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def emit(event: dict[str, Any]) -> None:
        if local == 0:
            write_all(tells, (json.dumps(event) + "\n").encode())

    trace = str(folder_of(Path(order["record"])) / f"trace-{number}") if job.trace else None
    save = None if number else job.save  # rank 0 has the whole tensors
    part = dataclasses.replace(job, budget=job.budget.share(local_ranks), trace=trace, save=save)
    record = run(part, order["key"], tuple(map(Path, order["folders"])), emit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if local and record.status != "ok":
        print(record.evidence.get("traceback", record.reason), file=sys.stderr, flush=True)
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stated = {"rank": number, "node": int(environment["GROUP_RANK"]), "resident_peak_bytes": resident_bytes}
    record = dataclasses.replace(record, machine={**record.machine, "ranks": [stated | record.peaks]})
    record.write(folder_of(Path(order["record"])) / f"{number}.json")
    return 0 if record.status == "ok" else 1


if __name__ == "__main__":
    main()
