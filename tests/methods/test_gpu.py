"""What only a CUDA device can show: agreement within the stated tolerances, and bits that no placement changes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.base.checkout import ROOT
from harness.core import method
from harness.core.job import Job, Workload
from harness.core.record import Record
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from harness.run import worker
from harness.run.prepare import prepare
from methods.hydra import ModelOrchestrator, ModelTask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
DEVICE = "cuda"
SMALL = Workload(
    num_layers=5, hidden_size=128, num_heads=4, seq_len=64, batch_size=2, vocab_size=512, learning_rate=0.03
)
OTHERS = [name for name in method.names() if name != method.reference() and method.load(name).is_exact]


def dtypes(name: str) -> list[str]:
    return ["fp32", "bf16", *(["fp16"] if method.load(name).scales_loss else [])]


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in OTHERS for dtype in dtypes(name)])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_trains_as_resident_within_the_stated_tolerance(
    name: str, dtype: str, clip_norm: float, shared_results: Path
) -> None:
    """In a process of its own: DeepSpeed starts only once in a process."""
    record = Sweep(shared_results).run(
        [resolve(Job(name, dataclasses.replace(SMALL, dtype=dtype, clip_norm=clip_norm), device=DEVICE))]
    )[0]
    if record.status == "unavailable":
        pytest.skip(record.reason)
    assert record.status == "ok", record.reason
    assert record.gate.passed, record.gate.text


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that add in one order only, or an error: of attention, those of plain matrix products."""
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def trained(workload: Workload, options: dict, folder: Path) -> Record:
    job = Job("stronghold", workload, options, device=DEVICE)
    prepare(job, folder, (), lambda event: None)
    record = worker.train_here(job, "", (), lambda event: None)
    assert record.status == "ok", record.evidence
    return record


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_the_window_changes_no_bit(clip_norm: float, exact: None, tmp_path: Path) -> None:
    workload = dataclasses.replace(SMALL, clip_norm=clip_norm)
    windows = [{"resident_layers": 0, "window_size": window} for window in (1, 2, 3, 4, 5)]
    assert_same_bits([trained(workload, options, tmp_path) for options in windows])


def test_a_streamed_layers_update_gives_the_hosts_bits(exact: None, tmp_path: Path) -> None:
    """In bf16, where both keep the master in two halves."""
    workload = dataclasses.replace(SMALL, dtype="bf16")
    assert_same_bits(
        [trained(workload, {"placement": each, "window_size": 2}, tmp_path) for each in ("W5", "S5", "S2W3")]
    )


def assert_same_bits(records: list[Record]) -> None:
    assert len({tuple(record.losses) for record in records}) == 1
    weights = [{name: tensor["sha256"] for name, tensor in record.tensors.items()} for record in records]
    assert all(each == weights[0] for each in weights)


BITS = """
import hashlib, sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from harness.core.job import Job, Workload
from harness.run import worker

torch.use_deterministic_algorithms(True)
workload = Workload(6, 512, 8, 64, 4, vocab_size=512, dtype=sys.argv[2])
with sdpa_kernel(SDPBackend.MATH):
    job = Job("stronghold", workload, {"placement": "W6"}, device=sys.argv[1])
    record = worker.train_here(job, "", (), lambda event: None)
assert record.status == "ok", record.evidence
print("BITS", hashlib.sha256(repr([record.losses, sorted(record.tensors.items())]).encode()).hexdigest())
"""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocking_launches_change_no_bit(dtype: str) -> None:
    """With them nothing overlaps, so what differs is a race."""
    told = []
    for blocking in ("0", "1"):
        environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": blocking, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, "-c", BITS, DEVICE, dtype]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert "BITS" in done.stdout, done.stderr[-2000:]
        told.append(done.stdout.split("BITS")[1])
    assert told[0] == told[1]


def test_hydras_random_state_of_a_gpu_is_that_of_torchs_generator() -> None:
    task = ModelTask("linear", nn.Sequential(nn.Linear(2, 2)), nn.functional.mse_loss, [()], 0.1)
    _, on_gpu = ModelOrchestrator([task], [f"{DEVICE}:0"])._random(258)
    assert torch.equal(on_gpu, torch.Generator(DEVICE).manual_seed(258).get_state())


def test_a_model_of_ones_own_trains_within_a_memory_limit() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    data = [(torch.randn(8, 64), torch.randn(8, 64)) for _ in range(3)]
    task = ModelTask("own", model, torch.nn.MSELoss(), data, lr=0.05)
    report = ModelOrchestrator([task], [f"{DEVICE}:0"], device_memory=2 * 2**30).train_models()
    assert report.failures == {} and len(task.losses) == 3
