"""Reads starting values from a model's weights in the format of the Hugging Face Hub: a folder with one file of
safetensors, or with several such files and an index. torch is imported only when a tensor is read.

Each tensor is mapped into memory when it is needed and then read in blocks, so memory holds no second copy of the
model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.foreign_file import read_json
from harness.core import hub_config
from harness.core.corpus_files import sampled_hash

if TYPE_CHECKING:
    from torch import Tensor

    from harness.core.job import Workload

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' names of the dtypes that weights may have here
HASHED_BLOCKS = 2**14  # number of hashed blocks of each file; a file of up to 64 MiB is hashed whole
TEXT_PART = "language_model"  # prefix of the part for texts, in files of models of texts and images
ADAPTER = "adapter_config.json"  # file beside which transformers loads an adapter's weights, too
PICKLES = "*.bin"  # files of weights that older versions of transformers wrote
COMPARED_BYTES = 2**24  # bytes of two tensors that are compared at once
HEAD = "lm_head.weight"
# Fields of a configuration that may differ between weights and model: no number of a training depends on them.
NOT_COMPUTED = {
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "pretraining_tp",
    "use_cache",
}
FIRST_EXPERT = (
    ".experts.0."  # part of tensors' names in files that hold the matrices of each expert by themselves
)
OTHER_HEAD = "embed_out.weight"  # name of the head's matrix in the files of some families of models


def check(workload: Workload) -> None:
    """Raise ValueError unless the folder `workload.weights` holds every tensor of the workload's model, in the model's
    shape and in a dtype of DTYPES, and no tensor that transformers would load or warn of, and that the model lacks."""
    anatomy, folder = workload.anatomy, Path(str(workload.weights))
    if (folder / ADAPTER).exists():
        message = f"expected weights of a whole model, got an adapter beside them ({ADAPTER})"
        raise ValueError(f"{folder}: {message}; merge it into the model first, by merge_and_unload of peft")
    _check_config(workload, folder)
    files, read = _files(folder), set[str]()
    for name in anatomy.names(workload.num_layers):
        expected = list(anatomy.shape_of(name) or ())
        with _opened(files, folder, name, "np") as (file, stored):
            read.add(stored)
            tensor = file.get_slice(stored)
            if (dtype := tensor.get_dtype()) not in DTYPES:
                message = f"expected weights in {', '.join(DTYPES)}, got {dtype} for {stored}"
                raise ValueError(f"{folder}: {message}; try the original model's weights")
            if (shape := tensor.get_shape()) != expected:
                message = f"expected {stored} of shape {expected}, got {shape}"
                raise ValueError(f"{folder}: {message}; try --model {folder}")
    _check_tied_head(workload, files, read)
    if others := _others(workload, files, read):
        message = f"expected only tensors of the model, got {min(others)}, one of {len(others)} that it lacks"
        way = "try the config.json that has them, or remove them from the files"
        raise ValueError(f"{folder}: {message} and would not train; {way}")


def _check_config(workload: Workload, folder: Path) -> None:
    """Raise ValueError if the folder has a config.json of another model than --model: tensors of the same shapes may
    belong to other angles of positions or another epsilon of the norms."""
    if not (folder / hub_config.FILE).exists():
        return
    config, _ = hub_config.read_config(folder)
    if (text := hub_config.text_of(config)) == workload.config:
        return
    heads = hub_config.sizes_of(config)["num_heads"]
    written = dataclasses.replace(workload, config=text, num_heads=heads, weights=None).anatomy.fields
    fields = workload.anatomy.fields
    for name in sorted((fields.keys() | written.keys()) - NOT_COMPUTED):
        if fields.get(name) != written.get(name):
            got = (
                f"got a config.json with {name} {written.get(name)!r:.80} instead of {fields.get(name)!r:.80}"
            )
            raise ValueError(
                f"{folder}: expected weights of the model of --model, {got}; try --model {folder}"
            )


def _check_tied_head(workload: Workload, files: dict[str, str], read: set[str]) -> None:
    """Raise ValueError if the configuration ties the head to the embedding, but the files hold a head with other
    values: transformers then does not tie them. A head with the embedding's values counts as read."""
    anatomy, folder = workload.anatomy, Path(str(workload.weights))
    heads = [name for name in _names(HEAD) if name in files] if anatomy.is_tied else []
    if not heads:
        return
    table = next(stored for stored in _names(next(iter(anatomy.embedding))) if stored in files)
    paths = [folder / files[stored] for stored in (heads[0], table)]
    if not _is_same(heads[0], table, *paths, *map(_state, paths)):
        message = f"expected no {heads[0]}, or one with the values of {table}, since config.json ties them, got another"
        raise ValueError(f"{folder}: {message}; write tie_word_embeddings: false into config.json")
    read.add(heads[0])


