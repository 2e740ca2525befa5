"""Varuna for a user's model: the training of one process, in any stages and replicas; and what is refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.base.checkout import ROOT
from harness.core.job import Job
from harness.devices.memory_account import Tracker
from harness.devices.streams import STREAMS
from harness.run.trace import Trace
from methods.pipeline import pipeline
from methods.pipeline.batches import micro_batch_sizes, split_batch
from methods.pipeline.checkpoint.checkpoints import read_checkpoint
from methods.pipeline.cut import (
    CutPoint,
    choose_cuts,
    count_cuts,
    cut_into_parts,
    run_without_memory,
    specs_of,
    trace_model,
)
from methods.pipeline.engine import Stage
from methods.pipeline.pipeline import Varuna, trace_note
from methods.pipeline.rank_map import RankMap
from methods.pipeline.seat import Offer, _choose_backend, take_seat
from methods.pipeline.setup import counted_names, find_shared
from methods.pipeline.transport import GRADIENT_KIND, Inbox, LostPeer, join
from tests.methods.pipeline import trainings, user_model
from tests.support.fake_cuda import FakeCuda, FakeEvent
from tests.support.ports import free_ports
from tests.support.ranks import on_ranks
from tests.support.training import tiny

STEPS, SIZE, DROPOUT = 6, 8, 0.3
SHORT_BUG, RANDOM_BUG = (
    "short_last_micro_batch_weighs_as_the_others",
    "random_state_of_the_recompute_not_restored",
)


def job(text: str, chunk: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "user",
        "map": text,
        "ranks": RankMap.parse(text).world_size,
        "chunk": chunk,
        "batch_size": SIZE,
        "steps": STEPS,
        **more,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def trained(folder: str) -> dict[str, list[Any]]:
    """By name, each rank's result."""
    jobs = {
        "2x2": job("0,2;1,3;", 2, save=folder, steps=3),
        "short": job("0,2;1,3;", 3),
        "cuts": job("0;1;", 2, cuts=[0]),
        "4x1": job("0;1;2;3;", 2),
        "resumed": job("2;0;1;", 4, load=folder),
        "on meta": job("0,2;1,3;", 2, meta=True, cuts=[1]),
        "gpipe": job("0,2;1,3;", 2, schedule="gpipe"),
        "1f1b": job("0;1;2;", 2, schedule="1f1b"),
        "bf16": job("0;1;", 4, bf16=True),
        "fp16 on meta": job("0;1;", 4, fp16=True, meta=True),
        "fp16": job("0;1;", 4, fp16=True),
        "fp16 from far above": job("0;1;", 4, fp16=True, scale=2.0**21),
        "other shapes": job("0;1;", 4, kind="shapes"),
        "gpipe of short micro-batches": job("0;1;", 3, kind="refused", schedule="gpipe"),
        "sum": job("0,1;", 2, kind="sum"),
        "too few gpus on the other machine": job("0;1;2;3;", 2, kind="seat", gpus=[2, 1], devices=[-1] * 4),
        "the cpu given to one rank": job("0;1;", 2, kind="seat", gpus=[2], devices=[-1, "cpu"]),
        "no gpus": job("0;1;", 2, kind="seat", gpus=[0], devices=[-1] * 2),
        "dropout": job("0;1;2;", 2, dropout=DROPOUT),
        SHORT_BUG: job("0;1;", 3, bug=SHORT_BUG),
        RANDOM_BUG: job("0;1;2;", 2, dropout=DROPOUT, bug=RANDOM_BUG),
    }
    results = on_ranks(4, "tests.methods.pipeline.trainings:on_this_rank", list(jobs.values()))
    return {name: [ranks[number] for ranks in results if ranks[number]] for number, name in enumerate(jobs)}


@functools.cache
def alone() -> tuple[list[float], list[float], dict[str, list[float]]]:
    return user_model.train_alone(STEPS, SIZE)


