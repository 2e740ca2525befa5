"""The verb `compare`: prints the ratio of two throughputs with its interval, the gate's verdict on each side, and all
fields in which the two sides differ."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.base.checkout import ROOT
from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core.job import Budget, gib
from harness.core.record import Record, added_folders, records_of
from harness.jobs.command import repeat_command
from papers.figures import points
from papers.figures.point import SIMULATED_CLOCKS, RatioInterval, doubts_text, machine_of, ratio, row_of

FASTER, SLOWER, NOT_DISTINGUISHABLE, NOT_COMPARED = "faster", "slower", "not distinguishable", "not compared"
DEFAULT_RESULTS = ROOT / "results"
COMPARED_METRIC = "samples_per_second"
# a + at the end says that the checkout's files differ from the commit
COMMIT = re.compile(r"[0-9a-f]{7,40}\+?")
# fields of a record whose differences are printed
COMPARED_FIELDS = ("job", "machine", "software", "origin", "clock", "data_sha256", "kernels")
# Compared runs must have the same workload, and should agree in all of these fields. If no two runs agree in them all,
# the first field is ignored, then also the second, then also the third.
SETTING_FIELDS = ["machine", "budget", "device"]
RepeatsPair = tuple[list[Record], list[Record]]


@dataclass(frozen=True)
class ComparedSide:
    """One side of a comparison with its measurement. Its fields are those of the JSON that `compare` prints."""

    method: str
    options: dict[str, Any]
    num_layers: int
    hidden_size: int
    device: str
    budget: Budget
    machine: str
    num_runs: int
    status: str
    gate: str  # the gate's verdict
    gate_text: str
    samples_per_second: float | None  # None, as the bounds, unless all runs passed the gate
    low: float | None
    high: float | None
    doubts: list[str]
    keys: list[str]


@dataclass(frozen=True)
class Comparison:
    """A comparison of two sides, A and B, each with the records of one job's repeats. `ratio`: A's throughput divided
    by B's; None if a side has no throughput."""

    a: list[Record]
    b: list[Record]
    verdict: str
    why: str  # how the ratio was bounded, or why there is no ratio
    ratio: RatioInterval | None = None

    def to_dict(self) -> JsonObject:
        ratio = self.ratio
        return {
            "a": dataclasses.asdict(compared_side(self.a)),
            "b": dataclasses.asdict(compared_side(self.b)),
            "verdict": self.verdict,
            "why": self.why,
            "ratio": ratio and ratio.value,
            "low": ratio and ratio.low,
            "high": ratio and ratio.high,
            "differs": field_differences(self.a[-1], self.b[-1]),
        }


def print_comparisons(a: str, b: str, results: Path, as_json: bool) -> bool:
    """Compare the records that the words `a` and `b` name, and print the comparisons. Return False if a comparison is
    not possible."""
    # each folder is read only once, so complaints about its files come only once
    read = functools.cache(records_of)
    point_pairs, complaints = pair_points(select_points(a, results, read), select_points(b, results, read))
    comparisons = [compare_repeats(*pair) for pair in point_pairs]
    folders = folder_named_by(a, results), folder_named_by(b, results)
    machines = {machine_of(repeats[-1]) for repeats in itertools.chain.from_iterable(point_pairs)}
    has_several = len(machines) > 1
    for comparison in comparisons:
        _print_comparison(comparison, as_json, folders, has_several)
    for complaint in complaints:
        print(
            json.dumps({"verdict": NOT_COMPARED, "why": complaint})
            if as_json
            else f"{NOT_COMPARED}: {complaint}"
        )
    return not complaints and all(comparison.ratio is not None for comparison in comparisons)


def folder_named_by(text: str, results: Path) -> Path:
    """Return the folder of the records that a word names: the folder of a named file, a named folder itself or, for any
    other word, `results`."""
    path = Path(text)
    if path.is_file():
        return path.parent
    return path if path.is_dir() else results


