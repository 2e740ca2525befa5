"""The adapters that --lora trains on frozen weights, as numbers. This file does not import torch.

The method is low-rank adaptation (LoRA, Hu et al. 2021); the library peft computes it.

An adapter of rank r adds (alpha / r) B A x to a linear layer's output W x. A (r x inputs) starts at random values and
B (outputs x r) at zero. A and B are trained; all other parameters of the model are frozen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple, Self

Shapes = dict[str, tuple[int, ...]]

MOST_RANK = 2**16
DEFAULT_ALPHA = 2  # alpha as a multiple of the rank
BASE = ".base_layer"  # part of the name that peft gives to the tensors of a linear layer with an adapter
A_NAME, B_NAME = (
    ".lora_A.default.weight",
    ".lora_B.default.weight",
)  # ends of the names of an adapter's tensors


class Adapters(NamedTuple):
    """The rank and alpha of adapters, and the names of the linear layers that get one; empty: all linear layers of
    each transformer layer."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, targets: str | None) -> Self:
        """Return the adapters that `--lora text` and `--lora-targets targets` ask for. Raises ValueError for other
        texts."""
        match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
        rank = int(match[1]) if match else 0
        alpha = int(match[2] or DEFAULT_ALPHA * rank) if match else 0
        if not (1 <= rank <= MOST_RANK and alpha):
            raise ValueError(
                f"--lora: expected RANK or RANK:ALPHA, whole numbers from 1 on, got {text!r}; try --lora 16 or"
                " --lora 16:32"
            )
        names = tuple(dict.fromkeys(filter(None, (name.strip() for name in (targets or "").split(",")))))
        if targets is not None and not names:
            raise ValueError(
                f"--lora-targets: expected names as q_proj,v_proj, got {targets!r}; or leave it out"
            )
        return cls(rank, alpha, names)

    @property
    def text(self) -> str:
        return f"{self.rank}:{self.alpha}"


def chosen(linears: Iterable[str], targets: tuple[str, ...]) -> list[str]:
    """Return those linear layers whose names, or ends of names after a dot, are among the targets; all if there are no
    targets."""
    return [name for name in linears if not targets or any(_is_named(name, target) for target in targets)]


def unknown_targets(linears: Iterable[str], targets: tuple[str, ...]) -> list[str]:
    """Return the targets that name none of the linear layers."""
    names = list(linears)
    return [target for target in targets if not any(_is_named(name, target) for name in names)]


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def adapted_shapes(
    layer: Shapes, linears: Shapes, targets: Iterable[str], rank: int
) -> tuple[Shapes, Shapes]:
    """Return two tables of a layer with adapters: its frozen tensors, by the names that peft gives them, and its
    adapters' tensors. `linears`: inputs and outputs of the linear layers, by name."""
    has_adapter, frozen = set(targets), Shapes()
    for name, shape in layer.items():
        owner, _, leaf = name.rpartition(".")
        frozen[f"{owner}{BASE}.{leaf}" if owner in has_adapter else name] = shape
    adapters = Shapes()
    for target in targets:
        num_inputs, num_outputs = linears[target]
        adapters |= {target + A_NAME: (rank, num_inputs), target + B_NAME: (num_outputs, rank)}
    return frozen, adapters


def original_name(name: str) -> str:
    """Return the name that a tensor of a layer with adapters has in the model without adapters."""
    return name.replace(f"{BASE}.", ".")


def targets_of(adapters: Iterable[str]) -> list[str]:
    """Return the names of the linear layers whose adapters' tensors have these names."""
    return [name.removesuffix(A_NAME) for name in adapters if name.endswith(A_NAME)]


def is_adapter(name: str) -> bool:
    """True for an adapter's matrix A or B."""
    return name.endswith((A_NAME, B_NAME))


def is_first_factor(name: str) -> bool:
    """True for an adapter's matrix A. It gets no gradient in the first step, because B starts at zero."""
    return name.endswith(A_NAME)


def start_bound(shape: tuple[int, ...]) -> float:
    """Return the bound b of the uniform distribution on [-b, b) from which peft draws a matrix A of this shape (r x
    inputs): Kaiming's with a slope of sqrt(5), so 1 / sqrt(inputs)."""
    return 1 / math.sqrt(shape[1])
