"""What scripts do with their models, as the page on several models lists it: exact, to the last bit, or refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from harness.base.checkout import ROOT
from methods.hydra import ModelOrchestrator, ModelTask
from methods.sharding.pure_layer import PureLayer

WIDTH = 6
ADAMW = functools.partial(torch.optim.AdamW, weight_decay=0.1)


def drawn(seed: int) -> list[tuple[Any, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, WIDTH, generator=generator), torch.tensor([0, 1, 2, 0])) for _ in range(3)]


BATCHES = drawn(1)
UNEVEN = [(x, torch.tensor([0, -100, -100, 2])) for x, _ in BATCHES]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class ActingLayer(nn.Module):
    """A linear layer, and what `act` does with the layer, its input and its result."""

    def __init__(self, act: Callable[[Any, Any, Tensor], Any] = lambda layer, x, y: y) -> None:
        super().__init__()
        self.linear, self.act, self.count = linear(), act, 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Any) -> Any:
        y = self.linear(x["x"] if isinstance(x, dict) else x)
        return self.act(self, x, y)


class Holder(nn.Module):
    """A model whose own forward pass does `act` with its layers and the input."""

    def __init__(self, act: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.layers, self.act = nn.ModuleList([linear(), linear(), linear()]), act
        self.register_buffer("scale", torch.full((), 2.0))

    def forward(self, x: Any) -> Tensor:
        return self.act(self, x)


class Pair(nn.Module):
    """Takes and returns two tensors, or a tuple of two."""

    def __init__(self, *, is_last: bool = False) -> None:
        super().__init__()
        self.linear, self.is_last = linear(), is_last

    def forward(self, x: Any) -> Any:
        x, kept = x if isinstance(x, tuple) else (x, x)
        y = torch.tanh(self.linear(x))
        return y + kept if self.is_last else (y, kept)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Spectrum(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x[:, None])[0][:, 0]


class Biased(nn.Module):
    """Attention with a learned bias of its scores, which takes another kernel where no gradient is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, 3 * WIDTH * 4), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).unflatten(1, (3, 1, WIDTH, 4)).unbind(1)
        return (
            F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias * 2)
            .flatten(1)
            .unflatten(1, (WIDTH, 4))
            .sum(2)
        )


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.linear = nn.Parameter(torch.ones(WIDTH)), linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.queries.expand(len(x), -1)


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def tied() -> nn.Module:
    first, last = linear(), linear()
    last.weight = first.weight
    return chain(first, nn.Tanh(), last, nn.Tanh(), first)


def frozen() -> nn.Module:
    model = chain(linear(), nn.Tanh(), linear())
    model[0].requires_grad_(False)
    return model


def fixed_norm() -> nn.Module:
    return chain(linear(), nn.BatchNorm1d(WIDTH).eval(), linear())


def hooked() -> nn.Module:
    model = chain(linear(), linear())
    model[0].register_forward_hook(lambda layer, x, y: 2 * y)
    model[1].register_full_backward_hook(
        lambda layer, dx, dy: tuple(None if grad is None else 3 * grad for grad in dx)
    )
    return model


def by_size(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() < 2]},
    ]
    return torch.optim.AdamW([{**group, "weight_decay": 0.1 * n} for n, group in enumerate(groups)], lr=lr)


def plain_layers(**_: Any) -> nn.Module:
    return chain(linear(), nn.Tanh(), linear())


# By the page's rows: how the model is made, and what its task is given beside.
EXACT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    'a criterion with `reduction="sum"`, weights of classes, smoothed labels, targets of -100': (
        plain_layers,
        {
            "criterion": nn.CrossEntropyLoss(torch.ones(3) / 3, reduction="sum", label_smoothing=0.1),
            "batches": UNEVEN,
        },
    ),
    "a weight in several layers, a layer twice in the list": (tied, {}),
    "frozen parameters": (frozen, {}),
    "a tuple of tensors from one layer to the next": (lambda: chain(Pair(), Pair(), Pair(is_last=True)), {}),
    "inputs in a dict, read by the first layer": (
        lambda: chain(ActingLayer(lambda layer, x, y: y), linear()),
        {"batches": [({"x": x}, y) for x, y in BATCHES]},
    ),
    "parametrizations without buffers, as `weight_norm`": (
        lambda: chain(parametrizations.weight_norm(linear())),
        {},
    ),
    "layers with `inplace=True`": (
        lambda: chain(linear(), nn.ReLU(inplace=True), linear(), nn.SiLU(inplace=True)),
        {},
    ),
    "running statistics in `eval()`": (fixed_norm, {}),
    "hooks of layers": (hooked, {}),
    "dropout, after `torch.manual_seed(task.seed)`": (lambda: chain(linear(), nn.Dropout(0.3), linear()), {}),
    "recurrent layers, transposed and complex tensors between layers": (
        lambda: chain(
            Recurrent(),
            Transposed(),
            Transposed(),
            Spectrum(torch.fft.rfft),
            Spectrum(functools.partial(torch.fft.irfft, n=WIDTH)),
        ),
        {},
    ),
    "a view of a parameter as a result": (
        lambda: chain(Queries(), Spectrum(lambda both: both[0] * both[1])),
        {"shards": [1, 1, 1]},
    ),
    "a learned bias of attention's scores": (lambda: chain(Biased(), Biased()), {}),
    "`schedule`, a function of the step": (plain_layers, {"schedule": lambda step: 0.1 / step}),
    "groups of the optimizer that follow from the parameters it is given": (
        plain_layers,
        {"optimizer": by_size},
    ),
    "an optimizer that reads its states in a step, as `Adafactor`": (
        plain_layers,
        {"optimizer": torch.optim.Adafactor},
    ),
}


