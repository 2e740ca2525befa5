"""Tells what a forward pass changed beside its result: buffers, parameters, attributes, its arguments, random states.

A pass that is repeated, as a recompute is, or that runs on a copy of a module, may change none of these. Objects and
torch's version counters are compared in each pass; values, which some writes change without a new version, in the first
passes alone.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import deque
from collections.abc import Sequence
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_leaves

WORD_BYTES, BLOCK_BYTES = 8, 2**14  # of what byte_sum() sums at once
NUM_VALUED = 2  # passes whose values are compared: a forward pass and its recompute
# compared by value, as they cannot change
PLAIN = (int, float, str, bytes, torch.Size, torch.dtype, torch.device)
CONTAINERS = (list, dict, set, deque)
INTERNAL = frozenset(vars(nn.Module()))  # attributes that every module has
OF_TORCH = {Tensor, nn.Parameter}  # classes whose tensors have an address; other ones may have none
LISTED = {"_flat_weights", "_flat_weight_refs"}  # where nn.LSTM and its kin list their parameters once more
CONSTANT = "_tensor_constant"  # the beginning of the attributes that torch.fx adds to a module that it traces


class ModuleState(NamedTuple):
    """A module's state. `marks`: of each tensor where its memory is, and its version. `attributes`, `contents`: the
    values of each module's attributes, and the items of those that are containers. `versions`: of the tensors among
    arguments and attributes. `sums`: of each tensor's bytes; None: values are not compared."""

    tensors: list[Tensor]
    marks: list[Any]
    attributes: list[list[Any]]
    contents: list[list[Any]]
    versions: list[tuple[str, Tensor, int]]
    generators: list[Any]
    sums: list[int] | None
    random: list[Any]


class ModuleWatch:
    """Compares a module before and after a pass. `num_valued`: passes whose values are compared. `with_hooks`: True:
    compare the modules' and the parameters' hooks, and requires_grad, too. `called`: the function that makes the pass,
    if it is not the module's forward()."""

    def __init__(
        self, module: nn.Module, num_valued: int = NUM_VALUED, *, with_hooks: bool = False, called: Any = None
    ) -> None:
        self.named, self.num_valued, self.with_hooks = list(module.named_modules()), num_valued, with_hooks
        self.kinds = self._kinds()
        self.tables = [table for *_, table in self.kinds]
        self.attributes = [vars(m) for _, m in self.named]
        attributes = [
            (f"attribute {f'{prefix}.{key}'.lstrip('.')}", key, value)
            for prefix, m in self.named
            for key, value in vars(m).items()
            if key not in LISTED
        ]
        self.containers = [
            (name, value)
            for name, key, value in attributes
            if isinstance(value, CONTAINERS) and (with_hooks or key not in INTERNAL)
        ]
        self.held = [
            (name, value)
            for name, key, value in attributes
            if isinstance(value, (Tensor, tuple, *CONTAINERS)) and key not in INTERNAL
        ]
        functions = [called]
        for _, m in self.named:
            functions += [type(m).forward, *m._forward_pre_hooks.values(), *m._forward_hooks.values()]
        self.generators = _generators([*(value for *_, value in attributes), *functions])

    def state(self, arguments: Any = ()) -> ModuleState:
        """Return the state before a pass on these arguments. It keeps the arguments alive."""
        tensors, is_valued = self._tensors(), self.num_valued > 0
        self.num_valued -= is_valued
        return ModuleState(
            tensors=tensors,
            marks=self._marks(tensors),
            attributes=self._compared(),
            contents=[_items(value) for _, value in self.containers],
            versions=[
                (name, leaf, leaf._version)
                for name, leaves in [
                    ("its input", _leaves(arguments)),
                    *((n, _items(v)) for n, v in self.held),
                ]
                for leaf in leaves
                if isinstance(leaf, Tensor)
            ],
            generators=list(map(_drawn, self.generators)),
            sums=list(map(byte_sum, tensors)) if is_valued else None,
            random=random_states() if is_valued else [],
        )

    def change(self, before: ModuleState) -> str:
        """Return what has changed since state() returned `before`; "": nothing."""
        tensors = self._tensors()
        if not _are_identical(tensors, before.tensors):
            return "a buffer or parameter"
        if (marks := self._marks(tensors)) != before.marks:
            return self._name([old != new for old, new in zip(before.marks, marks, strict=True)])
        if not _are_identical([*chain(*before.attributes)], [*chain(*self._compared())]):
            for (prefix, _), values, now in zip(self.named, before.attributes, self.attributes, strict=True):
                if key := _differing_attribute(values, self._compared_of(now)):
                    return f"attribute {f'{prefix}.{key}'.lstrip('.')}"
        for (name, value), items in zip(self.containers, before.contents, strict=True):
            if not _are_identical(_items(value), items):
                return name
        if changed := [name for name, tensor, version in before.versions if tensor._version != version]:
            return changed[0]
        if before.generators != list(map(_drawn, self.generators)):
            return "the state of a generator of random numbers"
        return "" if before.sums is None else self._changed_value(before.sums, before)

    def _kinds(self) -> list[tuple[str, str, dict[str, Tensor | None]]]:
        """Return the tables of tensors that are compared, each with its kind and its module's path."""
        return [
            (kind, prefix, table)
            for prefix, module in self.named
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers))
        ]

    def _compared(self) -> list[list[Any]]:
        """Return the values of each module's attributes that are compared."""
        return _dict_values(self.attributes)

    def _compared_of(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Return those of a module's attributes that are compared."""
        return attributes

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in chain(*_dict_values(self.tables)) if tensor is not None]

    def _marks(self, tensors: list[Tensor]) -> list[Any]:
        memory = map(Tensor.data_ptr if OF_TORCH.issuperset(map(type, tensors)) else _storage, tensors)
        if self.with_hooks:
            return [
                (where, tensor._version, tensor.requires_grad, hooks_of(tensor))
                for where, tensor in zip(memory, tensors, strict=True)
            ]
        return [(where, tensor._version) for where, tensor in zip(memory, tensors, strict=True)]

    def _name(self, differ: list[bool]) -> str:
        """Return the name of the first tensor that differs."""
        names = [
            f"{kind} {f'{prefix}.{key}'.lstrip('.')}"
            for kind, prefix, table in self.kinds
            for key, tensor in table.items()
            if tensor is not None
        ]
        return names[differ.index(True)]

    def _changed_value(self, sums: list[int], before: ModuleState) -> str:
        differ = [old != byte_sum(tensor) for old, tensor in zip(sums, before.tensors, strict=True)]
        if any(differ):
            return self._name(differ)
        return "" if before.random == random_states() else "the state of Python's or numpy's random numbers"


