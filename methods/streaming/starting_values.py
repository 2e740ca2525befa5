"""Starting values of layers at their homes, in memory and on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from harness.core.job import Workload
from harness.devices.streams import num_update_threads
from harness.models.gpt import initialize
from methods.streaming.layer_state import LayerState

if TYPE_CHECKING:
    from methods.streaming.disk import Shelf


def draw_states(states: Sequence[LayerState], workload: Workload) -> None:
    """Draw the starting values of the layers' tensors. All tensors of all layers are drawn in parallel, because a
    machine may have more cores than one layer has tensors. The layers of ranks, and frozen ones, are drawn in small
    blocks, because they have no fp32 memory to draw into."""
    if not any(state.is_shared or state.is_frozen for state in states):
        fill_states(states, partial(initialize, workload=workload))
        return
    _call_in_threads(states, partial(LayerState.draw_part, workload=workload))


def fill_states(
    states: Sequence[LayerState], initialize: Callable[[Iterable[tuple[str, Tensor]]], None]
) -> None:
    """Fill the layers with the starting values that initialize() writes into named fp32 tensors."""
    states_in_memory = [state for state in states if state.shelf is None]
    if states_in_memory:
        initialize(
            named_tensor for state in states_in_memory for named_tensor in state.to_draw(state.current)
        )
        _call_in_threads(states_in_memory, lambda state: state.keep_drawn(state.current))

    def begin_visit(state: LayerState, shelf: Shelf) -> Any:
        def initialize_and_keep(kept_tensors: list[Tensor]) -> Future:
            initialize(state.to_draw(state.state_of(kept_tensors)))
            return state.keep_drawn(state.state_of(kept_tensors))

        return shelf.visit(initialize_and_keep)

    for visit in [begin_visit(state, state.shelf) for state in states if state.shelf]:
        visit.result()


def _call_in_threads(states: Sequence[LayerState], work: Callable[[LayerState], Any]) -> None:
    """Call work(state) for each state, in threads, on the stream of the device's compute."""
    device = states[0].device
    pool = device.streams.pool(num_update_threads(device.name.type))

    def work_on_compute(state: LayerState) -> None:
        with device.streams.use(device.compute):
            work(state)

    for future in [pool.submit(work_on_compute, state) for state in states]:
        future.result()
    pool.shutdown()
