"""Hugging Face's Trainer (Wolf et al. 2020): transformers' own training loop, with all on the device.

The loop, its accumulation of micro-batches, the average of the loss over a batch's tokens, the shift of labels, the
optimizer with its groups, the clip and mixed precision (autocast over fp32 weights) are upstream code, as are the model
and its loss if the model has a config.json. This file gives it the harness's model, batches and learning rates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from harness.core.anatomy import NEEDS
from harness.core.job import Plan, Room, Workload
from harness.core.method import Method, Trained, Training, Unavailable
from harness.forecast.resources import OPTIMIZER_BYTES
from methods.shared.memory_needs import describe

NEEDS_ACCELERATE = "hf-trainer needs accelerate: pip install accelerate==1.15.0"
NO_AUTOCAST = "hf-trainer trains in half precision by torch's autocast, which has no sim: try --device cpu"
LOGITS_COPIES = 3  # fp32 tensors of the logits' size at once, when the loss's gradient is computed


@dataclass(frozen=True)
class HfTrainer(Method):
    label = "HF Trainer"
    color = "#FFD21E"
    paper = "Wolf et al. 2020, doi:10.18653/v1/2020.emnlp-demos.6; transformers.Trainer"
    log_dialect = "plain"
    takes_config = True
    accumulates = True

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Plan as for resident training, with two differences: weights, gradients and what layers keep are fp32 in any
        dtype, beside autocast's copies of the weights; and all logits are there at once."""
        _check_samples(workload)
        wide = replace(workload, dtype="fp32")
        params, num_parts = workload.num_params, workload.micro_batches
        boundary, tokens = wide.boundary_bytes // num_parts, workload.batch_size // num_parts * (workload.seq_len + 1)
        kept, logits = workload.num_layers * boundary, 4 * tokens * workload.vocab_size
        loss = int((3 + wide.anatomy.head_boundaries) * boundary) + (LOGITS_COPIES + wide.anatomy.slopes) * logits
        embedding = workload.vocab_size * workload.hidden_size
        # A new gradient waits until it is added to the sum; of a tied embedding there are two, and their sum.
        num_added = 2 * workload.anatomy.is_tied + (num_parts > 1)
        casts = 0 if workload.dtype == "fp32" else 2  # bytes of autocast's copy of a weight
        before = 0 if num_parts == 1 else 4 * params  # gradients of the micro-batches before
        moments = (  # at each moment: bytes of gradients, bytes of activations
            (before, kept + loss + casts * params),
            (max(before, 4 * workload.end_params), kept + wide.whole_layer_bytes),  # the top layer's backward pass
            (max(before, 4 * (params - embedding)), wide.whole_layer_bytes),  # the bottom layer's
            (4 * (params + num_added * embedding), 2 * boundary),  # the look-up's gradient
        )
        gradients, activations = max(moments, key=sum)
        optimizer = OPTIMIZER_BYTES["fp32"] * params
        return Plan({"weights": 4 * params, "gradients": gradients, "optimizer": optimizer, "activations": activations})

    def missing(self, device: str) -> str | None:
        if not find_spec("transformers"):
            return NEEDS
        return None if find_spec("accelerate") else NEEDS_ACCELERATE

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = describe(workload, "upstream: transformers.Trainer", "torch AdamW, fused, device")
        mixed = "" if workload.dtype == "fp32" else f", autocast to {workload.dtype}"
        return {**row, "precision": f"weights fp32{mixed}", "recompute": "every layer, torch checkpoint"}

    def train(self, workload: Workload, batches, device: str) -> Training:
        import tempfile

        from harness.devices.streams import require_device

        require_device(device, "Trainer")
        if device == "sim" and workload.dtype != "fp32":
            raise Unavailable(NO_AUTOCAST)
        try:
            from methods.engines.trainer import BatchTrainer
        except ImportError as error:
            raise Unavailable(NEEDS_ACCELERATE) from error

        with tempfile.TemporaryDirectory(prefix="harness-trainer-") as folder:
            trainer = BatchTrainer(workload, device, folder)
            with trainer.turns as turns:
                turns.give()
                for batch in batches:
                    yield turns.give(batch)
                turns.give()
        return Trained(trainer.states())


def _check_samples(workload: Workload) -> None:
    """Raise ValueError if the model has no position for one more token than a sample has: transformers shifts labels
    itself, so it gets the last token's target as another token."""
    if workload.config is not None and (most := workload.anatomy.most_tokens) <= workload.seq_len:
        told = f"--seq: expected at most {most - 1} for hf-trainer, which passes one more token through the model"
        raise ValueError(f"{told}, got {workload.seq_len}; try --seq {most - 1}")
