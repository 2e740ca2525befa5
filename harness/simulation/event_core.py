"""Simulates units of work in virtual time. Schedules of shards and of pipelines use this same core, in plans and in
figures.

A worker does one unit at a time. In `run_pool`, all workers share one queue, which holds the models' shards in turn. In
`run_lines`, each worker has its own queue and waits for messages from its neighbors in a line, as stages of a pipeline
do. For each item, a worker of a line has three units: F (forward) begins after the previous worker's message has
arrived, B (backward) begins after the next worker's message has arrived, and R (recompute) runs between F and B. No
worker's choice depends on later events at other workers. So the core goes over all workers again and again, and
advances every worker whose next unit is known: a million units take about a second, for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

KINDS = "FRB"
F, R, B = 1, 2, 3  # kinds of units: forward, recompute, backward; in a queue, 0 stands for no unit


# Computes the key of a waiting chain, by which workers choose, from three numbers: the chain's remaining time, its
# place in the order of arrival, and a number drawn from [0, 1) when it arrived.
Key = Callable[[float, int, float], float]


class PoolUnit(NamedTuple):
    chain: int
    worker: int
    start: float
    end: float


def run_pool(
    chains: Sequence[Sequence[float]], num_workers: int, key: Key, draw: Callable[[], float]
) -> list[PoolUnit]:
    """Return the units of all chains, in the order of their starts.

    `chains`: for each chain, the seconds of its units, which run one after another, each on any worker. `draw`: draws a
    number from [0, 1). A free worker takes the next unit of the waiting chain with the smallest key; if keys are equal,
    of the chain that has waited longest.
    """
    left = [float(sum(chain)) for chain in chains]
    next_unit = [0] * len(chains)
    waiting = [
        (key(left[number], number, draw()), number, number) for number, chain in enumerate(chains) if chain
    ]
    arrival, now = len(waiting), 0.0
    heapify(waiting)
    running: list[tuple[float, int, int]] = []  # a heap of tuples (end, worker, chain)
    units, free = [], list(reversed(range(num_workers)))
    while waiting or running:
        while waiting and free:
            number, worker = heappop(waiting)[2], free.pop()
            seconds = chains[number][next_unit[number]]
            next_unit[number] += 1
            left[number] -= seconds
            heappush(running, (now + seconds, worker, number))
            units.append(PoolUnit(number, worker, now, now + seconds))
        now = running[0][0]
        # chains whose units end now wait again before any worker takes its next unit
        while running and running[0][0] == now:
            _, worker, number = heappop(running)
            free.append(worker)
            if next_unit[number] < len(chains[number]):
                heappush(waiting, (key(left[number], arrival, draw()), arrival, number))
                arrival += 1
    return units


@dataclass(frozen=True)
class Line:
    """A line of workers. `orders`: the queue of each worker, as an array (workers, units) of F, R and B, filled up with
    0."""

    orders: Array
    seconds: Sequence[Mapping[str, float]]  # for each worker, the seconds of F, R and B
    num_items: int
    # for each worker but the last, the seconds of a message between it and the next worker
    send_seconds: Sequence[float]
    recompute_waits: bool  # True: R begins only after the message that B needs has arrived
    # True: if R is next, and the message for B has not arrived, the next F may run first
    is_opportunistic: bool


@dataclass(frozen=True)
class LineRun:
    """The run of a line. `starts`, `ends`: times of F, R and B, in arrays (kinds, workers, items), in which NaN stands
    for no unit; None if the times were not kept."""

    ended: Array  # for each worker, the time at which it has done all its units
    busy: Array  # for each worker, the seconds of all its units together
    starts: Array | None = None
    ends: Array | None = None


def run_lines(
    lines: Sequence[Line],
    *,
    sends_at_once: int | None = None,
    noise: Callable[[Array, bool], Array] | None = None,
    keeps_units: bool = False,
) -> list[LineRun]:
    """Run all lines at the same time, each by itself.

    `sends_at_once`: number of messages that a link carries at a time in each direction, while further messages wait;
    None: any number. `noise`: maps durations to randomly drawn ones; its second argument is True for messages, False
    for units. `keeps_units`: True: the results hold the start and the end of each unit.
    """
    import numpy as np

    sizes = [len(line.seconds) for line in lines]
    firsts = np.cumsum([0, *sizes[:-1]])
    num_workers, most = sum(sizes), max(line.num_items for line in lines)
    rows = np.arange(num_workers)

    def spread(values: Sequence[Any]) -> Array:
        return np.repeat(np.array(values), sizes)

    is_first, is_last = np.zeros(num_workers, bool), np.zeros(num_workers, bool)
    is_first[firsts] = is_last[firsts + np.array(sizes) - 1] = True
    num_items = spread([line.num_items for line in lines])
    waits, chooses = (
        spread([getattr(line, name) for line in lines]) for name in ("recompute_waits", "is_opportunistic")
    )
    orders = np.zeros((num_workers, 1 + max(line.orders.shape[1] for line in lines)), np.uint8)
    for first, line in zip(firsts, lines, strict=True):
        orders[first : first + len(line.orders), : line.orders.shape[1]] = line.orders
    seconds = np.zeros((num_workers, 1 + len(KINDS)))
    seconds[:, 1:] = [[each[kind] for kind in KINDS] for line in lines for each in line.seconds]
    # seconds of a message from each worker to the next
    send = np.array([each for line in lines for each in (*line.send_seconds, 0.0)])
    # For each worker and item, the time at which the message from the previous worker (below) or the next worker
    # (above) arrives; inf: not known yet. The last column is for messages that never come.
    below, above = np.full((num_workers, most + 1), np.inf), np.full((num_workers, most + 1), np.inf)
    exists = np.arange(most + 1) < num_items[:, None]
    below[exists & is_first[:, None]] = above[exists & is_last[:, None]] = 0.0
    # a link has a place for each message that it carries at a time; by direction, link and place: when the place is
    # free
    links = np.zeros((2, num_workers, sends_at_once or 0))
    done = {F: np.zeros(num_workers, int), R: np.zeros(num_workers, int), B: np.zeros(num_workers, int)}
    place, ahead = np.zeros(num_workers, int), np.zeros(num_workers, int)
    free, busy, least = np.zeros(num_workers), np.zeros(num_workers), np.zeros(num_workers)
    starts = ends = None
    if keeps_units:
        starts, ends = np.full((2, len(KINDS), num_workers, most), np.nan)
    is_any_choosing = bool(chooses.any())

    def sent(kind: int, who: Array, items: Array, end: Array) -> None:
        """Send a message about each of these items from its worker, at the time `end`. Write the times at which the
        messages arrive into `below` or `above`."""
        goes = ~(is_last if kind == F else is_first)[who]
        who, items, end = who[goes], items[goes], end[goes]
        if len(who) == 0:
            return
        to, arrivals = (who + 1, below) if kind == F else (who - 1, above)
        takes = send[np.minimum(who, to)]
        if noise:
            takes = noise(takes, True)
        if sends_at_once:
            at = int(kind == F), who, items % sends_at_once
            end = np.maximum(end, links[at])
            links[at] = end + takes
        arrivals[to, items] = end + takes

    while True:
        kind = orders[rows, place]
        while (again := (kind == F) & (ahead > 0)).any():
            # skip forward units that ran earlier than their turn
            place += again
            ahead -= again
            kind = orders[rows, place]
        if not kind.any():
            break
        from_below, from_above = below[rows, done[F]], above[rows, done[B]]
        is_unsure = None
        if is_any_choosing:
            # `least`: for each worker, a time before which its next unit does not begin; its next message arrives later
            # than that.
            below_least, above_least = np.roll(least, 1), np.roll(least, -1)
            may = (kind == R) & chooses & (from_above > free)
            comes = may & (from_above == np.inf) & (above_least < free)
            could = may & (done[F] < num_items) & (from_below == np.inf) & (below_least < free)
            is_unsure = comes | could
            swaps = may & ~is_unsure & (from_below <= free)
            kind = np.where(swaps, F, kind)
            ahead += swaps
            place -= swaps
        arrives = np.where(kind == F, from_below, np.where((kind == B) | waits, from_above, 0.0))
        start = np.maximum(free, arrives)
        goes = (kind != 0) & (start < np.inf)
        if is_unsure is not None:
            goes &= ~is_unsure
            is_blocked = (kind != 0) & ~goes & ~is_unsure
            awaited = np.where(kind == F, below_least, above_least)
            least = np.where(is_blocked, np.maximum(least, awaited), np.where(kind == 0, np.inf, least))
        who = np.flatnonzero(goes)
        kinds = kind[who]
        takes = seconds[who, kinds]
        if noise:
            takes = noise(takes, False)
        end = start[who] + takes
        busy[who] += takes
        free[who] = least[who] = end
        place[who] += 1
        for number, each in enumerate((F, R, B)):
            chosen = kinds == each
            mine, ended = who[chosen], end[chosen]
            items = done[each][mine]
            if starts is not None and ends is not None:
                starts[number, mine, items], ends[number, mine, items] = start[mine], ended
            if each != R:
                sent(each, mine, items, ended)
            done[each][mine] += 1
    parts = [slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    return [
        LineRun(
            free[part],
            busy[part],
            None if starts is None else starts[:, part],
            None if ends is None else ends[:, part],
        )
        for part in parts
    ]
