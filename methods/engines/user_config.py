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
from harness.base.json_object import JsonObject
from harness.base.registry import did_you_mean

AUTO = "auto"  # Hugging Face's word for a value that the caller gives
# Stands for an option that the user did not give: the method's plan takes its value from the configuration or, without
# one, the default. None cannot stand for it, because some options may be None.
UNSAID: Any = AUTO
MOST_CHARACTERS = 80  # most characters of a value in a message


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
Options = dict[str, Any]  # values of a method's options, by name
Table = dict[str, Rule]  # rules by the entry's path, such as zero_optimization.stage


class UserConfig(NamedTuple):
    """The data of a configuration, and the name of its file for messages."""

    data: JsonObject
    source: str
    folder: Path  # paths in the configuration begin here


def read_config(config: str) -> UserConfig:
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
        raise ValueError(
            f"{source}: expected a configuration of DeepSpeed or accelerate, got {message_text(data)}"
        )
    return UserConfig(data, source, Path() if is_text else path.resolve().parent)


def honored_entries(config: UserConfig, table: Table, known_values: dict[str, KnownValue]) -> JsonObject:
    """Return those entries of the configuration that the engine gets. Raises ValueError, one line with a way out, for
    an entry that says otherwise than the workload, that cannot be honored, or that is not known."""
    for path, expected in known_values.items():
        _refuse_contradiction(config, path, expected)
    return _honored(config, config.data, "", table, known_values)


def settled_options(method: Any, defaults: Options, configured_options: Options) -> Options:
    """Return the options named in `defaults`: as the configuration says, else as given, else by default. Raises
    ValueError if an option was given, even with its default, and the configuration says otherwise."""
    options = {name: value for name in defaults if (value := getattr(method, name)) != UNSAID}
    for name, value in configured_options.items():
        if options.get(name, value) != value:
            message = f"expected {value}, as the configuration says, got {options[name]}"
            raise ValueError(f"option {name}: {message}; leave {name} out")
    return defaults | options | configured_options


def fill_in(method: Any, defaults: Options) -> None:
    """Give the options of a method without a configuration, where they are UNSAID, their defaults."""
    for name, value in settled_options(method, defaults, {}).items():
        object.__setattr__(method, name, value)  # a method is frozen once it is made


def config_text(data: JsonObject) -> str:
    """Return the entries as JSON; equal entries give equal texts."""
    return json.dumps(_with_whole_numbers(data), sort_keys=True, separators=(",", ":"))


def message_text(value: Any) -> str:
    """Return a value as a message shows it."""
    text = json.dumps(value, default=str, skipkeys=True)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def value_at(data: Any, path: str) -> Any:
    """Return the value at a path such as zero_optimization.stage; None if there is none."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _refuse_contradiction(config: UserConfig, path: str, known: KnownValue) -> None:
    got = value_at(config.data, path)
    if got is None or got == AUTO or _is_equal(got, known.value):
        return
    expected = f"expected {path} {message_text(known.value)}, as {known.said_by} says"
    raise ValueError(f"{config.source}: {expected}, got {message_text(got)}; try {known.way_out(got)}")


def _honored(
    config: UserConfig, data: JsonObject, above: str, table: Table, known_values: dict[str, KnownValue]
) -> JsonObject:
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
                    f"{config.source}: expected {path} as a section of entries, got {message_text(value)}"
                )
            if section := _honored(config, value or {}, f"{path}.", table, known_values):
                honored[name] = section
        else:
            siblings = {name.split(".")[0] for name in _below(above, (*table, *known_values))}
            hint = did_you_mean(str(name), siblings).strip()
            message = f"{config.source}: expected entries of known names, got {message_text(path)}"
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
            raise ValueError(
                f"{config.source}: expected {path} switched off, got {message_text(value)}: {rule.why}"
            )
        return False
    if isinstance(rule, Only):
        if not any(_is_equal(value, allowed) for allowed in rule.values):
            expected = " or ".join(message_text(allowed) for allowed in rule.values) or "left out"
            raise ValueError(
                f"{config.source}: expected {path} {expected}, got {message_text(value)}: {rule.why}"
            )
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
        raise ValueError(f"{config.source}: expected {path} as {kinds}, got {message_text(value)}")
    return True


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return not value.get("enabled", any(value.values()))
    return not value


def _is_equal(value: Any, other: Any) -> bool:
    """True if both values are equal; true and 1 are not."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def _with_whole_numbers(value: Any) -> Any:
    """Return a value in which whole numbers are integers: 2e8 and 200000000 are the same configuration."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(element) for element in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
