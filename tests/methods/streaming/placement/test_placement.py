"""Where each layer lives: how it is written, that every place trains the same, and what it takes by arithmetic."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from harness.core.job import GIB, Room, Workload
from harness.core.method import create
from harness.devices.memory_rehearsal import predict
from methods.offload import adamw_kernel
from methods.offload.clip import BLOCK_NUMEL
from methods.streaming import layer_state
from methods.streaming.placement.placed_layers import PlacedLayers
from methods.streaming.placement.placement import parse, placement_text, rings, shrink, spread
from tests.methods.test_agree import difference
from tests.support.bugs import COMMITTED
from tests.support.planting import planted
from tests.support.training import (
    answers_within,
    losses_free_and_at_the_peak,
    small_bytes,
    tiny,
    train,
    train_resident,
)

MIXTURES = ["R5", "P5", "S5", "D5", "R1P1W2S1", "S2W1P1R1", "W1S1D1S1W1"]
SMALL = {"num_layers": 5, "hidden_size": 32, "num_heads": 2}
STEPS = 6
SOMETIMES = 2.7  # a limit that the norm is within at some of these steps, and beyond at others


def placed(workload: Workload, placement: str, clipping: str = "deferred", window_size: int = 2) -> str:
    """How this training differs from resident training; empty where it has the same bits."""
    options = {"placement": placement, "clipping": clipping, "window_size": window_size}
    return difference(train("stronghold", workload, STEPS, **options), train_resident(workload, STEPS))


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("R2W5S1", "RRWWWWWS"),
        ("R2W", "RRWWWWWW"),
        ("W", "WWWWWWWW"),
        ("RPW4SD", "RPWWWWSD"),
        ("S8", "SSSSSSSS"),
    ],
)
def test_a_placement_is_a_letter_a_layer(text: str, kinds: str) -> None:
    assert parse(text, 8) == kinds
    assert parse(placement_text(kinds), 8) == kinds


@pytest.mark.parametrize("number", [0, 1, 3, 7, 20])
@pytest.mark.parametrize("others", ["", "W", "PPWWD", "PWD" * 6])
def test_layers_are_spread_evenly_with_another_on_top(others: str, number: int) -> None:
    kinds = spread(others, "S", number)
    assert kinds.replace("S", "") == others
    assert others == "" or kinds.endswith(others[-1])
    for length in range(len(kinds) + 1):
        assert kinds[:length].count("S") == -(-length * number // max(1, len(kinds)))


def test_every_placement_is_written_and_read_back() -> None:
    for kinds in map("".join, itertools.product("RWSD", repeat=6)):
        assert parse(placement_text(kinds), 6) == kinds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "placement: expected runs of R"),
        ("R2X6", "placement: expected runs of R"),
        ("2R6W", "placement: expected runs of R"),
        ("r2w6", "placement: expected runs of R"),
        ("R2W5", "expected the model's 8 layers, got 7"),
        ("R2W99999999999", "expected the model's 8 layers, got"),
        ("R8W", "expected the model's 8 layers, got 9"),
    ],
)
def test_a_bad_placement_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        create("stronghold", {"placement": text}).plan(tiny(num_layers=8), Room())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placement": "R2W3", "resident_layers": 1}, "differ: leave one out"),
        ({"clipping": "sometimes"}, "clipping: expected one of deferred, speculate"),
    ],
)
def test_options_that_contradict_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        create("stronghold", options).plan(tiny(num_layers=5), Room())


def test_resident_layers_and_window_are_a_placement_too() -> None:
    planned = create("stronghold", {"resident_layers": 2, "window_size": 2}).plan(tiny(num_layers=8), Room())
    assert planned.options["placement"] == "R2W6"


def test_layers_take_turns_in_the_slots_of_their_ring() -> None:
    alone, streamed = rings("RWSWWDS", 2)
    assert (alone.above, streamed.above) == ({1: 4, 3: 5}, {})


@pytest.mark.parametrize(
    "changes", [{}, {"clip_norm": 0.0}, {"dtype": "bf16"}, {"dtype": "bf16", "clip_norm": 0.0}], ids=str
)
@pytest.mark.parametrize("placement", MIXTURES)
@pytest.mark.cover(1)
def test_every_place_has_the_very_bits_of_resident_training(placement: str, changes: dict[str, Any]) -> None:
    assert placed(tiny(**SMALL, **changes), placement) == ""


@pytest.mark.parametrize("window_size", [1, 5])
def test_a_window_of_any_width_has_the_same_bits(window_size: int) -> None:
    assert placed(tiny(**SMALL), "S2W2S1", window_size=window_size) == ""


@pytest.mark.parametrize("clip_norm", [COMMITTED, SOMETIMES, 0.05], ids=["never", "sometimes", "always"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["W5", "P5", "S5", "R1P1W2S1"])
@pytest.mark.cover(1)
def test_speculation_has_the_very_bits_however_often_it_is_clipped(
    placement: str, dtype: str, clip_norm: float
) -> None:
    assert placed(tiny(**SMALL, dtype=dtype, clip_norm=clip_norm), placement, "speculate") == ""


@pytest.mark.parametrize("placement", ["W5", "S5"])
def test_speculation_is_committed_at_some_steps_and_left_at_others(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = tiny(**SMALL, clip_norm=SOMETIMES)
    norms = train_resident(workload, STEPS).grad_norms
    assert min(norms) < SOMETIMES < max(norms)
    states: list[int] = []

    def spy(self: Any, *args: Any) -> Any:
        states.append(id(self.current))
        return next_step(self, *args)

    next_step = layer_state.LayerState.next_step
    monkeypatch.setattr(layer_state.LayerState, "next_step", spy)
    assert placed(workload, placement, "speculate") == ""
    assert len(set(states)) > 5 + 1  # more states have been in force than there are layers and ends


def test_no_update_is_made_ahead_if_every_step_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    said = answers_within(monkeypatch)
    assert placed(tiny(**SMALL, clip_norm=0.05), "W5", "speculate") == ""
    assert not said


@pytest.mark.parametrize(
    "changes", [{}, {"clip_norm": 0.0}, {"dtype": "bf16"}, {"vocab_size": 2 * BLOCK_NUMEL // 36}], ids=str
)
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches_have_the_very_bits_in_every_place(micro_batches: int, changes: dict[str, Any]) -> None:
    workload = tiny(**SMALL, batch_size=6, micro_batches=micro_batches, **changes)
    assert placed(workload, "R1P1W2S1", "speculate") == ""


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("placement", MIXTURES)
@pytest.mark.cover(1)
def test_the_plan_foretells_what_one_more_step_moves(placement: str, dtype: str, clip_norm: float) -> None:
    workload, options = (
        tiny(**SMALL, dtype=dtype, clip_norm=clip_norm),
        {"placement": placement, "window_size": 2},
    )
    one, two = (train("stronghold", workload, steps, **options).trained.moved_bytes for steps in (1, 2))
    planned = create("stronghold", options).plan(workload, Room()).moved_bytes
    # Where updates are owed, the end of the training pays the last one, so that every step moves as much.
    assert two - one == planned


def test_a_committed_step_of_streamed_layers_moves_no_gradient_in() -> None:
    workload = tiny(**SMALL, clip_norm=COMMITTED)
    options = {"placement": "S5", "window_size": 2, "clipping": "speculate"}
    two, three = (train("stronghold", workload, steps, **options).trained.moved_bytes for steps in (2, 3))
    assert three - two == create("stronghold", options).plan(workload, Room()).moved_bytes


UPDATES = [("fp32", "deferred"), ("bf16", "speculate"), ("fp16", "speculate"), ("fp32", None), ("bf16", None)]


@pytest.mark.parametrize(("dtype", "clipping"), UPDATES)
@pytest.mark.parametrize("placement", ["R4", "P4", "S4", "D4", "S1P1W1R1"])
@pytest.mark.cover(1)
def test_the_plan_is_the_rehearsals_peak_and_room_for_small_numbers_in_both_memories(
    placement: str, dtype: str, clipping: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip_norm = 1.0 if clipping else 0.0
    workload = Workload(
        num_layers=4, hidden_size=256, seq_len=64, vocab_size=512, dtype=dtype, clip_norm=clip_norm
    )
    stronghold = create("stronghold", {"placement": placement, "clipping": clipping})
    # a plan has room for an update without it
    monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    predicted, planned = predict(stronghold, workload), stronghold.plan(workload, Room())
    # A rehearsal commits no update ahead of the norm, which meets two boundaries more.
    more = small_bytes(workload) + (2 * workload.boundary_bytes if clipping == "speculate" else 0)
    assert predicted.device_bytes <= planned.device_bytes <= predicted.device_bytes + more
    drawn = 2**20  # starting values of resident layers on their way through the host
    assert planned.host_bytes == pytest.approx(predicted.host_bytes, rel=0.1, abs=drawn)


@pytest.mark.parametrize(("dtype", "clipping"), UPDATES)
def test_an_update_by_the_kernel_stays_within_the_plan(dtype: str, clipping: str | None) -> None:
    sizes = {"num_layers": 4, "hidden_size": 256, "seq_len": 64, "vocab_size": 512}
    workload = Workload(**sizes, dtype=dtype, clip_norm=1.0 if clipping else 0.0)
    stronghold = create("stronghold", {"placement": "S1P1W1R1", "clipping": clipping})
    assert predict(stronghold, workload).device_bytes <= stronghold.plan(workload, Room()).device_bytes


def test_bytes_by_kind_are_those_of_the_hand() -> None:
    """Of each layer's parameters: R 16 bytes here; P 4 here, 16 there; W and S 16 there. Here, too, one slot for W's
    weights, two rooms for gradients, and a slot with state and gradient for S. Speculation's second states are 12."""
    workload = Workload(num_layers=4, hidden_size=256, seq_len=64, vocab_size=512)
    layer, ends = workload.layer_params, workload.end_params
    plan = PlacedLayers(workload, "RPWS", 3, "speculate").plan()
    assert plan.device["weights"] == 4 * (ends + 2 * layer)
    assert plan.device["optimizer"] == 8 * (ends + layer)
    assert plan.device["buffers"] == (4 + 2 * 4 + 16) * layer
    numbers = 512 + 3 * 4  # small ones, and how often each layer was updated
    assert plan.host == {
        "weights": 12 * layer,
        "gradients": 12 * layer,
        "optimizer": (3 * 8 + 3 * 12) * layer + numbers,
    }


