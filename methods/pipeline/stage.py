"""One rank's stage of a pipeline: the passes of single micro-batches.

Of a forward pass only the stage's inputs are kept, and the state of the random numbers; the recompute makes what the
backward pass needs, with the same random numbers. The last stage goes back at once, without a recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# From a micro-batch's number and what the stage below sent, what goes to the stage above; of the last stage, the loss.
Compute = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]


class Stage:
    """`compute` of the last stage returns a loss whose gradient is weighted; `needs_grad` of each tensor received."""

    def __init__(self, compute: Compute, needs_grad: Sequence[bool], *, is_last: bool, device: str = "cpu") -> None:
        self.compute, self.needs_grad, self.is_last = compute, needs_grad, is_last
        self.device = torch.device(device)
        self.kept: dict[int, tuple[Sequence[Tensor], list[Tensor]]] = {}  # inputs and random state
        self.ready: tuple[list[Tensor], Sequence[Tensor]] | None = None  # for the backward pass: inputs and outputs
        self.losses: list[Tensor] = []  # of the last stage, one for each micro-batch

    def forward(self, number: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What to send up; nothing from the last stage."""
        if self.is_last:
            self.ready = self._with_graph(number, inputs)
            self.losses.append(self.ready[1][0].detach())
            return ()
        self.kept[number] = inputs, self._random_state()
        with torch.no_grad():
            return self.compute(number, inputs)

    def recompute(self, number: int) -> None:
        inputs, state = self.kept.pop(number)
        with self._random_state_of(state):
            self.ready = self._with_graph(number, inputs)

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """From the gradients of the outputs that need one, those of the inputs that do; none for a loss."""
        assert self.ready is not None
        (inputs, outputs), self.ready = self.ready, None
        if self.is_last:
            outputs[0].backward()
        else:
            wanted = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(wanted, list(grads))
        found = (tensor for tensor, needed in zip(inputs, self.needs_grad, strict=True) if needed)
        return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in found]

    def forget(self) -> None:
        """No backward pass follows."""
        self.kept, self.ready = {}, None

    def _with_graph(self, number: int, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        pairs = zip(inputs, self.needs_grad, strict=True)
        leaves = [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]
        return leaves, self.compute(number, leaves)

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else states

    @contextmanager
    def _random_state_of(self, states: list[Tensor]) -> Iterator[None]:
        """The random numbers of that moment; afterwards they go on where they were."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else [], device_type="cuda"):
            torch.set_rng_state(states[0])
            if len(states) > 1:
                torch.cuda.set_rng_state(states[1], self.device)
            yield


Spec = tuple[torch.Size, torch.dtype]


def spec_of(tensor: Tensor) -> Spec:
    return tensor.shape, tensor.dtype


def empty(spec: Spec) -> Any:
    return torch.empty(spec[0], dtype=spec[1])
