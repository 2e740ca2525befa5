"""The command line as the tests call it: run() in this process, start() in one of its own, to send signals to."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

from cli import job_verbs
from cli import main as door
from cli.job_options import make_jobs
from harness.base.checkout import ROOT
from harness.core.job import Job
from places import docker
from tests.support.until import until


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """./run.sh with these words and variables, in this process; what it prints, and how it exits."""
    command = ["./run.sh", *map(str, words)]
    out, error = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    docker.engine.cache_clear()  # of another DOCKER_HOST
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        try:
            door.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            signal.signal(signal.SIGTERM, handler)
            docker.engine.cache_clear()
    return subprocess.CompletedProcess(command, code, out.getvalue(), error.getvalue())


def jobs_of(call: str) -> list[Job]:
    """The jobs of a call that trains or plans."""
    words = shlex.split(call)[1:]
    return make_jobs(job_verbs.run.make_context("run", words[words[0] == "plan" :]).params, ())


def start(*words: object, **streams: int) -> subprocess.Popen[str]:
    """The same in a process of its own, which takes Ctrl-C even where the tests run in a shell's background."""
    command = [sys.executable, "-m", "harness", *map(str, words)]
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=default, **streams)


def wait_for_steps(results: Path) -> None:
    """Wait until a run has written its first interval of steps to its log."""
    until(lambda: any("iteration" in log.read_text() for log in results.glob("*.txt")))
