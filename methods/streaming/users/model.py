"""Checks a user's model and optimizer, and divides the model into layers and the rest, which stays on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from harness.models.gpt import DTYPES
from methods.offload.adamw import AdamSettings, Settings
from methods.shared.module_watch import hooks_of_step
from methods.streaming.users.layer import Placeholders, UserLayer
from methods.streaming.users.parameters import ObservedParameter

UNUSED = ("amsgrad", "maximize", "differentiable")  # options of torch's AdamW that streaming updates lack


class UserModel:
    """A model's layers, and the rest of the model. Raises ValueError, with a message of one line, for a model or
    optimizer that cannot be streamed."""

    def __init__(
        self, model: nn.Module, layers: Iterable[nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        self.model, self.optimizer, self.modules = model, optimizer, list(layers)
        if any(isinstance(parameter, ObservedParameter) for parameter in model.parameters()):
            raise ValueError(
                "expected a model without a trainer, got one that a trainer holds; close() that trainer"
            )
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        paths = {id(module): path for path, module in model.named_modules()}
        for place, module in enumerate(self.modules):
            if id(module) not in paths:
                raise ValueError(
                    f"layer {place} ({type(module).__name__}) is not a part of the model; try layers of this model"
                )
        self.prefixes = [f"{paths[id(module)]}." for module in self.modules]
        _check_layers(self.modules, self.prefixes)
        # A parameter that is also used outside of one layer stays on the device, where autograd sums its gradients. So
        # does a trained parameter of a layer with frozen ones, such as an adapter: these travel without it.
        inside = [list(module.parameters()) for module in self.modules]
        elsewhere = _outside(model, self.modules)
        uses = Counter(id(parameter) for parameters in inside for parameter in parameters)
        alone = {key for key, count in uses.items() if count == 1 and key not in elsewhere}
        self.own_parameters = [
            _travelling([parameter for parameter in parameters if id(parameter) in alone])
            for parameters in inside
        ]
        self.are_frozen = [not all(p.requires_grad for p in parameters) for parameters in self.own_parameters]
        ids_in_layers = {id(parameter) for parameters in self.own_parameters for parameter in parameters}
        others = [parameter for parameter in model.parameters() if id(parameter) not in ids_in_layers]
        self.rest = [parameter for parameter in others if parameter.requires_grad]
        self.frozen = [parameter for parameter in others if not parameter.requires_grad]
        self._check_parameters()
        self._check_optimizer()
        self.layers: list[UserLayer] = []
        for place, (module, prefix) in enumerate(zip(self.modules, self.prefixes, strict=True)):
            shared = [parameter for parameter in inside[place] if id(parameter) not in ids_in_layers]
            self.layers.append(UserLayer(module, prefix[:-1], self.own_parameters[place], shared))
        self.ends = Placeholders(self.rest)
        self.order = self._order()

    def names_of(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        return [self.names[id(parameter)] for parameter in parameters]

    @property
    def trained_parts(self) -> list[list[nn.Parameter]]:
        """The parameters that are trained: those of the rest of the model, then those of each layer, bottom first."""
        layers = zip(self.own_parameters, self.are_frozen, strict=True)
        return [self.rest, *(parameters for parameters, is_frozen in layers if not is_frozen)]

    def groups_of(self, parameters: Sequence[nn.Parameter]) -> dict[str, int]:
        """Return, by each parameter's place as text, the index of the parameter's group in the optimizer."""
        groups = enumerate(self.optimizer.param_groups)
        group_of = {id(parameter): number for number, group in groups for parameter in group["params"]}
        return {str(place): group_of[id(parameter)] for place, parameter in enumerate(parameters)}

    def settings(self) -> Settings:
        """Return the optimizer's settings, which a schedule may have changed since the last step. Raises ValueError if
        the optimizer has other parameters than before, or options that streaming lacks."""
        self._check_groups()
        if self.grouped != [[*map(id, group["params"])] for group in self.optimizer.param_groups]:
            raise ValueError(
                "expected the optimizer's parameters as they were when the trainer was made, got others; try to make"
                " the trainer after add_param_group()"
            )
        rows = (
            (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            for group in self.optimizer.param_groups
        )
        return [AdamSettings(*map(float, row)) for row in rows]

    def _order(self) -> list[int]:
        """Return, for each of the model's parameters, its index in a list that has first the parameters of the rest of
        the model, then those of all layers, bottom first."""
        ids = [id(parameter) for part in self.trained_parts for parameter in part]
        places = {key: place for place, key in enumerate(ids)}
        return [places[key] for key in self.names if key in places]

    def _check_parameters(self) -> None:
        streamed = [parameter for parameters in self.own_parameters for parameter in parameters]
        for parameter in (*streamed, *self.rest):
            name = self.names[id(parameter)]
            if is_lazy(parameter):
                raise ValueError(
                    f"parameter {name}: expected values, got a lazy module's; try a forward pass first"
                )
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {name}: expected values, got the meta device; initialize it first"
                )
            if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
                raise ValueError(
                    f"parameter {name}: expected memory without gaps, got a part of a tensor; try a copy"
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                raise ValueError(
                    f"parameter {name}: expected no gradient hooks, got some: streaming does not call hooks; try to"
                    " change .grad between backward() and step()"
                )
        # adapters on frozen layers may have a dtype of their own
        parts = (streamed, self.rest) if all(self.are_frozen) else ([*streamed, *self.rest],)
        self.layer_dtype, *others = [self._dtype_of(part) for part in parts if part]
        self.dtype = others[0] if others else self.layer_dtype

    def _dtype_of(self, parameters: Sequence[nn.Parameter]) -> str:
        """Return the name of the parameters' dtype. Raises ValueError if they have several, or one that cannot be
        trained."""
        dtypes = {parameter.dtype: self.names[id(parameter)] for parameter in parameters}
        names = {dtype: name for name, dtype in DTYPES.items()}
        if len(dtypes) != 1 or not dtypes.keys() <= names.keys():
            got = ", ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in dtypes.items())
            raise ValueError(f"expected parameters of one dtype, float32, bfloat16 or float16, got {got}")
        return names[next(iter(dtypes))]

    def _check_optimizer(self) -> None:
        optimizer = self.optimizer
        if type(optimizer) is not torch.optim.AdamW:
            raise ValueError(
                f"expected torch.optim.AdamW, got {type(optimizer).__name__}: streaming makes only AdamW's updates"
            )
        if optimizer.state:
            raise ValueError(
                "expected an optimizer before its first step, got one with states; try the trainer's load_state_dict()"
            )
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [parameter for part in self.trained_parts for parameter in part]
        if not trained:
            raise ValueError(
                "expected parameters with requires_grad=True, got none; try requires_grad_(), or adapters of peft"
            )
        if lacks := [self.names[id(parameter)] for parameter in trained if id(parameter) not in known]:
            raise ValueError(
                f"the optimizer lacks {len(lacks)} parameters, such as {lacks[0]}; add them, or freeze them"
            )
        if known - self.names.keys():
            raise ValueError(
                "the optimizer has parameters that are not the model's; make it of model.parameters()"
            )
        self._check_groups()
        self.grouped = [[*map(id, group["params"])] for group in optimizer.param_groups]

    def _check_groups(self) -> None:
        """Raise ValueError for options, or hooks of step(), that a step of the trainer would leave out."""
        if any(hook is not refuse_step for hook in hooks_of_step(self.optimizer)):
            raise ValueError(
                "expected an optimizer without hooks of its step(), got one: the trainer's step() does not call hooks;"
                " try their code before or after trainer.step()"
            )
        for group in self.optimizer.param_groups:
            if options := [name for name in UNUSED if group.get(name)]:
                raise ValueError(f"expected AdamW without {options[0]}; leave this option out")
            if not group.get("decoupled_weight_decay", True):
                raise ValueError(
                    "expected AdamW, got Adam's weight decay; leave decoupled_weight_decay=False out"
                )


def refuse_step(*_: Any) -> None:
    """A hook of the user's optimizer, whose step() would update the parameters a second time."""
    raise ValueError(
        "step: expected trainer.step() alone, got optimizer.step(), too; leave optimizer.step() out"
    )


