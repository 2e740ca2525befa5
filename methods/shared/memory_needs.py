"""Computes the memory that methods need, and a method's row in the fairness table. Needs only the standard library."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from pathlib import Path

from harness.core.anatomy import Shape
from harness.core.job import Plan, Room, Workload
from harness.core.option import Option
from harness.plan.resources import OPTIMIZER_BYTES

DISK = Option(("--disk",), "Folder for states that are kept on the disk.", metavar="DIR", is_short=True)
# number of a layer's elements that a host thread updates at once: few, so that all threads end together
CHUNK_NUMEL = 2**18
# number of elements that a device updates at once in fp16, after a copy of the gradients to fp32
BLOCK_NUMEL = 2**23
# Temporary bytes per element of an update by torch's kernels. Both dtypes take 4 bytes for an fp32 copy of the
# gradient. bf16 also takes 4 for the master, which is joined from its two halves, and 2 for the bits that mark ties.
UPDATE_COPY_BYTES = {"bf16": 10, "fp16": 4}

# ratio: bytes that autograd saves for a layer of the GPT / bytes of the layer's input
SAVED_BOUNDARY_RATIO = 17.2
# elements: torch's AdamW gives the same bits whether or not a slab is cut at multiples of VECTOR_NUMEL
VECTOR_NUMEL = 16
# bytes: every tensor of a slab starts at a multiple of ALIGNMENT_BYTES, as a tensor allocated alone does
ALIGNMENT_BYTES = 64
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")  # kinds of file systems whose files lie in the host's memory
# number of host buffers for states on the disk: one is read, one updated, one written at a time
NUM_BUFFERS = 3


def round_up(size: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Return the smallest multiple of `alignment` from `size` on."""
    return -(-size // alignment) * alignment


def shared_numel(numel: int, num_ranks: int) -> int:
    """Return the number of elements to which a slab of `numel` elements is padded, so that it splits over ranks. Every
    rank's part has the same size, a multiple of VECTOR_NUMEL: updating part by part then gives the same bits as
    updating the whole slab."""
    return numel if num_ranks == 1 else round_up(numel, VECTOR_NUMEL * num_ranks)


def stored_numel(numel: int) -> int:
    """Return the number of elements to which a layer of `numel` elements is padded on the disk. A padded layer fills
    whole pages in every dtype, so that reads can bypass the system's cache."""
    return round_up(numel, 2048)


def writable_folder(disk: str | None) -> Path:
    """Return the folder `disk` (None: the system's temporary folder, or /var/tmp if that one lies in memory). Raises
    ValueError if the folder is not writable, or lies in memory: its files would take host memory that no budget
    counts."""
    folder = Path(disk or tempfile.gettempdir())
    if not disk and file_system(folder) in MEMORY_FILE_SYSTEMS:
        folder = Path("/var/tmp")
    kind = file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        raise ValueError(
            f"expected a folder on a disk, got {folder} on {kind}, in memory; try another with --disk DIR"
        )
    try:
        # Try a write, because permissions are no sure sign: root ignores permissions, a network folder may hide them.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(f"cannot write to the folder {folder}; try another with --disk DIR") from error


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder lies on, such as ext4; empty if the system does not tell it."""
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mount_fields, _, file_system_fields = line.partition(" - ")
            if mount_fields.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return file_system_fields.split()[0]
    return ""


def block_numel(dtype: str) -> int:
    """Return the number of elements that the device updates at once if torch's kernels update instead of this
    project's. The number is lower in bf16, because a bf16 update makes larger temporary copies."""
    return CHUNK_NUMEL // 4 if dtype == "bf16" else BLOCK_NUMEL


def state_bytes(workload: Workload) -> dict[str, int]:
    """Return the bytes per parameter that a layer takes on the host: weights, gradients, and the optimizer's state.

    In mixed precision the optimizer's state includes an fp32 master. In bf16 the weights are one half of the master, so
    the optimizer's state holds only the other half. Temporary fp32 copies of an update are not counted.
    """
    return state_bytes_in(workload.dtype)


def state_bytes_in(dtype: str) -> dict[str, int]:
    """Return state_bytes() of a training in this dtype."""
    weight_bytes, optimizer_bytes = 4 if dtype == "fp32" else 2, OPTIMIZER_BYTES[dtype]
    if dtype == "bf16":
        optimizer_bytes -= 2
    return {"weights": weight_bytes, "gradients": weight_bytes, "optimizer": optimizer_bytes}


def page_locked_bytes(size: int, room: Room) -> int:
    """Return the bytes that torch allocates on the host for a tensor of `size` bytes. If the room locks pages, this is
    the next power of two, which torch keeps after the tensor is freed."""
    return 1 << (size - 1).bit_length() if room.page_locks and size else size


def separately_locked_bytes(size: int, workload: Workload, room: Room, num_ranks: int = 1) -> int:
    """Return the bytes that a rank takes for its parts of the model's tensors, if each part is page-locked on its own.
    `size`: bytes of an element."""

    def locked_bytes(shape: Shape) -> int:
        return page_locked_bytes(size * -(-math.prod(shape) // num_ranks), room) if len(shape) > 1 else 0

    # Biases and norms are counted as one tensor, because rounding each up adds little.
    vector_bytes = page_locked_bytes(size * -(-num_vector_params(workload) // num_ranks), room)
    return workload.anatomy.total(workload.num_layers, locked_bytes) + vector_bytes


def num_vector_params(workload: Workload) -> int:
    """Return the number of parameters in biases and norms, which are vectors."""
    return workload.anatomy.total(workload.num_layers, lambda shape: shape[0] if len(shape) == 1 else 0)


def saved_boundary_ratio(workload: Workload) -> float:
    """Return the ratio of the bytes that autograd saves for a layer to the bytes of the layer's input.

    For a model by its config.json the ratio also counts temporary tensors of the backward pass, because the sizes that
    are known of such a model do not separate temporary from saved tensors.
    """
    if workload.config is None:
        return SAVED_BOUNDARY_RATIO
    ratios = [
        max(inputs for inputs, _ in kind.blocks.lines) if kind.blocks else workload.boundaries_of(kind)
        for kind in workload.anatomy.kinds
    ]
    return max(ratios)


def micro_batch_workload(workload: Workload) -> Workload:
    """Return the workload whose batch is one micro-batch of this one's."""
    return dataclasses.replace(
        workload, batch_size=workload.batch_size // workload.micro_batches, micro_batches=1
    )


def gathered_params(workload: Workload) -> int:
    """Return the number of parameters that ranks gather in a step if each rank keeps a part of every tensor. Each layer
    is gathered twice, for the forward pass and for the recompute; embedding and head are gathered once."""
    return 2 * workload.num_params - workload.end_params


def resident_plan(workload: Workload) -> Plan:
    """Return the memory plan of a training that keeps everything on the device. Gradients are freed after each step, so
    the memory peaks at one of a few moments within a step."""
    if workload.lora:
        return _adapted_resident_plan(workload)
    num_params, weight_bytes, anatomy = workload.num_params, workload.weight_bytes, workload.anatomy
    is_whole = workload.micro_batches == 1
    boundary_bytes = workload.num_layers * workload.boundary_bytes // workload.micro_batches
    # embeddings of all micro-batches, and their gradients
    embedded_bytes = 0 if is_whole else 2 * workload.boundary_bytes
    embedding_numel = workload.vocab_size * workload.hidden_size
    # At each moment: bytes of gradients, bytes of activations.
    at_loss = (
        0 if is_whole else weight_bytes * num_params,
        boundary_bytes + workload.head_bytes + embedded_bytes,
    )
    at_top_layer = (
        weight_bytes * (workload.end_params if is_whole else num_params),
        boundary_bytes + workload.bytes_of(anatomy.kind_of(workload.num_layers - 1)) + embedded_bytes,
    )
    # The tied embedding's two gradients are summed.
    at_embedding = (weight_bytes * (num_params + 2 * embedding_numel), 2 * workload.boundary_bytes)
    at_update = (4 * num_params, 0)
    moments = (at_loss, at_top_layer, *_at_lower_layers(workload), at_embedding, at_update)
    gradients, activations = max(moments, key=sum)
    return Plan(
        {
            "weights": weight_bytes * num_params,
            "gradients": gradients,
            "optimizer": OPTIMIZER_BYTES[workload.dtype] * num_params,
            "activations": activations,
        }
    )


def _at_lower_layers(workload: Workload) -> list[tuple[int, int]]:
    """Return bytes of gradients and of activations at layers below the top one. If all layers are of one kind, at the
    bottom layer, above which are the most gradients; else at every layer."""
    num_params, boundary_bytes = workload.num_params, workload.boundary_bytes // workload.micro_batches
    moments = []
    for index in range(workload.num_layers if workload.anatomy.order else 1):
        kind = workload.anatomy.kind_of(index)
        num_params -= kind.num_params
        activations = index * boundary_bytes + workload.bytes_of(kind)
        moments.append((workload.weight_bytes * num_params, activations))
        if workload.anatomy.order and workload.micro_batches > 1:
            # gradients of the micro-batches before, and all micro-batches' embeddings with their gradients
            gradients = workload.weight_bytes * workload.num_params
            moments.append((gradients, activations + 2 * workload.boundary_bytes))
    return moments


def _adapted_resident_plan(workload: Workload) -> Plan:
    """Return the memory plan of a training that keeps everything on the device and trains adapters alone, in fp32. The
    adapters' gradients are the only ones that stay until the update."""
    num_trained, boundary_bytes = workload.num_trained, workload.boundary_bytes // workload.micro_batches
    embedded_bytes = 0 if workload.micro_batches == 1 else 2 * workload.boundary_bytes
    at_loss = workload.num_layers * boundary_bytes + workload.head_bytes
    at_layers = (
        index * boundary_bytes + workload.bytes_of(kind)
        for kind, index in workload.anatomy.topmost(workload.num_layers)
    )
    return Plan(
        {
            "weights": workload.weight_bytes * (workload.num_params - num_trained) + 4 * num_trained,
            "gradients": 4 * num_trained,
            "optimizer": OPTIMIZER_BYTES["fp32"] * num_trained,
            "activations": max(at_loss, *at_layers) + embedded_bytes,
        }
    )


def describe(
    workload: Workload, implementation: str, optimizer: str, *, has_own_recompute: bool = False
) -> dict[str, str]:
    """Return the row of the fairness table for a method that trains the model's own layers with torch.
    `implementation` and `optimizer`: the texts of these two cells. `has_own_recompute`: without dropout, the method
    recomputes by methods/streaming/recompute.py."""
    precision = f"weights {workload.dtype}"
    if workload.lora:
        precision += ", adapters and moments fp32"
    elif workload.dtype != "fp32":
        precision += ", master and moments fp32"
    if workload.dtype == "fp16":
        precision += ", dynamic loss scale"
    blocks = ", its MLP and norms by blocks of tokens" if workload.anatomy.has_blocks else ""
    is_own = has_own_recompute and not workload.dropout
    recomputed_by = "this project's code" if is_own else "torch checkpoint"
    return {
        "implementation": implementation,
        "model": "harness/models/gpt.py" if workload.config is None else f"transformers, {workload.model}",
        "attention": "torch scaled_dot_product_attention",
        "optimizer": optimizer,
        "precision": precision,
        "recompute": f"every layer{blocks}, {recomputed_by}",
        "clipping": "exact global norm",
    }
