"""What the tests of sim do in a process that has that device: one process has one, with the budgets it started with.

call() runs a function of this file in a new process and returns, or raises, what it did.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from harness.core.data import token_batches
from harness.core.job import Budget
from harness.devices import sim
from harness.devices.streams import CpuStreams, SimStreams
from harness.models import gpt
from tests.support import forks
from tests.support.training import TrainingResult, settled, tiny
from tests.support.training import train as train_anywhere
from tests.support.until import until

MIB = 2**20


def call(function: Callable[..., Any], *args: Any, **budgets: Any) -> Any:
    """Start sim with these budgets in a new process and call the function there."""
    return forks.call(_start_and_call, function, args, budgets)


def _start_and_call(function: Callable[..., Any], args: Any, budgets: dict[str, Any]) -> Any:
    pinned_bytes = budgets.pop("pinned_bytes", None)
    sim.start(Budget(**budgets), pinned_bytes)
    return function(*args)


def digest(result: TrainingResult) -> list[Any]:
    """Losses, gradient norms and a hash of every final weight and moment of a training."""
    hashed = hashlib.sha256()
    for state in sorted(result.trained.tensors, key=lambda state: state.name):
        for tensor in (state.weight, state.exp_avg):
            hashed.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return [result.losses, result.grad_norms, hashed.hexdigest()]


def train(name: str, changes: dict[str, Any], options: dict[str, Any], steps: int = 4) -> list[Any]:
    return digest(train_anywhere(name, tiny(**changes), steps, device="sim", **options))


def train_all(cases: list[Any]) -> list[Any]:
    return [train(*case) for case in cases]


def peak_of_training() -> int:
    train("resident", {}, {})
    return sim.started.stats()["device_peak"]


class AtOnce:
    """In place of threads: what several of them hold at once differs from run to run."""

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def map(self, work: Callable[..., Any], given: Iterable[Any]) -> list[Any]:
        return [work(one) for one in given]

    def submit(self, work: Callable[..., Any], *given: Any) -> Future:
        done: Future = Future()
        done.set_result(work(*given))
        return done

    def shutdown(self, **words: bool) -> None:
        pass


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for streams in (CpuStreams, SimStreams):
            patch.setattr(streams, "pool", lambda self, num_threads: AtOnce())
        patch.setattr(gpt, "ThreadPoolExecutor", lambda *cores: AtOnce())
        yield


@one_thread()
def peaks(cases: list[Any]) -> list[tuple[int, int]]:
    """Peak bytes of device and host of each training by one thread."""
    found = []
    for name, workload, options in cases:
        sim.started.reset_peaks()
        train_anywhere(name, workload, 3, device="sim", **options)
        found.append((sim.started.stats()["device_peak"], sim.started.stats()["host_peak"]))
    return found


def copies_of_host_memory(size: int) -> list[Any]:
    """Bytes in use with one tensor of this size, without it again, and whether one byte more is refused."""
    one = torch.empty(size, dtype=torch.uint8)
    used = sim.started.stats()["host_allocated"]
    text = refusal(lambda: torch.empty(1, dtype=torch.uint8))
    del one
    return [used, text, sim.started.stats()["host_allocated"]]


def pinned() -> list[Any]:
    """Three pages and a byte of page-locked memory: as charged, as told, and what a second one meets."""
    one = torch.empty(3 * 4096 + 1, dtype=torch.uint8, pin_memory=True)
    charged = sim.started.stats()
    second = refusal(lambda: torch.empty(4096, dtype=torch.uint8).pin_memory())
    return [charged["pinned_allocated"], charged["host_allocated"], one.is_pinned(), second]


def freed() -> list[int]:
    """Bytes of the device in use: with a tensor, with its storage emptied, filled again, and without it."""
    used = []
    tensor = torch.ones(1000, device="sim")
    used.append(sim.started.stats()["device_allocated"])
    tensor.untyped_storage().resize_(0)
    used.append(sim.started.stats()["device_allocated"])
    tensor.untyped_storage().resize_(8000)
    used.append(sim.started.stats()["device_allocated"])
    del tensor
    used.append(sim.started.stats()["device_allocated"])
    return used


def refused_in_backward() -> list[Any]:
    """The text of running out in a backward pass, and whether the same pass goes well afterwards with less."""
    weight = torch.ones(512, 512, device="sim", requires_grad=True)  # 1 MiB; its gradient is another
    ballast = torch.empty(MIB + MIB // 2, dtype=torch.uint8, device="sim")
    text = refusal(lambda: weight.mul(1.0).sum().backward())
    left = sim.started.stats()["device_allocated"]
    del ballast
    weight.sum().backward()
    return [text, left, float(weight.grad.sum().item())]


def mixed_operation() -> str:
    return refusal(lambda: torch.ones(3, device="sim") + torch.ones(3))


def number_of_the_host() -> list[float]:
    return (torch.ones(2, device="sim") * torch.tensor(3.0)).tolist()


def time_of_copies(num_bytes: int) -> dict[str, float]:
    """Seconds of a copy to the device and of one back."""
    host, device = (torch.zeros(num_bytes, dtype=torch.uint8, device=name) for name in ("cpu", "sim"))
    return {"in": seconds(lambda: device.copy_(host)), "out": seconds(lambda: host.copy_(device))}


def work_beside_a_copy(num_bytes: int) -> None:
    """Copy on another stream and compute meanwhile, until the copy has not ended before the computation."""
    host = torch.zeros(num_bytes, dtype=torch.uint8)
    device, other = (torch.zeros(num_bytes, dtype=torch.uint8, device="sim") for _ in range(2))
    stream = torch.get_device_module("sim").Stream()

    def is_under_way() -> bool:
        with stream:
            device.copy_(host, non_blocking=True)
        done = stream.record_event()
        other.add_(1)
        has_ended = done.query()
        done.synchronize()
        return not has_ended

    until(is_under_way)


def order_on_one_stream(num_bytes: int) -> float:
    """Seconds until an operation that follows a non-blocking copy on its stream has run."""
    host = torch.zeros(num_bytes, dtype=torch.uint8)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device="sim")
    return seconds(lambda: (there.copy_(host, non_blocking=True), there.add_(1)))


def step_seconds(name: str, options: dict[str, Any]) -> float:
    """Of the fastest of the last steps of a model whose layers are 0.2 MB."""
    workload = tiny(num_layers=6, hidden_size=64, num_heads=4)
    batches = [(inputs.to("sim"), targets.to("sim")) for inputs, targets in token_batches(workload, 4)]
    moments = [time.perf_counter() for _ in settled(name, options, workload).train(workload, batches, "sim")]
    return min(after - before for before, after in itertools.pairwise(moments))


def refusal(work: Any) -> str:
    """What an operation that cannot be done says."""
    try:
        work()
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def hydra(device_memory: int | None, words: dict[str, Any], is_whole: bool = False) -> list[str]:
    """Where each of four models that take turns parts from plain training; they may start as one shard each."""
    from methods.hydra import ModelOrchestrator
    from tests.methods.sharding.test_orchestrator import difference, tasks
    from tests.methods.sharding.test_rehearsal import FOUR

    together = tasks(FOUR)
    for task in together if is_whole else ():
        task.shards = [len(task.layers)]
    orchestrator = ModelOrchestrator(together, ["sim"], device_memory=device_memory, **words)
    orchestrator.generate()
    orchestrator.train_models()
    return [difference(task, seed) for seed, task in enumerate(together)]


def hydra_peaks(budgets: list[int]) -> list[int]:
    """Of the same without a limit: the device's peak for each memory that shards are made for. What a partition takes
    is foretold once, whichever memory asks for it."""
    from methods.hydra import ModelOrchestrator

    foretell, known = ModelOrchestrator._foretold_bytes, {}

    def remembered(orchestrator: Any, lengths: list[list[int]]) -> int | None:
        if str(lengths) not in known:
            known[str(lengths)] = foretell(orchestrator, lengths)
        return known[str(lengths)]

    ModelOrchestrator._foretold_bytes = remembered
    found = []
    for budget in budgets:
        sim.started.reset_peaks()
        assert hydra(budget, {}) == ["", "", "", ""]
        gc.collect()
        found.append(sim.started.stats()["device_peak"])
    return found
