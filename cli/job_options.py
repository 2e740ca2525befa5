"""The options of a job, and the jobs that their values describe.

The options -m -l -h -b -w are spelled as in the published artifact: -h is the hidden size, so only --help shows the
help.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import click

from cli import options
from cli.options import Bytes, Numbers
from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.devices import machine, named_machines
from harness.jobs.scale import to_fit
from harness.models import weight_files
from harness.run import place
from papers.figures import case

# By name of a method's option: its own option on the command line. --option sets any option of a method.
OF_METHODS = {
    "placement": "--placement",
    "num_models": "--models",
    "num_devices": "--devices",
    "disk": "--disk",
    "double_buffer": "--double-buffer",
    "hybrid": "--hybrid",
    "world_size": "--ranks",
    "resume": "--resume",
}
# options of the workload that take several values
LISTED = ("num_layers", "hidden_size", "batch_size", "seq_len")
OF_WORKLOAD = (
    "micro_batches",
    "vocab_size",
    "num_heads",
    "dtype",
    "dropout",
    "clip_norm",
    "learning_rate",
    "seed",
    "corpus",
    "weights",
)

# By name of an artifact: the defaults that --as sets. Options that the user gives override them.
SETTINGS = {"sc22": {"window_size": "4", "steps": "50", "dropout": "0.1"}}


def take_settings(context: click.Context, _: click.Parameter, name: str | None) -> str | None:
    """Callback of --as: make the artifact's settings the defaults of the other options. click calls it before it reads
    these."""
    context.default_map = {**(context.default_map or {}), **SETTINGS.get(name or "", {})}
    return name


workload_options = options.together(
    options.model,
    click.option("-l", "--layers", "num_layers", type=Numbers(), default="16", help="Number of layers."),
    click.option("-h", "hidden_size", type=Numbers(), default="2048", help="Hidden size."),
    click.option("-b", "batch_size", type=Numbers(), default="4", help="Samples per step."),
    click.option("--micro-batches", type=int, default=1, help="Number of equal parts of each batch."),
    options.num_heads,
    click.option("--seq", "seq_len", type=Numbers(), default="1024", help="Tokens per sample."),
    click.option("--vocab", "vocab_size", type=int, default=50304, help="Vocabulary size."),
    options.dtype,
    click.option(
        "--dropout", type=float, default=0.0, help="Dropout probability; the published runs used 0.1."
    ),
    click.option(
        "--clip", "clip_norm", type=float, default=1.0, help="Largest global gradient norm; 0: no clipping."
    ),
    click.option("--lr", "learning_rate", type=float, default=1.5e-4, help="Peak learning rate."),
    click.option("--seed", type=int, default=1234, help="Seed of weights and data."),
    click.option(
        "--data", "corpus", help="Prefix of a Megatron corpus (.bin, .idx); default: tokens drawn by --seed."
    ),
    click.option(
        "--weights",
        metavar="DIR",
        help="Folder of a Hugging Face model, whose weights training starts from; default: drawn by --seed.",
    ),
)
size_options = options.together(
    click.option(
        "-w", "window_size", type=Numbers(), help="Number of layers in the window; default: planned."
    ),
    click.option("--disk", metavar="DIR", help="Folder for states that are kept on the disk."),
    click.option("--device-memory", type=Bytes(), help="Budget of device memory; default: all of it."),
    click.option("--host-memory", type=Bytes(), help="Budget of host memory; default: all of it."),
    click.option("--disk-memory", type=Bytes(), help="Budget of disk space; default: all free space."),
)


def _methods(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return options.completed(method.names(), incomplete)


job_options = options.together(
    click.option(
        "-m",
        "method_names",
        metavar="METHOD",
        shell_complete=_methods,
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
    click.option(
        "--placement",
        metavar="RUNS",
        help="Kinds of layers, bottom first: R2W5 means 2 resident layers, then 5 windowed ones.",
    ),
    click.option("--steps", type=int, default=20, help="Training steps, warm-up included."),
    click.option(
        "--warmup",
        type=int,
        help="Number of first steps that medians leave out; default: 5, fewer if --steps is below 6.",
    ),
    click.option(
        "--option",
        "options",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set the method's option NAME to VALUE.",
    ),
    click.option(
        "--models",
        "num_models",
        type=int,
        help="Number of models that a method trains in turns (default: 1).",
    ),
    click.option(
        "--devices",
        "num_devices",
        type=int,
        help="Number of devices that the models of --models share; on a CPU each device is a process.",
    ),
    click.option(
        "--double-buffer", type=bool, help="Fetch the next shard while a shard computes (default: on)."
    ),
    click.option(
        "--hybrid",
        type=bool,
        help="Split a model's batches over two devices if devices outnumber models (default: on).",
    ),
    click.option("--ranks", "world_size", type=int, help="Number of processes that train one model."),
    click.option("--resume", metavar="FOLDER", help="Continue from the newest checkpoint in this folder."),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda", "sim"]),
        default="auto",
        help="sim: simulated on the CPU; auto: cuda if a GPU is here or --on asks for one, else sim if"
        " --device-memory is set, else cpu.",
    ),
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
    click.option(
        "--link", type=Bytes(), help="Speed of --device sim's link: bytes per second in each direction."
    ),
    click.option("--timeout", type=float, metavar="SECONDS", help="End a job that takes longer than this."),
    options.results,
    options.methods,
    options.machines,
    click.option("--rerun", is_flag=True, help="Run jobs again that have a record."),
    options.probe,
    options.as_json,
)
place_options = options.together(
    click.option(
        "--on",
        type=click.Choice(["local", *place.REGISTRY.files()]),
        default="local",
        help="Place where jobs run.",
    ),
    *(each for found in place.loadable().values() for each in found.cli_options.values()),
    click.option(
        "--dry-run", is_flag=True, help=f"Only print the objects that --on {place.drafting()} would create."
    ),
)


class WithMethods(click.Command):
    """A command whose help ends with a list of all methods, including those in the folders that --methods adds."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if "--help" in args:
            # read --help last, because --methods may follow it, and adds methods to the help
            args = [*(word for word in args if word != "--help"), "--help"]
        rest = super().parse_args(context, args)
        options.leave_out_given(context)
        return rest

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        folders = context.params.get("methods_folder") or ()
        rows = {name: f"unavailable: {why}" for name, why in method.broken(folders).items()}
        for name, cls in method.loadable(folders).items():
            own = ", ".join(method.option_names(cls))
            rows[name] = f"{cls.paper or cls.label}" + (f" (options: {own})" if own else "")
        with formatter.section("Methods"):
            formatter.write_dl(sorted(rows.items()))
        super().format_epilog(context, formatter)


