"""Simulates units of work in virtual time. Schedules of shards and of pipelines use this same core, in plans and in
figures.

A worker does one unit at a time. In `run_pool`, all workers share one queue, which holds the models' shards in turn. In
`run_lines`, each worker has its own queue and waits for messages from its neighbors in a line, as stages of a pipeline
do. For each micro-batch, a worker of a line has three units: F (forward) begins after the previous worker's message has
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
    seconds_left = [float(sum(chain)) for chain in chains]
    next_unit = [0] * len(chains)
    waiting_chains = [
        (key(seconds_left[chain], chain, draw()), chain, chain) for chain, units in enumerate(chains) if units
    ]
    arrival, now = len(waiting_chains), 0.0
    heapify(waiting_chains)
    running_units: list[tuple[float, int, int]] = []  # a heap of tuples (end, worker, chain)
    started_units: list[PoolUnit] = []
    free_workers = list(reversed(range(num_workers)))
    while waiting_chains or running_units:
        while waiting_chains and free_workers:
            chain, worker = heappop(waiting_chains)[2], free_workers.pop()
            seconds = chains[chain][next_unit[chain]]
            next_unit[chain] += 1
            seconds_left[chain] -= seconds
            heappush(running_units, (now + seconds, worker, chain))
            started_units.append(PoolUnit(chain, worker, now, now + seconds))
        now = running_units[0][0]
        # chains whose units end now wait again before any worker takes its next unit
        while running_units and running_units[0][0] == now:
            _, worker, chain = heappop(running_units)
            free_workers.append(worker)
            if next_unit[chain] < len(chains[chain]):
                heappush(waiting_chains, (key(seconds_left[chain], arrival, draw()), arrival, chain))
                arrival += 1
    return started_units


@dataclass(frozen=True)
class Line:
    """A line of workers. `orders`: the queue of each worker, as an array (workers, units) of F, R and B, filled up with
    0."""

    orders: Array
    seconds: Sequence[Mapping[str, float]]  # for each worker, the seconds of F, R and B
    num_micro_batches: int
    # for each worker but the last, the seconds of a message between it and the next worker
    send_seconds: Sequence[float]
    recompute_waits: bool  # True: R begins only after the message that B needs has arrived
    # True: if R is next, and the message for B has not arrived, the next F may run first
    is_opportunistic: bool


@dataclass(frozen=True)
class LineRun:
    """The run of a line. `starts`, `ends`: times of F, R and B, in arrays (kinds, workers, micro-batches), in which NaN
    stands for no unit; None if the times were not kept."""

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
        self.line_lengths = [len(line.seconds) for line in lines]
        self.first_workers = np.cumsum([0, *self.line_lengths[:-1]])
        num_workers, most = sum(self.line_lengths), max(line.num_micro_batches for line in lines)
        self.worker_numbers = np.arange(num_workers)
        self.is_first, self.is_last = np.zeros(num_workers, bool), np.zeros(num_workers, bool)
        self.is_first[self.first_workers] = self.is_last[
            self.first_workers + np.array(self.line_lengths) - 1
        ] = True
        self.num_micro_batches = np.repeat([line.num_micro_batches for line in lines], self.line_lengths)
        self.recompute_waits = np.repeat([line.recompute_waits for line in lines], self.line_lengths)
        self.is_opportunistic = np.repeat([line.is_opportunistic for line in lines], self.line_lengths)
        self._set_queues(lines, num_workers)
        # For each worker and micro-batch, the time at which the message from the previous worker, or from the next
        # worker, arrives; inf: not known yet. The last column is for messages that never come.
        self.previous_arrives_at, self.next_arrives_at = np.full((2, num_workers, most + 1), np.inf)
        exists = np.arange(most + 1) < self.num_micro_batches[:, None]
        self.previous_arrives_at[exists & self.is_first[:, None]] = 0.0
        self.next_arrives_at[exists & self.is_last[:, None]] = 0.0
        # By direction, link, and place in the link (one for each message that the link carries at a time): the time at
        # which the link has carried the last message of this place.
        self.links = np.zeros((2, num_workers, sends_at_once or 0))
        self.free_at, self.busy = np.zeros(num_workers), np.zeros(num_workers)
        # for each worker, a time before which its next unit does not begin, so that its next messages arrive later
        self.least = np.zeros(num_workers)
        self.starts = self.ends = None
        if keeps_units:
            self.starts, self.ends = np.full((2, len(KINDS), num_workers, most), np.nan)

    def _set_queues(self, lines: Sequence[Line], num_workers: int) -> None:
        """Set each worker's queue, the seconds of its units and of its messages, and its place in the queue."""
        import numpy as np

        self.orders = np.zeros((num_workers, 1 + max(line.orders.shape[1] for line in lines)), np.uint8)
        self.seconds = np.zeros((num_workers, 1 + len(KINDS)))
        self.send_seconds = np.zeros(num_workers)  # of a message from each worker to the next
        for first_worker, line in zip(self.first_workers, lines, strict=True):
            workers = slice(first_worker, first_worker + len(line.seconds))
            self.orders[first_worker : first_worker + len(line.orders), : line.orders.shape[1]] = line.orders
            self.seconds[workers, 1:] = [[of_worker[kind] for kind in KINDS] for of_worker in line.seconds]
            self.send_seconds[workers] = [*line.send_seconds, 0.0]
        self.done = {kind: np.zeros(num_workers, int) for kind in (F, R, B)}
        self.queue_positions = np.zeros(num_workers, int)  # the next unit's place in each worker's queue
        self.num_early_forwards = np.zeros(num_workers, int)  # forward units that ran earlier than their turn

    def advance(self) -> bool:
        """Run one unit of every worker whose next unit is known; return False if all units are done."""
        import numpy as np

        kinds = self._next_kinds()
        if not kinds.any():
            return False
        from_previous = self.previous_arrives_at[self.worker_numbers, self.done[F]]
        from_next = self.next_arrives_at[self.worker_numbers, self.done[B]]
        is_unsure = None
        if self.is_opportunistic.any():
            previous_least, next_least = np.roll(self.least, 1), np.roll(self.least, -1)
            kinds, is_unsure = self._swapped(kinds, (from_previous, from_next), (previous_least, next_least))
        arrivals = np.where(
            kinds == F, from_previous, np.where((kinds == B) | self.recompute_waits, from_next, 0.0)
        )
        starts = np.maximum(self.free_at, arrivals)
        is_ready = (kinds != 0) & (starts < np.inf)
        if is_unsure is not None:
            is_ready &= ~is_unsure
            is_blocked = (kinds != 0) & ~is_ready & ~is_unsure
            least_of_blocked = np.maximum(self.least, np.where(kinds == F, previous_least, next_least))
            self.least = np.where(is_blocked, least_of_blocked, np.where(kinds == 0, np.inf, self.least))
        workers = np.flatnonzero(is_ready)
        self._run(workers, kinds[workers], starts[workers])
        return True

    def _swapped(
        self, kinds: Array, arrivals: tuple[Array, Array], neighbor_least: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Let opportunistic workers whose next unit is R run the next F first, if the message for B has not arrived and
        the message for F has. Return the new kinds, and an array that is True for workers that must wait for a later
        call, because one of the two messages is not known yet, but may arrive before the worker is free.

        `arrivals`: the times at which the messages from the previous and from the next worker arrive. `neighbor_least`:
        times before which the next units of the previous and of the next worker do not begin.
        """
        import numpy as np

        (from_previous, from_next), (previous_least, next_least) = arrivals, neighbor_least
        may_swap = (kinds == R) & self.is_opportunistic & (from_next > self.free_at)
        backward_may_come = may_swap & (from_next == np.inf) & (next_least < self.free_at)
        has_forward = may_swap & (self.done[F] < self.num_micro_batches)
        forward_may_come = has_forward & (from_previous == np.inf) & (previous_least < self.free_at)
        is_unsure = backward_may_come | forward_may_come
        swaps = may_swap & ~is_unsure & (from_previous <= self.free_at)
        self.num_early_forwards += swaps
        self.queue_positions -= swaps
        return np.where(swaps, F, kinds), is_unsure

    def _next_kinds(self) -> Array:
        """Return the kind of each worker's next unit in its queue, without forward units that ran earlier."""
        kinds = self.orders[self.worker_numbers, self.queue_positions]
        while (ran_earlier := (kinds == F) & (self.num_early_forwards > 0)).any():
            self.queue_positions += ran_earlier
            self.num_early_forwards -= ran_earlier
            kinds = self.orders[self.worker_numbers, self.queue_positions]
        return kinds

    def _run(self, workers: Array, kinds: Array, starts: Array) -> None:
        """Run a unit of each of these workers, and send the messages. `kinds`, `starts`: for each of the workers, the
        unit's kind and its start."""
        seconds = self.seconds[workers, kinds]
        if self.noise:
            seconds = self.noise(seconds, False)
        ends = starts + seconds
        self.busy[workers] += seconds
        self.free_at[workers] = self.least[workers] = ends
        self.queue_positions[workers] += 1
        for kind_index, kind in enumerate((F, R, B)):
            is_of_kind = kinds == kind
            workers_of_kind, ends_of_kind = workers[is_of_kind], ends[is_of_kind]
            micro_batches = self.done[kind][workers_of_kind]
            if self.starts is not None and self.ends is not None:
                units = kind_index, workers_of_kind, micro_batches
                self.starts[units], self.ends[units] = starts[is_of_kind], ends_of_kind
            if kind != R:
                self._send(kind, workers_of_kind, micro_batches, ends_of_kind)
            self.done[kind][workers_of_kind] += 1

    def _send(self, kind: int, workers: Array, micro_batches: Array, ends: Array) -> None:
        """Send a message about each of these micro-batches from its worker, at the times `ends`, to the next worker (F)
        or the previous one (B). Write the times at which the messages arrive."""
        import numpy as np

        has_receiver = ~(self.is_last if kind == F else self.is_first)[workers]
        workers, micro_batches, ends = workers[has_receiver], micro_batches[has_receiver], ends[has_receiver]
        if len(workers) == 0:
            return
        receivers, arrivals = (
            (workers + 1, self.previous_arrives_at) if kind == F else (workers - 1, self.next_arrives_at)
        )
        seconds = self.send_seconds[np.minimum(workers, receivers)]
        if self.noise:
            seconds = self.noise(seconds, True)
        if self.sends_at_once:
            link_places = int(kind == F), workers, micro_batches % self.sends_at_once
            ends = np.maximum(ends, self.links[link_places])
            self.links[link_places] = ends + seconds
        arrivals[receivers, micro_batches] = ends + seconds

    def runs(self) -> list[LineRun]:
        """Return the run of each line."""
        runs = []
        for first_worker, num_workers in zip(self.first_workers, self.line_lengths, strict=True):
            workers = slice(first_worker, first_worker + num_workers)
            starts = None if self.starts is None else self.starts[:, workers]
            ends = None if self.ends is None else self.ends[:, workers]
            runs.append(LineRun(self.free_at[workers], self.busy[workers], starts, ends))
        return runs
