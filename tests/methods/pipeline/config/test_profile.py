"""A user's model is profiled, by one process and by several; and the documents' snippet."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.base.checkout import ROOT
from harness.core.job import Job, Workload
from harness.devices import device_lock, machine
from methods.pipeline.config import measure_model, measured_profile, profiler
from methods.pipeline.config.profile import Profile, read_profile
from methods.pipeline.config.profiler import device_tensor_bytes
from methods.varuna import AutoConfig, CutPoint, Profiler
from tests.methods.pipeline import user_model
from tests.methods.pipeline.trainings import see_gpus
from tests.support import cli
from tests.support.ranks import on_ranks
from tests.support.until import until

SNIPPET = (ROOT / "docs" / "pipelines.md").read_text().split("```python\n")[2].split("```")[0]
FORWARD_SECONDS = 0.01
IN, OUT, FITTING = 64, 32, 2


class ProfileClock:
    """Seconds that pass only where a test lets them, and a millionth at each look."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


CLOCK = ProfileClock()


class SlowLayer(nn.Module):
    """Its forward pass takes seconds of the clock, or asks for more memory than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(OUT, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            CLOCK.now += FORWARD_SECONDS
            torch.empty(2**50 if len(x) > FITTING else 0)
        return self.linear(x).mean()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cutpoint, self.slow = nn.Linear(IN, OUT, bias=False), CutPoint(), SlowLayer()

    def forward(self, x: Tensor) -> Tensor:
        return self.slow(self.cutpoint(self.first(x)))


def batch_of_two(size: int) -> dict[str, Any]:
    return {"x": torch.ones(size, IN)}


def profiled(model: nn.Module, get_batch: Any, sizes: list[int], folder: Path, **more: Any) -> Profile:
    profiling = Profiler(model, "cpu", **more)
    profiling.initialize(get_batch)
    return profiling.profile_all(get_batch, sizes, out_folder=folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Profiled by the clock above, on a machine where nothing waits for a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "time", CLOCK)
        patch.setattr(Profiler, "_waited_seconds", lambda self: 0.0)
        return profiled(Two(), batch_of_two, [4, 2, 1], tmp_path_factory.mktemp("two"))


def test_memory_that_runs_out_ends_the_sizes(two: Profile) -> None:
    lower, upper = two.sections
    assert [cost.size for cost in lower.costs] == [1, 2, 4]
    assert [cost.size for cost in upper.costs] == two.sizes == [1, 2]


def test_a_section_too_large_for_the_device_has_no_sizes(tmp_path: Path) -> None:
    """As a section whose weights alone fill a GPU."""
    with torch.device("meta"):
        model = Two()

    def fill(named: Any) -> None:
        for _, tensor in named:
            if tensor.shape == model.slow.linear.weight.shape:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")
            tensor.fill_(1.0)

    measured = profiled(model, batch_of_two, [1, 2], tmp_path, init_weights=fill)
    assert [[cost.size for cost in section.costs] for section in measured.sections] == [[1, 2], []]
    assert measured.sizes == []


class Tables(nn.Module):
    """Its own forward pass, which is traced, reads a buffer, and makes a tensor that the batch does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(IN))
        self.first, self.cutpoint, self.last = nn.Linear(IN, IN), CutPoint(), nn.Linear(IN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cutpoint(self.first(x + self.table + torch.arange(float(IN))))).mean()


def test_of_a_model_without_memory_buffers_are_filled_and_tensors_with_memory_are_kept(
    tmp_path: Path,
) -> None:
    with torch.device("meta"):
        model = Tables()
    seen: list[Tensor] = []
    model.first.register_forward_pre_hook(
        lambda module, arguments: None if arguments[0].is_meta else seen.append(arguments[0])
    )

    def fill(named: Any) -> None:
        for _, tensor in named:
            tensor.fill_(2.0)

    profiled(model, batch_of_two, [1], tmp_path, init_weights=fill)
    assert seen and all(torch.equal(x[0], 3.0 + torch.arange(float(IN))) for x in seen)


def test_bytes_are_those_of_the_tensors(two: Profile) -> None:
    """By hand: the lower section keeps its output; its backward pass makes the weight's gradient beside the sum."""
    for cost in two.sections[0].costs:
        sent = 4 * cost.size * OUT
        assert (cost.activation_bytes, cost.saved_bytes, cost.peak_bytes) == (sent, sent, sent + 4 * IN * OUT)
    assert [section.num_params for section in two.sections] == [IN * OUT, OUT + 1]


def test_seconds_are_those_of_the_section(two: Profile) -> None:
    lower, upper = (section.costs[0] for section in two.sections)
    assert upper.forward_seconds >= FORWARD_SECONDS and upper.recompute_seconds >= FORWARD_SECONDS
    assert lower.forward_seconds < FORWARD_SECONDS > upper.backward_seconds
    assert lower.backward_seconds > 0 < lower.copy_seconds
    assert all(0 < section.update_seconds < FORWARD_SECONDS for section in two.sections)


def test_one_process_measures_neither_messages_nor_sums(two: Profile) -> None:
    assert (two.messages, two.sums) == ([], [])
    assert two.num_ranks == 1 <= two.crowding


@pytest.mark.parametrize("fp16", [False, True])
def test_inputs_for_every_micro_batch_and_half_precision_are_taken(tmp_path: Path, fp16: bool) -> None:
    """The mask crosses no cut: each section has it."""
    measured = profiled(user_model.make(), lambda size: user_model.batch(0, size), [2], tmp_path, fp16=fp16)
    crossing = 2 * user_model.TOKENS * user_model.WIDTH * (2 if fp16 else 4)
    assert [section.costs[0].activation_bytes for section in measured.sections] == [
        crossing
    ] * user_model.NUM_BLOCKS + [0]
    assert read_profile(tmp_path) == measured and measured.fp16 == fp16


