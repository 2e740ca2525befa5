"""The verbs that train or plan: run, sweep, plan, search largest, case, setup, demo."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli import exit_codes, options
from cli.job_options import Call, Output, WithMethods, check_files, job_options, make_jobs, method_folders
from cli.options import FILE, FOLDER, Duration, check_writable
from cli.place_choice import place_options
from harness.base.console import print_table
from harness.base.whole_file import check_new, check_replaceable
from harness.core.job import Budget, Job, Room
from harness.core.method import workloads_of
from harness.devices import named_machines
from harness.devices.room import check_budget, host_bytes_at, less_imports, room_within
from harness.gate.probe import Extent
from harness.jobs import size_search, verdict_table
from harness.jobs.command import suggest_commands
from harness.jobs.progress import print_results, reporter
from harness.jobs.sweep import Sweep
from harness.plan.fit import Planned, resolve
from harness.plan.training_place import memories_text
from harness.run import timeline
from harness.run.place import Place, no_draft

PROBE = {"steps": "5", "warmup": "2"}  # defaults of --steps and --warmup for `search largest`
EXAMPLES = """\b
Examples:
  ./run.sh demo
  ./run.sh -m stronghold -l 4 -h 256 -b 2 --seq 256
  ./run.sh -m all -l 4 -h 256 -b 2
  ./run.sh sweep -m resident,stronghold -l 2:8:2 -w 1,2,4
  ./run.sh sweep -m l2l,stronghold --model gpt2,Qwen3-0.6B -l 4 -b 1 --seq 256
  ./run.sh plan -m all -l 32 --machine v100-vm
