"""What ranks send to each other in a step, by hand, and the seconds that it takes over the link between devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from harness.core.job import Room, Workload
from harness.core.method import create, having
from harness.core.rates import NEEDED_FACTS, Rates, rates_from_facts
from harness.devices import named_machines
from harness.plan.resources import least_seconds, predict_step, rank_rates

LOAD = Workload(num_layers=4, hidden_size=64, num_heads=4, seq_len=32, batch_size=4, vocab_size=512)
BF16 = dataclasses.replace(LOAD, dtype="bf16")
PARTS = dataclasses.replace(LOAD, batch_size=8, micro_batches=4, dtype="bf16")
RATES = Rates(
    1e12,
    device_bytes_per_second=1e12,
    inbound_bytes_per_second=1e12,
    outbound_bytes_per_second=1e12,
    host_adam_params_per_second=1e12,
)
SLOW = dataclasses.replace(RATES, exchange_bytes_per_second=1e3)  # all else is nothing beside the exchange
LAYERS, ENDS, ALL = 4 * LOAD.layer_params, LOAD.end_params, LOAD.num_params
BOUNDARY = 4 * 4 * 32 * 64  # bytes of a layer's input, of the whole batch in fp32

# Bytes that a rank sends in a step, of 2 or 4: of each tensor 1/2 or 3/4 for a gather, twice that for a sum.
SENT: list[tuple[str, dict[str, Any], Workload, float]] = [
    ("zero-offload", {"world_size": 2}, LOAD, (1 + 2) * 4 * ALL / 2),
    ("zero-offload", {"world_size": 4}, BF16, (1 + 2) * 2 * ALL * 3 / 4),
    # Stage 2 sums gradients for each micro-batch, stages 0 and 1 after the last; stage 3 gathers weights for each, too.
    ("zero-offload", {"world_size": 2}, PARTS, (1 + 4 * 2) * 2 * ALL / 2),
    ("deepspeed", {"world_size": 2, "stage": 1}, PARTS, (1 + 2) * 2 * ALL / 2),
    ("deepspeed", {"world_size": 2, "stage": 1, "offload": "optimizer"}, PARTS, (1 + 2) * 2 * ALL / 2),
    ("deepspeed", {"world_size": 2, "stage": 3}, PARTS, 4 * 2 * (2 * LAYERS + ENDS + ALL) / 2),
    ("zero-infinity", {"world_size": 2}, PARTS, 4 * 2 * (2 * LAYERS + ENDS + ALL) / 2),
    ("zero-infinity-nvme", {"world_size": 2}, PARTS, 4 * 2 * (2 * LAYERS + ENDS + ALL) / 2),
    ("zero-infinity", {"world_size": 2}, LOAD, 4 * (2 * LAYERS + ENDS + ALL) / 2),
    ("zero-infinity-nvme", {"world_size": 4}, BF16, 2 * (2 * LAYERS + ENDS + ALL) * 3 / 4),
    ("fsdp2-offload", {"world_size": 2}, BF16, (2 * (2 * LAYERS + ENDS) + 4 * ALL) / 2),
    (
        "fsdp2-offload",
        {"world_size": 2},
        dataclasses.replace(BF16, micro_batches=2),
        2 * (2 * (2 * LAYERS + ENDS) + 4 * ALL) / 2,
    ),
    ("l2l", {"world_size": 2}, LOAD, 4 * (2 * LAYERS + LAYERS + 2 * ENDS) / 2),
    # Two of the six windowed layers' fetches are saved at the turn; a resident layer's gradient is summed whole.
    (
        "stronghold",
        {"world_size": 2, "placement": "R1W3", "window_size": 2},
        LOAD,
        4 * ((6 - 2 + 3) * LAYERS / 4 + 2 * (LAYERS / 4 + ENDS)) / 2,
    ),
    ("megatron-lm", {"world_size": 4}, BF16, 2 * 4 * ALL * 3 / 4),
    ("megatron-lm", {"world_size": 2, "distributed_optimizer": True}, BF16, (4 + 2) * ALL / 2),
    # Two sums in each layer's forward pass, recompute and backward pass, one at each end of the model.
    ("megatron-lm", {"world_size": 2, "tensor_parallel": 2}, LOAD, (6 * 4 + 2) * 2 * BOUNDARY / 2),
    # Activations up, and the sum of the embedding's gradients at both ends; the embedding's and the head's sum.
    ("megatron-lm", {"world_size": 2, "pipeline_parallel": 2}, LOAD, BOUNDARY + 2 * 4 * 512 * 64 / 2),
    (
        "megatron-lm",
        {"world_size": 4, "tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
        LOAD,
        (6 * 2 + 1) * 2 * BOUNDARY / 2 + BOUNDARY / 2 + 2 * 4 * 512 * 64 / 2 / 2,
    ),
]


@pytest.mark.parametrize(("name", "options", "workload", "sent"), SENT, ids=str)
def test_a_step_that_the_exchange_binds_takes_its_bytes_over_the_rate(
    name: str, options: dict[str, Any], workload: Workload, sent: float
) -> None:
    trained = create(name, options)
    plan = trained.plan(workload, Room())
    assert sum(plan.exchanged.values()) == pytest.approx(sent, rel=1e-3)  # parts end in padding
    forecast = predict_step(trained, workload, plan, SLOW, options["world_size"])
    assert (
        forecast.seconds == pytest.approx(sent / 1e3, rel=1e-3)
        and forecast.binds == "exchanges between ranks"
    )
    assert least_seconds(workload, plan, SLOW) == pytest.approx(sent / 1e3, rel=1e-3)


# 2 bytes of each: weights, then gradients of four micro-batches
MOVED: list[tuple[str, dict[str, Any], float]] = [
    # at the end the sum again, to the host's fp32 gradients
    ("zero-offload", {}, 2 * (ALL + (1 + 3 * 2 + 1) * ALL)),
    # one sum, to zeros from the host
    ("deepspeed", {"stage": 1, "offload": "optimizer"}, 2 * (ALL + 3 * ALL)),
    ("deepspeed", {"stage": 3, "offload": "optimizer"}, 2 * (ALL + (1 + 3 * 2) * ALL)),
    ("zero-infinity", {}, 2 * (4 * (2 * LAYERS + ENDS) + (1 + 3 * 2) * ALL)),
    ("zero-infinity-nvme", {}, 2 * (4 * 2 * ALL + 3 * 2 * ALL) + 2 * 12 * ALL),  # states: to and fro
]


@pytest.mark.parametrize(("name", "options", "moved"), MOVED, ids=str)
def test_deepspeed_fetches_weights_and_sums_gradients_on_the_host_for_each_micro_batch(
    name: str, options: dict[str, Any], moved: float
) -> None:
    """Gradients of a later micro-batch are added on the device, so their sum comes from the host and goes back."""
    assert create(name, options).plan(PARTS, Room()).moved_bytes == moved


@pytest.mark.parametrize("name", having("world_size"))
def test_one_rank_sends_nothing(name: str) -> None:
    """So its step is the same to the last digit, whatever the link."""
    trained = create(name, {})
    for workload in (LOAD, BF16):
        plans = [trained.plan(workload, Room(rates=rates)) for rates in (RATES, SLOW)]
        assert not any(sum(plan.exchanged.values()) for plan in plans)
        seconds = [
            predict_step(trained, workload, plan, rates)
            for plan, rates in zip(plans, (RATES, SLOW), strict=True)
        ]
        assert seconds[0] == seconds[1]


def test_gathers_that_hide_behind_compute_take_no_time_of_their_own() -> None:
    """By hand: of stronghold's exchange only the sums count, until the gathers take longer than compute."""
    trained = create("stronghold", {"world_size": 2, "placement": "W4", "window_size": 2})
    plan, load = trained.plan(LOAD, Room()), dataclasses.replace(LOAD, batch_size=2)
    exact = dataclasses.replace(
        RATES,
        inbound_bytes_per_second=math.inf,
        outbound_bytes_per_second=math.inf,
        device_bytes_per_second=math.inf,
        host_adam_params_per_second=math.inf,
    )
    compute, gathers, sums = load.flops_per_step / 1e12, plan.exchanged["gathers"], plan.exchanged["sums"]
    for factor, seconds in ((0.5, 1.0), (2.0, 2.0)):
        rates = dataclasses.replace(exact, exchange_bytes_per_second=gathers / (factor * compute))
        expected = seconds * compute + sums / rates.exchange_bytes_per_second
        assert predict_step(trained, LOAD, plan, rates, 2).seconds == pytest.approx(expected)


