"""The host's AdamW: no bit of a split master is lost, and every path has the very bits of torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from harness.base.checkout import ROOT
from harness.core.data import token_batches
from harness.devices.streams import num_update_threads
from harness.simulation.fake_streams import DEVICE, Agent, watch_streams
from harness.simulation.watched_ops import Op
from methods.offload import adamw_kernel
from methods.offload.adamw import AdamStep, Piece, published_settings, split_into_runs, update
from methods.offload.state import State, joined_master, keep_master_
from tests.support import forks
from tests.support.races import VectorClock, finish
from tests.support.training import settled, tiny
from tests.support.until import until

# Elements of tensors that fill no vector register evenly, in a slab where each starts at a multiple of 16.
SHAPES = (5, 300, 16, 1000, 8, 2100, 31)
NUM_STEPS = 4
EVERY_LOW_HALF = torch.arange(2**16, dtype=torch.int64)
HIGH_HALVES = {
    "zero": 0x0000,
    "smallest": 0x0001,
    "one": 0x3F80,
    "odd": 0x3F81,
    "largest": 0x7F7F,
    "negative": 0xBF80,
    "odd and negative": 0xC049,
    "smallest negative": 0x8001,
    "largest negative": 0xFF7F,
}


HEADERS = {
    "algorithm": "copy|min|max",
    "cstring": "memcpy",
    "condition_variable": "condition_variable",
    "exception": "exception",
    "map": "map",
    "mutex": "mutex|lock_guard|unique_lock",
    "system_error": "system_error|errc|make_error_code",
    "thread": "thread",
}


@pytest.mark.parametrize("header", HEADERS)
def test_the_source_names_the_header_of_what_it_takes_from_the_library(header: str) -> None:
    """Not each library's headers bring one another along."""
    text = adamw_kernel.SOURCES[0].read_text()
    assert bool(re.search(rf"std::({HEADERS[header]})\b", text)) == (f"#include <{header}>" in text)


@pytest.fixture(scope="module")
def kernel() -> None:
    """The compiled kernel."""
    if adamw_kernel.compiled_library() is None:
        pytest.skip("no C++ compiler here: torch's kernels update in blocks")


def empty_state(numel: int, dtype: torch.dtype = torch.bfloat16) -> State:
    rest = {torch.bfloat16: torch.int16, torch.float16: torch.float32}.get(dtype)
    master = None if rest is None else torch.zeros(numel, dtype=rest)
    return State(torch.zeros(numel, dtype=dtype), master, *torch.zeros(2, numel))


