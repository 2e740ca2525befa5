"""Measures the workload's model, cut after every layer, for `./run.sh varuna profile`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from harness.base.json_object import JsonObject
from harness.base.rank_agent import OneRound, Rendezvous
from harness.core.cpu_cores import available_cores
from harness.core.failures import LOST_RANK
from harness.core.job import Workload
from harness.models.gpt import DTYPES, adamw
from methods.pipeline.config.profiler import Profiler
from methods.pipeline.cut_model import CutModel


def measure_model(order: JsonObject) -> str:
    """Measure the model as one rank; rank 0 writes the profile. Return the note of this rank's Seat. The environment
    variables of torchrun name the other ranks' address. `order`: the request of `./run.sh varuna profile`. Raises
    ValueError if the order's device is cuda, but a rank has no GPU of its own."""
    workload = Workload(**order["workload"])
    torch.set_num_threads(max(1, available_cores() // order["num_ranks"]))

    def get_batch(size: int) -> dict[str, Tensor]:
        tokens = torch.randint(workload.vocab_size, (size, workload.seq_len + 1))
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    model = CutModel(workload)
    profiler = Profiler(
        model.to(DTYPES[workload.dtype]),
        "cpu" if order["device"] == "cpu" else -1,
        workload.dtype == "fp16",
        make_optimizer=adamw,
        init_weights=model.init_weights,
    )
    if order["device"] == "cuda" and profiler.device.type != "cuda":
        raise ValueError(
            f"--device cuda: expected a GPU for each of --ranks {order['num_ranks']}, got {torch.cuda.device_count()};"
            " try fewer ranks, or --device cpu"
        )
    profiler.initialize(get_batch)
    profile = profiler.profile_all(get_batch, order["sizes"], out_folder=order["folder"])
    if profiler.rank == 0:
        # In bf16 a rank keeps an fp32 master of each weight and needs the same bytes as in fp16: the profile calls both
        # fp16.
        dataclasses.replace(profile, fp16=workload.dtype != "fp32").write(order["folder"])
    if dist.is_initialized():
        dist.destroy_process_group()
    return profiler.note


def measure_as_rank(order: JsonObject, environment: dict[str, str], report_fd: int) -> int:
    """Measure as one of several ranks; return the exit code 0. Write the note of the rank's Seat, or an error as
    one line, to the file descriptor `report_fd`. Raises that error."""
    os.environ |= environment
    try:
        os.write(report_fd, measure_model(order).encode())
    except Exception as error:
        os.write(report_fd, one_line_error(error).encode())
        raise
    return 0


def one_line_error(error: Exception) -> str:
    """Return the error as one line, because `varuna profile` shows only the last line of an error, and an error of CUDA
    has several lines."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:4000]


def main() -> None:
    """Entry point; reads the order, an object in JSON, from standard input. The answer is the ranks' note."""
    order = json.load(sys.stdin)
    num_ranks, messages = order["num_ranks"], dict[int, str]()
    if num_ranks == 1:
        try:
            messages[0] = measure_model(order)
        except Exception as error:
            traceback.print_exc()
            sys.exit(one_line_error(error))
    else:
        agent = OneRound(lambda rank, data: messages.update({rank: data.decode(errors="replace")}))
        exit_codes_of_failed = agent.meet(partial(measure_as_rank, order), num_ranks, num_ranks, Rendezvous())
        if agent.is_interrupted:
            sys.exit("interrupted")
        if exit_codes_of_failed:
            first_failed = min(
                exit_codes_of_failed, key=lambda rank: bool(LOST_RANK.search(messages.get(rank, "")))
            )
            sys.exit(
                f"rank {first_failed}: {messages.get(first_failed, f'exit code {exit_codes_of_failed[first_failed]}')}"
            )
    print(json.dumps(messages.get(0, "")))


if __name__ == "__main__":
    main()
