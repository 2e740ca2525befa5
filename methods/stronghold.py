"""STRONGHOLD (Sun et al. 2022): a window of layers slides over the model, the host's Adam runs beside the device.

The device holds the layers being computed and the next ones on their way; the others live on the host, which updates
each of them while the device computes. Layers leave the window in the order in which they will be needed last, so the
turn from forward to backward fetches nothing, and the first layers of the next step are brought up to date in their
slots as soon as the host has updated them.

Beyond the paper, each layer has a place of its own (_placement.py): for good on the device, all of it or its weights
alone, or in the window, or in a second one, whose layers bring their states along for the device to update. With
micro-batches all of them go through a layer at each visit, so it travels no more than for one.

Clipping is exact: an update waits for the global norm. `deferred`, it runs in forward order, under the next forward
pass. With `speculate` it is made during the backward pass as if nothing were clipped, into spare states, which are put
in force if so it was, and are worth nothing else; it stops as soon as the norm so far is beyond the limit. Without
clipping it starts as soon as the layer's gradient has landed. In fp16 a step whose norm is not finite is skipped, so
updates wait for the norm or are made ahead of it, clipping or not.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import Any

from harness.core.job import Budget, Plan, Workload
from harness.core.method import Trained, Training, largest_depth
from methods.offload import adamw_kernel
from methods.shared.memory_needs import describe, writable
from methods.streaming.placement import CLIPPINGS, num_gradients, parse, placed_plan, rings, shrink, text_of
from methods.streaming.planner import SLACK, Counts, arranged, choose, with_forecast

DEFAULT_WINDOW = 3  # one computed, one loaded, one on its way; more slots buy little, resident layers buy more
SPARE_ROOM = 9 / 8  # of what speculation needs on the host, before it is chosen: a plan is no measurement


@dataclass(frozen=True)
class Stronghold:
    window_size: int | None = None  # slots of the window; None: chosen by plan()
    resident_layers: int | None = None  # bottom layers that never leave the device; None: all that the budget holds
    placement: str | None = None  # a letter a layer, as R2W5S1 or R2W; None: resident_layers, the rest windowed
    clipping: str | None = None  # deferred or speculate; None: chosen by plan()
    disk: str | None = None  # folder for states on the disk; None: the system's temporary one, if placement says D

    label = "STRONGHOLD"
    color = "#A05CFF"
    paper = "Sun et al., SC 2022"
    bit_exact = True
    can_rehearse = True
    accumulates = True
    scales_loss = True

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        """The widest window, up to the default one, with which both memories suffice, and in it the fastest placement,
        where the budget has rates to tell by; else as many resident layers as fit."""
        if self.disk:
            writable(self.disk)
        if self.clipping not in (None, *CLIPPINGS):
            raise ValueError(f"no clipping {self.clipping!r}: choose one of {', '.join(CLIPPINGS)}")
        plan = self._fastest(workload, budget) or self._most_resident(workload, budget)
        counts = Counter(parse(plan.options["placement"], workload.num_layers))
        return with_forecast(plan, workload, budget, counts, plan.options.get("clipping"))

    def twin_options(self, num_layers: int, twin_layers: int) -> dict[str, Any]:
        options = asdict(self)
        if self.placement is not None:
            kinds = shrink(parse(self.placement, num_layers), twin_layers)
            resident = None if self.resident_layers is None else kinds.count("R")
            options |= {"placement": text_of(kinds), "resident_layers": resident}
        elif self.resident_layers is not None:
            options["resident_layers"] = min(self.resident_layers, twin_layers)
        if self.window_size is not None:
            options["window_size"] = min(self.window_size, twin_layers)
        return options

    def _windows(self, num_layers: int) -> Iterator[int]:
        """Sizes to try, the widest first."""
        most = min(DEFAULT_WINDOW, num_layers)
        for window in [self.window_size] if self.window_size is not None else range(most, 0, -1):
            if not 1 <= window <= num_layers:
                raise ValueError(f"window {window} is beyond the {num_layers} layers: -w takes 1 to {num_layers}")
            yield window

    def _fastest(self, workload: Workload, budget: Budget) -> Plan | None:
        """By the budget's rates. None without any, where the placement is given, and where nothing fits."""
        if (
            budget.rates is None
            or budget.device_bytes is None
            or (self.placement, self.resident_layers) != (None, None)
        ):
            return None
        clippings = CLIPPINGS if self.clipping is None and budget.host_bytes else (self.clipping or "deferred",)
        for window in self._windows(workload.num_layers):
            plans = []
            for clipping in clippings if workload.waits_for_norm else (None,):
                spare = SPARE_ROOM if (clipping, self.clipping) == ("speculate", None) else 1
                room = replace(budget, host_bytes=budget.host_bytes and int(budget.host_bytes / spare))

                def plan_of(
                    load: Workload, counts: Counts, clipping: str | None = clipping, window: int = window
                ) -> Plan:
                    return self._plan(load, arranged(counts), window, clipping)

                counts = choose(workload, room, plan_of, "RPWS", clipping)
                if counts is None and self.disk and clipping != "speculate":  # no disk while the host can hold it all
                    counts = choose(workload, room, plan_of, "RPWSD", clipping)
                if counts:
                    plans.append(with_forecast(plan_of(workload, counts), workload, budget, counts, clipping))
            if plans:  # deferred before speculate, which is no faster where gradients are clipped
                return min(plans, key=lambda plan: (plan.step_seconds or 0.0) * (1 + SLACK * plans.index(plan)))
        return None

    def _most_resident(self, workload: Workload, budget: Budget) -> Plan:
        """Layers that stay on the device spare the host, a narrow window leaves room for them. Where none suffices, the
        narrowest."""
        for window in self._windows(workload.num_layers):
            kinds = self._kinds(workload, budget, window)
            plan = self._plan(workload, kinds, window, self.clipping or "deferred")
            if plan.shortfall(budget) is None:
                break
        if self.clipping is None and workload.waits_for_norm and budget.device_bytes and budget.host_bytes:
            speculating = self._plan(workload, kinds, window, "speculate")
            if plan.host_bytes and SPARE_ROOM * speculating.host_bytes <= budget.host_bytes:
                return speculating
        return plan

    def _kinds(self, workload: Workload, budget: Budget, window: int) -> str:
        """A letter a layer."""
        num_layers, resident = workload.num_layers, self.resident_layers
        if resident is not None and not 0 <= resident <= num_layers:
            raise ValueError(f"resident_layers={resident} is beyond the {num_layers} layers: 0 to {num_layers} are")
        if self.placement is not None:
            kinds = parse(self.placement, num_layers)
            if resident not in (None, kinds.count("R")):
                raise ValueError(f"placement {self.placement} and resident_layers={resident} differ: give one of them")
            return kinds
        if resident is None:
            resident = _num_resident(workload, budget, window)
        kinds = _bottom_resident(resident, num_layers)
        while self.disk and budget.host_bytes and "W" in kinds and not _fits_host(workload, kinds, window, budget):
            kinds = "D".join(kinds.rsplit("W", 1))  # from the top: what is needed last has the longest time
        return kinds

    def _plan(self, workload: Workload, kinds: str, window: int, clipping: str | None) -> Plan:
        options = {"window_size": window, "resident_layers": kinds.count("R"), "placement": text_of(kinds)}
        if "D" in kinds:
            options["disk"] = str(writable(self.disk))
        if not workload.waits_for_norm:
            return placed_plan(workload, kinds, window, clipping=None, options=options)
        return placed_plan(workload, kinds, window, clipping, {**options, "clipping": clipping})

    def to_build(self) -> str | None:
        return adamw_kernel.to_build()

    def build(self) -> None:
        adamw_kernel.build()

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        host = adamw_kernel.describe(workload.dtype, one_pass=workload.waits_for_norm)
        adam = f"{host}; torch's on the device for resident and streamed layers and both ends"
        row = describe(workload, "this project", adam)
        return {**row, "clipping": f"{row['clipping']}, {self.clipping}"} if self.clipping else row

    def train(self, workload: Workload, batches, device: str) -> Training:
        from harness.devices.streams import Device
        from methods.offload.clip import Clip
        from methods.offload.layout import new_layer
        from methods.shared.loss_scale import LossScale
        from methods.streaming.disk import shelves
        from methods.streaming.embedding_and_head import ResidentEnds
        from methods.streaming.layer_state import Home
        from methods.streaming.slot import Gradients, Slot

        options = self.plan(workload, Budget()).options
        kinds, window = parse(options["placement"], workload.num_layers), options["window_size"]
        layers, (_, streamed) = range(workload.num_layers), rings(kinds, window)
        above = {i: j for ring in rings(kinds, window) for i, j in ring.above.items()}  # i leaves its slot to j
        below = {j: i for i, j in above.items()}
        travels, waits = set(kinds) - {"R"}, workload.waits_for_norm
        speculates = bool(travels) and options.get("clipping") == "speculate"

        with Device(device, num_workers=_num_workers(device)) as gpu:
            ends, homes = ResidentEnds(gpu, workload), []
            on_disk = shelves(gpu, kinds.count("D"), self.disk, workload)
            for i in layers:
                place: dict[str, Any] = {
                    "host": kinds[i] != "R",
                    "streamed": kinds[i] == "S",
                    "spare": speculates and kinds[i] in "PWS",
                    "shelf": next(on_disk) if kinds[i] == "D" else None,
                }
                homes.append(Home(gpu, new_layer(workload), f"layers.{i}.", workload, **place))
            slots = {i: Slot(homes[i], kinds[i]) for i in layers if i not in below}
            rooms = cycle([Gradients(homes[0]) for _ in range(num_gradients(kinds, window))])
            scale, is_ahead = LossScale(workload), not waits  # the device updates streamed layers in the backward pass

            def move(i: int, to: int) -> None:
                slots[to] = slots.pop(i)
                slots[to].prefetch(homes[to])

            def refill() -> None:
                for i in sorted(slots):
                    if kinds[i] != "R":
                        slots[i].prefetch(homes[i])

            refill()
            for step, (inputs, targets) in enumerate(batches, start=1):
                learning_rate = workload.learning_rate_at(step)
                xs, saved = ends.embed(inputs), []

                for i in layers:
                    slots[i].update_due()
                    xs, kept = slots[i].forward(xs)
                    saved.append(kept)
                    if i in above:
                        move(i, above[i])
                    elif is_ahead and kinds[i] == "S":
                        slots[i].prefetch_state()

                loss, dxs = ends.loss(xs, targets, scale.value)
                # Made here, for the forward pass has waited for the copies of the last one.
                clip = Clip(gpu, workload.clip_norm, scale)
                for i in reversed(layers):
                    if kinds[i] != "R":
                        slots[i].gradients = next(rooms)
                    dxs = slots[i].backward(saved.pop(), dxs)
                    clip.add(slots[i].norms())
                    if is_ahead and kinds[i] == "S":
                        slots[i].update(learning_rate, clip.unclipped)
                    if kinds[i] != "R" and (waits or kinds[i] != "S"):
                        slots[i].offload(homes[i])
                    if kinds[i] in "PWD" and not waits:
                        homes[i].update_when_landed(learning_rate, clip)
                    if kinds[i] in "PW" and speculates:
                        homes[i].speculate_when_landed(learning_rate, clip)
                    if i in below:
                        move(i, below[i])
                        if is_ahead and kinds[i] == "S":
                            slots[below[i]].prefetch_state()
                ends.backward(dxs)
                del dxs  # before the next step's, which are larger than a small device has to spare

                clip.add(ends.norms())
                clip.finish()
                if scale.is_used or speculates or travels - {"S"}:
                    clip.send_home()
                is_skipped = clip.overflows()
                if not is_skipped:
                    ends.home.update(learning_rate, clip.factor)
                for i, home in enumerate(homes):
                    if is_skipped:
                        home.drop(is_ahead=is_ahead and kinds[i] == "S")
                    elif kinds[i] == "R":
                        home.update(learning_rate, clip.factor)
                    elif kinds[i] == "S" and waits:
                        home.owe(learning_rate, clip, is_ahead)
                    elif waits:
                        home.update_when_landed(learning_rate, clip)
                refill()
                is_ahead = not waits or (speculates and "S" in travels and clip.is_one())
                yield scale.step(loss, clip.total, is_skipped=is_skipped)

            for i in streamed.layers if waits else ():
                slots[i].update_due()
                if i in above:
                    move(i, above[i])
            gpu.synchronize(*(home.updated for home in homes))
            return Trained((state for home in (ends.home, *homes) for state in home.states()), gpu.moved_bytes)


def _fits_host(workload: Workload, kinds: str, window: int, budget: Budget) -> bool:
    return budget.host_bytes is None or placed_plan(workload, kinds, window).host_bytes <= budget.host_bytes


def _bottom_resident(resident: int, num_layers: int) -> str:
    return "R" * resident + "W" * (num_layers - resident)


def _num_resident(workload: Workload, budget: Budget, window: int) -> int:
    """Bottom layers that fit the device budget beside the window; none where no budget is known."""
    if budget.device_bytes is None:
        return 0
    room, num_layers = budget.device_bytes, workload.num_layers

    def fits(resident: int) -> bool:
        if resident > num_layers:
            return False
        return placed_plan(workload, _bottom_resident(resident, num_layers), window).device_bytes <= room

    return largest_depth(fits)


def _num_workers(device: str) -> int:
    """Threads of the host's Adam: beside a GPU two cores are left to launch. Where the cores compute, all of them: one
    that is busy alone makes every other wait for its share of each product."""
    cores = len(os.sched_getaffinity(0))
    return cores if device != "cuda" else max(1, cores - 2)
