"""Checkpoints of a pipeline, by torch.distributed.checkpoint: one folder for each saved step.

Pipelines with any numbers of stages and replicas, and single processes, can read a checkpoint. Each weight is stored
under its name in the whole model, with its optimizer states and options. The replicas of a stage share the writing. A
checkpoint also stores the number of steps and the loss scale; in a job of `-m varuna` also the losses, norms and skips.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from harness.base.foreign_file import checked
from harness.base.json_object import JsonObject
from harness.core.job import Workload
from harness.core.method import Step
from methods.pipeline.checkpoint import files
from methods.pipeline.checkpoint.files import StoredValues
from methods.pipeline.checkpoint.folders import TABLE_FILE, checkpoint_folder, find_checkpoint

PLAIN_TYPES = (bool, int, float, str, list, tuple, type(None))  # types of an optimizer's options
# optimizers that torch fuses
FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
ADAM_STATES = {"step", "exp_avg", "exp_avg_sq"}  # names of the states of Adam and AdamW
T = TypeVar("T")
ParameterGroup = dict[str, Any]  # a group of an optimizer's param_groups
StoredSpec: TypeAlias = tuple[torch.Size, torch.dtype] | None


@dataclass(frozen=True)
class Progress:
    """How far training had come when a checkpoint was saved. `num_good`: steps in a row without an overflow."""

    num_steps: int
    loss_scale: float
    num_good: int


@dataclass(frozen=True)
class GptProgress(Progress):
    """Progress, and the further notes in the checkpoints of a job of `-m varuna`. The lists hold one value for each
    step."""

    workload: JsonObject
    loss: list[float]
    grad_norm: list[float]
    loss_scales: list[float | None]
    skipped: list[bool]
    source: str = ""  # hash of the source code that trained these steps

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.loss, self.grad_norm, self.loss_scales, self.skipped)}
        if len(lengths) > 1:
            raise ValueError(
                f"expected equally many losses, norms, loss scales and skips, got {sorted(lengths)} of them"
            )
        for is_skipped, scale in zip(self.skipped, self.loss_scales, strict=True):
            if is_skipped and scale is None:
                raise ValueError("expected a loss scale for each skipped step, got None")
        if not re.fullmatch("[0-9a-f]*", self.source):
            raise ValueError(f"expected the hash of the source code, got {self.source!r:.80}")

    @staticmethod
    def notes(workload: Workload, steps: Sequence[Step], source: str) -> JsonObject:
        """Return the notes that a checkpoint stores beside Progress. `steps`: all of the job's steps so far. `source`:
        hash of the source code."""
        norms = [float(step.grad_norm) for step in steps if step.grad_norm is not None]
        return {
            "workload": asdict(workload),
            "loss": [float(step.loss) for step in steps],
            "grad_norm": norms,
            "loss_scales": [step.loss_scale for step in steps],
            "skipped": [step.is_skipped for step in steps],
            "source": source,
        }

    def steps_of(self, workload: Workload, folder: str) -> list[Step]:
        """Return all steps up to the checkpoint. Raises ValueError if the checkpoint is of another workload, or lacks
        losses of some steps. `folder`: named in the error."""
        for name, value in asdict(workload).items():
            if (stored_value := self.workload.get(name)) != value:
                raise ValueError(
                    f"{folder}: expected a checkpoint with {name} {value}, got {stored_value}; try another folder"
                )
        if len(self.loss) != self.num_steps:
            raise ValueError(
                f"{folder}: expected a checkpoint of {self.num_steps} steps, got {len(self.loss)} losses"
            )
        columns = (self.loss, self.grad_norm, self.loss_scales, self.skipped)
        return [
            Step(torch.tensor(loss), torch.tensor(norm), loss_scale=loss_scale, is_skipped=is_skipped)
            for loss, norm, loss_scale, is_skipped in zip(*columns, strict=True)
        ]


def read_checkpoint(folder: str | Path, step: int | None = None) -> StoredValues:
    """Read a whole checkpoint in one process. `step`: the checkpoint's step; None: the newest complete checkpoint. The
    keys of the result are `weights.NAME`, `optimizer.NAME.STATE` and, with values in JSON, `options.NAME` and
    `progress`. Raises ValueError if the folder has no complete checkpoint of this step."""
    path, _ = find_checkpoint(folder, step)
    return _read_values(path, list(_read_entries(path)))


class Checkpoints:
    """Writes this rank's share of each checkpoint, and reads the values of this rank's stage.

    `masters`: the stage's weights in fp32, by name. `optimizer`: holds the masters' states and options. `names`: names
    of the weights that this stage writes, in the same order on all its replicas. `position`: stage, replica, number
    of replicas. `other_names`: for each name of a shared weight, its other name; None: no weight is shared. All ranks
    must make this object together.
    """

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        names: list[str],
        position: tuple[int, int, int],
        other_names: Mapping[str, str] | None = None,
    ) -> None:
        self.masters, self.optimizer = masters, optimizer
        self.other_names = dict(other_names or {})
        stage, replica, num_replicas = position
        self.written_names = names[replica::num_replicas]
        self.is_first = stage == 0 and replica == 0
        # The writing thread has a process group of its own, because its messages must not mix with training's messages.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.pending_save: Future | None = None

    def save(self, folder: str | Path, step: int, progress: Mapping[str, Any]) -> Future:
        """Copy the state now; a thread writes the copy while training goes on. The checkpoint is on disk when the
        returned future is done. First wait until the last checkpoint is on disk."""
        self.wait()
        path = checkpoint_folder(folder, step)
        if self.is_first:
            path.mkdir(parents=True, exist_ok=True)
            (path / TABLE_FILE).unlink(missing_ok=True)  # no rank writes before this rank has called save()
        state: StoredValues = {}
        for name in self.written_names:
            state |= {
                key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for key, value in self._state_of_weight(name).items()
            }
        if self.is_first:
            state["progress"] = json.dumps(progress)
        executor = ThreadPoolExecutor(1)
        self.pending_save = executor.submit(files.write_checkpoint, state, path, self.group)
        executor.shutdown(wait=False)
        return self.pending_save

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises an error if it could not be written."""
        if self.pending_save is not None:
            pending_save, self.pending_save = self.pending_save, None
            pending_save.result()

    def load(self, folder: str | Path, form: type[T], step: int | None = None) -> tuple[int, T]:
        """Read this stage's values into the masters and the optimizer. Return the checkpoint's step, and the progress
        that save() was given, as an object of class `form`. `step`: the checkpoint's step; None: the newest complete
        checkpoint.

        Raises ValueError, with nothing changed, if the checkpoint is of another model or was not written by this class.
        """
        path, loaded_step = find_checkpoint(folder, step)
        entries = _read_entries(path)
        # If a shared weight was one parameter when the checkpoint was written, the checkpoint has it under only one of
        # its two names.
        stored_names = {}
        for name in self.masters:
            stored_names[name] = name if f"weights.{name}" in entries else self.other_names.get(name, "")
        missing_names = [
            name for name, stored_name in stored_names.items() if f"weights.{stored_name}" not in entries
        ]
        if missing_names:
            raise ValueError(
                f"{path}: expected this model's weights, got none of {', '.join(missing_names[:3])}"
            )
        wanted_keys = ["progress"]
        for name in stored_names.values():
            wanted_keys += [f"weights.{name}", f"options.{name}"]
            wanted_keys += [key for key in entries if key.startswith(f"optimizer.{name}.")]
        self._check_entries(path, entries, stored_names)
        values = _read_values(path, wanted_keys)
        with _one_line_errors(path):
            progress = checked(form, json.loads(values["progress"]))
            options = {}
            for name, master in self.masters.items():
                options[name] = self._read_options(stored_names[name], master, values)
        for name, master in self.masters.items():
            with torch.no_grad():
                master.copy_(values[f"weights.{stored_names[name]}"])
            self._take_state(stored_names[name], master, values)
            self._group_of(master).update(options[name])
        return loaded_step, progress

    def _check_entries(self, path: Path, entries: Mapping[str, Any], stored_names: Mapping[str, str]) -> None:
        """Raise ValueError unless the checkpoint's weights and states have the shapes and dtypes of this stage's."""
        for name, master in self.masters.items():
            expected, got = _spec(master), _spec(entries[f"weights.{stored_names[name]}"])
            if expected != got:
                raise ValueError(f"{path}: {name}: expected {_spec_text(expected)}, got {_spec_text(got)}")
        with _one_line_errors(path):
            for name, master in self.masters.items():
                self._check_state(stored_names[name], master, entries)

    def _state_of_weight(self, name: str) -> StoredValues:
        master = self.masters[name]
        state: StoredValues = {f"weights.{name}": master}
        state |= {
            f"optimizer.{name}.{key}": value for key, value in self.optimizer.state.get(master, {}).items()
        }
        group = self._group_of(master).items()
        options = {key: value for key, value in group if key != "params" and isinstance(value, PLAIN_TYPES)}
        return state | {f"options.{name}": json.dumps(options)}

    def _check_state(self, name: str, master: nn.Parameter, entries: Mapping[str, Any]) -> None:
        """Raise ValueError unless each of the weight's states in the checkpoint has the weight's shape and dtype, or is
        a single fp32 number. torch's fused update accesses as many elements of a state as the weight has, so the update
        would read beyond the end of a smaller state."""
        if type(self.optimizer) not in FUSED_OPTIMIZERS:
            return
        state = _without_prefix(f"optimizer.{name}.", entries)
        if (
            type(self.optimizer) in FUSED_OPTIMIZERS[:2]
            and state
            and state.keys() - {"max_exp_avg_sq"} != ADAM_STATES
        ):
            raise ValueError(
                f"{name}: expected optimizer states {', '.join(sorted(ADAM_STATES))}, got {', '.join(sorted(state))}"
            )
        expected = _spec(master)
        for key, entry in state.items():
            is_number = _spec(entry) == (torch.Size(), torch.float32)
            if _spec(entry) != expected and not is_number:
                raise ValueError(
                    f"{key} of {name}: expected {_spec_text(expected)}, got {_spec_text(_spec(entry))}"
                )

    def _read_options(self, name: str, master: nn.Parameter, values: Mapping[str, Any]) -> JsonObject:
        """Return a weight's optimizer options from the checkpoint. Raises ValueError if an option has another type than
        the optimizer's current option."""
        options, group = json.loads(values[f"options.{name}"]), self._group_of(master)
        for key, value in options.items():
            if not isinstance(value, PLAIN_TYPES) or (key in group and not _is_alike(value, group[key])):
                raise ValueError(
                    f"option {key} of {name}: expected a value like {group.get(key)!r:.80}, got {value!r:.80}"
                )
        return dict(options)

    def _take_state(self, name: str, master: nn.Parameter, values: Mapping[str, Any]) -> None:
        if state := _without_prefix(f"optimizer.{name}.", values):
            # The state "step" goes where torch's optimizers keep it: on the device if the optimizer is fused, else on
            # the host.
            self.optimizer.state[master] = {
                key: self._on_optimizer_device(value, master) for key, value in state.items()
            }

    def _on_optimizer_device(self, value: Any, master: nn.Parameter) -> Any:
        is_moved = isinstance(value, Tensor) and (value.ndim > 0 or bool(self._group_of(master).get("fused")))
        return value.to(master.device) if is_moved else value

    def _group_of(self, master: nn.Parameter) -> ParameterGroup:
        for group in self.optimizer.param_groups:
            if any(weight is master for weight in group["params"]):
                return group
        raise ValueError(
            "the optimizer lacks a parameter of this model; try an optimizer of model.parameters()"
        )


