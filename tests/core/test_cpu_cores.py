"""The cores that a process may use, and those of a thread, which leaves the bits of computations beside it alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.base import cgroup
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


@pytest.mark.parametrize(("kind", "answer"), [("pool", "1 2 True"), ("calling", "2 2 True")])
def test_threads_of_one_core_leave_the_gradients_of_attention_as_they_are(kind: str, answer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ATTENTION, kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert done.stdout.strip() == answer


@pytest.fixture
def quota_of_one_core() -> Iterator[Path]:
    """A control group whose processes may take the time of one core and a half; gone afterwards."""
    group = cgroup.current_group(controller="cpu")
    folder = group.folder / f"quota-{os.getpid()}" if group else Path("none")
    name, text = (
        ("cpu.cfs_quota_us", "150000") if group and group.version == 1 else ("cpu.max", "150000 100000")
    )
    try:
        folder.mkdir()
        (folder / name).write_text(text)
    except OSError as error:
        pytest.skip(f"no group with a quota can be made here: {error}")
    yield folder
    folder.rmdir()


IN_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from harness.core.job import Job, Workload
from harness.devices import machine
from harness.devices.streams import num_update_threads
from harness.run.launch import environment

told = environment(Job("resident", Workload(), device="cpu")).get("OMP_NUM_THREADS")
print(machine.facts()["cores"], num_update_threads("cpu"), told)
"""


def test_threads_keep_to_the_quota_of_the_group(quota_of_one_core: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_GROUP, str(quota_of_one_core)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    is_narrower = len(os.sched_getaffinity(0)) > 1  # on one core torch itself sees that there is no other
    assert done.stdout.split() == ["1", "1", "1" if is_narrower else "None"]
