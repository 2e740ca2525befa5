"""Compiles the libraries that a job's method or device lacks. Each compilation is a process that ends before the run
begins, so that it takes no time of the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.base import cgroup
from harness.base.child_process import run_logged
from harness.core import log_lines, method
from harness.core.job import Job
from harness.devices import sim
from harness.run.launch import Report

_tried_builds: set[tuple[object, ...]] = set()  # builds that this process has tried; no build is tried twice


def prepare(job: Job, results: Path, folders: tuple[Path, ...], report: Report) -> None:
    """Compile the libraries that the job lacks, and report each compilation. The compilers' logs are written into the
    folder `results`.

    No error is raised if a compilation fails: the method's run reports which library is missing, and Python counts the
    bytes of sim.
    """
    trained = method.create(job.method, job.options, folders)
    if missing := trained.to_build():
        # two releases of an engine lack libraries of the same name
        identity = tuple(trained.identity().items())
        if _report_first_build(missing, report, folders, identity):
            _build_method(job, results, folders, report)
    if job.device == "sim" and (needed := sim.to_build()) and _report_first_build(needed, report):
        run_logged("harness.devices.sim", None, results / log_lines.BUILD_LOG.format("sim"))


def _build_method(job: Job, results: Path, folders: tuple[Path, ...], report: Report) -> None:
    """Compile what the job's method lacks in a process of its own, and report a failure."""
    group = cgroup.current_group()
    kills = group.oom_kills() if group else 0
    log = results / log_lines.BUILD_LOG.format(job.method)
    run_logged("harness.run.prepare", [job.method, job.options, list(map(str, folders))], log)
    if not method.create(job.method, job.options, folders).to_build():
        return
    text = f"the build failed: see {log}"
    if group and group.oom_kills() > kills:
        # the memory limit of this process may hold for the build, too
        text = "the build failed, out of host memory: try once without --host-memory, or with more of it"
    report({"event": "warning", "text": text})


def _report_first_build(missing: str, report: Report, *identity: object) -> bool:
    """Note and report a build, unless this process has tried it. `identity`: what tells apart builds of the same
    name."""
    if (missing, *identity) in _tried_builds:
        return False
    _tried_builds.add((missing, *identity))
    report({"event": "build", "text": f"building {missing}"})
    return True


def main() -> None:
    """Entry point for run_logged(): read a method's name, options and folders, and call the method's build()."""
    name, options, folders = json.load(sys.stdin)
    method.create(name, options, tuple(map(Path, folders))).build()


if __name__ == "__main__":
    main()
