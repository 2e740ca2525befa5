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
from harness.core.adapters import targets_of
from harness.models.gpt import DTYPES
from harness.models.hub_model import config_to_save
from harness.models.weight_files import ALONE, INDEX

if TYPE_CHECKING:
    from harness.core.job import Workload
    from harness.core.method import TensorState

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # begins the names of tensors in files of peft
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


class SavedAdapters:
    """Writes a folder of trained adapters, as peft writes and loads them: adapter_model.safetensors and
    adapter_config.json."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload, self.folder = workload, folder

    def passing(self, states: Iterable[TensorState]) -> Iterator[TensorState]:
        """Yield the given states unchanged, and write the weights of adapters. Raises ValueError after the last state
        if an adapter of the model is missing, and OSError if the folder cannot be written."""
        from peft import LoraConfig
        from safetensors.torch import save_file

        anatomy, terms, weights = self.workload.anatomy, self.workload.adapters, dict[str, Tensor]()
        assert terms is not None
        with whole_folder(self.folder) as path:
            for state in states:
                if anatomy.is_trained(state.name):
                    name = f"{PEFT_PREFIX}{state.name.replace('.default.', '.')}"
                    weights[name] = state.weight.detach().to("cpu", copy=True).contiguous()
                yield state
            expected = anatomy.adapter_tensors(self.workload.num_layers)
            if missing := len(expected) - len(weights):
                raise ValueError(f"expected all adapters of the model to save, got none of {missing} tensors")
            save_file(weights, path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            LoraConfig(
                r=terms.rank,
                lora_alpha=terms.alpha,
                target_modules=targets_of({anatomy.within(name): None for name in expected}),
                task_type="CAUSAL_LM",
                inference_mode=True,
                base_model_name_or_path=self.workload.weights or self.workload.model_name,
            ).save_pretrained(str(path))


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
