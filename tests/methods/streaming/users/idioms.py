"""Idioms of training scripts beyond the plain loop. Each runs with a trainer and, as the oracle, by plain PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH, LAYERS, STEPS = 8, 3, 4


class AuxiliaryLayer(nn.Module):
    """`keeps`: keeps an auxiliary loss on itself. `clamps`: changes its weights in forward(). `lends`: returns its
    weight in place of the auxiliary loss. `act`: what it does with its input. `notes`: a dictionary to write into."""

    keeps = clamps = lends = False
    act: Callable[[Any, Tensor], Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, notes: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        if notes is not None:
            notes["mean"] = x.mean()
        if self.clamps:
            self.map.weight.data.clamp_(-0.2, 0.2)
        if self.act is not None:
            x = vars(self)["act"](self, x)
        y = self.map(self.norm(x))
        if self.keeps:
            self.kept = y.square().mean()
        return x + y.tanh(), self.map.weight if self.lends else y.square().mean()


class Net(nn.Module):
    notes: dict[str, Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(AuxiliaryLayer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x, self.returned = self.inp(x), torch.zeros(())
        for layer in self.layers:
            x, auxiliary = layer(x, self.notes)
            self.returned = self.returned + auxiliary
        y: Tensor = self.out(x)
        return y


@dataclass
class IdiomScript:
    """A training script, with a trainer or without one."""

    model: Any
    optimizer: torch.optim.AdamW
    max_norm: float | None
    trainer: Any = None
    number: int = 0  # of the step
    seen: list[Tensor] = field(default_factory=list)  # what the script has read
    kept: Any = None

    @property
    def batch(self) -> Tensor:
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(self.number))

    def loss(self) -> Tensor:
        return (self.model(self.batch) - self.batch).square().mean()

    def step(self) -> None:
        if self.trainer:
            self.trainer.step()
            return
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def see(self, *tensors: Tensor) -> None:
        self.seen += [tensor.detach().clone() for tensor in tensors]

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


def nothing(script: IdiomScript) -> None: ...


@dataclass(frozen=True)
class Idiom:
    """What a script does beside the plain loop: before each forward pass, for the loss, after backward(), and after
    step(). `before_trainer`: once, before the trainer is made."""

    after_step: Callable[[IdiomScript], object] = nothing
    after_backward: Callable[[IdiomScript], object] = nothing
    before: Callable[[IdiomScript], object] = nothing
    loss: Callable[[IdiomScript], Tensor] = IdiomScript.loss
    before_trainer: Callable[[IdiomScript], object] = nothing

    def run(self, max_norm: float | None, make: Callable[..., Any] | None) -> list[Tensor]:
        """Return what the script reads, its losses and its last weights."""
        torch.manual_seed(0)
        model = Net()
        script = IdiomScript(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), max_norm)
        self.before_trainer(script)
        if make:
            script.trainer = make(model, model.layers, script.optimizer, max_norm=max_norm, device="cpu")
        try:
            for script.number in range(STEPS):
                self.before(script)
                loss = self.loss(script)
                loss.backward()
                self.after_backward(script)
                script.step()
                self.after_step(script)
                script.see(loss)
            script.see(*script.weights)
        finally:
            if script.trainer:
                script.trainer.__exit__(ValueError, None, None)
        return script.seen


def penalty(script: IdiomScript) -> Tensor:
    return 1e-2 * torch.stack([weight.square().sum() for weight in script.weights]).sum()


def averaged(script: IdiomScript) -> None:
    script.kept.update_parameters(script.model)
    script.see(*script.kept.module.parameters())


def prepare_average(script: IdiomScript) -> None:
    script.kept = AveragedModel(script.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def swapped_average(script: IdiomScript) -> None:
    script.kept = [
        0.5 * (old + new) for old, new in zip(script.kept or script.weights, script.weights, strict=True)
    ]
    before = [weight.data.clone() for weight in script.weights]
    with torch.no_grad():
        for weight, average in zip(script.weights, script.kept, strict=True):
            weight.copy_(average)
        script.see(script.loss())
        for weight, value in zip(script.weights, before, strict=True):
            weight.data.copy_(value)


@torch.no_grad()
def bounded(script: IdiomScript) -> None:
    for weight in script.weights:
        weight.clamp_(-0.4, 0.4)
        weight.data.mul_(0.99)


def through_views(script: IdiomScript) -> None:
    """Views that the script keeps from one step to the next."""
    script.kept = script.kept or [weight.data for weight in script.weights]
    script.see(*script.kept)
    script.kept[3].mul_(0.9)
    script.kept[-3].mul_(0.9)


def by_hand(script: IdiomScript) -> None:
    script.see(*script.model.layers.state_dict().values(), parameters_to_vector(script.weights))
    script.see(*(torch.from_numpy(weight.detach().numpy()) for weight in script.weights))


def loaded(script: IdiomScript) -> None:
    layer = script.model.layers[1]
    layer.load_state_dict({name: 0.9 * value for name, value in layer.state_dict().items()})


def gradient_penalty(script: IdiomScript) -> Tensor:
    x = script.batch.requires_grad_()
    (slope,) = torch.autograd.grad(script.model(x).sum(), x, create_graph=True)
    return script.loss() + slope.square().mean()


def noisy(script: IdiomScript) -> None:
    generator = torch.Generator().manual_seed(script.number)
    for weight in script.weights:
        assert weight.grad is not None
        weight.grad = weight.grad + 1e-2 * torch.randn(weight.shape, generator=generator)
    nn.utils.clip_grad_value_(script.weights, 1e-2)


def unscaled(script: IdiomScript) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(script.optimizer)


def dropped(script: IdiomScript) -> None:
    """The first batch of each step is dropped."""
    script.optimizer.zero_grad()
    script.loss().backward()


def some_without(script: IdiomScript) -> None:
    script.model.layers[0].map.bias.grad = None


def sharpness_aware(script: IdiomScript) -> None:
    """SAM: the gradient at another point."""
    with torch.no_grad():
        script.kept = [0.05 * weight.grad for weight in script.weights if weight.grad is not None]
        torch._foreach_add_(script.weights, script.kept)
    script.optimizer.zero_grad()
    script.loss().backward()
    with torch.no_grad():
        torch._foreach_sub_(script.weights, script.kept)


def evaluated(script: IdiomScript) -> None:
    with torch.no_grad():
        script.see(script.loss())


def summed(script: IdiomScript) -> None:
    script.number += 10
    (script.loss() / 2).backward()
    script.number -= 10


def frozen(script: IdiomScript) -> None:
    script.model.layers[1].requires_grad_(False)


def half_frozen(script: IdiomScript) -> None:
    """Freeze a layer whole, and the matrices of another."""
    script.model.layers[0].requires_grad_(False)
    for parameter in script.model.layers[1].parameters():
        parameter.requires_grad_(parameter.ndim == 1)


def with_frozen_changed(script: IdiomScript) -> None:
    """As adapters that are merged into frozen weights."""
    with torch.no_grad():
        next(script.model.layers[1].parameters()).mul_(0.9)
    script.see(*script.weights)


def frozen_outside(script: IdiomScript) -> None:
    script.model.inp.requires_grad_(False)


def hooked(script: IdiomScript) -> None:
    script.model.layers[1].map.weight.register_hook(lambda grad: 0.5 * grad)


def by_group(script: IdiomScript) -> None:
    script.optimizer.param_groups[0] |= {"lr": 1e-2 / (2 + script.number), "weight_decay": 0.1}


def maximized(script: IdiomScript) -> None:
    script.optimizer.param_groups[0]["maximize"] = True


def with_group(script: IdiomScript) -> None:
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def clamped_by_hook(script: IdiomScript) -> None:
    script.kept = script.kept or script.optimizer.register_step_post_hook(lambda *_: bounded(script))


def states_reset(script: IdiomScript) -> None:
    script.optimizer.state.clear()


def restored(script: IdiomScript) -> None:
    """A finder of learning rates: everything is as before."""
    if script.number == 1:
        script.kept = copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict()))
    elif script.number == 2:
        script.model.load_state_dict(script.kept[0])
        script.optimizer.load_state_dict(script.kept[1])


def compiled(script: IdiomScript) -> None:
    layer = script.model.layers[1]
    layer._compiled_call_impl = layer._call_impl  # compile() sets it


def with_other_weights(script: IdiomScript) -> None:
    weights = {name: 0.5 * weight.detach() for name, weight in script.model.named_parameters()}
    with torch.no_grad():
        script.see(torch.func.functional_call(script.model, weights, (script.batch,)))


def replaced(script: IdiomScript) -> None:
    vector_to_parameters(0.9 * parameters_to_vector(script.weights), script.weights)


def set_on_layers(name: str, value: Any = True) -> Callable[[IdiomScript], None]:
    return lambda script: [setattr(layer, name, value) for layer in script.model.layers] and None


def averaged_input(layer: Any, x: Tensor) -> Tensor:
    layer.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - layer.mean


def with_average(script: IdiomScript) -> None:
    for layer in script.model.layers:
        layer.register_buffer("mean", torch.zeros(WIDTH))
        layer.act = averaged_input


def counted(layer: Any, x: Tensor) -> Tensor:
    layer.calls = vars(layer).get("calls", 0) + 1
    return x * layer.calls


def with_noise(script: IdiomScript) -> None:
    generator = torch.Generator().manual_seed(1)
    for layer in script.model.layers:
        layer.act = lambda layer, x: x * torch.rand((), generator=generator)


def remembered(layer: Any, x: Tensor) -> Tensor:
    layer.last = x.detach().tanh()
    return x


def with_given(script: IdiomScript) -> None:
    factor = script.model.inp.weight.sum(1).exp()
    for layer in script.model.layers:
        layer.factor, layer.act = factor, lambda layer, x: x + layer.factor


def transposed(script: IdiomScript) -> None:
    for layer in script.model.layers:
        layer.map.weight.data = layer.map.weight.data.t().contiguous().t()


def turned(layer: Any, x: Tensor) -> Tensor:
    """The gradient of x lies in memory column by column."""
    return (1.1 * x).t().flatten().view(WIDTH, -1).t().contiguous()


def with_strides(script: IdiomScript) -> None:
    """Weights and gradients whose memory lies column by column. The script sees the strides of gradients."""
    transposed(script)
    for layer in script.model.layers:
        layer.act = turned
        layer.register_forward_hook(lambda module, args, results: seen_gradient(script, results[0]))


def seen_gradient(script: IdiomScript, x: Tensor) -> None:
    x.register_hook(lambda gradient: script.see(gradient, torch.tensor(gradient.stride())))


def with_new_layer(script: IdiomScript) -> None:
    script.model.layers.append(AuxiliaryLayer())


def halved_gradients(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if gradient is None else 0.5 * gradient for gradient in into)


def with_hooks(script: IdiomScript) -> None:
    for layer in script.model.layers:
        layer.register_full_backward_hook(halved_gradients)
        layer.map.register_full_backward_hook(halved_gradients)
        layer.norm.register_forward_hook(lambda module, args, result: 1.1 * result)


def kept_losses(script: IdiomScript) -> Tensor:
    return script.loss() + sum(layer.kept for layer in script.model.layers)


def with_notes(script: IdiomScript) -> None:
    script.model.notes = {}


IDIOMS = {
    "an auxiliary loss that layers return": Idiom(
        loss=lambda script: script.loss() + 0.1 * script.model.returned
    ),
    "an auxiliary loss that layers keep": Idiom(loss=kept_losses, before_trainer=set_on_layers("keeps")),
    "a penalty on weights, in the loss": Idiom(loss=lambda script: script.loss() + penalty(script)),
    "a penalty on weights, by a `backward()` of its own": Idiom(
        after_backward=lambda script: penalty(script).backward()
    ),
    "an average of weights, such as `AveragedModel`, made before the trainer": Idiom(
        averaged,
        before_trainer=prepare_average,
    ),
    "an average that is copied in for an evaluation": Idiom(swapped_average),
    "weights clamped, normalized or decayed after `step()`": Idiom(bounded),
    "views of weights kept from step to step": Idiom(through_views),
    "a submodule's `state_dict()`, `parameters_to_vector()`, a checkpoint by hand": Idiom(by_hand),
    "a submodule's `load_state_dict()`": Idiom(loaded),
    "`torch.autograd.grad()`, as in a gradient penalty": Idiom(loss=gradient_penalty),
    "`clip_grad_norm_()` left in": Idiom(
        after_backward=lambda script: nn.utils.clip_grad_norm_(script.weights, 0.01),
    ),
    "gradients changed: `clip_grad_value_()`, noise": Idiom(after_backward=noisy),
    "`GradScaler.unscale_()`": Idiom(after_backward=unscaled),
    "`zero_grad()` before the forward pass": Idiom(before=lambda script: script.optimizer.zero_grad()),
    "`zero_grad()` after `backward()`: a batch is dropped": Idiom(after_backward=dropped),
    "some gradients set to None": Idiom(after_backward=some_without),
    "two passes a step at other weights: SAM": Idiom(after_backward=sharpness_aware),
    "an evaluation between `backward()` and `step()`": Idiom(after_backward=evaluated),
    "gradients of several backward passes": Idiom(after_backward=summed),
    "two forward passes in one loss": Idiom(loss=lambda script: script.loss() + script.loss()),
    "a layer frozen later": Idiom(frozen),
    "a parameter outside of the layers frozen later": Idiom(frozen_outside),
    "layers frozen before the trainer is made, whole or in part": Idiom(before_trainer=half_frozen),
    "a frozen layer's weights changed after `step()`, as `merge_adapter()` does": Idiom(
        with_frozen_changed, before_trainer=half_frozen
    ),
    "a gradient hook on a layer's parameter": Idiom(before=hooked),
    "other rates or decays, by group": Idiom(by_group),
    "`maximize`": Idiom(maximized),
    "`add_param_group()`": Idiom(with_group),
    "a hook of the optimizer's `step()`": Idiom(before=clamped_by_hook),
    "`optimizer.state_dict()` and `load_state_dict()`": Idiom(restored),
    "`optimizer.state`, read or changed": Idiom(states_reset),
    "`layer.compile()`": Idiom(before=compiled),
    "hooks of modules, also ones that change gradients": Idiom(before_trainer=with_hooks),
    "a tensor without a gradient that a layer keeps, as its last attention": Idiom(
        lambda script: script.see(*(layer.last for layer in script.model.layers)),
        before_trainer=set_on_layers("act", remembered),
    ),
    "a layer's weight among its results": Idiom(
        loss=lambda script: script.loss() + script.model.returned.square().mean(),
        before_trainer=set_on_layers("lends"),
    ),
    "weights or gradients in another order of memory, as `channels_last`": Idiom(before_trainer=with_strides),
    "a buffer that a layer changes in `forward()`, as `spectral_norm` does": Idiom(
        before_trainer=with_average
    ),
    "a number or list that a layer changes in `forward()`": Idiom(
        before_trainer=set_on_layers("act", counted)
    ),
    "random numbers of Python, numpy or a `torch.Generator` in a layer": Idiom(
        before_trainer=set_on_layers("act", lambda layer, x: x * random.random())
    ),
    "random numbers of a `torch.Generator` in the closure of a layer's function": Idiom(
        before_trainer=with_noise
    ),
    "an argument that a layer changes in place": Idiom(
        before_trainer=set_on_layers("act", lambda layer, x: x.mul_(2))
    ),
    "a tensor with a gradient that a layer takes from an attribute": Idiom(before=with_given),
    "a parameter or layer added later": Idiom(with_new_layer),
    "weights changed in a layer's `forward()`": Idiom(before_trainer=set_on_layers("clamps")),
    "a dictionary or list among a layer's arguments changed in its `forward()`": Idiom(
        before_trainer=with_notes
    ),
    "`functional_call()` with other weights": Idiom(with_other_weights),
    "weights given other memory: `.data =`, `vector_to_parameters()`, `model.half()`": Idiom(replaced),
    "`copy.deepcopy(model)`, `torch.save(model)`": Idiom(lambda script: copy.deepcopy(script.model)),
}
