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

import pandas as pd

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core.record import Record, records_of
from harness.gate.flaws import untrained_reason
from harness.gate.verdict import combine_verdicts, judge, judge_models
from papers.claims.compare import (
    NOT_COMPARED,
    NOT_DISTINGUISHABLE,
    SETTING_FIELDS,
    SLOWER,
    Comparison,
    compare_repeats,
    compared_side,
    field_differences,
    select_points,
    side_text,
)

SAME_BITS, SAME_WITHIN_ROUNDING = "the same bits", "the same within rounding"
OTHERWISE, UNKNOWN_TRAINING = "otherwise", "not compared"
TRAINING_OF_VERDICT = {"exact": SAME_BITS, "tolerance": SAME_WITHIN_ROUNDING, "failed": OTHERWISE}
# differing fields that are printed
PRINTED_DIFFERENCES = ("software.commit", "software.source", "machine.gpu", "machine.cpu", "machine.cores")


@dataclass(frozen=True)
class BaselineComparison:
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
        return self.training != UNKNOWN_TRAINING and not (have_speed and self.speed.verdict == NOT_COMPARED)

    def to_dict(self) -> JsonObject:
        return {"training": self.training, "training_why": self.why, **self.speed.to_dict()}


def print_baseline_comparisons(
    baseline: str, new: str, results: Path, as_json: bool
) -> tuple[list[BaselineComparison], list[str]]:
    """Compare each point of the baseline with `new`, and print the comparisons. Return them, and a complaint for each
    point of which `new` has no run."""
    # each folder is read only once, so complaints about its files come only once
    read = functools.cache(records_of)
    points, new_points = select_points(baseline, results, read), select_points(new, results, read)
    comparisons, missing_texts = [], []
    for _, point in points.iterrows():
        repeats = _same_point(point, points, new_points)
        if repeats is None:
            load, name = point["workload"], point["name"].removesuffix(":")
            missing_texts.append(
                f"{name}, {counted(load.num_layers, 'layer')} x {load.hidden_size}: {new} has no run of it"
            )
        else:
            comparisons.append(compare_with_baseline(repeats, point["repeats"]))
    for comparison in comparisons:
        _print_baseline_comparison(comparison, as_json)
    for complaint in missing_texts:
        line = f"{UNKNOWN_TRAINING}: {complaint}"
        if as_json:
            line = json.dumps({"training": UNKNOWN_TRAINING, "training_why": complaint})
        print(line)
    return comparisons, missing_texts


def _same_point(point: pd.Series, points: pd.DataFrame, new_points: pd.DataFrame) -> list[Record] | None:
    """Return the newest repeats, among `others`, of a point of the baseline; None if there are none. Runs in the
    baseline's setting are preferred.

    The points must have the same options. If each side has only one point of the method, the options of the two may
    differ.
    """
    new_points = new_points[new_points["workload"] == point["workload"]]
    named = new_points[new_points["name"] == point["name"]]
    if named.empty:
        baseline_points = _of_method(point, points[points["workload"] == point["workload"]])
        new_points = _of_method(point, new_points)
        if len(baseline_points) == len(new_points) == 1:
            named = new_points
    for dropped in range(len(SETTING_FIELDS) + 1):
        keys = SETTING_FIELDS[dropped:]
        is_alike = [all(new_point[key] == point[key] for key in keys) for _, new_point in named.iterrows()]
        if any(is_alike):
            return list(named[is_alike]["repeats"].iloc[-1])
    return None


def _of_method(point: pd.Series, points: pd.DataFrame) -> pd.DataFrame:
    """Return those points that have the method of `point`; a point's name is METHOD:options."""
    return points[points["name"].str.split(":").str[0] == point["name"].partition(":")[0]]


def compare_with_baseline(new: Sequence[Record], old: Sequence[Record]) -> BaselineComparison:
    """Compare how the newest repeat of each side trained, and how fast all repeats of each side ran."""
    training, why = compare_trainings(new[-1], old[-1])
    return BaselineComparison(training, why, compare_repeats([*new], [*old], ("new", "the baseline")))


def compare_trainings(new: Record, old: Record) -> tuple[str, str]:
    """Return whether a record trains like the baseline's (SAME_BITS, SAME, OTHERWISE or UNKNOWN), and why."""
    if new.status != old.status:
        new_end, old_end = f"{new.status}{_end_text(new)}", f"{old.status}{_end_text(old)}"
        return OTHERWISE, f"ended as {new_end}, the baseline's as {old_end}"
    if new.status != "ok":
        return SAME_WITHIN_ROUNDING, f"both ended as {new.status}"
    if old.gate.passed and not new.gate.passed:
        return OTHERWISE, f"its gate is {new.gate.verdict}, the baseline's passed: {new.gate.text}"
    if new.job.steps != old.job.steps:
        return UNKNOWN_TRAINING, f"{counted(new.job.steps, 'step')} and {old.job.steps}: run both alike"
    if flaw := judge_models(new) or judge_models(old):
        return UNKNOWN_TRAINING, flaw.text
    if why := next((why for model in old.models() if (why := untrained_reason(model))), ""):
        return UNKNOWN_TRAINING, f"the baseline itself shows no training: {why}"
    # A method promises the reference's bits only on the same commit and machine, so do not ask for another commit's
    # bits.
    gates = [
        judge(dataclasses.replace(new_model, bit_exact=False), old_model)
        for new_model, old_model in zip(new.models(), old.models(), strict=True)
    ]
    gate = combine_verdicts(gates)
    return TRAINING_OF_VERDICT.get(gate.verdict, UNKNOWN_TRAINING), gate.text


def _end_text(record: Record) -> str:
    return f" ({record.reason})" if record.reason else ""


def _print_baseline_comparison(comparison: BaselineComparison, as_json: bool) -> None:
    if as_json:
        print(json.dumps(comparison.to_dict()))
        return
    speed = comparison.speed
    print(f"new:      {side_text(compared_side(speed.a))}")
    print(f"baseline: {side_text(compared_side(speed.b))}")
    verb = "trains" if comparison.training != UNKNOWN_TRAINING else "training"
    print(f"  {verb} {comparison.training}: {comparison.why}")
    if speed.ratio is None:
        print(f"  speed {NOT_COMPARED}: {speed.why}")
    else:
        speed_text = "cannot tell which is faster" if speed.verdict == NOT_DISTINGUISHABLE else speed.verdict
        print(f"  {speed_text}: {speed.ratio.text} times the baseline's samples/s ({speed.why})")
    for name, (new_value, old_value) in field_differences(speed.a[-1], speed.b[-1]).items():
        if name in PRINTED_DIFFERENCES:
            print(f"  differs: {name}: {new_value} | {old_value}")
