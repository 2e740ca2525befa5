"""The host's updates: every chunk once, by any thread, what is needed first before all others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.devices.update_threads import Workers
from tests.support.until import until


class Landing:
    """An event that happens when it is told to."""

    def __init__(self, *, landed: bool = True) -> None:
        self.happened = threading.Event()
        if landed:
            self.happened.set()

    def query(self) -> bool:
        return self.happened.is_set()


class Failed:
    """An event of a device on which an earlier kernel has failed."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    synchronize = query


@pytest.fixture(params=[1, 3])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    pool = Workers(ThreadPoolExecutor(request.param), request.param)
    yield pool
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def one_worker() -> Iterator[Workers]:
    pool = Workers(ThreadPoolExecutor(1), 1)
    yield pool
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("num_chunks", [1, 2, 7, 100])
def test_every_chunk_is_worked_on_once(workers: Workers, num_chunks: int) -> None:
    taken: list[int] = []
    updates = [
        workers.update(0, Landing(), num_chunks, lambda first, last: taken.extend(range(first, last)))
        for _ in range(5)
    ]
    for update in updates:
        update.result()
    assert sorted(taken) == sorted([*range(num_chunks)] * 5)


def test_what_is_needed_first_goes_first(one_worker: Workers) -> None:
    order: list[int] = []
    gate = threading.Event()
    one_worker.update(9, Landing(), 1, lambda first, last: gate.wait() and None)
    until(lambda: not one_worker._waiting)
    updates = [
        one_worker.update(deadline, Landing(), 1, lambda first, last, place=deadline: order.append(place))
        for deadline in (3, 1, 2)
    ]
    gate.set()
    for update in updates:
        update.result()
    assert order == [1, 2, 3]


def test_what_has_not_landed_holds_up_nothing_that_has(one_worker: Workers) -> None:
    order: list[int] = []
    late = Landing(landed=False)
    gate = threading.Event()
    one_worker.update(9, Landing(), 1, lambda first, last: gate.wait() and None)
    until(lambda: not one_worker._waiting)

    def last_of_all(first: int, last: int) -> None:
        late.happened.wait()
        order.append(0)

    first = one_worker.update(0, late, 1, last_of_all)
    second = one_worker.update(1, Landing(), 1, lambda first, last: order.append(1))
    gate.set()
    second.result()
    late.happened.set()
    first.result()
    assert order == [1, 0]


def test_where_nothing_has_landed_what_was_asked_for_first_is_waited_for(one_worker: Workers) -> None:
    """Else a thread would sit in an update that waits for the norm, while gradients land."""
    order: list[int] = []
    gate, landings = threading.Event(), [Landing(landed=False), Landing(landed=False)]
    one_worker.update(0, Landing(), 1, lambda first, last: gate.wait() and None)
    until(lambda: not one_worker._waiting)

    def work(place: int) -> None:
        landings[place].happened.wait()
        order.append(place)

    updates = [one_worker.update(5 + i, landings[i], 1, lambda first, last, i=i: work(i)) for i in range(2)]
    gate.set()
    until(lambda: len(one_worker._waiting) <= 1)
    landings[0].happened.set()
    updates[0].result()
    landings[1].happened.set()
    updates[1].result()
    assert order == [0, 1]


def test_threads_share_one_update() -> None:
    """Each of three threads waits in its chunk for the other two."""
    pool, together = Workers(ThreadPoolExecutor(3), 3), threading.Barrier(3)
    pool.update(0, Landing(), 3, lambda first, last: together.wait() and None).result()
    pool.shutdown()


def test_an_update_that_fails_says_so_to_who_waits(workers: Workers) -> None:
    def fail(first: int, last: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        workers.update(0, Landing(), 50, fail).result()
    workers.update(0, Landing(), 1, lambda first, last: None).result()


def test_an_error_of_the_device_reaches_whoever_waits_for_an_update(one_worker: Workers) -> None:
    failed = Failed()
    updates = [
        one_worker.update(0, failed, 1, lambda first, last: failed.synchronize() and None) for _ in range(3)
    ]
    for update in updates:
        with pytest.raises(RuntimeError, match="device-side assert"):
            update.result()


class OneThread(ThreadPoolExecutor):
    """A pool on a system that lets it start one thread: as there, what was asked for stays in the queue."""

    def submit(self, *arguments: Any, **options: Any) -> Any:
        is_first = not self._threads
        future = super().submit(*arguments, **options)
        if not is_first:
            raise RuntimeError("can't start new thread")
        return future


def test_an_update_ends_where_no_second_thread_can_be_started() -> None:
    done: list[int] = []
    workers = Workers(OneThread(1), 4)
    workers.update(0, Landing(), 9, lambda first, last: done.extend(range(first, last))).result()
    workers.shutdown()
    assert done == [*range(9)]


def test_an_update_that_waits_at_the_end_is_done_before_the_threads_end() -> None:
    done: list[int] = []
    gate = threading.Event()
    workers = Workers(ThreadPoolExecutor(1), 1)
    update = workers.update(
        0, Landing(), 9, lambda first, last: gate.wait() and done.extend(range(first, last))
    )
    threading.Timer(0.05, gate.set).start()
    workers.shutdown()
    assert update.done() and done == [*range(9)]
