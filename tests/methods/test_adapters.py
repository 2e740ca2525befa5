"""Adapters on frozen weights (--lora): every method trains them as the reference does, and the reference as peft and
transformers do in a plain loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from harness.core import hub_config
from harness.core.data import token_batches
from harness.core.job import Room, Workload
from harness.core.method import check, create
from harness.devices.memory_account import Tracker
from harness.models import model
from harness.models.gpt import initial
from harness.plan.resources import predict_step
from tests.plan.test_exchanges import RATES
from tests.support.configured import config_of, configured
from tests.support.training import TrainingResult, tiny, train, train_resident

STEPS = 4
DRAWN_BYTES = 2**19  # most bytes of the blocks of starting values that threads hold at one time
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("l2l", {}),
    ("stronghold", {}),
    ("stronghold", {"placement": "R1W2", "window_size": 1, "activations": "host"}),
]
FSDP2 = ("fsdp2-offload", {})
SIZES: dict[str, Workload] = {
    "GPT": tiny(num_layers=3, lora="4"),
    "qwen3": configured("qwen3", lora="4"),
    "gpt2": configured("gpt2", lora="4"),
    "mixtral": configured("mixtral", lora="4"),
    "llama, queries and values": configured("llama", lora="4:4", lora_targets="q_proj,v_proj"),
}


def bits(result: TrainingResult) -> dict[str, list[Any]]:
    return {
        state.name: [
            None if tensor is None else tensor.detach().float().tolist()
            for tensor in (state.weight, state.exp_avg, state.exp_avg_sq)
        ]
        for state in result.trained.tensors
    }


def of_dtypes(name: str) -> list[Any]:
    marks = [pytest.mark.heavy] * (name not in ("GPT", "qwen3"))
    return [
        pytest.param(name, dtype, marks=marks if dtype != "bf16" else [])
        for dtype in ("fp32", "bf16", "fp16")
    ]


@pytest.mark.parametrize(("method", "options"), [*WAYS, FSDP2], ids=str)
@pytest.mark.parametrize(("name", "dtype"), [pair for name in SIZES for pair in of_dtypes(name)])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.cover(2)
def test_adapters_are_trained_to_the_reference_s_bits_and_the_base_stays(
    name: str, dtype: str, micro_batches: int, method: str, options: dict[str, Any]
) -> None:
    load = dataclasses.replace(SIZES[name], dtype=dtype, micro_batches=micro_batches)
    expected, result = train_resident(load, STEPS), train(method, load, STEPS, **options)
    assert result[:2] == expected[:2] and bits(result) == bits(expected)
    drawn = dict(model.build(load).named_parameters())
    for state in result.trained.tensors:
        stayed = torch.equal(state.weight.float(), drawn[state.name].float())
        assert stayed is not load.anatomy.is_trained(state.name), state.name


def causal_with_adapters(load: Workload) -> Any:
    """The untouched model of peft and transformers, whose weights start at this project's values."""
    import peft
    import transformers

    config = hub_config.parsed(str(load.config))
    causal = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    for name, weight in causal.named_parameters():
        weight.data.copy_(initial(name, weight.shape, load))
    terms = load.adapters
    assert terms is not None
    names = list(terms.targets) or "all-linear"
    wrapped = peft.get_peft_model(
        causal,
        peft.LoraConfig(r=terms.rank, lora_alpha=terms.alpha, target_modules=names, task_type="CAUSAL_LM"),
    )
    for name, weight in wrapped.named_parameters():
        if weight.requires_grad:
            weight.data.copy_(initial(name.removeprefix("base_model.model."), weight.shape, load))
    return wrapped.eval()  # the file of GPT-2 asks for dropout


@pytest.mark.parametrize("name", ["qwen3", "llama, queries and values", "gpt2"])
def test_the_reference_trains_as_peft_and_transformers_do(name: str) -> None:
    load = SIZES[name]
    wrapped, losses = causal_with_adapters(load), []
    trained = {name: weight for name, weight in wrapped.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for step, (inputs, targets) in enumerate(token_batches(load, STEPS), start=1):
        logits = wrapped(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), load.clip_norm)
        optimizer.param_groups[0]["lr"] = load.learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result = train_resident(load, STEPS)
    assert result.losses == pytest.approx(losses, rel=1e-6)
    weights = {state.name: state.weight for state in result.trained.tensors}
    assert {name.removeprefix("base_model.model.") for name in trained} <= weights.keys()
    for name, weight in trained.items():
        torch.testing.assert_close(weights[name.removeprefix("base_model.model.")], weight.detach())


@pytest.mark.parametrize("name", SIZES)
def test_adapters_start_as_peft_starts_them(name: str) -> None:
    """A from Kaiming's uniform distribution with a slope of sqrt(5), B from zero; the base as without adapters."""
    load = SIZES[name]
    before = dict(model.build(dataclasses.replace(load, lora=None, lora_targets=None)).named_parameters())
    for full_name, weight in model.build(load).named_parameters():
        if ".lora_A." in full_name:
            bound = 1 / math.sqrt(weight.shape[1])
            assert 0.8 * bound < float(weight.detach().abs().max()) <= bound
            assert float(weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.3)
        elif ".lora_B." in full_name:
            assert not weight.any()
        else:
            assert torch.equal(weight, before[full_name.replace(".base_layer.", ".")])


