"""Makes a user's layer fit the streaming core: a module that takes tensors and returns tensors, and whose parameters
are views of a slot.

The user's parameters stay in the model, and their memory is the layer's home. While the layer computes, parameters that
are views of a slot replace the user's parameters, and autograd sees only the views.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from methods.shared.module_watch import RecomputeWatch
from methods.streaming.gradient_views import LEFT_OUTSIDE
from methods.streaming.layer_state import Passed
from methods.streaming.users.parameters import SlotParameter

TENSOR = object()  # marks a tensor's place in the structure of a layer's arguments or results
NUM_WATCHED, WATCH_EVERY = 3, 50  # recomputes that are watched: the first ones, and then one of so many
IN_PLACE = (
    "expected forward() to leave its arguments, and what its backward pass needs, as they are, got a change in place;"
    " try it on a copy"
)
CHANGED = (
    "{}: expected forward() to leave the layer's weights as they are, got a change;"
    " try to change them after step()"
)


class Site(NamedTuple):
    """A place where a layer uses a parameter. `source`: the parameter's name among the layer's own, or its index among
    the shared ones. `is_set`: the module takes parameters by setattr() alone, as recurrent modules, which keep
    lists."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    source: str | int
    is_set: bool

    def put(self, parameter: Tensor) -> None:
        if self.is_set:
            setattr(self.module, self.name, parameter)
        else:
            self.module._parameters[self.name] = parameter  # type: ignore[assignment]


class Argument(NamedTuple):
    """Marks, in the structure of a layer's results, the place of a tensor that the layer got: the model gets it back.
    `place`: its index among the tensors of the call."""

    place: int


