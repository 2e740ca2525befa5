"""The parts of a record that are dictionaries: what programs read of them, which is checked when a record is read."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, Required, TypedDict  # noqa: UP035 - typing's, before Python 3.12, pydantic refuses

from harness.base.checked_data import OTHER_FIELDS

Values = list[float | None]  # None in imported logs only


class Tensor(TypedDict, total=False):
    """A trained tensor's changes: see harness/gate/inspect_training.py."""

    changed: Required[float]
    moved: Required[float]
    size: float
    sketch: list[float] | None
    exp_avg: float | None
    exp_avg_sq: float | None
    sha256: str
    left_out: str  # of moved, sketch and both moments: what only rounding moves


class Other(TypedDict):
    """One of several models beside the first."""

    workload: dict[str, Any]  # in which fields it differs
    losses: Values
    grad_norms: Values
    loss_scales: NotRequired[list[float]]
    skipped_steps: NotRequired[list[int]]
    tensors: dict[str, Tensor]


class Evidence(TypedDict, total=False):
    """The evidence of an end, an import or a verdict, as far as programs read it; further fields are allowed."""

    resource: str
    other_parameters: str
    unsaid: list[str]
    reference: str
    reference_layers: int
    reference_ended: str
    probe_layers: int
    probe_steps: int


class MachineFacts(TypedDict, total=False):
    """The facts of a machine, as far as programs read them; further fields are allowed."""

    gpu: str
    cpu: str
    cores: int
    affinity: str  # which cores the run might use, such as 0,2-3, where it might not use all
    environment: str  # variables of the caller's that change kernels or threads, such as OMP_NUM_THREADS=2
    host_bytes: int
    ranks: list[dict[str, Any]]


class SoftwareFacts(TypedDict, total=False):
    """Versions and source, as far as programs read them; further fields are allowed."""

    source: str  # the hash of the code that decides how the method trains
    unlisted: list[str]  # files whose code the run executed, and which that hash lacks


class ScheduleFacts(TypedDict, total=False):
    """The schedule of several models or after a checkpoint, as far as programs read it; further fields are allowed."""

    num_models: int
    resumed_steps: int
    resumed_source: str  # what trained them
    turns: list[list[Any]]


for kind in (Evidence, MachineFacts, ScheduleFacts, SoftwareFacts):  # a TypedDict takes no statement in its body
    kind.__pydantic_config__ = OTHER_FIELDS  # type: ignore[union-attr]
