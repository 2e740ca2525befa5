"""Modules asked in a process of their own."""

from __future__ import annotations

import pytest

from harness.base.child_process import ask


@pytest.mark.parametrize("module", ["bisect", "this"])  # one prints nothing, one what is no JSON
def test_a_module_without_an_answer_is_named(module: str) -> None:
    """A method that ends its rehearsal by os._exit(0) ended `plan --exact` with a traceback."""
    with pytest.raises(ValueError, match=f"^{module} failed: no answer; "):
        ask(module, {})
