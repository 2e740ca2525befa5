"""Compiles what a job still needs, in processes of their own, outside of any run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness import method, published, sim
from harness.launch import Report, worker_environment
from harness.spec import Job


def prepare(job: Job, results: Path, folders: tuple[Path, ...], report: Report) -> None:
    """Compile what the job's method or device still needs; announced, once, outside of any run."""
    missing = method.create(job.method, job.options, folders).to_build()
    if missing:
        report({"event": "build", "text": f"building {missing}"})
        build(job, results, folders)
        if method.create(job.method, job.options, folders).to_build():
            log = results / published.BUILD_LOG.format(job.method)
            report({"event": "warning", "text": f"that failed, {log} says why"})
    if job.device == "sim" and sim.to_build():
        report({"event": "build", "text": f"building {sim.to_build()}"})
        build_sim(results)


def build(job: Job, results: Path, folders: tuple[Path, ...]) -> None:
    """Let the method compile what it needs, in a process of its own, to the end; the log lies beside the records.

    Where it fails, the method's own run says so.
    """
    order = {"method": job.method, "options": job.options, "folders": [str(folder) for folder in folders]}
    with open(results / published.BUILD_LOG.format(job.method), "w") as log:
        subprocess.run(
            [sys.executable, "-m", "harness.build"],
            input=json.dumps(order), stdout=log, stderr=log, text=True, env=worker_environment(),
        )  # fmt: skip


def build_sim(results: Path) -> None:
    """Compile the device sim in a process of its own; where that fails, the run counts bytes in Python, and says so."""
    with open(results / published.BUILD_LOG.format("sim"), "w") as log:
        subprocess.run([sys.executable, "-m", "harness.sim"], stdout=log, stderr=log, env=worker_environment())
