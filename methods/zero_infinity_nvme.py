"""ZeRO-Infinity with weights and optimizer on a folder of the disk. DeepSpeed, stage 3, its asynchronous I/O.

The folder gets a subfolder of this run's own, removed when the run ends in whatever way lets it; what a killed run left
behind is removed by the next one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.core.job import Budget, Plan, Workload, gib
from harness.core.method import Training, Unavailable
from methods.engines import deepspeed_config
from methods.shared.memory_needs import writable

PREFIX = "harness-nvme-"


@dataclass(frozen=True)
class ZeroInfinityNvme:
    disk: str | None = None  # the folder; the system's temporary one where none is named
    pipelined: bool | None = None  # reads and writes beside the update; None: where the host has room for its buffers
    reentrant: bool = True  # recompute; torch's newer way gives wrong gradients here (DeepSpeed 0.19.8 on a CPU)

    label = "ZeRO-Infinity (NVMe)"
    color = "#E7D6EF"
    paper = "Rajbhandari et al., SC 2021; DeepSpeed"

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        folder = writable(self.disk)
        plans = [self._plan(workload, str(folder), pipelined) for pipelined in (True, False)]
        if self.pipelined is not None:
            return plans[not self.pipelined]
        return next((plan for plan in plans if plan.shortfall(budget) is None), plans[-1])

    def _plan(self, workload: Workload, folder: str, pipelined: bool) -> Plan:
        params, size = workload.num_params, workload.weight_bytes
        of_weights = size * NUM_BUFFERS * deepspeed_config.largest_tensor(workload)
        of_states = (
            4
            * num_state_buffers(pipelined)
            * max(sub_group_params(workload), deepspeed_config.largest_tensor(workload))
        )
        return Plan(
            device=deepspeed_config.stage_3_device(workload),
            host={"gradients": 4 * params, "buffers": of_weights + of_states},
            disk={"weights": size * params, "optimizer": 12 * params},
            moved_bytes=2 * (12 + size) * params,
            options={"disk": folder, "pipelined": pipelined, "reentrant": self.reentrant},
        )

    def missing(self, device: str) -> str | None:
        return deepspeed_config.missing()

    def to_build(self) -> str | None:
        return deepspeed_config.to_build("async_io")

    def build(self) -> None:
        from methods.engines import deepspeed

        deepspeed.build("async_io")

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return deepspeed_config.description(workload, "fused", reentrant=self.reentrant)

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.engines import deepspeed

        plan = self.plan(workload, Budget())
        need, pipelined = plan.disk_bytes, plan.options["pipelined"]
        with swap_folder(writable(self.disk), need) as folder:
            if not deepspeed_config.is_built("async_io"):
                raise Unavailable(
                    "DeepSpeed's asynchronous I/O is not built: apt-get install libaio-dev g++, and again"
                )
            zero = {
                **deepspeed_config.stage_3(workload, on_gpu=device == "cuda"),
                # Prefetch would fetch the tied embedding, which is used twice, into two buffers, and fail.
                "stage3_prefetch_bucket_size": 0,
                "sub_group_size": sub_group_params(workload),
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": str(folder),
                    "pipeline_read": pipelined,
                    "pipeline_write": pipelined,
                    "buffer_count": num_state_buffers(pipelined),
                },
                "offload_param": {
                    "device": "nvme",
                    "nvme_path": str(folder),
                    "buffer_size": deepspeed_config.largest_tensor(
                        workload
                    ),  # elements: room for the largest parameter
                    "buffer_count": NUM_BUFFERS,
                    "max_in_cpu": 0,
                },
            }
            extra = {"aio": {"block_size": 2**20, "queue_depth": 8, "thread_count": 1, "overlap_events": True}}
            return (
                yield from deepspeed.train(
                    workload, batches, device, "fused", zero, reentrant=self.reentrant, extra=extra
                )
            )


NUM_BUFFERS = 8


def num_state_buffers(pipelined: bool) -> int:
    """Fewer and the swapper runs out of them. Pipelined, a step took 2.2 instead of 2.4 s and 0.3 GiB more of the host
    (8 layers x 512, a disk in the page cache)."""
    return 12 if pipelined else 4


def sub_group_params(workload: Workload) -> int:
    """Parameters that step at once: a file of each state apiece, so that the buffers hold a fraction of the states."""
    return max(1_000_000, workload.num_params // 32)


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
