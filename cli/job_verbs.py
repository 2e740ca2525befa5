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
from cli.job_options import (
    WithMethods,
    check_files,
    job_options,
    make_jobs,
    place_of,
    place_options,
    place_words,
)
from cli.options import FILE, FOLDER, Duration, check_writable
from harness.base.console import print_table
from harness.base.whole_file import check_new, check_replaceable
from harness.core.job import Budget, Job, Room
from harness.devices import named_machines
from harness.devices.room import check_budget, host_bytes_at, less_imports, room_within
from harness.jobs import size_axis, verdict_table
from harness.jobs.next_calls import next_calls_of
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
def run(**words: Any) -> None:
    """Train by one method, several or all. A job that has a record is not run again, unless --rerun is given."""
    _train(words)


@click.command(cls=WithMethods, epilog=EXAMPLES)
@job_options
@click.option(
    "--out", type=FILE, metavar="FILE", help="Write a table in Markdown: a verdict for each method and model."
)
@place_options
def sweep(**words: Any) -> None:
    """Train every combination of the values given. A job that does not fit is a result, not an error."""
    _train(words, is_sweep=True)


@click.command(cls=WithMethods)
@job_options
@click.option(
    "--exact",
    is_flag=True,
    help="Also show the exact peak of device memory, by rehearsing the training on tensors without memory.",
)
def plan(exact: bool, **words: Any) -> None:
    """Show what each method needs, and the largest depth that should fit. It neither trains nor allocates."""
    from cli.advice import plan_table
    from papers import laws as published_laws

    folders, name = _folders(words), words["machine_name"]
    jobs = make_jobs(words, folders)
    asked = Budget(words["device_bytes"], words["host_bytes"])
    is_elsewhere = bool(name) and not words["scale"]
    if is_elsewhere:
        host = host_bytes_at(named_machines.load(name), asked)
        jobs = [
            dataclasses.replace(job, budget=dataclasses.replace(job.budget, host_bytes=host)) for job in jobs
        ]
    # A plan needs no device. It takes cpu in place of sim, because sim cannot simulate several ranks or devices.
    jobs = [
        dataclasses.replace(job, device="cpu") if job.device == "sim" and _num_devices(job) > 1 else job
        for job in jobs
    ]
    found = [plan_table.row(job, folders, exact, page_locks=is_elsewhere) for job in jobs]
    is_published = name == named_machines.PUBLISHED and published_laws.is_published(jobs[0].workload)
    published = plan_table.published_rows(_published_room(name, asked)) if is_published else []
    if words["as_json"]:
        for row in (*found, *({"published": row} for row in published)):
            print(json.dumps(row))
        return
    if all("error" in row for row in found):
        raise ValueError("; ".join(dict.fromkeys(row["error"] for row in found)))
    if not words["scale"]:
        room = room_within(jobs[0].budget, jobs[0].device)
        several = max(job.options.get("num_devices", 1) for job in jobs)
        fills = room if is_elsewhere else less_imports(room, jobs[0].budget, jobs[0].device, several)
        print(memories_text(name, asked, fills, jobs[0].device))
    plan_table.show(found, exact)
    if published:
        plan_table.show_published(published)


def _num_devices(job: Job) -> int:
    return max(job.world_size, int(job.options.get("num_devices", 1)))


def _published_room(name: str, asked: Budget) -> Room:
    """Return the published machine's memories in full, without a reserve: the published laws already count the bytes
    that its allocators reserved."""
    there = named_machines.load(name)
    host = asked.host_bytes or there.room.host_bytes
    return Room(asked.device_bytes or there.device_bytes, host, rates=there.room.rates)


@click.group(invoke_without_command=True)
@click.pass_context
def search(context: click.Context) -> None:
    """Find the largest size that trains here, by real runs."""
    if context.invoked_subcommand is None:
        raise ValueError("search: expected the verb largest, got none; try ./run.sh search largest -m METHOD")


