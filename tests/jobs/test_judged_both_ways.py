"""The same records, judged in a sweep and as an archive: the verdicts agree, and no archive's verdict is the better."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.core import method
from harness.core.job import Budget, Job
from harness.core.record import Record, read_all
from harness.gate.archive import Archive
from harness.gate.probe import FOLDER, METHODS, STEPS, Extent
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from tests.support import forks, records
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


OTHER_BITS = fields(tensors={"wte": {**records.TENSOR, "sha256": "other", "moved": 2.0}})
# How a sweep's records may be changed without making it run one of them again.
DOUBTS: list[Change] = [
    software(unlisted=["own.py"]),
    fields(losses=[9.0] * STEPS),
    fields(grad_norms=[2.0] * STEPS),
    fields(data_sha256="other"),
    fields(tensors={}),
    fields(tensors={"wte": {**records.TENSOR, "changed": 0.0}}),
    OTHER_BITS,
    fields(is_exact=False),
    fields(bit_exact=True),
]
SMALL_BUDGET = Budget(
    device_bytes=resolve(Job("resident", dataclasses.replace(TINY, num_layers=4))).plan.device_bytes
)
KINDS = [
    Job("l2l", TINY),
    Job("l2l", dataclasses.replace(TINY, dtype="bf16")),
    Job("megatron-lm", dataclasses.replace(TINY, dropout=0.1)),
    Job("hydra", TINY, {"num_models": 2}),
    Job("stronghold", dataclasses.replace(TINY, num_layers=12), {"window_size": 2}, SMALL_BUDGET),
]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A folder for each kind of job, with its records as a sweep leaves them; no job was trained."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.jobs.sweep.launch", records.launch)
        patch.setattr(method, "source_hash", functools.cache(method.source_hash))
        patch.setattr("harness.jobs.sweep.prepare", lambda *arguments: None)
        for kind in KINDS:
            results = tmp_path_factory.mktemp("kind")
            planned = resolve(dataclasses.replace(kind, steps=STEPS, warmup=1))
            Sweep(results, probe=EXTENT).run([planned])
            of_method = {
                path: record
                for path, record in read_all(results / FOLDER)[0].items()
                if record.job.method == kind.method
            }
            for path, record in of_method.items():
                # a probe of other bits makes the sweep train the roundings
                OTHER_BITS(record).write(path)
            Sweep(results, probe=EXTENT).run([planned])
            for path, record in of_method.items():
                record.write(path)
            Sweep(results, probe=EXTENT).run([planned])
            for folder in (results, results / FOLDER):
                for path, record in read_all(folder)[0].items():
                    software(source=method.source_hash(record.job.method, (METHODS,)))(record).write(path)
            folders[kind.method + kind.workload.dtype] = results
        yield folders


@given(data=st.data())
@settings(
    max_examples=20,
    phases=[Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_whatever_is_wrong_with_a_record_it_is_judged_alike_both_ways(
    data: st.DataObject, kinds: dict[str, Path], read_once: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of runs, references, twins, probes and roundings, any two may be wrong."""
    recorded = kinds[data.draw(st.sampled_from(sorted(kinds)))]
    results = Path(shutil.copytree(recorded, tmp_path_factory.mktemp("changed") / "results"))
    paths = sorted(results.rglob("log_*.json"))
    for _ in range(data.draw(st.integers(0, 2))):
        path = data.draw(st.sampled_from(paths))
        data.draw(st.sampled_from(DOUBTS))(Record.read(path)).write(path)
    runs, probes = (list(read_all(folder)[0].values()) for folder in (results, results / FOLDER))
    events: list[dict] = []
    sweep = Sweep(results, probe=EXTENT, report=events.append)
    for path, record in read_all(results)[0].items():
        events.clear()
        in_archive, in_sweep = Archive(runs, probes).judge(record), sweep._judge(path).gate
        if "start" in [event["event"] for event in events]:  # the archive lacks what the sweep runs now
            assert not in_archive.passed
        elif record.is_judged:
            assert (in_archive.verdict, in_archive.reason) == (in_sweep.verdict, in_sweep.reason)
