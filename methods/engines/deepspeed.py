"""Trains the harness's model with an engine of DeepSpeed, configured from the job. Where a setting looks odd, a
comment names the behavior of DeepSpeed that the setting avoids.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from harness.base.json_object import JsonObject
from harness.core.job import BETAS, EPSILON, INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW, WEIGHT_DECAY, Workload
from harness.core.method import Step, TensorState, Trained, Training, Unavailable
from methods.engines.deepspeed_config import (
    COUNTED_ACCUMULATIONS,
    KERNELS,
    NEEDS_DEEPSPEED,
    EngineSettings,
    is_kernel_built,
    kernel_folder,
    kernel_versions,
    missing_to_build,
)
from methods.engines.deepspeed_stage_0 import main_states_of
from methods.engines.release import Release, importing

# The rule of methods/shared/loss_scale.py, but after the start or an overflow DeepSpeed doubles the scale a step later.
FP16_SETTINGS = {
    "enabled": True,
    "loss_scale": 0,  # dynamic
    "initial_scale_power": int(math.log2(INITIAL_LOSS_SCALE)),
    "hysteresis": 1,
    "min_loss_scale": 1,
}


def _fp16_section(workload: Workload) -> JsonObject:
    return {**FP16_SETTINGS, "loss_scale_window": workload.loss_scale_window or LOSS_SCALE_WINDOW}


def engine_config(workload: Workload, settings: EngineSettings) -> JsonObject:
    """Return DeepSpeed's configuration for this job."""
    num_parts = workload.micro_batches
    config: JsonObject = {
        "train_micro_batch_size_per_gpu": workload.batch_size // settings.num_ranks // num_parts,
        "gradient_accumulation_steps": num_parts if settings.accumulation in COUNTED_ACCUMULATIONS else 1,
        # given even if it is 0 (no clipping), because the default is 1.0
        "gradient_clipping": workload.clip_norm,
        "zero_optimization": settings.zero,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "fp16": _fp16_section(workload) if workload.dtype == "fp16" else {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if settings.adam != "fused":
        parameters = {
            "lr": workload.learning_rate,
            "betas": list(BETAS),
            "eps": EPSILON,
            "weight_decay": WEIGHT_DECAY,
        }
        if settings.adam == "published":
            parameters["torch_adam"] = True
        config["optimizer"] = {"type": "AdamW", "params": parameters}
    return _merge_sections(config, settings.extra_entries)


def _merge_sections(config: JsonObject, extra_entries: JsonObject) -> JsonObject:
    """Return the entries of both; where both have a section, its entries are merged."""
    merged_sections = {
        name: _merge_sections(config[name], extra_entries[name])
        for name in config.keys() & extra_entries.keys()
        if isinstance(config[name], dict) and isinstance(extra_entries[name], dict)
    }
    return config | extra_entries | merged_sections


def train(
    workload: Workload, batches: Any, device: str, settings: EngineSettings, open_context: ExitStack
) -> Training:
    """Train with the engine of deepspeed.initialize(); each rank trains on its part of every batch, micro-batch by
    micro-batch.

    `open_context`: a context that stays open until all trained tensors have been read, because each tensor is made only
    when it is read. Raises Unavailable if deepspeed or a kernel that the settings need is missing.
    """
    release, num_ranks = settings.release, settings.num_ranks
    adam = "cpu_adam" if "offload_optimizer" in settings.zero else "fused_adam"
    assert release is None or release.archive  # raises Unavailable if the release is not installed
    if settings.adam == "deepspeed" and not is_kernel_built(adam, release):
        reason = missing_to_build(adam, release)
        raise Unavailable(reason or f"DeepSpeed's {adam} is not compiled: ./run.sh setup")
    deepspeed = import_deepspeed(device, num_ranks, release)
    load_built_kernels(release, adam, *(["async_io"] if "aio" in settings.extra_entries else []))
    is_scaled = workload.dtype == "fp16"
    if is_scaled and device != "cuda":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        # DeepSpeed refuses fp16 on a CPU that lacks oneDNN's fp16 instructions, but torch's kernels do not need them.
        CPU_Accelerator.is_fp16_supported = lambda self: True
    import torch
    import torch.distributed as dist

    from harness.devices.exchange import join_alone, join_others, leave_others

    join_alone(device) if num_ranks == 1 else join_others(device)
    open_context.callback(leave_others)
    rank = dist.get_rank()
    engine = _engine(deepspeed, workload, engine_config(workload, settings), device, settings)
    counts, num_parts = settings.accumulation in COUNTED_ACCUMULATIONS, workload.micro_batches
    for step, batch in enumerate(batches, start=1):
        for group in _parameter_groups(engine):
            # set now, because SuperOffload updates during backward()
            group["lr"] = workload.learning_rate_at(step)
        scale, losses = float(engine.optimizer.loss_scale) if is_scaled else 1.0, []
        rank_tokens = (tokens.chunk(num_ranks)[rank].chunk(num_parts) for tokens in batch)
        for number, micro_batch in enumerate(zip(*rank_tokens, strict=True), start=1):
            if settings.accumulation in ("accelerate", "caller"):
                engine.set_gradient_accumulation_boundary(number == num_parts)
            loss = engine(*micro_batch, scale)
            # backward() multiplies by the scale again, and divides by the accumulation steps that it knows.
            engine.backward(loss / scale if counts else loss / scale / num_parts)
            losses.append(loss.detach())
            if settings.accumulation == "engine" or number == num_parts:
                engine.step()
        norm, mean = engine.get_global_grad_norm(), torch.stack(losses).mean() / num_ranks
        if num_ranks > 1:
            dist.all_reduce(mean)
        finished_step = Step(mean, None if norm is None else torch.as_tensor(norm))
        if is_scaled:
            finished_step = finished_step._replace(
                loss_scale=scale, is_skipped=bool(engine.optimizer.overflow)
            )
        yield finished_step
    return Trained(trained_states(engine, open_context.pop_all()))


def import_deepspeed(device: str, num_ranks: int = 1, release: Release | None = None) -> Any:
    """Import deepspeed and configure it for this device and for torchrun's ranks. Without CUDA, turn off DeepSpeed's
    shared-memory communication, which would have to be compiled. `release`: None: the installed one. Raises Unavailable
    if deepspeed is missing, or if the release does not import under the installed torch.
    """
    if num_ranks == 1:
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            port = str(free_socket.getsockname()[1])
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {
        "LOCAL_RANK": "0",  # DeepSpeed selects the GPU of this number; each rank sees only one GPU
        # DeepSpeed's launcher sets LOCAL_SIZE, without which DeepSpeed on a CPU starts numactl several times a step.
        "LOCAL_SIZE": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        "DS_ACCELERATOR": "cuda" if device == "cuda" else "cpu",
        "TORCH_EXTENSIONS_DIR": str(kernel_folder(release)),
        # the folder of ninja
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    warnings.filterwarnings("ignore", category=FutureWarning)
    with importing(release, f"this method {NEEDS_DEEPSPEED}"):
        import deepspeed
    if device != "cuda":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device == "sim":
        from methods.engines import deepspeed_sim

        deepspeed_sim.use_sim()
    return deepspeed


def load_built_kernels(release: Release | None, *kernels: str) -> None:
    """Load the named kernels, except any kernel that is not compiled. Without this call DeepSpeed would start ninja in
    every run to check the kernels."""
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import _import_module_from_library

    def load(kernel: str) -> None:
        OpBuilder._loaded_ops[kernel] = _import_module_from_library(
            kernel, kernel_folder(release) / kernel, True
        )

    for kernel in kernels:
        if is_kernel_built(kernel, release):
            if kernel == "async_io" and hasattr(op_builder, "PinMemoryBuilder"):  # since 0.19.5
                load("pin_memory")
                op_builder.PinMemoryBuilder().load()  # async_io, loaded next, needs the symbols of pin_memory
            load(kernel)


def use_built_kernel_in_superoffload(release: Release | None = None) -> None:
    """Make SuperOffload's optimizer process load the compiled kernel; otherwise that process would compile the kernel
    again, during the run and with other flags."""
    from deepspeed.runtime.superoffload import superoffload_utils

    superoffload_utils.superoffload_optimizer_worker = partial(superoffload_worker, release=release)


def superoffload_worker(
    tasks: Any,
    results: Any,
    config: Any,
    max_grad_numel: int,
    pin_memory: bool = True,
    release: Release | None = None,
) -> None:
    """Run SuperOffload's optimizer process with the compiled kernel. At the end put the optimizer's states into
    `results`, because no other process has them.

    `pin_memory` is ignored: the process's buffer is never page-locked. The buffer gets gradients from the host's
    memory, so locking its pages would gain nothing and would create a CUDA context.
    """
    from deepspeed.runtime.superoffload import superoffload_utils

    load_built_kernels(release, "cpu_adam")
    optimizers = []

    class KeptAdam(superoffload_utils.DeepSpeedCPUAdam):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            optimizers.append(self)

    with mock.patch.object(superoffload_utils, "DeepSpeedCPUAdam", KeptAdam):
        superoffload_utils.superoffload_optimizer_worker(
            tasks, results, config, max_grad_numel, pin_memory=False
        )
    results.put({number: dict(state) for number, state in optimizers[0].state.items()})
    tasks.get()  # Wait until the reader has mapped the tensors: their memory is freed when this process ends.


def _fetch_superoffloads_states(optimizer: Any) -> None:
    """Put SuperOffload's optimizer states where ZeRO stage 3 looks for states. The states come from SuperOffload's
    process, which updates on the host, and from its second optimizer, which updates on the device."""
    process = optimizer.superoffload_cpu_optimizer
    process.param_queue.put(None)
    states = process.result_queue.get()
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        if optimizer.subgroup_to_device[number] == "cpu":
            optimizer.optimizer.state[weights] = states[number]
        else:
            optimizer.optimizer.state[weights] = optimizer.backup_optimizer.state[weights]


def compile_kernel(kernel: str, release: Release | None = None) -> None:
    """Compile one of the kernels of a release of DeepSpeed (None: the installed one) into kernel_folder().
    Only one process builds at a time; others wait.

    Removes the locks of an interrupted build, because DeepSpeed would wait for them forever. Raises Unavailable if
    deepspeed, a compiler or a library is missing.
    """
    import_deepspeed("cpu", release=release)
    from deepspeed.accelerator import get_accelerator

    folder = kernel_folder(release)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "one_build", "w") as one_build:
        fcntl.flock(one_build, fcntl.LOCK_EX)
        if is_kernel_built(kernel, release):  # another process has built the kernel while this one waited
            return
        for lock in folder.glob("*/lock"):
            lock.unlink()
        builder = get_accelerator().create_op_builder(KERNELS[kernel][0])
        if not builder.is_compatible(verbose=True):
            raise Unavailable(f"DeepSpeed cannot build {kernel} here: try apt-get install g++ libaio-dev")
        # uses fewer of torch's headers
        header = Path(__file__).parent / "deepspeed_headers/torch/extension.h"
        os.environ["CPATH"] = os.pathsep.join(filter(None, [str(header.parents[1]), os.environ.get("CPATH")]))
        with _compiled_as_one_file(folder):
            builder.load(verbose=True)
        (folder / f"{kernel}.built").write_text(kernel_versions(release))


@contextmanager
def _compiled_as_one_file(folder: Path) -> Iterator[None]:
    """Inside this context torch compiles an extension's sources as one file in `folder`, without debug symbols. File by
    file, most of the time would go to compiling torch's headers again.

    Sources in the folder `common` are compiled separately: they include no torch headers and repeat each other's
    constants.
    """
    from torch.utils import cpp_extension

    load = cpp_extension.load

    def load_one(
        name: str, sources: list[str], extra_cflags: list[str], extra_include_paths: list[str], **options: Any
    ) -> Any:
        separate_sources = [source for source in sources if Path(source).parent.name == "common"]
        whole, inserted_files = folder / f"{name}.cpp", set[Path]()
        texts = []
        for source in sources:
            if source not in separate_sources:
                texts.append(_text_with_includes(Path(source), extra_include_paths, inserted_files))
        whole.write_text("".join(texts))
        flags = [flag for flag in extra_cflags if flag != "-g"]
        return load(
            name, [str(whole), *separate_sources], flags, extra_include_paths=extra_include_paths, **options
        )

    with mock.patch.object(cpp_extension, "load", load_one):
        yield


def _text_with_includes(file: Path, folders: list[str], inserted_files: set[Path]) -> str:
    """Return the file's text. Included files that lie in the file's own folder or in `folders` are inserted. Each file
    is inserted only once, because many files have no include guard. `inserted_files`: files inserted so far."""
    inserted_files.add(file)

    def included(match: re.Match[str]) -> str:
        paths = [Path(folder, match[1]).resolve() for folder in (str(file.parent), *folders)]
        for path in filter(Path.exists, paths):
            return "" if path in inserted_files else _text_with_includes(path, folders, inserted_files)
        return match[0]

    return re.sub(r'^#include [<"](.+)[>"]', included, file.read_text(), flags=re.MULTILINE) + "\n"


def _engine(deepspeed: Any, workload: Workload, config: dict, device: str, settings: EngineSettings) -> Any:
    """Return DeepSpeed's engine of the workload's model, with the harness's starting values."""
    import torch
    from deepspeed.utils import safe_set_full_fp32_param

    from harness.models.gpt import DTYPES, adamw_groups, initials

    dtype, is_partitioned = DTYPES[workload.dtype], config["zero_optimization"]["stage"] == 3
    model = _new_model(deepspeed, workload, config, device, settings)
    named = list(model.named_parameters())

    def starting_values() -> Iterator[tuple[Any, Any]]:
        """Yield each parameter once, with its starting value."""
        for name, parameter in named:
            assert parameter.dtype == dtype, f"{name} is {parameter.dtype}, not {dtype}"
        starts = initials(((name, _shape_of(parameter)) for name, parameter in named), workload)
        return zip((parameter for _, parameter in named), starts, strict=True)

    def set_value(parameter: Any, value: Any) -> None:
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=is_partitioned):
            parameter.data.copy_(value)

    if workload.dtype == "fp32":
        for parameter, value in starting_values():
            set_value(parameter, value)
    groups, optimizer = adamw_groups(model.parameters(), _shape_of), None
    if settings.adam == "fused":
        optimizer = torch.optim.AdamW(groups, lr=workload.learning_rate, betas=BETAS, eps=EPSILON, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=groups, config=config
    )
    if workload.dtype != "fp32":
        # DeepSpeed has made the fp32 main weights only now, of weights rounded to the dtype: set both to the starts.
        main_states = main_states_of(engine.optimizer)
        for parameter, value in starting_values():
            set_value(parameter, value)
            safe_set_full_fp32_param(parameter, value)
            if id(parameter) in main_states:
                main_states[id(parameter)].weight.copy_(value)
    return engine


def _shape_of(parameter: Any) -> Any:
    """Return a parameter's shape, even if stage 3 has partitioned it and left an empty tensor."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _new_model(
    deepspeed: Any, workload: Workload, config: dict, device: str, settings: EngineSettings
) -> Any:
    """Return the workload's model without values: partitioned over the ranks in stage 3, on the device else."""
    import torch

    from harness.models.gpt import GPT
    from harness.models.hub_model import HubModel
    from harness.models.model import whole

    class ReentrantGPT(GPT):
        def forward(self, inputs, targets, scale=1.0):
            x = self.ends.embed(inputs)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
            return self.ends.loss(x, targets, scale)

    if config["zero_optimization"]["stage"] != 3:
        return whole(workload).to_empty(device=device)
    if workload.config is None:
        # The configuration gives the dtype; Init's argument `dtype` is not used, because it turns fp32 into bf16 on a
        # CPU.
        with deepspeed.zero.Init(config_dict_or_path=config), without_random_values():
            return (ReentrantGPT if settings.reentrant else GPT)(workload)
    # zero.Init cannot make this model, but can partition it
    model = whole(workload).to_empty(device="cpu")
    assert isinstance(model, HubModel)
    model.recompute(reentrant=settings.reentrant)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)  # the dtype is the configuration's
    return model


