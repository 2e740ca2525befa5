"""Lists the checkpoints in a folder, and finds the complete ones. Needs only the standard library.

torch writes the file `.metadata` of a checkpoint last. A checkpoint without this file is incomplete and is never read.
"""

from __future__ import annotations

from pathlib import Path

TABLE_FILE = ".metadata"
STEP_PREFIX = "step_"


def checkpoint_folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"{STEP_PREFIX}{step:08d}"


def complete_steps(folder: str | Path) -> list[int]:
    """Return the steps with a complete checkpoint, in order."""
    steps = (step_of(path.parent) for path in Path(folder).glob(f"{STEP_PREFIX}*/{TABLE_FILE}"))
    return sorted(step for step in steps if step is not None)


def step_of(path: Path) -> int | None:
    """Return the step of the checkpoint in the folder `path`. Return None if checkpoint_folder() would never give a
    folder this name, for example for the copy of a checkpoint."""
    name = path.name.removeprefix(STEP_PREFIX)
    if not name.isascii() or not name.isdigit() or path != checkpoint_folder(path.parent, int(name)):
        return None
    return int(name)


def find_checkpoint(folder: str | Path, step: int | None = None) -> tuple[Path, int]:
    """Return the folder and the step of a complete checkpoint. `step`: the checkpoint's step; None: the newest. Raises
    ValueError if the folder has no complete checkpoint of this step."""
    steps = complete_steps(folder)
    if not steps or (step is not None and step not in steps):
        steps_text = f"steps {', '.join(map(str, steps))}" if steps else "none"
        expected_text = "a complete checkpoint" if step is None else f"a complete checkpoint of step {step}"
        raise ValueError(f"{folder}: expected {expected_text}, got {steps_text}")
    chosen_step = steps[-1] if step is None else step
    return checkpoint_folder(folder, chosen_step), chosen_step
