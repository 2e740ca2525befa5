"""Maps the harness's tensors to those of megatron-core's GPTModel. The map tells which of the harness's tensors each
tensor of GPTModel holds, and along which dimension tensor parallel ranks split the tensor. Needs only the standard
library.

For the published GPT each tensor of GPTModel holds one tensor of the harness. For Llama, Mistral, Qwen2 and Qwen3 one
tensor of GPTModel holds query, key and value, and one holds the first two matrices of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from harness.base.json_object import JsonObject
from harness.core import hub_config
from harness.core.anatomy import Shapes
from harness.core.job import Workload

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # values of model_type
QKV, FIRST_OF_MLP = "self_attention.linear_qkv", "mlp.linear_fc1"
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
LAYERS = "decoder.layers."  # prefix of a layer's tensors in GPTModel; the layer's number follows
# BY_ROWS: modules whose tensors are split by rows over tensor parallel ranks. BY_COLUMNS: the matrix, by columns.
BY_ROWS = ("embedding.word_embeddings", "output_layer", QKV, FIRST_OF_MLP)
BY_COLUMNS = ("self_attention.linear_proj", "mlp.linear_fc2")

ModuleTable = dict[str, list[str]]
# The tables map each module of GPTModel to the harness's modules whose tensors it holds. *_LAYER: the modules of a
# layer. *_ENDS: embedding, final norm and head.
GPT_LAYER: ModuleTable = {
    "input_layernorm": ["ln1"],
    QKV: ["qkv"],
    "self_attention.linear_proj": ["proj"],
    "pre_mlp_layernorm": ["ln2"],
    FIRST_OF_MLP: ["fc1"],
    "mlp.linear_fc2": ["fc2"],
}
GPT_ENDS: ModuleTable = {
    "embedding.word_embeddings": ["ends.wte"],
    "embedding.position_embeddings": ["ends.wpe"],
    "decoder.final_layernorm": ["ends.lnf"],
}
LLAMA_LAYER: ModuleTable = {
    "input_layernorm": ["input_layernorm"],
    QKV: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention.q_layernorm": ["self_attn.q_norm"],
    "self_attention.k_layernorm": ["self_attn.k_norm"],
    "self_attention.linear_proj": ["self_attn.o_proj"],
    "pre_mlp_layernorm": ["post_attention_layernorm"],
    FIRST_OF_MLP: ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.linear_fc2": ["mlp.down_proj"],
}
LLAMA_ENDS: ModuleTable = {
    "embedding.word_embeddings": ["model.embed_tokens"],
    "decoder.final_layernorm": ["model.norm"],
    "output_layer": ["lm_head"],
}


@dataclass(frozen=True)
class GptModelSizes:
    """The sizes and options of a model that GPTModel needs beside the hidden size."""

    num_heads: int
    num_groups: int  # number of groups of heads; the heads of a group share a key and a value
    head_size: int
    ffn_size: int  # inner width of the MLP
    is_tied: bool
    has_qkv_bias: bool
    norms_heads: bool  # True: queries and keys are normalized head by head
    epsilon: float  # epsilon of the norms


def check_model(workload: Workload) -> None:
    """Raise ValueError if GPTModel lacks some of the model's tensors, or would compute the model differently."""
    if workload.config is None:
        return
    for field, value, known in _conventions(hub_config.parsed(workload.config)):
        if value not in known:
            expected = ", ".join(map(str, known))
            raise ValueError(f"expected {field} {expected}, got {value}; try -m stronghold or l2l")
    if hub_config.is_beyond_window(workload.anatomy.fields, workload.seq_len):
        message = (
            "expected samples within the model's sliding window, because attention here sees all of a sample"
        )
        window = workload.anatomy.fields["sliding_window"]
        raise ValueError(
            f"--seq: {message}, got {workload.seq_len} tokens; try --seq {window - 1}, or -m stronghold"
        )
    held = {**layer_tensors(workload), **end_tensors(workload)}
    if others := {*workload.anatomy.layer, *workload.anatomy.ends}.difference(*held.values()):
        message = f"expected only tensors that megatron-core has, got {min(others)}"
        raise ValueError(f"{message}; try -m stronghold or l2l")


