"""Which method for this GPU? Every method's plan there, what a step should take, what binds, the cheapest change that
helps. Arithmetic alone: nothing is allocated, torch is not imported; what was measured stands beside it."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.core import method, named_models
from harness.core.job import GIB, MEMORIES, Budget, Job, Plan, Room, Workload, gib
from harness.core.record import Record
from harness.devices import cuda_budget, machine, named_machines
from harness.forecast.accuracy import accuracy, entry_of, is_here, measured_for
from harness.forecast.fit import largest
from harness.forecast.memories import host_bytes
from harness.forecast.resources import Forecast
from harness.forecast.step import predicted

ON_DISK = {"disk": tempfile.gettempdir()}
WORTH = 1.1  # a change that makes less than this many times the tokens a second is not named
MORE_HOST_GIB = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class TrainingPlace:
    """Where to train: what plans may fill there, and the peak that MFU is a share of."""

    name: str | None  # in machines.yaml; None: this machine
    about: str
    device: str
    asked: Budget

    def room_for(self, workload: Workload) -> Room:
        """Return the room of a machine by name with the budgets that are given; the host's is assumed if neither tells
        it."""
        if self.name is None:
            return machine.room(self.asked, self.device, workload)
        entry, asked = named_machines.load(self.name), self.asked
        device = cuda_budget.tensor_bytes(asked.device_bytes) if asked.device_bytes else entry.room.device_bytes
        disk, rates = asked.disk_bytes or entry.room.disk_bytes, entry.rates(workload.dtype)
        return Room(device, host_bytes(self.name, asked), disk, rates, page_locks=True)

    def peak_flops(self, dtype: str) -> float | None:
        sheet = self.name and named_machines.load(self.name).datasheet
        return sheet.peak_flops(dtype) if sheet else None


def named_place(name: str, asked: Budget) -> TrainingPlace:
    return TrainingPlace(name, named_machines.load(name).about, "cuda", asked)


def this_place(asked: Budget) -> TrainingPlace:
    device = machine.devices()[0]
    if device == "cpu" and asked.device_bytes:
        device = "sim"
    facts = machine.facts()
    return TrainingPlace(
        None, f"this machine: {facts.get('gpu') or facts['cpu']}, {facts['cores']} cores", device, asked
    )


def sized(num_params: float) -> Workload:
    """A GPT of about so many parameters: the width of the GPT-3 nearest to it, in as many layers as that takes."""

    def distance(workload: Workload) -> float:
        return max(workload.num_params / num_params, num_params / workload.num_params)

    models = [named_models.load(name) for name in named_models.names() if name.startswith("gpt3-")]
    nearest = min((Workload(**model.sizes) for model in models), key=distance)
    layers = round((num_params - nearest.end_params) / nearest.layer_params)
    return nearest.at_depth(max(1, layers))


def of_records(records: Sequence[Record]) -> Advice | None:
    """On the machine of these records, about the workload and the budgets of most runs that trained; None where there
    are none, or neither this machine nor machines.yaml is theirs."""
    trained = [record for record in records if record.samples_per_second and record.job.world_size == 1]
    if not trained:
        return None
    (workload, budget), _ = Counter((record.job.workload, record.job.budget) for record in trained).most_common(1)[0]
    if is_here(trained[-1]):
        place = this_place(budget)
    elif name := entry_of(trained[-1]):
        place = named_place(name, budget)
    else:
        return None
    return Advice(place, workload, records=tuple(records))


class Try(NamedTuple):
    """A plan, and what a step of it should take; None where the rates are not known."""

    plan: Plan
    room: Room
    step: Forecast | None

    @property
    def lacks(self) -> dict[str, int]:
        return self.plan.lacks(self.room)


@dataclass(frozen=True)
class Advice:
    """A question; rows() is its answer."""

    place: TrainingPlace
    workload: Workload
    tokens: float | None = None
    records: tuple[Record, ...] = ()
    folders: tuple[Path, ...] = ()

    def rows(self, names: list[str]) -> list[dict[str, Any]]:
        """A row a method, and one `with` a disk where its plan then uses one: those that fit by their speed, then those
        that do not by what they lack, those that do not run here, with what is `missing`, and those that do not train
        this workload, with the `error`."""
        off = accuracy(self.records, self.folders)
        rows = [row | {"accuracy": off[name]._asdict() if name in off else None}
                for name in names for row in self._rows(name)]  # fmt: skip
        return sorted(rows, key=_rank)

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        yield (row := self._row(name, {}))
        if "error" not in row and not row["disk"] and "disk" in method.option_names(method.load(name, self.folders)):
            on_disk = self._row(name, ON_DISK)
            if on_disk.get("disk"):
                yield on_disk | {"with": "--disk DIR"}

    def _row(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        is_exact = method.load(name, self.folders).is_exact
        try:
            found = self._try(name, self.place, self.workload, options)
        except (ValueError, method.Unavailable) as error:
            return {"method": name, "error": str(error)}
        job = Job(name, self.workload, device=self.place.device)
        depth = largest(method.create(name, options, self.folders), job, found.room)
        plan = found.plan.pooled(found.room)
        return {
            "method": name, "is_exact": is_exact, "missing": self._missing(name),
            "fits": not found.lacks, "lacks_bytes": found.lacks,
            "shortfall": found.plan.shortfall(found.room), **{memory: getattr(plan, memory) for memory in MEMORIES},
            "options": found.plan.options, "largest_layers": depth, **self._speeds(found.step),
            "measured_step_seconds": measured_for(self.records, name, self.workload, self.place.name, bool(plan.disk)),
            "change": self._change(name, options, found, depth),
        }  # fmt: skip

    def _missing(self, name: str) -> str | None:
        """Return what the method lacks to run here, and how to get it; for another machine that is unknown."""
        return method.create(name, {}, self.folders).missing(self.place.device) if self.place.name is None else None

    def _try(self, name: str, place: TrainingPlace, workload: Workload, options: dict[str, Any]) -> Try:
        trained = method.create(name, options, self.folders)
        method.check(trained, workload, self.folders)
        room = place.room_for(workload)
        plan = trained.plan(workload, room)
        return Try(plan, room, predicted(trained, workload, plan, room.rates) if room.rates else None)

    def _speeds(self, step: Forecast | None) -> dict[str, Any]:
        names = ("step_seconds", "binds", "tokens_per_second", "hours", "mfu")
        if step is None:
            return dict.fromkeys(names)
        workload, seconds = self.workload, step.seconds
        speed = workload.batch_size * workload.seq_len / seconds
        peak = self.place.peak_flops(workload.dtype)
        hours = self.tokens and self.tokens / speed / 3600
        mfu = peak and workload.model_flops_per_step / seconds / peak
        return dict(zip(names, (seconds, step.binds, speed, hours, mfu), strict=True))

    def _change(self, name: str, asked: dict[str, Any], now: Try, depth: int) -> str | None:
        """The first change that makes it fit, or a tenth faster, the cheapest first."""
        for text, place, workload, options in self._changes(name):
            with contextlib.suppress(ValueError, method.Unavailable):
                then = self._try(name, place, workload, asked | options)
                if now.lacks and not then.lacks:
                    return text
                if not (now.lacks or then.lacks) and now.step and then.step:
                    more = workload.batch_size / self.workload.batch_size * now.step.seconds / then.step.seconds
                    if more > WORTH:
                        return f"{text}: {more:.1f}x the tokens a second"
        return f"-l {depth}" if depth and now.lacks else None

    def _changes(self, name: str) -> Iterator[tuple[str, TrainingPlace, Workload, dict[str, Any]]]:
        """Yield changes, free ones first: other numbers, another batch, the disk; then memory, then another GPU."""
        place, workload = self.place, self.workload
        sheet = named_machines.load(place.name).datasheet if place.name else None
        half = "bf16" if not sheet or sheet.peak_flops("bf16") else "fp16"
        if workload.dtype == "fp32" and (not sheet or sheet.peak_flops(half)):
            yield f"--dtype {half}", place, replace(workload, dtype=half), {}
        for batch in (2 * workload.batch_size, workload.batch_size // 2):
            if batch:
                yield f"-b {batch}", place, replace(workload, batch_size=batch), {}
        if "disk" in method.option_names(method.load(name, self.folders)):
            yield "--disk DIR", place, workload, ON_DISK
        if place.name is None:
            return
        host = place.room_for(workload).host_bytes or 0
        for more in MORE_HOST_GIB:
            asked = replace(place.asked, host_bytes=host + more * GIB)
            yield f"+{more} GiB of host memory", replace(place, asked=asked), workload, {}
        sizes = {name: named_machines.load(name).room.device_bytes or 0 for name in named_machines.names()}
        for other in sorted(sizes, key=lambda other: (sizes[other], not _is_whole(other))):
            if sizes[other] > (place.room_for(workload).device_bytes or 0):
                yield f"--gpu {other}", named_place(other, Budget(host_bytes=host)), workload, {}


def name_text(row: dict[str, Any]) -> str:
    return " ".join(filter(None, (row["method"], row.get("with"))))


def fits_text(row: dict[str, Any]) -> str:
    lacks = ", ".join(f"{gib(size)} of {memory}" for memory, size in row["lacks_bytes"].items())
    return "not here" if row["missing"] else "yes" if row["fits"] else f"lacks {lacks}"


def off_text(row: dict[str, Any]) -> str:
    """How far predictions of this method have been off; nothing where no run tells it."""
    found = row["accuracy"]
    return f"{found['median']:+.0%}, worst {found['worst']:+.0%} ({found['num_runs']} runs)" if found else ""


def _is_whole(name: str) -> bool:
    """False for an entry of one machine, which may use a part of its GPU."""
    return "gpu_tflops" not in (named_machines.load(name).facts or {})


def _rank(row: dict[str, Any]) -> tuple[int, float]:
    if "error" in row:
        return 4, 0.0
    if row["missing"]:
        return 3, 0.0
    if not row["fits"]:
        return 2, sum(row["lacks_bytes"].values())
    return (1, 0.0) if row["step_seconds"] is None else (0, row["step_seconds"])
