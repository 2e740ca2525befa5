"""`compare --baseline`: tells whether two commits, or two folders of results, train the same, and which is faster.

Each point of the baseline (method, options, workload, setting) is compared with the newest runs of the same point. The
two trainings are compared as the gate compares a run with the reference, within the limits of rounding, because another
commit may sum in another order. Each record also holds the gate's verdict on its own training.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.base.console import counted
from harness.core.record import Record, records_of
from harness.gate.flaws import untrained_reason
from harness.gate.verdict import combine_verdicts, judge, judge_models
from papers.claims.compare import (
    ALIKE,
    NONE,
    SETTING,
    SLOWER,
    Comparison,
    compare,
    compared_side,
    differences,
    select,
    side_text,
)

SAME_BITS, SAME, OTHERWISE, UNKNOWN = "the same bits", "the same within rounding", "otherwise", "not compared"

# differing fields that are printed
TOLD = ("software.commit", "software.source", "machine.gpu", "machine.cpu", "machine.cores")


@dataclass(frozen=True)
class Held:
    """The newest runs of a point, compared with the baseline's runs. `training`: SAME_BITS, SAME, OTHERWISE or UNKNOWN.
    `why`: the reason, as text. `speed`: the comparison of both sides' speeds."""

    training: str
    why: str
    speed: Comparison

    @property
    def trains_otherwise(self) -> bool:
        return self.training == OTHERWISE

    @property
    def is_slower(self) -> bool:
        return self.speed.verdict == SLOWER

    @property
    def is_compared(self) -> bool:
        """True if it is known whether both sides train the same. If both have a throughput, their speeds must also have
        been compared."""
        have_speed = all(records[-1].samples_per_second for records in (self.speed.a, self.speed.b))
        return self.training != UNKNOWN and not (have_speed and self.speed.verdict == NONE)

    def to_dict(self) -> dict[str, Any]:
        return {"training": self.training, "training_why": self.why, **self.speed.to_dict()}


def print_held(baseline: str, new: str, results: Path, as_json: bool) -> tuple[list[Held], list[str]]:
    """Compare each point of the baseline with `new`, and print the comparisons. Return them, and a complaint for each
    point of which `new` has no run."""
    # each folder is read only once, so complaints about its files come only once
    read = functools.cache(records_of)
    points, others = select(baseline, results, read), select(new, results, read)
    held, missing = [], []
    for _, point in points.iterrows():
        repeats = _same_point(point, points, others)
        if repeats is None:
            load, name = point["workload"], point["name"].removesuffix(":")
            missing.append(
                f"{name}, {counted(load.num_layers, 'layer')} x {load.hidden_size}: {new} has no run of it"
            )
        else:
            held.append(hold(repeats, point["repeats"]))
    for one in held:
        _print_one(one, as_json)
    for complaint in missing:
        print(
            json.dumps({"training": UNKNOWN, "training_why": complaint})
            if as_json
            else f"{UNKNOWN}: {complaint}"
        )
    return held, missing


def _same_point(point: pd.Series, points: pd.DataFrame, others: pd.DataFrame) -> list[Record] | None:
    """Return the newest repeats, among `others`, of a point of the baseline; None if there are none. Runs in the
    baseline's setting are preferred.

    The points must have the same options. If each side has only one point of the method, the options of the two may
    differ.
    """
    new_points = others[others["workload"] == point["workload"]]
    named = new_points[new_points["name"] == point["name"]]
    if named.empty:
        baseline_points = _of_method(point, points[points["workload"] == point["workload"]])
        new_points = _of_method(point, new_points)
        named = new_points if len(baseline_points) == len(new_points) == 1 else named
    for dropped in range(len(SETTING) + 1):
        keys = SETTING[dropped:]
        alike = [all(other[key] == point[key] for key in keys) for _, other in named.iterrows()]
        if any(alike):
            return list(named[alike]["repeats"].iloc[-1])
    return None


def _of_method(point: pd.Series, points: pd.DataFrame) -> pd.DataFrame:
    """Return those points that have the method of `point`; a point's name is METHOD:options."""
    return points[points["name"].str.split(":").str[0] == point["name"].partition(":")[0]]


def hold(new: Sequence[Record], old: Sequence[Record]) -> Held:
    """Compare how the newest repeat of each side trained, and how fast all repeats of each side ran."""
    training, why = trains_the_same(new[-1], old[-1])
    return Held(training, why, compare([*new], [*old], ("new", "the baseline")))


def trains_the_same(new: Record, old: Record) -> tuple[str, str]:
    """Return whether a record trains like the baseline's (SAME_BITS, SAME, OTHERWISE or UNKNOWN), and why."""
    if new.status != old.status:
        return (
            OTHERWISE,
            f"ended as {new.status}{_end_text(new)}, the baseline's as {old.status}{_end_text(old)}",
        )
    if new.status != "ok":
        return SAME, f"both ended as {new.status}"
    if old.gate.passed and not new.gate.passed:
        return OTHERWISE, f"its gate is {new.gate.verdict}, the baseline's passed: {new.gate.text}"
    if new.job.steps != old.job.steps:
        return UNKNOWN, f"{counted(new.job.steps, 'step')} and {old.job.steps}: run both alike"
    if flaw := judge_models(new) or judge_models(old):
        return UNKNOWN, flaw.text
    if why := next((why for model in old.models() if (why := untrained_reason(model))), ""):
        return UNKNOWN, f"the baseline itself shows no training: {why}"
    # A method promises the reference's bits only on the same commit and machine, so do not ask for another commit's
    # bits.
    gates = [
        judge(dataclasses.replace(new_model, bit_exact=False), old_model)
        for new_model, old_model in zip(new.models(), old.models(), strict=True)
    ]
    gate = combine_verdicts(gates)
    return {"exact": SAME_BITS, "tolerance": SAME, "failed": OTHERWISE}.get(gate.verdict, UNKNOWN), gate.text


def _end_text(record: Record) -> str:
    return f" ({record.reason})" if record.reason else ""


def _print_one(one: Held, as_json: bool) -> None:
    if as_json:
        print(json.dumps(one.to_dict()))
        return
    speed = one.speed
    print(f"new:      {side_text(compared_side(speed.a))}")
    print(f"baseline: {side_text(compared_side(speed.b))}")
    verb = "trains" if one.training != UNKNOWN else "training"
    print(f"  {verb} {one.training}: {one.why}")
    if speed.ratio is None:
        print(f"  speed {NONE}: {speed.why}")
    else:
        speed_text = "cannot tell which is faster" if speed.verdict == ALIKE else speed.verdict
        print(f"  {speed_text}: {speed.ratio.text} times the baseline's samples/s ({speed.why})")
    for name, (new_value, old_value) in differences(speed.a[-1], speed.b[-1]).items():
        if name in TOLD:
            print(f"  differs: {name}: {new_value} | {old_value}")
