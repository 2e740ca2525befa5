"""The options that choose the place of a call's jobs, and their values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cli.options import OptionValues, of_field, together
from harness.core.option import options_of
from harness.run import place
from harness.run.place import Place, PlaceCall

LOCAL = "local"  # value of --on for this process's machine

place_options = together(
    click.option(
        "--on",
        type=click.Choice([LOCAL, *place.REGISTRY.files()]),
        default=LOCAL,
        help="Place where jobs run.",
    ),
    *(
        of_field(cls.cli_options, name)
        for cls in place.loadable_places().values()
        for name in options_of(cls.cli_options)
    ),
    click.option(
        "--dry-run", is_flag=True, help=f"Only print the objects that --on {place.drafting()} would create."
    ),
)


@dataclass(frozen=True)
class PlaceChoice:
    """The place that --on names, and the values of the options of every place."""

    name: str = LOCAL
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # by place: its dataclass of options
    is_dry_run: bool = False

    @classmethod
    def of(cls, values: OptionValues) -> PlaceChoice:
        """Return the choice among the values of a verb's options; verbs without --on choose this process's machine."""
        if "on" not in values:
            return cls()
        options = {
            name: kind.cli_options(**{field: values[field] for field in options_of(kind.cli_options)})
            for name, kind in place.loadable_places().items()
        }
        return cls(values["on"], options, values["dry_run"])

    @property
    def is_local(self) -> bool:
        return self.name == LOCAL

    def asks_for_gpus(self) -> bool:
        return not self.is_local and place.load_place(self.name).asks_for_gpus(self.options[self.name])

    def place(self, device: str, folders: tuple[Path, ...]) -> Place | None:
        """Return the place for jobs on this device; None for this process's machine. Raises Unavailable if the place
        cannot be reached, ValueError for an option of another place."""
        for name, options in self.options.items():
            for field, option in options_of(options).items():
                if getattr(options, field) and name != self.name:
                    needs = f"{option.flag} needs --on {name}"
                    raise ValueError(f"{needs}: add --on {name}, or leave {option.flag} out")
        if self.is_local:
            return None
        call = PlaceCall(device, folders, self.is_dry_run)
        return place.load_place(self.name).of(self.options[self.name], call)

    def arguments(self) -> list[str]:
        """Return the arguments of a command line that make this choice; empty for this process's machine."""
        if self.is_local:
            return []
        arguments = ["--on", self.name]
        options = self.options[self.name]
        for field, option in options_of(options).items():
            field_value = getattr(options, field)
            for value in field_value if option.is_repeated else filter(None, [field_value]):
                arguments += [option.flag, str(value)]
        return arguments
