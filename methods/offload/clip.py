"""Gradient norms and clip factors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from harness.devices.streams import Device
from methods.offload.transfer import queue
from methods.shared.loss_scale import LossScale

BLOCK_NUMEL = 2**16  # elements of a block


def norms_of(grads: Sequence[Tensor], *, in_blocks: bool = False) -> list[Tensor]:
    """Return the norm of each gradient, in fp32, on the gradient's device. `in_blocks`: compute each norm from the
    norms of blocks of its gradient.

    Blocks are used on a CPU only. A CPU's core sums all squares of a tensor in one fp32 number for each vector lane, so
    the norm of a large embedding was off by 1e-3 (results/LOG.md). A GPU sums in a tree, which is more exact."""
    if not grads:
        return []
    if in_blocks and grads[0].device.type != "cuda":
        return [global_norm(norms_of(grad.flatten().split(BLOCK_NUMEL))) for grad in grads]
    return list(torch._foreach_norm([*grads], 2, dtype=torch.float32))


def global_norm(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients together, computed from the norm of each gradient. If the norms are in the
    model's order, the result has the bits of torch.nn.utils.clip_grad_norm_."""
    return torch.linalg.vector_norm(torch.stack([*norms])) if norms else torch.zeros(())


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor by which torch.nn.utils.clip_grad_norm_ scales gradients of this norm."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class Clip:
    """The global gradient norm of a step, and the factor that clips the gradients and undoes the loss scale.

    Norms are added layer by layer, in the order of the backward pass. If there is neither a limit nor a loss scale, no
    factor is computed and nothing waits for one. `max_norm`: the limit; 0: no limit. `scale`: the loss scale; None: no
    scale is used. `norm_order`: for each parameter of the model, the index of its norm in the list of all norms, in
    which the norms added last come first; None: this list is in the order of the model's parameters.
    """

    def __init__(
        self,
        device: Device,
        max_norm: float,
        scale: LossScale | None = None,
        norm_order: Sequence[int] | None = None,
    ) -> None:
        self.device, self.max_norm, self.norm_order = device, max_norm, norm_order
        # The factor of a step that is not clipped; None means 1.
        self.unclipped_factor = 1 / scale.value if scale and scale.is_used else None
        self.norms: list[list[Tensor]] = []
        # after each layer, the squared norm so far; kept because a copy may read it
        self.squares: list[Tensor] = []
        self.factor: Tensor | None = None
        self.host_factor: Tensor | None = None
        self.landed_event: Any = None  # end of the factor's copy to the host

    def add(self, norms: list[Tensor]) -> None:
        self.norms.append(norms)

    def is_within(self) -> Callable[[], bool]:
        """Compute the norm of all layers added so far, and queue its copy to the host. Return a function that waits for
        this copy and returns whether the norm is finite and within the limit.

        The norm grows with each further layer. Once it exceeds the limit, an update that speculated on no clipping is
        useless."""
        square = torch.stack(self.norms[-1]).square().sum()
        self.squares.append(square + self.squares[-1] if self.squares else square)
        square_on_host, landed_event = self._send(self.squares[-1])
        limit = (self.max_norm / (self.unclipped_factor or 1)) ** 2 or sys.float_info.max

        def is_within() -> bool:
            landed_event.synchronize()
            return float(square_on_host) <= limit

        return is_within

    def finish(self) -> None:
        """Compute the global norm of all added gradients, over all ranks, and the clip factor. The norm is summed in
        the order of the model's parameters."""
        norms = [*chain.from_iterable(reversed(self.norms))]
        norm = global_norm([norms[index] for index in self.norm_order] if self.norm_order else norms)
        self.total_norm = self.device.ranks.norm(norm)
        if self.unclipped_factor is not None:
            # The factor is a power of two here, so no bit is lost.
            self.total_norm = self.total_norm * self.unclipped_factor
        if self.max_norm:
            self.factor = clip_factor(self.total_norm, self.max_norm)
        if self.unclipped_factor is not None:
            factor = torch.ones_like(self.total_norm) if self.factor is None else self.factor
            # A factor of NaN marks a gradient that is not finite: the step is skipped.
            self.factor = torch.where(self.total_norm.isfinite(), factor * self.unclipped_factor, math.nan)

    def send_home(self) -> None:
        """Queue the copy of the factor to the host, for updates on the host."""
        if self.factor is not None:
            self.host_factor, self.landed_event = self._send(self.factor)

    def on_host(self) -> Tensor | None:
        """Wait for the factor's copy on the host and return this copy; None if there is no factor."""
        if self.host_factor is not None:
            self.landed_event.synchronize()
        return self.host_factor

    def is_one(self) -> bool:
        """Wait for the factor on the host; return True if the factor clips nothing."""
        factor = self.on_host()
        return factor is None or float(factor) == (self.unclipped_factor or 1)

    def overflows(self) -> bool:
        """Wait for the factor; return True if a gradient is not finite. Without a loss scale return False at once."""
        return self.unclipped_factor is not None and math.isnan(float(self.on_host()))  # type: ignore[arg-type]

    def _send(self, value: Tensor) -> tuple[Tensor, Any]:
        done = self.device.compute.record_event()
        return queue(self.device, "outbound", "norm", "", [done], lambda: value.to("cpu", non_blocking=True))
