"""A model's parts as numbers: the names and shapes of its tensors, their starting values, and the operations and bytes
of a layer. Plans, counts of parameters and the gate read these numbers. This file does not import torch.

A model is an embedding, equal layers, and a head with the loss. A tensor that both embedding and head name is shared.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from harness.base.checkout import ROOT
from harness.base.child_process import ask
from harness.base.foreign_file import read_json
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole
from harness.core.hub_config import inner_size, narrowed
from harness.core.refusals import RefusedModel, Unavailable

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

INIT_STD = 0.02
# folder with the kept answers of harness/plan/sketch.py and block_sketch.py
SKETCHES = ROOT / ".venv" / "sketches"
# format number of the cached files; raise it when the fields or the numbers of a sketch change
SKETCH_FORMAT = 8
# most layers of a sketched model; kinds of layers that alternate repeat within fewer layers
MOST_SKETCHED_LAYERS = 8
# Most logits computed at once, 128 MiB in fp32: the loss is computed in blocks of tokens (harness/models/gpt.py).
MOST_LOGITS = 2**25
# Most elements of an MLP's inner tensor that is computed whole, 1 GiB in bf16. If the inner tensor is larger, MLP
# and norms compute in blocks of tokens, each with at most MOST_LOGITS inner elements (harness/models/token_blocks.py).
MOST_INNER_ELEMENTS = 2**29
PART_NAMES = ("embedding", "layer", "head")
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
class Anatomy:
    """The parts of a model. The names in `embedding` and `head` are the tensors' names in the model; the names in
    `layer` leave out the prefix of the layer."""

    embedding: Shapes
    layer: Shapes
    head: Shapes
    # prefix of a layer's tensors in the model, before the layer's number, such as "layers."
    layer_prefix: str
    # prefix of the ends' tensors in the model, such as "ends."; the module of the ends leaves it out
    ends_prefix: str
    token_flops: int  # FLOPs of one token's matrix products in a layer's forward pass
    # FLOPs of attention for each pair of tokens in a layer's forward pass. Causal attention takes half of the FLOPs of
    # full attention; eager attention takes all of them, because it computes all scores.
    pair_flops: int
    # most memory of a layer's recompute and backward pass, in multiples of the layer's input
    boundaries: float
    starts: dict[str, tuple[float, float]]  # mean and standard deviation of each tensor's starting values
    # memory that the norm before the head keeps, in multiples of the norm's input
    head_boundaries: float = 0.0
    given_bytes: int = 0  # bytes of a layer's arguments beside its input, for each token of a sample
    # Memory that grows with the square of T. pair_boundaries: memory of attention scores for each token of a sample, in
    # multiples of the layer's input. pair_given_bytes: bytes of masks for each pair of tokens.
    pair_boundaries: float = 0.0
    pair_given_bytes: int = 0
    # Of a mixture of experts: the most memory of a layer's recompute and backward pass. Each (factor, pair_factor,
    # fixed) stands for (factor + T * pair_factor) * B + fixed bytes, where B is the bytes of the layer's input; the
    # largest counts. `fixed`: gradients of the experts' matrices.
    lines: tuple[tuple[float, float, int], ...] = ()
    # parameters of a layer that a token meets; None: all. In a mixture a token meets a few of a layer's experts.
    active_params: int | None = None
    slopes: int = 0  # number of tensors of the logits' size that the loss keeps beside the logits
    # For some tensors of a layer: the elements [start, stop) whose gradient is nothing but rounding error.
    noise: dict[str, tuple[int, int]] = field(default_factory=dict)
    blocks: TokenBlocks | None = None  # None: a layer computes all tokens at once
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

    @cached_property
    def layer_params(self) -> int:
        return sum(map(math.prod, self.layer.values()))

    @cached_property
    def end_params(self) -> int:
        return sum(map(math.prod, self.ends.values()))

    @cached_property
    def layer_matrix(self) -> Shape:
        """The shape of a layer's largest tensor."""
        return max(self.layer.values(), key=math.prod)

    @cached_property
    def largest_numel(self) -> int:
        return max(map(math.prod, chain(self.ends.values(), self.layer.values())))

    def names(self, num_layers: int) -> list[str]:
        """Return the names of all tensors in the model's order; the reference sums the global norm in this order."""
        layers = (self.layer_name(index) + name for index in range(num_layers) for name in self.layer)
        return [*self.ends, *layers]

    def layer_name(self, index: int) -> str:
        """Return what the names of this layer's tensors begin with in the model, such as "layers.3."."""
        return f"{self.layer_prefix}{index}."

    def within(self, name: str) -> str:
        """Return a tensor's name within its layer. `name` is the tensor's name in the model; if the tensor belongs to
        no layer, `name` is returned."""
        if not name.startswith(self.layer_prefix):
            return name
        return name.removeprefix(self.layer_prefix).partition(".")[2]

    def total(self, num_layers: int, amount: Callable[[Shape], int]) -> int:
        """Return the sum of amount(shape) over all tensors of a model with this number of layers."""
        return sum(map(amount, self.ends.values())) + num_layers * sum(map(amount, self.layer.values()))


