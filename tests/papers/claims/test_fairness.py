"""What each method ran with, from the records alone."""

from __future__ import annotations

import dataclasses

import pytest

from harness.core.job import Job
from harness.core.record import Record
from harness.devices import machine
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from methods.offload import adamw_kernel
from papers.claims import fairness
from tests.support import forks
from tests.support.tiny import TINY


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    plans = [resolve(Job(name, TINY, steps=4, warmup=2)) for name in ("fsdp2-offload", "l2l")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.jobs.sweep.launch", forks.launch)
        return Sweep(tmp_path_factory.mktemp("fairness")).run(plans)


def test_a_row_names_who_implements_the_method_and_which_version(records: list[Record]) -> None:
    upstream, own_method_row = fairness.fairness_rows(records)
    assert (upstream["implementation"], upstream["version"]) == (
        "upstream: torch.distributed.fsdp",
        f"torch {machine.software()['torch']}",
    )
    assert (own_method_row["implementation"], own_method_row["version"]) == (
        "this project",
        f"commit {machine.software()['commit']}",
    )


def test_a_row_names_the_kernels_that_were_seen_not_those_that_were_hoped_for(records: list[Record]) -> None:
    seen = {row["method"]: row["kernels seen"] for row in fairness.fairness_rows(records)}
    updated = "adamw" if adamw_kernel.LIBRARY.is_built else "fused_adamw"  # ours, or torch's
    assert seen["l2l fp32"] == f"{updated}, products in fp32, scaled_dot_product_flash_attention_for_cpu"


def test_all_trained_on_the_same_data(records: list[Record]) -> None:
    assert len({row["data"] for row in fairness.fairness_rows(records)}) == 1


def test_the_newest_run_of_a_method_speaks_for_it_and_only_one_that_trained(records: list[Record]) -> None:
    newer = dataclasses.replace(records[1], data_sha256="0123456789")
    crashed = dataclasses.replace(records[1], status="crash")
    rows = fairness.fairness_rows([*records, newer, crashed])
    assert [row["data"] for row in rows if row["method"] == "l2l fp32"] == ["01234567, in order"]


def test_what_all_share_is_said_once_and_what_differs_names_who_has_it() -> None:
    rows = [
        {"method": name, "model": model, "clipping": "exact"}
        for name, model in (("a", "x"), ("b", "y"), ("c", "x"))
    ]
    assert fairness.fairness_lines(rows, 80) == ["model", "  x: a, c", "  y: b", "clipping", "  exact: all 3"]


def test_a_method_that_does_not_describe_itself_is_named_once_with_what_it_lacks() -> None:
    rows = [
        {"method": "a", "model": "x", "recompute": "none"},
        dict.fromkeys(("model", "recompute"), fairness.NOT_SAID),
    ]
    rows[1]["method"] = "b"
    assert fairness.fairness_lines(rows, 80) == [
        "model",
        "  x: a",
        "recompute",
        "  none: a",
        "what is not said",
        "  a method tells it by describe(): b",
    ]


def test_options_are_named_where_they_answer_otherwise() -> None:
    rows = [{"method": f"a (w={w})", "model": "x", "gate": gate} for w, gate in ((1, "ok"), (2, "failed"))]
    rows.append({"method": "b", "model": "y", "gate": "ok"})
    assert fairness.fairness_lines(rows, 80) == [
        "model",
        "  x: a",
        "  y: b",
        "gate",
        "  ok: a (w=1), b",
        "  failed: a (w=2)",
    ]


def test_no_line_is_wider_than_the_terminal_where_its_words_are_not(records: list[Record]) -> None:
    lines = fairness.fairness_lines(fairness.fairness_rows(records), 60)
    assert max(map(len, lines)) <= 60 and "      " in "".join(lines)
