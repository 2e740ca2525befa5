"""The vector clock by hand; no race in the methods; every planted ordering bug is found, which losses do not show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from harness.core.method import create
from harness.simulation.fake_streams import FakeStreams, Stream, watch_streams
from tests.support.bugs import COMMITTED, LOUD_BUGS, SILENT_BUGS, Bug, overflow, planted
from tests.support.races import Race, VectorClock, find_races
from tests.support.training import overflowing, tiny, train, train_resident

# Those that order their own streams, and Hydra, whose races tests/methods/sharding/test_hydra.py looks for.
OTHERS = set(
    "deepspeed hydra fsdp2-offload hf-trainer megatron-lm superoffload zenflow".split()
    + "zero-infinity zero-infinity-nvme zero-offload".split()
)
PLACED: list[dict] = [
    {},
    {"clip_norm": 0.0, "window_size": 1},
    {"clipping": "speculate", "clip_norm": COMMITTED},
    {"clipping": "speculate", "dtype": "bf16", "clip_norm": COMMITTED},
    {"dtype": "bf16", "micro_batches": 2},
]


def by_symptom(bugs: list[Bug]) -> list:
    return [pytest.param(bug, id=bug.symptom) for bug in bugs]


def stronghold_runs() -> list:
    return [
        pytest.param(num_layers, window, resident, id=f"l{num_layers}-w{window}-r{resident}")
        for num_layers in (1, 4, 5)
        for window in sorted({1, min(2, num_layers), min(3, num_layers), num_layers})
        for resident in (0, 1)
        if resident < num_layers
    ]


@pytest.mark.parametrize("clip_norm", [1.0, 0.0], ids=["clip", "no_clip"])
@pytest.mark.parametrize(("num_layers", "window", "resident"), stronghold_runs())
@pytest.mark.cover(1)
def test_no_race_in_stronghold(num_layers: int, window: int, resident: int, clip_norm: float) -> None:
    method = create("stronghold", {"window_size": window, "resident_layers": resident})
    assert find_races(method, tiny(num_layers=num_layers, clip_norm=clip_norm)) == []


@pytest.mark.parametrize("clip_norm", [1.0, 0.0], ids=["clip", "no_clip"])
def test_no_race_in_stronghold_with_every_layer_resident(clip_norm: float) -> None:
    assert (
        find_races(create("stronghold", {"resident_layers": 4}), tiny(num_layers=4, clip_norm=clip_norm))
        == []
    )


@pytest.mark.parametrize("changes", PLACED, ids=str)
@pytest.mark.parametrize("placement", ["P5", "S5", "D5", "R1P1W2S1", "S2W1D2"])
@pytest.mark.cover(1)
def test_no_race_in_a_placement(placement: str, changes: dict) -> None:
    options = {
        "placement": placement,
        "clipping": changes.get("clipping"),
        "window_size": changes.get("window_size"),
    }
    workload = tiny(num_layers=5, **{name: value for name, value in changes.items() if name not in options})
    assert find_races(create("stronghold", options), workload) == []


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("clipping", ["deferred", "speculate"])
@pytest.mark.parametrize("placement", ["W5", "S5", "R1P1W2S1", "S2W1D2"])
@pytest.mark.cover(1)
def test_no_race_where_steps_of_fp16_overflow(
    placement: str, clipping: str, clip_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflow(monkeypatch)
    options = {"placement": placement, "clipping": clipping, "window_size": 2}
    assert find_races(create("stronghold", options), overflowing(clip_norm=clip_norm), steps=4) == []


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.0}, {"dtype": "bf16"}, {"dropout": 0.1}], ids=str)
def test_no_race_in_any_method(method_name: str, folders: tuple[Path, ...], changes: dict) -> None:
    if method_name in OTHERS:
        pytest.skip("not built on harness.devices.streams, or tested elsewhere")
    assert find_races(create(method_name, {}, folders), tiny(num_layers=4, **changes)) == []


@pytest.mark.parametrize("bug", by_symptom(SILENT_BUGS + LOUD_BUGS))
def test_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug):
        races = find_races(create(bug.method, bug.options), bug.workload, steps=4)
    assert bug.endangered in {race.memory for race in races}


@pytest.mark.parametrize("bug", by_symptom(SILENT_BUGS))
@pytest.mark.heavy
def test_losses_on_a_cpu_do_not_show_the_bug(bug: Bug) -> None:
    with planted(bug):
        losses = train(bug.method, bug.workload, 3, **bug.options).losses
    assert losses == train_resident(bug.workload, 3).losses


class TwoStreams(NamedTuple):
    """A second stream beside compute, a buffer that compute has written, and the races so far."""

    streams: FakeStreams
    other: Stream
    buffer: torch.Tensor
    races: list[Race]


@pytest.fixture
def two() -> Iterator[TwoStreams]:
    clock = VectorClock()
    with watch_streams(clock) as streams:
        yield TwoStreams(streams, streams.stream(), torch.zeros(8), clock.races)


def test_unordered_read_of_what_is_written_is_a_race(two: TwoStreams) -> None:
    with two.streams.use(two.other):
        two.buffer.sum()
    assert [str(race) for race in two.races] == [
        "what zeros made: stream 1 reads it (sum) does not wait until compute writes it (zeros)"
    ]


def test_event_orders(two: TwoStreams) -> None:
    two.other.wait_event(two.streams.compute.record_event())
    with two.streams.use(two.other):
        two.buffer.sum()
    assert two.races == []


def test_event_orders_nothing_that_is_queued_after_it(two: TwoStreams) -> None:
    event = two.streams.compute.record_event()
    two.buffer.zero_()
    two.other.wait_event(event)
    with two.streams.use(two.other):
        two.buffer.sum()
    assert [race.first for race in two.races] == ["compute writes it (zero_)"]


def test_thread_that_waited_orders_what_it_queues(two: TwoStreams) -> None:
    two.streams.compute.synchronize()
    with two.streams.use(two.other):
        two.buffer.sum()
    assert two.races == []


def test_two_reads_are_no_race(two: TwoStreams) -> None:
    two.other.wait_event(two.streams.compute.record_event())
    two.buffer.sum()
    with two.streams.use(two.other):
        two.buffer.sum()
    assert two.races == []


def test_halves_of_a_buffer_are_no_race(two: TwoStreams) -> None:
    two.other.wait_event(two.streams.compute.record_event())
    two.buffer[:4].zero_()
    with two.streams.use(two.other):
        two.buffer[4:].zero_()
    assert two.races == []


def test_host_memory_is_touched_by_the_thread_itself(two: TwoStreams) -> None:
    two.buffer.to("cpu", non_blocking=True).sum()
    assert [race.second for race in two.races] == ["main reads it (sum)"]


def test_blocking_copy_is_waited_for(two: TwoStreams) -> None:
    two.buffer.to("cpu").sum()
    assert two.races == []


def test_result_waits_for_the_thread_but_not_for_what_it_queued(two: TwoStreams) -> None:
    def work() -> None:
        with two.streams.use(two.other):
            two.other.wait_event(two.streams.compute.record_event())
            two.buffer.zero_()

    two.streams.pool(1).submit(work).result()
    two.buffer.sum()
    assert [race.first for race in two.races] == ["stream 1 writes it (zero_)"]


@pytest.mark.parametrize(("num_threads", "num_races"), [(1, 0), (2, 1)])
def test_only_tasks_of_one_thread_are_ordered(two: TwoStreams, num_threads: int, num_races: int) -> None:
    home, pool = two.buffer.to("cpu"), two.streams.pool(num_threads)
    for _ in range(2):
        pool.submit(home.zero_)
    assert len(two.races) == num_races


def test_memory_freed_while_another_stream_reads_it_is_a_race(two: TwoStreams) -> None:
    fresh = two.buffer.clone()
    two.other.wait_event(two.streams.compute.record_event())
    with two.streams.use(two.other):
        fresh.sum()
    del fresh
    assert [race.second for race in two.races] == ["compute writes it (allocated anew)"]


def test_memory_that_comes_back_has_no_past(two: TwoStreams) -> None:
    for stream in (two.streams.compute, two.other) * 8:
        with two.streams.use(stream):
            torch.zeros(1000).zero_()
    assert two.races == []
