"""The values that describe a run: Workload, Budget, Room, Plan and Job. They need no torch and allocate no tensors.

Units: bytes, seconds, parameters. GiB = 2**30, 1 B = 10**9 parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.base.console import counted
from harness.base.foreign_file import NO_OTHER_FIELDS
from harness.base.json_object import JsonObject
from harness.core import hub_config
from harness.core.adapters import Adapters
from harness.core.anatomy import Anatomy, LayerKind, anatomy_of
from harness.core.option import UNSAID, Options, opt, unsaid_of
from harness.core.rates import Rates
from harness.core.workload_costs import WorkloadCosts

GIB = 2**30
MOST = 10**9  # upper bound of every count, so that products of counts are finite as floats
MOST_LAYERS = 2**20  # upper bound of num_layers, because a plan takes time for each layer
# upper bound of a plan's bytes: above any product of counts, far below the largest float
MOST_PLANNED_BYTES = 1e100
# The memories of a plan, and the kinds of bytes that a plan counts in each memory.
MEMORIES = ("device", "host", "disk")
STATE_KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")

# The published runs' optimizer: AdamW, whose learning rate warms up linearly and then decays as a cosine.
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01
MIN_LEARNING_RATE = 1e-5
LR_WARMUP_STEPS = 3200
LR_DECAY_STEPS = 320_000
# Settings of fp16's dynamic loss scale (methods/shared/loss_scale.py). DeepSpeed has the same values.
INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_WINDOW = 1000  # the loss scale doubles after this many steps in a row without overflow


@dataclass(frozen=True)
class Workload(WorkloadCosts):
    """A model, its optimizer and its data: the training that all methods share.

    Raises ValueError for values that make no model; the error's text names the allowed values."""

    __pydantic_config__ = NO_OTHER_FIELDS

    # how many transformer layers
    num_layers: int = opt(16, "-l", "--layers", "Number of layers.", is_list=True)
    hidden_size: int = opt(2048, "-h", "Hidden size.", is_list=True)  # width of a layer
    num_heads: int = opt(16, "--heads", "Attention heads per layer.")  # attention heads of each layer
    seq_len: int = opt(1024, "--seq", "Tokens per sample.", is_list=True)  # tokens of a sample
    batch_size: int = opt(4, "-b", "Samples per step.", is_list=True)  # samples of a step
    # equal parts of a batch, trained one after the other; their gradients are summed
    micro_batches: int = opt(1, "--micro-batches", "Number of equal parts of each batch.", is_unsaid=True)
    # GPT-2's 50257, padded to a multiple of 128
    vocab_size: int = opt(50304, "--vocab", "Vocabulary size.")
    # dtype of weights and gradients: fp32, bf16 or fp16; master weights and moments are fp32
    dtype: str = opt("fp32", "--dtype", "Number format: fp32, or mixed precision with bf16 or fp16.")
    # dropout probability; the published runs used 0.1; 0 allows comparison to the last bit
    dropout: float = opt(0.0, "--dropout", "Dropout probability; the published runs used 0.1.")
    # limit of the global gradient norm; 0: no clipping
    clip_norm: float = opt(1.0, "--clip", "Largest global gradient norm; 0: no clipping.")
    # the highest learning rate, reached at the end of the warm-up (learning_rate_at)
    learning_rate: float = opt(1.5e-4, "--lr", "Peak learning rate.")
    seed: int = opt(1234, "--seed", "Seed of weights and data.")  # seed of starting weights, data and dropout
    # prefix of a Megatron .bin/.idx pair; None: the synthetic stream
    corpus: str | None = opt(
        None, "--data", "Prefix of a Megatron corpus (.bin, .idx); default: tokens drawn by --seed."
    )
    # name of the model in `config`, for people
    model: str | None = field(default=None, metadata=UNSAID)
    # a model's config.json (harness/core/hub_config.py); None: the published GPT
    config: str | None = field(default=None, metadata=UNSAID)
    # folder of safetensors with starting weights, if config is set; None: seeded values
    weights: str | None = opt(
        None,
        "--weights",
        "Folder of a Hugging Face model, whose weights training starts from; default: drawn by --seed.",
        metavar="DIR",
        is_unsaid=True,
    )
    # rank and alpha of adapters, the only parameters that are then trained; None: all parameters are trained
    lora: str | None = opt(
        None,
        "--lora",
        "Train adapters of this rank on frozen weights (LoRA); default of alpha: twice the rank.",
        metavar="RANK[:ALPHA]",
        is_unsaid=True,
    )
    # names of the linear layers that get an adapter, separated by commas; None: all of each transformer layer
    lora_targets: str | None = opt(
        None,
        "--lora-targets",
        "Linear layers that get an adapter, as q_proj,v_proj; default: all of each layer.",
        metavar="NAMES",
        is_unsaid=True,
    )
    # step at which learning_rate is reached
    lr_warmup_steps: int = field(default=LR_WARMUP_STEPS, metadata=UNSAID)
    # step from which on the learning rate is at its lowest
    lr_decay_steps: int = field(default=LR_DECAY_STEPS, metadata=UNSAID)
    # fp16's steps without overflow before the scale doubles; None: 1000
    loss_scale_window: int | None = field(default=None, metadata=UNSAID)

    def __post_init__(self) -> None:
        check_count("num_layers", self.num_layers, MOST_LAYERS)
        for name in ("hidden_size", "num_heads", "seq_len", "batch_size", "micro_batches", "vocab_size"):
            check_count(name, getattr(self, name))
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed: expected 0 to 2**63 - 1, got {self.seed}")
        self._check_model()
        self._check_adapters()
        self._check_micro_batches()
        self._check_training()
        self._check_schedule()
        for name in ("dropout", "clip_norm", "learning_rate"):  # 1 and 1.0 must give the job the same key
            object.__setattr__(self, name, float(getattr(self, name)))

    def _check_model(self) -> None:
        if self.config is not None:
            self._check_config(self.config)
        elif self.weights is not None:
            raise ValueError(
                "--weights: expected a model with a config.json, got a GPT: try --model with that folder"
            )
        elif self.hidden_size % self.num_heads:
            below = self.hidden_size // self.num_heads * self.num_heads
            nearest = " or ".join(str(size) for size in (below, below + self.num_heads) if size)
            raise ValueError(
                f"hidden size {self.hidden_size} is not divisible by {self.num_heads} heads: try -h {nearest}, or other"
                " --heads"
            )

    def _check_config(self, text: str) -> None:
        config = hub_config.parsed(text)
        if (heads := hub_config.sizes_of(config)["num_heads"]) != self.num_heads:
            raise ValueError(
                f"--heads: expected {heads}, as the model has, got {self.num_heads}; leave --heads out"
            )
        if self.dropout:
            raise ValueError("--dropout: expected 0 for a model with a config.json: leave --dropout out")

    def _check_adapters(self) -> None:
        if self.lora_targets is not None and self.lora is None:
            raise ValueError("--lora-targets: expected --lora RANK beside it, got none; try --lora 16")
        if (terms := self.adapters) is None:
            return
        # 16 and 16:32 must give the job the same key
        object.__setattr__(self, "lora", terms.text)
        object.__setattr__(self, "lora_targets", ",".join(terms.targets) or None)
        if self.dropout:
            raise ValueError("--dropout: expected 0 with --lora: leave --dropout out")

    def _check_micro_batches(self) -> None:
        if self.batch_size % self.micro_batches:
            counts = ", ".join(str(n) for n in range(1, self.batch_size + 1) if self.batch_size % n == 0)
            expected = f"expected a divisor of batch {self.batch_size} ({counts})"
            raise ValueError(f"--micro-batches: {expected}, got {self.micro_batches}")
        if self.dropout and self.micro_batches > 1:
            raise ValueError(
                "dropout and micro-batches exclude each other, because micro-batches drop other elements than a whole"
                " batch; try --dropout 0, or --micro-batches 1"
            )

    def _check_training(self) -> None:
        if self.dtype not in ("fp32", "bf16", "fp16"):
            raise ValueError(f"--dtype: expected fp32, bf16 or fp16, got {self.dtype!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout: expected from 0 to below 1, got {self.dropout}")
        if not 0 <= self.clip_norm < math.inf:
            raise ValueError(f"--clip: expected 0 (off) or a positive norm, got {self.clip_norm}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--lr: expected a positive number, got {self.learning_rate}")

    def _check_schedule(self) -> None:
        for name in ("lr_warmup_steps", "lr_decay_steps", "loss_scale_window"):
            if (steps := getattr(self, name)) is not None:
                check_count(name, steps)
        if self.lr_decay_steps <= self.lr_warmup_steps:
            expected = f"expected lr_decay_steps above lr_warmup_steps ({self.lr_warmup_steps})"
            raise ValueError(f"{expected}, got {self.lr_decay_steps}; try {self.lr_warmup_steps + 1}")

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained on frozen weights; None: all parameters are trained. Raises ValueError for
        values of --lora that are none."""
        return None if self.lora is None else Adapters.parse(self.lora, self.lora_targets)

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the model: tensors by name and shape, and a layer's operations and bytes."""
        return anatomy_of(self)

    @property
    def layers_text(self) -> str:
        """The model's name and number of layers as text: `16 layers`, or `Qwen3-8B, 4 of 36 layers`."""
        if self.config is None:
            return counted(self.num_layers, "layer")
        whole_depth = hub_config.sizes_of(hub_config.parsed(self.config))["num_layers"]
        layers = counted(whole_depth, "layer")
        return f"{self.model_name}, {layers if whole_depth == self.num_layers else f'{self.num_layers} of {layers}'}"

    @property
    def model_name(self) -> str:
        """The model's name for people, such as `Qwen3-8B`; for the published GPT of any size, `GPT`."""
        if self.config is None:
            return "GPT"
        return str(self.model).removesuffix(f"/{hub_config.FILE}").rstrip("/").rpartition("/")[2]

    @property
    def layer_params(self) -> int:
        """Parameters of one layer, without its adapters; if layers are unequal, of the largest."""
        return self.anatomy.layer_params

    @property
    def end_params(self) -> int:
        """Parameters of embedding and head together; a tensor that both share counts once."""
        return self.anatomy.end_params

    @property
    def num_params(self) -> int:
        of_layers = (count * (kind.num_params + kind.num_adapter_params) for kind, count in self.kind_counts)
        return self.end_params + sum(of_layers)

    @property
    def num_trained(self) -> int:
        """Number of parameters that are trained: with adapters, theirs alone."""
        if not self.lora:
            return self.num_params
        return sum(count * kind.num_adapter_params for kind, count in self.kind_counts)

    @property
    def kind_counts(self) -> list[tuple[LayerKind, int]]:
        """Each kind of layer with the number of its layers."""
        return self.anatomy.counts(range(self.num_layers))

    @property
    def layer_numels(self) -> tuple[int, ...]:
        """For each layer, bottom first, its number of parameters; empty if all layers have the same."""
        return self.anatomy.layer_numels

    @property
    def mean_layer_params(self) -> int:
        """Parameters of a layer, as the rounded mean of all layers."""
        return round(sum(self.layer_numels) / self.num_layers) if self.layer_numels else self.layer_params

    @property
    def num_active_params(self) -> int:
        """Number of parameters that a token meets. In a mixture of experts these are fewer than num_params."""
        of_layers = (
            count * (kind.num_active_params + kind.num_adapter_params) for kind, count in self.kind_counts
        )
        return self.end_params + sum(of_layers)

    @property
    def params_text(self) -> str:
        """The number of parameters as text, such as 1.717 B; of a mixture of experts also those that a token meets, and
        with adapters those that are trained."""
        active, parts = self.num_active_params, []
        if active < self.num_params:
            parts.append(f"{params_text(active)} active")
        if self.lora:
            parts.append(f"{params_text(self.num_trained)} trained")
        return params_text(self.num_params) + (f" ({', '.join(parts)})" if parts else "")

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight, gradient or activation in the dtype of the computation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def waits_for_norm(self) -> bool:
        """True if updates wait for the whole gradient, because the gradient is clipped or, in fp16, checked for inf."""
        return self.clip_norm > 0 or self.dtype == "fp16"

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate at a step: it rises linearly, then falls as a cosine. Steps count from 1, and steps
        that fp16 skips count, too. The default workload has 4.687e-07 at step 10 and 2.344e-06 at step 50."""
        warmup, decay = self.lr_warmup_steps, self.lr_decay_steps
        if step <= warmup:
            return self.learning_rate * step / warmup
        lowest_rate = min(MIN_LEARNING_RATE, self.learning_rate)
        decay_share = min(1.0, (step - warmup) / (decay - warmup))
        return lowest_rate + (self.learning_rate - lowest_rate) * (1 + math.cos(math.pi * decay_share)) / 2

    def at_depth(self, num_layers: int) -> Workload:
        return dataclasses.replace(self, num_layers=num_layers)


@dataclass(frozen=True)
class Budget:
    """The limits of a run. A limit of None means all that the machine has. The `device_bytes` of a GPU include the
    driver's context and a reserve. --machine sets `rates`; only plans read rates, so a job's identity omits them."""

    __pydantic_config__ = NO_OTHER_FIELDS

    # bytes of the device's memory
    device_bytes: int | None = opt(None, "--device-memory", "Budget of device memory; default: all of it.")
    # bytes of the host's memory, for all processes of the run
    host_bytes: int | None = opt(None, "--host-memory", "Budget of host memory; default: all of it.")
    # bytes on the disk
    disk_bytes: int | None = opt(None, "--disk-memory", "Budget of disk space; default: all free space.")
    # most seconds that the whole run may take
    seconds: float | None = opt(
        None, "--timeout", "End a job that takes longer than this.", metavar="SECONDS"
    )
    # rate of the simulated link of device sim, in each direction
    link_bytes_per_second: float | None = opt(
        None, "--link", "Speed of --device sim's link: bytes per second in each direction."
    )
    rates: Rates | None = field(default=None, compare=False)  # the rates that plans assume; None: not known

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "disk_bytes", "seconds", "link_bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"budget: expected a positive and finite {name}, got {value}")
            if value is not None and not name.endswith("_bytes"):
                object.__setattr__(self, name, float(value))  # 1 and 1.0 must give the job the same key

    def share(self, num_ranks: int) -> Budget:
        """Return the budget of one of several ranks on one machine. Ranks share the host, but not a device."""
        return dataclasses.replace(self, host_bytes=self.host_bytes and self.host_bytes // num_ranks)

    @property
    def room(self) -> Room:
        """The room that a plan has on a device without a driver's context (sim or a CPU): the whole budget."""
        return Room(self.device_bytes, self.host_bytes, self.disk_bytes, self.rates)


