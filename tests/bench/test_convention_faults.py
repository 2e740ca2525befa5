"""The gate's probe sees each convention of models by their config.json that a training takes otherwise."""

from __future__ import annotations

import functools

import pytest

from bench import convention_faults, gate_power, routing_faults
from bench.gate_power import PowerCase
from harness.core.record import Record
from harness.gate import departures
from harness.gate.evidence import Trial
from tests.support.configured import configured

# By a family that has a convention, the faults that break it: each fault once, since each family takes a reference and
# a floor of roundings.
BROKEN = {
    "llama3.1": [
        "rotated neighbours",
        "angles of base 10,000",
        "angles not scaled",
        "gate and up projection swapped",
        "keys and values swapped",
        "queries of the next group of keys",
        "tanh GELU for SiLU",
        "norm epsilon 1e-6",
    ],
    "qwen2": ["biases of queries left out"],
    "qwen3": [
        "scores scaled by the hidden size",
        "queries and keys not normalized",
        "one norm over all heads",
        "queries and keys normalized after the rotation",
        "angles rounded to bf16",
    ],
    "gpt_neox": [
        "whole heads rotated",
        "attention and MLP one after the other",
        "tanh GELU for GELU",
        "rows of queries, keys and values not head by head",
    ],
    "gemma2": [
        "scores not capped",
        "logits not capped",
        "tokens not scaled",
        "scores scaled by the head size",
        "norms' weights not counted from one",
        "GELU for tanh GELU",
    ],
    "granite": [
        "tokens not multiplied",
        "residuals not multiplied",
        "logits not divided",
    ],
    "olmo2": ["a norm for each head", "norms before attention and MLP"],
    "smollm3": ["every layer rotated"],
    "mixtral": [*routing_faults.FAULTS],
}
TOKENS = {"qwen3": 64}  # of a sample: angles that are merely rounded show in long ones
STEPS = 4  # of a probe: each of these faults shows in the forward pass
QUICK = {"llama3.1", "qwen2", "qwen3"}  # a floor of roundings for each further family takes seconds


def case_of(family: str, dtype: str = "fp32", **options: str) -> PowerCase:
    size = configured(family, seq_len=TOKENS.get(family, 16))
    return PowerCase(
        "planted", options, {}, dtype, gate_power.SEEDS[0], options.get("fault", ""), size, STEPS
    )


@functools.cache
def honest(family: str) -> tuple[Record, Record]:
    """The reference's training of a family, and those that round otherwise."""
    case = case_of(family)
    return trained(case.reference()), trained(case.rounded())


def trained(case: PowerCase) -> Record:
    return gate_power.train(case.probe(case.dtype))


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        pytest.param(
            family, fault, id=f"{family}: {fault}", marks=[pytest.mark.heavy] * (family not in QUICK)
        )
        for family in BROKEN
        for fault in BROKEN[family]
    ],
)
def test_a_convention_taken_otherwise_is_seen(family: str, fault: str) -> None:
    reference, rounded = honest(family)
    trial = Trial(trained(case_of(family, fault=fault)), reference, tuple(rounded.models()))
    assert departures.rounding_departure(trial, is_held_to_bits=False) is not None


def test_without_a_fault_the_training_is_the_reference_s() -> None:
    reference, rounded = honest("qwen3")
    trial = Trial(trained(case_of("qwen3")), reference, tuple(rounded.models()))
    assert departures.rounding_departure(trial, is_held_to_bits=True) is None


@pytest.mark.parametrize(
    "options", [{"fault": "norms rounded after their weight alone"}, {"rounding": "plain-attention"}], ids=str
)
def test_a_norm_or_a_softmax_rounded_otherwise_in_bf16_is_seen_where_bits_are_promised(
    options: dict[str, str],
) -> None:
    reference = trained(case_of("llama3.1", "bf16").reference())
    trial = Trial(trained(case_of("llama3.1", "bf16", **options)), reference)
    assert departures.rounding_departure(trial, is_held_to_bits=True) is not None


@pytest.mark.heavy
def test_another_choice_among_experts_of_the_same_score_is_no_fault() -> None:
    reference, rounded = honest("mixtral")
    trial = Trial(
        trained(case_of("mixtral", fault=next(iter(routing_faults.TIES)))), reference, tuple(rounded.models())
    )
    assert departures.rounding_departure(trial, is_held_to_bits=False) is None


def test_a_mixture_of_two_layers_has_no_layer_for_the_faults_of_routing() -> None:
    assert routing_faults.of(configured("mixtral", num_layers=2)) == {}


@pytest.mark.heavy
def test_every_convention_of_these_families_is_tried() -> None:
    known = {fault for family in BROKEN for fault in convention_faults.of(configured(family))}
    assert known <= {fault for faults in BROKEN.values() for fault in faults}
