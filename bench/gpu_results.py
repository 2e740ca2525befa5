"""Packs the measurements of the calls on a borrowed GPU into one archive, and unpacks it for the next call.

The archive holds the folder of results, the machine's calibration and the kernel compiled there, by their places in
this tree. If it would be too large, the largest traces are left out first, and are named.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from harness.base.checkout import ROOT
from harness.base.whole_file import write_whole

MOST_BYTES = 16 * 2**20
BESIDE = ("results/calibration.json", ".venv/adam/*.so")  # of the tree, beside the folder of results


def name(results: Path) -> str:
    return f"{results.name}.tar.gz"


def archives(results: Path, out: Path) -> list[Path]:
    """Return archives that pack() or a person left: in the folder `out`, beside the results, at the top of this
    tree."""
    found = dict.fromkeys(folder / name(results) for folder in (out, results.parent, ROOT))
    return [path for path in found if path.exists()]


def files(results: Path, root: Path = ROOT) -> dict[str, Path]:
    """Return the files of the archive by their names in it: results/..., tree/...."""
    found = {f"results/{path.relative_to(results)}": path for path in sorted(results.rglob("*")) if _is_kept(path)}
    for pattern in BESIDE:
        found |= {f"tree/{path.relative_to(root)}": path for path in sorted(root.glob(pattern))}
    return found


def _is_kept(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and not path.name.startswith(".")


def pack(results: Path, out: Path, most_bytes: int = MOST_BYTES, root: Path = ROOT) -> list[str]:
    """Write the archive into the folder `out`; returns the names of what was left behind."""
    chosen, left = files(results, root), []
    data = _compressed(chosen)
    by_size = sorted(chosen, key=lambda name: ("trace" in name, chosen[name].stat().st_size))
    while len(data) > most_bytes and by_size:
        left.append(by_size.pop())
        del chosen[left[-1]]
        data = _compressed(chosen)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / name(results), data)
    return left


def _compressed(chosen: dict[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for name, path in chosen.items():
            archive.add(path, arcname=name, recursive=False)
    return buffer.getvalue()


def unpack(archive: Path, results: Path, root: Path = ROOT) -> int:
    """Unpack missing files; return their number. Raises ValueError for an archive that pack() has not written."""
    number = 0
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                top, _, rest = member.name.partition("/")
                place = {"results": results, "tree": root}.get(top)
                if place is None or not member.isfile() or ".." in Path(rest).parts:
                    raise ValueError(f"{archive} is no archive of results: it holds {member.name}")
                if not (place / rest).exists():
                    (place / rest).parent.mkdir(parents=True, exist_ok=True)
                    content = packed.extractfile(member)
                    assert content is not None
                    write_whole(place / rest, content.read())
                    number += 1
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from error
    return number
