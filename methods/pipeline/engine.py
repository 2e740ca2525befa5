"""Runs a step of one stage in Varuna: the stage's passes in a fixed order, unless a gradient is late.

A forward pass keeps only the stage's inputs and the random state. The recompute repeats the forward pass with the same
random numbers and keeps what the backward pass needs. The last stage runs its backward pass at once, without a
recompute.

If the gradient for a recompute has not arrived, the next forward pass, if there is one, runs before the recompute. This
order keeps stages busy on a slow network. The result does not change: forward passes still run in the order of
micro-batches, and backward passes do, too. Source: Athlur et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from methods.pipeline.schedule import Pass, orders
from methods.pipeline.transport import Transport

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

    def forward(self, micro_batch: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the forward pass of micro-batch `micro_batch`. Return the tensors for the stage above; () on the last
        stage."""
        if self.is_last:
            self.tensors_for_backward = self._with_graph(micro_batch, inputs)
            return ()
        self.inputs_and_states[micro_batch] = inputs, self._random_state()
        with torch.no_grad():
            return self.compute(micro_batch, inputs)

    def recompute(self, micro_batch: int) -> None:
        inputs, random_states = self.inputs_and_states.pop(micro_batch)
        with self._random_state_of(random_states):
            self.tensors_for_backward = self._with_graph(micro_batch, inputs)

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

    def _with_graph(
        self, micro_batch: int, inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        pairs = zip(inputs, self.needs_grad, strict=True)
        leaves = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        return leaves, self.compute(micro_batch, leaves)

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


# A function that takes the kind of a pass or message and the number of its micro-batch, and returns a context in which
# the pass runs or the message is handled.
Note = Callable[[str, int], AbstractContextManager[None]]


def unnoted(work: str, micro_batch: int) -> AbstractContextManager[None]:
    return nullcontext()


class Engine:
    """Runs the passes and messages of one stage. `order`: the stage's passes in order. `is_opportunistic`: True: a
    forward pass may run before a recompute whose gradient is late."""

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        order: Sequence[Pass],
        *,
        is_opportunistic: bool = True,
        note: Note = unnoted,
    ) -> None:
        self.stage, self.transport, self.order, self.note = stage, transport, order, note
        self.is_opportunistic = is_opportunistic

    @property
    def waited_seconds(self) -> float:
        """Return the seconds in which this stage could do nothing but wait for a neighbor."""
        return self.transport.waited_seconds

    def close(self) -> None:
        self.transport.close()

    def step(self) -> None:
        """Run all passes of a step. Afterwards the stage's parameters have gradients summed over the micro-batches."""
        self.transport.expect()
        remaining_passes = [
            step_pass for step_pass in self.order if not (step_pass.kind == "R" and self.stage.is_last)
        ]
        while remaining_passes:
            next_pass = remaining_passes[0]
            if next_pass.kind == "R" and self._forward_goes_first():
                forward_passes = (later for later in remaining_passes if later.kind == "F")
                next_pass = next(forward_passes, next_pass)
            remaining_passes.remove(next_pass)
            if next_pass.kind == "F":
                self._forward(next_pass.micro_batch)
            elif next_pass.kind == "R":
                self._recompute(next_pass.micro_batch)
            else:
                self._backward(next_pass.micro_batch)
        self.transport.finish()

    def evaluate(self) -> None:
        """Run the forward passes of a step without backward passes."""
        self.transport.expect(expects_gradients=False)
        for next_pass in self.order:
            if next_pass.kind == "F":
                self._forward(next_pass.micro_batch)
        self.stage.forget()
        self.transport.finish()

    def _forward_goes_first(self) -> bool:
        """Return whether the next forward pass should run before the next recompute, because the input of the forward
        pass has arrived, but the gradient for the recompute has not."""
        gradient_inbox, activation_inbox = self.transport.gradients_in, self.transport.activations_in
        if not self.is_opportunistic or gradient_inbox is None or gradient_inbox.has_arrived():
            return False
        return activation_inbox is None or activation_inbox.has_arrived()

    def _forward(self, micro_batch: int) -> None:
        inbox, outbox = self.transport.activations_in, self.transport.activations_out
        with self.note("wait for activation", micro_batch):
            inputs: Sequence[Tensor] = inbox.take() if inbox else ()
        with self.note("forward", micro_batch):
            outputs = self.stage.forward(micro_batch, self._on_device(inputs))
        if outbox:
            with self.note("send activation", micro_batch):
                outbox.send(micro_batch, outputs)

    def _recompute(self, micro_batch: int) -> None:
        with self.note("recompute", micro_batch):
            self.stage.recompute(micro_batch)

    def _backward(self, micro_batch: int) -> None:
        inbox, outbox = self.transport.gradients_in, self.transport.gradients_out
        with self.note("wait for gradient", micro_batch):
            grads: Sequence[Tensor] = inbox.take() if inbox else ()
        with self.note("backward", micro_batch):
            input_grads = self.stage.backward(self._on_device(grads))
        if outbox:
            with self.note("send gradient", micro_batch):
                outbox.send(micro_batch, input_grads)

    def _on_device(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.to(self.stage.device) for tensor in tensors]


def order_of(num_stages: int, stage: int, num_micro_batches: int) -> Sequence[Pass]:
    return orders("varuna", num_stages, num_micro_batches)[stage]
