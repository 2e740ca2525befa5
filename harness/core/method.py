"""The contract of a method, and the functions that find methods. Each file directly in a folder of methods is a method.

A method is a frozen dataclass in a file of its own name. The file must not import torch or an engine at the top,
because the parent process loads the file only to read the label and to ask for a plan; train() imports torch."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, get_type_hints

from harness.base.imported_file import errors_in_one_line, guard
from harness.base.json_object import JsonObject
from harness.base.registry import FileRegistry, did_you_mean
from harness.core import identity
from harness.core.job import MOST_LAYERS, Job, Plan, Room, Workload
from harness.core.option import Option, Options, options_of
from harness.core.refusals import Unavailable

if TYPE_CHECKING:
    import torch


class Step(NamedTuple):
    """The results of a step; if several models train, the results of the first model's step. Each tensor is a scalar on
    the device. The host has not waited for the tensors, so the device may still be computing them."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None = None  # global norm of the gradient, before clipping
    # if several models train: each model's share of the devices' busy time so far
    shares: list[float] | None = None
    loss_scale: float | None = None  # set in fp16 only
    is_skipped: bool = False  # True in fp16 if a gradient was not finite


class TensorState(NamedTuple):
    """A parameter after training: its weight in fp32 (the master weight, in mixed precision), and Adam's first and
    second moment, all three of the same shape. The sign of the second moment is ignored."""

    name: str
    weight: torch.Tensor
    exp_avg: torch.Tensor | None = None
    exp_avg_sq: torch.Tensor | None = None


class ForecastTest(NamedTuple):
    """How well forecasts of a method's step times agreed with runs on other machines."""

    num_runs: int
    worst: float  # the largest relative error of a forecast: measured seconds / forecast seconds - 1
    source: str


class OtherModel(NamedTuple):
    """The results of one model, not the first, if several models trained by turns."""

    changes: JsonObject  # fields of this model's workload that differ from the first model's
    losses: list[float]  # losses and grad_norms hold one value for each of this model's steps
    grad_norms: list[float]
    tensors: Iterable[TensorState]
    loss_scales: list[float] = []  # noqa: RUF012 in fp16: one value for each step
    skipped_steps: list[int] = []  # noqa: RUF012

    @classmethod
    def of(cls, changes: JsonObject, steps: Sequence[Step], tensors: Iterable[TensorState]) -> OtherModel:
        return cls(
            changes,
            [float(step.loss) for step in steps],
            [float(step.grad_norm) for step in steps if step.grad_norm is not None],
            tensors,
            [step.loss_scale for step in steps if step.loss_scale is not None],
            [number for number, step in enumerate(steps, start=1) if step.is_skipped],
        )


class Trained(NamedTuple):
    """The results that a method returns for the gate. If several models train, `tensors` are the first model's."""

    tensors: Iterable[TensorState]
    moved_bytes: int = 0  # bytes copied between device and host
    schedule: JsonObject = {}  # noqa: RUF012 if several models train: `num_models`, and the models' turns in order
    others: Sequence[OtherModel] = ()
    peaks: dict[str, int] = {}  # noqa: RUF012 peak bytes by memory, the largest of all processes that the method starts


Training = Generator[Step, None, Trained]

# Options of methods that train several models: the number of models and the number of batch sizes.
OF_SEVERAL_MODELS = ("num_models", "num_batch_sizes")
# most learning rates among several models: the first is the workload's, each next is half as high
NUM_RATES = 6


# types that these functions of a method must return
RESULT_TYPES = {"plan": Plan, "twin_options": dict, "describe": dict}


