"""What only a CUDA device can show: agreement within the stated tolerances, and bits that no placement changes."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from harness.core import method
from harness.core.job import Job, Workload
from harness.core.record import Record
from harness.jobs import gate
from harness.run import worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
SMALL = Workload(
    num_layers=5, hidden_size=128, num_heads=4, seq_len=64, batch_size=2, vocab_size=512, learning_rate=0.03
)
OTHERS = [name for name in method.names() if name != method.reference() and method.load(name).is_exact]


def dtypes(name: str) -> list[str]:
    return ["fp32", "bf16", *(["fp16"] if method.load(name).scales_loss else [])]


@functools.cache
def trained(name: str, workload: Workload, options: tuple = ()) -> Record:
    record = worker.run(Job(name, workload, dict(options), device="cuda"), name, (), lambda event: None)
    if record.status == "unavailable":
        pytest.skip(record.reason)
    assert record.status == "ok", record.evidence
    return record


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in OTHERS for dtype in dtypes(name)])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_trains_as_resident_within_the_stated_tolerance(name: str, dtype: str, clip_norm: float) -> None:
    workload = dataclasses.replace(SMALL, dtype=dtype, clip_norm=clip_norm)
    verdict = gate.judge(trained(name, workload), trained(method.reference(), workload))
    assert verdict.passed, verdict.text


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_the_window_changes_no_bit(window: int, clip_norm: float) -> None:
    workload = dataclasses.replace(SMALL, clip_norm=clip_norm)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        options = (("resident_layers", 0),)
        ours = trained("stronghold", workload, (*options, ("window_size", window)))
        theirs = trained("stronghold", workload, (*options, ("window_size", 4)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert ours.losses == theirs.losses
    assert {name: t["sha256"] for name, t in ours.tensors.items()} == {
        n: t["sha256"] for n, t in theirs.tensors.items()
    }
