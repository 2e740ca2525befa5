"""Is one faster than the other? A ratio with its interval, whether both trained, and all that differs between them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.core.job import Budget, Workload, gib
from harness.core.record import Record, read_all
from harness.figures import point as noise
from harness.figures.point import Row, machine_of, row

FASTER, SLOWER, ALIKE, NONE = "faster", "slower", "not distinguishable", "not compared"
SIMULATED = ("sim", "virtual")  # clocks that time what is simulated
METRIC = "samples_per_second"
FIELDS = [field.name for field in dataclasses.fields(Workload)]
CONTEXT = ("job", "machine", "software", "origin", "clock", "data_sha256", "kernels")  # fields of a record


class Point(NamedTuple):
    """What was run, under what."""

    method: str
    options: str
    workload: Workload
    machine: str
    budget: Budget
    device: str


# Two runs should agree in all of these beside the workload; where none do, in fewer, the first given up first.
SETTING = ("machine", "budget", "device")
Named = dict[str, Point]  # by METHOD:name=value,...
Side = dict[Point, list[Record]]  # repeats, oldest first; the point that was run last comes last


@dataclass(frozen=True)
class Comparison:
    """Of A's repeats with B's: `ratio` of their throughputs, A over B, where there is one."""

    a: list[Record]
    b: list[Record]
    verdict: str
    why: str  # what the verdict rests on, or why there is none
    ratio: noise.RatioInterval | None = None

    def to_dict(self) -> dict[str, Any]:
        ratio = self.ratio
        return {
            "a": side(self.a), "b": side(self.b), "verdict": self.verdict, "why": self.why,
            "ratio": ratio and ratio.value, "low": ratio and ratio.low, "high": ratio and ratio.high,
            "differs": differences(self.a[-1], self.b[-1]),
        }  # fmt: skip


def run(a: str, b: str, results: Path, as_json: bool) -> bool:
    """Compare what two words name, and print it; False where something could not be compared."""
    found, complaints = pairs(select(a, results), select(b, results))
    made = [compare(*pair) for pair in found]
    for one in made:
        show(one, as_json)
    for complaint in complaints:
        print(json.dumps({"verdict": NONE, "why": complaint}) if as_json else f"{NONE}: {complaint}")
    return not complaints and all(one.ratio is not None for one in made)


def select(text: str, results: Path) -> Side:
    """The records that a word names: a file, a folder, or METHOD[:name=value,...] among the results.

    Raises ValueError where it names none.
    """
    path = Path(text)
    if path.is_file():
        return _by_point([Record.read(path)])
    if path.is_dir():
        found = _by_point(read_all(path)[0].values())
        if not found:
            raise ValueError(f"no record of a run in {path}: name a folder of results, a record or a method")
        return found
    name, _, wanted = text.partition(":")
    of_method = [record for record in read_all(results)[0].values() if record.job.method == name]
    if not of_method:
        there = ", ".join(sorted({record.job.method for record in read_all(results)[0].values()})) or "nothing"
        raise ValueError(
            f"{text!r} is no file, no folder and no method recorded in {results}, which has {there}: run it first, or"
            " name another folder with --results"
        )
    options = _options(wanted)
    found = _by_point(record for record in of_method if _has(record, options))
    if not found:
        there = "; ".join(sorted({_options_text(record) or "no options" for record in of_method}))
        raise ValueError(f"no record of {text!r} in {results}: {name} was run with {there}")
    return found


def pairs(a: Side, b: Side) -> tuple[list[tuple[list[Record], list[Record]]], list[str]]:
    """What can be set side by side: one method and set of options of a workload each, or those that are the same in
    both; and a line for each workload where neither is so."""
    found: list[tuple[list[Record], list[Record]]] = []
    complaints: list[str] = []
    for load in dict.fromkeys(point.workload for point in a if point.workload in {other.workload for other in b}):
        for ours, theirs in _alike(*([point for point in one if point.workload == load] for one in (a, b))):
            both = [(ours[name], theirs[name]) for name in ours if name in theirs]
            if not both:
                ours, theirs = _with_throughput(ours, a), _with_throughput(theirs, b)
            if len(ours) == len(theirs) == 1:
                both = list(zip(ours.values(), theirs.values(), strict=True))
            found.extend((a[our], b[their]) for our, their in both)
            if not both:
                choices = " or ".join(ours if len(ours) > 1 else theirs)
                complaints.append(f"{load.num_layers} layers: several runs to choose from: name one, as {choices}")
    if not found and not complaints:
        complaints.append(_no_common_workload(a, b))
    return found, complaints


def _alike(a: list[Point], b: list[Point]) -> list[tuple[Named, Named]]:
    """For each setting that both sides ran under, the points of each."""
    for given_up in range(len(SETTING) + 1):
        ours, theirs = (_by_setting(points, SETTING[given_up:]) for points in (a, b))
        common = [setting for setting in ours if setting in theirs]
        if common:
            return [(ours[setting], theirs[setting]) for setting in common]
    return []


def _by_setting(points: list[Point], names: tuple[str, ...]) -> dict[tuple, Named]:
    """The last run of each method and set of options under each setting."""
    found: dict[tuple, Named] = {}
    for point in points:
        setting = tuple(getattr(point, name) for name in names)
        found.setdefault(setting, {})[f"{point.method}:{point.options}"] = point
    return found


def _with_throughput(named: Named, side: Side) -> Named:
    """Those that a ratio could be taken of; where there is none, the one that was run last, whose end says why."""
    able = {name: point for name, point in named.items() if _has_throughput(row(METRIC, side[point]))}
    return able or dict([max(named.items(), key=lambda item: side[item[1]][-1].started)])


def _has_throughput(one: Row) -> bool:
    return one.valid and noise.has_number(one)


def compare(a: list[Record], b: list[Record]) -> Comparison:
    """Of repeats of one workload each."""
    clocks = {records[-1].clock in SIMULATED for records in (a, b)}
    if len(clocks) > 1:
        return Comparison(a, b, NONE, f"one is timed by {a[-1].clock}, the other by {b[-1].clock}: run both alike")
    rows = [row(METRIC, records) for records in (a, b)]
    without = [f"{letter} has no throughput: {_reason(one)}" for letter, one in zip("AB", rows, strict=True)
               if not _has_throughput(one)]  # fmt: skip
    if without:
        return Comparison(a, b, NONE, "; ".join(without))
    silent = [letter for letter, one in zip("AB", rows, strict=True) if one.scatter is None]
    if silent:
        told = f"of {' and '.join(silent)} one step was timed, which tells nothing of its noise: run more --steps"
        return Comparison(a, b, NONE, told)
    found = noise.ratio(*rows)
    verdict = FASTER if found.low > 1 else SLOWER if found.high < 1 else ALIKE
    why = found.how
    if not found.has_interval:
        why += "; --rerun measures again"
    return Comparison(a, b, verdict, why, found)


def differences(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """What differs in the context: job, machine, software, data, by dotted name."""
    ours, theirs = _context(a), _context(b)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return {name: (ours.get(name), theirs.get(name)) for name in names}


def side(repeats: list[Record]) -> dict[str, Any]:
    """What one side is and measured, as data."""
    made, newest = row(METRIC, repeats), repeats[-1]
    shown = made if made.valid else None
    return {
        "method": made.method, "options": newest.job.options, "num_layers": made.num_layers,
        "hidden_size": made.hidden_size, "device": newest.job.device, "budget": dataclasses.asdict(newest.job.budget),
        "num_runs": len(repeats), "status": made.status, "gate": newest.gate.verdict,
        "gate_text": newest.gate.text, "samples_per_second": shown and shown.value, "low": shown and shown.low,
        "high": shown and shown.high, "keys": list(made.keys),
    }  # fmt: skip


def show(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        print(json.dumps(comparison.to_dict()))
        return
    for letter, repeats in (("A", comparison.a), ("B", comparison.b)):
        print(f"{letter}: {_side_text(side(repeats))}")
    if comparison.ratio is None:
        print(f"{comparison.verdict}: {comparison.why}")
    else:
        print(f"A is {comparison.verdict}: {comparison.ratio.text} times B's samples/s ({comparison.why})")
    for name, (ours, theirs) in differences(comparison.a[-1], comparison.b[-1]).items():
        print(f"  differs: {name}: {_shown(ours)} | {_shown(theirs)}")


def _side_text(one: dict[str, Any]) -> str:
    options = "".join(f" {name}={value}" for name, value in one["options"].items())
    runs = f"{one['num_runs']} run{'s' if one['num_runs'] > 1 else ''}"
    speed = "no throughput"
    if one["samples_per_second"]:
        bounds = f" ({one['low']:.4g} to {one['high']:.4g})" if one["low"] is not None else ""
        speed = f"{one['samples_per_second']:.4g} samples/s{bounds}"
    gate = f"gate {one['gate']}: {one['gate_text']}" if one["status"] == "ok" else f"ended as {one['status']}"
    place = ", ".join([f"on {one['device']}", *_budget_texts(one["budget"])])
    size = f"{one['num_layers']} layers x {one['hidden_size']}"
    return f"{one['method']}{options}, {size}, {place}: {runs}, {speed}; {gate}"


def _budget_texts(budget: dict[str, Any]) -> list[str]:
    """Of the memories and the link, which are what makes a budget's runs others."""
    limits = [
        f"{name} {gib(budget[f'{name}_bytes'])}" for name in ("device", "host", "disk") if budget[f"{name}_bytes"]
    ]
    link = budget["link_bytes_per_second"]
    return limits + ([f"link {gib(link)}/s"] if link else [])