def test_a_gpus_context_and_reserve_are_not_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "calibrations", list)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * 2**30)
    )
    assert device_tensor_bytes(torch.device("cuda")) == 15 * 2**30 * 31 // 32
    assert device_tensor_bytes(torch.device("cpu")) is None


def test_what_comes_too_early_or_has_no_sizes_is_refused(tmp_path: Path) -> None:
    profiling = Profiler(Two(), "cpu")
    with pytest.raises(ValueError, match=r"try initialize\(get_batch\) first"):
        profiling.profile_all(batch_of_two, [1], out_folder=tmp_path)
    profiling.initialize(batch_of_two)
    for sizes in ([], [0, 1]):
        with pytest.raises(ValueError, match="microbatches: expected sizes of at least 1, got"):
            profiling.profile_all(batch_of_two, sizes, out_folder=tmp_path)
    assert not any(tmp_path.iterdir())


def test_an_error_of_the_model_is_its_own(tmp_path: Path) -> None:
    class Wrong(Two):
        def __init__(self) -> None:
            super().__init__()
            self.slow.register_forward_hook(
                lambda module, inputs, output: output if output.is_meta else 1 / 0
            )

    with pytest.raises(ZeroDivisionError):
        profiled(Wrong(), batch_of_two, [1], tmp_path)


# ---- What the verb starts

TINY = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_len": 8, "vocab_size": 50}


def order(folder: Path, device: str) -> dict[str, Any]:
    return {"workload": TINY, "sizes": [1], "num_ranks": 2, "folder": str(folder), "device": device}


def test_the_verb_tells_why_ranks_with_too_few_gpus_measure_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    see_gpus(monkeypatch, 1)
    assert measure_model.measure_model(order(tmp_path, "auto")).endswith(
        "the machine of rank 0 has 2 ranks and 1 GPU"
    )
    assert read_profile(tmp_path).device_bytes is None
    with pytest.raises(
        ValueError, match=r"expected a GPU for each of --ranks 2, got 1; try fewer ranks, or --device cpu"
    ):
        measure_model.measure_model(order(tmp_path, "cuda"))


def test_a_gpu_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    arguments = (
        "-l",
        1,
        "-h",
        16,
        "--heads",
        2,
        "--seq",
        8,
        "--vocab",
        50,
        "--device",
        "cuda",
        "--out",
        tmp_path,
    )
    done = cli.run("varuna", "profile", *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--device cuda: expected a GPU for each of --ranks 1, got 0" in done.stderr


def test_an_error_of_several_lines_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's, whose last line says how to compile torch."""

    def fail(order: Any) -> str:
        raise RuntimeError("CUDA error: invalid device ordinal\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(measure_model, "measure_model", fail)
    reading, writing = os.pipe()
    with pytest.raises(RuntimeError):
        measure_model.measure_as_rank({}, {}, writing)
    os.close(writing)
    with open(reading) as pipe:
        assert (
            pipe.read()
            == "RuntimeError: CUDA error: invalid device ordinal Compile with `TORCH_USE_CUDA_DSA`"
        )


# ---- The documents' snippet


def test_a_thread_that_waited_longer_than_the_clock_shows_took_no_time() -> None:
    """The two are read from different clocks: a profile with fewer than no seconds was refused."""
    waits = iter([0.0, 9.0])
    it = SimpleNamespace(
        _synchronize=lambda: None,
        _waited_seconds=lambda: next(waits),
        _elapsed_seconds=0.0,
        _core_seconds=0.0,
    )
    assert Profiler._call_timed(it, len, "") == (0, 0.0) and it._core_seconds == 0.0  # type: ignore[arg-type]


def test_the_snippet_of_the_page_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPET, "snippet", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[0].startswith("stages ")
    assert len(read_profile("profile").sections) == 5 and read_profile("profile").sizes == [1, 2, 4]


@pytest.mark.heavy
def test_the_snippet_of_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    order = {"ranks": 2, "folder": str(tmp_path), "text": SNIPPET}
    first, _ = on_ranks(2, "tests.methods.pipeline.trainings:run_snippet", order)
    assert first.split()[0] == "stages"
    measured = read_profile(tmp_path / "profile")
    sent = {cost.activation_bytes for section in measured.sections for cost in section.costs} - {0}
    assert len(measured.sections) == 5 and measured.sizes == [1, 2, 4]
    assert {message.num_bytes for message in measured.messages} == sent and all(
        timing.is_one_machine for timing in measured.messages
    )
    assert {timing.num_ranks for timing in measured.sums} == {2} and all(
        timing.seconds > 0 for timing in measured.sums
    )
    assert AutoConfig(2, 2, 8, tmp_path / "profile").get_min().num_stages in (1, 2)


def test_a_profile_waits_for_the_job_that_holds_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, texts, done = Workload(**TINY), list[str](), threading.Event()
    monkeypatch.setattr(measured_profile, "ask", lambda module, order: done.set() or "")
    job = Job("profile", workload, {"world_size": 1}, device="cpu")
    arguments = (job, [1], tmp_path, lambda event: texts.append(event["text"]))
    thread = threading.Thread(target=measured_profile.measure_profile, args=arguments)
    with device_lock.turn(Job("some", workload), lambda event: None):
        thread.start()
        until(lambda: texts)
        assert not done.is_set() and texts[0].startswith("waiting for the cpu device: ")
    thread.join()
    assert done.is_set()
