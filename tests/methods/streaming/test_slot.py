"""How a layer travels: torch's own AdamW at home, torch's own autograd in a slot, and only the bytes that must move."""

from __future__ import annotations

import mmap
import resource
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.core.job import Room, Workload
from harness.core.method import create
from harness.devices.streams import Device
from harness.models.gpt import Layer, initial
from harness.models.model import new_layer
from methods.offload.adamw import published_settings
from methods.offload.layout import layout_of
from methods.offload.state import joined_master, keep_master_
from methods.shared.terms import Terms
from methods.streaming.layer_state import Home, LayerState, NamedLayer, Passed
from methods.streaming.slot import GradientRoom, Slot
from methods.streaming.starting_values import draw_states
from tests.support.training import tiny, train

ODD_SHAPES = ((1,), (3, 5), (7,), (17, 31), (33,), (1, 1))
FACTORS = (None, 1.0, 0.37)
ALIGNED = tiny(hidden_size=32, num_heads=2, num_layers=5)  # its slabs have no padding
ALIGNED_LAYER_BYTES = 4 * (12 * 32 * 32 + 13 * 32)
UPDATES = 5


class Odd(nn.Module):
    """Vectors and matrices that fill no vector register evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors_and_matrices = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in ODD_SHAPES)


@pytest.fixture
def device() -> Iterator[Device]:
    with Device("cpu") as cpu:
        yield cpu


def random(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def odd_layer(device: Device, dtype: str = "fp32") -> LayerState:
    layer = LayerState(device, NamedLayer(Odd(), "odd."), Terms(dtype), Home(on_host=True))
    keep_master_(layer.current, random(layer.layout.numel, seed=0))
    return layer


def gradients(layer: LayerState, update: int) -> list[Tensor]:
    views = enumerate(layer.layout.views(layer.grads), start=1)
    return [random(view.shape, seed=100 * update + place) for place, view in views]


def learning_rate(update: int) -> float:
    return 1e-3 * update


def update_at_home(layer: LayerState, factor: float | None) -> list[Tensor]:
    """Weights and first moments after some steps; a tensor of the factor, as the clip gives it."""
    for update in range(1, UPDATES + 1):
        for view, gradient in zip(layer.layout.views(layer.grads), gradients(layer, update), strict=True):
            view.copy_(gradient)
        layer.update(
            published_settings(learning_rate(update)), None if factor is None else torch.tensor(factor)
        )
    return list(chain.from_iterable((state.weight, state.exp_avg) for state in layer.tensors()))


def update_by_torch(layer: LayerState, factor: float | None, **implementation: bool) -> list[Tensor]:
    """The same steps from the same weights by torch's optimizer."""
    weights = [nn.Parameter(view.clone()) for view in layer.layout.views(joined_master(layer.current))]
    groups = [
        {"params": [weight for weight in weights if weight.ndim == 2], "weight_decay": 0.01},
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8, **implementation)
    for update in range(1, UPDATES + 1):
        for weight, gradient in zip(weights, gradients(layer, update), strict=True):
            weight.grad = gradient if factor is None else gradient * torch.tensor(factor)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update)
        optimizer.step()
    return list(
        chain.from_iterable((weight.detach(), optimizer.state[weight]["exp_avg"]) for weight in weights)
    )


@pytest.mark.parametrize("factor", FACTORS)
def test_update_has_the_very_bits_of_torchs_fused_adamw(device: Device, factor: float | None) -> None:
    layer = odd_layer(device)
    by_torch = update_by_torch(layer, factor, fused=True)
    assert all(map(torch.equal, update_at_home(layer, factor), by_torch))


@pytest.mark.parametrize("factor", FACTORS)
def test_update_is_close_to_torchs_unfused_adamw(device: Device, factor: float | None) -> None:
    layer = odd_layer(device)
    by_torch = update_by_torch(layer, factor, foreach=False, fused=False)
    torch.testing.assert_close(update_at_home(layer, factor), by_torch, rtol=1e-6, atol=1e-7)


