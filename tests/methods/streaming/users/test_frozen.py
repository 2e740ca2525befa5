"""Models with frozen parameters, peft's among them: streamed they have the bits of the script without streaming."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from harness.core.job import Room
from harness.devices import sim
from methods.l2l import L2LTrainer
from methods.streaming.placement.choice import PlacementChoice
from methods.streaming.placement.placed_layers import PlacedLayers, UserSizes
from methods.streaming.placement.placement import parse, with_frozen
from methods.stronghold import StrongholdTrainer
from tests.methods.streaming.users import models
from tests.methods.streaming.users.test_transformers import LAYERS, layers_of, losses_of, new_model
from tests.support.on_sim import call

TRAINERS: dict[str, Callable[..., Any]] = {
    "l2l": L2LTrainer,
    "l2l, boundaries": functools.partial(L2LTrainer, activations="host"),
    "window": StrongholdTrainer,
    "window 1": functools.partial(StrongholdTrainer, window_size=1, activations="host"),
    "R": functools.partial(StrongholdTrainer, placement="R4"),
    "mixed": functools.partial(StrongholdTrainer, placement="R1P1W1S1", window_size=1),
    "disk": functools.partial(StrongholdTrainer, placement="D2W2", window_size=1),
    "speculate": functools.partial(StrongholdTrainer, placement="W2S2", window_size=1, clipping="speculate"),
}


def lora(kind: str, dtype: torch.dtype, **settings: Any) -> nn.Module:
    """peft's model with its defaults: adapters in fp32 on every linear layer, on a frozen base in `dtype`."""
    base = new_model(kind, dtype)
    torch.manual_seed(3)
    chosen = {"r": 4, "target_modules": "all-linear", "fan_in_fan_out": kind == "gpt2"} | settings
    return peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **chosen))


def lora_dropout(kind: str, dtype: torch.dtype) -> nn.Module:
    return lora(kind, dtype, lora_dropout=0.1)


def lora_on_top(kind: str, dtype: torch.dtype) -> nn.Module:
    """The two lower layers have no adapters, so that no gradient reaches them."""
    targets = ["q_proj", "down_proj", "c_attn"]
    return lora(
        kind, dtype, target_modules=targets, layers_to_transform=[2, 3], layers_pattern=["layers", "h"]
    )


def lora_and_head(kind: str, dtype: torch.dtype) -> nn.Module:
    """With a head that is trained whole, as peft's modules_to_save are, and adapters in the base's dtype."""
    base = new_model(kind, dtype)
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules="all-linear", modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config, autocast_adapter_dtype=False)


def dora(kind: str, dtype: torch.dtype) -> nn.Module:
    return lora(kind, dtype, use_dora=True)


def frozen_below(kind: str, dtype: torch.dtype) -> nn.Module:
    """The two top layers and the head are trained, as they are."""
    model = new_model(kind, dtype).requires_grad_(False)
    for layer in layers_of(model)[2:]:
        layer.requires_grad_()
    return model


def frozen_in_between(kind: str, dtype: torch.dtype) -> nn.Module:
    model = new_model(kind, dtype)
    layers_of(model)[1].requires_grad_(False)
    return model


def norms_alone(kind: str, dtype: torch.dtype) -> nn.Module:
    model = new_model(kind, dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    return model


def embedding_alone(kind: str, dtype: torch.dtype) -> nn.Module:
    model = new_model(kind, dtype).requires_grad_(False)
    model.get_input_embeddings().requires_grad_()
    return model


MODELS = (
    lora,
    lora_dropout,
    lora_on_top,
    lora_and_head,
    dora,
    frozen_below,
    frozen_in_between,
    norms_alone,
    embedding_alone,
)
Result = tuple[list[tuple[float, float]], dict[str, Tensor]]


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@functools.cache
def by_plain_torch(make: Callable[..., nn.Module], kind: str, dtype: torch.dtype, clip: float) -> Result:
    """The script without streaming: a trained weight in bf16 has an fp32 master, a frozen one has none."""
    model = make(kind, dtype)
    transformers_model = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    transformers_model.activation_checkpointing_enable({"use_reentrant": False})
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [
        weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
        for weight in weights
    ]
    optimizer = optimizer_of(masters)

    def step(_: Tensor) -> Tensor:
        for master, weight in zip(masters, weights, strict=True):
            if master is not weight:
                master.grad, weight.grad = weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters, clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, [master.detach() for master in masters])
        return norm

    return losses_of(model, step), {name: p.detach() for name, p in model.named_parameters()}


