"""Writes torch's distributed checkpoints on several ranks, without running code that another rank sends.

torch's own save() gathers plans and results as pickles, and runs code that these contain. Here each rank plans and
writes its own file, and trusts other ranks' tables of contents no more than a foreign checkpoint's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from methods.pipeline.checkpoint_reader import table
from methods.pipeline.transport import gathered


def write(state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
    """Write a whole checkpoint to this folder, from the state of each rank of the group (None: this process is alone).
    All ranks must call this. If one rank cannot write its part, all ranks raise an error."""
    rank = dist.get_rank(group) if group else 0
    # wait for all ranks, because one rank removes the table of an older checkpoint first
    gathered(b"", group)
    tables = _together(lambda: _part(state, path, rank), path, group)
    _together(lambda: b"" if rank else _complete(path, tables), path, group)


def _part(state: dict[str, Any], path: Path, rank: int) -> bytes:
    """Write this rank's state to a file; return the table of contents of this file."""
    planner, writer = DefaultSavePlanner(), dcp.FileSystemWriter(path)
    planner.set_up_planner(state, is_coordinator=True)
    # makes torch name the file by the rank
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    [plan], found = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    [plan] = writer.prepare_global_plan([plan])
    results = writer.write_data(planner.finish_plan(plan), planner).value()
    found.storage_data = {result.index: result.storage_data for result in results}
    return pickle.dumps(found)


def _complete(path: Path, tables: list[bytes]) -> bytes:
    """Join the tables of all ranks' files and write the whole table. The table is written after all files, because the
    table marks the checkpoint as complete. Return b"", because _together() expects bytes."""
    whole, results = Metadata({}, planner_data={}), list[WriteResult]()
    for found in map(table, tables):
        whole.state_dict_metadata |= found.state_dict_metadata
        whole.planner_data |= found.planner_data
        results += [WriteResult(index, 0, place) for index, place in found.storage_data.items()]
    dcp.FileSystemWriter(path).finish(whole, [results])
    return b""


def _together(work: Callable[[], bytes], path: Path, group: dist.ProcessGroup | None) -> list[bytes]:
    """Call work() on each rank, and return the results of all ranks. If work() fails on one rank, all ranks raise an
    error."""
    error, own = None, b""
    try:
        own = b"." + work()
    except Exception as raised:
        error = raised
    told = gathered(own, group)
    if error:
        raise error
    if failed := [str(rank) for rank, each in enumerate(told) if not each]:
        raise OSError(f"rank {', '.join(failed)} could not write its part of {path}")
    return [each[1:] for each in told]
