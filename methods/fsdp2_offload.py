"""FSDP2 with CPU offload (Zhao et al. 2023; torch.distributed.fsdp): torch's own way to train beyond the device.

torch shards each layer over the ranks and keeps it on the host. torch gathers the whole layer on the device for the
forward pass, and again for the recompute and the backward pass. Gradients go back to the host, where torch's AdamW
updates the weights after the whole backward pass. This file only wraps the harness's model.

Each rank trains on its part of every batch; torch averages the gradients. With micro-batches torch adds the gradients
of each backward pass to those on the host. set_requires_gradient_sync(False) would save these copies, but would keep
the sum of the whole model's gradients on the device.

With adapters (--lora) torch shards the frozen weights, in the dtype of the workload. The adapters are not sharded: fp32
and small, they stay on the device, where AdamW updates them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.core.job import Plan, Room, Workload
from harness.core.method import Method, TensorState, Trained, Training
from harness.core.option import with_option
from harness.plan.resources import all_reduce_sent_bytes, gather_sent_bytes
from methods.engines import accelerate_file
from methods.engines.user_config import UNSAID, Options, fill_in, settled_options
from methods.shared.data_parallel import RANKS, rank_part
from methods.shared.memory_needs import (
    describe,
    gathered_params,
    micro_batch_workload,
    separately_locked_bytes,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
# Options that a configuration sets, and their values without one.
DEFAULTS: Options = {"reshard_after_forward": True, "reduce_dtype": "fp32"}


@dataclass(frozen=True)
class Fsdp2Offload(Method):
    label = "FSDP2 offload"
    color = "#6FA8DC"
    paper = "Zhao et al. 2023, arXiv:2304.11277; fully_shard with CPUOffloadPolicy"
    hides = ("copies", "gathers", "sums")
    takes_config = True  # trains models that a config.json describes, too
    takes_lora = True  # trains adapters alone on frozen weights, too
    accumulates = True
    scales_loss = True
    world_size: int = with_option(1, RANKS)  # ranks
    # False: a layer's weights stay on the device until its backward pass
    reshard_after_forward: bool = UNSAID
    reduce_dtype: str = UNSAID  # dtype in which ranks sum gradients: fp32, or weights for that of the weights
    config: str | None = None  # accelerate's YAML, or its JSON; sets the two options above

    def __post_init__(self) -> None:
        if self.config is None:
            fill_in(self, DEFAULTS)
        if self.reduce_dtype not in ("fp32", "weights", UNSAID):
            raise ValueError(f"reduce_dtype: expected fp32 or weights, got {self.reduce_dtype!r}")

    def plan(self, workload: Workload, room: Room) -> Plan:
        rank_part(workload, self.world_size)
        if self.config is None:
            return self._plan(workload, room)
        configured_options = accelerate_file.fsdp_options_of(self.config, workload, self.world_size)
        configured = replace(self, **settled_options(self, DEFAULTS, configured_options), config=None)
        return replace(configured._plan(workload, room), options=asdict(configured))

    def _plan(self, workload: Workload, room: Room) -> Plan:
        workload = rank_part(workload, self.world_size)
        if workload.lora:
            return self._plan_of_adapters(workload, room)
        # States and the batch are split over the ranks. Gathered weights, and their gradients, are whole on each rank.
        params = -(-workload.num_params // self.world_size)
        size, ends, layer = workload.weight_bytes, workload.end_params, workload.layer_params
        home = separately_locked_bytes(4, workload, room, self.world_size)
        num_parts, part = workload.micro_batches, micro_batch_workload(workload)
        of_part = gathered_params(workload) if self.reshard_after_forward else workload.num_params
        gathered, summed = num_parts * of_part, num_parts * workload.num_params
        summed_bytes = 4 if self.reduce_dtype == "fp32" else size  # bytes of a gradient while ranks sum it
        sent = {"gathers": size * gathered, "sums": summed_bytes * summed}
        # A later micro-batch's gradient of one tensor at a time, until it is added.
        added = 4 * -(-workload.anatomy.largest_numel // self.world_size) if num_parts > 1 else 0
        boundaries = part.num_layers * part.boundary_bytes
        # Layers that are gathered at once in a backward pass, and while a layer's gradients are summed.
        at_once = (2, 1) if self.reshard_after_forward else (workload.num_layers, workload.num_layers)
        # At each moment: bytes of gathered weights, gradients, activations.
        working_bytes = boundaries + part.working_bytes
        at_backward = (size * (ends + at_once[0] * layer), size * (ends + layer), working_bytes)
        # A layer's gradients are copied to the dtype of the sum, and summed into another copy.
        layer_sum_bytes = size * ends + 2 * summed_bytes * layer
        at_layer_sum = (size * (ends + at_once[1] * layer), layer_sum_bytes, boundaries)
        at_end_sum = (0, 2 * summed_bytes * ends, 0)  # and so are the gradients of embedding and head
        moments = (at_backward, at_layer_sum, at_end_sum)
        return Plan(
            device=dict(zip(("weights", "gradients", "activations"), max(moments, key=sum), strict=True)),
            host={"weights": home, "gradients": home + added, "optimizer": 8 * params},
            moved_bytes=4 * gathered // self.world_size + 4 * num_parts * params,
            exchanged={
                kind: gather_sent_bytes(num_bytes, self.world_size) for kind, num_bytes in sent.items()
            },
        )

    def _plan_of_adapters(self, workload: Workload, room: Room) -> Plan:
        """Return the plan of a rank that trains adapters: only frozen weights travel, in the workload's dtype."""
        size, ends, layer = workload.weight_bytes, workload.end_params, workload.layer_params
        num_parts, part, num_trained = (
            workload.micro_batches,
            micro_batch_workload(workload),
            workload.num_trained,
        )
        num_frozen = workload.num_params - num_trained
        of_part = gathered_params(workload) if self.reshard_after_forward else num_frozen
        num_at_once = 2 if self.reshard_after_forward else workload.num_layers
        return Plan(
            device={
                "weights": size * (ends + num_at_once * layer) + 4 * num_trained,
                "gradients": 4 * num_trained,
                "optimizer": 8 * num_trained,
                "activations": part.num_layers * part.boundary_bytes + part.working_bytes,
            },
            host={"weights": separately_locked_bytes(size, workload, room, self.world_size)},
            moved_bytes=size * num_parts * of_part // self.world_size,
            exchanged={
                "gathers": gather_sent_bytes(size * num_parts * of_part, self.world_size),
                "sums": all_reduce_sent_bytes(4 * num_trained, self.world_size),
            },
            updates_on_host=False,
        )

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        home = "device" if workload.lora else "host"
        return describe(workload, "upstream: torch.distributed.fsdp", f"torch AdamW, fused, {home}")

    def _sharded_model(self, workload: Workload, device: str):
        """Return the model, each of whose layers is a group of FSDP2, without values, on the host; its adapters are on
        the device."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        from harness.models.gpt import DTYPES
        from harness.models.model import whole

        dtype = DTYPES[workload.dtype]
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(device, (self.world_size,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if workload.dtype == "fp32" or workload.lora else dtype,
                reduce_dtype=torch.float32 if self.reduce_dtype == "fp32" else dtype,
            ),
        }
        # frozen weights need no fp32 masters
        model = whole(workload if workload.lora else replace(workload, dtype="fp32"))
        if workload.lora:
            settings["ignored_params"] = {p for p in model.parameters() if p.requires_grad}
        for layer in model.layers:
            fully_shard(layer, **settings, reshard_after_forward=self.reshard_after_forward)
        fully_shard(model, **settings)
        model = model.to_empty(device="cpu")
        if workload.lora:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(device)
        return model

    def train(self, workload: Workload, batches, device: str) -> Training:
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        from harness.devices.exchange import leave_others, norm_over_ranks
        from harness.devices.streams import require_device
        from harness.models.gpt import adamw
        from methods.offload.clip import clip_factor, global_norm, norms_of
        from methods.shared.loss_scale import LossScale

        require_device(device, "FSDP2")
        is_on_gpu = device == "cuda"
        backend = "cpu:gloo,cuda:nccl" if is_on_gpu else "gloo"
        num_ranks, num_parts = self.world_size, workload.micro_batches
        single_rank: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        # else torchrun's variables name ranks
        dist.init_process_group(backend, **(single_rank if num_ranks == 1 else {}))
        rank = dist.get_rank()
        try:
            model = self._sharded_model(workload, device)
            named: list[tuple[str, Any]] = list(model.named_parameters())  # DTensors, but for adapters
            _set_starting_values(named, workload, rank, num_ranks)
            parameters = [(name, p) for name, p in named if p.requires_grad]
            optimizer = adamw(p for _, p in parameters)
            scale = LossScale(workload)
            for step, (inputs, targets) in enumerate(batches, start=1):
                mean = torch.zeros((), device=device)
                rank_tokens = (tokens.chunk(num_ranks)[rank].chunk(num_parts) for tokens in (inputs, targets))
                for micro_batch in zip(*rank_tokens, strict=True):
                    loss = model(*micro_batch, scale.value) / num_parts
                    loss.backward()
                    mean += loss.detach() / num_ranks
                grads = [_local(p.grad) for _, p in parameters]
                if workload.lora and num_ranks > 1:
                    for grad in grads:
                        dist.all_reduce(grad.div_(num_ranks))
                if scale.is_used:
                    torch._foreach_div_(grads, scale.value)
                # The reference's GPU sums a norm in a tree: one long sum on the host would differ from the tree's by
                # more than the gate allows.
                norm = global_norm(norms_of(grads, in_blocks=is_on_gpu or num_parts > 1))
                if num_ranks > 1 and not workload.lora:
                    norm = norm_over_ranks(norm)
                if workload.clip_norm:
                    torch._foreach_mul_(grads, clip_factor(norm, workload.clip_norm))
                for group in optimizer.param_groups:
                    group["lr"] = workload.learning_rate_at(step)
                is_skipped = scale.overflows(norm)
                if not is_skipped:
                    optimizer.step()
                optimizer.zero_grad()
                if num_ranks > 1:
                    dist.all_reduce(mean)
                yield scale.step(mean, norm, is_skipped=is_skipped)

            def whole_tensor(tensor: Any) -> Any:
                is_split = isinstance(tensor, DTensor) and num_ranks > 1
                return tensor.full_tensor() if is_split else _local(tensor)

            def kept(parameter: Any) -> list[Any]:
                """Return the parameter's value and, if it is trained, its moments."""
                state = optimizer.state[parameter] if parameter.requires_grad else {}
                return [parameter.detach(), *(state[name] for name in MOMENTS if state)]

            states = (TensorState(name, *map(whole_tensor, kept(p))) for name, p in named)
            # Every rank must iterate over the states, because all ranks gather; only rank 0 returns the tensors.
            return Trained([state for state in states if rank == 0])
        finally:
            leave_others()


def _local(tensor: Any) -> Any:
    """Return this rank's part of a tensor that FSDP2 shards, and any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _set_starting_values(
    parameters: list[tuple[str, Any]], workload: Workload, rank: int, num_ranks: int
) -> None:
    """Set this rank's part of each parameter to the harness's starting value."""
    from harness.models.gpt import initialize, initials

    if num_ranks == 1:
        initialize(((name, _local(p).detach()) for name, p in parameters), workload)
        return
    drawn = initials(((name, p.shape) for name, p in parameters), workload)
    for (_, p), start in zip(parameters, drawn, strict=True):
        parts = start.chunk(num_ranks)[rank : rank + 1] if hasattr(p, "to_local") else [start]
        for part in parts:
            _local(p).detach().copy_(part)
