"""Models of transformers in a loop of one's own: streamed they have the bits of the script without streaming."""

from __future__ import annotations

import functools
import math
import re
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from harness.base.checkout import ROOT
from methods.l2l import L2LTrainer
from methods.stronghold import StrongholdTrainer

LAYERS, WORDS, TOKENS, STEPS = 4, 97, 24, 10
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "n_embd": 64,
    "n_layer": LAYERS,
    "n_head": 4,
    "vocab_size": WORDS,
    "n_positions": 64,
    "eos_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "head_dim": 16},
    "mistral": {**LLAMA, "head_dim": 16},
    "gemma3_text": {**LLAMA, "head_dim": 16, "sliding_window": 8},  # layers take unlike masks and angles
    "gpt2": GPT2,  # dropout
    "gpt_neox": {name: LLAMA[name] for name in LLAMA if name != "num_key_value_heads"},
    "mixtral": {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 2},
}
TRAINERS: dict[str, Callable[..., Any]] = {
    "l2l": L2LTrainer,
    "window": StrongholdTrainer,
    "mixed": functools.partial(StrongholdTrainer, placement="R1P1W1S1", window_size=1),
}


def new_model(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    return model.train()


def layers_of(model: nn.Module) -> Any:
    return next(
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == LAYERS
    )


def losses_of(model: nn.Module, step: Callable[[Tensor], Any]) -> list[tuple[float, float]]:
    """Return each step's loss and gradient norm."""
    generator, losses = torch.Generator().manual_seed(1), []
    torch.manual_seed(2)
    for _ in range(STEPS):
        tokens = torch.randint(WORDS, (2, TOKENS), generator=generator)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append((float(loss.detach()), float(step(loss))))
    return losses


def plain(kind: str, dtype: torch.dtype, clip: float) -> tuple[list[tuple[float, float]], list[Tensor]]:
    model = new_model(kind, dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = list(model.parameters())
    masters = (
        weights if dtype == torch.float32 else [nn.Parameter(weight.detach().float()) for weight in weights]
    )
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)

    def step(_: Tensor) -> Tensor:
        for master, weight in zip(masters, weights, strict=True):
            if master is not weight:
                master.grad, weight.grad = weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters, clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, [master.detach() for master in masters])
        return norm

    return losses_of(model, step), [weight.detach() for weight in weights]


oracle = functools.cache(plain)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.cover(2)
def test_bits_are_those_of_the_script_without_streaming(
    kind: str, dtype: torch.dtype, clip: float, trainer: str
) -> None:
    model = new_model(kind, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with TRAINERS[trainer](model, layers_of(model), optimizer, max_norm=clip, device="cpu") as streamed:
        streamed_losses = losses_of(model, lambda _: streamed.step())
    losses, weights = oracle(kind, dtype, clip)
    assert streamed_losses == losses
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_words_are_generated_between_steps(trainer: str) -> None:
    model, tokens = new_model("llama", torch.float32), torch.arange(5)[None]
    expected = model.eval().generate(tokens, max_new_tokens=4, do_sample=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with TRAINERS[trainer](model.train(), layers_of(model), optimizer, device="cpu"):
        assert torch.equal(model.eval().generate(tokens, max_new_tokens=4, do_sample=False), expected)


def test_a_cache_of_keys_and_values_is_refused_where_layers_are_recomputed() -> None:
    model, tokens = new_model("llama", torch.float32), torch.arange(5)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    streamed = StrongholdTrainer(model, layers_of(model), optimizer, device="cpu")
    with pytest.raises(
        ValueError, match=r"layer 0: expected no cache, .* got DynamicCache; try use_cache=False"
    ):
        model(input_ids=tokens, labels=tokens, use_cache=True)
    streamed.__exit__(ValueError, None, None)


def test_the_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "own_llama.py --layers 2 --width 32 --tokens 16 --steps 20 --placement R1W --micro-batches 2".split()
    )
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(ROOT / "examples" / "own_llama.py"), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 2 and losses[1] < losses[0] < math.log(128)
