"""Hydra's units are resident training cut into turns: the same bits, no race, memory and traffic as planned."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from harness.core.job import Room, Workload
from harness.core.method import Trained, Unavailable, create
from harness.devices import cuda_budget
from harness.devices.memory_rehearsal import predict
from methods.sharding import device_process, rehearsal
from methods.sharding.device_process import memory_shares
from methods.sharding.shard import shared_zeros
from tests.methods.test_agree import difference
from tests.support import forks, planting
from tests.support.fake_cuda import FakeCuda
from tests.support.races import find_races
from tests.support.training import TrainingResult, tiny, train, train_resident

STEPS = 6
# The two modes, shards of one layer, of several and the whole model, with one slot and with two.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"shard_layers": 2},
    {"shard_layers": 5},
    {"double_buffer": False},
    {"intermediates": "saved"},
    {"intermediates": "saved", "shard_layers": 2},
]
BOTH_MODES = [OPTIONS[1], OPTIONS[5]]
IN_THREE = {"batch_size": 6, "micro_batches": 3}
RUNS = [
    *((options, {"clip_norm": clip_norm}) for options in OPTIONS for clip_norm in (1.0, 0.0)),
    *((options, {"dropout": 0.1}) for options in BOTH_MODES),
    *(
        (options, {"dtype": "bf16", "clip_norm": clip_norm})
        for options in BOTH_MODES
        for clip_norm in (1.0, 0.0)
    ),
    *((options, {**IN_THREE, "clip_norm": clip_norm}) for options in BOTH_MODES for clip_norm in (1.0, 0.0)),
    *((options, {**IN_THREE, "dtype": "bf16"}) for options in BOTH_MODES),
]


class Bug(NamedTuple):
    """One change to a file of methods/ that leaves out a wait, and the clipping under which it endangers memory."""

    symptom: str
    old: str
    new: str
    clip_norm: float = 1.0
    file: str = "methods/sharding/shard.py"
    is_halved: bool = False  # where the model is two shards, one each slot


BUGS = [
    Bug("shard_overwritten_while_in_use", "(last_use, self.drain_event, *", "(self.drain_event, *"),
    Bug(
        "shard_overwritten_while_going_home", "(last_use, self.drain_event, *", "(last_use, *", clip_norm=0.0
    ),
    Bug(
        "shard_fetched_before_it_is_home",
        "*(home.offload_event for home in homes)",
        "*(None for home in ())",
        clip_norm=0.0,
        is_halved=True,
    ),
    Bug(
        "computed_before_its_weights_arrive",
        "(self.arrival_event, self.drain_event if to_write else None)",
        "(self.drain_event if to_write else None,)",
    ),
    Bug("gradient_overwritten_while_going_home", "self.drain_event if to_write else None", "None"),
    Bug(
        "sent_home_before_it_is_computed",
        "(compute_end, *(home.fetch_event for home in homes))",
        "tuple(home.fetch_event for home in homes)",
    ),
    Bug(
        "gradient_of_a_shared_weight_used_before_it_lands",
        "self.device.compute.wait_event(event)",
        "pass",
        file="methods/sharding/device_worker.py",
        is_halved=True,
    ),
    Bug("training_returns_before_the_last_copy_home", "gpu.synchronize()", "pass", file="methods/hydra.py"),
]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Load what Hydra imports afresh, with the bug in it."""
    with planting.planted(bug.file, bug.old, bug.new):
        yield


@pytest.mark.parametrize(("options", "changes"), RUNS, ids=str)
@pytest.mark.cover(1)
def test_the_very_bits_of_resident_training(options: dict, changes: dict) -> None:
    workload = tiny(num_layers=5, **changes)
    assert difference(train("hydra", workload, STEPS, **options), train_resident(workload, STEPS)) == ""


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_very_bits_where_slots_hold_the_whole_model(num_layers: int) -> None:
    workload = tiny(num_layers=num_layers)
    result = train("hydra", workload, STEPS, shard_layers=num_layers)
    assert difference(result, train_resident(workload, STEPS)) == ""


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.0}, IN_THREE], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.cover(1)
def test_no_race(options: dict, changes: dict) -> None:
    assert find_races(create("hydra", options), tiny(num_layers=5, **changes)) == []


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.symptom) for bug in BUGS])
def test_a_missing_wait_is_found_though_losses_do_not_show_it(bug: Bug) -> None:
    workload = tiny(num_layers=2 if bug.is_halved else 4, clip_norm=bug.clip_norm)
    options = {"shard_layers": 2} if bug.is_halved else {}
    with planted(bug):
        assert find_races(create("hydra", options), workload)
        assert train("hydra", workload, 3, **options).losses == train_resident(workload, 3).losses


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("options", "dtype"), [({"shard_layers": 3}, "bf16"), ({"intermediates": "saved"}, "fp32")]
)
@pytest.mark.cover(0)
def test_the_plan_is_within_a_tenth_of_the_rehearsal(options: dict, dtype: str, micro_batches: int) -> None:
    sizes = {"hidden_size": 128, "num_layers": 3, "seq_len": 256, "vocab_size": 512}
    workload = Workload(**sizes, micro_batches=micro_batches, dtype=dtype)
    method = create("hydra", options)
    plan, found = method.plan(workload, Room()), predict(method, workload)
    assert plan.device_bytes == pytest.approx(found.device_bytes, rel=0.1)
    assert plan.host_bytes == pytest.approx(found.host_bytes, rel=0.1)


