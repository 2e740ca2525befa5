"""A user's own configuration of DeepSpeed, as `deepspeed --deepspeed_config` and Hugging Face's Trainer take it.

The names of entries, and their defaults, are those of deepspeed/runtime/config.py, precision_config.py and
zero/config.py of 0.19.8; entries that other releases had are refused with the reason. `auto` is filled in as
accelerate's Accelerator.prepare() fills it in.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.base.json_object import JsonObject
from harness.core.job import BETAS, EPSILON, LOSS_SCALE_WINDOW, WEIGHT_DECAY, Plan, Room, Workload
from methods.engines import accelerate_file
from methods.engines.deepspeed_config import BUCKET_PARAMS, COUNTED_ACCUMULATIONS, zero_plan
from methods.engines.user_config import (
    AUTO,
    Dropped,
    Honored,
    KnownValue,
    Off,
    Only,
    Table,
    UserConfig,
    config_text,
    honored_entries,
    message_text,
    read_config,
    value_at,
)

NUMBER, FLAG, WORD = Honored((int, float)), Honored((bool,)), Honored((str,))
_PRINTS = Dropped("prints or logs")
_SAVES = Dropped("concerns saving and loading")
_NVME = Dropped("read only where states live on a disk")
_MODEL = Off("it changes the model or its data, which here are the reference's; leave it out")
_PARALLEL = Only((1, 0), "this method splits by ZeRO alone; try 1, or -m megatron-lm")
_REMOVED = "leave it out"
_RECOMPUTE = Only((False, 0, None), "the model recomputes each layer by torch's checkpoint; try false")

TABLE: Table = {
    # How ranks sum gradients, and in which precision.
    "communication_data_type": WORD,
    "prescale_gradients": FLAG,
    "gradient_predivide_factor": NUMBER,
    "gradient_allreduce_op": WORD,
    "data_types.grad_accum_dtype": WORD,
    "data_types.param_dtype": Only((), "--dtype says it; leave it out"),
    "data_types.buffer_dtype": Only((), "buffers keep the model's dtype; leave it out"),
    "data_types.keep_in_fp32_modules": Only((), "the model is the reference's; leave it out"),
    "bf16.immediate_grad_update": FLAG,
    "bf16.check_grad_overflow": FLAG,
    "bf16.bf16_master_weights_and_grads": FLAG,
    "bf16.bf16_optimizer_states": FLAG,
    "fp16.auto_cast": Dropped("casts inputs, which are whole numbers"),
    "fp16.loss_scale": NUMBER,
    "fp16.loss_scale_window": Dropped("read only in fp16, where the workload gives it"),
    "fp16.initial_scale_power": NUMBER,
    "fp16.hysteresis": NUMBER,
    "fp16.consecutive_hysteresis": FLAG,
    "fp16.min_loss_scale": NUMBER,
    "fp16.fp16_master_weights_and_grads": FLAG,
    "disable_allgather": Only((False,), "no longer a setting of DeepSpeed; leave it out"),
    "managed_gradient_accumulation": Only((True,), "the engine counts micro-batches here; try true"),
    "sequence_parallel_size": _PARALLEL,
    "seq_parallel_communication_data_type": Dropped("read only by sequence parallelism"),
    "mp_size": _PARALLEL,
    # The optimizer and its schedule.
    "optimizer.type": WORD,
    "optimizer.legacy_fusion": Only((False,), "read only by LAMB; leave it out"),
    "optimizer.params.torch_adam": FLAG,
    "optimizer.params.foreach": FLAG,
    "optimizer.params.fused": FLAG,
    "optimizer.params.fp32_optimizer_states": FLAG,
    "optimizer.params.adam_w_mode": Only(
        (True,), "the reference's AdamW decays weights, not gradients; try true"
    ),
    "optimizer.params.bias_correction": Only((True,), "the reference's AdamW corrects its moments; try true"),
    "optimizer.params.amsgrad": Only((False,), "the reference's AdamW keeps no largest moment; try false"),
    "zero_allow_untested_optimizer": Dropped("given as true: torch's AdamW is untested for DeepSpeed"),
    "zero_force_ds_cpu_optimizer": FLAG,
    # ZeRO.
    "zero_optimization.stage": NUMBER,
    "zero_optimization.contiguous_gradients": FLAG,
    "zero_optimization.reduce_scatter": FLAG,
    "zero_optimization.reduce_bucket_size": NUMBER,
    "zero_optimization.use_multi_rank_bucket_allreduce": FLAG,
    "zero_optimization.allgather_partitions": FLAG,
    "zero_optimization.allgather_bucket_size": NUMBER,
    "zero_optimization.overlap_comm": FLAG,
    "zero_optimization.round_robin_gradients": FLAG,
    "zero_optimization.parameter_alignment": FLAG,
    "zero_optimization.sub_group_size": NUMBER,
    "zero_optimization.stage3_prefetch_bucket_size": NUMBER,
    "zero_optimization.stage3_param_persistence_threshold": NUMBER,
    "zero_optimization.stage3_model_persistence_threshold": NUMBER,
    "zero_optimization.stage3_max_live_parameters": NUMBER,
    "zero_optimization.stage3_max_reuse_distance": NUMBER,
    "zero_optimization.stage3_module_granularity_threshold": NUMBER,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": FLAG,
    "zero_optimization.stage3_allgather_sequential": FLAG,
    "zero_optimization.memory_efficient_linear": FLAG,
    "zero_optimization.override_module_apply": FLAG,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _SAVES,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _SAVES,
    "zero_optimization.load_from_fp32_weights": _SAVES,
    "zero_optimization.elastic_checkpoint": _SAVES,
    "zero_optimization.pipeline_loading_checkpoint": _SAVES,
    "zero_optimization.ignore_unused_parameters": Dropped("each parameter of the models here is used"),
    "zero_optimization.log_trace_cache_warnings": _PRINTS,
    "zero_optimization.enable_sanity_checks": Dropped("only checks"),
    "zero_optimization.compute_grad_norm": Only((True,), "the gate reads the gradient norm; try true"),
    "zero_optimization.legacy_stage1": Only((False,), "no longer a setting of DeepSpeed; leave it out"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Dropped("read only by Muon"),
    "zero_optimization.leaf_module": Off("it names modules of another model; leave it out"),
    "zero_optimization.zero_hpz_partition_size": _PARALLEL,
    "zero_optimization.zero_quantized_weights": Only(
        (False,), "its kernels are not compiled here; try false"
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": Only(
        (False,), "each weight is trained here; try false"
    ),
    "zero_optimization.zero_quantized_gradients": Only(
        (False,), "its kernels are not compiled here; try false"
    ),
    "zero_optimization.zenflow": Off("its updates are late by design; try -m zenflow"),
    "zero_optimization.mics_shard_size": Only((-1,), f"MiCS is no longer part of DeepSpeed; {_REMOVED}"),
    "zero_optimization.mics_hierarchical_params_gather": Only(
        (False,), f"MiCS is no longer there; {_REMOVED}"
    ),
    "zero_optimization.cpu_offload": Only(
        (False,), "its name is now offload_optimizer, with device cpu; try that"
    ),
    "zero_optimization.cpu_offload_params": Only(
        (False,), "its name is now offload_param, with device cpu; try that"
    ),
    "zero_optimization.cpu_offload_param": Only(
        (False,), "its name is now offload_param, with device cpu; try that"
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Only((False,), "its name is now pin_memory; try that"),
    "zero_optimization.offload_optimizer.device": WORD,
    "zero_optimization.offload_optimizer.pin_memory": FLAG,
    "zero_optimization.offload_optimizer.ratio": Only((1,), "part of the optimizer on the device; try 1"),
    "zero_optimization.offload_optimizer.super_offload": Only(
        (False,), "it runs on a GPU only; try -m superoffload"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Dropped("read only by SuperOffload"),
    "zero_optimization.offload_optimizer.nvme_path": _NVME,
    "zero_optimization.offload_optimizer.buffer_count": _NVME,
    "zero_optimization.offload_optimizer.pipeline_read": _NVME,
    "zero_optimization.offload_optimizer.pipeline_write": _NVME,
    "zero_optimization.offload_optimizer.fast_init": _NVME,
    "zero_optimization.offload_param.device": WORD,
    "zero_optimization.offload_param.pin_memory": FLAG,
    "zero_optimization.offload_param.nvme_path": _NVME,
    "zero_optimization.offload_param.buffer_count": _NVME,
    "zero_optimization.offload_param.buffer_size": _NVME,
    "zero_optimization.offload_param.max_in_cpu": _NVME,
    "aio": _NVME,
    # Recompute.
    "activation_checkpointing.partition_activations": _RECOMPUTE,
    "activation_checkpointing.contiguous_memory_optimization": _RECOMPUTE,
    "activation_checkpointing.cpu_checkpointing": _RECOMPUTE,
    "activation_checkpointing.number_checkpoints": _RECOMPUTE,
    "activation_checkpointing.synchronize_checkpoint_boundary": _RECOMPUTE,
    "activation_checkpointing.profile": _PRINTS,
    # What changes no training; some of it would take time of the steps that are measured.
    "steps_per_print": _PRINTS,
    "wall_clock_breakdown": Dropped(
        "waits for the device at each part of a step, in order to time the parts"
    ),
    "memory_breakdown": _PRINTS,
    "dump_state": _PRINTS,
    "log_level": _PRINTS,
    "flops_profiler": _PRINTS,
    "comms_logger": _PRINTS,
    "timers": _PRINTS,
    "tensorboard": _PRINTS,
    "wandb": _PRINTS,
    "csv_monitor": _PRINTS,
    "comet": _PRINTS,
    "vocabulary_size": Dropped("only warns"),
    "disable_python_gc": Dropped("concerns Python's collector of garbage"),
    "checkpoint": _SAVES,
    "nebula": _SAVES,
    "datastates": _SAVES,
    "datastates_ckpt": _SAVES,
    "dataloader_drop_last": Dropped("the harness loads the data"),
    # What trains another model, other data or other updates, or splits otherwise.
    "amp": Off("apex is not installed; try --dtype bf16 or fp16"),
    "torch_autocast": Off("--dtype bf16 and fp16 keep weights in half precision; leave it out"),
    "autotuning": Off("it would try many configurations; leave it out"),
    "compile": Off("layers run as they are; leave it out"),
    "pipeline": Off("this method splits by ZeRO alone; try -m megatron-lm"),
    "tensor_parallel": Off("this method splits by ZeRO alone; try -m megatron-lm"),
    "expert_parallel": Off("this method splits by ZeRO alone; leave it out"),
    "use_data_before_expert_parallelism": Off("this method splits by ZeRO alone; leave it out"),
    "elasticity": Off("the number of ranks is fixed; leave it out"),
    "hybrid_engine": Off("it generates texts; leave it out"),
    "sparse_attention": _MODEL,
    "sparse_gradients": _MODEL,
    "curriculum_learning": _MODEL,
    "data_efficiency": _MODEL,
    "progressive_layer_drop": _MODEL,
    "compression_training": _MODEL,
    "quantize_training": _MODEL,
    "weight_quantization": _MODEL,
    "eigenvalue": _MODEL,
    "graph_harvesting": _MODEL,
    "msamp": _MODEL,
}
# Parameters of a schedule. Only `auto` is taken: then the workload's schedule sets the rate of each step.
SCHEDULE = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "warmup_type",
    "total_num_steps",
    "warmup_min_ratio",
    "cos_min_ratio",
    "last_batch_iteration",
)
_NO_SCHEDULE = Only((), 'the workload gives the rate of each step; try "auto", or leave scheduler out')
TABLE |= {"scheduler.type": Dropped("with parameters that are all auto it says no rate")}
TABLE |= {f"scheduler.params.{name}": _NO_SCHEDULE for name in SCHEDULE}
# types of the optimizer: DeepSpeed makes both AdamW, unless adam_w_mode says otherwise
ADAMW = ("adamw", "adam")
HOST_DEVICES = ("none", "cpu")
# dtypes in which gradients are summed
SUM_DTYPE_ENTRIES = (("", "communication_data_type"), ("data_types", "grad_accum_dtype"))
# Entries whose `auto` is filled in: dtypes of sums, what is kept on a device, and entries of ZeRO, of which DeepSpeed,
# too, takes the default for `auto`; but not the stage, whose default splits nothing.
AUTOMATIC = {
    *(".".join(filter(None, names)) for names in SUM_DTYPE_ENTRIES),
    *(f"zero_optimization.offload_{kind}.device" for kind in ("optimizer", "param")),
    *(path for path in TABLE if path.startswith("zero_optimization.") and path.count(".") == 1),
} - {"zero_optimization.stage"}
TABLE |= {
    path: rule._replace(takes_auto=True)
    for path, rule in TABLE.items()
    if path in AUTOMATIC and isinstance(rule, Honored)
}
# DeepSpeed's defaults of reduce_bucket_size and stage3_max_live_parameters.
BUCKET_SIZE, LIVE_PARAMS = 500_000_000, 1_000_000_000


def automatic_sizes(workload: Workload) -> dict[str, int]:
    """Return the sizes of ZeRO that accelerate fills in for `auto`, from the model's width."""
    square = workload.hidden_size**2
    return {
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * workload.hidden_size,
    }