def test_update_changes_every_element(device: Device) -> None:
    layer = odd_layer(device)
    before = [view.clone() for view in layer.layout.views(joined_master(layer.current))]
    update_at_home(layer, None)
    assert all(
        (old != new).all()
        for old, new in zip(before, layer.layout.views(joined_master(layer.current)), strict=True)
    )


def test_update_leaves_the_padding_at_zero(device: Device) -> None:
    layer = LayerState(device, NamedLayer(Odd(), "odd."), Terms("fp32"), Home(on_host=True))
    update_at_home(layer, None)
    for view in layer.layout.views(layer.current.weights):
        view.zero_()
    assert not layer.current.weights.any()


def test_bf16_weights_are_the_rounded_master(device: Device) -> None:
    layer = odd_layer(device, "bf16")
    update_at_home(layer, None)
    assert torch.equal(layer.current.weights, joined_master(layer.current).bfloat16())


def test_bf16_master_gathers_steps_too_small_to_move_a_weight(device: Device) -> None:
    layer = odd_layer(device, "bf16")
    keep_master_(layer.current, torch.ones(layer.layout.numel))
    layer.grads.fill_(1.0)
    for _ in range(100):
        layer.update(published_settings(1e-4), None)
    torch.testing.assert_close(
        layer.layout.views(layer.current.weights)[0].float(), torch.tensor([0.99]), rtol=4e-3, atol=0
    )


@pytest.mark.parametrize("module", [Odd(), new_layer(tiny(), 0)], ids=["odd", "layer"])
def test_views_do_not_overlap(module: nn.Module) -> None:
    layout = layout_of(module)
    views = layout.views(torch.zeros(layout.numel))
    for place, view in enumerate(views):
        view.fill_(place)
    assert all((view == place).all() for place, view in enumerate(views))


@pytest.mark.parametrize("module", [Odd(), new_layer(tiny(), 0)], ids=["odd", "layer"])
def test_views_have_the_parameters_shapes(module: nn.Module) -> None:
    layout = layout_of(module)
    views = layout.views(torch.zeros(layout.numel))
    assert [view.shape for view in views] == [parameter.shape for parameter in module.parameters()]


@pytest.mark.parametrize("module", [Odd(), new_layer(tiny(), 0)], ids=["odd", "layer"])
def test_views_start_at_multiples_of_64_bytes(module: nn.Module) -> None:
    layout = layout_of(module)
    slab = torch.zeros(layout.numel)
    assert all((view.data_ptr() - slab.data_ptr()) % 64 == 0 for view in layout.views(slab))


def autograd(workload: Workload, x: Tensor, dy: Tensor, seed: int) -> list[Tensor]:
    """Output, input's gradient and parameters' gradients of layer 1, by torch alone."""
    layer = Layer(workload)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(initial(f"layers.1.{name}", parameter.shape, workload))
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def passed(x: Tensor) -> list[Passed]:
    """One micro-batch, of whose tensor a gradient is asked."""
    return [(x.detach().requires_grad_(),)]


def new_state(device: Device, workload: Workload, index: int = 1) -> LayerState:
    state = LayerState.of_model(device, workload, index, host=True)
    draw_states([state], workload)
    return state


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_slot_has_the_very_bits_of_autograd(device: Device, dropout: float) -> None:
    workload = tiny(dropout=dropout)
    layer, slot = new_state(device, workload), Slot(new_state(device, workload, index=0))
    x, dy = random((2, 16, 36), seed=1), random((2, 16, 36), seed=2)
    grads = GradientRoom(layer).slab.fill_(7)  # what another layer left there
    slot.load(layer)
    torch.manual_seed(3)
    (y,) = layer.forward(passed(x))
    torch.rand(5)  # what the layers above draw
    recomputed = [*y, *layer.backward([(dy,)], grads)[0], *layer.layout.views(grads)]
    assert all(map(torch.equal, recomputed, autograd(workload, x, dy, seed=3)))


