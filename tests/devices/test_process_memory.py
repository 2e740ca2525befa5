"""Shared memory of several processes: each segment counts once, whoever maps it."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.devices import process_memory
from harness.devices.process_memory import process_bytes
from tests.support import forks

MIB = 2**20
SLACK_BYTES = 8 * MIB  # of torch's own segments, and of libraries


def resident(*pids: int) -> dict[int, int]:
    return {pid: process_bytes(pid).get("RssShmem", 0) for pid in pids}


def hold(tensors: list[torch.Tensor], own_bytes: int, sums: Any, ended: Any) -> None:
    """A process that reads the tensors, and has a segment of its own."""
    segment = torch.ones(own_bytes, dtype=torch.uint8).share_memory_()
    sums.put(sum(int(tensor.sum()) for tensor in tensors))
    ended.wait()
    del segment


@contextmanager
def holders(number: int, tensors: list[torch.Tensor], own_bytes: int) -> Iterator[list[int]]:
    """The numbers of processes that have the tensors resident."""
    sums, ended = forks.PROCESSES.Queue(), forks.PROCESSES.Event()
    processes = [
        forks.PROCESSES.Process(target=hold, args=(tensors, own_bytes, sums, ended)) for _ in range(number)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            sums.get()
        yield [process.pid or 0 for process in processes]
    finally:
        ended.set()
        for process in processes:
            process.join()


def test_a_tensor_that_three_processes_share_counts_once() -> None:
    before = resident(os.getpid())[os.getpid()]
    tensors = [torch.ones(size * MIB, dtype=torch.uint8).share_memory_() for size in (64, 32)]
    with holders(2, tensors, own_bytes=16 * MIB) as others:
        sizes = resident(os.getpid(), *others)
        assert sum(sizes.values()) - before >= 3 * 96 * MIB + 2 * 16 * MIB
        assert 0 <= process_memory.total_shared_bytes(sizes) - before - (96 + 2 * 16) * MIB < SLACK_BYTES


def test_memory_shared_by_a_fork_counts_once() -> None:
    shared = mmap.mmap(-1, 64 * MIB)
    shared.write(bytes(64 * MIB))
    reader, writer = os.pipe()
    before = resident(os.getpid())[os.getpid()] - 64 * MIB
    child = os.fork()
    if not child:
        shared.seek(0)
        os.write(writer, b"%d" % len(shared.read()))
        signal.pause()
    try:
        os.read(reader, 99)
        sizes = resident(os.getpid(), child)
        assert sizes[child] >= 64 * MIB
        assert 64 * MIB <= process_memory.total_shared_bytes(sizes) - before < 64 * MIB + SLACK_BYTES
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def maps(folder: Path, pid: int, *lines: str) -> None:
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "maps").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process_memory, "PROCESSES", tmp_path)
    process_memory._segments.cache_clear()
    return tmp_path


def test_page_locked_memory_of_two_ranks_counts_twice(processes: Path) -> None:
    """It has a segment of its own in each process; a file's mapping and the driver's are no shared memory."""
    for pid in (1, 2):
        maps(
            processes,
            pid,
            f"10000000-20000000 rw-s 00000000 00:01 {pid}  /dev/zero (deleted)",
            "20000000-90000000 rw-s 00000000 00:06 563  /dev/nvidiactl",
            "90000000-a0000000 rw-p 00000000 00:00 0",
            "a0000000-f0000000 r--s 00000000 fe:00 33  /data/corpus.bin",
        )
    assert process_memory.total_shared_bytes({1: 256 * MIB, 2: 256 * MIB}) == 512 * MIB


def test_what_no_segment_holds_counts_for_each_process(processes: Path) -> None:
    for pid in (1, 2, 3):
        maps(processes, pid, "10000000-20000000 rw-s 00000000 00:01 7  /dev/shm/torch_1 (deleted)")
    assert (
        process_memory.total_shared_bytes({1: 356 * MIB, 2: 256 * MIB, 3: 306 * MIB})
        == (256 + 100 + 50) * MIB
    )


def test_a_segment_that_is_hardly_touched_counts_by_what_is_resident(processes: Path) -> None:
    for pid in (1, 2):
        maps(processes, pid, "10000000-90000000 rw-s 00000000 00:01 7  /memfd:large (deleted)")
    assert process_memory.total_shared_bytes({1: 3 * MIB, 2: 4 * MIB}) == 7 * MIB


def test_a_segment_in_two_mappings_has_the_size_of_both(processes: Path) -> None:
    for pid in (1, 2):
        maps(
            processes,
            pid,
            "10000000-18000000 rw-s 00000000 00:01 7  /dev/shm/a b",
            "18000000-20000000 r--s 08000000 00:01 7  /dev/shm/a b",
        )
    assert process_memory.total_shared_bytes({1: 256 * MIB, 2: 256 * MIB}) == 256 * MIB


def test_the_mappings_of_one_process_are_not_read(processes: Path) -> None:
    assert process_memory.total_shared_bytes({1: 256 * MIB, 2: 0}) == 256 * MIB


def test_a_process_that_is_gone_counts_by_what_it_had(processes: Path) -> None:
    maps(processes, 1, "10000000-20000000 rw-s 00000000 00:01 7  /dev/shm/torch_1")
    assert process_memory.total_shared_bytes({1: 256 * MIB, 2: 5 * MIB}) == 261 * MIB
