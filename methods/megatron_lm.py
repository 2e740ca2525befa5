"""Megatron-LM (Shoeybi et al. 2019): the fast way to train what fits, on one device or several; megatron-core's own
GPT.

GPTModel with its own layers, gradient buffers and optimizer with fp32 main weights; every layer recomputed. Upstream
code but for attention, which is torch's fused kernel, and on a CPU a few answers about CUDA (engines/megatron.py).
Groups of `tensor_parallel` ranks share each matrix; `pipeline_parallel` such groups, each with as many layers, are the
stages of a pipeline, through which micro-batches flow by megatron-core's schedule (1F1B); several pipelines take a part
of every batch each.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec

from harness.core.job import BETAS, EPSILON, INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW, WEIGHT_DECAY, Plan, Room, Workload
from harness.core.method import Method, Step, TensorState, Trained, Training, Unavailable
from methods.shared.data_parallel import multiples, rank_part
from methods.shared.memory_needs import describe

NEEDS_MEGATRON = "megatron-lm needs megatron-core: pip install megatron-core==0.16.1"


@dataclass(frozen=True)
class MegatronLM(Method):
    world_size: int = 1  # ranks
    tensor_parallel: int = 1  # ranks that share each matrix
    sequence_parallel: bool = False  # they share what lies between the matrices, too
    pipeline_parallel: int = 1  # stages of a pipeline, each with as many layers
    distributed_optimizer: bool = False  # ranks with the same weights share the optimizer's states

    label = "Megatron-LM"
    color = "#E7D6EF"
    paper = "Shoeybi et al. 2019, arXiv:1909.08053; megatron-core"
    can_rehearse = True
    accumulates = True
    scales_loss = True
    drops_alike = False

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Plan the rank of the stage that needs most."""
        num_pipelines = self._num_pipelines(workload)
        part = rank_part(workload, num_pipelines)
        needs = [self._stage_bytes(part, stage, num_pipelines) for stage in range(self.pipeline_parallel)]
        stages = {f"stage {stage}": sum(need.values()) for stage, need in enumerate(needs) if len(needs) > 1}
        return Plan(max(needs, key=lambda need: sum(need.values())), stages=stages)

    def _num_pipelines(self, workload: Workload) -> int:
        """Return how many pipelines share each batch. Raises ValueError if ranks, model or batch do not divide."""
        shared, stages, ranks = self.tensor_parallel, self.pipeline_parallel, self.world_size
        if shared < 1 or ranks % shared:
            told = f"expected a divisor of --ranks {ranks}, got {shared}{_try_ranks(shared)}"
            raise ValueError(f"tensor_parallel: {told}")
        if stages < 1 or ranks // shared % stages:
            among = f"--ranks {ranks}" if shared == 1 else f"{ranks // shared}, --ranks over tensor_parallel"
            told = f"expected a divisor of {among}, got {stages}"
            raise ValueError(f"pipeline_parallel: {told}{_try_ranks(shared * stages)}")
        if workload.num_layers % stages:
            nearest = " or ".join(map(str, multiples(workload.num_layers, stages)))
            told = f"expected a divisor of num_layers {workload.num_layers}, got {stages}; try -l {nearest}"
            raise ValueError(f"pipeline_parallel: {told}")
        for name in ("num_heads", "vocab_size", *(["seq_len"] if self.sequence_parallel else [])):
            if getattr(workload, name) % shared:
                most = math.gcd(getattr(workload, name), ranks)
                told = f"expected a divisor of {name} {getattr(workload, name)}, got {shared}"
                raise ValueError(f"tensor_parallel: {told}; try tensor_parallel={most}")
        if self.sequence_parallel and shared == 1:
            raise ValueError("sequence_parallel: expected tensor_parallel above 1, got 1; try tensor_parallel=2")
        if workload.dropout and ranks > 1:
            raise ValueError("dropout and --ranks exclude each other: each rank would drop other elements")
        return ranks // (shared * stages)

    def _stage_bytes(self, part: Workload, stage: int, num_pipelines: int) -> dict[str, int]:
        """Bytes of a rank of this stage, by kind; `part`: what its pipeline trains."""
        size, params = part.weight_bytes, self._stage_params(part, stage)
        stepped = -(-params // num_pipelines) if self.distributed_optimizer else params
        main = 0 if size == 4 else 4  # fp32 main weights
        optimizer, activations = (8 + main) * stepped, self._activation_bytes(part, stage)
        if 4 * stepped > activations:  # torch's AdamW takes all tensors at once: one more fp32 copy while it steps
            optimizer, activations = optimizer + 4 * stepped, 0
        states = {"weights": size * params, "gradients": 4 * params, "optimizer": optimizer}  # gradients sum up in fp32
        return {**states, "activations": activations}

    def _stage_params(self, workload: Workload, stage: int) -> int:
        """Return the parameters of a rank: its part of each matrix and of the embedding, which both ends of a pipeline
        have, and all norms, the biases after a sum and the positions."""
        is_first, is_last = stage == 0, stage == self.pipeline_parallel - 1
        num_layers = workload.num_layers // self.pipeline_parallel
        whole = (6 * num_layers + workload.seq_len * is_first + 2 * is_last) * workload.hidden_size
        tokens = workload.vocab_size * workload.hidden_size if is_first or is_last else 0
        shared = num_layers * (workload.layer_params - 6 * workload.hidden_size) + tokens
        return whole + -(-shared // self.tensor_parallel)

    def _activation_bytes(self, part: Workload, stage: int) -> int:
        """Beside the states, at the fullest moment of the passes."""
        num_stages, num_parts, size = self.pipeline_parallel, part.micro_batches, part.weight_bytes
        boundary = part.boundary_bytes // num_parts
        logits = part.batch_size // num_parts * part.seq_len * part.vocab_size // self.tensor_parallel
        embedding = size * part.vocab_size * part.hidden_size // self.tensor_parallel
        # Its loss works in the logits' place; in bf16 beside their fp32 copy.
        head = 3 * boundary + max(4 * logits + embedding, (4 if size == 4 else 6) * logits)
        num_embeddings = 3 if num_stages == 1 else 1  # the tied embedding's two gradients and their sum, at the end
        ends = num_embeddings * embedding + 2 * boundary if stage == 0 else 0
        ahead = min(num_stages - stage, num_parts)  # micro-batches under way
        kept = ahead * part.num_layers // num_stages * boundary
        kept = kept // (self.tensor_parallel if self.sequence_parallel else 1)
        messages = 2 * boundary if num_stages > 1 else 0
        return messages + max(kept + max(head if stage == num_stages - 1 else 0, part.layer_bytes), ends)

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
            from methods.engines.megatron import cuda_questions_answered, forward_and_backward, parallel_state
        except ImportError as error:
            raise Unavailable(NEEDS_MEGATRON) from error

        num_pipelines, num_parts = self._num_pipelines(workload), workload.micro_batches
        join_alone(device) if self.world_size == 1 else join_others(device)
        try:
            parallel_state.initialize_model_parallel(self.tensor_parallel, self.pipeline_parallel)
            pipeline = parallel_state.get_data_parallel_rank()
            with cuda_questions_answered(device):
                model, optimizer = _build(self, workload, device)
            is_scaled = workload.dtype == "fp16"
            for step, (inputs, targets) in enumerate(batches, start=1):
                with cuda_questions_answered(device):
                    model.zero_grad_buffer()
                    optimizer.zero_grad()
                    mine = (tokens.chunk(num_pipelines)[pipeline].chunk(num_parts) for tokens in (inputs, targets))
                    scale = float(optimizer.get_loss_scale())
                    losses = forward_and_backward(model, list(zip(*mine, strict=True)))
                    for settings in optimizer.param_groups:
                        settings["lr"] = workload.learning_rate_at(step)
                    is_good, norm, _ = optimizer.step()
                # Of a pipeline only the last stage has losses, each of its ranks the same.
                mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
                if self.world_size > 1:
                    dist.all_reduce(mean)
                    mean /= self.world_size // self.pipeline_parallel
                ended = Step(mean, torch.as_tensor(norm if is_good else math.inf))
                yield ended._replace(loss_scale=scale, is_skipped=not is_good) if is_scaled else ended
            with cuda_questions_answered(device):
                return Trained(list(_states(self, workload, model, optimizer)))  # all ranks gather them
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _try_ranks(divisor: int) -> str:
    return f"; try --ranks {divisor}" if divisor > 0 else ""


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _build(method: MegatronLM, workload: Workload, device: str):
    """GPTModel with our weights, in gradient buffers, and Megatron's optimizer."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
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
        pipeline_model_parallel_size=method.pipeline_parallel, pipeline_dtype=dtype, batch_p2p_comm=on_gpu,
        deallocate_pipeline_outputs=method.pipeline_parallel > 1,
        **(RECOMPUTE if on_gpu else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = megatron.FusedAttention
    if not on_gpu:
        spec.module = _recomputed_layer()
    if method.sequence_parallel:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = megatron.ShardedNorm
        spec = TransformerBlockSubmodules([spec] * _num_layers(method, workload), layer_norm=megatron.ShardedNorm)
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=workload.vocab_size,
        max_sequence_length=workload.seq_len, position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True, parallel_output=True,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    starts = {}
    with torch.no_grad():
        named = dict(_named(method, workload, model))
        shapes = ((name, megatron.whole_shape(name, parameter.shape)) for name, parameter in named.items())
        drawn = initials(shapes, workload)
        for (name, parameter), start in zip(named.items(), drawn, strict=True):
            megatron.mark_shard(name, parameter)
            start = megatron.shard_of(name, start, workload.num_heads)
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
        for name, parameter in _named(method, workload, model):
            megatron.set_main(optimizer, parameter, starts[name])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    return model, optimizer


def _recomputed_layer():
    """Megatron's layer under torch's checkpoint: its own recompute reads the CUDA random state even on a CPU."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.utils.checkpoint import checkpoint

    class RecomputedLayer(TransformerLayer):
        def __call__(self, *args, **kwargs):
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    return RecomputedLayer


def _num_layers(method: MegatronLM, workload: Workload) -> int:
    """Return the layers of a stage."""
    return workload.num_layers // method.pipeline_parallel


def _named(method: MegatronLM, workload: Workload, model):
    """Yield each parameter of this rank with its name in our model; a stage numbers its layers from 0."""
    from methods.engines import megatron

    first_layer = megatron.stage() * _num_layers(method, workload)
    for name, parameter in model.named_parameters():
        yield megatron.our_name(re.sub(r"^(module\.)+", "", name), first_layer), parameter


def _places(method: MegatronLM, workload: Workload):
    """Yield stage, name and shape of each tensor of our model; both ends of a pipeline have a tied embedding."""
    anatomy, last = workload.anatomy, method.pipeline_parallel - 1
    for name, shape in anatomy.ends.items():
        yield 0 if name in anatomy.embedding else last, name, shape
    for layer in range(workload.num_layers):
        for name, shape in anatomy.layer.items():
            yield layer // _num_layers(method, workload), anatomy.layer_name(layer) + name, shape


def _states(method: MegatronLM, workload: Workload, model, optimizer):
    """Yield the model's tensors on rank 0, to which the stages send theirs; on other ranks none."""
    import torch
    import torch.distributed as dist

    from methods.engines import megatron

    held = dict(_named(method, workload, model))
    for stage, name, shape in _places(method, workload):
        if stage == megatron.stage():
            states = megatron.states_of(optimizer, held[name])
            states = [megatron.whole_of(name, each, workload.num_heads).contiguous() for each in states]
        else:
            states = [torch.empty(shape, device=next(model.parameters()).device) for _ in range(3)]
        for state in states if stage else ():
            dist.broadcast(state, group=megatron.pipeline_group(), group_src=stage)
        if dist.get_rank() == 0:
            yield TensorState(name, *states if method.world_size == 1 else (state.cpu() for state in states))