@pytest.mark.parametrize(("intermediates", "num_copies"), [("checkpointed", 5), ("saved", 17.2 * 2 + 3)])
def test_beside_a_gpu_each_copy_at_home_is_planned_as_torch_locks_it(
    intermediates: str, num_copies: float
) -> None:
    """3 MiB take 4."""
    workload = Workload(hidden_size=768, num_layers=2, batch_size=2, seq_len=512)
    assert workload.boundary_bytes == 3 * 2**20
    plan = create("hydra", {"intermediates": intermediates}).plan(workload, Room(page_locks=True))
    assert plan.host["activations"] == int(num_copies * 4 * 2**20)


def test_with_several_gpus_the_leading_processs_context_is_planned() -> None:
    plans = [create("hydra", {"num_devices": n}).plan(tiny(), Room(page_locks=True)) for n in (1, 2)]
    assert (
        plans[1].device_bytes - plans[0].device_bytes == cuda_budget.LEADING_BYTES > cuda_budget.CONTEXT_BYTES
    )
    on_cpu = [create("hydra", {"num_devices": n}).plan(tiny(), Room()).device_bytes for n in (1, 2)]
    assert on_cpu[0] == on_cpu[1]


@pytest.mark.parametrize(("has_context", "expected"), [(True, [0.375, 0.5]), (False, [1.0, 1.0])])
def test_a_gpus_process_may_take_what_the_leading_process_leaves(
    monkeypatch: pytest.MonkeyPatch, has_context: bool, expected: list[float]
) -> None:
    """Without a context the leading process takes nothing, and may not ask, which would make one."""
    total = SimpleNamespace(total_memory=8 * cuda_budget.LEADING_BYTES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_context)
    if has_context:
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.5)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    assert memory_shares(["cuda:0", "cuda:1"]) == expected


def test_the_processes_of_several_gpus_are_sent_batches_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read elsewhere, a GPU's tensor would be on that GPU again."""
    cuda, found = FakeCuda(2).install(monkeypatch), []

    def rehearsing(models: Any, batches: Any, *_: Any) -> Any:
        found.extend(tensor.device.type for batch in batches for tensor in batch)
        raise Unavailable("the batches are known")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(device_process, "start_processes", lambda *_: [])
    monkeypatch.setattr(rehearsal, "rehearse", rehearsing)
    method = create("hydra", {"num_devices": 2, "shard_layers": 1})
    with cuda.running(), pytest.raises(Unavailable, match="are known"):
        next(method.train(tiny(), iter([]), "cuda"))
    assert found == ["cpu", "cpu"]


@pytest.mark.parametrize("options", [{}, {"double_buffer": False}], ids=str)
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_what_moves_is_about_what_is_planned(options: dict, clip_norm: float) -> None:
    workload = tiny(num_layers=9, clip_norm=clip_norm, vocab_size=300)
    moved = train("hydra", workload, 10, **options).trained.moved_bytes / 10
    assert create("hydra", options).plan(workload, Room()).moved_bytes == pytest.approx(moved, rel=0.1)


@pytest.mark.parametrize("gib", [6, 8, 12, 24])
def test_a_budget_is_filled_by_the_longest_shards_that_fit(gib: int) -> None:
    workload, room = Workload(num_layers=12), Room(device_bytes=gib * 2**30)
    plan = create("hydra", {}).plan(workload, room)
    longer = plan.options["shard_layers"] + 1
    assert plan.shortfall(room) is None
    assert longer > 12 or create("hydra", {"shard_layers": longer}).plan(workload, room).shortfall(room)


