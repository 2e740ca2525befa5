"""The papers' claims as data: what claims/*.yaml may say, checked on load; one line names file, claim and what is
allowed.

Every scalar is read as text and parsed here, so that YAML guesses no types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.core import method
from harness.evidence import fields
from harness.figures.point import METRICS

FOLDER = method.ROOT / "claims"
PAPER_MACHINE = "v100-vm"
MACHINES = ("any", "gpu", "several-gpus", PAPER_MACHINE)  # where a claim is said to hold
CASES = range(1, 7)  # cases/caseN.py
AXES = ("num_layers", "window_size")
EXTREMES = ("largest", "smallest")  # of the windows measured


@dataclass(frozen=True)
class Point:
    """Which row of a case's table; None is whatever the table has."""

    method: str
    num_layers: int | None = None
    hidden_size: int | None = None
    window_size: int | str | None = None
    series: str = ""

    def __str__(self) -> str:
        size = f" at {self.num_layers} layers" if self.num_layers else ""
        series = f", {self.series}" if self.series else ""
        return f"{self.method}{size}" + (f", window {self.window_size}" if self.window_size else "") + series


@dataclass(frozen=True)
class Order:
    """Values fall from group to group; within a group nothing is claimed."""

    groups: tuple[tuple[Point, ...], ...]

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(point for group in self.groups for point in group)

    @property
    def text(self) -> str:
        return " > ".join(" or ".join(str(point) for point in group) for group in self.groups)


@dataclass(frozen=True)
class Ratio:
    over: Point
    under: Point
    least: float
    most: float

    @property
    def points(self) -> tuple[Point, ...]:
        return self.over, self.under

    @property
    def text(self) -> str:
        return f"{self.over} / {self.under} {_range_text(self.least, self.most)}"


@dataclass(frozen=True)
class Exponent:
    """Values grow as a power of the axis; at least four points are fitted."""

    point: Point
    axis: str
    least: float
    most: float
    fewest = 4

    @property
    def points(self) -> tuple[Point, ...]:
        return (self.point,)

    @property
    def text(self) -> str:
        return f"exponent of {self.axis} {_range_text(self.least, self.most)}"


@dataclass(frozen=True)
class Plateau:
    """From some point on, `num_points` points and the last among them, no larger one gains more than `gain`."""

    point: Point
    axis: str
    gain: float
    num_points: int

    @property
    def points(self) -> tuple[Point, ...]:
        return (self.point,)

    @property
    def text(self) -> str:
        return f"the last {self.num_points} or more of {self.axis} gain at most {self.gain:.0%}"


@dataclass(frozen=True)
class Value:
    point: Point
    value: float
    tolerance: float

    @property
    def points(self) -> tuple[Point, ...]:
        return (self.point,)

    @property
    def text(self) -> str:
        return f"{self.value:.4g} within {self.tolerance:.0%}"


Expected = Order | Ratio | Exponent | Plateau | Value


@dataclass(frozen=True)
class Claim:
    id: str
    text: str
    source: str  # figure, table or page
    case: int
    metric: str
    machines: tuple[str, ...]
    expected: Expected
    xfail: str = ""  # why we know that it does not hold

    @property
    def command(self) -> str:
        """What would test it: one about the paper's machine needs that machine and its sizes."""
        if self.machines == (PAPER_MACHINE,):
            return f"./run.sh case {self.case} --profile paper --machine {PAPER_MACHINE}"
        return f"./run.sh case {self.case} --profile {'demo' if 'any' in self.machines else 'quick'}"


def load(folder: Path = FOLDER) -> list[Claim]:
    """The claims of every file of a folder. Raises ValueError, one line, where one says what it may not."""
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise ValueError(f"{folder} holds no claims: *.yaml files, as {FOLDER.name}/stronghold.yaml of this project")
    claims = [claim for path in paths for claim in load_file(path)]
    twice = [claim.id for index, claim in enumerate(claims) if claim.id in {other.id for other in claims[:index]}]
    if twice:
        raise ValueError(f"{folder}: claim {twice[0]}: the id is taken twice: each claim has its own")
    return claims


