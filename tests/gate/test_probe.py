"""The gate's probe: made once for a method's source and options, compared with what rounding amounts to."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Budget, Job, Workload
from harness.core.record import Gate, Record
from harness.gate import departures, evidence, limits, probe
from harness.gate.court import ProbeTraining, skips_differ
from harness.gate.evidence import Trial
from harness.gate.probe import ALL_LAYERS, NONE, Extent, Probe, capped
from harness.gate.verdict import judge, with_probe
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from tests.support import cli, records
from tests.support.page import page_blocks
from tests.support.tiny import TINY, WORDS

PLANTED = (ROOT / "bench" / "faults",)
WIDE = """
from dataclasses import dataclass
from methods.l2l import L2L

@dataclass(frozen=True)
class Wide(L2L):
    def plan(self, workload, budget):
        if workload.hidden_size < 96:
            raise ValueError("expected 96 columns")
        return super().plan(workload, budget)
"""

LARGE = """
from dataclasses import dataclass, replace
from methods.l2l import L2L

@dataclass(frozen=True)
class Large(L2L):
    def plan(self, workload, room):
        made = super().plan(workload, room)
        return replace(made, host={**made.host, "weights": 2**40})
"""


def job(method: str = "l2l", options: dict | None = None, **changes) -> Job:
    folders = PLANTED if method == "planted" else ()
    return resolve(
        Job(method, dataclasses.replace(TINY, **changes), options or {}, steps=4, warmup=1), folders
    )[0]


def probed(events: list[dict]) -> list[tuple[str, int, int, str]]:
    """Method, layers, parts of a batch and dtype of each training of a probe."""
    jobs = [event["job"] for event in events if event["event"] == "start" and event.get("role") == "probe"]
    return [(j.method, j.workload.num_layers, j.workload.micro_batches, j.workload.dtype) for j in jobs]


def tensor(**changes) -> dict:
    return {
        "changed": 1.0,
        "moved": 1.0,
        "size": 1.0,
        "sketch": [1.0, 0.0],
        "exp_avg": 1.0,
        "exp_avg_sq": 1.0,
        "sha256": "a",
        **changes,
    }


def trained(losses: list[float], norms: list[float] | None = None, **changes) -> Record:
    """A record of these losses, with gradient norms and tensors of size 1."""
    record = records.record(dataclasses.replace(job(), steps=len(losses), warmup=0))
    fields = {
        "losses": losses,
        "grad_norms": norms or [1.0] * len(losses),
        "tensors": {"layers.0.fc1.weight": tensor()},
    }
    return dataclasses.replace(record, **{**fields, **changes})


def probed_verdict(record: Record, reference: Record, trained_probe: Probe) -> Gate:
    return with_probe(judge(record, reference), record, trained_probe)


BASE = [2.0, 1.9, 1.8, 1.7]
LIMITS = limits.rounding_floor(trained(BASE), [trained(BASE)]).times(10)._replace(faint=limits.FAINT_MULTIPLE)


@pytest.mark.parametrize(
    ("losses", "norms", "reason", "step"),
    [
        ([2.1, 1.9, 1.8, 1.7], [1.0] * 4, "forward", 1),
        (BASE, [2.0, 1.0, 1.0, 1.0], "gradient", 1),
        ([2.0, 1.8, 1.8, 1.7], [1.0] * 4, "update", 2),
        ([2.0, 1.9, 1.8, 1.6], [1.0] * 4, "later", 4),
        (BASE, [1.0, 1.0, 1.5, 1.0], "gradient", 3),
        # Weights that are hardly wrong show in the gradient's norm first.
        (BASE, [1.0, 1.00001, 1.0, 1.0], "update", 2),
        # What grows from below the limit may have begun with the first update; what strikes at a step shows at once.
        ([2.0, 1.9, 1.8, 1.7 * (1 + 1e-5)], [1.0] * 4, "update", 4),
        ([2.0, 1.9, 1.8, 1.7 * (1 + 1e-4)], [1.0] * 4, "later", 4),
    ],
)
def test_the_first_departure_names_the_fault(losses: list, norms: list, reason: str, step: int) -> None:
    departure = departures.first_departure(trained(losses, norms), trained(BASE), LIMITS)
    assert departure is not None and (departure.reason, departure.step) == (reason, step)


def test_no_floor_is_below_one_rounding_and_a_step_s_is_the_largest_so_far() -> None:
    split = trained([2.0, 1.9, 1.8, 1.7, 1.6, 1.5 * (1 + 1e-4), 1.4])
    floor = limits.rounding_floor(trained([2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4]), [split])
    assert floor.losses == pytest.approx([1e-7] * 5 + [1e-4] * 2, rel=1e-3)
    assert floor.norms == [1e-7] * 7


def test_a_rounding_that_skips_other_steps_of_fp16_is_no_floor_of_tensors() -> None:
    half = dataclasses.replace(job(dtype="fp16"), steps=4, warmup=0)
    scales = {"loss_scales": [8.0] * 4, "job": half}
    reference = trained(BASE, tensors={"a": tensor(size=0.0)}, **scales)
    alike, other = (
        trained(BASE, tensors={"a": tensor(size=0.0, sketch=[end, 0.0])}, **{**scales, **skips})
        for end, skips in ((1.01, {}), (1.5, {"skipped_steps": [3]}))
    )
    assert limits.rounding_floor(reference, [alike, other]).tensors["way"] == pytest.approx({"a": 0.01})


def test_a_tensor_s_floor_is_the_farthest_rounding_s() -> None:
    """One of them alone ends by chance where the reference does."""
    others = [trained(BASE, tensors={"a": tensor(size=0.0, sketch=[end, 0.0])}) for end in (1.0, 1.02, 1.01)]
    floor = limits.rounding_floor(trained(BASE, tensors={"a": tensor(size=0.0)}), others)
    assert floor.tensors["way"] == pytest.approx({"a": 0.02}) and floor.medians["way"] == pytest.approx(0.02)


def test_another_rounding_only_raises_a_floor() -> None:
    """So a training that is within the floor of some roundings is within that of all."""
    ends = [[2.0, 1.9, 1.8, 1.7 + far] for far in (1e-4, 3e-4, 2e-4)]
    few, more = (limits.rounding_floor(trained(BASE), [trained(end) for end in ends[:num]]) for num in (1, 3))
    assert all(a <= b for a, b in zip(few.losses, more.losses, strict=True)) and few.losses != more.losses


def test_a_tensor_s_floor_is_the_median_tensor_s_at_least() -> None:
    names = ("a", "b", "c")
    reference = trained(BASE, tensors={name: tensor(size=0.0) for name in names})
    ends = {"a": 1.0, "b": 1.01, "c": 1.5}
    split = trained(BASE, tensors={name: tensor(size=0.0, sketch=[end, 0.0]) for name, end in ends.items()})
    assert limits.rounding_floor(reference, [split]).tensors["way"] == pytest.approx(
        {"a": 0.01, "b": 0.01, "c": 0.5}
    )


@pytest.mark.parametrize(("moment", "name"), [("exp_avg", "first"), ("exp_avg_sq", "second")])
def test_a_moment_that_some_tensors_lack_is_a_departure_and_one_that_all_lack_is_said(
    moment: Any, name: str
) -> None:
    names = ("a", "b")
    reference = trained(BASE, tensors=dict.fromkeys(names, tensor()))
    partly = trained(BASE, tensors={"a": tensor(), "b": tensor(**{moment: None})})
    assert evidence.moment_differences(partly, reference, moment) == {"a": 0.0, "b": math.inf}
    none = trained(BASE, tensors=dict.fromkeys(names, tensor(**{moment: None})))
    assert (
        f"{name} moments were not tested" in probed_verdict(none, reference, Probe(untested="no probe")).text
    )


def test_a_second_moment_off_by_more_than_rounding_is_a_departure_where_all_else_agrees() -> None:
    wrong = trained(BASE, tensors={"layers.0.fc1.weight": tensor(exp_avg_sq=1.1)})
    departure = departures.first_departure(wrong, trained(BASE), LIMITS)
    assert (
        departure is not None
        and departure.reason == "gradient-scale"
        and "second moment 1.0e-01 off" in departure.difference_text
    )


@pytest.mark.parametrize(("factor", "verdict"), [(1.05, "tolerance"), (1.07, "failed")])
def test_what_drops_other_elements_may_differ_by_six_times_what_dropout_changes(
    factor: float, verdict: str
) -> None:
    """Dropout changes a loss by 1 % here."""
    reference, undropped = trained(BASE), trained([loss / 1.01 for loss in BASE])
    gate = judge(trained([loss * factor for loss in BASE]), reference, undropped=undropped)
    assert gate.verdict == verdict
    assert ("which elements are dropped was not compared" in gate.text) is gate.passed


@pytest.mark.parametrize(("moment", "verdict"), [(1.5, "tolerance"), (1.7, "failed")])
def test_of_other_dropout_the_farthest_tensor_is_held_to_the_farthest(moment: float, verdict: str) -> None:
    """Dropout changes one moment by 10 %, the others by hardly anything."""
    without = {"a": tensor(exp_avg=1.1), "b": tensor(exp_avg=1.001), "c": tensor(exp_avg=1.001)}
    undropped = trained([loss / 1.01 for loss in BASE], tensors=without)
    other = trained(
        [loss * 1.01 for loss in BASE], tensors={**dict.fromkeys("ac", tensor()), "b": tensor(exp_avg=moment)}
    )
    gate = judge(other, trained(BASE, tensors=dict.fromkeys("abc", tensor())), undropped=undropped)
    assert gate.verdict == verdict, gate.text


def test_what_drops_nothing_is_named_where_dropout_shows() -> None:
    """It is as far from the reference as dropout takes that, which is within six times."""
    undropped = trained([loss / 1.01 for loss in BASE])
    gate = judge(
        trained([loss * (1 + 1e-7) for loss in undropped.losses]), trained(BASE), undropped=undropped
    )  # type: ignore[operator]
    assert (gate.verdict, gate.reason) == ("failed", "dropout")
    hardly = trained([loss * (1 + 1e-7) for loss in undropped.losses])  # type: ignore[operator]
    assert judge(undropped, hardly, undropped=undropped).passed


def test_steps_that_fp16_skipped_otherwise_are_not_compared() -> None:
    half = dataclasses.replace(job(dtype="fp16"), steps=4, warmup=0)
    skipping = trained([2.0, 1.9, 1.5, 1.4], loss_scales=[8.0, 8.0, 8.0, 4.0], skipped_steps=[3], job=half)
    steady = trained(BASE, loss_scales=[8.0] * 4, job=half)
    assert evidence.num_comparable_steps(skipping, steady) == 2
    assert departures.first_departure(skipping, steady, LIMITS) is None


def test_without_a_probe_the_verdict_says_that_decay_and_later_rates_were_not_tested() -> None:
    """Rate times decay is 1.9e-9 at step 4: 1 less that is 1 in fp32."""
    record = trained(BASE)
    verdict = probed_verdict(record, trained(BASE), Probe(untested="the probe was left out"))
    untested = "decay and the learning rate after step 4 were not tested"
    assert verdict.passed and verdict.text.endswith(f"; the probe was left out; {untested}")


def test_a_run_whose_probe_ended_badly_has_no_throughput() -> None:
    """What trains wrongly and knows the probe could end there."""
    trial = Trial(trained(BASE, status="timeout", reason="too slow"), trained(BASE))
    verdict = probed_verdict(trained(BASE), trained(BASE), Probe((trial,)))
    assert (verdict.verdict, verdict.reason) == ("untested", "probe")
    assert (
        verdict.text.startswith("the probe in fp32 ended as timeout: too slow; ")
        and "--no-probe" in verdict.text
    )


def test_where_the_reference_s_probe_ended_badly_nothing_is_tested() -> None:
    ended = trained(BASE, status="timeout", reason="too slow")
    for trial in (Trial(trained(BASE), ended), Trial(ended, ended)):
        verdict = probed_verdict(trained(BASE), trained(BASE), Probe((trial,)))
        assert (
            verdict.passed and "the reference's probe in fp32 did not train: ended as timeout" in verdict.text
        )


def test_another_norm_beside_the_reference_s_bits_fails_the_probe() -> None:
    """What a method says of its norm was not compared where its weights were the reference's."""
    said = trained(BASE, [1.00009] * 4)
    verdict = probed_verdict(
        trained(BASE), trained(BASE), Probe((Trial(said, trained(BASE), (trained(BASE),)),))
    )
    assert (verdict.verdict, verdict.reason) == ("failed", "gradient"), verdict.text


