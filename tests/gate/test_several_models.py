"""Several models count only where the job asks for them: what a method tells of more would multiply its throughput."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from harness.core import method
from harness.core.job import Job
from harness.core.method import workloads_of
from harness.core.record import Record
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from tests.support.page import page_blocks
from tests.support.tiny import TINY

STEPS = 4
_serial = itertools.count()  # a module is imported once


def told_of(folder: Path, others: str, option: str) -> str:
    """CONTRIBUTING's method with such an option, which trains one model and tells of others; its name."""
    text = page_blocks("python")[0]
    for old, new in (
        ("import Method, Step", "import Method, OtherModel, Step"),
        ("    fused: bool = True", f"    {option}\n    fused: bool = True"),
        ("        for step, (inputs", "        steps = []\n        for step, (inputs"),
        (
            "yield Step(loss.detach(), norm)",
            "steps.append(Step(loss.detach(), norm))\n            yield steps[-1]",
        ),
        ("        return Trained(\n", "        tensors = (\n"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    text += f"        others = {others}\n        return Trained(tensors, 0,"
    text += " {'num_models': 1 + len(others)}, others)\n"
    name = f"tells_of_more_{next(_serial)}"
    (folder / f"{name}.py").write_text(text)
    return name.replace("_", "-")


def judged(folder: Path, others: str, option: str = "", **options: Any) -> Record:
    name = told_of(folder, others, option)
    job = Job(name, dataclasses.replace(TINY), options, steps=STEPS, warmup=1)
    return Sweep(folder, (folder,)).run([resolve(job, (folder,))])[0]


@pytest.mark.parametrize("changes", ["{}", "{'learning_rate': workload.learning_rate / 2}"])
def test_models_that_the_job_does_not_ask_for_have_no_throughput(
    changes: str, tmp_path: Path, in_process: None
) -> None:
    record = judged(tmp_path, f"[OtherModel.of({changes}, steps, tensors)] * 50")
    assert record.status == "ok" and record.samples_per_second is None
    assert (record.gate.verdict, record.gate.reason) == ("failed", "models"), record.gate.text
    assert record.gate.text == "51 models trained, the job asks for 1"


def test_a_model_of_another_workload_than_the_job_asks_for_has_no_throughput(
    tmp_path: Path, in_process: None
) -> None:
    """The second of two models has half the learning rate: the first one's training is not it."""
    record = judged(tmp_path, "[OtherModel.of({}, steps, tensors)]", "num_models: int = 1", num_models=2)
    assert (record.gate.verdict, record.gate.reason) == ("failed", "models"), record.gate.text
    assert record.gate.text.startswith("model 2 of 2 is not the one that the job asks for")


def test_a_method_does_not_ask_for_several_models_by_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a plan with num_models 1, as the job asks, got 51"):
        judged(tmp_path, "[]", "num_models: int = 51")


def test_the_models_that_a_job_asks_for_halve_the_learning_rate_and_within_it_the_batch() -> None:
    load = dataclasses.replace(TINY, batch_size=4, learning_rate=0.5)
    job = Job("hydra", load, {"num_models": 4, "num_batch_sizes": 2})
    sizes = [(load.learning_rate, load.batch_size) for load in workloads_of(job)]
    assert sizes == [(0.5, 4), (0.5, 2), (0.25, 4), (0.25, 2)]
    assert workloads_of(Job("l2l", load)) == [load]


@pytest.mark.parametrize("num_batch_sizes", [1, 2])
def test_models_that_the_job_asks_for_pass(num_batch_sizes: int, tmp_path: Path, in_process: None) -> None:
    options = {"num_models": 3, "num_batch_sizes": num_batch_sizes}
    job = resolve(Job("hydra", dataclasses.replace(TINY, batch_size=2), options, steps=STEPS, warmup=1))[0]
    record = Sweep(tmp_path).run([resolve(job)])[0]
    assert record.gate.verdict == "exact" and record.samples_per_second, record.gate.text


def test_no_method_trains_several_models_unasked(folders: tuple[Path, ...]) -> None:
    for name in method.names(folders):
        assert len(workloads_of(resolve(Job(name, TINY), folders)[0])) == 1
