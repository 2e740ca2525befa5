"""Finds a rank's seat in its job: its number, and the device on which it computes.

Each rank has a GPU of its own, because NCCL refuses two ranks on one GPU. If a machine has fewer GPUs than ranks, all
ranks of the job compute on the CPU: the ranks share one process group, whose backends depend on the device.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness.base.console import counted
from methods.pipeline.transport import gather_messages, join


class Offer(NamedTuple):
    """A rank's device, as this rank alone would choose it. `device_type`: the device's type. `num_local_ranks`: ranks
    on the rank's machine that need a GPU; 0: the user named the device. `num_gpus`: GPUs that torch sees there."""

    device_type: str
    num_local_ranks: int = 0
    num_gpus: int = 0


class Seat(NamedTuple):
    """A rank's number, the number of ranks, and the rank's device. `note`: one line that says why all ranks compute on
    the CPU although there are GPUs; "": they do not. All ranks have the same note."""

    rank: int
    world_size: int
    device: torch.device
    note: str = ""


def take_seat(limit_seconds: float, device: int | str, local_rank: int = -1) -> Seat:
    """Meet all ranks that torchrun's environment variables name, and return this process's seat. A process without
    these variables is alone. Rank 0 prints the note, if there is one, on standard error.

    `device`: a name, or the number of a GPU; both are taken as they are, but without GPUs a number means the CPU. Below
    0: GPU `local_rank` or, if that is below 0 too, GPU LOCAL_RANK; the CPU if a machine of the job has fewer GPUs than
    ranks (LOCAL_WORLD_SIZE), or if another rank was given the CPU.

    Raises LostPeer if a rank does not come. Raises ValueError if the script has made a process group by itself that
    cannot send tensors in host memory.
    """
    own_device, own_offer = _make_offer(device, local_rank)
    message = json.dumps(own_offer).encode()
    if dist.is_initialized():
        if "cpu:" not in (backend := dist.get_backend_config()):
            raise ValueError(
                f"expected a process group with a backend for CPU tensors, which carry messages, got {backend}; try"
                ' init_process_group("cpu:gloo,cuda:nccl"), or leave the call out'
            )
        offers = _parse_offers(gather_messages(message, dist.group.WORLD))
    elif "WORLD_SIZE" in os.environ:
        offers = _parse_offers(join(limit_seconds, message, _choose_backend))
    else:
        offers = [own_offer]
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    note = _shortage_note(offers)
    if note and rank == 0:
        print(note, file=sys.stderr, flush=True)
    if own_offer.num_local_ranks and any(offer.device_type == "cpu" for offer in offers):
        own_device = torch.device("cpu")
    if own_device.type == "cuda" and own_device.index is not None:
        torch.cuda.set_device(own_device)
    return Seat(rank, world_size, own_device, note)


def _make_offer(device: int | str, local_rank: int) -> tuple[torch.device, Offer]:
    if isinstance(device, str):
        named_device = torch.device(device)
        return named_device, Offer(named_device.type)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu_number = int(os.environ.get("LOCAL_RANK", "0"))
    if device >= 0 or local_rank >= 0:
        gpu_number = device if device >= 0 else local_rank
    num_local_ranks = 0 if device >= 0 else max(gpu_number + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    own_device = (
        torch.device("cuda", gpu_number) if num_gpus >= max(1, num_local_ranks) else torch.device("cpu")
    )
    return own_device, Offer(own_device.type, num_local_ranks, num_gpus)


def _parse_offers(messages: list[bytes]) -> list[Offer]:
    return [Offer(*json.loads(message)) for message in messages]


def _choose_backend(messages: list[bytes]) -> str:
    """Return the backend of a process group for the devices that its ranks have told. gloo alone serves tensors of any
    device."""
    return (
        "cpu:gloo,cuda:nccl"
        if {offer.device_type for offer in _parse_offers(messages)} == {"cuda"}
        else "gloo"
    )


def _shortage_note(offers: list[Offer]) -> str:
    offers_without_gpu = [
        (rank, offer) for rank, offer in enumerate(offers) if offer.num_gpus < offer.num_local_ranks
    ]
    if not offers_without_gpu or not any(offer.num_gpus for offer in offers):
        return ""
    rank, offer = offers_without_gpu[0]
    counts = f"{counted(offer.num_local_ranks, 'rank')} and {counted(offer.num_gpus, 'GPU')}"
    return f"all ranks compute on the CPU: each needs a GPU of its own, and the machine of rank {rank} has {counts}"
