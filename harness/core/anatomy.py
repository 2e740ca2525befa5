"""A model's parts as numbers: the names and shapes of its tensors, their starting values, and the operations and bytes
of a layer. Plans, counts of parameters and the gate read these numbers. This file does not import torch.

A model is an embedding, layers, and a head with the loss. A tensor that both embedding and head name is shared. Layers
of one kind (LayerKind) have the same tensors and compute alike; most models have one kind of layer.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.checkout import ROOT
from harness.base.child_process import ask
from harness.base.foreign_file import read_json
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole
from harness.core import adapters
from harness.core.hub_config import inner_size, is_beyond_window, narrowed, with_window
from harness.core.refusals import RefusedModel, Unavailable

Shape = tuple[int, ...]
Shapes = adapters.Shapes

INIT_STD = 0.02
# folder with the kept answers of harness/plan/sketch.py and block_sketch.py
SKETCHES = ROOT / ".venv" / "sketches"
# format number of the cached files; raise it when the fields or the numbers of a sketch change
SKETCH_FORMAT = 16
# tokens of the sliding window of a model that is sketched for samples beyond its window
SKETCHED_WINDOW = 8
# most layers of a model that is sketched, because a config.json may ask for any number
MOST_SKETCHED_LAYERS = 512
# Most logits computed at once, 128 MiB in fp32: the loss is computed in blocks of tokens (harness/models/gpt.py).
MOST_LOGITS = 2**25
# Most elements of an MLP's inner tensor that is computed whole, 1 GiB in bf16. If the inner tensor is larger, MLP
# and norms compute in blocks of tokens, each with at most MOST_LOGITS inner elements (harness/models/token_blocks.py).
MOST_INNER_ELEMENTS = 2**29
# answers of this process that were refusals, by hash of the question
_refusals: dict[str, JsonObject] = {}
TRANSFORMERS_MISSING = "models by their config.json need transformers: pip install transformers==5.23.0"


@dataclass(frozen=True)
class TokenBlocks:
    """The parts of a layer that compute in blocks of tokens (harness/models/token_blocks.py), and the most memory that
    this layer takes."""

    parts: tuple[str, ...]  # names of the layer's child modules that compute in blocks of tokens
    token_flops: int  # floating-point operations of one token's matrix products in these modules
    # Each pair (factor, fixed) stands for factor * B + fixed bytes, where B is the bytes of the layer's input. The
    # layer's recompute and backward pass take at most the largest of these numbers.
    lines: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class LayerKind:
    """What layers of one kind have in common: tensors, and the operations and bytes of a layer. The names in `tensors`
    and `adapters` leave out the prefix of the layer. If a model has adapters, these alone are trained."""

    tensors: Shapes
    token_flops: int  # FLOPs of one token's matrix products in the forward pass
    # FLOPs of attention for each pair of tokens in the forward pass. Causal attention takes half of the FLOPs of full
    # attention; eager attention and attention with a mask take all of them, because they compute all scores.
    pair_flops: int
    # most memory of the recompute and backward pass, in multiples of the layer's input
    boundaries: float
    # Memory that grows with the square of T: memory of attention scores for each token of a sample, in multiples of the
    # layer's input.
    pair_boundaries: float = 0.0
    # Of a mixture of experts: the most memory of the recompute and backward pass. Each (factor, pair_factor, fixed)
    # stands for (factor + T * pair_factor) * B + fixed bytes, where B is the bytes of the layer's input; the largest
    # counts. `fixed`: gradients of the experts' matrices.
    lines: tuple[tuple[float, float, int], ...] = ()
    # parameters that a token meets; None: all. In a mixture a token meets a few of a layer's experts.
    active_params: int | None = None
    # For some tensors: the elements [start, stop) whose gradient is nothing but rounding error.
    noise: dict[str, tuple[int, int]] = field(default_factory=dict)
    blocks: TokenBlocks | None = None  # None: a layer computes all tokens at once
    adapters: Shapes = field(default_factory=dict)  # tensors of adapters; `tensors` lacks them

    @cached_property
    def num_params(self) -> int:
        """Number of parameters, without those of adapters."""
        return sum(map(math.prod, self.tensors.values()))

    @cached_property
    def num_adapter_params(self) -> int:
        return sum(map(math.prod, self.adapters.values()))

    @property
    def num_active_params(self) -> int:
        return self.num_params if self.active_params is None else self.active_params

    @cached_property
    def largest_tensor(self) -> Shape:
        return max(self.tensors.values(), key=math.prod)


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model. The names in `embedding` and `head` are the tensors' names in the model."""

    embedding: Shapes
    head: Shapes
    kinds: tuple[LayerKind, ...]
    # prefix of a layer's tensors in the model, before the layer's number, such as "layers."
    layer_prefix: str
    # prefix of the ends' tensors in the model, such as "ends."; the module of the ends leaves it out
    ends_prefix: str
    starts: dict[str, tuple[float, float]]  # mean and standard deviation of each tensor's starting values
    # For each layer, bottom first, the index of its kind; empty: all layers, of any number, are of one kind.
    order: tuple[int, ...] = ()
    # memory that the norm before the head keeps, in multiples of the norm's input
    head_boundaries: float = 0.0
    given_bytes: int = 0  # bytes of the layers' arguments beside their input, for each token of a sample
    pair_given_bytes: int = 0  # bytes of masks for each pair of tokens, of each sample
    pair_shared_bytes: int = 0  # bytes of masks for each pair of tokens, which all samples share
    slopes: int = 0  # number of tensors of the logits' size that the loss keeps beside the logits
    # The configuration's fields with transformers' values for those that are left out; empty for the published GPT.
    fields: JsonObject = field(default_factory=dict)
    # patterns of names in files of weights that transformers ignores for this model
    ignored: tuple[str, ...] = ()

    @cached_property
    def ends(self) -> Shapes:
        return self.embedding | self.head

    @cached_property
    def is_tied(self) -> bool:
        """True if the head shares a tensor with the embedding."""
        return not self.embedding.keys().isdisjoint(self.head)

    @cached_property
    def most_tokens(self) -> float:
        """The most tokens of a sample: the rows of the smallest table of learned positions, infinity without any."""
        _, *positions = self.embedding.values()
        return min((shape[0] for shape in positions), default=math.inf)

    @cached_property
    def end_parts(self) -> list[int]:
        """Numbers of parameters: [both ends together] if the ends share a tensor, else [embedding, head]."""
        parts = [self.ends] if self.is_tied else [self.embedding, self.head]
        return [sum(map(math.prod, part.values())) for part in parts]

    @property
    def layer(self) -> Shapes:
        """The tensors of the bottom layer: those of every layer, unless layers are unequal (layer_numels)."""
        return self.kind_of(0).tensors

    @cached_property
    def layer_params(self) -> int:
        """Number of parameters of the largest layer, for which a slot has room."""
        return max(kind.num_params for kind in self.kinds)

    @cached_property
    def layer_numels(self) -> tuple[int, ...]:
        """For each layer, bottom first, its number of parameters; empty if all layers have the same."""
        numels = tuple(self.kinds[kind].num_params for kind in self.order)
        return numels if len(set(numels)) > 1 else ()

    @cached_property
    def end_params(self) -> int:
        return sum(map(math.prod, self.ends.values()))

    @cached_property
    def layer_matrix(self) -> Shape:
        """The shape of the largest tensor of all layers."""
        return max((kind.largest_tensor for kind in self.kinds), key=math.prod)

    @cached_property
    def largest_numel(self) -> int:
        return max(math.prod(self.layer_matrix), *map(math.prod, self.ends.values()))

    @cached_property
    def _by_depth(self) -> dict[int, Anatomy]:
        return {}

    def first(self, num_layers: int) -> Anatomy:
        """Return the parts of the model of the first `num_layers` layers. Raises ValueError if the model has several
        kinds of layers, but fewer layers: only its configuration tells a layer's kind."""
        if not self.order or num_layers == len(self.order):
            return self
        if num_layers > len(self.order):
            message = f"expected at most {len(self.order)} layers, as the model has, because they are unequal"
            raise ValueError(f"-l: {message}, got {num_layers}; try -l {len(self.order)}")
        if num_layers not in self._by_depth:
            order = self.order[:num_layers]
            kept = sorted(set(order))
            kinds = tuple(self.kinds[kind] for kind in kept)
            self._by_depth[num_layers] = replace(self, kinds=kinds, order=tuple(map(kept.index, order)))
        return self._by_depth[num_layers]

    @cached_property
    def has_blocks(self) -> bool:
        """True if a layer of some kind, and so the norm before the head, computes in blocks of tokens."""
        return any(kind.blocks for kind in self.kinds)

    def kind_of(self, index: int) -> LayerKind:
        """Return the kind of layer `index`."""
        return self.kinds[self.order[index] if self.order else 0]

    def counts(self, layers: range) -> list[tuple[LayerKind, int]]:
        """Return each kind of these layers with the number of its layers."""
        if not self.order:
            return [(self.kinds[0], len(layers))]
        counts = Counter(self.order[layers.start : layers.stop])
        return [(self.kinds[kind], count) for kind, count in counts.items()]

    def topmost(self, num_layers: int) -> list[tuple[LayerKind, int]]:
        """Return each kind with the index of its topmost layer."""
        last = {kind: index for index, kind in enumerate(self.order)} or {0: num_layers - 1}
        return [(self.kinds[kind], index) for kind, index in last.items()]

    @cached_property
    def num_layers_of_all_kinds(self) -> int:
        """The least number of layers, counted from the bottom, among which is a layer of each kind."""
        return 1 + max((self.order.index(kind) for kind in set(self.order)), default=0)

    def names(self, num_layers: int) -> list[str]:
        """Return the names of all tensors in the model's order; the reference sums the global norm in this order."""
        names = list(self.ends)
        for index in range(num_layers):
            kind = self.kind_of(index)
            names += (self.layer_name(index) + name for name in (*kind.tensors, *kind.adapters))
        return names

    def adapter_tensors(self, num_layers: int) -> Shapes:
        """Return the shapes of all adapters' tensors, by their names in the model."""
        shapes = Shapes()
        for index in range(num_layers):
            shapes |= {
                self.layer_name(index) + name: shape for name, shape in self.kind_of(index).adapters.items()
            }
        return shapes

    def is_trained(self, name: str) -> bool:
        """True if the tensor of this name in the model is trained: with adapters, these alone are."""
        return adapters.is_adapter(name) or not any(kind.adapters for kind in self.kinds)

    def layer_tensors(self, layers: Iterable[int]) -> Iterator[tuple[str, Shape]]:
        """Yield the names in the model and the shapes of these layers' tensors."""
        for index in layers:
            for name, shape in self.kind_of(index).tensors.items():
                yield self.layer_name(index) + name, shape

    def layer_name(self, index: int) -> str:
        """Return what the names of this layer's tensors begin with in the model, such as "layers.3."."""
        return f"{self.layer_prefix}{index}."

    def within(self, name: str) -> str:
        """Return a tensor's name within its layer. `name` is the tensor's name in the model; if the tensor belongs to
        no layer, `name` is returned."""
        if not name.startswith(self.layer_prefix):
            return name
        return name.removeprefix(self.layer_prefix).partition(".")[2]

    def kind_with(self, name: str) -> LayerKind | None:
        """Return the kind of the layer that has the tensor of this name in the model; None if no layer has it."""
        number = name.removeprefix(self.layer_prefix).partition(".")[0]
        if not name.startswith(self.layer_prefix) or not number.isdecimal():
            return None
        index = int(number)
        kind = self.kind_of(index) if index < len(self.order) or not self.order else None
        return kind if kind and self.within(name) in kind.tensors | kind.adapters else None

    def shape_of(self, name: str) -> Shape | None:
        """Return the shape of the tensor of this name in the model; None if there is no such tensor."""
        kind = self.kind_with(name)
        return (kind.tensors | kind.adapters)[self.within(name)] if kind else self.ends.get(name)

    def noise_of(self, name: str) -> tuple[int, int]:
        """Return the elements [start, stop) of the tensor of this name whose gradient is nothing but rounding error."""
        kind = self.kind_with(name)
        return kind.noise.get(self.within(name), (0, 0)) if kind else (0, 0)

    def total(self, num_layers: int, amount: Callable[[Shape], int]) -> int:
        """Return the sum of amount(shape) over all tensors of a model with this number of layers."""
        layers = [
            count * sum(map(amount, kind.tensors.values())) for kind, count in self.counts(range(num_layers))
        ]
        return sum(map(amount, self.ends.values())) + sum(layers)


