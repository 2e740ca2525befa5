"""The products of a mixture's experts, on tensors without memory and on the device sim.

transformers sorts the tokens by their experts and multiplies each group by its expert's matrix, in one call of torch
(grouped_mm). torch tells the shapes of this call in bf16 alone, and counts the tokens of each expert on GPUs in whole
numbers, which a CPU does not count. So on a tensor without memory transformers' own products in a loop take the place
of torch's call, and on every device that is neither a CPU nor a GPU tokens are counted as floats, as on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, register_flop_formula

OWN_COUNT = ("cpu", "mps", "cuda")  # devices on which transformers' count of tokens runs as it is
# attribute of transformers' modules of experts that compute in one of transformers' several ways
MARK = "_is_expert_parallel"
IMPLEMENTATION = "grouped_mm"  # transformers' name of this way to compute experts, its default


def experts_of(module: nn.Module) -> list[Any]:
    """Return the modules within `module` that hold the matrices of several experts, of which each token meets a few."""
    return [child for child in module.modules() if hasattr(child, MARK)]


def has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def adapt(moe: Any) -> None:
    """Change transformers' module of mixtures, `transformers.integrations.moe`, as the head of this file says."""
    may_group, forward = moe._can_use_grouped_mm, moe.ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]

    def may_group_now(rows: Tensor, matrices: Tensor, offsets: Tensor) -> bool:
        return has_memory(matrices) and bool(may_group(rows, matrices, offsets))

    @functools.wraps(forward)
    def experts_forward(experts: Any, x: Tensor, *routing: Tensor) -> Tensor:
        if x.device.type in OWN_COUNT:
            return forward(experts, x, *routing)
        with CountsInFloats():
            return forward(experts, x, *routing)

    moe._can_use_grouped_mm = may_group_now
    moe.ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = experts_forward
    _count_operations()


class CountsInFloats(TorchFunctionMode):
    """A context in which torch.histc gets its input as floats."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.histc:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


def _count_operations() -> None:
    """Let torch's FlopCounterMode count transformers' own products of groups: each row meets one matrix. A backward
    pass takes such products twice."""
    products = torch.ops.transformers.grouped_mm_fallback

    def of_products(rows: Any, matrices: Any, *others: Any, **settings: Any) -> int:
        return 2 * rows[0] * matrices[1] * matrices[2]

    def of_gradients(rows: Any, matrices: Any, *others: Any, **settings: Any) -> int:
        return 4 * rows[0] * matrices[1] * matrices[2]

    if products not in flop_registry:
        register_flop_formula(products)(of_products)
        register_flop_formula(torch.ops.transformers.grouped_mm_fallback_backward)(of_gradients)
