"""The same records, judged in a sweep and as an archive: the verdicts agree, and no archive's verdict is the better."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.core import method
from harness.core.job import Job
from harness.core.record import Record, read_all
from harness.gate.archive import Archive
from harness.gate.probe import FOLDER, METHODS, STEPS, Extent
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from tests.support import forks
from tests.support.tiny import TINY

JOB = resolve(Job("l2l", TINY, steps=4, warmup=1))[0]
EXTENT = Extent(1, STEPS)
Change = Callable[[Record], Record]


def software(**facts: Any) -> Change:
    return lambda record: dataclasses.replace(record, software={**record.software, **facts})


def fields(**values: Any) -> Change:
    return lambda record: dataclasses.replace(record, **values)


# For each change: whose record it changes (the run's, its reference's, its probe's, the probe's reference's), and how.
CHANGES: dict[str, tuple[str, Change]] = {
    "nothing": ("run", lambda record: record),
    "an earlier verdict": (
        "run",
        fields(gate=dataclasses.replace(Record(JOB, "", "ok").gate, verdict="failed")),
    ),
    "the run's code": ("run", software(changed=["own.py"])),
    "code beyond the run's identity": ("run", software(unlisted=["own.py"])),
    "code beyond the reference's identity": ("reference", software(unlisted=["own.py"])),
    "code beyond the probe's identity": ("probe", software(unlisted=["own.py"])),
    "code beyond the identity of the probe's reference": ("probe's reference", software(unlisted=["own.py"])),
    "the run's losses": ("run", fields(losses=[9.0] * JOB.steps)),
    "the run's data": ("run", fields(data_sha256="other")),
    "a method that is inexact by design": ("run", fields(is_exact=False)),
    "a tensor": ("run", fields(tensors={})),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run, its reference and its probe, as launch.py leaves them."""
    results = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.jobs.sweep.launch", forks.launch)
        (record,) = Sweep(results, probe=EXTENT).run([resolve(JOB)])
    assert record.gate.verdict == "exact" and f"probe: {STEPS} steps" in record.gate.text
    for folder in (results, results / FOLDER):
        for path, record in read_all(folder)[0].items():
            source = method.source_hash(record.job.method, (METHODS,))
            software(source=source)(record).write(path)
    yield results


def of(results: Path, whose: str) -> tuple[Path, Record]:
    folder = results / FOLDER if "probe" in whose else results
    name = method.reference() if "reference" in whose else JOB.method
    return next((path, record) for path, record in read_all(folder)[0].items() if record.job.method == name)


@pytest.mark.parametrize("name", CHANGES)
def test_a_record_is_judged_alike_in_a_sweep_and_as_an_archive(
    name: str, recorded: Path, tmp_path: Path
) -> None:
    whose, change = CHANGES[name]
    results = Path(shutil.copytree(recorded, tmp_path / "results"))
    path, record = of(results, whose)
    change(record).write(path)
    path, record = of(results, "run")
    archive = Archive(*(list(read_all(folder)[0].values()) for folder in (results, results / FOLDER)))
    in_archive = archive.judge(record)
    events: list[dict] = []
    in_sweep = Sweep(results, probe=EXTENT, report=events.append)._judge(path).gate
    assert "start" not in [event["event"] for event in events]  # else other records would be judged
    if name == "an earlier verdict":  # an archive's runs are judged no better than they were sent
        assert (in_archive.verdict, in_sweep.verdict) == ("failed", "exact")
        return
    assert (in_archive.verdict, in_archive.reason) == (in_sweep.verdict, in_sweep.reason)
    assert in_archive.passed == (name in ("nothing", "a method that is inexact by design"))
