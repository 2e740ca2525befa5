"""Exit codes: each of README's table, provoked, and what several jobs make of theirs."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli import exit_codes
from harness.base.checkout import ROOT
from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from tests.support import cli, tiny

README = (ROOT / "README.md").read_text().split("| exit code | meaning |")[1].split("\n\n")[0]
WITHOUT_TRAINING = {0: "fairness --help", 1: "verify --against published", 2: "-m strongholt"}
ENDS = {
    3: "raise KeyError('any')",
    4: "raise torch.OutOfMemoryError('any')",
    5: "loss = 2.5",
    7: "raise Unavailable('an engine is missing')",
}


def end(folder: Path, how: str, *arguments: object) -> int:
    """The exit code of a run by a method that does, after its first step, what is asked for."""
    lines = "\n".join(f"if self.how == 'of {code}': {line}" for code, line in ENDS.items())
    job = [*tiny.WORDS, "-m", "ending", "--steps", "2", "--option", f"how={how}"]
    return cli.run(
        *job, "--methods", tiny.write_ending(folder, lines), "--results", folder, *arguments
    ).returncode


def test_the_table_has_every_code_that_is_provoked_here_and_no_other() -> None:
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    assert shown == {*WITHOUT_TRAINING, *ENDS, 6, 8, 130} == {0, 1, *exit_codes.BY_STATUS.values(), 2, 5, 8}


@pytest.mark.parametrize("code", WITHOUT_TRAINING)
def test_a_call_that_trains_nothing_ends_in(code: int, tmp_path: Path) -> None:
    assert cli.run(*WITHOUT_TRAINING[code].split(), "--results", tmp_path).returncode == code


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.usefixtures("forked")
def test_a_run_ends_in(code: int, tmp_path: Path) -> None:
    assert end(tmp_path, f"of {code}") == code


def test_a_run_beyond_its_time_ends_in_6(tmp_path: Path) -> None:
    assert end(tmp_path, "", "--timeout", "0.01") == 6


def test_a_call_whose_reader_has_gone_ends_in_130_without_a_word() -> None:
    call = cli.start("--help", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert call.stdout and call.stderr
    call.stdout.close()
    assert (call.stderr.read(), call.wait(60)) == ("", 130)


def test_a_call_without_an_output_takes_no_file_for_one(tmp_path: Path) -> None:
    """The next file that is opened would have the number of the one that was closed."""
    arguments = [sys.executable, "-m", "harness", "verify", "--results", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_too_few_open_files_are_one_line(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "harness", *tiny.WORDS, "--results", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    message = "error: too many open files: raise the limit, ulimit -n 256, and repeat the call\n"
    assert (done.stderr, done.returncode) == (message, 2)


def test_a_lock_that_somebody_made_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "harness-cpu.lock").mkdir()
    done = cli.run(*tiny.WORDS, "--results", tmp_path / "results", HARNESS_LOCKS=str(tmp_path))
    line = (
        f"error: {tmp_path}/harness-cpu.lock: expected a regular file for a lock, got Is a directory; remove it, or set"
        " HARNESS_LOCKS=FOLDER\n"
    )
    assert (done.stderr, done.returncode) == (line, 2)


RECORD = Record(Job("some", Workload()), "k", "ok", gate=Gate("exact"))


@pytest.mark.parametrize(
    ("changes", "single", "several"),
    [
        ({}, 0, 0),
        ({"status": "crash"}, 3, 3),
        ({"status": "oom-host"}, 4, 0),
        ({"status": "oom-device"}, 4, 0),
        ({"gate": Gate("failed")}, 5, 5),
        ({"gate": Gate("failed"), "is_exact": False}, 5, 0),
        ({"gate": Gate("untested", evidence={"reference_ended": "killed"})}, 3, 3),
        ({"gate": Gate("untested", evidence={"reference_ended": "oom-host"})}, 5, 5),
        ({"status": "timeout"}, 6, 0),
        ({"status": "unavailable"}, 7, 0),
        ({"status": "does-not-fit"}, 4, 0),
    ],
)
def test_of_several_jobs_some_ends_are_results(changes: dict, single: int, several: int) -> None:
    record = dataclasses.replace(RECORD, **changes)
    assert exit_codes.of_records([record], is_sweep=False) == single
    assert exit_codes.of_records([RECORD, record], is_sweep=False) == several
