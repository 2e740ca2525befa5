"""One rank's stage of a pipeline: the passes of single micro-batches.

A forward pass keeps only the stage's inputs and the random state. The recompute repeats the forward pass with the same
random numbers and keeps what the backward pass needs. The last stage runs its backward pass at once, without a
recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# A function that takes a micro-batch's number and the tensors from the stage below. The function returns the tensors
# for the stage above or, on the last stage, the loss.
Compute = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]


class Stage:
    """The passes of a stage. `compute`: the stage's forward pass; on the last stage this pass returns the loss, already
    weighted by the micro-batch's share of the batch. `needs_grad`: for each received tensor, whether it needs a
    gradient."""

    def __init__(
        self, compute: Compute, needs_grad: Sequence[bool], *, is_last: bool, device: str = "cpu"
    ) -> None:
        self.compute, self.needs_grad, self.is_last = compute, needs_grad, is_last
        self.device = torch.device(device)
        # inputs and random state of each micro-batch
        self.inputs_and_states: dict[int, tuple[Sequence[Tensor], list[Tensor]]] = {}
        # inputs and outputs for the backward pass
        self.tensors_for_backward: tuple[list[Tensor], Sequence[Tensor]] | None = None

    def forward(self, number: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the forward pass of micro-batch `number`. Return the tensors for the stage above; () on the last
        stage."""
        if self.is_last:
            self.tensors_for_backward = self._with_graph(number, inputs)
            return ()
        self.inputs_and_states[number] = inputs, self._random_state()
        with torch.no_grad():
            return self.compute(number, inputs)

    def recompute(self, number: int) -> None:
        inputs, state = self.inputs_and_states.pop(number)
        with self._random_state_of(state):
            self.tensors_for_backward = self._with_graph(number, inputs)

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward pass of the micro-batch that is ready. `grads`: gradients of the outputs that need one; not
        used on the last stage. Return the gradients of the inputs that need one (token ids do not)."""
        assert self.tensors_for_backward is not None
        (inputs, outputs), self.tensors_for_backward = self.tensors_for_backward, None
        if self.is_last:
            outputs[0].backward()
        else:
            trained_outputs = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(trained_outputs, list(grads))
        leaves = (tensor for tensor, needs in zip(inputs, self.needs_grad, strict=True) if needs)
        return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in leaves]

    def forget(self) -> None:
        """Drop all that is kept for backward passes. Call this after forward passes that no backward pass follows."""
        self.inputs_and_states, self.tensors_for_backward = {}, None

    def _with_graph(self, number: int, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        pairs = zip(inputs, self.needs_grad, strict=True)
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        return leaves, self.compute(number, leaves)

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else states

    @contextmanager
    def _random_state_of(self, states: list[Tensor]) -> Iterator[None]:
        """Within this context, draw random numbers from these states. Afterwards restore the states from before the
        context."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else [], device_type="cuda"):
            torch.set_rng_state(states[0])
            if len(states) > 1:
                torch.cuda.set_rng_state(states[1], self.device)
            yield


Spec = tuple[torch.Size, torch.dtype]


def spec_of(tensor: Tensor) -> Spec:
    return tensor.shape, tensor.dtype


def empty_tensor(spec: Spec) -> Any:
    return torch.empty(spec[0], dtype=spec[1])
