"""Runs a list of measurements, the most important first, on a GPU that is available for minutes at a time. Each call
has a time limit.

A step is one measurement. A call continues where the last call stopped: it skips steps that have a result of the
current code, and runs steps that failed or took too long last. A call ends with a summary of one screen and an archive
(bench/gpu_results.py), which the next call reads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench import gpu_facts, gpu_results
from harness.base.checkout import ROOT
from harness.base.whole_file import write_whole
from harness.core import method
from harness.core.identity import source_hash
from harness.core.job import GIB, Workload, gib
from harness.core.record import Record, read_all
from harness.devices import machine
from harness.run.launch import EXPANDABLE_SEGMENTS

LIMIT_SECONDS = 540.0  # time limit of a call in seconds, including the call's archive
GRACE_SECONDS = 25.0  # seconds in which an interrupted step's worker may finish its record
ENDING_SECONDS = GRACE_SECONDS + 15.0  # seconds kept for the last step's grace, the summary and the archive
LEAST_SECONDS = 60.0  # a step begins only if so many seconds, or its own shorter limit, are left
RESULTS = (0, 4, 5)  # the harness's exit codes of steps that are done: success, out of memory, failed gate
NEEDED = ("pydantic",)  # packages that reading records needs
METHODS = ("stronghold", "resident", "zero-offload", "zero-infinity", "fsdp2-offload", "megatron-lm", "l2l")
TESTS = "window or streamed or blocking or (stronghold and fp32 and 1.0) or (l2l and bf16 and 1.0)"
SHOWN_OPTIONS = ("placement", "num_models", "double_buffer")
WIDTH = 160  # most characters in a line of the summary
_hash = functools.cache(source_hash)


class Scale(NamedTuple):
    """The sizes and memory limits of all steps; depths are numbers of layers."""

    device: str  # device on which facts and rates are measured
    layer: str
    job: str  # further options of each job: device, time limit and host memory
    capped: str  # option of most steps that limits device memory; `whole`: this option of other steps
    whole: str
    # options by dtype; bf16 takes more steps, because a GPU's clock rises in the first second
    steps: dict[str, str]
    small: int
    half: int
    headline: tuple[tuple[int, str], ...]
    deep: int  # depth whose model is larger than the limited device memory
    beyond: tuple[int, str, str]  # depth, dtype and options of a model that is larger than all device memory
    methods: tuple[str, ...] = METHODS


def cuda(host_bytes: int, gpu_bytes: int) -> Scale:
    """Return the published sizes. Jobs get 7/8 of each memory, but at most 90 GiB of host memory and 32 GiB of GPU
    memory."""
    wide = Workload(hidden_size=4096)
    host_gib, gpu_gib = (
        min(most, size * 7 // 8 // GIB) for most, size in ((90, host_bytes), (32, gpu_bytes))
    )
    return Scale(
        "cuda",
        "-h 2048 -b 4",
        f"--device cuda --timeout 400 --host-memory {host_gib}GiB",
        capped=f"--device-memory {gpu_gib}GiB",
        whole="",
        steps={"fp32": "--steps 8 --warmup 3", "bf16": "--steps 25 --warmup 5"},
        small=8,
        half=24,
        headline=((48, "fp32"), (48, "bf16"), (32, "fp32")),
        deep=78,
        # In narrow layers as many parameters would take the host longer to launch than the GPU to compute.
        beyond=(
            gpu_bytes * 5 // 4 // (16 * wide.layer_params),
            "bf16",
            f"-h {wide.hidden_size} --steps 8 --warmup 3",
        ),
    )


DEMO = Scale(
    "cpu",
    "-h 64 -b 2 --heads 4 --seq 32",
    "--vocab 512 --device sim --timeout 60 --host-memory 64MiB",
    capped="--device-memory 4MiB",
    whole="--device-memory 16MiB",
    steps=dict.fromkeys(("fp32", "bf16"), "--steps 4 --warmup 1"),
    small=2,
    half=2,
    headline=((3, "fp32"),),
    deep=6,
    beyond=(8, "bf16", ""),
    methods=("stronghold", "resident", "zero-offload"),
)


class GpuStep(NamedTuple):
    """A command, its time limit in seconds, and the files on which its result depends. The files that these files
    import count, too. `results`: the command's exit codes with which the step is done."""

    title: str
    seconds: float
    command: tuple[str, ...]
    files: tuple[Path, ...] = ()
    results: tuple[int, ...] = RESULTS


