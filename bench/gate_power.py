"""Measures the power of the gate: how many planted faults the gate detects, how many of these it names correctly, and
how many correct ("honest") runs it fails.

Each of the 42 FAULTS in bench/faults/_step_faults.py trains 4 layers of hidden size 64 for 20 steps in each dtype:
once at the published learning rate, and once at the learning rate of the gate's probe. They are planted again in the
path of one half precision alone, the PATH_FAULTS in the path of each dtype alone, the BF16_FAULTS in that of bf16.
Honest runs train in the same way, but round differently: other numbers of threads, micro-batches, sums of products,
attention and loops of AdamW, and every method that is exact by design and runs on this machine. The gate judges each
run three times: with its tolerances for a CPU, with its tolerances for CUDA and, if the method promises the
reference's bits, by bits. This takes some minutes on two cores. `--with` tries the gate at other sizes than the sizes
by which the gate's limits were chosen. With `--with 'lora="8"'` adapters alone are trained; the faults are then those
of bench/adapter_faults.py, and those of _step_faults.py that adapters can have. `--model` tries the gate on a model
with a config.json; the faults are then those of bench/convention_faults.py, and those of _step_faults.py that the model
can have.

    .venv/bin/python -m bench.gate_power [--out FILE] [--with seq_len=256 --with batch_size=1]

`--seeds` lists the seeds for roundings that the gate's floor does not include; `--no-faults` runs the honest runs only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench import adapter_faults, convention_faults
from harness.base import fork_server
from harness.base.whole_file import write_whole
from harness.core import method
from harness.core.cpu_cores import available_cores
from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from harness.gate import probe
from harness.gate.evidence import Trial
from harness.gate.probe import Probe
from harness.gate.verdict import judge, with_probe
from harness.models import named_models
from methods.shared.roundings import ROUNDINGS

SIZE = Workload(num_layers=4, hidden_size=64, num_heads=4, seq_len=32, batch_size=4, vocab_size=256)
NARROW = {"num_layers": SIZE.num_layers, "hidden_size": SIZE.hidden_size, "vocab_size": SIZE.vocab_size}
FOLDERS = (Path(__file__).parent / "faults", probe.METHODS)
DTYPES = ("fp32", "bf16", "fp16")
SEEDS = (1234, 7)
# Ways to judge a record: with the tolerances for a CPU, with the tolerances for CUDA, by bits, and by the record alone:
# with the tolerances for a CPU and without the gate's probe.
WAYS = ("cpu", "cuda", "bits", "without the probe")
METHODS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("resident", {}, {"micro_batches": 2}),
    ("l2l", {}, {}),
    ("stronghold", {"window_size": 1}, {}),
    ("stronghold", {"placement": "R1P1W1S1"}, {}),
    ("hydra", {}, {}),
    ("varuna", {}, {}),
]
OF_FLOOR = [name for names in probe.ROUNDINGS for name in names]
# roundings that the gate's floor does not include
UNSEEN = [name for name in ROUNDINGS if name not in OF_FLOOR]
ROUNDED: list[dict[str, Any]] = [
    {"threads": 2},
    {"adam": "foreach"},
    {"adam": "loop"},
    {"adam": "plain"},
    {"adam": "loop", "rounding": "split-products"},
    {"adam": "plain", "rounding": "products-in-halves"},
    {"adam": "plain", "rounding": "plain-attention"},
]
# Methods that run a library's engine: it takes seconds to start, and DeepSpeed needs a process for each training.
ENGINES = (
    "deepspeed",
    "hf-trainer",
    "megatron-lm",
    "fsdp2-offload",
    "zero-offload",
    "zero-infinity",
    "zero-infinity-nvme",
)
# Verdicts that name a fault correctly: the gate's reason and, for a fault of a single step, the step that shows the
# fault.
FORWARD, GRADIENT = {"forward"}, {"gradient"}
UPDATE = {"update", "unchanged", "partial-update"}
SECOND = UPDATE | {"later 3"}  # verdicts on faults whose first update is right or nearly right
RIGHT: dict[str, set[str]] = {
    "a layer's update skipped once": {"later 6"},
    "a layer's update skipped always": UPDATE,
    "a layer's update skipped every other step": SECOND,
    "only the first rows of each tensor updated": UPDATE,
    "biases never updated": UPDATE,
    "norms never updated": UPDATE,
    "decay on norms and biases": UPDATE,
    "no decay": UPDATE,
    "epsilon 1e-6": UPDATE,
    "epsilon 1e-10": UPDATE,
    "beta2 0.95": SECOND,
    "beta1 0.95": SECOND,
    "no bias correction": UPDATE,
    "step off by one": UPDATE,
    "constant rate on some layers": UPDATE,
    "rate one step late": UPDATE,
    "clip by each layer's norm": SECOND,
    "clip off": SECOND,
    "clip at half": SECOND,
    "norm counts the embedding twice": GRADIENT,
    "norm leaves out a layer": GRADIENT,
    "gradient a step stale in a layer": GRADIENT,
    "gradient a step stale everywhere": GRADIENT,
    "gradient a step stale in a window": GRADIENT,
    "weights a step stale": UPDATE,
    "gradients halved": GRADIENT,
    "gradients doubled": GRADIENT,
    "a sample dropped": FORWARD,
    "a batch twice": {"later 5"},
    "tied gradient from the head only": GRADIENT,
    "tied gradient from the look-up only": GRADIENT,
    "no fp32 master": UPDATE | {"weights"},
    "moments in bf16": SECOND,
    "gradients with noise of 1e-3": GRADIENT,
    "two layers' gradients swapped": UPDATE | GRADIENT,
    "two layers' states swapped": {"later 7"},
    "first moment not decayed": SECOND,
    "mask off by one": FORWARD,
    "tanh GELU": FORWARD,
    "dropout left at 0.1": FORWARD,
    "norm epsilon 1e-6": FORWARD,
    "a starting tensor off by 1 %": FORWARD,
}


# Faults of what a training of adapters leaves as it is: the base, and its masters.
OF_BASE = (
    "biases never updated",
    "norms never updated",
    "decay on norms and biases",
    "norm counts the embedding twice",
    "tied gradient from the head only",
    "tied gradient from the look-up only",
    "no fp32 master",
)


class PowerCase(NamedTuple):
    """A training to judge: a method with options, in a dtype. An honest run has an empty `fault`."""

    method: str
    options: dict[str, Any]
    changes: dict[str, Any]  # fields of the workload, with the values that replace those of `size`
    dtype: str
    seed: int
    fault: str = ""
    size: Workload = SIZE
    probe_steps: int = probe.STEPS
    window: int | None = None  # None: the scale of fp16 stays, because roundings would skip different steps

    def job(self) -> Job:
        """Return the job at the published learning rate. probe() returns the job at the probe's learning rate."""
        return self._job(dataclasses.replace(self.size, dtype=self.dtype))

    def probe(self, dtype: str) -> Job:
        load = probe.workload(probe.capped(self.size), dtype, self.probe_steps)
        return self._job(dataclasses.replace(load, loss_scale_window=self.window), self.probe_steps)

    def _job(self, size: Workload, steps: int = 20) -> Job:
        size = dataclasses.replace(size, **self.changes, seed=self.seed)
        return Job(self.method, size, self.options, steps=steps, warmup=0)

    def reference(self) -> PowerCase:
        return self._replace(method=method.reference(), options={}, changes={})

    def rounded(self) -> PowerCase:
        job = probe.rounding(self.probe("fp32"), OF_FLOOR)
        return self.reference()._replace(method=job.method, options=job.options)

    def jobs(self) -> Iterator[Job]:
        """Yield all jobs that a verdict needs. Raises ValueError if a job is not valid at this size."""
        yield from (self.job(), self.reference().job())
        for dtype in {self.dtype, "fp32"}:
            yield from (each.probe(dtype) for each in (self, self.reference(), self.rounded()))


