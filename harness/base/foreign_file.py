"""Reads files from untrusted sources. Limits protect this process: a file must be a regular file of limited size, and
its data must have limited nesting and limited numbers.

An archive is read into memory; nothing is unpacked onto the disk. The archive may hold only regular files, of limited
number and size, and a manifest must list each file with its hash. checked() converts data to a type: a dataclass, a
TypedDict or any other type that pydantic knows. pydantic is imported only when the first data is checked, so that the
command line starts sooner.
"""

from __future__ import annotations

import copy
import errno
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST_BYTES = 256 * 2**20
MOST_DEPTH = 40
MOST_YAML_VALUES = 100_000  # most values in a YAML file; a value counts again at each use of an alias for it
TOO_MUCH_YAML = f"expected YAML of at most {MOST_DEPTH} nested levels and {MOST_YAML_VALUES} values, got more"
MOST_DIGITS = 19  # most digits of an integer, so that it fits 64 bits
# start of JSON's escape of a surrogate, which is half of a character
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Limits of an archive: the names that a manifest can list, and the most bytes and files.
LISTABLE_NAME = re.compile(r"[\w .,+=@~-]+")
MOST_UNPACKED = 4 * MOST_BYTES
MOST_FILES = 20_000
MOST_MEMBER_BYTES = MOST_BYTES
T = TypeVar("T")
# Values that a dataclass or TypedDict may set as its `__pydantic_config__`.
NO_OTHER_FIELDS = {"extra": "forbid"}  # an unknown field is an error
OTHER_FIELDS = {"extra": "allow"}  # unknown fields are allowed
# Pattern of pydantic's error messages; the group `what` matches the description of the expected value.
SHOULD_PATTERN = re.compile(
    r"\w+ should (?:be|have) (?P<what>.+?)(?:, unable to .*| or an instance of .*| after validation, .*)?"
)


