"""Borrows a GPU for minutes: three calls of under ten minutes each, the most important steps first.

A call runs its steps in order, each with a limit of its own; steps that were tried before go last. Recorded results are
not measured again, so a call is repeated until all its steps are done, before the next one. Each call ends with a
verdict of one screen, and an archive (bench/gpu_results.py), which the next call reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bench import gpu_facts, gpu_results
from harness.base.checkout import ROOT
from harness.base.whole_file import write_whole
from harness.core.job import GIB, gib
from harness.core.record import Record, read_all
from harness.devices import machine
from harness.run.launch import EXPANDABLE

LIMIT_SECONDS = 480.0  # limit of a call, its archive included
ENDING_SECONDS = 15.0  # part of the limit, for verdict and archive
LEAST_SECONDS = 20.0  # a step needs at least this long
UNFINISHED = (2, 6, 130)  # exit codes of steps not begun, of jobs ended at their own limit, of interrupted ones
GRACE_SECONDS = 25.0  # for a step told to end: its worker finishes its record
PEERS = ("resident", "zero-offload", "zero-infinity", "fsdp2-offload", "megatron-lm", "l2l")
STREAMED = ("zero-offload", "zero-infinity", "fsdp2-offload", "l2l")  # the others hold the model on the device
SHOWN_OPTIONS = ("placement", "num_models", "double_buffer")
WIDTH = 160  # characters of the verdict


@dataclass(frozen=True)
class Scale:
    """Sizes and budgets of all steps."""

    device: str  # of facts and rates
    layer: tuple[str, ...]  # sizes of a layer
    vocab: tuple[str, ...]
    budget: tuple[str, ...]
    whole: tuple[str, ...]  # the same with all device memory
    dtypes: tuple[str, ...]
    headline: tuple[int, ...]  # depths of the second call; the last one is beyond the device's memory
    whole_depth: int  # the largest depth of resident training in fp32
    beyond: tuple[int, ...]  # depths of the third call
    probed: tuple[str, ...]  # methods that the third call puts to the gate's probe
    traced: int  # layers
    models: int  # layers of each of four models
    steps: tuple[str, ...]
    tests: str
    seconds: float  # of all methods at one depth


def cuda(host_bytes: int) -> Scale:
    """The published sizes. The host's budget leaves the machine an eighth of its memory."""
    job = ("--device", "cuda", "--timeout", "400", "--host-memory", f"{min(90, host_bytes * 7 // 8 // GIB)}GiB")
    return Scale(
        device="cuda", layer=("-h", "2048", "-b", "4"), vocab=(), budget=(*job, "--device-memory", "32GiB"), whole=job,
        dtypes=("fp32", "bf16"), headline=(16, 24, 32, 48), whole_depth=32, beyond=(78, 100),
        probed=("stronghold", *PEERS), traced=8, models=24, steps=("--steps", "8", "--warmup", "3"), seconds=400,
        tests="window or streamed or blocking or (stronghold and fp32 and 1.0) or (l2l and bf16 and 1.0)",
    )  # fmt: skip


DEMO_JOB = ("--device", "sim", "--timeout", "60", "--host-memory", "64MiB", "--device-memory")
DEMO = Scale(
    device="cpu", layer=("-h", "64", "-b", "2", "--heads", "4", "--seq", "32"), vocab=("--vocab", "512"),
    budget=(*DEMO_JOB, "4MiB"), whole=(*DEMO_JOB, "16MiB"), dtypes=("fp32",), headline=(2,), whole_depth=2,
    beyond=(6,), probed=("stronghold",), traced=2, models=2, steps=("--steps", "4", "--warmup", "1"), seconds=90,
    tests="window",
)  # fmt: skip


@dataclass(frozen=True)
class GpuStep:
    """A command and its limit in seconds. `needs`: run it only after stronghold has trained this many layers."""

    title: str
    command: tuple[str, ...]
    seconds: float
    needs: int = 0


