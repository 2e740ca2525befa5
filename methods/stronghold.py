"""STRONGHOLD (Sun et al. 2022): a window of layers slides over the model, the host's Adam runs beside the device.

The device holds the layers being computed and the next ones on their way; the others live on the host, which updates
each of them while the device computes. The bottom layers may stay on the device for good (`resident_layers`). Layers
leave the window in the order in which they will be needed last, so the turn from forward to backward fetches nothing,
and the first layers of the next step are brought up to date in their slots as soon as the host has updated them.

Clipping is exact: the update of every layer waits for the global norm and then runs in forward order, under the next
forward pass. Without clipping it starts as soon as the layer's gradient has landed, during the backward pass.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from harness.method import Step, Trained, Training, largest_depth
from harness.spec import Budget, Plan, Workload
from methods import _adam
from methods._plans import describe, streamed_plan

DEFAULT_WINDOW = 3  # one computed, one loaded, one on its way; more slots buy little, resident layers buy more


@dataclass(frozen=True)
class Stronghold:
    window_size: int | None = None  # slots of the window; None: chosen by plan()
    resident_layers: int | None = None  # bottom layers that never leave the device; None: all that the budget holds

    label = "STRONGHOLD"
    color = "#A05CFF"
    paper = "Sun et al., SC 2022"
    world_size = 1
    bit_exact = True
    has_twin = True
    accumulates = True

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        """The widest window, up to the default one, with which both memories suffice: layers that stay on the device
        spare the host, a narrow window leaves room for them. Where none suffices, the narrowest."""
        num_layers = workload.num_layers
        windows = [self.window_size] if self.window_size is not None else range(min(DEFAULT_WINDOW, num_layers), 0, -1)
        for window in windows:
            if not 1 <= window <= num_layers:
                raise ValueError(f"window {window} is beyond the {num_layers} layers: -w takes 1 to {num_layers}")
            resident = self.resident_layers
            if resident is None:
                resident = _most_resident(workload, budget, window)
            if not 0 <= resident <= num_layers:
                raise ValueError(f"resident_layers={resident} is beyond the {num_layers} layers: 0 to {num_layers} are")
            plan = _plan(workload, window, resident)
            if plan.shortfall(budget) is None:
                break
        return plan

    def to_build(self) -> str | None:
        return _adam.to_build()

    def build(self) -> None:
        _adam.build()

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        adam = f"{_adam.describe(workload.dtype)}; torch's on the device for resident layers and both ends"
        return describe(workload, "this project", adam)

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods._device import Device
        from methods._ends import ResidentEnds
        from methods._home import Home, new_layer
        from methods._stream import Clip, Slot

        options = self.plan(workload, Budget()).options
        num_layers, first = workload.num_layers, options["resident_layers"]
        window = min(options["window_size"], num_layers - first)

        with Device(device, num_workers=_num_workers(device)) as gpu:
            ends = ResidentEnds(gpu, workload)
            homes = [
                Home(gpu, new_layer(workload), f"layers.{i}.", workload, host=i >= first) for i in range(num_layers)
            ]
            slots = {i: Slot(homes[i], resident=i < first) for i in range(first + window)}
            for i in range(first, first + window):
                slots[i].prefetch(homes[i])

            for step, (inputs, targets) in enumerate(batches, start=1):
                learning_rate = workload.learning_rate_at(step)
                xs, saved, norms = ends.embed(inputs), [], []

                for i in range(num_layers):
                    xs, kept = slots[i].forward(xs)
                    saved.append(kept)
                    if first <= i < num_layers - window:
                        slots[i + window] = slots.pop(i)
                        slots[i + window].prefetch(homes[i + window])

                loss, dxs = ends.loss(xs, targets)
                for i in reversed(range(num_layers)):
                    dxs = slots[i].backward(saved.pop(), dxs)
                    norms.append(slots[i].norms())
                    if i < first:
                        continue
                    slots[i].offload(homes[i])
                    if not workload.clip_norm:
                        homes[i].update_when_landed(learning_rate, lambda: None)
                    if i >= first + window:
                        slots[i - window] = slots.pop(i)
                        slots[i - window].prefetch(homes[i - window])
                    elif not workload.clip_norm:
                        slots[i].prefetch(homes[i])
                ends.backward(dxs)

                clip = Clip([ends.norms(), *reversed(norms)], workload.clip_norm)
                for home in (ends.home, *homes[:first]):
                    home.update(learning_rate, clip.factor)
                if workload.clip_norm and window:
                    clip.send_home(gpu)
                    for home in homes[first:]:
                        home.update_when_landed(learning_rate, clip.on_host)
                    for i in range(first, first + window):
                        slots[i].prefetch(homes[i])
                yield Step(loss, clip.total)

            gpu.synchronize(*(home.updated for home in homes))
            return Trained((state for home in (ends.home, *homes) for state in home.states()), gpu.moved_bytes)


def _plan(workload: Workload, window: int, resident: int) -> Plan:
    slots = min(window, workload.num_layers - resident)
    options = {"window_size": window, "resident_layers": resident}
    return streamed_plan(workload, slots, resident, num_kept=slots, options=options)


def _most_resident(workload: Workload, budget: Budget, window: int) -> int:
    """Bottom layers that fit the device budget beside the window; none where no budget is known."""
    if budget.device_bytes is None:
        return 0
    room = budget.device_bytes
    return largest_depth(lambda n: n <= workload.num_layers and _plan(workload, window, n).device_bytes <= room)


def _num_workers(device: str) -> int:
    """Threads of the host's Adam. On a CPU one, for the cores compute already; else two are left to launch."""
    return 1 if device != "cuda" else max(1, len(os.sched_getaffinity(0)) - 2)
