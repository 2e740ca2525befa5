"""Lists the checkpoints in a folder, and finds the complete ones; standard library only.

torch writes the file `.metadata` last: a checkpoint without this file is incomplete, and never read.
"""

from __future__ import annotations

from pathlib import Path

COMPLETE = ".metadata"
PREFIX = "step_"


def folder_of(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"{PREFIX}{step:08d}"


def complete_steps(folder: str | Path) -> list[int]:
    """Return the steps with a complete checkpoint, in order."""
    steps = (step_of(path.parent) for path in Path(folder).glob(f"{PREFIX}*/{COMPLETE}"))
    return sorted(step for step in steps if step is not None)


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint whose folder has the name that folder_of() gives; None for any other name, such
    as that of a copy."""
    name = path.name.removeprefix(PREFIX)
    return int(name) if name.isascii() and name.isdigit() and path == folder_of(path.parent, int(name)) else None


def choose(folder: str | Path, step: int | None = None) -> tuple[Path, int]:
    """Return the checkpoint of this step, or the newest one if no step is given. Raises ValueError if there is none."""
    steps = complete_steps(folder)
    if not steps or (step is not None and step not in steps):
        there = f"steps {', '.join(map(str, steps))}" if steps else "none"
        wanted = "a complete checkpoint" if step is None else f"a complete checkpoint of step {step}"
        raise ValueError(f"{folder}: expected {wanted}, got {there}")
    chosen = steps[-1] if step is None else step
    return folder_of(folder, chosen), chosen
