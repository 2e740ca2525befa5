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

    @property
    def workload(self) -> Workload:
        make = overflowing if self.overflows else tiny
        return make(num_layers=5, clip_norm=self.clip_norm)

    @property
    def options(self) -> dict[str, Any]:
        if self.method != "stronghold":
            return {}
        return {"window_size": 2, "placement": self.placement, "clipping": self.clipping}


FETCH_WAITS = "(device.compute.record_event(), self.sent, self.home.landed)"
UPDATE_ALL = """\
                    elif waits:
                        home.update_when_landed(learning_rate, clip)
"""
REFILL = """\
                refill()
"""
UPDATE_LATER = """\
                for home in homes:
                    home.update_when_landed(learning_rate, clip)
"""

# Waits between streams and threads that a CPU, which does one thing after another, can do without.
SILENT_BUGS = [
    Bug(
        "weights_overwritten_while_in_use",
        "methods/streaming/slot.py",
        FETCH_WAITS,
        "(self.sent, self.home.landed)",
        "slot 1 weights",
    ),
    Bug(
        "weights_overwritten_after_waiting_for_the_wrong_stream",
        "methods/streaming/slot.py",
        FETCH_WAITS,
        "(device.inbound.record_event(), self.sent, self.home.landed)",
        "slot 1 weights",
    ),
    Bug(
        "parked_weights_overwritten_while_in_use",
        "methods/streaming/slot.py",
        FETCH_WAITS,
        "(self.sent, self.home.landed)",
        "slot 2 weights",
        placement="P5",
    ),
    Bug(
        "state_overwritten_while_going_home",
        "methods/streaming/slot.py",
        FETCH_WAITS,
        "(device.compute.record_event(), self.home.landed)",
        "slot 1 exp_avg",
        placement="S5",
    ),
    Bug(
        "gradient_fetched_before_it_has_come_home",
        "methods/streaming/slot.py",
        FETCH_WAITS,
        "(device.compute.record_event(), self.sent)",
        "layers.0.grads",
        placement="S5",
    ),
    Bug(
        "layer_computed_before_its_weights_arrive",
        "methods/streaming/slot.py",
        "self.device.compute.wait_event(self.loaded.result())",
        "self.loaded.result()",
        "slot 1 weights",
    ),
    Bug(
        "device_updates_before_the_state_arrives",
        "methods/streaming/slot.py",
        "device.compute.wait_event(self.completed.result())",
        "self.completed.result()",
        "slot 1 exp_avg",
        placement="S5",
    ),
    Bug(
        "device_updates_ahead_before_the_state_arrives",
        "methods/streaming/slot.py",
        "device.compute.wait_event(self.completed.result())",
        "self.completed.result()",
        "slot 1 exp_avg",
        clip_norm=0.0,
        placement="S5",
    ),
    Bug(
        "state_sent_home_before_it_is_updated",
        "methods/streaming/slot.py",
        'device.outbound.wait_event(done)\n            with device.span("outbound", "state"',
        'with device.span("outbound", "state"',
        "slot 1 exp_avg",
        placement="S5",
    ),
    Bug(
        "gradient_sent_home_before_it_is_computed",
        "methods/streaming/slot.py",
        'device.outbound.wait_event(done)\n            with device.span("outbound", "gradient"',
        'with device.span("outbound", "gradient"',
        "gradients 1 slab",
    ),
    Bug(
        "gradient_overwritten_while_going_home",
        "methods/streaming/slot.py",
        "self.device.compute.wait_event(self.gradients.drained)",
        "pass",
        "gradients 1 slab",
    ),
    Bug(
        "layer_updated_before_its_gradient_lands",
        "methods/streaming/layer_state.py",
        "landed.synchronize()\n                factor",
        "factor",
        "layers.2.grads",
        clip_norm=0.0,
    ),
    Bug(
        "layer_updated_ahead_before_its_gradient_lands",
        "methods/streaming/layer_state.py",
        "landed.synchronize()\n            if skipped or not is_within():",
        "if skipped:",
        "layers.2.grads",
        clip_norm=COMMITTED,
        clipping="speculate",
    ),
    Bug(
        "clip_factor_sent_home_before_it_is_computed",
        "methods/offload/clip.py",
        "[done]",
        "[]",
        "what clamp made",
    ),
    Bug(
        "norm_so_far_sent_home_before_it_is_computed",
        "methods/offload/clip.py",
        "[done]",
        "[]",
        "what sum made",
        clipping="speculate",
    ),
    Bug(
        "clip_factor_used_before_it_lands",
        "methods/offload/clip.py",
        "self.landed.synchronize()",
        "pass",
        "what clone made",
    ),
    Bug(
        "norm_so_far_used_before_it_lands",
        "methods/offload/clip.py",
        "            landed.synchronize()\n            return float(here)",
        "            return float(here)",
        "what clone made",
        clipping="speculate",
    ),
    Bug(
        "l2l_updates_before_the_gradient_lands",
        "methods/l2l.py",
        "slot.offload(home)\n                    slot.wait()",
        "slot.offload(home)",
        "layers.0.grads",  # the others are waited for with the next layer's weights
        clip_norm=0.0,
        method="l2l",
    ),
]
# Orders between threads, or of calls: on a CPU the losses are wrong now and then, or always.
LOUD_BUGS = [
    Bug(
        "weights_fetched_before_their_update",
        "methods/streaming/slot.py",
        "            updated.result()",
        "            pass",
        "layers.2.weights",
    ),
    Bug(
        "parked_weights_fetched_before_their_update",
        "methods/streaming/slot.py",
        "            updated.result()",
        "            pass",
        "layers.2.weights",
        placement="P5",
    ),
    Bug(
        "update_committed_before_it_is_through",
        "methods/streaming/layer_state.py",
        "                    ahead.done.result()\n",
        "",
        "layers.2.spare weights",
        clip_norm=COMMITTED,
        clipping="speculate",
    ),
    Bug(
        "update_dropped_before_it_is_through",
        "methods/streaming/layer_state.py",
        "self.updated, self.speculation = self.speculation.done, None",
        "self.speculation = None",
        "layers.3.grads",
        clip_norm=0.0,
        clipping="speculate",
        overflows=True,
    ),
    Bug(
        "state_read_from_the_disk_before_it_is_written",
        "methods/streaming/disk.py",
        "{self.last, disk.visits[turn]}",
        "{disk.visits[turn]}",
        "shelf 4 state",
        clip_norm=0.0,
        placement="D5",
    ),
    Bug(
        "state_read_where_another_is_not_yet_written_from",
        "methods/streaming/disk.py",
        "{self.last, disk.visits[turn]}",
        "{self.last}",
        "what room made",
        placement="D5",
    ),
    Bug(
        "state_written_before_it_is_updated",
        "methods/streaming/disk.py",
        "update(buffer).result()",
        "update(buffer)",
        "what room made",
        placement="D5",
    ),
    Bug(
        "window_refilled_before_the_updates_are_queued",
        "methods/stronghold.py",
        UPDATE_ALL + REFILL,
        REFILL + UPDATE_LATER,
        "layers.1.weights",
    ),
    Bug(
        "training_returns_before_the_last_update",
        "methods/stronghold.py",
        "gpu.synchronize(*(home.updated for home in homes))",
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
