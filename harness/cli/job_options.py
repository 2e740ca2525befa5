"""The words that verbs share: click types, the options of a job, and jobs made of them.

-m -l -h -b -w are spelled as published, so -h is the hidden size and help is --help.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.devices import machine, named_machines
from harness.places.place import Place


class Numbers(click.ParamType):
    """One number, several (1,2,4), or a range with its end (2:8:2)."""

    name = "N"

    def convert(self, value: Any, param: Any, context: Any) -> list[int]:
        found: list[int] = []
        for part in str(value).split(","):
            if not re.fullmatch(r"-?\d+(:-?\d+){0,2}", part):
                self.fail(f"{value!r} is no number: 4, 1,2,4 and 2:8:2 are", param, context)
            start, *rest = (int(number) for number in part.split(":"))
            stop, step = (rest[0] if rest else start), (rest[1] if len(rest) > 1 else 1)
            if step < 1 or stop < start:
                self.fail(f"{part!r} is no range: first:last:step, as 2:8:2", param, context)
            found.extend(range(start, stop + 1, step))
        return list(dict.fromkeys(found))


class Bytes(click.ParamType):
    """A size with its unit."""

    name = "SIZE"

    def convert(self, value: Any, param: Any, context: Any) -> int:
        try:
            return named_machines.size_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


class Duration(click.ParamType):
    """A time with its unit, in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: Any, context: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(value))
        if not match or not float(match[1]):
            self.fail(f"{value!r} is no time: a positive number with s, m or h, as 90m", param, context)
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def help_last(args: list[str]) -> list[str]:
    """What --help tells depends on --methods, wherever the two stand."""
    return [*(word for word in args if word != "--help"), "--help"] if "--help" in args else args


