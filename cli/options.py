"""Types of option values for click, and the options that several verbs share. Each option is declared once."""

from __future__ import annotations

import functools
import importlib
import math
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from harness.base.checkout import ROOT
from harness.base.registry import Registry
from harness.core.job import Workload
from harness.core.option import options_of
from harness.devices import named_machines
from harness.gate.probe import ALL_LAYERS, LAYERS, MOST_STEPS, NONE, STEPS, Extent
from harness.models import named_models
from harness.plan.sized_model import gpt_of_size, parsed_amount

MODEL = "harness.model"  # key under which click's context.meta holds the value of --model
WITHOUT_OPTION = ("model", "config")  # fields of a Workload that only --model sets
MOST_NUMBERS = 10_000  # most values that a range in an option may have

OptionValues = dict[str, Any]  # the values of a verb's options, by the option's name
WorkloadFields = dict[str, Any]  # fields of a Workload, by name


class Named(click.Path):
    """Click type: a path. The empty word is refused, because as a path it would mean the working folder."""

    def convert(self, value: Any, param: Any, context: Any) -> Any:
        if not str(value):
            self.fail("expected a path, got nothing")
        return super().convert(value, param, context)


class Finite(click.FloatRange):
    def convert(self, value: Any, param: Any, context: Any) -> float:
        number = super().convert(value, param, context)
        return number if math.isfinite(number) else self.fail(f"expected a finite number, got {value}")


FOLDER = Named(path_type=Path, file_okay=False)
FILE = Named(path_type=Path, dir_okay=False)

