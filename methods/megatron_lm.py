"""Megatron-LM (Shoeybi et al. 2019): the fast way to train what fits, on one device; megatron-core's own GPT.

GPTModel with its own layers, gradient buffers and optimizer with fp32 main weights; every layer recomputed. Upstream
code but for attention, which is torch's fused kernel, and on a CPU a few answers about CUDA (engines/megatron.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.util import find_spec

from harness.core.job import BETAS, EPSILON, INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW, WEIGHT_DECAY, Plan, Room, Workload
from harness.core.method import Method, Step, TensorState, Trained, Training, Unavailable
from methods.shared.memory_needs import describe

NEEDS_MEGATRON = "megatron-lm needs megatron-core: pip install megatron-core==0.16.1"


@dataclass(frozen=True)
class MegatronLM(Method):
    label = "Megatron-LM"
    color = "#E7D6EF"
    paper = "Shoeybi et al. 2019, arXiv:1909.08053; megatron-core"
    can_rehearse = True
    scales_loss = True
    drops_alike = False

    def plan(self, workload: Workload, room: Room) -> Plan:
        params, size = workload.num_params, workload.weight_bytes
        main = 0 if size == 4 else 4  # fp32 main weights
        optimizer, activations = (8 + main) * params, _activation_bytes(workload)
        if 4 * params > activations:  # torch's AdamW takes all tensors at once: one more fp32 copy while it steps
            optimizer, activations = optimizer + 4 * params, 0
        states = {"weights": size * params, "gradients": 4 * params, "optimizer": optimizer}  # gradients sum up in fp32
        return Plan({**states, "activations": activations})

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
            from harness.devices.streams import join_alone
            from methods.engines.megatron import cuda_questions_answered, parallel_state
        except ImportError as error:
            raise Unavailable(NEEDS_MEGATRON) from error

        join_alone(device)
        try:
            parallel_state.initialize_model_parallel()
            with cuda_questions_answered(device):
                model, optimizer = _build(workload, device)
            is_scaled = workload.dtype == "fp16"
            positions = torch.arange(workload.seq_len, device=device).expand(workload.batch_size, -1)
            for step, (inputs, targets) in enumerate(batches, start=1):
                with cuda_questions_answered(device):
                    model.zero_grad_buffer()
                    optimizer.zero_grad()
                    loss = model(inputs, positions, None, labels=targets).float().mean()
                    scale = float(optimizer.get_loss_scale())
                    (loss * scale).backward()
                    model.finish_grad_sync()
                    for group in optimizer.param_groups:
                        group["lr"] = workload.learning_rate_at(step)
                    is_good, norm, _ = optimizer.step()
                ended = Step(loss.detach(), torch.as_tensor(norm if is_good else math.inf))
                yield ended._replace(loss_scale=scale, is_skipped=not is_good) if is_scaled else ended
            return Trained(_states(workload, model, optimizer))
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _activation_bytes(workload: Workload) -> int:
    """Beside the states, at the fullest moment of the two passes."""
    boundary, size = workload.boundary_bytes, workload.weight_bytes
    logits = workload.batch_size * workload.seq_len * workload.vocab_size
    embedding = workload.vocab_size * workload.hidden_size
    # Its loss works in the logits' place; in bf16 beside their fp32 copy.
    head = 3 * boundary + max(4 * logits + size * embedding, (4 if size == 4 else 6) * logits)
    tied = 3 * size * embedding + 2 * boundary  # the tied embedding's two gradients and their sum, at the end
    return max(workload.num_layers * boundary + max(head, workload.layer_bytes), tied)


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _build(workload: Workload, device: str):
    """GPTModel with our weights, in gradient buffers, and Megatron's optimizer."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    from harness.core.gpt import DTYPES, initials
    from methods.engines.megatron import FusedAttention, our_name, reordered

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
        **(RECOMPUTE if on_gpu else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    if not on_gpu:
        spec.module = _recomputed_layer()
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=workload.vocab_size,
        max_sequence_length=workload.seq_len, position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True, parallel_output=True,
    )  # fmt: skip
    starts = {}
    with torch.no_grad():
        named = [(name, our_name(name), parameter) for name, parameter in model.named_parameters()]
        drawn = initials(((ours, parameter.shape) for _, ours, parameter in named), workload)
        for (name, ours, parameter), start in zip(named, drawn, strict=True):
            start = reordered(ours, start, workload.num_heads, to_megatron=True)
            parameter.copy_(start)
            if is_mixed:
                starts[name] = start
    model.to(device)
    chunk = Float16Module(config, model) if is_mixed else model
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=workload.learning_rate, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
            adam_eps=EPSILON, clip_grad=workload.clip_norm, **precision, hysteresis=1,
            initial_loss_scale=INITIAL_LOSS_SCALE, loss_scale_window=LOSS_SCALE_WINDOW,
        ),
        [model],
    )  # fmt: skip
    for group in optimizer.param_groups:
        # Megatron's own scheduler would apply the multiplier, 0 for biases and norms; our schedule is the harness's.
        group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]
    if is_mixed:
        # Main weights begin at the fp32 start itself, not at its rounding.
        for main, name in _main_weights(model):
            main.data.copy_(starts[name])
    return model, optimizer


def _recomputed_layer():
    """Megatron's layer under torch's checkpoint: its own recompute reads the CUDA random state even on a CPU."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.utils.checkpoint import checkpoint

    class RecomputedLayer(TransformerLayer):
        def __call__(self, *args, **kwargs):
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)

    return RecomputedLayer


def _main_weights(model):
    """Each fp32 weight that the optimizer steps, with its name in GPTModel, without wrappers' prefixes."""
    for name, parameter in model.named_parameters():
        yield getattr(parameter, "main_param", parameter), re.sub(r"^(module\.)+", "", name)


def _states(workload: Workload, model, optimizer) -> list[TensorState]:
    from methods.engines.megatron import our_name, reordered

    moments: dict = {}  # of the torch optimizers inside
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        moments |= each.optimizer.state
    found = []
    for main, name in _main_weights(model):
        ours, state = our_name(name), moments[main]
        whole = (main.detach(), state["exp_avg"], state["exp_avg_sq"])
        ordered = (reordered(ours, tensor, workload.num_heads, to_megatron=False) for tensor in whole)
        found.append(TensorState(ours, *ordered))
    return found
