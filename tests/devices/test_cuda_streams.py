"""By CUDA's rules, without a GPU: training on the second of two breaks none, and a bug against each is found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.data import token_batches
from harness.core.job import GIB, Budget, Job
from harness.devices import cuda_budget, machine
from harness.devices.streams import Device, num_update_threads
from harness.gate import inspect_training
from harness.run import worker
from harness.run.timeline import read_timeline
from methods.offload import adamw_cuda
from methods.offload.transfer import copy, queue
from methods.sharding import device_process, gpt
from methods.sharding.device_worker import WorkerOptions
from tests.support import bugs, planting
from tests.support.bugs import Bug
from tests.support.fake_cuda import FakeCuda, FakeEvent
from tests.support.fake_gpu import FakeGpu
from tests.support.training import TrainingResult, settled, tiny, train, train_resident

STEPS = 3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(2).install(monkeypatch)


@pytest.fixture
def running(cuda: FakeCuda) -> Iterator[FakeCuda]:
    with cuda.running():
        yield cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Of 32 GiB, its memory by NVML and by torch.cuda."""
    gpu = FakeGpu(32 * GIB, 0, 0)
    gpu.install_nvml(monkeypatch)
    gpu.install_functions(monkeypatch)
    return gpu


def trained(cuda: FakeCuda, method: str, workload: Any, **options: Any) -> TrainingResult:
    """On the second GPU, its tensors read as the gate reads them."""
    with cuda.running():
        result = train(method, workload, STEPS, "cuda:1", **options)
        for state in result.trained.tensors:
            state.weight.cpu()
            if state.exp_avg is not None:
                state.exp_avg.cpu()
    return result


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_streams_belong_to_the_device_of_their_name(cuda: FakeCuda, name: str, index: int) -> None:
    with Device(name) as device:
        assert {stream.device for stream in (device.compute, device.inbound, device.outbound)} == {index}


def test_threads_work_on_the_device_that_they_were_made_for(cuda: FakeCuda) -> None:
    with Device("cuda:1") as device:
        pools = (device.copier, device.returner, device.threads(2))
        assert {pool.submit(cuda.current_device).result() for pool in pools} == {1}


def test_a_copy_of_the_second_device_records_its_events_there(cuda: FakeCuda) -> None:
    with Device("cuda:1") as device:
        after = device.compute.record_event()
        queued = device.copier.submit(queue, device, "inbound", "weights", "layer", [after], lambda: None)
        assert (after.device, queued.result()[1].device) == (1, 1)


def test_a_thread_of_a_gpu_computes_on_one_core(cuda: FakeCuda) -> None:
    with Device("cuda:1") as device:
        assert device.copier.submit(torch.get_num_threads).result() == 1


def test_two_cores_are_left_to_launch_for_any_gpu() -> None:
    assert num_update_threads("cuda:1") == num_update_threads("cuda")


@pytest.mark.parametrize(
    ("method", "options", "dtype"),
    [
        ("l2l", {}, "fp32"),
        ("l2l", {}, "bf16"),
        ("stronghold", {"placement": "R1W3", "clipping": "speculate", "window_size": 2}, "fp32"),
        ("stronghold", {"placement": "R1P1W2", "window_size": 1}, "bf16"),
        ("stronghold", {"placement": "S2W2", "window_size": 1}, "fp32"),
        ("stronghold", {"placement": "S4", "window_size": 2, "clipping": "speculate"}, "bf16"),
        ("stronghold", {"placement": "R1D1W2", "window_size": 1}, "fp32"),
        ("hydra", {"shard_layers": 1}, "fp32"),
        ("hydra", {"shard_layers": 1, "num_models": 2}, "bf16"),
    ],
    ids=str,
)
def test_training_on_the_second_gpu_breaks_no_rule_and_gives_the_same_losses(
    cuda: FakeCuda, method: str, options: dict, dtype: str
) -> None:
    workload = tiny(num_layers=4, dtype=dtype)
    assert trained(cuda, method, workload, **options).losses == train_resident(workload, STEPS).losses
    assert list(cuda.broken) == []


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.symptom) for bug in bugs.SILENT_BUGS])
def test_an_ordering_bug_is_found_a_second_way(cuda: FakeCuda, bug: Bug) -> None:
    with bugs.planted(bug):
        trained(cuda, bug.method, bug.workload, **bug.options)
    assert any("without a wait" in broken for broken in cuda.broken)


@pytest.mark.parametrize(
    ("file", "old", "new", "rule"),
    [
        # The thread's current stream is not the one that the events are of.
        ("methods/offload/transfer.py", "with device.streams.use(stream):", "if True:", "without a wait"),
        # A copy on another stream reads what is freed, and may be given out again, at once.
        (
            "methods/offload/clip.py",
            "self._send(self.squares[-1])",
            "self._send(self.squares[-1] + 0)",
            "freed to",
        ),
        ("methods/offload/transfer.py", "for event in events:", "for event in ():", "without a wait"),
    ],
    ids=["current stream", "freed while in use", "events"],
)
def test_a_bug_against_a_rule_is_found(cuda: FakeCuda, file: str, old: str, new: str, rule: str) -> None:
    options = {"placement": "W4", "window_size": 2, "clipping": "speculate"}
    with planting.planted(file, old, new):
        trained(cuda, "stronghold", tiny(num_layers=4, clip_norm=100.0), **options)
    assert any(rule in broken for broken in cuda.broken), list(cuda.broken)