def select_points(
    text: str, results: Path, read: Callable[[Path], list[Record]] = records_of
) -> pd.DataFrame:
    """Return the repeats that a word names: a record's file, a folder, a commit or METHOD[:name=value,...]. A commit or
    a method names records in `results`. Raises ValueError if there are none."""
    path = Path(text)
    if path.is_file():
        return _repeats_of_points(points.record_frame([Record.read(path)]))
    folders = [path] if path.is_dir() else [results, *added_folders(results)]
    recorded = points.record_frame([record for folder in folders for record in read(folder)])
    if path.is_dir():
        if recorded.empty:
            raise ValueError(f"no record of a run in {path}: try a folder of results, a record or a method")
        return _repeats_of_points(recorded)
    if COMMIT.fullmatch(text) and text not in set(recorded["method"]):
        return _points_of_commit(text, recorded, results)
    method_name, _, options_text = text.partition(":")
    runs = recorded[recorded["method"] == method_name]
    if runs.empty:
        names = ", ".join(sorted(recorded["method"].unique())) or "nothing"
        raise ValueError(
            f"expected a file, a folder or a method recorded in {results} ({names}), got {text!r}; run it first, or try"
            " another folder with --results"
        )
    assignments = [assignment.partition("=") for assignment in options_text.split(",") if assignment]
    if not all(option and equals for option, equals, _ in assignments):
        raise ValueError(f"expected METHOD:name=value,name=value, got {options_text!r} after the colon")
    settings = [{**record.job.options, **vars(record.job.workload)} for record in runs[points.RECORD_COLUMN]]
    is_selected = [
        all(_has_value(setting, option, value) for option, _, value in assignments) for setting in settings
    ]
    selected = runs[is_selected]
    if selected.empty:
        texts = {_sorted_options_text(record) or "no options" for record in runs[points.RECORD_COLUMN]}
        options = "; ".join(sorted(texts))
        raise ValueError(f"no record of {text!r} in {results}: {method_name} was run with {options}")
    return _repeats_of_points(selected)


def _has_value(values: JsonObject, option: str, value: str) -> bool:
    return option in values and str(values[option]).lower() == value.lower()


def _points_of_commit(text: str, recorded: pd.DataFrame, results: Path) -> pd.DataFrame:
    """Return the runs of the commit that the text names. A + at its end selects the runs of a checkout with further
    changes; without a +, the runs of the unchanged commit are selected. Raises ValueError unless exactly one recorded
    commit begins with the text."""
    commits = recorded["commit"].fillna("").astype(str)
    is_wanted = commits.map(lambda commit: _is_same_commit(text, commit))
    if commits[is_wanted].nunique() != 1:
        known = ", ".join(dict.fromkeys(commit for commit in commits if commit)) or "none"
        raise ValueError(f"expected the start of one commit recorded in {results} ({known}), got {text!r}")
    return _repeats_of_points(recorded[is_wanted])


def _is_same_commit(text: str, recorded: str) -> bool:
    """True if both texts name the same commit: the digits of one begin with the digits of the other (records hold 12),
    and either both texts end with + or neither does."""
    digits, recorded_digits = text.removesuffix("+"), recorded.removesuffix("+")
    if not recorded_digits:
        return False
    is_prefix = recorded_digits.startswith(digits) or digits.startswith(recorded_digits)
    return is_prefix and text.endswith("+") == recorded.endswith("+")


