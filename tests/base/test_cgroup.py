"""The kernel's control groups: limits of memory and quotas of the CPU's time, as the kernel tells them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.base import cgroup
from harness.base.checkout import ROOT

MIB = 2**20


def tree(folder: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A process folder and the files of its groups, as the kernel shows them."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    process = folder / "process"
    process.mkdir()
    (process / "cgroup").write_text(groups)
    (process / "mountinfo").write_text(mounts.replace("TOP", str(folder / "top")))
    return process


V1_MOUNT = "35 31 0:32 ROOT TOP rw,relatime shared:1 - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 ROOT TOP rw,relatime - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "limit"),
    [
        # A nested group: the least limit on the way up holds.
        (
            "0::/a/b\n",
            V2_MOUNT.replace("ROOT", "/"),
            {"top/a/b/memory.max": "max\n", "top/a/memory.max": "1000\n", "top/cgroup.procs": ""},
            1000,
        ),
        (
            "4:memory:/a/b\n0::/\n",
            V1_MOUNT.replace("ROOT", "/") + V2_MOUNT.replace("ROOT", "/"),
            {"top/a/b/memory.limit_in_bytes": "3000\n", "top/a/memory.limit_in_bytes": "2000\n"},
            2000,
        ),
        # A container of docker: its group is the top of what it sees.
        (
            "4:memory:/docker/1\n",
            V1_MOUNT.replace("ROOT", "/docker/1"),
            {"top/memory.limit_in_bytes": "500\n"},
            500,
        ),
        ("0::/\n", V2_MOUNT.replace("ROOT", "/"), {"top/memory.max": "700\n"}, 700),
        # And one that names a group it cannot see.
        (
            "4:memory:/elsewhere\n",
            V1_MOUNT.replace("ROOT", "/docker/1"),
            {"top/memory.limit_in_bytes": "9\n"},
            9,
        ),
        ("0::/a\n", V2_MOUNT.replace("ROOT", "/"), {"top/a/memory.max": "max\n"}, None),
    ],
)
def test_the_limit_in_force_is_the_least_on_the_way_up(
    tmp_path: Path, groups: str, mounts: str, files: dict, limit: int | None
) -> None:
    group = cgroup.current_group(tree(tmp_path, groups, mounts, files))
    assert group is not None and group.limit_bytes() == limit


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cores"),
    [
        (
            "0::/a/b\n",
            V2_MOUNT.replace("ROOT", "/"),
            {"top/a/b/cpu.max": "max 100000\n", "top/a/cpu.max": "250000 100000\n"},
            2.5,
        ),
        ("0::/\n", V2_MOUNT.replace("ROOT", "/"), {"top/cpu.max": "max 100000\n"}, None),
        (
            "3:cpu,cpuacct:/a\n0::/\n",
            (V1_MOUNT + V2_MOUNT).replace("ROOT", "/").replace("rw,memory", "rw,cpu,cpuacct"),
            {"top/a/cpu.cfs_quota_us": "50000\n", "top/a/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            "3:cpu:/docker/1\n",
            V1_MOUNT.replace("ROOT", "/docker/1").replace("memory", "cpu"),
            {"top/cpu.cfs_quota_us": "-1\n", "top/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("4:memory:/a\n", V1_MOUNT.replace("ROOT", "/"), {"top/a/memory.limit_in_bytes": "9\n"}, None),
    ],
)
def test_the_quota_in_force_is_the_least_on_the_way_up(
    tmp_path: Path, groups: str, mounts: str, files: dict, cores: float | None
) -> None:
    assert cgroup.cpu_quota(tree(tmp_path, groups, mounts, files)) == cores


@pytest.fixture
def group(make_memory_group):
    return make_memory_group(64 * MIB)


def test_a_group_bounds_what_is_in_it_and_leaves_nothing_behind(group: cgroup.Group) -> None:
    code = (
        "import mmap; input(); pages = mmap.mmap(-1, 2**27); [pages.write(bytes(4096)) for _ in range(2**15)]"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    group.enter(process.pid)
    process.communicate(b"\n")
    assert (process.returncode, group.oom_kills(), group.limit_bytes()) == (-9, 1, 64 * MIB)
    group.remove()
    assert not group.folder.exists()


def test_pages_that_forks_share_count_once(group: cgroup.Group) -> None:
    """A process writes 32 MiB and forks twice."""
    code = (
        "import os; input(); kept = bytes(range(256)) * 2**17; [os.fork() or (input(), os._exit(0)) for _ in range(2)];"
        "print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    group.enter(process.pid)
    assert process.stdin and process.stdout
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    assert 32 * MIB <= (group.anonymous_bytes() or 0) < 48 * MIB
    process.kill()
    process.wait()


def test_a_group_of_a_dead_parent_is_removed_by_the_next(group: cgroup.Group) -> None:
    code = (
        "import os; from harness.base import cgroup; print(cgroup.make_group(2**26).folder, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    left = Path(
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    )
    assert left.is_dir()
    cgroup.make_group(2**26).remove()
    assert not left.exists() and group.folder.exists()
