"""The norm of a gradient, by one sum and by blocks."""

from __future__ import annotations

import torch

from methods.offload.clip import norms_of


def test_a_norm_by_blocks_is_right_where_one_sum_is_not() -> None:
    values = torch.randn(3_219_456, generator=torch.Generator().manual_seed(1))
    right = float(values.double().norm())
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (whole,), (by_blocks,) = norms_of([values]), norms_of([values], in_blocks=True)
    finally:
        torch.set_num_threads(num_threads)
    assert abs(float(whole) / right - 1) > 1e-5
    assert abs(float(by_blocks) / right - 1) < 1e-6
