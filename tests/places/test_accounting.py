"""A Slurm that keeps accounts and starts containers: what it remembers of jobs, and jobs in an OCI bundle."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Job
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from places.slurm import Slurm, slurm_states
from tests.support.packages import need
from tests.support.slurm import cluster
from tests.support.tiny import TINY, write_ending
from tests.support.until import until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
RUNTIME = """
RunTimeQuery="runc --root={0} state %n.%u.%j.%s.%t"
RunTimeKill="runc --root={0} kill -a %n.%u.%j.%s.%t"
RunTimeDelete="runc --root={0} delete --force %n.%u.%j.%s.%t"
RunTimeRun="runc --root={0} run %n.%u.%j.%s.%t -b %b"
"""
SEEN = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys", "/tmp", "/root", "/opt")


@pytest.fixture(scope="module")
def accounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    need(("runc",), "runc", "/usr/sbin/runc")
    folder = tmp_path_factory.mktemp("accounted")
    (folder / "runc").mkdir()
    (folder / "oci.conf").write_text(RUNTIME.format(folder / "runc"))
    with cluster(folder, is_accounted=True) as configuration:
        yield configuration


@pytest.fixture(autouse=True)
def environment(accounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(accounted))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )


def test_what_slurm_has_forgotten_its_accounting_tells(tmp_path: Path) -> None:
    lines = 'subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]])\nwhile True: time.sleep(1)'
    folders = (write_ending(tmp_path, lines),)
    plans = [
        resolve(Job("resident", TINY, steps=4, warmup=1)),
        resolve(Job("ending", TINY, {"how": ""}, steps=3, warmup=1), folders),
    ]
    records = Sweep(tmp_path, folders, place=Slurm({"partition": "tests"})).run(plans)
    assert [record.status for record in records] == ["ok", "interrupted"]
    numbers = [record.machine["slurm_job"] for record in records]
    shown = ["scontrol", "-o", "show", "jobs"]
    until(
        lambda: "JobId=" not in subprocess.run(shown, capture_output=True, text=True).stdout, poll_seconds=0.5
    )
    states = slurm_states(numbers)
    assert [states[number].name for number in numbers] == ["COMPLETED", "CANCELLED"]
    assert {state.nodes for state in states.values()} <= {"n1", "n2"}


def test_a_job_trains_in_a_bundle_that_slurm_starts(tmp_path: Path) -> None:
    """Its Python lies where only the container has it."""
    bundle = tmp_path / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    subprocess.run(["runc", "spec", "-b", bundle], check=True)
    settings = json.loads((bundle / "config.json").read_text())
    settings["process"]["terminal"] = False
    settings["root"]["readonly"] = False
    settings["linux"] = {"namespaces": [{"type": "mount"}]}
    del settings["hostname"]
    seen = {**{path: path for path in (*SEEN, str(ROOT), str(tmp_path)) if Path(path).exists()}}
    seen["/harness/.venv"] = str((ROOT / ".venv").resolve())
    settings["mounts"] = [
        {"destination": inside, "source": outside, "type": "bind", "options": ["rbind"]}
        for inside, outside in seen.items()
    ]
    (bundle / "config.json").write_text(json.dumps(settings))
    place = Slurm({"partition": "tests", "container_image": str(bundle)})
    (record,) = Sweep(tmp_path, place=place).run([resolve(Job("resident", TINY, steps=4, warmup=1))])
    assert record.gate.verdict == "exact" and record.machine["image"] == str(bundle)
