"""Copies between host and device. A copy is queued on a stream, waits for events, and records an event at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from harness.devices.streams import Device

Pair = tuple[Tensor, Tensor]  # target and source of a copy
Result = TypeVar("Result")


def queue(
    device: Device,
    track: str,
    work: str,
    part_name: str,
    events: Iterable[Any],
    operation: Callable[[], Result],
) -> tuple[Result, Any]:
    """Queue the work of operation() on the device's stream `track`, after the events in `events`; an event of None is
    skipped. Return the result of operation() and the event at the work's end. `work` and `part_name`: the kind of work
    and the part of the model, for a trace."""
    stream = getattr(device, track)
    with device.streams.use(stream):
        for event in events:
            if event is not None:
                stream.wait_event(event)
        with device.span(track, work, part_name):
            result = operation()
        return result, stream.record_event()


def copy(
    device: Device, track: str, work: str, part_name: str, events: Iterable[Any], pairs: Sequence[Pair]
) -> Any:
    """Queue these copies on the stream `track` and count their bytes; return the event at their end."""
    device.moved_bytes += num_bytes(pairs)
    return queue(device, track, work, part_name, events, lambda: copy_all(pairs))[1]


def copy_all(pairs: Iterable[Pair]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def num_bytes(pairs: Iterable[Pair]) -> int:
    return sum(target.nbytes for target, _ in pairs)
