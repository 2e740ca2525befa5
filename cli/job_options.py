"""The options of a job, and the jobs and the call that their values describe.

The options -m -l -h -b -w are spelled as in the published artifact: -h is the hidden size, so only --help shows the
help.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cli import options
from cli.options import OptionValues, of_field
from cli.place_choice import PlaceChoice
from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.core.option import options_of
from harness.devices import machine, named_machines
from harness.gate.probe import Extent
from harness.models import weight_files
from harness.plan.fit import scale_to_fit
from papers.figures import case

# The workload's fields with an option, in the order of the help; sizes come first.
SIZES = ("num_layers", "hidden_size", "batch_size", "micro_batches")
OF_WORKLOAD = {name: options_of(Workload)[name] for name in dict.fromkeys((*SIZES, *options_of(Workload)))}
# Fields of methods whose flags the help lists with the sizes, and those that it lists after --option. Flags of any
# other fields follow these.
WITH_SIZES = ("window_size", "disk", "placement")
AFTER_OPTION = ("num_models", "num_devices", "double_buffer", "hybrid", "world_size", "resume")

# By name of an artifact: the defaults that --as sets. Options that the user gives override them.
ARTIFACT_SETTINGS = {"sc22": {"window_size": "4", "steps": "50", "dropout": "0.1"}}


def take_settings(context: click.Context, _: click.Parameter, name: str | None) -> str | None:
    """Callback of --as: make the artifact's settings the defaults of the other options. click calls it before it reads
    these."""
    context.default_map = {**(context.default_map or {}), **ARTIFACT_SETTINGS.get(name or "", {})}
    return name


def of_methods(*names: str) -> list[Any]:
    """Return the options for these fields of methods. Their default is None: the method's own default."""
    declaring = method.declaring()
    return [of_field(declaring[name], name, default=None) for name in names if name in declaring]


workload_options = options.together(options.model, *(of_field(Workload, name) for name in OF_WORKLOAD))
size_options = options.together(
    *of_methods("window_size", "disk"),
    *(of_field(Budget, name) for name in ("device_bytes", "host_bytes", "disk_bytes")),
)