class Outcome(NamedTuple):
    case: PowerCase
    verdicts: dict[str, Gate]  # by the ways of WAYS

    def is_named(self, way: str) -> bool:
        verdict = self.verdicts[way]
        said = (
            f"{verdict.reason} {verdict.evidence.get('step')}"
            if verdict.reason == "later"
            else verdict.reason
        )
        # Convention faults have no entry in RIGHT: all convention faults show in the forward pass.
        return said in RIGHT.get(self.case.fault, FORWARD)


def fault_cases(
    dtype: str,
    faults: Iterable[str] = (),
    size: Workload = SIZE,
    seeds: Sequence[int] = SEEDS,
    probe_steps: int = probe.STEPS,
) -> list[PowerCase]:
    """Return a case for each of these faults, or, if there are none, for each fault that the model can have in this
    dtype."""
    return [
        PowerCase("planted", {"fault": fault}, {}, dtype, seeds[0], fault, size, probe_steps)
        for fault in faults or faults_of(dataclasses.replace(size, dtype=dtype))
    ]


def path_cases(
    dtype: str, size: Workload = SIZE, seeds: Sequence[int] = SEEDS, probe_steps: int = probe.STEPS
) -> list[PowerCase]:
    """Return a case for each fault in the path of this dtype alone: those of parts of a tensor and of single steps, in
    bf16 those of its own, and in half precision all others."""
    if size.lora:  # adapters are fp32, so they have no path of one dtype
        return []
    method.load("planted", FOLDERS)
    from methods import _bf16_faults, _path_faults  # type: ignore[attr-defined]

    of_sizes = (
        size.seq_len <= _path_faults.BLOCK_TOKENS
        or size.hidden_size // size.num_heads <= _path_faults.BLOCK_COLUMNS
    )
    lacking = [*_path_faults.OF_SIZES * of_sizes, *_path_faults.OF_SKIPS * (dtype != "fp16")]
    faults = [fault for fault in _path_faults.PATH_FAULTS if fault not in lacking]
    faults += _bf16_faults.BF16_FAULTS if dtype == "bf16" else []
    faults += faults_of(dataclasses.replace(size, dtype=dtype)) if dtype != "fp32" else []
    return [
        PowerCase(
            "planted",
            {"fault": fault, "only": dtype},
            {},
            dtype,
            seeds[0],
            fault,
            size,
            probe_steps,
            probe.OVERFLOWING_WINDOW if fault in _path_faults.OF_SKIPS else None,
        )
        for fault in faults
    ]


