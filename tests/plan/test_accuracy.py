"""The forecast that is held beside a record is one of the steps that the record timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.job import GIB, Job, Workload
from harness.core.method import create
from harness.core.rates import Rates
from harness.devices import named_machines
from harness.plan import accuracy
from methods.engines import user_config
from tests.papers.figures.test_case import record


@pytest.mark.parametrize(
    ("norms", "clipping"),
    [
        ([3.0] * 10, "deferred"),  # every step follows a clipped one
        ([0.5] * 10, "speculate"),
        ([3.0] * 5 + [0.5] * 5, "speculate"),  # only the first of the five timed steps follows a clipped one
        ([0.5] * 5 + [3.0] * 5, "deferred"),
    ],
)
def test_most_timed_steps_say_whether_speculation_is_foretold(norms: list[float], clipping: str) -> None:
    job = Job("stronghold", Workload(clip_norm=1.0), {"clipping": "speculate"}, steps=10, warmup=5)
    assert create("stronghold", job.options).as_timed(job, norms) == create(
        "stronghold", {"clipping": clipping}
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [("deepspeed", "zero_optimization: {stage: 1}"), ("fsdp2-offload", "distributed_type: FSDP")],
)
def test_a_record_that_names_a_file_is_not_planned(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file may be any of this machine; a run's own record has the text instead of the name."""
    (file := tmp_path / "config.yaml").write_text(text)
    job, reads = Job(name, Workload(), {"config": str(file)}), list[str]()
    monkeypatch.setattr(user_config, "read_text", lambda path: reads.append(path) or Path(path).read_text())
    monkeypatch.setattr(accuracy, "rates_of_record", lambda record: Rates(1e12))
    assert accuracy.forecast_of_record(record(job)) is None and not reads


# What NVIDIA's driver calls GPUs, with their memory in GiB.
@pytest.mark.parametrize(
    ("gpu", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-80"),
        ("NVIDIA A10", 22.5, "a10"),
        ("NVIDIA RTX A1000", 8.0, None),
        ("NVIDIA L40", 44.5, None),
        ("NVIDIA L40S", 44.5, "l40s"),
        ("NVIDIA H200", 139.8, "h200-141"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100"),
        ("", 0.0, None),
    ],
)
def test_a_gpu_s_machine_is_found_by_its_words_and_its_memory(
    gpu: str, gib: float, expected: str | None
) -> None:
    assert named_machines.of_gpu(gpu, int(gib * GIB)) == expected


def test_runs_on_a_gpu_count_for_each_of_its_machines() -> None:
    names = [name for name in named_machines.names() if named_machines.has_gpu(name, "NVIDIA H200")]
    assert names == ["h200", "h200-141"]
