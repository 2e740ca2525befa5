"""Shards that fit: foretold without memory, rehearsed with it, halved where they do not fit after all."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from methods.hydra import ModelOrchestrator
from tests.methods.sharding.test_orchestrator import tasks
from tests.support import on_sim

pytestmark = pytest.mark.usefixtures("compiled_sim")
FOUR = ("perceptron", "deep", "single", "tied")  # the simulated device has no convolution
NO_DIFFERENCE = [""] * len(FOUR)


def smallest(device_memory: int = 1, **words: Any) -> int:
    """The smallest feasible memory, as told where there is too little."""
    told = (
        r"layer \d+ needs .* by itself in each of \d slots: .* smallest feasible device_memory is (\d+) bytes"
    )
    with pytest.raises(ValueError, match=told) as error:
        ModelOrchestrator(tasks(FOUR), device_memory=device_memory, **words).generate()
    found = re.search(told, str(error.value))
    assert found
    return int(found[1])


@pytest.mark.parametrize("words", [{}, {"intermediates": "saved"}, {"double_buffer": False}], ids=str)
@pytest.mark.cover(0)
def test_the_smallest_feasible_memory_trains_the_largest_of_four_models_and_a_byte_less_is_refused(
    words: dict[str, Any],
) -> None:
    least = smallest(**words)
    assert smallest(least - 1, **words) == least
    assert on_sim.call(on_sim.hydra, least, words, device_bytes=least) == NO_DIFFERENCE


@pytest.mark.heavy
def test_what_does_not_fit_after_all_is_halved_in_the_rehearsal() -> None:
    """Shards are made for more memory than there is."""
    least = smallest()
    assert on_sim.call(on_sim.hydra, 3 * least, {}, device_bytes=least + 1024) == NO_DIFFERENCE


@pytest.mark.parametrize("double_buffer", [True, False])
def test_a_unit_that_runs_out_of_memory_halves_its_shard_and_goes_on_to_the_same_bits(
    double_buffer: bool,
) -> None:
    """Every model starts as one shard, and nothing was foretold or rehearsed."""
    least = smallest(double_buffer=double_buffer)
    words = {"double_buffer": double_buffer}
    assert on_sim.call(on_sim.hydra, None, words, True, device_bytes=least + 2048) == NO_DIFFERENCE


@pytest.mark.heavy
def test_no_peak_is_beyond_any_of_eight_memories_down_to_the_smallest_feasible() -> None:
    least, rng = smallest(), random.Random(3)
    budgets = [least, *(rng.randint(least, 3 * least) for _ in range(7))]
    peaks = on_sim.call(on_sim.hydra_peaks, budgets)
    assert [peak - budget for peak, budget in zip(peaks, budgets, strict=True) if peak > budget] == []
