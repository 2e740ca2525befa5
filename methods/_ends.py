"""Both ends of the model, kept and updated on the device: embedding and loss."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model import Ends
from harness.spec import Workload
from methods._device import Device
from methods._home import Home
from methods._stream import Slot


class ResidentEnds:
    """The embedding, the final norm and the tied head, trained where the activations are."""

    def __init__(self, device: Device, workload: Workload) -> None:
        with torch.device("meta"):
            self.module = Ends(workload)
        self.home = Home(device, self.module, "ends.", workload, host=False)
        self.slot = Slot(self.home, resident=True)

    def embed(self, inputs: Tensor) -> Tensor:
        """(B, T) token ids to (B, T, D); only the small graph of the look-up is kept for backward()."""
        self.embedded = self.module.embed(inputs)
        return self.embedded.detach()

    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, detached, and the gradient of the last layer's output; starts this step's gradients."""
        self.home.grads.zero_()
        x = x.detach().requires_grad_()
        loss = self.module.loss(x, targets)
        loss.backward()
        assert x.grad is not None
        return loss.detach(), x.grad

    def backward(self, dx: Tensor) -> None:
        """Add the look-up's share to the gradients."""
        self.embedded.backward(dx)
        del self.embedded

    def norms(self) -> list[Tensor]:
        return self.slot.norms()