@contextmanager
def without_random_values() -> Iterator[None]:
    """Skip torch's own random starting values, because drawing them takes as long as drawing the harness's."""
    from torch import nn

    with ExitStack() as stack:
        for module in (nn.Linear, nn.Embedding):
            stack.enter_context(mock.patch.object(module, "reset_parameters", lambda self: None))
        yield


def _parameter_groups(engine: Any) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups. With SuperOffload add the groups of its second optimizer, which updates
    on the device."""
    backup = getattr(engine.optimizer, "backup_optimizer", None)
    return [*engine.optimizer.param_groups, *(backup.param_groups if backup else [])]


def trained_states(engine: Any, open_context: ExitStack) -> Iterator[TensorState]:
    """Yield the weight and moments of one parameter at a time. Stage 3 gathers these tensors on the device, which has
    no room for the tensors of all parameters. At the end close the context `open_context`."""
    from deepspeed.utils import safe_get_full_fp32_param

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # Stage 2 links parameters to moments after the first group's step, when the second group has no moments yet.
        # Link all parameters again.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    if hasattr(engine.optimizer, "superoffload_cpu_optimizer"):
        _fetch_superoffloads_states(engine.optimizer)
    with open_context:
        main_states = main_states_of(engine.optimizer)
        for name, parameter in engine.module.named_parameters():
            main_state = main_states.get(id(parameter))
            if main_state is not None:
                moments = (main_state.state.get("exp_avg"), main_state.state.get("exp_avg_sq"))
                yield TensorState(name, main_state.weight.clone(), *moments)
                continue
            weight = safe_get_full_fp32_param(parameter)
            yield TensorState(
                name, weight.clone(), _moment(parameter, "exp_avg"), _moment(parameter, "exp_avg_sq")
            )


def _moment(parameter: Any, name: str) -> Any:
    """Return a parameter's moment of Adam; None before the parameter's first update, which in ZenFlow comes only after
    update_interval steps."""
    from deepspeed.utils import safe_get_full_optimizer_state

    try:
        return safe_get_full_optimizer_state(parameter, name).clone()
    except (KeyError, ValueError):  # by stage: DeepSpeed looks the name up, or says that it is not found
        return None
