"""The examples of CONTRIBUTING.md beside the method, which tests/core/test_method.py runs: each works as it stands."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Job
from harness.core.record import Record
from harness.devices import named_machines
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from harness.run import place as place_file
from papers.claims import claims
from papers.figures import case, profile
from tests.support import records
from tests.support.cli import run
from tests.support.page import page_blocks
from tests.support.tiny import TINY

_, CASE, PLACE = page_blocks("python")
CLAIM, MACHINE = page_blocks("yaml")
FACTS = {"cpu": "some CPU", "cores": 2}


@pytest.fixture
def added(tmp_path: Path) -> list[str]:
    """The words that name the page's case and claim, and results that the case would have."""
    (tmp_path / "case11.py").write_text(CASE)
    (tmp_path / "ten.yaml").write_text(CLAIM)
    case.REGISTRY.add([tmp_path])
    try:
        used = profile.make_profile("demo", None, ("l2l",), FACTS)
        jobs = [resolve(job)[0] for job in case.load_case(11).jobs(used, {})]
    finally:
        case.REGISTRY.forget()
    seconds = {"resident": 1.0, "l2l": 2.0}
    made = [
        records.record(job, seconds[job.method], key=job.method, clock="sim", machine=FACTS, started=1.0)
        for job in jobs
    ]
    records.write(tmp_path / "results", *made)
    return ["--cases", str(tmp_path), "--results", str(tmp_path / "results")]


@pytest.mark.shows("a case draws its figure")
def test_a_case_of_any_folder_is_a_table_and_a_figure(added: list[str]) -> None:
    done = run("case", "11", "--profile", "demo", "--extract", *added)
    assert done.returncode == 0 and [line.split(",")[3] for line in done.stdout.splitlines()] == [
        "method",
        "resident",
        "l2l",
    ]
    assert run("case", "11", "--profile", "demo", "--draw", *added).returncode == 0
    assert sorted(path.suffix for path in Path(added[-1], "figures").iterdir()) == [".csv", ".pdf", ".png"]


def test_a_claim_of_any_file_is_judged_and_the_next_call_knows_nothing_of_it(
    added: list[str], tmp_path: Path
) -> None:
    done = run("verify", *added, "--claims", tmp_path / "ten.yaml")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "SIMULATED: 1 of 1: 11.resident-first"
    assert 11 not in case.numbers() and "11.resident-first" not in {
        claim.id for claim in claims.load_claims()
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("verify --cases /nowhere", "expected a folder of cases, got /nowhere; try --cases FOLDER"),
        ("verify --claims /nowhere", "/nowhere is not a file of claims: "),
        ("verify --methods /nowhere", "expected a folder of methods, got /nowhere; try --methods FOLDER"),
        ("case 3 --methods /nowhere", "expected a folder of methods, got /nowhere; try --methods FOLDER"),
        (
            "verify --machines /nowhere",
            "expected a file of machines, got /nowhere; try --machines FILE, with entries ",
        ),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, words: str, told: str) -> None:
    done = run(*words.split(), "--results", tmp_path)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("metric = 1", "must hold one class of papers.figures.case.Case with jobs(); see CONTRIBUTING.md"),
        (CASE.replace("def jobs", "def job"), "must hold one class of papers.figures.case.Case with jobs()"),
        ("1 +", "does not load: SyntaxError"),
        (
            CASE.replace("samples_per_second", "speed"),
            "metric: expected one of params, samples_per_second, tokens",
        ),
        (CASE.replace('("resident", "l2l")', "()"), "methods: expected names of methods, got none"),
    ],
    ids=["lacking", "unfinished", "broken", "metric", "methods"],
)
def test_a_file_that_is_no_case_is_named(tmp_path: Path, text: str, told: str) -> None:
    number = 800 + len(text)  # modules are loaded once in a process
    (tmp_path / f"case{number}.py").write_text(text)
    for words in (["case", number, "--profile", "demo", "--extract"], ["verify"]):
        done = run(*words, "--cases", tmp_path, "--results", tmp_path)
        assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "case_profile.depth(",
            "case_profile.dpeth(",
            "AttributeError: 'CaseProfile' object has no attribute 'dpeth'",
        ),
        ("16)", "{}[case_profile.kind])", "KeyError: 'demo', case832.py line 11"),
    ],
)
def test_a_case_whose_jobs_fail_is_told_in_a_line(tmp_path: Path, right: str, wrong: str, told: str) -> None:
    number = 831 + ("kind" in wrong)
    (file := tmp_path / f"case{number}.py").write_text(CASE.replace(right, wrong))
    for last in ([], ["--extract"]):
        done = run("case", number, "--profile", "demo", *last, "--cases", tmp_path, "--results", tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {file}'s jobs() fails: {told}")
        assert len(done.stderr.splitlines()) == 1


def test_two_cases_of_one_number_are_refused(tmp_path: Path) -> None:
    (tmp_path / "case1.py").write_text(CASE)
    assert (
        "expected one file of case 1, got "
        in run("verify", "--cases", tmp_path, "--results", tmp_path).stderr
    )


def test_a_machine_is_an_entry(tmp_path: Path) -> None:
    (tmp_path / "machines.yaml").write_text(MACHINE)
    mine = named_machines.load("workstation", tmp_path / "machines.yaml")
    assert (mine.device_bytes, mine.room.host_bytes) == (23 * 2**30, 58 * 2**30) and mine.room.rates


def test_a_machine_of_any_file_is_planned_for_and_the_next_call_knows_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MACHINE)
    words = ("plan", "-m", "l2l", "-l", "2", "-h", "256", "--json")
    by_sizes = run(*words, "--device-memory", "23GiB", "--host-memory", "58GiB")
    by_name = run(*words, "--machine", "workstation", "--machines", tmp_path / "mine.yaml")
    assert json.loads(by_name.stdout)["largest_layers"] == json.loads(by_sizes.stdout)["largest_layers"] > 2
    assert run(*words, "--machine", "workstation").returncode == 2


