"""A user's own script, streamed: the same losses, norms and weights bit by bit, within the memory given."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.job import GIB
from harness.devices import cuda_budget, sim
from harness.simulation.fake_streams import DEVICE, watch_streams
from methods.l2l import L2LTrainer
from methods.stronghold import StrongholdTrainer
from tests.methods.streaming.users.models import (
    MODELS,
    TOKENS,
    WORDS,
    Course,
    batches,
    begun,
    by_plain_torch,
    layers_of,
    new_model,
    optimizer_of,
    schedule_of,
    streamed,
)
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_gpu import FakeGpu
from tests.support.on_sim import call
from tests.support.planting import planted
from tests.support.races import NUM_WORKERS, Race, VectorClock

KIB = 2**10
PLACED: dict[str, dict[str, Any]] = {
    "default": {},
    "W5, window 1": {"placement": "W5", "window_size": 1},
    "R5": {"placement": "R5"},
    "P5": {"placement": "P5"},
    "S5": {"placement": "S5", "window_size": 2},
    "all kinds": {"placement": "R1P1W1S1D1", "window_size": 2},
    "ahead": {"placement": "P1W2S2", "window_size": 1, "clipping": "speculate"},
    "boundaries": {"window_size": 1, "activations": "host"},
}
L2L = {"l2l": L2LTrainer, "l2l, boundaries": functools.partial(L2LTrainer, activations="host")}
TRAINERS: dict[str, Callable[..., Any]] = L2L | {
    name: functools.partial(StrongholdTrainer, **options) for name, options in PLACED.items()
}
oracle = functools.cache(by_plain_torch)


@pytest.mark.shows("a model of the user's own trains exactly")
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("clip", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.cover(2)
def test_bits_are_those_of_the_script_without_streaming(
    model: str, dtype: str, clip: float, trainer: str
) -> None:
    assert streamed(model, TRAINERS[trainer], dtype, clip) == oracle(model, dtype, clip)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("model", "dtype"), [("llama", "fp32"), ("unequal", "bf16")])
def test_embedding_and_head_may_be_layers_too(model: str, dtype: str, trainer: str) -> None:
    options = {
        name: word.replace("5", "7") for name, word in PLACED.get(trainer, {}).items() if name == "placement"
    }
    options |= {"placement": "R1P2W2S1D1"} if trainer == "all kinds" else {}
    options |= {"placement": "P2W2S3"} if trainer == "ahead" else {}

    def make(model: Any, layers: list[nn.Module], *args: Any, **more: Any) -> Any:
        return TRAINERS[trainer](model, [model.embed, *layers, model.head], *args, **more, **options)

    assert streamed(model, make, dtype) == oracle(model, dtype)


def overlapping(changes: dict[str, Any]) -> Callable[..., Any]:
    return functools.partial(StrongholdTrainer, accumulates=True, **changes)


@pytest.mark.parametrize(
    "trainer", [L2LTrainer, *map(overlapping, ({}, {"placement": "R1P1W2S1", "window_size": 1}))]
)
@pytest.mark.parametrize(("model", "dtype", "clip"), [("llama", "fp32", 1.0), ("shared", "bf16", 0.0)])
def test_gradients_of_several_backward_passes_add_up(
    model: str, dtype: str, clip: float, trainer: Any
) -> None:
    assert streamed(model, trainer, dtype, clip, parts=3) == oracle(model, dtype, clip, parts=3)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_fp16_takes_the_scaled_loss(trainer: str) -> None:
    assert streamed("unequal", TRAINERS[trainer], "fp16", 1.0) == oracle(
        "unequal", "fp16", 1.0, scale=2.0**16
    )


@pytest.mark.parametrize("trainer", ["l2l", "default", "all kinds", "ahead"])
def test_fp16_skips_a_step_whose_gradient_is_not_finite(trainer: str) -> None:
    model = new_model("llama", "fp16")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = optimizer_of(list(model.parameters()))
    with TRAINERS[trainer](model, model.layers, optimizer, max_norm=1.0, device="cpu") as trainer_:
        [[batch]] = batches(1)
        (trainer_.scale(model(*batch)) * torch.inf).backward()
        trainer_.step()
        assert trainer_.is_skipped and float(trainer_.scale(torch.ones(()))) == 2.0**15
        after = model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def train(trainer: Any, model: nn.Module, steps: list, schedule: Any) -> list[float]:
    losses = []
    for [batch] in steps:
        loss = model(*batch)
        trainer.scale(loss).backward()
        trainer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("first", "second"), [("all kinds", "l2l"), ("l2l", "S5"), ("ahead", "all kinds")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_training_goes_on_from_its_state_dicts_in_another_placement(
    dtype: str, first: str, second: str
) -> None:
    steps = list(batches(6))
    trainer, model, optimizer = begun(TRAINERS[first], "llama", dtype)
    with trainer:
        train(trainer, model, steps[:3], schedule_of(optimizer))
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        state = trainer.state_dict()
    trainer, model, optimizer = begun(TRAINERS[second], "llama", dtype)
    with trainer:
        model.load_state_dict(weights)
        trainer.load_state_dict(state)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (4 + step))
        assert train(trainer, model, steps[3:], schedule) == oracle("llama", dtype).losses[3:6]


def test_the_state_is_one_that_plain_adamw_goes_on_from() -> None:
    steps = list(batches(6))
    trainer, model, optimizer = begun(TRAINERS["all kinds"], "tied", "fp32")
    schedule = schedule_of(optimizer)
    with trainer:
        losses = train(trainer, model, steps[:3], schedule)
        state = trainer.state_dict()
    optimizer.load_state_dict({name: state[name] for name in ("state", "param_groups")})
    model.recomputes = True
    for [batch] in steps[3:]:
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == oracle("tied").losses[:6]


@pytest.mark.parametrize("trainer", ["l2l", "default", "all kinds", "ahead", "boundaries"])
def test_evaluation_between_steps_changes_no_bit(trainer: str) -> None:
    trainer_, model, optimizer = begun(TRAINERS[trainer], "llama", "fp32")
    schedule, losses = schedule_of(optimizer), []
    with trainer_:
        for [batch] in batches(4):
            with torch.no_grad():
                loss = float(model(*batch))
            model(*batch)  # a forward pass without a backward pass, too
            losses += train(trainer_, model, [[batch]], schedule)
            assert loss == losses[-1]
    assert losses == oracle("llama").losses[:4]


def take_step(trainer: Any, model: torch.nn.Module, optimizer: Any) -> None:
    """By the trainer or, without one, by plain PyTorch, clipped at a norm of 1."""
    if trainer:
        trainer.step()
        return
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("trainer", ["l2l", "default", "boundaries"])
def test_autocast_computes_in_bf16_on_fp32_weights(trainer: str) -> None:
    def course(recomputes: bool) -> list[float]:
        model = new_model("llama")
        model.recomputes = recomputes
        optimizer = optimizer_of(list(model.parameters()))
        trainer_ = (
            None
            if recomputes
            else TRAINERS[trainer](model, layers_of(model), optimizer, max_norm=1.0, device="cpu")
        )
        losses = []
        for [batch] in batches(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch)
            loss.backward()
            losses.append(float(loss.detach()))
            take_step(trainer_, model, optimizer)
        if trainer_:
            trainer_.close()
        return losses

    assert course(recomputes=False) == course(recomputes=True)


class SumsOutside(nn.Module):
    """A loop that computes the next layer's input by `join`, of a layer's input and its result."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inp, self.layers = nn.Linear(4, 16), nn.ModuleList(Residual() for _ in range(4))
        self.join, self.recomputes = join, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            x = self.join(x, y)
        return x.square().mean()