@dataclass(frozen=True)
class DeepSpeedFile:
    """What a user's configuration asks of DeepSpeed, without the entries that the workload gives."""

    entries: JsonObject
    stage: int
    offload: str | None  # a key of deepspeed_config.OFFLOADS; None: nothing lives on the host
    adam: str | None  # a key of deepspeed_config.ADAMS; None: the configuration leaves it to the caller
    accumulation: str | None  # a key of deepspeed_config.ACCUMULATIONS; None: likewise

    @classmethod
    def read(cls, text: str, workload: Workload, num_ranks: int, accumulation: str) -> DeepSpeedFile:
        """Read a file of DeepSpeed or accelerate, or JSON. Raises ValueError, one line with a way out, for an entry
        that says otherwise than the workload, that cannot be honored, or that is not known."""
        config = read_config(text)
        if is_from_accelerate := accelerate_file.is_accelerate_file(config.data):
            config = accelerate_file.deepspeed_config_of(config, workload, num_ranks)
        entries = honored_entries(config, TABLE, _workload_values(workload, num_ranks, accumulation))
        _check_schedule(config)
        for dtype in ("bf16", "fp16"):
            if dtype != workload.dtype:  # switched off, so nothing in it is read
                entries.pop(dtype, None)
        for section, name in SUM_DTYPE_ENTRIES:
            section_entries = entries.get(section, {}) if section else entries
            if section_entries.get(name) == workload.dtype:
                section_entries[name] = AUTO  # a probe of the same configuration may have another dtype
        zero = entries.setdefault("zero_optimization", {})
        for name, value in list(zero.items()):
            if value == AUTO and name not in automatic_sizes(workload):
                del zero[name]  # DeepSpeed takes its default
        stage, offload = _checked_stage(config, zero), _offload_key(config, zero)
        file_accumulation = "accelerate" if is_from_accelerate else None
        return cls(entries, stage, offload, adam_of(config, entries), file_accumulation)

    @property
    def text(self) -> str:
        """The configuration as JSON; reading it gives the same configuration, whatever the workload gives."""
        return config_text(self.entries)

    @property
    def overlaps(self) -> bool:
        """True if ranks exchange gradients during the backward pass. DeepSpeed's default depends on the stage."""
        return bool(self.entries["zero_optimization"].get("overlap_comm", self.stage == 3))

    def zero(self, workload: Workload) -> JsonObject:
        """Return the entry zero_optimization for this workload."""
        sizes = automatic_sizes(workload)
        zero = self.entries["zero_optimization"]
        return {name: sizes[name] if value == AUTO else value for name, value in zero.items()}

    def other_entries(self, workload: Workload) -> JsonObject:
        """Return all entries but zero_optimization for this workload."""
        data = copy.deepcopy(
            {name: value for name, value in self.entries.items() if name != "zero_optimization"}
        )
        for section, name in SUM_DTYPE_ENTRIES:
            section_entries = data.get(section, {}) if section else data
            if section_entries.get(name) == AUTO:
                section_entries[name] = workload.dtype
        return data

    def plan(self, workload: Workload, room: Room, num_ranks: int) -> Plan:
        """Return the plan of a rank, by the stage, the offload and the bucket sizes of the configuration."""
        plan = zero_plan(workload, room, self.stage, self.offload, num_ranks)
        if not self.stage:
            return plan
        zero, size, params = self.zero(workload), workload.weight_bytes, workload.num_params
        bucket = int(zero.get("reduce_bucket_size", BUCKET_SIZE))
        if room.device_bytes is None:
            # A bucket on the host takes memory only where it is written. On a device it takes all its memory at once.
            bucket = min(bucket, params)
        device = dict(plan.device)
        if self.stage == 3:
            live = min(params, int(zero.get("stage3_max_live_parameters", LIVE_PARAMS)))
            at_once = workload.end_params + 2 * workload.layer_params
            device["weights"] += size * max(0, live - at_once)
            device["buffers"] = size * bucket
        else:
            planned = 2 * min(BUCKET_PARAMS, params)
            device["gradients"] += size * ((2 if self.overlaps else 1) * bucket - planned)
        return replace(plan, device=device)


