"""Settings, memory plans and compiled kernels of the DeepSpeed methods, and their base class. Needs only the standard
library.

DeepSpeed can bind ranks to cores. The harness does not let it, because a single rank needs all cores of the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.base.checkout import ROOT
from harness.base.json_object import JsonObject
from harness.core import native_build
from harness.core.job import Plan, Room, Workload
from harness.plan.resources import all_reduce_sent_bytes, gather_sent_bytes
from methods.engines.release import Release
from methods.shared.memory_needs import (
    gathered_params,
    micro_batch_workload,
    num_vector_params,
    page_locked_bytes,
    separately_locked_bytes,
)

EXTENSIONS = ROOT / ".venv" / "torch_extensions"  # folder of the compiled kernels of the installed DeepSpeed
BUCKET_PARAMS = 50_000_000
SUB_GROUP_PARAMS = 100_000_000  # number of parameters that stage 3 updates at once
ADAMS = {  # each value of the option `adam`, with the name of this Adam in the fairness table
    "fused": "torch AdamW, fused, host",  # the default: needs no compiler
    "deepspeed": "DeepSpeedCPUAdam",  # as fast as `fused`, but must be compiled
    "published": "torch AdamW, op by op",  # as in the published artifact
}
# each value of the option `accumulation`: how gradients of micro-batches are summed before a step()
ACCUMULATIONS = {
    "engine": "by gradient_accumulation_steps",
    "accelerate": "by gradient_accumulation_steps, with the last backward pass marked, as accelerate does",
    "caller": "by several backward passes, the last one marked by set_gradient_accumulation_boundary()",
    "unmarked": "by several backward passes, none of them marked, as with torch alone",
}
# accumulations of which DeepSpeed's configuration tells the number
COUNTED_ACCUMULATIONS = ("engine", "accelerate")
# Each value of the option `offload` but None: what lives on the host. The number is the lowest stage that allows it.
OFFLOADS = {"optimizer": 1, "all": 3}
NEEDS_DEEPSPEED = "needs deepspeed: pip install deepspeed==0.19.8"
# For each kernel: the DeepSpeed class that builds it, and the seconds that the build takes on a 2-core EPYC.
KERNELS = {
    "cpu_adam": ("CPUAdamBuilder", 25),
    "fused_adam": ("FusedAdamBuilder", 25),
    "async_io": ("AsyncIOBuilder", 35),
}
HEADER_PACKAGES = {"Python.h": "python3-dev", "libaio.h": "libaio-dev"}  # headers and their Debian packages


@dataclass(frozen=True)
class EngineSettings:
    """What a method asks of DeepSpeed's engine, beside what the workload says."""

    zero: JsonObject  # the configuration's entry zero_optimization
    adam: str = "fused"  # a key of ADAMS
    reentrant: bool = False  # True: use torch's older recompute
    num_ranks: int = 1
    release: Release | None = None  # None: the installed release
    accumulation: str = "engine"  # a key of ACCUMULATIONS
    extra_entries: JsonObject = field(default_factory=dict)  # further entries of the configuration


def kernel_folder(release: Release | None) -> Path:
    """Return the folder of the compiled kernels of a release; None: of the installed one."""
    return release.folder / EXTENSIONS.name if release else EXTENSIONS


def is_kernel_built(kernel: str, release: Release | None = None) -> bool:
    """Return whether the kernel has been compiled for the installed torch and this release of DeepSpeed."""
    stamp = kernel_folder(release) / f"{kernel}.built"
    return stamp.exists() and stamp.read_text() == kernel_versions(release)