@pytest.mark.parametrize(
    ("dtype", "clip_norm", "param_bytes"),
    [
        ("fp32", 1.0, 16),
        ("bf16", 1.0, 14),
        ("fp16", 1.0, 16),
        ("fp32", 0.0, 12),
        ("bf16", 0.0, 12),
        ("fp16", 0.0, 16),
    ],
)
def test_a_resident_layer_takes_no_byte_twice(dtype: str, clip_norm: float, param_bytes: int) -> None:
    """Of each parameter: master and moments; the weight where it is no half of the master; a gradient where the update
    waits for the norm."""
    workload = Workload(4, 256, seq_len=64, vocab_size=512, dtype=dtype, clip_norm=clip_norm)
    predicted = [predict(create("stronghold", {"placement": f"R{n}"}), workload.at_depth(n)) for n in (4, 6)]
    more = predicted[1].device_bytes - predicted[0].device_bytes
    assert more == pytest.approx(
        2 * (param_bytes * workload.layer_params + workload.boundary_bytes), rel=0.01
    )


def test_a_streamed_layer_whose_update_need_not_wait_takes_12_bytes_a_parameter_of_the_host() -> None:
    workload = Workload(num_layers=4, hidden_size=256, seq_len=64, vocab_size=512, clip_norm=0.0)
    predicted = [predict(create("stronghold", {"placement": f"S{n}"}), workload.at_depth(n)) for n in (4, 6)]
    layer_bytes = 12 * workload.layer_params
    assert predicted[1].host_bytes - predicted[0].host_bytes == pytest.approx(2 * layer_bytes, rel=0.01)
    small_numbers = 512 + 4 * 4
    assert PlacedLayers(workload, "SSSS", 3, None).plan().host_bytes == 4 * layer_bytes + small_numbers


