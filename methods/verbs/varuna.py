"""The verbs of pipelines on machines that come and go: ./run.sh varuna profile, configure, simulate, launch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import options
from cli.options import FILE, FOLDER, Bytes, Finite, Numbers, check_writable
from harness.base.console import counted, print_table
from harness.base.json_object import JsonObject
from harness.core.job import Job, Workload, gib
from harness.core.rates import Rates
from harness.devices import named_machines
from harness.plan.training_place import device_source_text
from methods.pipeline.config.measured_profile import measure_profile
from methods.pipeline.config.profile import PROFILE_FILE
from methods.pipeline.config.simulate import Network, PipelineRun, simulate_step
from methods.pipeline.launch.run import launch
from methods.pipeline.schedule import SCHEDULES, SLOTS

if TYPE_CHECKING:
    from methods.pipeline.config.auto_config import AutoConfig, ConfigRow
    from methods.pipeline.config.profile import GptCosts, Profile

CallOptions = dict[str, Any]  # the values of a verb's options, by the names of its parameters
DOES_NOT_FIT = 4
MOST_PASSES = 10**8  # most stages times micro-batches that `simulate` takes; this many take some minutes
SECONDS_TYPE = Finite(0, 1e9)  # up to 30 years
MOST_PRINTED_ROWS = 20  # most rows of the printed table
# samples: the largest micro-batch that `configure` tries if times come from a machine's rates
LARGEST_CHUNK = 64
EXAMPLES = """\b
Examples:
  ./run.sh varuna profile -l 8 -h 256 --ranks 2
  ./run.sh varuna configure --profile profile --gpus 4 --batch 16
  ./run.sh varuna configure --model varuna-8.3b --machine h200 --gpus 256 --batch 8192
  ./run.sh varuna simulate --stages 9 --micro-batches 64 --send 0.5 --jitter 0.3
"""

model_options = options.together(
    options.model,
    click.option("-l", "num_layers", type=int, help="Number of layers."),
    click.option("-h", "hidden_size", type=int, default=2048, help="Hidden size."),
    options.num_heads,
    options.seq_len,
    click.option("--vocab", "vocab_size", type=int, default=50304, help="Vocabulary size."),
    options.dtype,
)
rates_options = options.together(
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
@model_options
@click.option(
    "--ranks", "num_ranks", type=click.IntRange(1), default=1, help="Processes that measure at once."
)
@click.option(
    "--micro-batches",
    "micro_batch_sizes",
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
def profile(num_ranks: int, micro_batch_sizes: list[int], device: str, folder: Path, **call: Any) -> None:
    """Measure the published GPT, or a model by its config.json, on this machine.

    The profile holds the seconds and bytes of the model's sections, of the sections' updates, of messages between
    stages and of all-reduces. To measure a model of your own, use the Python class Profiler.
    """
    if not _names_model(call):
        raise ValueError("expected -l and -h, or --model NAME, got neither")
    job = Job("profile", _named_workload(call), {"world_size": num_ranks}, device=device)
    check_writable(folder, "--out")
    if note := measure_profile(job, micro_batch_sizes, folder, _print_text):
        print(note, file=sys.stderr)
    print(folder / PROFILE_FILE)


def _print_text(event: JsonObject) -> None:
    print(event["text"], file=sys.stderr, flush=True)


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
@model_options
@rates_options
@options.as_json
def configure(num_gpus: int, gpus_per_vm: int, batch_size: int, as_json: bool, **call: Any) -> None:
    """Choose the number of stages and the micro-batch size, and show the best choices.

    The times come from a profile, or from the rates of a machine. Exit code 4: no choice fits.
    """
    from methods.pipeline.config.auto_config import AutoConfig

    costs, memory_source = _named_costs(call, batch_size)
    config = AutoConfig(num_gpus, gpus_per_vm, batch_size, costs, call["capacity"])
    configurations = config.table()
    if as_json:
        for configuration in configurations:
            print(json.dumps(vars(configuration)))
    else:
        if call["folder"] is None:
            print(f"{call['machine_name']}: {named_machines.load(call['machine_name']).about}")
        memory_source = "--memory" if call["capacity"] else memory_source
        memory = f"{gib(config.capacity_bytes)} ({memory_source})" if config.capacity_bytes else "not limited"
        print(f"memory of a device: {memory}")
        if call["folder"] is None and not call["network"]:
            print("messages and sums of gradients: 0 s (assumed; try --network)")
        if configurations[0].fits:
            best = configurations[0]
            print(
                f"chosen: {counted(best.num_stages, 'stage')}, micro-batches of {best.chunk_size},"
                f" {best.step_seconds:.4g} s a step, on {best.num_ranks} of {num_gpus} devices"
            )
        _print_configurations(configurations, config)
    if not configurations[0].fits:
        print(f"error: {config.why_not()}", file=sys.stderr)
        sys.exit(DOES_NOT_FIT)


def _named_costs(call: CallOptions, batch_size: int) -> tuple[Profile | GptCosts, str]:
    """Return the costs by --profile or --machine, and where a device's memory is known from."""
    from methods.pipeline.config.profile import GptCosts, read_profile

    if call["folder"] is not None:
        return read_profile(call["folder"]), "of the profiled device"
    if not _names_model(call) or call["machine_name"] is None:
        raise ValueError("expected --profile FOLDER, or --model NAME and --machine NAME")
    micro_batch_sizes = [2**power for power in range(LARGEST_CHUNK.bit_length()) if 2**power <= batch_size]
    name = call["machine_name"]
    memory, memory_source = named_machines.load(name).room.device_bytes, device_source_text(name)
    costs = GptCosts(
        _named_workload(call), _rates(call), micro_batch_sizes, memory, float(call["network"] or "inf")
    )
    return costs, memory_source


