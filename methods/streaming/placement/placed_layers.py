"""The bytes that the layers of a placement need on the device, on the host and on the disk, and those that a step
copies. This file does not import torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeGuard

from harness.core.job import Plan, Workload
from harness.plan.resources import all_reduce_sent_bytes, gather_sent_bytes
from methods.shared.memory_needs import (
    CHUNK_NUMEL,
    NUM_BUFFERS,
    UPDATE_COPY_BYTES,
    VECTOR_NUMEL,
    block_numel,
    shared_numel,
    state_bytes,
    state_bytes_in,
    stored_numel,
)
from methods.streaming.placement.placement import KINDS, num_boundaries, num_gradient_rooms, rings


class UserSizes(NamedTuple):
    """The sizes of a user's model that a plan needs, in place of a Workload. `activations`: measured bytes of device
    memory, without the memory for the layers' weights, gradients and states. `boundary_bytes`: measured bytes of a
    layer's inputs; 0 if the device keeps the inputs. `are_frozen`: for each layer, True if it travels without a
    gradient and a state; empty: none does. `end_dtype`: of the trained parameters outside of the layers, if it is not
    the layers'."""

    dtype: str
    numels: tuple[int, ...]  # number of parameters of each layer, bottom first
    end_params: int
    activations: int
    waits_for_norm: bool
    boundary_bytes: int = 0
    are_frozen: tuple[bool, ...] = ()
    end_dtype: str | None = None

    @property
    def num_layers(self) -> int:
        return len(self.numels)

    @property
    def layer_params(self) -> int:
        """Return the number of parameters of the largest layer, for which slots have room."""
        return max(self.numels)

    @property
    def weight_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2


Sizes = Workload | UserSizes


def params_of(workload: Sizes, kinds: str) -> dict[str, int]:
    """Return, for each kind, the number of parameters of all its layers."""
    if numels := numels_of(workload):
        pairs = [*zip(kinds, numels, strict=True)]
        return {kind: sum(numel for layer_kind, numel in pairs if layer_kind == kind) for kind in KINDS}
    # a search may ask for a million layers
    return {kind: kinds.count(kind) * workload.layer_params for kind in KINDS}


def numels_of(workload: Sizes) -> tuple[int, ...]:
    """Return the number of parameters of each layer, bottom first; for a Workload of equal layers an empty tuple."""
    return workload.numels if isinstance(workload, UserSizes) else workload.layer_numels


def trained_params_of(workload: Sizes, kinds: str) -> dict[str, int]:
    """Return, for each kind, the number of parameters of those of its layers that are trained."""
    if is_adapted(workload):
        return dict.fromkeys(KINDS, 0)
    if not isinstance(workload, UserSizes) or not workload.are_frozen:
        return params_of(workload, kinds)
    rows = zip(kinds, workload.numels, workload.are_frozen, strict=True)
    trained = Counter[str]()
    for kind, numel, is_frozen in rows:
        trained[kind] += 0 if is_frozen else numel
    return {kind: trained[kind] for kind in KINDS}


def is_adapted(workload: Sizes) -> TypeGuard[Workload]:
    """True if all layers are frozen but for their adapters."""
    return isinstance(workload, Workload) and workload.lora is not None


def _mean_params(workload: Sizes) -> int:
    """Return the mean number of parameters of a layer."""
    return workload.mean_layer_params if isinstance(workload, Workload) else workload.layer_params