def missing_to_build(kernel: str, release: Release | None = None) -> str | None:
    """Return what is missing to compile a kernel, and how to get it. Return None if nothing is missing, or if the
    kernel is already built."""
    if is_kernel_built(kernel, release):
        return None
    if not native_build.find_compiler():
        return f"DeepSpeed's {kernel} needs a compiler: apt-get install g++"
    headers = list(HEADER_PACKAGES) if kernel == "async_io" else ["Python.h"]
    missing_headers = [name for name in headers if not native_build.has_header(name)]
    if not missing_headers:
        return None
    packages = " ".join(HEADER_PACKAGES[name] for name in missing_headers)
    return f"DeepSpeed's {kernel} needs {' and '.join(missing_headers)}: apt-get install {packages}"


def kernel_versions(release: Release | None = None) -> str:
    """Return the versions of torch and deepspeed, on which a compiled kernel depends, or which of the two packages is
    missing."""
    try:
        return f"torch {version('torch')}, deepspeed {release.version if release else version('deepspeed')}"
    except PackageNotFoundError as error:
        return f"no {error.name}"


def stage_2_config(workload: Workload, is_on_gpu: bool) -> JsonObject:
    """Return the configuration of ZeRO stage 2: weights on the device, gradients and optimizer on the host."""
    bucket = min(BUCKET_PARAMS, workload.num_params)
    return {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": is_on_gpu,  # True: communicate on a separate stream; a CPU has no streams
        "reduce_bucket_size": bucket,  # elements; the default, 5e8, would take much device memory
        "allgather_bucket_size": bucket,
        "offload_optimizer": {"device": "cpu", "pin_memory": is_on_gpu},
    }


def stage_3_config(workload: Workload, is_on_gpu: bool) -> JsonObject:
    """Return the configuration of ZeRO stage 3: weights, gradients and optimizer on the host. The thresholds depend on
    the model's size, so that layers leave the device after use."""
    return {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": is_on_gpu,
        "reduce_bucket_size": workload.anatomy.largest_numel,
        "stage3_prefetch_bucket_size": workload.layer_params,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": workload.end_params + 2 * workload.layer_params,
        # elements; the default, 1e9, would keep most of the model on the device
        "stage3_max_reuse_distance": 0,
        "sub_group_size": SUB_GROUP_PARAMS,
        "offload_optimizer": {"device": "cpu", "pin_memory": is_on_gpu},
        "offload_param": {"device": "cpu", "pin_memory": is_on_gpu},
    }


