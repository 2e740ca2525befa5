"""The published GPT with CutPoints. Its tensors have no memory at first; each rank allocates its own stage only.

Shapes: B samples of a micro-batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.gpt import Ends, Layer, initialize
from harness.core.job import Workload
from harness.core.method import TensorState
from methods.pipeline.cut import CutPoint


class RepeatedLayer(Layer):
    """A layer that keeps only its input for the backward pass; maps (B, T, D) to (B, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class CutGpt(nn.Module):
    """The GPT with the tensor names of harness.core.gpt and a CutPoint after each layer, on torch's meta device.
    `recomputes`: each layer repeats its forward pass in the backward pass."""

    # The embedding of the first stage is also the head of the last stage.
    shared: ClassVar = [("ends.wte.weight", "ends.wte.weight")]

    def __init__(self, workload: Workload, *, recomputes: bool = False) -> None:
        super().__init__()
        layer = RepeatedLayer if recomputes else Layer
        with torch.device("meta"):
            self.ends = Ends(workload)
            self.layers = nn.ModuleList(layer(workload) for _ in range(workload.num_layers))
        self.cutpoints = [CutPoint() for _ in self.layers]
        self.workload = workload

    def forward(self, inputs: Tensor, targets: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Return the mean loss of a micro-batch, (B, T) tokens each; its gradient is multiplied by the loss scale."""
        x = self.ends.embed(inputs)
        for layer, cutpoint in zip(self.layers, self.cutpoints, strict=True):
            x = cutpoint(layer(x))
        return self.ends.loss(x, targets, loss_scale)

    def init_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Fill tensors, in place, with the starting values of their names."""
        initialize(named, self.workload)

    def shapes(self, size: int, device: Any = None) -> dict[str, Tensor]:
        """Return a batch of `size` samples without memory."""
        tokens = torch.empty(size, self.workload.seq_len, dtype=torch.long, device="meta")
        return {"inputs": tokens, "targets": tokens}

    def of_model(self, tensors: Iterable[TensorState]) -> Iterable[TensorState]:
        """Return the tensors under their names in the harness's model."""
        return tensors