def make_jobs(words: dict[str, Any], folders: tuple[Path, ...]) -> list[Job]:
    """Return a job for every combination of the values. Along the list, the method changes slowest, the window fastest.
    A method gets only those options that it has. Raises ValueError for an option that no method has, except -w, which
    published calls give to all methods, and for one that --option sets to another value."""
    names = _names(words, folders)
    given = dict(parse_option(text) for text in words["options"])
    for option, spelled in {"window_size": "-w", **OF_METHODS}.items():
        values = words.get(option) if option == "window_size" else [words.get(option)]
        if option in given and values not in (None, [None], [given[option]]):
            both = (
                f"got both, {','.join(map(str, values))} and {given[option]}; try {spelled} {given[option]}"
            )
            raise ValueError(f"expected one of {spelled} and --option {option}, {both}")
    device = _device(words, _budget(words))
    budget = _budget(words, device)
    steps = words["steps"]
    warmup = min(5, max(0, steps - 1)) if words["warmup"] is None else words["warmup"]
    jobs = []
    for name, workload, window in itertools.product(names, workloads(words), words["window_size"] or [None]):
        known = method.option_names(method.load(name, folders))
        if window and words.get("as_artifact"):
            # the artifact, too, limits the window to the model's layers
            window = min(window, workload.num_layers)
        asked = {"window_size": window} | {option: words.get(option) for option in OF_METHODS}
        own = {option: value for option, value in asked.items() if value is not None and option in known}
        jobs.append(Job(name, workload, {**given, **own}, budget, device, steps, warmup))
    for option, spelled in OF_METHODS.items():
        if words.get(option) is not None and not any(option in job.options for job in jobs):
            able = ", ".join(method.having(option, folders))
            raise ValueError(
                f"{spelled} does not apply to {', '.join(names)}: leave it out, or try -m {able}"
            )
    if words.get("scale"):
        jobs = [to_fit(job, folders)[0] for job in jobs]
    return [job for index, job in enumerate(jobs) if job not in jobs[:index]]


