"""Where a device had no model, the longest one trains on halves of its batches: two chains that join at the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from methods.hydra import ModelOrchestrator
from tests.methods.sharding.test_orchestrator import ADAMW, MODELS, difference, failing_loss, made, tasks


@pytest.mark.parametrize("intermediates", ["checkpointed", "saved"])
@pytest.mark.parametrize("name", ["perceptron", "tied"])
def test_fewer_models_than_devices_train_the_longest_on_halves_of_its_batches(
    name: str, intermediates: str
) -> None:
    """To the bits of two micro-batches whose losses are halved, the second one with random numbers of its own."""
    other, task = tasks(("single", name))
    ModelOrchestrator([other, task], ["cpu"] * 3, intermediates=intermediates, hybrid=True).train_models()
    assert difference(other, 0) == "" and task.failure == ""
    _, criterion, batches, words = MODELS[name]
    model = made(name)
    optimizer, losses = ADAMW(model.parameters(), lr=0.05), []
    random = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    for inputs, targets in batches * words["epochs"]:
        optimizer.zero_grad()
        total, grads = torch.zeros(()), []
        for half, part in enumerate(zip(inputs.chunk(2), targets.chunk(2), strict=True)):
            torch.set_rng_state(random[half])
            loss = criterion(model(part[0]), part[1]) / 2
            random[half] = torch.get_rng_state()
            grads.append(torch.autograd.grad(loss, list(model.parameters())))
            total += loss.detach()
        for parameter, first, second in zip(model.parameters(), *grads, strict=True):
            parameter.grad = first + second
        nn.utils.clip_grad_norm_(model.parameters(), words["max_norm"])
        optimizer.step()
        losses.append(total.item())
    assert task.losses == losses
    assert all(map(torch.equal, task.model.parameters(), model.parameters()))


def test_without_it_a_device_stays_idle_and_the_model_trains_as_if_alone() -> None:
    (task,) = tasks(("perceptron",))
    ModelOrchestrator([task], ["cpu", "cpu"]).train_models()
    assert difference(task, 0) == ""


def test_a_half_that_fails_ends_its_model_and_no_other() -> None:
    other, task = tasks(("single", "perceptron"))
    task.criterion = failing_loss
    report = ModelOrchestrator([other, task], ["cpu"] * 3, hybrid=True).train_models()
    assert list(report.failures) == ["perceptron"] and "fails by design" in task.failure
    assert difference(other, 0) == ""