def _repeats_of_points(recorded: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each point (name, workload and setting), in the order of the points' last runs. The column
    `repeats` has the records that share the point's newest key. Interrupted records are left out if the point has other
    records."""
    jobs = [record.job for record in recorded[points.RECORD_COLUMN]]
    runs = recorded.assign(
        name=recorded["method"] + ":" + recorded[points.RECORD_COLUMN].map(_sorted_options_text),
        workload=[job.workload for job in jobs],
        budget=[dataclasses.replace(job.budget, seconds=None) for job in jobs],
    )
    newest_first = (
        runs[::-1].groupby(["name", "workload", *SETTING_FIELDS], sort=False)[points.RECORD_COLUMN].agg(list)
    )
    return newest_first.map(_of_newest_key).rename("repeats")[::-1].reset_index()


def _of_newest_key(newest_first: list[Record]) -> list[Record]:
    repeats = points.of_newest_key(newest_first[::-1])
    return [record for record in repeats if record.is_result] or repeats


def pair_points(a: pd.DataFrame, b: pd.DataFrame) -> tuple[list[RepeatsPair], list[str]]:
    """Return the pairs of points to compare, and a complaint for each workload and setting without a pair.

    The two points of a pair have the same workload, setting and name. Their names may differ if each side has only one
    point.
    """
    point_pairs: list[RepeatsPair] = []
    complaints: list[str] = []
    b_by_workload = dict(list(b.groupby("workload", sort=False)))
    for workload, a_points in a.groupby("workload", sort=False):
        if workload not in b_by_workload:
            continue
        for a_side, b_side in _pairs_by_setting(a_points, b_by_workload[workload]):
            paired = a_side.merge(b_side, on="name")
            if paired.empty:
                a_side, b_side = _with_throughput(a_side), _with_throughput(b_side)
                if len(a_side) == len(b_side) == 1:
                    paired = a_side.merge(b_side, how="cross")
            point_pairs += zip(paired["repeats_x"], paired["repeats_y"], strict=True)
            if paired.empty:
                choices = " or ".join((a_side if len(a_side) > 1 else b_side)["name"])
                complaints.append(
                    f"{counted(workload.num_layers, 'layer')}: expected one run on each side, found several: try"
                    f" {choices}"
                )
    if not point_pairs and not complaints:
        complaints.append(_no_common_workload(a, b))
    return point_pairs, complaints


def _pairs_by_setting(a: pd.DataFrame, b: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Return a pair for each setting in which both sides have runs: A's points and B's points. If points of one side
    have the same name, only the newest is kept."""
    for dropped in range(len(SETTING_FIELDS) + 1):
        keys = ["workload", *SETTING_FIELDS[dropped:]]
        a_points, b_points = (
            dict(list(side.drop_duplicates([*keys, "name"], keep="last").groupby(keys, sort=False)))
            for side in (a, b)
        )
        if a_points.keys() & b_points.keys():
            return [(a_points[setting], b_points[setting]) for setting in a_points if setting in b_points]
    return []


def _with_throughput(side: pd.DataFrame) -> pd.DataFrame:
    """Return the points that have a throughput. If there are none, return the point that was run last, so that the call
    can print how its run ended."""
    rows = [row_of(COMPARED_METRIC, repeats) for repeats in side["repeats"]]
    with_throughput = side[[row.valid and row.has_number for row in rows]]
    if not with_throughput.empty:
        return with_throughput
    started = side["repeats"].map(lambda repeats: repeats[-1].started)
    return side.loc[[started.idxmax()]]


def compare_repeats(a: list[Record], b: list[Record], names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare the repeats of A with the repeats of B. All these records must have the same workload. Doubtful times are
    not distinguishable, whatever their ratio. `names`: how texts name both sides."""
    clocks = [records[-1].clock for records in (a, b)]
    if len({clock in SIMULATED_CLOCKS for clock in clocks}) > 1:
        return Comparison(
            a, b, NOT_COMPARED, f"one is timed by {clocks[0]}, the other by {clocks[1]}: run both alike"
        )
    sides = {name: row_of(COMPARED_METRIC, repeats) for name, repeats in zip(names, (a, b), strict=True)}
    without_throughput = [
        f"{name} has no throughput: {'' if row.status == 'ok' else f'ended as {row.status}: '}{row.reason}"
        for name, row in sides.items()
        if not (row.valid and row.has_number)
    ]
    if without_throughput:
        return Comparison(a, b, NOT_COMPARED, "; ".join(without_throughput))
    of_one_step = [name for name, row in sides.items() if row.scatter is None]
    if of_one_step:
        return Comparison(
            a,
            b,
            NOT_COMPARED,
            f"{' and '.join(of_one_step)} timed one step, which shows no noise: try more --steps",
        )
    bounds = ratio(*sides.values())
    if doubts := doubts_text(sides):
        return Comparison(a, b, NOT_DISTINGUISHABLE, f"doubtful: {doubts}; {bounds.how_bounded}", bounds)
    verdict = NOT_DISTINGUISHABLE
    if bounds.low > 1:
        verdict = FASTER
    elif bounds.high < 1:
        verdict = SLOWER
    return Comparison(a, b, verdict, bounds.how_bounded, bounds)


def field_differences(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """Return both records' values of each field in which the records differ, by the field's dotted name. Only the
    fields in CONTEXT are compared."""
    a_fields, b_fields = a.to_dict(), b.to_dict()
    return _differing_values(
        _flattened("", {name: a_fields[name] for name in COMPARED_FIELDS}),
        _flattened("", {name: b_fields[name] for name in COMPARED_FIELDS}),
    )


def _differing_values(a_values: JsonObject, b_values: JsonObject) -> dict[str, tuple[Any, Any]]:
    names = [name for name in {**a_values, **b_values} if a_values.get(name) != b_values.get(name)]
    return {name: (a_values.get(name), b_values.get(name)) for name in names}


def compared_side(repeats: list[Record]) -> ComparedSide:
    row, newest = row_of(COMPARED_METRIC, repeats), repeats[-1]
    value, low, high = (row.value, row.low, row.high) if row.valid else (None, None, None)
    return ComparedSide(
        row.method,
        newest.job.options,
        row.num_layers,
        row.hidden_size,
        newest.job.device,
        newest.job.budget,
        row.machine,
        len(repeats),
        row.status,
        newest.gate.verdict,
        newest.gate.text,
        value,
        low,
        high,
        list(row.inconclusive),
        list(row.keys),
    )


def _print_comparison(
    comparison: Comparison, as_json: bool, folders: tuple[Path, Path], names_machines: bool = False
) -> None:
    """Print a comparison. `folders`: the folders of A's and of B's records, named in the printed calls that measure
    again. `names_machines`: True: print each side's machine."""
    if as_json:
        print(json.dumps(comparison.to_dict()))
        return
    for letter, repeats in (("A", comparison.a), ("B", comparison.b)):
        side = compared_side(repeats)
        where = f", on {side.machine or 'an unnamed machine'}" if names_machines else ""
        print(f"{letter}{where}: {side_text(side)}")
    if comparison.ratio is None:
        print(f"{comparison.verdict}: {comparison.why}")
    elif comparison.verdict == NOT_DISTINGUISHABLE:
        print("cannot tell which is faster")
        print(f"  A's samples/s are {comparison.ratio.text} times B's ({comparison.why})")
        for repeats, folder in zip((comparison.a, comparison.b), folders, strict=True):
            where = "" if folder == DEFAULT_RESULTS else f" --results {shlex.quote(str(folder))}"
            print(
                f"  to narrow it, measure again: {repeat_command(repeats[-1], is_short=True)} --rerun{where}"
            )
    else:
        print(f"A is {comparison.verdict}: {comparison.ratio.text} times B's samples/s ({comparison.why})")
    for name, (a_value, b_value) in field_differences(comparison.a[-1], comparison.b[-1]).items():
        print(f"  differs: {name}: {_printed_value(a_value)} | {_printed_value(b_value)}")


def side_text(side: ComparedSide) -> str:
    options = "".join(f" {name}={value}" for name, value in side.options.items())
    budget, link = side.budget, side.budget.link_bytes_per_second
    sizes = {"device": budget.device_bytes, "host": budget.host_bytes, "disk": budget.disk_bytes}
    limits = [f"on {side.device}", *(f"{name} {gib(size)}" for name, size in sizes.items() if size)]
    device_text = ", ".join([*limits, f"link {gib(link)}/s"] if link else limits)
    bounds = f" ({side.low:.4g} to {side.high:.4g})" if side.low is not None else ""
    speed = side.samples_per_second
    speed_text = f"{speed:.4g} samples/s{bounds}" if speed else "no throughput"
    gate = f"gate {side.gate}: {side.gate_text}" if side.status == "ok" else f"ended as {side.status}"
    size = f"{counted(side.num_layers, 'layer')} x {side.hidden_size}"
    runs = counted(side.num_runs, "run")
    return f"{side.method}{options}, {size}, {device_text}: {runs}, {speed_text}; {gate}"


def _no_common_workload(a: pd.DataFrame, b: pd.DataFrame) -> str:
    """Find the two most similar workloads, one of each side, and return the fields in which they differ, as text."""
    pair_points = itertools.product(a["workload"], b["workload"])
    differences_of_pairs = [
        _differing_values(vars(a_workload), vars(b_workload)) for a_workload, b_workload in pair_points
    ]
    fewest = min(differences_of_pairs, key=len)
    differing = ", ".join(f"{name} {a_value} | {b_value}" for name, (a_value, b_value) in fewest.items())
    nearest = ", of the two nearest" if len(differences_of_pairs) > 1 else ""
    return f"different workloads: {differing}{nearest}; run both alike"


def _flattened(name: str, value: Any) -> JsonObject:
    """Return the values in a nested mapping, by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    values: JsonObject = {}
    for key, inner in value.items():
        values |= _flattened(f"{name}.{key}".lstrip("."), inner)
    return values


def _sorted_options_text(record: Record) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(record.job.options.items()))


def _printed_value(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
