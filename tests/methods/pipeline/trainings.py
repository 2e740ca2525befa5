"""What the ranks of a test do: many small trainings, one after the other, some with a bug planted."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.core.data import token_batches
from harness.core.job import Workload
from harness.core.method import TensorState, Training
from harness.devices.memory_account import Tracker
from methods.pipeline.checkpoint.checkpoints import Checkpoints
from methods.pipeline.rank_map import RankMap
from methods.pipeline.seat import take_seat
from tests.methods.pipeline import user_model
from tests.support.pipeline_bugs import BY_NAME
from tests.support.planting import planted
from tests.support.ranks import meeting
from tests.support.training import settled

ABOVE = 2.0**20  # a loss scale whose first steps overflow


def on_this_rank(rank: int, trainings: list[dict[str, Any]]) -> list[Any]:
    """A result for each training, None where this rank is not in it."""
    results: list[Any] = []
    for number, training in enumerate(trainings):
        bug = BY_NAME[training["bug"]] if training.get("bug") else None
        with meeting(rank, training["ranks"], number) as is_in:
            if not is_in:
                results.append(None)
                continue
            with planted(bug.file, bug.old, bug.new) if bug else nullcontext():
                results.append(KINDS[training["kind"]](training))
    return results


def by_method(training: dict[str, Any]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if training.get("overflows"):
            patch.setattr("methods.shared.loss_scale.INITIAL_LOSS_SCALE", ABOVE)
        options = {"world_size": training["ranks"], **training["options"]}
        return train(Workload(**training["workload"]), training["steps"], options)


def train(workload: Workload, steps: int, options: dict[str, Any], name: str = "varuna") -> dict[str, Any]:
    """Losses and norms of each step, steps skipped, and on the first rank sums that tell every tensor's bits."""
    torch.manual_seed(workload.seed)
    training = settled(name, options, workload).train(workload, token_batches(workload, steps), "cpu")
    result: dict[str, Any] = {"losses": [], "norms": [], "skipped": []}
    for _ in range(steps):
        step = next(training)
        assert step.grad_norm is not None
        result["losses"].append(step.loss.item())
        result["norms"].append(step.grad_norm.item())
        result["skipped"].append(step.is_skipped)
    result["tensors"] = {state.name: [bits(state.weight), bits(state.exp_avg)] for state in end_of(training)}
    return result


def peak(training: dict[str, Any]) -> int:
    """Bytes that this rank needs for a step. Messages of torch's schedules are in the device's memory, which sim does
    not show to them: there the host is the device."""
    device = "sim" if training["options"]["schedule"] == "varuna" else "cpu"
    workload, options = (
        Workload(**training["workload"]),
        {"world_size": training["ranks"], **training["options"]},
    )
    num_bytes = 0
    with Tracker() as tracker:
        batches = [(inputs.to(device), targets.to(device)) for inputs, targets in token_batches(workload, 2)]
        training = settled("varuna", options, workload).train(workload, batches, device)
        for _ in batches:
            next(training)
            num_bytes = tracker.stats()["device_peak" if device == "sim" else "host_peak"]
        end_of(training)
    return num_bytes


def end_of(training: Training) -> list[TensorState]:
    """The tensors of a training that has had all of its batches."""
    with pytest.raises(StopIteration) as end:
        next(training)
    return list(end.value.value.tensors)


def bits(tensor: Any) -> float:
    """A number that tells tensors of different bits apart."""
    whole = tensor.detach().double().flatten()
    return float((whole * torch.arange(1, len(whole) + 1)).sum())


def by_user(training: dict[str, Any]) -> dict[str, Any]:
    """The user's model: trained, evaluated, saved, gone on from, or refused, as `training` has it."""
    size, steps = training["batch_size"], training["steps"]
    with torch.device("meta" if training.get("meta") else "cpu"):
        whole = user_model.make(dropout=training.get("dropout", 0.0))
    model = _stage_of(whole, training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=user_model.LEARNING_RATE)
    model.set_optimizer(optimizer, init_loss_scale=training.get("scale", 2.0**10))
    torch.manual_seed(model.stage)
    result: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "active": model.active_cuts}
    result["here"] = sorted(name for name, weight in whole.named_parameters() if not weight.is_meta)
    first = model.load_checkpoint(training["load"]) if "load" in training else 0
    for step in range(first, steps):
        share = user_model.share(user_model.batch(step, size), model.replica, model.rank_map.num_replicas)
        loss, overflow = model.step(share, clip_grad_max_norm=user_model.MAX_NORM)
        if not overflow:
            optimizer.step()
        result["losses"].append(loss)
        result["norms"].append(float(model.grad_norm))
        result["skipped"].append(overflow)
    if "save" in training:
        model.checkpoint(training["save"]).result()
    share = user_model.share(user_model.batch(steps, size), model.replica, model.rank_map.num_replicas)
    model.eval()
    result["evaluated"] = model.evaluate(share)
    result["part"] = {name: weight.flatten().tolist() for name, weight in model.state_dict().items()}
    result["first"] = first
    dist.barrier()
    dist.destroy_process_group()
    return result


