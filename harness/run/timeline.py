"""The timeline of a run: spans of work on streams and threads. A timeline is written to and read from a file in the
trace format of Chrome and Perfetto. share() computes how much of a step's copies and updates ran during compute."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.base.foreign_file import read_json
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole

# rows of a timeline, from top to bottom
TRACKS = ("steps", "compute", "inbound", "outbound", "update", "disk")
# The kinds of work that may be hidden behind compute, and the tracks of each kind.
KINDS = {"copies": ("inbound", "outbound"), "updates": ("update",), "disk": ("disk",)}
FILE_START = '{"displayTimeUnit"'  # how the file begins
MICROSECONDS = 1e6  # microseconds in a second; the file's times are in microseconds
Interval = tuple[float, float]


class Span(NamedTuple):
    """One piece of work of a stream or a thread: `work` is its kind, `of` the part of the model, `start` and `end` are
    times in seconds."""

    track: str  # one of TRACKS, followed by the thread's number if several threads have the same track
    work: str
    of: str
    start: float
    end: float


class Timeline(NamedTuple):
    """The spans and the steps of a run, and facts about the run, such as its title and its clock."""

    spans: list[Span]
    steps: list[Span]
    about: JsonObject


class Share(NamedTuple):
    """The seconds of a step, of the step's compute and, for each kind of work in KINDS, of its work during compute
    (`hidden`) and outside of compute (`exposed`). Time in which work of two kinds is exposed counts for both kinds."""

    step: float
    compute: float
    hidden: dict[str, float]
    exposed: dict[str, float]


def steps(ends: Sequence[float], first_step: int) -> list[Span]:
    pairs = enumerate(itertools.pairwise(ends), first_step)
    return [Span("steps", f"step {number}", "", start, end) for number, (start, end) in pairs]


# ---- Files


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write the timeline to one JSON file, whole or not at all. The file's times count from the start of the first
    step."""
    spans = sorted((*timeline.steps, *timeline.spans), key=lambda span: span.start)
    tracks = sorted({span.track for span in spans}, key=_track_order)
    threads = {track: number for number, track in enumerate(tracks, start=1)}
    zero_seconds = min((span.start for span in timeline.steps), default=0.0)
    metadata: list[tuple[int, str, JsonObject]] = [
        (0, "process_name", {"name": timeline.about.get("title", "")})
    ]
    for name, number in threads.items():
        metadata += [
            (number, "thread_name", {"name": name}),
            (number, "thread_sort_index", {"sort_index": number}),
        ]
    events = [
        {"ph": "M", "pid": 1, "tid": number, "name": name, "args": facts} for number, name, facts in metadata
    ]
    events += [
        {
            "ph": "X",
            "pid": 1,
            "tid": threads[span.track],
            "ts": (span.start - zero_seconds) * MICROSECONDS,
            "dur": (span.end - span.start) * MICROSECONDS,
            "name": f"{span.work} {span.of}".strip(),
            "cat": span.work,
            "args": {"of": span.of},
        }
        for span in spans
    ]
    lines = ",\n".join(map(json.dumps, events))
    about = json.dumps(timeline.about)
    write_whole(path, f'{FILE_START}: "ms", "otherData": {about}, "traceEvents": [\n{lines}\n]}}\n')


def read_timeline(path: Path) -> Timeline:
    """Return the timeline in a file. Raises ValueError, which names the file, if it is no trace that write_timeline()
    wrote."""
    try:
        data = read_json(path)
        events = data["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        timeline = Timeline([], [], data["otherData"])
        for event in events:
            if event["ph"] != "X":
                continue
            start, end = event["ts"] / MICROSECONDS, (event["ts"] + event["dur"]) / MICROSECONDS
            span = Span(names[event["tid"]], event["cat"], event["args"]["of"], start, end)
            (timeline.steps if span.track == "steps" else timeline.spans).append(span)
        return timeline
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a trace of this harness, got {error!r}") from error


def of_ranks(ranks: dict[int, Timeline]) -> Timeline:
    """Merge the timelines of ranks on one machine, by the clock that all these ranks have read. The steps are the first
    rank's. `about["zero_seconds"]` of a timeline is the time on that clock from which the timeline's times count."""
    first = ranks[min(ranks)]
    spans = []
    for rank, timeline in ranks.items():
        offset_seconds = timeline.about["zero_seconds"] - first.about["zero_seconds"]
        for span in timeline.spans:
            track = f"{span.track} rank {rank}"
            start, end = span.start + offset_seconds, span.end + offset_seconds
            spans.append(Span(track, span.work, span.of, start, end))
    return Timeline(spans, first.steps, first.about)


def _track_order(track: str) -> tuple[int, str]:
    kind = track.split(" ")[0]
    return TRACKS.index(kind) if kind in TRACKS else len(TRACKS), track


# ---- What hid behind what


def share(spans: Iterable[Span], step: Span) -> Share:
    tracks: dict[str, list[Interval]] = {}
    for span in spans:
        start, end = max(span.start, step.start), min(span.end, step.end)
        if end > start:
            tracks.setdefault(span.track.split(" ")[0], []).append((start, end))
    compute = union(tracks.get("compute", []))
    hidden, exposed = dict[str, float](), dict[str, float]()
    for kind, track_names in KINDS.items():
        busy = union([interval for name in track_names for interval in tracks.get(name, [])])
        hidden[kind] = total_seconds(intersection(busy, compute))
        exposed[kind] = total_seconds(busy) - hidden[kind]
    return Share(step.end - step.start, total_seconds(compute), hidden, exposed)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, as a sorted list of disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the intersection of two sorted lists of disjoint intervals, as a sorted list."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a, b in itertools.product(first, second))
    return [(start, end) for start, end in pairs if start < end]


def total_seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
