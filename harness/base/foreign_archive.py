"""Reads an archive from an untrusted source into memory; nothing is unpacked onto the disk. The archive may hold only
regular files, of limited number and size, and a manifest must list each file with its hash."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness.base.foreign_file import MOST_BYTES, read_bytes

LISTABLE = re.compile(r"[\w .,+=@~-]+")  # pattern of the names of files and folders that a manifest can list
MOST_UNPACKED = 4 * MOST_BYTES
MOST_FILES = 20_000


def read_archive(path: Path, folder: str, manifest: str, endings: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the files in a gzipped tar archive, by their paths below `folder`, its only top folder.
    The manifest is left out.

    Raises ValueError, one line, unless the archive is whole, every file's name ends as `endings` say or in .sha256, and
    the file `manifest` lists exactly the other files with their SHA-256 hashes.
    """
    try:
        files = _members(path, folder, endings)
    except (OSError, EOFError, zlib.error, tarfile.TarError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: expected a whole archive written by ./run.sh bundle: {reason}") from error
    if manifest not in files:
        raise ValueError(
            f"{path}: expected an archive written by ./run.sh bundle, got one without {folder}/{manifest}"
        )
    listed = files.pop(manifest).decode(errors="replace").splitlines()
    hashed = {hashlib.sha256(data).hexdigest() + f"  {name}" for name, data in files.items()}
    if wrong := sorted(hashed.symmetric_difference(listed)):
        name = wrong[0].partition("  ")[2]
        raise ValueError(
            f"{path}: expected the files that {manifest} lists, got others: {name!r:.200}; ask the sender for the"
            " archive again"
        )
    return files


def _members(path: Path, folder: str, endings: Collection[str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    unpacked = _Limited(gzip.GzipFile(fileobj=io.BytesIO(read_bytes(path))))
    with tarfile.open(fileobj=unpacked, mode="r|") as tar:  # type: ignore[call-overload]
        for number, member in enumerate(tar, start=1):
            top, _, name = member.name.partition("/")
            if number > MOST_FILES:
                raise ValueError(f"{path}: expected at most {MOST_FILES} files, got more")
            if member.isdir() and not member.issparse() and _is_inside(member.name):
                continue
            if not member.isreg() or member.issparse():
                raise ValueError(f"{path}: expected regular files, got another kind at {member.name!r:.200}")
            if top != folder or not _is_inside(name) or name in files:
                raise ValueError(
                    f"{path}: expected each file once and inside {folder}/, got {member.name!r:.200}"
                )
            if not name.endswith((*endings, ".sha256")):
                kinds = " ".join(endings)
                raise ValueError(f"{path}: expected only data files ({kinds}), got {member.name!r:.200}")
            if member.size > MOST_BYTES:
                raise ValueError(f"{path}: expected files of at most {MOST_BYTES} bytes, got {member.size}")
            content = tar.extractfile(member)
            assert content is not None
            files[name] = content.read()
            if len(files[name]) != member.size:
                raise EOFError(f"{name} is cut short")
    return files


def _is_inside(name: str) -> bool:
    return all(LISTABLE.fullmatch(part) and part not in (".", "..") for part in name.split("/"))


class _Limited:
    """A stream that raises ValueError once more than MOST_UNPACKED bytes have been read from it. These bytes include
    the archive's headers."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.left = stream, MOST_UNPACKED

    def read(self, size: int) -> bytes:
        data = bytes(self.stream.read(size))
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"expected an archive of at most {MOST_UNPACKED} bytes when unpacked, got more")
        return data
