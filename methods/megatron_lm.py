"""Megatron-LM (Shoeybi et al. 2019): megatron-core's own GPT, the fast way to train a model that fits on one device or
several.

GPTModel has its own layers, gradient buffers, and an optimizer with fp32 main weights; every layer is recomputed. All
of this is upstream code, with two exceptions: attention is torch's fused kernel, and on a CPU engines/megatron.py
redirects the code's calls of CUDA.

`tensor_parallel` ranks form a group that shares each matrix. `pipeline_parallel` groups of this kind are the stages of
a pipeline; each stage has equally many layers, and micro-batches flow through the stages by megatron-core's schedule
(1F1B). If there are several pipelines, each takes a part of every batch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from harness.base.console import counted
from harness.core.job import (
    BETAS,
    EPSILON,
    INITIAL_LOSS_SCALE,
    LOSS_SCALE_WINDOW,
    WEIGHT_DECAY,
    Plan,
    Room,
    Workload,
)
from harness.core.method import Step, TensorState, Trained, Training
from harness.core.option import with_option
from harness.plan.resources import all_reduce_sent_bytes, gather_sent_bytes
from methods.engines import megatron_names
from methods.engines.release import ReleasedMethod, importing
from methods.shared.data_parallel import RANKS, nearest_multiples, rank_part
from methods.shared.memory_needs import describe

NEEDS_MEGATRON = "megatron-lm needs megatron-core: pip install megatron-core==0.16.1"
# The oldest releases that train without CUDA and Transformer Engine: of megatron-core, and for an option of the method.
# Up to 0.16 all take the same arguments.
OLDEST_RELEASES = {
    # 0.11 derives the class of inference_rng_tracker, which a CPU needs, from a partial: TypeError
    "": (0, 12),
    # 0.12 calls Transformer Engine to quantize weights, even if none is in fp8
    "distributed_optimizer": (0, 13),
}


@dataclass(frozen=True)
class MegatronLM(ReleasedMethod):
    world_size: int = with_option(1, RANKS)  # ranks
    tensor_parallel: int = 1  # ranks that share each matrix
    sequence_parallel: bool = False  # True: ranks of a group also split the sequence between matrices
    pipeline_parallel: int = 1  # number of stages of a pipeline; all stages have equally many layers
    distributed_optimizer: bool = False  # True: ranks with the same weights split the optimizer's states
    release: str | None = None  # version of megatron-core; None: the installed one

    package = "megatron-core"
    label = "Megatron-LM"
    color = "#E7D6EF"
    paper = "Shoeybi et al. 2019, arXiv:1909.08053; megatron-core"
    can_rehearse = True
    accumulates = True
    takes_config = True  # trains models that a config.json describes, too
    scales_loss = True
    drops_alike = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, oldest in OLDEST_RELEASES.items():
            is_asked = not option or getattr(self, option)
            if self.other_release and is_asked and self.other_release.numbers < oldest:
                message = f"{'.'.join(map(str, oldest))} or newer{f' for {option}' * bool(option)}, got {self.release}"
                raise ValueError(f"release: expected megatron-core {message}; try --option release=0.13.1")

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Plan a rank's memory for the stage that needs most, and a rank's exchanges for the stage that sends most."""
        num_pipelines = self._num_pipelines(workload)
        part = rank_part(workload, num_pipelines)
        needs = [self._stage_bytes(part, stage, num_pipelines) for stage in range(self.pipeline_parallel)]
        stages = {f"stage {stage}": sum(need.values()) for stage, need in enumerate(needs) if len(needs) > 1}
        sent = [self._exchanged(part, stage, num_pipelines) for stage in range(self.pipeline_parallel)]
        exchanged = max(sent, key=lambda kinds: sum(kinds.values()))
        return Plan(max(needs, key=lambda need: sum(need.values())), stages=stages, exchanged=exchanged)

    def _num_pipelines(self, workload: Workload) -> int:
        """Return how many pipelines share each batch. Raises ValueError in three cases: the ranks, or the model's
        sizes, cannot be divided as asked; megatron-core lacks the model; several ranks have dropout."""
        megatron_names.check_model(workload)
        shared, stages, ranks = self.tensor_parallel, self.pipeline_parallel, self.world_size
        if shared < 1 or ranks % shared:
            message = f"expected a divisor of --ranks {ranks}, got {shared}{_try_ranks(shared)}"
            raise ValueError(f"tensor_parallel: {message}")
        if stages < 1 or ranks // shared % stages:
            among = f"--ranks {ranks}"
            if shared > 1:
                among = f"{ranks // shared} (--ranks divided by tensor_parallel)"
            message = f"expected a divisor of {among}, got {stages}"
            raise ValueError(f"pipeline_parallel: {message}{_try_ranks(shared * stages)}")
        if workload.num_layers % stages:
            nearest = " or ".join(map(str, nearest_multiples(workload.num_layers, stages)))
            message = f"expected a divisor of the {counted(workload.num_layers, 'layer')}, got {stages}"
            raise ValueError(f"pipeline_parallel: {message}; try -l {nearest}")
        sizes = megatron_names.gpt_model_sizes(workload)
        divided = {
            "num_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_groups,
            "intermediate_size": sizes.ffn_size,
            "vocab_size": workload.vocab_size,
            "seq_len": workload.seq_len if self.sequence_parallel else 0,
        }
        for name, number in divided.items():
            if number % shared:
                message = f"expected a divisor of {name} {number}, got {shared}"
                raise ValueError(f"tensor_parallel: {message}; try tensor_parallel={math.gcd(number, ranks)}")
        if self.sequence_parallel and shared == 1:
            raise ValueError(
                "sequence_parallel: expected tensor_parallel above 1, got 1; try tensor_parallel=2"
            )
        if workload.dropout and ranks > 1:
            raise ValueError(
                "dropout and --ranks exclude each other: ranks would drop other elements; try --dropout 0"
            )
        return ranks // (shared * stages)

    def _stage_bytes(self, part: Workload, stage: int, num_pipelines: int) -> dict[str, int]:
        """Return the bytes of a rank of this stage, by kind. `part`: the workload of one pipeline."""
        size, params = part.weight_bytes, self._stage_params(part, stage)
        stepped = -(-params // num_pipelines) if self.distributed_optimizer else params
        main = 0 if size == 4 else 4  # fp32 main weights
        optimizer, activations = (8 + main) * stepped, self._activation_bytes(part, stage)
        if 4 * stepped > activations:
            # torch's AdamW makes fp32 copies of all tensors, when activations are freed
            optimizer, activations = optimizer + 4 * stepped, 0
        # fp32 sums of gradients
        states = {"weights": size * params, "gradients": 4 * params, "optimizer": optimizer}
        return {**states, "activations": activations}

    def _exchanged(self, part: Workload, stage: int, num_pipelines: int) -> dict[str, float]:
        """Return the bytes that a rank of this stage sends in a step, by kind.

        Pipelines sum their gradients. With the distributed optimizer each rank gets one part of the sum, and gathers
        all weights after the update. Ranks that share matrices sum a layer's activations twice in the forward pass,
        twice in the recompute and twice in the backward pass, and once at each end of the model. Stages pass
        activations up and their gradients down; the first and the last stage sum the gradients of a tied embedding.
        """
        num_stages, shared = self.pipeline_parallel, self.tensor_parallel
        params = self._stage_params(part, stage)
        gradients = 4 * params  # in fp32
        is_first, is_last = stage == 0, stage == num_stages - 1
        num_sums = 6 * _num_layers(self, part) + is_first + is_last
        sums = num_sums * all_reduce_sent_bytes(part.boundary_bytes, shared)
        if self.distributed_optimizer:
            sums += gather_sent_bytes(gradients, num_pipelines)
            gathers = gather_sent_bytes(part.weight_bytes * params, num_pipelines)
        else:
            sums, gathers = sums + all_reduce_sent_bytes(gradients, num_pipelines), 0.0
        if num_stages > 1 and (is_first or is_last) and megatron_names.gpt_model_sizes(part).is_tied:
            sums += all_reduce_sent_bytes(4 * part.vocab_size * part.hidden_size / shared, 2)
        neighbors = (not is_first) + (not is_last)
        messages = neighbors * part.boundary_bytes / (shared if self.sequence_parallel else 1)
        return {"gathers": gathers, "sums": sums, "messages": messages}

    def _stage_params(self, workload: Workload, stage: int) -> int:
        """Return the number of parameters of a rank of this stage. A rank has its part of each matrix and of the
        embedding, and all parameters of norms, of biases that are added after a sum, and of position embeddings. A tied
        embedding is on the first and on the last stage."""
        anatomy, last = workload.anatomy, self.pipeline_parallel - 1
        is_tied, num_ranks = megatron_names.gpt_model_sizes(workload).is_tied, self.tensor_parallel
        ends = {
            name: names
            for name, names in megatron_names.end_tensors(workload).items()
            if stage == _stage_of_end(self, name)
            or (stage == last and is_tied and name == megatron_names.EMBEDDING)
        }
        layer = megatron_names.rank_numel(megatron_names.layer_tensors(workload), anatomy.layer, num_ranks)
        return _num_layers(self, workload) * layer + megatron_names.rank_numel(ends, anatomy.ends, num_ranks)

    def _activation_bytes(self, part: Workload, stage: int) -> int:
        """Return the peak bytes of a rank's activations in forward and backward pass. Weights, gradients and optimizer
        states do not count."""
        num_stages, num_parts, size = self.pipeline_parallel, part.micro_batches, part.weight_bytes
        boundary = part.boundary_bytes // num_parts
        logits = part.batch_size // num_parts * part.seq_len * part.vocab_size // self.tensor_parallel
        embedding = size * part.vocab_size * part.hidden_size // self.tensor_parallel
        # Megatron's loss overwrites the logits; in bf16 it also needs an fp32 copy of the logits.
        normed = 3 * boundary + int(part.anatomy.head_boundaries * boundary)
        head = normed + max(4 * logits + embedding, (4 if size == 4 else 6) * logits)
        # At the end of the backward pass, a tied embedding has two gradients and their sum.
        num_embeddings = 3 if num_stages == 1 and megatron_names.gpt_model_sizes(part).is_tied else 1
        ends = num_embeddings * embedding + 2 * boundary if stage == 0 else 0
        # number of micro-batches whose inputs a stage keeps at once
        ahead = min(num_stages - stage, num_parts)
        kept = ahead * part.num_layers // num_stages * boundary
        kept = kept // (self.tensor_parallel if self.sequence_parallel else 1)
        messages = 2 * boundary if num_stages > 1 else 0
        return messages + max(
            kept + max(head if stage == num_stages - 1 else 0, part.whole_layer_bytes), ends
        )

    def missing(self, device: str) -> str | None:
        return None if find_spec("megatron") else NEEDS_MEGATRON

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = describe(
            workload, self.implementation, "megatron-core's, over torch AdamW without Apex, device"
        )
        recompute = "every layer, megatron-core's" if device == "cuda" else "every layer, torch checkpoint"
        return {**row, "model": "megatron.core GPTModel", "recompute": recompute}

    def train(self, workload: Workload, batches, device: str) -> Training:
        import torch
        import torch.distributed as dist

        from harness.devices.exchange import join_alone, join_others, leave_others

        with importing(self.other_release, NEEDS_MEGATRON):
            from methods.engines.megatron import cuda_questions_answered, forward_and_backward, parallel_state

        num_pipelines, num_parts = self._num_pipelines(workload), workload.micro_batches
        join_alone(device) if self.world_size == 1 else join_others(device)
        try:
            parallel_state.initialize_model_parallel(self.tensor_parallel, self.pipeline_parallel)
            pipeline = parallel_state.get_data_parallel_rank()
            with cuda_questions_answered(device):
                model, optimizer = _build_model(self, workload, device)
            is_scaled = workload.dtype == "fp16"
            for step, batch in enumerate(batches, start=1):
                with cuda_questions_answered(device):
                    model.zero_grad_buffer()
                    optimizer.zero_grad()
                    rank_tokens = (tokens.chunk(num_pipelines)[pipeline].chunk(num_parts) for tokens in batch)
                    scale = float(optimizer.get_loss_scale())
                    losses = forward_and_backward(model, list(zip(*rank_tokens, strict=True)))
                    for settings in optimizer.param_groups:
                        settings["lr"] = workload.learning_rate_at(step)
                    is_updated, norm, _ = optimizer.step()
                # Only the last stage of a pipeline has losses, and all ranks of this stage have the same losses.
                mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
                if self.world_size > 1:
                    dist.all_reduce(mean)
                    mean /= self.world_size // self.pipeline_parallel
                result = Step(mean, torch.as_tensor(norm if is_updated else math.inf))
                yield result._replace(loss_scale=scale, is_skipped=not is_updated) if is_scaled else result
            with cuda_questions_answered(device):
                # Every rank must iterate over the states, because it sends its tensors to rank 0.
                return Trained(list(_trained_states(self, workload, model, optimizer)))
        finally:
            parallel_state.destroy_model_parallel()
            leave_others()


def _try_ranks(divisor: int) -> str:
    return f"; try --ranks {divisor}" if divisor > 0 else ""


# Kernels that are not used: they need Apex or Transformer Engine, or compute another GELU than the harness's model.
FUSED_OPTIONS = (
    "apply_rope_fusion",
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "persist_layer_norm",
)
RECOMPUTE_OPTIONS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def _build_model(method: MegatronLM, workload: Workload, device: str):
    """Return a GPTModel and Megatron's optimizer for it. The model has the harness's starting values and Megatron's
    gradient buffers."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel

    from methods.engines import megatron

    is_gpt = workload.config is None
    tensor_parallel.model_parallel_cuda_manual_seed(workload.seed, inference_rng_tracker=device != "cuda")
    config = _transformer_config(method, workload, device)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(method, workload, device),
        vocab_size=workload.vocab_size,
        max_sequence_length=workload.seq_len,
        position_embedding_type="learned_absolute" if is_gpt else "rope",
        share_embeddings_and_output_weights=megatron_names.gpt_model_sizes(workload).is_tied,
        parallel_output=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if not is_gpt:
        model.rotary_pos_emb.inv_freq = megatron.inverse_frequencies(workload)
    starts = _set_starting_shards(method, workload, model)
    model = _with_gradient_buffers(method, workload, config, model.to(device))
    optimizer = _optimizer(method, workload, model)
    if workload.dtype != "fp32":
        # Main weights begin at the fp32 starting values, not at values rounded to 16 bits.
        for name, parameter in _named_parameters(method, workload, model):
            megatron.set_main_weight(optimizer, parameter, starts[name])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    return model, optimizer


def _with_gradient_buffers(method: MegatronLM, workload: Workload, config: Any, model: Any):
    """Return the model in megatron-core's wrappers, of 16-bit models and of models whose gradients are summed."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    gradients = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=method.distributed_optimizer
    )
    chunk = model if workload.dtype == "fp32" else Float16Module(config, model)
    return DistributedDataParallel(config, gradients, chunk)


