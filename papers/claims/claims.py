"""The papers' claims, read from claims/*.yaml and checked. An error names file, claim and field in one line.

YAML gives only text, lists and mappings. pydantic converts and checks each field by the types below.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from harness.base.checkout import ROOT
from harness.base.console import counted
from harness.base.foreign_file import checked, read_yaml
from harness.base.registry import Registry
from harness.core import method
from harness.devices import named_machines
from papers.figures import case
from papers.figures.point import METRICS

FOLDER = ROOT / "claims"
PAPER_MACHINE = named_machines.PUBLISHED
MACHINE_KINDS = ("any", "gpu", "several-gpus", PAPER_MACHINE)  # kinds of machines that a claim can be about
REGISTRY = Registry("claim", FOLDER)  # if claims are added, they replace this project's
SHAPE_AXES = ("num_layers", "window_size")  # fields of a point that may be the axis of a shape
# words that a claim may use for the largest and the smallest measured window
EXTREMES = ("largest", "smallest")
IDENTIFIER = re.compile("[a-z0-9][a-z0-9.-]{0,60}")


def expect(text: str, holds: Callable[[Any], Any]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"expected {text}, got {value!r:.80}")
        return value

    return AfterValidator(check)


def one_of(choices: Collection) -> AfterValidator:
    return expect(f"one of {', '.join(map(str, choices))}", choices.__contains__)


def one_of_those(current: Callable[[], Collection]) -> AfterValidator:
    """Return a check that a value is one of the choices that exist when a claims file is read: added folders may bring
    further choices."""

    def check(value: Any) -> Any:
        if value not in (choices := current()):
            raise ValueError(f"expected one of {', '.join(map(str, choices))}, got {value!r:.80}")
        return value

    return AfterValidator(check)


def has_one_of(*names: str) -> Any:
    def check(expected: Any) -> Any:
        if sum(getattr(expected, name) is not None for name in names) != 1:
            raise ValueError(f"expected exactly one of the fields {', '.join(names)}, got none or several")
        return expected

    return model_validator(mode="after")(check)


def _positive_integer(value: Any, or_else: str = "") -> int:
    """Return a positive integer that is written in digits only; int() would also accept 1_000 and +1. `or_else`:
    further text of the error."""
    if not re.fullmatch("[1-9][0-9]{0,8}", str(value)):
        raise ValueError(f"expected a positive integer{or_else}, got {value!r:.80}")
    return int(value)


def _window_or_extreme(value: Any) -> Any:
    return value if value in (None, *EXTREMES) else _positive_integer(value, f", {' or '.join(EXTREMES)}")


Text = Annotated[str, expect("text", str.strip), AfterValidator(lambda text: " ".join(text.split()))]
PositiveCount = Annotated[int, BeforeValidator(_positive_integer)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0)]
ASCENDING = expect("a range [low, high] with low < high", lambda pair: pair[0] < pair[1])
NO_UNKNOWN_FIELDS = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=NO_UNKNOWN_FIELDS)
class Point:
    """Selects a row of a case's table by its fields. A field of None matches any value."""

    method: Annotated[str, one_of_those(method.names)]
    num_layers: PositiveCount | None = None
    hidden_size: PositiveCount | None = None
    window_size: Annotated[int | str | None, BeforeValidator(_window_or_extreme)] = None
    series: Text = ""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value

    def __str__(self) -> str:
        size = f" at {counted(self.num_layers, 'layer')}" if self.num_layers else ""
        series = f", {self.series}" if self.series else ""
        return f"{self.method}{size}" + (f", window {self.window_size}" if self.window_size else "") + series


AS_LIST = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])
Group = Annotated[tuple[Point, ...], AS_LIST]


@dataclass(frozen=True, config=NO_UNKNOWN_FIELDS)
class Order:
    """A claim that values fall from one group of points to the next. Within a group, no order is claimed."""

    points: Annotated[
        tuple[Group, ...],
        expect("two or more points, highest first", lambda groups: len(groups) > 1 and all(groups)),
    ]

    @property
    def named(self) -> tuple[Point, ...]:
        return tuple(point for group in self.points for point in group)

    @property
    def text(self) -> str:
        return " > ".join(" or ".join(map(str, group)) for group in self.points)


@dataclass(frozen=True, config=NO_UNKNOWN_FIELDS)
class Ratio:
    over: Point
    under: Point
    at_least: Positive | None = None
    at_most: Positive | None = None
    within: Annotated[tuple[Positive, Positive], ASCENDING] | None = None
    _has_one_bound = has_one_of("at_least", "at_most", "within")

    @property
    def named(self) -> tuple[Point, ...]:
        return self.over, self.under

    @property
    def bounds(self) -> tuple[float, float]:
        return self.within or (self.at_least or 0.0, self.at_most or math.inf)

    @property
    def text(self) -> str:
        return f"{self.over} / {self.under} {_range_text(*self.bounds)}"


@dataclass(frozen=True, config=NO_UNKNOWN_FIELDS)
class Plateau:
    gain: Positive
    num_points: Annotated[int, Field(gt=1, lt=10**9)]