def workloads(words: dict[str, Any]) -> list[Workload]:
    """Return a workload for every combination of models and sizes."""
    found: list[Workload] = []
    for model in words["model"]:
        fields = {name: words[name] for name in OF_WORKLOAD} | model
        sizes = [[fields.pop(name)] if name in fields else words[name] for name in LISTED]
        found += [
            Workload(**dict(zip(LISTED, each, strict=True)), **fields) for each in itertools.product(*sizes)
        ]
    return found


def _names(words: dict[str, Any], folders: tuple[Path, ...]) -> list[str]:
    if not words["method_names"]:
        raise ValueError(
            f"-m: expected a method, got none; try all, or one of {', '.join(method.names(folders))}"
        )
    published = case.load(1).methods  # the artifact's methods
    if words["method_names"] == "all" and words.get("as_artifact"):
        return list(published)
    if words["method_names"] != "all":
        asked = words["method_names"].split(",")
        return [name for each in asked for name in (published if each == "published" else (each,))]
    broken = method.broken(folders)
    for name, why in broken.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    return [name for name in method.names(folders) if name not in broken]


def _device(words: dict[str, Any], budget: Budget) -> str:
    there = machine.devices()
    device = there[0] if words["device"] == "auto" else words["device"]
    elsewhere = words.get("on", "local") != "local"
    if words["device"] == "auto" and elsewhere and place.load(words["on"]).asks_for_gpus(words):
        device = "cuda"
    elif words["device"] == "auto" and device == "cpu" and budget.device_bytes:
        device = "sim"
    if elsewhere and device == "cuda" and not machine.gpu() and budget.device_bytes is None:
        raise ValueError(
            "expected the memory of the other machine's GPU, got none: try --device-memory 80GiB"
        )
    if device not in there and not elsewhere:
        why = machine.cuda_refused() if device == "cuda" and machine.gpu() else ""
        raise ValueError(
            f"--device: expected {' or '.join(there)} on this machine, got {device}{f': {why}' if why else ''}"
        )
    if words["link"] and device != "sim":
        raise ValueError(f"--link: expected --device sim, got {device}, whose link is real; leave --link out")
    return device


def _budget(words: dict[str, Any], device: str = "") -> Budget:
    """Return the job's budgets for this device. An option such as --host-memory sets its budget; every other budget is
    that of the machine that --machine names, if any."""
    budget = (
        named_machines.load(words["machine_name"]).budget_on(device, words["dtype"])
        if words["machine_name"]
        else Budget()
    )
    asked = {
        "device_bytes": "device_memory",
        "host_bytes": "host_memory",
        "disk_bytes": "disk_memory",
        "seconds": "timeout",
        "link_bytes_per_second": "link",
    }
    return dataclasses.replace(
        budget, **{name: words[word] for name, word in asked.items() if words[word] is not None}
    )


def parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option: expected NAME=VALUE, got {text!r}")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return name, number(value)
    return name, value


def place_of(words: dict[str, Any], device: str) -> place.Place | None:
    """Return the place that --on names; None if it is this process's machine. Raises Unavailable if the place cannot be
    reached, ValueError for an option of another place."""
    for name, cls in place.loadable().items():
        for option in cls.cli_options:
            if words[option] and words["on"] != name:
                raise ValueError(f"--{option} needs --on {name}: add --on {name}, or leave --{option} out")
    return None if words["on"] == "local" else place.load(words["on"]).of(words, device)


def place_words(words: dict[str, Any]) -> list[str]:
    """Return the words of a command line that name the call's place and the settings of the place; empty if the place
    is this process's machine."""
    if words["on"] == "local":
        return []
    found = ["--on", words["on"]]
    for name in place.load(words["on"]).cli_options:
        given = words[name] if isinstance(words[name], tuple) else filter(None, [words[name]])
        found += [word for value in given for word in (f"--{name}", str(value))]
    return found


def check_files(workload: Workload) -> None:
    """Raise ValueError if the workload's corpus or weights cannot be read. This is called before any process starts."""
    if workload.weights is not None:
        weight_files.check(workload)
    if workload.corpus is not None:
        from harness.core import data

        data.corpus(workload)