def _precision(workload: Workload) -> dict[str, Any]:
    """Return the arguments that tell megatron-core's model and its optimizer the dtype."""
    from harness.models.gpt import DTYPES

    dtype = workload.dtype
    return {"bf16": dtype == "bf16", "fp16": dtype == "fp16", "params_dtype": DTYPES[dtype]}


def _transformer_config(method: MegatronLM, workload: Workload, device: str):
    """Return megatron-core's configuration of the workload's model."""
    import torch.nn.functional as F
    from megatron.core.transformer import TransformerConfig

    precision = _precision(workload)
    sizes = megatron_names.gpt_model_sizes(workload)
    is_gpt, is_on_gpu = workload.config is None, device == "cuda"
    return TransformerConfig(
        num_layers=workload.num_layers,
        hidden_size=workload.hidden_size,
        num_attention_heads=workload.num_heads,
        num_query_groups=sizes.num_groups,
        kv_channels=sizes.head_size,
        ffn_hidden_size=sizes.ffn_size,
        hidden_dropout=workload.dropout,
        attention_dropout=workload.dropout,
        normalization="LayerNorm" if is_gpt else "RMSNorm",
        layernorm_epsilon=sizes.epsilon,
        qk_layernorm=sizes.norms_heads,
        add_qkv_bias=sizes.has_qkv_bias,
        add_bias_linear=is_gpt,
        gated_linear_unit=not is_gpt,
        activation_func=F.gelu if is_gpt else F.silu,
        use_cpu_initialization=True,
        perform_initialization=False,
        **precision,
        **dict.fromkeys(FUSED_OPTIONS, False),
        tensor_model_parallel_size=method.tensor_parallel,
        sequence_parallel=method.sequence_parallel,
        pipeline_model_parallel_size=method.pipeline_parallel,
        pipeline_dtype=precision["params_dtype"],
        batch_p2p_comm=is_on_gpu,
        deallocate_pipeline_outputs=method.pipeline_parallel > 1,
        **(RECOMPUTE_OPTIONS if is_on_gpu else {}),
    )


