"""A small file system on a disk: a file of this machine's disk, mounted. A tmpfs would be refused as memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_mib: int) -> Iterator[Path]:
    """Mount an empty file system of this size in a new folder. Skip the test where nobody may mount one."""
    disk, image = folder / "small", folder / "small.img"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(num_mib * 2**20)
    made = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)]
    for words in (made, ["mount", "-o", "loop", str(image), str(disk)]):
        try:
            subprocess.run(words, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("a small file system is mounted by root only, and not on every machine")
    (disk / "lost+found").rmdir()
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # an error may still hold a file
