"""The threads that do the optimizer's updates on the host. Several threads share the update of a layer; the update of
the layer that is needed first comes first.

An update is cut into chunks. Among the updates whose gradient has landed (has arrived on the host), a free thread takes
the next chunks of the update with the earliest deadline. So no thread waits for another, even for a slow thread.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Update:
    """An update in `num_chunks` chunks. `landed`: the event of the gradient's arrival on the host. work(first, last)
    waits for this event and updates chunks [first, last), so threads prefer updates whose event has happened. `number`
    counts updates in the order of their requests. `deadline`: the update with the lowest deadline is needed first."""

    def __init__(
        self, number: int, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]
    ) -> None:
        self.number, self.deadline, self.landed, self.work = number, deadline, landed, work
        self.num_chunks, self.num_taken, self.num_done = num_chunks, 0, 0
        self.done: Future[None] = Future()


class Workers:
    """The threads that do updates, and the list of updates that still have chunks to do."""

    def __init__(self, pool: ThreadPoolExecutor, num_threads: int) -> None:
        self._pool, self._num_threads = pool, num_threads
        self._lock = threading.Lock()
        self._request_numbers = itertools.count()
        self._waiting: list[Update] = []  # updates that have chunks left, sorted by deadline

    def update(
        self, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]
    ) -> Future[None]:
        """Let the threads call work(first, last) on ranges of chunks [first, last), so that each chunk is done once.
        Return at once, with a future that ends with the update. Among updates whose gradient has landed, the update
        with the earliest deadline comes first."""
        with self._lock:
            update = Update(next(self._request_numbers), deadline, landed, num_chunks, work)
            bisect.insort(self._waiting, update, key=lambda waiting: waiting.deadline)
        self._pool.submit(self._take)
        return update.done

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """End the threads: after all updates, or with `cancel_futures` after the shares that threads have taken."""
        if cancel_futures:
            with self._lock:
                self._waiting.clear()
        self._pool.shutdown(cancel_futures=cancel_futures)

    def _take(self) -> None:
        while self._take_share():
            pass

    def _take_share(self) -> bool:
        """Do the next share of an update. Return True if this thread must go on by itself, because the pool takes no
        more work: the system has no further thread, or the pool ends."""
        with self._lock:
            if not self._waiting:
                return False
            # If no gradient has landed yet, take the update that was requested first, whose gradient will land first.
            landed_updates = (update for update in self._waiting if _may_begin(update.landed))
            update = next(landed_updates, None) or min(self._waiting, key=lambda waiting: waiting.number)
            first_chunk, chunks_left = update.num_taken, update.num_chunks - update.num_taken
            # The first shares of an update are large, because taking a share costs time. The last shares are small, so
            # that all threads end at nearly the same time.
            num_chunks = max(1, chunks_left // (2 * self._num_threads))
            update.num_taken += num_chunks
            if update.num_taken == update.num_chunks:
                self._waiting.remove(update)
            has_more, goes_on = bool(self._waiting), False
        if has_more:
            try:
                self._pool.submit(self._take)  # lets any thread take the next chunks
            except RuntimeError:
                goes_on = True
        error: Exception | None = None
        try:
            update.work(first_chunk, first_chunk + num_chunks)
        except Exception as raised:
            error = raised
        with self._lock:
            update.num_done += num_chunks
            is_over = not update.done.done() and (error is not None or update.num_done == update.num_chunks)
        if is_over and error is not None:
            update.done.set_exception(error)
        elif is_over:
            update.done.set_result(None)
        return goes_on


def _may_begin(landed: Any) -> bool:
    """True if the gradient has landed, or if the device has failed. After a failure work() raises the device's error,
    and the update's future passes the error on to whoever waits for the update."""
    try:
        return bool(landed.query())
    except RuntimeError:
        return True
