"""Words of the command line to jobs, and events of a sweep to what a person or a program reads.

-m -l -h -b -w are spelled as published, so -h is the hidden size and help is --help.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from harness import machine, method
from harness.progress import reporter
from harness.record import Record, read_all
from harness.spec import GIB, Budget, Job, Workload
from harness.sweep import Sweep, resolve

EXIT = {"crash": 3, "killed": 3, "oom-device": 4, "oom-host": 4, "timeout": 6, "unavailable": 7, "interrupted": 130}
GATE_FAILED, USAGE, INTERRUPTED = 5, 2, 130
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
EXAMPLES = """\b
Examples:
  ./run.sh -m stronghold -l 4 -h 256 -b 2
  ./run.sh -m all -l 4 -h 256 -b 2
  ./run.sh sweep -m resident,stronghold -l 2:8:2 -w 1,2,4
"""


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
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|TiB)", str(value))
        if not match or not float(match[1]):
            self.fail(f"{value!r} is no size: a positive number with {', '.join(UNITS)}, as 32GiB", param, context)
        return int(float(match[1]) * UNITS[match[2]])


class Door(click.Group):
    """`run` is understood where no verb is given, so that the published calls stay as they are."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(context, args)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        write_methods(formatter, ())
        super().format_epilog(context, formatter)


class JobCommand(click.Command):
    """A verb whose help ends with the methods there are, those of --methods included."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        write_methods(formatter, context.params.get("methods_folder") or ())
        super().format_epilog(context, formatter)


def write_methods(formatter: click.HelpFormatter, folders: tuple[Path, ...]) -> None:
    rows = []
    for name in method.names(folders):
        cls = method.load(name, folders)
        options = ", ".join(method.option_names(cls))
        rows.append((name, f"{cls.paper or cls.label}" + (f" (options: {options})" if options else "")))
    with formatter.section("Methods"):
        formatter.write_dl(rows)


def job_options(command: Any) -> Any:
    """The options that run and sweep share."""
    folder = click.Path(path_type=Path, file_okay=False)
    for option in reversed((
        click.option("-m", "method_names", metavar="METHOD", help="Method, several (a,b), or all."),
        click.option("-l", "num_layers", type=Numbers(), default="16", help="Layers."),
        click.option("-h", "hidden_size", type=Numbers(), default="2048", help="Hidden size (help is --help)."),
        click.option("-b", "batch_size", type=Numbers(), default="4", help="Batch size."),
        click.option("-w", "window_size", type=Numbers(), help="Window, for methods that have one; else planned."),
        click.option("--heads", "num_heads", type=int, default=16),
        click.option("--seq", "seq_len", type=int, default=1024, help="Tokens per sample."),
        click.option("--vocab", "vocab_size", type=int, default=50304),
        click.option("--dtype", default="fp32", help="fp32 or bf16 (mixed precision)."),
        click.option("--dropout", type=float, default=0.0, help="The published runs used 0.1."),
        click.option("--clip", "clip_norm", type=float, default=1.0, help="Global gradient norm; 0 is off."),
        click.option("--lr", "learning_rate", type=float, default=1.5e-4, help="Peak of the published schedule."),
        click.option("--seed", type=int, default=1234),
        click.option("--data", "corpus", help="Prefix of a Megatron .bin/.idx corpus; default: a seeded stream."),
        click.option("--steps", type=int, default=20),
        click.option("--warmup", type=int, help="Steps left out of the median; default 5, or fewer of few steps."),
        click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the method."),
        click.option("--nvme", metavar="DIR", help="Folder on the disk, for methods that use one."),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto"),
        click.option("--device-memory", type=Bytes(), help="Budget: a CUDA device is held to it, a CPU plans by it."),
        click.option("--timeout", type=float, metavar="SECONDS", help="End a job that runs longer."),
        click.option("--results", type=folder, default=method.ROOT / "results", help="Folder of records and logs."),
        click.option("--methods", "methods_folder", type=folder, multiple=True, is_eager=True,
                     help="Another folder of methods."),
        click.option("--rerun", is_flag=True, help="Measure again what has a record."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object a line."),
    )):  # fmt: skip
        command = option(command)
    return command


@click.group(cls=Door, epilog=EXAMPLES, context_settings={"help_option_names": ["--help"]}, invoke_without_command=True)
@click.pass_context
def door(context: click.Context) -> None:
    """Train models larger than the device, by several methods, under one clock and one gate.

    A method whose training is not the reference's has no throughput.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@door.command(cls=JobCommand, epilog=EXAMPLES)
@job_options
def run(**words: Any) -> None:
    """Train by one method, by several, or by all; what has a record is not run again (--rerun)."""
    execute(words)


