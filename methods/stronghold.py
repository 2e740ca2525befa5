"""STRONGHOLD (Sun et al. 2022): a window of layers slides over the model, and the host runs Adam while the device
computes.

The device holds the layer that is being computed, and the next layers, whose copies are under way. The other layers
live on the host, which updates each of them while the device computes. The layer that is needed last leaves the window
first, so the turn from forward to backward pass fetches nothing. The next step's first layers are fetched as soon as
the host has updated them. All micro-batches of a step go through a layer at each visit, so the layer travels no more
often than for one micro-batch.

Beyond the paper, each layer has a place of its own (streaming/placement/). The first place is the device, for the
whole layer or for its weights alone. The second is the window. The third is another window, into which a layer brings
its states, so that the device updates it. placement/choice.py chooses the places, layer_kinds.py says what a layer does
in each place, and update_rules.py decides when it is updated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.core.job import Job, Plan, Room, Workload
from harness.core.method import Method, Trained, Training
from harness.core.option import opt, with_option
from methods.offload import adamw_cuda, adamw_kernel
from methods.shared.data_parallel import RANKS
from methods.shared.memory_needs import DISK, describe
from methods.streaming.placement.choice import PlacementChoice
from methods.streaming.placement.placement import parse, placement_text, shrink


def __getattr__(name: str) -> object:
    """Return the class for users' models; import it only now, because it imports torch and this module does not."""
    if name != "StrongholdTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from methods.streaming.users import trainers

    return trainers.StrongholdTrainer