def half_of(dtype: torch.dtype) -> torch.dtype:
    """In which gradients are rounded, so that one oracle does for fp32 and bf16."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def random(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def pieces() -> list[Piece]:
    pieces, start = [], 0
    for place, numel in enumerate(SHAPES):
        pieces.append(Piece(start, start + numel, place % 2))
        start += -(-numel // 16) * 16
    return pieces


NUMEL = pieces()[-1].stop


def by_torch(factor: float | None, dtype: torch.dtype = torch.bfloat16, beta1: float = 0.9) -> list[Tensor]:
    """Rounded weights, master and moments after some steps of torch's fused AdamW on an fp32 master of each tensor."""
    masters = [random(NUMEL, 0)[start:stop].clone() for start, stop, _ in pieces()]
    groups = [
        {"params": [master], "weight_decay": 0.01 * (piece.group == 0)}
        for master, piece in zip(masters, pieces(), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(beta1, 0.999), eps=1e-8, fused=True)
    for number in range(1, NUM_STEPS + 1):
        grads = random(NUMEL, number).to(half_of(dtype)).float()
        if factor is not None:
            grads *= torch.tensor(factor)
        for master, piece, group in zip(masters, pieces(), optimizer.param_groups, strict=True):
            master.grad, group["lr"] = grads[piece.start : piece.stop].clone(), 1e-3 * number
        optimizer.step()
    states = [optimizer.state[master] for master in masters]
    moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    return [
        torch.cat([master.to(half_of(dtype)) for master in masters]),
        torch.cat(masters),
        *map(torch.cat, moments),
    ]


def by_us(
    factor: float | None,
    max_numel: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    is_ahead: bool = False,
    beta1: float = 0.9,
) -> list[Tensor]:
    """The same by update(), in place or from one state into another and back."""
    state = empty_state(NUMEL, dtype)
    other = empty_state(NUMEL, dtype) if is_ahead else state
    keep_master_(state, random(NUMEL, 0))
    for number in range(1, NUM_STEPS + 1):
        settings = [group._replace(beta1=beta1) for group in published_settings(1e-3 * number)]
        step = AdamStep(settings, number, torch.tensor(float(number)))
        scale = None if factor is None else torch.tensor(factor)
        grads = random(NUMEL, number).to(half_of(dtype)).to(dtype)
        update(grads, state, other, split_into_runs(pieces(), max_numel), step, scale)
        state, other = other, state
    slabs = (state.weights.to(half_of(dtype)), joined_master(state), state.exp_avg, state.exp_avg_sq.abs())
    return [torch.cat([slab[start:stop] for start, stop, _ in pieces()]) for slab in slabs]


@pytest.mark.parametrize("high", HIGH_HALVES.values(), ids=HIGH_HALVES)
def test_every_low_half_of_a_master_comes_back(high: int) -> None:
    numbers = (high << 16) + EVERY_LOW_HALF
    bits = torch.where(numbers >= 2**31, numbers - 2**32, numbers).int()
    state = empty_state(len(bits))
    keep_master_(state, bits.view(torch.float32))
    assert torch.equal(joined_master(state).view(torch.int32), bits)
    assert torch.equal(state.weights, bits.view(torch.float32).bfloat16())


@pytest.mark.parametrize("path", ["torch", *adamw_kernel.VECTOR_PATHS])
def test_every_high_half_of_a_master_goes_through_an_update_by_nothing(
    kernel: None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of infinity, and of what is no number: with the low halves around zero and around a tie."""
    if path == "torch":
        monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    elif (place := adamw_kernel.VECTOR_PATHS.index(path)) > adamw_kernel.widest_path():
        pytest.skip(f"no {path} here")
    else:
        monkeypatch.setattr(adamw_kernel, "widest_path", lambda: place)
    highs = torch.arange(2**16)[(torch.arange(2**16) & 0x7F80) != 0x7F80]
    numbers = ((highs[:, None] << 16) + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).flatten()
    bits = torch.where(numbers >= 2**31, numbers - 2**32, numbers).int()
    state, grads = empty_state(len(bits)), torch.zeros(len(bits), dtype=torch.bfloat16)
    keep_master_(state, bits.view(torch.float32))
    for number in (1, 2):
        step = AdamStep(published_settings(0.0), number, torch.tensor(float(number)))
        update(grads, state, state, split_into_runs([Piece(0, len(bits), 0)], 2**17), step, None)
    assert torch.equal(joined_master(state).view(torch.int32), bits)
    assert torch.equal(state.weights, bits.view(torch.float32).bfloat16())


def test_a_master_that_is_no_number_stays_none() -> None:
    nans = ((0x7F80 << 16) + EVERY_LOW_HALF[1:]).int().view(torch.float32)
    state = empty_state(len(nans))
    keep_master_(state, torch.cat([nans]))
    assert joined_master(state).isnan().all()


@pytest.mark.parametrize("path", range(len(adamw_kernel.VECTOR_PATHS)), ids=adamw_kernel.VECTOR_PATHS)
@pytest.mark.parametrize("is_ahead", [False, True], ids=["in place", "ahead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [None, 0.37])
def test_every_path_has_the_very_bits_of_torchs_fused_adamw(
    kernel: None,
    path: int,
    is_ahead: bool,
    dtype: torch.dtype,
    factor: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if path > adamw_kernel.widest_path():
        pytest.skip(f"no {adamw_kernel.VECTOR_PATHS[path]} here")
    monkeypatch.setattr(adamw_kernel, "widest_path", lambda: path)
    assert all(map(torch.equal, by_us(factor, 10**6, dtype, is_ahead=is_ahead), by_torch(factor, dtype)))


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("path", range(len(adamw_kernel.VECTOR_PATHS)), ids=adamw_kernel.VECTOR_PATHS)
def test_first_moments_that_forget_quickly_have_the_very_bits_of_torch(
    kernel: None, path: int, beta1: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As generative adversarial networks are trained; there torch interpolates from the other end."""
    if path > adamw_kernel.widest_path():
        pytest.skip(f"no {adamw_kernel.VECTOR_PATHS[path]} here")
    monkeypatch.setattr(adamw_kernel, "widest_path", lambda: path)
    by_kernel, by_fused_adamw = (
        by_us(0.37, 10**6, torch.float32, beta1=beta1),
        by_torch(0.37, torch.float32, beta1),
    )
    assert all(map(torch.equal, by_kernel, by_fused_adamw))


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in place", "ahead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [None, 0.37])
def test_without_a_compiler_the_bits_are_the_same(
    is_ahead: bool, dtype: torch.dtype, factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    assert all(map(torch.equal, by_us(factor, 160, dtype, is_ahead=is_ahead), by_torch(factor, dtype)))


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("max_numel", [16, 160, 1024, 10**6])
def test_fp32_has_the_same_bits_however_it_is_cut(
    kernel: None, max_numel: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    assert all(map(torch.equal, by_us(0.37, max_numel, torch.float32), by_torch(0.37)))


class Large(NamedTuple):
    """A state of tensors that threads share in parts, and its gradient."""

    state: State
    pieces: list[Piece]
    grads: Tensor

    def update(self, target: State, **options: int) -> None:
        step = AdamStep(published_settings(1e-3), 1, torch.tensor(1.0))
        update(self.grads, self.state, target, [self.pieces], step, torch.tensor(0.37), **options)


def large(numel: int, dtype: torch.dtype) -> Large:
    """Of three tensors, the second of which is short and the third of which fills no vector evenly."""
    state = empty_state(numel, dtype)
    keep_master_(state, random(numel, 0))
    pieces = [
        Piece(0, numel // 2, 0),
        Piece(numel // 2, numel // 2 + 24, 1),
        Piece(numel // 2 + 32, numel, 0),
    ]
    return Large(state, pieces, random(numel, 1).to(dtype))


@pytest.mark.parametrize("num_threads", [2, 5])
@pytest.mark.parametrize("is_ahead", [False, True], ids=["in place", "ahead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_threads_leave_the_bits_of_one(
    kernel: None, dtype: torch.dtype, is_ahead: bool, num_threads: int
) -> None:
    alone, shared = large(800_013, dtype), large(800_013, dtype)
    alone.update(alone.state)
    target = empty_state(800_013, dtype) if is_ahead else shared.state
    shared.update(target, num_threads=num_threads)
    for start, stop, _ in alone.pieces:
        of_one, of_threads = alone.state.cut(start, stop), target.cut(start, stop)
        assert all(torch.equal(*pair) for pair in zip(of_one, of_threads, strict=True) if None not in pair)


def test_what_is_needed_first_overtakes_an_update_under_way(kernel: None) -> None:
    """In one of many tries, because a busy machine may end the update before the other one is asked for. Where none
    overtakes, each always finds the whole of the one before it done, and this tries for ever."""
    late, soon = large(2**24, torch.float32), large(2**17, torch.float32)
    with ThreadPoolExecutor(1) as pool:
        has_overtaken = False
        while not has_overtaken:
            late.state.exp_avg.zero_()
            under_way = pool.submit(late.update, late.state, num_threads=2, deadline=1)
            until(lambda: late.state.exp_avg[0], 1e-5)
            soon.update(soon.state, num_threads=2, deadline=0)
            has_overtaken = not late.state.exp_avg[-1]
            under_way.result()


def fork_after_threads() -> int:
    """The exit code of a fork of a process whose updates have several threads, which makes such an update, too."""

    def update() -> None:
        whole = large(2**17, torch.float32)
        whole.update(whole.state, num_threads=3)

    update()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    update()
    os._exit(7)


def test_a_forked_process_has_threads_of_its_own(kernel: None) -> None:
    """Those of its parent are not there, and would be waited for without an end."""
    assert forks.call(fork_after_threads) == 7


class HostUpdates(VectorClock):
    """The numbers of threads of the kernel's calls on the host's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_threads: list[int] = []

    def ran(self, agent: Agent, op: Op) -> None:
        if op.is_host and op.name == "adamw":
            self.num_threads.append(op.arguments["num_threads"])


@pytest.mark.parametrize(
    ("method", "options"), [("stronghold", {"placement": "W3", "window_size": 1}), ("l2l", {})]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_layer_is_updated_by_one_call_on_all_cores(
    kernel: None, method: str, options: dict, dtype: str, clip_norm: float
) -> None:
    """Whatever its size: 12 tensors, of which the largest have parts for several threads."""
    workload = tiny(num_layers=3, hidden_size=258, dtype=dtype, clip_norm=clip_norm)
    clock = HostUpdates()
    with watch_streams(clock):
        finish(settled(method, options, workload).train(workload, token_batches(workload, 2), DEVICE))
    assert clock.num_threads == [num_update_threads("cpu")] * 2 * 3


class StreamedUpdates(VectorClock):
    """Operations that touch a slot's second moments, and the bytes that each update reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.num_bytes: list[int] = []

    def ran(self, agent: Agent, op: Op) -> None:
        if any(
            str(access.memory).startswith("slot") and "exp_avg_sq" in str(access.memory)
            for access in op.accesses
        ):
            self.names.add(op.name)
            if op.name == "adamw":
                self.num_bytes.append(sum(access.num_bytes for access in op.accesses))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_streamed_layers_update_is_one_pass_of_at_most_48_bytes_a_parameter(
    kernel: None, dtype: str, clip_norm: float
) -> None:
    workload = tiny(num_layers=3, hidden_size=258, dtype=dtype, clip_norm=clip_norm)
    clock = StreamedUpdates()
    with watch_streams(clock):
        method = settled("stronghold", {"placement": "S3", "window_size": 1}, workload)
        finish(method.train(workload, token_batches(workload, 2), DEVICE))
    assert clock.names == {"adamw", "copy_"}
    assert len(clock.num_bytes) >= 3 and max(clock.num_bytes) <= 48 * workload.layer_params


@pytest.mark.parametrize("path", range(len(adamw_kernel.VECTOR_PATHS)), ids=adamw_kernel.VECTOR_PATHS)
def test_every_fp16_gradient_is_read_and_every_master_rounded_as_torch_does(
    kernel: None, path: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finite fp16, the floats halfway to the next one, and their neighbors; beyond the largest, infinity."""
    if path > adamw_kernel.widest_path():
        pytest.skip(f"no {adamw_kernel.VECTOR_PATHS[path]} here")
    monkeypatch.setattr(adamw_kernel, "widest_path", lambda: path)
    every = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)
    exact = torch.cat([every, -every])
    ties = (every[1:].float() + every[:-1].float()) / 2
    around = [
        ties,
        ties.nextafter(torch.tensor(0.0)),
        ties.nextafter(torch.tensor(1e9)),
        torch.tensor([65519.9, 65520]),
    ]
    masters = torch.cat([exact.float(), *around, -torch.cat(around)])
    grads = exact.repeat(-(-len(masters) // len(exact)))[: len(masters)]
    state = empty_state(len(masters), torch.float16)
    keep_master_(state, masters)
    step = AdamStep(published_settings(0.0), 1, torch.tensor(1.0))
    update(grads, state, state, [[Piece(0, len(masters), 1)]], step, None)
    assert torch.equal(state.weights, masters.half())
    torch.testing.assert_close(state.exp_avg, grads.float() / 10, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_tie_keeps_its_master_through_an_update(
    kernel: None, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a learning rate of zero: ties of even and odd masters, rounded down and up."""
    if not is_compiled:
        monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001] * 9, dtype=torch.int32)
    state = empty_state(len(ties))
    keep_master_(state, ties.view(torch.float32))
    step = AdamStep(published_settings(0.0), 1, torch.tensor(1.0))
    update(torch.ones(len(ties), dtype=torch.bfloat16), state, state, [[Piece(0, len(ties), 0)]], step, None)
    assert torch.equal(joined_master(state).view(torch.int32), ties)
    torch.testing.assert_close(state.exp_avg_sq.abs(), torch.full((len(ties),), 1e-3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_out_of_one_state_into_another_leaves_the_first(dtype: torch.dtype, kernel: None) -> None:
    source, target, alone = (empty_state(NUMEL, dtype) for _ in range(3))
    keep_master_(source, random(NUMEL, 0))
    keep_master_(alone, random(NUMEL, 0))
    step, grads = AdamStep(published_settings(1e-3), 1, torch.tensor(1.0)), random(NUMEL, 1).to(dtype)
    update(grads, source, target, split_into_runs(pieces(), 320), step, None)
    assert torch.equal(joined_master(source), random(NUMEL, 0)) and not source.exp_avg.any()
    update(grads, alone, alone, split_into_runs(pieces(), 320), step, None)
    for start, stop, _ in pieces():
        ahead, in_place = (joined_master(state)[start:stop] for state in (target, alone))
        assert torch.equal(ahead, in_place) and torch.equal(
            target.exp_avg[start:stop], alone.exp_avg[start:stop]
        )


@pytest.mark.parametrize("max_numel", [16, 160, 1024, 10**6])
def test_chunks_hold_every_element_once_and_are_cut_at_whole_vectors(max_numel: int) -> None:
    cut_pieces = [piece for chunk in split_into_runs(pieces(), max_numel) for piece in chunk]
    seen = torch.zeros(NUMEL, dtype=torch.int32)
    for start, stop, _ in cut_pieces:
        seen[start:stop] += 1
        assert start % 16 == 0
    assert all((seen[start:stop] == 1).all() for start, stop, _ in pieces())
    assert max(chunk[-1].stop - chunk[0].start for chunk in split_into_runs(pieces(), max_numel)) <= max_numel


@pytest.mark.heavy
def test_a_narrower_torch_has_the_same_bits(kernel: None) -> None:
    """torch's own kernels for AVX2, chosen in a process of their own."""
    code = (
        "import tests.methods.offload.test_adamw_kernel as t, torch;"
        " assert all(map(torch.equal, t.by_us(0.37, 10**6), t.by_torch(0.37)))"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == 0
