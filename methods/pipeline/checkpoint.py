"""Checkpoints of a pipeline, by torch.distributed.checkpoint: a folder for each step, that pipelines of any stages and
replicas, and a single process, read alike.

Each weight has its name in the whole model, with the optimizer's states and options beside it; of replicas each one
writes a share.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from methods.pipeline import checkpoint_reader
from methods.pipeline.checkpoint_folders import COMPLETE, choose, folder_of

PLAIN = (bool, int, float, str, list, tuple, type(None))  # options of an optimizer


def read(folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """A whole checkpoint, in one process: `weights.NAME`, `optimizer.NAME.STATE`, and as JSON `options.NAME`
    and `progress`."""
    path, _ = choose(folder, step)
    return _read(path, list(_metadata(path)))


class Checkpoints:
    """One rank's share of writing, and its part in reading.

    `names`: of this stage's weights, in the same order on all its replicas; `masters` and `optimizer` have their
    values; `other_names`: of shared weights. Made by all ranks together.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, names: list[str],
        place: tuple[int, int, int], other_names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.masters, self.optimizer = masters, optimizer
        self.other_names = dict(other_names or {})
        stage, replica, num_replicas = place
        self.written = names[replica::num_replicas]
        self.is_first = stage == 0 and replica == 0
        # In a thread of torch's own: its messages must not mix with those of training.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.under_way: Future | None = None

    def save(self, folder: str | Path, step: int, progress: Mapping[str, Any]) -> Future:
        """Copy the state, and write the copy while training goes on. It is durable when the future is done."""
        self.wait()
        path = folder_of(folder, step)
        if self.is_first:
            path.mkdir(parents=True, exist_ok=True)
            (path / COMPLETE).unlink(missing_ok=True)  # torch writes nothing before this rank has asked for it
        state: dict[str, Any] = {}
        for name in self.written:
            state |= {key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                      for key, value in self._state(name).items()}  # fmt: skip
        if self.is_first:
            state["progress"] = json.dumps(progress)
        saved: Any = dcp.async_save(state, checkpoint_id=path, process_group=self.group)
        self.under_way = getattr(saved, "upload_completion", saved)
        return self.under_way

    def wait(self) -> None:
        """Until the last one is durable. Raises what its writing raised."""
        if self.under_way is not None:
            pending, self.under_way = self.under_way, None
            pending.result()

    def load(self, folder: str | Path, step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Take this stage's values; the step, and the progress that save() was given."""
        path, chosen = choose(folder, step)
        there = _metadata(path)
        # A shared weight that was one parameter was written by one of its names.
        stored = {name: name if f"weights.{name}" in there else self.other_names.get(name, "") for name in self.masters}
        if missing := [name for name, other in stored.items() if f"weights.{other}" not in there]:
            raise ValueError(f"{path}: it has no weights of {', '.join(missing[:3])}: it is of another model")
        wanted = ["progress"]
        for name in stored.values():
            wanted += [f"weights.{name}", f"options.{name}"]
            wanted += [key for key in there if key.startswith(f"optimizer.{name}.")]
        found = _read(path, wanted)
        for name, master in self.masters.items():
            weight = found[f"weights.{stored[name]}"]
            if weight.shape != master.shape:
                raise ValueError(f"{path}: {name} has shape {tuple(weight.shape)}, here {tuple(master.shape)}")
            with torch.no_grad():
                master.copy_(weight)
            self._take_state(stored[name], master, found)
        return chosen, json.loads(found["progress"])

    def _state(self, name: str) -> dict[str, Any]:
        master = self.masters[name]
        found: dict[str, Any] = {f"weights.{name}": master}
        found |= {f"optimizer.{name}.{key}": value for key, value in self.optimizer.state.get(master, {}).items()}
        group = self._group_of(master).items()
        options = {key: value for key, value in group if key != "params" and isinstance(value, PLAIN)}
        return found | {f"options.{name}": json.dumps(options)}

    def _take_state(self, name: str, master: nn.Parameter, found: Mapping[str, Any]) -> None:
        prefix = f"optimizer.{name}."
        state = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        if state:
            # A count of steps stays where the optimizer made it: on the host, unless it is fused.
            self.optimizer.state[master] = {key: self._placed(value, master) for key, value in state.items()}
        self._group_of(master).update(json.loads(found[f"options.{name}"]))

    def _placed(self, value: Any, master: nn.Parameter) -> Any:
        is_moved = isinstance(value, Tensor) and (value.ndim > 0 or bool(self._group_of(master).get("fused")))
        return value.to(master.device) if is_moved else value

    def _group_of(self, master: nn.Parameter) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            if any(each is master for each in group["params"]):
                return group
        raise ValueError("the optimizer lacks a parameter of this model; try one made of model.parameters()")


def _metadata(path: Path) -> Mapping[str, Any]:
    return checkpoint_reader.metadata(path).state_dict_metadata


def _read(path: Path, wanted: list[str]) -> dict[str, Any]:
    there = _metadata(path)
    state: dict[str, Any] = {}
    for name in wanted:
        kind = there[name]
        is_tensor = isinstance(kind, TensorStorageMetadata)
        state[name] = torch.empty(kind.size, dtype=kind.properties.dtype) if is_tensor else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # each rank reads what it needs, without the others
        checkpoint_reader.load(path, state)
    return state
