"""The models that --model takes: names in models.yaml, and paths of config.json files. To add a name, add an entry to
models.yaml."""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.checkout import ROOT
from harness.base.foreign_file import NO_OTHER_FIELDS
from harness.base.registry import read_entries, read_entry
from harness.core import hub_config
from harness.core.job import Workload

FILE = ROOT / "models.yaml"
EXAMPLE = "gpt2: {num_layers: 12, hidden_size: 768, num_heads: 12, seq_len: 1024}"


@dataclass(frozen=True)
class NamedModel:
    """An entry of models.yaml that gives a model's sizes. `about` names the source of the sizes."""

    __pydantic_config__ = NO_OTHER_FIELDS
    num_layers: int
    hidden_size: int
    num_heads: int
    seq_len: int
    vocab_size: int = 50304
    about: str = ""

    @property
    def sizes(self) -> dict[str, Any]:
        """The model's sizes, as fields of a Workload."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "about"}

    @property
    def note(self) -> str:
        """Describe the model that is trained in place of the named one; empty if the named model itself is trained."""
        return f"the published GPT at its size: {self.about}" if "our architecture" in self.about else ""

    def __post_init__(self) -> None:
        Workload(**self.sizes)  # raises ValueError if the sizes make no model


@dataclass(frozen=True)
class ConfiguredModel:
    """A model that a configuration describes: an entry of models.yaml with a `config`, or a config.json."""

    __pydantic_config__ = NO_OTHER_FIELDS
    config: dict[str, Any]
    about: str = ""
    name: str = ""
    # models of the Hub, OWNER/NAME, whose config.json is the same in all that training needs
    ids: tuple[str, ...] = ()
    part_of: str = ""  # type of the whole model, if the configuration is only its part for texts

    @property
    def note(self) -> str:
        """Describe how the trained model differs from the configured one: it may be only the part for texts, and it
        has no dropout. Empty if it does not differ."""
        part = f"the part for texts of a {self.part_of}, without the others" if self.part_of else ""
        dropouts = ", ".join(f"{name} {value:g}" for name, value in hub_config.dropouts(self.config).items())
        return " and ".join(filter(None, (part, dropouts and f"trained without its dropout ({dropouts})")))

    @property
    def sizes(self) -> dict[str, Any]:
        """The model's sizes, name and configuration, as fields of a Workload."""
        return {
            **hub_config.sizes_of(self.config),
            "model": self.name,
            "config": hub_config.text_of(self.config),
        }


def names(file: Path = FILE) -> list[str]:
    return list(read_entries(file, EXAMPLE))


def several(text: str, file: Path = FILE) -> list[str]:
    """Return the models that `text` names. `text`: names and patterns of names, such as `tiny-*`, with commas between
    them; a pattern without a match is returned itself. If `text` is a path that exists, `text` alone is returned."""
    if Path(text).exists():
        return [text]
    matches: list[str] = []
    for pattern in text.split(","):
        matches += fnmatch.filter(names(file), pattern) or [pattern]
    return list(dict.fromkeys(matches))


def load(name: str, file: Path = FILE) -> NamedModel | ConfiguredModel:
    """Return the model that `name` names. `name` is a name in models.yaml, with or without the owner on the Hub
    (owner/model), one of an entry's `ids`, or the path of a config.json or of its folder. If `name` has a slash and is
    an existing path, `name` is read as a path. Raises ValueError, which names the nearest models, or tells what is
    wrong with the file."""
    models = read_entries(file, EXAMPLE)
    known = _known(name, models)
    if known in models and not ("/" in name and Path(name).exists()):
        if "config" not in models[known]:
            return read_entry(NamedModel, "model", known, (file,), EXAMPLE)
        model = read_entry(ConfiguredModel, "model", known, (file,), EXAMPLE)
        return dataclasses.replace(
            model, config=hub_config.checked_config(model.config, str(file)), name=known
        )
    if Path(name).exists() or name.endswith(hub_config.FILE):
        config, whole = hub_config.read_config(Path(name))
        return ConfiguredModel(config, name=name, part_of=whole)
    return read_entry(NamedModel, "model", name, (file,), EXAMPLE)


def _known(name: str, models: dict[str, Any]) -> str:
    """Return the entry's name that `name` means: an entry or one of its ids, with or without the owner. If there is
    none, return `name` without the owner."""
    short = name.rpartition("/")[2]
    if short not in models:
        for known, fields in models.items():
            ids = fields.get("ids") if isinstance(fields, dict) else None
            if isinstance(ids, list) and any(
                name in (spelled, str(spelled).rpartition("/")[2]) for spelled in ids
            ):
                return known
    return short