def by_trainer(
    make: Callable[..., nn.Module], kind: str, dtype: torch.dtype, clip: float, trainer: str
) -> Result:
    model = make(kind, dtype)
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    with TRAINERS[trainer](model, layers_of(model), optimizer, max_norm=clip, device="cpu") as streamed:
        losses = losses_of(model, lambda _: streamed.step())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


ALL_WAYS = (lora, frozen_in_between)  # adapters within every layer; a layer that is frozen whole


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("make", ALL_WAYS, ids=lambda make: make.__name__)
@pytest.mark.cover(2)
def test_bits_are_those_of_the_script_without_streaming(
    make: Callable[..., nn.Module], kind: str, dtype: torch.dtype, clip: float, trainer: str
) -> None:
    compare_bits(make, kind, dtype, clip, trainer)


@pytest.mark.parametrize("trainer", ["l2l", "window 1", "mixed", "speculate"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "make", [make for make in MODELS if make not in ALL_WAYS], ids=lambda make: make.__name__
)
@pytest.mark.cover(2)
def test_so_they_are_of_other_frozen_models(
    make: Callable[..., nn.Module], kind: str, dtype: torch.dtype, clip: float, trainer: str
) -> None:
    compare_bits(make, kind, dtype, clip, trainer)


def compare_bits(
    make: Callable[..., nn.Module], kind: str, dtype: torch.dtype, clip: float, trainer: str
) -> None:
    losses, weights = by_plain_torch(make, kind, dtype, clip)
    streamed_losses, streamed_weights = by_trainer(make, kind, dtype, clip, trainer)
    assert streamed_losses == losses
    assert weights.keys() == streamed_weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in streamed_weights.items())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_frozen_base_keeps_its_bits(trainer: str) -> None:
    before = dict(lora("llama", torch.bfloat16).named_parameters())
    _, weights = by_trainer(lora, "llama", torch.bfloat16, 1.0, trainer)
    changed = {name for name, weight in weights.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in weights if "lora_" in name}


KIB = 2**10
TARGETS = ["q", "k", "v", "o", "gate", "up", "down"]


def small_lora(dtype: str) -> nn.Module:
    model = models.new_model("llama", dtype)
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=TARGETS))


def trained_in(device_bytes: int, dtype: str) -> tuple[str, int, int, list[float]]:
    """Return the chosen placement, the most bytes of the device in use, the bytes of the layers' homes on the host, and
    the losses."""
    model = small_lora(dtype)
    steps = [batch for [batch] in models.batches(3, device="sim")]
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    layers, losses = model.get_base_model().layers, []
    limits: dict[str, Any] = {"device_memory": device_bytes, "example": lambda: model(*steps[0])}
    with StrongholdTrainer(model, layers, optimizer, max_norm=1.0, device="sim", **limits) as trainer:
        sim.started.reset_peaks()
        for batch in steps:
            loss = model(*batch)
            loss.backward()
            trainer.step()
            losses.append(float(loss.detach()))
        peak = sim.started.stats()["device_peak"]
        homes = [slab for state in trainer.stream.states for slab in (*state.current, state.grads)]
        on_host = sum(slab.nbytes for slab in homes if slab is not None and slab.device.type == "cpu")
        return trainer.placement, peak, on_host, losses


def small_by_plain_torch(dtype: str) -> list[float]:
    model = small_lora(dtype)
    model.get_base_model().recomputes = True
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = optimizer_of(weights), []
    for [batch] in models.batches(3):
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("dtype", "sizes"), [("fp32", [285, 390, 520]), ("bf16", [262, 310, 400])])
def test_device_memory_stays_below_the_limit_and_is_used(dtype: str, sizes: list[int]) -> None:
    runs = [call(trained_in, size * KIB, dtype, device_bytes=size * KIB) for size in sizes]
    assert all(losses == small_by_plain_torch(dtype) for *_, losses in runs)
    assert all(peak <= size * KIB for (_, peak, _, _), size in zip(runs, sizes, strict=True)), runs
    assert len({placement for placement, *_ in runs}) == len(sizes), runs


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_frozen_layer_takes_its_weights_alone_of_the_host(dtype: str, size: int) -> None:
    model = small_lora(dtype)
    layers = model.get_base_model().layers
    frozen = sum(p.numel() for p in layers.parameters() if not p.requires_grad)
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    with StrongholdTrainer(model, layers, optimizer, device="cpu") as trainer:
        states = trainer.stream.states
        slabs = [slab for state in states for slab in (*state.current, state.grads) if slab is not None]
        assert sum(slab.nbytes for slab in slabs) == size * frozen
        assert all(state.spare is None for state in states)