def stage_config(workload: Workload, stage: int, offload: str | None, *, is_on_gpu: bool) -> JsonObject:
    """Return the configuration of a stage of ZeRO. `offload`: a key of OFFLOADS; None: nothing lives on the host."""
    if stage == 0:
        return {"stage": 0}
    zero = stage_3_config(workload, is_on_gpu)
    if stage != 3:
        zero = {**stage_2_config(workload, is_on_gpu), "stage": stage}
    sections = {None: (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    kept = sections[offload]
    return {name: value for name, value in zero.items() if not name.startswith("offload_") or name in kept}


def stage_3_device(workload: Workload) -> dict[str, int]:
    """Return the bytes on the device, by kind: weights (embedding, head, the current layer and the next layer), the
    gradients of these weights, and activations."""
    at_once = workload.weight_bytes * (workload.end_params + 2 * workload.layer_params)
    return {"weights": at_once, "gradients": at_once, "activations": activation_bytes(workload)}


def activation_bytes(workload: Workload) -> int:
    """Return the bytes of activations: of one micro-batch, because an engine trains one after the other."""
    micro_batch = micro_batch_workload(workload)
    return micro_batch.num_layers * micro_batch.boundary_bytes + micro_batch.working_bytes


def stage_2_device(workload: Workload) -> dict[str, int]:
    """Return the bytes on the device, by kind, if stage 2 keeps gradients and optimizer on the host. Gradients are
    summed in whole buckets, in the weights' dtype."""
    params, size = workload.num_params, workload.weight_bytes
    return {
        "weights": size * params,
        "gradients": 2 * size * min(BUCKET_PARAMS, params),
        "activations": activation_bytes(workload),
    }


def stage_2_plan(workload: Workload, room: Room, num_ranks: int = 1, stage: int = 2) -> Plan:
    """Return the plan of stage 1 or 2 with gradients and optimizer on the host, for a rank. Weights are gathered after
    an update."""
    params, size = workload.num_params, workload.weight_bytes
    num_sums = _num_sums(workload, stage)
    # With micro-batches a sum over ranks is added, on the device, to those before it, which come from the host and go
    # back. Stage 2 has none to fetch at its first sum; stage 1 fetches zeros.
    kept = 0 if workload.micro_batches == 1 else max(2, 2 * num_sums - 1)
    return Plan(
        device=stage_2_device(workload),
        host=stage_2_host(workload, room, num_ranks),
        moved_bytes=(2 + kept) * size * params // num_ranks,
        exchanged=stage_2_exchanged(workload, num_ranks, stage),
    )


def stage_2_exchanged(workload: Workload, num_ranks: int, stage: int = 2) -> dict[str, float]:
    """Return the bytes that a rank sends in a step of stage 0, 1 or 2: gathered weights, and sums of gradients."""
    num_bytes = workload.weight_bytes * workload.num_params
    sums = _num_sums(workload, stage) * all_reduce_sent_bytes(num_bytes, num_ranks)
    return {"gathers": gather_sent_bytes(num_bytes, num_ranks), "sums": sums}


def _num_sums(workload: Workload, stage: int) -> int:
    """Return how often ranks sum gradients in a step: stage 2 for each micro-batch, the stages below after the last."""
    return workload.micro_batches if stage == 2 else 1


def zero_plan(workload: Workload, room: Room, stage: int, offload: str | None, num_ranks: int) -> Plan:
    """Return the plan of a rank by a stage of ZeRO. `offload`: a key of OFFLOADS; None: nothing lives on the host."""
    if offload == "all":
        return stage_3_plan(workload, room, num_ranks)
    if offload == "optimizer" and stage < 3:
        return stage_2_plan(workload, room, num_ranks, stage)
    params, size = workload.num_params, workload.weight_bytes
    rank_params = -(-params // num_ranks)
    gathered = stage_3_device(workload)
    stepped = rank_params if stage else params
    has_main = stage > 0 or size == 2  # fp32 main weights and gradients, apart from the weights
    device = {
        "weights": size * rank_params + gathered["weights"] if stage == 3 else size * params,
        "gradients": size * (rank_params if stage > 1 else params)
        + 2 * size * (min(BUCKET_PARAMS, params) if stage else 0),
        "optimizer": (16 if has_main else 8) * stepped,
        # In stage 0 the clipped update takes a copy of the gradients, when activations are freed.
        "activations": max(activation_bytes(workload), 0 if stage else size * params),
    }
    host = {}
    if offload == "optimizer":
        del device["optimizer"]
        host = {"weights": 4 * rank_params, "gradients": 4 * rank_params, "optimizer": 8 * rank_params}
    if stage == 3:
        # At the start DeepSpeed lays a rank's weights together on the host.
        host["buffers"] = size * rank_params
    if stage < 3:
        return Plan(device, host, exchanged=stage_2_exchanged(workload, num_ranks, stage))
    moved = 2 * size * rank_params + stage_3_summed(workload, num_ranks) if offload else 0
    return Plan(device, host, moved_bytes=moved, exchanged=stage_3_exchanged(workload, num_ranks))


def group_params(workload: Workload) -> tuple[int, int]:
    """Return the number of parameters in each of the optimizer's two groups: matrices, and biases with norms. Each
    group is one flat tensor in memory."""
    small = num_vector_params(workload)
    return workload.num_params - small, small


def sub_group_numels(workload: Workload) -> list[int]:
    """Return the number of parameters in each of stage 3's sub-groups, in stage 3's order. A sub-group takes whole
    tensors until it has at least SUB_GROUP_PARAMS parameters."""
    anatomy = workload.anatomy
    layers = [shape for _, shape in anatomy.layer_tensors(range(workload.num_layers))]
    tensors, numels = [*anatomy.ends.values(), *layers], []
    for has_vectors in (False, True):
        numel = 0
        for shape in tensors:
            if (len(shape) == 1) is has_vectors:
                numel += math.prod(shape)
            if numel >= SUB_GROUP_PARAMS:
                numels.append(numel)
                numel = 0
        numels += [numel] if numel else []
    return numels


def flat_group_bytes(size: int, workload: Workload, room: Room, num_ranks: int = 1) -> int:
    """Return the bytes of two page-locked tensors on a rank, one for each of the optimizer's groups. Each tensor holds
    the rank's part of its group. `size`: bytes of an element."""
    return sum(page_locked_bytes(size * -(-params // num_ranks), room) for params in group_params(workload))


def stage_2_host(workload: Workload, room: Room, num_ranks: int = 1) -> dict[str, int]:
    """Return the bytes that a rank takes on the host with stage 2: the rank's part of masters, gradients and moments,
    and a flat copy of all weights; with micro-batches also the rank's part of their sum, in the weights' dtype. On sim
    the sum of the first four is 20 (fp32) or 18 (bf16) bytes per parameter."""
    rank_bytes, params = flat_group_bytes(4, workload, room, num_ranks), -(-workload.num_params // num_ranks)
    sum_bytes = workload.weight_bytes * params if workload.micro_batches > 1 else 0
    states = {"weights": rank_bytes, "gradients": rank_bytes + sum_bytes, "optimizer": 8 * params}
    return {**states, "buffers": flat_group_bytes(workload.weight_bytes, workload, room)}


def stage_3_plan(workload: Workload, room: Room, num_ranks: int = 1) -> Plan:
    """Return the plan of stage 3. Page-locked memory holds a rank's part of the weights, this part's gradients in
    groups of SUB_GROUP_PARAMS parameters, and a buffer in which all gradients accumulate. Page-locked memory also holds
    what the weights took before they were partitioned: torch's cache keeps this memory after it is freed."""
    params, size = -(-workload.num_params // num_ranks), workload.weight_bytes
    gathered = -(-gathered_params(workload) // num_ranks)
    num_sub_groups, last_params = divmod(params, SUB_GROUP_PARAMS)
    freed = separately_locked_bytes(size, workload, room, num_ranks) if room.page_locks else 0
    home = {  # bytes on the host; on sim their sum is 24 (fp32) or 20 (bf16) bytes per parameter
        "weights": flat_group_bytes(size, workload, room, num_ranks) + 4 * params,
        "gradients": num_sub_groups * page_locked_bytes(4 * SUB_GROUP_PARAMS, room)
        + page_locked_bytes(4 * last_params, room),
        "optimizer": 8 * params,
        "buffers": page_locked_bytes(size * params, room) + freed,
    }
    fetched = workload.micro_batches * gathered
    moved, exchanged = size * (fetched + params), stage_3_exchanged(workload, num_ranks)
    moved += stage_3_summed(workload, num_ranks)
    return Plan(stage_3_device(workload), home, moved_bytes=moved, exchanged=exchanged)


def stage_3_summed(workload: Workload, num_ranks: int) -> int:
    """Return the bytes moved to sum gradients that stage 3 keeps on the host. Those of a later micro-batch are added on
    the device to those before it, which come from the host and go back."""
    params = -(-workload.num_params // num_ranks)
    return 2 * (workload.micro_batches - 1) * workload.weight_bytes * params


def stage_3_exchanged(workload: Workload, num_ranks: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, in the weights' dtype.

    For each micro-batch `gathers`: the rank's part of the layers' weights, once in the forward pass and once in the
    backward pass, and its part of embedding and head once; `sums`: the other ranks' parts of all gradients.
    """
    sent, size = {"gathers": gathered_params(workload), "sums": workload.num_params}, workload.weight_bytes
    return {
        kind: gather_sent_bytes(workload.micro_batches * size * count, num_ranks)
        for kind, count in sent.items()
    }
