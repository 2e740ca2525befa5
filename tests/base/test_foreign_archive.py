"""Archives that mean harm: each is refused in one line, before anything of it reaches the disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.base import foreign_file
from harness.base.foreign_file import read_archive
from papers.report.bundle import ENDINGS

DATA = b'{"a": 1}'
RIGHT = hashlib.sha256(DATA).hexdigest()


Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, data: bytes = DATA, kind: bytes = tarfile.REGTYPE, link: str = "") -> Entry:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(data)
    return member, data


def archive(path: Path, *entries: Entry, listed: str | None = None) -> Path:
    """Write an archive with these entries, by default with a manifest that lists them."""
    lines = [
        f"{hashlib.sha256(data).hexdigest()}  {it.name.partition('/')[2]}"
        for it, data in entries
        if it.isreg()
    ]
    manifest = entry("bundle/MANIFEST", ("\n".join(lines) if listed is None else listed).encode())
    with tarfile.open(path, "w:gz") as tar:
        for member, data in (manifest, *entries):
            tar.addfile(member, io.BytesIO(data))
    return path


def read(path: Path) -> dict[str, bytes]:
    return read_archive(path, "bundle", "MANIFEST", (*ENDINGS, "MANIFEST"))


def test_the_files_that_the_manifest_lists_are_read(tmp_path: Path) -> None:
    sent = archive(tmp_path / "b.tar.gz", entry("bundle/log_1.json"), entry("bundle/probes/log_2.json", b"2"))
    assert read(sent) == {"log_1.json": DATA, "probes/log_2.json": b"2"}


HOSTILE: dict[str, tuple[str, Entry]] = {
    "a path upwards": ("inside bundle/", entry("bundle/../../log_1.json")),
    "an absolute path": ("inside bundle/", entry("/bundle/log_1.json")),
    "another folder": ("inside bundle/", entry("other/log_1.json")),
    "a name of two lines": ("inside bundle/", entry("bundle/log_1\n.json")),
    "a symbolic link": ("another kind", entry("bundle/log_1.json", b"", tarfile.SYMTYPE, "/etc/passwd")),
    "a hard link": ("another kind", entry("bundle/log_1.json", b"", tarfile.LNKTYPE, "bundle/MANIFEST")),
    "a device": ("another kind", entry("bundle/log_1.json", b"", tarfile.CHRTYPE)),
    "a pipe": ("another kind", entry("bundle/log_1.json", b"", tarfile.FIFOTYPE)),
    "a folder upwards": ("another kind", entry("bundle/../..", b"", tarfile.DIRTYPE)),
    "a pickle": ("only data files", entry("bundle/log_1.pkl", pickle.dumps({"a": 1}))),
    "Python": ("only data files", entry("bundle/method.py", b"import os")),
    "a shell's script": ("only data files", entry("bundle/run.sh", b"id")),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_an_entry_is_refused_that_is(text: str, tmp_path: Path) -> None:
    message, members = HOSTILE[text]
    with pytest.raises(ValueError, match=message) as error:
        read(archive(tmp_path / "b.tar.gz", members))
    assert "\n" not in str(error.value)


def test_a_file_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each file once"):
        read(archive(tmp_path / "b.tar.gz", entry("bundle/log_1.json"), entry("bundle/log_1.json", b"2")))


@pytest.mark.parametrize(
    "listed", [f"{'0' * 64}  log_1.json", "", f"{RIGHT}  log_1.json\n{'0' * 64}  log_2.json"]
)
def test_a_file_that_is_not_as_listed_or_not_listed_or_missing_is_named(listed: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"expected the files that MANIFEST lists, got others: 'log_[12].json'"
    ):
        read(archive(tmp_path / "b.tar.gz", entry("bundle/log_1.json"), listed=listed))


def test_a_claimed_size_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_file, "MOST_MEMBER_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 bytes, got 101"):
        read(archive(tmp_path / "b.tar.gz", entry("bundle/log_1.json", b"0" * 101)))


def test_what_comes_out_is_limited_whatever_it_was_packed_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of 60 MB in a header packs into 60 KB."""
    monkeypatch.setattr(foreign_file, "MOST_UNPACKED", 2**20)
    sent = archive(tmp_path / "b.tar.gz", entry("bundle/" + "a" * 60_000_000))
    assert sent.stat().st_size < 2**17
    with pytest.raises(ValueError, match="at most 1048576 bytes when unpacked"):
        read(sent)


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_file, "MOST_FILES", 3)
    with pytest.raises(ValueError, match="at most 3 files"):
        read(archive(tmp_path / "b.tar.gz", *(entry(f"bundle/log_{number}.json") for number in range(3))))


def test_an_archive_cut_anywhere_is_refused(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(3000)
    whole = archive(tmp_path / "b.tar.gz", entry("bundle/log_1.json", noise)).read_bytes()
    for size in range(0, len(whole) - 200, 97):
        (tmp_path / "cut.tar.gz").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut.tar.gz"):
            read(tmp_path / "cut.tar.gz")


OTHERS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: path.write_bytes(pickle.dumps([1])),
    "a packed text": lambda path: path.write_bytes(gzip.compress(b"text" * 1000)),
    "a link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("text", OTHERS)
def test_another_file_is_no_archive(text: str, tmp_path: Path) -> None:
    OTHERS[text](tmp_path / "b.tar.gz")
    with pytest.raises(ValueError, match=r"expected (a whole|an) archive written by ./run.sh bundle"):
        read(tmp_path / "b.tar.gz")