@pytest.mark.parametrize("part", ["norm", "keys"])
def test_what_is_not_finite_fails_even_beside_the_reference_s_bits(part: str) -> None:
    end = {"layers.0.attn.qkv.bias": tensor(left_out="keys", size=math.nan if part == "keys" else 1.0)}
    record = trained(BASE, [1.0, math.nan if part == "norm" else 1.0, 1.0, 1.0], tensors=end)
    verdict = judge(record, trained(BASE, tensors=end))
    assert (verdict.verdict, verdict.reason) == ("failed", "not-finite"), verdict.text


def test_norms_that_a_method_does_not_return_are_not_said_to_be_tested() -> None:
    silent = trained(BASE, grad_norms=[])
    verdict = probed_verdict(silent, trained(BASE), Probe((Trial(silent, trained(BASE)),)))
    assert verdict.passed and "norms were not tested: the method returns none" in verdict.text
    assert "losses, weights" in verdict.text


@pytest.mark.parametrize(("keys", "verdict"), [(8.3e-6, "tolerance"), (8.5e-6, "failed")])
def test_a_bias_of_keys_may_end_anywhere_that_adamw_can_take_it(keys: float, verdict: str) -> None:
    """By hand: rates of 4.7e-8 times 1, 2, 3 and 4 are 4.7e-7, times 3.16 and the root of 32 elements 8.4e-6."""
    end = {"layers.0.attn.qkv.bias": tensor(moved=1e-6, size=math.hypot(1e-6, keys), left_out="keys")}
    gate = judge(trained([loss * (1 + 1e-7) for loss in BASE], tensors=end), trained(BASE, tensors=end))
    assert (gate.verdict, gate.reason) == (verdict, "weights" if verdict == "failed" else ""), gate.text


