"""Compiles what a job's method or device still needs: in a process of its own, never in a run that is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.core import log_lines, method
from harness.core.child_process import run_logged
from harness.core.job import Job
from harness.devices import cgroup, sim
from harness.run.launch import Report


def prepare(job: Job, results: Path, folders: tuple[Path, ...], report: Report) -> None:
    """Compile what is missing, and report it. If that fails, the run itself says what it lacks."""
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
    """Let the method compile what it needs; the log lies beside the records."""
    arguments = {"method": job.method, "options": job.options, "folders": [str(folder) for folder in folders]}
    run_logged("harness.run.prepare", arguments, results / log_lines.BUILD_LOG.format(job.method))


def build_sim(results: Path) -> None:
    """Compile the device sim; if that fails, runs count its bytes in Python."""
    run_logged("harness.devices.sim", None, results / log_lines.BUILD_LOG.format("sim"))


def main() -> None:
    """For run_logged(): build() of a method with options."""
    arguments = json.load(sys.stdin)
    folders = tuple(map(Path, arguments["folders"]))
    method.create(arguments["method"], arguments["options"], folders).build()


if __name__ == "__main__":
    main()