def test_streams_of_another_device_are_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    trained(cuda, "stronghold", tiny(num_layers=4), placement="W4", window_size=2)
    assert any("on device 1 while stream" in broken for broken in cuda.broken)


@pytest.mark.parametrize(("name", "is_inherited"), [("cuda", False), ("cpu", True)])
def test_a_forked_child_lacks_the_memory_that_a_gpu_reads(
    running: FakeCuda, name: str, is_inherited: bool
) -> None:
    with Device(name, 1) as device:
        slab = device.room(2**20, torch.float32, host=True)
        mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
        start = f"{slab.data_ptr() & -4096:x}-"
        (flags,) = (after.splitlines()[0].split() for at, after in pairwise(mappings) if f"\n{start}" in at)
        assert ("dc" not in flags) == is_inherited


def test_memory_that_is_not_page_locked_is_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.register = lambda address, size, flags: 0  # type: ignore[method-assign]
    cuda.unregister = lambda address: 0  # type: ignore[method-assign]
    cuda.install(monkeypatch)
    trained(cuda, "stronghold", tiny(num_layers=4), placement="W4", window_size=2)
    assert any("not page-locked" in broken for broken in cuda.broken)


@pytest.mark.parametrize(("code", "status"), [(2, "oom-host"), (712, "crash"), (801, "crash")])
def test_only_a_lack_of_memory_to_lock_is_called_one(
    gpu: FakeGpu, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, code: int, status: str
) -> None:
    """712: the range is locked already. 801: not supported. A crash is tried again, an oom-host is a result."""
    cuda.register = lambda address, size, flags: code  # type: ignore[method-assign]
    cuda.install(monkeypatch)
    with cuda.running():
        record = worker.train_here(
            Job("l2l", tiny(num_layers=2), device="cuda", steps=2, warmup=1), "", (), lambda event: None
        )
    assert record.status == status and f"CUDA error {code}" in record.reason


def test_a_lock_that_is_refused_leaves_no_error_for_the_next_launch(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def launch(*sizes: Any, **options: Any) -> torch.Tensor:
        if "device" in options and codes:
            codes.clear()
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*sizes, **options)

    zeros = torch.zeros
    cuda.register = lambda address, size, flags: codes.append(2) or 2  # type: ignore[method-assign]
    cuda.install(monkeypatch)
    monkeypatch.setattr(torch, "zeros", launch)
    with cuda.running(), Device("cuda", 1) as device:
        with pytest.raises(torch.OutOfMemoryError, match="cannot page-lock"):
            device.room(8, torch.float32, host=True)
        assert len(device.room(8, torch.float32, host=False)) == 8


def test_a_process_for_a_gpu_locks_the_homes_that_it_shares_and_takes_the_share_that_its_parent_may(
    gpu: FakeGpu, cuda: FakeCuda
) -> None:
    workload = tiny(num_layers=2)
    with Device("cpu") as host:
        models = [
            gpt.shards_on_host(workload, [1, 1, 1, 1], host, is_shared=True, in_halves=False)
            for _ in range(2)
        ]
    homes = [shards[0].slabs["weights"].untyped_storage() for shards in models]
    with cuda.running():
        worker = device_process.make_worker("cuda:1", models, WorkerOptions(), 0.25)
        assert cuda.locked == {home.data_ptr(): home.nbytes() for home in homes}
        worker.device.__exit__(None)
    assert sum(map(len, (shard.slabs["weights"] for shard in models[0]))) < homes[0].nbytes()
    assert (cuda.current_device(), gpu.fraction) == (1, 0.25)


def test_a_process_for_a_gpu_takes_the_memory_that_a_user_allows_it(gpu: FakeGpu, cuda: FakeCuda) -> None:
    with cuda.running():
        device_process.make_worker("cuda:1", [], WorkerOptions(device_memory=4 * GIB), 0.75).device.__exit__(
            None
        )
    assert gpu.cap_bytes == pytest.approx(4 * GIB - cuda_budget.CONTEXT_BYTES, abs=1)


def test_how_often_a_rehearsal_emptied_the_allocator_s_cache_is_not_in_the_record(
    cuda: FakeCuda, gpu: FakeGpu
) -> None:
    """A rehearsal may have tried shards that do not fit."""
    gpu.num_retries = 3
    trained(cuda, "hydra", tiny(num_layers=2), shard_layers=1)
    assert worker.memory_of_training("cuda")["num_alloc_retries"] == 0


