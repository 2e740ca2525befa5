"""Models by their config.json whose layers are unequal: what is counted and planned, and the bits of resident."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bench import model_types
from harness.core import hub_config
from harness.core.job import GIB, Job, Room, Workload
from harness.core.method import create
from harness.core.rates import Rates
from harness.devices import named_machines
from harness.devices.memory_account import Tracker
from harness.gate import probe
from harness.models import hub_model, weight_files
from harness.models.model import build
from harness.plan.fit import most_layers
from methods.pipeline.config.partition import gpt_stages
from methods.sharding.partition import model_shards
from methods.streaming.placement.planner import arrange_kinds
from tests.methods.test_agree import difference
from tests.support.configured import config_of, configured
from tests.support.training import train, train_resident

STEPS = 4
DEEPSEEK = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
}
# By name: the tiny family, the changes of its configuration, and the kind of each layer.
MIXED: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 1}, (0, 1, 1)),
    "deepseek_v2": (
        "llama",
        {
            "model_type": "deepseek_v2",
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "topk_method": "greedy",
        }
        | DEEPSEEK
        | EXPERTS,
        (0, 0, 1),
    ),
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 2}, (0, 0, 1)),
    "dots1": ("glm4_moe", {"model_type": "dots1", "first_k_dense_replace": 1}, (0, 1, 1)),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [1]}, (0, 1, 0)),
    "qwen3_moe": ("qwen3_moe", {"decoder_sparse_step": 2}, (0, 1, 0)),
}
# For each tiny family with a sliding window: the changes of its configuration that make samples longer than the window.
WINDOWS: dict[str, dict[str, Any]] = {
    **{family: {"sliding_window": 8} for family in ("gemma3", "gemma2", "gpt_oss", "mistral")},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}
# For each type with layers of attention between layers of a recurrence: the changes of its tiny configuration.
ALTERNATING = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": ALTERNATING,
    "qwen3_next": ALTERNATING
    | FEW_EXPERTS
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "jamba": FEW_EXPERTS | {"attn_layer_period": 3, "attn_layer_offset": 1},
}
QUICK = "qwen3_moe"
FAMILIES = [QUICK, *(pytest.param(name, marks=pytest.mark.heavy) for name in MIXED if name != QUICK)]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("l2l", {}),
    ("hydra", {"shard_layers": 1}),
    ("stronghold", {"placement": "W3", "window_size": 2}),
    ("stronghold", {"placement": "W3", "window_size": 1, "ends": "host", "activations": "host"}),
    ("stronghold", {"placement": "R1W1S1", "window_size": 1}),
    ("stronghold", {"placement": "P1S2", "window_size": 2, "clipping": "speculate"}),
]


def unequal(name: str, changes: dict[str, Any] | None = None, **sizes: Any) -> Workload:
    """A tiny model of unequal layers. `changes`: further changes of its configuration."""
    family, own, _ = MIXED[name]
    config = config_of(family, **own, **(changes or {}))
    return configured(
        family, **{**hub_config.sizes_of(config), "config": hub_config.text_of(config), **sizes}
    )


def whole_model(workload: Workload) -> torch.nn.Module:
    config = json.loads(str(workload.config)) | {"num_hidden_layers": workload.num_layers}
    with torch.device("meta"):
        return hub_model.transformers_model(config, torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_kinds_of_layers_and_parameters_are_those_of_transformers(name: str) -> None:
    workload = unequal(name)
    assert workload.anatomy.order == MIXED[name][2]
    named = {name: tuple(weight.shape) for name, weight in whole_model(workload).named_parameters()}
    anatomy = workload.anatomy
    assert {name: anatomy.shape_of(name) for name in anatomy.names(workload.num_layers)} == named
    assert workload.num_params == sum(map(math.prod, named.values()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_unequal_layers_have_the_bits_of_resident(name: str, dtype: str) -> None:
    workload = unequal(name, dtype=dtype)
    resident = train_resident(workload, STEPS)
    for method, options in METHODS:
        assert difference(train(method, workload, STEPS, **options), resident) == "", (method, options)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_of_attention_and_of_recurrences_have_the_bits_of_resident(kind: str, dtype: str) -> None:
    config = json.loads(str(model_types.tiny(kind))) | {"num_hidden_layers": 3} | HYBRIDS[kind]
    config = hub_config.checked_config(config, kind)
    sizes = {**hub_config.sizes_of(config), "seq_len": 16, "batch_size": 2, "learning_rate": 1.0}
    workload = Workload(**sizes, model=kind, config=hub_config.text_of(config), dtype=dtype)
    assert workload.anatomy.order == (0, 1, 0)
    assert workload.num_params == sum(weight.numel() for weight in whole_model(workload).parameters())
    resident = train_resident(workload, STEPS)
    for method, options in METHODS:
        assert difference(train(method, workload, STEPS, **options), resident) == "", (method, options)


def test_so_they_have_by_micro_batches_and_with_states_on_the_disk(tmp_path: Path) -> None:
    workload = unequal(QUICK, micro_batches=2)
    streamed = train("stronghold", workload, STEPS, placement="W1D2", window_size=2, disk=str(tmp_path))
    assert difference(streamed, train_resident(workload, STEPS)) == ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("method", "options"), [("resident", {}), *METHODS[:1], *METHODS[2:]])
@pytest.mark.parametrize("name", [QUICK, pytest.param("glm4_moe", marks=pytest.mark.heavy)])
def test_the_plan_is_what_the_training_takes_on_sim(
    name: str, method: str, options: dict[str, Any], dtype: str
) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 512, "moe_intermediate_size": 64}
    workload = unequal(name, wide, dtype=dtype, hidden_size=64, seq_len=256, batch_size=4)
    planned = create(method, options).plan(workload, Room()).device_bytes
    with Tracker() as account:
        train(method, workload, 2, device="sim", **options)
    assert planned == pytest.approx(account.stats()["device_peak"], rel=0.03)


def test_bytes_on_the_host_are_exact() -> None:
    """fp32 weights, gradients and two moments, with the number of steps of each layer and the clip factor."""
    workload = unequal(QUICK)
    plan = create("stronghold", {"placement": "R1W2", "window_size": 1}).plan(workload, Room())
    assert plan.host_bytes == 16 * sum(workload.layer_numels[1:]) + 512 + 2 * 4
    # each windowed layer comes in twice and its gradient goes home; the top one stays between both passes
    second, third = workload.layer_numels[1:]
    assert plan.moved_bytes == 4 * (3 * second + 2 * third)


def test_with_adapters_weights_come_in_once_for_a_layer_that_is_in_a_slot_at_a_turn() -> None:
    """In a window of one the top layer stays between both passes, and the lowest between two steps."""
    workload = unequal(QUICK, lora="4")
    plan = create("stronghold", {"placement": "R1W2", "window_size": 1}).plan(workload, Room())
    second, third = workload.layer_numels[1:]
    assert second != third
    assert plan.moved_bytes == 4 * (second + third)


def test_a_slot_is_as_large_as_the_largest_layer_that_passes_through_it() -> None:
    dense, sparse, _ = unequal(QUICK).layer_numels
    assert dense < sparse
    for placement, numel in (("W1R1W1", dense), ("R1W2", sparse)):
        plan = create("stronghold", {"placement": placement, "window_size": 1}).plan(unequal(QUICK), Room())
        assert (
            plan.device["buffers"] == 2 * 4 * numel
        )  # the slot, and the room for a gradient on its way home


def sliding(family: str, changes: dict[str, Any] | None = None, **sizes: Any) -> Workload:
    """A tiny model whose samples are four times as long as its sliding window."""
    config = config_of(family, **WINDOWS[family], **(changes or {}))
    return configured(family, **{"config": hub_config.text_of(config), "seq_len": 32, **sizes})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "family",
    ["gemma3", *(pytest.param(name, marks=pytest.mark.heavy) for name in WINDOWS if name != "gemma3")],
)
def test_samples_longer_than_a_sliding_window_have_the_bits_of_resident(family: str, dtype: str) -> None:
    workload = sliding(family, dtype=dtype)
    within = configured(family, seq_len=32, dtype=dtype)  # the same model with a longer window
    resident = train_resident(workload, STEPS)
    assert difference(train_resident(within, STEPS), resident).startswith("losses")
    for method, options in METHODS:
        assert difference(train(method, workload, STEPS, **options), resident) == "", (method, options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("mistral", "gpt_oss"))]
)
def test_the_plan_counts_masks_where_samples_are_longer_than_a_window(
    family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_model, "_parts", functools.lru_cache(hub_model.HubParts))  # masks not made before
    changes = {"max_position_embeddings": 1024, "hidden_size": 64, "head_dim": 16}
    workload = sliding(family, changes, hidden_size=64, seq_len=256, batch_size=4, dtype=dtype)
    planned = create("l2l", {}).plan(workload, Room()).device_bytes
    with Tracker() as account:
        train("l2l", workload, 2, device="sim")
    assert planned == pytest.approx(account.stats()["device_peak"], rel=0.07)


def test_attention_with_a_mask_computes_all_pairs_of_tokens() -> None:
    """Torch computes half of them without a mask: full attention is causal there."""
    full, masked = sliding("qwen2").anatomy.kinds
    assert sliding("qwen2").anatomy.order == (0, 1, 1) and masked.pair_flops == 2 * full.pair_flops
    assert configured("qwen2").anatomy.order == ()  # within the window all layers compute alike


def test_a_probe_is_beyond_the_window_if_the_run_is() -> None:
    workload = sliding("gemma3", seq_len=64, batch_size=8)
    small = probe.capped(workload)
    assert (small.seq_len, small.anatomy.fields["sliding_window"]) == (32, 16)
    assert probe.capped(configured("gemma3")).config == configured("gemma3").config


def test_weights_of_a_model_with_another_window_are_refused(tmp_path: Path) -> None:
    workload = sliding("gemma3")
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("gemma3", sliding_window=16)))
    causal = hub_model.transformers_model(json.loads(str(workload.config)), torch.float32)
    save_file(
        {name: weight.clone() for name, weight in causal.named_parameters()}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"a config\.json with sliding_window 16 instead of 8"):
        weight_files.check(dataclasses.replace(workload, weights=str(folder)))


def test_megatron_refuses_samples_longer_than_the_window() -> None:
    with pytest.raises(ValueError, match=r"expected samples within the model's sliding window.* try --seq 7"):
        create("megatron-lm", {}).plan(sliding("mistral"), Room())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_fewer_layers_are_the_first_of_the_configuration(num_layers: int) -> None:
    workload = unequal(QUICK, num_layers=num_layers)
    assert workload.layer_params == max(unequal(QUICK).layer_numels[:num_layers])
    assert workload.num_params == sum(weight.numel() for weight in whole_model(workload).parameters())


def test_more_layers_than_the_configuration_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"-l: expected at most 3 layers.* got 4; try -l 3"):
        unequal(QUICK, num_layers=4).num_params  # noqa: B018 computed for its error


def test_the_largest_depth_that_fits_is_at_most_the_configurations() -> None:
    assert most_layers(Job("l2l", unequal(QUICK)), Room(GIB, GIB)) == 3
    two = create("l2l", {}).plan(unequal(QUICK, num_layers=2), Room()).host_bytes
    assert most_layers(Job("l2l", unequal(QUICK)), Room(GIB, two)) == 2


def test_operations_are_the_sum_over_layers() -> None:
    """Forward, recompute and backward pass of each layer, and the head's three products."""
    workload = unequal(QUICK)
    dense, sparse = workload.anatomy.kinds
    layers = 2 * workload.flops_of(dense) + workload.flops_of(sparse)
    assert workload.flops_per_step == 4 * layers + workload.head_flops_per_step
    assert dense.token_flops - sparse.token_flops == 2 * 3 * 32 * (80 - 3 * 24) - 2 * 32 * 8