def _say_auto(got: Any) -> str:
    return '"auto"'


def _workload_values(workload: Workload, num_ranks: int, accumulation: str) -> dict[str, KnownValue]:
    """Return what the workload gives, by the entry's path."""
    counted = workload.micro_batches if accumulation in COUNTED_ACCUMULATIONS else 1
    batch_text = f"-b {workload.batch_size}"
    if num_ranks > 1:
        batch_text += f", {num_ranks} ranks"
    if counted > 1:
        batch_text += f", {workload.micro_batches} micro-batches"
    accumulation_text = f"accumulation={accumulation}"
    if accumulation in COUNTED_ACCUMULATIONS:
        accumulation_text = "--micro-batches"
    known_values = {
        "gradient_accumulation_steps": KnownValue(
            counted, accumulation_text, partial(_option_text, "--micro-batches")
        ),
        "train_micro_batch_size_per_gpu": KnownValue(
            workload.batch_size // num_ranks // workload.micro_batches,
            batch_text,
            lambda got: (
                f"-b {got * num_ranks * workload.micro_batches}" if isinstance(got, int) else '"auto"'
            ),
        ),
        "train_batch_size": KnownValue(
            workload.batch_size // workload.micro_batches * counted,
            batch_text,
            lambda got: f"-b {got // counted * workload.micro_batches}" if isinstance(got, int) else '"auto"',
        ),
        "gradient_clipping": KnownValue(workload.clip_norm, "--clip", partial(_option_text, "--clip")),
        "optimizer.params.lr": KnownValue(workload.learning_rate, "--lr", partial(_option_text, "--lr")),
    }
    if workload.dtype == "fp16":
        window = workload.loss_scale_window or LOSS_SCALE_WINDOW
        known_values["fp16.loss_scale_window"] = KnownValue(window, "the reference's loss scale", _say_auto)
    for dtype in ("bf16", "fp16"):
        known_values[f"{dtype}.enabled"] = KnownValue(
            workload.dtype == dtype, f"--dtype {workload.dtype}", partial(_dtype_option, dtype)
        )
    for name, value in (("betas", list(BETAS)), ("eps", EPSILON), ("weight_decay", WEIGHT_DECAY)):
        known_values[f"optimizer.params.{name}"] = KnownValue(value, "the reference's AdamW", _say_auto)
    return known_values


