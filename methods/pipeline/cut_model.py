"""The harness's model with CutPoints. Its tensors have no memory at first; each rank allocates only its own stage.

Embedding, layers and head are the modules of harness/models/model.py, which torch.fx leaves whole.

Shapes: B samples of a micro-batch, T tokens, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.job import Workload
from harness.core.method import TensorState
from harness.models.gpt import initialize
from harness.models.model import new_chain
from methods.pipeline.cut import CutPoint


class CutModel(nn.Module):
    """The model with a CutPoint after each layer, on torch's meta device. `recomputes`: True: each layer repeats its
    forward pass in the backward pass. `shared`, an attribute: pairs of names; a pair names one weight, which embedding
    and head share."""

    def __init__(self, workload: Workload, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding, *layers, self.head = new_chain(workload)
        self.layers = nn.ModuleList(layers)
        if recomputes:
            for layer in layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        self.cutpoints = [CutPoint() for _ in layers]
        self.workload = workload
        self.shared: list[tuple[str, str]] = []
        embedding_weights = dict(self.embedding.named_parameters())
        for name, _ in list(self.head.named_parameters()):
            if name in embedding_weights:
                owner, _, leaf = name.rpartition(".")
                self.head.get_submodule(owner)._parameters[leaf] = embedding_weights[name]
                self.shared.append((f"embedding.{name}", f"head.{name}"))

    def forward(self, inputs: Tensor, targets: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Return the mean loss of a micro-batch. inputs, targets: (B, T) token ids. The loss's gradient is multiplied
        by `loss_scale`."""
        x = self.embedding(inputs)
        for layer, cutpoint in zip(self.layers, self.cutpoints, strict=True):
            x = cutpoint(layer(x))
        loss: Tensor = self.head(x, targets, loss_scale)
        return loss

    def init_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill tensors of this model, in place, with their starting values. `named_tensors`: each tensor with its name
        in this model."""
        initialize(((self._name(name), tensor) for name, tensor in named_tensors), self.workload)

    def shapes(self, num_samples: int, device: Any = None) -> dict[str, Tensor]:
        """Return a batch of `num_samples` samples on the meta device, without memory. `device` has no effect."""
        tokens = torch.empty(num_samples, self.workload.seq_len, dtype=torch.long, device="meta")
        return {"inputs": tokens, "targets": tokens}

    def of_model(self, tensors: Iterable[TensorState]) -> Iterator[TensorState]:
        """Yield the tensors under their names in the harness's model. A tensor that is shared is yielded once."""
        seen_names: set[str] = set()
        for tensor in tensors:
            name = self._name(tensor.name)
            if name not in seen_names:
                seen_names.add(name)
                yield tensor._replace(name=name)

    def _name(self, cut_name: str) -> str:
        """Return a tensor's name in the harness's model, from its name in this model."""
        module_name, _, name = cut_name.partition(".")
        anatomy = self.workload.anatomy
        if module_name != "layers":
            return anatomy.ends_prefix + name
        layer_number, _, name_in_layer = name.partition(".")
        return anatomy.layer_name(int(layer_number)) + name_in_layer
