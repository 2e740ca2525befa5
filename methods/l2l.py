"""L2L (Pudipeddi et al. 2020): one layer at a time is on the device; the other layers and the optimizer are on the
host.

The device holds a single layer, the embedding and the loss. A layer is fetched for its forward pass and again for its
backward pass; then its gradient goes to the host, which updates the layer. The device waits for every copy and every
update."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.job import Plan, Room, Workload
from harness.core.method import Method, Trained, Training
from harness.core.option import with_option
from methods.offload import adamw_kernel
from methods.shared.data_parallel import RANKS
from methods.shared.memory_needs import describe
from methods.streaming.placement.choice import one_layer_plan


def __getattr__(name: str) -> object:
    """Return the class for users' models; import it only now, because it imports torch and this module does not."""
    if name != "L2LTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from methods.streaming.users import trainers

    return trainers.L2LTrainer


@dataclass(frozen=True)
class L2L(Method):
    world_size: int = with_option(1, RANKS)  # ranks
    # home of embedding and head; None: the device, or the host if the device is too small
    ends: str | None = None
    # memory of the boundaries; None: the device, or the host if the device is too small
    activations: str | None = None

    label = "L2L"
    color = "#E7D6EF"
    paper = "Pudipeddi et al. 2020, arXiv:2002.05645"
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
        return one_layer_plan(workload, room, self.ends, self.activations, self.world_size)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return describe(
            workload, "this project", adamw_kernel.describe_host_adam(workload.dtype), has_own_recompute=True
        )

    def train(self, workload: Workload, batches, device: str) -> Training:
        from harness.devices.streams import Device, num_update_threads
        from methods.offload.adamw import published_settings
        from methods.offload.clip import Clip
        from methods.shared.loss_scale import LossScale
        from methods.streaming.embedding_and_head import ends_of
        from methods.streaming.layer_kinds import send_boundaries_home
        from methods.streaming.layer_state import LayerState
        from methods.streaming.slot import GradientRoom, Slot
        from methods.streaming.starting_values import draw_states
        from methods.streaming.update_rules import update_at_once

        with Device(device, num_update_threads(device), self.world_size) as gpu:
            ends, depth = ends_of(gpu, workload, self.ends, waits=True), range(workload.num_layers)
            layers = [LayerState.of_model(gpu, workload, i, host=True) for i in depth]
            draw_states(layers, workload)
            ends.join(layers)
            if self.activations == "host":
                send_boundaries_home(layers, workload.boundary_bytes // self.world_size)
            largest = max(layers, key=lambda layer: layer.layout.numel)
            slot, gradients, scale = Slot(largest), GradientRoom(largest), LossScale(workload)
            for step, (inputs, targets) in enumerate(batches, start=1):
                settings = published_settings(workload.learning_rate_at(step))
                xs = ends.embed(inputs)
                for layer in layers:
                    slot.load(layer)
                    xs = layer.forward(xs)
                loss, dxs = ends.loss(xs, targets, scale.value)
                clip = Clip(gpu, workload.clip_norm, scale)
                for layer in reversed(layers):
                    slot.load(layer)
                    dxs = gradients.backward(layer, dxs)
                    clip.add(layer.norms())
                    gradients.send_home(layer)
                    gpu.synchronize()
                ends.backward(dxs)
                del dxs  # before the next step's
                is_skipped = update_at_once(clip, ends, layers, settings)
                yield scale.step(loss, clip.total_norm, is_skipped=is_skipped)
            gpu.synchronize()
            tensors = (tensor for state in (*ends.states, *layers) for tensor in state.tensors())
            return Trained(gpu.ranks.until_read(tensors), gpu.moved_bytes)
