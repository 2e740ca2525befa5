"""Hydra (Nagrecha and Kumar 2021): models larger than the device are cut into shards, and the shards take turns on the
device.

The training of a model is a chain of units. A unit is the forward pass, the backward pass or the update of one shard. A
policy picks the model whose unit runs next; the paper's policy, Sharded-LRTF, picks the model with the longest
remaining time. While a unit runs, the next unit's shard is copied into a second slot. Weights, gradients and the
optimizer's states live on the host and travel with their shard. The device holds two slots, each as large as the
largest shard, and one layer's activations. Micro-batches pass a shard one after the other within its unit, so their
number changes neither the units nor what is copied.

Clipping is exact: every shard's update is a unit of its own and waits for the global norm. Without clipping a shard's
update is part of its backward unit, as in the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import tee
from typing import TYPE_CHECKING, Any

from harness.core.job import Plan, Room, Workload
from harness.core.method import Method, Step, Trained, Training, largest_depth, vary_workload
from harness.core.option import opt
from harness.devices import cuda_budget
from harness.plan.resources import OPTIMIZER_BYTES
from methods.sharding.partition import model_shards
from methods.sharding.scheduler import policy_key
from methods.shared.memory_needs import (
    describe,
    micro_batch_workload,
    page_locked_bytes,
    saved_boundary_ratio,
)

if TYPE_CHECKING:
    from harness.devices.streams import Device
    from methods.sharding.shard import Shard
    from methods.sharding.task import Task, TaskSettings

SCALAR_BYTES = 512  # that a scalar takes on a device: the allocator's unit
NUM_SCALARS = 32  # beside the norms
MOST_TURNS = 2000  # a record keeps at most this many units of the timeline, the latest ones
OPTION_CHOICES = {"intermediates": ("checkpointed", "saved"), "partitioner": ("exact", "presharded")}


def __getattr__(name: str) -> object:
    """Return a class for users' models; import it only now, because it imports torch and this module does not."""
    if name not in ("Model", "ModelOrchestrator", "ModelTask"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from methods.sharding import orchestrator, user_model

    return getattr(user_model if name == "Model" else orchestrator, name)


@dataclass(frozen=True)
class Hydra(Method):
    # layers of a shard, where embedding and head count as layers; None: as many as fit
    shard_layers: int | None = None
    # True: the device has a second slot, for the next shard
    double_buffer: bool = opt(
        True, "--double-buffer", "Fetch the next shard while a shard computes (default: on)."
    )
    intermediates: str = "checkpointed"  # checkpointed: recompute layers; saved: send activations to the host
    # number of learning rates, one model each; the first rate is the workload's
    num_models: int = opt(1, "--models", "Number of models that a method trains in turns (default: 1).")
    num_batch_sizes: int = 1  # number of batch sizes for each learning rate: the workload's, half of it, ...
    # number of GPUs, or of processes on a CPU
    num_devices: int = opt(
        1,
        "--devices",
        "Number of devices that the models of --models share; on a CPU each device is a process.",
    )
    # True: split the first model's batches over two devices if devices outnumber models
    hybrid: bool = opt(
        True,
        "--hybrid",
        "Split a model's batches over two devices if devices outnumber models (default: on).",
    )
    partitioner: str = "exact"  # exact: halve shards that do not fit in a rehearsal; presharded: keep them
    policy: str = "lrtf"  # lrtf: longest remaining time first; or srtf (shortest first), fifo, random

    label = "Hydra"
    color = "#2E8B57"
    paper = "Nagrecha and Kumar 2021, arXiv:2110.08633"
    hides = ("copies",)
    can_rehearse = True
    takes_config = True  # trains models that a config.json describes, too
    accumulates = True

    @property
    def bit_exact(self) -> bool:  # type: ignore[override]
        """False if batches are split over devices, because gradients are then summed in another order."""
        return not self._halves(0.0)

    def _halves(self, dropout: float) -> bool:
        """True if the first model's batches are split over two devices; never with dropout, because the two halves
        would draw other random numbers than the whole batch."""
        return self.hybrid and self.num_devices > self.num_models and not dropout

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Plan shards of `shard_layers` layers. If that is None, plan shards of as many layers as fit on the device, or
        of one layer if the device's memory has no limit."""
        for name, choices in OPTION_CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected {' or '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("num_models", "num_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_batch_sizes < 1 or micro_batch_workload(workload).batch_size % 2 ** (
            self.num_batch_sizes - 1
        ):
            parts_text = f" in {workload.micro_batches} micro-batches" if workload.micro_batches > 1 else ""
            raise ValueError(
                f"num_batch_sizes: expected 1, and at most 1 more for each time that batch size {workload.batch_size}"
                f"{parts_text} halves, got {self.num_batch_sizes}"
            )
        policy_key(self.policy)
        shard_layers = self.shard_layers
        if self.partitioner == "presharded" and shard_layers is None:
            raise ValueError(
                "partitioner=presharded needs shard_layers, the number of layers of a shard; try --option"
                " shard_layers=1"
            )
        if shard_layers is not None and not 1 <= shard_layers <= workload.num_layers:
            raise ValueError(f"shard_layers: expected 1 to {workload.num_layers}, got {shard_layers}")
        device_bytes = room.device_bytes
        if shard_layers is not None or device_bytes is None:
            return self._plan(workload, room, shard_layers or 1)

        def fits(num_layers: int) -> bool:
            if num_layers > workload.num_layers:
                return False
            return self._plan(workload, room, num_layers).device_bytes <= device_bytes

        return self._plan(workload, room, max(1, largest_depth(fits)))

    def twin_options(self, num_layers: int, twin_layers: int) -> dict[str, Any]:
        shard_layers = self.shard_layers
        if shard_layers is not None:
            shard_layers = max(1, shard_layers * twin_layers // num_layers)
        return dataclasses.asdict(dataclasses.replace(self, shard_layers=shard_layers))

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = describe(workload, "this project", "torch AdamW, fused, device; states travel with the shard")
        return row | ({"recompute": "none: activations on the host"} if self.intermediates == "saved" else {})

    def train(self, workload: Workload, batches, device: str) -> Training:
        from harness.devices.streams import Device
        from methods.sharding import gpt
        from methods.sharding.device_process import largest_peaks
        from methods.sharding.dispatch import Dispatcher

        names = workload.anatomy.names(workload.num_layers)
        workloads = vary_workload(workload, self.num_models, self.num_batch_sizes)
        is_alone, is_shared = self.num_models == 1, self.num_devices > 1
        with ExitStack() as stack:
            gpu = stack.enter_context(Device(device))
            models = self._models(workload, len(workloads), gpu)
            devices, splits = self._devices(workloads, models, gpu, stack)
            tasks = self._tasks(workloads, batches, models, device)
            # A model may be one step ahead of the slowest model, so that no device waits for the slowest model.
            most_ahead = int(hasattr(batches, "__len__") and is_shared)
            dispatcher = Dispatcher(tasks, devices, self.policy, most_ahead=most_ahead, splits=splits)
            steps: list[list[Step]] = [[] for _ in tasks]
            num_yielded = 0
            for task, step in dispatcher.run():
                steps[task.model].append(step)
                while not tasks[0].failure and num_yielded < dispatcher.num_rounds:
                    yield steps[0][num_yielded]._replace(shares=None if is_alone else dispatcher.shares())
                    num_yielded += 1
            gpu.synchronize()
            gpt.raise_failures(tasks)
            schedule: dict[str, Any] = {
                "shards": [[len(shard.layers) for shard in shards] for shards in models]
            }
            if not is_alone:
                turns = [[*turned] for turned in dispatcher.timeline[-MOST_TURNS:]]
                schedule |= {"num_models": len(tasks), "turns": turns, **dispatcher.summary()}
            others = [
                gpt.other_model(workloads[n], models[n], steps[n], names) for n in range(1, len(workloads))
            ]
            moved_bytes = sum(device.moved_bytes for device in devices)
            peaks = largest_peaks(devices)
            return Trained(gpt.trained_tensors(models[0], names), moved_bytes, schedule, others, peaks)

    def _in_halves(self, workload: Workload, number: int) -> bool:
        """True if the batches of model `number` are split over two devices."""
        return number == 0 and self._halves(workload.dropout)

    def _models(self, workload: Workload, num_models: int, gpu: Device) -> list[list[Shard]]:
        """Return each model's shards, with the starting values, on the host."""
        from methods.sharding import gpt

        assert self.shard_layers
        shards = model_shards(workload, self.shard_layers)
        lengths = [shard.num_layers for count, shard in shards for _ in range(count)]  # ends count as layers
        return [
            gpt.shards_on_host(
                workload,
                lengths,
                gpu,
                is_shared=self.num_devices > 1,
                in_halves=self._in_halves(workload, number),
            )
            for number in range(num_models)
        ]

    def _devices(
        self, workloads: Sequence[Workload], models: list[list[Shard]], gpu: Device, stack: ExitStack
    ) -> tuple[list[Any], list[tuple[int, int]]]:
        """Return the devices that run units, and the shards that a rehearsal halved, as pairs of model and index."""
        import torch

        from methods.sharding import gpt
        from methods.sharding.device_process import LocalDevice, start_processes
        from methods.sharding.device_worker import Worker, WorkerOptions
        from methods.sharding.rehearsal import rehearse

        device, is_shared = str(gpu.name), self.num_devices > 1
        options = WorkerOptions(self.double_buffer, self.intermediates, keeps_random=workloads[0].dropout > 0)
        if is_shared:
            device_names = gpt.device_names(device, self.num_devices)
            devices = start_processes(device_names, models, options, stack, torch.get_num_threads())
        else:  # unless there is one model, the host waits for each unit, because the policy needs the unit's time
            devices = [LocalDevice(Worker(gpu, models, options), is_alone=self.num_models == 1)]
        if self.partitioner != "exact" or device == "cpu":
            return devices, []
        # Batches for several processes stay on the CPU: a process that reads another's GPU tensor makes a context on
        # that GPU.
        samples = [gpt.zero_batch(load, "cpu" if is_shared else device) for load in workloads]
        return rehearse(models, samples, [self._settings(workloads[0])] * len(workloads), devices)

    def _settings(self, workload: Workload) -> TaskSettings:
        """Return the settings of a model's training that need no batches."""
        from methods.sharding.task import TaskSettings

        return TaskSettings(
            max_norm=workload.clip_norm,
            update="later" if workload.clip_norm else "now",
            keeps_graphs=self.intermediates == "saved",
            micro_batches=workload.micro_batches,
        )

    def _tasks(
        self, workloads: Sequence[Workload], batches: Any, models: list[list[Shard]], device: str
    ) -> list[Task]:
        """Return a task for each model. A model with a smaller batch size takes each batch in several parts."""
        from methods.sharding import gpt
        from methods.sharding.task import FirstHalf, Task

        first, tasks = workloads[0], list[Task]()
        names = first.anatomy.names(first.num_layers)
        num_batches = len(batches) if hasattr(batches, "__len__") else None
        streams = tee(batches, len(workloads))
        for number, (load, stream) in enumerate(zip(workloads, streams, strict=True)):
            num_parts = first.batch_size // load.batch_size
            parts = gpt.batch_parts(stream, num_parts, to_host=self.num_devices > 1)
            settings = dataclasses.replace(
                self._settings(first),
                learning_rate_at=load.learning_rate_at,
                random_state=gpt.own_random_state(first, device),
                batches_per_round=num_parts,
                num_batches=num_batches and num_parts * num_batches,
            )
            arguments = (number, models[number], names, parts)
            if self._in_halves(first, number):
                tasks.append(FirstHalf(*arguments, second_random=None, settings=settings))
            else:
                tasks.append(Task(*arguments, settings=settings))
        return tasks

    def _plan(self, workload: Workload, room: Room, num_layers: int) -> Plan:
        weight_bytes, num_params, anatomy = workload.weight_bytes, workload.num_params, workload.anatomy
        state_bytes_per_param = OPTIMIZER_BYTES[workload.dtype]
        shards = model_shards(workload, num_layers)
        num_shards = sum(count for count, _ in shards)
        largest_bytes = max(shard.num_bytes(workload) for _, shard in shards)
        micro_batch = micro_batch_workload(workload)
        boundary_bytes = micro_batch.boundary_bytes
        # torch page-locks the host memory of each non-blocking copy
        host_boundary_bytes = workload.micro_batches * page_locked_bytes(boundary_bytes, room)
        device_bytes = {"buffers": min(1 + self.double_buffer, num_shards) * largest_bytes}
        if self.num_devices > 1 and room.page_locks:
            device_bytes["buffers"] += cuda_budget.LEADING_BYTES  # the leading process has a context, too
        num_boundaries: float = workload.num_layers + 3  # on the host
        if self.intermediates == "saved":
            activation_bytes = max(micro_batch.head_bytes, micro_batch.layer_bytes - 9 * boundary_bytes)
            num_boundaries = saved_boundary_ratio(workload) * workload.num_layers + 3
        else:
            activation_bytes = micro_batch.working_bytes + (shards[-1][1].num_layers + 1) * boundary_bytes
        # Activations are freed before an update begins. A parameter's first update allocates its moments; in mixed
        # precision every update allocates its shard's gradients in fp32.
        update_bytes = 8 * anatomy.largest_numel
        if weight_bytes < 4:
            update_bytes += max(shard.num_bytes(workload, lambda numel, _: 4 * numel) for _, shard in shards)
        num_scalars = self.num_models * anatomy.total(workload.num_layers, lambda shape: 1) + NUM_SCALARS
        activation_bytes = max(activation_bytes, update_bytes + 2 * boundary_bytes)
        token_bytes = 8 * workload.batch_size * workload.seq_len  # of a rehearsal
        device_bytes["activations"] = activation_bytes + SCALAR_BYTES * num_scalars + token_bytes
        model_bytes = {
            "weights": weight_bytes * num_params,
            "gradients": weight_bytes * num_params,
            "optimizer": state_bytes_per_param * num_params,
            "activations": num_boundaries * host_boundary_bytes,
        }
        host_bytes = {kind: self.num_models * int(num_bytes) for kind, num_bytes in model_bytes.items()}
        if self._halves(workload.dropout):
            host_bytes["gradients"] += weight_bytes * num_params
        moved_bytes = self.num_models * self._moved_bytes(workload, num_params, num_shards)
        options = {**dataclasses.asdict(self), "shard_layers": num_layers}
        return Plan(device_bytes, host_bytes, moved_bytes=moved_bytes, options=options, updates_on_host=False)

    def _moved_bytes(self, workload: Workload, num_params: int, num_shards: int) -> int:
        """Return the bytes moved in a step, for shards of equal size. Forward and backward pass fetch all weights. With
        clipping, updates fetch weights and gradients. A shard that is still in a slot is not fetched again."""
        # number of shards in slots when the backward pass begins, and when updates begin
        hits = 1 + self.double_buffer
        fetched = max(0, 2 * num_shards - hits)
        home = 1
        if workload.clip_norm:
            fetched += 2 * max(0, num_shards - hits)
            home = 2
        size = workload.weight_bytes
        states = 2 * OPTIMIZER_BYTES[workload.dtype] * num_params
        return states + size * num_params * (fetched + home * num_shards) // num_shards
