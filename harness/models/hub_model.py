"""A causal model of the Hugging Face Hub, whole or taken apart: two ends, and layers that compute one by one.

transformers' own modules compute everything. The reference trains HubModel, the whole model, which runs transformers'
own loop over the layers. The other methods use parts of the same model: hub_layer() and HubEnds. The loop passes a
layer more arguments than its input, such as angles of positions and masks. To learn these arguments, the harness runs
the loop once with stand-ins in place of the layers. harness/plan/sketch.py checks that the whole model and its
parts compute the same.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from harness.core import hub_config
from harness.core.anatomy import MOST_INNER_ELEMENTS, TRANSFORMERS_MISSING, block_tokens
from harness.core.hub_config import narrowed
from harness.core.job import Workload
from harness.core.refusals import RefusedModel, Unavailable
from harness.models import grouped_experts, token_blocks
from harness.models.gpt import DTYPES, Bend, HeadLoss
from harness.models.grouped_heads import takes_groups

FLOAT = "__float__"  # key with which transformers writes numbers that JSON does not have
# names of the norm after the last layer
NORMS = (
    "norm",
    "ln_f",
    "final_layer_norm",
    "final_layernorm",
    "norm_f",
    "final_norm",
    "embedding_norm",
    "layer_norm",
    "layernorm",
)


class KeepsBuffers(nn.Module):
    """A module whose buffers keep their values and dtype when the module is converted. The buffers hold computed
    numbers, such as frequencies of rotary positions."""

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert only the parameters. The buffers move to the parameters' device, but keep the values and the dtype in
        which they were computed."""
        kept = [(module, dict(module._buffers)) for module in self.modules() if module._buffers]
        super()._apply(function, recurse)
        place = next(self.parameters()).device
        for module, buffers in kept:
            for name, buffer in buffers.items():
                module._buffers[name] = buffer if buffer is None or place.type == "meta" else buffer.to(place)
        return self


