"""A device's worker: its slots, the models' random states, and copies of boundaries between layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from harness.devices.streams import Device
from methods.sharding.shard import Shard, ShardSlot, Version
from methods.sharding.unit import FORWARD, Result, Tensors, Unit, map_tensor, parts_of
from methods.sharding.unit_run import Turn


class Worker:
    """Runs units of models in the slots of a device."""

    def __init__(
        self, device: Device, models: Sequence[Sequence[Shard]], *, double_buffer: bool = True,
        max_norms: Sequence[float] = (), intermediates: str = "checkpointed", keeps_random: bool = True,
    ) -> None:  # fmt: skip
        shards = [shard for model in models for shard in model]
        self.device, self.models, self.max_norms = device, models, max_norms
        self.saves, self.keeps_random = intermediates == "saved", keeps_random
        self.double_buffer, self.rehearses = double_buffer, False
        self.slots: list[ShardSlot] = []
        with suppress(torch.OutOfMemoryError):  # reported by the first unit
            self._make_slots()
        for module in (module for shard in shards for layer in shard.layers for module in layer.modules()):
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device.name))
        self.busy: ShardSlot | None = None
        self.graphs: dict[tuple[int, int, int | None], Any] = {}  # saved forward passes that await their backward pass

    def _make_slots(self) -> None:
        self.slots, self.num_shards = [], 0
        shards = [shard for model in self.models for shard in model]
        self.slots = [ShardSlot(self.device, shards) for _ in range(min(1 + self.double_buffer, len(shards)))]
        self.num_shards = len(shards)

    def _fit(self, rehearses: bool) -> None:
        """Make smaller slots if shards were halved; after a rehearsal empty them and reset the count of moved bytes."""
        if self.num_shards != sum(map(len, self.models)):
            self.device.synchronize()
            for shard in (shard for model in self.models for shard in model):
                shard.release()
            self.graphs.clear()
            self._make_slots()
        if self.rehearses and not rehearses:
            self.device.synchronize()
            for slot in self.slots:
                slot.shard = None
            self.graphs.clear()
            self.device.moved_bytes = 0
        self.rehearses = rehearses

    def prefetch(self, unit: Unit) -> None:
        """Queue copies of the parts that a unit needs into a slot that the running unit does not use; none if there is
        no such slot. If both need the same shard, only its states may come now."""
        shard, parts = self.models[unit.model][unit.shard], parts_of(unit)
        shard.name = f"model {unit.model} shard {unit.shard}"
        slot = self._slot_of(shard, unit.version)
        if slot is self.busy:
            parts = parts & {"states"} if slot.holds(shard, unit.version) else set()
        if parts:
            slot.prefetch(shard, unit.version, parts)

    def run(self, unit: Unit, following: Unit | None = None) -> Result:
        """Run a unit; meanwhile prefetch for the one that is expected to follow."""
        self._fit(unit.rehearses)
        self.prefetch(unit)
        self.busy = self._slot_of(self.models[unit.model][unit.shard], unit.version)
        shard = self.busy.arrive(to_write=unit.kind != FORWARD)
        if following is not None:
            self.prefetch(following)
        turn = Turn(self, self.busy, shard, unit)
        with self._random(unit):
            result: Result = getattr(turn, unit.kind)()
            random = self.random_state()
        self.busy = None
        return result._replace(random=random)

    def finished(self, result: Result) -> Result:
        """The result for another process: wait until it is computed, and copy it to the host."""
        self.device.synchronize()
        loss, norms = result.loss, result.norms
        return result._replace(
            loss=None if loss is None else loss.cpu(), norms=None if norms is None else [norm.cpu() for norm in norms]
        )

    def forget(self, unit: Unit) -> None:
        """After a failed unit: discard the contents of its slot, and its graph."""
        if self.busy is not None:
            self.busy.shard, self.busy = None, None
        self.graphs.pop((unit.model, unit.shard, unit.part), None)

    def _slot_of(self, shard: Shard, version: Version) -> ShardSlot:
        for slot in self.slots:
            if slot.holds(shard, version):
                return slot
        free = [slot for slot in self.slots if slot is not self.busy]
        # The first slot is the one filled longest ago; it goes to the end of the queue.
        slot = free[0] if free else self.slots[0]
        self.slots.remove(slot)
        self.slots.append(slot)
        return slot

    @contextmanager
    def _random(self, unit: Unit) -> Iterator[None]:
        """Use the model's own random state, and restore this process's afterwards."""
        if not self.keeps_random:
            yield
            return
        before = self.random_state()
        self.set_random(unit.random)
        try:
            yield
        finally:
            self.set_random(before)

    def random_state(self) -> Any:
        if not self.keeps_random:
            return None
        cuda = self.device.name.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device.name) if cuda else None

    def set_random(self, state: Any) -> None:
        if state is None:
            return
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device.name)

    def to_host(self, tensors: Tensors) -> Tensors:
        """Copies in page-locked memory that lives until the copy has ended; on a CPU the tensors themselves."""
        if self.device.name.type != "cuda":
            return tuple(map_tensor(tensor, lambda t: t.to("cpu")) for tensor in tensors)
        copied = []
        for tensor in tensors:
            copied.append(map_tensor(tensor, lambda t: torch.empty_like(t, device="cpu", pin_memory=True)))
            if isinstance(tensor, torch.Tensor):
                copied[-1].copy_(tensor, non_blocking=True)
        return tuple(copied)

    def to_device(self, tensors: Tensors) -> Tensors:
        return tuple(map_tensor(tensor, lambda t: t.to(self.device.name, non_blocking=True)) for tensor in tensors)
