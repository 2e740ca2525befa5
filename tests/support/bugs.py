"""Ordering bugs to plant in methods/: each takes one wait away, or turns two calls round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from harness.core.job import Workload
from tests.support import planting
from tests.support.training import EDGE, overflowing, tiny

COMMITTED = 100.0  # a limit that no gradient of these trainings reaches


class Bug(NamedTuple):
    """One change to a file, and the memory that it endangers in a training of five layers."""

    symptom: str
    file: str
    old: str
    new: str
    endangered: str
    clip_norm: float = 1.0
    method: str = "stronghold"
    placement: str = "W5"
    clipping: str = "deferred"
    overflows: bool = False  # in fp16 at every other step
    dtype: str = "fp32"  # of what does not overflow
    activations: str = "device"  # where boundaries wait

    @property
    def workload(self) -> Workload:
        if self.overflows:
            return overflowing(num_layers=5, clip_norm=self.clip_norm)
        return tiny(num_layers=5, clip_norm=self.clip_norm, dtype=self.dtype)

    @property
    def options(self) -> dict[str, Any]:
        if self.method != "stronghold":
            return {}
        timing = {"clipping": self.clipping, "activations": self.activations}
        return {"window_size": 2, "placement": self.placement, **timing}


SLOT, STATE, CLIP = "methods/streaming/slot.py", "methods/streaming/layer_state.py", "methods/offload/clip.py"
DISK, STRONGHOLD = "methods/streaming/disk.py", "methods/stronghold.py"
KINDS, BOUNDARIES = "methods/streaming/layer_kinds.py", "methods/streaming/boundaries.py"
FETCH_WAITS = "(device.compute.record_event(), self.sent, layer.landed)"

# Waits between streams and threads that a CPU, which does one thing after another, can do without.
SILENT_BUGS = [
    Bug(
        "weights_overwritten_while_in_use",
        SLOT,
        FETCH_WAITS,
        "(self.sent, layer.landed)",
        "slot 1 weights",
    ),
    Bug(
        "weights_overwritten_after_waiting_for_the_wrong_stream",
        SLOT,
        FETCH_WAITS,
        "(device.inbound.record_event(), self.sent, layer.landed)",
        "slot 1 weights",
    ),
    Bug(
        "parked_weights_overwritten_while_in_use",
        SLOT,
        FETCH_WAITS,
        "(self.sent, layer.landed)",
        "slot 2 weights",
        placement="P5",
    ),
    Bug(
        "state_overwritten_while_going_home",
        SLOT,
        FETCH_WAITS,
        "(device.compute.record_event(), layer.landed)",
        "slot 1 exp_avg",
        placement="S5",
    ),
    Bug(
        "gradient_fetched_before_it_has_come_home",
        SLOT,
        FETCH_WAITS,
        "(device.compute.record_event(), self.sent)",
        "layers.0.grads",
        placement="S5",
    ),
    Bug(
        "layer_computed_before_its_weights_arrive",
        SLOT,
        "self.device.compute.wait_event(self.loaded.result())",
        "self.loaded.result()",
        "slot 1 weights",
    ),
    Bug(
        "device_updates_before_the_state_arrives",
        SLOT,
        "self.device.compute.wait_event(self.completed.result())",
        "self.completed.result()",
        "slot 1 exp_avg",
        placement="S5",
    ),
    Bug(
        "device_updates_ahead_before_the_state_arrives",
        SLOT,
        "self.device.compute.wait_event(self.completed.result())",
        "self.completed.result()",
        "slot 1 exp_avg",
        clip_norm=0.0,
        placement="S5",
    ),
    Bug(
        "half_of_a_master_left_behind_when_the_device_updates",
        SLOT,
        "self.device.compute.wait_event(self.completed.result())",
        "self.completed.result()",
        "slot 1 master",
        placement="S5",
        dtype="bf16",
    ),
    Bug(
        "half_of_a_master_sent_home_before_it_is_updated",
        SLOT,
        '"outbound", "state", layer.prefix, [done]',
        '"outbound", "state", layer.prefix, []',
        "slot 1 master",
        clip_norm=0.0,
        placement="S5",
        dtype="bf16",
    ),
    Bug(
        "state_sent_home_before_it_is_updated",
        SLOT,
        '"outbound", "state", layer.prefix, [done]',
        '"outbound", "state", layer.prefix, []',
        "slot 1 exp_avg",
        placement="S5",
    ),
    Bug(
        "gradient_sent_home_before_it_is_computed",
        SLOT,
        '"outbound", "gradient", layer.prefix, [done]',
        '"outbound", "gradient", layer.prefix, []',
        "gradients 1 slab",
    ),
    Bug(
        "gradient_overwritten_while_going_home",
        SLOT,
        "self.device.compute.wait_event(self.drained)",
        "pass",
        "gradients 1 slab",
    ),
    Bug(
        "boundary_overwritten_while_going_home",
        BOUNDARIES,
        "self.device.compute.wait_event(self.copied_event)",
        "pass",
        "boundaries 1 slab",
        activations="host",
    ),
    Bug(
        "boundary_sent_home_before_it_is_in_its_slot",
        BOUNDARIES,
        '"outbound", "boundary", self.layer_name, [done_event]',
        '"outbound", "boundary", self.layer_name, []',
        "boundaries 1 slab",
        activations="host",
    ),
    Bug(
        "slot_of_a_boundary_reused_before_the_layer_is_done",
        BOUNDARIES,
        '"inbound", "boundary", self.layer_name, [free_event]',
        '"inbound", "boundary", self.layer_name, []',
        "boundaries 1 slab",
        activations="host",
    ),
    Bug(
        "layer_recomputed_before_its_boundary_is_back",
        BOUNDARIES,
        "self.device.compute.wait_event(self.returned_event)",
        "pass",
        "boundaries 1 slab",
        placement="R5",  # else the wait for weights, which come in behind the boundary, is a wait for it, too
        activations="host",
    ),
    Bug(
        "resident_gradient_computed_where_another_is_going_home",
        KINDS,
        "            return self.gradients.backward(self.state, dxs)\n        dxs",
        "            return self.state.backward(dxs, self.gradients.slab)\n        dxs",
        "gradients 1 slab",
        clip_norm=0.0,
        placement="R3W2",
    ),
    Bug(
        "layer_updated_before_its_gradient_lands",
        STATE,
        "landed.synchronize()\n                factor",
        "factor",
        "layers.2.grads",
        clip_norm=0.0,
    ),
    Bug(
        "layer_updated_ahead_before_its_gradient_lands",
        STATE,
        "landed.synchronize()\n            if skipped or not is_within():",
        "if skipped:",
        "layers.2.grads",
        clip_norm=COMMITTED,
        clipping="speculate",
    ),
    Bug(
        "clip_factor_sent_home_before_it_is_computed",
        CLIP,
        "[done]",
        "[]",
        "what clamp made",
    ),
    Bug(
        "norm_so_far_sent_home_before_it_is_computed",
        CLIP,
        "[done]",
        "[]",
        "what sum made",
        clip_norm=COMMITTED,
        clipping="speculate",
    ),
    Bug(
        "clip_factor_used_before_it_lands",
        CLIP,
        "self.landed_event.synchronize()",
        "pass",
        "what clone made",
    ),
    Bug(
        "norm_so_far_used_before_it_lands",
        CLIP,
        "            landed_event.synchronize()\n            return float(square_on_host)",
        "            return float(square_on_host)",
        "what clone made",
        clip_norm=COMMITTED,
        clipping="speculate",
    ),
    Bug(
        "l2l_updates_before_the_gradient_lands",
        "methods/l2l.py",
        "gradients.send_home(layer)\n                    gpu.synchronize()",
        "gradients.send_home(layer)",
        "layers.0.grads",  # the others are waited for with the next layer's weights
        clip_norm=0.0,
        method="l2l",
    ),
]
# Orders between threads, or of calls: on a CPU the losses are wrong now and then, or always.
LOUD_BUGS = [
    Bug(
        "weights_fetched_before_their_update",
        SLOT,
        "            updated.result()",
        "            pass",
        "layers.2.weights",
    ),
    Bug(
        "parked_weights_fetched_before_their_update",
        SLOT,
        "            updated.result()",
        "            pass",
        "layers.2.weights",
        placement="P5",
    ),
    Bug(
        "update_committed_before_it_is_through",
        STATE,
        "                    ahead.done.result()\n",
        "",
        "layers.2.spare weights",
        clip_norm=COMMITTED,
        clipping="speculate",
    ),
    Bug(
        "update_dropped_before_it_is_through",
        STATE,
        "self.updated, self.speculation = self.speculation.done, None",
        "self.speculation = None",
        "layers.3.grads",
        clip_norm=0.0,
        clipping="speculate",
        overflows=True,
    ),
    Bug(
        "state_read_from_the_disk_before_it_is_written",
        DISK,
        "{self.last_visit, disk.visits[buffer_index]}",
        "{disk.visits[buffer_index]}",
        "shelf 5 state",
        clip_norm=0.0,
        placement="D5",
    ),
    Bug(
        "state_read_where_another_is_not_yet_written_from",
        DISK,
        "{self.last_visit, disk.visits[buffer_index]}",
        "{self.last_visit}",
        "what room made",
        placement="D5",
    ),
    Bug(
        "state_written_before_it_is_updated",
        DISK,
        "update(buffer).result()",
        "update(buffer)",
        "what room made",
        placement="D5",
    ),
    Bug(
        "window_refilled_before_the_updates_are_queued",
        STRONGHOLD,
        "rule.finish()  # starts the updates that have waited for the norm\n                window.refill()",
        "window.refill()\n                rule.finish()",
        "layers.1.weights",
    ),
    Bug(
        "training_returns_before_the_last_update",
        STRONGHOLD,
        "gpu.synchronize(*(state.updated for state in states))",
        "gpu.synchronize()",
        "layers.2.exp_avg",
    ),
]


def overflow(patch: pytest.MonkeyPatch) -> None:
    """Let overflowing() overflow at every other step: each good one doubles the scale."""
    patch.setattr("methods.shared.loss_scale.INITIAL_LOSS_SCALE", EDGE)
    patch.setattr("methods.shared.loss_scale.LOSS_SCALE_WINDOW", 1)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Load what is in methods/ afresh, with the bug in it, as what a method will import."""
    with planting.planted(bug.file, bug.old, bug.new), pytest.MonkeyPatch.context() as patch:
        if bug.overflows:
            overflow(patch)
        yield
