"""Two classes of parameters that tell what a user's script does with the weights of a layer.

Between two steps the parameters are the user's: the script may read, write or copy them, and use their gradients. Their
memory is the layer's home, where an update may still run, or from which a slot may have been filled already. So torch
calls this file's code before each of its operations on such a parameter, by `__torch_function__`. A script that never
touches a layer's weights pays nothing.

While a layer computes, other parameters, views of a slot, take the place of the user's. What a layer writes into a slot
would be lost, so these parameters note what cannot be seen from their count of versions: the use of `data`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# What torch does without a look at the values or the gradient.
PROPERTIES = (
    "shape dtype device layout ndim is_leaf requires_grad grad_fn is_cuda is_cpu is_meta is_sparse is_quantized"
    " itemsize nbytes _version _backward_hooks _base"
)
METHODS = (
    "size dim ndimension numel nelement element_size stride storage_offset get_device is_contiguous is_floating_point"
    " is_complex is_shared is_pinned retain_grad __len__ __hash__"
)
METADATA = {getattr(Tensor, name).__get__ for name in PROPERTIES.split()}
METADATA |= {getattr(Tensor, name) for name in METHODS.split()}
METADATA |= {torch.numel, torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type}


class Observer(Protocol):
    """Is called before torch's function `function` is called with these arguments, among them `parameter`."""

    def observe(
        self,
        parameter: nn.Parameter,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None: ...


class ObservedParameter(nn.Parameter):
    """A parameter of a layer in the user's model, while a trainer holds the model. It is the user's object: a trainer
    changes only its class. Copies and pickles of it are plain parameters."""

    observer: ClassVar[weakref.ref[Observer]]  # weak: parameters and their classes keep no trainer alive

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func not in METADATA:
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, ObservedParameter) and (observer := leaf.observer()):
                        observer.observe(leaf, func, args, kwargs)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


def observe(parameters: Iterable[nn.Parameter], observer: Observer) -> Callable[[], None]:
    """Make these parameters observed ones; return a function that gives them their classes back."""
    before: list[tuple[nn.Parameter, type]] = []
    classes: dict[type, type] = {}
    for parameter in parameters:
        kind = type(parameter)
        if kind not in classes:
            bases = (ObservedParameter,) if kind is nn.Parameter else (ObservedParameter, kind)
            classes[kind] = type(kind)(kind.__name__, bases, {"observer": weakref.ref(observer)})  # type: ignore[misc]
        before.append((parameter, kind))
        parameter.__class__ = classes[kind]

    def end() -> None:
        for parameter, kind in before:
            parameter.__class__ = kind

    return end


class SlotParameter(nn.Parameter):
    """A layer's parameter in a slot, which the layer sees while it computes. `note`: is called when the layer reads
    `data`, through which it may write unseen, or replaces it; None: the layer does not compute."""

    note: Callable[..., None] | None = None

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        if self.note is not None:
            self.note(self, is_replaced=False)
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.note is not None:
            self.note(self, is_replaced=True)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
