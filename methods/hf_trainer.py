"""Hugging Face's Trainer (Wolf et al. 2020): transformers' own training loop, with all on the device or, by the
caller's configuration, with DeepSpeed.

The loop, its accumulation of micro-batches, the average of the loss over a batch's tokens, the shift of labels, the
optimizer with its groups, the clip and mixed precision (autocast over fp32 weights) are upstream code, as are the model
and its loss if the model has a config.json. This file gives it the harness's model, batches and learning rates.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

from harness.base.json_object import JsonObject
from harness.core.anatomy import TRANSFORMERS_MISSING
from harness.core.job import Plan, Room, Workload
from harness.core.method import Trained, Training, Unavailable
from harness.plan.resources import OPTIMIZER_BYTES
from methods.engines import deepspeed_config
from methods.engines.deepspeed_file import DeepSpeedFile, adam_of
from methods.engines.release import ReleasedMethod, import_transformers, importing
from methods.engines.user_config import read_config
from methods.shared.memory_needs import describe

NEEDS_ACCELERATE = "hf-trainer needs accelerate: pip install accelerate==1.15.0"
NO_AUTOCAST = "hf-trainer trains in half precision by torch's autocast, which has no sim: try --device cpu"
LOGITS_COPIES = 3  # fp32 tensors of the logits' size at once, when the loss's gradient is computed


@dataclass(frozen=True)
class HfTrainer(ReleasedMethod):
    # a configuration file of DeepSpeed or accelerate, or its JSON; None: no DeepSpeed
    config: str | None = None
    release: str | None = None  # version of transformers, such as 5.20.0; None: the installed one

    package = "transformers"
    label = "HF Trainer"
    color = "#FFD21E"
    paper = "Wolf et al. 2020, doi:10.18653/v1/2020.emnlp-demos.6; transformers.Trainer"
    log_dialect = "plain"
    takes_config = True  # trains models that a config.json describes, too
    accumulates = True

    @property
    def kernel(self) -> str | None:
        """Return the name of the DeepSpeed kernel that must be compiled before a run; None if no kernel is needed, or
        if the plan has not read the configuration yet."""
        if self.config is None or self.names_file():
            return None
        config = read_config(self.config)
        entries: JsonObject = {"zero_optimization": {}} | config.data
        if adam_of(config, entries) != "deepspeed":
            return None
        return "cpu_adam" if "offload_optimizer" in entries["zero_optimization"] else "fused_adam"

    def file(self, workload: Workload) -> DeepSpeedFile | None:
        """Read the caller's configuration, if there is one. Raises ValueError as DeepSpeedFile.read() does."""
        return None if self.config is None else DeepSpeedFile.read(self.config, workload, 1, "accelerate")

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Plan as for resident training, with two differences: weights, gradients and what layers keep are fp32 in any
        dtype, beside autocast's copies of the weights; and all logits are there at once."""
        _check_samples(workload)
        if self.other_release and workload.config is not None:
            message = f"expected none for {workload.model}, got {self.release}"
            reason = "the installed transformers makes its model"
            raise ValueError(f"release: {message}: {reason}; leave release out, or try the published GPT")
        if (file := self.file(workload)) is not None:
            return replace(
                _plan_of_file(file, workload, room), options=asdict(replace(self, config=file.text))
            )
        fp32_workload = replace(workload, dtype="fp32")
        params, num_parts = workload.num_params, workload.micro_batches
        boundary = fp32_workload.boundary_bytes // num_parts
        embedding = workload.vocab_size * workload.hidden_size
        # A new gradient waits until it is added to the sum; of a tied embedding there are two, and their sum.
        num_added = 2 * workload.anatomy.is_tied + (num_parts > 1)
        cast_bytes = 0 if workload.dtype == "fp32" else 2  # bytes of autocast's copy of a weight
        earlier_gradients = 0 if num_parts == 1 else 4 * params  # gradients of the micro-batches before
        # At each moment: bytes of gradients, bytes of activations.
        at_loss = (earlier_gradients, _bytes_at_loss(fp32_workload) + cast_bytes * params)
        at_top_layer = (
            max(earlier_gradients, 4 * workload.end_params),
            workload.num_layers * boundary + fp32_workload.whole_layer_bytes,
        )
        bottom_gradients = max(earlier_gradients, 4 * (params - embedding))
        at_bottom_layer = (bottom_gradients, fp32_workload.whole_layer_bytes)
        at_look_up = (4 * (params + num_added * embedding), 2 * boundary)  # the look-up's gradient
        moments = (at_loss, at_top_layer, at_bottom_layer, at_look_up)
        gradients, activations = max(moments, key=sum)
        optimizer = OPTIMIZER_BYTES["fp32"] * params
        return Plan(
            {
                "weights": 4 * params,
                "gradients": gradients,
                "optimizer": optimizer,
                "activations": activations,
            }
        )

    def missing(self, device: str) -> str | None:
        if not find_spec("transformers"):
            return TRANSFORMERS_MISSING
        if not find_spec("accelerate"):
            return NEEDS_ACCELERATE
        if self.config is not None and not find_spec("deepspeed"):
            return deepspeed_config.NEEDS_DEEPSPEED
        return deepspeed_config.missing_to_build(self.kernel) if self.kernel else None

    @property
    def build_seconds(self) -> int:  # type: ignore[override]
        return deepspeed_config.KERNELS[self.kernel][1] if self.kernel else 0

    def to_build(self) -> str | None:
        texts, kernel = [super().to_build()], self.kernel
        if (
            kernel
            and not deepspeed_config.is_kernel_built(kernel)
            and not deepspeed_config.missing_to_build(kernel)
        ):
            texts.append(f"DeepSpeed's {kernel}, once, about {self.build_seconds} seconds on two cores")
        return "; ".join(filter(None, texts)) or None

    def build(self) -> None:
        from methods.engines import deepspeed

        super().build()
        if self.kernel:
            deepspeed.compile_kernel(self.kernel)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        implementation = "upstream: transformers.Trainer"
        if self.other_release:
            implementation = f"upstream: Trainer of {self.other_release.description()}"
        row = describe(workload, implementation, "torch AdamW, fused, device")
        row["recompute"] = "every layer, torch checkpoint"
        if (file := self.file(workload)) is not None:
            implementation += ", DeepSpeed, as the caller's configuration says"
            if file.offload or file.adam == "published":
                row["optimizer"] = deepspeed_config.ADAMS[file.adam or "fused"]
            elif file.adam == "deepspeed":
                row["optimizer"] = "DeepSpeed's FusedAdam"
            return {**row, "implementation": implementation, "clipping": "global norm, by the engine"}
        mixed = "" if workload.dtype == "fp32" else f", autocast to {workload.dtype}"
        return {**row, "precision": f"weights fp32{mixed}"}

    def train(self, workload: Workload, batches, device: str) -> Training:
        import tempfile

        from harness.devices.streams import require_device

        require_device(device, "Trainer")
        file = self.file(workload)
        if device == "sim" and workload.dtype != "fp32" and file is None:
            raise Unavailable(NO_AUTOCAST)
        with importing(self.other_release, NEEDS_ACCELERATE):
            if self.other_release:
                import_transformers()
            from methods.engines.trainer import BatchTrainer, DeepSpeedTrainer, wide_model

        with ExitStack() as open_context:
            folder = open_context.enter_context(tempfile.TemporaryDirectory(prefix="harness-trainer-"))
            if file is None:
                trainer = BatchTrainer(workload, device, folder, wide_model(workload, device))
            else:
                trainer = DeepSpeedTrainer(workload, device, folder, file, open_context)
            with trainer.turns as turns:
                turns.give()
                for batch in batches:
                    yield turns.give(batch)
                turns.give()
            return Trained(trainer.states())