def distance(result: dict[str, Any], expected: tuple[list[float], list[float]] | None = None) -> float:
    """The largest relative difference of a loss or a norm from one process's."""
    losses, norms = expected or alone()[:2]
    first = result["first"]
    last = first + len(result["losses"])
    pairs = [
        *zip(result["losses"], losses[first:last], strict=True),
        *zip(result["norms"], norms[first:last], strict=True),
    ]
    return max(abs(value - expected_value) / expected_value for value, expected_value in pairs)


@pytest.mark.parametrize("name", ["2x2", "short", "cuts", "4x1", "resumed", "on meta", "gpipe", "1f1b"])
def test_losses_and_norms_are_those_of_one_process(name: str, trained: dict[str, list[Any]]) -> None:
    for result in trained[name]:
        assert distance(result) < 1e-6


def test_the_parts_together_are_the_model_that_one_process_trains(trained: dict[str, list[Any]]) -> None:
    _, _, weights = alone()
    parts = {name: value for result in trained["4x1"] for name, value in result["part"].items()}
    assert parts.keys() == weights.keys()
    for name, value in weights.items():
        assert parts[name] == pytest.approx(value, abs=1e-5), name


def test_shared_weights_stay_the_same(trained: dict[str, list[Any]]) -> None:
    parts = [result["part"] for result in trained["4x1"]]
    assert parts[0]["wte.weight"] == parts[-1]["head.weight"]


def test_of_a_model_without_memory_a_process_makes_its_stage_alone(trained: dict[str, list[Any]]) -> None:
    """The embedding is the head, too, so both stages have it."""
    lower, upper = (result["here"] for result in trained["on meta"][:2])
    whole = {name for name, _ in user_model.make().named_parameters()}
    assert {*lower} | {*upper} == whole and {*lower} & {*upper} == {"wte.weight"}
    assert "wpe.weight" in lower and "blocks.3.linear.weight" in upper


def test_a_model_without_memory_needs_what_fills_it(single: Varuna) -> None:
    with pytest.raises(ValueError, match=r"got one on the meta device; try init_weights=\.\.\."):
        varuna(user_model.make().to("meta"))


def test_rounded_weights_made_by_each_process_are_those_of_the_whole_model(
    trained: dict[str, list[Any]],
) -> None:
    for on_meta, whole in zip(trained["fp16 on meta"], trained["fp16"], strict=True):
        assert (on_meta["losses"], on_meta["norms"], on_meta["part"]) == (
            whole["losses"],
            whole["norms"],
            whole["part"],
        )


def test_torchs_schedules_take_micro_batches_of_one_size(trained: dict[str, list[Any]]) -> None:
    messages = trained["gpipe of short micro-batches"]
    assert messages == ["chunk_size: expected micro-batches of one size for gpipe, got 3, 3, 2"] * 2


@pytest.mark.parametrize("name", ["4x1", "gpipe"])
def test_evaluation_is_the_loss_of_the_global_batch(name: str, trained: dict[str, list[Any]]) -> None:
    model = user_model.make()
    model.load_state_dict(
        {name: torch.tensor(value).view_as(model.state_dict()[name]) for name, value in alone()[2].items()}
    )
    expected = model.eval()(**user_model.batch(STEPS, SIZE)).item()
    assert [result["evaluated"] for result in trained[name]] == pytest.approx([expected] * 4, rel=1e-5)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_follows_fp32(name: str, trained: dict[str, list[Any]]) -> None:
    for result in trained[name]:
        assert distance(result) < (1e-2 if name == "fp16" else 1e-1) and not any(result["skipped"])


def test_an_overflow_is_told_to_every_process(trained: dict[str, list[Any]]) -> None:
    skipped_steps = [result["skipped"] for result in trained["fp16 from far above"]]
    assert skipped_steps[0] == skipped_steps[1] and skipped_steps[0][0] and not skipped_steps[0][-1]
    for result in trained["fp16 from far above"]:
        is_finite = [math.isfinite(norm) for norm in result["norms"]]
        assert is_finite == [not skipped for skipped in result["skipped"]]


def test_a_short_micro_batch_that_weighs_as_the_others_shows(trained: dict[str, list[Any]]) -> None:
    assert distance(trained[SHORT_BUG][0]) > 1e-4


