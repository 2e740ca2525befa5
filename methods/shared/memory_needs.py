"""Memory that methods need, by arithmetic, and a method's row in the fairness table; standard library only."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from harness.core.anatomy import Shape
from harness.core.job import Plan, Room, Workload
from harness.forecast.resources import OPTIMIZER_BYTES

CHUNK = 2**18  # elements of a layer that a host thread updates at once: few, so that all threads end together
BLOCK = 2**23  # elements that a device updates at once in fp16, by an fp32 copy of their gradient
# Bytes per element that an update by torch's kernels takes beside the state: 4 for an fp32 gradient and, in bf16, 4 for
# the master joined from its halves and 2 for the bits that mark ties.
UPDATE_COPIES = {"bf16": 10, "fp16": 4}

SAVED_BOUNDARIES = 17.2  # bytes that autograd saves for a layer of the GPT, over its input's bytes; rehearsals check it
VECTOR = 16  # elements: cuts at multiples of VECTOR keep the bits of torch's AdamW kernel
ALIGNMENT = 64  # bytes: every tensor of a slab starts at a multiple, as an allocation does
NUM_BUFFERS = 3  # buffers on the host for states on the disk: one read, one updated, one written


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def shared_numel(numel: int, num_ranks: int) -> int:
    """Return the number of elements of a slab that is split over ranks. All ranks have the same number, a multiple of
    VECTOR, so that updates of the parts have the bits of an update of the whole."""
    return numel if num_ranks == 1 else aligned(numel, VECTOR * num_ranks)


def stored_numel(numel: int) -> int:
    """Return the number of elements of a layer on the disk: whole pages in any dtype, so that reads can bypass the
    system's cache."""
    return aligned(numel, 2048)


def writable(disk: str | None) -> Path:
    """Return the named folder, or the system's temporary one. Raises ValueError if the folder is not writable."""
    folder = Path(disk or tempfile.gettempdir())
    try:  # try to write, because permissions tell too little about root and network folders
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(f"cannot write to the folder {folder}: name another with --disk DIR") from error


def block_numel(dtype: str) -> int:
    """Return the number of elements that the device updates at once without this project's kernel: fewer in bf16, whose
    update makes larger copies."""
    return CHUNK // 4 if dtype == "bf16" else BLOCK


def state_bytes(workload: Workload) -> dict[str, int]:
    """Return the bytes per parameter of a layer's home on the host, by kind. Mixed precision keeps an fp32 master; in
    bf16 the weights are one half of the master. Temporary fp32 copies of an update are not counted."""
    size, kept = workload.weight_bytes, OPTIMIZER_BYTES[workload.dtype]
    return {"weights": size, "gradients": size, "optimizer": kept - (2 if workload.dtype == "bf16" else 0)}


def page_locked(size: int, room: Room) -> int:
    """Return the bytes that torch allocates for a page-locked tensor: the next power of two. torch keeps them after the
    tensor is freed."""
    return 1 << (size - 1).bit_length() if room.page_locks and size else size


def each_page_locked(size: int, workload: Workload, room: Room, num_ranks: int = 1) -> int:
    """Return the bytes of a rank's parts of tensors, one for each weight, that are page-locked one by one. `size`:
    bytes of an element."""

    def locked(shape: Shape) -> int:
        return page_locked(size * -(-math.prod(shape) // num_ranks), room) if len(shape) > 1 else 0

    small = num_small(workload)  # biases and norms are counted as one tensor: rounding each up adds little
    return workload.anatomy.total(workload.num_layers, locked) + page_locked(size * -(-small // num_ranks), room)


def num_small(workload: Workload) -> int:
    """Return the number of parameters in biases and norms, which are vectors."""
    return workload.anatomy.total(workload.num_layers, lambda shape: shape[0] if len(shape) == 1 else 0)


def saved_boundaries(workload: Workload) -> float:
    """Return the bytes that autograd saves for a layer, over the bytes of its input. For a model by its config.json the
    tensors of the backward pass are included, because the model's sizes do not distinguish them."""
    if (blocks := workload.anatomy.blocks) is not None:
        return max(inputs for inputs, _ in blocks.lines)
    return SAVED_BOUNDARIES if workload.config is None else workload.boundaries


def gathered_params(workload: Workload) -> int:
    """Return the parameters that ranks gather in a step if each keeps a part of every tensor: those of the layers for
    the forward pass and again for the recompute, those of the ends once."""
    return 2 * workload.num_layers * workload.layer_params + workload.end_params


def resident_plan(workload: Workload) -> Plan:
    """Return the plan with everything on the device. Gradients live for one step, so the peak is at one of five
    moments."""
    params, size = workload.num_params, workload.weight_bytes
    is_whole = workload.micro_batches == 1
    boundaries = workload.num_layers * workload.boundary_bytes // workload.micro_batches
    starts = 0 if is_whole else 2 * workload.boundary_bytes  # every micro-batch's embedding, and its gradient
    embedding = workload.vocab_size * workload.hidden_size
    moments = (  # bytes of gradients and of activations
        (0 if is_whole else size * params, boundaries + workload.head_bytes + starts),
        # the top layer's backward pass
        (size * (workload.end_params if is_whole else params), boundaries + workload.layer_bytes + starts),
        (size * (params - workload.layer_params), workload.layer_bytes),  # the bottom layer's
        (size * (params + 2 * embedding), 2 * workload.boundary_bytes),  # the tied embedding's two gradients are summed
        (4 * params, 0),  # the update
    )
    gradients, activations = max(moments, key=sum)
    states = {"weights": size * params, "gradients": gradients, "optimizer": OPTIMIZER_BYTES[workload.dtype] * params}
    return Plan({**states, "activations": activations})


def describe(workload: Workload, implementation: str, optimizer: str) -> dict[str, str]:
    """Return the fairness table's row of a method that trains the model's own layers with torch."""
    scaled = ", dynamic loss scale" if workload.dtype == "fp16" else ""
    blocks = ", its MLP and norms by blocks of tokens" if workload.anatomy.blocks else ""
    kept = "" if workload.dtype == "fp32" else f", master and moments fp32{scaled}"
    return {
        "implementation": implementation,
        "model": "harness/core/gpt.py" if workload.config is None else f"transformers, {workload.model}",
        "attention": "torch scaled_dot_product_attention",
        "optimizer": optimizer,
        "precision": f"weights {workload.dtype}{kept}",
        "recompute": f"every layer{blocks}, torch checkpoint",
        "clipping": "exact global norm",
    }
