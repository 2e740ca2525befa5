"""Reads starting values from a model's weights in the format of the Hugging Face Hub: a folder with one file of
safetensors, or with several such files and an index. torch is imported only when a tensor is read.

Each tensor is mapped into memory when it is needed and then read in blocks, so memory holds no second copy of the
model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.foreign_file import read_json
from harness.core.corpus_files import sampled_hash

if TYPE_CHECKING:
    from torch import Tensor

    from harness.core.job import Workload

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names of the dtypes that weights may have here
HASHED_BLOCKS = 2**14  # number of hashed blocks of each file; a file of up to 64 MiB is hashed whole
TEXT_PART = "language_model"  # prefix of the part for texts, in files of models of texts and images
OTHER_HEAD = "embed_out.weight"  # name of the head's matrix in the files of some families of models


def check(workload: Workload) -> None:
    """Raise ValueError unless the folder `workload.weights` holds every tensor of the workload's model, in the model's
    shape and in a dtype of DTYPES."""
    anatomy, folder = workload.anatomy, Path(str(workload.weights))
    files = _files(folder)
    for name in anatomy.names(workload.num_layers):
        expected = list(anatomy.ends.get(name) or anatomy.layer[anatomy.within(name)])
        with _opened(files, folder, name, "np") as (file, own):
            tensor = file.get_slice(own)
            if (dtype := tensor.get_dtype()) not in DTYPES:
                told = f"expected weights in {', '.join(DTYPES)}, got {dtype} for {own}"
                raise ValueError(f"{folder}: {told}; try the original model's weights")
            if (found := tensor.get_shape()) != expected:
                told = f"expected {own} of shape {expected}, got {found}"
                raise ValueError(f"{folder}: {told}; try --model {folder}")


def files_hash(folder: str) -> str:
    """Return a hash of a folder of weights, made of the name and the sampled_hash() of each file."""
    digest = hashlib.sha256()
    with contextlib.suppress(ValueError):  # if the weights cannot be read, the run will say why
        for name in sorted(set(_files(Path(folder)).values())):
            path = Path(folder) / name
            told = _hash(path, *_state(path)) if path.exists() else "missing"
            digest.update(f"{name} {told} ".encode())
    return digest.hexdigest()[:16]


def paths(folder: str) -> list[Path]:
    """Return the paths of the folder's index and of its files of weights, with symbolic links resolved. The index may
    not exist. Raises ValueError if the folder has no weights."""
    return [(Path(folder) / name).resolve() for name in sorted({INDEX, *_files(Path(folder)).values()})]


def reading(folder: str, name: str) -> Callable[[Tensor], Tensor]:
    """Return a function that fills an fp32 host tensor with values of the model's tensor `name`. The first call takes
    the first values; each later call continues where the call before it ended."""
    path = Path(folder)
    with _opened(_files(path), path, name, "pt") as (file, own):
        values, start = file.get_tensor(own).view(-1), 0  # the tensor is mapped into memory, not read

    def fill(tensor: Tensor) -> Tensor:
        nonlocal start
        block = values[start : start + tensor.numel()]
        start += tensor.numel()
        return tensor.copy_(block.view(tensor.shape))

    return fill


def _state(path: Path) -> tuple[int, int, int]:
    """Return a file's inode number, size in bytes and time of last change. If the file's content changes, at least one
    of these changes, too."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=256)
def _hash(path: Path, *state: int) -> str:
    """Return sampled_hash() of a file. The hash is cached, because a job's key is computed many times. `state` is the
    file's _state(): a changed file has another state, so it is hashed again."""
    return sampled_hash(path, HASHED_BLOCKS)


def _files(folder: Path) -> dict[str, str]:
    """Return, for the name of each tensor, the name of its file. Raises ValueError if the folder has no weights or has
    a damaged index."""
    for name in (ALONE, INDEX):
        if (folder / name).is_file():
            return _listed(folder, name, *_state(folder / name))
    found = "a folder without either" if folder.is_dir() else "no such folder"
    raise ValueError(f"--weights {folder}: expected a folder with {ALONE} or {INDEX}, as Hugging Face has, got {found}")


@functools.lru_cache(maxsize=8)
def _listed(folder: Path, name: str, *state: int) -> dict[str, str]:
    """Return, for the name of each tensor, the name of its file. `name` is the folder's only file of weights (ALONE) or
    its index (INDEX). The answer is cached. `state` is the file's _state(): a changed file is read again."""
    if name == ALONE:
        with _file(folder, ALONE, "np") as file:
            return dict.fromkeys(file.keys(), ALONE)
    try:
        found = read_json((folder / INDEX).resolve())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX}: expected a weight_map, got {error!s:.80}; fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{folder / INDEX}: expected an object as weight_map, got {found!r:.80}; fetch it again")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file:
            told = f"tensor {name}: expected a file name without a folder, got {file!r:.80}"
            raise ValueError(f"{folder / INDEX}: {told}; fetch it again")
    return found


@contextlib.contextmanager
def _opened(files: dict[str, str], folder: Path, name: str, framework: str) -> Iterator[tuple[Any, str]]:
    """Yield the opened file that holds the model's tensor `name`, and the tensor's name in this file. The two names may
    differ: some files leave out the prefix of the base model, such as `model.`, and files of models of texts and images
    add the prefix TEXT_PART. Raises ValueError if there is no such tensor."""
    base = name.partition(".")[2]
    others = [OTHER_HEAD] if name == "lm_head.weight" else []
    for own in (name, base, f"{TEXT_PART}.{name}", f"model.{TEXT_PART}.{base}", *others):
        if own in files:
            with _file(folder, files[own], framework) as file:
                if own not in file.keys():  # noqa: SIM118 a file of tensors is no dictionary
                    raise ValueError(f"{folder / files[own]}: expected {own}, as the index says; fetch it again")
                yield file, own
            return
    raise ValueError(f"{folder}: expected weights of {name}, got none of this name; try --model {folder}")


@contextlib.contextmanager
def _file(folder: Path, name: str, framework: str) -> Iterator[Any]:
    """Yield a file of tensors, opened. Raises ValueError if the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(folder / name, framework=framework)
    except FileNotFoundError as error:
        raise ValueError(f"{folder / name}: expected this file of weights, got none; fetch it again") from error
    except (OSError, SafetensorError) as error:
        told = f"expected a file of safetensors, got {error!s:.80}"
        raise ValueError(f"{folder / name}: {told}; fetch it again") from error
    with opened as file:
        yield file
