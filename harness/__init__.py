"""Runs any method of training a model larger than the device, and tells the truth about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pandas import DataFrame


def load(folder: Path | str) -> DataFrame:
    """The records of a folder as a DataFrame, a row each; a speed stands only where the gate passed."""
    from papers.figures.points import load_frame

    return load_frame(folder)
