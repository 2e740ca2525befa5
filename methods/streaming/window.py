"""The window: decides which layer has which slot, and when the copy of the next layer into a slot starts.

Two rings of layers (placement/placement.py) take turns in their slots. The layers in the slots at the end of the
forward pass are the first of the backward pass, so the turn between both passes fetches nothing. A parked layer keeps
its slot."""

from __future__ import annotations

from methods.streaming.layer_kinds import Hosted, Layer, ResidentLayer, Streamed
from methods.streaming.placement.placement import rings
from methods.streaming.slot import Slot
from methods.streaming.update_rules import UpdateRule


class Window:
    """The slots of the layers that are not resident."""

    def __init__(self, layers: list[Layer], kinds: str, window_size: int, rule: UpdateRule) -> None:
        non_resident = {i: layer for i, layer in enumerate(layers) if not isinstance(layer, ResidentLayer)}
        both_rings = rings(kinds, window_size)
        pairs = [(non_resident[i], non_resident[j]) for ring in both_rings for i, j in ring.above.items()]
        self.above = dict(pairs)  # for each layer, the layer above that takes its slot next
        self.below = {above: layer for layer, above in pairs}
        numels = [layer.state.layout.numel for layer in layers]
        largest = {
            non_resident[i]: max(numels[j] for j in ring.layers) for ring in both_rings for i in ring.layers
        }
        self.slots: dict[Layer, Slot] = {
            layer: layer.new_slot(largest.get(layer))
            for layer in non_resident.values()
            if layer not in self.below
        }
        # these have a slot when a step begins
        self.lowest = [layer for layer in non_resident.values() if layer in self.slots]
        self.rule, self.layers = rule, layers

    def refill(self) -> None:
        """Fetch the ends and the layers with which the next step begins into their slots, each as soon as it is
        updated."""
        self.rule.ends.fetch()
        for layer in self.lowest:
            layer.fetch(self.slots[layer])

    def refetch(self) -> None:
        """Fetch the layers with which the next step begins once more, because weights at home have changed."""
        for slot in self.slots.values():
            slot.held = None
        self.refill()

    def slide_up(self, layer: Layer) -> None:
        """Give the layer's slot to the next layer above it; the topmost layers stay for the backward pass."""
        if layer in self.above:
            self._hand_over(layer, self.above[layer])
        elif self.rule.is_ahead:
            layer.fetch_state()

    def slide_down(self, layer: Layer) -> None:
        """Give the layer's slot to the next layer below it."""
        if layer in self.below:
            self._hand_over(layer, self.below[layer])
            if self.rule.is_ahead:
                self.below[layer].fetch_state()

    def rewind(self) -> None:
        """Give every slot back to the layer that has the slot when a step begins. Call this after a forward pass that
        no backward pass follows."""
        for layer in [*self.slots]:
            lowest = layer
            while lowest in self.below:
                lowest = self.below[lowest]
            if lowest is not layer and not isinstance(lowest, ResidentLayer):
                self._hand_over(layer, lowest)

    def settle(self) -> None:
        """Do the updates of streamed layers that still wait after the last step."""
        for layer in self.layers:
            if isinstance(layer, Streamed):
                layer.do_waiting_update()
                if layer in self.above:
                    self._hand_over(layer, self.above[layer])

    def _hand_over(self, layer: Layer, next_layer: Hosted | Streamed) -> None:
        self.slots[next_layer] = self.slots.pop(layer)
        next_layer.fetch(self.slots[next_layer])