def anatomy_of(workload: Any) -> Anatomy:
    """Return the parts of a workload's model. Raises RefusedModel if the harness cannot train the model, ValueError if
    a sample is longer than its table of positions, and Unavailable if transformers is missing."""
    if workload.config is None:
        return _gpt_anatomy(workload)
    sizes: dict[str, Any] = {"is_half": workload.dtype != "fp32", "block_tokens": block_tokens(workload)}
    terms = workload.adapters
    model = SketchedModel(
        workload.config,
        (workload.hidden_size, workload.vocab_size),
        *((terms.rank, terms.targets) if terms else ()),
    )
    model_name = workload.model or "the model"
    anatomy = _sketched_anatomy(model, model_name, **sizes)
    if is_beyond_window(anatomy.fields, workload.seq_len):
        anatomy = _anatomy_beyond_window(model, model_name, **sizes)
    anatomy = anatomy.first(workload.num_layers)
    if (most := anatomy.most_tokens) < workload.seq_len:
        message = f"expected at most {most}, the number of the model's positions, got {workload.seq_len}"
        raise ValueError(f"--seq: {message}; try --seq {most}")
    return anatomy


def block_tokens(workload: Any) -> int:
    """Return the tokens in a block of a layer's MLP and norms; 0 if MLP and norms compute a whole micro-batch at
    once."""
    if workload.config is None:
        return 0
    inner = inner_size(workload.config, workload.hidden_size)
    tokens = workload.batch_size // workload.micro_batches * workload.seq_len
    return max(1, MOST_LOGITS // inner) if tokens * inner > MOST_INNER_ELEMENTS else 0


def check_sizes(path: Path, record: Any) -> Any:
    """Return the record in the file `path`. Raises ValueError, which names the file, if the sizes of the record's
    models cannot be computed: every verb computes them, so one such record would end a verb that reads its folder."""
    try:
        for model in record.models():
            model.job.workload.num_params  # noqa: B018 computed for its errors
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, Unavailable) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{path} is left out: {reason}") from error
    return record


