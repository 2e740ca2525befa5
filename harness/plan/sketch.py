"""Finds, from a model's configuration, the sizes that harness/core/anatomy.py holds, without allocating the model.

At first a narrow model of the same kind must show that its parts compute the same as the whole model. The parts are the
embedding, the layers and the head. Run one after the other, they must give the logits of transformers' own model to the
last bit, and that model's gradients within GRADIENT_TOLERANCE. Then tensors, operations and memory (layer_memory.py)
are read from a model of the full size whose tensors have no memory.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness.base.checkout import ROOT
from harness.base.child_process import limit_memory
from harness.core import adapters, hub_config
from harness.core.job import Workload
from harness.core.refusals import RefusedModel
from harness.models import adapted, grouped_experts, model
from harness.models.hub_model import (
    HubEmbedding,
    HubEnds,
    HubHead,
    bend_of,
    is_out_of_memory,
    library,
    list_name,
    norm_name,
    parts_of,
    place_of,
    transformers_model,
)
from harness.plan.layer_memory import (
    COUNTED_TOKENS,
    TOKENS,
    activation_memory,
    are_masked,
    gpt_adapter_memory,
    is_beyond,
    keeps_pairs,
    model_memory,
)

FEWEST_LAYERS = 8  # a model is compared with at least so many layers, or with all that it has
HEAD_SIZE, WORDS, SAMPLES = 8, 64, 2  # sizes of the narrow model, beside TOKENS
MOST_HEADS_SIZES = 17  # widths of heads that are tried for the narrow model, up to 16 * HEAD_SIZE columns
MOST_COMPARED = 2**22  # most parameters of a model that is compared at its own width
# codes of RefusedModel for which the narrow model's sizes alone may be the reason
OF_SIZES = ("heads", "rejected-field", "rejected", "unmade", "fails")
# pattern of the class names of transformers' modules that send each token through a few of several experts
MIXTURE = re.compile(r"(Experts|Router|MoE|Moe|MoeBlock|MoELayer)$")
NOISE_SUFFIX = (
    "_jitter_noise"  # ends names of fields with the size of the noise that a router adds in training
)
# By the name of a buffer that older versions of transformers wrote into files: the pattern of its full names there.
OLDER_BUFFERS = {"inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
GRADIENT_TOLERANCE = 1e-5  # largest relative difference between the parts' gradients and the whole model's
# A vector whose elements are at most this many standard deviations of matrices is drawn as matrices are.
MOST_DEVIATIONS = 6.0
DECAYS = "A_log"  # ends names of tensors with the logarithms of a recurrence's decays, vectors or matrices
# Most bytes of private memory of a sketch's process, because a config.json may ask for any size. The sketch of Qwen3-8B
# took 0.5 GiB.
MOST_BYTES = 4 * 2**30


def sketch(workload: Workload) -> dict[str, Any]:
    """Return the fields of an Anatomy. Raises RefusedModel if the harness cannot train this model in parts."""
    causal = without_values(workload)
    check_kind(causal)
    check_shared(causal)
    whole = model.whole(workload)
    check_targets(workload, whole.layers)
    order = kinds_of(workload, whole.layers)
    first_layers = {kind: order.index(kind) for kind in sorted(set(order))}
    shown = workload.at_depth(num_shown(workload, first_layers.values()))
    base = replace(shown, lora=None, lora_targets=None)  # adapters change no part of the base
    starts = proved(base, sum(weight.numel() for weight in causal.parameters()))
    embedding, head = shapes_of(HubEmbedding(shown)), shapes_of(HubHead(shown))
    size = [workload.vocab_size, workload.hidden_size]
    table, *positions = embedding.values()
    matrices = [table, *(shape for shape in head.values() if len(shape) > 1)]
    if matrices != [size, size] or any(shape[1:] != size[1:] for shape in positions):
        raise RefusedModel("ends", vocab_size=size[0], hidden_size=size[1])
    return {
        "embedding": embedding,
        "kinds": [kind_fields(shown, index) for index in first_layers.values()],
        "order": order if len(first_layers) > 1 else [],
        "head": head,
        "layer_prefix": prefix_of(whole),
        **in_both_dtypes(shown, model_memory),
        "slopes": keeps_slopes(shown),
        "starts": starts,
        "ignored": ignored_names(causal),
        "fields": fields_of(causal.config),
    }


def check_targets(workload: Workload, layers: nn.ModuleList) -> None:
    """Raise RefusedModel if adapters have a target that is a linear module of no layer."""
    if (terms := workload.adapters) is None:
        return
    linears = {name for layer in layers for name in adapted.linear_sizes(layer)}
    names = sorted(name.removesuffix(".base_layer") for name in linears if ".lora_" not in name)
    if unknown := adapters.unknown_targets(names, terms.targets):
        raise RefusedModel("lora-targets", target=unknown[0], known=", ".join(names) or "none")


def kinds_of(workload: Workload, layers: nn.ModuleList) -> list[int]:
    """Return the kind of each layer as a number. Layers are of one kind if they have the same modules and tensors and,
    where samples are beyond a sliding window, both have a mask or none."""
    kinds: dict[Any, int] = {}
    masked = are_masked(workload) if is_beyond(workload) else [False for _ in layers]
    order = []
    for layer, is_masked in zip(layers, masked, strict=True):
        modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
        tensors = tuple((name, tuple(shape)) for name, shape in shapes_of(layer).items())
        order.append(kinds.setdefault((modules, tensors, is_masked), len(kinds)))
    return order


def kind_fields(workload: Workload, index: int) -> dict[str, Any]:
    """Return the fields of the LayerKind of layer `index`."""
    token_flops, pair_flops, active_params = layer_work(workload, index)
    shapes = shapes_of(model.new_layer(workload, index))
    return {
        "tensors": {name: shape for name, shape in shapes.items() if not adapters.is_adapter(name)},
        "adapters": {name: shape for name, shape in shapes.items() if adapters.is_adapter(name)},
        "token_flops": token_flops,
        "pair_flops": pair_flops,
        "active_params": active_params,
        **in_both_dtypes(workload, lambda load: activation_memory(load, index)),
    }


def in_both_dtypes(
    workload: Workload, fields: Callable[[Workload], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the fields, each as a table of its values in fp32 and in half precision."""
    fp32, half = fields(workload), fields(replace(workload, dtype="bf16"))
    return {name: {"fp32": fp32[name], "half": half[name]} for name in fp32}