def test_a_step_skipped_outside_fp16_fails_the_probe() -> None:
    """No step after it was compared, and the verdict passed."""
    skipping = trained([2.0, 1.9, 1.5, 1.4], skipped_steps=[1])
    verdict = probed_verdict(
        trained(BASE), trained(BASE), Probe((Trial(skipping, trained(BASE), (trained(BASE),)),))
    )
    assert (verdict.verdict, verdict.reason) == ("failed", "loss-scale"), verdict.text


@pytest.mark.probe
def test_a_limit_of_time_for_few_steps_is_longer_for_a_probe_of_more(
    tmp_path: Path, in_process: None
) -> None:
    """Else a run within its limit would have no throughput since its probe is not."""
    events: list[dict] = []
    limited = dataclasses.replace(job(), budget=Budget(seconds=100))
    Sweep(tmp_path, report=events.append).run([resolve(limited)])
    starts = [event for event in events if event["event"] == "start" and event.get("role") == "probe"]
    assert {(event["job"].steps, event["job"].budget.seconds) for event in starts} == {(20, 500)}


@pytest.mark.probe
@pytest.mark.parametrize("mistake", ["raise ValueError('not at this rate')", "raise SystemExit(0)"])
def test_a_method_that_plans_no_probe_of_its_run_s_own_size_has_no_throughput(
    mistake: str, tmp_path: Path, in_process: None
) -> None:
    name = f"refuses{len(mistake)}"
    refusal = f"if workload.learning_rate > 1e-3:\n            {mistake}\n        "
    text = page_blocks("python")[0].replace(
        "params = workload.num_params", f"{refusal}params = workload.num_params"
    )
    (tmp_path / f"{name}.py").write_text(text)
    refusing = resolve(Job(name, TINY, steps=4, warmup=1), (tmp_path,))[0]
    record = Sweep(tmp_path, (tmp_path,)).run([resolve(refusing, (tmp_path,))])[0]
    assert record.status == "ok" and (record.gate.verdict, record.gate.reason) == ("untested", "probe"), (
        record.gate.text
    )


