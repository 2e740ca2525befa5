"""The norm of a gradient, by one sum and by blocks."""

from __future__ import annotations

import torch

from harness.devices.streams import Device
from methods.offload.clip import Clip, norms_of


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


def test_a_norm_so_far_is_within_the_limit_until_the_gradients_added_exceed_it() -> None:
    with Device("cpu", 1) as cpu:
        clip = Clip(cpu, 5.0)
        answers = []
        for norm in (3.0, 3.9, 1.0):  # squares add up to 9, 24.21 and 25.21
            clip.add([torch.tensor(norm)])
            answers.append(clip.is_within()())
    assert answers == [True, True, False]
