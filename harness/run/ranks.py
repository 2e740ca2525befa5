"""One job by several ranks: torchrun's elastic agent starts them, watches them, and ends them together.

launch.py starts this module instead of worker.py if a job has several ranks. This process is the agent: it relays the
events of this machine's first rank, and writes the job's record. A rank is a process like worker.py's, with its share
of the host's budget; its own record lies in a folder beside the job's until the agent has read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from harness.base.child_process import interrupt_here, when_closed
from harness.core import failures, log_lines
from harness.core.job import Job
from harness.core.record import Record
from harness.devices import machine
from harness.run.timeline import of_ranks, read, write
from harness.run.worker import hand_over, interrupt_once, run


def folder_of(path: Path) -> Path:
    """Return the folder of the ranks' records, for the job with this record."""
    return path.with_name(f".ranks-{path.stem}")


def main() -> None:
    """Entry point of the agent. The order comes on standard input, which closes when the parent is gone: then the run
    is interrupted."""
    order = json.loads(sys.stdin.readline())
    os.set_inheritable(order["lock"], False)
    parent = os.dup(0)
    ours, theirs = socket.socketpair()
    # The ranks inherit one end as their standard input, which closes however this process ends.
    os.dup2(theirs.fileno(), 0)
    theirs.close()
    when_closed(parent, interrupt_here)
    relay = threading.Thread(target=_relay, args=(ours, order["events"]), daemon=True)
    relay.start()
    job = Job.from_dict(order["job"])
    print("\n".join(log_lines.header_lines(job)), flush=True)
    folder = folder_of(Path(order["record"]))
    folder.mkdir()
    try:
        end = _conclude(job, folder, *_train(job, order, folder))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # closes the last copy of the ranks' end
        relay.join(timeout=1)
        if job.trace and (traces := {int(path.name.split("-")[1]): read(path) for path in folder.glob("trace-*")}):
            write(of_ranks(dict(sorted(traces.items()))), Path(job.trace))
        if isinstance(end, Record):
            hand_over(end, order)
        elif end:
            os.write(order["events"], (json.dumps(end) + "\n").encode())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


def _train(job: Job, order: dict[str, Any], folder: Path) -> tuple[dict[int, int], bool]:
    """Run this machine's ranks; return exit codes of the failed ones, in the order seen, and True if interrupted."""
    interrupts: list[int] = []
    for kind in (signal.SIGINT, signal.SIGTERM):  # an exception may be taken for an import's own
        signal.signal(kind, lambda number, frame: interrupts.append(number))
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = _meeting()
    local_ranks = job.world_size // meeting["max_nodes"]
    if job.device == "cuda" and len(machine.visible_gpus()) < local_ranks:
        reason = f"{local_ranks} ranks need a GPU each, {len(machine.visible_gpus())} seen here: lower --ranks"
        Record(job, order["key"], "unavailable", reason=reason, started=time.time()).write(folder / "0.json")
        return {0: 1}, False
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.facts()["cores"] // local_ranks)))
    logs = DefaultLogsSpecs(log_dir=str(folder / "logs"))
    config = LaunchConfig(nproc_per_node=local_ranks, max_restarts=0, logs_specs=logs, **meeting)
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.default_int_handler)
    if interrupts:
        return {}, True
    try:
        elastic_launch(config, sys.executable)("-m", "harness.run.ranks", json.dumps(order))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}, False
    except (SignalException, KeyboardInterrupt):
        return {}, True
    return {}, False


def _meeting() -> dict[str, Any]:
    """Return how the agents of all machines meet: this one alone, unless torchrun's own variables name others."""
    num_nodes = int(os.environ.get("PET_NNODES", "1"))
    found: dict[str, Any] = {"min_nodes": num_nodes, "max_nodes": num_nodes}
    if num_nodes == 1:
        from harness.run import loopback_rendezvous as loopback

        loopback.register()
        for library in ("GLOO", "NCCL"):  # backends that connect ranks
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        return {**found, "rdzv_backend": loopback.BACKEND, "local_addr": loopback.ADDRESS, "run_id": "alone"}
    endpoint = f"{os.environ['PET_MASTER_ADDR']}:{os.environ['PET_MASTER_PORT']}"
    others = {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "run_id": os.environ["PET_RDZV_ID"]}
    return {**found, **others, "rdzv_configs": {"rank": int(os.environ["PET_NODE_RANK"])}}