class Activations(NamedTuple):
    """Bytes of a layer's inputs (`boundary_bytes`), of a step's small tensors, and of all activations at their peak."""

    boundary_bytes: int
    small_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class PlacedLayers:
    """Layers of these kinds, and the bytes that they need. `workload`: the workload of one rank; with several ranks,
    each rank has its part of every layer that is not resident. `clipping`: "deferred" or "speculate"; None: updates
    do not wait for the norm. `activations`: the memory that keeps the layers' inputs for the backward pass.
    `hosted_ends`: parameters of the parts of embedding and head that live on the host; empty: both are on the
    device. `is_ordered`: False: the letters stand for layers in any order, so each layer has the mean number of
    parameters, and a slot has room for the largest."""

    workload: Sizes
    kinds: str
    window_size: int
    clipping: str | None = "deferred"
    num_ranks: int = 1
    activations: str = "device"
    hosted_ends: Sequence[int] = ()
    is_ordered: bool = True

    def plan(self) -> Plan:
        """Return the plan of these layers. Raises ValueError if some rank's part of a layer would hold nothing but
        padding."""
        layer_params = min(self.numels, default=self.workload.layer_params)
        if self.num_ranks > 1 and layer_params < VECTOR_NUMEL * self.num_ranks**2:
            raise ValueError(
                f"--ranks: expected at most {math.isqrt(layer_params // VECTOR_NUMEL)} for layers of {layer_params}"
                f" parameters, got {self.num_ranks}; try a larger -h"
            )
        device_bytes, host_bytes = self._device_bytes(), self._host_bytes()
        if self.updated_dtype != "fp32":
            self._add_update_copies(device_bytes, host_bytes)
        if num_host_homes := self.num_hosted_layers + len(self.hosted_ends):
            # the clip factor, 512 bytes, and each home's number of steps, 4 bytes
            host_bytes["optimizer"] += 512 + 4 * num_host_homes
        disk_bytes = {}
        if self.count_of_kind["D"]:
            disk_bytes["optimizer"] = self.count_of_kind["D"] * self.stored_bytes
        moved_bytes = self._moved_bytes() + 2 * host_bytes.get("activations", 0)
        return Plan(
            device=device_bytes,
            host=host_bytes,
            disk=disk_bytes,
            moved_bytes=moved_bytes,
            exchanged=self._exchanged_bytes(),
        )

    @cached_property
    def count_of_kind(self) -> dict[str, int]:
        """Number of layers of each kind."""
        return {kind: self.kinds.count(kind) for kind in KINDS}

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """The number of parameters of each layer, bottom first; empty: all have as many, or the mean counts."""
        return numels_of(self.workload) if self.is_ordered else ()

    def numels_of_kinds(self, kinds: str) -> list[int]:
        """Return the number of parameters of each layer of these kinds, bottom first. Call it if layers are unequal."""
        return [numel for kind, numel in zip(self.kinds, self.numels, strict=True) if kind in kinds]

    def at_home(self, kinds: str, num_topmost: int | None = None) -> int:
        """Return the elements of all layers of these kinds, or of a rank's parts of them, at home. `num_topmost`: only
        of so many layers of these kinds, the topmost."""
        if self.numels:
            numels = self.numels_of_kinds(kinds)
            numels = numels if num_topmost is None else numels[len(numels) - num_topmost :]
            return sum(map(self._rank_numel, numels))
        count = sum(self.count_of_kind[kind] for kind in kinds) if num_topmost is None else num_topmost
        return count * self._rank_numel(_mean_params(self.workload))

    def room_for(self, kinds: str) -> int:
        """Return the elements of room on the device for the largest layer of these kinds; 0 without such a layer."""
        if self.numels:
            numel = max(self.numels_of_kinds(kinds), default=0)
        else:
            numel = self.workload.layer_params if any(self.count_of_kind[kind] for kind in kinds) else 0
        return shared_numel(numel, self.num_ranks)

    def _rank_numel(self, numel: int) -> int:
        return shared_numel(numel, self.num_ranks) // self.num_ranks

    @cached_property
    def params_of_kind(self) -> dict[str, int]:
        if self.is_ordered:
            return params_of(self.workload, self.kinds)
        mean_params = _mean_params(self.workload)
        return {kind: count * mean_params for kind, count in self.count_of_kind.items()}

    @cached_property
    def trained_params_of_kind(self) -> dict[str, int]:
        """The number of trained parameters of each kind's layers; the others have weights alone."""
        if not self.is_ordered:
            return self.params_of_kind
        return trained_params_of(self.workload, self.kinds)

    @property
    def num_trained(self) -> int:
        """Number of the layers' trained parameters."""
        return sum(self.trained_params_of_kind.values())

    @property
    def updated_dtype(self) -> str:
        """The dtype of the trained parameters. Those outside of the layers have one of their own if all layers are
        frozen; adapters are fp32."""
        if is_adapted(self.workload):
            return "fp32"
        end_dtype = self.workload.end_dtype if isinstance(self.workload, UserSizes) else None
        return end_dtype or self.workload.dtype

    @cached_property
    def end_bytes(self) -> dict[str, int]:
        """Bytes per trained parameter outside of the layers, as bytes_at_home."""
        return state_bytes_in(self.updated_dtype)

    @cached_property
    def bytes_at_home(self) -> dict[str, int]:
        """Bytes per parameter of weights, gradients and the optimizer's state."""
        return state_bytes(self.workload)  # type: ignore[arg-type]  # state_bytes() reads the dtype alone

    @property
    def updated_bytes(self) -> int:
        """Bytes per parameter that an update changes."""
        return self.bytes_at_home["weights"] + self.bytes_at_home["optimizer"]

    @property
    def stored_bytes(self) -> int:
        """Bytes of a layer on the disk, where all have as much room as the largest."""
        return self.bytes_at_home["optimizer"] * stored_numel(self.room_for("D"))

    @cached_property
    def num_hosted_layers(self) -> int:
        """Number of layers whose home is not the device."""
        return len(self.kinds) - self.count_of_kind["R"]

    @property
    def num_windowed_layers(self) -> int:
        return self.count_of_kind["W"] + self.count_of_kind["D"]

    @property
    def num_windowed_slots(self) -> int:
        return min(self.window_size, self.num_windowed_layers)

    @property
    def num_streamed_slots(self) -> int:
        return min(self.window_size, 2, self.count_of_kind["S"])

    @property
    def ends_on_device(self) -> int:
        """Number of the trained parameters outside of the layers' homes that live on the device: embedding and head,
        or the adapters."""
        if is_adapted(self.workload):
            return self.workload.num_trained
        return 0 if self.hosted_ends else self.workload.end_params

    @property
    def frozen_ends_on_device(self) -> int:
        """Number of the parameters of embedding and head that live on the device and are frozen."""
        return self.workload.end_params if is_adapted(self.workload) else 0

    @property
    def ends_numel(self) -> int:
        """Elements of the device memory that embedding and head use in turn if they live on the host: the elements of
        the larger of the two; 0 if they live on the device."""
        return max(self.hosted_ends, default=0)

    @property
    def num_kept_boundaries(self) -> int:
        """Number of layers whose inputs fit the device's memory for boundaries."""
        return len(self.kinds) if self.activations == "device" else num_boundaries(len(self.kinds))

    @cached_property
    def activation_bytes(self) -> Activations:
        workload = self.workload
        if isinstance(workload, UserSizes):  # at an update all measured activations may still be in memory
            return Activations(workload.activations, 0, workload.activations)
        # While one micro-batch computes, the other micro-batches wait in memory. While the head computes, each waiting
        # micro-batch keeps 2 boundaries: the top layer's output and the output's gradient. While a top layer computes,
        # it keeps 4: also the layer's input and the input's gradient.
        boundary_bytes = workload.boundary_bytes
        waiting_bytes = boundary_bytes - boundary_bytes // workload.micro_batches
        num_kept = self.num_kept_boundaries
        if is_adapted(workload) and self.activations == "host":
            num_kept += 1  # the bottom layer's input needs no gradient, so it does not travel
        bytes_at_head = num_kept * boundary_bytes + workload.head_bytes + 2 * waiting_bytes
        bytes_at_layer = 4 * waiting_bytes + max(
            min(index, num_kept - 1) * boundary_bytes + workload.bytes_of(kind)
            for kind, index in workload.anatomy.topmost(len(self.kinds))
        )
        # Small tensors matter when a device is nearly full: gradient norms and other scalars, 512 bytes each, and the
        # statistics that attention keeps for its backward pass, 8 bytes for each head and token.
        num_tensors = sum(count * len(kind.adapters or kind.tensors) for kind, count in workload.kind_counts)
        small_bytes = 512 * (num_tensors + 32) + 8 * workload.num_attention_rows
        small_bytes += workload.given_bytes
        return Activations(boundary_bytes, small_bytes, max(bytes_at_head, bytes_at_layer) + small_bytes)

    def _device_bytes(self) -> dict[str, int]:
        weight_bytes, num_resident = self.workload.weight_bytes, self.trained_params_of_kind["R"]
        device_bytes = {
            kind: per_param * num_resident + self.end_bytes[kind] * self.ends_on_device
            for kind, per_param in self.bytes_at_home.items()
        }
        num_frozen = self.params_of_kind["R"] - num_resident + self.frozen_ends_on_device
        device_bytes["weights"] += weight_bytes * num_frozen
        # If embedding and head live on the host, they use the same memory on the device in turn. This memory has room
        # for the weights and the gradient of the larger of the two.
        device_bytes["weights"] += weight_bytes * (self.params_of_kind["P"] + self.ends_numel)
        device_bytes["gradients"] += weight_bytes * self.ends_numel
        device_bytes["gradients"] -= 0 if self.clipping else weight_bytes * num_resident
        waits = self.clipping is not None
        num_rooms = num_gradient_rooms(self.kinds, self.window_size, waits=waits) if self.num_trained else 0
        streamed_bytes = self.updated_bytes + (weight_bytes if waits else 0)
        device_bytes["buffers"] = (
            weight_bytes * self.num_windowed_slots * self.room_for("WD")
            + weight_bytes * num_rooms * self.room_for("PWSD" if waits else "RPWSD")
            + streamed_bytes * self.num_streamed_slots * self.room_for("S")
        )
        device_bytes["activations"] = self.activation_bytes.peak_bytes
        return device_bytes

    def _host_bytes(self) -> dict[str, int]:
        workload, params_of_kind, bytes_at_home = (
            self.workload,
            self.trained_params_of_kind,
            self.bytes_at_home,
        )
        num_trained = self.num_trained - params_of_kind["R"]
        num_frozen = sum(self.params_of_kind.values()) - self.params_of_kind["R"] - num_trained
        numel = num_trained + sum(self.hosted_ends) if self.num_ranks == 1 else self.at_home("PWSD")
        host_bytes = {kind: per_param * numel for kind, per_param in bytes_at_home.items()}
        host_bytes["weights"] += workload.weight_bytes * num_frozen
        host_bytes["optimizer"] -= bytes_at_home["optimizer"] * params_of_kind["D"]
        host_bytes["gradients"] -= 0 if self.clipping else bytes_at_home["gradients"] * params_of_kind["S"]
        if self.num_kept_boundaries < len(self.kinds):
            host_bytes["activations"] = workload.boundary_bytes * (len(self.kinds) - self.num_kept_boundaries)
        if self.num_ranks > 1:
            # gloo gathers and sums in copies of a slab, one for each of two threads; NCCL makes no copies
            host_bytes["buffers"] = (
                2 * workload.weight_bytes * shared_numel(workload.layer_params, self.num_ranks)
            )
        if self.count_of_kind["D"]:
            host_bytes["buffers"] = min(NUM_BUFFERS, self.count_of_kind["D"]) * self.stored_bytes
        if self.clipping == "speculate":
            host_bytes["optimizer"] += self.updated_bytes * (
                sum(params_of_kind.values()) - params_of_kind["R"] - params_of_kind["D"]
            )
        return host_bytes

    def _add_update_copies(self, device_bytes: dict[str, int], host_bytes: dict[str, int]) -> None:
        """Add the fp32 copies that updates make without a compiled kernel, at a time when boundaries are in memory,
        too."""
        dtype = self.updated_dtype
        trained_params = self.trained_params_of_kind
        copy_bytes, block_params = UPDATE_COPY_BYTES[dtype], block_numel(dtype)
        boundary_bytes, small_bytes, peak_bytes = self.activation_bytes
        resident_params = self.room_for("R") if trained_params["R"] else 0
        moments = [
            (copy_bytes * min(block_params, max(self.ends_on_device, resident_params)), boundary_bytes)
        ]
        topmost = max(self.kinds.rfind("S"), -1 if self.clipping else self.kinds.rfind("R"))
        if topmost >= 0:
            # a deferred update of this layer runs in the forward pass, other updates in the backward pass
            num_boundaries_in_use = min(topmost, self.num_kept_boundaries)
            num_boundaries_in_use += 1 if self.clipping == "deferred" else 3
            kept_bytes = min(boundary_bytes * num_boundaries_in_use, peak_bytes)
            params_updated = self.room_for("S" if self.clipping else "RS")
            moments.append((copy_bytes * min(block_params, params_updated), kept_bytes))
        updated_bytes, kept_bytes = max(moments, key=sum)
        if updated_bytes + kept_bytes + small_bytes > peak_bytes:
            device_bytes["gradients"] += updated_bytes
            device_bytes["activations"] = kept_bytes + small_bytes
        is_any_at_home = self.num_trained > trained_params["R"] + trained_params["S"]
        params_at_home = self.room_for("PWD") // self.num_ranks if is_any_at_home else 0
        host_bytes["gradients"] += copy_bytes * min(CHUNK_NUMEL, max(params_at_home, self.ends_numel))

    def _moved_bytes(self) -> int:
        """Return the bytes of a step's copies, without boundaries. The weights of a travelling layer are fetched twice
        a step, but only once if the layer is still in a slot when the backward pass begins. The gradient goes home
        once; the gradient of a layer of kind S only if its update may have to wait for the norm, and if the update is
        deferred, it comes in once more."""
        weight_bytes = self.workload.weight_bytes
        gradient_bytes = 0
        if self.clipping is not None:
            gradient_bytes = weight_bytes * (2 if self.clipping == "deferred" else 1)
        num_copied = 2 * self.at_home("P") + 3 * self.at_home("WD") + 2 * sum(self.hosted_ends)
        num_copied -= self.at_home("WD", self.num_windowed_slots) + self.at_home("S", self.num_streamed_slots)
        num_copied -= self._num_spared()
        streamed_bytes = weight_bytes + 2 * self.updated_bytes + gradient_bytes
        return weight_bytes * num_copied + streamed_bytes * self.at_home("S")

    def _num_spared(self) -> int:
        """Return the elements that a step does not copy because layers are frozen. No gradient of these goes home.
        Their weights stay as they are on the device: parked ones, and those in slots when a step ends, which the next
        step needs first."""
        if is_adapted(self.workload):
            return self.at_home("WD") + self._lowest_in_window
        if not isinstance(self.workload, UserSizes) or not any(self.workload.are_frozen):
            return 0
        window, _ = rings(self.kinds, self.window_size)
        spared_copies = dict.fromkeys(window.layers, 1) | dict.fromkeys(window.layers[: window.num_slots], 2)
        spared_copies |= {index: 2 for index, kind in enumerate(self.kinds) if kind == "P"}
        frozen_layers = (index for index, is_frozen in enumerate(self.workload.are_frozen) if is_frozen)
        return sum(spared_copies.get(index, 0) * self.numels[index] for index in frozen_layers)

    @property
    def _lowest_in_window(self) -> int:
        """The elements of the layers that are in the window's slots when a step ends."""
        num_above = self.num_windowed_layers - self.num_windowed_slots
        return self.at_home("WD") - self.at_home("WD", num_above)

    def _exchanged_bytes(self) -> dict[str, float]:
        """Return the bytes that a rank sends. Ranks gather a layer when it is fetched, and sum its gradient in parts.
        Gradients of resident layers, ends and adapters are summed whole."""
        weight_bytes = self.workload.weight_bytes
        hosted_bytes = weight_bytes * self.num_ranks * self.at_home("WD")
        kept_bytes = weight_bytes * self.num_ranks * self.at_home("WD", self.num_windowed_slots)
        if is_adapted(self.workload):
            kept_bytes += weight_bytes * self.num_ranks * self._lowest_in_window
            gathered_bytes, summed_in_parts = 2 * hosted_bytes - kept_bytes, 0
            summed_whole = 4 * self.workload.num_trained
        else:
            gathered_bytes, summed_in_parts = 2 * hosted_bytes - kept_bytes, hosted_bytes
            summed_whole = weight_bytes * (self.workload.end_params + self.params_of_kind["R"])
        sums_bytes = gather_sent_bytes(summed_in_parts, self.num_ranks)
        sums_bytes += all_reduce_sent_bytes(summed_whole, self.num_ranks)
        return {
            "gathers": gather_sent_bytes(gathered_bytes, self.num_ranks),
            "sums": sums_bytes,
        }