def faults_of(size: Workload) -> list[str]:
    """Return the faults that a model of this size can have."""
    if size.lora:
        return [fault for fault in RIGHT if fault not in OF_BASE] + [*adapter_faults.FAULTS]
    anatomy = size.anatomy
    is_tied = not anatomy.embedding.keys().isdisjoint(anatomy.head)
    lacking = {
        "no fp32 master": size.dtype == "fp32",
        "tanh GELU": size.config is not None,
        "tied gradient from the head only": not is_tied,
        "tied gradient from the look-up only": not is_tied,
        "biases never updated": not any(
            name.endswith("bias") and "norm" not in name for name in anatomy.layer
        ),
    }
    return [fault for fault in RIGHT if not lacking.get(fault)] + [*convention_faults.of(size)]


def honest_cases(
    dtype: str, size: Workload = SIZE, seeds: Sequence[int] = SEEDS, probe_steps: int = probe.STEPS
) -> list[PowerCase]:
    """Return the honest cases. Roundings that the gate's floor does not include have a case for each seed. Other
    roundings and methods have two cases, for two seeds; engines have one case.
    """
    ways = [(way, seeds[:2]) for way in [*METHODS, *(("planted", how, {}) for how in ROUNDED)]]
    ways += [(("planted", {"rounding": name}, {}), seeds) for name in UNSEEN]
    found = [PowerCase(*way, dtype, seed, "", size, probe_steps) for way, own in ways for seed in own]
    found += [PowerCase(name, {}, {}, dtype, seeds[0], "", size, probe_steps) for name in ENGINES]
    loaded = {case.method: method.load(case.method, FOLDERS) for case in found}
    return [
        case
        for case in found
        if (dtype != "fp16" or loaded[case.method].scales_loss)
        and (size.config is None or loaded[case.method].takes_config)
        and (size.lora is None or loaded[case.method].takes_lora)
    ]


def is_trainable(case: PowerCase) -> bool:
    """True if the case's jobs are valid and its method can plan them. Some cases cannot be planned: METHODS has an
    entry whose placement fits only one number of layers."""
    with contextlib.suppress(ValueError):
        return all(
            method.create(job.method, job.options, FOLDERS).plan(job.workload, job.budget.room)
            for job in case.jobs()
        )
    return False


