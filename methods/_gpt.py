"""The harness's GPT as an ordered list of layers: embedding, blocks, and the head with its loss; both ends share the
token embedding, by name.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.method import OtherModel, Step, TensorState
from harness.model import DTYPES, Ends, Layer, decays, initialize
from harness.spec import BETAS, EPSILON, WEIGHT_DECAY, Workload
from methods._device import Device
from methods._shards import NamedLayer, Shard, cut
from methods._travel import MASTER


class Embedding(nn.Module):
    """(B, T) token ids to (B, T, D)."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.ends = Ends(workload)
        del self.ends.lnf

    def forward(self, inputs: Tensor) -> Tensor:
        return self.ends.embed(inputs)


class Head(nn.Module):
    """(B, T, D) and (B, T) token ids to the mean loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.ends = Ends(workload)
        del self.ends.wpe

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.ends.loss(x, targets)


def layers(workload: Workload) -> list[NamedLayer]:
    """Without memory; a shard gives them some."""
    with torch.device("meta"):
        modules = [Embedding(workload), *(Layer(workload) for _ in range(workload.num_layers)), Head(workload)]
    prefixes = ["", *(f"layers.{index}." for index in range(workload.num_layers)), ""]
    pairs = zip(modules, prefixes, strict=True)
    dtype = DTYPES[workload.dtype]
    return [NamedLayer(m.to(dtype), {name: prefix + name for name, _ in m.named_parameters()}) for m, prefix in pairs]


def names(workload: Workload) -> list[str]:
    """In the order of the whole model's parameters, in which the reference sums the global norm."""
    with torch.device("meta"):
        ends, layer = Ends(workload), Layer(workload)
    found = [f"ends.{name}" for name, _ in ends.named_parameters()]
    inner = [name for name, _ in layer.named_parameters()]
    return found + [f"layers.{index}.{name}" for index in range(workload.num_layers) for name in inner]


def adamw(parameters: list[nn.Parameter]) -> Any:
    """The published runs' optimizer: no decay on biases and norms."""
    decayed = [parameter for parameter in parameters if decays(parameter)]
    others = [parameter for parameter in parameters if not decays(parameter)]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=BETAS, eps=EPSILON, fused=True)


def at_home(workload: Workload, lengths: Sequence[int], device: Device) -> list[Shard]:
    """The seeded model on the host, cut into shards of so many layers each."""
    shards = cut(layers(workload), lengths, adamw, mixed=workload.dtype != "fp32")
    for shard in shards:
        shard.settle(lambda num_bytes: device.room(num_bytes, torch.uint8, host=True))
        weights = [shard.at_home(name) for name in shard.own]
        masters = [shard.states(shard.slabs["states"], name).get(MASTER) for name in shard.own]
        drawn = [weight if master is None else master for weight, master in zip(weights, masters, strict=True)]
        initialize(zip(shard.own, drawn, strict=True), workload)
        for weight, start in zip(weights, drawn, strict=True):
            weight.copy_(start)
    return shards


def tensors(shards: Sequence[Shard], ordered: Sequence[str]) -> list[TensorState]:
    """What training left behind, in this order of names."""
    states = {name: shard.states(shard.slabs["states"], name) for shard in shards for name in shard.own}
    weights = {name: shard.at_home(name) for shard in shards for name in shard.own}
    return [TensorState(name, states[name].get(MASTER, weights[name]), states[name]["exp_avg"]) for name in ordered]


def parts(batches: Iterable[tuple[Tensor, Tensor]], number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same samples in so many times as many batches."""
    for inputs, targets in batches:
        yield from zip(inputs.chunk(number), targets.chunk(number), strict=True)


def other(workload: Workload, shards: Sequence[Shard], steps: Sequence[Step], ordered: Sequence[str]) -> OtherModel:
    """For a record what became of a model that is not the first."""
    changes = {"learning_rate": workload.learning_rate, "batch_size": workload.batch_size}
    norms = [float(step.grad_norm) for step in steps if step.grad_norm is not None]
    return OtherModel(changes, [float(step.loss) for step in steps], norms, tensors(shards, ordered))
