"""The workload's model as an ordered list of layers: the embedding, the blocks, and the head, which computes the loss.
A tensor that embedding and head share has the same name in both.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.core.job import Workload
from harness.core.method import OtherModel, Step, TensorState, Unavailable
from harness.devices.streams import Device
from harness.models.gpt import DTYPES, adamw, initialize
from harness.models.model import new_chain
from methods.sharding.optimizer import MASTER
from methods.sharding.shard import Shard, ShardLayer, allocate_slabs, cut_into_shards
from methods.sharding.task import Task


def layers_without_memory(workload: Workload) -> list[ShardLayer]:
    """Return the model's layers on the meta device, where they take no memory. A shard later binds the layers to
    memory."""
    anatomy = workload.anatomy
    names = [anatomy.layer_name(index) for index in range(workload.num_layers)]
    pairs = zip(new_chain(workload), [anatomy.ends_prefix, *names, anatomy.ends_prefix], strict=True)
    dtype = DTYPES[workload.dtype]
    return [
        ShardLayer(module.to(dtype), {name: prefix + name for name, _ in module.named_parameters()})
        for module, prefix in pairs
    ]


def shards_on_host(
    workload: Workload, lengths: Sequence[int], device: Device, *, is_shared: bool, in_halves: bool
) -> list[Shard]:
    """Return the model on the host with its seeded starting values, cut into shards. `lengths`: the number of layers of
    each shard. `is_shared`: True if several processes use the memory. `in_halves`: True: also make room for the
    gradients of each batch's second half."""
    shards = cut_into_shards(
        layers_without_memory(workload), lengths, adamw, is_mixed=workload.dtype != "fp32"
    )
    allocate_slabs(
        shards,
        None if is_shared else lambda size: device.room(size, torch.uint8, host=True),
        in_halves=in_halves,
    )
    for shard in shards:
        weights = {name: shard.at_home(name) for name in shard.home_names}
        starts = {
            name: shard.states(shard.slabs["states"], name).get(MASTER, weights[name])
            for name in shard.home_names
        }
        initialize(starts.items(), workload)
        for name, weight in weights.items():
            weight.copy_(starts[name])
    return shards


def trained_tensors(shards: Sequence[Shard], ordered: Sequence[str]) -> list[TensorState]:
    """Return the trained weight and both moments of each parameter named in `ordered`, in this order."""
    states = {
        name: shard.states(shard.slabs["states"], name) for shard in shards for name in shard.home_names
    }
    weights = {name: shard.at_home(name) for shard in shards for name in shard.home_names}
    moments = {name: (state["exp_avg"], state["exp_avg_sq"]) for name, state in states.items()}
    return [TensorState(name, states[name].get(MASTER, weights[name]), *moments[name]) for name in ordered]


def batch_parts(
    batches: Iterable[tuple[Tensor, Tensor]], num_parts: int, *, to_host: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each batch in `num_parts` parts, one after the other. `to_host`: first copy the batch to the host, where
    other processes can read it."""
    for inputs, targets in batches:
        pair = (inputs.cpu(), targets.cpu()) if to_host else (inputs, targets)
        yield from zip(*(tokens.chunk(num_parts) for tokens in pair), strict=True)


def zero_batch(workload: Workload, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for rehearsals, all zeros. All their elements share the memory of one element."""
    token = torch.zeros((), dtype=torch.int64, device=device)
    return (token.expand(workload.batch_size, workload.seq_len),) * 2


def own_random_state(workload: Workload, device: str) -> Any:
    """Return this process's random state (the CPU's and the GPU's), with which a model trained alone starts. Return
    None if the workload has no dropout."""
    if not workload.dropout:
        return None
    return torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None


def device_names(device: str, num_devices: int) -> list[str]:
    """Return torch's names of `num_devices` devices. Raises Unavailable if there are fewer devices, or for sim."""
    if device == "sim":
        raise Unavailable("sim is one device: use --devices 1, or --device cpu, whose devices are processes")
    if device == "cuda" and torch.cuda.device_count() < num_devices:
        raise Unavailable(
            f"--devices: expected at most {torch.cuda.device_count()}, the GPUs of this machine, got {num_devices}"
        )
    return [f"cuda:{index}" if device == "cuda" else device for index in range(num_devices)]


def raise_failures(tasks: Sequence[Task]) -> None:
    """Raise the failure of the first model that failed, if any: OutOfMemoryError if its device ran out of memory, else
    RuntimeError. Call this when all models have ended."""
    failed = [task for task in tasks if task.failure]
    if failed:
        kind = torch.OutOfMemoryError if failed[0].lacks_memory else RuntimeError
        counts = ""
        if len(tasks) > 1:
            counts = f" (model {failed[0].model + 1} of {len(tasks)}; {len(failed)} failed in all)"
        raise kind(f"{failed[0].failure.strip().splitlines()[-1]}{counts}\n{failed[0].failure}")


def other_model(
    workload: Workload, shards: Sequence[Shard], steps: Sequence[Step], ordered: Sequence[str]
) -> OtherModel:
    """Return the record's entry for one of the models trained beside the first. `ordered`: names of its tensors."""
    changes = {"learning_rate": workload.learning_rate, "batch_size": workload.batch_size}
    return OtherModel.of(changes, steps, trained_tensors(shards, ordered))
