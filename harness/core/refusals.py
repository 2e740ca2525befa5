"""Why a model by its config.json cannot be trained here: each reason has a code, a sentence and a way out.

Every refusal of a model is a RefusedModel with a code of REASONS, also where transformers or torch raised an error: an
error of theirs becomes a reason of this table, so a reader is told what the model has, not where a library failed.
Unavailable is raised for a method or a model that the machine cannot run, such as one that needs a missing package.
"""

from __future__ import annotations

from typing import Any

OWN_SCRIPT = "try the trainers for a model of your own (docs/own-model.md)"
ANOTHER = "try another model, such as one of models.yaml"

# For each code: the sentence. Fields in braces are values of the refused model.
REASONS = {
    # The configuration itself.
    "unreadable": "cannot read it: {why}; expected a model's config.json, as Hugging Face has it",
    "no-type": "expected a model's config.json with a model_type, got none; try the file as Hugging Face has it",
    "size": (
        "expected {field} as a positive whole number, got {value}; add it as the model's config.json on the Hub has it"
    ),
    "no-size": "expected {field}, which plans and probes count with, got a type that has none: {kind}; "
    + OWN_SCRIPT,
    "value": "expected {field} as {expected}, got {value}; correct it in config.json",
    "list-of-widths": "expected one {field} for all layers, got a list with one for each layer; "
    + OWN_SCRIPT,
    "quantized": "expected weights that can be trained, got quantized ones: try the original model",
    "angles-of-sample": (
        "expected rotary positions of type {known}, got {kind}, whose angles depend on the sample; try a model with"
        " other positions, or yarn as its publisher sets it"
    ),
    "positions": "expected rotary positions of type {known}, got {kind}; correct rope_type in config.json",
    "attention": "expected {field} to be {known}, got {value}, which would load other code; remove it from config.json",
    "experts": (
        "expected {field} to be {known}, got {value}: plans count the memory of grouped products alone; remove it from"
        " config.json"
    ),
    "lora-targets": "--lora-targets: expected linear modules of its layers ({known}), got {target}",
    "tie": (
        "tie_word_embeddings is {whole} in the model's own fields and {part} in its text_config, and transformers reads"
        " one or the other; write the same value into both"
    ),
    "key-heads": (
        "expected num_key_value_heads as a divisor of the {heads} heads, got {key_heads}; correct config.json"
    ),
    "heads": (
        "expected hidden_size as a multiple of num_attention_heads, which transformers {version} demands of this type,"
        " got {hidden_size} of {heads} heads; correct config.json"
    ),
    "dropout": "transformers assumes a dropout of {part}, which config.json leaves out; write this field into it",
    # transformers makes no model of it.
    "unknown-type": (
        "transformers {version} does not make it: it knows no causal model of type {kind}; correct model_type, or "
        + ANOTHER
    ),
    "rejected-field": "transformers {version} does not make it: it rejects the value of {field}; correct config.json",
    "rejected": (
        "transformers {version} does not make it: its check {check} rejects the configuration; correct config.json"
        " until AutoConfig of transformers takes it"
    ),
    "unmade": (
        "transformers {version} does not make it, but raises {error} in {place}; correct config.json until"
        " AutoModelForCausalLM.from_config makes a model of it"
    ),
    "fails": (
        "transformers {version} makes it, but its forward pass raises {error} in {place}; correct config.json until the"
        " model of AutoModelForCausalLM.from_config runs"
    ),
    # Another kind of model.
    "mixture": (
        "mixture of experts: {part} computes each expert by itself, for as many tokens as chose it, so no plan can"
        " count its memory before ({error} in {place}); try another mixture, such as one of models.yaml"
    ),
    "balance-loss": (
        "its loss has a part for experts of equal use (output_router_logits), and losses here are of tokens alone;"
        " write output_router_logits: false into config.json"
    ),
    "random": (
        "it draws random numbers in its forward pass, and no two methods draw alike; write {fields} into config.json"
    ),
    "encoder-decoder": f"it is the decoder of an encoder-decoder model, or a bidirectional encoder; {ANOTHER}",
    "no-layers": "expected one list of its {num_layers} layers in {base}, got {lists}; " + OWN_SCRIPT,
    "no-norm": "expected one of {known} after its layers, got a model of {others}; " + OWN_SCRIPT,
    "before-layers": "expected only tables between its token ids and its layers, got {part}; " + OWN_SCRIPT,
    "buffers": "expected buffers that transformers computes without weights, got those of {part}; "
    + OWN_SCRIPT,
    "calls": "expected each of its {num_layers} layers to be called once, got {calls} calls; " + OWN_SCRIPT,
    "outputs": (
        "expected layers that hand one tensor to the next layer, got a loop over layers that needs more of them"
        " ({error} in {place}); " + OWN_SCRIPT
    ),
    "shared": "expected layers with tensors of their own, got {part}, which several layers share; "
    + OWN_SCRIPT,
    "ends": (
        "expected an embedding and a head of {vocab_size} x {hidden_size} and tables of positions, got other matrices; "
        + OWN_SCRIPT
    ),
    "head-bias": (
        "expected a head without bias, got one with {part}: the loss is computed from the matrix alone; "
        + OWN_SCRIPT
    ),
    "scaled-logits": "expected logits that {known} alone may change, got {field} {value}; " + OWN_SCRIPT,
    "no-checkpoints": "expected layers that transformers recomputes, got a model without checkpoints; "
    + OWN_SCRIPT,
    "other-logits": (
        "its embedding, layers, norm and head, run one after the other, give other logits than the whole model; "
        + OWN_SCRIPT
    ),
    "no-gradient": "{part} gets no gradient; " + OWN_SCRIPT,
    "other-gradient": "its parts give another gradient of {part} than the whole; " + OWN_SCRIPT,
    "narrow": (
        "the comparison of its parts with the whole needs a narrow model, and transformers {version} raises {error} in"
        " {place} for one of {hidden_size} columns; " + OWN_SCRIPT
    ),
    "memory": "reading its parts needs more than {gib} GiB of memory; correct the sizes in config.json",
    "apart": "its layers do not run one by one: {place} raises {error}; " + OWN_SCRIPT,
}


class RefusedModel(ValueError):
    """Raised if the harness cannot train a model. `code` is a key of REASONS, `values` fill its sentence, and `source`
    names the model or its file before the sentence."""

    def __init__(self, code: str, source: str = "", **values: Any) -> None:
        self.code, self.values = code, values
        super().__init__(f"{source}: {self.sentence}" if source else self.sentence)

    @property
    def sentence(self) -> str:
        return REASONS[self.code].format(**self.values)


class Unavailable(Exception):
    """Raised if the method or the model cannot run on this machine. The text names the reason and, if a command helps,
    this command."""