def _completed_methods(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return options.completed(method.names(), incomplete)


job_options = options.together(
    click.option(
        "-m",
        "method_names",
        metavar="METHOD",
        shell_complete=_completed_methods,
        help="One method, several (a,b), all, or published: the SC22 artifact's five.",
    ),
    click.option(
        "--as",
        "as_artifact",
        type=click.Choice(["sc22"]),
        is_eager=True,
        callback=take_settings,
        help="sc22: set the SC22 artifact's window 4, 50 steps, dropout 0.1; -m all is its five methods.",
    ),
    workload_options,
    size_options,
    *of_methods("placement"),
    of_field(Job, "steps"),
    of_field(Job, "warmup", default=None),
    click.option(
        "--option",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set the method's option NAME to VALUE.",
    ),
    *of_methods(*AFTER_OPTION),
    *of_methods(*(name for name in method.declaring() if name not in (*WITH_SIZES, *AFTER_OPTION))),
    of_field(Job, "device", type=click.Choice(["auto", "cpu", "cuda", "sim"]), default="auto"),
    click.option(
        "--machine",
        "--gpu",
        "machine_name",
        type=options.MachineName(),
        help="Set the budgets to the memories of this machine or GPU of machines.yaml.",
    ),
    click.option(
        "--scale",
        type=click.Choice(["fit"]),
        help="fit: train all layers on sim in about a minute: widths divided by f, memories by f squared.",
    ),
    of_field(Budget, "link_bytes_per_second"),
    of_field(Budget, "seconds"),
    options.results,
    options.methods,
    options.machines,
    click.option("--rerun", is_flag=True, help="Run jobs again that have a record."),
    options.probe_options,
    options.as_json,
)


class WithMethods(click.Command):
    """A command whose help ends with a list of all methods, including those in the folders that --methods adds."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if "--help" in args:
            # read --help last, because --methods may follow it, and adds methods to the help
            args = [*(word for word in args if word != "--help"), "--help"]
        remaining_args = super().parse_args(context, args)
        options.leave_out_given(context)
        return remaining_args

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        folders = context.params.get("methods_folder") or ()
        rows = {name: f"unavailable: {why}" for name, why in method.broken(folders).items()}
        for name, cls in method.loadable(folders).items():
            options_text = ", ".join(method.option_names(cls))
            rows[name] = f"{cls.paper or cls.label}" + (f" (options: {options_text})" if options_text else "")
        with formatter.section("Methods"):
            formatter.write_dl(sorted(rows.items()))
        super().format_epilog(context, formatter)


def make_jobs(options: OptionValues, folders: tuple[Path, ...]) -> list[Job]:
    """Return a job for every combination of the values. Along the list, the method changes slowest, the window fastest.
    A method gets only those options that it has. Raises ValueError for an option that no method has, except -w, which
    published calls give to all methods, and for one that --option sets to another value."""
    names = _method_names(options["method_names"], options.get("as_artifact"), folders)
    by_name = dict(map(parse_option, options["options"]))
    flags = method.flags()
    by_flag = {name: options[name] for name in flags if options.get(name) is not None}
    _check_set_once(by_flag, by_name)
    device = _device(options, _budget(options))
    budget = _budget(options, device)
    steps, warmup = options["steps"], options["warmup"]
    if warmup is None:
        warmup = min(5, max(0, steps - 1))
    choices = [value if flags[name].is_list else [value] for name, value in by_flag.items()]
    jobs = []
    for name, workload, values in itertools.product(names, workloads(options), itertools.product(*choices)):
        allowed = method.option_names(method.load(name, folders))
        chosen_options = {
            field: value for field, value in zip(by_flag, values, strict=True) if field in allowed
        }
        if options.get("as_artifact") and "window_size" in chosen_options:
            # the artifact, too, limits the window to the model's layers
            chosen_options["window_size"] = min(chosen_options["window_size"], workload.num_layers)
        jobs.append(Job(name, workload, {**by_name, **chosen_options}, budget, device, steps, warmup))
    for field in by_flag:
        if not flags[field].is_for_all and not any(field in job.options for job in jobs):
            methods_text = ", ".join(method.having(field, folders))
            raise ValueError(
                f"{flags[field].flag} does not apply to {', '.join(names)}: leave it out, or try -m {methods_text}"
            )
    if options.get("scale"):
        jobs = [scale_to_fit(job, folders)[0] for job in jobs]
    return [job for index, job in enumerate(jobs) if job not in jobs[:index]]


def _check_set_once(by_flag: OptionValues, by_name: OptionValues) -> None:
    """Raise ValueError if a method's option has one value by its flag and another by --option."""
    for name, value in by_flag.items():
        values = value if isinstance(value, list) else [value]
        if name in by_name and values != [by_name[name]]:
            flag = method.flags()[name].flag
            got = f"got both, {','.join(map(str, values))} and {by_name[name]}; try {flag} {by_name[name]}"
            raise ValueError(f"expected one of {flag} and --option {name}, {got}")


def workloads(options: OptionValues) -> list[Workload]:
    """Return a workload for every combination of models and sizes."""
    combinations: list[Workload] = []
    for model in options["model"]:
        fields = {name: options[name] for name in OF_WORKLOAD} | model
        lists = [name for name, option in OF_WORKLOAD.items() if option.is_list and name not in model]
        for sizes in itertools.product(*(fields[name] for name in lists)):
            combinations.append(Workload(**{**fields, **dict(zip(lists, sizes, strict=True))}))
    return combinations


def _method_names(text: str | None, artifact: str | None, folders: tuple[Path, ...]) -> list[str]:
    """Return the names of the methods that `text`, the value of -m, names."""
    if not text:
        raise ValueError(
            f"-m: expected a method, got none; try all, or one of {', '.join(method.names(folders))}"
        )
    published = case.load_case(1).methods  # the artifact's methods
    if text == "all" and artifact:
        return list(published)
    if text != "all":
        names: list[str] = []
        for name in text.split(","):
            names += published if name == "published" else (name,)
        return names
    broken = method.broken(folders)
    for name, why in broken.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    return [name for name in method.names(folders) if name not in broken]


def _device(options: OptionValues, budget: Budget) -> str:
    devices, place = machine.devices(), PlaceChoice.of(options)
    device = devices[0] if options["device"] == "auto" else options["device"]
    if options["device"] == "auto" and place.asks_for_gpus():
        device = "cuda"
    elif options["device"] == "auto" and device == "cpu" and budget.device_bytes:
        device = "sim"
    if not place.is_local and device == "cuda" and not machine.gpu() and budget.device_bytes is None:
        raise ValueError(
            "expected the memory of the other machine's GPU, got none: try --device-memory 80GiB"
        )
    if device not in devices and place.is_local:
        why = machine.cuda_refused() if device == "cuda" and machine.gpu() else ""
        expected = f"expected {' or '.join(devices)} on this machine"
        raise ValueError(f"--device: {expected}, got {device}{f': {why}' if why else ''}")
    if options["link_bytes_per_second"] and device != "sim":
        raise ValueError(f"--link: expected --device sim, got {device}, whose link is real; leave --link out")
    return device


def _budget(options: OptionValues, device: str = "") -> Budget:
    """Return the job's budgets for this device. An option such as --host-memory sets its budget; every other budget is
    that of the machine that --machine names, if any."""
    name = options["machine_name"]
    budget = named_machines.load(name).budget_on(device, options["dtype"]) if name else Budget()
    limits = {field: options[field] for field in options_of(Budget) if options[field] is not None}
    return dataclasses.replace(budget, **limits)


def parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option: expected NAME=VALUE, got {text!r}")
    constants = {"true": True, "false": False, "none": None}
    if value.lower() in constants:
        return name, constants[value.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return name, number(value)
    return name, value


def method_folders(options: OptionValues) -> tuple[Path, ...]:
    """Return the folders of methods that a call adds by --methods."""
    return tuple(path.resolve() for path in options["methods_folder"])


def check_files(workload: Workload) -> None:
    """Raise ValueError if the workload's corpus or weights cannot be read. This is called before any process starts."""
    if workload.weights is not None:
        weight_files.check(workload)
    if workload.corpus is not None:
        from harness.core import data

        data.corpus(workload)


@dataclass(frozen=True)
class Output:
    """What a call prints and writes beside records. A path of None: the call does not ask for that file."""

    as_json: bool
    shows_verdicts: bool  # True: print a table of verdicts, methods by models
    table: Path | None = None  # file for that table, in Markdown
    trace: Path | None = None  # file for a timeline of the run
    save: Path | None = None  # folder for the trained weights


@dataclass(frozen=True)
class Call:
    jobs: list[Job]
    folders: tuple[Path, ...]  # folders of methods
    place: PlaceChoice
    extent: Extent | None  # extent of the gate's probe; None: the usual one
    results: Path  # folder of records
    rerun: bool  # True: run jobs again that have a record
    output: Output

    @classmethod
    def of(cls, values: OptionValues, extent: Extent | None) -> Call:
        """Return the call with these values of a verb's options, by name. Raises ValueError for values that make no
        job."""
        folders, table = method_folders(values), values.get("out")
        shows_verdicts = len(values["model"]) > 1 or table is not None
        return cls(
            make_jobs(values, folders),
            folders,
            PlaceChoice.of(values),
            extent,
            values["results"],
            values["rerun"],
            Output(values["as_json"], shows_verdicts, table, values.get("trace"), values.get("save")),
        )