def test_a_half_of_a_master_that_stays_behind_is_seen() -> None:
    """The lower halves of streamed layers do not come home with the upper ones; in fp32 a master has no halves."""
    pairs = "for slot_slab, home_slab in self._pairs(layer, target)"
    with planted("methods/streaming/slot.py", pairs, f"{pairs} if slot_slab.is_floating_point()"):
        assert placed(tiny(**SMALL), "S5") == ""
        assert placed(tiny(**SMALL, dtype="bf16"), "S5") != ""


def test_updates_wait_for_the_norm_however_much_room_the_host_has() -> None:
    stronghold, room = create("stronghold", {"resident_layers": 0}), Room(GIB, GIB)
    assert stronghold.plan(tiny(**SMALL), room).options["clipping"] == "deferred"
    assert "clipping" not in stronghold.plan(tiny(**SMALL, clip_norm=0.0), room).options


def test_a_budget_of_the_peak_is_enough_for_every_place() -> None:
    options = {"placement": "R1P1W2S1", "clipping": "speculate", "window_size": 2}
    free, held = losses_free_and_at_the_peak(tiny(**SMALL), **options)
    assert held == free


@pytest.mark.parametrize(
    ("placement", "num_layers", "twin"),
    [
        ("R1W11", 4, "R1W3"),
        ("R6P3W2S1", 4, "R1P1W1S1"),
        ("R6P3W2S1", 2, "R1P1"),
        ("W8", 3, "W3"),
        ("R2W1D9", 4, "R1W1D2"),
    ],
)
def test_a_twin_has_every_kind_of_layer_that_there_is_room_for(
    placement: str, num_layers: int, twin: str
) -> None:
    kinds = parse(placement, sum(map(int, re.findall(r"\d+", placement))))
    assert placement_text(shrink(kinds, num_layers)) == twin