def _option_text(option: str, got: Any) -> str:
    return f"{option} {message_text(got)}"


def _dtype_option(dtype: str, got: Any) -> str:
    return f"--dtype {dtype}" if got is True else '"auto"'


def _check_schedule(config: UserConfig) -> None:
    """Raise ValueError for a schedule none of whose parameters is `auto`: it would go by DeepSpeed's own rates."""
    if (
        value_at(config.data, "scheduler.type")
        and AUTO not in (value_at(config.data, "scheduler.params") or {}).values()
    ):
        message = 'expected scheduler.params, each "auto", got none: the workload gives the rate of each step'
        raise ValueError(f"{config.source}: {message}; leave scheduler out")


def _checked_stage(config: UserConfig, zero: JsonObject) -> int:
    stage = zero.setdefault("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"{config.source}: expected zero_optimization.stage 0, 1, 2 or 3, got {message_text(stage)}"
        )
    return int(stage)


def _offload_key(config: UserConfig, zero: JsonObject) -> str | None:
    """Return the key of deepspeed_config.OFFLOADS; None: nothing lives on the host. Leave out sections of states that
    stay on the device."""
    offloads = []
    for name in ("offload_optimizer", "offload_param"):
        device = zero.get(name, {}).get("device", "none")
        if device == "nvme":
            message = f"expected {name} on the device or on cpu, got nvme"
            raise ValueError(f"{config.source}: {message}; try -m zero-infinity-nvme")
        if device not in (*HOST_DEVICES, AUTO):
            raise ValueError(
                f'{config.source}: expected {name}.device "none" or "cpu", got {message_text(device)}'
            )
        if device == "cpu":
            offloads.append(name)
        else:
            zero.pop(name, None)
    least_stage = 3 if "offload_param" in offloads else len(offloads)
    if zero["stage"] < least_stage:
        message = f"expected stage {least_stage} or higher for {offloads[-1]}, got {zero['stage']}"
        raise ValueError(f"{config.source}: {message}; try stage {least_stage}")
    if offloads == ["offload_param"]:
        message = "expected offload_optimizer on cpu beside offload_param, got none"
        raise ValueError(
            f"{config.source}: {message}: no plan counts weights alone on the host; try both on cpu"
        )
    return (None, "optimizer", "all")[len(offloads)]


def adam_of(config: UserConfig, entries: JsonObject) -> str | None:
    """Return which AdamW updates. An optimizer in the configuration is DeepSpeed's own, unless it asks for torch's.
    Without one, DeepSpeed's is demanded on the host, unless zero_force_ds_cpu_optimizer is false."""
    if "optimizer" in config.data:
        kind = value_at(entries, "optimizer.type")
        if not isinstance(kind, str) or kind.lower() not in ADAMW:
            message = f"expected optimizer.type AdamW, as the reference, got {message_text(kind)}"
            raise ValueError(f"{config.source}: {message}; leave optimizer out")
        return "published" if value_at(entries, "optimizer.params.torch_adam") else "deepspeed"
    is_on_host = "offload_optimizer" in entries["zero_optimization"]
    is_demanded = entries.get("zero_force_ds_cpu_optimizer", True) is not False
    return "deepspeed" if is_on_host and is_demanded else None
