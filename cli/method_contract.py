"""The contract of a method, as checks that run, and the verb `check-method`, which applies the checks to one file and
prints a line for each. The tests apply them to every method.

A check returns a text on what it saw. If the method breaks the contract, the check raises Broken with the requirement
that is not met.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from cli.exit_codes import CHECK_FAILED
from harness.base.checkout import ROOT
from harness.core import method
from harness.core.job import Job, Room, Workload
from harness.core.record import Record, read_all
from harness.gate.probe import NONE
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from papers.claims.fairness import COLUMNS

# The learning rate is so high that each step moves the weights by more than their rounding.
TINY = Workload(
    num_layers=3, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97, learning_rate=0.1
)
GRADIENT_TOLERANCE = 1e-3  # a larger relative error of a first moment in fp32 means a wrong gradient
MOST_NAMED_TENSORS = 4  # most tensors that a message names
# bytes of a parameter's weight and its two AdamW moments, over all memories; its gradient is not counted
STATE_BYTES = 12


class Broken(Exception):
    """The method breaks its contract. The text of the error tells which part of it."""


class Subject(NamedTuple):
    """A method to check: its name, the folders in which it is looked up, and a folder of results for the trainings of
    the checks."""

    name: str
    folders: tuple[Path, ...]
    results: Path


Check = Callable[[Subject], str]


def trains_in_fp32(subject: Subject) -> str:
    return _judged_text(subject, _trained(subject, "fp32"))


def trains_in_bf16(subject: Subject) -> str:
    return _judged_text(subject, _trained(subject, "bf16"))


def names_its_attention(subject: Subject) -> str:
    kernel, kernels = "scaled_dot_product_flash_attention_for_cpu", _trained(subject, "fp32").kernels
    kernels_text = ", ".join(kernels) or "none"
    _require(kernel in kernels, f"expected {kernel} at work in the second step, saw {kernels_text}")
    return kernel


def names_its_implementation(subject: Subject) -> str:
    texts = method.create(subject.name, {}, subject.folders).describe(TINY, "cpu")
    _require("implementation" in texts, "describe() does not name the implementation")
    _require(set(texts) <= set(COLUMNS), f"describe() may name {', '.join(COLUMNS)}, not {', '.join(texts)}")
    return texts["implementation"]


def is_frozen(subject: Subject) -> str:
    try:
        method.create(subject.name, {}, subject.folders).anything = 1  # type: ignore[attr-defined]
    except dataclasses.FrozenInstanceError:
        return ", ".join(method.option_names(method.load(subject.name, subject.folders))) or "none"
    raise Broken("the class is not @dataclass(frozen=True)")


def plans_more_for_more_layers(subject: Subject) -> str:
    needs = [_planned_bytes(subject, Workload(num_layers=depth))[0] for depth in (4, 8, 16, 64)]
    _require(
        needs == sorted(needs) and needs[0] < needs[-1], f"4, 8, 16, 64 layers are planned with {needs} bytes"
    )
    return f"{needs[-1] / needs[0]:.3g} times as much for 64 layers as for 4"


def plans_the_state(subject: Subject) -> str:
    param_bytes = _planned_bytes(subject, Workload())[1] / Workload().num_params
    _require(
        param_bytes >= STATE_BYTES,
        f"{param_bytes:.3g} bytes a parameter: weight and two moments take {STATE_BYTES} somewhere",
    )
    return f"{param_bytes:.3g} bytes a parameter"


BY_ARITHMETIC: dict[str, Check] = {
    "its options are the fields of a frozen dataclass": is_frozen,
    "it says what it runs with": names_its_implementation,
    "a deeper model needs no less": plans_more_for_more_layers,
    "a plan holds the state of the model": plans_the_state,
}
BY_TRAINING: dict[str, Check] = {
    "it trains as the reference does, fp32": trains_in_fp32,
    "it trains as the reference does, bf16": trains_in_bf16,
    "its record names the attention kernel": names_its_attention,
}


def outcomes(file: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield each check's name, whether the method's file passed the check, and what the check saw. If a run failed, its
    log is kept."""
    with _subject_alone(file) as subject:
        for name, is_passed, text in _outcomes_of_subject(subject):
            for folder in subject.folders:  # show the author's path, not the path of the link
                text = text.replace(f"{folder}/", f"{file.resolve().parent}/")
            yield name, is_passed, text


def _outcomes_of_subject(subject: Subject) -> Iterator[tuple[str, bool, str]]:
    try:
        method.load(subject.name, subject.folders)
    except ValueError as error:
        yield "its file loads", False, str(error)
        return
    for name, check in {**BY_ARITHMETIC, **BY_TRAINING}.items():
        try:
            is_passed, text = True, check(subject)
        except Exception as error:  # an error in the method's code ends only this check
            is_message = isinstance(error, (Broken, ValueError, method.Unavailable))
            is_passed, text = False, str(error) if is_message else f"{type(error).__name__}: {error}"
        yield name, is_passed, text


