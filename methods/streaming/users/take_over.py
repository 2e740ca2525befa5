"""Takes a user's model over for a training, and lets the training give it back. `undo` collects what gives it back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from methods.shared.terms import Terms
from methods.streaming.layer_kinds import LayerSource
from methods.streaming.layer_state import LayerState, NamedLayer
from methods.streaming.starting_values import fill_states
from methods.streaming.users.access import ScriptAccess
from methods.streaming.users.layer import UserLayer
from methods.streaming.users.model import UserModel, give, refuse_step
from methods.streaming.users.parameters import observe
from methods.streaming.users.state import SavedState, StatesElsewhere, refuse_copy


class StreamedForward:
    """Replaces a layer's forward(). This object cannot be copied: a copy of the model would call the original's
    layers."""

    def __init__(self, training: Any, place: int) -> None:
        self.training, self.place = training, place

    @torch._disable_dynamo  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.training.visit(self.place, args, options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy()


def layers_of(user: UserModel, terms: Terms) -> LayerSource:
    """Return the user's layers, which move to their homes one at a time: the user's copy of a layer is freed before the
    next home is made."""

    def start(states: Iterable[LayerState]) -> list[LayerState]:
        started = []
        for state in states:
            assert isinstance(state.module, UserLayer)
            move_home(state, state.module.users)
            started.append(state)
        return started

    rows = zip(user.layers, user.prefixes, user.own_parameters, user.are_frozen, strict=True)
    layers = [
        NamedLayer(layer, prefix, None if is_frozen else user.groups_of(parameters), user.layer_dtype)
        for layer, prefix, parameters, is_frozen in rows
    ]
    return LayerSource(terms, layers, start)


def replace_forwards(training: Any, undo: ExitStack) -> None:
    """Replace each layer's forward() by a call of this training."""
    for place, module in enumerate(training.user.modules):
        before = vars(module).get("forward")
        module.forward = StreamedForward(training, place)
        undo.callback(_restore, module, before)


def observe_script(user: UserModel, access: ScriptAccess, undo: ExitStack) -> None:
    """Let `access` see the script's uses of the layers' parameters."""
    streamed = [parameter for parameters in user.own_parameters for parameter in parameters]
    # autograd's references are hidden from the collector
    take = weakref.WeakMethod(access.take_from_outside)
    for parameter in streamed:
        if not parameter.requires_grad:
            continue
        hook = parameter.register_post_accumulate_grad_hook(partial(_call, take))
        undo.callback(hook.remove)
    undo.callback(observe(streamed, access))


def take_optimizer(user: UserModel, saved: SavedState, undo: ExitStack) -> None:
    """Let state_dict() and load_state_dict() of the optimizer, and load_state_dict() of the model, be those of
    `saved`."""
    optimizer = user.optimizer
    hooks = [
        user.model.register_load_state_dict_post_hook(saved.take_weights),
        optimizer.register_step_pre_hook(refuse_step),
        optimizer.register_state_dict_pre_hook(saved.show_none),
        optimizer.register_state_dict_post_hook(saved.add_states),
        optimizer.register_load_state_dict_pre_hook(saved.keep_states),
        optimizer.register_load_state_dict_post_hook(saved.load_states),
    ]
    for hook in hooks:
        undo.callback(hook.remove)
    undo.callback(setattr, optimizer, "state", optimizer.state)
    optimizer.state = StatesElsewhere()  # type: ignore[assignment]


def _call(method: weakref.WeakMethod[Any], parameter: nn.Parameter) -> None:
    """Call the method, unless its object is gone."""
    if (living := method()) is not None:
        living(parameter)


def _restore(module: nn.Module, before: Any) -> None:
    if before is None:
        del module.forward
    else:
        module.forward = before


def move_home(state: LayerState, parameters: Sequence[nn.Parameter]) -> None:
    """Copy the parameters' values into a new state, and make the parameters views of that state's weights."""

    def values(named: Iterable[tuple[str, Tensor]]) -> None:
        for (_, slab), parameter in zip(named, parameters, strict=True):
            slab.copy_(parameter.detach())

    fill_states([state], values)
    for parameter, weight in zip(parameters, state.layout.views(state.current.weights), strict=True):
        give(parameter, weight)