def _conventions(config: JsonObject) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield each convention that transformers' modules of FAMILIES take from the configuration and that no tensor's
    shape shows: its name, the model's value and the values that GPTModel computes alike. Left out are those that
    GPTModel gets from elsewhere: angles from transformers' own buffer, the norms' epsilon from gpt_model_sizes(),
    starting values from the harness."""
    yield "a model of type", config["model_type"], FAMILIES
    yield "the activation", config.get("hidden_act", "silu"), ("silu",)
    # transformers gives the padding token's row of the embedding no gradient, GPTModel does.
    yield "pad_token_id", config.get("pad_token_id"), (None,)
    yield "is_causal", config.get("is_causal", True), (True,)
    yield "partial_rotary_factor", hub_config.rotary_share(config), (1,)
    for kind in hub_config.rope_types(config):
        yield "positions of type", kind, ("default", "linear", "llama3")  # yarn scales attention, too


def gpt_model_sizes(workload: Workload) -> GptModelSizes:
    """Return the sizes of a model that passes check_model()."""
    num_heads, size, anatomy = workload.num_heads, workload.hidden_size, workload.anatomy
    if workload.config is None:
        return GptModelSizes(
            num_heads,
            num_heads,
            size // num_heads,
            4 * size,
            is_tied=True,
            has_qkv_bias=True,
            norms_heads=False,
            epsilon=1e-5,
        )
    layer = anatomy.layer
    head_size = layer["self_attn.q_proj.weight"][0] // num_heads
    return GptModelSizes(
        num_heads,
        layer["self_attn.k_proj.weight"][0] // head_size,
        head_size,
        layer["mlp.gate_proj.weight"][0],
        is_tied="lm_head.weight" not in anatomy.ends,
        has_qkv_bias="self_attn.q_proj.bias" in layer,
        norms_heads="self_attn.q_norm.weight" in layer,
        epsilon=hub_config.parsed(workload.config).get("rms_norm_eps", 1e-6),
    )


def layer_tensors(workload: Workload) -> dict[str, tuple[str, ...]]:
    """Return the names of a layer's tensors in GPTModel, without the layer's prefix, each with the names of the
    harness's tensors that it holds."""
    if workload.config is None:
        return dict(_held_tensors(GPT_LAYER, workload.anatomy.layer, biased=GPT_LAYER))
    return dict(_held_tensors(LLAMA_LAYER, workload.anatomy.layer, biased=(QKV,)))


def end_tensors(workload: Workload) -> dict[str, tuple[str, ...]]:
    """Return the tensors of embedding and head in the form of layer_tensors(); a tied head has no tensor of its own."""
    if workload.config is None:
        return dict(_held_tensors(GPT_ENDS, workload.anatomy.ends, biased=GPT_ENDS))
    return dict(_held_tensors(LLAMA_ENDS, workload.anatomy.ends, biased=()))


def _held_tensors(
    table: ModuleTable, shapes: Shapes, *, biased: Collection[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for module, gpt_names in table.items():
        for kind in ("weight", "bias") if module in biased else ("weight",):
            names = tuple(f"{name}.{kind}" for name in gpt_names)
            if names[0] in shapes:
                yield f"{module}.{kind}", names


def shared_dim(name: str) -> int | None:
    """Return the dimension along which tensor parallel ranks split a tensor of GPTModel; None if each rank has the
    whole tensor."""
    module, _, kind = name.rpartition(".")
    if module.endswith(BY_ROWS):
        return 0
    return 1 if module.endswith(BY_COLUMNS) and kind == "weight" else None


def is_of_first_stage(name: str) -> bool:
    """Return whether a tensor of embedding or head is on the first stage of a pipeline; if not, the tensor is on the
    last stage."""
    return name.startswith("embedding.")


def rank_numel(held: dict[str, tuple[str, ...]], shapes: Shapes, num_ranks: int) -> int:
    """Return the number of elements that each of `num_ranks` tensor parallel ranks has of these tensors. `held`: the
    tensors in the form of layer_tensors(). `shapes`: the shapes of the harness's tensors."""
    return sum(
        -(-math.prod(shapes[name]) // (1 if shared_dim(engine_name) is None else num_ranks))
        for engine_name, names in held.items()
        for name in names
    )