def test_one_process_reads_a_checkpoint_of_four(trained: dict[str, list[Any]], folder: str) -> None:
    whole = read_checkpoint(folder)
    assert json.loads(whole["progress"])["num_steps"] == 3
    for result in trained["2x2"]:
        for name, value in result["part"].items():
            assert whole[f"weights.{name}"].flatten().tolist() == value
            assert whole[f"optimizer.{name}.step"].item() == 3
            assert json.loads(whole[f"options.{name}"])["lr"] == user_model.LEARNING_RATE


# ---- The recompute


@pytest.mark.parametrize("name", ["dropout", RANDOM_BUG])
def test_dropout_is_that_of_one_process_that_draws_stage_by_stage(
    name: str, trained: dict[str, list[Any]]
) -> None:
    """Of three stages two recompute; with other random numbers than before, it shows."""
    for result in trained[name]:
        far = distance(result, user_model.train_with_dropout(STEPS, SIZE, 2, result["active"], DROPOUT))
        assert far > 1e-2 if name == RANDOM_BUG else far < 1e-6


def test_random_numbers_go_on_after_a_recompute() -> None:
    stage = Stage(lambda number, inputs: (torch.rand(3) * inputs[0],), [True], is_last=False)
    torch.manual_seed(5)
    stage.forward(0, [torch.ones(3)])
    state = torch.get_rng_state()
    stage.recompute(0)
    assert torch.equal(torch.get_rng_state(), state)


# ---- Cutting


