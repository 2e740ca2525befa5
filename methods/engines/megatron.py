"""Adapts the harness's model to megatron-core: puts torch's attention into Megatron's layer, converts weights to
Megatron's shapes and to each rank's part, and, without CUDA, replaces the few CUDA calls of Megatron's data-parallel
buffers and optimizer.

The installed version is megatron-core 0.16.1. The docstring of _OtherForCuda names its lines that make these CUDA
calls; releases since 0.12 make the same ones.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.core.job import Workload
from harness.models.grouped_heads import repeated, takes_groups
from harness.models.model import new_ends
from methods.engines.megatron_names import QKV, GptModelSizes, shared_dim

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ignore warnings that Apex and Transformer Engine are absent
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megatron.core import parallel_state as parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import MegatronModule


def join_tensors(name: str, gpt_tensors: Sequence[Tensor], sizes: GptModelSizes) -> Tensor:
    """Join the harness's tensors into GPTModel's tensor `name`; return it whole, not split over ranks.

    In GPTModel the rows of the fused QKV are ordered by groups of heads: each group's queries, then its key, then its
    value. In the harness all queries come first, then all keys, then all values; for the GPT they are one tensor. In
    the fused first two matrices of an MLP, each rank's part of the first matrix is followed by its part of the second.
    """
    if QKV in name:
        parts = gpt_tensors if len(gpt_tensors) == 3 else gpt_tensors[0].chunk(3)
        rows = [part.reshape(sizes.num_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(rows, 1).flatten(0, 1)
    if len(gpt_tensors) == 2:
        num_parts = parallel_state.get_tensor_model_parallel_world_size()
        chunks = [tensor.chunk(num_parts) for tensor in gpt_tensors]
        return torch.cat([part for parts in zip(*chunks, strict=True) for part in parts])
    return gpt_tensors[0]


def split_tensor(name: str, whole: Tensor, num_tensors: int, sizes: GptModelSizes) -> list[Tensor]:
    """Split a whole tensor of GPTModel into `num_tensors` tensors of the harness: the inverse of join_tensors()."""
    if QKV in name:
        groups = whole.view(sizes.num_groups, -1, *whole.shape[1:])
        rows = [sizes.num_heads // sizes.num_groups * sizes.head_size, sizes.head_size, sizes.head_size]
        parts = [part.flatten(0, 1) for part in groups.split(rows, 1)]
        return parts if num_tensors == 3 else [torch.cat(parts)]
    if num_tensors == 2:
        parts = list(whole.chunk(2 * parallel_state.get_tensor_model_parallel_world_size()))
        return [torch.cat(parts[::2]), torch.cat(parts[1::2])]
    return [whole]


def shard_of(name: str, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor of GPTModel, or the tensor itself if ranks do not split it."""
    if (dim := shared_dim(name)) is None:
        return whole
    num_parts = parallel_state.get_tensor_model_parallel_world_size()
    return whole.chunk(num_parts, dim)[parallel_state.get_tensor_model_parallel_rank()]


def gather_whole(name: str, shard: Tensor) -> Tensor:
    """Join all ranks' parts of a tensor of GPTModel, or of its optimizer state, and return the whole. All ranks must
    call this."""
    num_parts, dim = parallel_state.get_tensor_model_parallel_world_size(), shared_dim(name)
    if num_parts == 1 or dim is None:
        return shard
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(num_parts)]
    dist.all_gather(parts, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim)


def mark_shard(name: str, parameter: Tensor) -> None:
    """Mark a parameter for Megatron as split over ranks or not. Megatron marks only parameters that it initializes
    itself. Without the mark, Megatron's gradient norm would count only the first rank's part of a split parameter."""
    parameter.tensor_model_parallel = shared_dim(name) is not None  # type: ignore[attr-defined]


def inverse_frequencies(workload: Workload) -> Tensor:
    """Return, for each pair of a head's elements, the angle in radians by which rotary embedding turns the pair per
    token. The library transformers uses the same angles."""
    buffers = dict(new_ends(workload).named_buffers())
    return next(buffer.clone() for name, buffer in buffers.items() if name.endswith("rotary_emb.inv_freq"))


def stage_number() -> int:
    """Return the number of this rank's stage in its pipeline."""
    number: int = parallel_state.get_pipeline_model_parallel_rank()
    return number


def pipeline_group() -> Any:
    """Return the process group of this rank's pipeline, with one rank of each stage."""
    return parallel_state.get_pipeline_model_parallel_group()


