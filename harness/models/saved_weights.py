"""Writes a trained model in the format of the Hugging Face Hub: a folder with config.json and files of safetensors,
which transformers can load.

Each file is written as soon as its tensors arrive, so memory never holds a second copy of the model. The folder gets
its name after all files are written, so an interrupted write leaves no folder that could be loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from harness.base.whole_file import whole_folder
from harness.models.gpt import DTYPES
from harness.models.hub_model import config_to_save
from harness.models.weight_files import ALONE, INDEX

if TYPE_CHECKING:
    from harness.core.job import Workload
    from harness.core.method import TensorState

FILE_BYTES = 2**30  # most bytes of tensors in a file, unless one tensor alone is larger


class SavedWeights:
    """Writes a folder of a model's weights. The model must be described by a config.json (`workload.config`)."""

    def __init__(self, workload: Workload, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self.workload, self.folder, self.file_bytes = workload, folder, file_bytes
        self.missing = set(workload.anatomy.names(workload.num_layers))
        self.held: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.num_bytes = 0

    def passing(self, states: Iterable[TensorState]) -> Iterator[TensorState]:
        """Yield the given states unchanged, and write each state's weight, rounded to the workload's dtype. Raises
        ValueError after the last state if a weight of the model is missing, and OSError if the folder cannot be
        written."""
        with whole_folder(self.folder) as self.path:
            for state in states:
                self.missing.remove(state.name)
                weight = state.weight.detach().to("cpu", DTYPES[self.workload.dtype], copy=True)
                if self.held and _num_bytes(self.held) + weight.nbytes > self.file_bytes:
                    self._write()
                self.held[state.name] = weight
                yield state
            if self.missing:
                message = f"expected all weights of the model to save, got none of {min(self.missing)}"
                raise ValueError(f"{message}, one of {len(self.missing)} that are missing")
            self._write()
            self._finish()

    def _write(self) -> None:
        from safetensors.torch import save_file

        self.num_bytes += _num_bytes(self.held)
        save_file(self.held, self.path / str(len(self.files)), metadata={"format": "pt"})
        self.files.append(list(self.held))
        self.held = {}

    def _finish(self) -> None:
        """Give the files their final names, which contain the number of files. Then write the index, if there are
        several files, and config.json."""
        number = len(self.files)
        names = (
            [ALONE]
            if number == 1
            else [f"model-{n + 1:05}-of-{number:05}.safetensors" for n in range(number)]
        )
        for index, name in enumerate(names):
            (self.path / str(index)).rename(self.path / name)
        if number > 1:
            weight_map = {name: file for file, held in zip(names, self.files, strict=True) for name in held}
            index_file = {
                "metadata": {"total_size": self.num_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (self.path / INDEX).write_text(json.dumps(index_file, indent=2) + "\n")
        config_to_save(self.workload).save_pretrained(self.path)


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