def train(
    make: Callable[[], nn.Module], words: dict[str, Any], between: Callable[..., Any] | None = None
) -> ModelTask:
    torch.manual_seed(0)
    words = {"criterion": F.cross_entropy, "optimizer": ADAMW, "max_norm": 0.5, **words}
    batches = words.pop("batches", BATCHES)
    task = ModelTask("model", make(), dataloader=batches, lr=0.1, **words)
    orchestrator = ModelOrchestrator([task], ["cpu"])
    orchestrator.generate()
    if between:
        between(task.model)
    orchestrator.train_models()
    return task


def alone(
    make: Callable[[], nn.Module], words: dict[str, Any], between: Callable[..., Any] | None = None
) -> Any:
    torch.manual_seed(0)
    model = make()
    if between:
        between(model)
    criterion, losses = words.get("criterion", F.cross_entropy), []
    optimizer = words.get("optimizer", ADAMW)([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(0)
    for step, (inputs, targets) in enumerate(words.get("batches", BATCHES), start=1):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if "schedule" in words:
            for group in optimizer.param_groups:
                group["lr"] = words["schedule"](step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def difference(
    make: Callable[[], nn.Module], words: dict[str, Any], between: Callable[..., Any] | None = None
) -> str:
    task = train(make, words, between)
    losses, weights = alone(make, words, between)
    if task.failure or task.losses != losses:
        return task.failure or f"losses {task.losses} instead of {losses}"
    return ", ".join(
        name for name, value in task.model.state_dict().items() if not torch.equal(value, weights[name])
    )


@pytest.mark.parametrize("row", EXACT)
def test_what_the_page_calls_exact_has_the_bits_of_plain_training(row: str) -> None:
    assert difference(*EXACT[row]) == ""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(
        {key: 2 * v for key, v in model.state_dict().items()}
    ),
    "eval": lambda model: model.eval(),
    "requires_grad_": lambda model: model[0].requires_grad_(False),
    "a new weight": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.detach() * 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_script_changes_between_generate_and_train_models_counts(change: str) -> None:
    model = lambda: chain(linear(), nn.Dropout(0.3), linear())  # noqa: E731
    assert difference(model, {}, CHANGES[change]) == ""


def changed(act: Callable[[Any, Any, Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: chain(ActingLayer(act), linear())


def holder(act: Callable[[Any, Any], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Holder(act)


def in_order(model: Any, x: Tensor, act: Callable[[Tensor, Tensor], Tensor] = lambda x, y: y) -> Tensor:
    for layer in model.layers:
        x = act(x, layer(x))
    return x


@torch.no_grad()
def average(layer: Any, x: Any, y: Tensor) -> Tensor:
    layer.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return y


def counted(layer: Any, x: Any, y: Tensor) -> Tensor:
    layer.count += 1
    return y * layer.count


class Tally:
    count = 0


def counted_outside(layer: Any, x: Any, y: Tensor) -> Tensor:
    Tally.count += 1
    return y * Tally.count


def holding(held: Any, act: Callable[[Any, Any, Tensor], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = changed(act)()
        model[0].held = held
        return model

    return make


def next_count(counts: list[int]) -> int:
    counts[0] += 1
    return counts[0]


def auxiliary(layer: Any, x: Any, y: Tensor) -> Tensor:
    layer.loss = y.square().mean()
    return y


def shrunk(layer: Any, x: Any, y: Tensor) -> Tensor:
    layer.linear.weight.data.mul_(0.9)
    return y


def reading(*, is_hidden: bool) -> nn.Module:
    first, second = linear(), ActingLayer(lambda layer, x, y: y + F.linear(x, first.weight))
    if is_hidden:
        second.others = [first]
    return chain(first, second)


def sharing_memory() -> nn.Module:
    first, second = linear(), linear()
    second.weight = nn.Parameter(first.weight.data)
    return chain(first, second)


def transposed_weight() -> nn.Module:
    first = linear()
    first.weight = nn.Parameter(first.weight.data.t())
    return chain(first)


def clamping(given: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(given, lr)
    optimizer.register_step_post_hook(lambda *_: [each.data.clamp_(-0.1, 0.1) for each in given] and None)
    return optimizer


def one_channel() -> nn.Module:
    return chain(nn.Conv2d(1, WIDTH, 3)).to(memory_format=torch.channels_last)


def hooked_weight() -> nn.Module:
    model = chain(linear())
    model[0].weight.register_hook(lambda grad: 2 * grad)
    return model


def hooked_model() -> nn.Module:
    model = chain(linear())
    model.register_forward_hook(lambda module, x, y: 2 * y)
    return model


LEAVES: list[Tensor] = [torch.ones(3, requires_grad=True)]


def decayed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets) + LEAVES[0].square().sum()


class SharedRate(torch.optim.SGD):
    """Keeps a number for all of its parameters together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] *= 0.5


class Opaque(int):
    """An input that no layer takes."""

    def mean(self) -> int:
        raise RuntimeError("this input fails by design")


OPAQUE = Opaque(1)
CHANGED = (
    "expected a forward pass that changes nothing, as it runs twice and on a copy, got one that changes "
)
NO_CHAIN = (
    "expected a forward pass that calls the layers in order, each on the result of the one before,"
    " but that of Holder "
)
# By the page's rows: models or arguments, and the words of the refusal.
REFUSED: dict[str, list[tuple[Callable[[], nn.Module], dict[str, Any], str]]] = {
    "a forward pass of the model's own that is not the chain of its layers": [
        (
            holder(lambda model, x: in_order(model, x, lambda x, y: F.relu(y))),
            {},
            NO_CHAIN + "computes before layer 1",
        ),
        (
            holder(lambda model, x: in_order(model, x, lambda x, y: y.relu_())),
            {},
            NO_CHAIN + "computes in place before",
        ),
        (
            holder(lambda model, x: in_order(model, x, lambda x, y: x + y)),
            {},
            NO_CHAIN + "computes before layer 1",
        ),
        (holder(lambda model, x: in_order(model, x) * model.scale), {}, NO_CHAIN + "computes after layer 2"),
        (holder(lambda model, x: model.layers[1](model.layers[0](x))), {}, NO_CHAIN + "calls 2 of 3 layers"),
        (
            holder(lambda model, x: in_order(model, model.layers[0](x))),
            {},
            NO_CHAIN + "calls a Linear where layer 1",
        ),
        (
            holder(lambda model, x: in_order(model, x if random.random() < 2 else -x)),
            {},
            "draws random numbers before",
        ),
        (
            holder(lambda model, x: in_order(model, F.dropout(x, 0.5))),
            {},
            NO_CHAIN + "computes before layer 0",
        ),
        (
            holder(lambda model, x: in_order(model, x) if x.mean() < 9 else -x),
            {"batches": [(OPAQUE, 1)]},
            "cannot be",
        ),
    ],
    "a layer that changes a buffer, a parameter, an attribute of its own or its input": [
        (changed(average), {}, CHANGED + "buffer mean"),
        (
            changed(lambda layer, x, y: F.batch_norm(y, layer.mean, layer.mean, training=True)),
            {},
            CHANGED + "buffer mean",
        ),
        (changed(shrunk), {}, CHANGED + "parameter linear.weight"),
        (changed(counted), {}, CHANGED + "attribute count"),
        (changed(auxiliary), {}, CHANGED + "attribute loss"),
        (
            holding([torch.ones(WIDTH)], lambda layer, x, y: y * layer.held[0].mul_(0.9)),
            {},
            CHANGED + "attribute held",
        ),
        (holding([[0]], lambda layer, x, y: y * next_count(layer.held[0])), {}, CHANGED + "attribute held"),
        (changed(lambda layer, x, y: y + x.add_(1)), {}, "got one that changes its input"),
        (
            lambda: chain(parametrizations.spectral_norm(linear())),
            {},
            CHANGED + "buffer parametrizations.weight.0._u",
        ),
    ],
    "running statistics in training": [
        (lambda: chain(nn.BatchNorm1d(WIDTH)), {}, "keeps running statistics")
    ],
    "random numbers of Python, numpy or a `torch.Generator` in a layer": [
        (
            changed(lambda layer, x, y: y * random.random()),
            {},
            CHANGED + "the state of Python's or numpy's random",
        ),
        (
            holding(random.Random(0), lambda layer, x, y: y * layer.held.random()),
            {},
            CHANGED + "the state of a generator of random numbers",
        ),
    ],
    "a layer that counts in its class, in globals or in objects other than modules": [
        (
            changed(counted_outside),
            {},
            "expected the same result from each pass on the same input, got another",
        ),
    ],
    "a criterion that reads parameters, or changes a buffer of its own": [
        (
            plain_layers,
            {"criterion": decayed},
            "got one that computes with a parameter, whose gradient would be lost",
        ),
    ],
    "a parameter that gets no gradient in a batch": [
        (
            changed(lambda layer, x, y: x.tanh()),
            {},
            "got none for 0.linear.weight, 0.linear.bias; try requires_grad_",
        ),
        (
            lambda: chain(linear(), Spectrum(Tensor.detach)),
            {},
            "got none for 0.weight, 0.bias; try requires_grad_",
        ),
    ],
    "a layer that reads the weight of another": [
        (lambda: reading(is_hidden=True), {}, "holds a parameter that it does not register"),
        (lambda: reading(is_hidden=False), {}, "computes with a parameter that is not one of its own"),
    ],
    "hooks of a parameter, or of the whole model": [
        (hooked_weight, {}, "parameter 0.weight has a hook, which would not be called"),
        (hooked_model, {}, "Sequential has a hook, but only its layers are called"),
    ],
    "parameters that share memory, that are not contiguous, or with sparse gradients": [
        (sharing_memory, {}, "0.weight and 1.weight share memory but are not one parameter"),
        (transposed_weight, {}, "expected contiguous parameters with a shape, got 0.weight"),
        (one_channel, {}, "expected contiguous parameters with a shape, got 0.weight"),
        (lambda: chain(nn.Embedding(3, WIDTH, sparse=True)), {}, "Embedding makes sparse gradients"),
    ],
    "layers of TorchScript": [
        (
            lambda: chain(torch.jit.trace(linear(), torch.zeros(1, WIDTH))),
            {},
            "expected layers of Python, got layer 0",
        ),
    ],
    "a dict or a list from one layer to the next": [
        (
            changed(lambda layer, x, y: {"y": y}),
            {},
            r"layer 0 \(ActingLayer\) returns a dict; expected a tensor, or a tuple",
        ),
    ],
    "an optimizer of other parameters, with one number for all of them, with a closure or with hooks": [
        (
            plain_layers,
            {"optimizer": lambda given, lr: torch.optim.SGD(linear().parameters(), lr)},
            "got other parameters",
        ),
        (plain_layers, {"optimizer": SharedRate}, "SharedRate: expected states of single parameters"),
        (
            plain_layers,
            {"optimizer": torch.optim.LBFGS},
            "LBFGS: expected an optimizer whose step.. takes no arguments .*; try another, such as",
        ),
        (plain_layers, {"optimizer": clamping}, "SGD: expected an optimizer without hooks of its step"),
    ],
    "`schedule` with groups of several learning rates": [
        (
            plain_layers,
            {
                "optimizer": lambda given, lr: torch.optim.SGD([{"params": p, "lr": p.dim()} for p in given]),
                "schedule": lambda step: 0.1,
            },
            "expected one learning rate for all groups of the optimizer",
        ),
    ],
    "batches that are not pairs": [
        (plain_layers, {"batches": [{"x": 1, "y": 2}]}, "pairs of inputs and targets, got a dict")
    ],
    "`partitioner=`, the original's argument": [
        (plain_layers, {"partitioner": 1}, r"partitioner: expected shards=\[2, 4\]")
    ],
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_the_page_calls_refused_is_one_line(row: str) -> None:
    for make, words, text in REFUSED[row]:
        with pytest.raises(ValueError, match=text):
            task = train(make, words)
            raise ValueError(task.failure.strip().splitlines()[-1])


def test_autocast_around_the_training_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="outside of autocast, got it within"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        train(plain_layers, {})


def test_the_page_lists_these_rows() -> None:
    text = (ROOT / "docs" / "several-models.md").read_text()
    rows = dict(
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.endswith((" exact |", " refused |"))
    )
    assert rows == dict.fromkeys(EXACT, "exact") | dict.fromkeys(REFUSED, "refused")


def test_a_result_from_before_an_update_is_not_compared_with_a_recompute_after_it() -> None:
    """Of one step, a process may compute the forward pass and another the recompute."""
    layer, x = PureLayer("layer 0", nn.Linear(2, 2)), torch.ones(1, 2)
    with torch.no_grad():
        layer(x)
        layer.layer.weight.add_(1.0)
    assert torch.equal(layer(x), layer.layer(x))