def anatomy_of(workload: Any) -> Anatomy:
    """Return the parts of a workload's model. Raises RefusedModel if the harness cannot train the model, ValueError if
    a sample is longer than its table of positions, and Unavailable if transformers is missing."""
    if workload.config is None:
        return _gpt_anatomy(workload)
    is_half, tokens_at_once = workload.dtype != "fp32", block_tokens(workload)
    widths = (workload.hidden_size, workload.vocab_size)
    model_name = workload.model or "the model"
    anatomy = _sketched_anatomy(
        workload.config, widths, model_name, is_half=is_half, block_tokens=tokens_at_once
    )
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


@lru_cache(maxsize=64)
def _sketched_anatomy(
    text: str, widths: tuple[int, int], model_name: str, *, is_half: bool, block_tokens: int
) -> Anatomy:
    """Return the parts of a model described by a config.json. harness/plan/sketch.py imports torch, so it finds the
    parts in a process of its own. If a layer computes in blocks of tokens, block_sketch.py finds the memory of these
    blocks in another process. Each answer is kept in a file in SKETCHES, which later calls read. One sketch, of the
    configuration's own number of layers, serves every number of layers."""
    versions = [_transformers_version(), SKETCH_FORMAT]
    config = narrowed(text, min(json.loads(text)["num_hidden_layers"], MOST_SKETCHED_LAYERS), *widths)
    answer = _ask_once("harness.plan.sketch", config, versions)
    if refused := answer.get("refused"):
        code, values = refused
        raise RefusedModel(code, f"{model_name} cannot be trained here", **values)
    dtype, blocks = "half" if is_half else "fp32", None
    if block_tokens:
        question = {"config": config, "is_half": is_half, "block_tokens": block_tokens}
        blocks = _ask_once("harness.plan.block_sketch", question, versions)["blocks"]
    parts = {part: {name: tuple(shape) for name, shape in answer[part].items()} for part in PART_NAMES}
    return Anatomy(
        **parts,
        layer_prefix=answer["layer_prefix"],
        ends_prefix="",
        token_flops=answer["token_flops"],
        pair_flops=answer["pair_flops"],
        boundaries=answer["boundaries"][dtype],
        # A norm that computes in blocks keeps nothing for its backward pass, but its backward pass holds two copies of
        # the gradient of its input.
        head_boundaries=1.0 if blocks else answer["head_boundaries"][dtype],
        given_bytes=answer["given_bytes"][dtype],
        pair_given_bytes=answer["pair_given_bytes"][dtype],
        pair_boundaries=answer["pair_boundaries"][dtype],
        lines=tuple((*factors, fixed) for *factors, fixed in answer["lines"][dtype]),
        active_params=answer["active_params"],
        slopes=answer["slopes"],
        starts={name: (mean, std) for name, (mean, std) in answer["starts"].items()},
        ignored=tuple(answer["ignored"]),
        fields=answer["fields"],
        noise=_noise_elements(parts["layer"]),
        blocks=blocks and _token_blocks(blocks),
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
                "reading the model's tensors, FLOPs and memory off its config.json, once: seconds",
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
    return Anatomy(
        embedding=tokens | positions,
        layer=layer,
        head=tokens | norm,
        layer_prefix="layers.",
        ends_prefix="ends.",
        token_flops=24 * hidden_size**2,
        pair_flops=2 * hidden_size,
        # 22 times the layer's input: the activations of the layer, and the gradients of the MLP's inner tensors.
        boundaries=22,
        starts=_gpt_starts(tokens | positions | norm | layer, workload.num_layers),
        # The keys' bias adds the same number to every score of a query, and the softmax cancels this number.
        noise={"qkv.bias": (hidden_size, 2 * hidden_size)},
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