def train(job: Job) -> Record:
    """Train a job in this process."""
    from harness.run import worker

    with contextlib.redirect_stdout(io.StringIO()):
        return worker.train_here(job, job.key(), FOLDERS, lambda event: None)


def outcome(case: PowerCase, records: dict[str, Record]) -> Outcome:
    """Return the gate's verdicts on a case, from the records of its jobs."""

    def record(each: PowerCase, dtype: str) -> Record:
        return records[each.probe(dtype).key()]

    trials = []
    for dtype in dict.fromkeys(("fp32", case.dtype)):
        others = tuple(record(case.rounded(), dtype).models())
        trials.append(Trial(record(case, dtype), record(case.reference(), dtype), others))
    verdicts = {}
    for way in WAYS:
        as_judged: dict[str, Any] = {"device": "cuda" if way == "cuda" else "cpu", "bit_exact": way == "bits"}
        tried = Probe(tuple(trial._replace(record=_as(trial.record, **as_judged)) for trial in trials))
        ours, theirs = (_as(records[each.job().key()], **as_judged) for each in (case, case.reference()))
        verdicts[way] = judge(ours, theirs)
        if way != "without the probe":
            verdicts[way] = with_probe(verdicts[way], ours, tried)
    return Outcome(case, verdicts)


def _as(record: Record, device: str, bit_exact: bool) -> Record:
    return dataclasses.replace(
        record, job=dataclasses.replace(record.job, device=device), bit_exact=bit_exact
    )