class Steps:
    """The steps of each call, for a scale and a folder of results."""

    def __init__(self, scale: Scale, results: Path) -> None:
        self.scale, self.results = scale, results

    def of(self, call: int) -> list[GpuStep]:
        return (self.first, self.second, self.third)[call - 1]()

    def first(self) -> list[GpuStep]:
        """First call: does it work at all, and are the plans' assumptions true?"""
        scale = self.scale
        facts = ("-m", "bench.gpu_facts", str(self.results / "facts.json"), "--device", scale.device)
        tests = ("-m", "pytest", "-q", "tests/methods/test_gpu.py", "-k", scale.tests)
        kernel = "from methods.offload import adamw_kernel as k; k.to_build() and k.build(); print('compiled')"
        calibrate = ("doctor", "--calibrate", *scale.layer, "--dtype", "bf16", "--device", scale.device)
        window, streamed = ("--option", "resident_layers=0"), ("--placement", f"S{scale.traced}")
        depth, half, deepest = scale.headline[0], min(24, scale.whole_depth), scale.headline[-1]
        return [
            GpuStep("facts", ("env", f"PYTORCH_ALLOC_CONF={EXPANDABLE}", sys.executable, *facts), 90),
            GpuStep("the host's kernel", (sys.executable, "-c", kernel), 60),
            GpuStep("tests", (sys.executable, *tests), 150),
            self.verb("rates", *calibrate, seconds=90),
            self.run("nothing resident, bf16", "stronghold", scale.traced, "bf16", *window, trace="window-bf16"),
            self.run("nothing resident, fp32", "stronghold", scale.traced, "fp32", *window, trace="window-fp32"),
            self.run("updated on the device", "stronghold", scale.traced, "bf16", *streamed, trace="streamed-bf16"),
            self.run("resident, the whole device", "resident", half, "bf16", budget=scale.whole),
            self.run("resident, capped", "resident", half, "bf16"),
            self.run("stronghold, all resident", "stronghold", half, "bf16", "--placement", f"R{half}"),
            *(self.run(f"{name}, once", name, depth, "fp32", seconds=120) for name in PEERS[1:5]),
            self.run("beyond the device", "stronghold", deepest, "fp32", seconds=300),
        ]  # fmt: skip

    def second(self) -> list[GpuStep]:
        """Second call: the headline, depths beyond the device first."""
        return [self.points(dtype, depth) for dtype in self.scale.dtypes for depth in reversed(self.scale.headline)]

    def third(self) -> list[GpuStep]:
        """The largest depths, what a step does there, the headline's probes, several models, and the largest sizes."""
        scale, proven = self.scale, self.scale.headline[-1]
        points = [self.points(dtype, depth, proven) for dtype in scale.dtypes for depth in scale.beyond]
        four = ("hydra", scale.models, "bf16", "--models", "4")
        given = (*scale.layer, *scale.vocab, *scale.budget, "--no-probe")
        return [
            points[0],
            self.run("one step", "stronghold", scale.beyond[0], "fp32", trace="deep", seconds=300, needs=proven),
            *points[1:],
            *(self.probes(dtype, depth) for dtype in scale.dtypes for depth in scale.headline),
            self.run("Hydra with four models", *four, seconds=240),
            self.run("Hydra without its double buffer", *four, "--double-buffer", "off", seconds=240),
            *(self.verb(f"the largest size of {name}", "search", "largest", "-m", name, *given, seconds=400)
              for name in ("stronghold", "fsdp2-offload" if scale.device == "cuda" else "zero-offload")),
            self.verb("report", "report", seconds=120),
        ]  # fmt: skip

    def points(self, dtype: str, depth: int, needs: int = 0) -> GpuStep:
        """Return all methods that may fit, at a depth of the headline."""
        title, names, scale = f"all methods, {depth} layers, {dtype}", ",".join(self.names(depth)), self.scale
        return self._trains("sweep", title, names, depth, dtype, ("--no-probe",), scale.budget, scale.seconds, needs)

    def probes(self, dtype: str, depth: int) -> GpuStep:
        """Judge the measurements of points() again, with the gate's probe."""
        title, scale = f"probes, {depth} layers, {dtype}", self.scale
        names = ",".join(name for name in self.names(depth) if name in scale.probed)
        return self._trains("sweep", title, names, depth, dtype, (), scale.budget, scale.seconds, depth)

    def names(self, depth: int) -> tuple[str, ...]:
        return ("stronghold", *(PEERS if depth <= self.scale.whole_depth else STREAMED))

    def run(
        self, title: str, name: str, depth: int, dtype: str, *words: str, trace: str = "",
        budget: tuple[str, ...] | None = None, seconds: float = 90, needs: int = 0,
    ) -> GpuStep:  # fmt: skip
        traced = ("--trace", str(self.results / f"trace-{trace}.json")) if trace else ()
        given = budget or self.scale.budget
        asked = (*words, *traced, "--no-probe")
        return self._trains("run", title, name, depth, dtype, asked, given, seconds, needs)

    def _trains(
        self, verb: str, title: str, names: str, depth: int, dtype: str, words: tuple[str, ...],
        budget: tuple[str, ...], seconds: float, needs: int,
    ) -> GpuStep:  # fmt: skip
        sizes = ("-m", names, "-l", str(depth), "--dtype", dtype, *self.scale.layer, *self.scale.vocab)
        asked = (*sizes, *words, *budget, *self.scale.steps)
        return self.verb(title, verb, *asked, seconds=seconds, needs=needs)

    def verb(self, title: str, *words: str, seconds: float, needs: int = 0) -> GpuStep:
        command = (sys.executable, "-m", "harness", *words, "--results", str(self.results))
        return GpuStep(title, command, seconds, needs)