def _layer_spec(method: MegatronLM, workload: Workload, device: str):
    """Return the parts of which megatron-core makes a layer: its own, but for the attention and, where megatron-core
    has none for these tensors, the norm; on a CPU with a recompute by torch."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from methods.engines import megatron

    is_gpt, norms_heads = workload.config is None, megatron_names.gpt_model_sizes(workload).norms_heads
    spec = get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = megatron.FusedAttention
    if device != "cuda":
        spec.module = _recomputed_layer()
    if not method.sequence_parallel and is_gpt:
        return spec
    norm = megatron.ShardedNorm if is_gpt else megatron.RootMeanSquareNorm
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    if norms_heads:
        attention.q_layernorm = attention.k_layernorm = norm
    return TransformerBlockSubmodules([spec] * _num_layers(method, workload), layer_norm=norm)


def _set_starting_shards(method: MegatronLM, workload: Workload, model: Any) -> dict[str, Any]:
    """Set a rank's parameters to the harness's starting values. Return these values in fp32, by the parameters' names;
    an empty dict if the model itself is fp32."""
    import torch

    from harness.models.gpt import initials
    from methods.engines import megatron

    sizes, starts = megatron_names.gpt_model_sizes(workload), {}
    named = dict(_named_parameters(method, workload, model))
    shapes_of = {name: shapes for name, _, shapes in _whole_tensors(method, workload)}
    drawn = initials((pair for name in named for pair in shapes_of[name].items()), workload)
    with torch.no_grad():
        for name, parameter in named.items():
            megatron.mark_shard(name, parameter)
            whole = megatron.join_tensors(name, [next(drawn) for _ in shapes_of[name]], sizes)
            start = megatron.shard_of(name, whole)
            parameter.copy_(start)
            if workload.dtype != "fp32":
                starts[name] = start
    return starts


def _optimizer(method: MegatronLM, workload: Workload, model: Any):
    """Return megatron-core's optimizer for the rank's part of the model. It has the reference's settings of AdamW, and
    in fp16 of the dynamic loss scale."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        lr=workload.learning_rate,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPSILON,
        clip_grad=workload.clip_norm,
        **_precision(workload),
        hysteresis=1,
        initial_loss_scale=INITIAL_LOSS_SCALE,
        loss_scale_window=workload.loss_scale_window or LOSS_SCALE_WINDOW,
        use_distributed_optimizer=method.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [model])
    for group in optimizer.param_groups:
        # Apply the multiplier (0 for biases and norms) here: Megatron's scheduler, which would apply it, is not used.
        group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]
    return optimizer