def figures(outcomes: Iterable[Outcome], promised: set[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by dtype and way of judging, five counts: faults, seen faults, rightly named faults, honest runs, and
    honest runs that failed. Also return the unseen faults, the misnamed faults, and the honest runs that failed, each
    by name.

    `promised`: names of the honest runs whose methods promise the reference's bits.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for dtype in DTYPES:
        own = [each for each in outcomes if each.case.dtype == dtype]
        of_path = [one for one in own if "only" in one.case.options]
        own = [one for one in own if "only" not in one.case.options]
        faults, honest = (
            [each for each in own if bool(each.case.fault) == is_fault] for is_fault in (True, False)
        )
        for way in WAYS if own or of_path else ():
            runs = [each for each in honest if way != "bits" or _name(each.case) in promised]
            seen = [each for each in faults if each.verdicts[way].verdict == "failed"]
            named = [each for each in seen if each.is_named(way)]
            failed = [each for each in runs if not each.verdicts[way].passed]
            unseen = [one.case.fault for one in of_path if one.verdicts[way].verdict != "failed"]
            found.setdefault(dtype, {})[way] = {
                "faults": len(faults),
                "seen": len(seen),
                "named": len(named),
                "honest": len(runs),
                "false_alarms": len(failed),
                "unseen": [each.case.fault for each in faults if each not in seen],
                "misnamed": {
                    each.case.fault: _said(each.verdicts[way]) for each in seen if each not in named
                },
                "path_faults": len(of_path),
                "path_unseen": unseen,
                "failed": {_name(each.case): _said(each.verdicts[way]) for each in failed},
            }
    return found


def _name(case: PowerCase) -> str:
    told = {**case.options, **case.changes}
    return " ".join(
        [case.method, *(f"{name}={value}" for name, value in told.items()), case.dtype, str(case.seed)]
    )


def _said(verdict: Gate) -> str:
    return f"{verdict.reason}: {verdict.text}"


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the numbers of figures() as a table in Markdown."""
    lines = ["| dtype | judged | faults seen | named rightly | honest runs failed |", "|---|---|---|---|---|"]
    told = {
        "cpu": "by the probe",
        "cuda": "by the probe, CUDA's tolerances",
        "bits": "by bits, where promised",
    }
    for dtype, ways in found.items():
        for way, row in ways.items():
            pairs = (("seen", "faults"), ("named", "seen"), ("false_alarms", "honest"))
            cells = (dtype, told.get(way, way), *(f"{row[part]} of {row[whole]}" for part, whole in pairs))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def train_all(jobs: Iterable[Job], cores: int) -> dict[str, Record]:
    """Train the jobs; return the records by the jobs' keys. Each job of an engine runs in a process of its own."""
    unique = {job.key(): job for job in jobs}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = multiprocessing.get_context("forkserver")
    # what is imported above
    server.set_forkserver_preload([*fork_server.IMPORTS, "click", "harness.gate.probe"])
    found: dict[str, Record] = {}
    for is_engine in (True, False):
        some = {key: job for key, job in unique.items() if (job.method in ENGINES) == is_engine}
        with ProcessPoolExecutor(
            cores, mp_context=server, max_tasks_per_child=1 if is_engine else None
        ) as pool:
            found |= zip(some, pool.map(train, some.values(), chunksize=1), strict=True)
    return found


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File of the results; default: results/gate-power.json, with --model results/gate-power-NAME.json.",
)
@click.option("--cores", type=int, default=available_cores())
@click.option(
    "--model",
    metavar="NAME",
    help="Train a small copy of this model of models.yaml; default: a GPT of 4 layers, hidden size 64.",
)
@click.option(
    "--with",
    "changes",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Set a field of the workload, such as seq_len=256, or lora='\"8\"' for adapters.",
)
@click.option(
    "--seeds",
    default=",".join(map(str, SEEDS)),
    help="Seeds of the runs without a fault; runs with a fault use the first seed.",
)
@click.option("--dtypes", default=",".join(DTYPES))
@click.option("--probe-steps", type=int, default=probe.STEPS)
@click.option("--faults/--no-faults", default=True)
def main(
    out: Path | None,
    cores: int,
    model: str | None,
    changes: tuple[str, ...],
    seeds: str,
    dtypes: str,
    probe_steps: int,
    faults: bool,
) -> None:
    """Train and judge all cases, print the table, and write the table's numbers to a file."""
    started = time.monotonic()
    out = out or Path(f"results/gate-power{f'-{model}' if model else ''}.json")
    size = (
        SIZE if model is None else dataclasses.replace(SIZE, **{**named_models.load(model).sizes, **NARROW})
    )
    size = dataclasses.replace(
        size, **{name: json.loads(number) for name, number in (c.split("=") for c in changes)}
    )
    numbers = [int(seed) for seed in seeds.split(",")]
    outcomes: list[Outcome] = []
    records: dict[str, Record] = {}
    promised: set[str] = set()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    # Honest runs come first, so that an interrupted call still shows how many honest runs fail.
    kinds = (honest_cases, fault_cases, path_cases) if faults else (honest_cases,)
    for some, dtype in itertools.product(kinds, dtypes.split(",")):
        cases = [
            case
            for case in some(dtype, size=size, seeds=numbers, probe_steps=probe_steps)
            if is_trainable(case)
        ]
        more = train_all((job for case in cases for job in case.jobs() if job.key() not in records), cores)
        ended = {key: record for key, record in more.items() if record.status != "ok"}
        for record in ended.values():
            print(
                f"left out: {record.job.method}, {record.job.workload.dtype}: {record.status}: {record.reason}"
            )
        records |= more
        cases = [case for case in cases if all(records[job.key()].status == "ok" for job in case.jobs())]
        promised |= {
            _name(case) for case in cases if records[case.probe(dtype).key()].bit_exact and not case.changes
        }
        outcomes += [outcome(case, records) for case in cases]
        found = figures(outcomes, promised)
        seconds = round(time.monotonic() - started)
        told = {
            "figures": found,
            "workload": dataclasses.asdict(size),
            "seeds": numbers,
            "probe_steps": probe_steps,
            "seconds": seconds,
            "cores": cores,
        }
        write_whole(out, json.dumps(told, indent=1))
        print(f"{dtype}: {len(outcomes)} cases judged, {len(records)} trainings, {seconds} s", flush=True)
    print(table(found))
    for dtype, ways in found.items():
        for way, row in ways.items():
            for kind in ("unseen", "misnamed", "failed", "path_unseen"):
                if row[kind] and way != "without the probe":
                    print(f"{dtype}, {way}, {kind}: {row[kind]}")
    print(f"{len(records)} trainings in {seconds} s on {cores} cores: {out}")


if __name__ == "__main__":
    main()
