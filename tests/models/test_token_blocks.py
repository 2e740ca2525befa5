"""Layers in blocks of tokens: what they compute is the whole layer's, what they take is what plans say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from harness.core import anatomy, workload_costs
from harness.core.job import GIB, Room, Workload
from harness.core.method import create
from harness.devices.memory_account import Tracker
from harness.models import gpt, hub_model, named_models, token_blocks
from harness.models.model import new_layer
from harness.plan import block_sketch
from tests.methods.test_agree import difference
from tests.support.configured import FAMILIES, OTHERS, configured
from tests.support.training import small_bytes, train

AT_ONCE, TOKENS = 56, 64  # tokens of a block, and of a sample
TOKEN_FLOPS = 2 * 3 * 32 * 80  # of an MLP of three matrices
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("l2l", {}),
    ("stronghold", {"placement": "W3", "window_size": 1, "activations": "host"}),
    ("stronghold", {"placement": "R1W1S1", "window_size": 1}),
]
SIZES: list[tuple[str, str]] = [("llama", "fp32"), ("qwen2", "bf16")]


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for all sizes, of layers and of the loss."""
    inner = 80
    for module in (anatomy, hub_model):
        monkeypatch.setattr(module, "MOST_INNER_ELEMENTS", 0)
    for module in (anatomy, workload_costs, gpt):
        monkeypatch.setattr(module, "MOST_LOGITS", AT_ONCE * inner)


def layers(family: str, *, at_once: int, most: int = 0) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a layer, the same in blocks, and an input."""
    workload = configured(family)
    whole, blocks = (new_layer(workload, 0) for _ in range(2))
    torch.manual_seed(1)
    for name, weight in list(whole.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        values = 0.3 * torch.randn(weight.shape)
        for layer in (whole, blocks):
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(values.clone()))
    token_blocks.set_blocks(blocks, token_blocks.parts_of(blocks, workload.hidden_size), at_once, most)
    return whole, blocks, torch.randn(2, 16, workload.hidden_size, requires_grad=True)


def computed(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output of a checkpointed layer, and all gradients."""
    y = checkpoint(layer, x, use_reentrant=False)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    y.backward(dy)
    inputs = [x, *layer.parameters()]
    grads = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    return [y.detach(), *grads]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, pytest.param("mixtral", marks=pytest.mark.heavy)])
def test_a_layer_in_blocks_has_the_outputs_and_gradients_of_the_whole(family: str) -> None:
    whole, blocks, x = layers(family, at_once=7)
    for expected, in_blocks in zip(computed(whole, x), computed(blocks, x), strict=True):
        torch.testing.assert_close(in_blocks, expected, rtol=1e-4, atol=1e-5 * float(expected.norm()))


def test_so_it_has_under_autocast() -> None:
    whole, blocks, x = layers("llama", at_once=7)
    with torch.autocast("cpu", torch.bfloat16):
        for expected, in_blocks in zip(computed(whole, x), computed(blocks, x), strict=True):
            assert in_blocks.dtype == expected.dtype
            torch.testing.assert_close(in_blocks, expected, rtol=0.02, atol=0.01 * float(expected.norm()))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_mlp_and_norms_get_at_most_so_many_tokens_at_once(family: str) -> None:
    _, blocks, x = layers(family, at_once=7)
    seen: dict[str, list[int]] = {}
    for name, linear in blocks.mlp.named_children():
        if isinstance(linear, nn.Linear):
            linear.register_forward_hook(
                lambda _, args, y, name=name: seen.setdefault(name, []).append(y.shape[1])
            )
    blocks(x)
    assert [*seen.values()] == [[7, 7, 7, 7, 4]] * len(seen) and seen


def test_few_tokens_are_computed_at_once() -> None:
    whole, blocks, x = layers("llama", at_once=7, most=32)
    assert all(map(torch.equal, computed(whole, x), computed(blocks, x)))


def test_operations_are_those_of_one_more_forward_pass_of_what_blocks_compute() -> None:
    """But for the last block, which the layer's recompute stops before."""
    whole, blocks, x = layers("llama", at_once=8)
    flops = []
    for layer in (whole, blocks):
        with FlopCounterMode(display=False) as counter:
            computed(layer, x)
        flops.append(counter.get_total_flops())
    assert flops[1] - flops[0] == (32 - 8) * TOKEN_FLOPS


def test_an_mlp_that_mixes_tokens_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, x: forward(mlp, x.cumsum(1)))
    assert block_sketch.sketch(configured("llama"), AT_ONCE) is None


def test_a_layer_without_an_mlp_of_that_name_stays_whole() -> None:
    assert token_blocks.parts_of(nn.ModuleDict({"norm": nn.LayerNorm(8), "moe": nn.Linear(8, 8)}), 8) == []


@pytest.mark.parametrize(("family", "dtype"), SIZES)
def test_methods_have_the_bits_of_resident_in_blocks(family: str, dtype: str, in_blocks: None) -> None:
    workload = configured(family, dtype=dtype, seq_len=TOKENS, batch_size=6, micro_batches=2)
    blocks = workload.anatomy.kinds[0].blocks
    assert anatomy.block_tokens(workload) == AT_ONCE and blocks and blocks.token_flops == TOKEN_FLOPS
    resident = train("resident", workload, 2)
    for name, options in METHODS:
        assert difference(train(name, workload, 2, **options), resident) == ""


@pytest.mark.parametrize(("family", "dtype"), SIZES)
@pytest.mark.parametrize(("name", "options"), [*METHODS[:2], ("resident", {})])
def test_the_plan_is_the_peak_on_sim(
    name: str, options: dict[str, Any], family: str, dtype: str, in_blocks: None
) -> None:
    """The plan of resident training counts the top layer's input and output twice, and up to a twentieth of an input
    more, because it takes attention's memory from larger samples."""
    workload = configured(family, dtype=dtype, seq_len=TOKENS, batch_size=24)
    with Tracker() as tracker:
        train(name, workload, 2, device="sim", **options)
    peak, planned = tracker.stats()["device_peak"], create(name, options).plan(workload, Room()).device_bytes
    twice = 2.05 * workload.boundary_bytes if name == "resident" else 0
    assert peak <= planned <= peak + small_bytes(workload) + twice, (planned - peak, small_bytes(workload))


def test_a_sample_of_131072_tokens_fits_24_gib_with_one_layer_resident_at_a_time() -> None:
    load = Workload(**named_models.load("Llama-3.1-8B").sizes, seq_len=2**17, batch_size=1, dtype="bf16")
    options = {"placement": "W", "window_size": 1, "activations": "host", "ends": "host"}
    plan = create("stronghold", options).plan(load, Room())
    sizes = [
        round(num_bytes / GIB, 1)
        for num_bytes in (plan.device_bytes, load.layer_bytes, load.whole_layer_bytes)
    ]
    assert sizes == [14.2, 10.3, 34.6]


def test_sizes_of_published_figures_and_the_published_gpt_are_computed_whole() -> None:
    sizes = named_models.load("Llama-3.1-8B").sizes
    assert anatomy.block_tokens(Workload(**sizes, seq_len=1024, batch_size=32)) == 0
    assert anatomy.block_tokens(Workload(seq_len=2**17, batch_size=8)) == 0
