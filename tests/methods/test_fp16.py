"""fp16: the rule of the loss scale is torch's; steps that overflow are skipped by every method alike, and named."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.core.data import token_batches
from harness.core.job import Job, Room, Workload
from harness.core.method import Step, create, load
from harness.core.record import Record
from harness.gate.verdict import judge
from harness.jobs.sweep import Sweep
from harness.models.gpt import HeadLoss, initialize, is_decayed
from harness.models.model import build
from harness.plan.fit import resolve
from harness.run import worker
from methods.offload.clip import Clip
from methods.shared import loss_scale
from methods.shared.loss_scale import ChosenLossScale, LossScale
from methods.shared.terms import Terms
from tests.methods.test_agree import difference, largest_difference
from tests.support.bugs import COMMITTED, overflow
from tests.support.planting import planted
from tests.support.training import (
    EDGE,
    TrainingResult,
    answers_within,
    overflowing,
    tiny,
    train,
    train_resident,
)

STEPS = 8


@pytest.fixture
def at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    overflow(monkeypatch)


@pytest.fixture
def from_far_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps overflow, in the top layer already; others do later."""
    monkeypatch.setattr(loss_scale, "INITIAL_LOSS_SCALE", 2.0**20)
    monkeypatch.setattr(loss_scale, "LOSS_SCALE_WINDOW", 2)


def resident(workload: Workload) -> TrainingResult:
    """Resident training, once per workload and scale."""
    return resident_from(workload, loss_scale.INITIAL_LOSS_SCALE, loss_scale.LOSS_SCALE_WINDOW)


@functools.cache
def resident_from(workload: Workload, initial_scale: float, window: int) -> TrainingResult:
    return train("resident", workload, STEPS)


def skipped(result: TrainingResult) -> list[int]:
    return [step for step, norm in enumerate(result.grad_norms, start=1) if not math.isfinite(norm)]


def placed(workload: Workload, placement: str, clipping: str) -> str:
    """How this training differs from resident training; empty where it has the same bits."""
    options = {"placement": placement, "clipping": clipping, "window_size": 2}
    return difference(train("stronghold", workload, STEPS, **options), resident(workload))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("overflows", ["", "11111111", "10100110", "0000000", "00010000", "000001"])
def test_the_scale_is_torchs_grad_scaler(
    overflows: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "LOSS_SCALE_WINDOW", window)
    ours, theirs, tracker = (
        LossScale(tiny(dtype="fp16")),
        torch.tensor(2.0**16),
        torch.zeros((), dtype=torch.int32),
    )
    for digit in overflows:
        assert ours.step(torch.zeros(()), None, is_skipped=digit == "1").loss_scale == float(theirs)
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(digit)), 2.0, 0.5, window)
    assert ours.value == float(theirs)


def test_a_workload_may_set_when_the_scale_doubles() -> None:
    for scale in (LossScale(load := tiny(dtype="fp16", loss_scale_window=2)), LossScale(Terms.of(load))):
        assert [scale.step(torch.zeros(()), None).loss_scale for _ in range(5)] == [
            2**16,
            2**16,
            2**17,
            2**17,
            2**18,
        ]


def test_the_scale_is_never_below_1() -> None:
    scale = LossScale(tiny(dtype="fp16"))
    for _ in range(20):
        scale.step(torch.zeros(()), None, is_skipped=True)
    assert scale.value == 1


