"""How a rank leaves the others."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist

from harness.devices.exchange import leave_others


@pytest.mark.parametrize(
    ("backend", "is_failing", "leaves"),
    [
        ("gloo", False, True),
        ("gloo", True, True),
        ("cpu:gloo,cuda:nccl", False, True),
        ("cpu:gloo,cuda:nccl", True, False),
    ],
)
def test_a_rank_that_fails_between_gpus_does_not_wait_for_the_others(
    backend: str, is_failing: bool, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[bool]()
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(True))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    with contextlib.suppress(MemoryError):
        try:
            if is_failing:
                raise MemoryError
        finally:
            leave_others()
    assert bool(left) == leaves
