"""The host's AdamW beside the route by torch's kernels. In mixed precision that takes three passes: cast the gradient,
torch's fused kernel, cast the weights; in fp32, with clipping, two: scale the gradient, torch's fused kernel. One layer
of hidden size 2048 (50 M parameters), by threads; one alternating run, medians.

    .venv/bin/python -m bench.adam [--rounds 15] [--dtype fp32]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch

from harness.core.gpt import DTYPES
from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY, Workload
from harness.devices.streams import Device
from methods.offload import adamw_kernel
from methods.offload.clip import Clip
from methods.offload.layout import new_layer
from methods.streaming.layer_state import LayerState

FACTOR = torch.tensor(0.5)


def ours(device: Device, layer: Workload) -> Callable[[], None]:
    """A layer's state and its update, by the threads of a training."""
    state = LayerState(device, new_layer(layer), "layers.0.", layer, host=True)
    state.grads.normal_()
    state.landed = device.outbound.record_event()

    def update() -> None:
        clip = Clip(device, 0.0)
        if layer.dtype == "fp32":
            clip.factor = FACTOR
            clip.send_home()
        state.update_when_landed(1e-4, clip)
        state.updated.result()

    return update


def by_torch(num_threads: int, layer: Workload) -> Callable[[], None]:
    """Of flat slabs, by torch's own threads; the fp32 gradient has its place from the start."""
    numel, is_mixed = layer.layer_params, layer.dtype == "bf16"
    grads, weights = torch.randn(numel, dtype=DTYPES[layer.dtype]), torch.randn(numel, dtype=DTYPES[layer.dtype])
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
            [master], [wide], [exp_avg], [exp_avg_sq], [], [steps], amsgrad=False, maximize=False, lr=1e-4,
            beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON, weight_decay=WEIGHT_DECAY,
        )  # fmt: skip
        if is_mixed:
            weights.copy_(master)

    return update


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@click.command()
@click.option("--rounds", default=15)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16")
def main(rounds: int, dtype: str) -> None:
    if adamw_kernel.to_build():
        adamw_kernel.build()
    layer = Workload(num_layers=1, hidden_size=2048, dtype=dtype)
    print(f"{adamw_kernel.describe(dtype, one_pass=True)}, {layer.layer_params / 1e6:.2f} M parameters")
    for num_threads in (1, 2):
        with Device("cpu", num_workers=num_threads) as device:
            one, other = ours(device, layer), by_torch(num_threads, layer)
            pairs = [(seconds(one), seconds(other)) for _ in range(rounds + 2)][2:]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        ratios = sorted(theirs / own for own, theirs in pairs)
        print(
            f"{num_threads} threads: {1e3 * medians[0]:.1f} ms, by torch {1e3 * medians[1]:.1f} ms, ratio of"
            f" medians {medians[1] / medians[0]:.2f}, of {rounds} rounds {ratios[0]:.2f} to {ratios[-1]:.2f};"
            f" {layer.layer_params / medians[0] / 1e9:.2f} G parameters/s"
        )


if __name__ == "__main__":
    main()
