"""Makes the table of all types of causal models that transformers has: trained here, or refused and why.

    .venv/bin/python -m bench.model_types > docs/model-types.md

Each type is a tiny model: transformers' default configuration of the type with the sizes SIZES, and with the fields
CHANGES where transformers makes no such model of its defaults. A model that is accepted trains STEPS steps in fp32 by
`resident`, `l2l` and `stronghold`, in this process. Four minutes of an idle core.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from harness.base.checkout import ROOT
from harness.core import anatomy, hub_config
from harness.core.data import token_batches
from harness.core.job import Room, Workload
from harness.core.method import create
from harness.core.refusals import RefusedModel
from harness.plan import sketch

PAGE = ROOT / "docs" / "model-types.md"
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS, HEADS, KEY_HEADS, HIDDEN, INNER, WORDS, POSITIONS = 2, 4, 2, 32, 64, 101, 64
SIZES = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_size": HIDDEN,
    "max_position_embeddings": POSITIONS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": WORDS,
    "head_dim": HIDDEN // HEADS,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), INNER),
}
ALSO_SIZED = ("head_dim",)  # sizes that transformers demands of some types, though its default is none
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}  # 8 x 8 columns are twice the hidden size
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# For each type whose defaults, at these sizes, make no model: the fields that do.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA_HEADS,
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": KEY_HEADS, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": INNER},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": INNER},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA_HEADS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": LAYERS},
    "nemotron": {"num_key_value_heads": KEY_HEADS},
    "nemotron_h": {"num_hidden_layers": LAYERS, "layers_block_type": ["linear_attention", "full_attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "xlnet": {"d_head": HIDDEN // HEADS},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 8},
}
STEPS, TOKENS = 3, 16
NO_DEFAULTS = "transformers makes no configuration of its own defaults"
STREAMED: dict[str, dict[str, Any]] = {"l2l": {}, "stronghold": {"placement": "R1W1", "window_size": 1}}
HEAD = """# Types of models, of transformers {version}

Every type of causal model that transformers makes, tiny: {layers} layers of {hidden}, the type's other fields as
transformers assumes them. *Trained*: {steps} steps in fp32 by `l2l` and `stronghold` have the bits of `resident`, in
losses, gradient norms, weights and moments. *Refused*: by this reason; [models](models.md) tells what to do. A model of
a refused type may be accepted with other fields, and one of a trained type refused.

This page is made by `.venv/bin/python -m bench.model_types > docs/model-types.md`.

{counts}

| type | result | why |
|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """A line of the table: a type, what becomes of its tiny model, and why it is refused."""

    kind: str
    result: str
    why: str = ""

    def __str__(self) -> str:
        return f"| `{self.kind}` | {self.result} | {self.why} |"


