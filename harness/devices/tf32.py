"""Refuses TF32 in runs of fp32: TF32 keeps 10 bits of each factor's fraction, and is several times as fast."""

from __future__ import annotations

import os
from typing import Any

# Environment variables that make CUDA's libraries, and torch, compute matrix products of fp32 in TF32.
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def asked() -> list[str]:
    """Return the settings that make this process compute matrix products on a GPU in TF32."""
    import torch

    found = [f"{name}=1" for name in VARIABLES if os.environ.get(name) == "1"]
    products: Any = torch.backends.cuda.matmul
    # torch before 2.9, which a borrowed GPU's machine may have, knows only the older switch.
    name, tf32 = ("fp32_precision", "tf32") if hasattr(products, "fp32_precision") else ("allow_tf32", True)
    if getattr(products, name) == tf32:
        found.append(f"torch.backends.cuda.matmul.{name}")
    return found


def check(device: str, dtype: str) -> None:
    """Raise ValueError if a run in fp32 will compute, or has computed, in TF32."""
    if (device, dtype) == ("cuda", "fp32") and (found := asked()):
        raise ValueError(
            f"expected matrix products in fp32 for --dtype fp32, got TF32 by {' and '.join(found)}; try without this"
            " setting, or --dtype bf16"
        )
