"""The wheels that a machine with Python 3.12 and torch but without a network lacks, as requirements/ pins them.

    bench/gpu.sh --wheels DIR [NAME ...]

DeepSpeed has no wheel: its is made from its source, without kernels. NAME: further packages that the machine lacks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.base.checkout import ROOT

NAMES = ("megatron-core", "hjson", "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
         "typing-extensions")  # fmt: skip
BUILT = "deepspeed"
MOST_BYTES = 60 * 2**20  # of the wheels and of this tree without its history, which travel together
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux1_x86_64")  # fmt: skip
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Return versions by normal name."""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE)}


def pinned(names: tuple[str, ...]) -> list[str]:
    """Return requirements. Raises ValueError for a package without a pin."""
    known = pins("".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt")))
    unknown = [name for name in names if normal(name) not in known]
    if unknown:
        raise ValueError(f"expected packages of requirements/, got {', '.join(unknown)}")
    return [f"{name}=={known[normal(name)]}" for name in names]


def fetch(folder: Path, more: tuple[str, ...] = ()) -> list[Path]:
    """Fill the folder and remove other versions. Needs a network."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    (source,) = pinned((BUILT,))
    with tempfile.TemporaryDirectory() as temporary:
        from_source = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
        subprocess.run([*PIP, "download", *from_source, "-d", temporary, source], check=True)
        (archive,) = Path(temporary).iterdir()
        subprocess.run(
            [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(archive)], check=True
        )
    target = ["--python-version", "3.12", "--implementation", "cp"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run(
        [*PIP, "download", "--no-deps", "--only-binary", ":all:", *target, "-d", str(folder), *pinned((*NAMES, *more))],
        check=True,
    )
    return sorted(folder.glob("*.whl"))


def tree_bytes(root: Path = ROOT) -> int:
    """Return the bytes of the files that git tracks."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout
    return sum((root / name).stat().st_size for name in listed.decode().split("\0") if name and (root / name).is_file())


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("expected a folder: bench/gpu.sh --wheels DIR")
    found = fetch(Path(sys.argv[1]), tuple(sys.argv[2:]))
    wheels, tree = sum(path.stat().st_size for path in found), tree_bytes()
    for path in found:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    print(f"{wheels / 2**20:.1f} MiB of wheels, {tree / 2**20:.1f} MiB of this tree")
    if wheels + tree > MOST_BYTES:
        sys.exit(f"expected at most {MOST_BYTES // 2**20} MiB of both: leave packages out")


if __name__ == "__main__":
    main()
