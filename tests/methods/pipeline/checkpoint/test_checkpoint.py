"""Checkpoints: what is incomplete is never taken, however the writing ended."""

from __future__ import annotations

import enum
import json
import os
import pickle
import random
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from methods.pipeline.checkpoint import files
from methods.pipeline.checkpoint.checkpoints import Checkpoints, GptProgress, read_checkpoint
from methods.pipeline.checkpoint.folders import TABLE_FILE, checkpoint_folder, complete_steps, find_checkpoint
from tests.support.ranks import on_ranks

MOMENTS = 20


def state(step: int) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer, Checkpoints]:
    """A stage whose weights and moments tell their step."""
    masters = {
        f"layer.{number}": nn.Parameter(torch.full((64, 64), float(step + number))) for number in range(4)
    }
    optimizer = torch.optim.AdamW(masters.values())
    for master in masters.values():
        moments = {name: torch.full((64, 64), step / 3) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[master] = {"step": torch.tensor(float(step)), **moments}
    return masters, optimizer, Checkpoints(masters, optimizer, list(masters), (0, 0, 1))


def save_for_ever(folder: Path, ready: int) -> None:
    """Tells of each checkpoint that is complete."""
    step = (complete_steps(folder) or [0])[-1]
    while True:
        step += 1
        state(step)[2].save(folder, step, {"step": step}).result()
        os.write(ready, b".")


def test_a_checkpoint_is_read_back_to_the_bit(tmp_path: Path) -> None:
    masters, optimizer, checkpoints = state(7)
    checkpoints.save(tmp_path, 7, {"step": 7}).result()
    others, other_optimizer, other = state(1)
    assert other.load(tmp_path, dict) == (7, {"step": 7})
    for name, master in masters.items():
        assert torch.equal(others[name], master)
        for key, value in optimizer.state[master].items():
            assert torch.equal(other_optimizer.state[others[name]][key], value)


class Touches:
    """Whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["table of contents", "within the table", "item"])
def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, where: str) -> None:
    bad, touched = Touches(tmp_path / "touched"), tmp_path / "touched"
    state(7)[2].save(tmp_path, 7, {"step": 7}).result()
    path = checkpoint_folder(tmp_path, 7)
    if where == "item":
        dcp.save({"progress": bad}, checkpoint_id=path, no_dist=True)
    else:
        table = files.read_table(path)
        table.planner_data = bad
        (path / TABLE_FILE).write_bytes(pickle.dumps(bad if where == "table of contents" else table))
    with pytest.raises(
        ValueError, match=rf"{path}: expected a checkpoint, got damaged or foreign files"
    ) as error:
        read_checkpoint(tmp_path)
    assert not touched.exists() and "\n" not in str(error.value)
    assert "names " in str(error.value) and "weights_only" not in str(error.value)


def test_a_checkpoint_of_an_older_python_is_read_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 3.11.4 an enumeration's member is pickled as a call of getattr."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    state(7)[2].save(tmp_path, 7, {"step": 7}).result()
    assert b"getattr" in (checkpoint_folder(tmp_path, 7) / TABLE_FILE).read_bytes()
    assert state(1)[2].load(tmp_path, dict) == (7, {"step": 7})


def test_getattr_in_a_checkpoint_reaches_no_more_than_an_enumeration(tmp_path: Path) -> None:
    class Asks:
        def __reduce__(self) -> tuple:
            return getattr, (Metadata, "__init__")

    state(7)[2].save(tmp_path, 7, {"step": 7}).result()
    (checkpoint_folder(tmp_path, 7) / TABLE_FILE).write_bytes(pickle.dumps(Asks()))
    with pytest.raises(ValueError, match="it asks for __init__ of what is no enumeration"):
        read_checkpoint(tmp_path)


PROGRESS = asdict(GptProgress(7, 1.0, 7, {"num_layers": 2}, *([1.0] * 7, [1.0] * 7, [None] * 7, [False] * 7)))
MOMENT, OPTIONS = "optimizer.layer.1.exp_avg", "options.layer.1"
TAMPERED: dict[str, dict[str, Any]] = {
    "exp_avg of layer.1: expected float32 of shape (64, 64), got float32 of shape (3,)": {
        MOMENT: torch.zeros(3)
    },
    "exp_avg of layer.1: expected float32 of shape (64, 64), got float64": {
        MOMENT: torch.zeros(64, 64, dtype=torch.float64)
    },
    "exp_avg of layer.1: expected float32 of shape (64, 64), got no tensor": {MOMENT: "hello"},
    "expected optimizer states exp_avg, exp_avg_sq, step, got evil": {
        "optimizer.layer.1.evil": torch.zeros(3)
    },
    "layer.1: expected optimizer states exp_avg, exp_avg_sq, step, got exp_avg_sq, step": {MOMENT: None},
    "option betas of layer.1: expected a value like (0.9, 0.999), got 'x'": {
        OPTIONS: json.dumps({"betas": "x"})
    },
    "Expecting ',' delimiter": {OPTIONS: "[1"},
    "'list' object has no attribute 'items'": {OPTIONS: "[1]"},
    "it lacks progress": {"progress": None},
    "the JSON object must be str, bytes or bytearray, not int": {"progress": 5},
    "recursion": {"progress": "[" * 100_000},
    "loss.0: expected a valid number, got 'a'": {"progress": json.dumps(PROGRESS | {"loss": ["a"] * 7})},
    "losses, norms, loss scales and skips, got [5, 7]": {
        "progress": json.dumps(PROGRESS | {"loss": [1.0] * 5})
    },
    "expected the hash of the source code, got 'x": {"progress": json.dumps(PROGRESS | {"source": "x\ny"})},
    "expected a loss scale for each skipped step": {
        "progress": json.dumps(PROGRESS | {"skipped": [True] * 7})
    },
}


@pytest.mark.parametrize("message", TAMPERED)
def test_a_tampered_part_is_told_with_its_checkpoint_and_nothing_is_taken(
    tmp_path: Path, message: str
) -> None:
    state(7)[2].save(tmp_path, 7, PROGRESS).result()
    parts = {
        name: value
        for name, value in (read_checkpoint(tmp_path) | TAMPERED[message]).items()
        if value is not None
    }
    shutil.rmtree(checkpoint_folder(tmp_path, 7))
    dcp.save(parts, checkpoint_id=checkpoint_folder(tmp_path, 7), no_dist=True)
    masters, _, checkpoints = state(1)
    before = {name: master.clone() for name, master in masters.items()}
    with pytest.raises(ValueError, match="expected a checkpoint, got damaged or foreign files: ") as caught:
        checkpoints.load(tmp_path, GptProgress)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert all(torch.equal(master, before[name]) for name, master in masters.items())


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_size_that_the_files_do_not_have_takes_no_memory(tmp_path: Path, part: str) -> None:
    state(7)[2].save(tmp_path, 7, PROGRESS).result()
    path = checkpoint_folder(tmp_path, 7)
    table = files.read_table(path)
    name = next(name for name in table.state_dict_metadata if name.startswith(part))
    table.state_dict_metadata[name].size = torch.Size([10**13])
    (path / TABLE_FILE).write_bytes(pickle.dumps(table))
    for load in (lambda: read_checkpoint(tmp_path), lambda: state(1)[2].load(tmp_path, GptProgress)):
        with pytest.raises(
            ValueError, match=r"expected files with the table's \d+ bytes of tensors, got \d+"
        ):
            load()


def test_a_weight_of_another_shape_is_of_another_model(tmp_path: Path) -> None:
    state(7)[2].save(tmp_path, 7, PROGRESS).result()
    masters, optimizer, _ = state(1)
    masters["layer.1"] = nn.Parameter(torch.zeros(64, 32))
    message = r"layer.1: expected float32 of shape \(64, 32\), got float32 of shape \(64, 64\)"
    with pytest.raises(ValueError, match=message):
        Checkpoints(masters, optimizer, list(masters), (0, 0, 1)).load(tmp_path, GptProgress)


def test_a_pipe_in_place_of_a_table_is_not_waited_for(tmp_path: Path) -> None:
    state(7)[2].save(tmp_path, 7, PROGRESS).result()
    (checkpoint_folder(tmp_path, 7) / TABLE_FILE).unlink()
    os.mkfifo(checkpoint_folder(tmp_path, 7) / TABLE_FILE)
    with pytest.raises(ValueError, match="expected a regular file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", [b"cpathlib\nPosixPath\n", b"ctorch.distributed.checkpoint.metadata\nMetadata\n"]
)
def test_a_table_changes_no_class(tmp_path: Path, name: bytes) -> None:
    """A state of two parts sets attributes of whatever is built."""
    state(7)[2].save(tmp_path, 7, {"step": 7}).result()
    table = checkpoint_folder(tmp_path, 7) / TABLE_FILE
    table.write_bytes(b"\x80\x04" + name + b"N}X\x07\0\0\0changedK\x01s\x86b0" + table.read_bytes()[2:])
    with pytest.raises(ValueError, match="it changes <class "):
        read_checkpoint(tmp_path)
    assert not hasattr(Path, "changed") and not hasattr(Metadata, "changed")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "sub/file", ""])
def test_a_table_that_leads_out_of_its_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    state(7)[2].save(tmp_path, 7, PROGRESS).result()
    path = checkpoint_folder(tmp_path, 7)
    shutil.copy(next(path.glob("*.distcp")), tmp_path / "outside")
    table = files.read_table(path)
    for stored in table.storage_data.values():
        stored.relative_path = name
    (path / TABLE_FILE).write_bytes(pickle.dumps(table))
    with pytest.raises(ValueError, match="expected files in the checkpoint's folder, got "):
        state(1)[2].load(tmp_path, GptProgress)


def test_a_link_in_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    state(7)[2].save(tmp_path, 7, PROGRESS).result()
    (file,) = checkpoint_folder(tmp_path, 7).glob("*.distcp")
    file.symlink_to(file.rename(tmp_path / "outside"))
    with pytest.raises(ValueError, match="expected regular files, got another kind"):
        state(1)[2].load(tmp_path, GptProgress)


@pytest.mark.parametrize("size", [0, 100])
def test_a_truncated_file_is_told_with_its_checkpoint(tmp_path: Path, size: int) -> None:
    state(7)[2].save(tmp_path, 7, {"step": 7}).result()
    (file,) = checkpoint_folder(tmp_path, 7).glob("*.distcp")
    os.truncate(file, size)
    with pytest.raises(ValueError, match=rf"{checkpoint_folder(tmp_path, 7)}: .*; try an older step$"):
        state(1)[2].load(tmp_path, dict)


@pytest.mark.parametrize(
    "name", ["step_00000018.bak", "step_", "step_-1", "step_x", "step_8", "step_000000008"]
)
def test_a_folder_of_another_name_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    state(7)[2].save(tmp_path, 7, {}).result()
    shutil.copytree(checkpoint_folder(tmp_path, 7), tmp_path / name)
    assert complete_steps(tmp_path) == [7]


def test_of_several_ranks_none_unpickles_what_another_one_sends(tmp_path: Path) -> None:
    training = {"kind": "save", "ranks": 3, "folder": str(tmp_path)}
    assert on_ranks(3, "tests.methods.pipeline.trainings:on_this_rank", [training]) == [["saved"]] * 3
    values = read_checkpoint(tmp_path)
    assert [float(values[f"weights.layer.{number}"].mean()) for number in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_disk_that_is_full_on_one_rank_is_told_on_all_and_completes_nothing(tmp_path: Path) -> None:
    training = {"kind": "save", "ranks": 3, "folder": str(tmp_path), "fails": 1}
    messages = on_ranks(3, "tests.methods.pipeline.trainings:on_this_rank", [training])
    of_others = f"rank 1 could not write its part of {checkpoint_folder(tmp_path, 1)}"
    assert messages == [[of_others], ["[Errno 28] No space left on device"], [of_others]]
    assert complete_steps(tmp_path) == []


def test_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    masters, _, checkpoints = state(3)
    pending = checkpoints.save(tmp_path, 3, {})
    with torch.no_grad():
        masters["layer.0"].fill_(-1.0)
    pending.result()
    assert torch.equal(read_checkpoint(tmp_path)["weights.layer.0"], torch.full((64, 64), 3.0))


def test_an_incomplete_checkpoint_is_never_taken(tmp_path: Path) -> None:
    for step in (1, 2):
        state(step)[2].save(tmp_path, step, {"step": step}).result()
    (checkpoint_folder(tmp_path, 2) / TABLE_FILE).unlink()
    assert find_checkpoint(tmp_path)[1] == 1
    with pytest.raises(ValueError, match="expected a complete checkpoint of step 2, got steps 1"):
        find_checkpoint(tmp_path, 2)


def test_a_folder_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a complete checkpoint, got none"):
        find_checkpoint(tmp_path)


@pytest.mark.heavy
def test_kills_at_any_moment_of_writing_leave_the_newest_complete_one_to_the_bit(tmp_path: Path) -> None:
    """A child writes without end, and is killed at a random moment after each second complete one."""
    draws, last = random.Random(4), 0
    for _ in range(MOMENTS):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(tmp_path, writer)
            finally:
                os._exit(1)
        os.close(writer)
        for _ in range(2):
            assert os.read(reader, 1), "the child ended by itself"
        os.close(reader)
        time.sleep(draws.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step = complete_steps(tmp_path)[-1]
        assert step >= last + 2
        last = step
        whole, expected = read_checkpoint(tmp_path), state(last)[2]
        for name, master in expected.masters.items():
            assert torch.equal(whole[f"weights.{name}"], master.detach())
            assert torch.equal(whole[f"optimizer.{name}.exp_avg"], torch.full((64, 64), last / 3))
