"""Models by name: the sizes of --model, from models.yaml. To add a model is to add an entry there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.checked_data import NO_OTHER_FIELDS
from harness.base.checkout import ROOT
from harness.base.named_entries import entries, entry
from harness.core.job import Workload

FILE = ROOT / "models.yaml"
EXAMPLE = "gpt2: {num_layers: 12, hidden_size: 768, num_heads: 12, seq_len: 1024}"


@dataclass(frozen=True)
class NamedModel:
    """An entry of models.yaml: fields of a Workload, and their source."""

    __pydantic_config__ = NO_OTHER_FIELDS
    num_layers: int
    hidden_size: int
    num_heads: int
    seq_len: int
    vocab_size: int = 50304
    about: str = ""

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the fields of a Workload."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "about"}

    def __post_init__(self) -> None:
        Workload(**self.sizes)  # raises ValueError if the sizes make no model


def names(file: Path = FILE) -> list[str]:
    return list(entries(file, EXAMPLE))


def load(name: str, file: Path = FILE) -> NamedModel:
    """Return the model of this name. Raises ValueError that names the nearest one, or the entry's wrong fields."""
    return entry(NamedModel, "model", name, (file,), EXAMPLE)