def test_the_probe_has_a_layer_of_each_kind() -> None:
    """Three dense layers are below the sparse ones, as in DeepSeek-V3."""
    config = config_of("deepseek_v3", num_hidden_layers=8, first_k_dense_replace=5)
    workload = configured("deepseek_v3", config=hub_config.text_of(config), num_layers=8)
    assert probe.depth_of(workload, probe.Extent()) == 6
    assert probe.depth_of(workload.at_depth(5), probe.Extent()) == 4


def rates_of(machine: str) -> Rates:
    rates = named_machines.load(machine).room.rates
    assert rates is not None
    return rates


def deep() -> Workload:
    """Twelve layers, the lower four dense and a few times as large as a sparse one."""
    config = config_of("glm4_moe", num_hidden_layers=12, first_k_dense_replace=4, intermediate_size=2048)
    return configured("glm4_moe", config=hub_config.text_of(config), num_layers=12, batch_size=1)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("shown", ["R4W8", "R8W4"])
def test_the_placement_is_about_as_fast_as_the_fastest_of_all_that_fit(shown: str, clip_norm: float) -> None:
    """Within the planner's slack, and what whole layers lose."""
    workload, rates = dataclasses.replace(deep(), clip_norm=clip_norm), rates_of("v100-vm")
    device_bytes = (
        create("stronghold", {"placement": shown, "window_size": 3}).plan(workload, Room()).device_bytes
    )
    room = Room(device_bytes, 16 * workload.num_params + 2**20, rates=rates)
    plan = create("stronghold", {"window_size": 3}).plan(workload, room)
    assert plan.shortfall(room) is None and plan.step_seconds
    clipping = "deferred" if clip_norm else None
    every = [
        create(
            "stronghold",
            {"placement": arrange_kinds(dict(zip("RPWS", counts, strict=True)), clipping), "window_size": 3},
        )
        for counts in itertools.product(range(13), repeat=4)
        if sum(counts) == 12
    ]
    plans = [one.plan(workload, room) for one in every]
    least = min(each.step_seconds or 0 for each in plans if each.shortfall(room) is None)
    assert plan.step_seconds <= 1.1 * least


