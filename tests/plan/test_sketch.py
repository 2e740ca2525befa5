"""Every type of causal model that transformers has is planned, or refused by a reason of ours with a way out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from bench import model_types
from harness.core import anatomy, hub_config
from harness.core.job import Workload
from harness.core.refusals import REASONS
from harness.models import named_models
from tests.support import cli
from tests.support.configured import config_of

# For a few types: the reason, empty for a model that is trained.
EXPECTED = {
    "llama": "",
    "stablelm": "",
    "emu3": "",
    "minicpm3": "",
    "mixtral": "",
    "mpt": "",
    "llama4_text": "",
    "lfm3": "",
    "jetmoe": "no-checkpoints",
    "phimoe": "random",
    "bloom": "before-layers",
    "biogpt": "before-layers",
    "gptj": "head-bias",
    "gpt_bigcode": "buffers",
    "gpt_neo": "buffers",
    "gemma3n": "list-of-widths",
    "falcon_h1": "buffers",
    "mllama": "ends",
    "opt": "no-layers",
    "gemma4": "before-layers",
    "openai-gpt": "no-norm",
    "glm_moe_dsa": "outputs",
    "bart": "encoder-decoder",
    "bert": "encoder-decoder",
    "mamba": "no-size",
    "longcat_flash": "no-size",
}
PLACES = {code: re.sub(r"\\\{\w+\\\}", ".+", re.escape(sentence)) for code, sentence in REASONS.items()}


@pytest.fixture(autouse=True)
def sketched_in_this_process() -> Iterator[None]:
    with model_types.sketched_here():
        yield


def reason(folder: Path, config: str | dict[str, Any], *arguments: str) -> str:
    """The code of the reason in the one line with which `plan` refuses the model; empty if it plans it."""
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    ended = cli.run("plan", "-m", "resident", "--model", str(folder), "--seq", "16", "-b", "1", *arguments)
    lines = [line for line in ended.stderr.splitlines() if " here is " not in line]
    if ended.returncode == 0 and not lines:
        return ""
    assert ended.returncode == 2 and len(lines) == 1, ended.stderr
    (code, *_) = [code for code, pattern in PLACES.items() if re.search(f"{pattern}$", lines[0])] or [
        lines[0]
    ]
    return code


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_type_of_transformers_is_planned_or_refused_by_a_reason(kind: str, tmp_path: Path) -> None:
    assert reason(tmp_path, str(model_types.tiny(kind))) == EXPECTED[kind]


def test_the_page_of_types_has_a_row_for_each_type_and_reasons_of_ours() -> None:
    page = model_types.PAGE.read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [kind.strip("`") for kind, *_ in rows] == [*model_types.TYPES]
    reasons = {model_types.NO_DEFAULTS, *map(model_types.short, REASONS.values())}
    patterns = [re.sub(r"\\\{\w+\\\}", ".+", re.escape(reason)) for reason in reasons]
    for kind, result, *why in rows:
        assert (result, len(why)) in [("trained", 0), ("refused", 1)], kind
        assert all(any(re.fullmatch(pattern, text) for pattern in patterns) for text in why), kind
    assert transformers.__version__ in page


@pytest.mark.heavy
@pytest.mark.parametrize("kind", model_types.TYPES)
def test_a_row_of_the_page_says_what_becomes_of_its_type(kind: str) -> None:
    (line,) = [line for line in model_types.PAGE.read_text().splitlines() if line.startswith(f"| `{kind}` |")]
    assert str(model_types.row(kind)) == line, "python -m bench.model_types > docs/model-types.md"


SIZE_FIELDS = [*hub_config.FIELD_OF_SIZE.values()]
ENCODER_DECODERS = [
    kind for kind in model_types.TYPES if transformers.CONFIG_MAPPING[kind].is_encoder_decoder
]


@pytest.mark.parametrize("field", SIZE_FIELDS)
def test_a_size_is_known_by_each_name_that_transformers_has_for_it(field: str) -> None:
    for kind in model_types.TYPES:
        name = transformers.CONFIG_MAPPING[kind].attribute_map.get(field, field)
        names = hub_config.USUAL_NAMES | hub_config.NAMES_OF_TYPES.get(kind, {})
        assert name == field or names.get(name) == field or kind in ENCODER_DECODERS, kind


@pytest.mark.parametrize("field", SIZE_FIELDS)
def test_types_without_a_size_are_those_of_transformers(field: str) -> None:
    missing = []
    for kind in model_types.TYPES:
        config = transformers.CONFIG_MAPPING[kind]
        is_whole = not {"text_config", "decoder"} & config.sub_configs.keys() and kind not in ENCODER_DECODERS
        if is_whole and field not in config.attribute_map and field not in config.__dataclass_fields__:
            missing.append(kind)
    assert missing == [*hub_config.TYPES_WITHOUT_SIZE.get(field, ())]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"num_key_value_heads": 3}, "key-heads"),
        ({"hidden_size": 66}, "heads"),
        (
            {"hidden_size": 1792, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
            "heads",
        ),
        ({"vocab_size": None}, "size"),
        ({"vocab_size": True}, "size"),
        ({"hidden_size": "32"}, "size"),
        ({"num_hidden_layers": -1}, "size"),
        ({"intermediate_size": "80"}, "value"),
        ({"intermediate_size": [80, 80, 80]}, "list-of-widths"),
        ({"max_position_embeddings": "64"}, "value"),
        ({"sliding_window": [8]}, "value"),
        ({"head_dim": 8.5}, "value"),
        ({"eos_token_id": "</s>"}, "value"),
        ({"attention_dropout": "0.1"}, "value"),
        ({"rms_norm_eps": "small"}, "rejected-field"),
        ({"head_dim": 7}, "rejected"),
        ({"model_type": "nonsense"}, "unknown-type"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "angles-of-sample"),
        (
            {"rope_scaling": {"rope_type": "dynamic"}, "rope_parameters": {"rope_type": "default"}},
            "angles-of-sample",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "more": {"rope_type": "default"}}}, "angles-of-sample"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "positions"),
        ({"attn_implementation": "owner/kernels"}, "attention"),
        ({"_attn_implementation": "flash_attention_2"}, "attention"),
        ({"_experts_implementation": {"": "owner/kernels"}}, "attention"),
        ({"experts_implementation": "sonicmoe"}, "attention"),
        ({"experts_implementation": "eager"}, "experts"),
        ({"experts_implementation": "batched_mm"}, "experts"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_refused_by_a_reason(
    changes: dict[str, Any], code: str, tmp_path: Path
) -> None:
    assert reason(tmp_path, config_of("llama", **changes)) == code


@pytest.mark.parametrize(
    "changes",
    [
        {"initializer_range": {"__float__": "0.02"}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"pad_token_id": -1},
        {"shared_intermediate_size": 0},
    ],
    ids=str,
)
def test_what_does_not_hinder_is_planned(changes: dict[str, Any], tmp_path: Path) -> None:
    assert reason(tmp_path, config_of("llama", **changes), "--seq", "128") == ""


@pytest.mark.parametrize("share", [0.25, 0.4, 0.75])
def test_the_narrow_model_turns_whole_pairs_of_a_heads_columns(share: float, tmp_path: Path) -> None:
    config = json.loads(model_types.tiny("stablelm")) | {"hidden_size": 320, "partial_rotary_factor": share}
    config.pop("rope_parameters", None)
    assert reason(tmp_path, config) == ""


@pytest.mark.parametrize(("inner", "code"), [(64, "outputs"), (2**18, "narrow")])
def test_a_model_that_cannot_be_narrowed_is_compared_at_its_own_width_or_refused_for_ours(
    inner: int, code: str, tmp_path: Path
) -> None:
    """Mamba's heads have sizes of their own, so with half of the hidden size transformers makes no model."""
    config = json.loads(str(model_types.tiny("bamba"))) | {"hidden_size": 64, "mamba_d_head": 16}
    assert reason(tmp_path, config | {"intermediate_size": inner}) == code


def test_a_model_is_sketched_with_all_that_it_has_for_each_layer(tmp_path: Path) -> None:
    config = json.loads(model_types.tiny("zamba2"))
    config |= {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2}
    assert reason(tmp_path, config, "-l", "2") == "shared"


def test_one_sketch_serves_every_number_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[str] = []
    answered = anatomy.ask
    monkeypatch.setattr(
        anatomy, "ask", lambda module, question: modules.append(module) or answered(module, question)
    )
    assert [reason(tmp_path, config_of("llama"), "-l", number) for number in ("1", "4", "12")] == ["", "", ""]
    assert modules == ["harness.plan.sketch"]


def test_learned_positions_bound_a_sample(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("gpt2", n_positions=32)))
    with pytest.raises(
        ValueError, match=r"^--seq: expected at most 32, the number of the model's positions, got 64"
    ):
        _ = Workload(**named_models.load(str(tmp_path)).sizes, seq_len=64).num_params