def num_shown(workload: Workload, layers: Iterable[int]) -> int:
    """Return the number of layers of a model that is compared: of those of the workload's model the fewest, but at
    least FEWEST_LAYERS, that have all `layers`."""
    return max(min(workload.num_layers, FEWEST_LAYERS), 1 + max(layers))


def shapes_of(module: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of the module's parameters, by name."""
    return {name: list(parameter.shape) for name, parameter in module.named_parameters()}


def without_values(workload: Workload) -> Any:
    """Return transformers' model of the workload, whose tensors have no memory."""
    sizes = (workload.num_layers, workload.hidden_size, workload.vocab_size)
    config = hub_config.narrowed(str(workload.config), *sizes)
    with torch.device("meta"):
        return transformers_model(config, torch.float32)


def check_kind(causal: Any) -> None:
    """Raise RefusedModel if the model has modules or settings that the harness cannot take apart. The reasons are in
    the order in which they tell most."""
    base, config = causal.base_model, causal.config
    is_encoder = "encoder" in base._modules and not getattr(config, "is_decoder", False)
    if getattr(config, "is_encoder_decoder", False) or is_encoder:
        raise RefusedModel("encoder-decoder")
    held = {list_name(base), norm_name(base)}
    if not causal.supports_gradient_checkpointing:
        raise RefusedModel("no-checkpoints")
    if getattr(config, "output_router_logits", False):
        raise RefusedModel("balance-loss")
    for name, child in base.named_children():
        is_table = child is base.get_input_embeddings() or type(child).forward is nn.Embedding.forward
        if name not in held and not is_table and any(True for _ in child.parameters()):
            raise RefusedModel("before-layers", part=f"{name} ({type(child).__name__})")
    if getattr(head := causal.get_output_embeddings(), "bias", None) is not None:
        raise RefusedModel("head-bias", part=f"{head.bias.numel()} elements")
    if (scale := getattr(config, "logit_scale", None)) not in (None, 1):
        known = "final_logit_softcapping or logits_scaling"
        raise RefusedModel("scaled-logits", known=known, field="logit_scale", value=scale)
    if assumed := hub_config.dropouts(config.to_dict()):
        field, value = next(iter(assumed.items()))
        raise RefusedModel("dropout", part=f"{field} {value}")


def check_shared(causal: Any) -> None:
    """Raise RefusedModel if several layers share a tensor, because a layer travels with its own tensors alone."""
    unshared = {name for name, _ in causal.named_parameters()}
    names = {name for name, _ in causal.named_parameters(remove_duplicate=False)} - unshared
    if shared := [name for name in names if f".{list_name(causal.base_model)}." in name]:
        raise RefusedModel("shared", part=min(shared))


def ignored_names(causal: Any) -> list[str]:
    """Return patterns of the names of tensors that transformers ignores in files of this model: buffers that older
    versions wrote, and tensors of other heads."""
    buffers = {name.rpartition(".")[2] for name, _ in causal.named_buffers()}
    older = [pattern for name, pattern in OLDER_BUFFERS.items() if name in buffers]
    return sorted({*(causal._keys_to_ignore_on_load_unexpected or ()), *older})


def fields_of(config: Any) -> dict[str, Any]:
    """Return the fields that configurations of this type have, with transformers' values for those that are left out.
    Fields that all configurations have are left out: they do not change what a model computes."""
    common = {field.name for field in dataclasses.fields(library().PreTrainedConfig)}
    names = [field.name for field in dataclasses.fields(config) if field.name not in common]
    fields = {"model_type": config.model_type, **{name: getattr(config, name) for name in names}}
    return dict(json.loads(json.dumps(fields, default=str)))


def proved(workload: Workload, num_params: int) -> dict[str, tuple[float, float]]:
    """Return the result of prove() for a narrow model. If transformers cannot make or run a narrow model, return the
    result for a model of the workload's own width. Raises RefusedModel if the parts compute something else than the
    whole, or if the model of the workload's own width is too large to be compared. `num_params`: parameters of the
    workload's model."""
    small = narrow(workload)
    try:
        return prove(small)
    except Exception as error:
        if isinstance(error, RefusedModel):
            is_of_width, cause = error.code in OF_SIZES, error.__cause__ or error
        else:
            is_of_width, cause = not is_own(error) and not is_out_of_memory(error), error
        if not is_of_width or small.hidden_size == workload.hidden_size:
            raise
        if num_params > MOST_COMPARED:
            values: dict[str, Any] = {"error": type(cause).__name__, "place": place_of(cause)}
            values["hidden_size"] = small.hidden_size
            raise RefusedModel("narrow", version=library().__version__, **values) from error
    return prove(replace(small, hidden_size=workload.hidden_size))


def prefix_of(whole: nn.Module) -> str:
    """Return the text with which the tensor names of all layers begin; the layer's number follows it."""
    (name,) = (name for name, module in whole.named_modules() if module is whole.layers)
    return f"{name}."


def prove(small: Workload) -> dict[str, tuple[float, float]]:
    """Compare the parts of a small model with the whole. Return the mean and the standard deviation of the whole
    model's starting values, by tensor. Raises RefusedModel if the parts compute something else than the whole."""
    torch.manual_seed(1)
    config = hub_config.narrowed(str(small.config), small.num_layers, small.hidden_size, small.vocab_size)
    whole, ends = transformers_model(config, torch.float32).train(), HubEnds(small)
    layers = [model.new_layer(small, index) for index in range(small.num_layers)]
    prefix = prefix_of(model.whole(small))
    parts = {"": ends, **{f"{prefix}{index}.": layer for index, layer in enumerate(layers)}}
    named = dict(whole.named_parameters())
    starts = {within(name, prefix): start(name, weight, whole) for name, weight in named.items()}
    for weight in named.values():
        # norms and biases start from equal values; change them, so that the test notices exchanged ones
        weight.data.add_(torch.randn_like(weight), alpha=0.1)
    for names, part in parts.items():
        for name, _ in list(part.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(owner), leaf, nn.Parameter(named[names + name].detach().clone()))

    inputs, targets = torch.randint(small.vocab_size, (2, SAMPLES, TOKENS))
    logits = logits_of(whole, inputs)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    x = ends.embed(inputs)
    for layer in layers:
        x = layer(x)
    if not torch.equal(ends.logits(x), logits):
        check_repeats(whole, inputs, logits)
        raise RefusedModel("other-logits")
    ends.loss(x, targets).backward()
    weights = {
        names + name: weight for names, part in parts.items() for name, weight in part.named_parameters()
    }
    compare_gradients(weights, named)
    return starts


def compare_gradients(weights: dict[str, nn.Parameter], named: dict[str, nn.Parameter]) -> None:
    """Raise RefusedModel if a weight of the parts has another gradient than the whole model's. Gradients that are
    rounding error alone, such as those of the biases of keys without rotary positions, may differ."""
    norms = [float(weight.grad.norm()) for weight in named.values() if weight.grad is not None]
    rounding_error = torch.finfo(torch.float32).eps * max(norms)
    for name, weight in weights.items():
        grad, expected = weight.grad, named[name].grad
        if grad is None or expected is None:
            raise RefusedModel("no-gradient", part=name)
        allowed = max(GRADIENT_TOLERANCE * float(expected.norm()), rounding_error)
        if float((grad - expected).norm()) > allowed:
            raise RefusedModel("other-gradient", part=name)


def logits_of(whole: Any, inputs: Tensor) -> Tensor:
    """Return the logits of the whole model. Raises RefusedModel if its forward pass fails."""
    try:
        logits: Tensor = whole(input_ids=inputs, use_cache=False).logits
    except Exception as error:
        if is_out_of_memory(error):
            raise
        values = {"error": type(error).__name__, "place": place_of(error)}
        raise RefusedModel("fails", version=library().__version__, **values) from error
    return logits


def check_repeats(whole: Any, inputs: Tensor, logits: Tensor) -> None:
    """Raise RefusedModel if the whole model gives other logits than before, because it draws random numbers."""
    if torch.equal(whole(input_ids=inputs, use_cache=False).logits, logits):
        return
    fields = [name for name, value in whole.config.to_dict().items() if name.endswith(NOISE_SUFFIX) and value]
    raise RefusedModel("random", fields=", ".join(f"{name}: 0" for name in fields) or "its noise as 0")


def narrow(workload: Workload) -> Workload:
    """Return the workload of a narrow model of the same kind, in fp32. Its heads have the fewest columns, a multiple of
    HEAD_SIZE, of which rotary positions turn whole pairs."""
    share = hub_config.rotary_share(hub_config.parsed(str(workload.config)))
    sizes = (HEAD_SIZE * count for count in range(1, MOST_HEADS_SIZES))
    head_size = next(
        (size for size in sizes if int(size * share) >= 2 and int(size * share) % 2 == 0), HEAD_SIZE
    )
    return replace(
        workload,
        hidden_size=head_size * workload.num_heads,
        vocab_size=min(WORDS, workload.vocab_size),
        seq_len=TOKENS,
        batch_size=SAMPLES,
        dtype="fp32",
    )


def within(name: str, prefix: str) -> str:
    """Return a tensor's name within its layer. A tensor outside the layers keeps its full name."""
    return name.removeprefix(prefix).partition(".")[2] if name.startswith(prefix) else name


def start(name: str, weight: Tensor, whole: Any) -> tuple[float, float]:
    """Return the mean and the standard deviation of a tensor's starting values. A vector whose elements transformers
    draws otherwise than those of matrices, such as the logarithms of a recurrence's decays, has those of its elements
    here."""
    drawn = 0.0, float(getattr(whole.config, "initializer_range", 0.02))
    first = float(weight.detach().flatten()[0])
    if torch.equal(weight, torch.full_like(weight, first)):
        return first, 0.0
    is_otherwise = float(weight.detach().abs().max()) > MOST_DEVIATIONS * drawn[1]
    if is_otherwise and (weight.ndim == 1 or name.endswith(DECAYS)):
        return float(weight.detach().mean()), float(weight.detach().std())
    return drawn


def layer_work(workload: Workload, index: int) -> tuple[int, int, int]:
    """Return two numbers of operations, those of layer `index` for each token, and attention's for each pair of tokens
    in a sample, and the number of the layer's parameters that a token meets (active_params()). Causal attention takes
    half the operations of full attention, except for plain attention (is_plain) and beyond a sliding window, where
    torch computes all scores."""
    layer, operations = model.new_layer(workload, index), []
    unused = count_unused(layer)
    for tokens in COUNTED_TOKENS:
        with FlopCounterMode(display=False) as counter:
            layer(torch.empty((1, tokens, workload.hidden_size), device="meta"))
        operations.append(counter.get_total_flops() // tokens)
    pair = (operations[1] - operations[0]) // (COUNTED_TOKENS[1] - COUNTED_TOKENS[0])
    token_flops, computes_all = operations[0] - pair * COUNTED_TOKENS[0], keeps_pairs(workload, index)
    weights = [weight for name, weight in layer.named_parameters() if not adapters.is_adapter(name)]
    active_params = sum(weight.numel() for weight in weights) - sum(unused.values())
    return token_flops, pair if computes_all else pair // 2, active_params


def count_unused(module: nn.Module) -> dict[nn.Module, int]:
    """Return a table that the module's next forward pass fills: by the module of experts, the number of its parameters
    that a token does not meet."""
    unused: dict[nn.Module, int] = {}

    def when_routed(experts: Any, args: Any) -> None:
        num_params = sum(weight.numel() for weight in experts.parameters())
        unused[experts] = num_params - num_params * args[1].shape[-1] // experts.num_experts

    for experts in grouped_experts.experts_of(module):
        experts.register_forward_pre_hook(when_routed)
    return unused


def keeps_slopes(workload: Workload) -> int:
    """Return 1 if the slopes of capped logits are stored beside the logits, else 0."""
    bend = bend_of(parts_of(workload).base.config)
    return int(bend is not None and isinstance(bend(torch.zeros(1))[1], Tensor))


def main() -> None:
    """Entry point for child_process.ask(): reads JSON with a `config` and, for adapters, fields of a Workload from
    standard input, and prints answer() as JSON; or reads `gpt_lora_targets`, and prints gpt_adapter_memory()."""
    question = json.load(sys.stdin)
    limit_memory(MOST_BYTES)
    if (targets := question.get("gpt_lora_targets")) is not None:
        print(json.dumps(gpt_adapter_memory(targets)))
    else:
        print(json.dumps(answer(**question)))


def answer(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the fields of an Anatomy, or {"refused": [code, values]} with the code and values of a RefusedModel. An
    error of transformers or torch becomes a reason, too: a layer that reads its tensors' values fails, for example,
    because tensors without memory have no values."""
    try:
        sizes = hub_config.sizes_of(config)
        return sketch(Workload(**sizes, seq_len=TOKENS, config=json.dumps(config), **fields))
    except RefusedModel as error:
        return {"refused": [error.code, error.values]}
    except Exception as error:
        if is_out_of_memory(error):
            return {"refused": ["memory", {"gib": MOST_BYTES // 2**30}]}
        if is_own(error):
            raise
        if part := mixture_part(error):
            values = {"part": part, "error": type(error).__name__, "place": place_of(error)}
            return {"refused": ["mixture", values]}
        return {"refused": ["apart", {"error": type(error).__name__, "place": place_of(error)}]}


def mixture_part(error: Exception) -> str:
    """Return the class of the module of experts in whose forward pass the error was raised; empty if in no such."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and MIXTURE.search(type(module).__name__):
            return type(module).__name__
    return ""


def is_own(error: Exception) -> bool:
    """True if this project's code raised the error: that is a bug, not a property of the model."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(ROOT / "harness")


if __name__ == "__main__":
    main()
