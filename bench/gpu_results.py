"""Packs the results of bench/gpu.py into one archive, with their paths below the project's folder, and unpacks it.

The archive holds the folder of results, the machine's calibration and the kernel compiled there. If the archive would
be too large, the largest traces are left out, and their names are returned.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from harness.base.whole_file import write_whole

MOST_BYTES = 16 * 2**20
BESIDE = ("results/calibration.json", ".venv/adam/*.so")  # packed beside the folder of results


def pack(results: Path, out: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Write the archive of TREE/results/NAME into the folder `out`; returns the names of what was left behind."""
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
    """Unpack the files that are missing; return their number. Raises ValueError for another archive than pack()'s."""
    try:
        with tarfile.open(archive) as packed:
            missing = [member for member in packed if not (root / member.name).exists()]
            for name in (member.name for member in missing):
                if not name.startswith(("results/", ".venv/adam/")) or ".." in Path(name).parts:
                    raise ValueError(f"{archive}: expected an archive of results alone, got one with {name}")
            packed.extractall(root, missing, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    return len(missing)