def _recomputed_layer():
    """Return a subclass of Megatron's layer that recomputes by torch's checkpoint, because Megatron's own recompute
    reads the CUDA random state even on a CPU."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.utils.checkpoint import checkpoint

    class RecomputedLayer(TransformerLayer):
        def __call__(self, *args, **kwargs):
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    return RecomputedLayer


def _num_layers(method: MegatronLM, workload: Workload) -> int:
    """Return the number of layers of a stage."""
    return workload.num_layers // method.pipeline_parallel


def _stage_of_end(method: MegatronLM, name: str) -> int:
    """Return the number, from 0, of the stage that has this tensor of the embedding or the head."""
    return 0 if megatron_names.is_of_first_stage(name) else method.pipeline_parallel - 1


def _named_parameters(method: MegatronLM, workload: Workload, model):
    """Yield each parameter of this rank, after its name in the whole GPTModel. The rank's own names differ from these:
    a stage numbers its layers from 0, and the head may be the tied embedding."""
    from methods.engines import megatron

    first_layer = megatron.stage_number() * _num_layers(method, workload)
    is_tied = megatron_names.gpt_model_sizes(workload).is_tied
    for wrapped, parameter in model.named_parameters():
        name = re.sub(r"^(module\.)+", "", wrapped)
        if name.startswith(megatron_names.LAYERS):
            number, _, within = name.removeprefix(megatron_names.LAYERS).partition(".")
            name = f"{megatron_names.LAYERS}{first_layer + int(number)}.{within}"
        yield megatron_names.EMBEDDING if is_tied and name == megatron_names.HEAD else name, parameter


def _whole_tensors(method: MegatronLM, workload: Workload):
    """Yield, for each tensor of the whole GPTModel, its name, its stage, and the names and shapes of the harness's
    tensors that it holds. A tied embedding counts as the first stage's."""
    anatomy = workload.anatomy
    for name, names in megatron_names.end_tensors(workload).items():
        yield name, _stage_of_end(method, name), {gpt_name: anatomy.ends[gpt_name] for gpt_name in names}
    of_layer = megatron_names.layer_tensors(workload)
    for layer in range(workload.num_layers):
        stage, prefix = layer // _num_layers(method, workload), anatomy.layer_name(layer)
        for name, names in of_layer.items():
            shapes = {prefix + gpt_name: anatomy.layer[gpt_name] for gpt_name in names}
            yield f"{megatron_names.LAYERS}{layer}.{name}", stage, shapes