def test_a_departing_probe_fails_a_run_that_agrees_and_names_the_cause() -> None:
    wrong = trained([2.0, 1.9, 1.5, 1.4], bit_exact=True, tensors={"layers.0.fc1.weight": tensor(sha256="b")})
    verdict = probed_verdict(trained(BASE), trained(BASE), Probe((Trial(wrong, trained(BASE)),)))
    assert (verdict.verdict, verdict.reason) == ("failed", "later") and "(probe in fp32)" in verdict.text


@pytest.mark.probe
def test_equal_bits_take_no_measure_of_rounding_and_the_next_size_takes_no_probe(
    tmp_path: Path, in_process: None
) -> None:
    events: list[dict] = []
    record = Sweep(tmp_path, report=events.append).run([resolve(job(num_layers=5))])[0]
    assert probed(events) == [("l2l", 4, 1, "fp32"), ("resident", 4, 1, "fp32")]
    assert record.gate.verdict == "exact" and "probe: 20 steps at 4 of 5 layers in fp32" in record.gate.text
    events.clear()
    Sweep(tmp_path, report=events.append).run([resolve(job(num_layers=6))])
    assert probed(events) == []
    rate = {Record.read(path).job.workload.learning_rate for path in (tmp_path / "probes").glob("*.json")}
    assert rate == {probe.LEARNING_RATE}


@pytest.mark.heavy
@pytest.mark.probe
def test_other_bits_are_measured_by_other_roundings_of_the_reference_and_half_precision_in_fp32_too(
    tmp_path: Path, in_process: None
) -> None:
    events: list[dict] = []
    honest = job("planted", {"adam": "plain"}, dtype="bf16")
    record = Sweep(tmp_path, PLANTED, events.append).run([resolve(honest, PLANTED)])[0]
    assert sorted(probed(events)) == sorted(
        [("planted", 2, 1, dtype) for dtype in ("bf16", "fp32")]
        + [(method, 2, 1, dtype) for dtype in ("bf16", "fp32") for method in ("resident", "rounded")]
    )
    assert record.gate.passed and "probe: 20 steps in fp32 and bf16" in record.gate.text, record.gate.text


