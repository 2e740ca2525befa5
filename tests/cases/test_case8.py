"""Scaling over ranks: which jobs are its points, and what is foretold of them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from cases import case8
from harness.core import method
from harness.core.record import Record
from harness.devices import named_machines
from harness.plan.resources import predict_step
from papers.figures import case, profile
from papers.figures.point import FigureRow
from tests.papers.figures.test_case import DEMO, METHODS, record

SCALING = case8.Scaling()
V100 = {"gpu": "Tesla V100-PCIE-32GB", "gpu_bytes": 32 * 2**30, "host_bytes": 512 * 2**30}
QUICK = profile.make_profile("quick", None, METHODS, V100)


def test_every_method_that_has_ranks_is_in_the_figure() -> None:
    """But for `deepspeed`, whose stages 2 and 3 with offload the figure has by their papers' names."""
    assert set(SCALING.methods) == set(method.having("world_size")) - {"deepspeed"}


@pytest.mark.parametrize("used", [DEMO, QUICK], ids=["demo", "quick"])
def test_one_batch_is_split_and_one_sample_is_each_ranks(used: profile.CaseProfile) -> None:
    """Four samples on 1, 2 and 4 ranks; as many as ranks on 1 and 2: those on 4 are the same job."""
    jobs = SCALING.jobs(used, {})
    counts = Counter((job.world_size, job.workload.batch_size) for job in jobs)
    assert counts == dict.fromkeys([(1, 4), (2, 4), (4, 4), (1, 1), (2, 2)], len(SCALING.methods))
    assert all(any(profile_of_case.is_of(job) for profile_of_case in SCALING.profiles(used)) for job in jobs)
    assert "sim" not in {job.device for job in jobs}


def test_every_job_of_one_gpu_fits_beside_its_context_and_reserve() -> None:
    for job in (candidate for candidate in SCALING.jobs(QUICK, {}) if candidate.world_size == 1):
        assert (
            method.create(job.method, job.options).plan(job.workload, QUICK.room).shortfall(QUICK.room)
            is None
        )


def rows(machine: dict) -> list[FigureRow]:
    """The rows of case 8 from a record of each job on this machine, a second for each rank."""
    runs: list[Record] = [record(job, job.world_size, machine=machine) for job in SCALING.jobs(QUICK, {})]
    return SCALING.table(runs, QUICK)


def test_each_point_is_foretold_by_the_rates_of_its_machine() -> None:
    values = {
        (row.series, row.x, row.metric): row.value for row in rows(V100) if row.method == "zero-offload"
    }
    (job,) = [
        job
        for job in SCALING.jobs(QUICK, {})
        if (job.method, job.world_size, job.workload.batch_size) == ("zero-offload", 2, 4)
    ]
    rates = named_machines.load(named_machines.of_gpu(V100["gpu"], V100["gpu_bytes"])).rates("fp32")
    trained = method.create(job.method, job.options)
    plan = trained.plan(job.workload, dataclasses.replace(job.budget.share(2).room, rates=rates))
    assert rates and values["strong", 2.0, case8.FORETOLD] == pytest.approx(
        4 / predict_step(trained, job.workload, plan, rates, num_ranks=2).seconds
    )
    alone = dataclasses.replace(plan, exchanged={})
    assert (
        values["strong", 2.0, case8.FORETOLD]
        < 4 / predict_step(trained, job.workload, alone, rates, num_ranks=2).seconds
    )


def test_each_point_is_the_run_of_so_many_ranks() -> None:
    """In the order of the points: 4 samples a step, then as many as ranks."""
    for name in SCALING.methods:
        measured = [row.value for row in rows({"cpu": "some CPU", "cores": 2}) if row.method == name]
        assert measured == [4.0, 2.0, 1.0, 1.0, 1.0, 1.0], name


def test_nothing_is_foretold_of_a_machine_without_rates() -> None:
    assert {row.origin for row in rows({"cpu": "some CPU", "cores": 2})} == {"run"}


def test_a_method_without_a_run_of_one_rank_has_no_panel() -> None:
    runs = [
        record(job, 1.0) for job in SCALING.jobs(DEMO, {}) if job.world_size == 1 or job.method == "varuna"
    ]
    kept = [run for run in runs if run.job.world_size > 1 or run.job.method != "varuna"]
    assert {row.method for row in SCALING.table(kept, DEMO)} == set(SCALING.methods) - {"varuna"}


def test_it_is_not_in_all() -> None:
    assert 8 in case.numbers() and 8 not in case.numbers_of_all()