def test_parameters_and_operations_are_counted_as_by_hand() -> None:
    size, rank, tokens = 36, 4, 32
    load, whole = SIZES["GPT"], dataclasses.replace(SIZES["GPT"], lora=None)
    of_layer = rank * ((size + 3 * size) + (size + size) + (size + 4 * size) + (4 * size + size))
    assert load.num_trained == 3 * of_layer and load.num_params == whole.num_params + load.num_trained
    matrices = 12 * size * size
    # forward pass and recompute, the gradient of the input, and the gradients of the adapters alone
    of_token = 2 * (2 + 1) * matrices + 2 * 4 * of_layer
    attention = 4 * 2 * size * load.seq_len
    assert load.flops_per_step == tokens * (3 * (of_token + attention) + 4 * size * load.vocab_size)


def test_a_forecast_counts_the_updates_of_adapters_alone() -> None:
    """In fp32 an update touches 28 bytes of the device's memory for each parameter: gradient and state are read, the
    state is written. All else takes no time at these rates."""
    rates = dataclasses.replace(RATES, device_bytes_per_second=1e3)
    resident = create("resident", {})
    forecast = predict_step(resident, SIZES["GPT"], resident.plan(SIZES["GPT"], Room()), rates)
    assert forecast.seconds == pytest.approx(28 * SIZES["GPT"].num_trained / 1e3, rel=1e-2)


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    assert tiny(lora="16") == tiny(lora="16:32") != tiny(lora="16:16")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"lora": "0"},
            "--lora: expected RANK or RANK:ALPHA, whole numbers from 1 on, got '0'; try --lora 16",
        ),
        ({"lora": "4:"}, "expected RANK or RANK:ALPHA"),
        ({"lora_targets": "qkv"}, "--lora-targets: expected --lora RANK beside it, got none; try --lora 16"),
        ({"lora": "4", "lora_targets": " ,"}, "--lora-targets: expected names as q_proj,v_proj, got ' ,'"),
        ({"lora": "4", "dropout": 0.1}, "--dropout: expected 0 with --lora: leave --dropout out"),
    ],
    ids=str,
)
def test_an_adapter_that_is_none_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        tiny(**changes)


def test_a_target_that_the_model_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        ValueError, match=r"expected linear layers of the GPT \(qkv, proj, fc1, fc2\), got q_proj"
    ):
        _ = tiny(lora="4", lora_targets="q_proj").num_params
    with pytest.raises(
        ValueError, match=r"expected linear modules of its layers \(mlp.down_proj, .*\), got fc1"
    ):
        _ = configured("llama", lora="4", lora_targets="fc1").num_params


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        (
            "stronghold",
            {"placement": "W2S1"},
            "expected only layers R and W with --lora, .*; try --placement W3",
        ),
        (
            "stronghold",
            {"ends": "host"},
            "ends: expected device with --lora, got host; try --option ends=device",
        ),
        ("l2l", {"ends": "host"}, "ends: expected device with --lora"),
    ],
    ids=str,
)
def test_a_home_that_frozen_layers_or_ends_do_not_have_is_refused(
    method: str, options: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        create(method, options).plan(SIZES["GPT"], Room())


def test_a_method_that_trains_no_adapters_names_those_that_do() -> None:
    with pytest.raises(
        ValueError,
        match="does not train adapters: leave --lora out, or try -m fsdp2-offload, l2l, resident, strong",
    ):
        check(create("megatron-lm", {}), SIZES["GPT"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("method", "options"), [("resident", {}), *WAYS], ids=str)
@pytest.mark.parametrize("family", [None, "qwen3"], ids=str)
@pytest.mark.cover(2)
def test_a_plan_is_what_the_training_takes_on_sim(
    family: str | None, method: str, options: dict[str, Any], dtype: str
) -> None:
    sizes = {"seq_len": 64, "batch_size": 4, "lora": "4", "dtype": dtype}
    load = tiny(hidden_size=128, num_heads=4, num_layers=3, **sizes)
    if family:
        config = config_of(family, hidden_size=128, intermediate_size=320, head_dim=32)
        text = hub_config.text_of(config)
        load = Workload(**{**hub_config.sizes_of(config), **sizes, "model": family, "config": text})
    plan = create(method, options).plan(load, Room())
    with Tracker() as tracker:
        train(method, load, 2, device="sim", **options)
    peaks = tracker.stats()
    assert peaks["device_peak"] <= plan.device_bytes <= 1.1 * peaks["device_peak"]
    if method != "resident":  # the starting values are drawn in blocks
        assert plan.host_bytes <= peaks["host_peak"] <= plan.host_bytes + DRAWN_BYTES