@dataclass
class Tried:
    """The result of a step: its last exit code, its seconds, number of tries, source and device."""

    code: int | None = None  # None: ended at its limit
    seconds: float = 0.0
    times: int = 0
    source: str = ""


class GpuCall:
    """One call: runs steps, and keeps their results in the folder of results."""

    def __init__(self, results: Path, out: Path, limit_seconds: float = LIMIT_SECONDS) -> None:
        self.results, self.out, self.until = results, out, time.monotonic() + limit_seconds - ENDING_SECONDS
        self.file = results / "steps.json"
        self.source = f"{source_of(ROOT)} on {machine.gpu().get('gpu', 'no GPU')}"
        told = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.tried = {title: Tried(**fields) for title, fields in told.items()}

    def run(self, steps: list[GpuStep]) -> None:
        for step in self.ordered(steps):
            if step.needs and step.needs not in self.trained("stronghold"):
                print(f"-- {step.title}: left out, stronghold has not trained {step.needs} layers yet", flush=True)
                continue
            left = self.until - time.monotonic()
            if left < min(LEAST_SECONDS, step.seconds):
                print(f"-- {step.title}: no time left, the same call goes on here", flush=True)
                continue
            self.attempt(step, min(left, step.seconds))

    def ordered(self, steps: list[GpuStep]) -> list[GpuStep]:
        """Return the steps to do, never tried ones first: a step that always takes too long delays no other."""
        return sorted((step for step in steps if not self.is_done(step)), key=lambda step: self._of(step).times)

    def is_done(self, step: GpuStep) -> bool:
        """True if the step ended by itself, with this source: a failure is a result."""
        tried = self._of(step)
        return tried.code is not None and tried.code not in UNFINISHED and tried.source == self.source

    def attempt(self, step: GpuStep, seconds: float) -> None:
        log = self.results / "steps" / (re.sub(r"\W+", "-", step.title) + ".txt")
        log.parent.mkdir(parents=True, exist_ok=True)
        tried, started = self._of(step), time.monotonic()
        tried.times, tried.source = tried.times + 1, self.source
        with open(log, "w") as file:
            tried.code = ended(step.command, file, seconds)
        tried.seconds = round(time.monotonic() - started, 1)
        self.tried[step.title] = tried
        write_whole(
            self.file, json.dumps({title: dataclasses.asdict(each) for title, each in self.tried.items()}, indent=1)
        )
        gpu_results.pack(self.results, self.out)  # pack now, because this call may be killed
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        print(f"-- {step.title}: {outcome(tried)}, {tried.seconds:.0f} s: {last[:200]}", flush=True)

    def pack(self) -> None:
        left = gpu_results.pack(self.results, self.out)
        print(
            f"== {self.out / gpu_results.name(self.results)}" + (f", without {', '.join(left)}" if left else ""),
            flush=True,
        )

    def _of(self, step: GpuStep) -> Tried:
        return self.tried.get(step.title, Tried())

    def trained(self, name: str) -> set[int]:
        """Return the depths at which a method has trained as the reference does."""
        records = read_all(self.results)[0].values()
        return {record.job.workload.num_layers for record in records
                if record.job.method == name and record.status == "ok" and record.gate.passed}  # fmt: skip


