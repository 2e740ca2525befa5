"""Every call that the project writes is one that runs: each is collected and run, those that would train as plans."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from cli.job_options import make_jobs
from harness.base.checkout import ROOT
from harness.core import method
from harness.core.job import Job
from harness.models import named_models
from harness.plan.fit import resolve
from papers.figures import case
from tests.support import calls, records
from tests.support.cli import run
from tests.support.tiny import TINY

CALLS = calls.calls()
OF_JOBS = ("run", "sweep", "plan", "search")
OF_RESULTS = ("report", "bundle", "compare", "fairness", "verify")
# Taken by the door, and not run here: they build, install, serve, wait for machines, train or measure for minutes, or
# need files that the reader has; each has tests of its own.
ONLY_READ = (
    "setup",
    "demo",
    "notebook",
    "image",
    "varuna launch",
    "varuna profile",
    "varuna configure",
    "check-method",
    "import",
    "add",
    "doctor --calibrate",
    "rates",
    "releases",
    "verify --cases",
)
# What a plan does not have, each with a value.
OF_PLACES = {"--on", "--slurm", "--kubernetes", "--image", "--trace", "--save", "--out", "--repeats", "--of"}
# Models whose plans take most of a minute, each with one of its type that is planned instead.
SMALLER = {"Qwen/Qwen3-8B": "Qwen/Qwen3-0.6B", "Llama-3.1-8B": "Llama-3.2-1B"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each method that a call compares."""
    folder = tmp_path_factory.mktemp("results")
    made = [records.record(Job(name, TINY), key=name, started=1e9) for name in ("resident", "stronghold")]
    records.write(folder, *made)
    return folder


def as_plan(words: list[str]) -> list[str]:
    """The plan of what the call would train."""
    rest = words[1:] if words[0] in ("run", "sweep", "plan") else words[2:] if words[0] == "search" else words
    kept = [
        word for place, word in enumerate(rest) if not {word, *rest[max(0, place - 1) : place]} & OF_PLACES
    ]
    return ["plan", *kept]


def test_calls_are_found_everywhere() -> None:
    assert len(CALLS) > 80
    for each in (
        "./run.sh --as sc22 -m all -l 32",
        "./run.sh varuna configure --profile FOLDER --gpus N --batch B",
        "./run.sh plan -m l2l -l 2 -h 256 --machine v100-vm",
        "./run.sh case 3 --profile demo",
    ):
        assert each in CALLS


@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_is_written_runs(
    call: str, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a call may write
    (tmp_path / "cluster.yaml").write_text("nodes: 2\n")  # a file that the reader has
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    filled = calls.filled(call)
    for name in SMALLER.keys() & {*filled}:
        named_models.load(name)
    words, told = calls.parsed([SMALLER.get(word, word) for word in filled])
    verb = next(iter(words), "")
    if "--help" in words:
        assert run("--help").returncode == 0
        return
    if len(words) == 1 and verb in (*OF_JOBS, "import", "check-method", "completion", "varuna"):
        return  # a verb's name in a sentence
    if any(words[: len(each.split())] == each.split() for each in ONLY_READ):
        return
    if verb == "case":
        # 11 is CONTRIBUTING's
        assert words[1] in ("all", "overlap", "11", *case.numbers(), *map(str, case.numbers()))
    elif verb in OF_JOBS or verb.startswith("-"):
        for job in make_jobs({**told, "num_layers": [min(told["num_layers"][-1], 32)]}, ()):
            with contextlib.suppress(method.Unavailable):
                resolve(job)
        planned = run(*as_plan(words))
        assert planned.returncode == 0, planned.stderr
    elif verb in OF_RESULTS:
        out = ["--out", tmp_path / "made"] if verb in ("report", "bundle") else []
        ended = run(*words, "--results", results, *out)
        assert ended.returncode in (0, 1), ended.stderr
    else:
        ended = run(*words, *(["--results", results] if verb == "advise" else []))
        assert ended.returncode == 0, ended.stderr
