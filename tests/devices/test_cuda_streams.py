"""Streams, events and threads of one GPU among several, by CUDA's rules of the current device."""

from __future__ import annotations

import pytest
import torch

from harness.devices.streams import Device
from methods.offload.transfer import queue
from tests.support.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(2).install(monkeypatch)


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_streams_belong_to_the_device_of_their_name(cuda: FakeCuda, name: str, index: int) -> None:
    with Device(name) as device:
        assert {stream.device for stream in (device.compute, device.inbound, device.outbound)} == {index}


def test_threads_work_on_the_device_that_they_were_made_for(cuda: FakeCuda) -> None:
    with Device("cuda:1") as device:
        pools = (device.copier, device.returner, device.threads(2))
        assert {pool.submit(cuda.current_device).result() for pool in pools} == {1}


def test_a_copy_of_the_second_device_records_its_events_there(cuda: FakeCuda) -> None:
    with Device("cuda:1") as device:
        after = device.compute.record_event()
        queued = device.copier.submit(queue, device, "inbound", "weights", "layer", [after], lambda: None)
        assert (after.device, queued.result()[1].device) == (1, 1)


def test_a_thread_of_a_gpu_computes_on_one_core(cuda: FakeCuda) -> None:
    with Device("cuda:1") as device:
        assert device.copier.submit(torch.get_num_threads).result() == 1
