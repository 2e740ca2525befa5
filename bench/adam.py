"""The host's AdamW in mixed precision beside the route of three passes: cast the gradient, torch's fused kernel, cast
the weights. One layer of hidden size 2048 (50 M parameters), by threads; one alternating run, medians.

    .venv/bin/python -m bench.adam [--rounds 15]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch

from harness.spec import BETAS, EPSILON, WEIGHT_DECAY, Workload
from methods import _adam
from methods._device import Device
from methods._home import Home, new_layer
from methods._stream import Clip

LAYER = Workload(num_layers=1, hidden_size=2048, dtype="bf16")


def ours(device: Device) -> Callable[[], None]:
    """A layer's home and its update, by the threads of a training."""
    home = Home(device, new_layer(LAYER), "layers.0.", LAYER, host=True)
    home.grads.normal_()
    home.landed = device.outbound.record_event()

    def update() -> None:
        home.update_when_landed(1e-4, Clip(device, 0.0))
        home.updated.result()

    return update


def three_passes(num_threads: int) -> Callable[[], None]:
    """Of flat slabs, by torch's own threads; the fp32 gradient has its place from the start."""
    numel = LAYER.layer_params
    grads, weights = torch.randn(numel, dtype=torch.bfloat16), torch.randn(numel, dtype=torch.bfloat16)
    master, exp_avg, exp_avg_sq, wide = weights.float(), *torch.zeros(3, numel)
    steps = torch.zeros(())

    def update() -> None:
        torch.set_num_threads(num_threads)
        steps.add_(1)
        wide.copy_(grads)
        torch._fused_adamw_(
            [master], [wide], [exp_avg], [exp_avg_sq], [], [steps], amsgrad=False, maximize=False, lr=1e-4,
            beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON, weight_decay=WEIGHT_DECAY,
        )  # fmt: skip
        weights.copy_(master)

    return update


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@click.command()
@click.option("--rounds", default=15)
def main(rounds: int) -> None:
    if _adam.to_build():
        _adam.build()
    print(f"{_adam.describe('bf16')}, {LAYER.layer_params / 1e6:.2f} M parameters")
    for num_threads in (1, 2):
        with Device("cpu", num_workers=num_threads) as device:
            one, other = ours(device), three_passes(num_threads)
            pairs = [(seconds(one), seconds(other)) for _ in range(rounds + 2)][2:]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        ratios = sorted(theirs / own for own, theirs in pairs)
        print(
            f"{num_threads} threads: {1e3 * medians[0]:.1f} ms, three passes {1e3 * medians[1]:.1f} ms, ratio of"
            f" medians {medians[1] / medians[0]:.2f}, of {rounds} rounds {ratios[0]:.2f} to {ratios[-1]:.2f};"
            f" {LAYER.layer_params / medians[0] / 1e9:.2f} G parameters/s"
        )


if __name__ == "__main__":
    main()
