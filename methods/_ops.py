"""Work on slabs that torch does not do, as operations of torch: what watches operations (plans without memory, accounts
of memory, the tests' race detector) sees it, too."""

from __future__ import annotations

import torch
from torch import Tensor

from methods import _adam

_library = torch.library.Library("harness", "DEF")
_library.define(
    "adamw(Tensor grads, Tensor[] source, Tensor(a!)[] target, Tensor? factor, int[] table, float learning_rate,"
    " int number) -> ()"
)


def adamw(
    grads: Tensor,
    source: list[Tensor],
    target: list[Tensor],
    factor: Tensor | None,
    table: list[int],
    learning_rate: float,
    number: int,
) -> None:
    """The compiled kernel on slabs of the host; `table` has start, stop and whether decay applies of each piece."""
    _adam.run(
        _adam.widest_path(),
        grads.data_ptr(),
        [slab.data_ptr() for slab in source],
        [slab.data_ptr() for slab in target],
        table,
        learning_rate,
        number,
        1.0 if factor is None else float(factor),
    )


_library.impl("adamw", adamw, "CPU")
_library.impl("adamw", lambda *args: None, "Meta")  # for tensors without memory