@contextmanager
def _subject_alone(file: Path) -> Iterator[Subject]:
    """Yield the method in a new folder without the other methods of its own folder. The new folder has links to the
    method's file, and to the files _name.py beside it, which methods may import."""
    file, folder = file.resolve(), Path(tempfile.mkdtemp(prefix="check-method-")).resolve()
    name = file.stem.replace("_", "-")
    try:
        if file.parent == ROOT / "methods":
            yield Subject(name, (), folder)
            return
        (folder / "methods").mkdir()
        for path in (file, *file.parent.glob("_*.py")):
            (folder / "methods" / path.name).symlink_to(path)
        yield Subject(name, (folder / "methods",), folder)
    finally:
        if all(record.status == "ok" for record in read_all(folder)[0].values()):
            shutil.rmtree(folder)


def _planned_bytes(subject: Subject, workload: Workload) -> tuple[int, int]:
    """Return the planned bytes of device and host memory together, and the planned bytes of device, host and disk
    together."""
    plan = method.create(subject.name, {}, subject.folders).plan(workload, Room())
    memory = plan.device_bytes + plan.host_bytes
    return memory, memory + plan.disk_bytes


def _trained(subject: Subject, dtype: str) -> Record:
    """Return the record of a training of twenty steps. Checks that share a folder of results share the record."""
    clip_norm = TINY.clip_norm if method.load(subject.name, subject.folders).clips else 0.0
    job = Job(subject.name, dataclasses.replace(TINY, dtype=dtype, clip_norm=clip_norm), steps=20, warmup=2)
    sweep = Sweep(subject.results, subject.folders, is_timed=False)
    (record,) = sweep.run([resolve(job, subject.folders)])
    if record.status == "unavailable":
        raise method.Unavailable(record.reason)
    logs = [
        str(path).removesuffix(".json") + ".txt" for path, kept in sweep.records.items() if kept is record
    ]
    _require(record.status == "ok", f"{record.status}: {record.reason} ({', '.join(logs)})")
    return record


def _judged_text(subject: Subject, record: Record) -> str:
    """Check that the gate's verdict is the one that the method declares: passed, or failed if the method declares
    another training than the reference's. Return the gate's text. Raises Broken if it is the other verdict."""
    gate = record.gate
    if gate.passed != record.is_exact:
        is_of_a_gradient = gate.reason == "gradient" and record.job.workload.dtype == "fp32"
        where = _wrong_gradients(subject, record.job, gate.evidence["step"]) if is_of_a_gradient else ""
        raise Broken(gate.text + where)
    return gate.text


def _wrong_gradients(subject: Subject, job: Job, step: int) -> str:
    """Return a text that names the tensors with wrong gradients at `step`, the first step with a wrong gradient norm;
    empty if no tensor stands out. Records hold no gradients, so a tensor's gradient is judged by its first AdamW moment
    after `step`."""
    short = dataclasses.replace(job, steps=step, warmup=0)
    reference = dataclasses.replace(short, method=method.reference(subject.folders), options={})
    plans = [resolve(trained, subject.folders) for trained in (short, reference)]
    tensors, reference_tensors = (
        record.tensors
        for record in Sweep(subject.results, subject.folders, probe=NONE, is_timed=False).run(plans)
    )
    moments = {
        name: (tensors.get(name, {}).get("exp_avg"), tensor.get("exp_avg"))
        for name, tensor in reference_tensors.items()
    }
    ratios = {
        name: moment / reference_moment
        for name, (moment, reference_moment) in moments.items()
        if moment and reference_moment
    }
    # a wrong clip factor scales the moments of all tensors alike
    clip = statistics.median(ratios.values() or [1.0])
    off = [name for name, ratio in ratios.items() if abs(ratio / clip - 1) > GRADIENT_TOLERANCE]
    if not off:
        return ""
    off.sort(key=lambda name: -abs(ratios[name] / clip - 1))
    names_text = ", ".join(f"{name} ({ratios[name] / clip:.3g} times)" for name in off[:MOST_NAMED_TENSORS])
    more = f" and {len(off) - MOST_NAMED_TENSORS} more" if len(off) > MOST_NAMED_TENSORS else ""
    return f"; beside the others' the gradient of step {step} is wrong in {names_text}{more}"


def _require(is_kept: Any, text: str) -> None:
    if not is_kept:
        raise Broken(text)


@click.command(name="check-method")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE")
def check_method(file: Path) -> None:
    """Check that a method's file keeps the contract of methods, by tiny runs on the CPU. Exit code 1: a check
    failed."""
    if file.suffix != ".py" or file.name.startswith("_"):
        raise ValueError(f"expected a method's file, such as my_method.py, got {file}")
    failures: set[str] = set()
    for name, is_passed, message in outcomes(file):
        message_text = " ".join(message.split())
        if not is_passed:
            # leave out the name of the log, which differs between runs that fail alike
            failure = message_text.partition("; its log has the traceback")[0]
            message_text = "as told above" if failure in failures else message_text
            failures.add(failure)
        print(f"{'passed' if is_passed else 'failed'}  {name}: {message_text}", flush=True)
    sys.exit(CHECK_FAILED if failures else 0)