results = click.option(
    "--results", type=FOLDER, default=ROOT / "results", help="Folder of records, logs and figures."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


def together(*options: Any) -> Any:
    """Combine several options into one decorator. --help shows the options in this order."""
    return lambda command: functools.reduce(
        lambda decorated, option: option(decorated), reversed(options), command
    )


class Layers(click.IntRange):
    """Click type: a number of layers, or the word `all`."""

    def __init__(self) -> None:
        super().__init__(1)

    def convert(self, value: Any, param: Any, context: Any) -> int:
        return ALL_LAYERS if value == "all" else super().convert(value, param, context)


probe_options = together(
    click.option("--no-probe", is_flag=True, help="Judge without the gate's probe; the verdict states this."),
    click.option(
        "--probe",
        type=click.Choice(["full"]),
        help="A probe with all sizes and layers of the run (default: as large as a tenth of the run's cost allows).",
    ),
    click.option(
        "--probe-layers", type=Layers(), metavar="N|all", help=f"Layers of the probe (default: {LAYERS})."
    ),
    click.option(
        "--probe-steps",
        type=click.IntRange(STEPS, MOST_STEPS),
        help=f"Number of steps of the probe (default: {STEPS}).",
    ),
)


def with_extent(command: Any) -> Any:
    """Give a command the values of the probe's options as one argument, `extent`: the probe's extent, NONE for
    --no-probe, or None if no option of the probe was given."""

    @functools.wraps(command)
    def call(
        *arguments: Any,
        no_probe: bool,
        probe: str | None,
        probe_layers: int | None,
        probe_steps: int | None,
        **options: Any,
    ) -> Any:
        return command(
            *arguments, **options, extent=_extent(no_probe, probe == "full", probe_layers, probe_steps)
        )

    return call


def probe(command: Any) -> Any:
    """Add the probe's options to a command that takes an `extent`."""
    return probe_options(with_extent(command))


def _extent(is_left_out: bool, is_full: bool, layers: int | None, steps: int | None) -> Extent | None:
    is_sized = bool(is_full or layers or steps)
    if is_left_out and is_sized:
        raise ValueError(
            "expected --no-probe, or --probe, --probe-layers and --probe-steps, got both; leave one out"
        )
    if is_left_out:
        return NONE
    most_layers = layers or (ALL_LAYERS if is_full else LAYERS)
    return Extent(most_layers, steps or STEPS, is_full) if is_sized else None


methods = click.option(
    "--methods", "methods_folder", type=FOLDER, multiple=True, is_eager=True, help="Add a folder of methods."
)


def _adds_to(module: str) -> Any:
    """Return a callback for an option, which adds the option's folders or files to the registry of `module` until the
    call ends."""

    def callback(context: click.Context, _: Any, places: tuple[Path, ...]) -> None:
        if places:
            registry: Registry = importlib.import_module(module).REGISTRY
            context.find_root().call_on_close(registry.forget)
            registry.add(places)

    return callback


machines = click.option(
    "--machines",
    type=FILE,
    multiple=True,
    is_eager=True,
    expose_value=False,
    metavar="FILE",
    callback=_adds_to("harness.devices.named_machines"),
    help="Add machines from a file written like machines.yaml.",
)
# Options for verbs that read results: records may name methods, cases, claims and machines that this project does not
# have.
added = together(
    click.option(
        "--methods",
        type=FOLDER,
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=_adds_to("harness.core.method"),
        help="Add a folder of methods.",
    ),
    click.option(
        "--cases",
        type=FOLDER,
        multiple=True,
        is_eager=True,
        expose_value=False,
        callback=_adds_to("papers.figures.case"),
        help="Add a folder of cases, which define figures.",
    ),
    click.option(
        "--claims",
        type=Named(path_type=Path),
        multiple=True,
        expose_value=False,
        callback=_adds_to("papers.claims.claims"),
        help="File or folder of claims; default: claims/ of this project.",
    ),
    machines,
)
machine_of_records = click.option(
    "--machine",
    metavar="NAME",
    help="Use only records of machines whose name contains NAME, such as v100-vm, the paper's machine.",
)


class Amount(click.ParamType):
    """Click type: a number with a decimal unit, such as 7B."""

    name = "N"

    def convert(self, value: Any, param: Any, context: Any) -> float:
        if (number := parsed_amount(str(value))) is None:
            self.fail(
                f"expected a positive number such as 7B, 350M or 1e9 in digits, got {value!r}", param, context
            )
        return number


class MachineName(click.ParamType):
    """Click type: the name of a machine in machines.yaml, in any usual spelling."""

    name = "NAME"

    def shell_complete(
        self, context: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(name) for name in named_machines.names() if name.startswith(incomplete)]

    def convert(self, value: Any, param: Any, context: Any) -> str:
        return named_machines.spelled(str(value))


def _take_model_names(context: click.Context, _: click.Parameter, text: str | None) -> list[WorkloadFields]:
    """Return the fields of a Workload for each model that --model names.

    For one model, its sizes become defaults of their own options, and only fields without an option are returned. For
    several models, all fields are returned; leave_out_given() then removes those whose options the user gives.
    """
    names = named_models.several(text) if text else []
    if len(names) > 1:
        return [_workload_fields_of_model(context, name) for name in names]
    return [_set_model_sizes(context, *names)]


def _set_model_sizes(context: click.Context, name: str | None = None) -> WorkloadFields:
    """Make a model's sizes the defaults of their options, unless the verb has its own default, such as the largest
    depth of a search. Return the fields of a Workload that have no option."""
    if name is None:
        return {}
    fields = _workload_fields_of_model(context, name)
    without_option = {field: fields.pop(field) for field in WITHOUT_OPTION if field in fields}
    if parsed_amount(name) is None:
        context.meta[MODEL] = name
    _set_size_defaults(context, fields)
    return without_option


def _workload_fields_of_model(context: click.Context, name: str) -> WorkloadFields:
    """Return the fields of a Workload that a model sets. If `name` is a number of parameters, the model is a GPT of
    about this size."""
    if num_params := parsed_amount(name):
        return _fields_of_gpt_size(num_params)
    model = named_models.load(name)
    if model.note:
        click.echo(f"{name} here is {model.note}", err=True)
    return model.sizes


def leave_out_given(context: click.Context) -> None:
    """Remove, from each model of --model, the fields that the user sets by an option such as -l: that option sets the
    field for all models."""
    if "model" in context.params:
        by_user = {
            name
            for name in context.params
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        left_out = by_user - {*WITHOUT_OPTION}
        models = context.params["model"]
        context.params["model"] = [
            {name: model[name] for name in model if name not in left_out} for model in models
        ]


def _completed_models(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return completed(named_models.names(), incomplete)


def completed(names: Iterable[str], incomplete: str) -> list[str]:
    """Return completions of a name at a shell's Tab. If `incomplete` is a list (a,b), its last name is completed."""
    before = incomplete[: incomplete.rfind(",") + 1]
    return [before + name for name in names if name.startswith(incomplete.removeprefix(before))]


def _set_gpt_size(context: click.Context, param: click.Parameter, num_params: float | None) -> None:
    if num_params is not None:
        _set_size_defaults(context, _fields_of_gpt_size(num_params))


def _fields_of_gpt_size(num_params: float) -> WorkloadFields:
    """Return the fields of a Workload for a GPT with about this number of parameters."""
    shape = gpt_of_size(num_params)
    return {name: getattr(shape, name) for name in ("num_layers", "hidden_size", "num_heads")}


def _set_size_defaults(context: click.Context, sizes: WorkloadFields) -> None:
    context.default_map = {
        **{option: str(size) for option, size in sizes.items()},
        **(context.default_map or {}),
    }


params = click.option(
    "--params",
    type=Amount(),
    is_eager=True,
    expose_value=False,
    callback=_set_gpt_size,
    help="Number of parameters, such as 7B: set -l, -h and --heads to a GPT of this size.",
)
model = together(
    click.option(
        "--model",
        metavar="NAME|PATH",
        shell_complete=_completed_models,
        is_eager=True,
        callback=_take_model_names,
        help="Set -l, -h, --heads and --vocab (for a GPT also --seq) to a model's: a name in models.yaml, such as"
        " gpt2-xl or Qwen3-8B; a config.json or its folder; or a size such as 7b, for a GPT of about 7B parameters."
        " Several: a,b, or a pattern of names, such as 'tiny-*'. These options, if given, override the models' values.",
    ),
    params,
)


class Numbers(click.ParamType):
    """Click type: a number, several numbers (1,2,4), or a range with its step (2:8:2), which includes its end."""

    name = "N"

    def convert(self, value: Any, param: Any, context: Any) -> list[int]:
        numbers: list[int] = []
        for range_text in str(value).split(","):
            if not re.fullmatch(r"-?\d+(:-?\d+){0,2}", range_text):
                self.fail(f"expected numbers such as 4, 1,2,4 or 2:8:2, got {value!r}", param, context)
            start, *stop_and_step = (int(number) for number in range_text.split(":"))
            stop = stop_and_step[0] if stop_and_step else start
            step = stop_and_step[1] if len(stop_and_step) > 1 else 1
            if step < 1 or stop < start:
                self.fail(
                    f"expected a range first:last:step such as 2:8:2, got {range_text!r}", param, context
                )
            if (stop - start) // step >= MOST_NUMBERS:
                self.fail(f"expected at most {MOST_NUMBERS} numbers, got {range_text!r}", param, context)
            numbers.extend(range(start, stop + 1, step))
        return list(dict.fromkeys(numbers))


class Bytes(click.ParamType):
    """Click type: a size with a unit, such as 16GiB. Its value is the size in bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: Any, context: Any) -> int:
        try:
            return named_machines.size_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


class Duration(click.ParamType):
    """Click type: a time with a unit, such as 90m. Its value is the time in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: Any, context: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(value))
        if not match or not float(match[1]):
            self.fail(f"expected a positive time in s, m or h, such as 90m, got {value!r}", param, context)
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


TYPES = {"int": int, "float": float, "bool": bool, "str": str}  # by a field's annotation


def of_field(kind: type, name: str, **settings: Any) -> Any:
    """Return click's option for a field that declares one; `settings` are arguments of click.option() that replace the
    field's own."""
    option = options_of(kind)[name]
    field = kind.__dataclass_fields__[name]  # type: ignore[attr-defined]
    # A file that postpones the evaluation of its annotations has them as texts.
    annotation = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    value_type: Any = TYPES.get(annotation.removesuffix(" | None"))
    if option.is_list:
        value_type = Numbers()
    elif "bytes" in name:
        value_type = Bytes()
    if option.is_repeated:
        return click.option(*option.flags, name, multiple=True, help=option.help, metavar=option.metavar)
    default = field.default if field.default is None or not option.is_list else str(field.default)
    declared = {"type": value_type, "default": default, "help": option.help, "metavar": option.metavar}
    return click.option(*option.flags, name, **{**declared, **settings})


# options of verbs that take one size, not several
num_heads = of_field(Workload, "num_heads")
seq_len = of_field(Workload, "seq_len", type=int)
dtype = of_field(Workload, "dtype")


def check_writable(folder: Path, option: str = "--results") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        got = "it is a link to nothing" if folder.is_symlink() and not folder.exists() else error.strerror
        raise ValueError(f"cannot write to {folder}: {got}; try another folder with {option}") from error