def _others(workload: Workload, files: dict[str, str], read: set[str]) -> set[str]:
    """Return the names of tensors in the files that the model lacks. Not among them are layers that the workload leaves
    out, the other parts of a model of texts and images, and what transformers ignores for this model."""
    anatomy, num_layers = workload.anatomy, workload.num_layers
    whole = hub_config.sizes_of(hub_config.parsed(str(workload.config)))["num_layers"]
    left_out_layers = range(num_layers, whole)
    left_out = {name for name, _ in workload.at_depth(whole).anatomy.layer_tensors(left_out_layers)}
    others = files.keys() - read - {stored for name in left_out for stored in _names(name)}
    if any(TEXT_PART in stored.split(".") for stored in read):
        others = {stored for stored in others if TEXT_PART in stored.split(".")}
    ignored = re.compile("|".join(f"({pattern})" for pattern in anatomy.ignored) or r"(?!)")
    return {stored for stored in others if not ignored.search(stored)}


@functools.lru_cache(maxsize=8)
def _is_same(name: str, other: str, path: Path, other_path: Path, *states: tuple[int, int, int]) -> bool:
    """True if two tensors in files of safetensors have the same bytes. The answer is cached for the files' states."""
    spans = [_span(path, name), _span(other_path, other)]
    if len({stop - start for start, stop in spans}) > 1:
        return False
    with open(path, "rb") as file, open(other_path, "rb") as other_file:
        for opened, (start, _) in zip((file, other_file), spans, strict=True):
            opened.seek(start)
        left = spans[0][1] - spans[0][0]
        while left:
            size = min(left, COMPARED_BYTES)
            if file.read(size) != other_file.read(size):
                return False
            left -= size
    return True


def _span(path: Path, name: str) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end in a file of safetensors. The file begins with the header's length, 8
    bytes, and the header; offsets count from the header's end."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + start, 8 + length + stop


def files_hash(folder: str) -> str:
    """Return a hash of a folder of weights, made of the name and the sampled_hash() of each file."""
    digest = hashlib.sha256()
    with contextlib.suppress(ValueError):  # if the weights cannot be read, the run will say why
        for name in sorted(set(_files(Path(folder)).values())):
            path = Path(folder) / name
            digest_text = _hash(path, *_state(path)) if path.exists() else "missing"
            digest.update(f"{name} {digest_text} ".encode())
    return digest.hexdigest()[:16]


def paths(folder: str) -> list[Path]:
    """Return the paths of the folder's index and of its files of weights, with symbolic links resolved. The index may
    not exist. Raises ValueError if the folder has no weights."""
    return [(Path(folder) / name).resolve() for name in sorted({INDEX, *_files(Path(folder)).values()})]


def reading(folder: str, name: str) -> Callable[[Tensor], Tensor]:
    """Return a function that fills an fp32 host tensor with values of the model's tensor `name`. The first call takes
    the first values; each later call continues where the call before it ended."""
    path = Path(folder)
    with _opened(_files(path), path, name, "pt") as (file, stored):
        values, start = file.get_tensor(stored).view(-1), 0  # the tensor is mapped into memory, not read

    def fill(tensor: Tensor) -> Tensor:
        nonlocal start
        block = values[start : start + tensor.numel()]
        start += tensor.numel()
        return tensor.copy_(block.view(tensor.shape))

    return fill


