"""The root folder of this project, and a function that installs one of its extras (optional dependencies)."""

import importlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def install_extra(name: str) -> bool:
    """Install the extra `name` of pyproject.toml into .venv, by venv.sh; return False if the installation failed."""
    is_there = not subprocess.run(["bash", "-c", '. "$0/venv.sh" "$1"', ROOT, name]).returncode
    importlib.invalidate_caches()
    return is_there