def test_ranks_on_a_cpu_share_its_exchange() -> None:
    on_host = dataclasses.replace(SLOW, is_host=True)
    assert rank_rates(on_host, 4).exchange_bytes_per_second == 1e3 / 4
    assert rank_rates(SLOW, 4).exchange_bytes_per_second == 1e3


def test_a_pipeline_s_messages_and_its_replicas_sums_take_the_link_s_time() -> None:
    """By hand: of two stages and a micro-batch of all samples, its activations up and their gradients down, which pass
    through the host; of two replicas the sum of all gradients, in fp32."""
    pipeline = {"world_size": 2, "num_stages": 2, "chunk_size": 4}
    replicas = {"world_size": 2, "num_stages": 1, "chunk_size": 2}
    slow = dataclasses.replace(SLOW, inbound_bytes_per_second=1e4, outbound_bytes_per_second=1e4)
    for options, sent in ((pipeline, 2 * BOUNDARY * (1 + 2 / 10)), (replicas, 2 * 4 * ALL / 2)):
        forecast = create("varuna", options).plan(LOAD, Room(rates=slow)).step_seconds
        assert forecast == pytest.approx(sent / 1e3, rel=1e-3)


def test_devices_without_a_link_of_their_own_exchange_over_the_link_to_the_host() -> None:
    rates = rates_from_facts(dict.fromkeys(NEEDED_FACTS, 2.0))
    assert rates and rates.exchange_bytes_per_second == 2e9
    desktop, server = (named_machines.load(name).rates("bf16") for name in ("rtx4090", "h100"))
    assert desktop and desktop.exchange_bytes_per_second == desktop.outbound_bytes_per_second == 25e9
    assert server and server.exchange_bytes_per_second == pytest.approx(0.8 * 450e9)
