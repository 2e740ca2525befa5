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
# Maps durations to randomly drawn ones; the second argument is True for messages, False for units.
Noise = Callable[["Array", bool], "Array"]


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
    noise: Noise | None = None,
    keeps_units: bool = False,
) -> list[LineRun]:
    """Run all lines at the same time, each by itself.

    `sends_at_once`: number of messages that a link carries at a time in each direction, while further messages wait;
    None: any number. `noise`: maps durations to randomly drawn ones; its second argument is True for messages, False
    for units. `keeps_units`: True: the results hold the start and the end of each unit.
    """
    workers = LineWorkers(lines, sends_at_once, noise, keeps_units=keeps_units)
    while workers.advance():
        pass
    return workers.runs()


class LineWorkers:
    """The workers of all lines, one line after the other, as the rows of arrays."""

    def __init__(
        self, lines: Sequence[Line], sends_at_once: int | None, noise: Noise | None, *, keeps_units: bool
    ) -> None:
        import numpy as np

        self.sends_at_once, self.noise = sends_at_once, noise
        self.sizes = [len(line.seconds) for line in lines]
        self.firsts = np.cumsum([0, *self.sizes[:-1]])
        num_workers, most = sum(self.sizes), max(line.num_items for line in lines)
        self.rows = np.arange(num_workers)
        self.is_first, self.is_last = np.zeros(num_workers, bool), np.zeros(num_workers, bool)
        self.is_first[self.firsts] = self.is_last[self.firsts + np.array(self.sizes) - 1] = True
        self.num_items = np.repeat([line.num_items for line in lines], self.sizes)
        self.waits = np.repeat([line.recompute_waits for line in lines], self.sizes)
        self.chooses = np.repeat([line.is_opportunistic for line in lines], self.sizes)
        self.is_any_choosing = bool(self.chooses.any())
        self.orders = np.zeros((num_workers, 1 + max(line.orders.shape[1] for line in lines)), np.uint8)
        self.seconds = np.zeros((num_workers, 1 + len(KINDS)))
        self.send_seconds = np.zeros(num_workers)  # of a message from each worker to the next
        for first, line in zip(self.firsts, lines, strict=True):
            workers = slice(first, first + len(line.seconds))
            self.orders[first : first + len(line.orders), : line.orders.shape[1]] = line.orders
            self.seconds[workers, 1:] = [[of_worker[kind] for kind in KINDS] for of_worker in line.seconds]
            self.send_seconds[workers] = [*line.send_seconds, 0.0]
        # For each worker and item, the time at which the message from the previous worker (below) or the next worker
        # (above) arrives; inf: not known yet. The last column is for messages that never come.
        self.below, self.above = np.full((2, num_workers, most + 1), np.inf)
        exists = np.arange(most + 1) < self.num_items[:, None]
        self.below[exists & self.is_first[:, None]] = self.above[exists & self.is_last[:, None]] = 0.0
        # By direction, link, and message that the link carries at a time: when the link has done with it.
        self.links = np.zeros((2, num_workers, sends_at_once or 0))
        self.done = {kind: np.zeros(num_workers, int) for kind in (F, R, B)}
        self.place = np.zeros(num_workers, int)  # in the queue
        self.ahead = np.zeros(num_workers, int)  # forward units that ran earlier than their turn
        self.free, self.busy = np.zeros(num_workers), np.zeros(num_workers)
        # for each worker, a time before which its next unit does not begin; its next message arrives later than that
        self.least = np.zeros(num_workers)
        self.starts = self.ends = None
        if keeps_units:
            self.starts, self.ends = np.full((2, len(KINDS), num_workers, most), np.nan)

    def advance(self) -> bool:
        """Run one unit of every worker whose next unit is known; return False if all units are done."""
        import numpy as np

        kind = self._next_kinds()
        if not kind.any():
            return False
        from_below, from_above = self.below[self.rows, self.done[F]], self.above[self.rows, self.done[B]]
        is_unsure = None
        if self.is_any_choosing:
            below_least, above_least = np.roll(self.least, 1), np.roll(self.least, -1)
            may = (kind == R) & self.chooses & (from_above > self.free)
            comes = may & (from_above == np.inf) & (above_least < self.free)
            could = may & (self.done[F] < self.num_items) & (from_below == np.inf) & (below_least < self.free)
            is_unsure = comes | could
            swaps = may & ~is_unsure & (from_below <= self.free)
            kind = np.where(swaps, F, kind)
            self.ahead += swaps
            self.place -= swaps
        arrives = np.where(kind == F, from_below, np.where((kind == B) | self.waits, from_above, 0.0))
        start = np.maximum(self.free, arrives)
        goes = (kind != 0) & (start < np.inf)
        if is_unsure is not None:
            goes &= ~is_unsure
            is_blocked = (kind != 0) & ~goes & ~is_unsure
            awaited = np.maximum(self.least, np.where(kind == F, below_least, above_least))
            self.least = np.where(is_blocked, awaited, np.where(kind == 0, np.inf, self.least))
        who = np.flatnonzero(goes)
        self._run(who, kind[who], start[who])
        return True

    def _next_kinds(self) -> Array:
        """Return the kind of each worker's next unit in its queue, without forward units that ran earlier."""
        kind = self.orders[self.rows, self.place]
        while (again := (kind == F) & (self.ahead > 0)).any():
            self.place += again
            self.ahead -= again
            kind = self.orders[self.rows, self.place]
        return kind

    def _run(self, who: Array, kinds: Array, start: Array) -> None:
        """Run a unit of each of these workers, and send the messages."""
        takes = self.seconds[who, kinds]
        if self.noise:
            takes = self.noise(takes, False)
        end = start + takes
        self.busy[who] += takes
        self.free[who] = self.least[who] = end
        self.place[who] += 1
        for row, kind in enumerate((F, R, B)):
            chosen = kinds == kind
            mine, ended = who[chosen], end[chosen]
            items = self.done[kind][mine]
            if self.starts is not None and self.ends is not None:
                self.starts[row, mine, items], self.ends[row, mine, items] = start[chosen], ended
            if kind != R:
                self._send(kind, mine, items, ended)
            self.done[kind][mine] += 1

    def _send(self, kind: int, who: Array, items: Array, end: Array) -> None:
        """Send a message about each of these items from its worker, at the time `end`. Write the times at which the
        messages arrive into `below` or `above`."""
        import numpy as np

        goes = ~(self.is_last if kind == F else self.is_first)[who]
        who, items, end = who[goes], items[goes], end[goes]
        if len(who) == 0:
            return
        to, arrivals = (who + 1, self.below) if kind == F else (who - 1, self.above)
        takes = self.send_seconds[np.minimum(who, to)]
        if self.noise:
            takes = self.noise(takes, True)
        if self.sends_at_once:
            at = int(kind == F), who, items % self.sends_at_once
            end = np.maximum(end, self.links[at])
            self.links[at] = end + takes
        arrivals[to, items] = end + takes

    def runs(self) -> list[LineRun]:
        """Return the run of each line."""
        runs = []
        for first, size in zip(self.firsts, self.sizes, strict=True):
            part = slice(first, first + size)
            starts = None if self.starts is None else self.starts[:, part]
            ends = None if self.ends is None else self.ends[:, part]
            runs.append(LineRun(self.free[part], self.busy[part], starts, ends))
        return runs
