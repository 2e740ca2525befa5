"""Our model in megatron-core: our attention in its layer, our weights in its shapes and in its ranks' parts, and,
without CUDA, stand-ins for the few calls to CUDA of its data-parallel buffers and optimizer.

megatron-core 0.16.1; docstrings name the lines that make these calls.
"""

from __future__ import annotations

import logging
import re
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

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex and Transformer Engine are absent
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megatron.core import parallel_state as parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import MegatronModule

NAMES = {
    "ends.wte.weight": "embedding.word_embeddings.weight",
    "ends.wpe.weight": "embedding.position_embeddings.weight",
    "ends.lnf": "decoder.final_layernorm",
    "ln1": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "ln2": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
OURS = {theirs: ours for ours, theirs in NAMES.items()}


def our_name(name: str, first_layer: int = 0) -> str:
    """The name in harness.core.gpt.GPT of a parameter of GPTModel, or of a stage of it that begins with this layer."""
    if name == "output_layer.weight":  # the last stage's copy of the embedding
        return "ends.wte.weight"
    if name in OURS:
        return OURS[name]
    match = re.fullmatch(r"(decoder\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match, name
    layer = f"layers.{first_layer + int(match[2])}." if match[1] else ""
    return f"{layer}{OURS[match[3]]}.{match[4]}"


def reordered(name: str, tensor: Tensor, num_heads: int, *, to_megatron: bool) -> Tensor:
    """The rows of a fused QKV are (3, heads, head size) with us and (heads, 3, head size) in Megatron; others as is."""
    if ".qkv." not in name:
        return tensor
    outer, inner = (3, num_heads) if to_megatron else (num_heads, 3)
    rows = tensor.view(outer, inner, tensor.shape[0] // (3 * num_heads), *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape)


def shard_dim(name: str) -> int | None:
    """Return the dimension in which tensor parallel ranks share a parameter; None: each has all of it."""
    if name == "ends.wte.weight" or ".qkv." in name or ".fc1." in name:
        return 0
    return 1 if name.endswith(("proj.weight", "fc2.weight")) else None


def whole_shape(name: str, shape: torch.Size) -> torch.Size:
    """Return the shape of a parameter of which a rank has a part of this shape."""
    num_parts, dim = parallel_state.get_tensor_model_parallel_world_size(), shard_dim(name)
    return torch.Size(size * num_parts if at == dim else size for at, size in enumerate(shape))


def shard_of(name: str, whole: Tensor, num_heads: int) -> Tensor:
    """Return this rank's part of a parameter of ours, in Megatron's order."""
    ordered, dim = reordered(name, whole, num_heads, to_megatron=True), shard_dim(name)
    if dim is None:
        return ordered
    num_parts, rank = (
        getattr(parallel_state, f"get_tensor_model_parallel_{what}")() for what in ("world_size", "rank")
    )
    return ordered.chunk(num_parts, dim)[rank]


def whole_of(name: str, shard: Tensor, num_heads: int) -> Tensor:
    """Return a parameter, or a state of it, in our order, from all ranks' parts. Each rank must call this."""
    num_parts, dim = parallel_state.get_tensor_model_parallel_world_size(), shard_dim(name)
    if num_parts > 1 and dim is not None:
        parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(num_parts)]
        dist.all_gather(parts, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        shard = torch.cat(parts, dim)
    return reordered(name, shard, num_heads, to_megatron=False)


def mark_shard(name: str, parameter: Tensor) -> None:
    """Tell Megatron that ranks share this parameter: where initialization is ours it does not, and its gradient norm
    would count the first rank's part alone."""
    parameter.tensor_model_parallel = shard_dim(name) is not None  # type: ignore[attr-defined]


def stage() -> int:
    """Return the number of this rank's stage in its pipeline."""
    number: int = parallel_state.get_pipeline_model_parallel_rank()
    return number


def pipeline_group() -> Any:
    """Return the ranks of this rank's pipeline, one of each stage."""
    return parallel_state.get_pipeline_model_parallel_group()


def forward_and_backward(model: Any, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Pass micro-batches, each (inputs, targets) of (B, T) token ids, through the model, or through the pipeline of
    which it is a stage; leave in the gradient buffers the mean's gradient. Return the mean loss of each micro-batch on
    the last stage, and nothing on others."""

    def mean_of(losses: Tensor) -> tuple[Tensor, Tensor]:
        mean = losses.float().mean()
        return mean, mean.detach().clone()  # Megatron divides the first one, in place, by the number of micro-batches

    def forward(pairs: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        inputs, targets = next(pairs)
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape)
        return model(inputs, positions, None, labels=targets), mean_of

    size, tokens = parts[0][0].shape
    passes = get_forward_backward_func()
    losses: list[Tensor] = passes(
        forward_step_func=forward, data_iterator=iter(parts), model=model, num_microbatches=len(parts),
        seq_length=tokens, micro_batch_size=size,
    )  # fmt: skip
    return losses


def range_of(optimizer: Any, parameter: Any) -> Any:
    """Return the elements of a flat parameter that this rank's distributed optimizer holds: start and end."""
    return optimizer._get_model_param_range_map(parameter)["param"]


def set_main(optimizer: Any, parameter: Any, start: Tensor) -> None:
    """Set the fp32 main weight, of which the distributed optimizer holds a part on this rank, or none."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(each, DistributedOptimizer):
            parameter.main_param.data.copy_(start)
        elif parameter in each.model_param_gbuf_map:
            held = range_of(each, parameter)
            parameter.main_param.data.copy_(start.flatten()[held.start : held.end])


def states_of(optimizer: Any, parameter: Any) -> list[Tensor]:
    """Return weight and both moments of a rank's parameter, in fp32; of the distributed optimizer each rank must call
    this."""
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    if not isinstance(optimizers[0], DistributedOptimizer):
        main = getattr(parameter, "main_param", parameter)
        state = next(each.optimizer.state[main] for each in optimizers if main in each.optimizer.state)
        return [main.detach(), state["exp_avg"], state["exp_avg_sq"]]
    slabs = [torch.zeros(parameter.numel(), device=parameter.device) for _ in range(3)]
    for each in optimizers:
        if parameter in each.model_param_gbuf_map:
            held, states = range_of(each, parameter), each._get_main_param_and_optimizer_states(parameter)
            for slab, name in zip(slabs, ("param", "exp_avg", "exp_avg_sq"), strict=True):
                slab[held.start : held.end] = states[name].detach().flatten()
    for slab in slabs:
        dist.all_reduce(slab, group=parallel_state.get_data_parallel_group())
    return [slab.view(parameter.shape) for slab in slabs]


class ShardedNorm(nn.LayerNorm):
    """A norm of a part of each sequence, whose gradients Megatron sums over the tensor parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


class FusedAttention(MegatronModule):
    """torch's scaled_dot_product_attention in the place of core attention: flash kernels on a GPU without Transformer
    Engine, where Megatron's own would hold (B, heads, T, T). query, key, value: (T, B, heads, head size)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class _OtherForCuda(TorchFunctionMode):
    """device='cuda' makes tensors on this device, .cuda() leaves them there, .type() says torch.cuda.*: assumed by
    param_and_grad_buffer.py:806, optimizer.py:473 and 671, clip_grads.py:90 and 167."""

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
    """Without CUDA, let Megatron's optimizer find this device where it looks for a CUDA device."""
    if device == "cuda":
        yield
        return
    with _OtherForCuda(device), mock.patch("torch.cuda.current_device", lambda: device):
        yield
