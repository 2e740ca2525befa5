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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from harness.base import cgroup, executed_code, fork_server
from harness.base.child_process import GPU_ORDER, child_environment
from harness.base.executed_code import Executed
from harness.base.imported_file import drop_stale_bytecode
from harness.core import cpu_cores, failures, log_lines, method
from harness.core.job import Job
from harness.core.record import Record, new_stem
from harness.devices import budgets, machine, shared_memory
from harness.devices.device_lock import turn
from harness.plan import run_time
from harness.run import ranks, scratch
from harness.run.identity import code_facts, unless_changed

SAMPLE_SECONDS = 0.1
LIST_SECONDS = 1.0  # seconds between two lists of the worker's children; making a list takes 1.5 ms of a core
GRACE_SECONDS = 20.0  # seconds from the signal that stops a worker until the worker is killed
AFTER_TRAINING = ("drain", "inspect", "done")  # phases after training; memory that they take does not count
# Statuses that a worker may report after it was stopped. An interrupted import may raise any exception.
AFTER_A_STOP = ("interrupted", "crash", "unavailable")
LOG_TAIL_BYTES = 4096
SHARED_MEMORY = Path("/dev/shm")
EXPANDABLE = "expandable_segments:True"
Report = Callable[[dict[str, Any]], None]


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
    with turn(job, report, is_timed, foreseen_seconds) as held:
        if existing := recorded(before := key()):
            return existing
        stem = stem or new_stem(results, job)
        path = Path(f"{stem}.json")
        with open(f"{stem}.txt", "w") as log:
            watch = Watch(job, before, path, folders, log, report, held.descriptors)
            try:
                watch.follow()
            finally:
                watch.close()
                is_alone = is_timed or not held.is_shared()
                record = dataclasses.replace(
                    watch.complete(watch.record or watch.obituary()), is_timed=is_alone
                )
                record = unless_changed(record, key)
                record.write(path)
                told = record.status, record.phase, len(record.losses), record.reason
                log.write(log_lines.end_line(job, *told) + "\n")
    return path