class Two(nn.Module):
    """Two layers with a CutPoint between, and variations that are refused."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first, self.second, self.cutpoint, self.kind = nn.Linear(4, 4), nn.Linear(4, 1), CutPoint(), kind

    def forward(self, x: Tensor) -> Tensor:
        residual = x = self.first(x)
        width = x.shape[1] if self.kind == "size" else 1
        if self.kind == "branch" and x.sum() > 0:
            x = -x
        x = self.cutpoint(x)
        if self.kind == "twice":
            x = self.cutpoint(x)
        if self.kind == "both sides":
            x = self.first(x)
        if self.kind == "residual":
            x = x + residual * 2
        if self.kind == "size":
            x = x * width
        return self.second(x).mean()


INPUTS = {"x": torch.arange(8.0).view(2, 4)}


def parts_of(model: nn.Module) -> Any:
    return cut_into_parts(model, trace_model(model, INPUTS), [0])


@pytest.mark.parametrize("kind", ["", "residual"])
def test_the_parts_compute_what_the_model_does(kind: str) -> None:
    model = Two(kind)
    lower, upper = parts_of(model)
    assert torch.equal(upper.module(*lower.module(INPUTS["x"])), model(**INPUTS))
    assert {name for name, _ in lower.module.named_parameters()} == {"first.weight", "first.bias"}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("branch", "cannot be traced"),
        ("twice", "a CutPoint is used twice in a forward pass: make a CutPoint for each place"),
        (
            "both sides",
            r"parameter first.weight is used by stages 0 and 1, on both sides of a cut; try shared_weights=",
        ),
        ("size", "expected tensors at the cut above stage 0, got int"),
    ],
)
def test_a_model_that_cannot_be_cut_is_one_line(kind: str, message: str) -> None:
    model = Two(kind)
    with pytest.raises(ValueError, match=message) as error:
        parts = parts_of(model)
        specs_of(next(run_without_memory(parts, INPUTS))[0], 0)
        find_shared(model, parts, [])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pair", [("wte.weight", "head.weight"), ("head.weight", "wte.weight")])
def test_the_norm_counts_a_shared_parameter_under_the_first_name_of_its_pair(pair: tuple[str, str]) -> None:
    names = counted_names(user_model.make(), [pair])
    assert pair[0] in names and pair[1] not in names
    assert len(names) == len([*user_model.make().parameters()])


def test_the_norm_counts_a_parameter_that_two_stages_use_under_one_name() -> None:
    assert "wte.weight" in counted_names(user_model.make(), [("wte.weight", "wte.weight")])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("first.weight", "third.weight"), "the model has no parameter third.weight"),
        (("first.weight", "second.weight"), r"got \(4, 4\) of first.weight and \(1, 4\) of second.weight"),
    ],
)
def test_a_pair_that_cannot_be_shared_is_named(pair: tuple[str, str], message: str) -> None:
    model = Two()
    with pytest.raises(ValueError, match=message):
        find_shared(model, parts_of(model), [pair])


def test_cuts_balance_time_and_spare_the_last_stage_its_recompute() -> None:
    """By hand: 4 a unit below, 3 on the last stage; every run adds 1."""
    assert choose_cuts([10, 10, 10, 10], [True] * 4, 2) == [1]
    assert choose_cuts([10, 10, 10, 10, 30], [True] * 5, 2) == [2]
    assert choose_cuts([1, 1, 1, 100], [True] * 4, 3) in ([0, 2], [1, 2])


def test_a_stage_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="expected parameters in all 2 stages"):
        choose_cuts([10, 0], [True, False], 2)


def test_cuts_that_are_named_are_taken(trained: dict[str, list[Any]]) -> None:
    assert [result["active"] for result in trained["cuts"]] == [[0], [0]]
    assert [result["active"] for result in trained["fp16"]] != [[0], [0]]
    assert not any(name.startswith("blocks.1.") for name in trained["cuts"][0]["part"])


def test_more_stages_than_cuts_are_refused() -> None:
    model = user_model.make()
    graph = trace_model(model, user_model.batch(0, 2))
    assert count_cuts(graph) == user_model.NUM_BLOCKS
    with pytest.raises(ValueError, match="expected at least 5 CutPoints for 6 stages, got 4"):
        choose_cuts([1] * 5, [True] * 5, 6)


# ---- Batches and maps


def test_a_global_batch_never_shrinks() -> None:
    assert micro_batch_sizes(16, 3, 2) == [3, 3, 2]
    with pytest.raises(ValueError, match="expected a multiple of 3 replicas, got 16; try 15 or 18"):
        micro_batch_sizes(16, 2, 3)


def test_shapes_that_change_are_named_by_every_process_or_where_they_are_sent(
    trained: dict[str, list[Any]],
) -> None:
    (first, at_the_cut), (second,) = trained["other shapes"]
    assert first == second
    assert first.startswith(
        "step: expected input_ids of (8,) for each sample, as in the first batch, got (5,); try to pad"
    )
    assert at_the_cut == (
        "micro-batch 0: expected tensor 0 that stage 0 sends to be (4, 8, 16) float32, got (4, 5, 16) float32; try"
        " to pad all batches to one shape"
    )


def test_what_has_a_batch_of_one_goes_to_every_micro_batch() -> None:
    micro_batches = split_batch({"x": torch.arange(5), "y": torch.ones(1, 3), "z": None}, [2, 2, 1])
    assert [micro_batch["x"].tolist() for micro_batch in micro_batches] == [[0, 1], [2, 3], [4]]
    assert all(micro_batch["y"].shape == (1, 3) and micro_batch["z"] is None for micro_batch in micro_batches)
    with pytest.raises(ValueError, match="expected 5 samples of x in this process, got 4"):
        split_batch({"x": torch.arange(4)}, [2, 2, 1])


def test_maps_are_read_as_published() -> None:
    ranks = RankMap.parse("0,2;1,3;")
    assert (ranks.num_stages, ranks.num_replicas, ranks.stage_and_replica(3)) == (2, 2, (1, 1))
    assert ranks == RankMap.parse("0,2;1,3") == RankMap.parse(str(RankMap.make(2, 2))) and ranks.pipeline(
        1
    ) == [2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1;2;", "equally many ranks in each stage"),
        ("0;0;", "each rank from 0 to 1 once"),
        ("a;b", "as '0,2;1,3'"),
        ("", "equally many ranks in each stage"),
    ],
)
def test_a_map_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankMap.parse(text)


# ---- One process is a pipeline, too


def varuna(model: nn.Module, **more: Any) -> Varuna:
    def batch(size: int, device: Any = None) -> dict[str, Any]:
        return user_model.batch(0, size)

    return Varuna(model, "0;", batch, 4, 2, device=more.pop("device", "cpu"), **more)


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> Iterator[Varuna]:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    yield varuna(user_model.make(), shared_weights=user_model.SHARED)
    dist.destroy_process_group()


def test_forward_and_step_say_what_to_call(single: Varuna) -> None:
    with pytest.raises(RuntimeError, match=r"try step\(inputs\)"):
        single(torch.ones(1))
    with pytest.raises(ValueError, match=r"try set_optimizer\(optimizer\)"):
        single.step(user_model.batch(0, 4))
    with pytest.raises(ValueError, match="made after Varuna"):
        single.set_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with pytest.raises(ValueError, match="the batch lacks labels, mask, which the first batch had"):
        single.evaluate({"input_ids": torch.zeros(4, 8), "scale": None, "bias": None})


@pytest.mark.parametrize("cuts", [[0], [9]])
def test_cuts_unlike_the_stages_are_refused(single: Varuna, cuts: list[int]) -> None:
    with pytest.raises(
        ValueError, match="cuts: expected 0 numbers of CutPoints, from 0 to 3, for 1 stage, got"
    ):
        varuna(user_model.make(), cuts=cuts)


def test_a_group_of_the_script_that_sends_no_host_memory_is_refused() -> None:
    """As of init_process_group("nccl"); inboxes would fail at their first message."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            ValueError, match=r"backend for CPU tensors, which carry messages, got cuda:gloo; try"
        ):
            take_seat(1.0, "cuda")
    finally:
        dist.destroy_process_group()


