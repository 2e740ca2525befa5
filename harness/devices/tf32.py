"""Refuses TF32 in runs of fp32. TF32 rounds the factors of products to 10 bits of fraction and is several times as
fast, so runs with TF32 and runs without it cannot be compared."""

from __future__ import annotations

import os
from typing import Any

# Environment variables whose value 1 makes CUDA's libraries or torch compute matrix products of fp32 in TF32.
VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def tf32_settings() -> list[str]:
    """Return the settings that make this process compute matrix products on a GPU in TF32; empty if there are none."""
    import torch

    settings = [f"{name}=1" for name in VARIABLES if os.environ.get(name) == "1"]
    products: Any = torch.backends.cuda.matmul
    # torch before 2.9, which a rented machine may have, knows only the switch allow_tf32.
    name, tf32 = ("fp32_precision", "tf32") if hasattr(products, "fp32_precision") else ("allow_tf32", True)
    if getattr(products, name) == tf32:
        settings.append(f"torch.backends.cuda.matmul.{name}")
    return settings


def refuse_tf32(device: str, dtype: str) -> None:
    """Raise ValueError if the run is in fp32 on a GPU, but this process computes in TF32."""
    if (device, dtype) == ("cuda", "fp32") and (settings := tf32_settings()):
        raise ValueError(
            f"expected matrix products in fp32 for --dtype fp32, got TF32 by {' and '.join(settings)}; try without this"
            " setting, or --dtype bf16"
        )
