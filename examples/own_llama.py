"""A Llama of transformers, streamed by STRONGHOLD: it trains on the source of Python's library.

.venv/bin/python examples/own_llama.py                            a small one, on a GPU or on the CPU
.venv/bin/python examples/own_llama.py --device-memory 2          on a GPU: as many resident layers as 2 GiB hold
.venv/bin/python examples/own_llama.py --placement R2W --micro-batches 4
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tarfile

import torch
from torch import Tensor

from methods.stronghold import StrongholdTrainer

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("error: this example needs transformers; try: ./run.sh setup")

WORDS = 128  # characters


def batch(step: int, batch_size: int, num_tokens: int, device: torch.device) -> Tensor:
    """Characters of a text, (B, T)."""
    codes = torch.tensor([min(ord(letter), WORDS - 1) for letter in inspect.getsource(tarfile)])
    starts = torch.randint(
        len(codes) - num_tokens, (batch_size,), generator=torch.Generator().manual_seed(step)
    )
    return torch.stack([codes[start : start + num_tokens] for start in starts]).to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--placement")
    parser.add_argument("--device-memory", type=float, help="GiB")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def loss_of(step: int) -> Tensor:
        tokens = batch(step, args.batch_size, args.tokens, device)
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss / args.micro_batches

    device_bytes = args.device_memory and int(args.device_memory * 2**30)
    trainer = StrongholdTrainer(
        model,
        model.model.layers,
        optimizer,
        max_norm=1.0,
        placement=args.placement,
        device_memory=device_bytes,
        example=lambda: loss_of(0),
        accumulates=args.micro_batches > 1,
    )
    print(
        f"placement {trainer.placement}, {sum(each.numel() for each in model.parameters()) / 1e6:.1f} M parameters"
    )
    with trainer:
        for step in range(args.steps):
            total = 0.0
            for part in range(args.micro_batches):
                loss = loss_of(step * args.micro_batches + part)
                loss.backward()
                total += float(loss.detach())
            norm = trainer.step()
            schedule.step()
            if step % 10 == 9 or step == args.steps - 1:
                print(f"step {step + 1}: loss {total:.4f}, gradient norm {float(norm):.3f}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
