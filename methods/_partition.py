"""Where to cut a model into shards: the longest runs of layers that fit; standard library only.

Memory grows with each layer that a run takes, so the longest prefix that fits leaves the fewest shards. Sizes in bytes
by the parameter's name: a parameter that several layers of a run share is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.spec import Workload, gib

Sizes = dict[str, int]
ALIGNMENT = 64  # bytes, of every tensor in a slab
MOMENTS = 2  # of AdamW, fp32; beside them it counts its steps


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def longest_runs(layers: Sequence[Sizes], room: int, names: Sequence[str] = ()) -> list[int]:
    """Numbers of layers of each shard, none of which takes more than `room`.

    Raises ValueError naming the first layer that does so by itself.
    """
    lengths: list[int] = []
    held: Sizes = {}
    for index, sizes in enumerate(layers):
        alone = sum(sizes.values())
        if alone > room:
            name = names[index] if names else f"layer {index}"
            raise ValueError(f"{name} needs {gib(alone)} ({alone} bytes) by itself, a shard has room for {gib(room)}")
        if lengths and sum({**held, **sizes}.values()) <= room:
            lengths[-1] += 1
            held |= sizes
        else:
            lengths.append(1)
            held = dict(sizes)
    return lengths


def shard_bytes(layers: Sequence[Sizes], lengths: Sequence[int]) -> list[int]:
    """What each shard of such a cut takes."""
    found, start = [], 0
    for length in lengths:
        held: Sizes = {}
        for sizes in layers[start : start + length]:
            held |= sizes
        found.append(sum(held.values()))
        start += length
    return found


def gpt_tensors(workload: Workload) -> list[dict[str, int]]:
    """The harness's GPT as an ordered list of layers, by parameter name the number of its elements; both ends share
    the token embedding."""
    size, vocab = workload.hidden_size, workload.vocab_size
    matrices = {"qkv": 3 * size, "proj": size, "fc1": 4 * size}
    layer = {f"{name}.weight": rows * size for name, rows in matrices.items()} | {"fc2.weight": 4 * size * size}
    layer |= {f"{name}.bias": rows for name, rows in {**matrices, "fc2": size}.items()}
    layer |= {f"{norm}.{kind}": size for norm in ("ln1", "ln2") for kind in ("weight", "bias")}
    layers = [{f"layers.{i}.{name}": numel for name, numel in layer.items()} for i in range(workload.num_layers)]
    embedding = {"ends.wte.weight": vocab * size, "ends.wpe.weight": workload.seq_len * size}
    head = {"ends.wte.weight": vocab * size, "ends.lnf.weight": size, "ends.lnf.bias": size}
    return [embedding, *layers, head]


def adamw_bytes(numel: int, weight_bytes: int) -> int:
    """A parameter on its way: weight, gradient, moments, step count; an fp32 master where weights are narrower."""
    states = (MOMENTS + (weight_bytes < 4)) * aligned(4 * numel) + ALIGNMENT
    return 2 * aligned(weight_bytes * numel) + states
