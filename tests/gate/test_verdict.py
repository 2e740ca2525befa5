"""The gate on real training: what is right passes, each way of training wrongly fails for its own reason."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from harness.core.job import WEIGHT_DECAY, Job, Workload
from harness.core.record import Gate, Record
from harness.gate import departures
from harness.gate.evidence import Trial
from harness.gate.probe import Probe
from harness.gate.verdict import combine_verdicts, judge, needs_no_probe, with_probe
from harness.run import worker
from tests.support.planting import planted

# A learning rate at which eight steps of so small a model move its loss.
WORKLOAD = Workload(
    num_layers=4, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97, learning_rate=0.1
)
STEPS = 8

# One broken line each: file, the line as it is, the line as it must not be, the gate's reason.
MUTANTS = {
    "updates only the first row of each tensor": (
        "methods/offload/layout.py",
        "Piece(start, stop,",
        "Piece(start, start + shape[1:].numel(),",
        "partial-update",
    ),
    "skips one layer's update": (
        "methods/streaming/update_rules.py",
        "if isinstance(layer, self.timing.late_kinds):",
        "if isinstance(layer, self.timing.late_kinds) and layer is not self.layers[0]:",
        "unchanged",
    ),
    "clips by each layer's own norm": (
        "methods/streaming/layer_state.py",
        "step, factor)",
        "step, torch.clamp(1 / (torch.linalg.vector_norm(self.grads) + 1e-6), max=1.0))",
        "later",
    ),
    "drops the schedule on host layers": (
        "methods/streaming/layer_kinds.py",
        "self.state.update_when_landed(settings, clip)",
        f"self.state.update_when_landed([s._replace(learning_rate={WORKLOAD.learning_rate}) for s in settings], clip)",
        "update",
    ),
    "uses last step's weights once": (
        "methods/stronghold.py",
        "window.refill()  # fetches",
        "[each.fetch(window.slots[each]) for each in window.lowest[step == 3 :]]  # fetches",
        "later",
    ),
}


def trained(method: str, options: dict | None = None, folders: tuple[Path, ...] = (), **changes) -> Record:
    workload = dataclasses.replace(WORKLOAD, **changes)
    job = Job(method, workload, options or {}, steps=STEPS, warmup=1)
    record = worker.train_here(job, method, folders, lambda event: None)
    assert record.status == "ok", record.evidence
    return record


@functools.cache
def reference(**changes) -> Record:
    return trained("resident", **changes)


def verdict_on(text: str, **changes) -> Gate:
    file, right, wrong, _ = MUTANTS[text]
    with planted(file, right, wrong):
        return judge(trained("stronghold", {"window_size": 2}, **changes), reference(**changes))


@pytest.mark.parametrize("text", MUTANTS)
def test_wrong_training_fails_for_its_named_reason(text: str) -> None:
    verdict = verdict_on(text)
    assert (verdict.verdict, verdict.reason) == ("failed", MUTANTS[text][3]), verdict.text


def test_stale_weights_that_move_no_loss_are_seen_in_the_weights() -> None:
    verdict = verdict_on("uses last step's weights once", learning_rate=1e-5)
    assert (verdict.verdict, verdict.reason) == ("failed", "weights")


def test_the_same_method_loaded_afresh_passes_exactly() -> None:
    with planted("methods/stronghold.py", "layers = new_layers", "layers  = new_layers"):
        assert judge(trained("stronghold", {"window_size": 2}), reference()).verdict == "exact"


def test_bf16_passes() -> None:
    verdict = judge(trained("stronghold", {"window_size": 2}, dtype="bf16"), reference(dtype="bf16"))
    assert verdict.passed


@pytest.mark.parametrize(
    ("matrices", "vectors", "is_told"),
    [(1, 0, True), (0, 0, False), (5, 0, False), (-1, 0, False), (1, 1, False)],
)
def test_matrices_that_end_larger_by_what_decay_takes_are_told_as_without_decay(
    matrices: float, vectors: float, is_told: bool
) -> None:
    """Decay takes its rate times the learning rate off a matrix in each step, and nothing off biases and norms."""
    job = Job("planted", WORKLOAD, steps=STEPS)
    taken = WEIGHT_DECAY * sum(WORKLOAD.learning_rate_at(step) for step in range(1, STEPS + 1))
    ends = {"layers.0.qkv.weight": matrices, "layers.0.qkv.bias": vectors, "layers.0.ln1.weight": vectors}
    record, reference = (
        Record(
            job,
            "",
            "ok",
            tensors={
                name: {"changed": 1.0, "moved": 1.0, "size": 1 + times * share * taken}
                for name, share in ends.items()
            },
        )
        for times in (1, 0)
    )
    text = departures.missing_decay_text(record, reference)
    assert text.endswith("as without decay") == is_told and bool(text) == is_told


def test_weight_decay_on_norms_is_seen_in_where_the_weights_end_though_they_move_as_far() -> None:
    with planted("methods/offload/layout.py", "is_decayed(shape)", "True"):
        record = dataclasses.replace(trained("stronghold", {"window_size": 2}), bit_exact=False)
    verdict = judge(record, reference())
    assert (verdict.verdict, verdict.reason) == ("failed", "weights"), verdict.text


@pytest.mark.parametrize("learning_rate", [1e-5, 1.6e-5])
def test_weights_near_1_need_not_move_where_a_step_is_shorter_than_their_rounding(
    learning_rate: float,
) -> None:
    """At step 8 the rates are 2.5e-8 and 4e-8, of which a step of AdamW is a part; the floats beside 1 are 6e-8 below
    and 12e-8 above."""
    record = reference(learning_rate=learning_rate)
    assert not all(tensor["changed"] for tensor in record.tensors.values())
    assert judge(record, record).verdict == "exact"
    idle = {name: {**tensor, "exp_avg": 0.0} for name, tensor in record.tensors.items()}
    assert judge(dataclasses.replace(record, tensors=idle), record).reason == "unchanged"


def with_moments(record: Record, factor: float, of: str) -> Record:
    tensors = {
        name: {**tensor, "exp_avg": tensor["exp_avg"] * (factor if of in name else 1), "sha256": ""}
        for name, tensor in record.tensors.items()
    }
    return dataclasses.replace(record, tensors=tensors)


def test_a_gradient_that_cancels_in_bf16_may_differ_more_than_all_of_them() -> None:
    record = dataclasses.replace(reference(dtype="bf16"), bit_exact=False)
    assert judge(with_moments(record, 0.88, "layers.1.ln1.bias"), record).verdict == "tolerance"
    assert judge(with_moments(record, 0.5, "ends.wte"), record).reason == "gradient-scale"
    assert judge(with_moments(record, 0.9, ""), record).reason == "gradient-scale"


def test_a_nan_loss_fails_at_its_step() -> None:
    record = reference()
    losses = [*record.losses[:4], float("nan"), *record.losses[5:]]
    verdict = judge(dataclasses.replace(record, losses=losses), record)
    assert (verdict.reason, verdict.evidence["step"]) == ("not-finite", 5)


def test_a_missing_step_fails() -> None:
    record = reference()
    assert judge(dataclasses.replace(record, losses=record.losses[:-1]), record).reason == "incomplete"


def test_other_data_fails() -> None:
    assert judge(dataclasses.replace(reference(), data_sha256="other"), reference()).reason == "data"


def test_tensors_left_out_fail() -> None:
    tensors = dict(reference().tensors)
    del tensors["layers.0.fc1.weight"]
    assert judge(dataclasses.replace(reference(), tensors=tensors), reference()).reason == "missing"


def test_a_last_update_left_out_fails_though_all_losses_agree() -> None:
    tensors = {name: {**tensor, "sha256": "other"} for name, tensor in reference().tensors.items()}
    verdict = judge(dataclasses.replace(reference(), tensors=tensors), reference())
    assert (verdict.verdict, verdict.reason) == ("failed", "weights")


def test_a_method_that_promises_bits_is_not_let_off_with_a_tolerance() -> None:
    losses = [loss * (1 + 1e-7) for loss in reference().losses]
    near = dataclasses.replace(reference(), losses=losses)
    assert judge(near, reference()).verdict == "failed"
    assert judge(dataclasses.replace(near, bit_exact=False), reference()).verdict == "tolerance"


def test_what_did_not_finish_is_not_judged() -> None:
    assert judge(dataclasses.replace(reference(), status="oom-host"), reference()).verdict == "untested"


def test_a_twin_stands_in_where_the_reference_does_not_fit() -> None:
    deep = trained("l2l", num_layers=5)
    verdict = judge(deep, twins=(trained("l2l"), reference()))
    assert (verdict.verdict, verdict.evidence["twin_layers"]) == ("twin", 4)


def test_a_failing_twin_fails_what_it_stands_for() -> None:
    twin = dataclasses.replace(trained("l2l"), losses=[1.0] * STEPS)
    assert judge(trained("l2l", num_layers=5), twins=(twin, reference())).verdict == "failed"


def test_methods_that_disagree_at_a_size_without_reference_fail_there() -> None:
    deep = trained("l2l", num_layers=5)
    peer = dataclasses.replace(deep, losses=[loss * 1.01 for loss in deep.losses])
    assert judge(deep, twins=(trained("l2l"), reference()), peers=[peer]).reason == "peers"


def test_no_throughput_without_a_passing_gate() -> None:
    record = reference()
    assert dataclasses.replace(record, gate=judge(record, record)).samples_per_second is not None
    assert dataclasses.replace(record, gate=Gate("failed", "loss", "differs")).samples_per_second is None
    assert record.samples_per_second is None


def test_of_several_models_the_worst_one_is_the_verdict_and_named() -> None:
    good, bad = Gate("exact", "", "bit-equal"), Gate("failed", "loss", "loss 2 instead of 1")
    gate = combine_verdicts([good, bad, good])
    assert (gate.verdict, gate.reason) == (
        "failed",
        "loss",
    ) and gate.text == "model 2 of 3: loss 2 instead of 1"
    assert gate.evidence["models"] == ["exact", "failed", "exact"]
    assert combine_verdicts([good, good]).text == "each of 2 models: bit-equal"
    assert combine_verdicts([good]) is good


def test_a_run_of_whose_steps_none_was_trained_here_is_untested() -> None:
    resumed = dataclasses.replace(reference(), schedule={"resumed_steps": STEPS, "resumed_source": "a"})
    verdict = judge(resumed, reference())
    assert (verdict.verdict, verdict.reason) == ("untested", "no-step"), verdict.text


@pytest.mark.parametrize(
    ("source", "verdict"), [("here", "exact"), ("elsewhere", "untested"), ("", "untested")]
)
def test_steps_that_other_source_trained_are_untested(source: str, verdict: str) -> None:
    schedule = {"resumed_steps": 3, "resumed_source": source}
    resumed = dataclasses.replace(reference(), schedule=schedule, software={"source": "here"})
    assert judge(resumed, reference()).verdict == verdict


def test_a_run_of_code_that_its_identity_lacks_is_untested() -> None:
    record = dataclasses.replace(reference(), software={"unlisted": ["decay.py"]})
    verdict = judge(record, reference())
    assert (verdict.verdict, verdict.reason) == ("untested", "unlisted-code")
    assert verdict.text.startswith("it executed decay.py, which its identity lacks; import it by its name")


def of_code(record: Record, **software) -> Record:
    return dataclasses.replace(record, software=software)


def test_a_run_whose_code_changed_while_it_ran_is_untested_and_runs_again() -> None:
    record = of_code(reference(), changed=["decay.py"])
    verdict = judge(record, reference())
    assert (verdict.verdict, verdict.reason) == ("untested", "changed-code")
    assert verdict.text == "decay.py changed while it ran or waited; try the same call again"
    assert reference().is_lasting and not record.is_lasting


@pytest.mark.parametrize("name", ["changed", "unlisted"])
def test_a_reference_that_other_code_trained_is_none(name: str) -> None:
    verdict = judge(reference(), of_code(reference(), **{name: ["decay.py"]}))
    assert (verdict.verdict, verdict.reason) == ("untested", "no-reference")


def test_a_twin_that_other_code_trained_is_none() -> None:
    verdict = judge(
        of_code(reference(), source="new"), twins=(of_code(reference(), source="old"), reference())
    )
    assert (verdict.verdict, verdict.reason) == ("untested", "changed-code")


@pytest.mark.parametrize("software", [{"source": "old"}, {"source": "new", "changed": ["decay.py"]}])
def test_a_probe_that_other_code_trained_is_none(software: dict) -> None:
    trial = Trial(of_code(reference(), **software), reference())
    verdict = with_probe(Gate("exact"), of_code(reference(), source="new"), Probe((trial,)))
    assert (verdict.verdict, verdict.reason) == ("untested", "probe")


@pytest.mark.parametrize(
    ("is_exact", "verdict", "is_probed"),
    [
        (False, "exact", True),
        (False, "tolerance", True),
        (False, "twin", True),
        (False, "failed", False),
        (True, "failed", True),
    ],
)
def test_a_method_that_is_inexact_by_design_passes_only_with_a_probe(
    is_exact: bool, verdict: str, is_probed: bool
) -> None:
    record = dataclasses.replace(reference(), is_exact=is_exact)
    assert needs_no_probe(Gate(verdict, "update"), record) != is_probed


# Of WORKLOAD a layer's largest matrix has 32 x 128 elements of 4 bytes, its product with one sample of 16 tokens has
# 16 x 32 and 16 x 128 more; the tokens of 8 steps are 2 samples of 17, 16 and 16 of 8 bytes.
MATRIX, SAMPLE, TOKENS = 16384, 10240, 8 * 2 * 49 * 8


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [
        (MATRIX // 2, "untested"),
        (MATRIX + TOKENS, "untested"),  # a pad as large as a matrix
        (MATRIX + SAMPLE + TOKENS - 1, "untested"),
        (MATRIX + SAMPLE + TOKENS, "exact"),
    ],
)
def test_a_device_that_held_less_than_a_layer_s_largest_product_trained_nothing(
    peak: int, verdict: str
) -> None:
    elsewhere = dataclasses.replace(reference(), peaks={"device_allocated": peak})
    assert judge(elsewhere, reference()).verdict == verdict


def test_tokens_alone_are_no_training_however_many_there_are() -> None:
    """What the harness puts on the device for 1000 steps is larger than any matrix of this model."""
    job = dataclasses.replace(reference().job, steps=1000)
    losses = [1.0] * 1000
    idle = dataclasses.replace(
        reference(), job=job, losses=losses, grad_norms=[], peaks={"device_allocated": 1000 * 784}
    )
    assert judge(idle, idle).reason == "device"


@pytest.mark.parametrize(
    ("dtype", "kernels", "verdict"),
    [
        ("bf16", ["products in fp32"], "failed"),
        ("bf16", ["products in bf16", "products in fp32"], "exact"),
        ("bf16", ["fused_adamw"], "exact"),  # another thread's products, say: none was seen
        ("fp32", ["products in fp32"], "exact"),
    ],
)
def test_a_training_in_fp32_has_no_speed_in_half_precision(
    dtype: str, kernels: list[str], verdict: str
) -> None:
    """It is within what half precision rounds."""
    job = dataclasses.replace(reference().job, workload=dataclasses.replace(WORKLOAD, dtype=dtype))
    record = dataclasses.replace(reference(), job=job, kernels=kernels)
    assert judge(record, record).verdict == verdict


STATE = 12 * WORKLOAD.num_params  # weights and two moments in fp32


@pytest.mark.parametrize(
    ("host", "options", "verdict"),
    [
        (STATE - 1, {}, "untested"),
        (STATE, {}, "exact"),
        (STATE // 2, {"world_size": 2}, "exact"),
        (0, {"disk": "/ssd"}, "exact"),
    ],
)
def test_memories_that_never_held_weights_and_moments_are_no_budget_s_peaks(
    host: int, options: dict[str, Any], verdict: str
) -> None:
    """Arrays of numpy, say: the simulated device counts only tensors, so that any budget would hold any model."""
    job = dataclasses.replace(reference().job, device="sim", options=options)
    peaks = {
        "device_allocated": MATRIX + SAMPLE + TOKENS,
        "host_accounted": host - (MATRIX + SAMPLE + TOKENS),
    }
    assert judge(dataclasses.replace(reference(), job=job, peaks=peaks), reference()).verdict == verdict


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_may_share_a_matrix(num_ranks: int) -> None:
    job = dataclasses.replace(reference().job, options={"world_size": num_ranks})
    peaks = {"device_allocated": (MATRIX + SAMPLE) // num_ranks + TOKENS}
    assert judge(dataclasses.replace(reference(), job=job, peaks=peaks), reference()).verdict == "exact"
