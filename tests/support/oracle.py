"""Trains models of transformers by plain PyTorch: tests hold the harness to the results. It imports nothing of this
project, and its numbers are written here by hand.

As a program it reads JSON from stdin: {"folder": a path, "configs": {family: the fields of a config.json}, "batches":
token ids, (steps, B, T + 1)}. For each family it writes FOLDER/FAMILY/weights, the starting weights as transformers
saves a model, and FOLDER/FAMILY/DTYPE-ATTENTION.safetensors, what trained() returns. FOLDER/modules.json names the
packages that it imported.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def started(config: dict[str, Any]) -> Any:
    """Return a model in fp32 with larger starting values than transformers draws, so that each convention shows in the
    logits; elements of norms and biases differ."""
    own = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        drawn = torch.randn(weight.shape, generator=generator)
        weight.data = 0.2 * drawn if weight.ndim > 1 else weight.data + 0.1 * drawn
    return model


def trained(folder: Path, dtype: str, attention: str, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Train the model in a folder on batches of token ids, (B, T + 1), by a plain loop: torch's default AdamW, decay of
    matrices alone, gradients clipped at a norm of 1, a rate that grows by 1/3200 a step, fp32 masters of the weights.
    Return, in fp32, logits (B, T, V) and gradients of the first step, each step's loss and gradient norm, and the
    trained masters."""

    def load(dtype: torch.dtype) -> Any:
        words = {"dtype": dtype, "attn_implementation": attention}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **words)  # without dropout
        for weight in model.parameters():
            # kernels of products round by the alignment of a matrix, which a mapped file does not keep
            weight.data = weight.data.clone()
        return model

    model = load(DTYPES[dtype])
    weights, masters = (dict(each.named_parameters()) for each in (model, load(torch.float32)))
    groups = [
        {"params": [master for master in masters.values() if master.ndim > 1], "weight_decay": 0.01},
        {"params": [master for master in masters.values() if master.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    found, losses, norms = dict[str, Tensor](), list[Tensor](), list[Tensor]()
    for step, tokens in enumerate(batches, start=1):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for name, weight in weights.items():
            masters[name].grad, weight.grad = weight.grad.float(), None
        if step == 1:
            found["logits"] = logits.detach()
            found |= {f"gradient {name}": master.grad.clone() for name, master in masters.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), 1.0))
        for group in optimizer.param_groups:
            group["lr"] = step / 3200
        optimizer.step()
        for name, weight in weights.items():
            weight.data.copy_(masters[name].data)
        losses.append(loss.detach())
    found |= {f"weight {name}": master.detach() for name, master in masters.items()}
    return found | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    order = json.load(sys.stdin)
    batches = torch.tensor(order["batches"])
    for family, config in order["configs"].items():
        folder = Path(order["folder"]) / family
        model = started(config)
        # a mixture keeps the matrices of all experts joined, as the model has them
        model.save_pretrained(folder / "weights", save_original_format=False)
        for attention in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
            for dtype in DTYPES:
                found = trained(folder / "weights", dtype, attention, batches)
                save_file(found, folder / f"{dtype}-{attention}.safetensors")
    packages = sorted({name.partition(".")[0] for name in sys.modules})
    (Path(order["folder"]) / "modules.json").write_text(json.dumps(packages))


if __name__ == "__main__":
    main()
