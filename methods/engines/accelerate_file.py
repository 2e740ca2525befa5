"""A user's own configuration of accelerate, the YAML that `accelerate launch --config_file` takes.

The names of entries are those of accelerate's commands/config/config_args.py and commands/launch.py, and what they mean
is in its utils/dataclasses.py (DeepSpeedPlugin, FullyShardedDataParallelPlugin) and utils/fsdp_utils.py, read at commit
16cb6eb (1.15.0.dev0). accelerate itself is not needed.
"""

from __future__ import annotations

from harness.base.json_object import JsonObject
from harness.core.job import Workload
from methods.engines.user_config import (
    AUTO,
    Dropped,
    Honored,
    KnownValue,
    Off,
    Only,
    Options,
    Table,
    UserConfig,
    honored_entries,
    message_text,
    read_config,
)

# by distributed_type: the method that trains so
METHOD_OF_TYPE = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp2-offload"}
# of accelerate's files
SIGN_ENTRIES = ("distributed_type", "compute_environment", "deepspeed_config", "fsdp_config")
# by --dtype: accelerate's mixed_precision
PRECISION_OF_DTYPE = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_PLACE = Dropped("says where ranks run, which --on says here")
_SAVES = Dropped("concerns saving and loading")
_OTHER = Off("another plugin than that of distributed_type; leave it out")
_TPU = Off("no device here is a TPU; leave it out")
_NOT_COMPILED = Only(("NO", "no", False), "layers run as they are; try 'NO'")
_OBSOLETE = Dropped("FSDP2 has no such setting, and accelerate ignores it")

TABLE: Table = {
    "compute_environment": Only(("LOCAL_MACHINE",), "ranks are started here; try LOCAL_MACHINE"),
    "distributed_type": Dropped("says which method reads the file"),
    "debug": Dropped("checks shapes of exchanges"),
    "downcast_bf16": Only(("no", False), "read on TPUs only; try 'no'"),
    "main_training_function": Dropped("names the script's function"),
    **dict.fromkeys(("dynamo_backend", "dynamo_config.dynamo_backend"), _NOT_COMPILED),
    **dict.fromkeys(
        (
            f"dynamo_config.dynamo_{name}"
            for name in ("mode", "use_dynamic", "use_fullgraph", "use_regional_compilation")
        ),
        Dropped("read only with a dynamo_backend"),
    ),
    "fp8_config": Off("--dtype is fp32, bf16 or fp16; leave it out"),
    "fp16": Only((False,), "its name is now mixed_precision; try that"),
    "parallelism_config": Off("ranks share the model in one way only; leave it out"),
    "megatron_lm_config": _OTHER,
    "mpirun_config": Off("ranks are started by torchrun; leave it out"),
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    **dict.fromkeys(
        (
            "machine_rank",
            "num_machines",
            "gpu_ids",
            "main_process_ip",
            "main_process_port",
            "rdzv_backend",
            "same_network",
            "enable_cpu_affinity",
            "use_cpu",
        ),
        _PLACE,
    ),
}
DEEPSPEED: Table = {
    "deepspeed_config.deepspeed_config_file": Honored((str,)),
    "deepspeed_config.zero_stage": Honored((int,)),
    "deepspeed_config.offload_optimizer_device": Honored((str,)),
    "deepspeed_config.offload_param_device": Honored((str,)),
    "deepspeed_config.offload_optimizer_nvme_path": Honored((str,)),
    "deepspeed_config.offload_param_nvme_path": Honored((str,)),
    "deepspeed_config.gradient_accumulation_steps": Honored((int, str), takes_auto=True),
    "deepspeed_config.gradient_clipping": Honored((int, float, str), takes_auto=True),
    "deepspeed_config.zero3_init_flag": Dropped("says how the model is made"),
    "deepspeed_config.zero3_save_16bit_model": _SAVES,
    "deepspeed_config.deepspeed_hostfile": _PLACE,
    "deepspeed_config.deepspeed_inclusion_filter": _PLACE,
    "deepspeed_config.deepspeed_exclusion_filter": _PLACE,
    "deepspeed_config.deepspeed_multinode_launcher": _PLACE,
    "deepspeed_config.deepspeed_moe_layer_cls_names": Only(
        (), "it names layers of another model; leave it out"
    ),
    "fsdp_config": _OTHER,
}
FSDP: Table = {
    "fsdp_config.fsdp_version": Only(
        (2,),
        "FSDP1 flattens a layer's parameters into one, and no method here trains by it; "
        "try the file that `accelerate to-fsdp2` writes",
    ),
    "fsdp_config.fsdp_offload_params": Only((True,), "this method keeps parameters on the host; try true"),
    "fsdp_config.fsdp_reshard_after_forward": Honored((bool,)),
    "fsdp_config.fsdp_auto_wrap_policy": Only(
        ("TRANSFORMER_BASED_WRAP",), "this method wraps each layer; try TRANSFORMER_BASED_WRAP"
    ),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Dropped(
        "names the layer, of which this method wraps each"
    ),
    "fsdp_config.fsdp_min_num_params": Dropped("read only by SIZE_BASED_WRAP"),
    "fsdp_config.fsdp_activation_checkpointing": Dropped("every method here recomputes each layer"),
    "fsdp_config.fsdp_state_dict_type": _SAVES,
    "fsdp_config.fsdp_cpu_ram_efficient_loading": _SAVES,
    "fsdp_config.fsdp_sharding_strategy": _OBSOLETE,
    "fsdp_config.fsdp_backward_prefetch": _OBSOLETE,
    "fsdp_config.fsdp_backward_prefetch_policy": _OBSOLETE,
    "fsdp_config.fsdp_sync_module_states": _OBSOLETE,
    "fsdp_config.fsdp_use_orig_params": _OBSOLETE,
    "fsdp_config.fsdp_forward_prefetch": Only((False,), "FSDP2 has none; leave it out"),
    "fsdp_config.fsdp_ignored_modules": Only((), "this method splits every parameter; leave it out"),
    "deepspeed_config": _OTHER,
}
# What FSDP2's plugin assumes of entries that are left out, where this method has no such setting.
FSDP_DEFAULTS = {"fsdp_version": 1, "fsdp_offload_params": False, "fsdp_auto_wrap_policy": "NO_WRAP"}


