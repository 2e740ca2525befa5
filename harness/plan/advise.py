"""Answers which method should train on a GPU, with which settings, and which changes would make training faster.

The answer is the fastest plan of all methods that train like the reference. Plans are arithmetic: nothing is allocated,
torch is not imported. The answer shows measured times beside the predicted ones.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.job import GIB, MEMORIES, Budget, Job, Workload, gib
from harness.core.record import Record
from harness.devices import named_machines
from harness.plan.accuracy import (
    forecast_error,
    is_of_machine,
    is_of_this_machine,
    machine_name_of,
    measured_step_seconds,
    method_accuracies,
)
from harness.plan.best_settings import NEAR_SPEED_SHARE, Options, Try, best_try
from harness.plan.fit import most_layers
from harness.plan.resources import predict_step
from harness.plan.training_place import TrainingPlace, named_place, this_place

DISK_FOLDER = tempfile.gettempdir()
HELPFUL_SPEEDUP = 1.1  # a change helps if it gives more than this many times the tokens per second
ADDED_HOST_GIB = (32, 64, 128, 256, 512, 1024)
# If the sequence length may be chosen, it is first halved until a token takes at most MOST_TOKEN_COST times the
# operations that it takes in a sequence of SHORT_SEQ_LEN tokens.
SHORT_SEQ_LEN, MOST_TOKEN_COST = 1024, 1.1
SEARCHED_FIELDS = frozenset({"batch_size", "micro_batches", "seq_len"})


class Remedy(NamedTuple):
    """A change of machine or workload that was tried, such as more host memory.

    `method`: the fastest method after the change; None if the change does not help. `times`: the speed after the change
    divided by the speed now; None if nothing fits now.
    """

    change: str
    method: str | None = None
    tokens_per_second: float | None = None
    times: float | None = None
    settings: str = ""


@dataclass(frozen=True)
class Decision:
    """The answer to an Advice.

    `rows`: a row for each method, and another for its plan with a disk, if it can use one; the chosen row is first.
    `chosen`: the row with the smallest batch, among the rows nearly as fast as the fastest (NEAR_SPEED_SHARE); None if
    no method fits, or if no speed is known.
    """

    workload: Workload
    rows: list[JsonObject]
    chosen: JsonObject | None

    @property
    def is_unknown(self) -> bool:
        """True if a method fits, but no speed is known, so that no row could be chosen."""
        return self.chosen is None and any(is_usable(row) and row["fits"] for row in self.rows)


@dataclass(frozen=True)
class Advice:
    """A question: how to train a workload at a place. decision() returns the answer.

    `tokens`: number of tokens of the whole training, for its duration in hours; None: no duration is given. `searched`:
    those of the SEARCHED_FIELDS whose values the answer may choose. `options`: values of method options; each is used
    by the methods that have the option.
    """

    place: TrainingPlace
    workload: Workload
    tokens: float | None = None
    records: tuple[Record, ...] = ()
    folders: tuple[Path, ...] = ()
    searched: frozenset[str] = frozenset()
    options: Options = field(default_factory=dict)

    def decision(self, names: list[str]) -> Decision:
        """Return the decision between the methods `names`. If the sequence length may be chosen, halve it while no
        method is chosen, or while each halving makes training more than HELPFUL_SPEEDUP times as fast."""
        load, may_halve = self.workload, "seq_len" in self.searched
        load = self._affordable(load) if may_halve else load
        decision = self._decide(names, load)
        while may_halve and load.seq_len // 2 >= SHORT_SEQ_LEN:
            shorter = replace(load, seq_len=load.seq_len // 2)
            if decision.chosen and not self._is_worth(decision.chosen, shorter):
                break
            load, decision = shorter, self._decide(names, shorter)
        return decision

    def _affordable(self, load: Workload) -> Workload:
        """Return the workload with its sequence length halved until a token takes at most MOST_TOKEN_COST times the
        operations that it takes in a sequence of SHORT_SEQ_LEN tokens."""

        def cost(tokens: int) -> float:
            return replace(load, seq_len=tokens).flops_per_step / tokens

        seq_len = load.seq_len
        while seq_len // 2 >= SHORT_SEQ_LEN and cost(seq_len) > MOST_TOKEN_COST * cost(SHORT_SEQ_LEN):
            seq_len //= 2
        return replace(load, seq_len=seq_len)

    def _is_worth(self, chosen: JsonObject, workload: Workload) -> bool:
        fastest = self._fastest(chosen["method"], self.place, workload, chosen["asked"], chosen["batch_size"])
        return (fastest.tokens_per_second or 0.0) > HELPFUL_SPEEDUP * chosen["tokens_per_second"]

    def _decide(self, names: list[str], workload: Workload) -> Decision:
        place_name = self.place.name
        is_there = (
            is_of_this_machine if place_name is None else lambda record: is_of_machine(record, place_name)
        )
        accuracies = method_accuracies(filter(is_there, self.records), self.folders)
        rows = []
        for name in names:
            measured = accuracies.get(name)
            forecast = {
                "accuracy": measured and measured._asdict(),
                "error_of_forecast": forecast_error(name, accuracies, self.folders)._asdict(),
            }
            rows += [row | forecast for row in self._rows(name, workload)]
        rows.sort(key=_row_rank)
        candidates = [row for row in rows if _row_rank(row)[0] == 0]
        near_rows = []
        for row in candidates:
            if row["tokens_per_second"] >= NEAR_SPEED_SHARE * candidates[0]["tokens_per_second"]:
                near_rows.append(row)
        chosen = min(near_rows, key=lambda row: row["batch_size"], default=None)
        if chosen:
            rows.insert(0, rows.pop(rows.index(chosen)))
        return Decision(workload, [row | {"reason": _choice_reason(row, chosen)} for row in rows], chosen)

    def _rows(self, name: str, workload: Workload) -> Iterator[JsonObject]:
        """Yield the row of a method and, if the method can keep states on a disk, the row of its plan with states on
        the disk."""
        known_options = method.option_names(method.load(name, self.folders))
        options = {option: value for option, value in self.options.items() if option in known_options}
        yield (row := self._row(name, workload, options))
        if "error" not in row and not row["disk"] and "disk" in known_options:
            on_disk = self._row(name, workload, options | {"disk": DISK_FOLDER})
            if on_disk.get("disk"):
                yield on_disk | {"with": "--disk DIR"}

    def _row(self, name: str, workload: Workload, options: Options) -> JsonObject:
        try:
            fastest = self._fastest(name, self.place, workload, options)
        except (ValueError, method.Unavailable) as error:
            return {"method": name, "error": str(error)}
        load, plan, cls = fastest.workload, fastest.plan.pooled(fastest.room), method.load(name, self.folders)
        unrated = replace(fastest.room, rates=None)
        job = Job(name, load, options, device=self.place.device)
        size_fields = ("num_params", "num_layers", "batch_size", "micro_batches", "seq_len", "dtype")
        return {
            "method": name,
            "is_exact": cls.is_exact,
            "missing": self._missing(name),
            **{field: getattr(load, field) for field in size_fields},
            "fits": not fastest.lacking_bytes,
            "lacks_bytes": fastest.lacking_bytes,
            "shortfall": fastest.plan.shortfall(fastest.room),
            **{memory: getattr(plan, memory) for memory in MEMORIES},
            "options": fastest.plan.options,
            "asked": options,
            "largest_layers": most_layers(job, unrated, self.folders),
            **self._speeds(fastest),
            "measured_step_seconds": measured_step_seconds(
                self.records, name, load, self.place.name, bool(plan.disk)
            ),
        }

    def _missing(self, name: str) -> str | None:
        """Return, as text, what the method lacks to run on this machine, and how to get it. None if it lacks nothing,
        or if the place is another machine."""
        if self.place.name is not None:
            return None
        return method.create(name, {}, self.folders).missing(self.place.device)

    def _fastest(
        self, name: str, place: TrainingPlace, workload: Workload, options: Options, least_batch: int = 1
    ) -> Try:
        """Return the fastest Try of a method. `least_batch`: the batch with which the search begins."""
        configured_method = method.create(name, options, self.folders)
        searched = self.searched if configured_method.accumulates else self.searched - {"micro_batches"}
        return best_try(
            partial(self._try, configured_method, place, options), workload, searched, least_batch
        )

    def _try(
        self, configured_method: method.Method, place: TrainingPlace, options: Options, workload: Workload
    ) -> Try:
        method.check(configured_method, workload, self.folders)
        num_ranks = options.get("world_size", 1)
        room = place.room_for(workload, num_ranks)
        plan = configured_method.plan(workload, room)
        forecast = (
            predict_step(configured_method, workload, plan, room.rates, num_ranks) if room.rates else None
        )
        return Try(workload, options, plan, room, forecast)

    def _speeds(self, fastest: Try) -> JsonObject:
        names = ("step_seconds", "binds", "tokens_per_second", "hours", "mfu")
        if fastest.forecast is None:
            return dict.fromkeys(names)
        seconds, speed = fastest.forecast.seconds, fastest.tokens_per_second
        peak = self.place.peak_flops(fastest.workload.dtype)
        hours = self.tokens and speed and self.tokens / speed / 3600
        mfu = peak and fastest.workload.model_flops_per_step / seconds / peak
        return dict(zip(names, (seconds, fastest.forecast.binds, speed, hours, mfu), strict=True))

    def remedies(self, decision: Decision) -> Iterator[Remedy]:
        """Yield a Remedy for each change that is tried, whether it helps or not."""
        place, load = self.place, decision.workload
        helps = partial(self._remedy, decision)
        yield self._more_host(decision)
        if decision.chosen and decision.chosen["disk"]:
            yield self._without_disk(decision)
        if place.device == "cuda":
            yield helps("a second GPU", place, load, {"world_size": 2})
        if place.name and not decision.chosen:
            yield self._first_gpu(decision)
        if load.seq_len > 1:
            yield helps(f"--seq {load.seq_len // 2}", place, replace(load, seq_len=load.seq_len // 2))

    def _more_host(self, decision: Decision) -> Remedy:
        """Return the remedy of the smallest addition of host memory that helps."""
        load = decision.workload
        host = self.place.room_for(load).host_bytes or 0

        def remedy(size: int) -> Remedy:
            place = self.place.with_host(host + size * GIB)
            return self._remedy(decision, f"+{size} GiB of host memory", place, load)

        if not remedy(ADDED_HOST_GIB[-1]).method:
            return Remedy("more host memory")
        return next(filter(lambda remedy: remedy.method, map(remedy, ADDED_HOST_GIB)))

    def _first_gpu(self, decision: Decision) -> Remedy:
        """Return the remedy of another GPU in the same host. The GPUs in machines.yaml with more memory than this one
        are tried, the smallest first; the first on which a method fits is taken."""
        load = decision.workload
        room = self.place.room_for(load)
        budget = Budget(host_bytes=room.host_bytes, disk_bytes=self.place.budget.disk_bytes)
        sizes = {name: named_machines.load(name).room.device_bytes or 0 for name in named_machines.names()}
        larger = [name for name in sizes if sizes[name] > (room.device_bytes or 0)]
        larger.sort(key=lambda name: sizes[name])
        tried = (self._remedy(decision, f"--gpu {name}", named_place(name, budget), load) for name in larger)
        return next((remedy for remedy in tried if remedy.method), Remedy("another GPU"))

    def _without_disk(self, decision: Decision) -> Remedy:
        rows = [row for row in decision.rows if is_usable(row) and row["fits"] and not row["disk"]]
        if not rows or not decision.chosen:
            return Remedy("no disk")
        fastest = rows[0]
        speed = fastest["tokens_per_second"]
        speedup = speed / decision.chosen["tokens_per_second"]
        return Remedy("no disk", fastest["method"], speed, speedup, settings_text(fastest))

    def _remedy(
        self,
        decision: Decision,
        change: str,
        place: TrainingPlace,
        workload: Workload,
        options: Options | None = None,
    ) -> Remedy:
        """Return the remedy of a change. If the change helps, the remedy has the fastest method of the usable rows
        after the change. For each row, the search for a batch begins at the row's own batch."""
        speed_now = decision.chosen and decision.chosen["tokens_per_second"]
        faster: list[tuple[JsonObject, Try]] = []
        for row in filter(is_usable, decision.rows):
            least_batch = row["batch_size"] * workload.seq_len // row["seq_len"] if row["fits"] else 1
            row_options = row["asked"] | (options or {})
            with contextlib.suppress(ValueError, method.Unavailable):
                least_batch = max(least_batch, row_options.get("world_size", 1))
                changed = self._fastest(row["method"], place, workload, row_options, least_batch)
                is_faster = (changed.tokens_per_second or 0.0) > HELPFUL_SPEEDUP * (speed_now or 0.0)
                if not changed.lacking_bytes and changed.forecast and is_faster:
                    faster.append((row, changed))
        if not faster:
            return Remedy(change)
        row, changed = max(faster, key=lambda pair: pair[1].tokens_per_second or 0.0)
        speed = changed.tokens_per_second or 0.0
        ranks = " --ranks 2" if changed.options.get("world_size") else ""
        load = changed.workload
        settings = settings_text(vars(load))
        return Remedy(
            change, row["method"] + ranks, speed, speed / speed_now if speed_now else None, settings
        )


