"""Packs the results of bench/gpu.py into one archive, and unpacks such an archive. The archive keeps each file's path
relative to the project's folder.

The archive holds the folder of results, the machine's calibration and the kernel that was compiled on the machine. If
the archive would be larger than MOST_BYTES, pack() leaves out the largest traces.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from harness.base.whole_file import write_whole

MOST_BYTES = 16 * 2**20
BESIDE = ("results/calibration.json", ".venv/adam/*.so")  # files that are packed, too


def pack(results: Path, out: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Write the archive of `results`, the folder TREE/results/NAME, to `out`. Return the paths of files left out
    because the archive would exceed `most_bytes`."""
    root = results.parents[1]
    there = [path for path in results.rglob("*") if path.is_file() and not path.name.startswith(".")]
    files = [*there, *(path for pattern in BESIDE for path in root.glob(pattern))]
    files.sort(key=lambda path: ("trace" in path.name, path.stat().st_size))
    left = []
    while len(data := _packed(files, root)) > most_bytes:
        left.append(str(files.pop().relative_to(root)))
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{results.name}.tar.gz", data)
    return left


def _packed(files: list[Path], root: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", dereference=True) as archive:
        for path in files:
            archive.add(path, path.relative_to(root))
    return buffer.getvalue()


def unpack(archive: Path, root: Path) -> int:
    """Unpack files that the tree lacks; return their number. Raises ValueError if the file is no archive that pack()
    has made."""
    try:
        with tarfile.open(archive) as packed:
            missing = [member for member in packed if not (root / member.name).exists()]
            for name in (member.name for member in missing):
                if not name.startswith(("results/", ".venv/adam/")) or ".." in Path(name).parts:
                    raise ValueError(
                        f"{archive}: expected an archive that bench/gpu.py wrote, got one with the file {name}"
                    )
            packed.extractall(root, missing, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    return len(missing)
