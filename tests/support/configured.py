"""Tiny models by their config.json, as workloads, and how transformers alone trains one: no code of this project."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from harness.core import hub_config
from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY, Workload
from harness.core.model import build
from harness.simulation.batches import token_batches

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
    **{name: {"model_type": name, "pad_token_id": 0} for name in ("phi3", "olmo2", "smollm3", "gpt_neox")},
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


def theirs(workload: Workload) -> Any:
    """transformers' own model in fp32, with the starting values of ours, or with weights that it loads itself."""
    import transformers

    if workload.weights is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(workload.weights, dtype=torch.float32).train()
    config = transformers.AutoConfig.for_model(**json.loads(str(workload.config)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    named = dict(model.named_parameters())
    ours = dict(build(workload).named_parameters())
    assert named.keys() == ours.keys()
    for name, weight in named.items():
        weight.data.copy_(ours[name].data)
    return model.train()


def their_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def their_losses(workload: Workload, steps: int) -> list[float]:
    return their_training(workload, steps)[0]


def their_training(workload: Workload, steps: int) -> tuple[list[float], Any]:
    """The losses of a plain loop, and its model: torch's default AdamW, decay on matrices, clipped gradients."""
    model, losses = theirs(workload), []
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON)
    for step, (inputs, targets) in enumerate(token_batches(workload, steps), start=1):
        loss = their_loss(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        if workload.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate_at(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, model
