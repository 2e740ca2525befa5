"""Places named tensors in flat slabs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harness.models.gpt import is_decayed
from methods.offload.adamw import Piece
from methods.shared.memory_needs import ALIGNMENT_BYTES, round_up


class SlabPlace(NamedTuple):
    """A tensor's place in a slab: elements [start, stop) or, for a tensor with a dtype of its own, bytes."""

    start: int
    stop: int
    shape: torch.Size
    dtype: torch.dtype | None


class Layout:
    """The positions of named tensors in a flat slab. A tensor whose dtype is given as None has the slab's dtype. In a
    slab of bytes (uint8) each tensor has a dtype of its own."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Size, torch.dtype | None]]) -> None:
        self.places: dict[str, SlabPlace] = {}
        self.strides: dict[str, tuple[int, ...]] = {}
        self.numel = 0  # elements of the slab
        for name, shape, dtype in tensors:
            extent, element_bytes = shape.numel(), 4
            if dtype:  # a slab of bytes
                extent, element_bytes = shape.numel() * dtype.itemsize, 1
            self.places[name] = SlabPlace(self.numel, self.numel + extent, shape, dtype)
            self.strides[name] = torch.empty(shape, device="meta").stride()
            # rounded up: each tensor aligned like an fp32 allocation
            self.numel += round_up(extent, ALIGNMENT_BYTES // element_bytes)

    @property
    def names(self) -> list[str]:
        return list(self.places)

    def pieces(self, groups: Mapping[str, int] | None = None) -> list[Piece]:
        """Return one Piece for each tensor, for AdamW's update. `groups`: the index of a tensor's group in Settings, by
        the tensor's name; None: the groups of published_settings()."""
        return [
            Piece(start, stop, groups[name] if groups else int(not is_decayed(shape)))
            for name, (start, stop, shape, _) in self.places.items()
        ]

    def view(self, slab: Tensor, name: str) -> Tensor:
        start, stop, shape, dtype = self.places[name]
        assert stop <= len(slab)  # as_strided() would reach beyond a slab that is a part of a larger one
        if dtype is None:  # one operation, because a step makes many views
            return slab.as_strided(shape, self.strides[name], slab.storage_offset() + start)
        return slab[start:stop].view(dtype).view(shape)

    def views(self, slab: Tensor) -> list[Tensor]:
        return [self.view(slab, name) for name in self.places]

    def flat(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor's elements in the order in which a slab has them."""
        strides = self.strides[name]
        return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: -strides[dim])).flatten()


def cut_pieces(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """Return the parts of the pieces that lie in the elements [start, stop) of a slab, with positions counted from
    `start`."""
    cut = []
    for piece in pieces:
        if piece.start < stop and piece.stop > start:
            cut.append(Piece(max(piece.start, start) - start, min(piece.stop, stop) - start, piece.group))
    return cut


def layout_of(module: nn.Module) -> Layout:
    """Return the layout of the parameters that travel with the module, with their strides, which must leave no gaps:
    the frozen ones of a module that is_frozen(), else all."""
    named = [*module.named_parameters()]
    if is_frozen(module):
        named = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
    layout = Layout((name, parameter.shape, None) for name, parameter in named)
    layout.strides.update((name, parameter.stride()) for name, parameter in named)
    return layout


def is_frozen(module: nn.Module) -> bool:
    """True if the module has frozen parameters. These travel then without its trained ones, which have another home."""
    return not all(parameter.requires_grad for parameter in module.parameters())


def install(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set the module's parameter called `name`, which may have dots, to `parameter`."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
