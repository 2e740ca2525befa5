"""Starts a worker process for a job, watches the worker, and makes sure that a record of the job exists at the end.

The worker has a session of its own. This process, the parent, does not import torch; it samples the worker's memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from harness.base import cgroup, executed_code, fork_server, scratch
from harness.base.child_process import GPU_ORDER, child_environment
from harness.base.executed_code import Executed
from harness.base.imported_file import drop_stale_bytecode
from harness.base.json_object import JsonObject
from harness.base.rank_agent import num_local_ranks
from harness.core import cpu_cores, failures, log_lines, method
from harness.core.identity import CodeIdentity, code_facts
from harness.core.job import Job
from harness.core.record import Record, new_stem
from harness.devices import budgets, machine
from harness.devices.device_lock import Report, turn
from harness.devices.room import host_limit_bytes, warnings_beside
from harness.plan import run_time
from harness.run.memory_peaks import MemoryPeaks

SAMPLE_SECONDS = 0.1
GRACE_SECONDS = 20.0  # seconds from the signal that stops a worker until the worker is killed
# phases after training; memory that they take does not count
PHASES_AFTER_TRAINING = ("drain", "inspect", "done")
# Statuses that a worker may report after it was stopped. An interrupted import may raise any exception.
STATUSES_AFTER_STOP = ("interrupted", "crash", "unavailable")
LOG_TAIL_BYTES = 4096
EXPANDABLE_SEGMENTS = "expandable_segments:True"


def launch(
    job: Job,
    key: Callable[[], str],
    results: Path,
    folders: tuple[Path, ...] = (),
    report: Report = lambda event: None,
    recorded: Callable[[str], Path | None] = lambda key: None,
    stem: Path | None = None,
    is_timed: bool = True,
    foreseen_seconds: float = 0.0,
) -> Path:
    """Run the job in a process of its own; return the record's path, `stem`.json. If `stem` is None, choose a new name.

    An untimed job may share the device with other untimed jobs; then its seconds do not count. `key` returns the job's
    present key. It is called when the device is free, because code or data may have changed while this call waited, and
    again after the run: the record says if they changed meanwhile. `recorded` is called with the first of these keys.
    If it returns the path of a record, which another process has made, no run starts. The first Ctrl-C lets the worker
    finish its record, a second kills the worker; both are raised again here.
    """
    with turn(job, report, is_timed, foreseen_seconds) as device_turn:
        first_key = key()
        if existing_path := recorded(first_key):
            return existing_path
        stem = stem or new_stem(results, job)
        path = Path(f"{stem}.json")
        with open(f"{stem}.txt", "w") as log, memory_wall(job) as wall:
            start = Start.now(job, first_key, folders, wall)
            for text in warnings_beside(job, start.surroundings):
                report({"event": "warning", "text": text})
            child = Child(start, path, folders, log, device_turn.descriptors)
            events, deadline = Events("start", report), Deadline(job, child)
            peaks = MemoryPeaks(child.process.pid, job, wall)
            try:
                follow(child, events, peaks, deadline)
            finally:
                record = conclude(start, child, events, peaks, deadline)
                record = dataclasses.replace(record, is_timed=is_timed or not device_turn.is_shared())
                record = unless_changed(record, key)
                record.write(path)
                last_line = log_lines.end_line(
                    job, record.status, record.phase, len(record.losses), record.reason
                )
                log.write(last_line + "\n")
    return path


def environment(job: Job) -> dict[str, str]:
    """Return the worker's environment variables. Variables that the caller has set keep their values.

    On a CPU one thread computes small layers; ranks share the cores; torch does not know a quota of CPU time. CUDA
    numbers GPUs as NVML does. On CUDA torch's allocator grows its segments instead of adding segments, which leaves
    fewer fragments. Other processes cannot share such segments, but no method shares segments."""
    variables = dict(GPU_ORDER)
    if job.device == "cuda" and not machine.allocator_settings():
        variables["PYTORCH_ALLOC_CONF"] = EXPANDABLE_SEGMENTS
    if job.device != "cuda" and job.world_size == 1 and cpu_cores.is_small(job.workload):
        variables["OMP_NUM_THREADS"] = "1"
    elif job.world_size > 1 or cpu_cores.has_quota():
        num_threads = machine.facts()["cores"] // num_local_ranks(job.world_size)
        variables["OMP_NUM_THREADS"] = str(max(1, num_threads))
    return variables | child_environment()


@contextlib.contextmanager
def memory_wall(job: Job) -> Iterator[cgroup.Group | None]:
    """Within this context, keep a memory group for the job's worker, with the budget's limit. None: the budget has no
    such limit, or the system allows no group."""
    limit = budgets.wall_bytes(job)
    wall = cgroup.make_group(limit) if limit else None
    try:
        yield wall
    finally:
        if wall:
            wall.remove()


@dataclass(frozen=True)
class Start:
    """The facts that this process notes before a job's worker starts."""

    job: Job
    key: str
    started: float  # Unix time
    surroundings: JsonObject  # facts of the machine that may change from run to run
    identify: Callable[[], CodeIdentity]  # returns the present identity of the method's code
    code: CodeIdentity  # the identity at the start
    wall: cgroup.Group | None  # the memory group that holds the worker alone
    # the memory group in which the worker is: the wall or, without one, this process's
    group: cgroup.Group | None
    # processes that the kernel has killed for lack of memory: in the group, on the machine
    kills: tuple[int, int]

    @classmethod
    def now(cls, job: Job, key: str, folders: tuple[Path, ...], wall: cgroup.Group | None) -> Start:
        started, surroundings = time.time(), machine.surroundings(job.device, machine.num_gpus(job))
        identify = partial(method.code_identity, job.method, folders)
        code = identify()
        for file in code.modified_ns:
            drop_stale_bytecode(file)
        group = wall or cgroup.current_group()
        return cls(job, key, started, surroundings, identify, code, wall, group, _oom_kills(group))