@dataclass(frozen=True)
class Stronghold(Method):
    # number of the window's slots; None: plan() chooses
    window_size: int | None = opt(
        None,
        "-w",
        "Number of layers in the window; default: planned.",
        is_list=True,
        is_short=True,
        is_for_all=True,
    )
    resident_layers: int | None = None  # bottom layers that never leave the device; None: as many as fit
    # kinds of the layers, as R2W5S1; None: resident_layers, then windowed layers
    placement: str | None = opt(
        None,
        "--placement",
        "Kinds of layers, bottom first: R2W5 means 2 resident layers, then 5 windowed ones.",
        metavar="RUNS",
        is_short=True,
    )
    clipping: str | None = None  # deferred or speculate; None: deferred if gradients are clipped
    # home of embedding and head; None: the device, or the host if the device is too small
    ends: str | None = None
    # folder for states of layers of kind D; None: the system's temporary folder
    disk: str | None = with_option(None, DISK)
    # memory of the boundaries; None: the device, or the host if the device is too small
    activations: str | None = None
    world_size: int = with_option(1, RANKS)  # ranks

    label = "STRONGHOLD"
    color = "#A05CFF"
    paper = "Sun et al., SC 2022"
    # read only for plans without step_seconds: plans for several ranks
    hides = ("copies", "updates", "gathers")
    can_rehearse = True
    takes_config = True  # trains models that a config.json describes, too
    takes_lora = True  # trains adapters alone on frozen weights, too
    accumulates = True
    scales_loss = True
    to_build = staticmethod(adamw_kernel.to_build)
    build = staticmethod(adamw_kernel.build)

    @property
    def bit_exact(self) -> bool:  # type: ignore[override]
        """False with several ranks, because gradients are then summed in another order."""
        return self.world_size == 1

    bit_exact_in_half = bit_exact  # type: ignore[assignment]

    def plan(self, workload: Workload, room: Room) -> Plan:
        return PlacementChoice(workload, room, **asdict(self)).plan()

    def as_timed(self, job: Job, grad_norms: Sequence[float | None]) -> Stronghold:
        """Return this method. If it speculates, but most timed steps followed a clipped step, return it with deferred
        updates, because a step after a clipped one does not speculate."""
        limit = job.workload.clip_norm or math.inf
        # the norms of the steps that come before each timed step
        before = grad_norms[max(0, job.warmup - 1) : -1]
        clipped = [norm is None or not math.isfinite(norm) or norm > limit for norm in before]
        is_rare = 2 * sum(clipped) <= len(clipped)
        return self if self.clipping != "speculate" or is_rare else replace(self, clipping="deferred")

    def twin_options(self, num_layers: int, twin_layers: int) -> dict[str, Any]:
        """Return the options for a twin, the same model with fewer layers. The twin has the same mixture of layer
        kinds, and its window slides if the model's window slides."""
        options, num_resident = asdict(self), self.resident_layers or 0
        kinds = "R" * num_resident + "W" * (num_layers - num_resident)
        if self.placement:
            kinds = parse(self.placement, num_layers)
        twin = shrink(kinds, twin_layers)
        if self.placement is not None:
            options["placement"] = placement_text(twin)
        if self.resident_layers is not None:
            options["resident_layers"] = twin.count("R")
        if self.window_size is not None:
            streamed, left = (len(letters) - letters.count("R") for letters in (kinds, twin))
            most = left - 1 if self.window_size < streamed and left > 1 else twin_layers
            options["window_size"] = min(self.window_size, most)
        return options

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        adam = adamw_kernel.describe_host_adam(workload.dtype)
        if device == "cuda":
            halves = f"of masters in halves: {adamw_cuda.describe_split_update()}"
            adam += f"; on the device {halves if workload.dtype == 'bf16' else 'torch AdamW, fused'}"
        row = describe(workload, "this project", adam, has_own_recompute=True)
        return {**row, "clipping": f"{row['clipping']}, {self.clipping}"} if self.clipping else row

    def train(self, workload: Workload, batches, device: str) -> Training:
        from harness.devices.streams import Device, num_update_threads
        from methods.offload.adamw import published_settings
        from methods.streaming.embedding_and_head import ends_of
        from methods.streaming.layer_kinds import model_layers, new_layers, send_boundaries_home
        from methods.streaming.update_rules import UpdateRule
        from methods.streaming.window import Window

        assert self.placement and self.window_size
        kinds = parse(self.placement, workload.num_layers)
        with Device(device, num_update_threads(device), self.world_size) as gpu:
            ends, source = ends_of(gpu, workload, self.ends), model_layers(workload)
            speculates = self.clipping == "speculate"
            layers = new_layers(gpu, source, kinds, self.window_size, self.disk, speculates=speculates)
            if self.activations == "host":
                num_bytes = workload.boundary_bytes // self.world_size
                send_boundaries_home([layer.state for layer in layers], num_bytes)
            ends.join(layer.state for layer in layers)
            rule = UpdateRule(source.terms, ends, layers, self.clipping)
            window = Window(layers, kinds, self.window_size, rule)

            window.refill()
            for step, (inputs, targets) in enumerate(batches, start=1):
                xs = ends.embed(inputs)  # a list, one per micro-batch
                for layer in layers:
                    xs = layer.forward(xs)  # waits for its prefetch
                    window.slide_up(layer)  # the slot fetches the next layer above
                loss, dxs = ends.loss(xs, targets, rule.scale.value)
                rule.begin(published_settings(workload.learning_rate_at(step)))
                for layer in reversed(layers):
                    dxs = layer.backward(dxs)  # recomputes
                    # adds the gradient's norm, sends the gradient home, may update
                    rule.gradient_ready(layer)
                    window.slide_down(layer)  # the slot fetches the next layer below
                ends.backward(dxs)
                del dxs  # free this memory: a small device needs it for the next step
                rule.finish()  # starts the updates that have waited for the norm
                window.refill()  # fetches the next step's first layers
                yield rule.step(loss)

            if workload.waits_for_norm:
                window.settle()
            states = [*ends.states, *(layer.state for layer in layers)]
            gpu.synchronize(*(state.updated for state in states))
            tensors = (tensor for state in states for tensor in state.tensors())
            return Trained(gpu.ranks.until_read(tensors), gpu.moved_bytes)