@pytest.mark.probe
@pytest.mark.parametrize(("options", "parts"), [({"adam": "plain"}, 1), ({"fault": "no decay"}, 2)])
def test_more_roundings_are_trained_only_where_the_first_leave_a_departure(
    options: dict, parts: int, tmp_path: Path, in_process: None
) -> None:
    events: list[dict] = []
    Sweep(tmp_path, PLANTED, events.append).run([resolve(job("planted", options), PLANTED)])
    jobs = [
        event["job"] for event in events if event["event"] == "start" and event["job"].method == "rounded"
    ]
    assert [job.options["names"] for job in jobs] == [",".join(names) for names in probe.ROUNDINGS[:parts]]


@pytest.mark.probe
def test_forgotten_decay_fails_by_the_probe_alone(tmp_path: Path, in_process: None) -> None:
    forgotten = job("planted", {"fault": "no decay"})
    assert Sweep(tmp_path, PLANTED, probe=NONE).run([resolve(forgotten, PLANTED)])[0].gate.passed
    verdict = Sweep(tmp_path, PLANTED).run([resolve(forgotten, PLANTED)])[0].gate
    assert (verdict.verdict, verdict.reason) == ("failed", "update"), verdict.text
    assert "is 2 times what rounding does here" in verdict.text
    assert "larger than the reference's, where biases and norms agree: as without decay; " in verdict.text


@pytest.mark.probe
@pytest.mark.parametrize(
    ("fault", "extent", "text"),
    [
        ("no decay beyond layer 4", Extent(layers=ALL_LAYERS), "probe: 20 steps at 4 of 6 layers in fp32"),
        ("no decay after step 20", Extent(steps=40), "probe: 20 steps at 4 of 6 layers in fp32"),
    ],
)
def test_more_layers_or_steps_see_what_is_wrong_in_them_alone(
    fault: str, extent: Extent, text: str, tmp_path: Path, in_process: None
) -> None:
    forgotten = job("planted", {"fault": fault}, num_layers=6)
    verdict = Sweep(tmp_path, PLANTED).run([resolve(forgotten, PLANTED)])[0].gate
    assert verdict.passed and text in verdict.text
    verdict = Sweep(tmp_path, PLANTED, probe=extent).run([resolve(forgotten, PLANTED)])[0].gate
    assert (verdict.verdict, verdict.reason) == ("failed", "update"), verdict.text


@pytest.mark.probe
def test_a_later_verdict_rests_on_no_less_and_trains_nothing_again(tmp_path: Path, in_process: None) -> None:
    extent = Extent(layers=ALL_LAYERS, steps=30)
    first = Sweep(tmp_path, probe=extent).run([resolve(job(num_layers=5))])[0]
    assert "probe: 30 steps in fp32" in first.gate.text
    events: list[dict] = []
    for less in (Extent(), NONE):
        again = Sweep(tmp_path, report=events.append, probe=less).run([resolve(job(num_layers=5))])[0]
        assert again.gate == first.gate
    assert probed(events) == []


@pytest.mark.probe
def test_a_probe_has_a_size_of_its_own_which_larger_jobs_share(tmp_path: Path, in_process: None) -> None:
    events: list[dict] = []
    for sizes in ({"hidden_size": 128, "seq_len": 96, "vocab_size": 600}, {"hidden_size": 96, "seq_len": 80}):
        record = Sweep(tmp_path, report=events.append).run(
            [resolve(job(num_heads=8, **{"vocab_size": 576, **sizes}))]
        )[0]
        # what lies beyond is not seen
        size = f"64 of {sizes['hidden_size']} columns, 64 of {sizes['seq_len']} tokens"
        assert f"probe: 20 steps at {size}, 512 of {sizes.get('vocab_size', 576)} words" in record.gate.text
    loads = [
        event["job"].workload
        for event in events
        if event.get("role") == "probe" and event["event"] == "start"
    ]
    sizes = {(load.hidden_size, load.num_heads, load.seq_len, load.vocab_size) for load in loads}
    assert sizes == {(64, 8, 64, 512)} and len(loads) == 2


@pytest.mark.parametrize("name", ["hidden_size", "num_heads", "seq_len", "vocab_size"])
def test_a_full_probe_has_each_size_of_the_run(name: str) -> None:
    """Attention to the last 64 tokens only, and the scale of heads wider than 32, were not seen."""
    large = job(num_layers=5, hidden_size=512, num_heads=4, seq_len=256, vocab_size=1000)
    full, small = (probe.sized(large, Extent(is_full=is_full)) for is_full in (True, False))
    assert getattr(full, name) == getattr(large.workload, name) >= getattr(small, name)