def advice_of_records(records: Sequence[Record]) -> Advice | None:
    """Return a question about the machine of these records, with the workload and budget that their runs have most
    often. None if no run trained, or if the machine is neither this one nor in machines.yaml."""
    trained = [record for record in records if record.samples_per_second and record.job.world_size == 1]
    if not trained:
        return None
    pairs = Counter((record.job.workload, record.job.budget) for record in trained)
    (workload, budget), _ = pairs.most_common(1)[0]
    if is_of_this_machine(trained[-1]):
        place = this_place(budget)
    elif name := machine_name_of(trained[-1]):
        place = named_place(name, budget)
    else:
        return None
    return Advice(place, workload, records=tuple(records))


def is_usable(row: JsonObject) -> bool:
    """True if the row's method trains this workload like the reference, and the method lacks nothing at the place, as
    far as is known."""
    return "error" not in row and row["is_exact"] and not row["missing"]


def method_text(row: JsonObject) -> str:
    return " ".join(filter(None, (row["method"], row.get("with"))))


def settings_text(row: JsonObject) -> str:
    parts = f" in {row['micro_batches']} micro-batches" if row["micro_batches"] > 1 else ""
    return f"{row['batch_size']} x {row['seq_len']}{parts}"


def fits_text(row: JsonObject) -> str:
    if row["missing"]:
        return "not here"
    lacks = ", ".join(f"{gib(size)} of {memory}" for memory, size in row["lacks_bytes"].items())
    return "yes" if row["fits"] else f"lacks {lacks}"


