"""Tiny models by their config.json, as workloads, whole and in parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.core import hub_config
from harness.core.job import Workload
from harness.core.model import new_ends, new_layer

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False},
    "llama3.1": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
                 "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 16,
              "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "rms_norm_eps": 1e-5, "head_dim": 8, "sliding_window": 64,
                "tie_word_embeddings": False},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, "pad_token_id": 0} for name in ("phi3", "olmo2", "gpt_neox")},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0, "no_rope_layer_interval": 2},
    "granite": {"model_type": "granite", "pad_token_id": 0, "logits_scaling": 6.0, "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22, "attention_multiplier": 0.125},
    "gemma": {"model_type": "gemma", "pad_token_id": 0, "head_dim": 8},
    "gemma2": {"model_type": "gemma2", "pad_token_id": 0, "head_dim": 8, "sliding_window": 64,
               "query_pre_attn_scalar": 4, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    "gemma3": {"model_type": "gemma3_text", "pad_token_id": 0, "head_dim": 8, "sliding_window": 64, "rope_theta": 1e6,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}  # fmt: skip
SIZES = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 64}  # fmt: skip


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**(FAMILIES | OTHERS)[family], **SIZES, **changes}


def configured(family: str, **changes: Any) -> Workload:
    """A model of a family at a learning rate that makes a stale weight show."""
    config = config_of(family)
    sizes = {**hub_config.sizes_of(config), "seq_len": 16, "batch_size": 2, "learning_rate": 1.0}
    return Workload(**{**sizes, "model": family, "config": hub_config.text_of(config), **changes})


def in_parts(workload: Workload, whole: nn.Module) -> tuple[Any, list[nn.Module]]:
    """Both ends and the layers, with the weights of the whole model."""
    ends, layers = new_ends(workload), [new_layer(workload, index) for index in range(workload.num_layers)]
    weights = dict(whole.named_parameters())
    for part, prefix in [(ends, ""), *((each, workload.anatomy.layer_name(i)) for i, each in enumerate(layers))]:
        for name, _ in list(part.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(owner), leaf, nn.Parameter(weights.pop(prefix + name).detach()))
    assert not weights
    return ends, layers