@pytest.mark.parametrize("frozen", [{0, 1, 2, 3, 4}, {0, 1}, {3, 4}], ids=str)
@pytest.mark.parametrize(("placement", "window_size"), [("W5", 1), ("W5", 3), ("P5", 2), ("R1P1W1S1D1", 1)])
def test_the_plan_foretells_what_one_more_step_moves(
    placement: str, window_size: int, frozen: set[int]
) -> None:
    model, moved = models.new_model("llama"), []
    for place in frozen:
        model.layers[place].requires_grad_(False)
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    options: dict[str, Any] = {"max_norm": 1.0, "placement": placement, "window_size": window_size}
    with StrongholdTrainer(model, model.layers, optimizer, device="cpu", **options) as trainer:
        for [batch] in models.batches(2):
            model(*batch).backward()
            trainer.step()
            moved.append(trainer.gpu.moved_bytes)
        numels = tuple(state.layout.numel for state in trainer.stream.states)
        end_params = trainer.ends.layout.numel
    are_frozen = tuple(place in frozen for place in range(len(numels)))
    sizes = UserSizes("fp32", numels, end_params, 0, waits_for_norm=True, are_frozen=are_frozen)
    kinds = with_frozen(parse(placement, len(numels)), are_frozen)
    plan = PlacedLayers(sizes, kinds, window_size).plan()
    assert moved[1] - moved[0] == plan.moved_bytes


def test_the_placement_names_the_kinds_that_frozen_layers_have() -> None:
    """A frozen layer has no state that could be streamed or lie on a disk."""
    model = models.new_model("llama")
    for place in (1, 2, 4):
        model.layers[place].requires_grad_(False)
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    with StrongholdTrainer(model, model.layers, optimizer, device="cpu", placement="R1S2D2") as trainer:
        assert trainer.placement == "R1W2D1W1"
        assert [type(layer).__name__ for layer in trainer.stream.layers[1:3]] == ["Hosted"] * 2


def test_a_plan_puts_no_frozen_layer_on_the_disk() -> None:
    sizes = UserSizes("fp32", (100,) * 3, 10, 0, waits_for_norm=False, are_frozen=(True, True, False))
    options = PlacementChoice(sizes, Room(), placement="D2R1").plan().options
    assert (options["placement"], "disk" in options) == ("W2R1", False)


CHANGES: dict[str, Callable[[nn.Parameter, bool], object]] = {
    "by place": lambda weight, is_trained: weight.requires_grad_(is_trained),
    "by name": lambda weight, is_trained: weight.requires_grad_(requires_grad=is_trained),
    "of the class": lambda weight, is_trained: Tensor.requires_grad_(weight, requires_grad=is_trained),
    "by the attribute": lambda weight, is_trained: setattr(weight, "requires_grad", is_trained),
}


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_whether_a_parameter_is_trained_may_not_change_however_the_call_says_it(
    change: str, is_trained: bool
) -> None:
    model = models.new_model("llama")
    layers = model.layers
    layers[1].requires_grad_(False)
    optimizer = optimizer_of([parameter for parameter in model.parameters() if parameter.requires_grad])
    weights = {weight.requires_grad: weight for weight in (layers[0].q.weight, layers[1].q.weight)}
    message = (
        f"q.weight: expected requires_grad={not is_trained}, as when the trainer was made, got {is_trained}"
    )
    with StrongholdTrainer(model, layers, optimizer, device="cpu"):
        CHANGES[change](weights[is_trained], is_trained)
        with pytest.raises(ValueError, match=message):
            CHANGES[change](weights[not is_trained], is_trained)


@pytest.mark.parametrize(("trainer", "num_fetches"), [("l2l", 2 * LAYERS), ("window 1", 2 * (LAYERS - 1))])
def test_a_step_copies_weights_in_and_nothing_out(trainer: str, num_fetches: int) -> None:
    model = lora("llama", torch.bfloat16)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layer = sum(p.numel() for p in layers_of(model)[0].parameters() if not p.requires_grad)
    with TRAINERS[trainer](model, layers_of(model), optimizer_of(weights), device="cpu") as streamed:
        moved = []

        def step(_: Tensor) -> Tensor:
            moved.append(streamed.gpu.moved_bytes)
            return streamed.step()

        losses_of(model, step)
    # two inputs stay in slots, and the lowest layer's, which has no gradient, beside them
    inputs = 2 * (LAYERS - 3) * 2 * 24 * 64 * 2 if trainer == "window 1" else 0
    assert moved[-1] - moved[-2] == num_fetches * 2 * layer + inputs
