"""Files written whole: what may be replaced, and by which rights."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.base.whole_file import check_replaceable, own_folder, write_whole


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to("kept")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "link", "pipe"):
        with pytest.raises(ValueError, match=f"{name}: expected a new file, or a file to replace"):
            write_whole(tmp_path / name, "new")
    assert (tmp_path / "kept").read_text() == "kept" and len(list(tmp_path.iterdir())) == 4


def test_only_a_file_that_an_earlier_call_wrote_is_replaced(tmp_path: Path) -> None:
    """As by --trace with the name of a script."""
    script, trace, empty = (tmp_path / name for name in ("script.py", "trace.json", "empty"))
    script.write_text("import torch\n")
    trace.write_text('{"displayTimeUnit": "ms"}')
    empty.touch()
    for path in (trace, empty, tmp_path / "new"):
        check_replaceable(path, b'{"displayTimeUnit"')
    with pytest.raises(
        ValueError, match=r"script.py: expected a new file, or one that an earlier call wrote"
    ):
        check_replaceable(script, b'{"displayTimeUnit"')


def test_a_folder_of_the_harness_own_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "probes").symlink_to("elsewhere")
    with pytest.raises(ValueError, match="probes: expected a folder, got a symbolic link"):
        own_folder(tmp_path / "probes")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_has_the_rights_that_the_umask_leaves(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("old")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))  # as a full disk does: a part is written
    try:
        with pytest.raises(OSError, match="page"):
            write_whole(tmp_path / "page", "new" * 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_the_longest_name_there_is_can_be_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 255), "text")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["text"]


WRITER = """
import os, sys
from pathlib import Path
from harness.base.whole_file import write_whole
os.fsync = lambda handle: (print("writes", flush=True), sys.stdin.read())
write_whole(Path(sys.argv[1]), "new")
"""


def test_the_next_writer_removes_what_a_killed_one_left_and_spares_one_that_writes(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    names = [tmp_path / "killed", tmp_path / "alive"]
    killed, alive = (subprocess.Popen([sys.executable, "-c", WRITER, name], **pipes) for name in names)
    for writer in (killed, alive):
        assert writer.stdout.readline() == "writes\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    write_whole(tmp_path / "third", "third")
    assert not list(tmp_path.glob(".killed*")) and list(tmp_path.glob(".alive*"))
    alive.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive", "third"]
    assert (tmp_path / "alive").read_text() == "new"