def _oom_kills(group: cgroup.Group | None) -> tuple[int, int]:
    return group.oom_kills() if group else 0, cgroup.oom_kills()


class Child:
    """A job's worker, or the agent of its ranks: a process with a session of its own, the pipe of its events, and its
    temporary folder."""

    def __init__(
        self, start: Start, record: Path, folders: tuple[Path, ...], log: IO[str], locks: tuple[int, ...]
    ) -> None:
        """Start the process and send it its order. `record`: path of the record; `log`: file of its output; `locks`:
        descriptors of the devices' locks, which the process inherits."""
        self.record, self.log = record, Path(log.name)
        reader, writer = os.pipe()
        # both this process and the child hold the folder's lock
        self.scratch, self.lock = scratch.make_folder()
        self.notes = self.scratch / "executed"  # file of notes about executed code
        try:
            self.process = self._started(start, log, (writer, *locks, self.lock))
        except BaseException:
            shutil.rmtree(self.scratch, ignore_errors=True)
            os.close(self.lock)
            raise
        os.close(writer)
        self.pipe = os.fdopen(reader, "rb", buffering=0)
        order = {
            "job": start.job.to_dict(),
            "key": start.key,
            "record": str(record),
            "events": writer,
            "locks": locks,
            "folders": list(map(str, folders)),
        }
        assert self.process.stdin
        # Writing fails if the process has ended already, which follow() then notices.
        with contextlib.suppress(OSError):
            if start.wall:
                start.wall.enter(self.process.pid)  # before the process gets the order and takes memory
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def _started(
        self, start: Start, log: IO[str], descriptors: tuple[int, ...]
    ) -> subprocess.Popen[str] | fork_server.Forked:
        module = "harness.run.ranks" if start.job.world_size > 1 else "harness.run.worker"
        variables = environment(start.job)
        variables |= {"TMPDIR": str(self.scratch), executed_code.NOTES_VARIABLE: str(self.notes)}
        # A memory group counts only memory that is taken inside the group, but a fork brings memory that the server
        # took before. So a worker in a group is a new process, not a fork.
        if start.job.device != "cuda" and not start.wall:
            with contextlib.suppress(OSError):
                streams = log.fileno(), log.fileno()
                return fork_server.start(module, streams, variables, descriptors).started()
        return subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=descriptors,
            start_new_session=True,
            text=True,
            env=variables,
        )

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def end(self, peaks: MemoryPeaks) -> list[Executed]:
        """End all processes of the run, and remove its temporary folders. Return the notes of the executed code."""
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        peaks.end_processes(GRACE_SECONDS)  # ranks have sessions of their own
        executed = executed_code.read_notes(self.notes)
        for folder in (scratch.ranks_folder(self.record), self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(self.lock)  # held until here, so that no other run removed the notes
        self.pipe.close()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        return executed


class Events:
    """Collects the values in a worker's events, and passes each event except the record on to `report`."""

    def __init__(self, phase: str, report: Report) -> None:
        self.phase, self.report = phase, report
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.record: Record | None = None  # the record that the worker has sent
        # if a rank failed without a record: the event that tells its number and exit code
        self.failed_rank: JsonObject = {}
        self.latest_time = time.monotonic()  # time of the latest event
        self._pending, self._unread = b"", list[bytes]()

    def feed(self, data: bytes) -> None:
        """Take a piece of the worker's output, in which each line is an event as JSON. If `report` raises at an event,
        the next call continues with the event after it."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._unread += lines
        while self._unread:
            event = json.loads(self._unread.pop(0))
            self.latest_time = time.monotonic()
            if event["event"] == "record":
                with contextlib.suppress(ValueError):  # if the record is not valid, obituary() makes another
                    self.record = Record.from_dict(event["record"])
                continue
            if event["event"] == "phase":
                self.phase = event["phase"]
            elif event["event"] == "step":
                self.phase = f"step {event['step']}"
                self.losses.append(event["loss"])
                self.step_seconds.append(event["seconds"])
            elif event["event"] == "rank":
                self.failed_rank = event
            self.report(event)

    def fields(self) -> JsonObject:
        """Return the fields of a record whose values are known from the events."""
        return {"phase": self.phase, "losses": self.losses, "step_seconds": self.step_seconds}


class Deadline:
    """Stops a worker that takes too long."""

    def __init__(self, job: Job, child: Child) -> None:
        self.job, self.child = job, child
        # this process's reason to stop the worker: "deadline", "silence" or "interrupt"; "": not stopped
        self.stopped = ""
        self.begin_time = self.signal_time = time.monotonic()  # nobody can set this clock

    def check(self, latest_event: float) -> None:
        """Stop a worker that exceeds its time limit or, without --timeout, has sent no event for too long; kill it if
        it does not end within GRACE_SECONDS. `latest_event`: time of its latest event."""
        now, limit = time.monotonic(), self.job.budget.seconds
        if self.stopped:
            if now - self.signal_time > GRACE_SECONDS:
                self.child.send_signal(signal.SIGKILL)
        elif now - self.begin_time > (limit or run_time.deadline_seconds(self.job)):
            self.stop("deadline", signal.SIGTERM)
        elif not limit and now - latest_event > run_time.silence_seconds(self.job):
            self.stop("silence", signal.SIGTERM)

    def stop(self, reason: str, number: signal.Signals) -> None:
        self.stopped, self.signal_time = self.stopped or reason, time.monotonic()
        self.child.send_signal(number)

    @property
    def seconds(self) -> float:
        """The limit in seconds that the worker exceeded or, if it exceeded none, the limit of the whole run."""
        default_limit = run_time.silence_seconds if self.stopped == "silence" else run_time.deadline_seconds
        return self.job.budget.seconds or default_limit(self.job)


def follow(child: Child, events: Events, peaks: MemoryPeaks, deadline: Deadline) -> None:
    """Read the child's events and sample its memory until the child has ended. A Ctrl-C or BrokenPipeError that came
    meanwhile is raised again at the end."""
    is_interrupted, broken_pipe = False, None  # `report` raises BrokenPipeError if its reader is gone
    with selectors.DefaultSelector() as selector:
        selector.register(child.pipe, selectors.EVENT_READ)
        while True:
            try:
                ready = selector.select(SAMPLE_SECONDS)
                if not ready and child.process.poll() is not None:
                    break  # the child has ended, though its children may hold the pipe open
                if ready:
                    data = child.pipe.read(65536)
                    if not data:
                        break
                    events.feed(data)
                if events.phase not in PHASES_AFTER_TRAINING:
                    peaks.confirm()  # training went on after the last sample
                    peaks.sample()
                    if not selector.select(0):
                        peaks.confirm()
                elif ready and peaks.wall:
                    peaks.wall.lift_limit()
                deadline.check(events.latest_time)
            except KeyboardInterrupt:
                if is_interrupted:
                    raise
                is_interrupted = True
                deadline.stop("interrupt", signal.SIGINT)
            except BrokenPipeError as error:
                broken_pipe, events.report = error, lambda event: None
                deadline.stop("interrupt", signal.SIGINT)
    child.process.wait()
    if broken_pipe:
        raise broken_pipe
    if is_interrupted:
        raise KeyboardInterrupt


def conclude(start: Start, child: Child, events: Events, peaks: MemoryPeaks, deadline: Deadline) -> Record:
    """End the child, and return the job's record."""
    if child.process.poll() is None:
        deadline.stopped = deadline.stopped or "interrupt"
    executed = child.end(peaks)
    events.feed(b"")  # the events after one at which `report` raised an error
    end = observed_end(start, child, events, peaks, deadline)
    return completed_record(events.record or obituary(start, events, end), start, end, peaks, executed)


def observed_end(
    start: Start, child: Child, events: Events, peaks: MemoryPeaks, deadline: Deadline
) -> failures.End:
    """Return the end of the child's process as this process saw it."""
    peaks.sample_shm()
    kills_in_group, kills_on_machine = _oom_kills(start.group)
    return failures.End(
        phase=events.phase,
        code=events.failed_rank["code"] if events.failed_rank else child.process.wait(),
        stopped=deadline.stopped,
        seconds=deadline.seconds,
        oom_kills=kills_in_group - start.kills[0],
        owns_group=bool(start.wall),
        system_oom_kills=kills_on_machine - start.kills[1],
        host_peak_bytes=sum(peaks.bytes.values()),
        host_limit_bytes=host_limit_bytes(start.job.budget, start.job.device) or 0,
        shm_free_bytes=peaks.shm_free_bytes,
        log_tail=child.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace"),
    )


def obituary(start: Start, events: Events, end: failures.End) -> Record:
    """Return a record for a worker that sent none, made from the worker's events and the way in which it ended."""
    failure = failures.of_process(end)
    if events.failed_rank:
        failure = failures.of_rank(failure, events.failed_rank["rank"], start.job.world_size)
    return Record(
        job=start.job,
        key=start.key,
        clock=start.job.device,
        started=start.started,
        machine=machine.facts(),
        software=machine.software(),
        **events.fields(),
        **failure.changes({}),
    )


def completed_record(
    record: Record, start: Start, end: failures.End, peaks: MemoryPeaks, executed: list[Executed]
) -> Record:
    """Return the record with the facts that only this process knows added: peaks, limits, why the worker ended."""
    changes: JsonObject = {
        "peaks": {**record.peaks, **peaks.bytes},
        "machine": {**record.machine, **start.surroundings, **machine.kernel_environment()},
        "software": record.software | code_facts(start.code, executed, start.identify),
    }
    if start.wall:
        changes["limits"] = {**record.limits, "host_wall": f"memory group of cgroup v{start.wall.version}"}
    failure, end = None, dataclasses.replace(end, phase=record.phase)
    if end.stopped and record.status in STATUSES_AFTER_STOP:
        failure = failures.of_stop(end)
    elif record.status == "crash":
        failure = failures.of_killed_child(end, record.reason, str(record.evidence.get("traceback")))
    if failure:
        changes |= failure.changes(record.evidence)
    record = dataclasses.replace(record, **changes)
    if record.status.startswith("oom-host") and (limit := budgets.limit_of_the_call()):
        return dataclasses.replace(record, evidence={**record.evidence, "limit_of": limit})
    return record


def unless_changed(record: Record, key: Callable[[], str]) -> Record:
    """Return the record, which says so if its key is no longer the job's: the data or the machine have changed. `key`:
    returns the job's present key."""
    try:
        present_key = key()
    except (OSError, ValueError) as error:  # a file of the data is gone
        present_key = str(error)
    if present_key == record.key or "changed" in record.software:
        return record
    changed = [f"its key, {record.key} to {present_key}"]
    return dataclasses.replace(record, software={**record.software, "changed": changed})
