"""Megatron-LM (Shoeybi et al. 2019): the fast way to train what fits, on one device or several; megatron-core's own
GPT.

GPTModel with its own layers, gradient buffers and optimizer with fp32 main weights; every layer recomputed. Upstream
code but for attention, which is torch's fused kernel, and on a CPU a few answers about CUDA (engines/megatron.py).
Groups of `tensor_parallel` ranks share each matrix; several groups take a part of every batch each.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec

from harness.core.job import BETAS, EPSILON, INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW, WEIGHT_DECAY, Plan, Room, Workload
from harness.core.method import Method, Step, TensorState, Trained, Training, Unavailable
from methods.shared.data_parallel import rank_part
from methods.shared.memory_needs import describe

NEEDS_MEGATRON = "megatron-lm needs megatron-core: pip install megatron-core==0.16.1"


@dataclass(frozen=True)
class MegatronLM(Method):
    world_size: int = 1  # ranks
    tensor_parallel: int = 1  # ranks that share each matrix
    sequence_parallel: bool = False  # they share what lies between the matrices, too
    distributed_optimizer: bool = False  # groups of them share the optimizer's states

    label = "Megatron-LM"
    color = "#E7D6EF"
    paper = "Shoeybi et al. 2019, arXiv:1909.08053; megatron-core"
    can_rehearse = True
    scales_loss = True
    drops_alike = False

    def plan(self, workload: Workload, room: Room) -> Plan:
        num_groups = self._num_groups(workload)
        part, size = rank_part(workload, num_groups), workload.weight_bytes
        params = _rank_params(workload, self.tensor_parallel)
        stepped = -(-params // num_groups) if self.distributed_optimizer else params
        main = 0 if size == 4 else 4  # fp32 main weights
        optimizer, activations = (8 + main) * stepped, self._activation_bytes(part)
        if 4 * stepped > activations:  # torch's AdamW takes all tensors at once: one more fp32 copy while it steps
            optimizer, activations = optimizer + 4 * stepped, 0
        states = {"weights": size * params, "gradients": 4 * params, "optimizer": optimizer}  # gradients sum up in fp32
        return Plan({**states, "activations": activations})

    def _num_groups(self, workload: Workload) -> int:
        """Return the number of data parallel groups. Raises ValueError if the ranks or the model do not divide."""
        shared = self.tensor_parallel
        if shared < 1 or self.world_size % shared:
            raise ValueError(f"tensor_parallel: expected a divisor of --ranks {self.world_size}, got {shared}")
        for name in ("num_heads", "vocab_size", *(["seq_len"] if self.sequence_parallel else [])):
            if getattr(workload, name) % shared:
                raise ValueError(
                    f"tensor_parallel: expected a divisor of {name} {getattr(workload, name)}, got {shared}"
                )
        if self.sequence_parallel and shared == 1:
            raise ValueError("sequence_parallel: expected tensor_parallel above 1, got 1; try tensor_parallel=2")
        return self.world_size // shared

    def _activation_bytes(self, workload: Workload) -> int:
        """Beside the states, at the fullest moment of the two passes."""
        boundary, size = workload.boundary_bytes, workload.weight_bytes
        logits = workload.batch_size * workload.seq_len * workload.vocab_size // self.tensor_parallel
        embedding = workload.vocab_size * workload.hidden_size // self.tensor_parallel
        # Its loss works in the logits' place; in bf16 beside their fp32 copy.
        head = 3 * boundary + max(4 * logits + size * embedding, (4 if size == 4 else 6) * logits)
        tied = 3 * size * embedding + 2 * boundary  # the tied embedding's two gradients and their sum, at the end
        kept = workload.num_layers * boundary // (self.tensor_parallel if self.sequence_parallel else 1)
        return max(kept + max(head, workload.layer_bytes), tied)

    def missing(self, device: str) -> str | None:
        return None if find_spec("megatron") else NEEDS_MEGATRON

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = describe(workload, "upstream: megatron-core", "megatron-core's, over torch AdamW without Apex, device")
        recompute = "every layer, megatron-core's" if device == "cuda" else row["recompute"]
        return {**row, "model": "megatron.core GPTModel", "recompute": recompute}

    def train(self, workload: Workload, batches, device: str) -> Training:
        import torch
        import torch.distributed as dist

        try:
            from harness.devices.exchange import join_alone, join_others
            from methods.engines.megatron import cuda_questions_answered, finalize_model_grads, parallel_state
        except ImportError as error:
            raise Unavailable(NEEDS_MEGATRON) from error

        num_groups = self._num_groups(workload)
        join_alone(device) if self.world_size == 1 else join_others(device)
        try:
            parallel_state.initialize_model_parallel(self.tensor_parallel)
            group, data_group = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_group()
            with cuda_questions_answered(device):
                model, optimizer = _build(self, workload, device)
            is_scaled = workload.dtype == "fp16"
            positions = torch.arange(workload.seq_len, device=device).expand(workload.batch_size // num_groups, -1)
            for step, (inputs, targets) in enumerate(batches, start=1):
                with cuda_questions_answered(device):
                    model.zero_grad_buffer()
                    optimizer.zero_grad()
                    mine, labels = (tokens.chunk(num_groups)[group] for tokens in (inputs, targets))
                    loss = model(mine, positions, None, labels=labels).float().mean()
                    scale = float(optimizer.get_loss_scale())
                    (loss * scale).backward()
                    finalize_model_grads([model])
                    for settings in optimizer.param_groups:
                        settings["lr"] = workload.learning_rate_at(step)
                    is_good, norm, _ = optimizer.step()
                mean = loss.detach() / num_groups
                if num_groups > 1:
                    dist.all_reduce(mean, group=data_group)
                ended = Step(mean, torch.as_tensor(norm if is_good else math.inf))
                yield ended._replace(loss_scale=scale, is_skipped=not is_good) if is_scaled else ended
            with cuda_questions_answered(device):
                return Trained(list(_states(workload, model, optimizer)))  # all ranks gather them
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _rank_params(workload: Workload, tensor_parallel: int) -> int:
    """Return the parameters of a rank: its part of each matrix and of the embedding, and all norms, the biases after a
    sum and the positions."""
    whole = (6 * workload.num_layers + 2 + workload.seq_len) * workload.hidden_size
    return whole + -(-(workload.num_params - whole) // tensor_parallel)


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _build(method: MegatronLM, workload: Workload, device: str):
    """GPTModel with our weights, in gradient buffers, and Megatron's optimizer."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from harness.core.gpt import DTYPES, initials
    from methods.engines import megatron

    on_gpu, dtype, is_mixed = device == "cuda", DTYPES[workload.dtype], workload.dtype != "fp32"
    precision = {"bf16": workload.dtype == "bf16", "fp16": workload.dtype == "fp16", "params_dtype": dtype}
    tensor_parallel.model_parallel_cuda_manual_seed(workload.seed, inference_rng_tracker=not on_gpu)
    config = TransformerConfig(
        num_layers=workload.num_layers, hidden_size=workload.hidden_size, num_attention_heads=workload.num_heads,
        ffn_hidden_size=4 * workload.hidden_size, hidden_dropout=workload.dropout, attention_dropout=workload.dropout,
        use_cpu_initialization=True, perform_initialization=False, **precision,
        # Fused kernels that need Apex or Transformer Engine, or compute GELU otherwise than our model.
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, persist_layer_norm=False,
        tensor_model_parallel_size=method.tensor_parallel, sequence_parallel=method.sequence_parallel,
        **(RECOMPUTE if on_gpu else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = megatron.FusedAttention
    if not on_gpu:
        spec.module = _recomputed_layer()
    if method.sequence_parallel:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = megatron.ShardedNorm
        spec = TransformerBlockSubmodules([spec] * workload.num_layers, layer_norm=megatron.ShardedNorm)
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=workload.vocab_size,
        max_sequence_length=workload.seq_len, position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True, parallel_output=True,
    )  # fmt: skip
    starts = {}
    with torch.no_grad():
        named = [(name, megatron.our_name(name), parameter) for name, parameter in model.named_parameters()]
        shapes = ((ours, megatron.whole_shape(ours, parameter.shape)) for _, ours, parameter in named)
        drawn = initials(shapes, workload)
        for (name, ours, parameter), start in zip(named, drawn, strict=True):
            megatron.mark_shard(ours, parameter)
            start = megatron.shard_of(ours, start, workload.num_heads)
            parameter.copy_(start)
            if is_mixed:
                starts[name] = start
    model.to(device)
    chunk = Float16Module(config, model) if is_mixed else model
    shares = {"use_distributed_optimizer": method.distributed_optimizer}
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **shares), chunk)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=workload.learning_rate, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
            adam_eps=EPSILON, clip_grad=workload.clip_norm, **precision, hysteresis=1,
            initial_loss_scale=INITIAL_LOSS_SCALE, loss_scale_window=LOSS_SCALE_WINDOW, **shares,
        ),
        [model],
    )  # fmt: skip
    for group in optimizer.param_groups:
        # Megatron's own scheduler would apply the multiplier, 0 for biases and norms; our schedule is the harness's.
        group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]
    if is_mixed:
        # Main weights begin at the fp32 start itself, not at its rounding.
        for name, parameter in _named(model):
            megatron.set_main(optimizer, parameter, starts[name])
    return model, optimizer


def _recomputed_layer():
    """Megatron's layer under torch's checkpoint: its own recompute reads the CUDA random state even on a CPU."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.utils.checkpoint import checkpoint

    class RecomputedLayer(TransformerLayer):
        def __call__(self, *args, **kwargs):
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    return RecomputedLayer


def _named(model):
    """Yield each parameter with its name in GPTModel, without wrappers' prefixes."""
    for name, parameter in model.named_parameters():
        yield re.sub(r"^(module\.)+", "", name), parameter


def _states(workload: Workload, model, optimizer):
    from methods.engines import megatron

    for name, parameter in _named(model):
        ours, states = megatron.our_name(name), megatron.states_of(optimizer, parameter)
        yield TensorState(ours, *(megatron.whole_of(ours, each, workload.num_heads) for each in states))
