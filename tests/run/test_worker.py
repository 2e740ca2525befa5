"""What a method may tell of its own time: nothing that would make another throughput of the same training."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from harness.core.job import Job
from harness.core.record import Record
from harness.devices import machine
from harness.run import worker
from tests.support.tiny import TINY, write_ending

TELLS = """
import json
from dataclasses import dataclass

import torch

from harness.core.job import Plan
from harness.core.method import Method, Step, TensorState, Trained


@dataclass(frozen=True)
class Tells(Method):
    how: str = "each"

    def plan(self, workload, budget):
        return Plan({})

    def train(self, workload, batches, device):
        waiting = []
        for _ in batches:
            waiting.append(Step(LOSSES.get(self.how, torch.tensor(1.0)), **STEPS.get(self.how, {})))
            yield from waiting if self.how == "twice" else []
            if len(waiting) == {"pairs": 2, "at the end": 9}.get(self.how, 1):
                yield from waiting
                waiting = []
        yield from waiting
        tensors = [TensorState(self.how, torch.ones(2))] if self.how == HALF else []
        return Trained(tensors, MOVED.get(self.how, 0), SCHEDULES.get(self.how, {}), peaks=PEAKS.get(self.how, {}))


SCHEDULES = {"models": {"num_models": 1000}, "none": {"num_models": 0}, "resumed": {"resumed_steps": 3},
             "object": {"a": object()}, "deep": json.loads(60 * '{"a": ' + "1" + 60 * "}")}
PEAKS = {"own processes": {"device_allocated": 7}}
MOVED = {"words": "many", "less than none": -5, "digits": 10**30}
STEPS = {"skipped": {"is_skipped": True}, "no scale": {"loss_scale": "x"}, "no shares": {"shares": "abc"}}
HALF = chr(0xD800)  # of a character
LOSSES = {"later": torch.nn.Parameter(torch.tensor(1.0))}
"""


@pytest.mark.parametrize(
    "how, refused",
    [
        ("each", ""),
        ("at the end", "got up to 3 batches taken beyond a step"),
        ("pairs", "got up to 1 batches taken beyond a step"),
        ("twice", "expected one Step for each batch, got another after batch 1"),
        ("models", "expected num_models 1, one more than `others`, got 1000"),
        ("none", "expected num_models 1, one more than `others`, got 0"),
        ("resumed", "expected resumed_steps 0 without the option resume, got 3"),
        ("later", "expected a torch.Tensor as a step's loss or norm, got Parameter"),
        ("words", "got moved_bytes: expected a valid integer, got 'many'"),
        ("less than none", "expected moved_bytes of at least 0, got -5"),
        ("object", "Object of type object is not JSON serializable"),
        ("deep", "got expected JSON of at most 40 nested levels"),
        ("digits", "got expected integers of at most 19 digits, got one of 31"),
        ("skipped", "expected a number as a step's loss_scale, got None"),
        ("no scale", "expected a number as a step's loss_scale, got 'x'"),
        ("no shares", "expected a number as a step's share, got 'a'"),
        (chr(0xD800), ""),
    ],
)
def test_a_method_does_not_choose_its_throughput(tmp_path: Path, how: str, refused: str) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    job = Job("tells", TINY, {"how": how}, steps=4, warmup=1)
    record = worker.train_here(job, "key", (tmp_path,), lambda event: None)
    assert (record.status, refused in record.reason) == ("crash" if refused else "ok", True), record.reason
    record.write(tmp_path / "log_record.json")
    str(Record.read(tmp_path / "log_record.json")).encode()


def test_a_peak_in_processes_of_the_methods_own_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    record = worker.train_here(
        Job("tells", TINY, {"how": "own processes"}, steps=2, warmup=1),
        "key",
        (tmp_path,),
        lambda event: None,
    )
    assert record.peaks["device_allocated"] == 7


def test_a_method_that_yields_nothing_is_told_what_to_yield(tmp_path: Path) -> None:
    (tmp_path / "yields_none.py").write_text(
        TELLS.split("        waiting")[0].replace("class Tells", "class YieldsNone")
        + "        return Trained([])\n"
    )
    record = worker.train_here(
        Job("yields-none", TINY, steps=4, warmup=1), "key", (tmp_path,), lambda event: None
    )
    assert record.reason.startswith(
        "TypeError: expected train() to yield a Step for each batch, got Trained from it"
    )


def test_a_record_tells_the_cores_that_a_run_had_before_its_engine_pinned_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed's SuperOffload does; here the pinning is told, not done."""
    monkeypatch.setattr(machine, "facts", functools.cache(machine.facts.__wrapped__))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    methods = write_ending(tmp_path, "os.sched_getaffinity = lambda pid: {0}")
    record = worker.train_here(Job("ending", TINY, steps=2, warmup=1), "key", (methods,), lambda event: None)
    assert record.status == "ok" and record.machine["cores"] == 4
