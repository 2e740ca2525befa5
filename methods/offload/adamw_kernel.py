"""AdamW on the host by this project's kernel, adamw_kernel.cpp, which is compiled once.

The kernel passes over the state once. torch's kernels pass several times in mixed precision, in updates from one state
into another, and if the gradient must be multiplied by the clip factor. One call updates a whole layer; several threads
of the kernel's own do the work. These threads never take Python's interpreter lock, so they do not delay the Python
threads that launch the device's work.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.base.checkout import ROOT
from harness.core.native_build import Library

VECTOR_PATHS = ("plain", "AVX2", "AVX-512")  # vector instructions, in the order of adamw_kernel.cpp
GRADIENT_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
SOURCES = tuple(Path(__file__).with_name(name) for name in ("adamw_kernel.cpp", "adamw_element.h"))
LIBRARY = Library("the host's AdamW", 2, ROOT / ".venv" / "adam", SOURCES)
# The compiler must not fuse a product and a sum into one operation: all VECTOR_PATHS and torch must give the same bits.
COMPILER_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)


to_build = LIBRARY.to_build


def build() -> None:
    """Compile the kernel. Raises Unavailable if the compilation fails; training then uses torch's kernels."""
    LIBRARY.build(*COMPILER_FLAGS)


@functools.cache
def compiled_library() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if it is not built."""
    return ctypes.CDLL(str(LIBRARY.path)) if LIBRARY.is_built else None


def widest_path() -> int:
    """Return the index in VECTOR_PATHS of the widest vector instructions that this processor has. The kernel must be
    built."""
    library = compiled_library()
    assert library is not None
    return int(library.adamw_widest_path())


def describe_host_adam(dtype: str) -> str:
    """Describe the host's optimizer, for the fairness table."""
    if compiled_library():
        return f"AdamW in one pass ({VECTOR_PATHS[widest_path()]}), host"
    return "torch AdamW, fused, host" if dtype == "fp32" else "torch AdamW, fused, in blocks, host"


def step_factors(settings: Sequence[float], step_number: int) -> tuple[float, ...]:
    """Return the numbers that the kernel needs for step `step_number`, counted from 1, in the order of struct Factors
    in adamw_element.h. `settings`: an adamw.AdamSettings."""
    learning_rate, beta1, beta2, epsilon, weight_decay = settings
    decay, bias2_sqrt = 1 - learning_rate * weight_decay, math.sqrt(1 - beta2**step_number)
    step_size = -(learning_rate / (1 - beta1**step_number))
    return decay, 1 - beta1, beta2, 1 - beta2, bias2_sqrt, epsilon, step_size


def update_on_host(
    grads: Any,
    source: list[Any],
    target: list[Any],
    factor: Any,
    scale: float,
    piece_table: list[int],
    settings: Sequence[float],
    step_number: int,
    num_threads: int,
    deadline: int,
) -> None:
    """Take one AdamW step. Read the state from the slabs `source` and write it to `target`; both may be the same.

    The gradients are multiplied by `scale` and by `factor`, a tensor of one element (None: 1). A state has these slabs,
    in this order: weights, the fp32 master or its low half (only in mixed precision), exp_avg, exp_avg_sq.
    `piece_table` has three numbers for each piece of a tensor: start, stop, and 1 if the piece has weight decay. Among
    simultaneous calls with the same number of threads the one with the lowest deadline goes first. The GIL is released
    during the step.
    """
    library = compiled_library()
    total_factor = scale if factor is None else scale * float(factor)
    assert library is not None
    kernel_factors = (total_factor, *step_factors(settings, step_number))
    library.adamw(
        widest_path(),
        GRADIENT_DTYPES.index(str(grads.dtype)),
        ctypes.c_void_p(grads.data_ptr()),
        _addresses(source),
        _addresses(target),
        (ctypes.c_int64 * len(piece_table))(*piece_table),
        ctypes.c_int64(len(piece_table) // 3),
        (ctypes.c_double * len(kernel_factors))(*kernel_factors),
        num_threads,
        ctypes.c_int64(deadline),
    )


def _addresses(slabs: list[Any]) -> ctypes.Array:
    """Return the addresses of a state's slabs for the kernel; address 0 stands for a master that is not there."""
    weights, *masters, exp_avg, exp_avg_sq = (slab.data_ptr() for slab in slabs)
    return (ctypes.c_void_p * 4)(weights, masters[0] if masters else 0, exp_avg, exp_avg_sq)