class Method(ABC):
    """The base class of every method. A method must define plan() and train(); everything else has a default.

    A method is a frozen dataclass; its fields are its options.

    A method that trains in several processes has an option world_size, 1 by default. Each process runs train() with
    torchrun's environment variables. A process gets the whole batch, trains on its own part of the batch, and yields
    the loss of the whole batch; rank 0 returns the whole tensors. plan() counts the bytes of one rank. A method that
    trains several models (workloads_of()) has the option num_models, 1 by default, and may have num_batch_sizes."""

    label: ClassVar[str]  # default: the name of the method's file
    color: ClassVar[str] = "#888888"  # in figures of the runs
    paper: ClassVar[str] = ""
    bit_exact: ClassVar[bool] = False  # True: promises results bit-equal to the reference's on a CPU in fp32
    # True: promises bit-equal results on a CPU in bf16 and fp16, too
    bit_exact_in_half: ClassVar[bool] = False
    is_exact: ClassVar[bool] = True  # False: trains differently by design
    is_reference: ClassVar[bool] = False  # True for exactly one method
    # True: runs on tensors without memory (harness/devices/memory_rehearsal.py)
    can_rehearse: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False  # True: trains on micro-batches
    log_dialect: ClassVar[str] = "megatron"  # dialect of its logs, one of log_lines.DIALECTS
    build_seconds: ClassVar[int] = 0  # rough duration of build()
    verbs: ClassVar[str] = ""  # module whose VERBS are click commands that the method adds to ./run.sh
    clips: ClassVar[bool] = True  # False: trains only with --clip 0
    drops_alike: ClassVar[bool] = True  # False: its dropout drops elements that the reference's dropout keeps
    takes_config: ClassVar[bool] = False  # True: trains models described by a config.json, too
    takes_lora: ClassVar[bool] = False  # True: trains adapters alone on frozen weights, too (--lora)
    scales_loss: ClassVar[bool] = False  # True: trains in fp16, by the rule of methods/shared/loss_scale.py
    # Name of the option that asks for another release of the method's engine, which build() installs into this
    # checkout's .venv; until then identity() is empty. None: the method has no such option.
    release_option: ClassVar[str | None] = None

    # how forecasts of the method's step times were tested
    forecast_test: ClassVar[ForecastTest | None] = None

    # Kinds of work that run during the device's compute: "copies" to and from the host, "updates" on the host,
    # "gathers" and "sums" between ranks. If a plan has no step_seconds, forecasts of a step's time read these kinds.
    hides: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Set the default label, and make each function report its failure in one line that names the method's file.
        train() is left as it is, because it runs in a process of its own."""
        if "label" not in vars(cls):
            cls.label = cls.__module__.rpartition(".")[2].replace("_", "-")
        guard(cls, (Unavailable,), RESULT_TYPES, unguarded=("train",))

    @abstractmethod
    def plan(self, workload: Workload, room: Room) -> Plan:
        """Compute the bytes that training needs. Raises ValueError for options that this workload does not allow."""

    def settled(self, plan: Plan) -> Self:
        """Return this method with the options that its plan has chosen, so that train() need not choose any."""
        return type(self)(**plan.options) if plan.options else self

    def as_timed(self, job: Job, grad_norms: Sequence[float | None]) -> Self:
        """Return this method with the options by which to forecast the median step of a past run, whose steps had these
        gradient norms. The options may depend on the norms, because clipped steps may work in another way."""
        return self

    @abstractmethod
    def train(
        self, workload: Workload, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], device: str
    ) -> Training:
        """Train with settled options on each (inputs, targets) batch, (B, T) token ids on the device.

        Yield each step before taking the next batch, because the step's time ends at the yield. Return when every
        update is done. `batches` may have no length. Raises Unavailable, or torch's OutOfMemoryError."""

    def missing(self, device: str) -> str | None:
        """Describe what the method lacks on this device, and how to get it; None if the method lacks nothing."""
        return None

    def names_file(self) -> bool:
        """True if the option `config` names a file, which plan() would read. A plan's options hold the file's data, as
        JSON, in the name's place, so a run leaves no such name in its record; a record with one is not planned."""
        config = getattr(self, "config", None)
        return isinstance(config, str) and not config.lstrip().startswith("{")

    def twin_options(self, num_layers: int, twin_layers: int) -> Options:
        """Return the options with which a model of `twin_layers` layers runs the same code as one of `num_layers`."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def identity(self) -> dict[str, str]:
        """Return what decides how this method trains, beside its options and its code, such as the hash of an engine's
        archive that only a run with these options needs. A job's key contains these facts."""
        return {}

    def to_build(self) -> str | None:
        """Describe for people what build() would compile or install before a run; None if nothing is missing."""
        return None

    def build(self) -> None:  # noqa: B027 most methods have nothing to compile
        """Compile or install what the method needs. The harness calls build() once, in a process of its own that ends
        before the runs."""

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        """Return the method's row in the fairness table: implementation, model, attention, optimizer, precision,
        recompute, clipping."""
        return {"implementation": "its file"}


