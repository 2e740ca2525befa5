"""AdamW on a GPU for a split state, whose fp32 master is stored in two halves. The kernel is adamw_cuda.cu. Each run
compiles the kernel by NVRTC, a compiler that comes with torch.

The kernel reads and writes 26 bytes per parameter. Its operations are those of the host's kernel, so a layer gets the
same bits wherever it is updated. torch's fused kernel does not take a master in two halves: joining the halves, the
update and splitting the result move 206 bytes per parameter.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from methods.offload.adamw_kernel import step_factors

KERNEL_SOURCE = Path(__file__).with_name("adamw_cuda.cu")
ELEMENT_HEADER = Path(__file__).with_name("adamw_element.h")
THREADS_PER_BLOCK = 256
ELEMENTS_PER_THREAD = 4  # elements that a thread takes at once, as in adamw_cuda.cu
MOST_BLOCKS = 2048  # most blocks for one tensor: enough, because a GPU runs fewer blocks at once
_failed_devices: set[int] = set()  # indices of the devices for which torch could not compile the kernel


def describe_split_update() -> str:
    """Describe how this process's GPU updates a split state, for the fairness table."""
    return "joined and split again, since NVRTC compiled no kernel" if _failed_devices else "in one pass"


def compiled_kernel() -> Any:
    """Return the kernel for the current device; None if torch cannot compile it."""
    import torch

    return _compiled_for(torch.cuda.current_device())


@functools.cache
def _compiled_for(device_index: int) -> Any:
    import torch
    from torch.utils import cpp_extension

    # As on the host, the compiler must not fuse a product and a sum into one operation, which would change bits.
    compiler_options: dict[str, Any] = {
        "cuda_include_dirs": [str(ELEMENT_HEADER.parent)],
        "nvcc_options": ["--fmad=false", "--std=c++17"],
    }
    cuda_home = cpp_extension.CUDA_HOME
    # torch refuses to compile if it finds no CUDA toolkit. This source needs no header of a toolkit: name any folder.
    cpp_extension.CUDA_HOME = cuda_home or str(ELEMENT_HEADER.parent)
    try:
        return torch.cuda._compile_kernel(KERNEL_SOURCE.read_text(), "adamw", **compiler_options)  # type: ignore[attr-defined]
    except (AttributeError, OSError, RuntimeError) as error:
        _failed_devices.add(device_index)
        warnings.warn(f"layers in two halves are updated by torch's kernels, slowly: {error}", stacklevel=2)
        return None
    finally:
        cpp_extension.CUDA_HOME = cuda_home


def update_on_gpu(
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
    """Queue an update on the current CUDA stream. Takes the arguments of adamw_kernel.update_on_host(); `num_threads`
    and `deadline` have no effect here."""
    pieces = _on_device(tuple(piece_table), grads.device)
    longest_numel = max(stop - start for start, stop in zip(piece_table[::3], piece_table[1::3], strict=True))
    num_blocks = -(-longest_numel // (THREADS_PER_BLOCK * ELEMENTS_PER_THREAD))
    compiled_kernel()(
        grid=(min(MOST_BLOCKS, num_blocks), len(piece_table) // 3, 1),
        block=(THREADS_PER_BLOCK, 1, 1),
        args=[
            grads,
            *source,
            *target,
            pieces,
            grads if factor is None else factor,
            int(factor is not None),
            scale,
            *step_factors(settings, step_number),
        ],
    )


@functools.cache
def _on_device(piece_table: tuple[int, ...], device: Any) -> Any:
    """Return a copy of the table on the device. The copy is cached, because making it waits for the device."""
    import torch

    return torch.tensor(piece_table, dtype=torch.int64, device=device)
