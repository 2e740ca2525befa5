"""Fuzzing: how many examples, and values that nobody expects. FUZZ=3000 asks for more, as bench/fuzz.sh does."""

from __future__ import annotations

import copy
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

fuzzed = settings(
    max_examples=int(os.environ.get("FUZZ", "300")),
    suppress_health_check=list(HealthCheck),
    database=None,
)
TEXTS = [
    "",
    " ",
    "0",
    "1",
    "-1",
    "2",
    "16",
    "1.5",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "9" * 400,
    "9" * 5000,
    "true",
    "none",
    "l2l",
    "resident",
    "stronghold",
    "all",
    "cpu",
    "sim",
    "cuda",
    "fp16",
    "exact",
    "ok",
    "=",
    "a=b",
    "=1+1",
    "[/dev/shm]",
    "\x1b[2J",
    "\u202e",
    "\n",
    "a\nb",
    "\0",
    "\udcff",
    "12MiB",
    "0GiB",
    "2:8:2",
    "8:2",
    "1,2",
    "..",
    "/",
    "/dev/null",
    "~",
    "${HOME}",
    "%s%n",
    "{0}",
    "'",
    '"',
    "<script>",
    "x" * 300,
]
texts = st.sampled_from(TEXTS) | st.text(max_size=6)
numbers = st.sampled_from(
    [0, 1, -1, 2, 7, 10**6, 10**9, 2**63, -(2**63), 10**18, 0.5, -0.0, 1e-320, 1e308, 1e16]
)
VALUES = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a value of JSON."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in pairs for found in ((value, key), *places(inner))]


@st.composite
def changed(draw: st.DrawFn, whole: Any, most: int = 3) -> Any:
    """A value of JSON with some of its parts replaced, exchanged or left out, at any depth."""
    made = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, most))):
        if not (there := places(made)):
            break
        (container, key), (other, another) = draw(st.sampled_from(there)), draw(st.sampled_from(there))
        kind = draw(st.sampled_from(["replace", "replace", "leave out", "exchange"]))
        if kind == "replace":
            container[key] = draw(VALUES)
        elif kind == "leave out":
            del container[key]
        else:
            container[key] = copy.deepcopy(other[another])
    return made


@st.composite
def broken(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes, some of them cut, doubled, left out or replaced."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 40)))
        piece = draw(
            st.just(data[stop : stop + 30]) | st.binary(max_size=8) | texts.map(lambda text: _bytes(text))
        )
        data = draw(
            st.sampled_from([data[:start], data[:start] + piece + data[stop:], data[:start] + piece + data])
        )
    return data


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape" if "\udcff" in text else "replace")
