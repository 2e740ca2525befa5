"""Where each parameter lies in a flat slab."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.core.gpt import Layer, decays
from harness.core.job import Workload
from methods.offload.adamw import Piece

ALIGNMENT = 16  # elements: 64 bytes of fp32, so that every tensor of a slab starts where an allocation would


class Layout:
    """Where each parameter of a module lies in a flat slab."""

    def __init__(self, module: nn.Module) -> None:
        self.names, self.shapes, self.starts, self.decays = [], [], [], []
        self.numel = 0
        for name, parameter in module.named_parameters():
            self.names.append(name)
            self.shapes.append(parameter.shape)
            self.starts.append(self.numel)
            self.decays.append(decays(parameter))
            self.numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def pieces(self) -> list[Piece]:
        ends = (start + shape.numel() for start, shape in zip(self.starts, self.shapes, strict=True))
        return [Piece(*piece) for piece in zip(self.starts, ends, self.decays, strict=True)]

    def views(self, slab: Tensor) -> list[Tensor]:
        starts_shapes = zip(self.starts, self.shapes, strict=True)
        return [slab[start : start + shape.numel()].view(shape) for start, shape in starts_shapes]


def kept_dtypes(workload: Workload, *, host: bool) -> list[torch.dtype]:
    """Of what AdamW keeps besides the weights: the master (none in fp32, half of it in bf16), two moments."""
    master = [] if workload.dtype == "fp32" else [torch.int16 if host and workload.dtype == "bf16" else torch.float32]
    return [*master, torch.float32, torch.float32]


def new_layer(workload: Workload) -> Layer:
    """A layer without memory of its own; the slot it comes to gives it some."""
    with torch.device("meta"):
        return Layer(workload)
