"""Checks that data read from a file has a given type: a dataclass, a TypedDict or any other type that pydantic knows.

pydantic is imported only when the first data is checked, so that the command line starts sooner.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")
# Values that a dataclass or TypedDict may set as its `__pydantic_config__`.
NO_OTHER_FIELDS = {"extra": "forbid"}  # an unknown field is an error
OTHER_FIELDS = {"extra": "allow"}  # unknown fields are allowed
# Pattern of pydantic's error messages; the group `what` matches the description of the expected value.
SHOULD = re.compile(
    r"\w+ should (?:be|have) (?P<what>.+?)(?:, unable to .*| or an instance of .*| after validation, .*)?"
)


def checked(kind: type[T], data: Any) -> T:
    """Return the data converted to the type `kind`. Raises ValueError with one line that names every wrong field."""
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(data)  # type: ignore[arg-type]
    except ValidationError as error:
        complaints = dict.fromkeys(_complaint(detail) for detail in error.errors(include_url=False))
        raise ValueError(" ".join("; ".join(complaints).split())) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        # raised by a constructor that computes with a value of another type, such as a text for a number
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"expected values that can be computed with, got {text:.200}") from error


def _complaint(detail: Any) -> str:
    """Return one of pydantic's errors as text, if possible in the form `field: expected X, got Y`."""
    where = ".".join(map(str, detail["loc"]))
    kind, text = detail["type"], detail["msg"]
    if kind == "missing":
        return f"{where} is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown field {where}"
    if kind in ("value_error", "assertion_error"):
        return f"{where}: {detail['ctx']['error']}" if where else str(detail["ctx"]["error"])
    should = SHOULD.fullmatch(text)
    expected = f"expected {should['what']}" if should else text
    return f"{where}: {expected}, got {detail['input']!r:.80}".removeprefix(": ")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