class JobCommand(click.Command):
    """A verb whose help ends with the methods there are, those of --methods included."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, help_last(args))

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        write_methods(formatter, context.params.get("methods_folder") or ())
        super().format_epilog(context, formatter)


def write_methods(formatter: click.HelpFormatter, folders: tuple[Path, ...]) -> None:
    rows = []
    broken = method.broken(folders)
    for name in method.names(folders):
        if name in broken:
            rows.append((name, f"unavailable: {broken[name]}"))
            continue
        cls = method.load(name, folders)
        options = ", ".join(method.option_names(cls))
        rows.append((name, f"{cls.paper or cls.label}" + (f" (options: {options})" if options else "")))
    with formatter.section("Methods"):
        formatter.write_dl(rows)


FOLDER = click.Path(path_type=Path, file_okay=False)
methods_option = click.option(
    "--methods", "methods_folder", type=FOLDER, multiple=True, is_eager=True, help="Another folder of methods."
)


# Options of methods that have words of their own, for methods that have such an option.
OPTION_WORDS = {"placement": "--placement", "num_models": "--models", "num_devices": "--devices", "disk": "--disk",
                "double_buffer": "--double-buffer", "hybrid": "--hybrid", "world_size": "--ranks"}  # fmt: skip


def job_options(command: Any) -> Any:
    """The options that run and sweep share."""
    for option in reversed((
        click.option("-m", "method_names", metavar="METHOD", help="Method, several (a,b), or all."),
        click.option("-l", "num_layers", type=Numbers(), default="16", help="Layers."),
        click.option("-h", "hidden_size", type=Numbers(), default="2048", help="Hidden size (help is --help)."),
        click.option("-b", "batch_size", type=Numbers(), default="4", help="Batch size."),
        click.option("-w", "window_size", type=Numbers(), help="Window, for methods that have one; else planned."),
        click.option("--placement", metavar="RUNS", help="Where layers live, as R2W5S1, for methods that place them."),
        click.option("--micro-batches", type=int, default=1, help="Equal parts of a batch, one after the other."),
        click.option("--heads", "num_heads", type=int, default=16),
        click.option("--seq", "seq_len", type=int, default=1024, help="Tokens per sample."),
        click.option("--vocab", "vocab_size", type=int, default=50304),
        click.option("--dtype", default="fp32", help="fp32; bf16 or fp16, mixed precision."),
        click.option("--dropout", type=float, default=0.0, help="The published runs used 0.1."),
        click.option("--clip", "clip_norm", type=float, default=1.0, help="Global gradient norm; 0 is off."),
        click.option("--lr", "learning_rate", type=float, default=1.5e-4, help="Peak of the published schedule."),
        click.option("--seed", type=int, default=1234),
        click.option("--data", "corpus", help="Prefix of a Megatron .bin/.idx corpus; default: a seeded stream."),
        click.option("--steps", type=int, default=20),
        click.option("--warmup", type=int, help="Steps left out of the median; default 5, or fewer of few steps."),
        click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the method."),
        click.option("--models", "num_models", type=int, help="Models that take turns, for methods that have this."),
        click.option("--devices", "num_devices", type=int, help="Devices that they take turns on; on a CPU processes."),
        click.option("--double-buffer", type=bool, help="off: fetch what comes next only when it has come."),
        click.option("--hybrid", type=bool, help="off: train no model on two devices where there are more of these."),
        click.option("--ranks", "world_size", type=int, help="Processes that train together, for methods that can."),
        click.option("--disk", metavar="DIR", help="Folder on the disk, for methods that use one."),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "sim"]), default="auto",
                     help="sim: a CPU with a device memory of its own; auto takes it where --device-memory is given."),
        click.option("--machine", "machine_name", metavar="NAME", help="Budgets of a machine in machines.yaml."),
        click.option("--device-memory", type=Bytes(), help="Budget of device memory."),
        click.option("--host-memory", type=Bytes(), help="Budget of host memory."),
        click.option("--link", type=Bytes(), help="Simulated link of --device sim, a second in each direction."),
        click.option("--disk-memory", type=Bytes(), help="Budget on the disk, for methods that use one."),
        click.option("--timeout", type=float, metavar="SECONDS", help="End a job that runs longer."),
        click.option("--results", type=FOLDER, default=method.ROOT / "results", help="Folder of records and logs."),
        methods_option,
        click.option("--rerun", is_flag=True, help="Measure again what has a record."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object a line."),
    )):  # fmt: skip
        command = option(command)
    return command


def place_options(command: Any) -> Any:
    """Where jobs run."""
    for option in reversed((
        click.option("--on", type=click.Choice(["local", "docker", "slurm"]), default="local", help="Where they run."),
        click.option("--image", metavar="NAME", help="For --on docker; default: what ./run.sh image build made."),
        click.option("--slurm", multiple=True, metavar="NAME=VALUE|FILE",
                     help="For --on slurm: partition, account, qos, time in minutes, gpus, cpus; or YAML."),
    )):  # fmt: skip
        command = option(command)
    return command


def place_of(words: dict[str, Any], device: str) -> Place | None:
    """The place that --on names; None is here. Raises method.Unavailable where there is no such place."""
    if words["image"] and words["on"] != "docker":
        raise ValueError("--image goes with --on docker")
    if words["on"] == "docker":
        from harness.places.docker import Docker, default_image

        return Docker(words["image"] or default_image(device))
    if words["slurm"] and words["on"] != "slurm":
        raise ValueError("--slurm goes with --on slurm")
    if words["on"] == "slurm":
        from harness.places.slurm import Slurm, options_of

        return Slurm(options_of(words["slurm"]))
    return None


def make_jobs(words: dict[str, Any], folders: tuple[Path, ...]) -> list[Job]:
    """Every combination, methods slowest; -w and its like only for methods that have such an option. Raises ValueError
    where a word is of no use to any of them; -w is, for published calls give it to all."""
    if not words["method_names"]:
        raise ValueError(f"-m is missing: choose one of all, {', '.join(method.names(folders))}")
    names = words["method_names"].split(",")
    if names == ["all"]:
        broken = method.broken(folders)
        names = [name for name in method.names(folders) if name not in broken]
        for name, why in broken.items():
            print(f"left out: {name}: {why}", file=sys.stderr)
    options = dict(parse_option(text) for text in words["options"])
    sizes = ("micro_batches", "seq_len", "vocab_size", "num_heads", "dtype", "dropout", "clip_norm", "learning_rate",
             "seed", "corpus")  # fmt: skip
    fixed = {name: words[name] for name in sizes}
    device = machine.devices()[0] if words["device"] == "auto" else words["device"]
    budget = budget_of(words)
    if words["device"] == "auto" and device == "cpu" and budget.device_bytes:
        device = "sim"
    elsewhere = words.get("on", "local") != "local"
    if elsewhere and device == "cuda" and not machine.gpu() and budget.device_bytes is None:
        raise ValueError("--device cuda elsewhere: say how much memory the GPU there has, --device-memory 80GiB")
    if device not in machine.devices() and not elsewhere:
        raise ValueError(f"no {device} device here: --device takes {' or '.join(machine.devices())}")
    if words["link"] and device != "sim":
        raise ValueError(f"--link is simulated on --device sim only; on {device} the link is what it is")
    steps = words["steps"]
    warmup = min(5, max(0, steps - 1)) if words["warmup"] is None else words["warmup"]
    grid = itertools.product(
        names, words["num_layers"], words["hidden_size"], words["batch_size"], words["window_size"] or [None]
    )
    jobs = []
    for name, num_layers, hidden_size, batch_size, window in grid:
        workload = Workload(num_layers=num_layers, hidden_size=hidden_size, batch_size=batch_size, **fixed)
        known = method.option_names(method.load(name, folders))
        asked = {"window_size": window} | {option: words.get(option) for option in OPTION_WORDS}
        chosen = {**options, **{key: value for key, value in asked.items() if value is not None and key in known}}
        jobs.append(Job(name, workload, chosen, budget, device, steps, warmup))
    for option, word in OPTION_WORDS.items():
        if words.get(option) is not None and not any(option in job.options for job in jobs):
            able = ", ".join(method.having(option, folders))
            raise ValueError(f"{word} is of no use to {', '.join(names)}: leave it out, or -m {able}")
    return [job for index, job in enumerate(jobs) if job not in jobs[:index]]


def budget_of(words: dict[str, Any]) -> Budget:
    """The named machine's budgets, overridden by those that are given."""
    budget = named_machines.load(words["machine_name"]).budget if words["machine_name"] else Budget()
    asked = {
        "device_bytes": words["device_memory"],
        "host_bytes": words["host_memory"],
        "disk_bytes": words["disk_memory"],
        "seconds": words["timeout"],
        "link_bytes_per_second": words["link"],
    }
    return dataclasses.replace(budget, **{name: value for name, value in asked.items() if value is not None})


def parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option takes NAME=VALUE, not {text!r}")
    if value.lower() in ("true", "false", "none"):
        return name, {"true": True, "false": False, "none": None}[value.lower()]
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            continue
    return name, value


def check_corpus(workload: Workload) -> None:
    if workload.corpus:
        from harness.core import data

        data.corpus(workload)


def check_writable(folder: Path, word: str = "--results") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; name another folder with {word}") from error
