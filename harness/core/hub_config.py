"""Reads a model's config.json in the format of the Hugging Face Hub, refuses a model that cannot be trained here, and
makes a model smaller for probes.

A workload holds the whole configuration as text, so a record can be understood and run again without the file. The
workload's own sizes override the configuration's: it may have fewer layers, a smaller vocabulary or a smaller hidden
size. If the hidden size shrinks by a factor, all other widths shrink by this factor.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from harness.base.foreign_file import parsed_json, read_json
from harness.base.json_object import JsonObject
from harness.core.refusals import RefusedModel

FILE = "config.json"
# For each size of a Workload: the name of its field in a configuration.
FIELD_OF_SIZE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
# For each field that some families of models name differently in their files: the usual name. transformers accepts
# both names.
USUAL_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
LAYERS_AND_HEADS = {"n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
# For a type of model: the names that only this type's files have, as USUAL_NAMES. Other types may have a field of such
# a name for something else.
NAMES_OF_TYPES = {
    "dbrx": {**LAYERS_AND_HEADS, "d_model": "hidden_size", "max_seq_len": "max_position_embeddings"},
    "gpt_neo": {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
    "mpt": {**LAYERS_AND_HEADS, "d_model": "hidden_size"},
    "trocr": {
        "decoder_layers": "num_hidden_layers",
        "decoder_attention_heads": "num_attention_heads",
        "d_model": "hidden_size",
    },
    "xglm": {
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
        "d_model": "hidden_size",
    },
    "xlm": {**LAYERS_AND_HEADS, "emb_dim": "hidden_size"},
    "xlnet": {"d_model": "hidden_size"},
}
# For a size: the types of models whose configurations need not have it. They have no heads, or the size follows from
# other fields.
TYPES_WITHOUT_SIZE = {
    "num_hidden_layers": ("blt", "longcat_flash", "nemotron_h", "reformer"),
    "hidden_size": ("blt",),
    "num_attention_heads": ("blt", "falcon_mamba", "jetmoe", "mamba", "mamba2", "rwkv", "xlstm"),
}
# fields of widths, which shrink with the hidden size
WIDTH_FIELDS = (
    "intermediate_size",
    "head_dim",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
# fields of numbers that may be 0, which then stands for no window and for no experts that all tokens meet
MAY_BE_0 = ("sliding_window", "shared_intermediate_size")
# Names of the number of experts that a token meets: Mixtral's and most families', Kimi Linear's, ERNIE 4.5's, and
# that of Aria and Hunyuan, whose value may be a list with an entry for each layer.
CHOSEN_EXPERTS_FIELDS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
# Other fields of whole numbers that this project reads; each may be missing.
NUMBER_FIELDS = (*WIDTH_FIELDS, "num_key_value_heads", "sliding_window", "max_position_embeddings")
MOST_COUNT = 10**9  # upper bound of every count, as in harness/core/job.py
# fields that are lists with an entry for each layer, of any length
LAYER_LIST_FIELDS = ("layer_types", "no_rope_layers")
# For a type of model: the values that transformers assumes for sizes that a file leaves out. Gemma 3's models of texts
# and images leave out most sizes of their part for texts.
ASSUMED_SIZES = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}
# field with the part for texts, in the configuration of a model of texts and images
TEXT_PART_FIELD = "text_config"
TIES_FIELD = "tie_word_embeddings"
# Types of models of texts and images that tie their head to their embedding unless their file says otherwise.
TIED_MODEL_TYPES = """
aya_vision blip cohere2_vision deepseek_vl deepseek_vl_hybrid diffusion_gemma ernie4_5_vl_moe flava florence2
fun_asr_nano gemma3 gemma3n gemma4 gemma4_unified gemma4_unified_assistant glmasr got_ocr2 granite_docling
granite_speech granite_speech_plus grounding-dino hunyuan_vl hyperclovax_vision_v2 internvl janus kimi_k25 kosmos-2
kosmos-2.5 lfm2_vl lfm3_vl lighton_ocr minicpm_ocr mistral3 mm-grounding-dino moss_transcribe_diarize ovis2
paddleocr_vl paligemma pe_audio_video pp_chart2table qwen3_asr shieldgemma2 t5gemma2_encoder voxtral_realtime
"""
GPT2_DROPOUTS = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
# For a type of model: the dropout fields whose default in transformers is not 0, with this default.
ASSUMED_DROPOUTS = {
    "gpt2": GPT2_DROPOUTS,
    "gpt-sw3": GPT2_DROPOUTS,
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
}
# prefixes of the dropout fields of heads that a causal model does not have
OTHER_HEAD_PREFIXES = ("classifier_", "summary_")
REPEATED_FIELD = "attention_types"  # GPT-Neo's field of patterns of kinds of layers, with numbers of repeats
PER_LAYER_FIELD = "per_layer_config"  # field with settings of single layers, by the layer's number
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LEAST_WIDTH = 8  # smallest width of a narrowed model; widths are multiples of 8, as kernels need
# Fields of a configuration that the text in a Workload leaves out, because training does not depend on them.
UNUSED_FIELDS = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Rotary positions whose angles do not depend on the sample, and those whose angles do.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
ROPE_TYPES_OF_SAMPLES = ("dynamic", "longrope")
# Fields that choose code for attention or experts, and their values. transformers takes any other value as the name of
# a repository whose kernels it loads and runs.
IMPLEMENTATION_FIELDS = tuple(
    name.format(kind=kind)
    for kind in ("attn", "experts")
    for name in ("{kind}_implementation", "_{kind}_implementation", "_{kind}_implementation_internal")
)
ATTENTION_NAMES = (None, "sdpa", "eager")
EXPERTS_NAMES = (None, "grouped_mm")
UNCOUNTED_EXPERTS_NAMES = (
    "eager",
    "batched_mm",
)  # transformers' own ways to compute experts, which no plan counts


def read_config(path: Path) -> tuple[JsonObject, str]:
    """Return a model's configuration and, for a model of texts and images, the type of the whole model, else "".
    `path`: a file, or a folder with a config.json. The configuration of a model of texts and images is that of the
    model's part for texts. Raises RefusedModel if the file cannot be read, or as checked_config() does."""
    file = path / FILE if path.is_dir() else path
    try:
        # files in the Hub's cache are symbolic links, which read_json() refuses
        whole = read_json(file.resolve())
    except (OSError, ValueError) as error:
        raise RefusedModel("unreadable", str(file), why=getattr(error, "strerror", None) or error) from error
    config = checked_config(whole, str(file))
    return config, "" if config["model_type"] == whole["model_type"] else whole["model_type"]


