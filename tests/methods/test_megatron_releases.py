"""Other releases of megatron-core than the installed one train as it does, and say which they are."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from harness.core.job import Job, Workload
from harness.core.method import create
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from methods.engines import release
from methods.engines.release import Release
from tests.support import releases

OLDEST = "0.12.0"
SMALL = Workload(
    num_layers=2, hidden_size=64, num_heads=4, seq_len=32, batch_size=4, vocab_size=512, learning_rate=0.05
)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of that of the releases."""
    monkeypatch.setattr(release, "ENGINES", tmp_path)
    return tmp_path


def implementation(options: dict[str, Any]) -> str:
    return create("megatron-lm", options).describe(SMALL, "cpu")["implementation"]


def test_the_installed_release_needs_no_installation(engines: Path) -> None:
    trained = create("megatron-lm", {})
    assert trained.to_build() is None and trained.identity() == {}
    assert implementation({}) == "upstream: megatron-core"


def test_another_release_is_installed_before_a_run_and_told_with_its_archive(engines: Path) -> None:
    options = {"release": "0.13.1"}
    trained = create("megatron-lm", options)
    assert str(trained.to_build()).startswith("megatron-core 0.13.1, once")
    assert trained.identity() == {} and implementation(options) == "upstream: megatron-core 0.13.1"
    (wanted := Release("megatron-core", "0.13.1")).packages.mkdir(parents=True)
    (wanted.folder / release.FACTS_FILE).write_text(
        json.dumps({"archive": "megatron_core-0.13.1.whl", "sha256": "ab" * 32})
    )
    assert trained.to_build() is None and trained.identity() == {"megatron-core 0.13.1": "ab" * 32}
    assert (
        implementation(options)
        == f"upstream: megatron-core 0.13.1 (megatron_core-0.13.1.whl, sha256 {'ab' * 32})"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"release": "newest"}, "release: expected a version of megatron-core such as 0.18.9, got 'newest'"),
        (
            {"release": "0.11.0"},
            "release: expected megatron-core 0.12 or newer, got 0.11.0; try --option release",
        ),
        (
            {"release": "0.12.3", "distributed_optimizer": True},
            "release: expected megatron-core 0.13 or newer for distributed_optimizer, got 0.12.3; try --option release",
        ),
    ],
    ids=str,
)
def test_a_release_that_cannot_train_is_refused_in_one_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        create("megatron-lm", options)


def test_the_oldest_releases_are_taken(engines: Path) -> None:
    assert create("megatron-lm", {"release": "0.12.0"}).to_build()
    assert create("megatron-lm", {"release": "0.13.0", "distributed_optimizer": True}).to_build()


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_an_older_release_trains_as_the_reference_does_and_its_record_names_it(tmp_path: Path) -> None:
    """In bf16, with micro-batches; the installed release is another one."""
    releases.need("megatron-core", OLDEST)
    load = dataclasses.replace(SMALL, micro_batches=2, dtype="bf16")
    job = resolve(Job("megatron-lm", load, {"release": OLDEST}, steps=5, warmup=1))[0]
    sweep = Sweep(tmp_path)
    record = sweep.run([resolve(job)])[0]
    assert record.gate.passed, record.reason or record.gate.text
    assert record.software["megatron-core"] == OLDEST != version("megatron-core")
    (digest,) = create("megatron-lm", job.options).identity().values()
    assert f"megatron-core {OLDEST}" in record.description["implementation"]
    assert f"sha256 {digest}" in record.description["implementation"]
    assert sweep.key(job) == record.key  # so a second call finds the record