class Residual(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + super().forward(x)
        return y


@pytest.mark.parametrize("trainer", ["l2l", "default", "boundaries"])
@pytest.mark.parametrize(
    "join",
    [lambda x, y: y.t().contiguous().t(), lambda x, y: 0.5 * x + 0.1 * y],
    ids=["other strides", "residual sums outside of layers"],
)
def test_gradients_between_layers_are_summed_as_by_checkpoint(join: Any, trainer: str) -> None:
    compare_sums(lambda: SumsOutside(join), trainer)


class Cross(nn.Module):
    """Uses `memory` twice, as cross-attention uses an encoder's output for keys and for values, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.body = nn.Linear(16, 16), nn.Linear(16, 16), Residual()

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.body(x * self.key(memory) + self.value(memory)), memory


class Decoder(SumsOutside):
    """Layers that share a memory. `returns`: each layer takes the memory that the layer before has returned."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__(lambda x, y: y)
        self.layers, self.returns = nn.ModuleList(Cross() for _ in range(3)), returns

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        memory = x.tanh()
        for layer in self.layers:
            call = functools.partial(checkpoint, layer, use_reentrant=False) if self.recomputes else layer
            x, returned = call(x, memory)
            memory = returned if self.returns else memory
        return x.square().mean() + memory.mean()


@pytest.mark.parametrize("trainer", ["l2l", "default", "boundaries"])
@pytest.mark.parametrize("returns", [False, True], ids=["the model's", "returned"])
def test_gradients_of_a_tensor_that_layers_use_twice_are_summed_as_by_checkpoint(
    returns: bool, trainer: str
) -> None:
    compare_sums(lambda: Decoder(returns=returns), trainer)


def compare_sums(make: Callable[[], Any], trainer: str) -> None:
    def course(name: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = make()
        model.recomputes = not name
        optimizer = optimizer_of(list(model.parameters()))
        training = (
            TRAINERS[name](model, model.layers, optimizer, max_norm=1.0, device="cpu") if name else None
        )
        for _ in range(3):
            model(torch.randn(8, 4)).backward()
            take_step(training, model, optimizer)
        if training:
            training.close()
        return [weight.detach() for weight in model.parameters()]

    assert all(map(torch.equal, course(trainer), course("")))


def losses_of_growing_batches(trainer: Any, model: Any, optimizer: Any, device: str = "cpu") -> list[float]:
    """Samples of 4, then 12, then 8 tokens; without a trainer by plain PyTorch."""
    losses = []
    for [(tokens, targets)], length in zip(batches(3, device=device), (4, 12, 8), strict=True):
        loss = model(tokens[:, :length], targets[:, :length])
        loss.backward()
        losses.append(float(loss.detach()))
        take_step(trainer, model, optimizer)
    return losses


@pytest.mark.parametrize("trainer", ["boundaries", "l2l, boundaries"])
def test_boundaries_take_more_memory_once_a_batch_is_larger(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they leave is unlocked."""
    plain = new_model("llama")
    plain.recomputes = True
    expected = losses_of_growing_batches(None, plain, optimizer_of(list(plain.parameters())))
    cuda = FakeCuda(2).install(monkeypatch)
    with cuda.running():
        model = new_model("llama")
        optimizer = optimizer_of(list(model.parameters()))
        with TRAINERS[trainer](model, model.layers, optimizer, max_norm=1.0, device="cuda:1") as trainer_:
            assert losses_of_growing_batches(trainer_, model, optimizer, "cuda:1") == expected
            assert sum(size == 2 * 12 * 32 * 4 for size in cuda.locked.values()) == 3
    assert list(cuda.broken) == [] and cuda.locked == {}


def test_the_model_is_the_users_again_after_close() -> None:
    trainer, model, optimizer = begun(TRAINERS["all kinds"], "llama", "fp32")
    parameters, [[batch]] = list(model.parameters()), batches(1)
    with trainer:
        train(trainer, model, [[batch]], schedule_of(optimizer))
    assert all(before is after for before, after in zip(parameters, model.parameters(), strict=True))
    assert "forward" not in vars(model.layers[0])
    model(*batch).backward()
    assert all(parameter.grad is not None for parameter in parameters)


@pytest.mark.parametrize("trainer", ["l2l", "all kinds"])
def test_a_training_goes_on_from_the_state_of_plain_adamw(trainer: str) -> None:
    steps, plain = list(batches(6)), new_model("tied")
    plain.recomputes = True
    optimizer = optimizer_of(list(plain.parameters()))
    schedule = schedule_of(optimizer)
    for [batch] in steps[:3]:
        plain(*batch).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    trainer_, model, trained_optimizer = begun(TRAINERS[trainer], "tied", "fp32")
    with trainer_:
        model.load_state_dict(plain.state_dict())
        trainer_.load_state_dict(optimizer.state_dict())
        schedule = torch.optim.lr_scheduler.LambdaLR(trained_optimizer, lambda step: 1 / (4 + step))
        assert train(trainer_, model, steps[3:], schedule) == oracle("tied").losses[3:6]


# ---- Memory, on sim

SIZES = [600 * KIB, 800 * KIB, 1400 * KIB]


def within(name: str, dtype: str, device_bytes: int) -> tuple[str, int, Course]:
    """Return the placement chosen, the most bytes of the device in use, and what is trained in three steps, of which
    the third begins with all states."""
    chosen = []

    def make(model: nn.Module, layers: list[nn.Module], optimizer: torch.optim.AdamW, **options: Any) -> Any:
        [[batch]] = batches(1, device="sim")
        trainer = StrongholdTrainer(
            model, layers, optimizer, example=lambda: model(*batch), device_memory=device_bytes, **options
        )
        sim.started.reset_peaks()
        chosen.append(trainer.placement)
        return trainer

    course = streamed(name, make, dtype, steps=3, device="sim")
    return chosen[0], sim.started.stats()["device_peak"], course


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["llama", "unequal", "gpt2"])
def test_device_memory_stays_below_the_limit_and_is_used(model: str, dtype: str) -> None:
    sizes = SIZES if dtype == "fp32" else [size * 3 // 4 for size in SIZES]
    # set-up and trial included
    courses = [call(within, model, dtype, size, device_bytes=size) for size in sizes]
    assert all(course == oracle(model, dtype, steps=3) for _, _, course in courses)
    assert all(peak <= size for (_, peak, _), size in zip(courses, sizes, strict=True)), courses
    assert len({placement for placement, _, _ in courses}) == len(sizes)  # more memory, more resident layers


def losses_within(device_bytes: int, activations: str | None = None) -> tuple[str, int, list[float]]:
    """Return the memory chosen for boundaries, the most bytes of the device in use, and the losses, of 64 samples."""
    rows = torch.randint(WORDS, (64, TOKENS + 1), generator=torch.Generator().manual_seed(1)).to("sim")
    model = new_model("llama")
    optimizer = optimizer_of(list(model.parameters()))
    options: dict[str, Any] = {"device_memory": device_bytes, "activations": activations, "max_norm": 1.0}
    trainer = StrongholdTrainer(
        model,
        model.layers,
        optimizer,
        example=lambda: model(rows[:, :-1], rows[:, 1:]),
        device="sim",
        **options,
    )
    sim.started.reset_peaks()
    losses = []
    with trainer:
        for _ in range(2):
            loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            trainer.step()
            losses.append(float(loss.detach()))
    return trainer.activations, sim.started.stats()["device_peak"], losses


def test_boundaries_are_on_the_host_where_nothing_else_fits() -> None:
    """At the second size even the trial with them on the device runs out of memory."""
    chosen, _, expected = call(losses_within, 64 * 2**20)
    assert chosen == "device"
    for size in (2400 * KIB, 2200 * KIB):
        chosen, peak, losses = call(losses_within, size, device_bytes=size)
        assert (chosen, losses) == ("host", expected) and peak <= size
    with pytest.raises(ValueError, match=r"needs 2\.4 MiB of device memory"):
        call(losses_within, 2400 * KIB, "device")


def test_without_room_for_the_model_it_is_said_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"needs .* of device memory .*; try another placement"):
        call(within, "llama", "fp32", 100 * KIB)


# ---- Order of copies

SLOT = "methods/streaming/slot.py"


def races(**options: Any) -> list[Race]:
    """Races of a training of three micro-batches a step."""
    from methods.stronghold import StrongholdTrainer  # as loaded now

    clock, make = VectorClock(), functools.partial(StrongholdTrainer, accumulates=True, **options)
    with watch_streams(clock, NUM_WORKERS):
        streamed("llama", make, parts=3, steps=2, device=DEVICE)
    return clock.races


@pytest.mark.parametrize("window_size", [1, 2])
@pytest.mark.parametrize("placement", ["W5", "P5", "S5", "R1P1W1S1D1"])
@pytest.mark.cover(1)
def test_no_race_where_gradients_add_up(placement: str, window_size: int) -> None:
    assert races(placement=placement, window_size=window_size) == []


@pytest.mark.parametrize("placement", ["R5", "W5"])
def test_no_race_where_boundaries_travel(placement: str) -> None:
    assert races(placement=placement, window_size=2, activations="host") == []


@pytest.mark.parametrize(
    ("old", "new", "endangered"),
    [
        ("layer.prefix, [free], pairs", "layer.prefix, [], pairs", "gradients 1 slab"),
        ("self.device.compute.wait_event(earlier)", "earlier", "gradients 1 slab"),
    ],
)
def test_a_wait_that_is_missing_where_gradients_add_up_is_a_race(old: str, new: str, endangered: str) -> None:
    with planted(SLOT, old, new):
        races_found = races(placement="W5", window_size=2)
    assert endangered in {race.memory for race in races_found}, races_found


@pytest.mark.parametrize(
    ("trainer", "dtype", "parts"),
    [
        ("l2l", "bf16", 2),
        ("default", "fp32", 1),
        ("default", "bf16", 2),
        ("all kinds", "fp32", 2),
        ("ahead", "bf16", 1),
        ("boundaries", "fp32", 2),
        ("l2l, boundaries", "bf16", 1),
    ],
)
def test_training_on_the_second_gpu_breaks_no_rule(
    trainer: str, dtype: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(2).install(monkeypatch)
    make = TRAINERS[trainer] if trainer in L2L or parts == 1 else overlapping(PLACED[trainer])
    with cuda.running():
        course = streamed("llama", make, dtype, parts=parts, steps=3, device="cuda:1")
    assert list(cuda.broken) == []
    assert course == by_plain_torch("llama", dtype, parts=parts, steps=3)


def on_fake_gpu(trainer: str) -> Any:
    model = new_model("llama", "fp32")
    return TRAINERS[trainer](model, model.layers, optimizer_of(list(model.parameters())), device="cuda:1")


@pytest.mark.parametrize("trainer", ["l2l", "default"])
def test_a_trainer_for_which_memory_cannot_be_locked_leaves_none_locked(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second, smaller trainer in the same script would find the pages taken."""
    cuda = FakeCuda(2)
    register = cuda.register
    cuda.register = lambda *arguments: register(*arguments) if len(cuda.locked) < 3 else 2  # type: ignore[method-assign]
    cuda.install(monkeypatch)
    with cuda.running(), pytest.raises(torch.OutOfMemoryError, match="page-lock"):
        on_fake_gpu(trainer)
    assert cuda.locked == {}


def test_after_a_failure_the_model_has_its_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(2)
    cuda.register = lambda address, size, flags: 2  # type: ignore[method-assign]
    cuda.install(monkeypatch)
    model = new_model("llama", "fp32")
    with cuda.running(), pytest.raises(torch.OutOfMemoryError):
        L2LTrainer(model, model.layers, optimizer_of(list(model.parameters())), device="cuda:1")
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())  # type: ignore[attr-defined]


def test_a_trainer_that_is_dropped_unlocks_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(2).install(monkeypatch)
    with cuda.running():
        trainer = on_fake_gpu("l2l")
        assert cuda.locked
        del trainer
        gc.collect()
        assert cuda.locked == {}


def test_a_loop_on_another_stream_than_the_trainer_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's copies wait for its own stream, so they would not wait for the loop's."""
    cuda = FakeCuda(1).install(monkeypatch)
    model, refusal = (
        new_model("llama", "fp32"),
        "expected the training loop on the CUDA stream that was current",
    )
    with cuda.running():
        ((tokens, targets),) = next(iter(batches(1, 1, "cuda")))
        with L2LTrainer(
            model, model.layers, optimizer_of(list(model.parameters())), device="cuda"
        ) as trainer:
            with cuda.use(cuda.make_stream()), pytest.raises(ValueError, match=refusal):
                model(tokens, targets)
            model(tokens, targets).backward()
            with cuda.use(cuda.make_stream()), pytest.raises(ValueError, match=refusal):
                trainer.step()
            trainer.step()
            state = trainer.state_dict()
            with cuda.use(cuda.make_stream()), pytest.raises(ValueError, match=refusal):
                trainer.load_state_dict(state)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_starting_values_wait_for_the_stream_on_which_the_trainer_is_made(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(1).install(monkeypatch)
    model = new_model("llama", dtype)
    with cuda.running(), cuda.use(cuda.make_stream()):
        model.to("cuda")
        optimizer = optimizer_of(list(model.parameters()))
        with StrongholdTrainer(model, model.layers, optimizer, device="cuda", placement="R2W"):
            pass
    assert [*cuda.broken] == []


def test_a_trainer_holds_a_gpu_s_memory_limit_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit covers the context; a plan leaves the reserve free, too."""
    cuda, gpu = FakeCuda(1).install(monkeypatch), FakeGpu(8 * GIB, 0, 0)
    gpu.install_nvml(monkeypatch)
    gpu.install_functions(monkeypatch)
    gpu.reserved_bytes, gpu.fraction = 8 * 2**20, 0.75  # the script's own
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: None)
    model, caps = new_model("llama"), list[float]()
    optimizer = optimizer_of(list(model.parameters()))

    def example() -> Tensor:
        caps.append(gpu.cap_bytes)
        loss: Tensor = model(*batch)
        return loss

    with cuda.running():
        ((batch,),) = batches(1, 1, "cuda")
        options: dict[str, Any] = {"device": "cuda", "device_memory": 2 * GIB, "example": example}
        with StrongholdTrainer(model, model.layers, optimizer, **options) as trainer:
            assert trainer.placement == "R5"
            caps.append(gpu.cap_bytes)
        assert caps == [pytest.approx(2 * GIB - cuda_budget.CONTEXT_BYTES, abs=1)] * 2
        assert gpu.fraction == 0.75
        options["device_memory"] = cuda_budget.CONTEXT_BYTES + cuda_budget.RESERVE_BYTES
        with pytest.raises(
            ValueError, match=r"needs .* of device memory .* try .* device_memory=\d+, which"
        ) as refused:
            StrongholdTrainer(model, model.layers, optimizer, **options)
        options["device_memory"] = int(re.findall(r"device_memory=(\d+)", str(refused.value))[0])
        StrongholdTrainer(model, model.layers, optimizer, **options).close()
    assert gpu.fraction == 0.75
