"""Decides when a layer is updated, with which clip factor and with which loss scale.

Without clipping an update starts as soon as the layer's gradient has landed (IMMEDIATE). Clipping is exact, so it needs
the norm of the whole gradient. A DEFERRED update starts when the norm is known, and runs beside the next forward pass.
A SPECULATIVE update is made during the backward pass, as if nothing were clipped. It writes into a spare state, which
becomes the current state if the norm is within the limit. Such an update stops as soon as the norm of the gradients
known by then exceeds the limit. The first step, and a step after one that was clipped, is DEFERRED instead: clipped
steps come in runs, so a run that is always clipped makes no update in vain. In fp16 a step whose norm is not finite is
skipped, so updates are deferred or speculative even without clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from harness.core.method import Step
from methods.offload.adamw import Settings
from methods.offload.clip import Clip
from methods.shared.loss_scale import LossScale
from methods.shared.terms import Terms
from methods.streaming.embedding_and_head import AnyEnds
from methods.streaming.layer_kinds import Hosted, Layer, ResidentLayer, Streamed
from methods.streaming.layer_state import LayerState


class Timing(NamedTuple):
    """The timing of a rule: the function to call when a layer's gradient is known (with layer, settings and clip), the
    kinds of layers that are updated after the backward pass, and the kinds for which the host needs the clip factor."""

    gradient_ready: Callable[[Layer, Settings, Clip], None]
    late_kinds: tuple[type, ...]
    factor_kinds: tuple[type, ...]


IMMEDIATE = Timing(lambda layer, settings, clip: layer.update_now(settings, clip), (), ())
DEFERRED = Timing(
    lambda layer, settings, clip: layer.send_gradient(), (ResidentLayer, Hosted, Streamed), (Hosted,)
)
SPECULATIVE = Timing(
    lambda layer, settings, clip: layer.update_ahead(settings, clip),
    (ResidentLayer, Hosted, Streamed),
    (Hosted, Streamed),
)
TIMINGS = {None: IMMEDIATE, "deferred": DEFERRED, "speculate": SPECULATIVE}


def update_at_once(clip: Clip, ends: AnyEnds, layers: Sequence[LayerState], settings: Settings) -> bool:
    """Complete the norm, update both ends and all layers, and wait for these updates. Return True if an fp16 overflow
    made the step skip its updates."""
    clip.add(ends.norms())
    clip.finish()
    clip.send_home()
    if clip.overflows():
        return True
    ends.update(settings, clip)
    for layer in layers:
        layer.update(settings, clip.on_host())
    return False


class UpdateRule:
    """One of the three rules, for the layers and both ends of a model; owns the step's Clip and the loss scale.
    `clipping`: deferred or speculate; None: update at once. `order`: goes to Clip."""

    settings: Settings  # the settings and the Clip of this step
    clip: Clip

    def __init__(
        self,
        terms: Terms,
        ends: AnyEnds,
        layers: list[Layer],
        clipping: str | None,
        order: Sequence[int] | None = None,
    ) -> None:
        self.device, self.ends, self.layers = ends.states[0].device, ends, layers
        self.clip_norm, self.order = terms.clip_norm, order
        self.usual_timing = TIMINGS[clipping]
        # the timing of this step
        self.timing = DEFERRED if self.usual_timing is SPECULATIVE else self.usual_timing
        self.has_stepped = False
        # True: streamed layers' states are fetched for the backward pass, in which the device then updates them.
        self.is_ahead = self.timing is IMMEDIATE
        self.scale = LossScale(terms)
        host_needs_factor = any(
            isinstance(layer, self.usual_timing.factor_kinds) and not layer.state.is_frozen
            for layer in layers
        )
        self.sends_factor = self.scale.is_used or ends.is_hosted or host_needs_factor

    def begin(self, settings: Settings) -> None:
        """Begin a backward pass, with a new Clip. Nothing uses the last step's Clip any more: the forward pass has
        waited for all copies of that Clip's factor."""
        if self.usual_timing is SPECULATIVE and self.has_stepped:
            self.timing = SPECULATIVE if self.clip.is_one() else DEFERRED
        self.settings, self.clip = settings, Clip(self.device, self.clip_norm, self.scale, self.order)

    def gradient_ready(self, layer: Layer) -> None:
        """Add the layer's gradient to the norm, send the gradient home if the host needs it, and start an update, plain
        or speculative, if the rule makes an update at this point."""
        self.clip.add(layer.state.norms())
        self.timing.gradient_ready(layer, self.settings, self.clip)

    def finish(self) -> None:
        """Complete the norm and start the updates that have waited for it, or skip the step."""
        self.clip.add(self.ends.norms())
        self.clip.finish()
        if self.sends_factor:
            self.clip.send_home()
        self.is_skipped = self.clip.overflows()
        if self.is_skipped:
            for layer in self.layers:
                layer.drop()
            return
        self.ends.update(self.settings, self.clip)
        for layer in self.layers:
            if isinstance(layer, self.timing.late_kinds):
                layer.update(self.settings, self.clip)

    def step(self, loss: Tensor) -> Step:
        """Return the step as the method yields it, and set the next step's loss scale."""
        self.has_stepped = True
        if self.usual_timing is SPECULATIVE:
            self.is_ahead = any(isinstance(layer, Streamed) for layer in self.layers) and self.clip.is_one()
        return self.scale.step(loss, self.clip.total_norm, is_skipped=self.is_skipped)