def _conclude(job: Job, folder: Path, failed: dict[int, int], is_interrupted: bool) -> Record | dict[str, Any] | None:
    """Return the job's record, or None; if the first rank to fail left no record, report its exit code."""
    ended = {int(path.stem): dataclasses.replace(Record.read(path), job=job) for path in folder.glob("*.json")}
    if failed:
        first = first_to_fail(failed, ended)
        if first not in ended:
            return {"event": "rank", "rank": first, "code": failed[first]}
        record = ended[first]
        end = failures.of_rank(failures.Failure(record.status, record.reason), first, job.world_size)
        return dataclasses.replace(record, **end.changes(record.evidence))
    if not ended:
        return None
    record = together([ended[rank] for rank in sorted(ended)])
    if is_interrupted and record.status != "ok":  # a rank may notice a lost peer before the interrupt
        end = failures.of_stop(failures.End(record.phase, stopped="interrupt"))
        return dataclasses.replace(record, **end.changes({}))
    return record


def first_to_fail(failed: dict[int, int], ended: dict[int, Record]) -> int:
    """Return the first rank that failed by itself: not stopped by the agent, not cut off by a peer.

    A killed rank, which has no record, comes before one with a record. failed: exit codes in the order seen.
    """

    def rank_order(rank: int) -> tuple[bool, bool]:
        record = ended.get(rank)
        is_consequence = failed[rank] == -signal.SIGTERM or (record is not None and followed(record))
        return is_consequence, record is not None

    return min(failed, key=rank_order)


def followed(record: Record) -> bool:
    """True if another rank's end caused this one."""
    return record.status == "interrupted" or bool(failures.LOST_RANK.search(record.reason))


def together(records: list[Record]) -> Record:
    """Return the first record with the largest of each peak, and with each rank's own statement."""
    names = sorted({name for record in records for name in record.peaks})
    peaks = {name: max(record.peaks.get(name, 0) for record in records) for name in names}
    stated = [rank for record in records for rank in record.machine.get("ranks", [])]
    told: dict[str, Any] = {**records[0].machine, "ranks": stated}
    if stated:
        told["peak_rank"] = max(stated, key=_peak_bytes)["rank"]
    retries = max(record.num_alloc_retries for record in records)
    return dataclasses.replace(records[0], peaks=peaks, num_alloc_retries=retries, machine=told)


def _peak_bytes(stated: dict[str, Any]) -> int:
    """Return the peak of the device's memory or, without one, the process's."""
    return int(stated.get("device_allocated", stated["resident_peak_bytes"]))


def of_nodes(records: list[Record]) -> Record:
    """Merge the records of a job's machines, rank 0's first. If a rank failed, return the record of the first rank that
    did, else all records together()."""
    failed = [record for record in records if record.status != "ok"]
    return min(failed, key=followed) if failed else together(records)


def end_all(processes: list[psutil.Process], seconds: float) -> None:
    """Kill the processes that still run, and wait for them; not for zombies."""
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


def _relay(ranks: socket.socket, events: int) -> None:
    with open(events, "wb", closefd=False) as parent:
        while data := ranks.recv(65536):
            try:
                parent.write(data)
                parent.flush()
            except BrokenPipeError:
                interrupt_here()


def rank(order: dict[str, Any]) -> None:
    """Run one rank. SIGINT lets it finish its record; SIGTERM, which the agent sends when another rank has failed, does
    not. The rank ends when the agent is gone."""
    signal.signal(signal.SIGINT, interrupt_once)
    when_closed(0, lambda: os.killpg(0, signal.SIGKILL))
    number, local, local_ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    job = Job.from_dict(order["job"])
    if job.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = machine.visible_gpus()[local]
    if local:  # the log is the first rank's
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def emit(event: dict[str, Any]) -> None:
        if local == 0:
            os.write(0, (json.dumps(event) + "\n").encode())

    trace = str(folder_of(Path(order["record"])) / f"trace-{number}") if job.trace else None
    part = dataclasses.replace(job, budget=job.budget.share(local_ranks), trace=trace)
    record = run(part, order["key"], tuple(map(Path, order["folders"])), emit)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if local and record.status != "ok":
        print(record.evidence.get("traceback", record.reason), file=sys.stderr, flush=True)
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    stated = {"rank": number, "node": int(os.environ["GROUP_RANK"]), "resident_peak_bytes": resident_bytes}
    record = dataclasses.replace(record, machine={**record.machine, "ranks": [stated | record.peaks]})
    record.write(folder_of(Path(order["record"])) / f"{number}.json")
    sys.stdout.flush()
    os._exit(0 if record.status == "ok" else 1)


if __name__ == "__main__":
    rank(json.loads(sys.argv[1])) if len(sys.argv) > 1 else main()
