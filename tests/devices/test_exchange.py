"""How a rank joins the others, and leaves them."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from harness.core.refusals import Unavailable
from harness.devices import exchange
from harness.devices.exchange import Ranks, leave_others
from tests.support.fake_cuda import FakeCuda


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


def test_ranks_on_gpus_refuse_a_single_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a gather and a sum, in another order on each rank, would wait for each other."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(Unavailable, match="CUDA_DEVICE_MAX_CONNECTIONS=1 may let ranks on GPUs wait"):
        Ranks("cuda", 2)
    assert not dist.is_initialized()
    Ranks("cuda", 1)


def test_both_groups_are_ready_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by a sum on the device, the computing thread's first: so on every rank."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    cuda, summed, all_reduce = FakeCuda(1).install(monkeypatch), [], dist.all_reduce
    monkeypatch.setattr(exchange, "join_others", lambda device: None)
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda tensor, group=None: (summed.append((tensor.device.type, group)), all_reduce(tensor)),
    )
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        with cuda.running():
            ranks = Ranks("cuda", 2)
        assert summed == [("cuda", None), ("cuda", ranks.copiers)]
    finally:
        dist.destroy_process_group()