def forward_and_backward(model: Any, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Pass micro-batches, each (inputs, targets) of (B, T) token ids, through the model, or through the pipeline of
    which it is a stage; leave the gradient of the mean loss in the gradient buffers. On the last stage return the mean
    loss of each micro-batch; on other stages return an empty list."""

    def mean_of(losses: Tensor) -> tuple[Tensor, Tensor]:
        mean = losses.float().mean()
        # Megatron divides the first mean, in place, by the number of micro-batches
        return mean, mean.detach().clone()

    def forward(pairs: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        inputs, targets = next(pairs)
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape)
        return model(inputs, positions, None, labels=targets), mean_of

    size, tokens = parts[0][0].shape
    passes = get_forward_backward_func()
    losses: list[Tensor] = passes(
        forward_step_func=forward,
        data_iterator=iter(parts),
        model=model,
        num_microbatches=len(parts),
        seq_length=tokens,
        micro_batch_size=size,
    )
    return losses


def held_range(optimizer: Any, parameter: Any) -> Any:
    """Return the start and end of the elements of a flat parameter that this rank's distributed optimizer holds."""
    return optimizer._get_model_param_range_map(parameter)["param"]


def set_main_weight(optimizer: Any, parameter: Any, start: Tensor) -> None:
    """Set a parameter's fp32 main weight to `start`. The distributed optimizer sets only the part of the main weight
    that this rank holds; a rank may hold no part."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(part, DistributedOptimizer):
            parameter.main_param.data.copy_(start)
        elif parameter in part.model_param_gbuf_map:
            rank_range = held_range(part, parameter)
            parameter.main_param.data.copy_(start.flatten()[rank_range.start : rank_range.end])


def parameter_states(optimizer: Any, parameter: Any) -> list[Tensor]:
    """Return, in fp32, the weight and both moments of one of this rank's parameters. If the optimizer is distributed,
    all ranks must call this."""
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    if not isinstance(optimizers[0], DistributedOptimizer):
        main = getattr(parameter, "main_param", parameter)
        state = next(part.optimizer.state[main] for part in optimizers if main in part.optimizer.state)
        return [main.detach(), state["exp_avg"], state["exp_avg_sq"]]
    slabs = [torch.zeros(parameter.numel(), device=parameter.device) for _ in range(3)]
    for part in optimizers:
        if parameter in part.model_param_gbuf_map:
            rank_range = held_range(part, parameter)
            states = part._get_main_param_and_optimizer_states(parameter)
            for slab, name in zip(slabs, ("param", "exp_avg", "exp_avg_sq"), strict=True):
                slab[rank_range.start : rank_range.end] = states[name].detach().flatten()
    for slab in slabs:
        dist.all_reduce(slab, group=parallel_state.get_data_parallel_group())
    return [slab.view(parameter.shape) for slab in slabs]


class ShardedNorm(nn.LayerNorm):
    """A LayerNorm that gets only this rank's part of each sequence. Megatron sums the gradients of the norm's
    parameters over the tensor parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


class RootMeanSquareNorm(nn.Module):
    """The norm of Llama, Mistral and Qwen, with the rounding of transformers: normalize in fp32, round to the dtype,
    then multiply by the weight. torch's own RMSNorm rounds once."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class FusedAttention(MegatronModule):
    """Calls torch's scaled_dot_product_attention in the place of Megatron's core attention. Without Transformer Engine,
    Megatron's attention would store a tensor (B, heads, T, T), while torch's attention has flash kernels on a GPU.
    query, key, value: (T, B, heads, head size)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if not takes_groups(key):
            key, value = (repeated(heads, query.shape[1]) for heads in (key, value))
        attention_options = {
            "is_causal": True,
            "dropout_p": self.dropout,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        mixed = F.scaled_dot_product_attention(query, key, value, **attention_options)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class _OtherForCuda(TorchFunctionMode):
    """Redirects Megatron's calls of CUDA to `device`: a tensor that Megatron makes with device='cuda' is made on
    `device`, .cuda() returns the tensor as it is, and .type() returns the name of a torch.cuda type. Megatron makes
    these calls in param_and_grad_buffer.py:806, optimizer.py:473 and 671, clip_grads.py:90 and 167."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = self.device
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return f"torch.cuda.{result.rpartition('.')[2]}"
        return result


@contextmanager
def cuda_questions_answered(device: str) -> Iterator[None]:
    """Inside this context Megatron's optimizer uses `device` wherever it asks for the CUDA device."""
    if device == "cuda":
        yield
        return
    with _OtherForCuda(device), mock.patch("torch.cuda.current_device", lambda: device):
        yield
