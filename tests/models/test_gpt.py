"""The model: as many parameters as the arithmetic says, a GPT by an independent forward pass, seeded by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from harness.core.data import token_batches
from harness.core.job import Workload
from harness.models import gpt
from harness.models.gpt import GPT, initial, is_decayed
from harness.models.model import build
from tests.support.training import plain_loss, plain_weights, tiny

WIDE = tiny(hidden_size=256, num_heads=4, num_layers=8)  # enough numbers to see a standard deviation
MATRICES = ("wte", "wpe", "qkv", "proj", "fc1", "fc2")


def meta(workload: Workload) -> GPT:
    """The model without memory."""
    with torch.device("meta"):
        return GPT(workload)


@pytest.mark.parametrize(
    "workload",
    [
        tiny(),
        tiny(num_layers=5, seq_len=7),
        tiny(hidden_size=8, num_heads=1, vocab_size=13),
        Workload(num_layers=100),
    ],
    ids=lambda workload: f"{workload.num_layers}-layers-{workload.hidden_size}-hidden",
)
def test_parameters_are_as_many_as_the_arithmetic_says(workload: Workload) -> None:
    assert sum(parameter.numel() for parameter in meta(workload).parameters()) == workload.num_params


def test_layer_parameters_are_as_many_as_the_arithmetic_says() -> None:
    assert sum(parameter.numel() for parameter in meta(Workload()).layers[0].parameters()) == 50_358_272


@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 5}, {"num_heads": 1}, {"batch_size": 1, "seq_len": 33}]
)
def test_loss_and_gradients_agree_with_an_independent_forward_pass(changes: dict[str, Any]) -> None:
    workload = tiny(**changes)
    inputs, targets = token_batches(workload, 1)[0]
    gpt = build(workload)
    loss = gpt(inputs, targets)
    loss.backward()
    weights = {name: value.requires_grad_() for name, value in plain_weights(workload).items()}
    plain = plain_loss(weights, inputs, targets, workload)
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert {name for name, _ in gpt.named_parameters()} == weights.keys()
    for name, parameter in gpt.named_parameters():
        difference = torch.linalg.vector_norm(parameter.grad - weights[name].grad)
        assert difference <= 1e-5 * torch.linalg.vector_norm(weights[name].grad), name


def test_short_inputs_take_the_first_positions() -> None:
    workload = tiny()
    inputs, targets = (tokens[:, :5] for tokens in token_batches(workload, 1)[0])
    plain = plain_loss(plain_weights(workload), inputs, targets, workload)
    assert build(workload)(inputs, targets).item() == pytest.approx(plain.item(), rel=1e-5)


def test_no_token_sees_a_later_one() -> None:
    workload = tiny()
    layer, x = (
        build(workload).layers[0],
        initial("ends.wte.weight", torch.Size((16, 36)), workload).unsqueeze(0),
    )
    changed = x.clone()
    changed[:, 9, 0] += 1
    moved = (layer(x) != layer(changed)).any(-1).flatten().tolist()
    assert moved == [False] * 9 + [True] * 7


def test_head_is_the_token_embedding() -> None:
    gpt, (inputs, targets) = build(tiny()), token_batches(tiny(), 1)[0]
    gpt(inputs, targets).backward()
    unseen = sorted(set(range(101)) - set(inputs.flatten().tolist()))
    assert (gpt.ends.wte.weight.grad[unseen] != 0).any(-1).all()  # only the head's gradient reaches them


def test_recompute_sees_the_dropout_of_the_forward_pass() -> None:
    workload = tiny(dropout=0.5)
    inputs, targets = token_batches(workload, 1)[0]
    recomputed, kept = build(workload), build(workload)
    torch.manual_seed(0)
    recomputed(inputs, targets).backward()
    torch.manual_seed(0)
    x = kept.ends.embed(inputs)
    for layer in kept.layers:
        x = layer(x)
    kept.ends.loss(x, targets).backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(recomputed.parameters(), kept.parameters(), strict=True)
    )


def test_decay_is_on_matrices_only() -> None:
    decayed = {
        name for name, parameter in meta(tiny(num_layers=1)).named_parameters() if is_decayed(parameter.shape)
    }
    ends, layer = {"ends.wte.weight", "ends.wpe.weight"}, {"qkv", "proj", "fc1", "fc2"}
    assert decayed == ends | {f"layers.0.{name}.weight" for name in layer}


def test_initial_values_are_a_function_of_name_and_seed_in_any_order() -> None:
    shapes = {name: parameter.shape for name, parameter in meta(tiny()).named_parameters()}
    onward = {name: initial(name, shapes[name], tiny()) for name in shapes}
    torch.manual_seed(99)
    backward = {name: initial(name, shapes[name], tiny()) for name in reversed(shapes)}
    assert all(torch.equal(onward[name], backward[name]) for name in shapes)


def test_initial_values_leave_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    initial("ends.wte.weight", torch.Size((3, 3)), tiny())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "seed"), [("layers.0.qkv.weight", 1), ("layers.1.qkv.weight", 0), ("layers.0.fc1.weight", 0)]
)
def test_initial_values_differ_by_name_and_by_seed(name: str, seed: int) -> None:
    shape = torch.Size((36, 36))
    first = initial("layers.0.qkv.weight", shape, tiny(seed=0))
    assert not torch.isclose(initial(name, shape, tiny(seed=seed)), first).all()


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_start_at_the_published_spread(name: str) -> None:
    # N(0, 0.02), what is added to the residual stream by 1/sqrt(2 L) of that; L = 8 here.
    std = 0.02 / math.sqrt(2 * 8) if name in ("proj", "fc2") else 0.02
    weights = [weight for path, weight in build(WIDE).named_parameters() if f".{name}.weight" in path]
    values = torch.cat([weight.detach().flatten() for weight in weights])
    error = 4 / math.sqrt(2 * len(values))  # four standard errors of a standard deviation, relative
    assert values.std().item() == pytest.approx(std, rel=error)
    assert values.mean().item() == pytest.approx(0, abs=4 * std / math.sqrt(len(values)))


def test_biases_start_at_zero_and_norms_at_one() -> None:
    vectors = {name: weight for name, weight in build(tiny()).named_parameters() if weight.ndim == 1}
    assert all((weight == (0 if name.endswith("bias") else 1)).all() for name, weight in vectors.items())


def test_bf16_model_is_the_fp32_one_rounded() -> None:
    rounded, exact = build(tiny(dtype="bf16")).named_parameters(), dict(build(tiny()).named_parameters())
    assert all(torch.equal(weight, exact[name].bfloat16()) for name, weight in rounded)


def test_loss_of_the_bf16_model_is_near_that_of_the_fp32_one() -> None:
    batch = token_batches(tiny(), 1)[0]
    assert build(tiny(dtype="bf16"))(*batch).item() == pytest.approx(build(tiny())(*batch).item(), rel=5e-3)


def test_loss_of_the_bf16_model_is_fp32() -> None:
    assert build(tiny(dtype="bf16"))(*token_batches(tiny(), 1)[0]).dtype == torch.float32


@pytest.mark.parametrize(
    "num_logits", [gpt.MOST_LOGITS, 7 * 101, 1], ids=["one block", "blocks", "token by token"]
)
def test_loss_in_blocks_of_tokens_is_torchs_cross_entropy(
    num_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt, "MOST_LOGITS", num_logits)
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, generator=generator).requires_grad_() for size in ((32, 36), (101, 36)))
    targets = torch.randint(0, 101, (32,), generator=generator)

    def loss_and_gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss, *torch.autograd.grad(3 * loss, (x, weight))]

    blocked = loss_and_gradients(gpt.HeadLoss.apply(x, weight, targets))
    whole = loss_and_gradients(torch.nn.functional.cross_entropy(x @ weight.t(), targets))
    torch.testing.assert_close(blocked, whole, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("numel", [1, 15, 64, 95, 127, 128, 129, 143, 1650])
def test_what_is_drawn_in_blocks_has_the_very_bits_of_what_is_drawn_at_once(numel: int) -> None:
    name, shape = "layers.1.fc2.weight", torch.Size((numel, 1))
    drawn = torch.empty(numel)
    for start, block in gpt.drawn_blocks(name, shape, tiny(), at_once=64):
        drawn[start : start + len(block)] = block
    assert torch.equal(drawn, gpt.initial(name, shape, tiny()).view(-1))


def test_what_is_drawn_ahead_comes_in_order() -> None:
    shapes = [(f"layers.{place}.fc1.weight", torch.Size((1 + 97 * (place % 5), 8))) for place in range(40)]
    for (name, shape), drawn in zip(shapes, gpt.initials(shapes, tiny()), strict=True):
        assert torch.equal(drawn, gpt.initial(name, shape, tiny()))
