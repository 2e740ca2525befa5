"""What scripts do with their models, as the page on pipelines lists it: as in one process, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from harness.base.checkout import ROOT
from methods.varuna import CutPoint, Varuna

WIDTH, SIZE, CHUNK = 6, 5, 3  # the last micro-batch is smaller
Act = Callable[..., Any]


class Model(nn.Module):
    """Two blocks with a CutPoint between, a head, and the loss that `act` computes from the head's result."""

    def __init__(self, act: Act, block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.blocks, self.cutpoint, self.act = nn.ModuleList([block(), block()]), CutPoint(), act
        self.head, self.unused = nn.Linear(WIDTH, 3), nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, per_sample: Tensor | None = None, scale: float = 1.0) -> Any:
        output = self.head(self.blocks[1](self.cutpoint(self.blocks[0](x)))) * scale
        return self.act(self, output, y) if per_sample is None else self.act(self, output, y, per_sample)


class Block(nn.Module):
    """A linear layer, and what `act` does with it and its result. Not traced."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act, self.calls = nn.Linear(WIDTH, WIDTH), act, 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x))


def batch(size: int, device: Any = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, WIDTH, generator=generator), "y": torch.arange(size) % 3}


def uneven(size: int, device: Any = None) -> dict[str, Any]:
    inputs = batch(size)
    return {**inputs, "y": inputs["y"].masked_fill(torch.arange(size) % 3 == 1, -100)}


def counted(size: int, device: Any = None) -> dict[str, Any]:
    inputs = uneven(size)
    return {**inputs, "per_sample": (inputs["y"] != -100).float().mean().reshape(1)}


def mean(model: Any, output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y)


def in_blocks(act: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Model(mean, lambda: Block(act))


def with_act(act: Act) -> Callable[[], nn.Module]:
    return lambda: Model(act)


def frozen() -> nn.Module:
    model = Model(mean)
    model.blocks[1].requires_grad_(False)
    return model


def hooked() -> nn.Module:
    model = Model(mean)
    model.blocks[0].register_forward_hook(lambda module, x, y: 2 * y)
    return model


# By the page's rows: how the model and its batch are made.
EXACT: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "a mean over the samples, smoothed labels, a smaller last micro-batch": (
        with_act(lambda model, output, y: F.cross_entropy(output, y, label_smoothing=0.1)),
        batch,
    ),
    'targets of -100, by `reduction="sum"` over samples and the batch\'s targets a sample': (
        with_act(
            lambda model, output, y, per_sample: (
                F.cross_entropy(output, y, reduction="sum") / output.shape[0] / per_sample[0]
            )
        ),
        counted,
    ),
    "a penalty on parameters named as attributes, in `shared_weights` if of another stage": (
        with_act(lambda model, output, y: F.cross_entropy(output, y) + model.blocks[0].weight.square().sum()),
        batch,
    ),
    "frozen and unused parameters": (frozen, batch),
    "the loss first in a tuple": (
        with_act(lambda model, output, y: (F.cross_entropy(output, y), output)),
        batch,
    ),
    "parametrizations without buffers": (
        lambda: Model(mean, lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        batch,
    ),
    "hooks of modules without CutPoints": (hooked, batch),
}


def seeded_model(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def pipeline(make: Callable[[], nn.Module], batch_of: Callable[..., Any] = batch, **options: Any) -> Varuna:
    model = Varuna(seeded_model(make), "0;", batch_of, SIZE, CHUNK, device="cpu", **options)
    model.set_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    return model


@pytest.mark.parametrize("row", EXACT)
def test_what_the_page_calls_exact_is_the_training_of_one_process(row: str) -> None:
    make, batch_of = EXACT[row]
    model, plain, inputs = pipeline(make, batch_of), seeded_model(make), batch_of(SIZE)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        mean_loss, _ = model.step(inputs, clip_grad_max_norm=0.5)
        model.optimizer.step()
        optimizer.zero_grad()
        loss = plain(**inputs)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert mean_loss == pytest.approx(loss.item(), rel=1e-5)
    weights = dict(plain.named_parameters())
    assert all(torch.allclose(weight, weights[name], atol=1e-5) for name, weight in model.named_parameters())


@torch.no_grad()
def averaged(block: Any, y: Tensor) -> Tensor:
    block.mean.mul_(0.9).add_(y.mean(0))
    return y


def called(block: Any, y: Tensor) -> Tensor:
    block.calls += 1
    return y * block.calls


def auxiliary(block: Any, y: Tensor) -> Tensor:
    block.loss = y.square().mean()
    return y


def centered(block: Any, y: Tensor) -> Tensor:
    return y - y.mean(0)


def hooked_parameter() -> nn.Module:
    model = Model(mean)
    model.head.weight.register_hook(lambda grad: 2 * grad)
    return model


def hooked_holder() -> nn.Module:
    model = Model(mean)
    model.register_forward_hook(lambda module, x, y: 2 * y)
    return model


def partly_in_eval() -> nn.Module:
    model = Model(mean, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)))
    model.blocks[0].eval()
    return model


class AddsToInput(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


CHANGED = (
    "expected a forward pass that changes nothing, as it runs again for each micro-batch"
    " and recompute; .* changes "
)
NO_MEAN = "expected a loss that is the mean over samples, each by itself"
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
NO_PROBE = "stage 0: expected a forward pass that can run without memory"
# By the page's rows: models, their batches, and the words of the refusal.
REFUSED: dict[str, list[tuple[Callable[[], nn.Module], Callable[..., Any], str]]] = {
    "means of `cross_entropy` over unlike numbers of targets, by -100 or by weights of classes": [
        (
            with_act(mean),
            uneven,
            "expected as many targets in each micro-batch's mean, got 0.5 to 0.666667 a sample",
        ),
        (
            with_act(lambda model, output, y: F.cross_entropy(output, y, WEIGHTS)),
            batch,
            "expected as many targets",
        ),
    ],
    "a loss that is no mean over samples, each by itself": [
        (with_act(lambda model, output, y: F.cross_entropy(output, y, reduction="sum")), batch, NO_MEAN),
        (with_act(lambda model, output, y: output.square().mean().sqrt()), batch, NO_MEAN),
        (with_act(lambda model, output, y: (output @ output.T).logsumexp(1).mean()), batch, NO_MEAN),
        (in_blocks(centered), batch, NO_MEAN),
    ],
    "running statistics, and buffers, attributes or inputs that a pass changes": [
        (
            lambda: Model(mean, lambda: nn.BatchNorm1d(WIDTH)),
            batch,
            CHANGED + "buffer blocks.0.num_batches_tracked",
        ),
        (in_blocks(averaged), batch, CHANGED + "buffer blocks.0.mean"),
        (in_blocks(called), batch, CHANGED + "attribute blocks.0.calls"),
        (in_blocks(auxiliary), batch, CHANGED + "attribute blocks.0.loss"),
        (
            in_blocks(lambda block, y: F.batch_norm(y, block.mean, block.mean, training=True)),
            batch,
            CHANGED + "buffer",
        ),
        (lambda: Model(mean, AddsToInput), batch, CHANGED + "its input"),
    ],
    "tensors of a module that are no buffers, and shapes that follow from values": [
        (in_blocks(lambda block, y: y * torch.ones(WIDTH)), batch, NO_PROBE),
        (in_blocks(lambda block, y: y * float(y.max() > 0)), batch, NO_PROBE),
    ],
    "parameters that the modules with CutPoints read by `parameters()`": [
        (
            with_act(
                lambda model, output, y: mean(model, output, y) + sum(p.sum() for p in model.parameters())
            ),
            batch,
            "computes with parameter blocks.0.weight outside of its module, when it is traced",
        ),
    ],
    "random numbers, or changes of buffers, in the modules with CutPoints": [
        (
            with_act(lambda model, output, y: mean(model, output * torch.rand(1), y)),
            batch,
            "change the random state",
        ),
        (
            with_act(lambda model, output, y: mean(model, output * random.random(), y)),
            batch,
            "change the random state",
        ),
        (
            with_act(lambda model, output, y: mean(model, output * model.count.add_(1), y)),
            batch,
            "change buffer count",
        ),
    ],
    "hooks of parameters, or of modules with CutPoints": [
        (
            hooked_parameter,
            batch,
            "parameter head.weight has a hook, which would be called for each micro-batch",
        ),
        (hooked_holder, batch, "module Model has a hook, but holds CutPoints"),
    ],
    "a model, or a module of it, in `eval()`": [
        (
            partly_in_eval,
            batch,
            r"expected a model in train\(\) mode, which a stage would return to, got blocks.0",
        ),
    ],
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_the_page_calls_refused_is_one_line(row: str) -> None:
    for make, batch_of, text in REFUSED[row]:
        with pytest.raises(ValueError, match=text) as error:
            pipeline(make, batch_of).step(batch_of(SIZE))
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def model() -> Varuna:
    """A model after a step, in bf16, whose weights are rounded masters."""
    model = pipeline(lambda: Model(mean), lambda size, device=None: {**batch(size), "scale": 1.0}, bf16=True)
    model.step({**batch(SIZE), "scale": 1.0})
    return model


AFTERWARDS: dict[str, tuple[Callable[[Varuna], Any], str]] = {
    "values other than tensors that change from batch to batch, and items that the first batch lacked": (
        lambda model: model.step({**batch(SIZE), "scale": 2.0}),
        "step: expected scale to stay as in the first batch, 1.0, got 2.0; try a tensor",
    ),
    "gradients that change between `step()` and `optimizer.step()`": (
        lambda model: [
            nn.utils.clip_grad_norm_(model.optimizer.param_groups[0]["params"], 1e-3),
            model.optimizer.step(),
        ],
        r"expected the gradients that step\(\) left, of one stage of the model, got changed ones",
    ),
    "weights in fp16 or bf16 that change between steps, but by `load_state_dict()`": (
        lambda model: [
            model.part.head.weight.data.clamp_(0),
            model.part.head.weight.detach().clamp_(0),
            model.step({**batch(SIZE), "scale": 1.0}),
        ],
        "step: expected weights as the last update left them, got changed ones",
    ),
}


@pytest.mark.parametrize("row", AFTERWARDS)
def test_what_the_page_calls_refused_between_steps_is_one_line(row: str, model: Varuna) -> None:
    act, text = AFTERWARDS[row]
    with pytest.raises(ValueError, match=text):
        act(model)


def test_the_page_lists_these_rows() -> None:
    text = (ROOT / "docs" / "pipelines.md").read_text()
    lines = [line for line in text.splitlines() if line.endswith((" exact |", " refused |"))]
    rows = dict(line.strip("| ").split(" | ") for line in lines)
    assert rows == dict.fromkeys(EXACT, "exact") | dict.fromkeys([*REFUSED, *AFTERWARDS], "refused")
