"""A small file system on a disk: a file of this machine's disk, mounted. A tmpfs would be refused as memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_mib: int) -> Iterator[Path]:
    """Mount an empty file system of this size in a new folder. Skip the test where nobody may mount one, or nothing
    makes one."""
    if not shutil.which("mkfs.ext4"):
        pytest.skip("no mkfs.ext4 here, which makes a small file system")
    disk, image = folder / "small", folder / "small.img"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(num_mib * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)], check=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(disk)], stderr=subprocess.PIPE, text=True
    )
    if mounted.returncode:
        pytest.skip(
            f"a small file system is mounted by root only, and not on every machine: {mounted.stderr.strip()}"
        )
    (disk / "lost+found").rmdir()
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)  # an error may still hold a file
