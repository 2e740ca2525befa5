"""A causal model of the Hugging Face Hub, as the harness trains it: two ends, and layers that compute one by one.

transformers' own modules compute everything. The reference trains HubModel, which runs the model's own loop over its
layers. hub_layer() and HubEnds are the same modules, taken apart. To learn which arguments the loop passes to a layer
beside its input (angles of positions, masks), the loop runs once with stand-ins in place of the layers.
harness/forecast/sketch.py checks that the whole model and its parts compute the same.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from harness.core import hub_config, job, token_blocks
from harness.core.anatomy import NEEDS
from harness.core.gpt import DTYPES, Bend, HeadLoss
from harness.core.hub_config import narrowed
from harness.core.job import Workload
from harness.core.unavailable import Unavailable

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")  # names of the norm after the last layer


class Unlike(ValueError):
    """The model differs from those that the harness can train; the text says how."""


class KeepsBuffers(nn.Module):
    """A module of parameters and of buffers that are computed, not trained."""

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert only the parameters: buffers keep the values and the dtype in which they were computed."""
        kept = [(module, dict(module._buffers)) for module in self.modules() if module._buffers]
        super()._apply(function, recurse)
        place = next(self.parameters()).device
        for module, buffers in kept:
            for name, buffer in buffers.items():
                module._buffers[name] = buffer if buffer is None or place.type == "meta" else buffer.to(place)
        return self


