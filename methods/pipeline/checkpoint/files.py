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
from methods.pipeline.checkpoint.folders import TABLE_FILE
from methods.pipeline.transport import gather_messages

StoredValues = dict[str, Any]  # tensors and plain values, by their keys in a checkpoint
_TORCH_CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED_CLASSES = {
    *(
        (f"{_TORCH_CHECKPOINT}.metadata", name)
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
    (f"{_TORCH_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}


def _enum_member(enum_class: Any, member_name: str) -> Any:
    """Return the member `member_name` of an enumeration. This function replaces getattr, because Python before 3.11.4
    pickles a member as a call of getattr."""
    if not (isinstance(enum_class, type) and issubclass(enum_class, enum.Enum)):
        raise pickle.UnpicklingError(f"it asks for {member_name} of what is no enumeration")
    return enum_class[member_name]


class _Unpickler(pickle._Unpickler):  # Python's version, because the C version's opcodes cannot be replaced
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) not in ALLOWED_CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no checkpoint")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Set the attributes of an unpickled object, but only of an instance of a dataclass. A changed class or
        function would affect the whole process."""
        built_object = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(built_object, type) or not dataclasses.is_dataclass(built_object):
            raise pickle.UnpicklingError(f"it changes {built_object!r:.60}")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class TableReader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_table(Path(self.path))


class PlainValuesPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is no tensor from its bytes. torch's own method would load any object; this method loads
        only plain values."""
        name = read_item.dest_index.fqn
        assert self.state_dict is not None
        self.original_state_dict[name] = self.state_dict[name] = torch.load(value, weights_only=True)


def load_table(data: bytes) -> Metadata:
    """Load a table of contents from a pickle that is not trusted."""
    table = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(table, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(table).__name__}")
    return table


def read_table(path: Path) -> Metadata:
    """Return the table of contents of the checkpoint in this folder. Raises ValueError if there is no valid table, or
    if the files hold fewer bytes than the table says."""
    try:
        table = load_table(read_bytes(path / TABLE_FILE))
        expected_bytes = sum(map(_tensor_bytes, table.state_dict_metadata.values()))
        stored_bytes = sum(map(_file_size, path.iterdir()))
        if expected_bytes > stored_bytes:
            raise ValueError(
                f"expected files with the table's {expected_bytes} bytes of tensors, got {stored_bytes} bytes"
            )
        for entry in (table.storage_data or {}).values():
            _check_inside(entry)
        table.storage_meta = table.storage_meta or StorageMeta()
    except Exception as error:  # reading damaged or foreign bytes may raise anything
        raise unreadable_error(path, error) from error
    return table


def _tensor_bytes(entry: Any) -> int:
    """Return the bytes of a value, from its entry in the table of contents; 0 if the value is no tensor. Raises
    ValueError if the entry is not valid."""
    if isinstance(entry, BytesStorageMetadata):
        return 0
    if not isinstance(entry, TensorStorageMetadata) or not isinstance(entry.properties.dtype, torch.dtype):
        raise ValueError(f"expected only tensors in the checkpoint's table, got a {type(entry).__name__}")
    if not all(isinstance(dimension, int) and dimension >= 0 for dimension in entry.size):
        raise ValueError(f"expected sizes from 0 in a tensor's shape, got {tuple(entry.size)}")
    return math.prod(entry.size) * entry.properties.dtype.itemsize


def _check_inside(entry: Any) -> None:
    """Raise ValueError unless a table's entry names a file of the checkpoint's own folder: torch opens any path."""
    file_name = getattr(entry, "relative_path", None)
    if not isinstance(file_name, str) or file_name in ("", ".", "..") or Path(file_name).name != file_name:
        raise ValueError(f"expected files in the checkpoint's folder, got {file_name!r:.80}")


def _file_size(file: Path) -> int:
    status = file.lstat()  # a symbolic link may lead out of the folder
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"expected regular files, got another kind: {file.name}")
    return status.st_size


def load_values(path: Path, state: StoredValues) -> None:
    """Fill `state`, in place, with the values that the checkpoint in this folder has under the same keys. Raises
    ValueError if a file is damaged."""
    try:
        dcp.load(
            state,
            storage_reader=TableReader(path),
            planner=PlainValuesPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    except (Exception, CheckpointException) as error:  # CheckpointException is not derived from Exception
        raise unreadable_error(path, error) from error


def unreadable_error(path: Path, error: BaseException) -> ValueError:
    """Return a ValueError of one line that tells the first cause of `error`, even if torch has wrapped the cause in
    another error."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    reason = (str(cause).splitlines() or [""])[0] or type(cause).__name__
    if reason.startswith("Weights only load failed"):
        # name only the class, without torch's advice to allow running code
        class_match = re.search(r"GLOBAL (\S+)", str(cause))
        reason = (
            f"an item names {class_match[1]}, which is no plain value"
            if class_match
            else "an item is no plain value"
        )
    return ValueError(
        f"{path}: expected a checkpoint, got damaged or foreign files: {reason}; try an older step"
    )


def write_checkpoint(state: StoredValues, path: Path, group: dist.ProcessGroup | None) -> None:
    """Write a whole checkpoint to this folder, from the state of each rank of the group (None: this process is alone).
    All ranks must call this. If one rank cannot write its part, all ranks raise an error."""
    rank = dist.get_rank(group) if group else 0
    # wait for all ranks, because one rank removes the table of an older checkpoint first
    gather_messages(b"", group)
    tables = _run_on_all_ranks(lambda: _write_own_file(state, path, rank), path, group)
    _run_on_all_ranks(lambda: b"" if rank else _write_whole_table(path, tables), path, group)


def _write_own_file(state: StoredValues, path: Path, rank: int) -> bytes:
    """Write this rank's state to a file; return the table of contents of this file."""
    planner, writer = DefaultSavePlanner(), dcp.FileSystemWriter(path)
    planner.set_up_planner(state, is_coordinator=True)
    # makes torch name the file by the rank
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    [plan], table = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan([plan])
    results = writer.write_data(planner.finish_plan(plan), planner).value()
    table.storage_data = {result.index: result.storage_data for result in results}
    return pickle.dumps(table)


def _write_whole_table(path: Path, tables: list[bytes]) -> bytes:
    """Join the tables of all ranks' files and write the whole table. The table is written after all files, because the
    table marks the checkpoint as complete. Return b"", because _on_all_ranks() expects bytes."""
    whole_table, results = Metadata({}, planner_data={}), list[WriteResult]()
    for table in map(load_table, tables):
        whole_table.state_dict_metadata |= table.state_dict_metadata
        whole_table.planner_data |= table.planner_data
        results += [WriteResult(index, 0, storage) for index, storage in table.storage_data.items()]
    dcp.FileSystemWriter(path).finish(whole_table, [results])
    return b""


def _run_on_all_ranks(write: Callable[[], bytes], path: Path, group: dist.ProcessGroup | None) -> list[bytes]:
    """Call work() on each rank, and return the results of all ranks. If work() fails on one rank, all ranks raise an
    error."""
    error, message = None, b""  # an empty message tells the other ranks of an error
    try:
        message = b"." + write()
    except Exception as raised_error:
        error = raised_error
    messages = gather_messages(message, group)
    if error:
        raise error
    if failed_ranks := [rank for rank, result in enumerate(messages) if not result]:
        text = f"rank {', '.join(map(str, failed_ranks))} could not write its part of {path}"
        raise naming_ranks(OSError(text), failed_ranks)
    return [result[1:] for result in messages]
