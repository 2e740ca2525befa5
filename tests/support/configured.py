"""Tiny models by their config.json, as workloads, whole and in parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from harness.core import hub_config
from harness.core.job import Workload
from harness.models import named_models
from harness.models.model import new_ends, new_layer


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    model = named_models.load(f"tiny-{family}")
    assert isinstance(model, named_models.ConfiguredModel)
    return {**model.config, **changes}


# Families that are tested in depth; megatron-lm has layers of these alone.
FAMILIES = ("llama", "llama3.1", "qwen2", "qwen3", "mistral")
TINY = [name.removeprefix("tiny-") for name in named_models.several("tiny-*")]
MIXTURES = [family for family in TINY if "num_experts_per_tok" in str(config_of(family))]
OTHERS = [family for family in TINY if family not in (*FAMILIES, *MIXTURES)]


def configured(family: str, **changes: Any) -> Workload:
    """A model of a family at a learning rate that makes a stale weight show."""
    config = config_of(family)
    sizes = {**hub_config.sizes_of(config), "seq_len": 16, "batch_size": 2, "learning_rate": 1.0}
    return Workload(**{**sizes, "model": family, "config": hub_config.text_of(config), **changes})


def in_parts(workload: Workload, whole: nn.Module) -> tuple[Any, list[nn.Module]]:
    """Both ends and the layers, with the weights of the whole model."""
    ends, layers = new_ends(workload), [new_layer(workload, index) for index in range(workload.num_layers)]
    weights = dict(whole.named_parameters())
    for part, prefix in [
        (ends, ""),
        *((each, workload.anatomy.layer_name(i)) for i, each in enumerate(layers)),
    ]:
        for name, _ in list(part.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(owner), leaf, nn.Parameter(weights.pop(prefix + name).detach()))
    assert not weights
    return ends, layers