def test_a_scripts_scale_has_its_least_or_stays() -> None:
    """Of ten overflows."""
    for scale, ended in ((ChosenLossScale(64.0, 4.0), 4.0), (ChosenLossScale(64.0, is_dynamic=False), 64.0)):
        for _ in range(10):
            scale.step(torch.zeros(()), None, is_skipped=True)
        assert scale.value == ended
        scale.resume(2.0, 5)
        assert (scale.value, scale.num_good) == ((2.0, 5) if scale.is_dynamic else (64.0, 0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_dtypes_have_no_scale(dtype: str) -> None:
    ended = LossScale(tiny(dtype=dtype)).step(torch.zeros(()), None)
    assert (ended.loss_scale, ended.is_skipped) == (None, False)


def by_grad_scaler(workload: Workload) -> tuple[list[float], dict[str, Tensor]]:
    """Every loss and the final weights of a loop as torch's documents write it: GradScaler on fp32 masters."""
    model = build(workload)
    names, weights = zip(*model.named_parameters(), strict=True)
    masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
    initialize(zip(names, masters, strict=True), workload)
    groups = [([p for p in masters if is_decayed(p.shape) is d], 0.01 * d) for d in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": p, "weight_decay": decay} for p, decay in groups], eps=1e-8, fused=True
    )
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=loss_scale.INITIAL_LOSS_SCALE, growth_interval=loss_scale.LOSS_SCALE_WINDOW
    )
    losses = []
    for step, (inputs, targets) in enumerate(token_batches(workload, STEPS), start=1):
        scale = scaler.get_scale()
        loss = model(inputs, targets, scale)
        scaler.scale(loss / scale).backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate_at(step)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(masters, workload.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        losses.append(loss.item())
    return losses, dict(zip(names, masters, strict=True))


@pytest.mark.parametrize("edge", ["at_the_edge", "from_far_above"])
def test_resident_training_has_the_very_bits_of_torchs_grad_scaler(
    edge: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(edge)
    workload = overflowing()
    ours, (losses, weights) = resident(workload), by_grad_scaler(workload)
    assert 2 <= len(skipped(ours)) <= STEPS - 2
    assert ours.losses == losses
    assert all(torch.equal(state.weight, weights[state.name]) for state in ours.trained.tensors)


def test_fp16_training_is_near_that_of_fp32() -> None:
    losses = train_resident(tiny(dtype="fp16")).losses
    assert largest_difference(losses, train_resident(tiny()).losses) < 1e-3


@pytest.mark.heavy
def test_gradients_that_fp16_rounds_to_zero_are_there_with_a_scale() -> None:
    """Of 4096 tokens and 20,000 words each logit's gradient is about 1e-8, fp16's smallest number 6e-8."""
    torch.manual_seed(1)
    x, weight, targets = (
        torch.randn(4096, 8),
        torch.randn(20_000, 8) / 100,
        torch.zeros(4096, dtype=torch.int64),
    )

    def gradient(dtype: torch.dtype, scale: float) -> Tensor:
        leaf = weight.to(dtype).requires_grad_()
        HeadLoss.apply(x.to(dtype), leaf, targets, scale).backward()
        assert leaf.grad is not None
        return leaf.grad[1:].float() / scale

    assert not gradient(torch.float16, 1.0).any()
    torch.testing.assert_close(
        gradient(torch.float16, 2.0**16), gradient(torch.float32, 1.0), rtol=1e-2, atol=1e-8
    )


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.0}, {"dropout": 0.1}], ids=str)
def test_l2l_has_the_very_bits_of_resident_training(changes: dict[str, Any], at_the_edge: None) -> None:
    workload = overflowing(**changes)
    assert difference(train("l2l", workload, STEPS), resident(workload)) == ""


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("clipping", ["deferred", "speculate"])
@pytest.mark.parametrize("placement", ["W5", "P5", "S5", "D5", "R5", "R1P1W2S1"])
@pytest.mark.cover(1)
def test_every_place_skips_the_steps_of_resident_training(
    placement: str, clipping: str, clip_norm: float, at_the_edge: None
) -> None:
    assert placed(overflowing(clip_norm=clip_norm), placement, clipping) == ""


@pytest.mark.parametrize("clipping", ["deferred", "speculate"])
def test_steps_that_overflow_from_the_top_on_are_skipped_as_well(clipping: str, from_far_above: None) -> None:
    assert placed(tiny(num_layers=5, dtype="fp16", clip_norm=COMMITTED), "R1P1W2S1", clipping) == ""


@pytest.mark.parametrize(("method", "options"), [("l2l", {}), ("stronghold", {"placement": "R1P1W2S1"})])
@pytest.mark.parametrize("clipping", ["deferred", "speculate"])
def test_a_step_is_skipped_for_any_of_its_micro_batches(
    method: str, options: dict[str, Any], clipping: str, at_the_edge: None
) -> None:
    workload = overflowing(batch_size=6, micro_batches=3)
    options = {**options, "clipping": clipping} if options else {}
    assert difference(train(method, workload, STEPS, **options), resident(workload)) == ""


def test_updates_ahead_are_put_in_force_or_dropped_as_the_gradients_turn_out(
    at_the_edge: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[bool, bool]] = []
    finish = Clip.send_home

    def spy(self: Any) -> None:
        finish(self)
        said.append((self.is_one(), self.overflows()))

    monkeypatch.setattr(Clip, "send_home", spy)
    train("stronghold", overflowing(clip_norm=0.0), STEPS, placement="W5", clipping="speculate")
    assert set(said) == {(True, False), (False, True)}


def test_an_update_ahead_is_not_begun_where_a_gradient_above_is_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = answers_within(monkeypatch)

    def step(self: LossScale, loss: Tensor, norm: Tensor, *, is_skipped: bool) -> Step:
        # overflows from the second step on, which is updated ahead, because the first is good
        self.value = 2.0**40
        return Step(loss, norm, is_skipped=is_skipped)

    monkeypatch.setattr(loss_scale, "INITIAL_LOSS_SCALE", 2.0**10)
    monkeypatch.setattr(LossScale, "step", step)
    train(
        "stronghold", tiny(num_layers=5, dtype="fp16", clip_norm=0.0), 3, placement="W5", clipping="speculate"
    )
    assert said and not any(said)


