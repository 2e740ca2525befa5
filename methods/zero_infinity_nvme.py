"""ZeRO-Infinity with weights and optimizer on a folder of the disk. DeepSpeed, stage 3, its asynchronous I/O.

The folder gets a subfolder of this run's own, removed when the run ends in whatever way lets it; what a killed run left
behind is removed by the next one.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.method import Training, Unavailable
from harness.spec import Budget, Plan, Workload, gib
from methods import _zero

PREFIX = "harness-nvme-"


@dataclass(frozen=True)
class ZeroInfinityNvme:
    nvme: str | None = None  # the folder; the system's temporary one where none is named
    reentrant: bool = True  # recompute; torch's newer way gives wrong gradients here (DeepSpeed 0.19.8 on a CPU)

    label = "ZeRO-Infinity (NVMe)"
    color = "#E7D6EF"
    paper = "Rajbhandari et al., SC 2021; DeepSpeed"
    world_size = 1

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        folder = Path(self.nvme or tempfile.gettempdir())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write to the folder {folder}: name another with --nvme DIR")
        params, size = workload.num_params, workload.weight_bytes
        buffers = size * NUM_BUFFERS * _zero.largest_tensor(workload) + 4 * 12 * SUB_GROUP_PARAMS
        return Plan(
            device=_zero.stage_3_device(workload),
            host={"gradients": 4 * params, "buffers": buffers},
            disk={"weights": size * params, "optimizer": 12 * params},
            moved_bytes=2 * (12 + size) * params,
            options={"nvme": str(folder), "reentrant": self.reentrant},
        )

    def to_build(self) -> str | None:
        return _zero.to_build("async_io")

    def build(self) -> None:
        from methods import _deepspeed

        _deepspeed.build("async_io")

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return _zero.description(workload, "fused", reentrant=self.reentrant)

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods import _deepspeed

        need = self.plan(workload, Budget()).disk_bytes
        with swap_folder(Path(self.nvme or tempfile.gettempdir()), need) as folder:
            if not _zero.is_built("async_io"):
                raise Unavailable(
                    "DeepSpeed's asynchronous I/O is not built: apt-get install libaio-dev g++, and again"
                )
            zero = {
                **_zero.stage_3(workload, on_gpu=device == "cuda"),
                # Prefetch would fetch the tied embedding, which is used twice, into two buffers, and fail.
                "stage3_prefetch_bucket_size": 0,
                "sub_group_size": SUB_GROUP_PARAMS,
                "offload_optimizer": {"device": "nvme", "nvme_path": str(folder), "buffer_count": 4},
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": str(folder),
                    "buffer_size": _zero.largest_tensor(workload),  # elements: room for the largest parameter
                    "buffer_count": NUM_BUFFERS,
                    "max_in_cpu": 0,
                },
            }
            extra = {"aio": {"block_size": 2**20, "queue_depth": 8, "thread_count": 1, "overlap_events": True}}
            return (
                yield from _deepspeed.train(
                    workload, batches, device, "fused", zero, reentrant=self.reentrant, extra=extra
                )
            )


NUM_BUFFERS = 8
SUB_GROUP_PARAMS = 1_000_000


@contextmanager
def swap_folder(parent: Path, need: int) -> Iterator[Path]:
    """A folder of this process below `parent`, gone afterwards. Raises OSError(ENOSPC) where there is no room."""
    for left in parent.glob(f"{PREFIX}*"):
        if not Path(f"/proc/{left.name.removeprefix(PREFIX)}").exists():
            shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(parent).free
    if free < need:
        raise OSError(errno.ENOSPC, f"needs {gib(need)} of disk, {parent} has {gib(free)} free")
    folder = parent / f"{PREFIX}{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
