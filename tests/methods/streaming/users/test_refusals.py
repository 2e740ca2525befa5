"""Models, options and loops that cannot be streamed are refused: in one line, which says what was expected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from methods.l2l import L2LTrainer
from methods.stronghold import StrongholdTrainer
from tests.methods.streaming.users.models import Llama, batches, begun, layers_of, new_model, optimizer_of


def refused(
    match: str, name: str = "llama", change: Callable[[Any], Any] | None = None, **options: Any
) -> None:
    """Expect a refusal of a model after a change to it, in one line."""
    model = new_model(name)
    layers = (change(model) if change else None) or layers_of(model)
    optimizer = options.pop("optimizer", None) or optimizer_of(list(model.parameters()))
    with pytest.raises(ValueError, match=match) as raised:
        StrongholdTrainer(model, layers, optimizer, device="cpu", **options)
    assert "\n" not in str(raised.value)


def frozen(model: Any) -> None:
    model.requires_grad_(False)


def mixed(model: Any) -> None:
    model.layers[1].bfloat16()


def with_statistics(model: Any) -> None:
    model.layers[1].gate = nn.BatchNorm1d(8)


def hooked(model: Any) -> None:
    model.layers[1].q.weight.register_hook(lambda grad: grad)


def lazy(model: Any) -> None:
    model.layers[1].gate = nn.LazyLinear(4)


def scripted(model: Any) -> None:
    model.layers[1].gate = torch.jit.trace(model.layers[1].gate, torch.zeros(1, 32))


def with_gaps(model: Any) -> None:
    model.layers[1].gate.weight = nn.Parameter(torch.zeros(48, 64)[:, ::2])


def on_meta(model: Any) -> None:
    model.layers[1].to("meta")


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("layer 0 .Linear. is not a part of the model", lambda model: [nn.Linear(2, 2)]),
        ("layers.0 is listed twice", lambda model: [*model.layers, model.layers[0]]),
        ("layers is listed twice, or contains another layer", lambda model: [model.layers, model.layers[0]]),
        (
            "expected parameters with requires_grad=True, got none; try requires_grad_.., or adapters of peft",
            frozen,
        ),
        ("one dtype, float32, bfloat16 or float16, got float32 .*, bfloat16", mixed),
        ("layers.1 .BatchNorm1d.: expected no running statistics", with_statistics),
        ("layers.1.q.weight: expected no gradient hooks, got some: .*; try to change .grad between", hooked),
        ("layers.1.input_norm.weight: expected values, got the meta device", on_meta),
        ("layers.1.gate.weight: expected values, got a lazy module's", lazy),
        ("layers.1: expected a module of Python, got TorchScript's", scripted),
        ("layers.1.gate.weight: expected memory without gaps, got a part of a tensor", with_gaps),
    ],
)
def test_a_model_that_cannot_be_streamed_is_refused(match: str, change: Callable[[Any], Any]) -> None:
    refused(match, change=change)


def test_running_statistics_may_be_in_eval() -> None:
    model = new_model("llama")
    with_statistics(model)
    model.layers[1].gate.eval()
    StrongholdTrainer(model, model.layers, optimizer_of(list(model.parameters())), device="cpu").close()


def stepped() -> torch.optim.AdamW:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (
            "expected torch.optim.AdamW, got SGD",
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)},
        ),
        (
            "parameters, such as embed.weight; add them",
            {"optimizer": torch.optim.AdamW([nn.Parameter(torch.zeros(2))])},
        ),
        ("an optimizer before its first step", {"optimizer": stepped()}),
        ("exclude each other", {"accumulates": True, "clipping": "speculate"}),
        ("clipping: expected deferred or speculate, got 'never'", {"clipping": "never"}),
        ("expected device_memory and example=", {"host_memory": 2**30}),
        (
            "a device with its own memory, got cpu",
            {"device_memory": 2**30, "example": lambda: torch.zeros(())},
        ),
        ("window_size: expected 1 to 5, got 6", {"window_size": 6}),
        ("expected the model's 5 layers, got 4", {"placement": "R2W2"}),
    ],
)
def test_options_that_make_no_sense_are_refused(match: str, options: dict[str, Any]) -> None:
    refused(match, **options)


def looping(model: Any, batch: Any) -> None:
    model.layers = nn.ModuleList([*model.layers, model.layers[0]])
    model(*batch).backward()


def two_losses(model: Any, batch: Any) -> None:
    (model(*batch) + model(*batch)).backward()


def turned_round(model: Any, batch: Any) -> None:
    model.layers = nn.ModuleList([*reversed(model.layers)])
    model(*batch)


def its_own_checkpointing(model: Any, batch: Any) -> None:
    model.recomputes = True
    model(*batch).backward()


def keeping(model: Any, batch: Any) -> None:
    """As a cache of keys and values, which is fuller when it is recomputed."""
    calls: list[int] = []
    model.layers[2].v.register_forward_hook(
        lambda module, args, y: y if calls else calls.append(1) or y.tanh().tanh()
    )
    model(*batch).backward()


class OddLayer(nn.Module):
    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.map, self.compute = nn.Linear(4, 4), compute

    def forward(self, x: Tensor, notes: Any) -> Any:
        return self.compute(self, x, notes)


class OddModel(nn.Module):
    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.inp, self.layers = nn.Linear(4, 4), nn.ModuleList(OddLayer(compute) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        notes = SimpleNamespace(bias=x.tanh(), weight=self.inp.weight)
        for layer in self.layers:
            x = layer(x, notes)
        return x.sum()


def replacing(layer: Any, x: Tensor, notes: Any) -> Tensor:
    layer.map.weight.data = 0.5 * layer.map.weight.data
    y: Tensor = layer.map(x)
    return y


def registering(layer: Any, x: Tensor, notes: Any) -> Tensor:
    layer.kept = layer.map.weight
    y: Tensor = layer.map(x)
    return y


@pytest.mark.parametrize(
    ("match", "compute"),
    [
        ("try use_reentrant=False", lambda layer, x, notes: checkpoint(layer.map, x, use_reentrant=True)),
        ("leave its arguments, .* got a change in place", lambda layer, x, notes: layer.map(x.mul_(0.5))),
        (
            "expected tensors with gradients among the layer's arguments",
            lambda layer, x, notes: layer.map(x + notes.bias),
        ),
        (
            "expected tensors with gradients among the layer's arguments",
            lambda layer, x, notes: layer.map(x) + notes.weight[0] * notes.weight[1],
        ),
        ("layers.0: expected forward.. to leave the layer's weights as they are", replacing),
        ("expected forward.. to register no parameters, got kept; try", registering),
    ],
)
def test_a_layer_that_cannot_be_recomputed_is_refused(match: str, compute: Callable[..., Any]) -> None:
    model = OddModel(compute)
    trainer = L2LTrainer(model, model.layers, optimizer_of(list(model.parameters())), device="cpu")
    with pytest.raises(ValueError, match=match) as raised:
        model(torch.ones(2, 4)).backward()
    assert "\n" not in str(raised.value)
    trainer.__exit__(ValueError, None, None)


def noisy(generator: torch.Generator) -> Callable[..., Tensor]:
    return lambda x, *others: x * torch.rand((), generator=generator)


def of_class(layer: OddLayer, noise: Callable[..., Tensor]) -> None:
    class DrawsNoise(OddLayer):
        def forward(self, x: Tensor, notes: Any) -> Any:
            return noise(super().forward(x, notes))

    layer.__class__ = DrawsNoise


def as_forward(layer: Any, noise: Callable[..., Tensor]) -> None:
    layer.forward = lambda x, notes: noise(layer.map(x))


def as_hook(layer: Any, noise: Callable[..., Tensor]) -> None:
    layer.map.register_forward_hook(lambda module, args, y: noise(y))


def as_attribute(layer: Any, noise: Callable[..., Tensor]) -> None:
    layer.compute = lambda layer, x, notes: noise(layer.map(x))


@pytest.mark.parametrize("holds", [of_class, as_forward, as_hook, as_attribute])
def test_a_layer_that_draws_from_a_generator_in_a_closure_is_refused(holds: Callable[..., None]) -> None:
    model = OddModel(lambda layer, x, notes: layer.map(x))
    for layer in model.layers:
        holds(layer, noisy(torch.Generator().manual_seed(1)))
    trainer = L2LTrainer(model, model.layers, optimizer_of(list(model.parameters())), device="cpu")
    with pytest.raises(
        ValueError, match="got a change of the state of a generator of random numbers; try to leave"
    ):
        model(torch.ones(2, 4)).backward()
    trainer.__exit__(ValueError, None, None)


def twice(model: Any, batch: Any) -> None:
    model(*batch).backward()
    model(*batch).backward()


@pytest.mark.parametrize(
    ("match", "work"),
    [
        ("expected one backward pass through all layers after each forward pass", looping),
        ("expected one backward pass through all layers after each forward pass", two_losses),
        ("expected each layer once, in the list's order, got layer 4 after layer -1", turned_round),
        ("got layer 4 after layer 4; try to turn the model's own checkpointing off", its_own_checkpointing),
        ("expected one backward pass before step", twice),
        ("layer 2: expected the same tensors when the backward pass recomputes", keeping),
    ],
)
def test_a_loop_that_cannot_be_streamed_is_refused(match: str, work: Callable[[Any, Any], None]) -> None:
    trainer, model, _ = begun(StrongholdTrainer)
    [[batch]] = batches(1)
    with pytest.raises(ValueError, match=match) as raised:
        work(model, batch)
    assert "\n" not in str(raised.value)
    trainer.__exit__(ValueError, None, None)


class WithSpare(Llama):
    """A head of which the loss makes no use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.layers[3].spare = nn.Linear(2, 2)


