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

FILE = "config.json"
# For each size of a Workload: the name of its field in a configuration.
SIZES = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads",
         "vocab_size": "vocab_size"}  # fmt: skip
# For each field that some families of models name differently in their files: the usual name. transformers accepts
# both names.
USUAL = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
         "n_positions": "max_position_embeddings"}  # fmt: skip
WIDTHS = ("intermediate_size", "head_dim", "n_inner")  # fields of widths, which shrink with the hidden size
# Fields that are counts, or null: the harness computes with them before transformers sees them.
COUNTS = (*WIDTHS, "num_key_value_heads", "max_position_embeddings", "sliding_window")
MOST = 10**9  # upper bound of every count, as in harness/core/job.py
OF_LAYERS = ("layer_types", "no_rope_layers")  # fields that are lists with an entry for each layer
# For a type of model: the values that transformers assumes for sizes that a file leaves out. Gemma 3's models of texts
# and images leave out most sizes of their part for texts.
UNSAID = {"gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                          "max_position_embeddings": 131072}}  # fmt: skip
TEXT_PART = "text_config"  # field with the part for texts, in the configuration of a model of texts and images
DROPOUTS = {"gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop")}  # dropout fields whose default is not 0, by model type
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LEAST_WIDTH = 8  # smallest width of a narrowed model; widths are multiples of 8, as kernels need
# Fields of a configuration that the text in a Workload leaves out, because training does not depend on them.
LEFT_OUT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # rotary positions whose angles do not depend on the sample


def read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the configuration in a file, or in a folder's config.json, and a text. For a model of texts and images,
    the configuration is that of the part for texts, and the text is the type of the whole model; for any other model,
    the text is empty. Raises ValueError if the file cannot be read, or as checked_config() does."""
    file = path / FILE if path.is_dir() else path
    try:
        whole = read_json(file.resolve())  # files in the Hub's cache are symbolic links, which read_json() refuses
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot read {file}: {told}; expected a model's {FILE}, as Hugging Face has it") from error
    config = checked_config(whole, str(file))
    return config, "" if config["model_type"] == whole["model_type"] else whole["model_type"]


def checked_config(config: Any, source: str) -> dict[str, Any]:
    """Return the configuration of the causal model, as text_part() does. Raises ValueError, which tells the reason, if
    the harness cannot train this model. `source` names the configuration's file in the error."""
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{source}: expected a model's {FILE} with a model_type, got none")
    is_quantized, config = bool(config.get("quantization_config")), text_part(config)
    for name in SIZES.values():
        if not isinstance(config.get(name), int):
            told = f"expected {name} as a number, got {config.get(name)!r:.40}"
            raise ValueError(f"{source}: {told}; models of type {config['model_type']} cannot be trained here")
    _check_counts(config, source)
    if is_quantized or config.get("quantization_config"):
        raise ValueError(f"{source}: expected weights that can be trained, got quantized ones: try the original model")
    if others := [kind for kind in _rope_types(config) if kind not in ROPE_TYPES]:
        known, got = ", ".join(ROPE_TYPES), others[0]
        told = f"expected rotary positions of type {known}, got {got}, whose angles depend on the sample"
        raise ValueError(f"{source}: {told}")
    return config


def _check_counts(config: dict[str, Any], source: str) -> None:
    """Raise ValueError, which names the field, if a count is no count, or ids of tokens are no ids."""
    for name in (*SIZES.values(), *COUNTS):
        value = config.get(name)
        if value is not None and (type(value) is not int or not 0 <= value <= MOST):
            raise ValueError(f"{source}: expected {name} as one number from 0 to {MOST}, got {value!r:.40}")
    if config["hidden_size"] < 1 or config["num_attention_heads"] < 1:
        sizes = f"{config['hidden_size']} and {config['num_attention_heads']}"
        raise ValueError(f"{source}: expected hidden_size and num_attention_heads of at least 1, got {sizes}")
    for name in TOKENS:
        ids = config.get(name)
        if ids is not None and not all(type(number) is int for number in (ids if isinstance(ids, list) else [ids])):
            raise ValueError(f"{source}: expected {name} as a number or numbers, got {ids!r:.40}")


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part for texts of the configuration or, if there is none, the whole configuration. Fields get their
    usual names (USUAL), and sizes that are left out get their values (UNSAID)."""
    part = config.get(TEXT_PART)
    config = part if isinstance(part, dict) and isinstance(part.get("model_type"), str) else config
    usual = {USUAL.get(name, name): value for name, value in config.items()}
    return UNSAID.get(config["model_type"], {}) | usual


@functools.lru_cache(maxsize=32)
def parsed(text: str) -> dict[str, Any]:
    """Return the configuration that a Workload holds as text. Raises ValueError as checked_config() does."""
    return checked_config(parsed_json(text), "the workload's config")


def text_of(config: dict[str, Any]) -> str:
    """Return the configuration as the text that a Workload holds, without the fields of LEFT_OUT."""
    return json.dumps({name: value for name, value in config.items() if name not in LEFT_OUT}, sort_keys=True)


def sizes_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration's sizes as fields of a Workload."""
    return {field: config[name] for field, name in SIZES.items()}


@functools.lru_cache(maxsize=32)
def inner_size(text: str, hidden_size: int) -> int:
    """Return the width of an MLP's inner tensors in the model narrowed to this hidden size; 0 if the configuration does
    not tell it."""
    return int(narrowed(text, 1, hidden_size, 1).get("intermediate_size") or 0)


def check_samples(config: dict[str, Any], seq_len: int) -> None:
    """Raise ValueError if a sample of `seq_len` tokens is longer than the model's sliding window or than the number of
    its positions."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and window < seq_len:
        raise ValueError(f"--seq: expected at most {window}, the tokens of the model's sliding window, got {seq_len};"
                         f" try --seq {window}")  # fmt: skip
    most = config.get("max_position_embeddings")
    if most is not None and most < seq_len:
        raise ValueError(f"--seq: expected at most {most}, the number of the model's positions, got {seq_len}; try"
                         f" --seq {most}")  # fmt: skip


def narrowed(text: str, num_layers: int, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """Return the configuration changed to these sizes, without dropout. All widths shrink by the same factor as the
    hidden size; the number of heads stays."""
    config = json.loads(text)
    share = hidden_size / config["hidden_size"]
    for name in WIDTHS:
        if isinstance(config.get(name), int):
            config[name] = config[name] if share == 1 else max(LEAST_WIDTH, int(config[name] * share) // 8 * 8)
    config |= {"num_hidden_layers": num_layers, "hidden_size": hidden_size, "vocab_size": vocab_size}
    for name in OF_LAYERS:
        if (kinds := config.get(name)) and isinstance(kinds, list):
            config[name] = [kinds[index % len(kinds)] for index in range(num_layers)]  # more layers repeat the list
    for name in TOKENS:
        ids = config.get(name) or 0
        if max(ids if isinstance(ids, list) else [ids], default=0) >= vocab_size:
            config[name] = None
    dropouts = [name for name in config if name.endswith(("dropout", "_pdrop"))]
    return config | dict.fromkeys([*dropouts, *DROPOUTS.get(config["model_type"], ())], 0.0)


def _rope_types(config: dict[str, Any]) -> list[str]:
    """Return the types of rotary positions, one for each kind of layer. Newer files hold these types in
    rope_parameters, older files in rope_scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        return [str(scaling)]
    kinds = [each for each in scaling.values() if isinstance(each, dict)] or [scaling]
    return [str(each.get("rope_type", each.get("type", "default"))) for each in kinds]
