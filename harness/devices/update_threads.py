"""The host's updates: threads that share a layer's update, the layer that is needed first before all others.

An update is cut into chunks. A thread takes some chunks of the update with the earliest deadline among those whose
gradient has landed, works on them, and comes again; so a slow thread holds up nobody, and no thread waits for another.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Update:
    """Work on `num_chunks` chunks, best begun when the event `landed` has happened; it waits for that itself."""

    def __init__(
        self, number: int, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]
    ) -> None:
        self.number, self.deadline, self.landed, self.work = number, deadline, landed, work
        self.num_chunks, self.num_taken, self.num_done = num_chunks, 0, 0
        self.done: Future[None] = Future()


class Workers:
    """Threads for updates."""

    def __init__(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        self._pool, self._num_threads = pool, num_threads
        self._lock = threading.Lock()
        self._asked = itertools.count()
        self._waiting: list[Update] = []  # with chunks that nobody has taken, by deadline

    def update(self, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]) -> Future[None]:
        """Call work(first, last) on chunks [first, last), each chunk once, on any of the threads; returns at once. What
        has the lowest deadline of all that has landed goes first."""
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
            # Where nothing has landed yet, what was asked for first will be the first to land.
            landed = (update for update in self._waiting if update.landed.query())
            update = next(landed, None) or min(self._waiting, key=lambda waiting: waiting.number)
            first, left = update.num_taken, update.num_chunks - update.num_taken
            # Large shares first, for each costs a little; small ones last, so that all threads end together.
            share = max(1, left // (2 * self._num_threads))
            update.num_taken += share
            if update.num_taken == update.num_chunks:
                self._waiting.remove(update)
            is_more = bool(self._waiting)
        if is_more:
            self._pool.submit(self._take)  # for the next thread, or for this one when it is through
        try:
            update.work(first, first + share)
        except Exception as error:
            self._end(update, share, error)
        else:
            self._end(update, share, None)

    def _end(self, update: Update, share: int, error: Exception | None) -> None:
        with self._lock:
            update.num_done += share
            is_over = not update.done.done() and (error is not None or update.num_done == update.num_chunks)
        if is_over and error is not None:
            update.done.set_exception(error)
        elif is_over:
            update.done.set_result(None)
