"""Notes for --trace when each stream and thread of a run did which work, and reports how long the allocation of host
memory takes.

Methods only name their work on streams and threads (Device.span); this module reads the clock. On an asynchronous
stream a moment is an event, whose time is read at the end of the run, so that no work waits for the event. On a thread,
or on a stream of the CPU, a moment is the host's time. Without --trace no work is noted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core.job import Job
from harness.devices.streams import STREAMS, UNTRACED
from harness.run.timeline import Span, Timeline, steps, write_timeline

FIRST_REPORT_SECONDS = 1.0  # total seconds of allocations of host memory at which the first report comes
# number of a run's last steps that are traced; work queued before them may end in the first traced step
NUM_TRACED_STEPS = 3


class Trace:
    """Notes the work of a run's last NUM_TRACED_STEPS steps and of its end, and writes the trace's file."""

    def __init__(self, job: Job) -> None:
        self.job, self.first_step = job, max(1, job.steps + 1 - NUM_TRACED_STEPS)
        self.streams = STREAMS[job.device]
        # True for torch's streams, False for a CPU's
        self.has_events = hasattr(self.streams.current(), "wait_stream")
        self.is_on = False
        self.notes: list[tuple[str, int, str, str, Any, Any]] = []  # (track, thread, work, part, start, end)
        self.streams.span = self.span

    def span(self, stream: Any, track: str, work: str, of: str) -> AbstractContextManager[None]:
        return self._noted(stream, track, work, of) if self.is_on else UNTRACED

    @contextmanager
    def _noted(self, stream: Any, track: str, work: str, of: str) -> Iterator[None]:
        """Note the moments at which the work in this context begins and ends, and the thread that runs or queues the
        work."""
        start = self.mark(stream)
        yield
        self.notes.append((track, threading.get_ident(), work, of, start, self.mark(stream)))

    def mark(self, stream: Any) -> Any:
        """Return the present moment: an event recorded on the stream or, if `stream` is None or the device's streams
        have no events, the host's time in seconds."""
        if stream is None or not self.has_events:
            return time.perf_counter()
        kind = torch.cuda.Event if self.job.device == "cuda" else functools.partial(torch.Event, "sim")
        event: Any = kind(enable_timing=True)
        event.record(stream)
        return event

    def write(self, marks: Sequence[Any], report: Callable[[JsonObject], None]) -> None:
        """Wait for all queued work, and write the trace's file. `marks`: the moments at which the run's steps begin and
        end, from the first step on. `report` gets a warning if the trace has no spans or cannot be written."""
        self.streams.span = None
        job, timeline = self.job, self._timeline(marks[self.first_step - 1 :])
        if not timeline.spans:
            text = f"{job.method} names no work on its streams: the trace holds its steps alone"
            report({"event": "warning", "text": text})
        assert job.trace
        try:
            write_timeline(timeline, Path(job.trace))
        except OSError as error:  # the run itself is valid without a trace
            report({"event": "warning", "text": f"cannot write {job.trace}: {error.strerror}"})

    def _timeline(self, marks: Sequence[Any]) -> Timeline:
        for *_, end in self.notes:
            if not isinstance(end, float):
                end.synchronize()
        event, now = self.mark(self.streams.current()), time.perf_counter()
        if self.has_events:
            event.synchronize()

        def seconds(moment: Any) -> float:
            return moment if isinstance(moment, float) else now - moment.elapsed_time(event) / 1000

        threads: dict[str, dict[int, int]] = {}  # for each track: its threads, numbered in the order seen
        for track, thread, *_ in self.notes:
            numbers = threads.setdefault(track, {})
            numbers.setdefault(thread, len(numbers) + 1)
        spans = []
        for track, thread, work, of, start, end in self.notes:
            several = f" {threads[track][thread]}" if len(threads[track]) > 1 else ""
            spans.append(Span(track + several, work, of.rstrip("."), seconds(start), seconds(end)))
        options = "".join(f" {name}={value}" for name, value in self.job.options.items() if value is not None)
        title = f"{self.job.method}{options}, {counted(self.job.workload.num_layers, 'layer')}"
        about: JsonObject = {"title": title, "clock": self.job.device, "job": self.job.to_dict()}
        if self.job.world_size > 1:
            # of_ranks() needs the time on the clock from which the file's times count
            about["zero_seconds"] = seconds(marks[0])
        return Timeline(spans, steps([seconds(mark) for mark in marks], self.first_step), about)


class Taking:
    """Reports how many bytes of host memory a method has allocated, and how many seconds the allocations took. The
    first report comes after FIRST_REPORT_SECONDS of allocations, and another one each time that these seconds have
    doubled."""

    def __init__(self, device: str, report: Callable[[JsonObject], None]) -> None:
        self.report, self.num_bytes, self.seconds, self.next_seconds = report, 0, 0.0, FIRST_REPORT_SECONDS
        self.streams = STREAMS[device]
        self.streams.taking = self.taking

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.num_bytes += num_bytes
        self.seconds += time.perf_counter() - started
        if self.seconds >= self.next_seconds:
            self.next_seconds = 2 * self.seconds
            self.report({"event": "memory", "bytes": self.num_bytes, "seconds": self.seconds})

    def end(self) -> None:
        """Report the total, if allocations took at least FIRST_REPORT_SECONDS, and stop counting."""
        if self.seconds >= FIRST_REPORT_SECONDS:
            self.report({"event": "memory", "bytes": self.num_bytes, "seconds": self.seconds})
        self.streams.taking = nullcontext
