"""The door: verbs to what they do, errors to one line and an exit code."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from harness.cli import result_verbs
from harness.cli.doctor import doctor
from harness.cli.job_options import (
    Duration,
    JobCommand,
    check_corpus,
    check_writable,
    help_last,
    job_options,
    make_jobs,
    methods_option,
    place_of,
    place_options,
    write_methods,
)
from harness.core import method
from harness.core.console import print_table
from harness.core.record import Record
from harness.devices import budgets
from harness.jobs.progress import reporter
from harness.jobs.sweep import Sweep, resolve
from harness.places.docker_image import image

EXIT = {
    "crash": 3, "killed": 3, "oom-device": 4, "oom-host": 4, "does-not-fit": 4, "timeout": 6, "unavailable": 7,
    "interrupted": 130,
}  # fmt: skip
GATE_FAILED, USAGE, INTERRUPTED = 5, 2, 130
# A probe of `search largest`, and the depth beyond which none is made, where the words are not given.
PROBE = {"steps": "5", "warmup": "2", "num_layers": str(2**20)}
EXAMPLES = """\b
Examples:
  ./run.sh demo
  ./run.sh -m stronghold -l 4 -h 256 -b 2
  ./run.sh -m all -l 4 -h 256 -b 2
  ./run.sh sweep -m resident,stronghold -l 2:8:2 -w 1,2,4
  ./run.sh plan -m all -l 32 --machine v100-vm
"""


class Door(click.Group):
    """`run` is understood where no verb is given, so that the published calls stay as they are."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if len(args) > 2 and args[0] == "--methods" and args[2] in self.commands:
            args = [args[2], *args[:2], *args[3:]]
        if args and args[0].startswith("-") and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(context, help_last(args))

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        write_methods(formatter, context.params.get("methods_folder") or ())
        super().format_epilog(context, formatter)


