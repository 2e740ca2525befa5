"""The cores of a thread: threads beside a computation leave its bits as they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.base.checkout import ROOT

# 16 heads of 24 columns: MKL rounds the gradients of this attention otherwise if its products share cores.
ATTENTION = """
import hashlib, sys, torch
from torch.nn.functional import scaled_dot_product_attention
from harness.core.cpu_cores import use_cores
from harness.devices.streams import STREAMS

assert torch.get_num_threads() == 2
parts = torch.arange(3 * 8 * 16 * 256 * 24).sin().view(3, 8, 256, 16, 24).transpose(2, 3).requires_grad_()

def gradient():
    parts.grad = None
    scaled_dot_product_attention(*parts, is_causal=True).pow(2).sum().backward()
    return hashlib.sha256(parts.grad.numpy().tobytes()).hexdigest()

before = gradient()
if sys.argv[1] == "pool":
    pool = STREAMS["cpu"].pool(1)
    print(pool.submit(torch.get_num_threads).result(), torch.get_num_threads(), gradient() == before)
else:
    use_cores(2)
    print(2, torch.get_num_threads(), gradient() == before)
"""


@pytest.mark.parametrize(("kind", "told"), [("pool", "1 2 True"), ("calling", "2 2 True")])
def test_threads_of_one_core_leave_the_gradients_of_attention_as_they_are(kind: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ATTENTION, kind], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.stdout.strip() == told