class SketchedModel(NamedTuple):
    """What a sketch depends on: the text of a config.json, hidden size and vocabulary, and the adapters' rank and
    targets (their alpha changes no tensor and no memory)."""

    config: str
    widths: tuple[int, int]
    rank: int | None = None
    targets: tuple[str, ...] = ()

    def question(self) -> JsonObject:
        """Return the question for harness/plan/sketch.py."""
        num_layers = min(json.loads(self.config)["num_hidden_layers"], MOST_SKETCHED_LAYERS)
        question: JsonObject = {"config": narrowed(self.config, num_layers, *self.widths)}
        if self.rank is not None:
            question |= {"lora": str(self.rank), "lora_targets": ",".join(self.targets) or None}
        return question


@lru_cache(maxsize=64)
def _sketched_anatomy(model: SketchedModel, model_name: str, *, is_half: bool, block_tokens: int) -> Anatomy:
    """Return the parts of a model described by a config.json. harness/plan/sketch.py imports torch, so it finds the
    parts in a process of its own. If a layer computes in blocks of tokens, block_sketch.py finds the memory of these
    blocks in another process. Each answer is kept in a file in SKETCHES, which later calls read. One sketch, of the
    configuration's own number of layers, serves every number of layers (Anatomy.first)."""
    versions, question = [_transformers_version(), SKETCH_FORMAT], model.question()
    answer = _ask_once("harness.plan.sketch", question, versions)
    if refused := answer.get("refused"):
        code, values = refused
        raise RefusedModel(code, f"{model_name} cannot be trained here", **values)
    blocks = [None for _ in answer["kinds"]]
    if block_tokens:
        order = answer["order"]
        layers = [order.index(kind) if order else kind for kind in range(len(blocks))]
        question |= {"is_half": is_half, "block_tokens": block_tokens, "layers": layers}
        blocks = _ask_once("harness.plan.block_sketch", question, versions)["blocks"]
    return _anatomy_of_answer(answer, "half" if is_half else "fp32", blocks)