def test_fp16_takes_16_bytes_a_parameter_at_home() -> None:
    """Weights and gradients of 2, a master and two moments of 4: no half of the master is the weight."""
    workload = Workload(num_layers=4, hidden_size=256, seq_len=64, vocab_size=512, dtype="fp16")
    plan = create("stronghold", {"placement": "W4"}).plan(workload, Room())
    assert (
        plan.host["weights"] + plan.host["optimizer"] == 14 * 4 * workload.layer_params + 512 + 4 * 4
    )  # small numbers


def recorded(method: str, folders: tuple[Path, ...] = (), **options: Any) -> Record:
    workload = overflowing(learning_rate=0.1, clip_norm=COMMITTED)
    record = worker.train_here(
        Job(method, workload, options, steps=STEPS, warmup=1), method, folders, lambda event: None
    )
    assert record.status == "ok", record.evidence
    return record


def test_the_record_says_each_steps_scale_and_which_were_skipped(at_the_edge: None) -> None:
    record = recorded("resident")
    assert record.skipped_steps == [1, 3, 5, 7]
    assert record.loss_scales == [EDGE, EDGE / 2] * 4


def test_the_same_steps_skipped_pass_the_gate(at_the_edge: None) -> None:
    verdict = judge(recorded("stronghold", placement="R1P1W2S1", clipping="speculate"), recorded("resident"))
    assert verdict.verdict == "exact", verdict.text


# One broken line each: file, the line as it is, the line as it must not be, the gate's reason.
MUTANTS = {
    "takes the step all the same": (
        "methods/streaming/update_rules.py",
        "self.is_skipped = self.clip.overflows()",
        "self.is_skipped = False",
        "not-finite",
    ),
    "keeps the scale once": (
        "methods/stronghold.py",
        "yield rule.step(loss)",
        "rule.is_skipped &= step > 1; yield rule.step(loss)",
        "loss-scale",
    ),
    "counts a skipped update": (
        "methods/streaming/layer_state.py",
        "self.num_updates -= 1\n",
        "pass\n",
        "later",
    ),
}


@pytest.mark.parametrize("text", MUTANTS)
def test_wrong_scaling_fails_the_gate_for_its_named_reason(text: str, at_the_edge: None) -> None:
    *change, reason = MUTANTS[text]
    with planted(*change), pytest.MonkeyPatch.context() as patch:
        overflow(patch)
        record = recorded("stronghold", placement="W5", clipping="speculate", window_size=2)
    verdict = judge(record, recorded("resident"))
    assert (verdict.verdict, verdict.reason) == ("failed", reason), verdict.text


def test_norms_that_are_not_finite_agree_in_a_step_that_both_skip(at_the_edge: None) -> None:
    record = recorded("resident")
    assert any(math.isnan(record.grad_norms[step - 1]) for step in record.skipped_steps)
    near = dataclasses.replace(record, bit_exact=False, losses=[loss * (1 + 1e-7) for loss in record.losses])
    verdict = judge(near, record)
    assert verdict.passed and verdict.verdict == "tolerance", verdict.text


def test_the_gate_names_where_scales_part(at_the_edge: None) -> None:
    record = recorded("resident")
    others = {"skipped_steps": [], "loss_scales": [EDGE] * STEPS}
    said = {
        name: judge(dataclasses.replace(record, **{name: value}), record).text
        for name, value in others.items()
    }
    assert said["skipped_steps"] == (
        "it skipped no step for gradients that are not finite, the reference steps 1, 3, 5 and 1 more"
    )
    assert said["loss_scales"] == "loss scale 262144.0 instead of 131072.0 at step 2"


@pytest.mark.heavy
def test_every_method_that_has_a_loss_scale_skips_what_the_reference_skips(
    method_name: str, folders: tuple[Path, ...], shared_results: Path, forked: None
) -> None:
    """At the scale that all begin with, so few tokens have larger gradients than fp16 holds."""
    asked = Job(
        method_name, tiny(dtype="fp16", seq_len=4, batch_size=1, learning_rate=0.1), steps=10, warmup=2
    )
    if not load(method_name, folders).scales_loss:
        with pytest.raises(ValueError, match="has no loss scale for fp16"):
            resolve(asked, folders)
        return
    job, *_ = resolve(asked, folders)
    record = Sweep(shared_results, folders).run([resolve(job, folders)])[0]
    assert record.status == "ok", record.reason
    assert record.skipped_steps and len(record.skipped_steps) < 5
    assert record.gate.passed, record.gate.text