@dataclass(frozen=True, config=NO_UNKNOWN_FIELDS)
class Shape:
    """A claim on the shape of values along an axis: a power law, fitted to at least four points, or a plateau.

    A plateau has at least `num_points` points, which are the last ones on the axis. None of its points gains more than
    `gain` over the plateau's first point.
    """

    of: Point
    against: Annotated[str, one_of(SHAPE_AXES)]
    exponent: Annotated[tuple[Finite, Finite], ASCENDING] | None = None
    plateau: Plateau | None = None
    _has_one_shape = has_one_of("exponent", "plateau")

    @property
    def named(self) -> tuple[Point, ...]:
        return (self.of,)

    @property
    def min_points(self) -> int:
        return self.plateau.num_points if self.plateau else 4

    @property
    def text(self) -> str:
        if self.exponent:
            return f"exponent of {self.against} {_range_text(*self.exponent)}"
        assert self.plateau
        return f"the last {self.min_points} or more of {self.against} gain at most {self.plateau.gain:.0%}"


@dataclass(frozen=True, config=NO_UNKNOWN_FIELDS)
class Value:
    of: Point
    value: Positive
    tolerance: Positive

    @property
    def named(self) -> tuple[Point, ...]:
        return (self.of,)

    @property
    def text(self) -> str:
        return f"{self.value:.4g} within {self.tolerance:.0%}"


Expected = Order | Ratio | Shape | Value
CLAIM_KINDS: dict[str, Any] = {"order": Order, "ratio": Ratio, "shape": Shape, "value": Value}


@dataclass(frozen=True, config=NO_UNKNOWN_FIELDS)
class Claim:
    id: Annotated[
        str, expect("small letters, digits, dots and dashes such as size-order", IDENTIFIER.fullmatch)
    ]
    text: Text
    source: Text  # the figure, table or page of the paper
    case: Annotated[int, one_of_those(case.numbers)]
    metric: Annotated[str, one_of(METRICS)]
    machines: Annotated[tuple[Annotated[str, one_of(MACHINE_KINDS)], ...], expect("one machine or more", len)]
    expected: Expected
    xfail: Text = ""  # the known reason why the claim does not hold here; empty: it should hold

    @model_validator(mode="after")
    def _has_its_machine(self) -> Claim:
        if isinstance(self.expected, Value) and self.machines != (PAPER_MACHINE,):
            raise ValueError(
                f"machines: expected [{PAPER_MACHINE}], the only machine whose values are judged, got others"
            )
        return self

    @property
    def command(self) -> str:
        """Return the command that would test the claim. If the claim is only about the paper's machine, the command has
        that machine's sizes."""
        if self.machines == (PAPER_MACHINE,):
            return f"./run.sh case {self.case} --profile paper --machine {PAPER_MACHINE}"
        return f"./run.sh case {self.case} --profile {'demo' if 'any' in self.machines else 'quick'}"


# fields that claims of every kind have
COMMON_FIELDS = {field.name for field in dataclasses.fields(Claim)} - {"expected"}


def load_claims(*places: Path) -> list[Claim]:
    """Return the claims of these files and folders. Without arguments, return the added claims or, if none were added,
    this project's. Raises ValueError with one line of text for an invalid file."""
    claims: dict[str, Claim] = {}
    for place in places or REGISTRY.added_paths or [FOLDER]:
        for path, claim in _claims_of_place(place):
            if claim.id in claims:
                raise ValueError(f"{path.parent}: claim {claim.id}: the id is taken; try another")
            claims[claim.id] = claim
    return list(claims.values())


def _claims_of_place(place: Path) -> Iterator[tuple[Path, Claim]]:
    paths = sorted(place.glob("*.yaml")) if place.is_dir() else [place]
    if not paths:
        raise ValueError(f"{place} holds no claims: expected *.yaml files as in {FOLDER.name}/")
    for path in paths:
        yield from ((path, claim) for claim in _load_file(path))


def _load_file(path: Path) -> list[Claim]:
    try:
        data = read_yaml(path, as_text=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a file of claims: {' '.join(str(error).split())}") from error
    if not (isinstance(data, dict) and set(data) == {"claims"} and isinstance(data["claims"], list)):
        raise ValueError(f"{path} is not a file of claims: expected one key, claims, with a list")
    entries = enumerate(data["claims"], start=1)
    return [_checked_claim(path, number, claim_fields) for number, claim_fields in entries]


def _checked_claim(path: Path, number: int, claim_fields: Any) -> Claim:
    claim_name = str(number)
    try:
        if not isinstance(claim_fields, dict):
            raise ValueError(f"expected a mapping of fields, got {claim_fields!r:.80}")
        if IDENTIFIER.fullmatch(str(claim_fields.get("id"))):
            claim_name = claim_fields["id"]
        kind = claim_fields.get("kind")
        common = {key: claim_fields[key] for key in COMMON_FIELDS & set(claim_fields)}
        if not isinstance(kind, str) or kind not in CLAIM_KINDS:
            raise ValueError(f"kind: expected one of {', '.join(CLAIM_KINDS)}, got {kind!r:.80}")
        own_fields = {
            key: value for key, value in claim_fields.items() if key not in COMMON_FIELDS | {"kind"}
        }
        known_names = [field.name for field in dataclasses.fields(CLAIM_KINDS[kind])]
        unknown_names = own_fields.keys() - set(known_names)
        if unknown_names:
            raise ValueError(f"{min(unknown_names)!r}: expected one of the fields {', '.join(known_names)}")
        return checked(Claim, common | {"expected": checked(CLAIM_KINDS[kind], own_fields)})
    except ValueError as error:
        raise ValueError(f"{path}: claim {claim_name}: {' '.join(str(error).split())}") from error


def _range_text(least: float, most: float) -> str:
    if math.isinf(most):
        return f">= {least:.3g}"
    return f"<= {most:.3g}" if least == 0 else f"from {least:.3g} to {most:.3g}"
