"""States on the disk: the same bits as in memory, as few buffers as said, and a full disk told by its name."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.method import create
from harness.spec import Budget, Job, Workload
from harness.sweep import Sweep
from methods._device import Device
from methods._disk import Disk, File, shelves
from methods._home import Home, new_layer
from methods._plans import NUM_BUFFERS
from methods._stream import Clip
from tests.training import tiny

NUM_LAYERS = 5


@pytest.fixture
def device() -> Iterator[Device]:
    with Device("cpu") as cpu:
        yield cpu


def homes(device: Device, workload: Workload, folder: Path | None) -> list[Home]:
    """Layers whose states lie in the folder, or in memory."""
    places = [None] * NUM_LAYERS if folder is None else shelves(device, NUM_LAYERS, str(folder), workload)
    return [
        Home(device, new_layer(workload), f"layers.{place}.", workload, host=True, shelf=shelf)
        for place, shelf in enumerate(places)
    ]


def updated(device: Device, workload: Workload, folder: Path | None, steps: int = 3) -> list[Tensor]:
    """Weights and first moments after some updates of every layer, top down as without clipping."""
    found = homes(device, workload, folder)
    for step in range(1, steps + 1):
        for place, home in reversed(list(enumerate(found))):
            home.updated.result()
            generator = torch.Generator().manual_seed(100 * step + place)
            home.grads.copy_(torch.randn(home.grads.numel(), generator=generator))
            home.landed = device.outbound.record_event()
            home.update_when_landed(1e-2 * step, Clip(device, 0.0))
    for home in found:
        home.updated.result()
    return list(chain.from_iterable((state.weight, state.exp_avg) for home in found for state in home.states()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_the_disk_are_updated_to_the_same_bits(device: Device, tmp_path: Path, dtype: str) -> None:
    workload = tiny(dtype=dtype)
    on_disk, in_memory = updated(device, workload, tmp_path), updated(device, workload, None)
    assert len(on_disk) == len(in_memory) and all(map(torch.equal, on_disk, in_memory))


def test_files_have_no_name_to_leave_behind(device: Device, tmp_path: Path) -> None:
    updated(device, tiny(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_as_many_buffers_as_said_hold_all_layers(device: Device, tmp_path: Path) -> None:
    disk = Disk(device, tmp_path, 100, tiny())
    assert len(disk.buffers) == NUM_BUFFERS
    assert {slab.nbytes % 4096 for buffer in disk.buffers for slab in buffer} == {0}


@pytest.mark.parametrize("offset", [0, 3], ids=["whole pages", "beside them"])
def test_what_is_written_is_read_again(tmp_path: Path, device: Device, offset: int) -> None:
    """Past the system's cache where memory lies in whole pages, through it where not."""
    whole = File(tmp_path, 3 * 8192)
    file = whole.at(8192)
    slab = device.room(2048 + offset, torch.float32, host=True)[offset:]
    slab.copy_(torch.arange(2048))
    torch.ops.harness.write(file, slab)
    again = device.room(2048, torch.float32, host=True)
    torch.ops.harness.read(file, again)
    assert torch.equal(slab, again)


def test_a_disk_that_fills_up_is_told_where_the_layer_is_asked_for_next(device: Device, tmp_path: Path) -> None:
    home = homes(device, tiny(), tmp_path)[0]
    assert home.shelf is not None
    with open("/dev/full", "r+b", buffering=0) as full:
        home.shelf.state[1] = torch.tensor([full.fileno(), full.fileno(), 0])
        home.landed = device.outbound.record_event()
        for _ in range(2):
            home.update_when_landed(1e-3, Clip(device, 0.0))
        with pytest.raises(OSError, match="No space left") as raised:
            home.updated.result()
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted by root only")
def test_a_disk_that_is_too_small_is_told_before_the_first_step(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        with pytest.raises(OSError, match=r"No space left on device: 2\.0 MiB") as raised:
            File(tmp_path, 2 * 2**20)
        assert raised.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)  # the error still holds the file


def test_a_model_whose_states_are_half_again_the_hosts_memory_trains_exactly(tmp_path: Path) -> None:
    """On the device sim, whose host has two thirds of what weights, gradients and states take."""
    workload = Workload(num_layers=12, hidden_size=128, num_heads=4, seq_len=32, batch_size=2, vocab_size=128)
    host_bytes = 16 * workload.num_layers * workload.layer_params * 2 // 3
    options = {"resident_layers": 0, "disk": str(tmp_path)}
    job = Job("stronghold", workload, options, Budget(2**24, host_bytes), "sim", steps=4, warmup=1)
    record = Sweep(tmp_path).run([job])[0]
    assert record.gate.verdict == "exact", (record.reason, record.gate.text)
    assert "D" in record.job.options["placement"] and record.peaks["host_accounted"] <= host_bytes


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    stronghold = create("stronghold", {"placement": "W1D1", "disk": "/nowhere"})
    with pytest.raises(ValueError, match="name another with --disk DIR"):
        stronghold.plan(tiny(), Budget())
