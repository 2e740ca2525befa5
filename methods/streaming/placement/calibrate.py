"""Measures, in a process of its own, the rates that the planner uses: of compute, copies, updates, the disk and
exchanges between devices.

The process reads one JSON object (workload, device, folder) from standard input, and writes another, with the raw
numbers and the rates, to standard output. The process times the code that trains: the model's layer,
harness/devices/streams.py, layer_state.py.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.base.json_object import JsonObject
from harness.core.job import Workload
from harness.core.method import Unavailable
from harness.core.rates import Rates
from harness.devices import named_machines
from harness.devices.budgets import context_since
from harness.devices.machine import facts, gpu_free_bytes
from harness.devices.streams import Device
from harness.models.gpt import DTYPES
from harness.plan.resources import UPDATE_BYTES, all_reduce_sent_bytes
from methods.offload import adamw_kernel
from methods.offload.adamw import published_settings
from methods.offload.clip import Clip
from methods.streaming.disk import StateFile
from methods.streaming.embedding_and_head import ResidentEnds
from methods.streaming.layer_state import LayerState, Passed
from methods.streaming.slot import GradientRoom, Slot
from methods.streaming.starting_values import draw_states

CPU_LAYER_FLOPS = 1.5e10  # most FLOPs of a timed forward pass on a CPU: 0.2 s on two cores
COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}  # bytes of a timed copy: more than any cache holds
HOST_UPDATED_HIDDEN_SIZE = 1024  # hidden size of the layers whose updates by the host are timed: 200 MiB each
# Hidden size of the layers that the device updates: on a GPU a smaller layer's update takes less time than its launch.
DEVICE_UPDATED_HIDDEN_SIZE = {"cpu": 1024, "cuda": 2048}
# Passes that are queued together: a GPU that is waited for after each pass stands still while the next is launched.
PASSES_AT_ONCE = {"cpu": 1, "cuda": 4}
# most layers that are updated at once; more threads share these, so the memory does not grow with cores
MOST_UPDATED_LAYERS = 16
FILE_BYTES = 256 * 2**20
BLOCK_BYTES = 32 * 2**20
SUMMED_BYTES, NUM_SUMS = 32 * 2**20, 8
UPDATES_AT_ONCE = 16  # updates on the device that are queued together
ADAM_SETTINGS = published_settings(1e-4)
REPEATED_SECONDS = 1.0  # each timed call is repeated for about so many seconds


def measure_machine(workload: Workload, device_name: str, folder: Path) -> JsonObject:
    """Return all raw numbers by name: times in seconds, rates of copies in bytes a second, rates of updates in
    parameters a second. On a GPU also return the bytes of a process's context.
    """
    free_bytes = gpu_free_bytes() if device_name == "cuda" else None
    with Device(device_name) as device:
        measured: JsonObject = {
            "compute": measure_compute(workload, device),
            "copies": measure_copies(device),
        }
    measured |= {
        "updates": measure_updates(workload, device_name),
        "disk": measure_disk(folder),
        **measure_exchange(device_name),
    }
    # Measure the context last: by now the libraries have loaded the kernels that training uses.
    context_bytes = context_since(free_bytes) if device_name == "cuda" else None
    return measured if context_bytes is None else {**measured, "context_bytes": context_bytes}


def rates_of(measured: JsonObject, workload: Workload, device: str) -> Rates:
    """Derive the rates from the numbers of measure_machine(). `workload`: the workload whose layer was timed."""
    layer, head_seconds = measured["compute"]["layer"], measured["compute"]["head_seconds"]
    update_rates, copy_rates = measured["updates"], measured["copies"]
    update_bytes = UPDATE_BYTES[workload.dtype]
    alone_rate, rates_under_copies = max(update_rates["alone"].values()), update_rates["under_copies"]
    inbound, outbound = copy_rates["inbound_page_locked"], copy_rates["outbound_page_locked"]
    read_rate, write_rate = measured["disk"]["read"], measured["disk"]["write"]
    layer_seconds = layer["forward_seconds"] + layer["backward_seconds"]
    bytes_under_copies = (
        update_bytes * rates_under_copies["params_per_second"] + rates_under_copies["copied_bytes_per_second"]
    )
    return Rates(
        device_flops_per_second=4 * workload.layer_flops / layer_seconds,
        forward_share=layer["forward_seconds"] / layer_seconds,
        head_flops_per_second=workload.head_flops_per_step / head_seconds,
        device_bytes_per_second=update_bytes * update_rates["on_device"],
        inbound_bytes_per_second=inbound,
        outbound_bytes_per_second=outbound,
        exchange_bytes_per_second=measured.get("exchange", min(inbound, outbound)),
        duplex_share=min(1.0, copy_rates["both_ways"] / (inbound + outbound)),
        # the higher of two measurements
        host_bytes_per_second=max(update_bytes * alone_rate, bytes_under_copies),
        host_adam_params_per_second=alone_rate,
        streamed_cost=update_rates["on_device"] / update_rates["streamed"],
        ahead_cost=max(
            1.0, update_rates["alone"][str(rates_under_copies["threads"])] / update_rates["ahead"]
        ),
        disk_read_bytes_per_second=read_rate,
        disk_write_bytes_per_second=write_rate,
        disk_duplex_share=min(1.0, measured["disk"]["both_ways"] / (read_rate + write_rate)),
        is_host=device != "cuda",
    )


def timed_workload(workload: Workload, device: str) -> Workload:
    """Return the workload to time. On a CPU this workload has so few tokens that a layer's forward pass ends soon; the
    time per token is assumed not to depend on the number of tokens.
    """
    if device == "cuda":
        return workload
    for size_name, least_size in (("batch_size", 1), ("seq_len", 64)):
        while workload.layer_flops > CPU_LAYER_FLOPS and getattr(workload, size_name) > least_size:
            workload = dataclasses.replace(workload, **{size_name: getattr(workload, size_name) // 2})
    return workload


def measure_compute(workload: Workload, device: Device) -> JsonObject:
    """Return the seconds of a layer's forward pass, of its recompute with the backward pass, and of the head with its
    loss and gradients.
    """
    input_shape = (workload.batch_size, workload.seq_len, workload.hidden_size)
    layer = LayerState.of_model(device, workload, 0, host=False)
    draw_states([layer], workload)
    layer.bind(layer.current.weights)
    x, dy = torch.randn(2, *input_shape, dtype=DTYPES[workload.dtype], device=device.name)
    layer_inputs: list[Passed] = [(x.requires_grad_(),)]
    passes_at_once = PASSES_AT_ONCE[device.name.type]
    both_passes_seconds = median_seconds(
        device, lambda: layer.forward(layer_inputs) and layer.backward([(dy,)], layer.grads), passes_at_once
    )
    forward_seconds = median_seconds(device, lambda: layer.forward(layer_inputs), passes_at_once)
    targets = torch.randint(workload.vocab_size, input_shape[:2], device=device.name)
    ends = ResidentEnds(device, workload)
    head_seconds = median_seconds(device, lambda: ends.loss(layer_inputs, targets, 1.0), passes_at_once)
    return {
        "layer": {
            "forward_seconds": forward_seconds,
            "backward_seconds": max(both_passes_seconds - forward_seconds, 0.0),
        },
        "head_seconds": head_seconds,
    }


def measure_copies(device: Device) -> dict[str, float]:
    """Return the rates of copies, in bytes a second: within the device (bytes read plus bytes written), each way over
    the link with page-locked and with pageable memory, and both ways at once. On a CPU all are copies within host
    memory.
    """
    num_bytes = COPY_BYTES[device.name.type]
    host_slab, other_host_slab, device_slab, other_device_slab = make_slabs(device, num_bytes)
    pageable = torch.zeros(num_bytes // 4)

    def copy(stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        with device.streams.use(stream):
            target.copy_(source, non_blocking=True)

    def copy_both_ways() -> None:
        inbound_copy = device.copier.submit(copy, device.inbound, device_slab, host_slab)
        copy(device.outbound, other_host_slab, other_device_slab)
        inbound_copy.result()

    timed_copies: dict[str, tuple[int, Callable[[], Any]]] = {
        "within_device": (2, lambda: device_slab.copy_(other_device_slab)),
        "inbound_page_locked": (1, lambda: copy(device.inbound, device_slab, host_slab)),
        "outbound_page_locked": (1, lambda: copy(device.outbound, other_host_slab, other_device_slab)),
        "inbound_pageable": (1, lambda: copy(device.inbound, device_slab, pageable)),
        "outbound_pageable": (1, lambda: copy(device.outbound, pageable, other_device_slab)),
        "both_ways": (2, copy_both_ways),
    }
    return {
        name: num_copies * num_bytes / median_seconds(device, work)
        for name, (num_copies, work) in timed_copies.items()
    }


def make_slabs(device: Device, num_bytes: int) -> list[torch.Tensor]:
    """Return four slabs of `num_bytes` each: two on the host, then two on the device."""
    return [device.room(num_bytes // 4, torch.float32, host=host) for host in (True, True, False, False)]


def measure_updates(workload: Workload, device_name: str) -> JsonObject:
    """Return the rates of updates, in parameters a second. `alone`: by the host, for each number of threads. `ahead`:
    by the host, into the spare states. `under_copies`: by the host, while copies go both ways.
    `on_device`, `streamed`: by the device, a resident layer and a streamed layer.
    """
    one_layer = dataclasses.replace(workload, num_layers=1, num_heads=1)
    small_workload = dataclasses.replace(
        one_layer, hidden_size=min(HOST_UPDATED_HIDDEN_SIZE, workload.hidden_size)
    )
    most_threads = facts()["cores"] - (2 if device_name == "cuda" else 0)
    most_threads, rate_of_threads = max(1, most_threads), {}
    for num_threads in sorted(
        {1, most_threads, *(2**power for power in range(1, 10) if 2**power < most_threads)}
    ):
        with Device(device_name, num_workers=num_threads) as device:
            layers = make_landed_layers(device, small_workload, min(num_threads, MOST_UPDATED_LAYERS))
            seconds = median_seconds(device, lambda layers=layers: update_all(layers))  # type: ignore[misc]
            rate_of_threads[str(num_threads)] = len(layers) * small_workload.layer_params / seconds
            if num_threads == most_threads:
                rates_under_copies = measure_updates_under_copies(device, layers, small_workload.layer_params)
        del layers  # page-locked memory
    with Device(device_name, num_workers=most_threads) as device:
        layers = make_landed_layers(
            device, small_workload, min(most_threads, MOST_UPDATED_LAYERS), spare=True
        )
        seconds = median_seconds(device, lambda: update_all(layers, ahead=True))
        ahead_rate = len(layers) * small_workload.layer_params / seconds
    with Device(device_name, num_workers=most_threads) as device:
        hidden_size = min(DEVICE_UPDATED_HIDDEN_SIZE[device_name], workload.hidden_size)
        device_rates = measure_updates_on_device(
            device, dataclasses.replace(one_layer, hidden_size=hidden_size)
        )
    return {
        "alone": rate_of_threads,
        "ahead": ahead_rate,
        "under_copies": {"threads": most_threads, **rates_under_copies},
        **device_rates,
    }


def measure_updates_on_device(device: Device, workload: Workload) -> dict[str, float]:
    """Return the rates of updates on the device, in parameters a second: of a resident layer, and of a streamed layer
    in its slot."""
    resident = LayerState.of_model(device, workload, 0, host=False)
    streamed = LayerState.of_model(device, workload, 0, host=True, streamed=True)
    slot, grads = Slot(streamed, holds_state=True), GradientRoom(streamed).slab
    step = streamed.next_step(ADAM_SETTINGS)
    update_calls: dict[str, Callable[[], Any]] = {
        "on_device": lambda: resident.update(ADAM_SETTINGS, None),
        "streamed": lambda: streamed.adamw(grads, slot.state, slot.state, streamed.chunks, step, None),
    }

    return {
        name: workload.layer_params / median_seconds(device, update, UPDATES_AT_ONCE)
        for name, update in update_calls.items()
    }


def make_landed_layers(
    device: Device, workload: Workload, num_layers: int, *, spare: bool = False
) -> list[LayerState]:
    """Return layers whose state is on the host and whose gradients have arrived there."""
    layers = [LayerState.of_model(device, workload, i, host=True, spare=spare) for i in range(num_layers)]
    for layer in layers:
        layer.landed = device.outbound.record_event()
    return layers


def update_all(layers: list[LayerState], *, ahead: bool = False) -> None:
    """Update all layers and wait until the updates are done. `ahead`: update into the spare states, before the norm is
    known; False: update in place.
    """
    for layer in layers:
        clip = Clip(layer.device, 0.0)
        clip.add([torch.zeros((), device=layer.device.name)])
        (layer.speculate_when_landed if ahead else layer.update_when_landed)(ADAM_SETTINGS, clip)
    for layer in layers:
        (layer.speculation.done if layer.speculation else layer.updated).result()


def measure_updates_under_copies(
    device: Device, layers: list[LayerState], layer_params: int
) -> dict[str, float]:
    """Return the rates of updates and of copies that run at the same time. Copies both ways go on until the updates
    end.
    """
    num_bytes = COPY_BYTES[device.name.type] // 4
    host_slab, other_host_slab, device_slab, other_device_slab = make_slabs(device, num_bytes)
    copied_bytes, num_rounds, started = 0, 8, time.perf_counter()
    for _ in range(num_rounds):
        for layer in layers:
            layer.update_when_landed(ADAM_SETTINGS, Clip(device, 0.0))
        while not all(layer.updated.done() for layer in layers):
            with device.streams.use(device.inbound):
                device_slab.copy_(host_slab, non_blocking=True)
            with device.streams.use(device.outbound):
                other_host_slab.copy_(other_device_slab, non_blocking=True)
            device.synchronize()
            copied_bytes += 2 * num_bytes
    seconds = time.perf_counter() - started
    updated_params = num_rounds * len(layers) * layer_params
    return {"params_per_second": updated_params / seconds, "copied_bytes_per_second": copied_bytes / seconds}


def measure_exchange(device_name: str) -> dict[str, float]:
    """Return the rate of exchanges between devices, in bytes a second. On a CPU this is the rate of all ranks together,
    measured by sums over two ranks. For a GPU it is the rate of the datasheet, because the machine may have only one
    GPU; for an unknown GPU the dictionary is empty."""
    if device_name == "cuda":
        machine_name = named_machines.of_gpu(facts()["gpu"], facts()["gpu_bytes"])
        rates = named_machines.load(machine_name).rates("fp32") if machine_name else None
        return {"exchange": rates.exchange_bytes_per_second} if rates else {}
    with tempfile.TemporaryDirectory() as folder:
        meeting_path = str(Path(folder) / "meeting")
        # Two new processes: torch numbers the groups of a process, and ranks with other numbers do not meet.
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            seconds, _ = pool.map(sum_over_two, (meeting_path, meeting_path), (0, 1))
    return {"exchange": 2 * all_reduce_sent_bytes(SUMMED_BYTES, 2) / seconds}


def sum_over_two(meeting_path: str, rank: int) -> float:
    """Return the median seconds of a sum over two ranks. Each rank is a process of its own; the ranks find each other
    by the file `meeting_path`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    time_limit = timedelta(seconds=60)  # long, because the other process first imports torch
    dist.init_process_group(
        "gloo", store=dist.FileStore(meeting_path, 2), rank=rank, world_size=2, timeout=time_limit
    )
    summed_tensor, times = torch.zeros(SUMMED_BYTES // 4), []
    for _ in range(NUM_SUMS):
        started = time.perf_counter()
        dist.all_reduce(summed_tensor)
        times.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return statistics.median(times[1:])


def measure_disk(folder: Path) -> dict[str, float]:
    """Return the rates, in bytes a second, of writing a file in this folder, of reading it, and of both at once."""
    file = StateFile(folder, FILE_BYTES)
    slabs = [torch.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=torch.float32).normal_() for _ in range(2)]
    block_places = [file.at(start) for start in range(0, FILE_BYTES, BLOCK_BYTES)]

    def time_blocks(read_or_write: Callable[[torch.Tensor, torch.Tensor], None], slab: torch.Tensor) -> float:
        started = time.perf_counter()
        for place in block_places:
            read_or_write(place, slab)
        return time.perf_counter() - started

    write, read = torch.ops.harness.write, torch.ops.harness.read
    time_blocks(write, slabs[0])  # the first write to reserved space takes longer
    written_seconds, read_seconds = time_blocks(write, slabs[0]), time_blocks(read, slabs[1])
    with ThreadPoolExecutor(2) as pool:
        both_seconds = max(pool.map(time_blocks, (write, read), slabs))
    return {
        "write": FILE_BYTES / written_seconds,
        "read": FILE_BYTES / read_seconds,
        "both_ways": 2 * FILE_BYTES / both_seconds,
    }


def median_seconds(device: Device, work: Callable[[], Any], calls_at_once: int = 1) -> float:
    """Return the median seconds of a call of work(). The device is waited for after `calls_at_once` calls. After a
    first round that does not count, there are rounds for about REPEATED_SECONDS, 3 to 99 of them.
    """
    times: list[float] = []
    while len(times) < 4 or (sum(times) < REPEATED_SECONDS and len(times) < 100):
        started = time.perf_counter()
        for _ in range(calls_at_once):
            work()
        device.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:]) / calls_at_once


def main() -> None:
    order = json.load(sys.stdin)
    if adamw_kernel.to_build():
        with suppress(Unavailable):
            # no compiler: torch's kernels are timed, because training then uses these
            adamw_kernel.build()
    workload = timed_workload(Workload(**order["workload"]), order["device"])
    measured = measure_machine(workload, order["device"], Path(order["folder"]))
    rates = rates_of(measured, workload, order["device"])
    computed = {name: getattr(workload, name) for name in ("batch_size", "seq_len", "hidden_size", "dtype")}
    print(json.dumps({"computed": computed, "measured": measured, "rates": dataclasses.asdict(rates)}))


if __name__ == "__main__":
    main()