def _anatomy_of_answer(answer: JsonObject, dtype: str, blocks: list[Any]) -> Anatomy:
    """Return the parts of a model from the sketch's answer. `dtype`: "fp32" or "half"; `blocks`: of each kind of layer
    TokenBlocks' fields, or None."""
    return Anatomy(
        embedding=_shapes(answer["embedding"]),
        head=_shapes(answer["head"]),
        kinds=tuple(
            _layer_kind(kind, dtype, of_kind) for kind, of_kind in zip(answer["kinds"], blocks, strict=True)
        ),
        order=tuple(answer["order"]),
        layer_prefix=answer["layer_prefix"],
        ends_prefix="",
        # A norm that computes in blocks keeps nothing for its backward pass, but its backward pass holds two copies of
        # the gradient of its input.
        head_boundaries=1.0 if any(blocks) else answer["head_boundaries"][dtype],
        given_bytes=answer["given_bytes"][dtype],
        pair_given_bytes=answer["pair_given_bytes"][dtype],
        pair_shared_bytes=answer["pair_shared_bytes"][dtype],
        slopes=answer["slopes"],
        starts={name: (mean, std) for name, (mean, std) in answer["starts"].items()},
        ignored=tuple(answer["ignored"]),
        fields=answer["fields"],
    )


