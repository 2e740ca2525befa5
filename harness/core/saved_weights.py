"""Writes a trained model as the Hugging Face Hub has models: config.json and safetensors under transformers' names, so
that transformers loads it.

Each file is written when it is full, so that no second copy of the model is in memory. The folder gets its name when
all of it is written: an interrupted write leaves nothing that loads.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from harness.base.whole_file import UNFINISHED
from harness.core.gpt import DTYPES
from harness.core.hub_model import config_to_save
from harness.core.weight_files import ALONE, INDEX, check_new

if TYPE_CHECKING:
    from harness.core.job import Workload
    from harness.core.method import TensorState

FILE_BYTES = 2**30  # of tensors in a file, unless one alone is larger


class SavedWeights:
    """A folder being written. `workload`: of the model, by its config.json."""

    def __init__(self, workload: Workload, folder: Path, file_bytes: int = FILE_BYTES) -> None:
        self.workload, self.folder, self.file_bytes = workload, folder, file_bytes
        self.missing = set(workload.anatomy.names(workload.num_layers))
        self.held: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.num_bytes = 0

    def passing(self, states: Iterable[TensorState]) -> Iterator[TensorState]:
        """Write the tensors' weights, rounded to the workload's dtype, as they pass by. Raises ValueError in the end if
        the model has others, and OSError."""
        check_new(self.folder)
        with self._unfinished() as self.path:
            for state in states:
                self.missing.remove(state.name)
                weight = state.weight.detach().to("cpu", DTYPES[self.workload.dtype], copy=True)
                if self.held and _num_bytes(self.held) + weight.nbytes > self.file_bytes:
                    self._write()
                self.held[state.name] = weight
                yield state
            if self.missing:
                told = f"expected all weights of the model to save, got none of {min(self.missing)}"
                raise ValueError(f"{told} and {len(self.missing) - 1} others")
            self._write()
            self._finish()

    def _write(self) -> None:
        from safetensors.torch import save_file

        self.num_bytes += _num_bytes(self.held)
        save_file(self.held, self.path / str(len(self.files)), metadata={"format": "pt"})
        self.files.append(list(self.held))
        self.held = {}

    def _finish(self) -> None:
        """Name the files, now that their number is known, and write what makes them a model."""
        number = len(self.files)
        names = [ALONE] if number == 1 else [f"model-{n + 1:05}-of-{number:05}.safetensors" for n in range(number)]
        for index, name in enumerate(names):
            (self.path / str(index)).rename(self.path / name)
        if number > 1:
            weight_map = {name: file for file, held in zip(names, self.files, strict=True) for name in held}
            told = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self.path / INDEX).write_text(json.dumps(told, indent=2) + "\n")
        config_to_save(self.workload).save_pretrained(self.path)
        for path in self.path.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        self.path.rename(self.folder)

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """Make a folder beside the one that is meant, locked while this process lives; remove those of this name whose
        writers were killed."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for left in self.folder.parent.glob(f".{glob.escape(self.folder.name)}.*{UNFINISHED}"):
            with contextlib.suppress(OSError), _locked(left):
                shutil.rmtree(left)
        path = self.folder.with_name(f".{self.folder.name}.{secrets.token_hex(4)}{UNFINISHED}")
        path.mkdir()
        with _locked(path):
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)  # it has its name, unless something failed


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises BlockingIOError if another process holds it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _num_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
