"""Start a worker for a job, watch it without disturbing it, and see to it that a record of its end exists.

The worker has a session of its own. This process imports no torch: what it samples is the worker alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from harness import machine
from harness.method import ROOT
from harness.record import Record, new_stem
from harness.spec import Job

SAMPLE_SECONDS = 0.1
GRACE_SECONDS = 20.0  # for a worker told to end, until it is killed
# Huge pages for torch's large CPU tensors: the same run at 1.16 times the speed, 2-core EPYC, results/LOG.md.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
Report = Callable[[dict[str, Any]], None]


def launch(job: Job, key: str, results: Path, folders: tuple[Path, ...] = (), report: Report | None = None) -> Path:
    """Run the job in a process of its own; returns the path of its record. The log has the same stem.

    A first KeyboardInterrupt lets the worker finish its record, a second one kills it; both are raised again here.
    """
    stem = new_stem(results, job)
    path = Path(f"{stem}.json")
    with open(f"{stem}.txt", "w") as log:
        watch = Watch(job, key, path, folders, log, report or (lambda event: None))
        try:
            watch.follow()
        finally:
            watch.close()
            record = Record.read(path) if path.exists() else watch.obituary()
            changes: dict[str, Any] = {"peaks": {**record.peaks, **watch.peaks}}
            if watch.timed_out and record.status == "interrupted":
                changes |= {"status": "timeout", "reason": f"{watch.overtime()} at {record.phase}"}
            dataclasses.replace(record, **changes).write(path)
    return path


def build(job: Job, results: Path, folders: tuple[Path, ...]) -> None:
    """Let the method compile what it needs, in a process of its own, to the end; the log lies beside the records.

    Where it fails, the method's own run says so.
    """
    order = {"method": job.method, "options": job.options, "folders": [str(folder) for folder in folders]}
    with open(results / f"build_{job.method}.txt", "w") as log:
        subprocess.run(
            [sys.executable, "-m", "harness.build"],
            input=json.dumps(order), stdout=log, stderr=log, text=True, env=_environment(),
        )  # fmt: skip


def build_sim(results: Path) -> None:
    """Compile the device sim in a process of its own; where that fails, the run counts bytes in Python, and says so."""
    with open(results / "build_sim.txt", "w") as log:
        subprocess.run([sys.executable, "-m", "harness.sim"], stdout=log, stderr=log, env=_environment())


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}


class Watch:
    """One worker process, its events, its memory and its end."""

    def __init__(self, job: Job, key: str, path: Path, folders: tuple[Path, ...], log: Any, report: Report) -> None:
        self.job, self.key, self.report = job, key, report
        self.peaks = {"host_anonymous": 0, "host_shared": 0}
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.phase, self.started, self.timed_out, self.interrupted = "start", time.time(), False, False
        reader, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.worker"],
            stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(writer,), start_new_session=True, text=True,
            env=_environment(),
        )  # fmt: skip
        os.close(writer)
        self.events = os.fdopen(reader, "rb", buffering=0)
        order = {"job": job.to_dict(), "key": key, "record": str(path), "events": writer}
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it died already: follow() will say so
            self.process.stdin.write(json.dumps({**order, "folders": [str(folder) for folder in folders]}) + "\n")
            self.process.stdin.flush()

    def follow(self) -> None:
        """Take in events and samples until the worker has closed its end of the pipe and is gone."""
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.events, selectors.EVENT_READ)
            while True:
                try:
                    ready = selector.select(SAMPLE_SECONDS)
                    if not ready and self.process.poll() is not None:
                        break  # a child of the worker may still hold the pipe open
                    if ready:
                        chunk = self.events.read(65536)
                        if not chunk:
                            break
                        *lines, pending = (pending + chunk).split(b"\n")
                        for line in lines:
                            self._take(json.loads(line))
                    self._sample()
                    self._check_deadline()
                except KeyboardInterrupt:
                    if self.interrupted:
                        raise
                    self.interrupted = True
                    self._signal(signal.SIGINT)
        self.process.wait()
        if self.interrupted:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Leave no process behind."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.events.close()
        if self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def obituary(self) -> Record:
        """The record of a worker that could not write its own: what it had reported, and how it ended."""
        status, reason = self._classify()
        return Record(
            job=self.job, key=self.key, status=status, phase=self.phase, reason=f"{reason} at {self.phase}",
            evidence={"returncode": self.process.returncode}, clock=self.job.device, started=self.started,
            machine=machine.facts(), software=machine.software(), losses=self.losses, step_seconds=self.step_seconds,
        )  # fmt: skip

    def overtime(self) -> str:
        return f"ran longer than its {self.job.budget.seconds:g} seconds"

    def _classify(self) -> tuple[str, str]:
        if self.timed_out:
            return "timeout", self.overtime()
        if self.interrupted:
            return "interrupted", "interrupted"
        code = self.process.returncode
        if code == -signal.SIGKILL:
            return "killed", "killed by SIGKILL from outside"
        if code < 0:
            return "crash", f"ended by {signal.Signals(-code).name}"
        return "crash", f"ended with exit code {code} and no record; its log has the rest"

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "phase":
            self.phase = event["phase"]
        elif event["event"] == "step":
            self.phase = f"step {event['step']}"
            self.losses.append(event["loss"])
            self.step_seconds.append(event["seconds"])
        self.report(event)

    def _sample(self) -> None:
        """Anonymous and shared memory of the worker and its children; pinned memory counts as either."""
        anonymous = shared = 0
        with contextlib.suppress(psutil.Error):
            worker = psutil.Process(self.process.pid)
            for process in [worker, *worker.children(recursive=True)]:
                sizes = _resident_bytes(process.pid)
                anonymous, shared = anonymous + sizes[0], shared + sizes[1]
        self.peaks["host_anonymous"] = max(self.peaks["host_anonymous"], anonymous)
        self.peaks["host_shared"] = max(self.peaks["host_shared"], shared)

    def _check_deadline(self) -> None:
        limit = self.job.budget.seconds
        overtime = time.time() - self.started - limit if limit else -1.0
        if overtime > 0 and not self.timed_out:
            self.timed_out = True
            self._signal(signal.SIGTERM)
        if overtime > GRACE_SECONDS:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _resident_bytes(pid: int) -> tuple[int, int]:
    """Anonymous and shared resident bytes of a process; all of it as anonymous where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
        if "RssAnon" in sizes:
            return sizes["RssAnon"], sizes.get("RssShmem", 0)
    except OSError:
        pass
    return psutil.Process(pid).memory_info().rss, 0
