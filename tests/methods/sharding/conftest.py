"""Models of users are compared with plain training on a CPU, to the last bit: no test of them takes a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
