"""The verbs `doctor` and `rates`. `doctor` prints what this machine has, and what each method still needs; with
--calibrate, it measures the machine's rates. `rates` prints them as an entry of machines.yaml."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import click

from cli import options
from cli.exit_codes import UNAVAILABLE
from cli.options import check_writable
from harness.base.child_process import ask
from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core import method, native_build
from harness.core.job import Budget, Job, Workload, gib
from harness.core.rates import facts_of
from harness.devices import cuda_budget, machine, sim
from harness.devices.device_lock import turn
from harness.devices.named_machines import plain
from harness.plan.training_place import this_place

GB = 1e9
MIB = 2**20


@click.command()
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure the rates that plans use, in under a minute if the machine is idle.",
)
@click.option("-h", "hidden_size", type=int, default=2048, help="Hidden size of the layer that is timed.")
@click.option("-b", "batch_size", type=int, default=4, help="Samples per step.")
@options.num_heads
@options.seq_len
@options.dtype
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Device to check and time."
)
@options.results
def doctor(calibrate: bool, device: str, results: Path, **sizes: Any) -> None:
    """Show what this machine has, what is missing, and the command that installs it. Free space is that of the disk of
    --results. Exit code 7: no method can run."""
    if device == "auto":
        device = machine.devices()[0]
    if device not in machine.devices():
        raise ValueError(f"--device: expected auto or {machine.devices()[0]} on this machine, got {device}")
    workload = Workload(**sizes)
    for name, text in (*hardware_facts(results), *software_facts(), *method_states(device)):
        print(f"{name:20}{text}")
    if calibrate:
        measure_rates(workload, device, results)
    calibrations = [calibration_text(entry) for entry in machine.calibrations()]
    for text in calibrations or ["none of this machine: ./run.sh doctor --calibrate"]:
        print(f"{'calibration':20}{text}")
    if all(method.create(name, {}).missing(device) for name in method.names()):
        sys.exit(UNAVAILABLE)


def hardware_facts(results: Path) -> list[tuple[str, str]]:
    facts = machine.facts()
    gpu = f"{facts['gpu']}, {gib(facts['gpu_bytes'])}, driver {facts['driver']}" if "gpu" in facts else "none"
    if "gpu" in facts and (reason := machine.cuda_refused()):
        gpu += f"; {reason}"
    folder = next(path for path in (results.resolve(), *results.resolve().parents) if path.exists())
    return [
        ("cpu", f"{facts['cpu']}, {counted(facts['cores'], 'core')}, {gib(facts['host_bytes'])} of memory"),
        ("gpu", gpu),
        ("disk", f"{gib(shutil.disk_usage(folder).free)} free at {folder}"),
    ]


def software_facts() -> list[tuple[str, str]]:
    versions = machine.software()
    compiler = native_build.find_compiler()
    engines = ", ".join(f"{name} {versions[name] or 'missing'}" for name in machine.PACKAGES)
    sim_state = "not compiled yet: ./run.sh setup" if compiler else "needs g++"
    if sim.is_built():
        sim_state = "compiled"
    return [
        ("python, engines", f"{versions['python']}, {engines}"),
        ("compiler", compiler or "none: apt-get install g++"),
        ("device sim", sim_state),
    ]


def method_states(device: str) -> list[tuple[str, str]]:
    """Return pairs of a method's name and its state: ready, or what it still needs."""
    states = []
    for name in method.names():
        trained = method.create(name, {})
        missing = trained.missing(device)
        to_build = None if missing else trained.to_build()
        ready = f"ready, but for {to_build}: ./run.sh setup" if to_build else f"ready on {device}"
        states.append((name, missing or ready))
    return states


def measure_rates(workload: Workload, device: str, results: Path) -> None:
    """Measure the device's rates (compute, copies, updates) in a separate process, while no job runs on the device, and
    save them."""
    for folder in (results, machine.CALIBRATION.parent):
        # if a folder is not writable, fail before the measurement
        check_writable(folder)
    print("calibrating", flush=True)
    arguments = {"workload": dataclasses.asdict(workload), "device": device, "folder": str(results)}
    with turn(Job("calibration", workload, device=device), lambda event: print(event["text"], flush=True)):
        measured = ask("methods.streaming.placement.calibrate", arguments)
    entry = {"device": device, "dtype": workload.dtype, "forward_flops": workload.layer_flops}
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    load = machine.surroundings(device).get("load_average")
    sizes = {name: getattr(workload, name) for name in ("hidden_size", "batch_size", "seq_len")}
    machine.keep_calibration({**entry, **sizes, "date": day, "load_average": load, **measured})


