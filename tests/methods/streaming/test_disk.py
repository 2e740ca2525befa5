"""States on the disk: the same bits as in memory, as few buffers as said, and a full disk told by its name."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from cli import exit_codes
from harness.core.job import Job, Room, Workload
from harness.core.method import create
from harness.core.record import Record, read_all
from harness.devices.streams import Device
from harness.jobs.sweep import Sweep
from harness.models.model import new_layer
from harness.plan.fit import resolve
from methods.offload.adamw import published_settings
from methods.offload.clip import Clip
from methods.offload.layout import layout_of
from methods.shared.memory_needs import NUM_BUFFERS
from methods.streaming.disk import Disk, StateFile, shelves
from methods.streaming.layer_state import LayerState
from methods.streaming.starting_values import draw_states
from tests.support.cli import run
from tests.support.small_disk import small_disk
from tests.support.training import tiny

NUM_LAYERS = 5
PUNCH_HOLE = 0x02 | 0x01  # of fallocate(2): free the bytes, keep the file's size


@pytest.fixture
def device() -> Iterator[Device]:
    with Device("cpu") as cpu:
        yield cpu


def layers_of(device: Device, workload: Workload, folder: Path | None) -> list[LayerState]:
    """Layers whose states lie in the folder, or in memory."""
    numel = layout_of(new_layer(workload, 0)).numel
    on_disk = None if folder is None else shelves(device, NUM_LAYERS, str(folder), numel, workload.dtype)
    layers = [
        LayerState.of_model(device, workload, place, host=True, shelf=shelf)
        for place, shelf in enumerate(on_disk or [None] * NUM_LAYERS)
    ]
    draw_states(layers, workload)
    return layers


def updated(device: Device, workload: Workload, folder: Path | None, steps: int = 3) -> list[Tensor]:
    """Weights and first moments after some updates of every layer, top down as without clipping."""
    layers = layers_of(device, workload, folder)
    for step in range(1, steps + 1):
        for place, layer in reversed(list(enumerate(layers))):
            layer.updated.result()
            generator = torch.Generator().manual_seed(100 * step + place)
            layer.grads.copy_(torch.randn(layer.grads.numel(), generator=generator))
            layer.landed = device.outbound.record_event()
            layer.update_when_landed(published_settings(1e-2 * step), Clip(device, 0.0))
    for layer in layers:
        layer.updated.result()
    return list(
        chain.from_iterable((state.weight, state.exp_avg) for layer in layers for state in layer.tensors())
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_on_the_disk_are_updated_to_the_same_bits(device: Device, tmp_path: Path, dtype: str) -> None:
    workload = tiny(dtype=dtype)
    on_disk, in_memory = updated(device, workload, tmp_path), updated(device, workload, None)
    assert len(on_disk) == len(in_memory) and all(map(torch.equal, on_disk, in_memory))


def test_what_is_read_after_the_training_is_not_page_locked(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layers_of(device, tiny(), tmp_path)[0]
    assert layer.shelf
    monkeypatch.setattr(device, "room", lambda *args, **options: pytest.fail("page-locks memory for a copy"))
    exp_avg, exp_avg_sq = layer.shelf.read()
    assert not exp_avg.any() and not exp_avg_sq.any()


def test_files_have_no_name_to_leave_behind(device: Device, tmp_path: Path) -> None:
    updated(device, tiny(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_as_many_buffers_as_said_hold_all_layers(device: Device, tmp_path: Path) -> None:
    disk = Disk(device, tmp_path, 100, layout_of(new_layer(tiny(), 0)).numel, "fp32")
    assert len(disk.buffers) == NUM_BUFFERS
    assert {slab.nbytes % 4096 for buffer in disk.buffers for slab in buffer} == {0}


@pytest.mark.parametrize("offset", [0, 3], ids=["whole pages", "beside them"])
def test_what_is_written_is_read_again(tmp_path: Path, device: Device, offset: int) -> None:
    """Past the system's cache where memory lies in whole pages, through it where not."""
    whole = StateFile(tmp_path, 3 * 8192)
    file = whole.at(8192)
    slab = device.room(2048 + offset, torch.float32, host=True)[offset:]
    slab.copy_(torch.arange(2048))
    torch.ops.harness.write(file, slab)
    again = device.room(2048, torch.float32, host=True)
    torch.ops.harness.read(file, again)
    assert torch.equal(slab, again)


def test_a_disk_that_fills_up_is_told_where_the_layer_is_asked_for_next(
    device: Device, tmp_path: Path
) -> None:
    layer = layers_of(device, tiny(), tmp_path)[0]
    assert layer.shelf is not None
    with open("/dev/full", "r+b", buffering=0) as full:
        layer.shelf.state[1] = torch.tensor([full.fileno(), full.fileno(), 0])
        layer.landed = device.outbound.record_event()
        for _ in range(2):
            layer.update_when_landed(published_settings(1e-3), Clip(device, 0.0))
        with pytest.raises(OSError, match="No space left") as raised:
            layer.updated.result()
    assert raised.value.errno == errno.ENOSPC