def _print_configurations(configurations: list[ConfigRow], config: AutoConfig) -> None:
    """Print at most MOST_PRINTED_ROWS configurations, best first. The last column names what limits a configuration's
    speed, or the memory that it lacks."""
    capacity = config.capacity_bytes or 0
    column_titles = (
        "stages",
        "replicas",
        "micro-batch",
        "step, s",
        "samples/s",
        "memory of a device",
        "limited by",
    )
    cells = []
    for configuration in configurations[:MOST_PRINTED_ROWS]:
        limit = configuration.binds
        if not configuration.fits:
            limit = f"does not fit: lacks {gib(configuration.device_bytes - capacity)}"
        cells.append(
            (
                configuration.num_stages,
                configuration.num_replicas,
                configuration.chunk_size,
                f"{configuration.step_seconds:.4g}",
                f"{config.batch_size / configuration.step_seconds:.4g}",
                gib(configuration.device_bytes),
                limit,
            )
        )
    print_table(column_titles, cells, numbers=column_titles[:-1])
    if len(configurations) > MOST_PRINTED_ROWS:
        print(f"the best {MOST_PRINTED_ROWS} of {len(configurations)} configurations; --json prints all")


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
    type=(SECONDS_TYPE, SECONDS_TYPE, SECONDS_TYPE),
    help="Seconds of a stage's forward pass, recompute and backward pass.  [default: 1 1 2]",
)
@click.option("--send", type=SECONDS_TYPE, help="Seconds of a message between stages.  [default: 0]")
@click.option(
    "--long-send", type=SECONDS_TYPE, help="Seconds of a message between machines; default: --send."
)
@click.option("--gpus-per-vm", type=click.IntRange(1), default=1, help="Number of stages on each machine.")
@click.option(
    "--sends-at-once",
    type=click.IntRange(1),
    default=4,
    help="Most messages at once on a link, per direction.",
)
@click.option(
    "--sum", "sum_seconds", type=SECONDS_TYPE, default=0.0, help="Seconds of the all-reduce between replicas."
)
@click.option(
    "--jitter",
    type=SECONDS_TYPE,
    default=0.0,
    help="Standard deviation of the messages' times, as a share of their mean.",
)
@click.option(
    "--pass-jitter",
    type=SECONDS_TYPE,
    default=0.0,
    help="Standard deviation of the passes' times, as a share of their mean.",
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the random jitter.")
@model_options
@click.option(
    "--chunk-size", type=click.IntRange(1), default=1, help="With a model: samples per micro-batch."
)
@rates_options
@click.option(
    "--out", type=FILE, metavar="FILE", help="Draw a timeline of the stages to FILE.pdf and FILE.png."
)
@options.as_json
def simulate(num_stages: int, num_micro_batches: int, out: Path | None, as_json: bool, **call: Any) -> None:
    """Simulate the time of a pipeline step under a virtual clock; no model runs.

    With -l or --model the seconds of the passes are predicted for that model from the rates of --machine.
    """
    if num_stages * num_micro_batches > MOST_PASSES:
        raise ValueError(
            f"expected at most {MOST_PASSES} stages times micro-batches, got {num_stages} x {num_micro_batches}"
        )
    times = _step_times(call, num_stages)
    runs = {
        name: simulate_step(
            name,
            times.passes,
            num_micro_batches,
            _message_network(call, times.send),
            num_replicas=call["num_replicas"],
            pass_jitter=call["pass_jitter"],
            seed=call["seed"],
            keeps_units=out is not None,
        )
        for name in dict.fromkeys(call["schedules"].split(","))
    }
    _print_runs(runs, times, as_json=as_json)
    if out is not None:
        from methods.verbs.pipeline_timeline import timeline
        from papers.figures import plot

        note = (
            f"simulated: {num_stages} stages, {num_micro_batches} micro-batches; messages of {times.send:.3g} s,"
            f" jitter {call['jitter']:g} of messages, {call['pass_jitter']:g} of passes, seed {call['seed']}"
        )
        for path in plot.save(timeline(runs, note), out.with_suffix("")):
            print(path)


@dataclass(frozen=True)
class StepTimes:
    """The times of a simulated step, in seconds, and their origins."""

    passes: list[dict[str, float]]  # of each stage, by kind of pass
    origin: str
    send: float  # of a message between two stages
    sent_by: str


def _step_times(call: CallOptions, num_stages: int) -> StepTimes:
    passes, send, sent_by = call["passes"], call["send"], "--send"
    if _names_model(call):
        stages, per_message = _model_times(call, num_stages)
        name = _named_workload(call).model_name
        origin = f"{name} at the rates of {named_machines.source(call['machine_name'])}"
        if send is None and call["network"]:
            send, sent_by = per_message, f"{name}'s on --network"
    else:
        stages = [dict(zip(SLOTS, passes or map(float, SLOTS.values()), strict=True))] * num_stages
        origin = "--passes" if passes else "assumed; try --passes, or --model and --machine"
    if send is None:
        send, sent_by = 0.0, "assumed; try --send"
    return StepTimes(stages, origin, send, sent_by)


def _message_network(call: CallOptions, send: float) -> Network:
    return Network(
        send,
        call["long_send"],
        call["gpus_per_vm"],
        call["jitter"],
        call["sends_at_once"],
        call["sum_seconds"],
    )


def _print_runs(runs: dict[str, PipelineRun], times: StepTimes, *, as_json: bool) -> None:
    if as_json:
        for name, run in runs.items():
            print(json.dumps({"schedule": name, "step_seconds": run.step_seconds, "bubble": run.bubble}))
        return
    print(
        f"passes of a stage: {_passes_text(times.passes)} ({times.origin}); messages: {times.send:.3g} s"
        f" ({times.sent_by})"
    )
    first_seconds = next(iter(runs.values())).step_seconds
    cells = [
        (name, f"{run.step_seconds:.5g}", f"{run.step_seconds / first_seconds:.3f}", f"{run.bubble:.1%}")
        for name, run in runs.items()
    ]
    column_titles = ("schedule", "step, s", "over the first", "bubble")
    print_table(column_titles, cells, numbers=column_titles[1:])


def _passes_text(passes: list[dict[str, float]]) -> str:
    """Format the seconds of the forward pass, recompute and backward pass. If stages differ, give the range from the
    fastest stage to the slowest."""
    texts = []
    for name, kind in zip(("forward", "recompute", "backward"), SLOTS, strict=True):
        seconds = sorted({f"{stage[kind]:.3g}" for stage in passes}, key=float)
        texts.append(f"{name} {' to '.join(dict.fromkeys((seconds[0], seconds[-1])))} s")
    return ", ".join(texts)


def _names_model(call: CallOptions) -> bool:
    """Return whether the call names a model, by --model or -l. Raises ValueError if it names several models."""
    if len(call["model"]) > 1:
        raise ValueError("expected one model, got several; try a call for each")
    return call["num_layers"] is not None


def _named_workload(call: CallOptions) -> Workload:
    field_names = ("num_layers", "hidden_size", "num_heads", "seq_len", "vocab_size", "dtype")
    return Workload(**{name: call[name] for name in field_names}, **call["model"][0])


def _rates(call: CallOptions) -> Rates:
    name = call["machine_name"]
    rates = named_machines.load(name).rates(call["dtype"]) if name else None
    if rates is None:
        raise ValueError("--machine: expected a machine whose rates give a GPT's times, got none")
    return rates


def _model_times(call: CallOptions, num_stages: int) -> tuple[list[dict[str, float]], float]:
    """Return the seconds of each stage's passes, by kind of pass, and the seconds of a message between two stages.

    Raises ValueError if there are more stages than layers, or if --machine has no rates.
    """
    from methods.pipeline.config.partition import gpt_stages, passes_of

    workload, chunk_size = _named_workload(call), call["chunk_size"]
    if num_stages > workload.num_layers:
        raise ValueError(
            f"--stages: expected at most {workload.num_layers}, the number of layers, got {num_stages}"
        )
    per_sample = workload.boundary_bytes / workload.batch_size
    stages, rates = gpt_stages(workload, num_stages), _rates(call)
    passes = [passes_of(workload, stage, chunk_size, rates) for stage in stages]
    return passes, chunk_size * per_sample / float(call["network"] or "inf")


varuna.add_command(launch)
VERBS = (varuna,)
