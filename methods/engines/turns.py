"""Lets a loop of a library train one batch at a time: the loop runs in a thread that takes turns with its caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

STACK_BYTES = 8 * 2**20  # of the thread: as much as a main thread has, because the loop trains in it


class Ended(BaseException):
    """Ends the loop in its thread when the caller takes no further turn."""


class Turns:
    """Runs `loop` in a thread. Its caller and the thread take turns: one waits while the other works. So the loop does
    nothing between the caller's turns, and torch's dispatch modes of the caller, which belong to a thread, hold in the
    loop's turns, too."""

    def __init__(self, loop: Callable[[], None]) -> None:
        self._loop = loop
        self._to_loop, self._to_caller = SimpleQueue[tuple[Any, list[Any]]](), SimpleQueue[Any]()
        self._modes = ExitStack()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_callers = True  # whose turn it is

    def __enter__(self) -> Turns:
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)
        return self

    def __exit__(self, *exc: object) -> None:
        """End the loop, if it has not ended. If its turn was interrupted, the thread is left to itself."""
        self._to_loop.put((Ended(), []))
        if self._is_callers:
            self._thread.join()

    def give(self, value: Any = None) -> Any:
        """Let the loop work with `value`. Return what the loop gives for the next value; None if the loop has ended.
        Raises what the loop raises. The first value only starts the loop."""
        self._is_callers = False
        self._to_loop.put((value, _get_current_dispatch_mode_stack()))
        message = self._to_caller.get()
        self._is_callers = True
        if isinstance(message, BaseException):
            raise message
        return message

    def take(self, message: Any = None) -> Any:
        """In the loop: end the turn with `given`, and return the caller's next value."""
        self._modes.close()
        self._to_caller.put(message)
        return self._taken()

    def _taken(self) -> Any:
        value, modes = self._to_loop.get()
        if isinstance(value, Ended):
            raise value
        for mode in modes:
            self._modes.enter_context(mode)
        return value

    def _run(self) -> None:
        ended = None
        try:
            self._taken()
            self._loop()
        except BaseException as error:
            ended = error
        finally:
            self._modes.close()
        self._to_caller.put(ended)
