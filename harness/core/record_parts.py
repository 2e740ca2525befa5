"""The parts of a record that are dictionaries: what programs read of them, which is checked when a record is read."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, Required, TypedDict  # noqa: UP035 - typing's, before Python 3.12, pydantic refuses

from harness.base.checked_data import OTHER_FIELDS

Values = list[float | None]  # None in imported logs only


class Tensor(TypedDict, total=False):
    """A trained tensor's changes: see harness/gate/inspect_training.py."""

    changed: Required[float]  # share of its elements that differ from their start
    moved: Required[float]  # Euclidean distance from its start
    size: float  # Euclidean norm at the end
    sketch: list[float] | None  # sums of its change, with seeded signs; their distance estimates the tensors'
    exp_avg: float | None  # norm of Adam's first moment
    exp_avg_sq: float | None  # norm of Adam's second moment
    sha256: str  # hash of its final values in fp32, the first 16 digits
    left_out: str  # of moved, sketch and both moments: what only rounding moves


class Other(TypedDict):
    """One of several models beside the first."""

    workload: dict[str, Any]  # in which fields it differs
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
    reference_layers: int  # its depth, if it is a shallower twin of the run
    reference_ended: str  # its status, if that is not ok
    probe_layers: int  # depth of the probe that the verdict rests on, too
    probe_steps: int  # its steps


class MachineFacts(TypedDict, total=False):
    """The facts of a machine, as far as programs read them; further fields are allowed."""

    gpu: str  # name
    cpu: str  # name
    cores: int  # how many
    affinity: str  # which cores the run might use, such as 0,2-3, where it might not use all
    environment: str  # variables of the caller's that change kernels or threads, such as OMP_NUM_THREADS=2
    host_bytes: int  # the machine's memory
    ranks: list[dict[str, Any]]  # of each rank its number and peak


class SoftwareFacts(TypedDict, total=False):
    """Versions and source, as far as programs read them; further fields are allowed."""

    source: str  # the hash of the code that decides how the method trains
    unlisted: list[str]  # files whose code the run executed, and which that hash lacks


class ScheduleFacts(TypedDict, total=False):
    """The schedule of several models or after a checkpoint, as far as programs read it; further fields are allowed."""

    num_models: int  # how many took turns
    resumed_steps: int  # how many were done before, by the run that left the checkpoint
    resumed_source: str  # what trained them
    turns: list[list[Any]]  # for each: model, shard, kind, device, and its start and end in seconds


for kind in (Evidence, MachineFacts, ScheduleFacts, SoftwareFacts):  # a TypedDict takes no statement in its body
    kind.__pydantic_config__ = OTHER_FIELDS  # type: ignore[union-attr]