@pytest.fixture(name="small_disk")
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 9 MiB, with room for 8 MiB."""
    with small_disk(tmp_path, 9) as folder:
        yield folder


@pytest.mark.parametrize(
    ("failing", "outcome"), [("mkfs.ext4", subprocess.CalledProcessError), ("mount", pytest.skip.Exception)]
)
def test_only_where_nothing_can_be_mounted_are_tests_of_a_small_disk_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, outcome: type[BaseException]
) -> None:
    for name in ("mkfs.ext4", "mount"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {int(name == failing)}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(outcome), small_disk(tmp_path, 1):
        pass


def fill(folder: Path) -> None:
    with suppress(OSError), open(folder / "filler", "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_too_small_is_told_before_the_first_step(small_disk: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: 9\.0 MiB of states: .*small") as raised:
        StateFile(small_disk, 9 * 2**20)
    assert raised.value.errno == errno.ENOSPC and list(small_disk.iterdir()) == []


def test_states_that_another_process_has_cut_off_are_named_with_their_folder(
    device: Device, tmp_path: Path
) -> None:
    all_shelves = [layer.shelf for layer in layers_of(device, tiny(), tmp_path) if layer.shelf]
    for shelf in all_shelves:
        shelf.read()  # waits for its writing: a later write would make the file longer again
    first = all_shelves[0]
    os.ftruncate(first.disk.files[0].cached.fileno(), 0)
    with pytest.raises(
        OSError, match=f"a file of states ends at 0 bytes, before its data does: '{tmp_path}'"
    ):
        first.read()


def take_room_of_states(folder: Path) -> None:
    """As on a file system that takes room only as it is written: what the run has reserved there is given back, and
    something else fills the disk."""
    for process in psutil.Process().children(recursive=True):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(str(folder)):
                    with open(link, "r+b") as file:
                        size = ctypes.c_long(os.fstat(file.fileno()).st_size)
                        ctypes.CDLL(None).fallocate(file.fileno(), PUNCH_HOLE, ctypes.c_long(0), size)
    fill(folder)


@pytest.mark.heavy
def test_a_disk_that_is_full_in_mid_run_ends_that_run_alone_and_once_there_is_room_the_same_call_trains_it(
    small_disk: Path, tmp_path: Path
) -> None:
    """Something else fills the disk, which harms nobody, and from step 20 on has the room of the states, too."""
    workload = Workload(num_layers=4, hidden_size=128, num_heads=4, seq_len=32, batch_size=2, vocab_size=128)
    on_disk = Job("stronghold", workload, {"placement": "W1D3", "disk": str(small_disk)}, steps=40, warmup=1)
    plans = [resolve(job) for job in (on_disk, Job("resident", workload, steps=40, warmup=1))]

    def report(event: dict) -> None:
        if event["event"] == "step" and event["step"] >= 3 and "first" not in ends:
            (fill if event["step"] < 20 else take_room_of_states)(small_disk)
        elif event["event"] == "end":
            ends.setdefault("first", event["record"])

    ends: dict[str, Record] = {}
    full, other = Sweep(tmp_path, report=report).run(plans)
    assert (full.status, exit_codes.of_records([full], is_sweep=False)) == ("does-not-fit", 4)
    assert full.phase.startswith("step ") and len(full.losses) >= 20
    assert (
        full.reason.startswith(f"out of room on the disk at {full.phase}") and str(small_disk) in full.reason
    )
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    assert other.gate.verdict == "exact"

    (small_disk / "filler").unlink()
    again, same = Sweep(tmp_path).run(plans)
    assert again.gate.verdict == "exact" and len(again.losses) == 40
    assert same.started == other.started


def test_no_room_for_results_is_one_line_and_exit_4(small_disk: Path) -> None:
    fill(small_disk)
    command = f"-m resident -l 1 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 2 --results {small_disk}"
    done = run(*command.split())
    assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)
    assert done.stderr.startswith("error: the disk is full")


@pytest.mark.heavy
def test_a_model_whose_states_are_half_again_the_hosts_memory_trains_exactly(
    tmp_path: Path, forked: None
) -> None:
    """Through the door, on the device sim, whose host has two thirds of what weights, gradients and states take."""
    layer_params = Workload(hidden_size=128, num_heads=4).layer_params
    host_kib = 16 * 12 * layer_params * 2 // 3 // 1024
    command = f"-m stronghold -l 12 -h 128 -b 2 --heads 4 --seq 32 --vocab 128 --steps 4 --warmup 1 --disk {tmp_path}"
    budgets = (
        f"--device-memory 16MiB --host-memory {host_kib}KiB --option resident_layers=0 --results {tmp_path}"
    )
    done = run(*command.split(), *budgets.split())
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = (record for record in read_all(tmp_path)[0].values() if record.job.method == "stronghold")
    assert record.gate.verdict == "exact" and "D" in record.job.options["placement"]
    assert record.peaks["host_accounted"] <= 1024 * host_kib


@pytest.mark.parametrize("folder", ["/nowhere", "/proc"])
def test_a_folder_that_cannot_be_written_is_one_line(folder: str) -> None:
    stronghold = create("stronghold", {"placement": "W1D1", "disk": folder})
    with pytest.raises(ValueError, match="try another with --disk DIR"):
        stronghold.plan(tiny(), Room())