def _without_prefix(prefix: str, values: Mapping[str, Any]) -> StoredValues:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _spec(value: Any) -> StoredSpec:
    """Return the shape and dtype of a tensor, or of a tensor's entry in a checkpoint's table of contents. Return None
    for other values."""
    if isinstance(value, TensorStorageMetadata):
        return value.size, value.properties.dtype
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _spec_text(spec: StoredSpec) -> str:
    return f"{str(spec[1]).removeprefix('torch.')} of shape {tuple(spec[0])}" if spec else "no tensor"


def _is_alike(value: Any, current: Any) -> bool:
    if isinstance(current, list | tuple):
        return isinstance(value, list) and len(value) == len(current) and all(map(_is_alike, value, current))
    if value is None or current is None:  # None: torch chooses the value
        return isinstance(current if value is None else value, bool | None)
    return isinstance(value, str) if isinstance(current, str) else isinstance(value, int | float)


@contextlib.contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Within this context, turn errors from a damaged or foreign checkpoint into a ValueError of one line."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise files.unreadable_error(path, error) from error


def _read_entries(path: Path) -> Mapping[str, Any]:
    return files.read_table(path).state_dict_metadata


def _read_values(path: Path, wanted_keys: list[str]) -> StoredValues:
    entries = _read_entries(path)
    if missing_keys := [key for key in wanted_keys if key not in entries]:
        raise files.unreadable_error(path, ValueError(f"it lacks {missing_keys[0]}"))
    state: StoredValues = {}
    for key in wanted_keys:
        spec = _spec(entries[key])
        state[key] = torch.empty(spec[0], dtype=spec[1]) if spec else None
    with warnings.catch_warnings():
        # torch warns that one process reads alone, as each rank does here
        warnings.simplefilter("ignore", UserWarning)
        files.load_values(path, state)
    return state