@search.command(cls=WithMethods, context_settings={"default_map": PROBE})
@click.option(
    "--of",
    type=click.Choice(size_axis.OF),
    default=size_axis.LAYERS,
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
def largest(context: click.Context, of: str, **words: Any) -> None:
    """Find the largest size that each method trains in these budgets, and what fails above it. If the option of the
    searched size (-l, -b or --seq) is given, it is the search's upper limit.

    Every probe is a run with a record. So the same call continues an interrupted search, or shows the table of a
    finished one.
    """
    from harness.jobs.largest_size import FEWEST_STEPS, Probes, find, texts

    if words["steps"] < FEWEST_STEPS:
        raise ValueError(f"--steps: expected at least {FEWEST_STEPS} in a search, got {words['steps']}")
    probe, folders = options.probe_of(words), _folders(words)
    if len(words["model"]) > 1:
        raise ValueError("expected one model, got several; try a search for each")
    grows = size_axis.OPTIONS[of]
    is_given = context.get_parameter_source(grows) is ParameterSource.COMMANDLINE
    given = max(words[grows]) if is_given else None
    parts = size_axis.parts_of(words["micro_batches"], words["world_size"] or 1)
    least = {"num_layers": 1, "batch_size": parts, "seq_len": max(words["seq_len"])}[grows]
    jobs = make_jobs({**words, grows: [least]}, folders)
    check_budget(jobs[0].budget, jobs[0].device, max(job.world_size for job in jobs))
    check_files(jobs[0].workload)
    with reporter(words["as_json"]) as report:
        runs = Sweep(words["results"], folders, report, words["rerun"], probe=probe)
        probes = [Probes(runs, job, of) for job in jobs]
        check_writable(words["results"])
        found = [find(each, words["repeats"], each.most(given)) for each in probes]
    records = [result.pop("record") for result in found]
    if words["as_json"]:
        for result in found:
            print(json.dumps({"event": "answer", **result}))
    else:
        rows = [texts(result) for result in found]
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
def case(**words: Any) -> None:
    """Make one figure of the papers, or all: run what is missing, write the table, draw the figure.

    Four figures are not from the papers, and `all` leaves them out: 8, throughput over the number of ranks; 9,
    throughput over the batch; 10, the releases of engines that train (see the verb releases); and overlap, the copies
    that run at the same time as compute in one step.
    """
    from papers.claims.collect import CaseCall, collect

    if words["only"] is None:
        check_writable(words["results"])
    if words["out"]:
        check_writable(words["out"], "--out")
    probe = options.probe_of(words)
    sys.exit(exit_codes.of_records(collect(CaseCall(**words, probe=probe)), is_sweep=True))


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


def _train(words: dict[str, Any], is_sweep: bool = False) -> None:
    probe, folders = options.probe_of(words), _folders(words)
    asked = make_jobs(words, folders)
    resolved = [_resolved(job, folders) for job in asked]
    plans = [planned for planned in resolved if isinstance(planned, Planned)]
    left_out = [reason for reason in resolved if isinstance(reason, str)]
    if not plans:
        raise ValueError(left_out[0])
    jobs = [planned.job for planned in plans]
    if words["on"] == "local":
        check_budget(jobs[0].budget, jobs[0].device, max(job.world_size for job in jobs))
    if words.get("trace"):
        if len(asked) > 1 or words["on"] != "local":
            raise ValueError("--trace needs a single run on this machine: one method, one size, no --on")
        check_replaceable(words["trace"], timeline.HEAD.encode())
        check_writable(words["trace"].parent, "--trace")
        plans = [
            plans[0]._replace(job=dataclasses.replace(plans[0].job, trace=str(words["trace"].resolve())))
        ]
    if words.get("save"):
        if (
            len(asked) > 1
            or words["on"] != "local"
            or len(jobs[0].workloads()) > 1
            or jobs[0].workload.config is None
        ):
            raise ValueError(
                "--save needs a single run on this machine, of one model with a config.json: one method, one size, no"
                " --on"
            )
        check_new(words["save"])
        check_writable(words["save"].resolve().parent, "--save")
        plans = [plans[0]._replace(job=dataclasses.replace(plans[0].job, save=str(words["save"].resolve())))]
    if words.get("out"):
        if verdict_table.columns(asked) is None:
            raise ValueError("--out: expected models of different layers or width as columns, got two alike")
        check_replaceable(words["out"], f"# {verdict_table.TITLE}".encode())
        check_writable(words["out"].resolve().parent, "--out")
    place = place_of(words, jobs[0].device)
    if place:
        for job in jobs:
            place.check(job, folders)
    for load in dict.fromkeys(job.workload for job in jobs):
        check_files(load)
    check_writable(words["results"])
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    if words["dry_run"]:
        return _draft(place, jobs, words["results"], folders)
    with reporter(words["as_json"]) as report:
        records = Sweep(words["results"], folders, report, words["rerun"], place, probe).run(plans)
    if len(records) > 1 and not words["as_json"]:
        print_results(records)
    if len(words["model"]) > 1 or words.get("out"):
        ended = iter(records)
        _show_verdicts(asked, [each if isinstance(each, str) else next(ended) for each in resolved], words)
    refused = [record for record in records if (record.status, record.phase) == ("does-not-fit", "plan")]
    if not is_sweep and len(refused) == len(asked):
        _advise(asked, folders, words)
    sys.exit(exit_codes.of_records(records, is_sweep))


def _resolved(job: Job, folders: tuple[Path, ...]) -> Planned | str:
    """Return the planned job; if its method cannot train it, return the reason as text."""
    try:
        return resolve(job, folders)
    except ValueError as error:
        return f"{job.method}, {job.workload.layers_text}: {error}"


def _show_verdicts(asked: list[Job], outcomes: list[verdict_table.Outcome], words: dict[str, Any]) -> None:
    """Print the verdicts as a table, methods by models, and write it to the file of --out. Do nothing if two models
    have the same layers and width."""
    if (models := verdict_table.columns(asked)) is None:
        return
    heads, rows = ["method", *models.values()], verdict_table.rows(asked, outcomes)
    if not words["as_json"]:
        print_table(heads, rows, has_lines=True)
    if words.get("out"):
        call = shlex.join(["./run.sh", *sys.argv[1:]])
        refused: dict[str, str] = {}  # by method: its first refusal
        for job, outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome, str):
                refused.setdefault(job.method, f"refused, such as {outcome}")
        notes = refused.values()
        verdict_table.write_markdown(words["out"], verdict_table.TITLE, call, heads, rows, notes)


def _draft(place: Place | None, jobs: list[Job], results: Path, folders: tuple[Path, ...]) -> None:
    """Print the text that would be submitted to the place to run these jobs. Raises ValueError if no place was named,
    or if the place submits no text."""
    if place is None:
        raise ValueError(no_draft())
    runs = Sweep(results, folders, place=place)
    print(place.draft([(job, runs.key(job)) for job in jobs], folders))


def _advise(jobs: list[Job], folders: tuple[Path, ...], words: dict[str, Any]) -> None:
    """Print commands that the user may call instead of these jobs, which do not fit. For another place than this
    machine, leave out the commands that put layers on a disk of this machine."""
    elsewhere = place_words(words)
    for call, why in next_calls_of(jobs, folders):
        if elsewhere and "--disk" in shlex.split(call):
            continue
        call = shlex.join([*shlex.split(call), *elsewhere])
        print(
            json.dumps({"event": "next", "call": call, "why": why})
            if words["as_json"]
            else f"try {call}\n    {why}"
        )


def _folders(words: dict[str, Any]) -> tuple[Path, ...]:
    return tuple(path.resolve() for path in words["methods_folder"])
