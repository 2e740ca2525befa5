"""The root folder of this project, and the installation of its extras."""

import importlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def install_extra(name: str) -> bool:
    """Install an extra of pyproject.toml into .venv, as venv.sh does; return False if that failed."""
    is_there = not subprocess.run(["bash", "-c", '. "$0/venv.sh" "$1"', ROOT, name]).returncode
    importlib.invalidate_caches()
    return is_there
