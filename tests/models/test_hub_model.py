"""A model by its config.json has the parts and counts of transformers' own; what is not of the kind is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bench import model_types
from harness.core import anatomy, hub_config
from harness.core.data import token_batches
from harness.core.job import Workload
from harness.core.refusals import RefusedModel
from harness.models import named_models
from harness.models.model import build, new_layer
from tests.support import cli, forks
from tests.support.configured import FAMILIES, config_of, configured, in_parts

# Parameters of the published checkpoints.
PUBLISHED = {
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-2-13b-hf": 13_015_864_320,
    "Llama-2-70b-hf": 68_976_648_192,
    "Mistral-7B-v0.2": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B": 7_241_732_096,
    "Mistral-Nemo": 12_247_782_400,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
}


def counted(config: dict[str, Any]) -> int:
    """Parameters by hand: RMS norms, gated MLP, grouped keys and values; in Qwen2 QKV biases, in Qwen3 heads' norms."""
    size, inner, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    head = config.get("head_dim") or size // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = 2 * size + 3 * size * inner + 2 * size * queries + 2 * size * keys
    layer += queries + 2 * keys if kind == "qwen2" else 2 * head if kind == "qwen3" else 0
    ends = (1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * size + size
    return config["num_hidden_layers"] * layer + ends


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_has_the_parameters_of_its_checkpoint(name: str) -> None:
    model = named_models.load(name)
    assert isinstance(model, named_models.ConfiguredModel)
    assert counted(model.config) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["Qwen3-8B", "meta-llama/Llama-3-8B", "Qwen/Qwen2.5-7B"])
def test_a_sketch_counts_the_parameters_of_the_checkpoint(name: str) -> None:
    assert Workload(**named_models.load(name).sizes).num_params == PUBLISHED[name.rpartition("/")[2]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_parts_compute_the_bits_of_the_whole(family: str, dtype: str) -> None:
    workload = configured(family, dtype=dtype)
    inputs, targets = token_batches(workload, 1)[0]
    whole = build(workload)
    ends, layers = in_parts(workload, whole)
    x = ends.embed(inputs)
    for layer in layers:
        x = layer(x)
    assert ends.loss(x, targets).item() == whole(inputs, targets).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_anatomy_is_that_of_the_module(family: str) -> None:
    workload = configured(family)
    named = {name: tuple(weight.shape) for name, weight in build(workload).named_parameters()}
    anatomy = workload.anatomy
    layers = {anatomy.layer_name(i) + name: shape for i in range(3) for name, shape in anatomy.layer.items()}
    assert named == anatomy.ends | layers
    assert workload.num_params == counted(config_of(family)) == sum(map(math.prod, named.values()))
    size, inner = 32, 80
    head = config_of(family).get("head_dim", 8)
    matrices = 3 * size * inner + 2 * size * 4 * head + 2 * size * 2 * head
    (kind,) = anatomy.kinds
    assert (kind.token_flops, kind.pair_flops) == (2 * matrices, 2 * 4 * head)


def test_no_weight_of_a_layer_has_memory_though_its_type_draws_vectors_by_torch_normal() -> None:
    """Such a weight was in no slot: its gradient was lost by l2l and stronghold."""
    text = str(model_types.tiny("diffllama"))
    workload = Workload(**hub_config.sizes_of(json.loads(text)), seq_len=16, config=text)
    assert [name for name, weight in new_layer(workload, 0).named_parameters() if not weight.is_meta] == []


def test_gpt2_is_counted_with_its_learned_positions_once() -> None:
    """12 D^2 + 13 D for a layer; the head is the embedding of tokens."""
    anatomy = configured("gpt2").anatomy
    assert anatomy.layer_params == 12 * 32**2 + 13 * 32 and anatomy.end_params == (101 + 64 + 2) * 32
    assert anatomy.embedding.keys() - anatomy.head == {"transformer.wpe.weight"}
    (kind,) = anatomy.kinds
    assert (kind.token_flops, kind.pair_flops) == (24 * 32**2, 2 * 32)


def test_what_gpt2_drops_where_its_file_does_not_say_so_is_not_dropped() -> None:
    config = {name: value for name, value in config_of("gpt2").items() if not name.endswith("_pdrop")}
    narrow = hub_config.narrowed(hub_config.text_of(config), 3, 32, 101)
    assert {narrow[name] for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")} == {0.0}


def test_angles_stay_fp32_in_a_bf16_model() -> None:
    model = build(configured("llama", dtype="bf16"))
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())


REFUSED = [
    ({"model_type": "nonsense"}, "transformers [0-9.]+ does not make it"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "of type default, linear, .*, got dynamic"),
    ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "got dynamic"),
    ({"quantization_config": {"bits": 4}}, "got quantized ones"),
    ({"num_hidden_layers": None}, "expected num_hidden_layers as a positive whole number, got none"),
    ({"hidden_size": True}, "expected hidden_size as a positive whole number, got True"),
    ({"num_attention_heads": 0}, "expected num_attention_heads as a positive whole number, got 0"),
    ({"intermediate_size": [64, 64]}, "expected one intermediate_size for all layers, got a list"),
    ({"max_position_embeddings": "64"}, "expected max_position_embeddings as a whole number from 1 to "),
    ({"sliding_window": 1e30}, "expected sliding_window as a whole number from 1 to "),
    ({"head_dim": -8}, "expected head_dim as a whole number from 1 to "),
    ({"eos_token_id": ["2"]}, r"expected eos_token_id as a token's number, got \['2'\]"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(*change) for change, _ in REFUSED])