def test_a_parameter_without_a_gradient_is_named() -> None:
    [[batch]] = batches(1)
    for inside, name in ((True, "layers.3.spare.weight"), (False, "spare.weight")):
        model = WithSpare()
        if not inside:
            del model.layers[3].spare
        trainer = StrongholdTrainer(model, model.layers, optimizer_of(list(model.parameters())), device="cpu")
        with pytest.raises(ValueError, match=f"got no gradient for {name}$"):
            model(*batch).backward()
            trainer.step()
        trainer.__exit__(ValueError, None, None)


def test_a_step_needs_a_backward_pass_and_settings_that_stay() -> None:
    [[batch]] = batches(1)
    model = new_model("llama")
    optimizer = optimizer_of(list(model.parameters()))
    with StrongholdTrainer(model, model.layers, optimizer, device="cpu") as trainer:
        with pytest.raises(ValueError, match="expected a backward pass through all layers"):
            trainer.step()
        model(*batch).backward()
        optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(ValueError, match="expected the optimizer's settings as in the backward pass"):
            trainer.step()


def test_a_script_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("expected one process, got 2; try to run the script without torchrun")


def test_a_step_of_the_optimizer_itself_is_refused() -> None:
    [[batch]] = batches(1)
    trainer, model, optimizer = begun(L2LTrainer)
    with trainer:
        model(*batch).backward()
        with pytest.raises(ValueError, match=r"expected trainer\.step\(\) alone"):
            optimizer.step()
        trainer.step()


