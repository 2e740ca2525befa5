"""megatron-core trains models by their config.json as resident training does, and refuses those it does not have."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from harness.core import hub_config
from harness.core.job import Job, Room
from harness.core.method import create
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from methods.engines import megatron_names
from tests.support import engine_runs, forks
from tests.support.configured import FAMILIES, configured


def test_megatrons_own_layers_train_the_families_whose_names_it_knows() -> None:
    """Rotary pairs and their scaling, grouped keys, norms of heads, biases, tied heads."""
    workloads = {family: configured(family) for family in FAMILIES}
    assert max(forks.call(engine_runs.differences, "megatron-lm", workloads).values()) <= 1e-6


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("qwen3", "fp32", {"tensor_parallel": 2, "sequence_parallel": True}),
        ("llama3.1", "fp32", {"pipeline_parallel": 2}),
        ("qwen2", "bf16", {"tensor_parallel": 2}),
    ],
)
def test_megatrons_ranks_train_them_too(
    family: str, dtype: str, options: dict[str, Any], tmp_path: Path
) -> None:
    load = configured(family, num_layers=4, micro_batches=2, vocab_size=128, dtype=dtype)
    record = Sweep(tmp_path).run(
        [resolve(Job("megatron-lm", load, {"world_size": 2, **options}, steps=5, warmup=1))]
    )
    assert record[0].gate.passed, record[0].gate.text
    assert record[0].gate.evidence["loss_difference"] <= (1e-6 if dtype == "fp32" else 5e-3)


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        (
            "smollm3",
            {},
            "expected a model of type llama, mistral, qwen2, qwen3, got smollm3; try -m stronghold",
        ),
        (
            "llama",
            {"world_size": 4, "tensor_parallel": 4},
            "a divisor of num_key_value_heads 2, got 4; try ten",
        ),
        (
            "qwen2",
            {"world_size": 2, "tensor_parallel": 2},
            "a divisor of vocab_size 101, got 2; try tensor_parallel=1",
        ),
    ],
)
def test_what_megatron_does_not_have_is_one_line(family: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        create("megatron-lm", options).plan(configured(family), Room())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_act": "gelu"}, "the activation silu, got gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear, llama3, got yarn"),
        ({"mlp_bias": True}, r"got mlp\.\w+_proj\.bias"),
        ({"pad_token_id": 0}, "pad_token_id None, got 0"),
        ({"is_causal": False}, "is_causal True, got False"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "1, got 0.5",
        ),
    ],
    ids=str,
)
def test_megatron_refuses_what_it_computes_otherwise(changes: dict[str, Any], told: str) -> None:
    load = configured("llama")
    load = dataclasses.replace(load, config=json.dumps(json.loads(str(load.config)) | changes))
    with pytest.raises(ValueError, match=f"^expected .*{told}; try -m"):
        create("megatron-lm", {}).plan(load, Room())


# Fields that transformers' modules of these families read: sizes and biases, which the tensors' shapes show; angles,
# which are copied; what sizes_of() and the anatomy hand over; what Workload bounds or sets to 0; and the conventions.
SHOWN = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "vocab_size",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "rope_parameters",
    "max_position_embeddings",
    "rms_norm_eps",
    "sliding_window",
    "layer_types",
    "attention_dropout",
    "_attn_implementation",
}


@pytest.mark.parametrize("family", megatron_names.FAMILIES)
def test_every_field_that_transformers_reads_is_known_to_megatrons_check(family: str) -> None:
    modules = (f"models.{family}.modeling_{family}", "masking_utils")
    sources = [
        (Path(transformers.__file__).parent / f"{name.replace('.', '/')}.py").read_text() for name in modules
    ]
    causal_masks = sources[1].partition("def create_chunked_causal_mask")[0]
    read = {*re.findall(r"config\.(\w+)", sources[0])} | {
        *re.findall(r'getattr\(config, "(\w+)"', causal_masks)
    }
    conventions = {
        name.rpartition(" ")[2] for name, _, _ in megatron_names._conventions(configured_fields(family))
    }
    assert read <= SHOWN | conventions | {"hidden_act"}


def configured_fields(family: str) -> dict[str, Any]:
    return hub_config.parsed(str(configured(family).config))