@pytest.mark.parametrize("waits", [True, False])
def test_page_locked_memory_given_back_in_use_is_found(
    running: FakeCuda, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    if not waits:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with Device("cuda:1") as device:
        slot, home = (device.room(8, torch.float32, host=host) for host in (False, True))
        copy(device, "outbound", "state", "", [device.compute.record_event()], [(home, slot)])
    assert bool(running.broken) is not waits


def test_memory_is_mapped_until_it_is_unlocked(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps pages that are unmapped first, and cannot lock their addresses again."""
    mapped, unregister = [], cuda.unregister

    def noted(address: int) -> int:
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        mapped.append(any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges))
        return unregister(address)

    cuda.unregister = noted  # type: ignore[method-assign]
    cuda.install(monkeypatch)
    with cuda.running(), Device("cuda") as device:
        for _ in range(2):
            device.room(2**22, torch.float32, host=True)
    assert mapped == [True, True]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_stream_that_is_recorded_may_still_use_what_is_freed(running: FakeCuda, is_told: bool) -> None:
    with Device("cuda:1") as device:
        x = torch.ones(8, device="cuda:1")
        device.inbound.wait_event(device.compute.record_event())
        with device.streams.use(device.inbound):
            x.sum()
        if is_told:
            x.record_stream(device.inbound)
        del x
    assert any("freed to" in broken for broken in running.broken) is not is_told


def test_an_event_is_of_one_device(cuda: FakeCuda) -> None:
    event = FakeEvent(cuda)
    event.record(cuda.current_stream(0))
    with pytest.raises(AssertionError, match="an event of device 0"):
        event.record(cuda.current_stream(1))


def test_nobody_waits_for_an_event_that_was_never_recorded(cuda: FakeCuda) -> None:
    with pytest.raises(AssertionError, match="never recorded"):
        cuda.current_stream().wait_event(FakeEvent(cuda))
    with pytest.raises(AssertionError, match="never recorded"):
        FakeEvent(cuda).synchronize()


def test_tensors_of_two_memories_meet_in_copies_alone(running: FakeCuda) -> None:
    with pytest.raises(AssertionError, match="add of tensors of devices"):
        torch.ones(2, device="cuda:1") + torch.ones(2)
    assert (torch.ones(2, device="cuda:1") * torch.tensor(2.0)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["resident", "stronghold", "l2l", "hydra"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_on_a_gpu_makes_a_record_a_trace_and_no_mistake(
    gpu: FakeGpu, cuda: FakeCuda, tmp_path: Path, name: str, dtype: str
) -> None:
    """The worker itself: its clock, budgets and peaks, and the inspection."""
    gpu.num_retries = 2
    inspect_training.sketch_signs()  # the threads share it by functools.cache, whose order is not followed
    file, budget = tmp_path / "trace.json", Budget(device_bytes=4 * GIB)
    job = Job(
        name,
        tiny(num_layers=4, dtype=dtype),
        budget=budget,
        device="cuda",
        steps=5,
        warmup=1,
        trace=str(file),
    )
    with cuda.running():
        record = worker.train_here(job, "key", (), lambda event: None)
    assert record.status == "ok", record.evidence["traceback"]
    assert list(cuda.broken) == [] and "cap of the caching allocator" in record.limits["device"]
    assert record.losses == train_resident(job.workload, 5).losses and len(record.timed_seconds) == 4
    assert record.num_alloc_retries == 2 and set(record.peaks) == {"device_allocated", "device_reserved"}
    assert len(read_timeline(file).steps) >= 2


def test_a_gpus_kernel_is_compiled_before_the_first_step(
    running: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, workload = [], tiny(dtype="bf16")
    monkeypatch.setattr(adamw_cuda, "_compiled_for", lambda device_index: events.append("compiled"))

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        events.append("step")
        for inputs, targets in token_batches(workload, 1):
            yield inputs.to("cuda"), targets.to("cuda")

    next(settled("stronghold", {}, workload).train(workload, batches(), "cuda"))
    assert events[0] == "compiled" and "step" in events


@pytest.fixture
def ieee() -> Iterator[None]:
    """Products of fp32 after the test as before."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


SWITCHES = """
from dataclasses import dataclass

import torch

from methods import resident


@dataclass(frozen=True)
class Switches(resident.Resident):
    is_reference = False

    def train(self, workload, batches, device):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        return (yield from super().train(workload, batches, device))
"""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("by", ["NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "switches"])
def test_a_run_in_fp32_does_not_compute_in_tf32(
    gpu: FakeGpu,
    cuda: FakeCuda,
    ieee: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
    dtype: str,
) -> None:
    if by == "switches":
        (tmp_path / "switches.py").write_text(SWITCHES)
    else:
        monkeypatch.setenv(by, "1")
    job = Job(
        "switches" if by == "switches" else "resident", tiny(dtype=dtype), device="cuda", steps=2, warmup=0
    )
    with cuda.running():
        record = worker.train_here(job, "", (tmp_path,), lambda event: None)
    assert record.status == ("crash" if dtype == "fp32" else "ok"), record.evidence
    assert ("got TF32 by" in record.reason) is (dtype == "fp32")


@pytest.mark.parametrize("is_on", [True, False])
def test_an_older_torchs_switch_to_tf32_is_read(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=is_on))
    assert machine.tf32_settings() == ["torch.backends.cuda.matmul.allow_tf32"] * is_on