@dataclass(frozen=True)
class Room:
    """The bytes of each memory that a plan may fill: the budget's or, if the budget sets no limit, all that the machine
    has. The `device_bytes` of a GPU leave out the driver's context and a reserve. None: no limit."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    rates: Rates | None = None
    page_locks: bool = False  # True: copies to and from the device use page-locked host memory


@dataclass(frozen=True)
class Plan:
    """A method's needs, computed without a run: bytes by memory and kind, and the options that the method chose."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0  # bytes copied in a step, both directions together
    # bytes that a rank sends in a step, by kind: gathers, sums, messages
    exchanged: dict[str, float] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    tried: str = ""  # if the plan does not fit: text that names other options that do not fit either
    # seconds of a step by the machine's rates, or a lower bound; None: not computed
    step_seconds: float | None = None
    binds: str = ""  # name of the resource that sets step_seconds
    updates_on_host: bool = True  # True: the host updates the parameters whose optimizer state it keeps
    # device bytes by pipeline stage; `device`: the largest stage
    stages: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for memory in (self.device, self.host, self.disk):
            if unknown := set(memory) - set(STATE_KINDS):
                expected = f"expected a plan's kinds of bytes among {', '.join(STATE_KINDS)}"
                raise ValueError(f"{expected}, got {', '.join(sorted(unknown))}")
        if not isinstance(self.stages, dict):
            raise ValueError(f"expected a plan's stages as bytes by name, got {self.stages!r:.80}")
        moved = {"moved_bytes": self.moved_bytes}
        byte_tables: list[Mapping[str, float]] = [
            self.device,
            self.host,
            self.disk,
            self.exchanged,
            self.stages,
            moved,
        ]
        for byte_table in byte_tables:
            for kind, num_bytes in byte_table.items():
                if not isinstance(num_bytes, int | float) or not 0 <= num_bytes <= MOST_PLANNED_BYTES:
                    expected = f"expected a plan's bytes as numbers from 0 to {MOST_PLANNED_BYTES:g}"
                    raise ValueError(f"{expected}, got {num_bytes!s:.80} for {kind}")
        seconds = 0 if self.step_seconds is None else self.step_seconds
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise ValueError(f"expected a plan's step_seconds of at least 0, got {seconds!r:.80}")

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    def pooled(self, room: Room) -> Plan:
        """Return this plan or, if the room sets no device_bytes, a copy that counts the bytes of each device as host
        bytes."""
        if room.device_bytes is not None:
            return self
        num_devices, host = self.options.get("num_devices", 1), dict[str, int]()
        for kind in {**self.device, **self.host}:
            host[kind] = num_devices * self.device.get(kind, 0) + self.host.get(kind, 0)
        return dataclasses.replace(self, device={}, host=host)

    def lacks(self, room: Room) -> dict[str, int]:
        """Return the missing bytes of each memory that is too small; empty if the plan fits."""
        plan, missing = self.pooled(room), {}
        for memory in MEMORIES:
            needed_bytes, room_bytes = getattr(plan, f"{memory}_bytes"), getattr(room, f"{memory}_bytes")
            if room_bytes is not None and needed_bytes > room_bytes:
                missing[memory] = needed_bytes - room_bytes
        return missing

    def shortfall(self, room: Room) -> str | None:
        """Describe the first memory that is too small, and the plan's bytes there by kind; None if the plan fits."""
        for memory in self.lacks(room):
            plan, room_bytes = self.pooled(room), getattr(room, f"{memory}_bytes")
            kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in getattr(plan, memory).items() if size)
            memory_name = "memory" if memory == "host" and room.device_bytes is None else f"{memory} memory"
            needed_bytes = getattr(plan, f"{memory}_bytes")
            return f"needs {gib(needed_bytes)} of {memory_name} ({kinds}), there is {gib(room_bytes)}"
        return None


