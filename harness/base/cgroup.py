"""Reads the limits of the kernel's control groups (cgroups, v1 and v2), of memory and of the CPU's time, and how many
processes the kernel killed in each group for lack of memory; also makes a memory group for a worker.

Groups form a tree. A process is under the limits of its own group and of all groups above its own group. In a container
the visible tree may begin at the container's own group, and is often read-only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
# v1 limits memory plus swap, v2 swap alone
SWAP_LIMIT_FILES = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
ANONYMOUS_FIELDS = {1: "total_rss", 2: "anon"}  # names in memory.stat
KILL_FILES = {1: "memory.oom_control", 2: "memory.events"}
REMOVAL_SECONDS = 5.0
_serial = itertools.count()


@dataclass(frozen=True)
class Group:
    """A control group: its folder, the topmost visible folder of its tree, and the version of cgroups (1 or 2)."""

    folder: Path
    top: Path
    version: int

    def lineage(self) -> list[Path]:
        """Return the group's folder and all visible folders above it, the group's own first."""
        return [self.folder, *(path for path in self.folder.parents if path.is_relative_to(self.top))]

    def limit_bytes(self) -> int | None:
        """Return the lowest limit in bytes of this group and all groups above; None if no group has a limit."""
        limits = [_read_text(folder / LIMIT_FILES[self.version]).strip() for folder in self.lineage()]
        return min((int(limit) for limit in limits if limit.isdigit()), default=None)  # "max" means no limit

    def anonymous_bytes(self) -> int | None:
        """Return the bytes of anonymous memory of the group and all groups below it, in which pages that processes
        share count once; None if the kernel does not tell them."""
        bytes_by_field = dict(line.split() for line in _read_text(self.folder / "memory.stat").splitlines())
        field_text = bytes_by_field.get(ANONYMOUS_FIELDS[self.version])
        return int(field_text) if field_text else None

    def oom_kills(self) -> int:
        return oom_kills(self.folder / KILL_FILES[self.version])

    def enter(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def lift_limit(self) -> None:
        """Remove the group's limit, so that the group's processes may take more memory."""
        with contextlib.suppress(OSError):
            if self.version == 1:
                (self.folder / SWAP_LIMIT_FILES[1]).write_text("-1")
            (self.folder / LIMIT_FILES[self.version]).write_text("-1" if self.version == 1 else "max")

    def remove(self) -> None:
        """Kill the processes that are still in the group, and remove the group."""
        deadline = time.monotonic() + REMOVAL_SECONDS
        while self.folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                for pid in (self.folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.01)


def current_group(process: Path = Path("/proc/self"), controller: str = "memory") -> Group | None:
    """Return a process's group of the controller; None if the process has none. `process`: the process's folder in
    /proc, whose files `cgroup` and `mountinfo` tell the group. `controller`: memory or cpu."""
    groups = [line.split(":", 2) for line in _read_text(process / "cgroup").splitlines()]
    mounts = [line.split() for line in _read_text(process / "mountinfo").splitlines()]
    # If a machine has both versions, an entry of v1 names the controllers that v1 has.
    paths_by_version = [(1, path) for _, controllers, path in groups if controller in controllers.split(",")]
    paths_by_version = paths_by_version or [(2, path) for number, _, path in groups if number == "0"]
    for version, path in paths_by_version:
        for mount in mounts:
            kind, _, options = mount[mount.index("-") + 1 :][:3]
            is_v2 = (kind, version) == ("cgroup2", 2)
            is_v1 = kind == "cgroup" and controller in options.split(",")
            if not (is_v1 or is_v2):
                continue
            root, top = Path(mount[3]), Path(mount[4])
            folder = top / Path(path).relative_to(root) if Path(path).is_relative_to(root) else top
            return Group(folder if folder.is_dir() else top, top, version)
    return None


def cpu_quota(process: Path = Path("/proc/self")) -> float | None:
    """Return how many cores' time the process may take: the lowest quota of its group and all groups above; None if no
    group has a quota."""
    group = current_group(process, "cpu")
    if group is None:
        return None
    # microseconds of CPU time in each period, and the period's microseconds; "max" (v2) and -1 (v1) mean no quota
    files = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas = []
    for folder in group.lineage():
        numbers = " ".join(_read_text(folder / file) for file in files).split()
        if numbers and numbers[0].isdigit():
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def make_group(limit_bytes: int) -> Group | None:
    """Return a new group with this limit, in which no process can swap beyond the limit; None if the system does not
    allow a group. First, groups that dead processes of the harness left are removed."""
    group = current_group()
    if group is None:
        return None
    for parent in group.lineage():
        if group.version == 2 and "memory" not in _read_text(parent / "cgroup.subtree_control").split():
            continue  # in cgroups v2, groups below this one could have no limits
        _remove_groups_of_the_dead(parent)
        group = Group(parent / f"harness-{os.getpid()}-{next(_serial)}", group.top, group.version)
        try:
            group.folder.mkdir()
            (group.folder / LIMIT_FILES[group.version]).write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # some kernels do not count swap
                (group.folder / SWAP_LIMIT_FILES[group.version]).write_text(
                    str(limit_bytes if group.version == 1 else 0)
                )
            return group
        except OSError:
            with contextlib.suppress(OSError):
                group.folder.rmdir()
            return None
    return None


def oom_kills(count_file: Path = Path("/proc/vmstat")) -> int:
    """Return the number of processes that the kernel killed for lack of memory; 0 if the kernel does not count.
    `count_file`: the file with the count; by default the count is the whole machine's."""
    lines = _read_text(count_file).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _read_text(file: Path) -> str:
    """Return the text of a file of the kernel; empty if the file cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text()
    return ""


def _remove_groups_of_the_dead(parent: Path) -> None:
    for folder in parent.glob("harness-*"):
        if not Path(f"/proc/{folder.name.split('-')[1]}").exists():
            with contextlib.suppress(OSError):
                # if the group still has a process, a later run removes the group
                folder.rmdir()