def _state(path: Path) -> tuple[int, int, int]:
    """Return a file's inode number, size in bytes and time of last change. If the file's content changes, at least one
    of these changes, too."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


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
    pickles = sorted(path.name for path in folder.glob(PICKLES)) if folder.is_dir() else []
    if pickles:
        way = f"try from_pretrained({str(folder)!r}) and save_pretrained of transformers, into a new folder"
        raise ValueError(
            f"--weights {folder}: expected {ALONE} or {INDEX}, got {pickles[0]}, which only unpickling reads: {way}"
        )
    kind = "a folder without either" if folder.is_dir() else "no such folder"
    raise ValueError(
        f"--weights {folder}: expected a folder with {ALONE} or {INDEX}, as Hugging Face has, got {kind}"
    )


@functools.lru_cache(maxsize=8)
def _listed(folder: Path, name: str, *state: int) -> dict[str, str]:
    """Return, for the name of each tensor, the name of its file. `name` is the folder's only file of weights (ALONE) or
    its index (INDEX). The answer is cached. `state` is the file's _state(): a changed file is read again."""
    if name == ALONE:
        with _file(folder, ALONE, "np") as file:
            return dict.fromkeys(file.keys(), ALONE)
    try:
        weight_map = read_json((folder / INDEX).resolve())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / INDEX}: expected a weight_map, got {error!s:.80}; fetch it again"
        ) from error
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{folder / INDEX}: expected an object as weight_map, got {weight_map!r:.80}; fetch it again"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            message = f"tensor {name}: expected a file name without a folder, got {file!r:.80}"
            raise ValueError(f"{folder / INDEX}: {message}; fetch it again")
    return weight_map


@contextlib.contextmanager
def _opened(files: dict[str, str], folder: Path, name: str, framework: str) -> Iterator[tuple[Any, str]]:
    """Yield the opened file that holds the model's tensor `name`, and the tensor's name in this file. Raises ValueError
    if there is no such tensor."""
    for stored in _names(name):
        if stored in files:
            with _file(folder, files[stored], framework) as file:
                if stored not in file.keys():  # noqa: SIM118 a file of tensors is no dictionary
                    raise ValueError(
                        f"{folder / files[stored]}: expected {stored}, as the index says; fetch it again"
                    )
                yield file, stored
            return
    if longer := next((stored for stored in files if stored.endswith(f".{name}")), None):
        message = f"got {longer}; save the files again without {longer.removesuffix(name)} before each name"
        raise ValueError(f"{folder}: expected weights of {name}, {message}")
    if single := next((stored for stored in files if FIRST_EXPERT in stored), None):
        message = f"got a tensor for each expert ({single}), which transformers joins when it loads them"
        way = "write model.state_dict() of from_pretrained with save_file of safetensors.torch, into a new folder"
        raise ValueError(f"{folder}: expected weights of {name}, {message}; {way}")
    raise ValueError(f"{folder}: expected weights of {name}, got none of this name; try --model {folder}")


def _names(name: str) -> tuple[str, ...]:
    """Return the names that the model's tensor `name` may have in files. Some files leave out the prefix of the base
    model, such as `model.`, and files of models of texts and images add the prefix TEXT_PART."""
    base = name.partition(".")[2]
    others = (OTHER_HEAD,) if name == HEAD else ()
    return (name, base, f"{TEXT_PART}.{name}", f"model.{TEXT_PART}.{base}", *others)


@contextlib.contextmanager
def _file(folder: Path, name: str, framework: str) -> Iterator[Any]:
    """Yield a file of tensors, opened. Raises ValueError if the file is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(folder / name, framework=framework)
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder / name}: expected this file of weights, got none; fetch it again"
        ) from error
    except (OSError, SafetensorError) as error:
        message = f"expected a file of safetensors, got {error!s:.80}"
        raise ValueError(f"{folder / name}: {message}; fetch it again") from error
    with opened as file:
        yield file
