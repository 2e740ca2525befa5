"""CUDA's current devices and streams by their documented rules, without a GPU: what breaks a rule is an AssertionError.

A thread starts on device 0. A stream, and an event when it is first recorded, belong to the device that is current.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from harness.devices import streams


class FakeCuda:
    """A process's devices, and each thread's current one."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices, self.thread = num_devices, threading.local()

    def current_device(self) -> int:
        return getattr(self.thread, "device", 0)

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else device.index
        assert isinstance(index, int) and 0 <= index < self.num_devices
        self.thread.device = index

    def current_stream(self) -> FakeStream:
        return getattr(self.thread, "stream", None) or FakeStream(self)

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """As torch.cuda.stream: its device becomes current, too."""
        before = self.current_device(), getattr(self.thread, "stream", None)
        self.thread.device, self.thread.stream = stream.device, stream
        yield
        self.thread.device, self.thread.stream = before

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        patch.setattr(torch.cuda, "set_device", self.set_device)
        patch.setattr(torch.cuda, "current_device", self.current_device)
        patch.setattr(streams.CudaStreams, "stream", lambda table: FakeStream(self))
        patch.setattr(streams.CudaStreams, "current", staticmethod(self.current_stream))
        patch.setattr(streams.CudaStreams, "use", staticmethod(self.use))
        return self


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.device = cuda, cuda.current_device()

    def record_event(self) -> FakeEvent:
        assert self.cuda.current_device() == self.device, "an event of another device than its stream's"
        return FakeEvent(self.device)

    def wait_event(self, event: FakeEvent) -> None:
        assert isinstance(event, FakeEvent)

    def synchronize(self) -> None: ...


class FakeEvent:
    def __init__(self, device: int) -> None:
        self.device = device