def calibration_text(entry: JsonObject) -> str:
    """Return a calibration as text of several lines."""
    rates, measured = entry["rates"], entry["measured"]
    layer_tflops, head_tflops = (rates[f"{place}_flops_per_second"] / 1e12 for place in ("device", "head"))
    copies = {name: f"{rate / GB:.1f}" for name, rate in measured["copies"].items()}
    disk = {name: f"{rate / GB:.2f}" for name, rate in measured["disk"].items()}
    layer_seconds, timed_layer, updates = measured["compute"]["layer"], entry["computed"], measured["updates"]
    by_threads = ", ".join(f"{rate / GB:.2f} by {threads}" for threads, rate in updates["alone"].items())
    both = updates["under_copies"]  # the rates of updates and of copies at the same time
    indent = "\n" + " " * 20
    busy_note = "; the machine was busy: calibrate again when it is not" if machine.was_busy(entry) else ""
    return indent.join(
        (
            f"{entry['device']} {entry['dtype']}, {entry['hidden_size']} wide,"
            f" {entry['batch_size']} x {entry['seq_len']}"
            f" tokens, {entry['date']}{busy_note}",
            f"layer of {timed_layer['batch_size']} x {timed_layer['seq_len']} tokens:"
            f" forward {layer_seconds['forward_seconds']:.3g} s,"
            f" recompute and backward {layer_seconds['backward_seconds']:.3g} s;"
            f" {layer_tflops:.3g} TFLOP/s, the head's {head_tflops:.3g}",
            f"copies, GB/s: in {copies['inbound_page_locked']} (pageable {copies['inbound_pageable']}),"
            f" out {copies['outbound_page_locked']} (pageable {copies['outbound_pageable']}),"
            f" both at once {copies['both_ways']}, within the device {copies['within_device']}",
            f"host's Adam, G parameters/s: {by_threads} threads,"
            f" {updates['ahead'] / GB:.2f} from one state into another;"
            f" {both['params_per_second'] / GB:.2f} while {both['copied_bytes_per_second'] / GB:.1f} GB/s are copied;"
            f" the device's: {updates['on_device'] / GB:.2f}, of a streamed layer {updates['streamed'] / GB:.2f}",
            f"disk, GB/s: read {disk['read']}, write {disk['write']}, both at once {disk['both_ways']}",
        )
    )


@click.command()
@click.option("--name", metavar="NAME", help="Name of the entry; default: the GPU's name.")
@click.option("-h", "hidden_size", type=int, default=2048, help="Hidden size of the layer that is timed.")
@click.option("-b", "batch_size", type=int, default=4, help="Samples per step.")
@options.num_heads
@options.seq_len
@options.results
def rates(name: str | None, results: Path, **sizes: Any) -> None:
    """Print this machine's GPU as an entry of machines.yaml, for --machines FILE on another machine. Rates that are not
    known yet are measured, in under a minute."""
    place = this_place(Budget())
    if place.device != "cuda":
        raise ValueError(
            "expected a GPU, got none; for this CPU try ./run.sh doctor --calibrate, then ./run.sh advise"
        )
    workload = Workload(**sizes, dtype=place.dtype)
    if machine.rates(place.device, workload) is None:
        with contextlib.redirect_stdout(sys.stderr):  # only the entry goes to standard output
            measure_rates(workload, place.device, results)
    measured = machine.rates(place.device, workload)
    assert measured
    gpu = machine.gpu()
    entry = {
        "about": f"Measured there by ./run.sh rates: {place.about.removeprefix('this machine: ')}",
        "device_memory": f"{(gpu['gpu_bytes'] - cuda_budget.context_bytes()) // MIB}MiB",
        "host_memory": f"{machine.host_bytes() // MIB}MiB",
        "facts": {"precision": workload.dtype, **facts_of(measured)},
    }
    # JSON is valid YAML, and quotes all text that needs quotes in YAML
    print(f"{name or plain(gpu['gpu'])}: {json.dumps(entry)}")
