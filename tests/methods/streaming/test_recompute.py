"""A recompute without torch's checkpoint: its bits, its work, what it keeps, and its refusals."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from harness.core.job import Workload
from harness.core.method import create
from harness.models.gpt import Layer
from methods.streaming.recompute import run_recomputed
from tests.support.training import tiny

WORKLOAD = Workload(num_layers=1, hidden_size=32, num_heads=2, seq_len=8, batch_size=2, vocab_size=64)


def layer() -> tuple[Layer, Tensor, Tensor]:
    torch.manual_seed(5)
    return Layer(WORKLOAD), *torch.randn(2, 2, 8, 32)


def gradients(run) -> tuple[list[Tensor], int]:
    """All gradients of a layer's two passes, and the FLOPs of both."""
    module, x, dy = layer()
    x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        run(module, x).backward(dy)
    return [x.grad, *(parameter.grad for parameter in module.parameters())], counter.get_total_flops()


def by_us(module: nn.Module, x: Tensor) -> Tensor:
    return run_recomputed(module, [x], keeps_random=False)


def test_gradients_and_work_are_those_of_torchs_checkpoint() -> None:
    """So the recompute ends before its last product, too."""
    recomputed_gradients, flops = gradients(by_us)
    checkpoint_gradients, checkpoint_flops = gradients(
        lambda module, x: checkpoint(module, x, use_reentrant=False)
    )
    assert all(map(torch.equal, recomputed_gradients, checkpoint_gradients)) and flops == checkpoint_flops


def test_a_recompute_within_a_recompute_has_the_gradients_of_none() -> None:
    """As blocks of tokens are recomputed within a layer."""

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            halves = [checkpoint(self.inner, half, use_reentrant=False) for half in x.chunk(2)]
            return torch.cat(halves).tanh()

    nested, _ = gradients(lambda module, x: by_us(Nested(module), x))
    plain, _ = gradients(lambda module, x: torch.cat([module(half) for half in x.chunk(2)]).tanh())
    assert all(map(torch.equal, nested, plain))


@pytest.mark.parametrize("run", [by_us, lambda module, x: module(x)], ids=["recomputed", "plain"])
def test_between_both_passes_only_the_inputs_are_kept(run) -> None:
    module, x, _ = layer()
    seen = list[weakref.ref]()
    module.fc2.register_forward_pre_hook(lambda _, arguments: seen.append(weakref.ref(arguments[0])))
    y = run(module, x)
    assert (seen[0]() is None) is (run is by_us) and y.requires_grad


def test_random_numbers_of_the_forward_pass_come_again_where_they_are_kept() -> None:
    x = torch.ones(64, requires_grad=True)
    y = run_recomputed(nn.Sequential(nn.Dropout(0.5), nn.Tanh()), [x], keeps_random=True)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y.detach() != 0)


def test_inputs_that_require_no_gradient_are_recomputed_as_such() -> None:
    module, x, dy = layer()
    by_us(module, x).backward(dy)
    gradients = [parameter.grad for parameter in module.parameters()]
    again, x, dy = layer()
    again(x).backward(dy)
    assert x.grad is None and all(
        map(torch.equal, gradients, (parameter.grad for parameter in again.parameters()))
    )


@pytest.mark.parametrize("name", ["l2l", "stronghold"])
def test_the_fairness_table_names_who_recomputes(name: str) -> None:
    recomputes = {
        dropout: create(name, {}).describe(tiny(dropout=dropout), "cpu")["recompute"]
        for dropout in (0.0, 0.1)
    }
    assert recomputes == {0.0: "every layer, this project's code", 0.1: "every layer, torch checkpoint"}


def test_a_recompute_that_saves_other_tensors_is_refused() -> None:
    class Changing(nn.Module):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return (x[: 4 // self.num_calls] ** 2).sum()

    y = by_us(Changing(), torch.ones(4, requires_grad=True))
    with pytest.raises(RuntimeError, match="expected a recompute to save tensors of"):
        y.backward()


def test_a_recompute_that_fails_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            if self.fails:
                raise MemoryError
            return y.sin()

    module, x = Failing(), torch.ones(4, requires_grad=True)
    y = by_us(module, x)
    for module.fails in (True, False):
        if module.fails:
            with pytest.raises(MemoryError):
                y.sum().backward(retain_graph=True)
        else:
            y.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


def test_a_second_backward_pass_is_refused() -> None:
    module, x, dy = layer()
    y = by_us(module, x)
    y.backward(dy, retain_graph=True)
    with pytest.raises(RuntimeError, match="got a second backward pass"):
        y.backward(dy)