def _stage_of(whole: nn.Module, training: dict[str, Any]) -> Any:
    from methods.varuna import Varuna

    seeded = user_model.make().state_dict()
    return Varuna(
        whole,
        training["map"],
        lambda size, device=None: user_model.batch(0, size),
        training["batch_size"],
        training["chunk"],
        fp16=training.get("fp16", False),
        shared_weights=user_model.SHARED,
        cuts=training.get("cuts"),
        bf16=training.get("bf16", False),
        schedule=training.get("schedule", "varuna"),
        device="cpu",
        init_weights=lambda named: [tensor.copy_(seeded[name]) for name, tensor in named],
    )


def refused(training: dict[str, Any]) -> str:
    """What a process says of a model that it does not take."""
    from methods.varuna import Varuna

    size = training["batch_size"]
    with pytest.raises(ValueError) as error:
        Varuna(
            user_model.make(),
            training["map"],
            lambda size, device=None: user_model.batch(0, size),
            size,
            training["chunk"],
            device="cpu",
            shared_weights=user_model.SHARED,
            schedule=training["schedule"],
        )
    dist.destroy_process_group()
    return str(error.value)


def by_user_with_other_shapes(training: dict[str, Any]) -> list[str]:
    """What a process says of shorter samples than the first ones, and the lower stage, of a cut that shortens them."""
    from methods.varuna import Varuna

    size = training["batch_size"]
    model = Varuna(
        user_model.make(),
        training["map"],
        lambda size, device=None: user_model.batch(0, size),
        size,
        training["chunk"],
        device="cpu",
        shared_weights=user_model.SHARED,
    )
    model.set_optimizer(torch.optim.SGD(model.parameters()))
    inputs = user_model.batch(0, size)
    model.step(inputs)
    messages = []
    shorter = {name: value[:, :5] if name != "bias" else value for name, value in inputs.items()}
    with pytest.raises(ValueError) as error:
        model.step(shorter)
    messages.append(str(error.value))
    if model.stage == 0:
        model.part.register_forward_hook(
            lambda part, arguments, outputs: [tensor[:, :5] for tensor in outputs]
        )
        with pytest.raises(ValueError) as error:
            model.step(inputs)
        messages.append(str(error.value))
    dist.destroy_process_group()
    return messages


def sum_alone(training: dict[str, Any]) -> str:
    """What the first rank says of a sum in which the other takes no part."""
    from methods.pipeline.gradients import Groups, all_reduce
    from methods.pipeline.transport import LostPeer, join

    join(60.0)
    groups, message = Groups(RankMap.make(1, 2), dist.get_rank(), [], 1.0), ""
    if dist.get_rank() == 0:
        with pytest.raises(LostPeer) as error:
            all_reduce(torch.ones(1), groups.replicas)
        message = str(error.value)
    dist.barrier()
    dist.destroy_process_group()
    return message


def save(training: dict[str, Any]) -> str:
    """What this rank says of a checkpoint that each rank writes a part of; the disk of the rank `fails` is full. torch
    may unpickle nothing that a rank sends."""
    from methods.pipeline.transport import join

    def refuse(*_: Any) -> None:
        raise AssertionError("torch unpickles what a rank sent")

    join(60.0)
    rank = dist.get_rank()
    masters = {f"layer.{number}": nn.Parameter(torch.full((8, 8), float(number))) for number in range(4)}
    place = (0, rank, dist.get_world_size())
    checkpoints = Checkpoints(masters, torch.optim.AdamW(masters.values()), list(masters), place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.distributed_c10d._tensor_to_object", refuse)
        if training.get("fails") == rank:
            patch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", disk_full)
        try:
            checkpoints.save(training["folder"], 1, {"step": 1}).result()
            message = "saved"
        except OSError as error:
            message = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return message


def seat_with_gpus(training: dict[str, Any]) -> list[Any]:
    """What a rank takes and what it prints, on machines of two ranks that see `gpus` GPUs each."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
        see_gpus(patch, training["gpus"][rank // 2])
        patch.setenv("LOCAL_RANK", str(rank % 2))
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        seat = take_seat(60.0, training["devices"][rank])
        backend = dist.get_backend_config()
    dist.destroy_process_group()
    return [*seat[:2], str(seat.device), seat.note, printed.getvalue(), backend]


def see_gpus(patch: pytest.MonkeyPatch, number: int) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: number > 0)
    patch.setattr(torch.cuda, "device_count", lambda: number)


def disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def unpickled(training: dict[str, Any]) -> list[str]:
    """Train, and return the classes that this process loads by name while it does."""
    heard: set[str] = set()
    sys.addaudithook(
        lambda event, names: heard.add(".".join(names)) if event == "pickle.find_class" else None
    )
    train(Workload(**training["workload"]), training["steps"], training["options"], training["method"])
    return sorted(heard)


def run_snippet(rank: int, order: dict[str, Any]) -> str:
    """What a rank prints that runs a document's text with the variables that torchrun sets, in a folder."""
    os.chdir(order["folder"])
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(order["ranks"]))
    with meeting(rank, order["ranks"], 0), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(order["text"], "snippet", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "method": by_method,
    "user": by_user,
    "peak": peak,
    "refused": refused,
    "shapes": by_user_with_other_shapes,
    "sum": sum_alone,
    "save": save,
    "seat": seat_with_gpus,
    "unpickled": unpickled,
}