def test_parameters_that_are_exchanged_are_refused() -> None:
    trainer, model, _ = begun(L2LTrainer)
    with pytest.raises(ValueError, match="try it without assign=True"):
        model.load_state_dict(new_model("llama").state_dict(), assign=True)
    trainer.__exit__(ValueError, None, None)


def test_a_model_in_training_is_not_copied_whole() -> None:
    trainer, model, _ = begun(L2LTrainer)
    with trainer, pytest.raises(ValueError, match="cannot copy a model while a trainer holds it"):
        copy.deepcopy(model)
    copy.deepcopy(model)


def test_a_layer_whose_parameters_have_made_other_numbers_of_steps_is_refused() -> None:
    """As after a parameter of a layer was unfrozen later."""
    trainer, _, optimizer = begun(L2LTrainer)
    plain = optimizer_of(list(new_model("llama").parameters()))
    for place, parameter in enumerate(
        parameter for group in plain.param_groups for parameter in group["params"]
    ):
        zeros = torch.zeros_like(parameter)
        plain.state[parameter] = {
            "step": torch.tensor(3.0 - (place == 2)),
            "exp_avg": zeros,
            "exp_avg_sq": zeros,
        }
    with (
        trainer,
        pytest.raises(ValueError, match=r"layers\.0: expected one number of steps .* got 3 for .*, 2 for "),
    ):
        optimizer.load_state_dict(plain.state_dict())
