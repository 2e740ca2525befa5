"""The record of a job on a cluster, by what its nodes left and what the cluster says."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.job import Budget, Job
from harness.core.record import Record
from harness.run.place import OrderedJob
from places.shared.cluster import ClusterReport, complete, killed, out_of_memory
from tests.support.tiny import TINY

ONE = Job("resident", TINY)
REPORT = ClusterReport({"on": "there"}, {"cluster": "told"}, "said\n")


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    return tmp_path / "log_resident"


def test_without_a_record_the_log_has_what_was_said_and_the_clusters_end(stem: Path) -> None:
    record = Record.read(complete(OrderedJob(ONE, "key", stem), None, killed("step 3", "gone"), REPORT))
    assert (record.status, record.reason, record.machine["on"]) == (
        "killed",
        "killed at step 3: gone",
        "there",
    )
    assert record.evidence["cluster"] == "told"
    said, end = Path(f"{stem}.txt").read_text().splitlines()
    assert said == "said" and end.startswith("end") and record.reason in end


def test_a_record_that_is_well_keeps_its_end_and_gets_no_evidence(stem: Path) -> None:
    left = Record(ONE, "key", "ok")
    record = Record.read(complete(OrderedJob(ONE, "key", stem), left, killed("step 3", "gone"), REPORT))
    assert (record.status, record.evidence, record.machine["on"]) == ("ok", {}, "there")


@pytest.mark.parametrize("limit", [None, 2**30])
def test_a_memory_limit_is_the_clusters_where_the_job_set_none(stem: Path, limit: int | None) -> None:
    job = Job("resident", TINY, budget=Budget(host_bytes=limit))
    lost = Record(job, "key", "killed", reason="killed")
    end = out_of_memory("step 3", 2**30)
    record = Record.read(complete(OrderedJob(job, "key", stem), lost, end, REPORT))
    assert record.status == "oom-host" and record.evidence["cluster"] == "told"
    assert record.evidence.get("limit_of") == (None if limit else "the cluster")
