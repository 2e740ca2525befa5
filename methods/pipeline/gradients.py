"""The fp32 weights that an optimizer updates (the masters), and their gradients, which are reduced over all ranks: sums
over replicas and over shared weights, and the global norm.

For an fp32 model the masters are the model's own weights. In mixed precision each micro-batch's gradient is added, in
fp32, to the master's gradient as soon as the gradient is computed.

Each micro-batch's loss is weighted by its share of the global batch, so only sums are needed. The norm is taken over
all stages, with each shared weight once. Every rank gets the same bits of the norm.

In fp16 all ranks therefore agree on an overflow: one gradient that is not finite makes the norm not finite on every
rank. A single process adds gradients in fp16, while ranks add them in fp32. For ranks to skip the same steps as a
single process, a sum that fp16 cannot hold counts here as not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.core.failures import naming_ranks
from methods.pipeline.config.partition import BUCKET_BYTES
from methods.pipeline.rank_map import RankMap
from methods.pipeline.transport import LostPeer


class SharedWeight(NamedTuple):
    """A weight that two stages share, or that one stage has under two names. The norm counts only the first name."""

    name: str
    other_name: str
    stage: int
    other_stage: int


class Groups:
    """The process groups in which ranks sum values: a stage's replicas, a replica's pipeline, two stages with a shared
    weight. All ranks must make this object, with the same arguments except `rank`. `limit_seconds`: longest wait for
    other ranks."""

    def __init__(
        self, rank_map: RankMap, rank: int, shared_weights: Sequence[SharedWeight], limit_seconds: float
    ) -> None:
        self.limit = timedelta(seconds=limit_seconds)  # given to each group in place of torch's default limit
        self.stage, self.replica = rank_map.stage_and_replica(rank)
        self.rank_map, self.rank = rank_map, rank
        self.replicas = self._make_own_group([list(replicas) for replicas in rank_map.ranks_by_stage])
        self.pipeline = self._make_own_group(
            [rank_map.pipeline(replica) for replica in range(rank_map.num_replicas)]
        )
        self.pairs = {}
        for pair in shared_weights:
            if pair.stage != pair.other_stage:
                ranks = rank_map.ranks_by_stage[pair.stage]
                other_ranks = rank_map.ranks_by_stage[pair.other_stage]
                groups = [sorted(pair_of_ranks) for pair_of_ranks in zip(ranks, other_ranks, strict=True)]
                self.pairs[pair] = self._make_own_group(groups)

    def _make_own_group(self, groups: list[list[int]]) -> Any:
        """Make a process group for each list of several ranks. Return the group that this rank is in; None: it is in no
        group."""
        own_group = None
        for members in groups:
            if len(members) > 1:
                group = dist.new_group(members, timeout=self.limit)
                own_group = group if self.rank in members else own_group
        return own_group


class Gradients:
    """The gradients of a rank. `masters`: this stage's trained weights by name. `names`: the names of all weights of
    the model, in the model's order. `dtype`: dtype of the computation; None: the weights' dtype."""

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        names: Sequence[str],
        groups: Groups,
        shared_weights: Sequence[SharedWeight],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.masters, self.groups, self.dtype = dict(masters), groups, dtype
        self.shared_weights = [
            pair for pair in shared_weights if groups.stage in (pair.stage, pair.other_stage)
        ]
        # If a weight is in two stages under the same name, the first stage counts it in the norm.
        repeated_names = {
            pair.name
            for pair in self.shared_weights
            if pair.name == pair.other_name and groups.stage != pair.stage
        }
        self.written_names = [name for name in self.masters if name not in repeated_names]
        uncounted = repeated_names | {
            pair.other_name
            for pair in self.shared_weights
            if pair.other_stage == groups.stage and pair.name != pair.other_name
        }
        index_of_name = {name: index for index, name in enumerate(names)}
        self.counted_names = [name for name in self.masters if name not in uncounted]
        self.norm_indices = torch.tensor(
            [index_of_name[name] for name in self.counted_names], dtype=torch.long
        )
        self.num_names = len(names)
        # gradients of the last step, with their versions
        self.step_grads: list[tuple[Tensor | None, int]] = []

    def reduce(
        self, loss: Tensor, check_numbers: Tensor, scale: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the gradients over all ranks that have the weights, and divide the sums by `scale`, the loss scale. Leave
        the results in the masters' gradients; a weight that no pass has used has none. Return the loss of the global
        batch, the gradient norm, and the sum of all ranks' `check_numbers`.

        `loss`: a scalar, the sum of the losses of this rank's micro-batches; 0 on all stages but the last.
        `check_numbers`: the numbers of MeanCheck.
        """
        has_grad = torch.tensor(
            [master.grad is not None for master in self.masters.values()], dtype=torch.float32
        )
        lacks_grad = not has_grad.all()
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        numbers = torch.cat([loss.detach().float().reshape(1), check_numbers, has_grad.to(loss.device)])
        if self.groups.replicas:
            for bucket in _yield_buckets([*grads, numbers]):
                _sum_bucket(bucket, self.groups.replicas)
        loss, check_numbers, has_grad = numbers.split([1, len(check_numbers), len(has_grad)])
        self._sum_shared()
        is_finite = self._are_finite()
        if scale != 1.0:
            torch._foreach_div_(grads, scale)
        loss_norm_and_checks = self._norm(torch.cat([loss, check_numbers]), is_finite)
        if lacks_grad:
            # an optimizer skips weights without a gradient, but would decay weights with a gradient of zeros
            shared_names = {name for pair in self.shared_weights for name in (pair.name, pair.other_name)}
            for (name, master), has_gradient in zip(self.masters.items(), has_grad.tolist(), strict=True):
                master.grad = master.grad if has_gradient or name in shared_names else None
        return loss_norm_and_checks

    def _are_finite(self) -> Tensor | None:
        """Return, for each gradient counted in the norm, whether it is finite in fp16, which rounds values beyond its
        range to infinity. Return None in other dtypes, or if there is no gradient."""
        grads = self._counted_gradients()
        if self.dtype != torch.float16 or not grads:
            return None
        return torch.stack([*torch._foreach_norm(grads, math.inf)]).half().isfinite()

    def _counted_gradients(self) -> list[Tensor]:
        return [grad for name in self.counted_names if (grad := self.masters[name].grad) is not None]

    def _sum_shared(self) -> None:
        for pair in self.shared_weights:
            if pair.stage == pair.other_stage:
                first_master, second_master = self.masters[pair.name], self.masters[pair.other_name]
                if first_master is not second_master:
                    assert first_master.grad is not None and second_master.grad is not None
                    first_master.grad += second_master.grad
                    second_master.grad.copy_(first_master.grad)
                continue
            own_master = self.masters[pair.name if self.groups.stage == pair.stage else pair.other_name]
            assert own_master.grad is not None
            all_reduce(own_master.grad, self.groups.pairs[pair])

    def _norm(self, numbers: Tensor, is_finite: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of the global batch, the gradient norm and MeanCheck's numbers. All come from one vector,
        which is summed over stages: the gradient norm of each weight, in the model's order, the loss and MeanCheck's
        numbers. `numbers`: the loss and MeanCheck's numbers. `is_finite`: False for a weight: its norm counts as
        infinite; None: all are finite."""
        grads = self._counted_gradients()
        norms_and_numbers = torch.zeros(self.num_names + len(numbers), device=numbers.device)
        if grads:
            norms = torch.stack([*torch._foreach_norm(grads, 2, dtype=torch.float32)])
            norms_and_numbers[self.norm_indices.to(numbers.device)] = (
                norms if is_finite is None else norms.where(is_finite, math.inf)
            )
        norms_and_numbers[self.num_names :] = numbers
        if self.groups.pipeline:
            all_reduce(norms_and_numbers, self.groups.pipeline)
        _, loss, check_numbers = norms_and_numbers.split([self.num_names, 1, len(numbers) - 1])
        return loss.clone(), torch.linalg.vector_norm(norms_and_numbers[: self.num_names]), check_numbers

    def remember(self) -> None:
        """Remember the gradients of a step, by their versions, until forget()."""
        self.step_grads = [(master.grad, _grad_version(master.grad)) for master in self.masters.values()]

    def forget(self) -> None:
        """Release the gradients of the last step, because a plan counts the gradients of one step alone."""
        self.step_grads = []

    def refuse_changes(self) -> None:
        """Raise ValueError if a script has changed gradients since remember(). A change such as clipping would be
        wrong, because a rank has the gradients of its stage alone."""
        for master, (grad, version) in zip(self.masters.values(), self.step_grads, strict=False):
            if master.grad is not grad or _grad_version(grad) != version:
                raise ValueError(
                    "optimizer.step(): expected the gradients that step() left, of one stage of the model, got changed"
                    " ones; try step(inputs, clip_grad_max_norm=...)"
                )
        self.forget()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), max_norm, norm)


def _grad_version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


def all_reduce(tensor: Tensor, group: Any) -> None:
    """Sum the tensor, in place, over the ranks of a group. Raises LostPeer, which names the group's other ranks, if a
    rank takes no part."""
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        other_ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        reason = " ".join(str(error).split())
        text = f"rank {' or '.join(map(str, other_ranks))} took no part in a sum: look at its log ({reason})"
        raise naming_ranks(LostPeer(text), other_ranks) from error


def _yield_buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors that are summed together, each of at most BUCKET_BYTES. A larger tensor is alone in its
    list."""
    bucket: list[Tensor] = []
    bucket_bytes = 0
    for tensor in tensors:
        if bucket and bucket_bytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append(tensor)
        bucket_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _sum_bucket(tensors: list[Tensor], group: Any) -> None:
    if len(tensors) == 1:
        all_reduce(tensors[0], group)
        return
    joined_tensor = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce(joined_tensor, group)
    for tensor, summed_slice in zip(
        tensors, joined_tensor.split([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(summed_slice.view_as(tensor))


class Masters:
    """The masters of a stage. `weights`: the stage's parameters by name. `starting_values`: for parameters in fp16 or
    bf16, the fp32 values before rounding; None: the masters start from the rounded values."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], starting_values: Mapping[str, Tensor] | None = None
    ) -> None:
        self.weights = dict(weights)
        self.by_name: dict[str, nn.Parameter] = {}
        for name, weight in self.weights.items():
            if weight.dtype == torch.float32:
                self.by_name[name] = weight
                continue
            starting_value = weight.detach().float() if starting_values is None else starting_values[name]
            self.by_name[name] = nn.Parameter(starting_value, requires_grad=weight.requires_grad)
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._gradient_adder(self.by_name[name]))
        self.versions = self._versions()

    @staticmethod
    def _gradient_adder(master: nn.Parameter):
        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

        return add

    def trained_masters(self) -> dict[str, nn.Parameter]:
        return {name: master for name, master in self.by_name.items() if master.requires_grad}

    def zero_grad(self) -> None:
        for master in self.by_name.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights that the model computes with."""
        pairs = [(weight, self.by_name[name]) for name, weight in self.weights.items()]
        rounded_pairs = [(weight, master) for weight, master in pairs if weight is not master]
        if rounded_pairs:
            torch._foreach_copy_(
                [weight for weight, _ in rounded_pairs], [master for _, master in rounded_pairs]
            )
        self.versions = self._versions()

    @torch.no_grad()
    def share(self, groups: Groups, shared_weights: Sequence[SharedWeight]) -> None:
        """Copy the first replica's weights to the other replicas. Then copy, for each pair of shared weights, the first
        weight to the second."""
        if groups.replicas:
            for master in self.by_name.values():
                dist.broadcast(master, groups.rank_map.ranks_by_stage[groups.stage][0], group=groups.replicas)
        for pair in shared_weights:
            if pair.stage == pair.other_stage:
                self.by_name[pair.other_name].copy_(self.by_name[pair.name])
            elif groups.stage in (pair.stage, pair.other_stage):
                name = pair.name if groups.stage == pair.stage else pair.other_name
                source = groups.rank_map.ranks_by_stage[pair.stage][groups.replica]
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
