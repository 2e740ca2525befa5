"""How a fault of bench/convention_faults.py and bench/routing_faults.py lets one module call another function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Breaks = Callable[[Any], None]  # a function that plants a fault in a HubModel


def replace_within(module: Any, owner: Any, name: str, other: Callable[[Any], Any]) -> None:
    """While `module` computes, let other(function) take the place of the function `name` of `owner`, such as a module
    of torch or the source file of `module`."""
    from methods.shared.roundings import replaced

    forward = module.forward

    def changed(*args: Any, **options: Any) -> Any:
        with replaced(owner, name, other(getattr(owner, name))):
            return forward(*args, **options)

    module.forward = changed
