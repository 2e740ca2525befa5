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
NUM_COMPARED_PASSES = 2  # passes whose values are compared: a forward pass and its recompute
# compared by value, as they cannot change
PLAIN_TYPES = (int, float, str, bytes, torch.Size, torch.dtype, torch.device)
CONTAINER_TYPES = (list, dict, set, deque)
INTERNAL_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes that every module has
TORCH_TENSOR_TYPES = {Tensor, nn.Parameter}  # classes whose tensors have an address; other ones may have none
# where nn.LSTM and its kin list their parameters once more
LIST_ATTRIBUTES = {"_flat_weights", "_flat_weight_refs"}
# the beginning of the attributes that torch.fx adds to a module that it traces
CONSTANT_PREFIX = "_tensor_constant"

Attributes = dict[str, Any]  # a module's attributes, by name


class ModuleState(NamedTuple):
    """A module's state at one time, which is compared with its state after a pass."""

    tensors: list[Tensor]
    marks: list[Any]  # for each tensor: where its memory is, and its version
    attributes: list[list[Any]]  # for each module: the values of its attributes
    contents: list[list[Any]]  # the items of the containers among the attributes
    versions: list[tuple[str, Tensor, int]]  # of the tensors among arguments and attributes
    generators: list[Any]  # states of the generators of random numbers
    sums: list[int] | None  # for each tensor: the sum of its bytes; None: values are not compared
    random: list[Any]  # states of the global random generators


class ModuleWatch:
    """Compares a module before and after a pass. `num_valued`: passes whose values are compared. `with_hooks`: True:
    compare the modules' and the parameters' hooks, and requires_grad, too. `called`: the function that makes the pass,
    if it is not the module's forward()."""

    def __init__(
        self,
        module: nn.Module,
        num_valued: int = NUM_COMPARED_PASSES,
        *,
        with_hooks: bool = False,
        called: Any = None,
    ) -> None:
        self.named_modules = list(module.named_modules())
        self.num_valued, self.with_hooks = num_valued, with_hooks
        self.tensor_tables = self._tensor_tables()
        self.tables = [table for *_, table in self.tensor_tables]
        self.attributes = [vars(module) for _, module in self.named_modules]
        attributes = [
            (f"attribute {f'{prefix}.{key}'.lstrip('.')}", key, value)
            for prefix, module in self.named_modules
            for key, value in vars(module).items()
            if key not in LIST_ATTRIBUTES
        ]
        self.containers = [
            (name, value)
            for name, key, value in attributes
            if isinstance(value, CONTAINER_TYPES) and (with_hooks or key not in INTERNAL_ATTRIBUTES)
        ]
        self.held_attributes = [
            (name, value)
            for name, key, value in attributes
            if isinstance(value, (Tensor, tuple, *CONTAINER_TYPES)) and key not in INTERNAL_ATTRIBUTES
        ]
        functions = [called]
        for _, module in self.named_modules:
            functions.append(type(module).forward)
            functions += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        self.generators = _generators([*(value for *_, value in attributes), *functions])

    def state(self, arguments: Any = ()) -> ModuleState:
        """Return the state before a pass on these arguments. It keeps the arguments alive."""
        tensors, is_valued = self._tensors(), self.num_valued > 0
        self.num_valued -= is_valued
        return ModuleState(
            tensors=tensors,
            marks=self._marks(tensors),
            attributes=self._compared_values(),
            contents=[_items(value) for _, value in self.containers],
            versions=self._versions(arguments),
            generators=list(map(_generator_state, self.generators)),
            sums=list(map(byte_sum, tensors)) if is_valued else None,
            random=random_states() if is_valued else [],
        )

    def _versions(self, arguments: Any) -> list[tuple[str, Tensor, int]]:
        """Return the versions of the tensors among the arguments and in the module's attributes, by their names."""
        versions = []
        named_leaves = [("its input", _leaves(arguments))]
        named_leaves += [(name, _items(value)) for name, value in self.held_attributes]
        for name, leaves in named_leaves:
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    versions.append((name, leaf, leaf._version))
        return versions

    def change(self, before: ModuleState) -> str:
        """Return what has changed since state() returned `before`; "": nothing."""
        tensors = self._tensors()
        if not _are_identical(tensors, before.tensors):
            return "a buffer or parameter"
        if (marks := self._marks(tensors)) != before.marks:
            return self._first_name([old != new for old, new in zip(before.marks, marks, strict=True)])
        if not _are_identical([*chain(*before.attributes)], [*chain(*self._compared_values())]):
            attributes = zip(self.named_modules, before.attributes, self.attributes, strict=True)
            for (prefix, _), values, now in attributes:
                if key := _differing_attribute(values, self._compared_attributes(now)):
                    return f"attribute {f'{prefix}.{key}'.lstrip('.')}"
        for (name, value), items in zip(self.containers, before.contents, strict=True):
            if not _are_identical(_items(value), items):
                return name
        if changed := [name for name, tensor, version in before.versions if tensor._version != version]:
            return changed[0]
        if before.generators != list(map(_generator_state, self.generators)):
            return "the state of a generator of random numbers"
        return "" if before.sums is None else self._changed_value(before.sums, before)

    def _tensor_tables(self) -> list[tuple[str, str, dict[str, Tensor | None]]]:
        """Return the tables of tensors that are compared, each with its kind and its module's path."""
        return [
            (kind, prefix, table)
            for prefix, module in self.named_modules
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers))
        ]

    def _compared_values(self) -> list[list[Any]]:
        """Return the values of each module's attributes that are compared."""
        return _dict_values(self.attributes)

    def _compared_attributes(self, attributes: Attributes) -> Attributes:
        """Return those of a module's attributes that are compared."""
        return attributes

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in chain(*_dict_values(self.tables)) if tensor is not None]

    def _marks(self, tensors: list[Tensor]) -> list[Any]:
        have_addresses = TORCH_TENSOR_TYPES.issuperset(map(type, tensors))
        memory = map(Tensor.data_ptr if have_addresses else _storage_and_offset, tensors)
        if self.with_hooks:
            return [
                (address, tensor._version, tensor.requires_grad, hooks_of(tensor))
                for address, tensor in zip(memory, tensors, strict=True)
            ]
        return [(address, tensor._version) for address, tensor in zip(memory, tensors, strict=True)]

    def _first_name(self, differences: list[bool]) -> str:
        """Return the name of the first tensor that differs."""
        names = []
        for kind, prefix, table in self.tensor_tables:
            for key, tensor in table.items():
                if tensor is not None:
                    names.append(f"{kind} {f'{prefix}.{key}'.lstrip('.')}")
        return names[differences.index(True)]

    def _changed_value(self, sums: list[int], before: ModuleState) -> str:
        differences = [old != byte_sum(tensor) for old, tensor in zip(sums, before.tensors, strict=True)]
        if any(differences):
            return self._first_name(differences)
        return "" if before.random == random_states() else "the state of Python's or numpy's random numbers"


