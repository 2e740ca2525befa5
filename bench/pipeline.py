"""Times pipelines in real processes: stages that sleep, compared with the simulation, and stages that compute on this
machine's cores.

    .venv/bin/python -m bench.pipeline [--stages sleeping|real] [--micro-batches 12] [--unit 0.05] [--steps 5]

Sleeping stages take no core, so the step time depends on the schedule and the messages only. The table's bubbles (idle
shares of a step) are simulated. Its column for communication shows the time of a step whose passes take no time, as a
share of a normal step's time.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import statistics
import time
from typing import Any, NamedTuple

import click

from harness.core.job import Room, Workload

MOST_STAGES = 4  # of the sleeping pipelines
SCHEDULES = ("varuna", "varuna, fixed order", "1f1b", "gpipe")
WORKLOAD = Workload(num_layers=8, hidden_size=256, num_heads=4, seq_len=128, batch_size=8, vocab_size=1024)


def on_ranks(num_ranks: int, function: Any, *arguments: Any) -> list[Any]:
    """Run the function on each rank; return their results. One process imports torch and forks the ranks."""
    import torch.multiprocessing as processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = processes.get_context("fork")
    results = context.SimpleQueue()
    started = [
        context.Process(target=_rank, args=(rank, num_ranks, port, results, function, *arguments))
        for rank in range(num_ranks)
    ]
    for process in started:
        process.start()
    results_by_rank = dict(results.get() for _ in started)
    for process in started:
        process.join()
    return [results_by_rank[rank] for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, port: int, results: Any, function: Any, *arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        results.put((rank, function(rank, *arguments)))
    except BaseException as error:
        results.put((rank, f"rank {rank}: {error!r}"))
        raise


class SleepingPipeline(NamedTuple):
    """A pipeline whose passes sleep. `unit`: seconds of a forward pass or a recompute; a backward pass takes two
    units."""

    num_stages: int
    schedule: str
    num_micro_batches: int
    unit: float


def sleeping(rank: int, pipeline: SleepingPipeline, steps: int) -> list[float]:
    """Return the seconds of each step on a rank whose passes sleep."""
    import torch.distributed as dist

    from methods.pipeline.transport import join

    join(60.0)
    make = sleeping_varuna if pipeline.schedule.startswith("varuna") else sleeping_torch
    step = make(rank, pipeline)
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return seconds[1:]  # leave out the first step, which includes the start of the ranks


def sleeping_varuna(rank: int, pipeline: SleepingPipeline) -> Any:
    import torch

    from methods.pipeline.engine import Engine, Stage, order_of
    from methods.pipeline.transport import Transport

    num_stages, schedule, num_micro_batches, unit = pipeline

    class SleepingStage(Stage):
        def forward(self, number: int, inputs: Any) -> Any:
            time.sleep(unit)
            return [torch.zeros(1)]

        def recompute(self, number: int) -> None:
            time.sleep(unit)

        def backward(self, grads: Any) -> Any:
            time.sleep(2 * unit)
            return [torch.zeros(1)]

    last = num_stages - 1
    specs = [[(torch.Size([1]), torch.float32)]] * num_micro_batches
    transport = Transport(rank - 1 if rank else None, rank + 1 if rank < last else None, 60.0, specs, specs)
    order = order_of(num_stages, rank, num_micro_batches)
    stage = SleepingStage(lambda number, inputs: (), [True] * bool(rank), is_last=rank == last)
    is_free = schedule == "varuna"
    return Engine(stage, transport, order, is_opportunistic=is_free).step


def sleeping_torch(rank: int, pipeline: SleepingPipeline) -> Any:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    from methods.pipeline.torch_schedules import SCHEDULES as CLASSES

    num_stages, schedule, num_micro_batches, unit = pipeline

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(unit)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            time.sleep(3 * unit)
            return grads[0].clone()

    class SleepingModule(nn.Module):
        def forward(self, x: Any) -> Any:
            return Sleep.apply(x)

    like = torch.zeros(1, 1, requires_grad=True)
    stage = PipelineStage(
        SleepingModule(), rank, num_stages, torch.device("cpu"), input_args=(like,), output_args=(like,)
    )
    loop = CLASSES[schedule](stage, num_micro_batches, loss_fn=lambda x, target: x.sum(), scale_grads=False)
    batch, last = torch.zeros(num_micro_batches, 1, requires_grad=True), num_stages - 1

    def step() -> None:
        losses: list[Any] = []
        inputs = (batch,) if rank == 0 else ()
        last_arguments: dict[str, Any] = {"target": batch.detach(), "losses": losses} if rank == last else {}
        loop.step(*inputs, **last_arguments, return_outputs=False)

    return step


def real(rank: int, options: dict[str, Any], steps: int) -> list[float]:
    """Return the seconds of each step of a GPT on this rank. `options`: options of the method varuna."""
    import torch

    from harness.core.data import token_batches
    from harness.core.method import create

    torch.set_num_threads(1)
    seconds, began = [], time.perf_counter()
    method = create("varuna", options)
    for _ in method.settled(method.plan(WORKLOAD, Room())).train(
        WORKLOAD, token_batches(WORKLOAD, steps), "cpu"
    ):
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    return seconds[1:]


def table_of_sleeping(num_micro_batches: int, unit: float, steps: int, rounds: int) -> None:
    """Print the table of sleeping stages. Each round runs all rows, so that other load on the machine slows all rows
    alike."""
    from methods.pipeline.config.simulate import simulate_step

    rows = [(num_stages, schedule) for num_stages in range(2, MOST_STAGES + 1) for schedule in SCHEDULES]
    seconds_of: dict[Any, list[float]] = {(row, is_idle): [] for row in rows for is_idle in (False, True)}
    for _, row, is_idle in itertools.product(range(rounds), rows, (False, True)):
        pipeline = SleepingPipeline(*row, num_micro_batches, 0.0 if is_idle else unit)
        seconds_of[row, is_idle] += on_ranks(row[0], sleeping, pipeline, steps)[0]
    print("| stages | schedule | s/step | simulated | measured / simulated | bubble | communication alone |")
    print("|---|---|---|---|---|---|---|")
    for num_stages, schedule in rows:
        name = schedule.split(",")[0]
        passes = {"F": unit, "R": unit, "B": 2 * unit}
        run = simulate_step(name, [passes] * num_stages, num_micro_batches, is_opportunistic=name == schedule)
        measured, idle = (
            statistics.median(seconds_of[(num_stages, schedule), is_idle]) for is_idle in (False, True)
        )
        print(
            f"| {num_stages} | {schedule} | {measured:.3f} | {run.step_seconds:.3f} |"
            f" {measured / run.step_seconds:.3f} | {run.bubble:.1%} | {idle / measured:.1%} |"
        )


def table_of_real(steps: int) -> None:
    print(f"real stages: {dataclasses.asdict(WORKLOAD)}")
    print("| stages | replicas | schedule | s/step |")
    print("|---|---|---|---|")
    for num_stages, num_replicas in ((1, 1), (2, 1), (1, 2), (2, 2)):
        for schedule in ("varuna", "1f1b", "gpipe") if num_stages > 1 else ("varuna",):
            options = {
                "world_size": num_stages * num_replicas,
                "num_stages": num_stages,
                "chunk_size": 1,
                "schedule": schedule,
            }
            ranks = on_ranks(num_stages * num_replicas, real, options, steps + 1)
            print(
                f"| {num_stages} | {num_replicas} | {schedule} | {statistics.median(ranks[0]):.3f} |",
                flush=True,
            )


@click.command()
@click.option("--stages", "kind", type=click.Choice(["sleeping", "real"]), default="sleeping")
@click.option(
    "--micro-batches",
    "num_micro_batches",
    default=12,
    type=click.IntRange(min=MOST_STAGES),
    help="At least the stages of the longest pipeline, which torch's 1f1b needs.",
)
@click.option("--unit", default=0.05, help="Seconds that the forward pass of a sleeping stage takes.")
@click.option("--steps", default=5)
@click.option("--rounds", default=3)
def main(kind: str, num_micro_batches: int, unit: float, steps: int, rounds: int) -> None:
    table_of_sleeping(num_micro_batches, unit, steps, rounds) if kind == "sleeping" else table_of_real(steps)


if __name__ == "__main__":
    main()
