"""Optimizers whose states travel, on a GPU: where the states lie when torch steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from methods.sharding.optimizer import step
from tests.support.fake_cuda import FakeCuda


class Watched(torch.optim.AdamW):
    """Notes the device of each state at each step."""

    seen: list[dict[str, str]]

    def step(self, closure: Any = None) -> Any:
        self.seen += [
            {key: value.device.type for key, value in state.items()} for state in self.state.values()
        ]
        return super().step(closure)


def trained(device: str, num_steps: int, **words: Any) -> tuple[list[torch.Tensor], list[dict[str, str]]]:
    """Weights and states after some steps of two parameters with states in a slot, and what was seen."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(size, generator=generator) for size in ((3, 4), (5,)) for _ in range(1 + num_steps)]
    weights = [drawn[0], drawn[1 + num_steps]]
    parameters = [nn.Parameter(weight.clone().to(device)) for weight in weights]
    states = [
        {
            "step": torch.zeros((), device=device),
            **{key: torch.zeros(p.shape, device=device) for key in MOMENTS},
        }
        for p in parameters
    ]
    optimizer = Watched(parameters, **words)
    optimizer.seen = []
    for number in range(num_steps):
        for place, parameter in enumerate(parameters):
            parameter.grad = drawn[place * (1 + num_steps) + 1 + number].to(device)
        step(optimizer, parameters, states, is_first=number == 0)
    ended = [parameter.detach() for parameter in parameters] + [
        each for state in states for each in state.values()
    ]
    return [each.cpu().clone() for each in ended], optimizer.seen


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("words", "there"), [({}, "cpu"), ({"foreach": False}, "cpu"), ({"fused": True}, "cuda")]
)
def test_torch_reads_no_number_from_a_gpu_when_it_steps(
    words: dict[str, Any], there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count of steps is where torch would make it; bits and states in the slot are those of a CPU."""
    cuda = FakeCuda(1).install(monkeypatch)
    with cuda.running():
        ended, seen = trained("cuda", 3, **words)
    assert seen == 4 * [{"step": there, **dict.fromkeys(MOMENTS, "cuda")}]
    assert list(cuda.broken) == []
    expected, _ = trained("cpu", 3, **words)
    assert all(torch.equal(*pair) for pair in zip(ended, expected, strict=True)) and float(ended[2]) == 3
