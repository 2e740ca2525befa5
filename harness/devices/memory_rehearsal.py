"""A memory rehearsal: finds the memory peaks of a training by running the method's own code on tensors without bytes.

The method's train() runs two steps on FakeTensors, in this process. Meanwhile a Tracker books the bytes that every
storage would take on the device or on the host. The peaks are exact, with two exceptions: memory that only CUDA takes
(its context, fragments of its allocator), and kernels whose buffers differ from the CPU's. A step must not depend on a
computed number, because every number that it reads from a tensor is 0.5.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from harness.core.job import Job, Room, Workload
from harness.core.method import Method, Unavailable, create
from harness.devices.memory_account import SIM_NAME, Tracker

# steps of a rehearsal: the first makes the optimizer's state, the second has the state from its start
STEPS = 2


class Prediction(NamedTuple):
    """The peak bytes of both memories, and the seconds that the rehearsal itself took."""

    device_bytes: int
    host_bytes: int
    seconds: float


def predict(method: Method, workload: Workload, steps: int = STEPS) -> Prediction:
    """Rehearse the training of this workload and return its peaks. `steps`: number of steps whose batches the device
    holds. Raises Unavailable if the method's engine cannot run on tensors without memory."""
    if not method.can_rehearse:
        raise Unavailable(
            f"{method.label} has no memory rehearsal: its engine does not run on tensors without memory"
        )
    started = time.perf_counter()
    with without_memory() as tracker:
        token_shape = (steps, workload.batch_size, workload.seq_len + 1)
        tokens = torch.empty(token_shape, dtype=torch.int64, device=SIM_NAME)
        inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        training = method.settled(method.plan(workload, Room())).train(
            workload, zip(inputs[:STEPS], targets[:STEPS], strict=True), SIM_NAME
        )
        for _ in training:
            pass
        stats = tracker.stats()
    return Prediction(stats["device_peak"], stats["host_peak"], time.perf_counter() - started)


@contextmanager
def without_memory() -> Iterator[Tracker]:
    """Within this context, tensors have no bytes, work for other threads runs at once in the calling thread, and
    exchanges between ranks do nothing, because there is only one rank. Yield the Tracker that books the bytes."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        tracker = stack.enter_context(Tracker())
        for target, name, replacement in (
            (ThreadPoolExecutor, "submit", _submit),
            (nn.Module, "_apply", _apply),
            # Makes torch's optimizers update several FakeTensors at once, as they update real tensors on a GPU. Updates
            # one by one would take other buffers.
            (
                import_module("torch.optim.optimizer"),
                "_foreach_supported_types",
                [Tensor, nn.Parameter, FakeTensor],
            ),
            (dist, "all_reduce", lambda *args, **kwargs: None),
            (dist, "all_gather_object", lambda gathered, item, **kwargs: gathered.__setitem__(0, item)),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        yield tracker


def _submit(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
    future: Future = Future()
    try:
        future.set_result(work(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    return future


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """A replacement of nn.Module._apply that makes new parameters. torch's own function changes tensors in place, which
    FakeTensors do not allow."""
    for child in module.children() if recurse else ():
        child._apply(function)
    with torch.no_grad():
        buffers = {name: function(buffer) for name, buffer in module._buffers.items() if buffer is not None}
        module._buffers.update(buffers)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(function(parameter), parameter.requires_grad)
    return module


def main() -> None:
    """Entry point for child_process.ask(): read a job and the folders of methods; print a Prediction or, if the job
    cannot be rehearsed, {"unavailable": reason}."""
    arguments = json.load(sys.stdin)
    job = Job.from_dict(arguments["job"])
    method = create(job.method, job.options, tuple(map(Path, arguments["folders"])))
    try:
        print(json.dumps(predict(method, job.workload, job.steps)._asdict()))
    except Unavailable as error:
        print(json.dumps({"unavailable": str(error)}))


if __name__ == "__main__":
    main()