def _plan_of_file(file: DeepSpeedFile, workload: Workload, room: Room) -> Plan:
    """Return the plan of the file's stage, with two differences: all logits are there at once, and the model is made on
    the host."""
    plan = file.plan(workload, room, 1)
    activations = max(plan.device["activations"], _bytes_at_loss(workload))
    # What the model takes there at the start, beyond what the states take there later.
    freed = max(0, workload.weight_bytes * workload.num_params - sum(plan.host.values()))
    host = {**plan.host, "buffers": plan.host.get("buffers", 0) + freed}
    return replace(plan, device={**plan.device, "activations": activations}, host=host)


def _bytes_at_loss(workload: Workload) -> int:
    """Return the bytes of activations when the loss's gradient is computed, on one micro-batch: the layers' inputs, and
    what the norm before the head and the loss keep. In half precision logits and their gradient are there in the dtype,
    too."""
    boundary = workload.boundary_bytes // workload.micro_batches
    numel = workload.batch_size // workload.micro_batches * (workload.seq_len + 1) * workload.vocab_size
    copies = LOGITS_COPIES + workload.anatomy.slopes + (workload.dtype != "fp32")
    return (
        workload.num_layers * boundary
        + int((3 + workload.anatomy.head_boundaries) * boundary)
        + 4 * copies * numel
    )


def _check_samples(workload: Workload) -> None:
    """Raise ValueError if the model has no position for one more token than a sample has: transformers shifts labels
    itself, so it gets the last token's target as another token."""
    if workload.config is not None and (most := workload.anatomy.most_tokens) <= workload.seq_len:
        message = f"--seq: expected at most {most - 1} for hf-trainer, which passes one more token through the model"
        raise ValueError(f"{message}, got {workload.seq_len}; try --seq {most - 1}")