def steps(scale: Scale, results: Path) -> list[GpuStep]:
    """Return all steps in order: smoke tests, facts that plans assume, main results, largest sizes."""
    known, small, half, deep, python = (
        method.REGISTRY.files(),
        scale.small,
        scale.half,
        scale.deep,
        sys.executable,
    )

    def harness(title: str, seconds: float, words: str, *more: str, files: Sequence[Path]) -> GpuStep:
        command = (python, "-m", "harness", *words.split(), *more, "--results", str(results))
        return GpuStep(title, seconds, command, tuple(files))

    def rates(dtype: str) -> GpuStep:
        words = f"doctor --calibrate {scale.layer} --dtype {dtype} --device {scale.device}"
        return harness(
            f"rates, {dtype}", 90, words, files=[ROOT / "methods/streaming/placement/calibrate.py"]
        )

    def train(
        title: str,
        names: str,
        depth: int,
        dtype: str,
        more: str = "",
        seconds: float = 90,
        *,
        memory: str = scale.capped,
        trace: str = "",
        probe: str = "--no-probe",
    ) -> GpuStep:
        sizes = (
            f"-m {names} -l {depth} --dtype {dtype} {scale.layer} {scale.job} {memory} {scale.steps[dtype]}"
        )
        traced = ("--trace", str(results / f"trace-{trace}.json")) if trace else ()
        title, files = (
            f"{title}, {depth} layers, {dtype}",
            [known[name] for name in {"resident", *names.split(",")}],
        )
        return harness(title, seconds, f"run {sizes} {more} {probe}", *traced, files=sorted(files))

    def several(depth: int, dtype: str) -> list[GpuStep]:
        # a step for each method: a short call does some of them
        return [train(name, name, depth, dtype, seconds=400) for name in scale.methods]

    def probes(depth: int, dtype: str) -> GpuStep:
        return train("probes", ",".join(scale.methods), depth, dtype, seconds=400, probe="")

    facts = (
        "env",
        f"PYTORCH_ALLOC_CONF={EXPANDABLE_SEGMENTS}",
        python,
        "-m",
        "bench.gpu_facts",
        str(results / "facts.json"),
    )
    tests, window = ROOT / "tests/methods/test_gpu.py", "--option resident_layers=0"
    return [
        GpuStep("facts", 90, (*facts, "--device", scale.device), (ROOT / "bench/gpu_facts.py",)),
        # pytest's own codes 4 and 5 say that no test ran.
        GpuStep(
            "tests",
            240,
            (python, "-m", "pytest", "-q", str(tests), "-k", TESTS),
            (tests, *known.values()),
            (0,),
        ),
        rates("bf16"),
        rates("fp32"),
        train("the reference", "resident", half, "bf16", memory=scale.whole),
        train("the reference again", "resident", half, "bf16", "--rerun", memory=scale.whole),
        train("nothing resident", "stronghold", small, "bf16", window, trace="window-bf16"),
        train("nothing resident", "stronghold", small, "fp32", window, trace="window-fp32"),
        train(
            "updated on the device",
            "stronghold",
            small,
            "bf16",
            f"--placement S{small}",
            trace="streamed-bf16",
        ),
        train("the reference, capped", "resident", half, "bf16"),
        train("all resident", "stronghold", half, "bf16", f"--placement R{half}"),
        *(train(name, name, small, "fp32", seconds=120) for name in scale.methods[2:]),
        *chain.from_iterable(several(depth, dtype) for depth, dtype in scale.headline),
        *several(deep, "fp32"),
        train("one step", "stronghold", deep, "fp32", seconds=300, trace="deep"),
        train("without clipping", "stronghold", deep, "bf16", "--clip 0", 300),
        *several(deep, "bf16"),
        train("a large batch", "stronghold", deep, "bf16", "-b 16", 300),
        train("beyond the whole device", "stronghold", *scale.beyond, seconds=400, memory=scale.whole),
        *(probes(depth, dtype) for depth, dtype in scale.headline),
        train("four models", "hydra", half, "bf16", "--models 4", 240),
        train("four models, one buffer", "hydra", half, "bf16", "--models 4 --double-buffer off", 240),
    ]