class Placeholders(nn.Module):
    """A module whose parameters have the shapes of the given parameters, but no memory. A parameter's name is its
    index: "0", "1"."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for place, parameter in enumerate(parameters):
            memoryless = torch.empty_like(parameter, device="meta")
            self.register_parameter(str(place), nn.Parameter(memoryless, parameter.requires_grad))


class UserLayer(Placeholders):
    """One layer of a user's model. `own_parameters`: those that travel with the layer. `shared`: its other parameters,
    which stay on the device. The layer takes the shared parameters as further tensors, after the tensors that the
    model passes."""

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        own_parameters: Sequence[nn.Parameter],
        shared: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(own_parameters)
        # a list, because a module registers layers
        self.layer, self.compute, self.name = [layer], layer.forward, name
        # plain lists, because a module does not register these
        self.users, self.shared = list(own_parameters), list(shared)
        self.is_first = True  # True: no forward pass yet
        self.is_down = False  # True: the layer's own backward pass runs
        self.num_recomputes = 0
        # For each use of an argument in the last forward pass, in the order in which a backward pass has the gradients:
        # the argument's index among the tensors, and the gradient.
        self.start = 0  # autograd's number of the first node that the last forward pass has made
        self.uses: list[int] = []
        self.gradients: list[Tensor | None] = []
        # copies of weights whose `data` this forward pass has read
        self.read: dict[nn.Parameter, Tensor] = {}
        owned = {id(parameter): str(place) for place, parameter in enumerate(own_parameters)}
        others = {id(parameter): place for place, parameter in enumerate(shared)}
        self.sites: list[Site] = []
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    place = owned.get(id(parameter))
                    source = others[id(parameter)] if place is None else place
                    is_set = place is not None and type(module).__setattr__ is not nn.Module.__setattr__
                    self.sites.append(Site(module, name, parameter, source, is_set))
        self.registered = [site.parameter for site in self.sites]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. A view of a slot tells what the layer's forward() does with it."""
        super().register_parameter(name, param)
        if param is not None and not param.is_meta:
            param.__class__ = SlotParameter

    def take(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> Passed:
        """Return the tensors among a call's arguments, then the shared parameters. Keep the structure of the arguments
        for forward()."""
        leaves, self.taken = tree_flatten((args, dict(options)))
        flat = [*args, *options.values()]
        self.has_containers = len(flat) != len(leaves) or any(
            a is not b for a, b in zip(flat, leaves, strict=True)
        )
        self.leaves = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return (*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *self.shared)

    def give(self, results: Passed, tensors: Passed) -> Any:
        """Return the structure that the layer returned, with these results, and the call's tensors, in their places."""
        leaves = [
            tensors[leaf.place] if isinstance(leaf, Argument) else leaf for leaf in self.returned_leaves
        ]
        return _filled(leaves, self.returned, iter(results))

    def forward(self, *tensors: Tensor) -> Passed:
        rest = iter(tensors)
        args, options = _filled(self.leaves, self.taken, rest)
        start = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]
        versions = [tensor._version for tensor in tensors]
        with self._placed([*rest]), self._watched():
            result = self.compute(*args, **options)
        if torch.is_grad_enabled() and versions != [tensor._version for tensor in tensors]:
            raise ValueError(f"{self.name}: {IN_PLACE}")
        if self.has_containers:
            self._check_arguments(args, options, tensors)
        if self.is_first:
            self._check_names()
        leaves, self.returned = tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            kind = type(result).__name__
            raise ValueError(
                "expected a layer to return a tensor, alone or in a tuple, list or dictionary, got a"
                f" {kind} without one"
            )
        arguments = {id(tensor): Argument(place) for place, tensor in enumerate(tensors)}
        marks = [arguments.get(id(leaf), TENSOR) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.returned_leaves = marks
        results = tuple(self._kept(leaf) for leaf, mark in zip(leaves, marks, strict=True) if mark is TENSOR)
        if torch.is_grad_enabled() and not self.is_down:
            self._find_uses(tensors, results, start)
        return results

    def _kept(self, result: Tensor) -> Tensor:
        """Return a result that stays: a copy of one that is a view of the slot."""
        weight = next(iter(self._parameters.values()), None)
        is_view = weight is not None and result.layout is torch.strided and _memory(result) == _memory(weight)
        return result.clone() if is_view else result

    def _find_uses(self, tensors: Passed, results: Passed, start: int) -> None:
        """Find the uses of the arguments in the graph that forward() has made since the node of number `start`. Each
        use hands its gradient over: autograd would first sum those of a layer, and give the sum the argument's strides;
        but without a trainer it adds each to the gradients of the tensor's later uses."""
        self.start, arguments = start, {}
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                arguments[get_gradient_edge(tensor).node] = place
                tensor.register_post_accumulate_grad_hook(self._refuse_gradient)
        nodes: set[Any] = {get_gradient_edge(result).node for result in results if result.requires_grad}
        waiting, edges = [*nodes], list[tuple[int, Any, int, int]]()
        while waiting:
            node = waiting.pop()
            number, others = node._sequence_nr(), node.next_functions
            if number < start or (not others and _is_foreign(node)):
                raise ValueError(
                    f"{self.name}: expected tensors with gradients among the layer's arguments, alone or in tuples,"
                    " lists or dictionaries, got some elsewhere, such as in an object's attribute; try to pass them so"
                )
            for index, (other, _) in enumerate(others):
                if other in arguments:
                    edges.append((-number, node, index, arguments[other]))
                elif other is not None and other not in nodes:
                    nodes.add(other)
                    waiting.append(other)
        edges.sort(key=itemgetter(0, 2))
        self.uses, self.gradients = [place for *_, place in edges], [None] * len(edges)
        for use, (_, node, index, _) in enumerate(edges):
            node.register_hook(partial(self._take_gradient, use, index))

    def _take_gradient(self, use: int, index: int, into: Passed, _: Any) -> Any:
        """Take the gradient that a node gives to an argument, and leave none for autograd's sum."""
        if not self.is_down:
            raise ValueError(LEFT_OUTSIDE.format(self.name))
        self.gradients[use] = into[index]
        return (*into[:index], None, *into[index + 1 :])

    def _refuse_gradient(self, argument: Tensor) -> None:
        """Raise ValueError if a gradient has come by another way than the layer's uses of the argument."""
        if argument.grad is not None:
            raise ValueError(LEFT_OUTSIDE.format(self.name))

    def collected(self) -> list[Tensor | None]:
        """Return the gradients of the last backward pass, one for each of `uses`."""
        gradients, self.gradients = self.gradients, []
        return gradients

    def _check_names(self) -> None:
        """Raise ValueError if forward() has registered one of the layer's weights once more: later this view of a slot
        would be another layer's weight."""
        self.is_first = False
        for path, module in self.layer[0].named_modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, SlotParameter):
                    got = f"{path}.{name}".lstrip(".")
                    raise ValueError(
                        f"{self.name}: expected forward() to register no parameters, got {got}; try to keep a copy,"
                        " .detach().clone()"
                    )

    def _check_arguments(self, args: Any, options: Any, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError if the layer has changed a container among its arguments: the model has another one."""
        rest = iter(tensors)
        before = [next(rest) if leaf is TENSOR else leaf for leaf in self.leaves]
        leaves, structure = tree_flatten((args, options))
        if structure != self.taken or any(a is not b for a, b in zip(leaves, before, strict=True)):
            raise ValueError(
                f"{self.name}: expected the layer to leave lists and dictionaries among its arguments as they are, got"
                " a change; try to return what it computes"
            )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise ValueError if a recompute changes anything, and so another pass would. Most recomputes are not watched:
        what a layer keeps from pass to pass changes from the first one on."""
        if not self.is_down:
            yield
            return
        self.num_recomputes += 1
        if self.num_recomputes > NUM_WATCHED and self.num_recomputes % WATCH_EVERY:
            yield
            return
        watch = RecomputeWatch(self.layer[0], called=self.compute)
        before = watch.state()
        try:
            yield
        finally:
            if change := watch.change(before):
                raise ValueError(
                    f"{self.name}: expected forward() to change nothing that it computes with, because the backward"
                    f" pass runs it once more, got a change of {change}; try to leave the layer out of the list"
                )

    @contextmanager
    def _placed(self, shared: Sequence[Tensor]) -> Iterator[None]:
        """Put the views of the slot, and the shared parameters, in the places of the user's parameters. Raises
        ValueError if others are in these places, or if the layer has changed its weights."""
        registered = [site.module._parameters.get(site.name) for site in self.sites]
        if not all(map(operator.is_, registered, self.registered)):
            raise ValueError(
                f"{self.name}: expected its parameters as they were when the trainer was made, got others; try to make"
                " the trainer after changes of the model"
            )
        weights = [*self._parameters.values()]
        versions = [weight._version for weight in weights]  # type: ignore[union-attr]
        for weight in weights:
            weight.note = self._keep  # type: ignore[union-attr, assignment]
        try:
            placed: dict[Any, Any] = {**self._parameters, **dict(enumerate(shared))}
            for site in self.sites:
                site.put(placed[site.source])
            yield
        finally:
            for site in self.sites:
                site.put(site.parameter)
            for weight in weights:
                weight.note = None  # type: ignore[union-attr, assignment]
            read, self.read = self.read, {}
        is_same = versions == [weight._version for weight in weights]  # type: ignore[union-attr]
        if not is_same or any(not torch.equal(weight, copy) for weight, copy in read.items()):
            raise ValueError(CHANGED.format(self.name))

    def _keep(self, weight: nn.Parameter, *, is_replaced: bool) -> None:
        if is_replaced:
            raise ValueError(CHANGED.format(self.name))
        if weight not in self.read:
            self.read[weight] = weight.detach().clone()


def _is_foreign(leaf: Any) -> bool:
    """Return whether a leaf of a layer's graph is a parameter that is not the layer's."""
    variable = getattr(leaf, "variable", None)
    return variable.__class__ is not SlotParameter and isinstance(variable, nn.Parameter)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _filled(leaves: Sequence[Any], structure: Any, tensors: Iterator[Tensor]) -> Any:
    return tree_unflatten([next(tensors) if leaf is TENSOR else leaf for leaf in leaves], structure)
