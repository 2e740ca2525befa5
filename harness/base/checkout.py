"""The root folder of this project."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
