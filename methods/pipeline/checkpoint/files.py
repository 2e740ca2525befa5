"""Reads and writes torch's distributed checkpoints without running code that is in them or that another rank sends.

torch pickles a checkpoint's table of contents and all values that are not tensors, and torch's reader runs code that
such a pickle contains. This reader refuses a table that contains other classes than torch's tables do. It refuses other
values unless they are plain.

torch's own save() gathers plans and results as pickles, and runs code that these contain. Here each rank plans and
writes its own file, and trusts other ranks' tables of contents no more than a foreign checkpoint's.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import pickle
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from harness.base.foreign_file import read_bytes
from harness.core.failures import naming_ranks
from methods.pipeline.checkpoint.folders import COMPLETE
from methods.pipeline.transport import gathered

_CONTENTS = "torch.distributed.checkpoint"
ALLOWED = {
    *(
        (f"{_CONTENTS}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_CONTENTS}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}


def _member(kind: Any, name: str) -> Any:
    """Return the member `name` of an enumeration. This function replaces getattr, because Python before 3.11.4 pickles
    a member as a call of getattr."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"it asks for {name} of what is no enumeration")
    return kind[name]


class _Unpickler(pickle._Unpickler):  # Python's version, because the C version's opcodes cannot be replaced
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no checkpoint")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set the attributes of an unpickled object, but only of an instance of a dataclass. A changed class or
        function would affect the whole process."""
        built = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(built, type) or not dataclasses.is_dataclass(built):
            raise pickle.UnpicklingError(f"it changes {built!r:.60}")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_table(Path(self.path))


class Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is no tensor from its bytes. torch's own method would load any object; this method loads
        only plain values."""
        name = read_item.dest_index.fqn
        assert self.state_dict is not None
        self.original_state_dict[name] = self.state_dict[name] = torch.load(value, weights_only=True)


def load_table(data: bytes) -> Metadata:
    """Load a table of contents from a pickle that is not trusted."""
    contents = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(contents, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(contents).__name__}")
    return contents


def read_table(path: Path) -> Metadata:
    """Return the table of contents of the checkpoint in this folder. Raises ValueError if there is no valid table, or
    if the files hold fewer bytes than the table says."""
    try:
        contents = load_table(read_bytes(path / COMPLETE))
        expected = sum(map(_tensor_bytes, contents.state_dict_metadata.values()))
        size = sum(map(_file_size, path.iterdir()))
        if expected > size:
            raise ValueError(f"expected files with the table's {expected} bytes of tensors, got {size} bytes")
        for stored in (contents.storage_data or {}).values():
            _check_inside(stored)
        contents.storage_meta = contents.storage_meta or StorageMeta()
    except Exception as error:  # reading damaged or foreign bytes may raise anything
        raise unreadable(path, error) from error
    return contents


def _tensor_bytes(kind: Any) -> int:
    """Return the bytes of a value, from its entry in the table of contents; 0 if the value is no tensor. Raises
    ValueError if the entry is not valid."""
    if isinstance(kind, BytesStorageMetadata):
        return 0
    if not isinstance(kind, TensorStorageMetadata) or not isinstance(kind.properties.dtype, torch.dtype):
        raise ValueError(f"expected only tensors in the checkpoint's table, got a {type(kind).__name__}")
    if not all(isinstance(size, int) and size >= 0 for size in kind.size):
        raise ValueError(f"expected sizes from 0 in a tensor's shape, got {tuple(kind.size)}")
    return math.prod(kind.size) * kind.properties.dtype.itemsize


def _check_inside(stored: Any) -> None:
    """Raise ValueError unless a table's entry names a file of the checkpoint's own folder: torch opens any path."""
    name = getattr(stored, "relative_path", None)
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"expected files in the checkpoint's folder, got {name!r:.80}")


def _file_size(file: Path) -> int:
    status = file.lstat()  # a symbolic link may lead out of the folder
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"expected regular files, got another kind: {file.name}")
    return status.st_size


def load_values(path: Path, state: dict[str, Any]) -> None:
    """Fill `state`, in place, with the values that the checkpoint in this folder has under the same keys. Raises
    ValueError if a file is damaged."""
    try:
        dcp.load(state, storage_reader=Reader(path), planner=Planner(flatten_state_dict=False), no_dist=True)
    except (Exception, CheckpointException) as error:  # CheckpointException is not derived from Exception
        raise unreadable(path, error) from error


def unreadable(path: Path, error: BaseException) -> ValueError:
    """Return a ValueError of one line that tells the first cause of `error`, even if torch has wrapped the cause in
    another error."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    reason = (str(cause).splitlines() or [""])[0] or type(cause).__name__
    if reason.startswith("Weights only load failed"):
        # name only the class, without torch's advice to allow running code
        named = re.search(r"GLOBAL (\S+)", str(cause))
        reason = (
            f"an item names {named[1]}, which is no plain value" if named else "an item is no plain value"
        )
    return ValueError(
        f"{path}: expected a checkpoint, got damaged or foreign files: {reason}; try an older step"
    )


def write_checkpoint(state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
    """Write a whole checkpoint to this folder, from the state of each rank of the group (None: this process is alone).
    All ranks must call this. If one rank cannot write its part, all ranks raise an error."""
    rank = dist.get_rank(group) if group else 0
    # wait for all ranks, because one rank removes the table of an older checkpoint first
    gathered(b"", group)
    tables = _on_all_ranks(lambda: _write_own_file(state, path, rank), path, group)
    _on_all_ranks(lambda: b"" if rank else _complete(path, tables), path, group)


def _write_own_file(state: dict[str, Any], path: Path, rank: int) -> bytes:
    """Write this rank's state to a file; return the table of contents of this file."""
    planner, writer = DefaultSavePlanner(), dcp.FileSystemWriter(path)
    planner.set_up_planner(state, is_coordinator=True)
    # makes torch name the file by the rank
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    [plan], contents = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan([plan])
    results = writer.write_data(planner.finish_plan(plan), planner).value()
    contents.storage_data = {result.index: result.storage_data for result in results}
    return pickle.dumps(contents)


def _complete(path: Path, tables: list[bytes]) -> bytes:
    """Join the tables of all ranks' files and write the whole table. The table is written after all files, because the
    table marks the checkpoint as complete. Return b"", because _on_all_ranks() expects bytes."""
    whole, results = Metadata({}, planner_data={}), list[WriteResult]()
    for contents in map(load_table, tables):
        whole.state_dict_metadata |= contents.state_dict_metadata
        whole.planner_data |= contents.planner_data
        results += [WriteResult(index, 0, storage) for index, storage in contents.storage_data.items()]
    dcp.FileSystemWriter(path).finish(whole, [results])
    return b""


def _on_all_ranks(work: Callable[[], bytes], path: Path, group: dist.ProcessGroup | None) -> list[bytes]:
    """Call work() on each rank, and return the results of all ranks. If work() fails on one rank, all ranks raise an
    error."""
    error, message = None, b""  # an empty message tells the other ranks of an error
    try:
        message = b"." + work()
    except Exception as raised:
        error = raised
    messages = gathered(message, group)
    if error:
        raise error
    if failed := [rank for rank, result in enumerate(messages) if not result]:
        text = f"rank {', '.join(map(str, failed))} could not write its part of {path}"
        raise naming_ranks(OSError(text), failed)
    return [result[1:] for result in messages]