def ended(command: Sequence[str], output: Any, seconds: float) -> int | None:
    """Return the exit code; None if the step was ended at its limit, first as by Ctrl-C."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None
    finally:
        if process.poll() is None:  # this call itself is interrupted
            os.killpg(process.pid, signal.SIGINT)
            process.wait(GRACE_SECONDS)


def source_of(root: Path) -> str:
    """Hash all sources that a step runs: with another source its result says nothing."""
    key = hashlib.sha256()
    for folder in ("harness", "methods", "bench", "tests/methods"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".cu", ".h"):
                key.update(path.read_bytes())
    return key.hexdigest()[:16]


def outcome(tried: Tried | None) -> str:
    if tried is None:
        return "not begun"
    return "ended at its limit" if tried.code is None else "done" if tried.code == 0 else f"exit code {tried.code}"


def verdict(call: GpuCall, steps: list[GpuStep]) -> list[str]:
    """Print one screen: facts, steps left, failures, the runs."""
    facts = call.results / "facts.json"
    found = gpu_facts.lines(json.loads(facts.read_text())) if facts.exists() else ["none"]
    left = [f"  {step.title}: {outcome(call.tried.get(step.title))}" for step in steps if not call.is_done(step)]
    done = [step for step in steps if call.is_done(step)]
    wrong = [f"  {step.title}: {outcome(call.tried[step.title])}" for step in done if call.tried[step.title].code]
    records = {record.key: record for record in read_all(call.results)[0].values()}
    ordered = sorted(records.values(), key=lambda record: (record.job.workload.dtype, record.job.workload.num_layers))
    runs = [row(record) for record in ordered]
    told = [
        "== facts", *found, f"== {len(done)} of {len(steps)} steps done; left:", *left, "== went wrong:", *wrong,
        "== runs", *runs,
    ]  # fmt: skip
    return [line[:WIDTH] for line in told]


def row(record: Record) -> str:
    """Return a run in a line: speed and peak of the device, each with the plan's share of it, and the verdict."""
    job, predicted = record.job, record.predicted
    options = "".join(f" {name}={job.options[name]}" for name in SHOWN_OPTIONS if job.options.get(name) is not None)
    title = f"{job.method + options:38.38} {job.workload.num_layers:3} {job.workload.dtype}"
    if record.status != "ok":
        return f"{title}  {record.status}: {record.reason}"
    seconds, peak = record.median_step_seconds or 0.0, record.peaks.get("device_allocated", 0)
    by_plan = _share(predicted.get("step_seconds"), seconds), _share(sum(predicted.get("device", {}).values()), peak)
    told = f"{seconds:.3f} s{by_plan[0]}, device {gib(peak)}{by_plan[1]}, host {gib(record.host_peak_bytes)}"
    return f"{title}  {told}, {record.gate.verdict}" + (f", {record.slowed_by}" if record.slowed_by else "")


def _share(planned: float | None, measured: float) -> str:
    return f" ({planned / measured:.2f} planned)" if planned and measured else ""


@click.command()
@click.argument("number", type=click.IntRange(1, 3), default=1)
@click.argument("results", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "results" / "gpu")
@click.option("--demo", is_flag=True, help="All three calls at tiny sizes on the simulated device.")
@click.option("--limit", "limit_seconds", type=float, default=LIMIT_SECONDS, help="Seconds of this call.")
def main(number: int, results: Path, demo: bool, limit_seconds: float) -> None:
    """Run call NUMBER, 1 to 3, with records in RESULTS. The archive goes to the folder $OUT, else beside RESULTS."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ.get("OUT") or results.parent).resolve()
    for archive in gpu_results.archives(results, out):
        print(f"{gpu_results.unpack(archive, results)} files put back from {archive}", flush=True)
    steps = Steps(DEMO if demo else cuda(machine.host_bytes()), results)
    asked = [step for each in ((1, 2, 3) if demo else (number,)) for step in steps.of(each)]
    call = GpuCall(results, out, limit_seconds)
    try:
        call.run(asked)
    finally:
        print("\n".join(verdict(call, asked)), flush=True)
        call.pack()
    sys.exit(0 if all(map(call.is_done, asked)) else 3)


if __name__ == "__main__":
    main()
