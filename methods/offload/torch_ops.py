"""Work on slabs that torch does not do, as operations of torch: what watches operations (plans without memory, accounts
of memory, the tests' race detector) sees it, too."""

from __future__ import annotations

import errno
import os

import torch
from torch import Tensor

from harness.core.gpt import DTYPES
from harness.core.job import gib
from methods.offload import adamw_kernel

NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAGE_BYTES = 4096  # a file is read and written past the system's cache where memory and length are whole pages

_library = torch.library.Library("harness", "DEF")
_library.define(
    "adamw(Tensor grads, Tensor[] source, Tensor(a!)[] target, Tensor? factor, float scale, int[] table,"
    " float learning_rate, int number) -> ()"
)
_library.define("reserve(Tensor(a!) file, int num_bytes) -> ()")
_library.define("read(Tensor file, Tensor(a!) slab) -> ()")
_library.define("write(Tensor(a!) file, Tensor slab) -> ()")


def adamw(
    grads: Tensor,
    source: list[Tensor],
    target: list[Tensor],
    factor: Tensor | None,
    scale: float,
    table: list[int],
    learning_rate: float,
    number: int,
) -> None:
    """The compiled kernel on slabs of the host: weights, in mixed precision the rest of their master, two moments.
    `table` has start, stop and whether decay applies of each piece."""
    adamw_kernel.run(
        adamw_kernel.widest_path(),
        NAMES[grads.dtype],
        grads.data_ptr(),
        _addresses(source),
        _addresses(target),
        table,
        learning_rate,
        number,
        scale * (1.0 if factor is None else float(factor)),
    )


def _addresses(slabs: list[Tensor]) -> list[int]:
    weights, *rest, exp_avg, exp_avg_sq = (slab.data_ptr() for slab in slabs)
    return [weights, rest[0] if rest else 0, exp_avg, exp_avg_sq]


def reserve(file: Tensor, num_bytes: int) -> None:
    """Take so many bytes of the disk, all zero, before anything is written. Raises OSError where it has no room."""
    try:
        os.posix_fallocate(file.tolist()[0], 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that only takes room as it is written
            error.strerror = f"{error.strerror}: {gib(num_bytes)} of states"
            raise


def read(file: Tensor, slab: Tensor) -> None:
    """Fill a slab of the host from a file. `file` stands for the bytes: the file's descriptor, the one that goes past
    the system's cache or the same again, and where the bytes begin. Raises OSError."""
    pages, handle, start = _pages(file, slab)
    while pages:
        done = os.preadv(handle, [pages], start)
        if not done:
            raise OSError(errno.EIO, f"a file of states ends at {start} bytes, before its data does")
        pages, start = pages[done:], start + done


def write(file: Tensor, slab: Tensor) -> None:
    """The way back. Raises OSError, as where the disk is full."""
    pages, handle, start = _pages(file, slab)
    while pages:
        done = os.pwritev(handle, [pages], start)
        pages, start = pages[done:], start + done


def _pages(file: Tensor, slab: Tensor) -> tuple[memoryview, int, int]:
    """The slab's bytes, the descriptor for them, and their place in the file."""
    cached, direct, start = file.tolist()
    is_whole = slab.data_ptr() % PAGE_BYTES == 0 and slab.nbytes % PAGE_BYTES == 0
    return slab.view(torch.uint8).numpy().data, direct if is_whole else cached, start


for _operation in (adamw, reserve, read, write):
    _library.impl(_operation.__name__, _operation, "CPU")
    _library.impl(_operation.__name__, lambda *args: None, "Meta")  # for tensors without memory
