"""Samples the memory of a run's processes while they train, and ends the processes."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import psutil

from harness.base import cgroup
from harness.base.rank_agent import num_local_ranks
from harness.core.job import Job
from harness.devices.process_memory import process_bytes, total_shared_bytes

LIST_SECONDS = 1.0  # seconds between two lists of the worker's children; making a list takes 1.5 ms of a core
SHARED_MEMORY = Path("/dev/shm")


class MemoryPeaks:
    """The most bytes that a run's processes had in use while they trained: the worker and its children, or all ranks
    and their children."""

    def __init__(self, pid: int, job: Job, wall: cgroup.Group | None) -> None:
        """`pid`: number of the worker's process or, if the job has several ranks, of their agent's; `wall`: the memory
        group that holds this process and its children alone."""
        self.pid, self.job, self.wall = pid, job, wall
        self.bytes = {"host_anonymous": 0, "host_shared": 0}
        self.latest_sample = dict(self.bytes)  # the last sample, which confirm() adds to the peaks
        self.shm_free_bytes: int | None = None  # fewest free bytes seen in /dev/shm
        self.processes: list[psutil.Process] = []
        self.trainers: list[psutil.Process] = []  # the members of `processes` whose memory counts
        self.listed_at = 0.0  # time at which `processes` was last listed

    def sample(self) -> None:
        """Sample anonymous and shared memory. Shared memory includes page-locked memory, and files on a tmpfs, such as
        torch's libraries (104 MiB, results/LOG.md)."""
        self.sample_shm()
        with contextlib.suppress(psutil.Error):
            self._list_processes()
        anonymous_bytes, shared_bytes = 0, dict[int, int]()
        for process in self.trainers:
            with contextlib.suppress(psutil.Error):  # the process may be gone
                sizes = process_bytes(process.pid)
                anonymous_bytes += sizes.get("RssAnon") or process.memory_info().rss
                shared_bytes[process.pid] = sizes.get("RssShmem", 0)
        if self.wall and self.job.world_size == 1:  # forks share pages, which the group counts once
            anonymous_bytes = self.wall.anonymous_bytes() or anonymous_bytes
        self.latest_sample = {
            "host_anonymous": anonymous_bytes,
            "host_shared": total_shared_bytes(shared_bytes),
        }

    def _list_processes(self) -> None:
        """List the processes if the last list is old, or lacks ranks.

        A child counts only after two lists in a row contain it, because a new child has its parent's memory for some
        milliseconds, until the child runs its own program."""
        is_one_rank = self.job.world_size == 1
        lacks_ranks = not is_one_rank and len(self.trainers) < num_local_ranks(self.job.world_size)
        if not lacks_ranks and time.monotonic() - self.listed_at <= LIST_SECONDS:
            return
        worker, self.listed_at = psutil.Process(self.pid), time.monotonic()
        first_trainers = [worker] if is_one_rank else worker.children()  # an agent trains nothing
        others = [process for process in worker.children(recursive=True) if process not in first_trainers]
        others_listed_before = [process for process in others if process in self.processes]
        self.trainers = [*first_trainers, *others_listed_before]
        self.processes = [*first_trainers, *others]

    def confirm(self) -> None:
        """Raise the peaks to the last sample."""
        self.bytes = {name: max(self.bytes[name], self.latest_sample[name]) for name in self.bytes}

    def sample_shm(self) -> None:
        if SHARED_MEMORY.is_dir():
            free_bytes = shutil.disk_usage(SHARED_MEMORY).free
            if self.shm_free_bytes is None or free_bytes < self.shm_free_bytes:
                self.shm_free_bytes = free_bytes

    def end_processes(self, seconds: float) -> None:
        """Kill the processes that still run, and wait, at most `seconds`, until each has ended or is a zombie."""
        deadline = time.monotonic() + seconds
        processes = self.processes
        while processes and time.monotonic() < deadline:
            killed = []
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                        process.kill()
                        killed.append(process)
            processes = killed
            time.sleep(0.01 if killed else 0)