class HubModel(KeepsBuffers):
    """The whole model as transformers makes it. In the backward pass transformers' own checkpoints recompute every
    layer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        causal = memoryless_model(*_key(workload))
        _adopt(self, causal.train())
        _set_blocks(workload, enumerate(self.layers), _base(self))
        self.recompute(reentrant=False)

    def recompute(self, *, reentrant: bool) -> None:
        """Make the backward pass recompute every layer. `reentrant`: True for torch's older, reentrant implementation
        of checkpoints, False for its newer one."""
        _base(self).activation_checkpointing_enable({"use_reentrant": reentrant})

    @property
    def layers(self) -> nn.ModuleList:
        return _layers(self)

    def named_parameters(self, *args: Any, **settings: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the ends first, then those of the layers. All methods sum the gradient's norm in this
        order."""
        of_layers = {id(parameter) for parameter in self.layers.parameters()}
        parameters = list(super().named_parameters(*args, **settings))
        yield from sorted(parameters, key=lambda pair: id(pair[1]) in of_layers)

    def forward(self, inputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the mean cross-entropy of (B, T) token ids. The loss's gradient is multiplied by `scale`."""
        return _head_loss(self, _base(self)(input_ids=inputs, use_cache=False)[0], targets, scale)

    def embed(self, inputs: Tensor) -> Tensor:
        """Map (B, T) token ids to (B, T, D), by the embedding table alone."""
        embedded: Tensor = _base(self).get_input_embeddings()(inputs)
        return embedded

    def loss(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the mean cross-entropy of embedded tokens, (B, T, D). The loss's gradient is multiplied by `scale`."""
        return _head_loss(self, _base(self)(inputs_embeds=x, use_cache=False)[0], targets, scale)


class HubEnds(KeepsBuffers):
    """The two ends of the model: the modules before its first layer and those after its last layer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        causal = memoryless_model(*_key(workload))
        _take_out(causal)
        _adopt(self, causal)
        _set_blocks(workload, (), _base(self))

    def embed(self, inputs: Tensor) -> Tensor:
        """Map (B, T) token ids to (B, T, D). If the ids are a meta tensor, only the embedding table is applied; its
        output has the right shape."""
        base = _base(self)
        if inputs.is_meta:
            # the model's loop might read the ids to choose a mask, but meta tensors have no values
            shaped: Tensor = base.get_input_embeddings()(inputs)
            return shaped
        with _replaced(base._modules, norm_name(base), nn.Identity()):
            embedded: Tensor = base(input_ids=inputs, use_cache=False)[0]
        return embedded

    def loss(self, x: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
        """Return the mean cross-entropy over all tokens, in fp32. The loss's gradient is multiplied by `scale`."""
        return _head_loss(self, self.normalized(x), targets, scale)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return all logits, (B, T, V), without a gradient."""
        logits, bend = F.linear(self.normalized(x), _head(self)), bend_of(_base(self).config)
        return bend(logits)[0] if bend else logits

    def normalized(self, x: Tensor) -> Tensor:
        """Return the output of the norm before the head."""
        base = _base(self)
        normalized: Tensor = base._modules[norm_name(base)](x)
        return normalized


class HubEmbedding(HubEnds):
    """Maps (B, T) token ids to (B, T, D)."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        base = _base(self)
        base._modules[norm_name(base)] = nn.Identity()
        self._modules.pop("lm_head", None)

    forward = HubEnds.embed


class HubHead(HubEnds):
    """Maps hidden states (B, T, D) and target token ids (B, T) to the mean loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        base = _base(self)
        # a tied head uses this table
        embedding = None if "lm_head" in self._modules else base.get_input_embeddings()
        for name, table in _tables(base):
            if table is not embedding:
                del base._modules[name]

    forward = HubEnds.loss


def hub_layer(workload: Workload, index: int) -> nn.Module:
    """Return layer `index`, which maps (B, T, D) to (B, T, D). The layer's parameters are meta tensors."""
    parts = parts_of(workload)
    with unset_fake_temporarily():
        layer: nn.Module = copy.deepcopy(parts.layers[index])
    _set_blocks(workload, [(index, layer)])
    layer.register_forward_pre_hook(functools.partial(parts.give, index), with_kwargs=True)
    if buffers := _own_buffers(layer):
        layer.register_forward_pre_hook(functools.partial(_bring, buffers))
    layer.register_forward_hook(_only_hidden)
    return layer


class HubParts:
    """The layers of a model, without memory, and the arguments that the model's loop passes to the layers beside their
    input."""

    def __init__(self, text: str, dtype: torch.dtype) -> None:
        with unset_fake_temporarily():
            # the parts are cached, so they must hold no fake tensors of a rehearsal
            causal = memoryless_model(text, dtype)
        self.layers = _take_out(causal)
        self.base = causal.base_model
        self.base._modules[norm_name(self.base)] = nn.Identity()
        for name, table in _tables(self.base):
            if table is not self.base.get_input_embeddings():
                self.base._modules[name] = NoPositions(table)
        self.arguments: dict[Any, list[dict[str, Any]]] = {}

    def give(
        self, index: int, layer: nn.Module, args: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Hook before the forward pass of layer `index`: add the arguments that the model's loop passes to the layer.
        The arguments are kept for each shape, dtype and device of the layer's input."""
        x = args[0].detach()
        if x.is_meta or isinstance(x, FakeTensor):
            # x has no values, which the loop may read to choose a mask
            with unset_fake_temporarily():
                heard = self.heard(torch.zeros((), dtype=x.dtype).expand(x.shape))[index]
            return args, {**tree_map_only(Tensor, functools.partial(_like, x.device), heard), **keywords}
        key = (x.shape, x.dtype, x.device)
        if key not in self.arguments:
            self.arguments[key] = self.heard(x)
        return args, {**self.arguments[key][index], **keywords}

    @torch.no_grad()
    def heard(self, x: Tensor) -> list[dict[str, Any]]:
        """Run the model's loop on the embedded tokens x, with stand-ins in place of the layers. Return the arguments
        that each layer gets beside its input, by name. Raises RefusedModel if the loop does not call each layer once,
        or needs more of a layer than its output."""
        heard: list[dict[str, Any]] = []
        stands = nn.ModuleList(StandIn(layer, heard) for layer in self.layers)
        with _replaced(self.base._modules, list_name(self.base), stands):
            try:
                self.base(inputs_embeds=x, use_cache=False)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                values = {"error": type(error).__name__, "place": place_of(error)}
                raise RefusedModel("outputs", **values) from error
        if len(heard) != len(stands):
            raise RefusedModel("calls", num_layers=len(stands), calls=len(heard))
        return heard


class StandIn(nn.Module):
    """A module that replaces a layer. It appends the arguments that it gets beside its input to `heard`, and returns
    its input unchanged."""

    def __init__(self, layer: nn.Module, heard: list[dict[str, Any]]) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # `layer` is not registered as a child module
        self.heard = heard

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the layer, because the model's loop may read attributes such as attention_type."""
        return getattr(self.__dict__["layer"], name) if name not in self._modules else self._modules[name]

    def forward(self, x: Tensor, *others: Any, **keywords: Any) -> Any:
        # the first argument is the layer's input
        names = [*inspect.signature(self.layer.forward).parameters][1:]
        self.heard.append(dict(zip(names, others, strict=False)) | keywords)
        return x


class NoPositions(nn.Module):
    """A module that replaces a table of learned positions whose values do not exist yet. The module returns zeros, so
    the model adds nothing to its input."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.width, self.dtype = table.embedding_dim, table.weight.dtype

    def forward(self, positions: Tensor) -> Tensor:
        nothing = torch.zeros((), dtype=self.dtype, device=positions.device)
        return nothing.expand(*positions.shape, self.width)


def memoryless_model(text: str, dtype: torch.dtype) -> Any:
    """Return transformers' model of a configuration. The model's buffers have memory and values; its parameters have no
    memory. Raises RefusedModel if the model cannot be trained here."""
    with torch.device("meta"):
        causal = transformers_model(json.loads(text), dtype)
    for module in causal.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.is_meta:
                # DiffLlama draws vectors by torch.normal, which gives them memory although torch.device says meta
                setattr(module, name, nn.Parameter(weight.to("meta")))
    _compute_buffers(causal)
    if getattr(causal.config, "tie_word_embeddings", False):
        causal.tie_weights()
    return causal


def causal_model(workload: Workload, device: str) -> Any:
    """Return transformers' own model, with its own head and loss, in the workload's dtype on a device. The values of
    its parameters are not yet set. Raises RefusedModel if the model cannot be trained here."""
    holder: Any = KeepsBuffers()
    holder.causal = memoryless_model(*_key(workload))
    causal = holder.to_empty(device=device).causal
    causal.tie_weights()  # a tied tensor got memory for each of its two names
    return causal.train()


def transformers_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the model that transformers makes of a configuration, with transformers' starting values. Raises
    RefusedModel if transformers cannot make it."""
    transformers = library()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    version, kind = transformers.__version__, config["model_type"]
    # The part for texts of some models has a type of its own, such as emu3_text_model, but the causal class of the
    # whole model's type.
    named = [
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind == name or kind.startswith(f"{name}_")
    ]
    if not named or kind not in transformers.CONFIG_MAPPING:
        raise RefusedModel("unknown-type", version=version, kind=f"{kind:.40}")
    causal_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[max(named, key=len)])
    if kind not in named and causal_class.config_class is not transformers.CONFIG_MAPPING[kind]:
        raise RefusedModel("unknown-type", version=version, kind=f"{kind:.40}")
    try:
        configuration = transformers.AutoConfig.for_model(**_with_floats(hub_config.with_own_names(config)))
        causal = causal_class._from_config(configuration, dtype=dtype)
    except Exception as error:
        # transformers raises errors of many kinds for configurations that it cannot use
        if is_out_of_memory(error):
            raise
        raise _unmade(error, config, version) from error
    if causal.base_model is causal:
        causal.base_model_prefix = (
            "model"  # Llama 4 and Mllama name a part of the model of texts and images there
        )
    return causal


def _with_floats(value: Any) -> Any:
    """Return a value of a configuration with the numbers that transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return (
            float(value[FLOAT])
            if value.keys() == {FLOAT}
            else {name: _with_floats(value[name]) for name in value}
        )
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _unmade(error: Exception, config: dict[str, Any], version: str) -> RefusedModel:
    """Return the reason why transformers made no model of a configuration. Its checks of fields and of the whole
    configuration raise errors whose text begins with the name of the field or check."""
    kind = type(error).__name__
    named = re.search(r"'(\w+)'", str(error).partition("\n")[0])
    if kind == "StrictDataclassFieldValidationError" and named:
        return RefusedModel("rejected-field", version=version, field=named[1])
    heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    if hidden_size % heads:
        return RefusedModel("heads", version=version, heads=heads, hidden_size=hidden_size)
    if kind == "StrictDataclassClassValidationError" and named:
        return RefusedModel("rejected", version=version, check=named[1])
    return RefusedModel("unmade", version=version, error=kind, place=place_of(error))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)  # torch's is a RuntimeError


def place_of(error: BaseException) -> str:
    """Return the file and line that raised an error: the last in the code of a type of models, or the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    of_types = [
        frame for frame in frames if Path(frame.filename).name.startswith(("modeling_", "configuration_"))
    ]
    frame = (of_types or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def config_to_save(workload: Workload) -> Any:
    """Return transformers' configuration of the workload's model, to be saved beside its weights. Dropout has the
    values of the workload's config.json. Raises RefusedModel if transformers cannot make the model."""
    text, dtype = _key(workload)
    declared = json.loads(str(workload.config))
    config = json.loads(text) | {
        name: declared[name] for name in declared if name.endswith(("dropout", "_pdrop"))
    }
    with torch.device("meta"):
        causal = transformers_model(config, dtype)
    causal.config.architectures = [type(causal).__name__]
    return causal.config


@functools.cache
def library() -> Any:
    """Import the module transformers and return it. From then on its attention groups heads only where torch should get
    them so (grouped_heads.py), and experts compute on tensors without memory (grouped_experts.py). If transformers is
    missing, raises Unavailable, whose text names the command that installs it."""
    # configurations are local files, so transformers need not ask a server
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
        from transformers.integrations import moe, sdpa_attention
    except ImportError as error:
        raise Unavailable(TRANSFORMERS_MISSING) from error
    transformers.utils.logging.set_verbosity_error()
    may_group = sdpa_attention.use_gqa_in_sdpa

    def may_group_now(attention_mask: Tensor | None, key: Tensor, value: Tensor) -> bool:
        return may_group(attention_mask, key, value) and takes_groups(key)

    sdpa_attention.use_gqa_in_sdpa = may_group_now
    grouped_experts.adapt(moe)
    return transformers


def parts_of(workload: Workload) -> HubParts:
    """Return the HubParts of the workload's model. All layers of a model share one HubParts."""
    return _parts(*_key(workload))


def _set_blocks(
    workload: Workload, layers: Iterable[tuple[int, nn.Module]], base: nn.Module | None = None
) -> None:
    """Make `layers`, pairs of an index and a module, compute long samples in blocks of tokens and, if `base` is given,
    also the norm after its last layer. Nothing changes if the workload's samples are short."""
    if not (at_once := block_tokens(workload)) or not workload.anatomy.has_blocks:
        return
    most = MOST_INNER_ELEMENTS // hub_config.inner_size(str(workload.config), workload.hidden_size)
    for index, layer in layers:
        if (blocks := workload.anatomy.kind_of(index).blocks) is not None:
            token_blocks.set_blocks(layer, blocks.parts, at_once, most)
    if base is not None:
        token_blocks.set_blocks(base, [norm_name(base)], at_once, most)


def _key(workload: Workload) -> tuple[str, torch.dtype]:
    assert workload.config is not None
    sizes = (workload.num_layers, workload.hidden_size, workload.vocab_size)
    return json.dumps(narrowed(workload.config, *sizes)), DTYPES[workload.dtype]


_parts = functools.lru_cache(maxsize=8)(HubParts)


def _adopt(module: nn.Module, causal: Any) -> None:
    """Give `module` the children of the model `causal` under their own names, the head under the name lm_head. A tied
    head is left out, because it has no tensor of its own."""
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
    """Return the mean cross-entropy of the linear head on normalized hidden states (B, T, D) and target token ids
    (B, T). The loss's gradient is multiplied by `scale`."""
    rows, head = hidden.flatten(0, 1), _head(module)
    bend = bend_of(_base(module).config)
    mean: Tensor = HeadLoss.apply(rows, head, targets.flatten(), scale, bend)  # type: ignore[no-untyped-call]
    return mean


def bend_of(config: Any) -> Bend | None:
    """Return the function that the model applies to each logit after the head, a cap or a divisor; None: no such
    function."""
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        return functools.partial(_capped, cap)
    if (divisor := getattr(config, "logits_scaling", 1.0)) != 1:
        return lambda logits: (logits.div_(divisor), 1 / divisor)
    return None


def _capped(cap: float, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits capped as in Gemma 2, cap * tanh(logits / cap), and the slope of this function at each logit.
    The slopes overwrite the logits."""
    curve = logits.div_(cap).tanh_()
    capped = curve * cap
    return capped, torch.addcmul(curve.new_ones(()), curve, curve, value=-1, out=curve)


def _head(module: Any) -> Tensor:
    """Return the head's matrix, (V, D)."""
    owner = module._modules.get("lm_head") or _base(module).get_input_embeddings()
    weight: Tensor = owner.weight
    return weight


def list_name(base: nn.Module) -> str:
    """Return the name of the base model's list of layers. Raises RefusedModel if there is no such list."""
    config: Any = base.config
    lists = [(name, child) for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    for name, child in lists:
        if len(child) in (0, config.num_hidden_layers):
            return name
    # lists within other modules, too, as a reader may see them in the model
    lengths = ", ".join(
        f"{name} of {len(child)}" for name, child in base.named_modules() if isinstance(child, nn.ModuleList)
    )
    lengths = lengths or "none"
    raise RefusedModel(
        "no-layers", num_layers=config.num_hidden_layers, base=type(base).__name__, lists=lengths
    )


def norm_name(base: nn.Module) -> str:
    """Return the name of the norm after the last layer, one of NORMS. Raises RefusedModel if no module has such a
    name."""
    for name in NORMS:
        if name in base._modules:
            return name
    others = [
        name for name, child in base.named_children() if not isinstance(child, nn.Embedding | nn.ModuleList)
    ]
    raise RefusedModel("no-norm", known=", ".join(NORMS), others=", ".join(others) or "none")


def _tables(base: nn.Module) -> list[tuple[str, nn.Embedding]]:
    """Return the names and modules of the embedding's tables: the table of tokens and, in some models, the table of
    learned positions."""
    return [(name, child) for name, child in base.named_children() if isinstance(child, nn.Embedding)]


def _layers(module: Any) -> nn.ModuleList:
    base = _base(module)
    layers: nn.ModuleList = base._modules[list_name(base)]
    return layers


def _take_out(causal: Any) -> nn.ModuleList:
    """Remove the layers from the model `causal`, and return them."""
    base = causal.base_model
    name = list_name(base)
    layers: nn.ModuleList = base._modules[name]
    base._modules[name] = nn.ModuleList()
    return layers


def _compute_buffers(causal: Any) -> None:
    """Set the values of the model's buffers, on the CPU. To get them, make each module that holds only buffers again
    from the configuration. Raises RefusedModel for a buffer that the configuration does not determine."""
    for name, module in list(causal.named_modules()):
        if not module._buffers:
            continue
        if list(module._buffers) == ["embed_scale"]:  # the scale of Gemma's embedding
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device="cpu")
            continue
        has_weights = any(True for _ in module.parameters())
        if has_weights or not hasattr(module, "config") or f".{list_name(causal.base_model)}." in name:
            if not _start_buffers(causal, module):
                raise RefusedModel("buffers", part=f"{name} ({type(module).__name__})")
            continue
        with torch.device("cpu"):
            causal.set_submodule(name, type(module)(module.config))


def _start_buffers(causal: Any, module: nn.Module) -> bool:
    """Set the buffers of a module with weights to the values from which transformers starts them, such as the zeros
    that a router adds to its scores. Return False if transformers does not set them all, or not without the values of
    other tensors."""
    for name, buffer in module._buffers.items():
        if buffer is None or not buffer.is_floating_point():
            return False
        module._buffers[name] = torch.full(buffer.shape, torch.nan, dtype=buffer.dtype, device="cpu")
    try:
        with torch.device("cpu"):
            causal._init_weights(module)  # the weights have no memory, so only the buffers change
    except NotImplementedError:  # from torch: a tensor without memory has no values
        return False
    return not any(bool(buffer.isnan().any()) for _, buffer in module.named_buffers(recurse=False))


def _own_buffers(layer: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the layer's buffers, each with its module and its name there."""
    named = [(module, name, buffer) for module in layer.modules() for name, buffer in module._buffers.items()]
    return [(module, name, buffer) for module, name, buffer in named if buffer is not None]


def _bring(buffers: list[tuple[nn.Module, str, Tensor]], layer: nn.Module, args: Any) -> None:
    """Hook before a layer's forward pass: move the layer's buffers to the memory of its input."""
    x = args[0]
    for module, name, buffer in buffers:
        held = module._buffers[name]
        assert held is not None
        if held.device == x.device and isinstance(held, FakeTensor) == isinstance(x, FakeTensor):
            continue
        module._buffers[name] = (
            buffer.to(x.device) if grouped_experts.has_memory(x) else _like(x.device, buffer)
        )


def _like(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _only_hidden(layer: nn.Module, args: Any, output: Any) -> Any:
    """Hook after a layer's forward pass: return the hidden states alone. If the layer has several outputs, the hidden
    states are the first."""
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _replaced(modules: dict[str, Any], name: str, module: nn.Module) -> Iterator[None]:
    replaced, modules[name] = modules[name], module
    try:
        yield
    finally:
        modules[name] = replaced
