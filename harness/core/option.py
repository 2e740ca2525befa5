"""Options as fields: a field of a dataclass declares how the command line spells it, opt(16, "--heads", "its help").

Workload, Budget, Job and every method declare their options so. The command line, the calls that repeat a job and the
tables of records walk these declarations, so a new option is declared once, at its field."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from harness.base.json_object import JsonObject

Options = dict[str, Any]  # values of a method's options, by field: numbers, texts or None
OPTION = "option"  # key of a field's metadata that holds its Option
# Metadata of a field that a workload's JSON leaves out if it has its default. A field that is added later needs it, so
# that jobs from before it existed keep their keys.
UNSAID = {"is_unsaid": True}


@dataclass(frozen=True)
class Option:
    """How the command line spells a field."""

    flags: tuple[str, ...]  # the spellings; the first is the one that messages and printed calls use
    help: str
    metavar: str | None = None  # name of the value in the help; None: the name of its type
    is_list: bool = False  # True: takes several numbers, and a call makes a job for each
    is_repeated: bool = False  # True: may be given several times; the value is a tuple of texts
    # For an option of a method. is_short: a short printed call spells it by its flag, not by --option NAME=VALUE.
    # is_for_all: methods that do not have it ignore it; otherwise one of the methods of the call must have it.
    is_short: bool = False
    is_for_all: bool = False

    @property
    def flag(self) -> str:
        return self.flags[0]


def opt(default: Any, *flags_and_help: str, is_unsaid: bool = False, **settings: Any) -> Any:
    """Declare a field with an option: opt(default, "--flag", ..., "help", metavar=...), with further fields of Option
    as settings."""
    *flags, text = flags_and_help
    return with_option(default, Option(tuple(flags), text, **settings), is_unsaid=is_unsaid)


def with_option(default: Any, option: Option, *, is_unsaid: bool = False) -> Any:
    """Declare a field with an option that several dataclasses share."""
    return dataclasses.field(default=default, metadata={OPTION: option, **(UNSAID if is_unsaid else {})})


def options_of(kind: Any) -> dict[str, Option]:
    """Return the options that a dataclass declares, by field."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[OPTION] for field in fields if OPTION in field.metadata}


def unsaid_of(kind: Any) -> JsonObject:
    """Return the defaults that the dataclass's JSON leaves out, by field."""
    return {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if UNSAID.items() <= field.metadata.items()
    }
