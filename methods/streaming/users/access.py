"""Uses that a user's script makes of the layers' parameters, beside the trainer's own work. Each use is exact or is
refused.

    a use of a weight      first all updates end; the next forward pass fetches the layer again, as it may be changed
    a use of a gradient    the script gets the gradient that waits at home for step(); step() takes it back
    from outside           a gradient that comes from another place than the layer's own forward() is refused, but for
                           one from a backward pass of its own, which adds to the layer's

Where the trainer cannot take a change over, a copy of the weights shows it: weights in bf16 and fp16 have an fp32
master, and from a forward pass to the end of its backward pass slots hold other copies.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from methods.offload.clip import norms_of
from methods.streaming.gradient_views import settle_gradient
from methods.streaming.layer_state import LayerState

MEMORY = "{}: expected its memory to stay, where its updates are made, got another; try .copy_() in place of .data ="
MASTERS = (
    "{}: expected the same weights in {}, because each has an fp32 master, got others; try model.load_state_dict() of"
    " the whole model, which sets the masters, too"
)
FROZEN_LATER = (
    "{}: expected requires_grad={}, as when the trainer was made, got {}; try to make the trainer afterwards"
)
HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
MOVES = {Tensor.set_, Tensor.resize_, Tensor.share_memory_}
GET_GRADIENT, SET_GRADIENT, DELETE_GRADIENT = (
    getattr(Tensor.grad, name)  # type: ignore[attr-defined]
    for name in ("__get__", "__set__", "__delete__")
)
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
FREEZE = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
UPDATES_HAVE_BEGUN = (
    "{}: expected step() next, because without a limit of the norm, or with clipping='speculate', updates begin in the"
    " backward pass; try accumulates=True, with which they wait for step()"
)


class Taken(NamedTuple):
    """A parameter of layer `place`, its gradient's memory at home, and the gradient as the script has it, which it may
    keep; None: the script has dropped it."""

    place: int
    parameter: nn.Parameter
    home: Tensor
    gradient: Tensor | None


class ScriptAccess:
    """The script's access to the layers of a training."""

    def __init__(self, training: Any) -> None:
        self.training, self.user = training, training.user
        self.places = {
            id(parameter): place
            for place, parameters in enumerate(self.user.own_parameters)
            for parameter in parameters
        }
        # The layers whose weights the script may have changed since the last forward pass began, by place, with a copy
        # of weights that must not change; None: these may change.
        self.touched: dict[int, Tensor | None] = {}
        self.exposed: set[int] = set()  # the layers whose gradients the script has
        self.taken: list[Taken] = []  # the gradients that the last take_gradients() has taken
        self.num_views = [num_views(state.current.weights) for state in training.stream.states]
        self.versions = [parameter._version for parameter in self.user.rest]
        self.modules = [*self.user.model.modules()]
        self.sizes = self._sizes()  # numbers of modules and parameters in each module
        self.addresses = [
            (parameter, parameter.data_ptr())
            for parameters in (self.user.rest, *self.user.own_parameters)
            for parameter in parameters
        ]

    # ---- Each use of a parameter

    def observe(
        self,
        parameter: nn.Parameter,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        place, name = self.places[id(parameter)], self.user.names[id(parameter)]
        if not args or args[0] is not parameter:
            self.touch(place)
        elif function in HOOKS:
            raise ValueError(
                f"{name}: expected no gradient hooks, got one: streaming does not call hooks; try to change .grad"
                " between backward() and step()"
            )
        elif function in MOVES:
            raise ValueError(MEMORY.format(name))
        elif function in FREEZE:
            is_trained = not self.user.are_frozen[place]
            # the one argument, by place or by name, says whether the parameter is trained; without it, it is
            if all((*args[1:], *kwargs.values())) != is_trained:
                raise ValueError(FROZEN_LATER.format(name, is_trained, not is_trained))
        elif function == SET_DATA:
            if not _is_same_memory(parameter, args[1]):
                raise ValueError(MEMORY.format(name))
        elif function in (GET_GRADIENT, SET_GRADIENT, DELETE_GRADIENT):
            self._use_gradient(place, name, is_set=function == SET_GRADIENT and args[1] is not None)
        else:
            self.touch(place)

    def touch(self, place: int) -> None:
        """Let the script use the layer's weights: they are the newest, and may be other ones afterwards."""
        training = self.training
        if place == training.computing:  # by the layer's own backward pass, before its update
            return
        training.come_home()
        if place not in self.touched:
            has_master = training.terms.dtype != "fp32" and not self.user.are_frozen[place]
            may_change = not has_master and not training.is_passing()
            self.touched[place] = None if may_change else self._state(place).current.weights.clone()

    def check_unchanged(self) -> None:
        """Raise ValueError if the script has changed weights that must not change."""
        for place, before in self.touched.items():
            if before is not None and not torch.equal(before, self._state(place).current.weights):
                layer = self.user.layers[place].name
                if self.training.is_passing():
                    raise ValueError(
                        f"{layer}: expected the same weights from a forward pass to the end of its backward pass, got"
                        " others; try to change weights after step()"
                    )
                raise ValueError(MASTERS.format(layer, self.training.terms.dtype))

    def check_parameters(self) -> None:
        """Raise ValueError if the script has added parameters, given parameters other memory, frozen or unfrozen one,
        or changed weights whose masters would not change."""
        for name, parameter in self.user.model.named_parameters() if self._sizes() != self.sizes else ():
            if parameter.requires_grad and id(parameter) not in self.user.names:
                raise ValueError(
                    f"{name}: expected the model's parameters as they were when the trainer was made, got another; try"
                    " to make a trainer after changes of the model"
                )
        if self.training.terms.dtype != "fp32":
            self.check_unchanged()
            for parameter, version in zip(self.user.rest, self.versions, strict=True):
                if parameter._version != version:
                    raise ValueError(
                        MASTERS.format(self.user.names[id(parameter)], self.training.terms.dtype)
                    )
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, address in self.addresses:
                if parameter.data_ptr() != address:
                    raise ValueError(MEMORY.format(self.user.names[id(parameter)]))
        for parameters, is_trained in ((self.user.rest, True), (self.user.frozen, False)):
            for parameter in parameters:
                if parameter.requires_grad != is_trained:
                    name = self.user.names[id(parameter)]
                    raise ValueError(FROZEN_LATER.format(name, is_trained, not is_trained))

    def _sizes(self) -> list[int]:
        return [len(module._modules) + len(module._parameters) for module in self.modules]

    def held(self) -> list[int]:
        """Return the layers of whose memory the script holds a view, such as `.data` or a state_dict(). Call this while
        no update runs: an update makes views, too."""
        states = self.training.stream.states
        return [
            place
            for place, (state, before) in enumerate(zip(states, self.num_views, strict=True))
            if num_views(state.current.weights) > before
        ]

    # ---- Gradients

    def _use_gradient(self, place: int, name: str, *, is_set: bool) -> None:
        training = self.training
        if self.user.are_frozen[place]:
            if is_set:
                raise ValueError(
                    f"{name}: expected no gradient of a frozen parameter, got one that is set; try"
                    " requires_grad_() before the trainer is made"
                )
        elif not training.num_backward:
            if is_set:
                raise ValueError(
                    f"{name}: expected a gradient from a backward pass, got one that is set; try step()"
                )
        elif place not in self.exposed:
            if training.is_down():
                raise ValueError(
                    f"{name}: expected no use of gradients within a backward pass; try it afterwards"
                )
            if not training.stream.waits:
                raise ValueError(UPDATES_HAVE_BEGUN.format(f"{name}.grad"))
            self._expose(place)

    def _expose(self, place: int) -> None:
        self.training.gpu.synchronize()
        for parameter, gradient in self._gradients(place):
            parameter.grad = gradient.clone()  # the script may keep it, and drop it, as any gradient
        self.exposed.add(place)

    def has_dropped_all(self) -> bool:
        """Return whether the script has dropped the gradients of all layers."""
        with torch._C.DisableTorchFunctionSubclass():
            num_trained = self.user.are_frozen.count(False)
            return len(self.exposed) == num_trained and all(
                parameter.grad is None for parameters in self.user.own_parameters for parameter in parameters
            )

    def take_gradients(self) -> list[str]:
        """Take the gradients back home, as the script has left them. Return the names of the parameters whose gradients
        the script has dropped; these are zero now."""
        dropped, self.taken = list[str](), list[Taken]()
        with torch._C.DisableTorchFunctionSubclass():
            for place in sorted(self.exposed):
                for parameter, home in self._gradients(place):
                    self.taken.append(Taken(place, parameter, home, parameter.grad))
                    if parameter.grad is None:
                        dropped.append(self.user.names[id(parameter)])
                        home.zero_()
                    else:
                        home.copy_(parameter.grad)
                        parameter.grad = None
        self.exposed.clear()
        return dropped

    def return_gradients(self) -> None:
        """After a further backward pass, let the gradients that the script had before show the sum."""
        if not self.taken:
            return
        self.training.gpu.synchronize()
        with torch._C.DisableTorchFunctionSubclass():
            for place, parameter, home, gradient in self.taken:
                parameter.grad = home.clone() if gradient is None else gradient.copy_(home)
                self.exposed.add(place)
        self.taken = []

    def take_from_outside(self, parameter: nn.Parameter) -> None:
        """Autograd calls this when a gradient reaches the user's parameter itself: while a layer computes, other
        parameters take its place."""
        training, place, name = self.training, self.places[id(parameter)], self.user.names[id(parameter)]
        if place == training.computing:
            parameter.grad = None
            raise ValueError(
                f"{name}: expected its layer's forward() alone to compute with it, got a reentrant checkpoint() or a"
                " hook of the layer that does, too; try use_reentrant=False, or a layer that contains the module with"
                " the hook"
            )
        with torch._C.DisableTorchFunctionSubclass():
            is_alone = torch._C._current_graph_task_id() != training.graph_task and not training.is_passing()
            if not is_alone or not training.num_backward or not training.stream.waits:
                parameter.grad = None
                raise ValueError(
                    f"{name}: expected gradients only from its layer's own forward(), got one from elsewhere; try to"
                    " leave this layer out of the list, or backward() of that part of the loss by itself, after the"
                    " other, with accumulates=True"
                )
            if place not in self.exposed:
                outside, parameter.grad = parameter.grad, None
                self._expose(place)
                assert parameter.grad is not None and outside is not None
                parameter.grad.add_(outside)

    def _gradients(self, place: int) -> list[tuple[nn.Parameter, Tensor]]:
        state = self._state(place)
        return list(zip(self.user.own_parameters[place], state.layout.views(state.grads), strict=True))

    def _state(self, place: int) -> LayerState:
        states: Sequence[LayerState] = self.training.stream.states
        return states[place]


def num_views(slab: Tensor) -> int:
    """Return the number of tensors that share the slab's memory, the slab included."""
    memory = slab.untyped_storage()  # counts as a user, too
    return int(torch._C._storage_Use_Count(memory._cdata)) - 1  # type: ignore[attr-defined]


def has_lent_gradients(state: LayerState) -> bool:
    """Return whether a script holds gradients of this state: the tensors themselves, to which the state and this line
    have three references, or further views of the slab."""
    views = state.rooms.views.values()
    return any(sys.getrefcount(view) > 3 for view in views) or num_views(state.grads) > 1 + len(views)


@torch.no_grad()
def settle_gradients(state: LayerState) -> None:
    """Copy gradients that a script has replaced into the slab."""
    for name in state.layout.names:
        settle_gradient(state.rooms, state.prefix, name, state.module.get_parameter(name))


def norms_at_home(state: LayerState) -> list[Tensor]:
    """Return the norm of each parameter's gradient at home, on the device."""
    norms = norms_of(state.layout.views(state.grads), in_blocks=state.terms.norms_in_blocks)
    return [norm.to(state.device.name) for norm in norms]


def show_at_home(state: LayerState, home: Tensor) -> None:
    """Bring the current weights into the slab `home`: it is that of the current state, or of the spare one."""
    if state.current.weights is not home:
        assert state.spare is not None
        home.copy_(state.current.weights)
        state.spare = state.spare._replace(weights=state.current.weights)
        state.current = state.current._replace(weights=home)


def _is_same_memory(parameter: Tensor, other: Any) -> bool:
    return other is parameter or (
        parameter.data_ptr() == other.data_ptr()
        and (parameter.shape, parameter.stride(), parameter.dtype)
        == (other.shape, other.stride(), other.dtype)
    )