class RecomputeWatch(ModuleWatch):
    """Compares what makes a pass that is repeated another one: buffers, numbers and texts among the attributes,
    containers, random states. Another object as an attribute, such as the last pass's attention, does not."""

    def _kinds(self) -> list[tuple[str, str, dict[str, Tensor | None]]]:
        return [(kind, prefix, table) for kind, prefix, table in super()._kinds() if kind == "buffer"]

    def _compared(self) -> list[list[Any]]:
        return _dict_values([*map(self._compared_of, self.attributes)])

    def _compared_of(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in attributes.items() if isinstance(value, PLAIN)}


def random_states() -> list[Any]:
    """Return the states of the random numbers that torch's random state does not cover: Python's and numpy's."""
    if (numpy := sys.modules.get("numpy")) is None:
        return [random.getstate()]
    kind, keys, *rest = numpy.random.get_state()
    return [random.getstate(), kind, keys.tobytes(), rest]


def _storage(tensor: Tensor) -> tuple[Any, Any]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def byte_sum(tensor: Tensor) -> int:
    """Return a sum of the tensor's bytes; 0 for a tensor without memory. Bytes are summed in words of 8 if these are
    aligned, without a copy, else in blocks, because torch copies what it sums into words of 8."""
    if tensor.device.type not in ("cpu", "cuda") or isinstance(tensor, FakeTensor) or not tensor.numel():
        return 0
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    data = real.contiguous().flatten().view(torch.uint8)
    if data.numel() % WORD_BYTES == 0 and data.storage_offset() % WORD_BYTES == 0:
        return int(data.view(torch.int64).sum())
    return int(torch.stack([block.sum() for block in data.split(BLOCK_BYTES)]).sum())


def hooks_of(tensor: Tensor) -> int:
    """Return the number of hooks on a tensor's gradient."""
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def hooks_of_step(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the hooks that torch calls at each step() of an optimizer: its own, and those of all optimizers."""
    of_optimizer: list[dict[int, Any]] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ]
    of_all: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    return [hook for hooks in (*of_optimizer, *of_all) for hook in hooks.values()]


def leaves_beyond(results: Any, stops: Any) -> list[Tensor]:
    """Return the leaf tensors to which a backward pass from the tensors in `results` would bring gradients, unless it
    is through the tensors in `stops`."""
    waiting, leaves = [_node(tensor) for tensor in _differentiable(results)], []
    visited = {_node(tensor) for tensor in _differentiable(stops)}
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [other for other, _ in node.next_functions]
    return leaves


def _differentiable(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]


def _node(tensor: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _are_identical(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _dict_values(dicts: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [*map(list, map(dict.values, dicts))]


def _leaves(arguments: Any) -> Sequence[Any]:
    """Return what tree_leaves() does, at once for tensors alone."""
    is_flat = isinstance(arguments, tuple) and all(type(argument) is Tensor for argument in arguments)
    return arguments if is_flat else tree_leaves(arguments)


def _items(container: Any) -> list[Any]:
    """Return the items of a container, or a tensor, with those of the containers within."""
    if isinstance(container, dict):  # also one of a class that tree_leaves() does not know
        container = list(container.values())
    return list(container) if isinstance(container, set) else tree_leaves(container)


def _drawn(generator: Any) -> Any:
    """Return the state of a generator of random numbers; None: it is none."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits: Any = getattr(generator, "bit_generator", None)  # as numpy's generators have
    return repr(bits.state) if hasattr(bits, "state") else None


def _generators(values: list[Any]) -> list[Any]:
    """Return the generators of random numbers among these values, and in the closures of the functions among them."""
    waiting, generators, seen = list(values), [], set[int]()
    while waiting:
        value = waiting.pop()
        if _drawn(value) is not None:
            generators.append(value)
        elif isinstance(value, (FunctionType, MethodType)) and id(value) not in seen:
            seen.add(id(value))
            waiting += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    return generators


def _differing_attribute(before: list[Any], now: dict[str, Any]) -> str:
    """Return the first attribute that is not as before; "": all are."""
    if _are_identical(before, list(now.values())):
        return ""
    for key, old, new in zip(now, before, now.values(), strict=False):
        is_equal = type(old) is type(new) and isinstance(new, PLAIN) and old == new
        if old is not new and not is_equal and key not in LISTED:
            return key
    added = [key for key in [*now][len(before) :] if not key.startswith(CONSTANT)]
    if added:
        return added[0]
    return "an attribute that it had" if len(now) < len(before) else ""
