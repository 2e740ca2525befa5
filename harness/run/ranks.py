"""Runs one job by several ranks on this machine: an agent starts the ranks, watches them, and ends them together.

If a job has several ranks, launch.py starts this module instead of worker.py. This process is the agent. It relays the
events of this machine's first rank to launch.py and, at the end, hands over the job's record. Each rank is a fork of
the agent that does the work of worker.py with its share of the host's budget. A rank writes a record of its own into a
folder beside the job's record; the agent reads these records and removes the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

from harness.base import executed_code, fork_server
from harness.base.json_object import JsonObject
from harness.base.rank_agent import OneRound, Rendezvous, num_local_ranks, write_all
from harness.base.scratch import ranks_folder
from harness.core import failures, log_lines
from harness.core.job import Job
from harness.core.record import Record
from harness.devices import machine
from harness.run.timeline import of_ranks, read_timeline, write_timeline
from harness.run.worker import hand_over, interrupt_once, train_here


class JobAgent(OneRound):
    """The agent of a job's ranks on this machine. Its parent, launch.py, sends the job on standard input and keeps
    standard input open. If standard input closes, the parent has ended, and the agent interrupts the ranks."""

    def __init__(self) -> None:
        self.order = json.loads(sys.stdin.readline())
        self.events, locks = self.order["events"], self.order["locks"]
        for lock in locks:
            os.set_inheritable(lock, False)
        super().__init__(self._pass_on, private=[self.events, *locks])
        self.watch(0, self._hear_parent)
        self.job, self.folder = Job.from_dict(self.order["job"]), ranks_folder(Path(self.order["record"]))

    def train(self) -> dict[int, int]:
        """Run the ranks of this machine to their ends. Return the exit codes of the ranks that failed, as
        OneRound.run() does."""
        fork_server.import_all(fork_server.IMPORTS)
        num_local = num_local_ranks(self.job.world_size)
        if self.job.device == "cuda" and len(machine.visible_gpus()) < num_local:
            reason = (
                f"{num_local} ranks need a GPU each, {len(machine.visible_gpus())} seen here: lower --ranks"
            )
            record = Record(self.job, self.order["key"], "unavailable", reason=reason, started=time.time())
            record.write(self.folder / "0.json")
            return {0: 1}
        rendezvous = Rendezvous()
        if num_local < self.job.world_size:
            port, node = int(os.environ["PET_MASTER_PORT"]), int(os.environ["PET_NODE_RANK"])
            rendezvous = Rendezvous(
                os.environ["PET_MASTER_ADDR"], port, node, False, os.environ["PET_RDZV_ID"]
            )
        return self.meet(partial(run_rank, self.order), num_local, self.job.world_size, rendezvous)

    def conclude(self, exit_codes: dict[int, int]) -> None:
        """Write the job's trace, if the job asks for a trace, and hand over the job's record. If the first rank that
        failed left no record, report the rank's exit code instead."""
        traces = {int(path.name.split("-")[1]): read_timeline(path) for path in self.folder.glob("trace-*")}
        if self.job.trace and traces:
            write_timeline(of_ranks(dict(sorted(traces.items()))), Path(self.job.trace))
        paths = self.folder.glob("*.json")
        records = {int(path.stem): dataclasses.replace(Record.read(path), job=self.job) for path in paths}
        first_failed = first_to_fail(exit_codes, records) if exit_codes else None
        if first_failed is not None and first_failed not in records:
            event = {"event": "rank", "rank": first_failed, "code": exit_codes[first_failed]}
            self._pass_on(first_failed, (json.dumps(event) + "\n").encode())
        elif records:
            hand_over(self._record(records, first_failed), self.order)

    def _record(self, records: dict[int, Record], first_failed: int | None) -> Record:
        """Return the job's record, made from the `records` of its ranks. `first_failed`: the first rank that failed;
        None: no rank failed."""
        if first_failed is not None:
            record = records[first_failed]
            end = failures.Failure(record.status, record.reason)
            failure = failures.of_rank(end, first_failed, self.job.world_size)
            return dataclasses.replace(record, **failure.changes(record.evidence))
        record = merge_records([records[rank] for rank in sorted(records)])
        if self.is_interrupted and record.status != "ok":
            # a rank may have failed because its peer was interrupted
            failure = failures.of_stop(failures.End(record.phase, stopped="interrupt"))
            return dataclasses.replace(record, **failure.changes({}))
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
    """Entry point of the agent's process, which launch.py starts."""
    executed_code.watch()  # the ranks, which are forks, watch, too
    agent = JobAgent()
    print("\n".join(log_lines.header_lines(agent.job)), flush=True)
    agent.folder.mkdir()
    try:
        agent.conclude(agent.train())
    finally:
        shutil.rmtree(agent.folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


def first_to_fail(exit_codes: dict[int, int], records: dict[int, Record]) -> int:
    """Return the rank whose failure caused the other failures. `exit_codes`: exit codes of the failed ranks, in the
    order in which the agent saw them; `records`: the records of the ranks that left a record.

    A rank that failed by itself comes before ranks that lost a peer. Among equals, a rank without a record, which was
    killed, comes before ranks with a record; then, ranks whose evidence names another failed rank come last. If several
    ranks are still equal, the order of `exit_codes` decides.
    """

    def order(rank: int) -> tuple[bool, bool, bool]:
        record = records.get(rank)
        if record is None:
            return False, False, False
        waited_for = {*record.evidence.get("lost_ranks", ())} - {rank}
        return ended_after_another(record), True, not waited_for.isdisjoint(exit_codes)

    return min(exit_codes, key=order)


def ended_after_another(record: Record) -> bool:
    """True if the rank of this record ended only because another rank had ended."""
    return record.status == "interrupted" or bool(failures.LOST_RANK.search(record.reason))


def merge_records(records: list[Record]) -> Record:
    """Return the first record, with the facts of all records' ranks added, and with each peak and the number of
    allocator retries raised to the maximum of all records. Code that is unlisted or changed in any record is so in the
    returned one."""
    names = sorted({name for record in records for name in record.peaks})
    peaks = {name: max(record.peaks.get(name, 0) for record in records) for name in names}
    rank_facts = [rank for record in records for rank in record.machine.get("ranks", [])]
    facts: JsonObject = {**records[0].machine, "ranks": rank_facts}
    if rank_facts:
        facts["peak_rank"] = max(rank_facts, key=_peak_bytes)["rank"]
    retries = max(record.num_alloc_retries for record in records)
    software = {**records[0].software, **_other_code(records)}
    return dataclasses.replace(
        records[0], peaks=peaks, num_alloc_retries=retries, machine=facts, software=software
    )


def _other_code(records: list[Record]) -> dict[str, list[str]]:
    """Return the facts about code that is not the identity's, of all records together."""
    facts = {}
    for name in ("unlisted", "changed"):
        texts = sorted({text for record in records for text in record.software.get(name, [])})
        if len({record.software.get("source") for record in records}) > 1 and name == "changed":
            texts.append("its code, which differs between its machines")
        if texts:
            facts[name] = texts
    return facts


def _peak_bytes(rank_facts: JsonObject) -> int:
    """Return a rank's peak bytes of device memory or, if the rank's facts do not tell these bytes, its process's peak
    bytes of resident memory."""
    name = "device_allocated" if "device_allocated" in rank_facts else "resident_peak_bytes"
    return int(rank_facts[name])


def merge_nodes(records: list[Record]) -> Record:
    """Return one record for the job from the records of its machines, the first of which ran rank 0. If some machines
    failed, return the record of the first machine that failed by itself; else return merge_records() of all records."""
    failed = [record for record in records if record.status != "ok"]
    return min(failed, key=ended_after_another) if failed else merge_records(records)


def run_rank(order: JsonObject, environment: dict[str, str], writer: int) -> int:
    """Run one rank in this process, a fork of the agent; return its exit code. `order`: the agent's order;
    `environment`: torchrun's variables of this rank; `writer`: descriptor of the pipe to the agent. After SIGINT the
    rank still finishes its record."""
    os.environ |= environment
    signal.signal(signal.SIGINT, interrupt_once)
    rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
    num_local = int(environment["LOCAL_WORLD_SIZE"])
    job = Job.from_dict(order["job"])
    if job.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = machine.visible_gpus()[local_rank]
    if local_rank:  # only the first rank writes to the log
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def emit(event: JsonObject) -> None:
        if local_rank == 0:
            write_all(writer, (json.dumps(event) + "\n").encode())

    trace = str(ranks_folder(Path(order["record"])) / f"trace-{rank}") if job.trace else None
    save = None if rank else job.save  # only rank 0 has the whole tensors
    rank_job = dataclasses.replace(job, budget=job.budget.share(num_local), trace=trace, save=save)
    record = train_here(rank_job, order["key"], tuple(map(Path, order["folders"])), emit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if local_rank and record.status != "ok":
        print(record.evidence.get("traceback", record.reason), file=sys.stderr, flush=True)
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {"rank": rank, "node": int(environment["GROUP_RANK"]), "resident_peak_bytes": resident_bytes}
    record = dataclasses.replace(record, machine={**record.machine, "ranks": [facts | record.peaks]})
    record.write(ranks_folder(Path(order["record"])) / f"{rank}.json")
    return 0 if record.status == "ok" else 1


if __name__ == "__main__":
    main()