@pytest.mark.parametrize("seed", [2, 0, 1])
@pytest.mark.cover(0)
def test_no_budget_from_the_smallest_that_is_feasible_is_exceeded(seed: int) -> None:
    """The room is drawn from one layer a shard to the whole model; the training's own peak is the rehearsal's."""
    rng = random.Random(seed)
    workload = tiny(
        num_layers=3,
        vocab_size=rng.choice([64, 1500]),
        dtype=rng.choice(["fp32", "bf16"]),
        micro_batches=1 + seed % 2,
    )
    choice = {"num_models": 1 + seed % 2, "double_buffer": seed > 0}
    edges = [
        create("hydra", {**choice, "shard_layers": n}).plan(workload, Room()).device_bytes for n in (1, 3)
    ]
    room = Room(device_bytes=rng.randint(*edges) if seed else edges[0])
    plan = create("hydra", choice).plan(workload, room)
    assert plan.shortfall(room) is None
    assert predict(create("hydra", plan.options), workload).device_bytes <= plan.device_bytes


@pytest.mark.parametrize(
    ("num_devices", "changes"),
    [(1, {"dropout": 0.1}), (2, {"dropout": 0.1}), (1, {"batch_size": 4, "micro_batches": 2})],
    ids=str,
)
def test_several_models_end_where_each_would_alone(num_devices: int, changes: dict) -> None:
    """Three learning rates times two batch sizes, half a batch twice as often."""
    workload = tiny(num_layers=3, **changes)
    result = train("hydra", workload, STEPS, num_models=6, num_batch_sizes=2, num_devices=num_devices)
    assert difference(result, train_resident(workload, STEPS)) == ""
    for number, other in enumerate(result.trained.others, start=1):
        rate, half = divmod(number, 2)
        sizes = {"batch_size": workload.batch_size >> half, "learning_rate": workload.learning_rate / 2**rate}
        own = dataclasses.replace(workload, **sizes)
        assert other.changes == {"learning_rate": own.learning_rate, "batch_size": own.batch_size}
        found = TrainingResult(other.losses, other.grad_norms, Trained(other.tensors))
        assert difference(found, train_resident(own, STEPS << half)) == ""
    schedule = result.trained.schedule
    assert schedule["num_models"] == 6 and schedule["ratio"] >= 1
    assert {turn[0] for turn in schedule["turns"]} == set(range(6))
    assert {turn[3] for turn in schedule["turns"]} == set(range(num_devices))


@pytest.mark.parametrize("changes", [{}, {"batch_size": 8, "micro_batches": 2}], ids=str)
def test_one_model_on_two_devices_is_trained_on_halves_to_within_rounding(changes: dict) -> None:
    """The sums of the tied embedding's gradients are in another order than those of micro-batches."""
    workload = tiny(num_layers=3, learning_rate=1e-3, **changes)
    found, reference = train("hydra", workload, STEPS, num_devices=2), train_resident(workload, STEPS)
    assert found.losses == pytest.approx(reference.losses, rel=1e-6) and found.losses != reference.losses
    assert found.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
    assert not create("hydra", {"num_devices": 2}).bit_exact
    assert create("hydra", {"num_devices": 2, "hybrid": False}).bit_exact


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shard_layers": 13}, "shard_layers: expected 1 to 12, got 13"),
        ({"num_models": 0}, "num_models: expected at least 1, got 0"),
        ({"num_batch_sizes": 4}, "at most 1 more for each time that batch size 4 halves, got 4"),
        ({"num_batch_sizes": 3, "micro": 2}, "that batch size 4 in 2 micro-batches halves, got 3"),
        ({"num_devices": 0}, "num_devices: expected at least 1, got 0"),
        ({"partitioner": "pilot"}, "expected exact or presharded, got 'pilot'"),
        ({"partitioner": "presharded"}, "presharded needs shard_layers"),
        ({"policy": "longest"}, "policy: expected one of lrtf, srtf, fifo, random, got 'longest'"),
        ({"intermediates": "kept"}, "expected checkpointed or saved, got 'kept'"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(options: dict, text: str) -> None:
    workload = Workload(num_layers=12, micro_batches=options.pop("micro", 1))
    with pytest.raises(ValueError, match=text):
        create("hydra", options).plan(workload, Room())


def shared_peak_bytes(num_bytes: int) -> int:
    """How far memory that processes share raises this process's peak."""

    def peak_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    before = peak_bytes()
    shared_zeros(num_bytes).fill_(1)
    return peak_bytes() - before


def test_memory_that_processes_share_is_taken_once() -> None:
    assert 0.9 < forks.call(shared_peak_bytes, 2**28) / 2**28 < 1.2
