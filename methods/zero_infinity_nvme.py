"""ZeRO-Infinity with weights and optimizer states in a folder on the disk, by DeepSpeed's stage 3 and DeepSpeed's
asynchronous I/O.

Each run has a subfolder of its own and removes it at the end. The next run removes the subfolders of killed runs.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.base.scratch import is_marked, mark
from harness.core.job import Plan, Room, Workload, gib
from harness.core.method import Training, Unavailable
from harness.core.option import with_option
from methods.engines.deepspeed_config import (
    EngineSettings,
    is_kernel_built,
    missing_to_build,
    stage_3_config,
    stage_3_device,
    stage_3_exchanged,
    stage_3_summed,
)
from methods.engines.deepspeed_method import DeepSpeedMethod
from methods.shared.data_parallel import RANKS, rank_part
from methods.shared.memory_needs import DISK, writable_folder

FOLDER_PREFIX = "harness-nvme-"
NUM_PARAMETER_BUFFERS = 8  # buffers for parameters


@dataclass(frozen=True)
class ZeroInfinityNvme(DeepSpeedMethod):
    # folder of weights and states; None: the system's temporary folder
    disk: str | None = with_option(None, DISK)
    # True: read and write during the update; None: True if buffers fit on the host
    pipelined: bool | None = None
    # True: recompute by torch's older way; the newer way is wrong with DeepSpeed 0.19.8
    reentrant: bool = True
    world_size: int = with_option(1, RANKS)  # ranks
    release: str | None = None  # version of DeepSpeed, such as 0.18.9; None: the installed one

    label = "ZeRO-Infinity (NVMe)"
    paper = "Rajbhandari et al., SC 2021; DeepSpeed"
    adam = "fused"
    kernel = "async_io"
    takes_config = True  # trains models that a config.json describes, too

    def plan(self, workload: Workload, room: Room) -> Plan:
        folder = writable_folder(self.disk)
        plans = [self._plan(workload, str(folder), pipelined) for pipelined in (True, False)]
        if self.pipelined is not None:
            return plans[not self.pipelined]
        return next((plan for plan in plans if plan.shortfall(room) is None), plans[-1])

    def _plan(self, workload: Workload, folder: str, pipelined: bool) -> Plan:
        workload, ranks = rank_part(workload, self.world_size), self.world_size
        params, size = -(-workload.num_params // ranks), workload.weight_bytes
        largest = -(-workload.anatomy.largest_numel // ranks)
        state_buffer_bytes = 4 * num_state_buffers(pipelined) * max(sub_group_params(workload), largest)
        buffer_bytes = size * NUM_PARAMETER_BUFFERS * largest + state_buffer_bytes
        return Plan(
            device=stage_3_device(workload),
            host={"gradients": 4 * params, "buffers": buffer_bytes},
            disk=on_disk(workload, ranks),
            moved_bytes=2 * (12 + workload.micro_batches * size) * params + stage_3_summed(workload, ranks),
            exchanged=stage_3_exchanged(workload, ranks),
            options={**dataclasses.asdict(self), "disk": folder, "pipelined": pipelined},
        )

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.engines import deepspeed

        assert self.pipelined is not None
        with ExitStack() as open_context:
            folder = open_context.enter_context(
                swap_folder(writable_folder(self.disk), sum(on_disk(workload, self.world_size).values()))
            )
            if not is_kernel_built("async_io", self.other_release):
                lacking = missing_to_build("async_io", self.other_release)
                raise Unavailable(lacking or "DeepSpeed's async_io is not compiled: ./run.sh setup")
            nvme = {"device": "nvme", "nvme_path": str(folder)}
            zero = {
                **stage_3_config(workload, is_on_gpu=device == "cuda"),
                # No prefetch: it would fetch the tied embedding, which is used twice, into two buffers, and fail.
                "stage3_prefetch_bucket_size": 0,
                "sub_group_size": sub_group_params(workload),
                "offload_optimizer": {
                    **nvme,
                    "buffer_count": num_state_buffers(self.pipelined),
                    "pipeline_read": self.pipelined,
                    "pipeline_write": self.pipelined,
                },
                "offload_param": {
                    **nvme,
                    "buffer_count": NUM_PARAMETER_BUFFERS,
                    "max_in_cpu": 0,
                    "buffer_size": workload.anatomy.largest_numel,  # elements
                },
            }
            aio = {"block_size": 2**20, "queue_depth": 8, "thread_count": 1, "overlap_events": True}
            settings = EngineSettings(
                zero,
                self.adam,
                self.reentrant,
                self.world_size,
                self.other_release,
                extra_entries={"aio": aio},
            )
            return (yield from deepspeed.train(workload, batches, device, settings, open_context))


def on_disk(workload: Workload, num_ranks: int) -> dict[str, int]:
    """Return the bytes that a rank has on the disk: the bytes of weights and of optimizer states."""
    params = -(-workload.num_params // num_ranks)
    return {"weights": workload.weight_bytes * params, "optimizer": 12 * params}


def num_state_buffers(pipelined: bool) -> int:
    """Return the number of buffers for states: the fewest with which DeepSpeed's swapper works.

    With `pipelined`, a step took 2.2 instead of 2.4 s, but 0.3 GiB more host memory. (Measured with 8 layers of hidden
    size 512, and the files in the page cache.)
    """
    return 12 if pipelined else 4


def sub_group_params(workload: Workload) -> int:
    """Return the number of parameters of a sub-group: the parameters that DeepSpeed updates at once. DeepSpeed keeps
    each state of a sub-group in a file and reads the file into a buffer, so the buffers hold only a fraction of all
    states."""
    return max(1_000_000, workload.num_params // 32)


@contextmanager
def swap_folder(parent: Path, needed_bytes: int) -> Iterator[Path]:
    """Make a folder for this process in `parent`, and remove the folder at the end. First remove the marked folders of
    dead processes. Raises OSError(ENOSPC) if the disk has less than `needed_bytes` bytes free."""
    for old_folder in parent.glob(f"{FOLDER_PREFIX}*"):
        process_id = old_folder.name.removeprefix(FOLDER_PREFIX)
        if is_marked(old_folder) and not Path(f"/proc/{process_id}").exists():
            shutil.rmtree(old_folder, ignore_errors=True)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise OSError(errno.ENOSPC, f"needs {gib(needed_bytes)} of disk, {parent} has {gib(free_bytes)} free")
    folder = parent / f"{FOLDER_PREFIX}{os.getpid()}"
    folder.mkdir()
    mark(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