class HubModel(KeepsBuffers):
    """The whole model, untouched; every layer is recomputed in the backward pass, by transformers' own checkpoints."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        causal = made(*_key(workload))
        _adopt(self, causal.train())
        _set_blocks(workload, self.layers, _base(self))
        self.recompute(reentrant=False)

    def recompute(self, *, reentrant: bool) -> None:
        """Checkpoint every layer, by torch's reentrant implementation of checkpoints or by the newer one."""
        _base(self).activation_checkpointing_enable({"use_reentrant": reentrant})

    @property
    def layers(self) -> nn.ModuleList:
        return _layers(self)

    def named_parameters(self, *args: Any, **words: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the ends' parameters first: all methods sum the gradient's norm in this order."""
        own = {id(parameter) for parameter in self.layers.parameters()}
        found = list(super().named_parameters(*args, **words))
        yield from sorted(found, key=lambda pair: id(pair[1]) in own)

    def forward(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the mean cross-entropy of (B, T) token ids; its gradient is multiplied by `scale`."""
        return _head_loss(self, _base(self)(input_ids=inputs, use_cache=False)[0], targets, scale)

    def embed(self, inputs: Tensor) -> Tensor:
        """Map (B, T) token ids to (B, T, D), by the embedding table alone."""
        embedded: Tensor = _base(self).get_input_embeddings()(inputs)
        return embedded

    def loss(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the loss of embedded tokens, (B, T, D)."""
        return _head_loss(self, _base(self)(inputs_embeds=x, use_cache=False)[0], targets, scale)


class HubEnds(KeepsBuffers):
    """The modules of the model before its first layer and after its last."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        causal = made(*_key(workload))
        _take_out(causal)
        _adopt(self, causal)
        _set_blocks(workload, (), _base(self))

    def embed(self, inputs: Tensor) -> Tensor:
        """Map (B, T) token ids to (B, T, D). Ids without memory go through the embedding table alone, which gives the
        right shape."""
        base = _base(self)
        if inputs.is_meta:  # the model's loop may choose a mask by the ids, which have no values here
            shaped: Tensor = base.get_input_embeddings()(inputs)
            return shaped
        with _replaced(base._modules, _norm_name(base), nn.Identity()):
            embedded: Tensor = base(input_ids=inputs, use_cache=False)[0]
        return embedded

    def loss(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the mean cross-entropy over all tokens, in fp32; its gradient is multiplied by `scale`."""
        return _head_loss(self, self.normalized(x), targets, scale)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return all logits, (B, T, V), without a gradient."""
        logits, bend = F.linear(self.normalized(x), _head(self)), bend_of(_base(self).config)
        return bend(logits)[0] if bend else logits

    def normalized(self, x: Tensor) -> Tensor:
        """Return the output of the norm before the head."""
        base = _base(self)
        normalized: Tensor = base._modules[_norm_name(base)](x)
        return normalized


class HubEmbedding(HubEnds):
    """Maps (B, T) token ids to (B, T, D)."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        base = _base(self)
        base._modules[_norm_name(base)] = nn.Identity()
        self._modules.pop("lm_head", None)

    forward = HubEnds.embed


class HubHead(HubEnds):
    """Maps (B, T, D) and (B, T) token ids to the mean loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        base = _base(self)
        own = None if "lm_head" in self._modules else base.get_input_embeddings()  # a tied head is the embedding
        for name, table in _tables(base):
            if table is not own:
                del base._modules[name]

    forward = HubEnds.loss


def hub_layer(workload: Workload, index: int) -> nn.Module:
    """Return a layer without memory of its own: (B, T, D) to (B, T, D)."""
    parts = parts_of(workload)
    with unset_fake_temporarily():
        layer: nn.Module = copy.deepcopy(parts.layers[index])
    _set_blocks(workload, [layer])
    layer.register_forward_pre_hook(functools.partial(parts.give, index), with_kwargs=True)
    layer.register_forward_hook(_only_hidden)
    return layer


class HubParts:
    """The layers of a model, without memory, and the arguments that the model's loop passes to them."""

    def __init__(self, text: str, dtype: torch.dtype) -> None:
        with unset_fake_temporarily():  # the parts are cached, and must hold none of a rehearsal's fake tensors
            causal = made(text, dtype)
        self.layers = _take_out(causal)
        self.base = causal.base_model
        self.base._modules[_norm_name(self.base)] = nn.Identity()
        for name, table in _tables(self.base):
            if table is not self.base.get_input_embeddings():
                self.base._modules[name] = NoPositions(table)
        self.given: dict[Any, list[dict[str, Any]]] = {}

    def give(self, index: int, layer: nn.Module, args: Any, words: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before a layer's forward pass: add the arguments that the model's loop passes to the layer."""
        x = args[0].detach()
        if x.is_meta or isinstance(x, FakeTensor):  # the loop may choose a mask by values, which x lacks
            with unset_fake_temporarily():
                heard = self.heard(torch.zeros((), dtype=x.dtype).expand(x.shape))[index]
            return args, {**tree_map_only(Tensor, functools.partial(_like, x.device), heard), **words}
        key = (x.shape, x.dtype, x.device)
        if key not in self.given:
            self.given[key] = self.heard(x)
        return args, {**self.given[key][index], **words}

    @torch.no_grad()
    def heard(self, x: Tensor) -> list[dict[str, Any]]:
        """Run the model's loop on the input x, with stand-ins for the layers; return the arguments of each layer."""
        heard: list[dict[str, Any]] = []
        stands = nn.ModuleList(StandIn(layer, heard) for layer in self.layers)
        with _replaced(self.base._modules, _list_name(self.base), stands):
            self.base(inputs_embeds=x, use_cache=False)
        if len(heard) != len(stands):
            raise Unlike(f"its {len(stands)} layers are called {len(heard)} times")
        return heard


class StandIn(nn.Module):
    """Stands in a layer's place: notes its arguments beside its input, and returns the input."""

    def __init__(self, layer: nn.Module, heard: list[dict[str, Any]]) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # no child: the layer's parameters are not the stand-in's
        self.heard = heard

    def __getattr__(self, name: str) -> Any:
        """Return the layer's own attribute: the model's loop may read the layer's kind, such as attention_type."""
        return getattr(self.__dict__["layer"], name) if name not in self._modules else self._modules[name]

    def forward(self, x: Tensor, *others: Any, **given: Any) -> Any:
        names = [*inspect.signature(self.layer.forward).parameters][1:]  # of a layer's arguments beside its input
        self.heard.append(dict(zip(names, others, strict=False)) | given)
        return x


class NoPositions(nn.Module):
    """Stands in the place of a table of learned positions, which has no memory: nothing is added to the input."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.width, self.dtype = table.embedding_dim, table.weight.dtype

    def forward(self, positions: Tensor) -> Tensor:
        nothing = torch.zeros((), dtype=self.dtype, device=positions.device)
        return nothing.expand(*positions.shape, self.width)


def made(text: str, dtype: torch.dtype) -> Any:
    """Return transformers' model of a configuration, in which only buffers have memory. Raises Unlike."""
    with torch.device("meta"):
        causal = theirs(json.loads(text), dtype)
    _compute_buffers(causal)
    if causal.config.tie_word_embeddings:
        causal.tie_weights()
    return causal


def theirs(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return transformers' model of a configuration unchanged, with its own starting values. Raises Unlike."""
    transformers = library()
    try:
        own = transformers.AutoConfig.for_model(**config)
        return transformers.AutoModelForCausalLM.from_config(own, dtype=dtype, trust_remote_code=False)
    except (ImportError, KeyError, TypeError, ValueError) as error:
        told = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0]
        raise Unlike(f"transformers {transformers.__version__} does not make it: {told:.200}") from error


def config_to_save(workload: Workload) -> Any:
    """Return transformers' configuration of the workload's model, for its saved weights. Raises Unlike."""
    text, dtype = _key(workload)
    given = json.loads(str(workload.config))
    config = json.loads(text) | {name: given[name] for name in given if name.endswith(("dropout", "_pdrop"))}
    with torch.device("meta"):
        causal = theirs(config, dtype)
    causal.config.architectures = [type(causal).__name__]
    return causal.config


def library() -> Any:
    """Return transformers. Raises Unavailable with the command that installs it."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # configurations are local files: transformers asks no server
    try:
        import transformers
    except ImportError as error:
        raise Unavailable(NEEDS) from error
    transformers.utils.logging.set_verbosity_error()
    return transformers


def parts_of(workload: Workload) -> HubParts:
    """Return the parts of the workload's model, which all of its layers share."""
    return _parts(*_key(workload))


def _set_blocks(workload: Workload, layers: Iterable[nn.Module], base: nn.Module | None = None) -> None:
    """Let layers, and the norm after the last one, compute long samples in blocks of tokens."""
    if not (at_once := workload.block_tokens) or (blocks := workload.anatomy.blocks) is None:
        return
    most = job.NUM_INNER // hub_config.inner_size(str(workload.config), workload.hidden_size)
    for layer in layers:
        token_blocks.set_blocks(layer, blocks.parts, at_once, most)
    if base is not None:
        token_blocks.set_blocks(base, [_norm_name(base)], at_once, most)


def _key(workload: Workload) -> tuple[str, torch.dtype]:
    assert workload.config is not None
    sizes = (workload.num_layers, workload.hidden_size, workload.vocab_size)
    return json.dumps(narrowed(workload.config, *sizes)), DTYPES[workload.dtype]


_parts = functools.lru_cache(maxsize=8)(HubParts)


def _adopt(module: nn.Module, causal: Any) -> None:
    """Give `module` the model's children, by their names; a tied head, which has no tensor of its own, is left out."""
    embedding = causal.get_input_embeddings()
    for name, child in causal.named_children():
        if child is not causal.get_output_embeddings():
            module.add_module(name, child)
        elif child.weight is not embedding.weight:
            module.add_module("lm_head", child)
    object.__setattr__(module, "base_name", causal.base_model_prefix)


def _base(module: Any) -> Any:
    return module._modules[module.base_name]


def _head_loss(module: Any, hidden: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Return the mean cross-entropy of the linear head on normalized hidden states, (B, T, D)."""
    rows, head = hidden.flatten(0, 1), _head(module)
    bend = bend_of(_base(module).config)
    mean: Tensor = HeadLoss.apply(rows, head, targets.flatten(), scale, bend)  # type: ignore[no-untyped-call]
    return mean


def bend_of(config: Any) -> Bend | None:
    """Return the model's function of each logit after the head (a cap or a divisor); None if its configuration has
    none."""
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        return functools.partial(_capped, cap)
    if (divisor := getattr(config, "logits_scaling", 1.0)) != 1:
        return lambda logits: (logits.div_(divisor), 1 / divisor)
    return None


def _capped(cap: float, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits as Gemma 2 caps them, and the cap's slopes, which overwrite the logits."""
    curve = logits.div_(cap).tanh_()
    capped = curve * cap
    return capped, torch.addcmul(curve.new_ones(()), curve, curve, value=-1, out=curve)


def _head(module: Any) -> Tensor:
    """The matrix of the head: (V, D)."""
    owner = module._modules.get("lm_head") or _base(module).get_input_embeddings()
    weight: Tensor = owner.weight
    return weight


def _list_name(base: nn.Module) -> str:
    """Return the name of the list of layers. Raises Unlike if the model has no such list."""
    config: Any = base.config
    for name, child in base.named_children():
        if isinstance(child, nn.ModuleList) and len(child) in (0, config.num_hidden_layers):
            return name
    raise Unlike(f"it has no list of its {config.num_hidden_layers} layers")


def _norm_name(base: nn.Module) -> str:
    """Return the name of the norm after the last layer. Raises Unlike if there is none."""
    for name in NORMS:
        if name in base._modules:
            return name
    raise Unlike(f"it has none of {', '.join(NORMS)} after its layers")


def _tables(base: nn.Module) -> list[tuple[str, nn.Embedding]]:
    """Return the tables of the embedding by name: that of tokens and, in some models, that of learned positions."""
    return [(name, child) for name, child in base.named_children() if isinstance(child, nn.Embedding)]


def _layers(module: Any) -> nn.ModuleList:
    base = _base(module)
    found: nn.ModuleList = base._modules[_list_name(base)]
    return found


def _take_out(causal: Any) -> nn.ModuleList:
    """Remove the model's layers from the model, and return the layers."""
    base = causal.base_model
    name = _list_name(base)
    layers: nn.ModuleList = base._modules[name]
    base._modules[name] = nn.ModuleList()
    return layers


def _compute_buffers(causal: Any) -> None:
    """Create each module that holds only computed buffers again, on the CPU, so that the buffers have values. Raises
    Unlike for a buffer that the configuration does not determine."""
    for name, module in list(causal.named_modules()):
        if not module._buffers:
            continue
        if list(module._buffers) == ["embed_scale"]:  # the scale of Gemma's embedding
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device="cpu")
            continue
        if module._parameters or not hasattr(module, "config") or ".layers." in name:
            raise Unlike(f"{name} ({type(module).__name__}) holds buffers that are no function of the configuration")
        with torch.device("cpu"):
            causal.set_submodule(name, type(module)(module.config))


def _like(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _only_hidden(layer: nn.Module, args: Any, output: Any) -> Any:
    """Hook after a layer's forward pass: return the hidden states, the first of several outputs."""
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _replaced(modules: dict[str, Any], name: str, module: nn.Module) -> Iterator[None]:
    own, modules[name] = modules[name], module
    try:
        yield
    finally:
        modules[name] = own