def environment(job: Job) -> dict[str, str]:
    """Return the worker's environment variables. Variables that the caller has set keep their values.

    On a CPU one thread computes small layers; ranks share the cores; torch does not know a quota of CPU time. CUDA
    numbers GPUs as NVML does. On CUDA torch's allocator grows its segments instead of adding segments, which leaves
    fewer fragments. Other processes cannot share such segments, but no method shares segments."""
    chosen = dict(GPU_ORDER)
    if job.device == "cuda" and not machine.allocator_settings():
        chosen["PYTORCH_ALLOC_CONF"] = EXPANDABLE
    if job.device != "cuda" and job.world_size == 1 and machine.is_small(job.workload):
        chosen["OMP_NUM_THREADS"] = "1"
    elif job.world_size > 1 or cpu_cores.has_quota():
        chosen["OMP_NUM_THREADS"] = str(max(1, machine.facts()["cores"] // ranks.num_local_ranks(job)))
    return chosen | child_environment()


class Events:
    """Collects the values in the events that a worker sends, and passes each event on to `report`."""

    def __init__(self, phase: str, report: Report) -> None:
        self.phase, self.report = phase, report
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self._pending, self._unread = b"", list[bytes]()

    def feed(self, data: bytes) -> None:
        """Take a piece of the worker's output, in which each line is an event as JSON. If `report` raises at an event,
        the next call continues with the event after it."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._unread += lines
        while self._unread:
            event = json.loads(self._unread.pop(0))
            if event["event"] == "phase":
                self.phase = event["phase"]
            elif event["event"] == "step":
                self.phase = f"step {event['step']}"
                self.losses.append(event["loss"])
                self.step_seconds.append(event["seconds"])
            self.report(event)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a record whose values are known from the events."""
        return {"phase": self.phase, "losses": self.losses, "step_seconds": self.step_seconds}


class Watch:
    """Starts one worker process, follows its events and memory, and ends it."""

    def __init__(
        self,
        job: Job,
        key: str,
        path: Path,
        folders: tuple[Path, ...],
        log: Any,
        report: Report,
        locks: tuple[int, ...],
    ) -> None:
        self.job, self.key, self.path, self.log, self.report = job, key, path, Path(log.name), report
        self.peaks = {"host_anonymous": 0, "host_shared": 0}
        self.sampled = dict(self.peaks)
        # the worker and its children, or the ranks and their children
        self.processes: list[psutil.Process] = []
        self.trainers: list[psutil.Process] = []  # the members of `processes` whose memory counts
        self.listed = 0.0  # time at which `processes` was last listed
        self.events = Events("start", self._take)
        # if a rank failed without a record: the event that tells its exit code
        self.rank: dict[str, Any] = {}
        self.executed: list[Executed] = []  # what the processes of the run executed
        # the worker's record, to which complete() adds this process's facts
        self.record: Record | None = None
        self.started = time.time()
        self.began = self.last_event = self.signalled = time.monotonic()  # nobody can set this clock
        # why this process stopped the worker, a word of failures.End.stopped; "": not stopped
        self.stopped = ""
        self.interrupted = False
        self.broken: BrokenPipeError | None = None  # `report` raises it if its reader is gone
        self.shm_free_bytes: int | None = None
        self.surroundings = machine.surroundings(job.device, machine.num_gpus(job))
        self.identify = partial(method.listed, job.method, folders)
        self.identity = self.identify()
        for file in self.identity.modified_ns:
            drop_stale_bytecode(file)
        for text in machine.warnings_beside(job, self.surroundings):
            report({"event": "warning", "text": text})
        limit = budgets.wall_bytes(job)
        self.wall = cgroup.make(limit) if limit else None  # the worker's own memory group; None: it has none
        self.group = self.wall or cgroup.current()
        self.kills = (self.group.oom_kills() if self.group else 0, cgroup.oom_kills())
        reader, writer = os.pipe()
        self.scratch, self.held = scratch.make()  # both this process and the worker hold the folder's lock
        self.notes = self.scratch / "executed"  # file of notes about executed code
        try:
            self.process = self._start(log, (writer, *locks, self.held))
        except BaseException:
            shutil.rmtree(self.scratch, ignore_errors=True)
            os.close(self.held)
            raise
        os.close(writer)
        self.pipe = os.fdopen(reader, "rb", buffering=0)
        order = {
            "job": job.to_dict(),
            "key": key,
            "record": str(path),
            "events": writer,
            "locks": locks,
            "folders": list(map(str, folders)),
        }
        assert self.process.stdin
        # Writing fails if the worker has ended already, which follow() then notices.
        with contextlib.suppress(OSError):
            if self.wall:
                self.wall.enter(self.process.pid)  # before the worker gets the order and takes memory
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def _start(
        self, log: IO[str], descriptors: tuple[int, ...]
    ) -> subprocess.Popen[str] | fork_server.Forked:
        module = "harness.run.ranks" if self.job.world_size > 1 else "harness.run.worker"
        of_worker = environment(self.job) | {
            "TMPDIR": str(self.scratch),
            executed_code.VARIABLE: str(self.notes),
        }
        # A memory group counts only memory that is taken inside the group, but a fork brings memory that the server
        # took before. So a worker in a group is a new process, not a fork.
        if self.job.device != "cuda" and not self.wall:
            with contextlib.suppress(OSError):
                return fork_server.start(module, log.fileno(), log.fileno(), of_worker, descriptors).started()
        return subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=descriptors,
            start_new_session=True,
            text=True,
            env=of_worker,
        )

    def follow(self) -> None:
        """Read the worker's events and sample its memory until the worker has ended. A Ctrl-C or BrokenPipeError that
        came meanwhile is raised again at the end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while True:
                try:
                    ready = selector.select(SAMPLE_SECONDS)
                    if not ready and self.process.poll() is not None:
                        break  # the worker has ended, though its children may hold the pipe open
                    if ready:
                        data = self.pipe.read(65536)
                        if not data:
                            break
                        self.events.feed(data)
                    self._confirm()
                    self._sample()
                    if not selector.select(0):
                        self._confirm()
                    self._check_time()
                except KeyboardInterrupt:
                    if self.interrupted:
                        raise
                    self.interrupted = True
                    self._stop("interrupt", signal.SIGINT)
                except BrokenPipeError as error:
                    self.broken, self.report = error, lambda event: None
                    self._stop("interrupt", signal.SIGINT)
        self.process.wait()
        if self.broken:
            raise self.broken
        if self.interrupted:
            raise KeyboardInterrupt

    def close(self) -> None:
        """End all processes of the run, and remove the run's temporary folders and memory group."""
        if self.process.poll() is None:
            self.stopped = self.stopped or "interrupt"
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.events.feed(b"")
        ranks.end_all(self.processes, GRACE_SECONDS)  # ranks have sessions of their own
        self.executed = executed_code.read(self.notes)
        for folder in (ranks.folder_of(self.path), self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(self.held)  # held until here, so that no other run removed the notes
        self.end = self._end()
        if self.wall:
            self.wall.remove()
        self.pipe.close()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def obituary(self) -> Record:
        """Return a record for a worker that sent none, made from the worker's events and the way in which it ended."""
        failure = failures.of_process(self.end)
        if self.rank:
            failure = failures.of_rank(failure, self.rank["rank"], self.job.world_size)
        return Record(
            job=self.job,
            key=self.key,
            clock=self.job.device,
            started=self.started,
            machine=machine.facts(),
            software=machine.software(),
            **self.events.fields(),
            **failure.changes({}),
        )

    def complete(self, record: Record) -> Record:
        """Return the record with the facts that only this process knows added: peaks, limits, why the worker ended."""
        changes: dict[str, Any] = {"peaks": {**record.peaks, **self.peaks}}
        changes["machine"] = {**record.machine, **self.surroundings, **machine.kernel_environment()}
        changes["software"] = record.software | code_facts(self.identity, self.executed, self.identify)
        if self.wall:
            changes["limits"] = {**record.limits, "host_wall": f"memory group of cgroup v{self.wall.version}"}
        failure, end = None, dataclasses.replace(self.end, phase=record.phase)
        if self.stopped and record.status in AFTER_A_STOP:
            failure = failures.of_stop(end)
        elif record.status == "crash":
            failure = failures.of_killed_child(end, record.reason, str(record.evidence.get("traceback")))
        if failure:
            changes |= failure.changes(record.evidence)
        record = dataclasses.replace(record, **changes)
        if record.status.startswith("oom-host") and (limit := budgets.limit_of_the_call()):
            return dataclasses.replace(record, evidence={**record.evidence, "limit_of": limit})
        return record

    def _end(self) -> failures.End:
        self._sample_shm()
        kills = (self.group.oom_kills() if self.group else 0) - self.kills[0]
        limit = machine.room(self.job.budget, self.job.device).host_bytes or 0
        allowed_seconds = run_time.silence_seconds if self.stopped == "silence" else run_time.deadline_seconds
        return failures.End(
            phase=self.events.phase,
            code=self.rank["code"] if self.rank else self.process.wait(),
            stopped=self.stopped,
            seconds=self.job.budget.seconds or allowed_seconds(self.job),
            oom_kills=kills,
            owns_group=bool(self.wall),
            system_oom_kills=cgroup.oom_kills() - self.kills[1],
            host_peak_bytes=sum(self.peaks.values()),
            host_limit_bytes=limit,
            shm_free_bytes=self.shm_free_bytes,
            log_tail=self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace"),
        )

    def _take(self, event: dict[str, Any]) -> None:
        self.last_event = time.monotonic()
        if event["event"] == "record":
            with contextlib.suppress(ValueError):  # if the record is not valid, obituary() makes another
                self.record = Record.from_dict(event["record"])
            return
        if self.wall and event["event"] == "phase" and event["phase"] in AFTER_TRAINING:
            self.wall.lift()
        if event["event"] == "rank":
            self.rank = event
        self.report(event)

    def _sample(self) -> None:
        """Sample anonymous and shared memory of the worker and its children, or of all ranks and their children. Shared
        memory includes page-locked memory, and files on a tmpfs, such as torch's libraries (104 MiB, results/LOG.md).

        A child counts only after two lists in a row contain it, because a new child has its parent's memory for some
        milliseconds, until the child runs its own program."""
        if self.events.phase in AFTER_TRAINING:
            return
        self._sample_shm()
        anonymous, shared = 0, dict[int, int]()
        with contextlib.suppress(psutil.Error):
            are_missing = self.job.world_size > 1 and len(self.trainers) < ranks.num_local_ranks(self.job)
            if are_missing or time.monotonic() - self.listed > LIST_SECONDS:
                worker, self.listed = psutil.Process(self.process.pid), time.monotonic()
                first = [worker] if self.job.world_size == 1 else worker.children()  # an agent trains nothing
                others = [process for process in worker.children(recursive=True) if process not in first]
                self.trainers = [*first, *(process for process in others if process in self.processes)]
                self.processes = [*first, *others]
        for process in self.trainers:
            with contextlib.suppress(psutil.Error):  # the process may be gone
                sizes = budgets.process_bytes(process.pid)
                anonymous += sizes.get("RssAnon") or process.memory_info().rss
                shared[process.pid] = sizes.get("RssShmem", 0)
        if self.wall and self.job.world_size == 1:  # forks share pages, which the group counts once
            anonymous = self.wall.anonymous_bytes() or anonymous
        self.sampled = {"host_anonymous": anonymous, "host_shared": shared_memory.total_bytes(shared)}

    def _confirm(self) -> None:
        """Raise the peaks to the last sample, unless the worker's events have told that training is over."""
        if self.events.phase not in AFTER_TRAINING:
            self.peaks = {name: max(self.peaks[name], self.sampled[name]) for name in self.peaks}

    def _sample_shm(self) -> None:
        if SHARED_MEMORY.is_dir():
            free = shutil.disk_usage(SHARED_MEMORY).free
            self.shm_free_bytes = min(free, free if self.shm_free_bytes is None else self.shm_free_bytes)

    def _check_time(self) -> None:
        """Stop a worker that exceeds its time limit or, without --timeout, sends no events for too long."""
        now, asked = time.monotonic(), self.job.budget.seconds
        if self.stopped:
            if now - self.signalled > GRACE_SECONDS:
                self._signal(signal.SIGKILL)
        elif now - self.began > (asked or run_time.deadline_seconds(self.job)):
            self._stop("deadline", signal.SIGTERM)
        elif not asked and now - self.last_event > run_time.silence_seconds(self.job):
            self._stop("silence", signal.SIGTERM)

    def _stop(self, why: str, number: signal.Signals) -> None:
        self.stopped, self.signalled = self.stopped or why, time.monotonic()
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