def test_on_a_gpu_passes_are_noted_by_events_and_messages_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCuda(1).install(monkeypatch)
    monkeypatch.setattr(STREAMS["cuda"], "span", None)
    trace = Trace(Job("varuna", tiny(), device="cuda"))
    trace.is_on = True
    for work in ("forward", "recompute", "backward", "send"):
        with trace_note(torch.device("cuda"), work, 0):
            pass
    kinds = [(track, type(end)) for track, *_, end in trace.notes]
    assert kinds == [("compute", FakeEvent)] * 3 + [("messages", float)]


class LinkOfOneStep:
    """Keeps what a step tells."""

    def at_boundary(self, model: Any) -> None: ...
    def tell_alive(self) -> None: ...
    def tell_step(self, model: Any, inputs: Any, facts: dict[str, Any]) -> None:
        self.facts = facts


def test_a_stage_is_busy_until_its_queued_passes_have_ended(
    single: Varuna, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, link = [0.0], LinkOfOneStep()
    queued = SimpleNamespace(synchronize=lambda: now.append(100.0))
    monkeypatch.setattr(STREAMS["cpu"], "current", lambda: queued, raising=False)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    single._link = link  # type: ignore[assignment]
    single.set_optimizer(torch.optim.SGD(single.parameters()))
    single.step(user_model.batch(0, 4))
    assert link.facts["busy_seconds"] == 100.0


def test_a_peer_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 3,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_ports(1)[0],
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(LostPeer, match=r"rank 1, 2 of 3 did not come within 1 s"):
        join(1.0)


def test_a_rank_that_finds_no_store_names_the_rank_that_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank, unless torchrun's agent has a store; nothing listens at the port."""
    addresses = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    for name, value in addresses.items():
        monkeypatch.setenv(name, str(value))
    lost_ranks = {}
    for is_agent_store in ("True", "False"):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", is_agent_store)
        with pytest.raises(LostPeer, match="did not answer at") as error:
            join(1.0)
        lost_ranks[is_agent_store] = error.value.lost_ranks  # type: ignore[attr-defined]
    assert lost_ranks == {"True": [], "False": [0]}


def test_all_ranks_take_the_cpu_and_the_first_says_so_if_a_machine_has_fewer_gpus_than_ranks(
    trained: dict[str, list[Any]],
) -> None:
    note = (
        "all ranks compute on the CPU: each needs a GPU of its own, and the machine of rank 2 has 2 ranks and"
        " 1 GPU"
    )
    for rank, (number, world_size, device, seat_note, printed, backend) in enumerate(
        trained["too few gpus on the other machine"]
    ):
        assert (number, world_size, device, seat_note, printed) == (
            rank,
            4,
            "cpu",
            note,
            "" if rank else f"{note}\n",
        )
        assert "nccl" not in backend


@pytest.mark.parametrize("name", ["the cpu given to one rank", "no gpus"])
def test_ranks_on_the_cpu_say_nothing_where_no_gpu_is_lacking(
    name: str, trained: dict[str, list[Any]]
) -> None:
    assert [seat[2:5] for seat in trained[name]] == [["cpu", "", ""]] * 2


@pytest.mark.parametrize(
    ("requested", "local", "gpus", "taken"),
    [
        ((-1, -1), ("1", "2"), 2, "cuda:1"),
        ((-1, 1), ("0", "2"), 2, "cuda:1"),
        ((-1, -1), ("", ""), 1, "cuda:0"),
        ((-1, -1), ("1", "2"), 1, "cpu"),
        ((-1, 0), ("0", "2"), 1, "cpu"),
        ((-1, 1), ("", ""), 1, "cpu"),
        ((-1, -1), ("0", "1"), 0, "cpu"),
        ((3, -1), ("0", "8"), 4, "cuda:3"),
        ((3, -1), ("0", "1"), 0, "cpu"),
        (("cuda", -1), ("1", "2"), 1, "cuda"),
        (("cuda:1", -1), ("0", "8"), 2, "cuda:1"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_among_the_ranks_of_its_machine(
    requested: tuple[Any, int], local: tuple[str, str], gpus: int, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And makes it the current one, on whose stream it waits."""
    current: list[torch.device] = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local, strict=True):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    trainings.see_gpus(monkeypatch, gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert str(take_seat(1.0, *requested).device) == taken
    assert [str(device) for device in current] == [taken] * (":" in taken)


def test_a_group_has_nccl_if_all_its_ranks_compute_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group without it sums tensors of either device."""
    for kinds, backend in (
        (["cuda", "cuda"], "cpu:gloo,cuda:nccl"),
        (["cuda", "cpu"], "gloo"),
        (["sim"], "gloo"),
    ):
        assert _choose_backend([json.dumps(Offer(kind)).encode() for kind in kinds]) == backend


class Counter(nn.Module):
    """Its own forward pass, which is traced, reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cutpoint, self.scale = nn.Linear(4, 1), CutPoint(), nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.cutpoint(x * self.scale * self.count)).mean()


def test_training_and_evaluation_share_a_models_tensors_on_the_device() -> None:
    """A buffer of the modules that are traced stayed on the host for evaluation."""
    with Tracker():  # which counts the device sim
        model = Varuna(
            Counter(), "0;", lambda size, device=None: {"x": torch.ones(size, 4)}, 4, 2, device="sim"
        )
        model.eval()
        model.evaluate({"x": torch.ones(4, 4)})
        evaluated, trained = (
            dict([*part.module.named_parameters(), *part.module.named_buffers()])
            for part in model.parts_by_mode.values()
        )
        assert evaluated.keys() == trained.keys() == {"linear.weight", "linear.bias", "scale", "count"}
        for name, tensor in trained.items():
            assert tensor is evaluated[name] and tensor.device.type == "sim", name


def test_a_message_that_never_comes_names_its_rank() -> None:
    inbox = Inbox(5, GRADIENT_KIND, 0.05)
    with pytest.raises(LostPeer, match=r"no gradient from rank 5 in 0.05 s"):
        inbox.take()
    inbox.close()


def test_a_rank_that_takes_no_part_in_a_sum_is_named_after_the_limit(trained: dict[str, list[Any]]) -> None:
    """Of a second, where torch gives a group of its own half an hour."""
    message = trained["sum"][0]
    assert message.startswith("rank 1 took no part in a sum: look at its log (") and "\n" not in message


# ---- The documents' snippet


@pytest.mark.heavy
def test_the_snippet_of_the_page_runs_on_four_ranks(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "pipelines.md").read_text().split("```python\n")[1].split("```")[0]
    order = {"ranks": 4, "folder": str(tmp_path), "text": text}
    printed = "".join(on_ranks(4, "tests.methods.pipeline.trainings:run_snippet", order))
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("loss")]
    assert len(losses) >= 5 and losses[-1] < losses[0]