def errors_text(row: JsonObject) -> str:
    """Return, as text, the errors of predictions for this row's method; empty if no run measured them."""
    accuracy = row["accuracy"]
    if not accuracy:
        return ""
    num_runs = counted(accuracy["num_runs"], "run")
    return f"{accuracy['median']:+.0%}, worst {accuracy['worst']:+.0%} ({num_runs})"


def _choice_reason(row: JsonObject, chosen: JsonObject | None) -> str:
    """Return, as text, why a row was not chosen; `taken` for the chosen row; `fits` if no row was chosen."""
    if "error" in row:
        return row["error"]
    if row["missing"] or not row["fits"]:
        return fits_text(row)
    if not row["is_exact"]:
        return "trains otherwise by design"
    if chosen is None:
        return "fits"
    if (chosen["method"], chosen.get("with")) == (row["method"], row.get("with")):
        return "taken"
    larger = ", in a larger batch" if row["tokens_per_second"] > chosen["tokens_per_second"] else ""
    return f"{row['tokens_per_second'] / chosen['tokens_per_second']:.2f} times as fast{larger}"


def _row_rank(row: JsonObject) -> tuple[int, float]:
    if "error" in row:
        return 5, 0.0
    if row["missing"]:
        return 4, 0.0
    if not row["fits"]:
        return 3, sum(row["lacks_bytes"].values())
    if row["step_seconds"] is None:
        return 2, 0.0
    return (0 if row["is_exact"] else 1), -row["tokens_per_second"]
