"""Measures how fast the host's AdamW kernel is beside torch's kernels and beside a plain copy. Also measures how much
the update's threads delay a thread that launches kernels.

torch passes over a layer three times in mixed precision (cast the gradient, fused kernel, cast the weights), and twice
in fp32 with clipping (scale the gradient, fused kernel). Each row of the table updates one layer of hidden size 2048
(50 M parameters) with one number of threads. The rows alternate in one run; the table has medians. The table shows the
update's bytes per second beside the bytes per second of a copy by as many threads; the copy's rate is the bandwidth of
the host's memory.

The second measurement times the forward pass of a tiny layer, which consists mostly of kernel launches, alone and
beside such updates. The pass's waits for a core do not count, because a thread that launches work on a GPU has a core.
Only a few launches wait for Python's interpreter lock, so the mean shows these waits and the median does not.

    .venv/bin/python -m bench.adam [--rounds 15] [--dtype fp32] [--threads 1 --threads 14]
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import torch

from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY, Workload
from harness.devices.streams import Device
from harness.models.gpt import DTYPES
from harness.plan.resources import UPDATE_BYTES
from methods.offload import adamw_kernel
from methods.offload.adamw import published_settings
from methods.offload.clip import Clip
from methods.streaming.layer_state import LayerState
from methods.streaming.starting_values import draw_states

FACTOR = torch.tensor(0.5)
COPY_BYTES = 2**29  # more than any cache holds
NUM_LAUNCHES = 32  # launches timed in a row
NUM_UPDATES = 3  # number of updates under way while launches are timed


def ours(device: Device, layer: Workload) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return two functions: the first starts a layer's update on the threads that training uses; the second returns
    True if the update is over.
    """
    state = LayerState.of_model(device, layer, 0, host=True)
    state.grads.normal_()
    state.landed = device.outbound.record_event()

    def start() -> None:
        clip = Clip(device, 0.0)
        if layer.dtype == "fp32":
            clip.factor = FACTOR
            clip.send_home()
        state.update_when_landed(published_settings(1e-4), clip)

    return start, lambda: state.updated.done()


def by_torch(num_threads: int, layer: Workload) -> Callable[[], None]:
    """Return a function that updates a layer's flat tensors with torch's own threads. The function allocates no
    memory."""
    numel, is_mixed = layer.layer_params, layer.dtype == "bf16"
    grads, weights = (
        torch.randn(numel, dtype=DTYPES[layer.dtype]),
        torch.randn(numel, dtype=DTYPES[layer.dtype]),
    )
    exp_avg, exp_avg_sq = torch.zeros(2, numel)
    master, wide = (weights.float(), torch.zeros(numel)) if is_mixed else (weights, grads)
    steps = torch.zeros(())

    def update() -> None:
        torch.set_num_threads(num_threads)
        steps.add_(1)
        if is_mixed:
            wide.copy_(grads)
        else:
            grads.mul_(FACTOR)
        torch._fused_adamw_(
            [master],
            [wide],
            [exp_avg],
            [exp_avg_sq],
            [],
            [steps],
            amsgrad=False,
            maximize=False,
            lr=1e-4,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
        )
        if is_mixed:
            weights.copy_(master)

    return update


def plain_copy(num_threads: int) -> Callable[[], None]:
    """Return a function that copies COPY_BYTES by the C library, whose writes bypass the caches. A copy by torch would
    first read the memory that it overwrites.
    """
    here, there = torch.ones(COPY_BYTES // 4), torch.ones(COPY_BYTES // 4)
    pool, part = ThreadPoolExecutor(num_threads), COPY_BYTES // num_threads

    def copy_part(start: int) -> None:
        ctypes.memmove(there.data_ptr() + start, here.data_ptr() + start, part)

    def copy() -> None:
        list(pool.map(copy_part, range(0, num_threads * part, part)))

    return copy


def launches(device: Device, layer: Workload, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of forward passes alone, and of forward passes while updates run and one more update waits.
    The two kinds of passes alternate.
    """
    tiny = Workload(num_layers=1, hidden_size=16, num_heads=1, batch_size=1, seq_len=4, dtype=layer.dtype)
    launched = LayerState.of_model(device, tiny, 0, host=False)
    draw_states([launched], tiny)
    launched.bind(launched.current.weights)
    xs = [(torch.randn(1, 4, 16, dtype=DTYPES[layer.dtype]).requires_grad_(),)]
    layers = [ours(device, layer) for _ in range(NUM_UPDATES)]

    def passes(*, beside: bool) -> Iterator[float]:
        for _ in range(NUM_LAUNCHES):
            for start, is_over in layers:
                if beside and is_over():
                    start()
            waited = seconds_without_a_core()
            yield seconds(lambda: launched.forward(xs)) - (seconds_without_a_core() - waited)

    quiet: list[float] = []
    busy: list[float] = []
    for _ in range(rounds):
        quiet += passes(beside=False)
        busy += passes(beside=True)
        while not all(is_over() for _, is_over in layers):
            time.sleep(1e-3)
    return quiet, busy


def seconds_without_a_core() -> float:
    """Return the seconds that this thread has waited for a core that other threads occupied."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@click.command()
@click.option("--rounds", default=15)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16")
@click.option("--threads", multiple=True, default=(1, 2))
def main(rounds: int, dtype: str, threads: tuple[int, ...]) -> None:
    if adamw_kernel.to_build():
        adamw_kernel.build()
    layer = Workload(num_layers=1, hidden_size=2048, dtype=dtype)
    print(f"{adamw_kernel.describe_host_adam(dtype)}, {layer.layer_params / 1e6:.2f} M parameters")
    for num_threads in threads:
        with Device("cpu", num_workers=num_threads) as device:
            (start, is_over), other, copy = (
                ours(device, layer),
                by_torch(num_threads, layer),
                plain_copy(num_threads),
            )

            def update(start=start, is_over=is_over) -> None:
                start()
                while not is_over():
                    time.sleep(1e-4)

            taken = [(seconds(update), seconds(other), seconds(copy)) for _ in range(rounds + 2)][2:]
            del other, copy
            torch.set_num_threads(1)
            quiet, busy = (found[NUM_LAUNCHES:] for found in launches(device, layer, rounds + 1))
        medians = [statistics.median(column) for column in zip(*taken, strict=True)]
        ratios = sorted(theirs / own for own, theirs, _ in taken)
        moved, copied = UPDATE_BYTES[dtype] * layer.layer_params / medians[0], 2 * COPY_BYTES / medians[2]
        print(
            f"{num_threads} threads: {1e3 * medians[0]:.1f} ms, by torch {1e3 * medians[1]:.1f} ms, ratio of"
            f" medians {medians[1] / medians[0]:.2f}, of {rounds} rounds {ratios[0]:.2f} to {ratios[-1]:.2f};"
            f" {layer.layer_params / medians[0] / 1e9:.2f} G parameters/s"
        )
        print(f"  {moved / 1e9:.1f} GB/s, a plain copy {copied / 1e9:.1f} GB/s: {moved / copied:.0%} of it")
        for what, of in (("median", statistics.median), ("mean", statistics.mean)):
            print(
                f"  a launch, {what}: {1e3 * of(quiet):.2f} ms, beside {num_threads} busy threads"
                f" {1e3 * of(busy):.2f} ms, {of(busy) / of(quiet):.2f} times"
            )


if __name__ == "__main__":
    main()
