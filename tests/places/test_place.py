"""An order: what a job elsewhere is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.job import Job
from harness.core.method import Unavailable
from harness.run.place import OrderedJob
from methods.engines import release
from places.torchrun import Torchrun
from tests.support import cli, tiny
from tests.support.tiny import TINY


@pytest.mark.parametrize(("name", "is_forwarded"), [("OMP_THREAD_LIMIT", True), ("LD_PRELOAD", False)])
def test_variables_of_threads_and_kernels_are_there_as_they_are_here(
    monkeypatch: pytest.MonkeyPatch, name: str, is_forwarded: bool
) -> None:
    monkeypatch.setenv(name, "1")
    assert (
        OrderedJob(Job("resident", TINY), "key", Path("stem")).order(())["environment"].get(name) == "1"
    ) is is_forwarded


RELEASED = Job("deepspeed", TINY, {"release": "0.18.9"})


def test_a_release_is_installed_before_its_job_is_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed by the order, it would change the job's key."""
    monkeypatch.setattr(release, "ENGINES", tmp_path)
    place = Torchrun([])
    with pytest.raises(
        Unavailable, match=r"^--option release=0\.18\.9 is not installed: run once without --on$"
    ):
        place.check(RELEASED, ())
    place.check(Job("deepspeed", TINY), ())
    (wanted := release.Release("deepspeed", "0.18.9")).packages.mkdir(parents=True)
    (wanted.folder / release.FACTS_FILE).write_text('{"archive": "deepspeed.tar.gz", "sha256": "ab"}')
    place.check(RELEASED, ())


def test_a_release_needs_a_place_without_packages_of_its_own(tmp_path: Path) -> None:
    done = cli.run(
        "-m",
        "deepspeed",
        "--option",
        "release=0.18.9",
        *tiny.WORDS[2:],
        "--on",
        "kubernetes",
        "--dry-run",
        "--results",
        tmp_path,
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "error: --on: expected a place that uses this .venv for"
    )
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
