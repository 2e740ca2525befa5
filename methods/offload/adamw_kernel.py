"""The host's own AdamW: adamw_kernel.cpp, compiled once.

It takes one pass where torch's kernels take several: in mixed precision, from one state into another, and by a gradient
that is to be clipped.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY
from harness.core.method import ROOT
from harness.core.native_build import Library

PATHS = ("plain", "AVX2", "AVX-512")  # by their number in adamw_kernel.cpp, as the next
FORMATS = ("fp32", "bf16", "fp16")
LIBRARY = Library("the host's AdamW", 1, ROOT / ".venv" / "adam", (Path(__file__).with_name("adamw_kernel.cpp"),))
# No operation is fused but where the source says so: its three paths and torch give the same bits.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def to_build() -> str | None:
    """What build() would compile, for people; None when it is there, or there is nothing to compile it with."""
    return LIBRARY.to_build()


def build() -> None:
    """Compile it. Raises Unavailable where that fails; torch's kernels then do its work."""
    LIBRARY.build(*FLAGS)


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernel; None where there is none."""
    return ctypes.CDLL(str(LIBRARY.path)) if LIBRARY.is_built else None


def widest_path() -> int:
    """The index in PATHS of the widest vectors that this processor has."""
    library = load()
    assert library is not None
    return int(library.adamw_widest_path())


def describe(dtype: str, *, one_pass: bool = False) -> str:
    """The host's optimizer, for the fairness table; `one_pass` in fp32, too: its threads clip, or update ahead."""
    if dtype == "fp32" and not (one_pass and load()):
        return "torch AdamW, fused, host"
    return f"AdamW in one pass ({PATHS[widest_path()]}), host" if load() else "torch AdamW, fused, in blocks, host"


def run(
    path: int,
    dtype: str,
    grads: int,
    source: list[int],
    target: list[int],
    table: list[int],
    learning_rate: float,
    num_updates: int,
    factor: float,
) -> None:
    """One step on slabs given by their addresses: weights, rest of their master (0 in fp32), exp_avg, exp_avg_sq; the
    target may be the source. `dtype` is that of weights and gradients.

    `table` has three numbers for each piece of a tensor: start, stop, whether decay applies. Other threads of Python
    run meanwhile.
    """
    library = load()
    assert library is not None
    numbers = (factor, learning_rate, WEIGHT_DECAY, *BETAS, EPSILON, num_updates)
    library.adamw(
        path,
        FORMATS.index(dtype),
        ctypes.c_void_p(grads),
        (ctypes.c_void_p * 4)(*source),
        (ctypes.c_void_p * 4)(*target),
        (ctypes.c_int64 * len(table))(*table),
        ctypes.c_int64(len(table) // 3),
        (ctypes.c_double * len(numbers))(*numbers),
    )
