"""A tiny configuration of every type of causal model that transformers has, as transformers writes it."""

from __future__ import annotations

import functools
import json
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS, HEADS, KEY_HEADS, HIDDEN, INNER, WORDS, POSITIONS = 2, 4, 2, 32, 64, 101, 64
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), POSITIONS),
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": WORDS,
    "head_dim": HIDDEN // HEADS,
}
NEEDED = ("head_dim",)  # sizes that transformers demands of some types, though its default is none


@functools.cache
def tiny(kind: str) -> str | None:
    """Return config.json of the smallest model of this type whose sizes are these; other fields keep the values of
    transformers. None if transformers rejects its own defaults."""
    try:
        config = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    except StrictDataclassClassValidationError:
        return None
    part = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    sizes = dict(SIZES)
    if "qk_rope_head_dim" in part:  # latent attention: widths of heads of its own, and a key for each head
        del sizes["head_dim"]
        sizes["num_key_value_heads"] = HEADS
    num_layers = part.get("num_hidden_layers")
    for name, value in [*part.items()]:
        if value is None and (name not in NEEDED or name not in sizes):
            del part[name]
        elif name in sizes and not isinstance(value, list):
            part[name] = sizes[name]
        elif name.endswith("token_id"):
            part[name] = _within(value)
        elif isinstance(value, list) and len(value) == num_layers:
            part[name] = value[:LAYERS]
        elif name == "per_layer_config":
            part[name] = {layer: changes for layer, changes in value.items() if int(layer) < LAYERS}
    return json.dumps(config)


def _within(ids: Any) -> Any:
    return [min(number, WORDS - 1) for number in ids] if isinstance(ids, list) else min(ids, WORDS - 1)