def _by_point(records: Iterable[Record]) -> Side:
    """Repeats of what was measured last: equal keys are repeats, others of the same point are older states of it. What
    was cut short is none where there are whole ones."""
    found: Side = {}
    for record in records:
        job = record.job
        budget = dataclasses.replace(job.budget, seconds=None)
        point = Point(job.method, _options_text(record), job.workload, machine_of(record), budget, job.device)
        repeats = found.pop(point, [])
        if repeats and repeats[-1].key != record.key:
            repeats.clear()
        found[point] = [*repeats, record]
    return {point: [one for one in repeats if one.is_result] or repeats for point, repeats in found.items()}


def _no_common_workload(a: Side, b: Side) -> str:
    """Which fields differ between the two workloads that are nearest to each other."""
    loads = [(ours.workload, theirs.workload) for ours in a for theirs in b]
    different = [
        [(name, getattr(ours, name), getattr(theirs, name)) for name in FIELDS
         if getattr(ours, name) != getattr(theirs, name)]
        for ours, theirs in loads
    ]  # fmt: skip
    told = ", ".join(f"{name} {ours} | {theirs}" for name, ours, theirs in min(different, key=len))
    nearest = ", of the two nearest" if len(loads) > 1 else ""
    return f"different workloads: {told}{nearest}; run both alike"


def _context(record: Record) -> dict[str, Any]:
    data = record.to_dict()
    kept = {name: data[name] for name in CONTEXT}
    flat: dict[str, Any] = {}
    _flatten("", kept, flat)
    return flat


def _flatten(prefix: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), item, flat)
    else:
        flat[prefix] = value


def _options(text: str) -> dict[str, str]:
    parts = [part.partition("=") for part in text.split(",") if part]
    if not all(name and equals for name, equals, _ in parts):
        raise ValueError(f"{text!r} are no options: METHOD:name=value,name=value")
    return {name: value for name, _, value in parts}


def _has(record: Record, options: dict[str, str]) -> bool:
    own = {**record.job.options, **{name: getattr(record.job.workload, name) for name in FIELDS}}
    return all(name in own and str(own[name]).lower() == value.lower() for name, value in options.items())


def _options_text(record: Record) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(record.job.options.items()))


def _reason(one: Row) -> str:
    return one.reason if one.status == "ok" else f"ended as {one.status}: {one.reason}"


def _shown(value: Any) -> str:
    return "-" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
