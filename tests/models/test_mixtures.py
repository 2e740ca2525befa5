"""Mixtures of experts by their config.json: what is counted, what is planned, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import model_types
from harness.core import hub_config
from harness.core.data import token_batches
from harness.core.job import Room, Workload
from harness.core.method import create
from harness.core.refusals import RefusedModel
from harness.devices.memory_account import Tracker
from harness.models import grouped_experts, hub_model, named_models, weight_files
from harness.models.hub_model import library
from harness.models.model import build, new_layer
from harness.plan import block_sketch, sketch
from tests.support.configured import config_of, configured
from tests.support.training import train

# Parameters of the published checkpoints, whole, and those that a token meets.
PUBLISHED = {
    "OLMoE-1B-7B-0924": (6_919_161_856, 1_282_017_280),
    "Mixtral-8x7B-v0.1": (46_702_792_704, 12_879_925_248),
    "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
}


def counted(config: dict[str, Any], num_experts: int) -> int:
    """Parameters by hand, with so many experts in each layer: RMS norms, grouped keys and values, gated experts and a
    router. OLMoE has norms over all queries and keys, Qwen3 norms of heads; gpt-oss has biases and a sink a head."""
    size, kind = config["hidden_size"], config["model_type"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    all_experts = config.get("num_experts", config.get("num_local_experts"))
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or size // heads
    queries, keys = heads * head, key_heads * head
    layer = 2 * size + 2 * size * (queries + keys) + all_experts * size + num_experts * 3 * size * inner
    if kind == "olmoe":
        layer += queries + keys
    if kind == "qwen3_moe":
        layer += 2 * head
    if kind == "gpt_oss":
        layer += queries + 2 * keys + size + heads + all_experts + num_experts * (2 * inner + size)
    ends = 2 * config["vocab_size"] * size + size
    return int(config["num_hidden_layers"] * layer + ends)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_mixture_has_the_parameters_of_its_checkpoint_and_a_token_meets_a_few_experts(name: str) -> None:
    model = named_models.load(name)
    assert isinstance(model, named_models.ConfiguredModel)
    config = model.config
    experts = config.get("num_experts", config.get("num_local_experts")), config["num_experts_per_tok"]
    assert tuple(counted(config, number) for number in experts) == PUBLISHED[name]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.heavy) for name in PUBLISHED])
def test_so_does_its_sketch_count(name: str) -> None:
    workload = Workload(**named_models.load(name).sizes, seq_len=16)
    assert (workload.num_params, workload.num_active_params) == PUBLISHED[name]


def test_operations_are_those_of_the_experts_that_a_token_meets() -> None:
    """Mixtral's layer: projections of queries, keys, values and the output, the router, and two of four experts."""
    size, inner, keys = 32, 48, 16
    by_hand = 2 * (2 * size * size + 2 * size * keys + 4 * size + 2 * 3 * size * inner)
    assert configured("mixtral").anatomy.kinds[0].token_flops == by_hand


def test_the_backward_pass_of_grouped_products_counts_twice_the_forward_pass() -> None:
    library()
    rows, matrices = torch.empty(6, 8, device="meta"), torch.empty(2, 8, 16, device="meta")
    rows.requires_grad_(), matrices.requires_grad_()
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.ops.transformers.grouped_mm_fallback(rows, matrices, offsets).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 8 * 16


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_expert_that_no_token_chose_gets_a_gradient_of_zeros_and_decays(dtype: str) -> None:
    workload = configured("mixtral", dtype=dtype, batch_size=1, seq_len=1, num_layers=1, learning_rate=1e-3)
    before = build(workload)
    before(*token_batches(workload, 1)[0]).backward()
    (weight,) = [weight for name, weight in before.named_parameters() if name.endswith("down_proj")]
    assert weight.grad is not None
    unused = (weight.grad == 0).flatten(1).all(1)
    assert int(unused.sum()) == 2  # of four experts one token chooses two
    for method in ("resident", "l2l"):
        trained = {state.name: state.weight for state in train(method, workload, 1).trained.tensors}
        start = dict(build(dataclasses.replace(workload, dtype="fp32")).named_parameters())
        (name,) = [name for name in trained if name.endswith("down_proj")]
        decayed = start[name][unused] * (1 - 0.01 * workload.learning_rate_at(1))
        torch.testing.assert_close(trained[name][unused], decayed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("method", "options"), [("l2l", {}), ("stronghold", {"placement": "R1W1S1", "window_size": 1})]
)
@pytest.mark.parametrize("tokens", [16, 256])
def test_the_plan_of_a_mixture_is_what_its_training_takes_on_sim(
    tokens: int, method: str, options: dict[str, Any], dtype: str
) -> None:
    """With few tokens the gradient of the experts' matrices is most of a layer's memory, with many the activations."""
    config = config_of("mixtral", hidden_size=64, intermediate_size=128, num_local_experts=16)
    text, sizes = hub_config.text_of(config), {"hidden_size": 64, "seq_len": tokens, "batch_size": 4}
    workload = configured("mixtral", config=text, **sizes, dtype=dtype)
    planned = create(method, options).plan(workload, Room()).device_bytes
    with Tracker() as account:
        train(method, workload, 2, device="sim", **options)
    assert planned == pytest.approx(account.stats()["device_peak"], rel=0.03)


