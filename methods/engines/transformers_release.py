"""What other releases of transformers than the installed one name or ask otherwise. Each entry says why it changes no
training."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Older names of TrainingArguments' arguments, for releases that lack the newer ones: the same switch.
OLDER_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
# Modules that releases import, each with what stands in for it. The check demands other versions of huggingface_hub and
# tokenizers than the environment's, and httpx, which some releases import, fetches files: no training here reads
# a hub, a text or a file of the net. A release that does need another version of a package does not import.
STAND_INS: dict[str, dict[str, Any]] = {
    "transformers.dependency_versions_check": {"dep_version_check": lambda package, hint=None: None},
    "httpx": {"HTTPError": OSError},
}


def import_release() -> None:
    """Import the release that Release.use() has chosen, with the stand-ins. Raises what the import raises."""
    for name, contents in STAND_INS.items():
        if "." in name or not find_spec(name):
            module = sys.modules[name] = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module).update(contents)
    os.environ["HF_HUB_OFFLINE"] = "1"
    importlib.import_module("transformers.trainer")


def arguments_of(cls: Any, **settings: Any) -> Any:
    """Return TrainingArguments of a release's class `cls`, which gets the given ones by the names that it knows."""
    known = cls.__dataclass_fields__
    return cls(**{name if name in known else OLDER_NAMES[name]: value for name, value in settings.items()})