def test_shards_hold_each_tensor_once() -> None:
    workload = deep()
    shards = model_shards(workload, 1)
    assert sum(shard.num_blocks for _, shard in shards) == 12
    held = sum(shard.num_bytes(workload, lambda numel, _: numel) for _, shard in shards)
    assert held == workload.num_params  # the head is not tied


def test_stages_hold_each_layer_once_and_the_longest_is_no_longer_than_another_cut() -> None:
    workload = deep()
    stages = gpt_stages(workload, 2)
    assert [*stages[0].layers, *stages[1].layers] == list(range(12))
    assert sum(stage.num_params(workload) for stage in stages) == workload.num_params
    assert stages[0].num_layers < 6  # the dense layers take longer


def test_files_of_weights_have_the_tensors_of_each_kind(tmp_path: Path) -> None:
    causal = hub_model.transformers_model(json.loads(str(unequal(QUICK).config)), torch.float32)
    tensors = {name: weight.detach().clone() for name, weight in causal.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    for num_layers in (3, 1):
        workload = unequal(QUICK, weights=str(tmp_path), num_layers=num_layers)
        weight_files.check(workload)
        named = build(workload).named_parameters()
        assert all(torch.equal(weight, tensors[name]) for name, weight in named)


def test_equal_layers_have_no_order_and_any_depth() -> None:
    workload = dataclasses.replace(configured("qwen3_moe"), num_layers=40)
    assert (workload.anatomy.order, workload.layer_numels) == ((), ())
    assert workload.num_params == workload.end_params + 40 * workload.layer_params