def checked_config(config: Any, source: str) -> JsonObject:
    """Return the configuration of the causal model, as text_part() does. Raises RefusedModel if the harness cannot
    train this model, or if a field has another type than transformers' configurations give it. `source` names the
    configuration's file in the error."""
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise RefusedModel("no-type", source)
    try:
        if config.get("quantization_config"):
            raise RefusedModel("quantized")
        for part in (config, text := text_part(config)):
            _check_implementations(part)
        _check_values(text)
        _check_positions(text)
    except RefusedModel as error:
        raise RefusedModel(error.code, source, **error.values) from None
    return text


def text_part(config: JsonObject) -> JsonObject:
    """Return the part for texts of the configuration or, if there is none, the whole configuration. Fields get their
    usual names (USUAL_NAMES), and sizes that are left out get their values (ASSUMED_SIZES). Raises RefusedModel if it
    is unclear whether the whole model ties its head to its embedding."""
    part = config.get(TEXT_PART_FIELD)
    if isinstance(part, dict) and isinstance(part.get("model_type"), str):
        part = part | {TIES_FIELD: _is_tied(config, part)}
    else:
        part = config
    usual_names = USUAL_NAMES | NAMES_OF_TYPES.get(part["model_type"], {})
    usual = {usual_names.get(name, name): value for name, value in part.items()}
    return ASSUMED_SIZES.get(part["model_type"], {}) | usual


def with_own_names(config: JsonObject) -> JsonObject:
    """Return the configuration with its type's own names of sizes, from which transformers derives other fields."""
    names = {usual: name for name, usual in NAMES_OF_TYPES.get(config["model_type"], {}).items()}
    return {names.get(name, name): value for name, value in config.items()}


def _is_tied(whole: JsonObject, part: JsonObject) -> bool:
    """Return whether a model of texts and images ties its head to its embedding. transformers reads the field of the
    whole model. Raises RefusedModel if the part for texts says otherwise, because its files were then written by a
    program that read the part's field."""
    default = whole["model_type"] in TIED_MODEL_TYPES.split()
    is_tied = default if whole.get(TIES_FIELD) is None else whole[TIES_FIELD]
    is_part_tied = default if part.get(TIES_FIELD) is None else part[TIES_FIELD]
    for value in (is_tied, is_part_tied):
        if not isinstance(value, bool):
            raise RefusedModel("value", field=TIES_FIELD, expected="true or false", value=f"{value!r:.40}")
    if part.get(TIES_FIELD) is not None and is_part_tied != is_tied:
        raise RefusedModel("tie", whole=str(is_tied).lower(), part=str(is_part_tied).lower())
    return is_tied