def test_what_is_not_of_the_kind_is_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("mistral", **change)))
    ended = cli.run("plan", "-m", "resident", "--model", str(tmp_path), "--seq", "16")
    assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1
    assert re.search(message, ended.stderr), ended.stderr


@pytest.mark.parametrize("named", ["evil.Evil", "{folder}--evil.Evil"])
def test_code_that_a_configuration_names_is_not_run(named: str, tmp_path: Path) -> None:
    """As a record from elsewhere may hold it; on the command line such a field is left out."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    named = named.format(folder=tmp_path)
    planted = {
        "auto_map": {"AutoConfig": named, "AutoModelForCausalLM": named},
        "_name_or_path": str(tmp_path),
    }
    workload = dataclasses.replace(configured("llama"), config=json.dumps({**config_of("llama"), **planted}))
    assert build(workload) is not None and not (tmp_path / "touched").exists()


@pytest.mark.heavy
def test_a_sketch_that_needs_too_much_memory_is_one_line(tmp_path: Path) -> None:
    changes = {"num_attention_heads": 8192, "num_key_value_heads": 8192, "head_dim": 8}
    (tmp_path / "config.json").write_text(
        json.dumps(config_of("mistral", **changes, intermediate_size=10**6))
    )
    ended = cli.run("plan", "-m", "resident", "--model", str(tmp_path), "--seq", "16")
    assert ended.returncode == 2 and len(ended.stderr.strip().splitlines()) == 1
    assert re.search("more than 4 GiB|can't allocate memory", ended.stderr), ended.stderr


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    ended = cli.run("plan", "-m", "resident", "--model", f"{tmp_path}/config.json")
    assert ended.returncode == 2 and f"{tmp_path}/config.json: cannot read it" in ended.stderr


def test_widths_shrink_with_the_hidden_size() -> None:
    text = hub_config.text_of(config_of("qwen3", hidden_size=1024, intermediate_size=3072, head_dim=128))
    narrow = hub_config.narrowed(text, 2, 128, 64)
    assert [narrow[name] for name in ("intermediate_size", "head_dim", "num_hidden_layers")] == [384, 16, 2]


@pytest.mark.parametrize(
    ("name", "kinds"), [("layer_types", ["full_attention", "sliding_attention"]), ("no_rope_layers", [1, 0])]
)
def test_more_layers_than_a_model_has_go_on_with_its_kinds(name: str, kinds: list[Any]) -> None:
    text = hub_config.text_of(config_of("smollm3", **{name: kinds}))
    assert hub_config.narrowed(text, 5, 32, 101)[name] == [*kinds, *kinds, kinds[0]]


def test_a_token_beyond_a_smaller_vocabulary_is_its_last_one() -> None:
    text = hub_config.text_of(config_of("llama", eos_token_id=[7, 99], bos_token_id=5, pad_token_id=100))
    narrow = hub_config.narrowed(text, 2, 32, 50)
    assert [narrow[name] for name in hub_config.TOKEN_FIELDS] == [5, [7, 49], 49]


@pytest.mark.parametrize(
    ("whole", "part", "ties"),
    [("gemma3", None, True), ("gemma3", True, True), ("llava", None, False), ("mistral3", None, True)],
)
def test_a_part_for_texts_ties_its_head_as_the_whole_model_does(
    whole: str, part: bool | None, ties: bool
) -> None:
    config = {"model_type": whole, "text_config": config_of("llama", tie_word_embeddings=part)}
    assert hub_config.text_part(config)["tie_word_embeddings"] is ties
    assert hub_config.text_part({**config, "tie_word_embeddings": part or False})[
        "tie_word_embeddings"
    ] is bool(part)


@pytest.mark.parametrize(("whole", "part"), [(True, False), (False, True), (None, False)])
def test_a_part_for_texts_that_contradicts_the_whole_is_refused(whole: bool | None, part: bool) -> None:
    config = {"model_type": "gemma3", "text_config": config_of("llama", tie_word_embeddings=part)}
    with pytest.raises(RefusedModel, match="write the same value into both"):
        hub_config.checked_config({**config, "tie_word_embeddings": whole}, "it")


@pytest.mark.heavy
def test_whole_models_tie_their_heads_by_transformers_defaults() -> None:
    """Among types whose default makes a part for texts."""
    tied = set()
    for kind, cls in transformers.CONFIG_MAPPING.items():
        with contextlib.suppress(Exception):  # a type that rejects its own defaults
            config = cls()
            if config.tie_word_embeddings and hasattr(config.text_config, "model_type"):
                tied.add(kind)
    assert tied == {*hub_config.TIED_MODEL_TYPES.split()}


def test_the_dropout_of_a_configuration_is_named() -> None:
    """With what transformers assumes for GPT-2."""
    model = named_models.ConfiguredModel(config_of("llama", attention_dropout=0.1, classifier_dropout=0.5))
    assert model.note == "trained without its dropout (attention_dropout 0.1)"
    config = {name: value for name, value in config_of("gpt2").items() if name != "attn_pdrop"} | {
        "embd_pdrop": 0
    }
    assert named_models.ConfiguredModel(config).note.endswith("(attn_pdrop 0.1, resid_pdrop 0.1)")


def test_a_model_is_sketched_once_for_all_threads_that_draw_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of six threads had started a process for it."""
    sketched: list[str] = []

    def ask(module: str, arguments: Any) -> Any:
        sketched.append(module)
        return forks.ask(module, arguments)

    monkeypatch.setattr(anatomy, "ask", ask)
    monkeypatch.setattr(anatomy, "SKETCHES", Path(os.devnull))
    build(configured("llama", model="drawn by threads"))
    assert sketched == ["harness.plan.sketch"]