@lru_cache(maxsize=64)
def _anatomy_beyond_window(model: SketchedModel, model_name: str, **sizes: Any) -> Anatomy:
    """Return _sketched_anatomy() for samples that are longer than the model's sliding window. By how much they are
    longer does not matter, so the window is short in the sketch."""
    short = model._replace(config=with_window(model.config, SKETCHED_WINDOW))
    fields = _sketched_anatomy(model, model_name, **sizes).fields
    return replace(_sketched_anatomy(short, model_name, **sizes), fields=fields)


def _shapes(answer: JsonObject) -> Shapes:
    return {name: tuple(shape) for name, shape in answer.items()}


def _layer_kind(answer: JsonObject, dtype: str, blocks: JsonObject | None) -> LayerKind:
    """Return a kind of layer from the sketch's answer. `dtype`: "fp32" or "half"; `blocks`: TokenBlocks' fields."""
    tensors = _shapes(answer["tensors"])
    return LayerKind(
        tensors=tensors,
        token_flops=answer["token_flops"],
        pair_flops=answer["pair_flops"],
        boundaries=answer["boundaries"][dtype],
        pair_boundaries=answer["pair_boundaries"][dtype],
        lines=tuple((*factors, fixed) for *factors, fixed in answer["lines"][dtype]),
        active_params=answer["active_params"],
        noise={} if answer["adapters"] else _noise_elements(tensors),
        adapters=_shapes(answer["adapters"]),
        blocks=_token_blocks(blocks) if blocks else None,
    )


def _transformers_version() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError as error:
        raise Unavailable(TRANSFORMERS_MISSING) from error


def _noise_elements(layer: Shapes) -> dict[str, tuple[int, int]]:
    """Return the elements of a layer's tensors whose gradient is little more than rounding error: the bias of the keys.

    It adds nearly the same number to every score of a query, even with rotary positions, which hardly turn a head's
    slow pairs. In GPT-2's c_attn.bias the bias of the keys is the second of three equal parts."""
    noise = {}
    for name, (num_elements, *_) in layer.items():
        if name.endswith("k_proj.bias"):
            noise[name] = (0, num_elements)
        elif name.endswith("c_attn.bias"):
            noise[name] = (num_elements // 3, 2 * num_elements // 3)
    return noise


def _token_blocks(answer: JsonObject) -> TokenBlocks:
    lines = tuple((inputs, fixed) for inputs, fixed in answer["lines"])
    return TokenBlocks(tuple(answer["parts"]), answer["token_flops"], lines)


def _ask_once(module_name: str, question: Any, versions: list[Any]) -> Any:
    """Return the answer of a module that sketches a model. The answer is read from its file in SKETCHES or, if there is
    no file, asked of the module and then written to the file. If the module refuses the model, nothing is written, but
    this process keeps the refusal."""
    digest = hashlib.sha256(json.dumps([question, *versions], sort_keys=True).encode()).hexdigest()
    file = SKETCHES / f"{digest[:16]}.json"
    if (refusal := _refusals.get(digest)) is not None:
        return refusal
    try:
        return read_json(file)
    except (OSError, ValueError):
        if sys.stderr.isatty():  # a person waits
            print(
                "reading the model's tensors, FLOPs and memory off its layers, once: seconds",
                file=sys.stderr,
            )
        answer = ask(module_name, question)
    if answer.get("refused"):
        _refusals[digest] = answer
    else:
        with contextlib.suppress(OSError):
            # if the file cannot be written, the next process sketches the model again
            SKETCHES.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(answer))
    return answer


