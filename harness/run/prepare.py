"""Compiles what a job still needs, in processes of their own, outside of any run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.core import log_lines, method
from harness.core.job import Job
from harness.devices import cgroup, sim
from harness.run.launch import Report, worker_environment


def prepare(job: Job, results: Path, folders: tuple[Path, ...], report: Report) -> None:
    """Compile what the job's method or device still needs; announced, once, outside of any run."""
    missing = method.create(job.method, job.options, folders).to_build()
    if missing:
        report({"event": "build", "text": f"building {missing}"})
        group = cgroup.current()
        kills = group.oom_kills() if group else 0
        build(job, results, folders)
        if method.create(job.method, job.options, folders).to_build():
            text = f"that failed, {results / log_lines.BUILD_LOG.format(job.method)} says why"
            if group and group.oom_kills() > kills:  # in a container, or on a cluster, the job's limit holds here, too
                text = "that failed, out of host memory: once without --host-memory, or with more of it, compiles it"
            report({"event": "warning", "text": text})
    if job.device == "sim" and sim.to_build():
        report({"event": "build", "text": f"building {sim.to_build()}"})
        build_sim(results)


def build(job: Job, results: Path, folders: tuple[Path, ...]) -> None:
    """Let the method compile what it needs, in a process of its own, to the end; the log lies beside the records.

    Where it fails, the method's own run says so.
    """
    order = {"method": job.method, "options": job.options, "folders": [str(folder) for folder in folders]}
    _run("harness.run.build", results / log_lines.BUILD_LOG.format(job.method), json.dumps(order))


def build_sim(results: Path) -> None:
    """Compile the device sim in a process of its own; where that fails, the run counts bytes in Python, and says so."""
    _run("harness.devices.sim", results / log_lines.BUILD_LOG.format("sim"), "")


def _run(module: str, log_path: Path, order: str) -> None:
    """In a session of its own: no compiler outlives an interrupted call."""
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
            env=worker_environment(), start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(order)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