class GpuCall:
    """One call of this script: runs steps. The file steps.json keeps, for each step, the last exit code, its seconds,
    the number of tries with the step's full time limit, and the hash of the step's code.
    """

    def __init__(self, results: Path, out: Path, limit_seconds: float = LIMIT_SECONDS) -> None:
        self.results, self.out, self.file = results, out, results / "steps.json"
        self.until = time.monotonic() + limit_seconds - ENDING_SECONDS
        self.tried: dict[str, dict[str, Any]] = (
            json.loads(self.file.read_text()) if self.file.exists() else {}
        )
        packages = {**machine.software(), "commit": "", **{name: version(name) for name in NEEDED}}
        self.around = json.dumps([machine.gpu().get("gpu"), packages])

    def run(self, steps: Sequence[GpuStep]) -> None:
        for step in steps:
            left = self.until - time.monotonic()
            if left < min(LEAST_SECONDS, step.seconds):
                print(f"-- {step.title}: no time left, the next call goes on here", flush=True)
            else:
                self.attempt(step, min(left, step.seconds))

    def left(self, steps: Sequence[GpuStep]) -> list[GpuStep]:
        """Return the steps that have no result of the present code, packages and GPU; those tried least often first."""

        def is_done(step: GpuStep) -> bool:
            told = self.tried.get(step.title, {"code": None})
            return told["code"] in step.results and told["source"] == self.source(step)

        unfinished = (step for step in steps if not is_done(step))
        return sorted(unfinished, key=lambda step: self.tried.get(step.title, {"times": 0})["times"])

    def source(self, step: GpuStep) -> str:
        return hashlib.sha256("".join([self.around, *map(_hash, step.files)]).encode()).hexdigest()[:16]

    def attempt(self, step: GpuStep, seconds: float) -> None:
        log = self.results / "steps" / (re.sub(r"\W+", "-", step.title) + ".txt")
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with open(log, "w") as file:
            code = ended(step.command, file, seconds)
        spent, times = round(time.monotonic() - started, 1), self.tried.get(step.title, {"times": 0})["times"]
        # a try that the end of the call cut short does not count
        times += code is not None or seconds == step.seconds
        self.tried[step.title] = {"code": code, "seconds": spent, "times": times, "source": self.source(step)}
        write_whole(self.file, json.dumps(self.tried, indent=1))
        gpu_results.pack(self.results, self.out)  # pack now, because this call may be killed
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        print(f"-- {self.outcome(step)}, {spent:.0f} s: {last[:200]}", flush=True)

    def outcome(self, step: GpuStep) -> str:
        code = self.tried.get(step.title, {"code": "not begun"})["code"]
        told = {None: "ended at its limit", 0: "done", "not begun": "not begun"}.get(
            code, f"exit code {code}"
        )
        return f"{step.title}: {told}"

    def verdict(self, steps: Sequence[GpuStep]) -> list[str]:
        """Return the summary's lines: facts, steps left, failures, and runs."""
        facts, left, runs = (
            self.results / "facts.json",
            self.left(steps),
            defaultdict[str, list[Record]](list),
        )
        for record in read_all(self.results)[0].values():
            runs[record.key].append(record)
        told = [
            "== facts",
            *(gpu_facts.lines(json.loads(facts.read_text())) if facts.exists() else ["none"]),
            f"== {len(steps) - len(left)} of {len(steps)} steps done; left:",
            *map(self.outcome, left),
            "== refused or failed:",
            *(self.outcome(step) for step in steps if step not in left and self.tried[step.title]["code"]),
            "== runs",
            *sorted(map(row, runs.values())),
        ]
        return [line[:WIDTH] for line in told]


