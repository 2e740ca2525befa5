"""Plants a bug in a file of methods/: what a method then imports is loaded afresh, with the bug in it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from harness.base.checkout import ROOT

# What defines operations of torch, which a process defines once.
LOADED_ONCE = {"methods.offload.torch_ops", "methods.offload.adamw_kernel", "methods.offload.adamw_cuda"}


@contextmanager
def planted(file: str, old: str, new: str) -> Iterator[None]:
    """Replace `old`, which `file` (a path below the root) holds once, by `new`."""
    name = file.removesuffix(".py").replace("/", ".")
    path = ROOT / file
    source = path.read_text()
    assert source.count(old) == 1, f"{file} does not hold this once: {old}"
    before = _fresh_modules()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    package = importlib.import_module(name.rpartition(".")[0])
    try:
        for each in before:
            _forget(each)
        sys.modules[name] = module
        exec(compile(source.replace(old, new), path, "exec"), vars(module))
        setattr(package, name.rpartition(".")[2], module)
        yield
    finally:
        for each in _fresh_modules():
            _forget(each)
        for each, there in before.items():
            sys.modules[each] = there
            setattr(sys.modules[each.rpartition(".")[0]], each.rpartition(".")[2], there)


def _fresh_modules() -> dict[str, object]:
    """The modules of methods/ that are loaded, without its packages."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("methods.") and not hasattr(module, "__path__") and name not in LOADED_ONCE
    }


def _forget(name: str) -> None:
    package, _, leaf = name.rpartition(".")
    del sys.modules[name]
    vars(sys.modules[package]).pop(leaf, None)
