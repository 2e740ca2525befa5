"""The masters: the fp32 weights that an optimizer updates, and their gradients. For an fp32 model the masters are the
model's own weights.

In mixed precision each micro-batch's gradient is added, in fp32, to the master's gradient as soon as it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from methods.pipeline.gradients import Groups
from methods.pipeline.shared_weights import Shared


class Masters:
    """The masters of a stage. `weights`: the stage's parameters by name. `starts`: for parameters in fp16 or bf16, the
    fp32 values before rounding; None: the masters start from the rounded values."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], starts: Mapping[str, Tensor] | None = None
    ) -> None:
        self.weights = dict(weights)
        self.by_name: dict[str, nn.Parameter] = {}
        for name, weight in self.weights.items():
            if weight.dtype == torch.float32:
                self.by_name[name] = weight
                continue
            start = weight.detach().float() if starts is None else starts[name]
            self.by_name[name] = nn.Parameter(start, requires_grad=weight.requires_grad)
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._adder(self.by_name[name]))
        self.versions = self._versions()

    @staticmethod
    def _adder(master: nn.Parameter):
        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

        return add

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: master for name, master in self.by_name.items() if master.requires_grad}

    def zero_grad(self) -> None:
        for master in self.by_name.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights that the model computes with."""
        pairs = [(weight, self.by_name[name]) for name, weight in self.weights.items()]
        rounded = [(weight, master) for weight, master in pairs if weight is not master]
        if rounded:
            torch._foreach_copy_([weight for weight, _ in rounded], [master for _, master in rounded])
        self.versions = self._versions()

    @torch.no_grad()
    def share(self, groups: Groups, shared: Sequence[Shared]) -> None:
        """Copy the first replica's weights to the other replicas. Then copy, for each pair of shared weights, the first
        weight to the second."""
        if groups.replicas:
            for master in self.by_name.values():
                dist.broadcast(master, groups.ranks.ranks[groups.stage][0], group=groups.replicas)
        for pair in shared:
            if pair.stage == pair.other_stage:
                self.by_name[pair.other].copy_(self.by_name[pair.name])
            elif groups.stage in (pair.stage, pair.other_stage):
                name = pair.name if groups.stage == pair.stage else pair.other
                source = groups.ranks.ranks[pair.stage][groups.replica]
                dist.broadcast(self.by_name[name], source, group=groups.pairs[pair])
        self.publish()

    def refuse_changed_weights(self) -> None:
        """Raise ValueError if a rounded weight was changed since publish(), which would lose the change."""
        if self.versions != self._versions():
            raise ValueError(
                "step: expected weights as the last update left them, got changed ones, whose fp32 masters would undo"
                " the change; try load_state_dict()"
            )

    def _versions(self) -> list[int]:
        return [weight._version for name, weight in self.weights.items() if weight is not self.by_name[name]]