def is_accelerate_file(data: JsonObject) -> bool:
    """True if the data of a file are accelerate's."""
    return any(name in data for name in SIGN_ENTRIES)


def deepspeed_config_of(config: UserConfig, workload: Workload, num_ranks: int) -> UserConfig:
    """Return the configuration of DeepSpeed that accelerate would make of this file: that of its plugin, or the file
    that it names. Raises ValueError as honored_entries() does, or if the file is for another method."""
    config = _for_method(config, "DEEPSPEED")
    entries = honored_entries(config, TABLE | DEEPSPEED, _accelerate_values(workload, num_ranks))
    plugin = entries.get("deepspeed_config", {})
    if file := plugin.pop("deepspeed_config_file", None):
        if plugin:
            message = f"expected no other entries beside deepspeed_config_file, got {', '.join(plugin)}"
            raise ValueError(f"{config.source}: {message}; try them in {file}")
        return read_config(str(config.folder / file))
    zero: JsonObject = {"stage": plugin.get("zero_stage", 2)}
    for kind in ("optimizer", "param"):
        zero[f"offload_{kind}"] = {"device": str(plugin.get(f"offload_{kind}_device", "none")).lower()}
    settings = {name: plugin.get(name, AUTO) for name in ("gradient_accumulation_steps", "gradient_clipping")}
    return config._replace(data={**settings, "zero_optimization": zero})


def fsdp_options_of(text: str, workload: Workload, num_ranks: int) -> Options:
    """Return the options of -m fsdp2-offload by the file `text`, or by YAML's data as JSON. Raises ValueError as
    deepspeed_config_of() does."""
    config = read_config(text)
    if not is_accelerate_file(config.data):
        message = "expected accelerate's YAML, with distributed_type FSDP, got none"
        raise ValueError(f"{config.source}: {message}; try -m deepspeed for a configuration of DeepSpeed")
    config = _for_method(config, "FSDP")
    entries = config.data.get("fsdp_config") or {}
    if isinstance(entries, dict):
        named = {f"fsdp_{str(name).removeprefix('fsdp_')}": value for name, value in entries.items()}
        config.data["fsdp_config"] = FSDP_DEFAULTS | named
    honored = honored_entries(config, TABLE | FSDP, _accelerate_values(workload, num_ranks))
    plugin = honored.get("fsdp_config", {})
    # accelerate's mixed precision sums gradients in the dtype of the weights.
    reduce_dtype = "fp32" if workload.dtype == "fp32" else "weights"
    return {
        "reshard_after_forward": plugin.get("fsdp_reshard_after_forward", True),
        "reduce_dtype": reduce_dtype,
    }


def _for_method(config: UserConfig, kind: str) -> UserConfig:
    """Return a copy of the configuration, if it is for the method of this distributed_type."""
    value = config.data.get("distributed_type")
    if value != kind:
        message = f"expected distributed_type {kind}, as -m {METHOD_OF_TYPE[kind]}, got {message_text(value)}"
        method = METHOD_OF_TYPE.get(value) if isinstance(value, str) else None
        ways = f"-m {method}" if method else "a file for " + " or ".join(METHOD_OF_TYPE)
        raise ValueError(f"{config.source}: {message}; try {ways}")
    data = dict(config.data)
    if data.get("mixed_precision") is False:  # YAML's reading of no
        data["mixed_precision"] = "no"
    return config._replace(data=data)


def _accelerate_values(workload: Workload, num_ranks: int) -> dict[str, KnownValue]:
    dtypes = {precision: dtype for dtype, precision in PRECISION_OF_DTYPE.items()}
    dtype = f"--dtype {workload.dtype}"
    ways = " or ".join(PRECISION_OF_DTYPE.values())
    return {
        "num_processes": KnownValue(num_ranks, "--ranks", lambda value: f"--ranks {message_text(value)}"),
        "mixed_precision": KnownValue(
            PRECISION_OF_DTYPE[workload.dtype],
            dtype,
            lambda value: f"--dtype {dtypes[value]}" if isinstance(value, str) and value in dtypes else ways,
        ),
    }