@pytest.mark.parametrize(
    "words",
    [
        "advise -l 2 -h 2048 --gpu workstation",
        "varuna configure -l 2 -h 256 --gpus 2 --batch 4 --machine workstation",
    ],
)
def test_verbs_that_take_a_machine_find_those_of_a_file(tmp_path: Path, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(MACHINE)
    done = run(*words.split(), "--machines", tmp_path / "mine.yaml")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_case_finds_a_machine_of_a_file_and_names_both(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MACHINE)
    words = (
        "case",
        "3",
        "--profile",
        "fit",
        "--machine",
        "workstation",
        "--machines",
        tmp_path / "mine.yaml",
    )
    done = run(*words, "--extract", "--results", tmp_path)
    call = " ".join(map(str, ["./run.sh", *words]))
    assert done.stderr == f"error: no record of profile fit_workstation here; try {call} first\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "a: {device_memory: 9.0}",
            "a: expected a positive size with KiB, MiB, GiB, TiB, KB, MB, GB, TB, got '9.0'; try 32GiB",
        ),
        ("a: {devicememory: 9GiB}", "a: "),
        ("v100-vm: {device_memory: 9GiB}", "expected one entry named v100-vm, got "),
        ("../a: {device_memory: 9GiB}", "expected a name of letters, digits, ._- and spaces, got '../a'"),
        ("- a", "does not load"),
        ("[" * 100, "does not load"),
    ],
)
def test_a_file_of_wrong_machines_is_told_in_a_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    done = run("plan", "-m", "resident", "--machines", tmp_path / "mine.yaml")
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_link_to_a_file_of_machines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MACHINE)
    (tmp_path / "link.yaml").symlink_to("mine.yaml")
    assert (
        "expected a regular file"
        in run("plan", "-m", "resident", "--machines", tmp_path / "link.yaml").stderr
    )


@pytest.mark.parametrize(
    ("number", "end"), [(12, "raise SystemExit(0)"), (13, "yield __import__('os')._exit(0)")]
)
def test_a_case_whose_jobs_would_end_the_process_is_told_in_a_line(
    tmp_path: Path, number: int, end: str
) -> None:
    """Each of a number of its own: a process imports a name once."""
    (file := tmp_path / f"case{number}.py").write_text(
        CASE.replace("        return", f"        {end}\n        return")
    )
    done = run("case", number, "--cases", tmp_path, "--results", tmp_path)
    told = f"error: {file}'s jobs() ended the process: SystemExit"
    assert done.returncode == 2 and done.stderr.startswith(told) and len(done.stderr.splitlines()) == 1


def test_a_case_without_runs_tells_what_to_run_first(tmp_path: Path) -> None:
    (tmp_path / "case11.py").write_text(CASE)
    done = run("case", "11", "--extract", "--cases", tmp_path, "--results", tmp_path)
    told = "error: case 11: expected --profile, because this case draws only its own runs; try ./run.sh case 11 --cases"
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"{told} {tmp_path}")
        and len(done.stderr.splitlines()) == 1
    )


def test_a_case_that_picks_is_a_table_of_runs_made_by_hand(tmp_path: Path) -> None:
    (tmp_path / "case14.py").write_text(CASE.replace("    methods", "    picks = True\n    methods"))
    records.write(tmp_path / "results", records.record(Job("l2l", TINY)))
    done = run("case", "14", "--extract", "--cases", tmp_path, "--results", tmp_path / "results")
    assert done.returncode == 0 and [line.split(",")[3] for line in done.stdout.splitlines()] == [
        "method",
        "l2l",
    ]


@pytest.mark.heavy
def test_a_place_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """On a machine whose ssh runs the command on this one, in another folder."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift; cd /; exec sh -c "$1"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "results").mkdir()
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "ssh.py").write_text(PLACE)
    place_file.REGISTRY.add([tmp_path / "place"])
    request.addfinalizer(place_file.REGISTRY.forget)
    cls = place_file.load_place("ssh")
    place = cls.of(cls.cli_options("there"), place_file.PlaceCall("cpu"))
    monkeypatch.chdir(tmp_path)
    (record,) = Sweep(Path("results"), place=place).run([resolve(Job("resident", TINY, steps=2, warmup=1))])
    assert isinstance(record, Record) and record.gate.passed and record.machine["on"] == "ssh"
    ssh.write_text("#!/bin/sh\nexit 7\n")
    (record,) = Sweep(tmp_path / "results", place=place, rerun=True).run([resolve(record.job)])
    assert (record.status, record.reason) == ("killed", "ssh ended with exit code 7")


@pytest.mark.parametrize("name", ["run", "test", "notebook", "kubernetes"])
def test_the_lock_has_what_the_project_asks_for(name: str) -> None:
    """By name and version, with a hash in every line; else requirements/renew.sh was forgotten."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] if name == "run" else project["optional-dependencies"][name]
    text = (ROOT / f"requirements/{name}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert {pin.lower() for pin in asked} <= {line.split()[0].lower() for line in lines}
    assert all(
        re.search(r" --hash=sha256:[0-9a-f]{64}( --hash=sha256:[0-9a-f]{64})*$", line) for line in lines
    )
    assert "://" not in text  # no index: whoever sets up has their own