@lru_cache(maxsize=256)
def _gpt_anatomy(workload: Any) -> Anatomy:
    """Return the parts of the published GPT (harness/models/gpt.py): fused QKV, an MLP four times as wide as the layer,
    learned positions, tied head, biases everywhere."""
    hidden_size, vocab_size = workload.hidden_size, workload.vocab_size
    layer: Shapes = {
        "ln1.weight": (hidden_size,),
        "ln1.bias": (hidden_size,),
        "qkv.weight": (3 * hidden_size, hidden_size),
        "qkv.bias": (3 * hidden_size,),
        "proj.weight": (hidden_size, hidden_size),
        "proj.bias": (hidden_size,),
        "ln2.weight": (hidden_size,),
        "ln2.bias": (hidden_size,),
        "fc1.weight": (4 * hidden_size, hidden_size),
        "fc1.bias": (4 * hidden_size,),
        "fc2.weight": (hidden_size, 4 * hidden_size),
        "fc2.bias": (hidden_size,),
    }
    tokens: Shapes = {"ends.wte.weight": (vocab_size, hidden_size)}
    positions: Shapes = {"ends.wpe.weight": (workload.seq_len, hidden_size)}
    norm: Shapes = {"ends.lnf.weight": (hidden_size,), "ends.lnf.bias": (hidden_size,)}
    kind = LayerKind(
        tensors=layer,
        token_flops=24 * hidden_size**2,
        pair_flops=2 * hidden_size,
        # 22 times the layer's input: the activations of the layer, and the gradients of the MLP's inner tensors.
        boundaries=22,
        # The keys' bias adds the same number to every score of a query, and the softmax cancels this number.
        noise={"qkv.bias": (hidden_size, 2 * hidden_size)},
    )
    if workload.adapters is not None:
        kind = _with_adapters(kind, workload)
    return Anatomy(
        embedding=tokens | positions,
        head=tokens | norm,
        kinds=(kind,),
        layer_prefix="layers.",
        ends_prefix="ends.",
        starts=_gpt_starts(tokens | positions | norm | layer, workload.num_layers),
    )


def _with_adapters(kind: LayerKind, workload: Any) -> LayerKind:
    """Return the layer of the published GPT with adapters. Raises ValueError for targets that it does not have."""
    terms = workload.adapters
    linears: Shapes = {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in kind.tensors.items()
        if len(shape) > 1
    }
    if unknown := adapters.unknown_targets(linears, terms.targets):
        known = ", ".join(linears)
        raise ValueError(f"--lora-targets: expected linear layers of the GPT ({known}), got {unknown[0]}")
    targets = adapters.chosen(linears, terms.targets)
    tensors, shapes = adapters.adapted_shapes(kind.tensors, linears, targets, terms.rank)
    memory = _ask_once("harness.plan.sketch", {"gpt_lora_targets": ",".join(targets)}, [SKETCH_FORMAT])
    at_rank_0, per_share = memory["fp32" if workload.dtype == "fp32" else "half"]
    return replace(
        kind,
        tensors=tensors,
        adapters=shapes,
        token_flops=kind.token_flops + 2 * sum(map(math.prod, shapes.values())),
        boundaries=at_rank_0 + per_share * terms.rank / workload.hidden_size,
        noise={},
    )


def _gpt_starts(shapes: Shapes, num_layers: int) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of the tensors' starting values. Matrices start at random values of mean 0 and
    standard deviation 0.02. The deviation of the two projections into the residual stream is 0.02 / sqrt(2 L), with L
    layers. Biases start at 0, weights of norms at 1."""
    into_residual = INIT_STD / math.sqrt(2 * num_layers)
    starts = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            starts[name] = (1.0 if name.endswith("weight") else 0.0, 0.0)
        elif name in ("proj.weight", "fc2.weight"):
            starts[name] = (0.0, into_residual)
        else:
            starts[name] = (0.0, INIT_STD)
    return starts