REGISTRY = FileRegistry("method", "methods", lambda stem: stem.replace("_", "-"))


def names(folders: tuple[Path, ...] = ()) -> list[str]:
    """Return the names of all methods as on the command line: a method's name is its file's name with hyphens."""
    return sorted(REGISTRY.files(folders))


def broken(folders: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return the reason for each method whose file cannot be loaded, by method's name. The other methods still run."""
    reasons = {}
    for name in names(folders):
        try:
            load(name, folders)
        except ValueError as error:
            reasons[name] = str(error)
    return reasons


def loadable(folders: tuple[Path, ...]) -> dict[str, type[Method]]:
    load_errors = broken(folders)
    return {name: load(name, folders) for name in names(folders) if name not in load_errors}


def load(name: str, folders: tuple[Path, ...] = ()) -> type[Method]:
    """Return the method's class. Raises ValueError if there is no method of this name or its file holds no method."""
    files = REGISTRY.files(folders)
    if name not in files:
        raise ValueError(
            f"no method {name!r}: {did_you_mean(name, files)}choose one of {', '.join(sorted(files))}"
        )
    cls: type[Method] | None = REGISTRY.class_in(files[name], Method)
    if cls is None or not dataclasses.is_dataclass(cls):
        raise ValueError(
            f"{files[name]} must hold one frozen dataclass of harness.core.method.Method with plan() and train(); see"
            " CONTRIBUTING.md"
        )
    return cls


def create(name: str, options: Options, folders: tuple[Path, ...] = ()) -> Method:
    """Return the method with these options. Raises ValueError for an unknown method, option or value."""
    cls = load(name, folders)
    allowed = option_names(cls)
    for option in options:
        if option not in allowed:
            raise ValueError(f"{name} has no option {option!r}: it has {', '.join(allowed) or 'none'}")
    file = REGISTRY.files(folders)[name]
    with errors_in_one_line(file, "class"):
        types_by_option = get_type_hints(cls)
    for option, value in options.items():
        if not isinstance(value, types_by_option[option]):
            type_name = getattr(types_by_option[option], "__name__", types_by_option[option])
            note = "" if isinstance(value, str) else " (none, true, false and numbers are not read as text)"
            raise ValueError(f"{name}'s option {option} takes {type_name}, not {value!r}{note}")
    with errors_in_one_line(file, "__init__()", (Unavailable,)):
        return cls(**options)


def check(method: Method, workload: Workload, folders: tuple[Path, ...] = ()) -> None:
    """Raise ValueError if this method cannot train this workload. The text names methods that can."""

    def methods_with(ability: str) -> str:
        return ", ".join(name for name, cls in loadable(folders).items() if getattr(cls, ability))

    if workload.config is not None and not method.takes_config:
        method_names = methods_with("takes_config")
        raise ValueError(
            f"{method.label} trains only the published GPT, not {workload.model}: try -m {method_names}"
        )
    if workload.lora is not None and not method.takes_lora:
        raise ValueError(
            f"{method.label} does not train adapters: leave --lora out, or try -m {methods_with('takes_lora')}"
        )
    if workload.micro_batches > 1 and not method.accumulates:
        method_names = methods_with("accumulates")
        raise ValueError(
            f"{method.label} does not sum gradients of micro-batches: try --micro-batches 1, or -m {method_names}"
        )
    if workload.clip_norm and not method.clips:
        raise ValueError(
            f"{method.label} does not clip gradients: try --clip 0, or -m {methods_with('clips')}"
        )
    if workload.dtype == "fp16" and not method.scales_loss:
        raise ValueError(
            f"{method.label} has no loss scale for fp16: try --dtype bf16, or -m {methods_with('scales_loss')}"
        )


def declaring(folders: tuple[Path, ...] = ()) -> dict[str, type[Method]]:
    """Return, by field, the first method that declares a flag for the field. The flag also sets the fields of the same
    name of all other methods."""
    return _declaring(tuple(REGISTRY.files(folders).values()), folders)


@functools.lru_cache(maxsize=4)
def _declaring(_: tuple[Path, ...], folders: tuple[Path, ...]) -> dict[str, type[Method]]:
    classes: dict[str, type[Method]] = {}
    for cls in loadable(folders).values():
        for name in options_of(cls):
            classes.setdefault(name, cls)
    return classes


def flags(folders: tuple[Path, ...] = ()) -> dict[str, Option]:
    """Return the options of methods that have a flag of their own, by field; --option sets any other field."""
    return {name: options_of(cls)[name] for name, cls in declaring(folders).items()}


def option_names(cls: type[Method]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]


def having(option: str, folders: tuple[Path, ...] = ()) -> list[str]:
    """Return the names of the methods that have this option."""
    return [name for name, cls in loadable(folders).items() if option in option_names(cls)]


def reference(folders: tuple[Path, ...] = ()) -> str:
    """Return the name of the reference method. Raises ValueError unless exactly one method has is_reference = True."""
    references = [name for name, cls in loadable(folders).items() if cls.is_reference]
    if len(references) != 1:
        raise ValueError(
            f"expected one method with is_reference = True, got {len(references)}: {', '.join(references)}"
        )
    return references[0]


def largest_depth(fits: Callable[[int], bool]) -> int:
    """Return the largest number of layers that fits, found by doubling and bisection; 0 if one layer does not fit.
    Assumes that if a model fits, every model with fewer layers fits, too."""
    depth_bound = 1
    while fits(depth_bound):
        if depth_bound == MOST_LAYERS:
            return depth_bound
        depth_bound *= 2
    depths = range(depth_bound // 2 + 1, depth_bound)
    return depth_bound // 2 + bisect.bisect_left(depths, True, key=lambda depth: not fits(depth))


def source_hash(name: str, folders: tuple[Path, ...] = ()) -> str:
    """Return the hash of the code that decides how this method trains."""
    return identity.source_hash(REGISTRY.files(folders)[name])


def code_identity(name: str, folders: tuple[Path, ...] = ()) -> identity.CodeIdentity:
    """Return the files and folders that source_hash() covers."""
    return identity.CodeIdentity.of(REGISTRY.files(folders)[name])


def workloads_of(job: Job) -> list[Workload]:
    """Return the workload of each of the job's models: one model, unless options of OF_SEVERAL_MODELS say more."""
    return vary_workload(job.workload, *(job.options.get(name, 1) for name in OF_SEVERAL_MODELS))


def vary_workload(workload: Workload, num_models: int, num_batch_sizes: int) -> list[Workload]:
    """Return the workloads of several models, each with its own pair of learning rate and batch size. There are
    `num_batch_sizes` sizes and NUM_RATES rates, each half of the one before; after the last rate the rates repeat."""
    workloads = []
    for number in range(num_models):
        rate_index, size_index = divmod(number, num_batch_sizes)
        learning_rate = workload.learning_rate / 2 ** (rate_index % NUM_RATES)
        batch_size = workload.batch_size >> size_index
        workloads.append(dataclasses.replace(workload, learning_rate=learning_rate, batch_size=batch_size))
    return workloads