def _trained_states(method: MegatronLM, workload: Workload, model, optimizer):
    """Yield the harness's tensors on rank 0, which receives them from all stages. Other ranks yield nothing, but must
    iterate to the end, because they send their tensors meanwhile."""
    import torch
    import torch.distributed as dist

    from methods.engines import megatron

    sizes = megatron_names.gpt_model_sizes(workload)
    rank_parameters = dict(_named_parameters(method, workload, model))
    for name, stage, shapes in _whole_tensors(method, workload):
        if stage == megatron.stage_number():
            states = megatron.parameter_states(optimizer, rank_parameters[name])
            states = [megatron.gather_whole(name, state).contiguous() for state in states]
        else:
            (_, *columns), rows = next(iter(shapes.values())), sum(shape[0] for shape in shapes.values())
            states = [torch.empty((rows, *columns), device=next(model.parameters()).device) for _ in range(3)]
        for state in states if stage else ():
            dist.broadcast(state, group=megatron.pipeline_group(), group_src=stage)
        if dist.get_rank() == 0:
            if method.world_size > 1:
                states = [state.cpu() for state in states]
            gpt_states = [megatron.split_tensor(name, state, len(shapes), sizes) for state in states]
            for gpt_name, weight, *moments in zip(shapes, *gpt_states, strict=True):
                yield TensorState(gpt_name, weight, *moments)