def _check_implementations(config: JsonObject) -> None:
    """Raise RefusedModel if a field names code of attention or experts that is not transformers' own, or a way to
    compute experts that plans do not count."""
    for field in IMPLEMENTATION_FIELDS:
        names = EXPERTS_NAMES if "experts" in field else ATTENTION_NAMES
        if (value := config.get(field)) not in names:
            code = "experts" if "experts" in field and value in UNCOUNTED_EXPERTS_NAMES else "attention"
            known = " or ".join(filter(None, names))
            raise RefusedModel(code, field=field, known=known, value=f"{value!r:.60}")


def _check_values(config: JsonObject) -> None:
    """Raise RefusedModel if a field that this project reads has a value of another type or range."""
    _check_sizes(config)
    for name in NUMBER_FIELDS:
        value = config.get(name)
        if name in WIDTH_FIELDS and isinstance(value, list):
            raise RefusedModel("list-of-widths", field=name)
        if value is not None and not _is_count(value) and not (value == 0 and name in MAY_BE_0):
            raise RefusedModel(
                "value", field=name, expected=f"a whole number from 1 to {MOST_COUNT}", value=f"{value!r:.40}"
            )
    for name in CHOSEN_EXPERTS_FIELDS:
        if not all(count == 0 or _is_count(count) for count in _numbers(config.get(name))):
            expected = f"a whole number from 0 to {MOST_COUNT}"
            raise RefusedModel("value", field=name, expected=expected, value=f"{config[name]!r:.40}")
    for name in TOKEN_FIELDS:
        ids = config.get(name)
        if not all(_is_id(number) for number in (ids if isinstance(ids, list) else [ids])):
            raise RefusedModel("value", field=name, expected="a token's number", value=f"{ids!r:.40}")
    for name, value in dropouts(config).items():
        if not isinstance(value, int | float):
            raise RefusedModel("value", field=name, expected="a number", value=f"{value!r:.40}")
    heads, key_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if key_heads and heads % key_heads:
        raise RefusedModel("key-heads", heads=heads, key_heads=key_heads)
    if config.get("quantization_config"):
        raise RefusedModel("quantized")