@door.command(cls=JobCommand, epilog=EXAMPLES)
@job_options
def sweep(**words: Any) -> None:
    """The same over every combination of the lists given; a point that fails is a result and not an error."""
    execute(words, is_sweep=True)


@door.command()
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=method.ROOT / "results")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def fairness(results: Path, as_json: bool) -> None:
    """What each recorded method ran with: who implements it, kernels, precision, recompute, clipping, data."""
    from harness import fairness as table

    rows = table.rows(list(read_all(results)[0].values()))
    if not rows:
        raise ValueError(
            f"no run that trained is recorded in {results}: run some first, as ./run.sh -m all -l 4 -h 256"
        )
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        table.show(rows)


def execute(words: dict[str, Any], is_sweep: bool = False) -> None:
    folders = tuple(path.resolve() for path in words["methods_folder"])
    asked = make_jobs(words, folders)
    jobs, left_out = [], []
    for job in asked:
        try:
            resolved, _, shortfall = resolve(job, folders)
        except ValueError as error:
            left_out.append(f"{job.method}, {job.workload.num_layers} layers: {error}")
            continue
        if shortfall and len(asked) == 1 and not is_sweep:
            raise ValueError(shortfall)
        jobs.append(resolved)
    if not jobs:
        raise ValueError(left_out[0])
    check_corpus(jobs[0].workload)
    check_writable(words["results"])
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    with reporter(words["as_json"]) as report:
        records = Sweep(words["results"], folders, report, words["rerun"]).run(jobs)
    sys.exit(exit_code(records, is_sweep))


def make_jobs(words: dict[str, Any], folders: tuple[Path, ...]) -> list[Job]:
    """Every combination, methods slowest; -w and --nvme are only given to methods that have such an option."""
    if not words["method_names"]:
        raise ValueError(f"-m is missing: choose one of all, {', '.join(method.names(folders))}")
    names = words["method_names"].split(",")
    names = method.names(folders) if names == ["all"] else names
    options = dict(parse_option(text) for text in words["options"])
    sizes = ("seq_len", "vocab_size", "num_heads", "dtype", "dropout", "clip_norm", "learning_rate", "seed", "corpus")
    fixed = {name: words[name] for name in sizes}
    device = machine.devices()[0] if words["device"] == "auto" else words["device"]
    if device not in machine.devices():
        raise ValueError(f"no {device} device here: --device takes {' or '.join(machine.devices())}")
    budget = Budget(device_bytes=words["device_memory"], seconds=words["timeout"])
    steps = words["steps"]
    warmup = min(5, max(0, steps - 1)) if words["warmup"] is None else words["warmup"]
    grid = itertools.product(
        names, words["num_layers"], words["hidden_size"], words["batch_size"], words["window_size"] or [None]
    )
    jobs = []
    for name, num_layers, hidden_size, batch_size, window in grid:
        workload = Workload(num_layers=num_layers, hidden_size=hidden_size, batch_size=batch_size, **fixed)
        known = method.option_names(method.load(name, folders))
        asked = {"window_size": window, "nvme": words["nvme"]}
        chosen = {**options, **{key: value for key, value in asked.items() if value is not None and key in known}}
        jobs.append(Job(name, workload, chosen, budget, device, steps, warmup))
    return [job for index, job in enumerate(jobs) if job not in jobs[:index]]


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
        from harness import data

        data.corpus(workload)


def check_writable(results: Path) -> None:
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        raise ValueError(f"cannot write to {results}: {error.strerror}; name another folder with --results") from error


def exit_code(records: list[Record], is_sweep: bool) -> int:
    """0 fine, 3 crash, 4 out of memory, 5 failed the gate, 6 timeout, 7 unavailable, 130 interrupted.

    Of several points those that ended without a verdict are results, and so is the failed gate of a method that says
    itself that it trains otherwise; a crash or any other failed gate never is.
    """
    several = is_sweep or len(records) > 1
    codes = {EXIT.get(record.status, 0) for record in records}
    if any(record.status == "ok" and not record.gate.passed and (record.is_exact or not several) for record in records):
        codes.add(GATE_FAILED)
    serious = codes & ({3, GATE_FAILED, INTERRUPTED} if several else codes)
    return min(serious - {0}, default=0)


def main() -> None:
    """The door: every error of the user's is one line on standard error and exit code 2."""
    try:
        door.main(standalone_mode=False, prog_name="./run.sh")
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted: the same call again goes on where this one stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        hint = "; -h is the hidden size, help is --help" if "'-h'" in error.format_message() else "; see --help"
        print(f"error: {error.format_message().rstrip('.')}{hint}", file=sys.stderr)
        sys.exit(USAGE)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE)
