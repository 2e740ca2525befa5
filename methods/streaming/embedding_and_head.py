"""The two ends of the model, which are resident on the device: the embedding, and the head with the loss.

Shapes: B samples of a micro-batch, T tokens, D hidden. A batch comes in whole; this rank's part of it is passed on as a
list of micro-batches, each a tuple of one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from harness.core.job import Workload
from harness.core.model import new_ends
from harness.devices.streams import Device
from methods.shared.terms import Terms
from methods.streaming.layer_state import LayerState, Passed
from methods.streaming.starting_values import draw


class ResidentEnds:
    """The embedding, the final norm and the head, trained where the activations are."""

    def __init__(self, device: Device, workload: Workload) -> None:
        self.device, self.module, prefix = device, new_ends(workload), workload.anatomy.ends_prefix
        self.state = LayerState(device, self.module, prefix, Terms.of(workload), host=False)
        draw([self.state], workload)
        self.state.bind(self.state.current.weights)
        self.ranks, self.num_parts = device.ranks, workload.micro_batches

    def embed(self, inputs: Tensor) -> list[Passed]:
        """Embed token ids to (B, T, D); keep only the small graph of the look-up, for backward()."""
        with self.device.span("compute", "forward", self.state.prefix):
            embedded = [self.module.embed(part) for part in self._micro_batches(inputs)]
            self.embedded = [get_gradient_edge(x) for x in embedded]  # the graph without its outputs' memory
        return [(x.detach().requires_grad_(),) for x in embedded]

    def loss(self, xs: list[Passed], targets: Tensor, scale: float) -> tuple[Tensor, list[Passed]]:
        """Return the mean loss of the whole batch, detached, and the gradients of the last layer's outputs, times the
        loss scale."""
        with self.device.span("compute", "loss", self.state.prefix):
            self.state.collect_gradients(self.state.grads)
            total, dxs = torch.zeros((), device=xs[0][0].device), list[Passed]()
            for (x,), part in zip(xs, self._micro_batches(targets), strict=True):
                x = x.detach().requires_grad_()
                loss = self.module.loss(x, part, scale) / (self.num_parts * self.ranks.num_ranks)
                loss.backward()
                total += loss.detach()
                assert x.grad is not None
                dxs.append((x.grad,))
            self.ranks.sum(total)
        return total, dxs

    def backward(self, dxs: list[Passed]) -> None:
        """Add the embedding look-up's share to the gradients; afterwards they are the gradients of the whole batch."""
        with self.device.span("compute", "backward", self.state.prefix):
            for edge, (dx,) in zip(self.embedded, dxs, strict=True):
                torch.autograd.backward([edge], [dx])
        del self.embedded
        self.state.sum_gradients()

    def _micro_batches(self, batch: Tensor) -> tuple[Tensor, ...]:
        return self.ranks.part(batch).chunk(self.num_parts)