@dataclass(frozen=True)
class Job:
    """One run as plain data. Two jobs with equal keys (see key()) measure the same thing."""

    __pydantic_config__ = NO_OTHER_FIELDS

    method: str  # name of the method
    workload: Workload  # what the method trains
    options: dict[str, Any] = field(default_factory=dict)  # the method's options, by name
    budget: Budget = Budget()  # what the run may use
    # cpu, cuda, or sim: a CPU with a second memory (harness/devices/sim.py)
    device: str = opt(
        "cpu",
        "--device",
        "sim: simulated on the CPU; auto: cuda if a GPU is here or --on asks for one, else sim if --device-memory is"
        " set, else cpu.",
    )
    steps: int = opt(20, "--steps", "Training steps, warm-up included.")  # number of steps, warm-up included
    # number of steps at the start that are not timed
    warmup: int = opt(
        5,
        "--warmup",
        "Number of first steps that medians leave out; default: 5, fewer if --steps is below 6.",
    )
    # file for a timeline of the last steps; no part of the key
    trace: str | None = field(default=None, compare=False)
    # folder for the trained weights; no part of the key
    save: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        if not 0 <= self.warmup < self.steps:
            steps = counted(self.steps, "step")
            raise ValueError(f"--warmup: expected 0 to {self.steps - 1} for {steps}, got {self.warmup}")
        for name, value in self.options.items():
            if not isinstance(value, int | float | str | None):
                raise ValueError(f"expected options as numbers, texts or None, got {value!r:.80} for {name}")
            if isinstance(value, int) and abs(value) > MOST:
                raise ValueError(f"option {name}: expected -{MOST} to {MOST}, got a number outside")
        if not isinstance(ranks := self.options.get("world_size", 1), int) or ranks < 1:
            raise ValueError(f"option world_size: expected a whole number of at least 1, got {ranks!r:.80}")

    @property
    def world_size(self) -> int:
        """Number of ranks (processes that train one model together): the option world_size; 1 if it is not set."""
        return self.options.get("world_size", 1)

    def key(self, **context: str) -> str:
        """Return a hash that identifies this job in a context, such as the hash of the method's source and the
        machine's facts. The values of --timeout, --trace and --save do not change the hash."""
        untimed = dataclasses.replace(self.budget, seconds=None)
        same = dataclasses.replace(self, budget=untimed, trace=None, save=None)
        text = json.dumps([same.to_dict(), context], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> JsonObject:
        data = dataclasses.asdict(self)
        del data["budget"]["rates"]
        for name in ("trace", "save"):
            if data[name] is None:
                del data[name]
        for name, default in unsaid_of(Workload).items():
            if data["workload"][name] == default:
                del data["workload"][name]
        return data

    @staticmethod
    def from_dict(data: JsonObject) -> Job:
        return Job(**{**data, "workload": Workload(**data["workload"]), "budget": Budget(**data["budget"])})


def check_count(name: str, value: int, most: int = MOST) -> None:
    if not 1 <= value <= most:
        limit = f"least 1, got {value}" if value < 1 else f"most {most}"
        raise ValueError(f"{name}: expected at {limit}")


def params_text(num_params: int) -> str:
    """Format a number of parameters, such as 1.717 B or 16.3 M."""
    return f"{num_params / 1e9:.3f} B" if num_params >= 1e8 else f"{num_params / 1e6:.3g} M"


def gib(size: float) -> str:
    """Format bytes."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} bytes"