def test_layer_has_the_same_bits_where_it_comes_back_to_another_slot(device: Device) -> None:
    workload = tiny()
    layer, other = new_state(device, workload), new_state(device, workload, index=0)
    first, second, grads = Slot(layer), Slot(other), GradientRoom(layer).slab
    x, dy = random((2, 16, 36), seed=1), random((2, 16, 36), seed=2)
    first.load(layer)
    (y,) = layer.forward(passed(x))
    first.load(other)
    other.forward([y])
    second.load(layer)
    recomputed = [*y, *layer.backward([(dy,)], grads)[0], *layer.layout.views(grads)]
    assert all(map(torch.equal, recomputed, autograd(workload, x, dy, seed=3)))


def test_recompute_leaves_the_random_state_where_the_pass_above_left_it(device: Device) -> None:
    layer = new_state(device, tiny(dropout=0.5))
    Slot(layer).load(layer)
    layer.forward(passed(random((2, 16, 36), seed=1)))
    torch.rand(5)
    state = torch.get_rng_state()
    layer.backward([(random((2, 16, 36), seed=2),)], GradientRoom(layer).slab)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradient_arrives_home_as_it_left(device: Device) -> None:
    layer = new_state(device, ALIGNED)
    gradients = GradientRoom(layer)
    gradients.slab.copy_(random(gradients.slab.shape, seed=1))
    gradients.send_home(layer)
    device.synchronize()
    assert torch.equal(layer.grads, gradients.slab)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_l2l_moves_each_layer_in_twice_and_its_gradient_out_once(num_steps: int) -> None:
    moved = train("l2l", ALIGNED, num_steps).trained.moved_bytes
    assert moved == num_steps * (2 * 5 + 5) * ALIGNED_LAYER_BYTES


# Of n streamed layers the w of the window stay for the backward pass, and the last w fetched wait for the next step;
# the window is filled once before the first step.
@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("window_size", "resident_layers", "streamed", "kept"),
    [(1, 0, 5, 1), (2, 0, 5, 2), (5, 0, 5, 5), (2, 1, 4, 2), (2, 4, 1, 1), (2, 5, 0, 0)],
)
@pytest.mark.cover(1)
def test_stronghold_fetches_no_layer_of_the_window_again_at_the_turn(
    window_size: int, resident_layers: int, streamed: int, kept: int, clip_norm: float, num_steps: int
) -> None:
    workload = tiny(hidden_size=32, num_heads=2, num_layers=5, clip_norm=clip_norm)
    options = {"window_size": window_size, "resident_layers": resident_layers}
    moved = train("stronghold", workload, num_steps, **options).trained.moved_bytes
    fetches_per_step = (streamed - kept) + (streamed - kept) + kept
    assert moved == (kept + num_steps * (fetches_per_step + streamed)) * ALIGNED_LAYER_BYTES


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("resident", {}),
        ("l2l", {}),
        ("stronghold", {"window_size": 1, "resident_layers": 0}),
        ("stronghold", {"window_size": 3, "resident_layers": 1}),
        ("stronghold", {"window_size": 2, "resident_layers": 4}),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.cover(1)
def test_plan_foretells_what_one_more_step_moves(method: str, options: dict[str, int], dtype: str) -> None:
    workload = tiny(hidden_size=32, num_heads=2, num_layers=5, dtype=dtype)
    one, two = (train(method, workload, num_steps, **options).trained.moved_bytes for num_steps in (1, 2))
    assert create(method, options).plan(workload, Room()).moved_bytes == two - one


def test_a_slab_of_the_host_has_its_pages_before_it_is_used(device: Device) -> None:
    slab = device.room(2**22, torch.float32, host=True)
    assert slab.untyped_storage().nbytes() == 2**24  # exactly as large as asked
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    slab.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2**24 // mmap.PAGESIZE // 100


def test_hosts_single_threads_leave_compute_its_own() -> None:
    # A fresh thread, as in a fresh process: torch settles a thread's count when it first computes.
    counts: list[int] = []

    def compute() -> None:
        train("stronghold", tiny(), 1)
        counts.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert counts == [2]