@functools.cache
def tiny(kind: str) -> str | None:
    """Return config.json of the smallest model of this type whose sizes are these; other fields keep the values of
    transformers. None if transformers rejects its own defaults."""
    try:
        config = json.loads(transformers.CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    except StrictDataclassClassValidationError:
        return None
    part = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    names = hub_config.USUAL_NAMES | hub_config.NAMES_OF_TYPES.get(kind, {})
    sizes = SIZES | {name: SIZES[usual] for name, usual in names.items()}
    if "qk_rope_head_dim" in part:  # latent attention: widths of heads of its own, and a key for each head
        del sizes["head_dim"]
        sizes["num_key_value_heads"] = HEADS
    num_layers = {names.get(name, name): value for name, value in part.items()}.get("num_hidden_layers")
    for name, value in [*part.items()]:
        if value is None and (name not in ALSO_SIZED or name not in sizes):
            del part[name]
        elif name in sizes and not isinstance(value, list):
            part[name] = sizes[name]
        elif name.endswith("token_id"):
            part[name] = _within(value)
        elif isinstance(value, list) and len(value) == num_layers:
            part[name] = value[:LAYERS]
        elif name == "per_layer_config":
            part[name] = {layer: changes for layer, changes in value.items() if int(layer) < LAYERS}
    return json.dumps(config | CHANGES.get(kind, {}))


def _within(ids: Any) -> Any:
    return [min(number, WORDS - 1) for number in ids] if isinstance(ids, list) else min(ids, WORDS - 1)


def short(sentence: str) -> str:
    """Return a sentence of REASONS without its way out."""
    return sentence.rpartition("; ")[0] or sentence


def row(kind: str) -> Row:
    """Return the line of a type, whose tiny model is taken apart and, if it is accepted, trained."""
    if (config := tiny(kind)) is None:
        return Row(kind, "refused", NO_DEFAULTS)
    try:
        text = hub_config.text_of(hub_config.checked_config(json.loads(config), ""))
        sizes = {**hub_config.sizes_of(json.loads(text)), "seq_len": TOKENS, "batch_size": 2}
        workload = Workload(**sizes, config=text, model=kind, learning_rate=1.0)
        _ = workload.anatomy
    except RefusedModel as error:
        return Row(kind, "refused", short(error.sentence))
    others = [name for name, options in STREAMED.items() if not _is_same(name, options, workload)]
    return Row(kind, "differs", ", ".join(others)) if others else Row(kind, "trained")


def _is_same(method: str, options: dict[str, Any], workload: Workload) -> bool:
    """True if the method trains with the bits of `resident`."""
    pairs = zip(_numbers(method, workload, **options), _numbers("resident", workload), strict=True)
    return all(torch.equal(number, expected) for number, expected in pairs)


def _numbers(name: str, workload: Workload, **options: Any) -> list[torch.Tensor]:
    """Train the model, and return its losses and gradient norms, and then weight and both moments of each tensor, in
    the order of the tensors' names."""
    torch.manual_seed(workload.seed)
    method = create(name, options)
    steps = method.settled(method.plan(workload, Room())).train(
        workload, token_batches(workload, STEPS), "cpu"
    )
    numbers = []
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            states = sorted(end.value.tensors, key=lambda state: state.name)
            tensors = [
                tensor for state in states for tensor in (state.weight, state.exp_avg, state.exp_avg_sq)
            ]
            return [*numbers, *tensors]
        numbers += [step.loss.clone(), torch.as_tensor(step.grad_norm).clone()]


def page(rows: Iterable[Row]) -> str:
    """Return the page with these lines."""
    lines = list(rows)
    results = [line.result for line in lines]
    counts = ", ".join(f"{results.count(result)} {result}" for result in sorted({*results}, reverse=True))
    head = HEAD.format(
        version=transformers.__version__, layers=LAYERS, hidden=HIDDEN, steps=STEPS, counts=f"{counts}."
    )
    return head + "".join(f"{line}\n" for line in lines)


@contextlib.contextmanager
def sketched_here() -> Iterator[None]:
    """Within this context models are sketched in this process, and each anew, because a kept sketch may be of older
    code."""
    asked, folder = anatomy.ask, anatomy.SKETCHES
    with tempfile.TemporaryDirectory() as sketches:
        anatomy.ask = lambda module, question: json.loads(json.dumps(sketch.answer(**question)))
        anatomy.SKETCHES = Path(sketches)
        anatomy._sketched_anatomy.cache_clear()
        try:
            yield
        finally:
            anatomy.ask, anatomy.SKETCHES = asked, folder
            anatomy._sketched_anatomy.cache_clear()


def main() -> None:
    torch.set_num_threads(1)
    with sketched_here():
        rows = list(_rows())
    print(page(rows), end="")


def _rows() -> Iterator[Row]:
    """Yield the lines of all types, and say on stderr how far they are."""
    for number, kind in enumerate(TYPES, start=1):
        line = row(kind)
        print(f"{number} of {len(TYPES)}: {line}", file=sys.stderr)
        yield line


if __name__ == "__main__":
    main()
