"""The former names of modules that files of users import: such a file still loads, and gets the module by its present
name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The present name of each module or package that the pages once told users to import.
PRESENT = {
    "harness.core.gpt": "harness.models.gpt",
    "harness.core.model": "harness.models.model",
    "harness.figures": "papers.figures",
}


def present_name(name: str) -> str:
    """Return a module's present name; `name` itself if it is no former name."""
    for former, present in PRESENT.items():
        if name == former or name.startswith(f"{former}."):
            return present + name[len(former) :]
    return name


class FormerNames(MetaPathFinder, Loader):
    """Finds a module by its former name. It comes first: Python's own finder would make a second module of the file."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if present_name(name) != name else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(present_name(spec.name))
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import has replaced it by the former name's


def find_former_names() -> None:
    """Let imports find modules by their former names in this process."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())
