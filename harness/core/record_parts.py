"""The parts of a record that are dictionaries. Each class lists the fields that programs read, with their types, which
are checked when a record is read."""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, Required, TypedDict  # noqa: UP035 pydantic refuses typing's before Python 3.12

from harness.base.foreign_file import OTHER_FIELDS

Values = list[float | None]  # None in imported logs only


class Tensor(TypedDict, total=False):
    """How training changed one tensor. harness/gate/inspect_training.py computes these numbers."""

    changed: Required[float]  # share of the tensor's elements that differ from their starting values
    moved: Required[float]  # Euclidean distance of the tensor from its starting values
    size: float  # Euclidean norm of the tensor at the end
    # sums of the changes with random signs, from which tensors' distances are estimated
    sketch: list[float] | None
    exp_avg: float | None  # norm of Adam's first moment
    exp_avg_sq: float | None  # norm of Adam's second moment
    with_gradient: float | None  # share of the elements whose second moment is not zero
    sha256: str  # hash of the final values in fp32, its first 16 hexadecimal digits
    # elements that `moved`, `sketch` and the moments' facts leave out: only rounding changes them
    left_out: str


class Other(TypedDict):
    """The results of one model, not the first, if several models trained."""

    workload: dict[str, Any]  # fields of the model's workload that differ from the first model's
    losses: Values  # as in Record
    grad_norms: Values  # as in Record
    loss_scales: NotRequired[list[float]]  # as in Record
    skipped_steps: NotRequired[list[int]]  # as in Record
    tensors: dict[str, Tensor]  # as in Record


class Evidence(TypedDict, total=False):
    """The facts behind a run's status, an import or a verdict. Only the fields that programs read are listed; further
    fields are allowed."""

    resource: str  # what ran out or is missing: device, host, time, ...
    other_parameters: str  # how a log's count of parameters differs from the workload's
    unsaid: list[str]  # fields of the workload whose values a log does not tell
    reference: str  # key of the reference's record that the run was compared with
    reference_layers: int  # the reference's number of layers, if the reference is a shallower twin of the run
    reference_ended: str  # the status of the reference's run, if the status is not ok
    lost_ranks: list[int]  # other ranks that a rank had lost or that had failed, when the rank ended
    probe_layers: int  # number of layers of the gate's probe, if the verdict also rests on a probe
    probe_steps: int  # the probe's number of steps
    probe_is_full: bool  # True: the probe had the sizes of the run


class MachineFacts(TypedDict, total=False):
    """The facts of a machine. Only the fields that programs read are listed; further fields are allowed."""

    gpu: str  # name of the GPU
    cpu: str  # name of the CPU
    cores: int  # number of cores that the run might use
    affinity: str  # the cores that the run might use, such as 0,2-3; left out if the run might use all cores
    environment: str  # the caller's variables that change kernels or threads, such as OMP_NUM_THREADS=2
    host_bytes: int  # bytes of host memory that the run might use
    ranks: list[dict[str, Any]]  # number, node and peak bytes of each rank


class SoftwareFacts(TypedDict, total=False):
    """The versions and the source of the code that ran. Only the fields that programs read are listed; further fields
    are allowed."""

    source: str  # the hash of the code that decides how the method trains
    # code that the run executed, and programs that it started, which `source` does not cover
    unlisted: list[str]
    changed: list[str]  # what of the run's identity changed while the run went on


class ScheduleFacts(TypedDict, total=False):
    """The schedule of a run that trained several models or resumed from a checkpoint. Only the fields that programs
    read are listed; further fields are allowed."""

    num_models: int  # number of models that took turns
    resumed_steps: int  # number of steps that an earlier run had done and that the checkpoint held
    resumed_source: str  # hash of the code that trained the resumed steps
    # for each turn: model, shard, kind, device, and the turn's start and end in seconds
    turns: list[list[Any]]


for kind in (Evidence, MachineFacts, ScheduleFacts, SoftwareFacts):
    # a TypedDict's body must not hold this statement
    kind.__pydantic_config__ = OTHER_FIELDS  # type: ignore[union-attr]
