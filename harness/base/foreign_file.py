"""Reads files from untrusted sources. Limits protect this process: a file must be a regular file of limited size, and
its data must have limited nesting and limited numbers."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_BYTES = 256 * 2**20
MOST_DEPTH = 40
MOST_PARTS = 100_000  # most values in a YAML file; a value counts again at each use of an alias for it
TOO_MUCH_YAML = f"expected YAML of at most {MOST_DEPTH} nested levels and {MOST_PARTS} values, got more"
MOST_DIGITS = 19  # most digits of an integer, so that it fits 64 bits
# start of JSON's escape of a surrogate, which is half of a character
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_text(path: Path) -> str:
    return read_bytes(path).decode(errors="replace")


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError if `path` is anything else, such as a symbolic link or a pipe,
    or if the file has more than MOST_BYTES bytes. If `path` is a pipe, this function does not wait for its writer."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_regular(path, "a symbolic link") from error
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path, "another kind")
        if status.st_size > MOST_BYTES:
            text = f"expected at most {MOST_BYTES} bytes, got {status.st_size}"
            raise OSError(errno.EFBIG, text, str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def _not_regular(path: Path, kind: str) -> OSError:
    return OSError(errno.EINVAL, f"expected a regular file, got {kind}", str(path))


def read_json(path: Path) -> Any:
    """Return the data of a JSON file. Raises OSError as read_bytes() does, and ValueError as parsed_json() does."""
    return parsed_json(read_text(path))


def parsed_json(text: str) -> Any:
    """Return the data of a JSON text. Raises ValueError if the text is not JSON or is null, if its data are nested more
    than MOST_DEPTH levels deep, or if a number is not finite or an integer has more than MOST_DIGITS digits. Surrogates
    in texts become escapes."""
    try:
        data = json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_no_number)
    except RecursionError:
        data = None
    if data is None or not _is_limited(data):
        raise ValueError(f"expected JSON of at most {MOST_DEPTH} nested levels, got more levels, or null")
    return writable(data) if SURROGATE.search(text) else data


def writable(value: Any) -> Any:
    """Return a JSON value in which surrogate characters are replaced by escapes, because no UTF-8 file can hold
    surrogates."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {writable(key): writable(item) for key, item in value.items()}
    return [writable(item) for item in value] if isinstance(value, list) else value


def read_yaml(path: Path, as_text: bool = False) -> Any:
    """Return the data of a YAML file. Raises OSError as read_bytes() does, and ValueError for invalid YAML, nesting
    that is too deep, and more than MOST_PARTS values, because a short file may repeat a value many times by aliases.
    `as_text`: True keeps numbers, dates and truth values as text."""
    return copy.deepcopy(_parsed_yaml(read_text(path), as_text))


@functools.lru_cache(maxsize=32)  # a report reads the same files of machines and models many times
def _parsed_yaml(text: str, as_text: bool) -> Any:
    import yaml

    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
        data = yaml.load(text, Loader=yaml.BaseLoader if as_text else yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        # impossible dates or numbers
        raise ValueError(" ".join(str(error).split())) from error
    if not _is_limited(data, MOST_PARTS):
        raise ValueError(TOO_MUCH_YAML)
    return data


def _check_events(events: Iterable[Any]) -> None:
    """Raise ValueError if a YAML document, which is not built yet, has too many levels or nodes. An alias counts as
    often as the nodes that it stands for: a merge (`<<`) copies them."""
    import yaml

    sizes: dict[str, int] = {}  # number of nodes by anchor; without anchors that are still open
    # anchor and number of nodes of each collection that is not complete
    open_nodes: list[list[Any]] = [["", 0]]
    for event in events:
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([anchor, 1])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, size = None, sizes.get(event.anchor, 2 * MOST_PARTS + 1)
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if not isinstance(event, yaml.CollectionStartEvent):
            open_nodes[-1][1] += size
            if anchor:
                sizes[anchor] = size
        # of a mapping both keys and values are nodes
        if open_nodes[-1][1] > 2 * MOST_PARTS or len(open_nodes) > MOST_DEPTH + 1:
            raise ValueError(TOO_MUCH_YAML)


def _is_limited(data: Any, most_parts: float = math.inf) -> bool:
    level, num_parts = [data], 0
    for _ in range(MOST_DEPTH + 1):
        items = (item for part in level for item in _parts(part))
        level = list(items) if most_parts == math.inf else list(itertools.islice(items, int(most_parts) + 1))
        num_parts += len(level)
        if not level or num_parts > most_parts:
            break
    return not level and num_parts <= most_parts


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"expected integers of at most {MOST_DIGITS} digits, got one of {len(digits)}")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


def _no_number(word: str) -> float:
    raise ValueError(f"expected finite numbers, got {word:.40}")