def read_text(path: Path) -> str:
    return read_bytes(path).decode(errors="replace")


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError if `path` is anything else, such as a symbolic link or a pipe,
    or if the file has more than MOST_BYTES bytes. If `path` is a pipe, this function does not wait for its writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_regular(path, "a symbolic link") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path, "another kind")
        if status.st_size > MOST_BYTES:
            text = f"expected at most {MOST_BYTES} bytes, got {status.st_size}"
            raise OSError(errno.EFBIG, text, str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


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
        data = json.loads(
            text, parse_int=_parse_integer, parse_float=_parse_number, parse_constant=_refuse_number
        )
    except RecursionError:
        data = None
    if data is None or not _is_limited(data):
        raise ValueError(f"expected JSON of at most {MOST_DEPTH} nested levels, got more levels, or null")
    return escape_surrogates(data) if SURROGATE.search(text) else data


def escape_surrogates(value: Any) -> Any:
    """Return a JSON value in which surrogate characters are replaced by escapes, because no UTF-8 file can hold
    surrogates."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {escape_surrogates(key): escape_surrogates(entry) for key, entry in value.items()}
    return [escape_surrogates(entry) for entry in value] if isinstance(value, list) else value


def read_yaml(path: Path, as_text: bool = False) -> Any:
    """Return the data of a YAML file. Raises OSError as read_bytes() does, and ValueError for invalid YAML, nesting
    that is too deep, and more than MOST_YAML_VALUES values, because a short file may repeat a value many times by
    aliases. `as_text`: True keeps numbers, dates and truth values as text."""
    return copy.deepcopy(_parse_yaml(read_text(path), as_text))


@functools.lru_cache(maxsize=32)  # a report reads the same files of machines and models many times
def _parse_yaml(text: str, as_text: bool) -> Any:
    import yaml

    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader))
        data = yaml.load(text, Loader=yaml.BaseLoader if as_text else yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        # impossible dates or numbers
        raise ValueError(" ".join(str(error).split())) from error
    if not _is_limited(data, MOST_YAML_VALUES):
        raise ValueError(TOO_MUCH_YAML)
    return data


def _check_events(events: Iterable[Any]) -> None:
    """Raise ValueError if a YAML document, which is not built yet, has too many levels or nodes. An alias counts as
    often as the nodes that it stands for: a merge (`<<`) copies them."""
    import yaml

    nodes_by_anchor: dict[str, int] = {}  # number of nodes by anchor; without anchors that are still open
    # anchor and number of nodes of each collection that is not complete
    open_nodes: list[list[Any]] = [["", 0]]
    for event in events:
        anchor, num_nodes = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([anchor, 1])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, num_nodes = open_nodes.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, num_nodes = None, nodes_by_anchor.get(event.anchor, 2 * MOST_YAML_VALUES + 1)
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if not isinstance(event, yaml.CollectionStartEvent):
            open_nodes[-1][1] += num_nodes
            if anchor:
                nodes_by_anchor[anchor] = num_nodes
        # of a mapping both keys and values are nodes
        if open_nodes[-1][1] > 2 * MOST_YAML_VALUES or len(open_nodes) > MOST_DEPTH + 1:
            raise ValueError(TOO_MUCH_YAML)


def _is_limited(data: Any, most_values: float = math.inf) -> bool:
    values, num_values = [data], 0
    for _ in range(MOST_DEPTH + 1):
        children = (child for value in values for child in _child_values(value))
        values = list(
            children if most_values == math.inf else itertools.islice(children, int(most_values) + 1)
        )
        num_values += len(values)
        if not values or num_values > most_values:
            break
    return not values and num_values <= most_values


def _child_values(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _parse_integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"expected integers of at most {MOST_DIGITS} digits, got one of {len(digits)}")
    return int(digits)


def _parse_number(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse_number(digits)


def _refuse_number(word: str) -> float:
    raise ValueError(f"expected finite numbers, got {word:.40}")


def read_archive(path: Path, folder: str, manifest: str, endings: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the files in a gzipped tar archive, by their paths below `folder`, its only top folder.
    The manifest is left out.

    Raises ValueError, one line, unless the archive is whole, every file's name ends as `endings` say or in .sha256, and
    the file `manifest` lists exactly the other files with their SHA-256 hashes.
    """
    try:
        files = _read_members(path, folder, endings)
    except (OSError, EOFError, zlib.error, tarfile.TarError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: expected a whole archive written by ./run.sh bundle: {reason}") from error
    if manifest not in files:
        raise ValueError(
            f"{path}: expected an archive written by ./run.sh bundle, got one without {folder}/{manifest}"
        )
    manifest_lines = files.pop(manifest).decode(errors="replace").splitlines()
    hash_lines = {hashlib.sha256(data).hexdigest() + f"  {name}" for name, data in files.items()}
    if differing_lines := sorted(hash_lines.symmetric_difference(manifest_lines)):
        name = differing_lines[0].partition("  ")[2]
        raise ValueError(
            f"{path}: expected the files that {manifest} lists, got others: {name!r:.200}; ask the sender for the"
            " archive again"
        )
    return files


def _read_members(path: Path, folder: str, endings: Collection[str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    unpacked = _Limited(gzip.GzipFile(fileobj=io.BytesIO(read_bytes(path))))
    with tarfile.open(fileobj=unpacked, mode="r|") as tar:  # type: ignore[call-overload]
        for number, member in enumerate(tar, start=1):
            top, _, name = member.name.partition("/")
            if number > MOST_FILES:
                raise ValueError(f"{path}: expected at most {MOST_FILES} files, got more")
            if member.isdir() and not member.issparse() and _is_inside(member.name):
                continue
            if not member.isreg() or member.issparse():
                raise ValueError(f"{path}: expected regular files, got another kind at {member.name!r:.200}")
            if top != folder or not _is_inside(name) or name in files:
                raise ValueError(
                    f"{path}: expected each file once and inside {folder}/, got {member.name!r:.200}"
                )
            if not name.endswith((*endings, ".sha256")):
                kinds = " ".join(endings)
                raise ValueError(f"{path}: expected only data files ({kinds}), got {member.name!r:.200}")
            if member.size > MOST_MEMBER_BYTES:
                raise ValueError(
                    f"{path}: expected files of at most {MOST_MEMBER_BYTES} bytes, got {member.size}"
                )
            content = tar.extractfile(member)
            assert content is not None
            files[name] = content.read()
            if len(files[name]) != member.size:
                raise EOFError(f"{name} is cut short")
    return files


def _is_inside(name: str) -> bool:
    return all(LISTABLE_NAME.fullmatch(part) and part not in (".", "..") for part in name.split("/"))


class _Limited:
    """A stream that raises ValueError once more than MOST_UNPACKED bytes have been read from it. These bytes include
    the archive's headers."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.bytes_left = stream, MOST_UNPACKED

    def read(self, num_bytes: int) -> bytes:
        data = bytes(self.stream.read(num_bytes))
        self.bytes_left -= len(data)
        if self.bytes_left < 0:
            raise ValueError(f"expected an archive of at most {MOST_UNPACKED} bytes when unpacked, got more")
        return data


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
    field_path = ".".join(map(str, detail["loc"]))
    kind, text = detail["type"], detail["msg"]
    if kind == "missing":
        return f"{field_path} is missing"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown field {field_path}"
    if kind in ("value_error", "assertion_error"):
        return f"{field_path}: {detail['ctx']['error']}" if field_path else str(detail["ctx"]["error"])
    should = SHOULD_PATTERN.fullmatch(text)
    expected = f"expected {should['what']}" if should else text
    return f"{field_path}: {expected}, got {detail['input']!r:.80}".removeprefix(": ")


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