def _travelling(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters of a layer that travel with it: the frozen ones, or all if none is frozen."""
    return [parameter for parameter in parameters if not parameter.requires_grad] or parameters


def _check_layers(modules: Sequence[nn.Module], prefixes: Sequence[str]) -> None:
    if not modules:
        raise ValueError("expected a list of layers, such as model.model.layers, got none")
    uses = Counter(map(id, modules))
    for module, prefix in zip(modules, prefixes, strict=True):
        for inner in module.modules():
            if isinstance(inner, torch.jit.ScriptModule):
                raise ValueError(
                    f"layer {prefix[:-1]}: expected a module of Python, got TorchScript's; try it without torch.jit"
                )
            if uses[id(inner)] > int(inner is module):
                raise ValueError(
                    f"layer {prefix[:-1]} is listed twice, or contains another layer of the list; list each layer once"
                )
            has_statistics = getattr(inner, "track_running_stats", False) and inner.training
            if has_statistics or getattr(inner, "sparse", False):
                what = "sparse gradients" if getattr(inner, "sparse", False) else "running statistics"
                raise ValueError(
                    f"layer {prefix[:-1]} ({type(inner).__name__}): expected no {what}, which break recompute"
                )
        if not any(True for _ in module.parameters()):
            raise ValueError(f"layer {prefix[:-1]} has no parameters; leave it out of the list")


def _outside(model: nn.Module, layers: Sequence[nn.Module]) -> set[int]:
    """Return the parameters, by identity, that modules outside of the layers use."""
    inside, outside = {id(inner) for layer in layers for inner in layer.modules()}, set[int]()
    for module in model.modules():
        if id(module) not in inside:
            outside.update(map(id, module._parameters.values()))
    return outside


def give(parameter: nn.Parameter, memory: Tensor) -> None:
    """Give the parameter this memory, which may be on another device; the parameter stays the same object."""
    if torch._has_compatible_shallow_copy_type(parameter, memory):
        parameter.data = memory
        return
    attributes: dict[str, Any] = dict(parameter.__dict__)
    torch.utils.swap_tensors(parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
    parameter.__dict__.update(attributes)
    # The hooks in this list were the old tensor's, so autograd would not call these hooks.
    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def move_frozen_and_buffers(user: UserModel, device: torch.device) -> None:
    """Move the frozen parameters that travel with no layer, and all buffers, to the device. Raises ValueError for a
    buffer on the meta device."""
    for parameter in user.frozen:
        give(parameter, parameter.detach().to(device))
    for path, module in user.model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {path}.{name}: expected values, got the meta device; initialize it first"
                )
            module._buffers[name] = buffer.to(device)
