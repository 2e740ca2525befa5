"""Runs a step of one stage in Varuna: the stage's passes in a fixed order, unless a gradient is late.

If the gradient for a recompute has not arrived, the next forward pass, if there is one, runs before the recompute. This
order keeps stages busy on a slow network. The result does not change: forward passes still run in the order of
micro-batches, and backward passes do, too. Source: Athlur et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from methods.pipeline.schedule import Pass, orders
from methods.pipeline.stage import Stage
from methods.pipeline.transport import Transport

# A function that takes the kind of a pass or message and the number of its micro-batch, and returns a context in which
# the pass runs or the message is handled.
Note = Callable[[str, int], AbstractContextManager[None]]


def unnoted(work: str, number: int) -> AbstractContextManager[None]:
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
            if next_pass.kind == "R" and self._goes_first():
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
        self.transport.expect(gradients=False)
        for next_pass in self.order:
            if next_pass.kind == "F":
                self._forward(next_pass.micro_batch)
        self.stage.forget()
        self.transport.finish()

    def _goes_first(self) -> bool:
        """Return whether the next forward pass should run before the next recompute, because the input of the forward
        pass has arrived, but the gradient for the recompute has not."""
        above, below = self.transport.gradients_in, self.transport.activations_in
        if not self.is_opportunistic or above is None or above.has_arrived():
            return False
        return below is None or below.has_arrived()

    def _forward(self, number: int) -> None:
        below, above = self.transport.activations_in, self.transport.activations_out
        with self.note("wait for activation", number):
            inputs: Sequence[Tensor] = below.take() if below else ()
        with self.note("forward", number):
            outputs = self.stage.forward(number, self._on_device(inputs))
        if above:
            with self.note("send activation", number):
                above.send(number, outputs)

    def _recompute(self, number: int) -> None:
        with self.note("recompute", number):
            self.stage.recompute(number)

    def _backward(self, number: int) -> None:
        above, below = self.transport.gradients_in, self.transport.gradients_out
        with self.note("wait for gradient", number):
            grads: Sequence[Tensor] = above.take() if above else ()
        with self.note("backward", number):
            input_grads = self.stage.backward(self._on_device(grads))
        if below:
            with self.note("send gradient", number):
                below.send(number, input_grads)

    def _on_device(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.to(self.stage.device) for tensor in tensors]


def order_of(num_stages: int, stage: int, num_micro_batches: int) -> Sequence[Pass]:
    return orders("varuna", num_stages, num_micro_batches)[stage]