def test_a_probe_has_heads_and_samples_of_the_run_s_size_where_a_tenth_of_its_cost_pays_for_it() -> None:
    large = dataclasses.replace(job(num_layers=16, hidden_size=1024, num_heads=8, seq_len=512), steps=20)
    sizes = probe.sized(large, Extent())
    assert (sizes.seq_len, sizes.hidden_size // sizes.num_heads) == (512, 128)
    trained_flops = probe.TRAININGS["fp32"] * probe.STEPS * sizes.at_depth(4).flops_per_step
    assert trained_flops <= 0.1 * large.steps * large.workload.flops_per_step
    assert probe.sized(dataclasses.replace(large, steps=2, warmup=1), Extent()).seq_len < 512


def test_the_verdict_names_each_size_that_no_probe_had() -> None:
    load = dataclasses.replace(TINY, num_layers=9, hidden_size=512, num_heads=8, seq_len=256, vocab_size=1000)
    whole = dataclasses.replace(trained(BASE), job=dataclasses.replace(job(), workload=load))
    small = dataclasses.replace(capped(load), num_layers=4, num_heads=4, hidden_size=32)
    part = dataclasses.replace(trained(BASE), job=dataclasses.replace(job(), workload=small))
    text = with_probe(judge(whole, whole), whole, Probe((Trial(part, part),))).text
    sizes = "4 of 9 layers, 32 of 512 columns, 4 of 8 heads, 64 of 256 tokens, 512 of 1000 words"
    assert f" steps at {sizes}, 8 of 64 columns of a head in fp32" in text


def test_a_probe_straddles_both_turns_of_the_schedule() -> None:
    """A method without the cosine was exact."""
    load = probe.workload(TINY, "fp32")
    rates = [load.learning_rate_at(step) for step in range(1, probe.STEPS + 1)]
    assert rates.index(max(rates)) == 11 and rates[-2:] == [1e-5, 1e-5]


@pytest.mark.parametrize(("dtype", "clip_norm", "rate"), [("bf16", 1.0, 0.1875), ("bf16", 0.0, 3.75e-3)])
def test_half_precision_is_probed_by_small_gradients_where_the_method_clips(
    dtype: str, clip_norm: float, rate: float
) -> None:
    load = probe.workload(dataclasses.replace(TINY, clip_norm=clip_norm), dtype)
    assert (load.learning_rate, load.clip_norm) == (
        rate,
        clip_norm and pytest.approx(3e-11 * TINY.num_params**0.5),
    )


@pytest.mark.parametrize(("far", "reason"), [(2.1e-7, "forward"), (1.9e-7, "gradient")])
def test_a_first_loss_beyond_its_own_rounding_tells_of_the_forward_pass(far: float, reason: str) -> None:
    """Another step's rounding, 1e-5 here, hid it, and the gradient was named."""
    losses = [2.0 * (1 + far), *BASE[1:]]
    wrong = trained(losses, [2.0, 1.0, 1.0, 1.0], tensors={"layers.0.fc1.weight": tensor(sha256="b")})
    rounded = trained([2.0, 1.9 * (1 + 1e-5), 1.8, 1.7])
    departure = departures.rounding_departure(Trial(wrong, trained(BASE), (rounded,)), is_held_to_bits=False)
    assert departure is not None and (departure.reason, departure.step) == (reason, 1)


def shares(missing: float, key: str) -> dict:
    """A tensor of 4096 elements of which so many did not change, or got no gradient."""
    return {"layers.0.fc1.weight": tensor(**{key: 1 - missing / 4096})}


@pytest.mark.parametrize("key", ["changed", "with_gradient"])
@pytest.mark.parametrize(("missing", "spread", "is_seen"), [(16, 0, True), (3, 0, False), (16, 8, False)])
def test_a_few_elements_that_were_never_updated_are_seen(
    key: str, missing: int, spread: int, is_seen: bool
) -> None:
    """The last 16 elements of a tensor were never updated in bf16, within its rounding."""
    reference = trained(BASE, tensors=shares(0, key))
    record, other = (trained(BASE, tensors=shares(num, key)) for num in (missing, spread))
    record.tensors["layers.0.fc1.weight"]["sha256"] = "b"
    departure = departures.rounding_departure(Trial(record, reference, (other,)), is_held_to_bits=False)
    assert (departure.reason if departure else "") == ("partial-update" if is_seen else "")


@pytest.mark.parametrize("batch_size, tokens", [(1, 64), (4, 64), (8, 32), (32, 8), (256, 8)])
def test_a_probe_of_a_large_batch_has_fewer_tokens(batch_size: int, tokens: int) -> None:
    """The batch is the run's, which options cut; at 64 tokens 256 samples took as long as the run."""
    assert capped(Workload(seq_len=1024, batch_size=batch_size)).seq_len == tokens
    assert capped(Workload(seq_len=4, batch_size=batch_size)).seq_len == 4


@pytest.mark.probe
def test_a_method_that_trains_its_own_width_alone_is_probed_at_it(tmp_path: Path, in_process: None) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    wide = Job("wide", dataclasses.replace(TINY, hidden_size=96, num_heads=2), {}, steps=4, warmup=1)
    events: list[dict] = []
    wide, folders = resolve(wide, (tmp_path,))[0], (tmp_path,)
    verdict = (
        Sweep(Path(tempfile.mkdtemp(dir=tmp_path)), folders, events.append)
        .run([resolve(wide, folders)])[0]
        .gate
    )
    loads = [
        event["job"].workload
        for event in events
        if event.get("role") == "probe" and event["event"] == "start"
    ]
    assert {load.hidden_size for load in loads} == {96} and "probe: 20 steps in fp32" in verdict.text, (
        verdict.text
    )


def test_seconds_of_a_probe_grow_with_its_layers_and_steps(tmp_path: Path) -> None:
    deep, foreseen = job(num_layers=8), []
    for extent in (Extent(), Extent(layers=ALL_LAYERS), Extent(steps=60), NONE):
        foreseen.append(Sweep(tmp_path, probe=extent).probe_seconds(deep, job_seconds=100.0))
    assert foreseen[0] < foreseen[1] < foreseen[2] and foreseen[3] == 0


@pytest.mark.heavy
@pytest.mark.probe
def test_one_sample_and_dropout_are_probed_with_two_and_without(tmp_path: Path, in_process: None) -> None:
    events: list[dict] = []
    Sweep(tmp_path, report=events.append).run([resolve(job(batch_size=1, dropout=0.1))])
    loads = [
        event["job"].workload
        for event in events
        if event.get("role") == "probe" and event["event"] == "start"
    ]
    assert {(load.batch_size, load.dropout) for load in loads} == {(2, 0.0)}


@pytest.mark.probe
def test_a_run_beyond_its_plan_that_trained_is_probed_beyond_it(tmp_path: Path, in_process: None) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    beyond = resolve(Job("large", TINY, budget=Budget(host_bytes=2**34), steps=4, warmup=1), (tmp_path,))
    record = Sweep(tmp_path, (tmp_path,)).attempt(beyond, 1, {})
    assert record.gate.verdict == "exact" and "probe: 20 steps" in record.gate.text, record.gate.text


@pytest.mark.probe
def test_a_reference_that_never_fits_leaves_nothing_to_probe_by(tmp_path: Path, in_process: None) -> None:
    tiny = dataclasses.replace(job(), budget=Budget(device_bytes=1))
    probe = ProbeTraining(tiny, 0, Extent(), Sweep(tmp_path).probe_store).train()
    assert probe == Probe((), "no probe in fp32: the reference does not fit at any depth")


@pytest.mark.probe
@pytest.mark.heavy
def test_the_door_probes_unless_told_not_to(tmp_path: Path, forked: None) -> None:
    arguments = [*WORDS[:1], "l2l", *WORDS[2:], "--device", "cpu", "--results", tmp_path]
    without = cli.run(*arguments, "--no-probe")
    assert (
        without.returncode == 0 and "; the probe was left out; decay and the learning rate" in without.stdout
    )
    probed = cli.run(*arguments)
    assert probed.returncode == 0 and "; probe: 20 steps in fp32" in probed.stdout


def test_a_record_of_before_there_was_a_probe_is_read() -> None:
    old = trained(BASE, gate=Gate("exact", "", "bit-equal")).to_dict()
    assert Record.from_dict(old).gate.text == "bit-equal"


@pytest.mark.parametrize(("norm", "verdict"), [(1.0 + 2.8e-4, "tolerance"), (1.0 + 2e-2, "failed")])
def test_a_norm_may_be_off_by_what_one_sum_over_a_vocabulary_rounds(norm: float, verdict: str) -> None:
    """An engine that sums in fp64 was 2.8e-4 from the reference at this vocabulary and width."""
    workload = dataclasses.replace(job().workload, hidden_size=64, vocab_size=50304)
    pair = trained(BASE), trained(BASE, [norm] * 4, tensors={"layers.0.fc1.weight": tensor(sha256="b")})
    reference, record = (
        dataclasses.replace(one, job=dataclasses.replace(one.job, workload=workload)) for one in pair
    )
    assert judge(record, reference).verdict == verdict


@pytest.mark.parametrize(("ulps", "verdict"), [(1.2, "tolerance"), (2.5, "failed")])
def test_the_rounding_of_steps_that_are_a_few_ulps_long_is_no_departure(ulps: float, verdict: str) -> None:
    """AdamW in fp64 inside was 2.4e-3 of its way off at a rate of 1.5e-5, where 20 steps move 283 ulps."""
    of, losses = dataclasses.replace(job(), steps=20, warmup=0), [2.0] * 20
    way = 283 * 2**-24
    reference, near = (
        trained(
            losses, job=of, tensors={"a": tensor(moved=way, sketch=[way + far * 2**-24], sha256=str(far))}
        )
        for far in (0.0, ulps)
    )
    assert judge(near, reference).verdict == verdict


def test_a_value_and_a_limit_that_round_alike_have_a_digit_more() -> None:
    assert limits.distinct_texts(2.04e-3, 2.0e-3) == ("2.04e-03", "2.00e-03")
    assert limits.distinct_texts(2.4e-3, 2.0e-3) == ("2.4e-03", "2.0e-03")


@pytest.mark.parametrize(
    ("norms", "parts", "hint"),
    [
        ([2.0, 1.0, 1.0, 1.0], 2, "is every micro-batch summed?"),
        ([1.0, 2.0, 1.0, 1.0], 1, "is a gradient a step late? compare both moments after step 2"),
    ],
)
def test_a_wrong_gradient_says_what_to_look_at(norms: list, parts: int, hint: str) -> None:
    of = dataclasses.replace(job(micro_batches=parts), steps=4, warmup=0)
    departure = departures.first_departure(trained(BASE, norms, job=of), trained(BASE, job=of), LIMITS)
    assert departure is not None and hint in departure.text


@pytest.mark.parametrize(
    ("of_method", "of_rounding", "differ"), [([3], [3], False), ([4], [3], True), ([3], [4], True)]
)
def test_where_a_rounding_decides_which_steps_fp16_skips_is_no_measure(
    of_method: list, of_rounding: list, differ: bool
) -> None:
    """Four honest roundings failed where all but the reference's own skipped other steps."""
    mine, rounded = (trained(BASE, skipped_steps=steps) for steps in (of_method, of_rounding))
    assert skips_differ(Trial(mine, trained(BASE, skipped_steps=[3]), (rounded,))) is differ


def test_a_deeper_probe_has_a_wider_limit() -> None:
    """Noise of an ulp in each product was 25 times the floor in 6 layers."""
    deep, flat = (
        trained(BASE, job=dataclasses.replace(job(num_layers=num), steps=4, warmup=0)) for num in (6, 4)
    )
    assert [_times_the_floor(one).losses[0] for one in (flat, deep)] == pytest.approx([20, 30])


@pytest.mark.parametrize(("dtype", "times"), [("fp32", 20), ("bf16", 3), ("fp16", 40)])
def test_in_bf16_the_median_tensor_s_way_has_a_stricter_limit(dtype: str, times: float) -> None:
    """Copies of the weights without each matrix's last row end 4.5 times the floor away, honest runs within 1.1."""
    widened = _times_the_floor(trained(BASE, job=dataclasses.replace(job(dtype=dtype), steps=4, warmup=0)))
    assert widened.medians["way"] == pytest.approx(times)
    assert widened.medians["exp_avg"] == pytest.approx(20 if dtype == "fp32" else 40)


def _times_the_floor(reference: Record) -> limits.Limits:
    """Return the limits of a probe whose floor is 1."""
    floor = limits.Limits(
        [1.0],
        [1.0],
        {part: {"a": 1.0} for part in evidence.COMPARISONS},
        dict.fromkeys(evidence.COMPARISONS, 1.0),
    )
    return limits.probe_limits(floor, reference)


@pytest.mark.parametrize(("size", "reason"), [(1 + 1.4e-5, None), (1 + 6e-5, "gradient-scale")])
def test_a_second_moment_may_be_off_by_what_beta_rounds_in_fp32(size: float, reason: str | None) -> None:
    """DeepSpeed's Adam of a CPU was 1.3e-5 from the reference in every tensor."""
    reference, record = (
        trained(BASE),
        trained(BASE, tensors={"layers.0.fc1.weight": tensor(sha256="b", exp_avg_sq=size)}),
    )
    departure = departures.rounding_departure(Trial(record, reference, (reference,)), is_held_to_bits=False)
    assert (departure and departure.reason) == reason