def test_blocks_of_tokens_compute_the_experts_that_a_token_meets() -> None:
    """Mixtral's MLP: two of four gated experts, and the router."""
    assert hub_config.inner_size(hub_config.text_of(config_of("mixtral")), 32) == 2 * 48
    blocks = block_sketch.sketch(configured("mixtral"), 4)
    assert blocks is not None
    assert (blocks["parts"][0], blocks["token_flops"]) == ("mlp", 2 * (2 * 3 * 32 * 48 + 4 * 32))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mixtral", {"num_experts_per_tok": 3}),
        ("ernie4_5_moe", {"moe_k": 3, "moe_layer_start_index": 0}),
        ("aria_text", {"moe_topk": 3}),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": [2, 3]}),
        (
            "kimi_linear",
            {"num_experts_per_token": 3, "num_experts": 8, "num_expert_group": 1, "first_k_dense_replace": 0},
        ),
    ],
)
def test_inner_widths_count_the_chosen_experts_by_the_name_that_a_family_gives_their_number(
    kind: str, changes: dict[str, Any]
) -> None:
    config = {**json.loads(str(model_types.tiny(kind))), **changes}
    whole, widths = hub_model.transformers_model(config, torch.float32), list[int]()

    def when_routed(experts: Any, args: Any) -> None:
        widths.append(args[1].shape[-1] * experts.intermediate_dim)

    for experts in grouped_experts.experts_of(whole):
        experts.register_forward_pre_hook(when_routed)
    whole(torch.zeros((1, 4), dtype=torch.long), use_cache=False)
    assert hub_config.inner_size(hub_config.text_of(config), config["hidden_size"]) == max(widths)


@pytest.mark.parametrize("count", ["2", [2, "2"], 2.5, -1, True])
def test_a_number_of_experts_that_is_no_whole_number_is_refused(count: object) -> None:
    with pytest.raises(RefusedModel, match="expected num_experts_per_tok as a whole number from 0 to"):
        hub_config.checked_config(config_of("mixtral", num_experts_per_tok=count), "")


def test_tokens_are_counted_on_sim_as_on_a_cpu() -> None:
    workload = configured("mixtral", dtype="bf16")
    expected = train("resident", workload, 2).losses
    with Tracker():
        assert train("resident", workload, 2, device="sim").losses == expected


def test_a_router_adds_zeros_to_its_scores_where_transformers_starts_from_zeros() -> None:
    layer = new_layer(configured("deepseek_v3"), 1)
    buffers = dict(layer.named_buffers())
    assert [name.rpartition(".")[2] for name in buffers] == ["e_score_correction_bias"]
    assert torch.equal(next(iter(buffers.values())), torch.zeros(8))


def test_vectors_that_start_from_several_values_are_drawn_by_their_names() -> None:
    named = dict(build(configured("gpt_oss")).named_parameters())
    sinks = [weight for name, weight in named.items() if name.endswith("sinks")]
    assert len(sinks) == 3 and not torch.equal(sinks[0], sinks[1])
    assert all(0 < float(weight.detach().std()) < 0.1 for weight in sinks)


def test_biases_of_experts_start_from_zeros_as_in_transformers() -> None:
    named = dict(build(configured("gpt_oss")).named_parameters())
    biases = [weight for name, weight in named.items() if "experts" in name and name.endswith("bias")]
    assert biases and not any(weight.detach().any() for weight in biases)


def test_methods_of_matrices_alone_refuse_a_mixture_by_name() -> None:
    workload = configured("mixtral")
    for name, message in (
        ("zenflow", r"ZenFlow: expected matrices.* got mlp\.experts\.gate_up_proj"),
        ("megatron-lm", "expected a model of type llama, mistral, qwen2, qwen3, got mixtral"),
    ):
        with pytest.raises(ValueError, match=message):
            create(name, {}).plan(workload, Room())


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Workload:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return configured("qwen3_moe", weights=str(folder))


def test_weights_are_read_as_transformers_holds_them_in_memory(tmp_path: Path) -> None:
    causal = hub_model.transformers_model(config_of("qwen3_moe"), torch.float32)
    tensors = {name: weight.detach().clone() for name, weight in causal.named_parameters()}
    workload = write(tmp_path, tensors)
    weight_files.check(workload)
    assert all(torch.equal(weight, tensors[name]) for name, weight in build(workload).named_parameters())


def test_files_of_single_experts_are_refused_with_the_call_that_joins_them(tmp_path: Path) -> None:
    causal = hub_model.transformers_model(config_of("qwen3_moe"), torch.float32)
    tensors = {name: weight.detach().clone() for name, weight in causal.named_parameters()}
    for name in [name for name in tensors if "experts" in name]:
        for number, matrix in enumerate(tensors.pop(name)):
            tensors[name.replace("experts.", f"experts.{number}.") + ".weight"] = matrix.clone()
    with pytest.raises(
        ValueError, match=r"a tensor for each expert .*model\.state_dict\(\) of from_pretrained"
    ):
        weight_files.check(write(tmp_path, tensors))


def refusal(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    answer = sketch.answer(json.loads(hub_config.text_of(config)))
    code, values = answer.get("refused", ("", {}))
    return code, values


def test_a_loss_of_balanced_experts_is_refused() -> None:
    assert refusal(config_of("mixtral", output_router_logits=True))[0] == "balance-loss"


def test_routing_that_draws_random_numbers_is_refused() -> None:
    code, values = refusal(config_of("mixtral", router_jitter_noise=0.1))
    assert (code, values["fields"]) == ("random", "router_jitter_noise: 0")


def test_experts_that_do_not_run_without_memory_are_refused_by_the_name_of_their_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_experts, "has_memory", lambda tensor: True)
    code, values = refusal(config_of("mixtral"))
    assert (code, values["part"]) == ("mixture", "MixtralSparseMoeBlock")


def test_a_module_whose_buffers_transformers_does_not_start_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, device="meta"))
            self.table = nn.Buffer(torch.empty(2, device="meta"))

    causal = sketch.without_values(configured("mixtral"))
    assert not hub_model._start_buffers(causal, Odd())
