"""The verbs of pipelines on machines that come and go: ./run.sh varuna profile, configure, simulate, launch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import options
from cli.options import FILE, FOLDER, Bytes, Finite, Numbers, check_writable
from harness.base.console import print_table
from harness.base.counted import counted
from harness.core.job import Workload, gib
from harness.core.rates import Rates
from harness.devices import named_machines
from harness.plan.training_place import device_source
from methods.pipeline.config.measured_profile import measure_profile
from methods.pipeline.config.profile import FILE as PROFILE_FILE
from methods.pipeline.launch.run import launch
from methods.pipeline.schedule import SCHEDULES, SLOTS

if TYPE_CHECKING:
    from methods.pipeline.config.auto_config import AutoConfig, ConfigRow

DOES_NOT_FIT = 4
MOST_PASSES = 10**8  # most stages times micro-batches that `simulate` takes; this many take some minutes
SECONDS = Finite(0, 1e9)  # up to 30 years
MOST_ROWS = 20  # most rows of the printed table
# samples: the largest micro-batch that `configure` tries if times come from a machine's rates
LARGEST_CHUNK = 64
EXAMPLES = """\b
Examples:
  ./run.sh varuna profile -l 8 -h 256 --ranks 2
  ./run.sh varuna configure --profile profile --gpus 4 --batch 16
  ./run.sh varuna configure --model varuna-8.3b --machine h200 --gpus 256 --batch 8192
  ./run.sh varuna simulate --stages 9 --micro-batches 64 --send 0.5 --jitter 0.3
