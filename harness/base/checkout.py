"""The root folder of this project, and a function that installs one of its extras (optional dependencies)."""

import importlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def install_extra(extra: str) -> bool:
    """Install an extra of pyproject.toml into .venv, by venv.sh; return False if the installation failed."""
    is_installed = not subprocess.run(["bash", "-c", '. "$0/venv.sh" "$1"', ROOT, extra]).returncode
    importlib.invalidate_caches()
    return is_installed
