"""The optimizer's updates on the host: threads share a layer's update; the layer that is needed first goes first.

An update is cut into chunks. A free thread takes the next chunks of the update with the earliest deadline, among
the updates whose gradient has landed. So a slow thread delays no other thread, and no thread waits for another.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Update:
    """An update in `num_chunks` chunks. `landed`: the event of the gradient's arrival. `work` waits for this event, so
    a thread best begins an update after it."""

    def __init__(
        self, number: int, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]
    ) -> None:
        self.number, self.deadline, self.landed, self.work = number, deadline, landed, work
        self.num_chunks, self.num_taken, self.num_done = num_chunks, 0, 0
        self.done: Future[None] = Future()


class Workers:
    """The threads that do updates, and the updates that wait for a thread."""

    def __init__(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        self._pool, self._num_threads = pool, num_threads
        self._lock = threading.Lock()
        self._asked = itertools.count()
        self._waiting: list[Update] = []  # updates with chunks left, by deadline

    def update(self, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]) -> Future[None]:
        """Call work(first, last) on chunks [first, last), each chunk once, on any thread; return at once. Among updates
        whose gradient has landed, the one with the earliest deadline goes first."""
        with self._lock:
            update = Update(next(self._asked), deadline, landed, num_chunks, work)
            bisect.insort(self._waiting, update, key=lambda waiting: waiting.deadline)
        self._pool.submit(self._take)
        return update.done

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(cancel_futures=cancel_futures)

    def _take(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            # The gradient of the update asked for first will land first if no gradient has landed yet.
            landed = (update for update in self._waiting if update.landed.query())
            update = next(landed, None) or min(self._waiting, key=lambda waiting: waiting.number)
            first, left = update.num_taken, update.num_chunks - update.num_taken
            # Large shares come first, because each share costs a little; small ones come last, so that all threads end
            # together.
            share = max(1, left // (2 * self._num_threads))
            update.num_taken += share
            if update.num_taken == update.num_chunks:
                self._waiting.remove(update)
            is_more = bool(self._waiting)
        if is_more:
            self._pool.submit(self._take)  # for another thread, or for this one later
        error: Exception | None = None
        try:
            update.work(first, first + share)
        except Exception as raised:
            error = raised
        with self._lock:
            update.num_done += share
            is_over = not update.done.done() and (error is not None or update.num_done == update.num_chunks)
        if is_over and error is not None:
            update.done.set_exception(error)
        elif is_over:
            update.done.set_result(None)