def ended(command: Sequence[str], output: Any, seconds: float) -> int | None:
    """Run the command; return its exit code, or None if it reached its limit of `seconds`. At the limit the command
    gets SIGINT; what is left of it when it has ended, or after GRACE_SECONDS, gets SIGKILL."""
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # the command reached its limit, or this call was interrupted
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # nothing of the command is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def row(runs: Sequence[Record]) -> str:
    """Return one line about a job: the last run's step time and device peak, each with the ratio of the planned value
    to the measured one; the gate's verdict; and, for several runs, whether they had the same bits.
    """
    record = runs[-1]
    job, predicted, options = record.job, record.predicted, record.job.options
    shown = "".join(f" {name}={options[name]}" for name in SHOWN_OPTIONS if options.get(name) is not None)
    title = f"{job.workload.dtype} {job.workload.num_layers:3} {job.method + shown:38.38}"
    if record.status != "ok":
        return f"{title}  {record.status}: {record.reason}"
    seconds, peak = record.median_step_seconds or 0.0, record.peaks.get("device_allocated", 0)
    of_plan = (
        _share(predicted.get("step_seconds"), seconds),
        _share(sum(predicted.get("device", {}).values()), peak),
    )
    told = [
        f"{seconds:.3f} s{of_plan[0]}, device {gib(peak)}{of_plan[1]}, host {gib(record.host_peak_bytes)}"
    ]
    if len(runs) > 1:
        bits = {json.dumps([run.losses, run.tensors], sort_keys=True) for run in runs if run.status == "ok"}
        told.append(f"{len(runs)} runs, {'the same bits' if len(bits) == 1 else 'other bits'}")
    return f"{title}  {', '.join(filter(None, [*told, record.gate.verdict, record.slowed_by]))}"


def _share(planned: float | None, measured: float) -> str:
    return f" ({planned / measured:.2f} planned)" if planned and measured else ""


@click.command()
@click.argument("name", default="gpu")
@click.option("--demo", is_flag=True, help="Run tiny sizes on the simulated device.")
@click.option(
    "--limit", "limit_seconds", type=float, default=LIMIT_SECONDS, help="Time limit of this call in seconds."
)
@click.option("--only", multiple=True, metavar="TITLE", help="Run only this step, even if it has a result.")
def main(name: str, demo: bool, limit_seconds: float, only: tuple[str, ...]) -> None:
    """Run the steps that are left, and write their records to results/NAME. The archive goes to the folder that the
    environment variable OUT names; default: results.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
        raise click.UsageError(
            f"expected {', '.join(missing)}; try bench/gpu.sh --wheels wheels, with a network"
        )
    results = ROOT / "results" / name
    results.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ.get("OUT") or results.parent).resolve()
    for archive in {folder / f"{name}.tar.gz" for folder in (out, results.parent, ROOT)}:
        if archive.exists():
            print(f"{gpu_results.unpack(archive, ROOT)} files put back from {archive}", flush=True)
    listed = steps(DEMO if demo else cuda(machine.host_bytes(), machine.gpu().get("gpu_bytes", 0)), results)
    titles = [step.title for step in listed]
    if unknown := [title for title in only if title not in titles]:
        raise click.UsageError(f"expected a step's title, got {unknown[0]}; try one of {'; '.join(titles)}")
    call = GpuCall(results, out, limit_seconds)
    try:
        call.run([step for step in listed if step.title in only] if only else call.left(listed))
    finally:
        print("\n".join(call.verdict(listed)), flush=True)
        behind = gpu_results.pack(results, out)
        print(f"== {out / name}.tar.gz" + (f", without {', '.join(behind)}" if behind else ""), flush=True)
    sys.exit(3 if call.left(listed) else 0)


if __name__ == "__main__":
    main()