def load_file(path: Path) -> list[Claim]:
    try:
        # BaseLoader makes text, lists and mappings of it, and nothing else.
        data = yaml.load(path.read_bytes(), Loader=yaml.BaseLoader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of claims: {fields.one_line(error)}") from error
    if not (isinstance(data, dict) and set(data) == {"claims"} and isinstance(data["claims"], list)):
        raise ValueError(f"{path} is not a file of claims: it has one key, claims, a list")
    return [_claim(path, number, item) for number, item in enumerate(data["claims"], start=1)]


def _claim(path: Path, number: int, item: Any) -> Claim:
    name = str(number)
    try:
        given = fields.mapping(item)
        name = fields.identifier(given.get("id"))
        kind = given.pop("kind", None)
        common = {key: given.pop(key) for key in list(given) if key in COMMON}
        missing = set(COMMON) - {"xfail"} - set(common)
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} missing")
        parsed = {key: fields.within_key(key, COMMON[key], value) for key, value in common.items()}
        expected = KINDS[fields.choose("kind", kind, KINDS)](given)
        claim = Claim(**parsed, expected=expected)
        if isinstance(expected, Value) and claim.machines != (PAPER_MACHINE,):
            raise ValueError(f"machines: a value is judged on {PAPER_MACHINE} alone: [{PAPER_MACHINE}]")
        return claim
    except ValueError as error:
        raise ValueError(f"{path}: claim {name}: {fields.one_line(error)}") from error


def _order(given: dict[str, Any]) -> Order:
    found = fields.take(given, required={"points": fields.some})["points"]
    groups = tuple(
        tuple(fields.within_key("points", _point, one) for one in (group if isinstance(group, list) else [group]))
        for group in found
    )
    if len(groups) < 2 or not all(groups):
        raise ValueError("points: two or more, highest first; those in a list of their own are not compared")
    return Order(groups)


def _ratio(given: dict[str, Any]) -> Ratio:
    found = fields.take(
        given,
        required={"over": _point, "under": _point},
        one_of={"at_least": fields.positive, "at_most": fields.positive, "within": fields.positive_pair},
    )
    least, most = found.get("within") or (found.get("at_least", 0.0), found.get("at_most", math.inf))
    return Ratio(found["over"], found["under"], least, most)


def _shape(given: dict[str, Any]) -> Exponent | Plateau:
    found = fields.take(
        given, required={"of": _point, "against": _axis}, one_of={"exponent": fields.pair, "plateau": _plateau}
    )
    if "exponent" in found:
        return Exponent(found["of"], found["against"], *found["exponent"])
    return Plateau(found["of"], found["against"], **found["plateau"])


def _plateau(value: Any) -> dict[str, Any]:
    return fields.take(fields.mapping(value), required={"gain": fields.positive, "num_points": fields.from_two})


def _value(given: dict[str, Any]) -> Value:
    found = fields.take(given, required={"of": _point, "value": fields.positive, "tolerance": fields.positive})
    return Value(found["of"], found["value"], found["tolerance"])


def _point(value: Any) -> Point:
    given = {"method": value} if isinstance(value, str) else fields.mapping(value)
    sizes = {"num_layers": fields.count, "hidden_size": fields.count, "window_size": _window, "series": fields.sentence}
    return Point(**fields.take(given, required={"method": _method}, optional=sizes))


def _method(value: Any) -> str:
    return fields.choose("method", value, method.names())


def _window(value: Any) -> int | str:
    return value if value in EXTREMES else fields.count(value, f" or {' or '.join(EXTREMES)}")


def _axis(value: Any) -> str:
    return fields.choose("axis", value, AXES)


def _case(value: Any) -> int:
    return int(fields.choose("case", value, [str(number) for number in CASES]))


def _metric(value: Any) -> str:
    return fields.choose("metric", value, METRICS)


def _machines(value: Any) -> tuple[str, ...]:
    return tuple(fields.choose("machine", one, MACHINES) for one in fields.some(value))


def _range_text(least: float, most: float) -> str:
    if math.isinf(most):
        return f">= {least:.3g}"
    return f"<= {most:.3g}" if least == 0 else f"from {least:.3g} to {most:.3g}"


COMMON: dict[str, Callable] = {
    "id": fields.identifier, "text": fields.sentence, "source": fields.sentence, "case": _case,
    "metric": _metric, "machines": _machines, "xfail": fields.sentence,
}  # fmt: skip
KINDS: dict[str, Callable] = {"order": _order, "ratio": _ratio, "shape": _shape, "value": _value}
