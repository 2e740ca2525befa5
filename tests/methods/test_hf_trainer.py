"""Hugging Face's Trainer trains as the reference does, by its own loop, one batch at a time; the gate sees it err."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import gate_power
from harness.core.data import token_batches
from harness.core.job import Job, Room, Workload
from harness.core.method import create
from harness.core.record import Record
from harness.devices.memory_account import Tracker
from harness.gate import departures, probe
from harness.gate.departures import Departure
from harness.gate.evidence import Trial
from harness.gate.inspect_training import Kernels
from methods.engines.turns import Turns
from tests.methods.test_agree import largest_difference, micro_batched
from tests.support.configured import configured
from tests.support.planting import planted
from tests.support.training import tiny, train, train_resident

STEPS = 8
TRAINER = "methods/engines/trainer.py"
# One broken line each: the line as it is, the line as it must not be, the gate's reason.
FAULTS = {
    "losses of micro-batches are summed": (
        "(len(targets) if num_items_in_batch is None else num_items_in_batch)",
        "len(targets)",
        "forward",
    ),
    "labels are not shifted": ("labels[:, 1:]", "labels[:, :-1]", "forward"),
    "no decay": ("weight_decay=WEIGHT_DECAY", "weight_decay=0.0", "update"),
    "a schedule that begins at rate 0": ("learning_rate_at(done + 1)", "learning_rate_at(done)", "update"),
    "no clip": ("max_grad_norm=workload.clip_norm", "max_grad_norm=0.0", "update"),
}


@pytest.mark.parametrize(
    "workload",
    [tiny(), tiny(clip_norm=0.0), tiny(dropout=0.1), micro_batched(micro_batches=3)],
    ids=["clip", "no clip", "dropout", "micro-batches"],
)
def test_trainer_trains_as_resident(workload: Workload) -> None:
    """Each loss before its update, each norm before the clip; weights and moments by the gate's contract."""
    ours, theirs = train("hf-trainer", workload, STEPS), train_resident(workload, STEPS)
    assert largest_difference(ours.losses, theirs.losses) < 1e-6
    assert largest_difference(ours.grad_norms, theirs.grad_norms) < 1e-5


def test_the_job_alone_says_what_it_trains_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate takes its precision from the environment, too."""
    expected = train("hf-trainer", tiny(), 2).losses
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert train("hf-trainer", tiny(), 2).losses == expected


@functools.cache
def of_reference(method: str, micro_batches: int, **options: str) -> Record:
    return trained(method, micro_batches, **options)


def trained(method: str, micro_batches: int, **options: str) -> Record:
    load = probe.workload(probe.capped(micro_batched(micro_batches=micro_batches)), "fp32")
    record = gate_power.train(Job(method, load, options, steps=probe.STEPS, warmup=0))
    assert record.status == "ok", record.evidence
    return record


def departure(micro_batches: int) -> Departure | None:
    """Of a training at the probe's learning rate from the reference's."""
    record = trained("hf-trainer", micro_batches)
    rounded = of_reference(
        "rounded", micro_batches, names="plain-attention,single-samples,split-products"
    ).models()
    return departures.trial_departure(Trial(record, of_reference("resident", micro_batches), tuple(rounded)))


def test_trainer_divides_gpt_2s_loss_by_one_token_too_many_a_sample() -> None:
    """Trainer 5.23.0 counts the tokens that are learned by the name of the model's class, and GPT2LMHeadModel's does
    not say that its loss shifts the labels: of 17 tokens it learns 16, and divides by 17."""
    workload = configured("gpt2")
    ours, theirs = train("hf-trainer", workload, 1), train_resident(workload, 1)
    for mine, other in zip(
        (*ours.losses, *ours.grad_norms), (*theirs.losses, *theirs.grad_norms), strict=True
    ):
        assert mine == pytest.approx(other * 16 / 17, rel=1e-6)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_gate_sees_it_err(fault: str) -> None:
    old, new, reason = FAULTS[fault]
    with planted(TRAINER, old, new):
        found = departure(3)
    assert found is not None and found.reason == reason, found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_gate_passes_it_as_it_is(micro_batches: int) -> None:
    assert departure(micro_batches) is None


def test_the_kernels_of_the_loops_thread_are_seen() -> None:
    training = create("hf-trainer", {}).train(
        tiny(), iter([(torch.zeros(2, 16, dtype=torch.int64),) * 2] * 2), "cpu"
    )
    next(training)
    with Kernels() as kernels:
        next(training)
    assert {"fused_adamw", "scaled_dot_product_flash_attention_for_cpu"} <= kernels.names
    training.close()


def test_a_sample_for_which_the_model_has_no_further_position_is_refused() -> None:
    """Trainer's samples hold the last target, too."""
    most = int(configured("gpt2").anatomy.most_tokens)
    with pytest.raises(
        ValueError, match=f"--seq: expected at most {most - 1} .*got {most}; try --seq {most - 1}"
    ):
        create("hf-trainer", {}).plan(configured("gpt2", seq_len=most), Room())


@pytest.mark.parametrize(
    "workload",
    [
        Workload(3, 128, 4, seq_len=128, batch_size=4, vocab_size=4096),
        Workload(3, 128, 4, seq_len=128, batch_size=4, vocab_size=4096, dtype="bf16"),
        Workload(6, 64, 4, seq_len=64, batch_size=4, vocab_size=64),
        Workload(1, 64, 4, seq_len=16, batch_size=2, vocab_size=20_000, micro_batches=2),
        configured("llama", seq_len=128, batch_size=4, micro_batches=2),
    ],
    ids=["logits", "bf16", "layers", "tied embedding", "llama"],
)
def test_a_plan_counts_what_a_training_takes(workload: Workload) -> None:
    """The bytes that torch allocates, for two steps; the rest of a percent is numbers of a step."""
    batches, tracker = list(token_batches(workload, 2)), Tracker()
    with tracker.in_thread():
        for _ in create("hf-trainer", {}).train(workload, iter(batches), "cpu"):
            pass
    planned = create("hf-trainer", {}).plan(workload, Room()).device_bytes
    assert 0.9 * planned < tracker.stats()["host_peak"] < 1.01 * planned


def turns_of(loop: Callable[[Turns], Any]) -> Turns:
    made: list[Turns] = []
    made.append(Turns(lambda: loop(made[0])))
    return made[0]


def test_a_loop_works_in_its_turns_alone() -> None:
    told: list[str] = []

    def loop(turns: Turns) -> None:
        given = None
        while (value := turns.take(given)) is not None:
            told.append(f"loop {value}")
            given = value + 1

    with turns_of(loop) as turns:
        turns.give()
        for value in (1, 2):
            told.append(f"caller {turns.give(value)}")
        assert turns.give() is None
    assert told == ["loop 1", "caller 2", "loop 2", "caller 3"]


def test_what_a_loop_raises_reaches_its_caller() -> None:
    def loop(turns: Turns) -> None:
        turns.take()
        raise torch.OutOfMemoryError("full")

    with turns_of(loop) as turns:
        turns.give()
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            turns.give(1)


def test_a_training_that_is_closed_leaves_no_thread() -> None:
    before = threading.active_count()
    training = create("hf-trainer", {}).train(
        tiny(), iter([(torch.zeros(2, 16, dtype=torch.int64),) * 2] * 2), "cpu"
    )
    next(training)
    assert threading.active_count() == before + 1
    training.close()
    assert threading.active_count() == before
