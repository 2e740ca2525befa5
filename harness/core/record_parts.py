"""The parts of a record that are dictionaries: the fields that programs read, checked when a record is read."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, Required, TypedDict  # noqa: UP035 - typing's, before Python 3.12, pydantic refuses

from harness.base.checked_data import OTHER_FIELDS

Values = list[float | None]  # None in imported logs only


class Tensor(TypedDict, total=False):
    """A trained tensor's changes: see harness/gate/inspect_training.py."""

    changed: Required[float]  # share of the tensor's elements that differ from their starting values
    moved: Required[float]  # Euclidean distance of the tensor from its starting values
    size: float  # Euclidean norm of the tensor at the end
    sketch: list[float] | None  # sums of the change, with seeded signs; sketches' distances estimate the tensors'
    exp_avg: float | None  # norm of Adam's first moment
    exp_avg_sq: float | None  # norm of Adam's second moment
    sha256: str  # hash of the final values in fp32, the first 16 digits
    left_out: str  # elements that `moved`, `sketch` and both moments leave out, because only rounding changes them


class Other(TypedDict):
    """One of several models beside the first."""

    workload: dict[str, Any]  # fields of the model's workload that differ from the first model's
    losses: Values  # as in Record
    grad_norms: Values  # as in Record
    loss_scales: NotRequired[list[float]]  # as in Record
    skipped_steps: NotRequired[list[int]]  # as in Record
    tensors: dict[str, Tensor]  # as in Record


class Evidence(TypedDict, total=False):
    """The evidence of an end, an import or a verdict, as far as programs read it; further fields are allowed."""

    resource: str  # what ran out or is missing: device, host, time, ...
    other_parameters: str  # how a log's count of parameters differs from the workload's
    unsaid: list[str]  # fields of the workload that a log does not tell
    reference: str  # key of the reference's record that the run was compared with
    reference_layers: int  # the reference's number of layers, if it is a shallower twin of the run
    reference_ended: str  # the reference's status, if that is not ok
    probe_layers: int  # number of layers of the probe, if the verdict also rests on one
    probe_steps: int  # the probe's number of steps


class MachineFacts(TypedDict, total=False):
    """The facts of a machine, as far as programs read them; further fields are allowed."""

    gpu: str  # name of the GPU
    cpu: str  # name of the CPU
    cores: int  # number of cores that the run might use
    affinity: str  # the cores that the run might use, such as 0,2-3; left out if it might use all
    environment: str  # the caller's variables that change kernels or threads, such as OMP_NUM_THREADS=2
    host_bytes: int  # bytes of host memory that the run might use
    ranks: list[dict[str, Any]]  # number, node and peak bytes of each rank


class SoftwareFacts(TypedDict, total=False):
    """Versions and source, as far as programs read them; further fields are allowed."""

    source: str  # the hash of the code that decides how the method trains
    unlisted: list[str]  # files whose code the run executed, although `source` does not cover them


class ScheduleFacts(TypedDict, total=False):
    """The schedule of several models or after a checkpoint, as far as programs read it; further fields are allowed."""

    num_models: int  # number of models that took turns
    resumed_steps: int  # number of steps that the checkpoint held, done by an earlier run
    resumed_source: str  # source of the code that trained the resumed steps
    turns: list[list[Any]]  # of each turn: model, shard, kind, device, and its start and end in seconds


for kind in (Evidence, MachineFacts, ScheduleFacts, SoftwareFacts):  # a TypedDict takes no statement in its body
    kind.__pydantic_config__ = OTHER_FIELDS  # type: ignore[union-attr]