class RecomputeWatch(ModuleWatch):
    """Compares what makes a pass that is repeated another one: buffers, numbers and texts among the attributes,
    containers, random states. Another object as an attribute, such as the last pass's attention, does not."""

    def _tensor_tables(self) -> list[tuple[str, str, dict[str, Tensor | None]]]:
        return [(kind, prefix, table) for kind, prefix, table in super()._tensor_tables() if kind == "buffer"]

    def _compared_values(self) -> list[list[Any]]:
        return _dict_values([*map(self._compared_attributes, self.attributes)])

    def _compared_attributes(self, attributes: Attributes) -> Attributes:
        return {key: value for key, value in attributes.items() if isinstance(value, PLAIN_TYPES)}


def random_states() -> list[Any]:
    """Return the states of the random numbers that torch's random state does not cover: Python's and numpy's."""
    if (numpy := sys.modules.get("numpy")) is None:
        return [random.getstate()]
    kind, keys, *rest = numpy.random.get_state()
    return [random.getstate(), kind, keys.tobytes(), rest]


def _storage_and_offset(tensor: Tensor) -> tuple[Any, Any]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset()


def byte_sum(tensor: Tensor) -> int:
    """Return a sum of the tensor's bytes; 0 for a tensor without memory. Bytes are summed in words of 8 if these are
    aligned, without a copy, else in blocks, because torch copies what it sums into words of 8."""
    if tensor.device.type not in ("cpu", "cuda") or isinstance(tensor, FakeTensor) or not tensor.numel():
        return 0
    values = tensor.detach()
    if tensor.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    data = values.contiguous().flatten().view(torch.uint8)
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


def _dict_values(dicts: Sequence[Attributes]) -> list[list[Any]]:
    return [*map(list, map(dict.values, dicts))]


def _leaves(arguments: Any) -> Sequence[Any]:
    """Return what tree_leaves() does, at once for tensors alone."""
    is_flat = isinstance(arguments, tuple) and all(type(argument) is Tensor for argument in arguments)
    return arguments if is_flat else tree_leaves(arguments)


def _items(container: Any) -> list[Any]:
    """Return, in one list, the items of a container and of the containers in it; for a tensor, the tensor alone."""
    if isinstance(container, dict):  # tree_leaves() does not look into a subclass of dict
        container = list(container.values())
    return list(container) if isinstance(container, set) else tree_leaves(container)


def _generator_state(generator: Any) -> Any:
    """Return the state of a generator of random numbers; None: it is none."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits: Any = getattr(generator, "bit_generator", None)  # as numpy's generators have
    return repr(bits.state) if hasattr(bits, "state") else None


def _generators(values: list[Any]) -> list[Any]:
    """Return the generators of random numbers among these values, and in the closures of the functions among them."""
    waiting, generators, visited_functions = list(values), [], set[int]()
    while waiting:
        value = waiting.pop()
        if _generator_state(value) is not None:
            generators.append(value)
        elif isinstance(value, (FunctionType, MethodType)) and id(value) not in visited_functions:
            visited_functions.add(id(value))
            waiting += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    return generators


def _differing_attribute(before: list[Any], now: Attributes) -> str:
    """Return the first attribute that is not as before; "": all are."""
    if _are_identical(before, list(now.values())):
        return ""
    for key, old, new in zip(now, before, now.values(), strict=False):
        is_equal = type(old) is type(new) and isinstance(new, PLAIN_TYPES) and old == new
        if old is not new and not is_equal and key not in LIST_ATTRIBUTES:
            return key
    added = [key for key in [*now][len(before) :] if not key.startswith(CONSTANT_PREFIX)]
    if added:
        return added[0]
    return "an attribute that it had" if len(now) < len(before) else ""