@click.group(
    cls=Door,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["--help"], "show_default": True},
    invoke_without_command=True,
)
@methods_option
@click.pass_context
def door(context: click.Context, methods_folder: tuple[Path, ...]) -> None:
    """Train models larger than the device, by several methods, under one clock and one gate.

    A method whose training is not the reference's has no throughput.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@door.command(cls=JobCommand, epilog=EXAMPLES)
@job_options
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a timeline of the last three steps, for Perfetto or chrome://tracing.",
)
@place_options
def run(**words: Any) -> None:
    """Train by one method, by several, or by all; what has a record is not run again (--rerun)."""
    execute(words)


@door.command(cls=JobCommand, epilog=EXAMPLES)
@job_options
@place_options
def sweep(**words: Any) -> None:
    """The same over every combination of the lists given; a point that fails is a result and not an error."""
    execute(words, is_sweep=True)


@door.command(cls=JobCommand)
@job_options
@click.option("--exact", is_flag=True, help="Add what a run without memory finds on the device, for methods with one.")
def plan(exact: bool, **words: Any) -> None:
    """What each method would need, and the largest depth that should fit; runs nothing, allocates nothing."""
    from harness.jobs import plan_table, published_laws

    folders = tuple(path.resolve() for path in words["methods_folder"])
    jobs = make_jobs(words, folders)
    found = plan_table.rows(jobs, folders, exact)
    named = words["machine_name"] == published_laws.MACHINE and published_laws.is_published(jobs[0].workload)
    published = plan_table.published_rows(jobs[0].budget) if named else []
    if words["as_json"]:
        for row in (*found, *({"published": row} for row in published)):
            print(json.dumps(row))
        return
    if all("error" in row for row in found):
        raise ValueError("; ".join(dict.fromkeys(row["error"] for row in found)))
    plan_table.show(found, exact)
    if published:
        plan_table.show_published(published)


@door.group(invoke_without_command=True)
@click.pass_context
def search(context: click.Context) -> None:
    """Find the edge of what trains here, by real runs."""
    if context.invoked_subcommand is None:
        raise ValueError("search what? ./run.sh search largest -m METHOD finds the largest depth that trains")


@search.command(cls=JobCommand, context_settings={"default_map": PROBE})
@click.option("--repeats", type=click.IntRange(1), default=1, help="Fresh processes that decide each side of the edge.")
@job_options
def largest(**words: Any) -> None:
    """The largest depth that each method trains in these budgets (-l bounds it), what fails above it and why.

    Every probe is a run with a record: the same call again goes on, or only shows the table.
    """
    from harness.jobs.largest_depth import FEWEST_STEPS, Probes, find, texts

    if words["steps"] < FEWEST_STEPS:
        raise ValueError(f"--steps {words['steps']} is too few for a probe: {FEWEST_STEPS} at least")
    folders = tuple(path.resolve() for path in words["methods_folder"])
    jobs = make_jobs({**words, "num_layers": [1]}, folders)
    budgets.check(jobs[0].budget, jobs[0].device, max(job.world_size for job in jobs))
    check_corpus(jobs[0].workload)
    with reporter(words["as_json"]) as report:
        sweep = Sweep(words["results"], folders, report, words["rerun"])
        probes = [Probes(sweep, job) for job in jobs]
        check_writable(words["results"])
        found = [find(method_probes, words["repeats"], max(words["num_layers"])) for method_probes in probes]
    records = [result.pop("record") for result in found]
    if words["as_json"]:
        for result in found:
            print(json.dumps({"event": "answer", **result}))
    else:
        rows = [texts(result) for result in found]
        print_table(list(rows[0]), [row.values() for row in rows], has_lines=True)
    sys.exit(exit_code([record for record in records if record], is_sweep=True))


@door.command()
@click.argument("number", metavar="N|overlap|all")
@click.option(
    "--profile", "name", metavar="NAME", help="demo (minutes, on a CPU), quick, paper or fit (to this machine)."
)
@click.option("--machine", "on", metavar="NAME", help="Whose memories the budgets are: v100-vm is the published.")
@click.option("--budget", "seconds", type=Duration(), help="Time for what is missing; the plan says what is left out.")
@click.option("--repeats", type=click.IntRange(1), help="Processes a point; from 3 on there are intervals.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=method.ROOT / "results")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Of tables and figures: RESULTS/figures.")
@click.option("--extract", "only", flag_value="extract", help="Only write the table of the records there are.")
@click.option("--draw", "only", flag_value="draw", help="Only draw the table there is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def case(**words: Any) -> None:
    """Run what is missing for a figure of the papers, or for all, write its table and draw it; overlap is a figure of
    ours: what hides behind what in one step, by a trace."""
    from harness.evidence import collect

    if words["only"] is None:
        check_writable(words["results"])
    if words["out"]:
        check_writable(words["out"], "--out")
    sys.exit(exit_code(collect.main(**words), is_sweep=True))


@door.command()
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=method.ROOT / "results")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def setup(results: Path, as_json: bool) -> None:
    """Compile now what the methods and the simulated device need, so that no later call waits for it."""
    from harness.cli import demo

    check_writable(results)
    demo.setup(results, as_json)


@door.command(name="demo")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), default=method.ROOT / "results")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def demo_(results: Path, as_json: bool) -> None:
    """All at a tiny size, in minutes and without a GPU: every method, the six figures, the report."""
    from harness.cli import demo

    check_writable(results)
    sys.exit(exit_code(demo.demo(results, as_json), is_sweep=True))


for verb in (*result_verbs.VERBS, doctor, image):
    door.add_command(verb)


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
    if words["on"] == "local":
        budgets.check(jobs[0].budget, jobs[0].device, max(job.world_size for job in jobs))
    if words.get("trace"):
        if len(asked) > 1 or words["on"] != "local" or jobs[0].world_size > 1:
            raise ValueError("--trace is of one run in one process, here: one method and size, and no --on or --ranks")
        check_writable(words["trace"].parent, "--trace")
        jobs = [dataclasses.replace(jobs[0], trace=str(words["trace"].resolve()))]
    place = place_of(words, jobs[0].device)
    check_corpus(jobs[0].workload)
    check_writable(words["results"])
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    with reporter(words["as_json"]) as report:
        records = Sweep(words["results"], folders, report, words["rerun"], place).run(jobs)
    sys.exit(exit_code(records, is_sweep))


def exit_code(records: list[Record], is_sweep: bool) -> int:
    """0 fine, 3 crash, 4 out of memory or disk, 5 failed the gate, 6 timeout, 7 unavailable, 130 interrupted.

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
    """The door: every error of the user's is one line on standard error and exit code 2. SIGTERM is as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        door.main(standalone_mode=False, prog_name="./run.sh")
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted: the same call again goes on where this one stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        hint = "; -h is the hidden size, help is --help" if "'-h'" in error.format_message() else "; see --help"
        print(f"error: {error.format_message().rstrip('.')}{hint}", file=sys.stderr)
        sys.exit(USAGE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" in {error.filename}" if error.filename else ""
        print(f"error: no room left on the disk{where}: free some, and the same call goes on", file=sys.stderr)
        sys.exit(EXIT["does-not-fit"])
    except (ValueError, method.Unavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE if isinstance(error, ValueError) else EXIT["unavailable"])
