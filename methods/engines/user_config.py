"""Reads a user's own configuration of an engine, and checks each entry by a table.

No entry is ignored in silence: a table says of each whether the engine gets it, the workload gives it, it changes no
training, or the adapter cannot honor it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.foreign_file import parsed_json, read_text, read_yaml
from harness.base.registry import did_you_mean

AUTO = "auto"  # Hugging Face's word for a value that the caller gives
# value of a method's option until its plan takes it from the configuration; None is a value, too
UNSAID: Any = AUTO
LONGEST = 80  # most characters of a value in a message


class Honored(NamedTuple):
    """The engine gets this entry."""

    kinds: tuple[type, ...]  # types of its value
    takes_auto: bool = False  # True: the adapter fills in `auto`


class Only(NamedTuple):
    """An entry that may have these values only. They change nothing, so the engine does not get them."""

    values: tuple[Any, ...]
    why: str  # why no other value is honored, and what to try


class Dropped(NamedTuple):
    """An entry that the engine does not get, because it changes no training."""

    why: str


class Off(NamedTuple):
    """A feature that must be switched off: a section without a value, or whose `enabled` is false."""

    why: str


class KnownValue(NamedTuple):
    """A value that the workload gives. The configuration may say the same, `auto` or nothing."""

    value: Any
    said_by: str  # what says the value, such as --micro-batches
    way_out: Callable[[Any], str]  # the option that asks for the configuration's value


Rule = Honored | Only | Dropped | Off
Table = dict[str, Rule]  # rules by the entry's path, such as zero_optimization.stage


class UserConfig(NamedTuple):
    """The data of a configuration, and the name of its file for messages."""

    data: dict[str, Any]
    source: str
    folder: Path  # paths in the configuration begin here


def read(config: str) -> UserConfig:
    """Read the configuration in the file `config`, JSON or YAML; a `config` that begins with { is JSON itself. Raises
    ValueError if the file cannot be read, such as a link, or is no configuration."""
    is_text = config.lstrip().startswith("{")
    path = Path(config)
    source = "config" if is_text else path.name
    try:
        text = config if is_text else read_text(path)
        is_json = text.lstrip().startswith("{")
        data = parsed_json(text) if is_json else read_yaml(path)
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(
            f"option config: cannot read {config if not is_text else 'the text'}: {message}"
        ) from error
    if not isinstance(data, dict):
        raise ValueError(f"{source}: expected a configuration of DeepSpeed or accelerate, got {shown(data)}")
    return UserConfig(data, source, Path() if is_text else path.resolve().parent)


def checked(config: UserConfig, table: Table, known_values: dict[str, KnownValue]) -> dict[str, Any]:
    """Return those entries of the configuration that the engine gets. Raises ValueError, one line with a way out, for
    an entry that says otherwise than the workload, that cannot be honored, or that is not known."""
    for path, expected in known_values.items():
        _compare(config, path, expected)
    return _honored(config, config.data, "", table, known_values)


def settled(method: Any, defaults: dict[str, Any], says: dict[str, Any]) -> dict[str, Any]:
    """Return the options named in `defaults`: as the configuration says, else as given, else by default. Raises
    ValueError if an option was given, even with its default, and the configuration says otherwise."""
    options = {name: value for name in defaults if (value := getattr(method, name)) != UNSAID}
    for name, value in says.items():
        if options.get(name, value) != value:
            message = f"expected {value}, as the configuration says, got {options[name]}"
            raise ValueError(f"option {name}: {message}; leave {name} out")
    return defaults | options | says


def fill_in(method: Any, defaults: dict[str, Any]) -> None:
    """Give the options of a method without a configuration, where they are UNSAID, their defaults."""
    for name, value in settled(method, defaults, {}).items():
        object.__setattr__(method, name, value)  # a method is frozen once it is made


def text_of(data: dict[str, Any]) -> str:
    """Return the entries as JSON; equal entries give equal texts."""
    return json.dumps(_plain(data), sort_keys=True, separators=(",", ":"))


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    text = json.dumps(value, default=str, skipkeys=True)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def value_at(data: Any, path: str) -> Any:
    """Return the value at a path such as zero_optimization.stage; None if there is none."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _compare(config: UserConfig, path: str, known: KnownValue) -> None:
    got = value_at(config.data, path)
    if got is None or got == AUTO or _is_same(got, known.value):
        return
    expected = f"expected {path} {shown(known.value)}, as {known.said_by} says"
    raise ValueError(f"{config.source}: {expected}, got {shown(got)}; try {known.way_out(got)}")


def _honored(
    config: UserConfig, data: dict[str, Any], above: str, table: Table, known_values: dict[str, KnownValue]
) -> dict[str, Any]:
    """Return the entries of the section `data` that the engine gets. `above`: the section's path, with a dot."""
    honored = {}
    for name, value in data.items():
        path, is_section = f"{above}{name}", isinstance(value, dict)
        if path in known_values:
            continue
        if (rule := table.get(path)) is not None:
            if _is_kept(config, path, value, rule):
                honored[name] = value
        elif any(known.startswith(f"{path}.") for known in (*table, *known_values)):
            if value is not None and not is_section:
                raise ValueError(
                    f"{config.source}: expected {path} as a section of entries, got {shown(value)}"
                )
            if section := _honored(config, value or {}, f"{path}.", table, known_values):
                honored[name] = section
        else:
            siblings = {name.split(".")[0] for name in _below(above, (*table, *known_values))}
            hint = did_you_mean(str(name), siblings).strip()
            message = f"{config.source}: expected entries of known names, got {shown(path)}"
            raise ValueError(f"{message}; {hint or 'correct the name, or leave it out'}")
    return honored


def _below(above: str, paths: tuple[str, ...]) -> Iterator[str]:
    return (path.removeprefix(above) for path in paths if path.startswith(above))


def _is_kept(config: UserConfig, path: str, value: Any, rule: Rule) -> bool:
    """Return whether the engine gets an entry. Raises ValueError if the rule does not allow its value."""
    if isinstance(rule, Dropped) or (value in (None, AUTO) and not isinstance(rule, Honored)):
        return False
    if isinstance(rule, Off):
        if not _is_off(value):
            raise ValueError(f"{config.source}: expected {path} switched off, got {shown(value)}: {rule.why}")
        return False
    if isinstance(rule, Only):
        if not any(_is_same(value, allowed) for allowed in rule.values):
            expected = " or ".join(shown(allowed) for allowed in rule.values) or "left out"
            raise ValueError(f"{config.source}: expected {path} {expected}, got {shown(value)}: {rule.why}")
        return False
    if value is None:
        return False
    if value == AUTO:
        if not rule.takes_auto:
            message = f'expected {path} as a value, because nothing fills it in, got "{AUTO}"'
            raise ValueError(f"{config.source}: {message}; try a value, or leave it out")
        return True
    if not isinstance(value, rule.kinds) or (isinstance(value, bool) and bool not in rule.kinds):
        kinds = " or ".join(kind.__name__ for kind in rule.kinds)
        raise ValueError(f"{config.source}: expected {path} as {kinds}, got {shown(value)}")
    return True


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return not value.get("enabled", any(value.values()))
    return not value


def _is_same(one: Any, other: Any) -> bool:
    """True if both values are equal; true and 1 are not."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def _plain(value: Any) -> Any:
    """Return a value in which whole numbers are integers: 2e8 and 200000000 are the same configuration."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
