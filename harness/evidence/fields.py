"""Text of a file, parsed field by field; a ValueError says what is allowed, in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any


def take(
    given: dict[str, Any],
    required: dict[str, Callable],
    one_of: dict[str, Callable] | None = None,
    optional: dict[str, Callable] | None = None,
) -> dict[str, Any]:
    """Each field parsed; all that are required, one of those that exclude each other, no other."""
    one_of, optional = one_of or {}, optional or {}
    known = {**required, **one_of, **optional}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{short(unknown[0])} is no field here: it takes {', '.join(known)}")
    missing = [key for key in required if key not in given]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    if one_of and len(set(given) & set(one_of)) != 1:
        raise ValueError(f"it takes one of {', '.join(one_of)}")
    return {key: within_key(key, known[key], value) for key, value in given.items()}


def within_key(key: str, parse: Callable, value: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def choose(what: str, value: Any, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"no {what} {short(value)}: choose one of {', '.join(choices)}")
    return value


def identifier(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,60}", value):
        raise ValueError(f"id: {short(value)} is none: small letters, digits, dots and dashes, as size-order")
    return value


def sentence(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{short(value)} is no text")
    return " ".join(value.split())


def count(value: Any, or_else: str = "") -> int:
    if not isinstance(value, str) or not re.fullmatch(r"[1-9][0-9]{0,8}", value):
        raise ValueError(f"{short(value)} is no whole number from 1 on{or_else}")
    return int(value)


def from_two(value: Any) -> int:
    if count(value) < 2:
        raise ValueError("2 or more")
    return int(value)


def number(value: Any) -> float:
    try:
        found = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{short(value)} is no number")
    return found


def positive(value: Any) -> float:
    if number(value) <= 0:
        raise ValueError(f"{short(value)} is not positive")
    return number(value)


def pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2 or not number(value[0]) < number(value[1]):
        raise ValueError(f"{short(value)} is no range: [low, high]")
    return number(value[0]), number(value[1])


def positive_pair(value: Any) -> tuple[float, float]:
    low, high = pair(value)
    if low <= 0:
        raise ValueError(f"{short(value)} is no range of positive numbers: [low, high]")
    return low, high


def some(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{short(value)} is no list of one or more")
    return value


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{short(value)} is no mapping of fields")
    return dict(value)


def short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