def _check_sizes(config: JsonObject) -> None:
    """Raise RefusedModel unless the configuration has each size of a Workload."""
    kind = config["model_type"]
    for name in FIELD_OF_SIZE.values():
        if _is_count(value := config.get(name)):
            continue
        if value is None and config.get("is_encoder_decoder") is True:
            raise RefusedModel("encoder-decoder")
        if value is None and kind in TYPES_WITHOUT_SIZE.get(name, ()):
            raise RefusedModel("no-size", field=name, kind=kind)
        raise RefusedModel("size", field=name, value="none" if value is None else f"{value!r:.40}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_COUNT


def _numbers(value: Any) -> list[Any]:
    """Return the entries of a field that holds one number or a list of them; none if the field is missing."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_id(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _check_positions(config: JsonObject) -> None:
    """Raise RefusedModel unless all rotary positions have angles that do not depend on the sample."""
    for kind in rope_types(config):
        if kind not in ROPE_TYPES:
            code = "angles-of-sample" if kind in ROPE_TYPES_OF_SAMPLES else "positions"
            raise RefusedModel(code, known=", ".join(ROPE_TYPES), kind=f"{kind:.40}")


@functools.lru_cache(maxsize=32)
def parsed(text: str) -> JsonObject:
    """Return the configuration that a Workload holds as text. Raises ValueError as checked_config() does."""
    return checked_config(parsed_json(text), "the workload's config")


def text_of(config: JsonObject) -> str:
    """Return the configuration as the text that a Workload holds, without the fields of UNUSED_FIELDS."""
    used_fields = {name: value for name, value in config.items() if name not in UNUSED_FIELDS}
    return json.dumps(used_fields, sort_keys=True)


def sizes_of(config: JsonObject) -> JsonObject:
    """Return the configuration's sizes as fields of a Workload."""
    return {field: config[name] for field, name in FIELD_OF_SIZE.items()}


@functools.lru_cache(maxsize=32)
def inner_size(text: str, hidden_size: int) -> int:
    """Return the width of an MLP's inner tensors in the model narrowed to this hidden size; 0 if the configuration does
    not tell it. In a mixture of experts it is the width of all experts that a token meets, in the layer where these are
    most."""
    config = narrowed(text, json.loads(text)["num_hidden_layers"], hidden_size, 1)
    inner = config.get("intermediate_size") or 0
    of_expert = config.get("moe_intermediate_size") or inner
    chosen = [count for name in CHOSEN_EXPERTS_FIELDS for count in _numbers(config.get(name))]
    return int(max(inner, of_expert * max(chosen, default=0)))


def is_beyond_window(fields: JsonObject, seq_len: int) -> bool:
    """True if the attention of layers with a sliding window does not see all of a sample of `seq_len` tokens, or just
    sees it: transformers then gives these layers a mask. `fields`: of a configuration, with transformers' values for
    those that are left out."""
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    return window is not None and seq_len >= window


def with_window(text: str, tokens: int) -> str:
    """Return the text of the configuration with a sliding window of so many tokens."""
    return json.dumps(json.loads(text) | {"sliding_window": tokens}, sort_keys=True)


def dropouts(config: JsonObject) -> dict[str, float]:
    """Return the configuration's dropout probabilities that are not 0, by field, with those that transformers assumes
    for fields that are left out (ASSUMED_DROPOUTS)."""
    assumed = ASSUMED_DROPOUTS.get(config["model_type"], {})
    return {name: value for name, value in (assumed | config).items() if _is_dropout(name) and value}


def _is_dropout(field: str) -> bool:
    if field.startswith(OTHER_HEAD_PREFIXES):
        return False
    return field.endswith(("dropout", "_pdrop", "_dropout_prob", "layerdrop"))


def narrowed(text: str, num_layers: int, hidden_size: int, vocab_size: int) -> JsonObject:
    """Return the configuration changed to these sizes, without dropout. All widths shrink by the same factor as the
    hidden size; the number of heads stays. Lists and tables with an entry for each layer get the number of layers. A
    special token beyond a smaller vocabulary becomes its last one, so a model that has a padding token keeps one."""
    config = json.loads(text)
    shrink_factor = hidden_size / config["hidden_size"]
    for name in WIDTH_FIELDS:
        if isinstance(config.get(name), int) and config[name] and shrink_factor != 1:
            config[name] = max(LEAST_WIDTH, int(config[name] * shrink_factor) // 8 * 8)
    whole_depth = config["num_hidden_layers"]
    layer_lists = [name for name, value in config.items() if _is_layer_list(name, value, whole_depth)]
    for name in layer_lists:
        entries = config[name]
        # more layers repeat the list
        config[name] = [entries[index % len(entries)] for index in range(num_layers)]
    if kinds := _repeated_kinds(config.get(REPEATED_FIELD), num_layers):
        config[REPEATED_FIELD] = [[[kinds[index % len(kinds)] for index in range(num_layers)], 1]]
    if isinstance(tables := config.get(PER_LAYER_FIELD), dict):
        kept_tables = {index: table for index, table in tables.items() if _is_below(index, num_layers)}
        config[PER_LAYER_FIELD] = kept_tables
    if vocab_size < config["vocab_size"]:
        for name in TOKEN_FIELDS:
            config[name] = _within_vocab(config.get(name), vocab_size)
    config |= {"num_hidden_layers": num_layers, "hidden_size": hidden_size, "vocab_size": vocab_size}
    return config | dict.fromkeys(dropouts(config), 0.0)


def _is_layer_list(field: str, value: Any, num_layers: int) -> bool:
    """True if the field holds a list with an entry for each layer."""
    if not isinstance(value, list) or not value or field in TOKEN_FIELDS:
        return False
    return field in LAYER_LIST_FIELDS or len(value) == num_layers


def _repeated_kinds(value: Any, num_layers: int) -> list[Any]:
    """Return the entries of at least the first layers in a field of patterns, each with the number of its repeats, such
    as [[["global", "local"], 12]]; empty if the field is not of this form."""
    try:
        return [kind for pattern, repeats in value for kind in pattern * min(repeats, num_layers)]
    except (TypeError, ValueError):
        return []


def _is_below(index: str, num_layers: int) -> bool:
    return not index.isdecimal() or int(index) < num_layers


def _within_vocab(ids: Any, vocab_size: int) -> Any:
    """Return a special token, or a list of such tokens, within a vocabulary of this size."""
    if isinstance(ids, list):
        return [_within_vocab(number, vocab_size) for number in ids]
    return ids if ids is None else min(ids, vocab_size - 1)


def rope_types(config: JsonObject) -> list[str]:
    """Return the types of rotary positions, one for each kind of layer."""
    tables = [table if isinstance(table, dict) else {"rope_type": table} for table in _rope_tables(config)]
    return [str(table.get("rope_type", table.get("type", "default"))) for table in tables]


def _rope_tables(config: JsonObject) -> list[Any]:
    """Return the settings of rotary positions, one table for each kind of layer. transformers reads the older field
    rope_scaling before rope_parameters, and takes tables within a table for those of kinds of layers."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    nested = [kind for kind in table.values() if isinstance(kind, dict)] if isinstance(table, dict) else []
    is_flat = not nested or "rope_type" in table or "type" in table
    return nested + [table] * is_flat


def rotary_share(config: JsonObject) -> float:
    """Return the share of a head's columns that rotary positions turn, 1 if the configuration does not tell it."""
    tables = [config, *(table for table in _rope_tables(config) if isinstance(table, dict))]
    shares = [table.get("partial_rotary_factor") for table in tables]
    numbers = [share for share in shares if isinstance(share, int | float)]
    return numbers[-1] if numbers else 1.0
