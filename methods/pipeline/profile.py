"""The cost of a model's sections, messages and sums on a kind of machine: one JSON file; standard library only, but for
the check of the file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.checked_data import checked
from harness.base.foreign_file import read_json
from harness.base.whole_file import write_whole

FILE = "profile.json"


class NotNegative:
    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")


@dataclass(frozen=True)
class SectionCost(NotNegative):
    """The cost of one section's passes of a micro-batch with this many samples."""

    size: int
    forward_seconds: float
    recompute_seconds: float  # a forward pass that keeps the backward pass's needs
    backward_seconds: float
    copy_seconds: float  # copy of the tensors at the cut above, to the host and back
    saved_bytes: int  # kept between recompute and backward pass
    peak_bytes: int  # beyond weights, gradients and the section's input
    activation_bytes: int  # tensors at the cut above


@dataclass(frozen=True)
class Section(NotNegative):
    num_params: int
    update_seconds: float  # the optimizer's update of its parameters
    costs: list[SectionCost]  # by size, up to the last one before memory ran out


@dataclass(frozen=True)
class Message(NotNegative):
    """A message from a rank to its neighbor, while both compute."""

    is_one_machine: bool
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Sum(NotNegative):
    """An all-reduce in a ring of ranks, while all other rings of that size run, too."""

    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    fp16: bool
    device_bytes: int | None  # memory of a device; None for a CPU, whose memory the ranks share
    sections: list[Section]  # the model's parts between neighboring CutPoints
    messages: list[Message]  # empty if one rank measured
    sums: list[Sum]
    # Passes are timed as of a rank that has a core. `num_ranks` of a machine's ranks that compute at once take
    # `crowding` times as long; the machine's cores serve `num_served` ranks. None: each rank has a device of its own.
    crowding: float = 1.0
    num_ranks: int = 1
    num_served: float | None = None

    def __post_init__(self) -> None:
        if not self.sections:
            raise ValueError("sections: expected one at least, got none")
        for section in self.sections:
            sizes = [cost.size for cost in section.costs]
            if sizes != sorted({*sizes} - {0}):
                raise ValueError(f"sections: expected costs of sizes from 1 in order, got {sizes}")

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of micro-batches for which no section lacked memory."""
        return sorted(set.intersection(*({cost.size for cost in section.costs} for section in self.sections)))

    def at(self, size: int) -> list[SectionCost]:
        """Return each section's cost at this size."""
        return [next(cost for cost in section.costs if cost.size == size) for section in self.sections]

    def write(self, folder: str | Path) -> Path:
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        return path


def read(folder: str | Path) -> Profile:
    """Raises ValueError, one line, for what is no profile."""
    path = Path(folder) / FILE
    try:
        data: Any = read_json(path)
        return checked(Profile, data)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: no such file; try Profiler(...).profile_all(..., out_folder={str(folder)!r})"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a profile: {error}") from error