"""

model = options.together(
    options.model,
    click.option("-l", "num_layers", type=int, help="Number of layers."),
    click.option("-h", "hidden_size", type=int, default=2048, help="Hidden size."),
    options.num_heads,
    options.seq_len,
    click.option("--vocab", "vocab_size", type=int, default=50304, help="Vocabulary size."),
    options.dtype,
)
rates = options.together(
    click.option(
        "--machine",
        "machine_name",
        type=options.MachineName(),
        help="Compute a model's times from the rates that machines.yaml has for this machine.",
    ),
    options.machines,
    click.option(
        "--network", type=Bytes(), help="Speed of the link between two stages, in bytes per second."
    ),
)


@click.group(invoke_without_command=True, epilog=EXAMPLES)
@click.pass_context
def varuna(context: click.Context) -> None:
    """Pipelines on machines that come and go: measure, choose stages, simulate a step, launch a script."""
    if context.invoked_subcommand is None:
        raise ValueError(
            "varuna: expected a verb; try ./run.sh varuna configure --profile FOLDER --gpus N --batch B"
        )


@varuna.command()
@model
@click.option(
    "--ranks", "num_ranks", type=click.IntRange(1), default=1, help="Processes that measure at once."
)
@click.option(
    "--micro-batches",
    "sizes",
    type=Numbers(),
    default="1,2,4,8",
    help="Micro-batch sizes to measure, in samples.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="auto: cuda if each rank has a GPU of its own, else cpu.",
)
@click.option("--out", "folder", type=FOLDER, default="profile", help="Folder to write the profile to.")
def profile(num_ranks: int, sizes: list[int], device: str, folder: Path, **words: Any) -> None:
    """Measure the published GPT, or a model by its config.json, on this machine.

    The profile holds the seconds and bytes of the model's sections, of the sections' updates, of messages between
    stages and of all-reduces. To measure a model of your own, use the Python class Profiler.
    """
    if not _names_model(words):
        raise ValueError("expected -l and -h, or --model NAME, got neither")
    workload = _workload(words)
    check_writable(folder, "--out")
    tell = lambda event: print(event["text"], file=sys.stderr, flush=True)  # noqa: E731
    if note := measure_profile(workload, sizes, num_ranks, folder, device, tell):
        print(note, file=sys.stderr)
    print(folder / PROFILE_FILE)


@varuna.command()
@click.option(
    "--profile",
    "folder",
    type=FOLDER,
    help="Folder of a profile; default: predict a model's times from the rates of --machine.",
)
@click.option(
    "--gpus", "num_gpus", type=int, required=True, help="Number of devices in all machines together."
)
@click.option("--gpus-per-vm", type=int, default=1, help="Number of devices in each machine.")
@click.option("--batch", "batch_size", type=int, required=True, help="Samples per step, over all replicas.")
@click.option(
    "--memory",
    "capacity",
    type=Bytes(),
    help="Memory of each device; default: the profile's, or that of --machine.",
)
@model
@rates
@options.as_json
def configure(
    folder: Path | None,
    num_gpus: int,
    gpus_per_vm: int,
    batch_size: int,
    capacity: int | None,
    as_json: bool,
    **words: Any,
) -> None:
    """Choose the number of stages and the micro-batch size, and show the best choices.

    The times come from a profile, or from the rates of a machine. Exit code 4: no choice fits.
    """
    from methods.pipeline.config.auto_config import AutoConfig
    from methods.pipeline.config.gpt_costs import GptCosts
    from methods.pipeline.config.profile import Profile, read_profile

    costs: Profile | GptCosts
    if folder is not None:
        costs, known = read_profile(folder), "of the profiled device"
    elif not _names_model(words) or words["machine_name"] is None:
        raise ValueError("expected --profile FOLDER, or --model NAME and --machine NAME")
    else:
        sizes = [2**power for power in range(LARGEST_CHUNK.bit_length()) if 2**power <= batch_size]
        name = words["machine_name"]
        memory, known = named_machines.load(name).room.device_bytes, device_source(name)
        costs = GptCosts(_workload(words), _rates(words), sizes, memory, float(words["network"] or "inf"))
    config = AutoConfig(num_gpus, gpus_per_vm, batch_size, costs, capacity)
    rows = config.table()
    if as_json:
        for row in rows:
            print(json.dumps(vars(row)))
    else:
        if folder is None:
            print(f"{words['machine_name']}: {named_machines.load(words['machine_name']).about}")
        known = "--memory" if capacity else known
        print(
            f"memory of a device: {f'{gib(config.capacity)} ({known})' if config.capacity else 'not limited'}"
        )
        if folder is None and not words["network"]:
            print("messages and sums of gradients: 0 s (assumed; try --network)")
        if rows[0].fits:
            best, used = rows[0], rows[0].num_stages * rows[0].num_replicas
            stages = counted(best.num_stages, "stage")
            told = f"{stages}, micro-batches of {best.chunk_size}, {best.step_seconds:.4g} s a step"
            print(f"chosen: {told}, on {used} of {num_gpus} devices")
        _show(rows, config)
    if not rows[0].fits:
        print(f"error: {config.why_not()}", file=sys.stderr)
        sys.exit(DOES_NOT_FIT)


def _show(rows: list[ConfigRow], config: AutoConfig) -> None:
    """Print at most MOST_ROWS configurations, best first. The last column names what limits a configuration's speed,
    or the memory that it lacks."""
    names = ("stages", "replicas", "micro-batch", "step, s", "samples/s", "memory of a device", "limited by")
    cells = [
        (
            row.num_stages,
            row.num_replicas,
            row.chunk_size,
            f"{row.step_seconds:.4g}",
            f"{config.batch_size / row.step_seconds:.4g}",
            gib(row.device_bytes),
            row.binds
            if row.fits
            else f"does not fit: lacks {gib(row.device_bytes - (config.capacity or 0))}",
        )
        for row in rows[:MOST_ROWS]
    ]
    print_table(names, cells, numbers=names[:-1])
    if len(rows) > MOST_ROWS:
        print(f"the best {MOST_ROWS} of {len(rows)} configurations; --json prints all")


@varuna.command()
@click.option("--stages", "num_stages", type=click.IntRange(1), required=True)
@click.option(
    "--micro-batches",
    "num_micro_batches",
    type=click.IntRange(1),
    required=True,
    help="Micro-batches of each replica.",
)
@click.option(
    "--replicas",
    "num_replicas",
    type=click.IntRange(1),
    default=1,
    help="Number of pipelines that share a batch.",
)
@click.option(
    "--schedule", "schedules", default=",".join(SCHEDULES), help="Schedules to simulate, separated by commas."
)
@click.option(
    "--passes",
    type=(SECONDS, SECONDS, SECONDS),
    help="Seconds of a stage's forward pass, recompute and backward pass.  [default: 1 1 2]",
)
@click.option("--send", type=SECONDS, help="Seconds of a message between stages.  [default: 0]")
@click.option("--long-send", type=SECONDS, help="Seconds of a message between machines; default: --send.")
@click.option("--gpus-per-vm", type=click.IntRange(1), default=1, help="Number of stages on each machine.")
@click.option(
    "--sends-at-once",
    type=click.IntRange(1),
    default=4,
    help="Most messages at once on a link, per direction.",
)
@click.option(
    "--sum", "sum_seconds", type=SECONDS, default=0.0, help="Seconds of the all-reduce between replicas."
)
@click.option(
    "--jitter",
    type=SECONDS,
    default=0.0,
    help="Standard deviation of the messages' times, as a share of their mean.",
)
@click.option(
    "--pass-jitter",
    type=SECONDS,
    default=0.0,
    help="Standard deviation of the passes' times, as a share of their mean.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the random jitter.")
@model
@click.option(
    "--chunk-size", type=click.IntRange(1), default=1, help="With a model: samples per micro-batch."
)
@rates
@click.option(
    "--out", type=FILE, metavar="FILE", help="Draw a timeline of the stages to FILE.pdf and FILE.png."
)
@options.as_json
def simulate(
    num_stages: int,
    num_micro_batches: int,
    num_replicas: int,
    schedules: str,
    passes: tuple[float, float, float] | None,
    send: float | None,
    long_send: float | None,
    gpus_per_vm: int,
    sends_at_once: int,
    sum_seconds: float,
    jitter: float,
    pass_jitter: float,
    seed: int,
    chunk_size: int,
    out: Path | None,
    as_json: bool,
    **words: Any,
) -> None:
    """Simulate the time of a pipeline step under a virtual clock; no model runs.

    With -l or --model the seconds of the passes are predicted for that model from the rates of --machine.
    """
    from methods.pipeline.config import simulate as pipelines

    if num_stages * num_micro_batches > MOST_PASSES:
        raise ValueError(
            f"expected at most {MOST_PASSES} stages times micro-batches, got {num_stages} x {num_micro_batches}"
        )
    seconds, origin = (
        [dict(zip(SLOTS, passes or map(float, SLOTS.values()), strict=True))] * num_stages,
        "--passes",
    )
    sent_by = "--send"
    if _names_model(words):
        seconds, per_message = _of_model(words, num_stages, chunk_size)
        name = _workload(words).model_name
        origin = f"{name} at the rates of {named_machines.source(words['machine_name'])}"
        if send is None and words["network"]:
            send, sent_by = per_message, f"{name}'s on --network"
    elif passes is None:
        origin = "assumed; try --passes, or --model and --machine"
    if send is None:
        send, sent_by = 0.0, "assumed; try --send"
    network = pipelines.Network(send, long_send, gpus_per_vm, jitter, sends_at_once, sum_seconds)
    runs = {
        name: pipelines.simulate(
            name,
            seconds,
            num_micro_batches,
            network,
            num_replicas=num_replicas,
            pass_jitter=pass_jitter,
            seed=seed,
            keeps_units=out is not None,
        )
        for name in dict.fromkeys(schedules.split(","))
    }
    first = next(iter(runs.values()))
    if as_json:
        for name, run in runs.items():
            print(json.dumps({"schedule": name, "step_seconds": run.step_seconds, "bubble": run.bubble}))
    else:
        print(f"passes of a stage: {_told(seconds)} ({origin}); messages: {send:.3g} s ({sent_by})")
        cells = [
            (
                name,
                f"{run.step_seconds:.5g}",
                f"{run.step_seconds / first.step_seconds:.3f}",
                f"{run.bubble:.1%}",
            )
            for name, run in runs.items()
        ]
        names = ("schedule", "step, s", "over the first", "bubble")
        print_table(names, cells, numbers=names[1:])
    if out is not None:
        from methods.verbs.pipeline_timeline import timeline
        from papers.figures import plot

        note = (
            f"simulated: {num_stages} stages, {num_micro_batches} micro-batches; messages of {network.send_seconds:.3g}"
            f" s, jitter {jitter:g} of messages, {pass_jitter:g} of passes, seed {seed}"
        )
        for path in plot.save(timeline(runs, note), out.with_suffix("")):
            print(path)


def _told(seconds: list[dict[str, float]]) -> str:
    """Format the seconds of the forward pass, recompute and backward pass. If stages differ, give the range from the
    fastest stage to the slowest."""
    names, found = ("forward", "recompute", "backward"), []
    for name, kind in zip(names, SLOTS, strict=True):
        each = sorted({f"{passes[kind]:.3g}" for passes in seconds}, key=float)
        found.append(f"{name} {' to '.join(dict.fromkeys((each[0], each[-1])))} s")
    return ", ".join(found)


def _names_model(words: dict[str, Any]) -> bool:
    """Return whether the call names a model, by --model or -l. Raises ValueError if it names several models."""
    if len(words["model"]) > 1:
        raise ValueError("expected one model, got several; try a call for each")
    return words["num_layers"] is not None


def _workload(words: dict[str, Any]) -> Workload:
    names = ("num_layers", "hidden_size", "num_heads", "seq_len", "vocab_size", "dtype")
    return Workload(**{name: words[name] for name in names}, **words["model"][0])


def _rates(words: dict[str, Any]) -> Rates:
    name = words["machine_name"]
    found = named_machines.load(name).rates(words["dtype"]) if name else None
    if found is None:
        raise ValueError("--machine: expected a machine whose rates give a GPT's times, got none")
    return found


def _of_model(
    words: dict[str, Any], num_stages: int, chunk_size: int
) -> tuple[list[dict[str, float]], float]:
    """Return the seconds of each stage's passes, by kind of pass, and the seconds of a message between two stages.

    Raises ValueError if there are more stages than layers, or if --machine has no rates.
    """
    from methods.pipeline.config.partition import gpt_stages, passes_of

    workload = _workload(words)
    if num_stages > workload.num_layers:
        raise ValueError(
            f"--stages: expected at most {workload.num_layers}, the number of layers, got {num_stages}"
        )
    per_sample = workload.boundary_bytes / workload.batch_size
    stages, rates = gpt_stages(workload, num_stages), _rates(words)
    passes = [passes_of(workload, stage, chunk_size, rates) for stage in stages]
    return passes, chunk_size * per_sample / float(words["network"] or "inf")


varuna.add_command(launch)
VERBS = (varuna,)