"""


@click.command(cls=WithMethods, epilog=EXAMPLES)
@job_options
@click.option(
    "--trace",
    type=FILE,
    metavar="FILE",
    help="Write a timeline of the last three steps, for Perfetto or chrome://tracing.",
)
@click.option(
    "--save",
    type=FOLDER,
    metavar="DIR",
    help="Write the trained weights and their config.json into a new folder, for transformers.",
)
@place_options
@options.with_extent
def run(extent: Extent | None, **values: Any) -> None:
    """Train by one method, several or all. A job that has a record is not run again, unless --rerun is given."""
    _train_jobs(Call.of(values, extent))


@click.command(cls=WithMethods, epilog=EXAMPLES)
@job_options
@click.option(
    "--out", type=FILE, metavar="FILE", help="Write a table in Markdown: a verdict for each method and model."
)
@place_options
@options.with_extent
def sweep(extent: Extent | None, **values: Any) -> None:
    """Train every combination of the values given. A job that does not fit is a result, not an error."""
    _train_jobs(Call.of(values, extent), is_sweep=True)


@click.command(cls=WithMethods)
@job_options
@click.option(
    "--exact",
    is_flag=True,
    help="Also show the exact peak of device memory, by rehearsing the training on tensors without memory.",
)
def plan(exact: bool, as_json: bool, **values: Any) -> None:
    """Show what each method needs, and the largest depth that should fit. It neither trains nor allocates."""
    from cli import plan_table
    from papers import laws as published_laws

    folders, machine_name = method_folders(values), values["machine_name"]
    jobs = make_jobs(values, folders)
    limits = Budget(values["device_bytes"], values["host_bytes"])
    is_elsewhere = bool(machine_name) and not values["scale"]
    if is_elsewhere:
        host = host_bytes_at(named_machines.load(machine_name), limits)
        jobs = [
            dataclasses.replace(job, budget=dataclasses.replace(job.budget, host_bytes=host)) for job in jobs
        ]
    # A plan needs no device. It takes cpu in place of sim, because sim cannot simulate several ranks or devices.
    jobs = [
        dataclasses.replace(job, device="cpu") if job.device == "sim" and _num_devices(job) > 1 else job
        for job in jobs
    ]
    rows = [plan_table.plan_row(job, folders, exact, page_locks=is_elsewhere) for job in jobs]
    published = []
    if machine_name == named_machines.PUBLISHED and published_laws.is_published(jobs[0].workload):
        published = plan_table.published_limit_rows(_published_room(machine_name, limits))
    if as_json:
        for row in (*rows, *({"published": row} for row in published)):
            print(json.dumps(row))
        return
    if all("error" in row for row in rows):
        raise ValueError("; ".join(dict.fromkeys(row["error"] for row in rows)))
    if not values["scale"]:
        room = room_within(jobs[0].budget, jobs[0].device)
        several = max(job.options.get("num_devices", 1) for job in jobs)
        fills = room if is_elsewhere else less_imports(room, jobs[0].budget, jobs[0].device, several)
        print(memories_text(machine_name, limits, fills, jobs[0].device))
    plan_table.print_plans(rows, exact)
    if published:
        plan_table.print_published_limits(published)


def _num_devices(job: Job) -> int:
    return max(job.world_size, int(job.options.get("num_devices", 1)))


def _published_room(name: str, limits: Budget) -> Room:
    """Return the published machine's memories in full, without a reserve: the published laws already count the bytes
    that its allocators reserved."""
    machine = named_machines.load(name)
    host = limits.host_bytes or machine.room.host_bytes
    return Room(limits.device_bytes or machine.device_bytes, host, rates=machine.room.rates)


@click.group(invoke_without_command=True)
@click.pass_context
def search(context: click.Context) -> None:
    """Find the largest size that trains here, by real runs."""
    if context.invoked_subcommand is None:
        raise ValueError("search: expected the verb largest, got none; try ./run.sh search largest -m METHOD")


@search.command(cls=WithMethods, context_settings={"default_map": PROBE})
@click.option(
    "--of",
    type=click.Choice(size_search.AXES),
    default=size_search.LAYERS,
    help="Size to search: layers, samples per step, tokens per sample, or tokens per step.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=1,
    help="Runs of the largest size found, and of the next size.",
)
@job_options
@click.pass_context
@options.with_extent
def largest(
    context: click.Context, of: str, repeats: int, extent: Extent | None, as_json: bool, **values: Any
) -> None:
    """Find the largest size that each method trains in these budgets, and what fails above it. If the option of the
    searched size (-l, -b or --seq) is given, it is the search's upper limit.

    Every probe is a run with a record. So the same call continues an interrupted search, or shows the table of a
    finished one.
    """
    from harness.jobs.largest_size import FEWEST_STEPS, Probes, answer_texts, find_largest

    if values["steps"] < FEWEST_STEPS:
        raise ValueError(f"--steps: expected at least {FEWEST_STEPS} in a search, got {values['steps']}")
    if len(values["model"]) > 1:
        raise ValueError("expected one model, got several; try a search for each")
    grows = size_search.GROWN_FIELDS[of]
    is_limited = context.get_parameter_source(grows) is ParameterSource.COMMANDLINE
    limit = max(values[grows]) if is_limited else None
    parts = size_search.total_micro_batches(values["micro_batches"], values["world_size"] or 1)
    least = {"num_layers": 1, "batch_size": parts, "seq_len": max(values["seq_len"])}[grows]
    folders, folder = method_folders(values), values["results"]
    jobs = make_jobs({**values, grows: [least]}, folders)
    check_budget(jobs[0].budget, jobs[0].device, max(job.world_size for job in jobs))
    check_files(jobs[0].workload)
    with reporter(as_json) as report:
        runs = Sweep(folder, folders, report, values["rerun"], probe=extent)
        probes = [Probes(runs, job, of) for job in jobs]
        check_writable(folder)
        answers = [find_largest(probe, repeats, probe.size_limit(limit)) for probe in probes]
    records = [answer.pop("record") for answer in answers]
    if as_json:
        for answer in answers:
            print(json.dumps({"event": "answer", **answer}))
    else:
        rows = [answer_texts(answer) for answer in answers]
        print_table(list(rows[0]), [row.values() for row in rows], has_lines=True)
    sys.exit(exit_codes.of_records([record for record in records if record], is_sweep=True))


@click.command()
@click.argument("number", metavar="N|overlap|all")
@click.option(
    "--profile",
    metavar="NAME",
    help="Scale of the runs: demo (minutes), quick, paper, or fit (this machine).",
)
@click.option(
    "--machine", type=options.MachineName(), help="Use the memories of this machine in machines.yaml."
)
@click.option(
    "--budget", "seconds", type=Duration(), help="Most time for missing runs; the other runs are listed."
)
@click.option(
    "--repeats", type=click.IntRange(1), help="Number of runs of each job; a confidence interval needs 3."
)
@options.results
@options.added
@click.option("--out", type=FOLDER, help="Folder of tables and figures; default: RESULTS/figures.")
@click.option(
    "--extract", "only", flag_value="extract", help="Only write the table from the records; run nothing."
)
@click.option("--draw", "only", flag_value="draw", help="Only draw the figure from the table.")
@click.option(
    "--where",
    multiple=True,
    metavar="NAME=VALUE",
    help="With --extract or --draw: use only records whose field NAME is VALUE.",
)
@options.probe
@options.as_json
def case(extent: Extent | None, **values: Any) -> None:
    """Make one figure of the papers, or all: run what is missing, write the table, draw the figure.

    Four figures are not from the papers, and `all` leaves them out: 8, throughput over the number of ranks; 9,
    throughput over the batch; 10, the releases of engines that train (see the verb releases); and overlap, the copies
    that run at the same time as compute in one step.
    """
    from papers.claims.campaign import CaseCall, run_case

    if values["only"] is None:
        check_writable(values["results"])
    if values["out"]:
        check_writable(values["out"], "--out")
    sys.exit(exit_codes.of_records(run_case(CaseCall(**values, probe=extent)), is_sweep=True))


@click.command()
@options.results
@options.as_json
def setup(results: Path, as_json: bool) -> None:
    """Compile what the methods and the simulated device need, so that no later call waits for a compiler."""
    from cli.demo import set_up

    check_writable(results)
    set_up(results, as_json)


@click.command()
@options.results
@click.option("--quick", is_flag=True, help="Show only two methods and three figures, in about a minute.")
@options.as_json
def demo(results: Path, quick: bool, as_json: bool) -> None:
    """Show everything at a tiny size, in minutes and without a GPU: every method, the seven figures, the report."""
    from cli.demo import show

    check_writable(results)
    sys.exit(exit_codes.of_records(show(results, as_json, quick), is_sweep=True))


VERBS = (run, sweep, plan, search, case, setup, demo)


def _train_jobs(call: Call, is_sweep: bool = False) -> None:
    """Run the jobs of a call, print how they ended, and exit with their code."""
    outcomes = [_planned_or_reason(job, call.folders) for job in call.jobs]
    planned_jobs = [outcome for outcome in outcomes if isinstance(outcome, Planned)]
    left_out = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if not planned_jobs:
        raise ValueError(left_out[0])
    jobs = [planned.job for planned in planned_jobs]
    if call.place.is_local:
        check_budget(jobs[0].budget, jobs[0].device, max(job.world_size for job in jobs))
    planned_jobs = _with_files(planned_jobs, call)
    place = call.place.place(jobs[0].device, call.folders)
    if place:
        for job in jobs:
            place.check(job, call.folders)
    for workload in dict.fromkeys(job.workload for job in jobs):
        check_files(workload)
    check_writable(call.results)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if call.place.is_dry_run:
        return _print_draft(place, jobs, call.results, call.folders)
    with reporter(call.output.as_json) as report:
        records = Sweep(call.results, call.folders, report, call.rerun, place, call.extent).run(planned_jobs)
    if len(records) > 1 and not call.output.as_json:
        print_results(records)
    if call.output.shows_verdicts:
        remaining_records = iter(records)
        ends = [outcome if isinstance(outcome, str) else next(remaining_records) for outcome in outcomes]
        _print_verdicts(call.jobs, ends, call.output)
    refused = [record for record in records if (record.status, record.phase) == ("does-not-fit", "plan")]
    if not is_sweep and len(refused) == len(call.jobs):
        _print_next_calls(call)
    sys.exit(exit_codes.of_records(records, is_sweep))


def _planned_or_reason(job: Job, folders: tuple[Path, ...]) -> Planned | str:
    """Return the planned job; if its method cannot train it, return the reason as text."""
    try:
        return resolve(job, folders)
    except ValueError as error:
        return f"{job.method}, {job.workload.layers_text}: {error}"


def _with_files(planned_jobs: list[Planned], call: Call) -> list[Planned]:
    """Check the files of --trace, --save and --out, and return the plans of jobs that write the first two."""
    output, first = call.output, planned_jobs[0].job
    is_single = len(call.jobs) == 1 and call.place.is_local
    if output.trace:
        if not is_single:
            raise ValueError("--trace needs a single run on this machine: one method, one size, no --on")
        check_replaceable(output.trace, timeline.FILE_START.encode())
        check_writable(output.trace.parent, "--trace")
        first = dataclasses.replace(first, trace=str(output.trace.resolve()))
    if output.save:
        if not is_single or len(workloads_of(first)) > 1 or first.workload.config is None:
            raise ValueError(
                "--save needs a single run on this machine, of one model with a config.json: one method, one size, no"
                " --on"
            )
        check_new(output.save)
        check_writable(output.save.resolve().parent, "--save")
        first = dataclasses.replace(first, save=str(output.save.resolve()))
    if output.table:
        if verdict_table.model_heads(call.jobs) is None:
            raise ValueError("--out: expected models of different layers or width as columns, got two alike")
        check_replaceable(output.table, f"# {verdict_table.TABLE_TITLE}".encode())
        check_writable(output.table.resolve().parent, "--out")
    return [planned_jobs[0]._replace(job=first), *planned_jobs[1:]]


def _print_verdicts(jobs: list[Job], outcomes: list[verdict_table.Outcome], output: Output) -> None:
    """Print the verdicts as a table, methods by models, and write it to the file of --out. Do nothing if two models
    have the same layers and width."""
    if (models := verdict_table.model_heads(jobs)) is None:
        return
    heads, rows = ["method", *models.values()], verdict_table.verdict_rows(jobs, outcomes)
    if not output.as_json:
        print_table(heads, rows, has_lines=True)
    if output.table:
        command = shlex.join(["./run.sh", *sys.argv[1:]])
        refused: dict[str, str] = {}  # by method: its first refusal
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, str):
                refused.setdefault(job.method, f"refused, such as {outcome}")
        table = verdict_table.Table(verdict_table.TABLE_TITLE, heads, rows, list(refused.values()))
        verdict_table.write_markdown(output.table, command, table)


def _print_draft(place: Place | None, jobs: list[Job], results: Path, folders: tuple[Path, ...]) -> None:
    """Print the text that would be submitted to the place to run these jobs. Raises ValueError if no place was named,
    or if the place submits no text. `results`: the folder of records; `folders`: the folders of methods."""
    if place is None:
        raise ValueError(no_draft())
    dry_sweep = Sweep(results, folders, place=place)
    print(place.draft([(job, dry_sweep.key(job)) for job in jobs], folders))


def _print_next_calls(call: Call) -> None:
    """Print commands that the user may call instead of these jobs, which do not fit. For another place than this
    machine, leave out the commands that put layers on a disk of this machine."""
    for command, why in suggest_commands(call.jobs, call.folders):
        arguments = shlex.split(command)
        if not call.place.is_local and "--disk" in arguments:
            continue
        text = shlex.join([*arguments, *call.place.arguments()])
        if call.output.as_json:
            print(json.dumps({"event": "next", "call": text, "why": why}))
        else:
            print(f"try {text}\n    {why}")
