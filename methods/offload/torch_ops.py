"""Operations on slabs that torch lacks. Each operation is registered with torch, so that memory rehearsals, memory
accounts and the race detector see it.
"""

from __future__ import annotations

import errno
import os

import torch
from torch import Tensor

from harness.core.job import gib
from methods.offload import adamw_cuda, adamw_kernel

PAGE_BYTES = 4096  # reads and writes of whole pages can bypass the system's cache

_library = torch.library.Library("harness", "DEF")
_library.define(
    "adamw(Tensor grads, Tensor[] source, Tensor(a!)[] target, Tensor? factor, float scale, int[] table,"
    " float[] settings, int number, int num_threads, int deadline) -> ()"
)
_library.define("reserve(Tensor(a!) file, int num_bytes) -> ()")
_library.define("read(Tensor file, Tensor(a!) slab) -> ()")
_library.define("write(Tensor(a!) file, Tensor slab) -> ()")


def reserve_file(file: Tensor, num_bytes: int) -> None:
    """Reserve `num_bytes` of disk space for a file, filled with zeros. Raises OSError if the disk has too little."""
    try:
        os.posix_fallocate(file.tolist()[0], 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            # file systems that cannot reserve space raise these
            error.strerror = f"{error.strerror}: {gib(num_bytes)} of states"
            raise


def read_slab(file: Tensor, slab: Tensor) -> None:
    """Fill a slab on the host from a file. Raises OSError if a read fails, or if the file ends too early.

    `file` holds three numbers: a descriptor that uses the system's cache, a descriptor that bypasses the cache (or the
    first one again), and the offset in bytes at which to start.
    """
    pages, descriptor, start = _pages_and_target(file, slab)
    while pages:
        num_read = os.preadv(descriptor, [pages], start)
        if not num_read:
            raise OSError(errno.EIO, f"a file of states ends at {start} bytes, before its data does")
        pages, start = pages[num_read:], start + num_read


def write_slab(file: Tensor, slab: Tensor) -> None:
    """Write a slab on the host to a file; `file`: the three numbers that read_slab() takes. Raises OSError, for example
    if the disk is full."""
    pages, descriptor, start = _pages_and_target(file, slab)
    while pages:
        num_written = os.pwritev(descriptor, [pages], start)
        pages, start = pages[num_written:], start + num_written


def _pages_and_target(file: Tensor, slab: Tensor) -> tuple[memoryview, int, int]:
    """Return the slab's bytes, the descriptor to use for them, and their offset in the file. The descriptor that
    bypasses the cache is used for slabs of whole pages only."""
    cached_descriptor, direct_descriptor, start = file.tolist()
    is_whole = slab.data_ptr() % PAGE_BYTES == 0 and slab.nbytes % PAGE_BYTES == 0
    return slab.view(torch.uint8).numpy().data, direct_descriptor if is_whole else cached_descriptor, start


for _name, _operation in (
    ("adamw", adamw_kernel.update_on_host),
    ("reserve", reserve_file),
    ("read", read_slab),
    ("write", write_slab),
):
    _library.impl(_name, _operation, "CPU")
    _library.impl(_name, lambda *args: None, "Meta")  # for tensors without memory
_library.impl("adamw", adamw_cuda.update_on_gpu, "CUDA")
