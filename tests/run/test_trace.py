"""Traces: the format that Chrome and Perfetto read, and that spans tell what happened, measured and in virtual time."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import overlap
from harness.core.job import Budget, Job, Workload
from harness.core.method import create
from harness.core.record import Gate, Record
from harness.devices.streams import Device
from harness.jobs.progress import _Lines
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from harness.run import trace
from harness.run.launch import launch
from harness.run.timeline import (
    Span,
    Timeline,
    intersection,
    read_timeline,
    share,
    steps,
    total_seconds,
    union,
    write_timeline,
)
from harness.run.trace import NUM_TRACED_STEPS, Taking
from harness.simulation.virtual_clock import VirtualMachine, VirtualRun, virtual_run
from papers.figures import profile
from papers.report import page as report
from tests.papers.report.test_page import RECORDS, Page, measured
from tests.support import records
from tests.support.training import tiny

DEMO = profile.make_profile("demo", None, ("stronghold",), {"cpu": "some CPU", "cores": 2})
WORKLOAD = Workload(num_layers=4, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)
OPTIONS = {"window_size": 2, "placement": "R1W2D1", "clipping": "deferred"}
SLACK_SECONDS = {"cuda": 1e-5}  # of an event's time, float32 milliseconds; else of times in microseconds
NUM_STEPS = 5
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
)


@pytest.fixture(scope="module", params=["cpu", "sim", "l2l", "hydra", CUDA])
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """A real run of each kind, traced: streams in the code's order, streams of a link that takes its time."""
    folder = tmp_path_factory.mktemp("traced")
    path, kind = folder / "trace.json", request.param
    name = kind if kind in ("l2l", "hydra") else "stronghold"
    budget = (
        Budget(device_bytes=2**24, host_bytes=2**26, link_bytes_per_second=2**26)
        if kind == "sim"
        else Budget()
    )
    if kind == "sim":
        request.getfixturevalue("compiled_sim")
    options = {**OPTIONS, "disk": str(folder)} if name == "stronghold" else {}
    device = kind if kind in ("sim", "cuda") else "cpu"
    job = Job(name, WORKLOAD, options, budget, device, NUM_STEPS, 1, trace=str(path))
    record = Record.read(launch(job, lambda: "key", folder))
    assert record.status == "ok", record.reason
    return path, record


@pytest.fixture(scope="module")
def virtual() -> VirtualRun:
    machine = VirtualMachine(
        device_flops_per_second=1e9,
        link_bytes_per_second=1e7,
        device_update_params_per_second=1e8,
        host_update_params_per_second=1e6,
        num_workers=2,
    )
    options = {"window_size": 2, "placement": "R1W3S2P2", "clipping": "deferred"}
    return virtual_run(create("stronghold", options), tiny(num_layers=8), machine)


def test_a_trace_is_json_with_the_fields_that_viewers_need(traced: tuple[Path, Record]) -> None:
    events = json.loads(traced[0].read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in (event for event in events if event["ph"] == "X"):
        assert event.keys() >= {"name", "pid", "tid", "ts", "dur"} and event["tid"] in names
        assert event["ts"] >= 0 and event["dur"] >= 0
    assert {"steps", "compute", "inbound", "outbound"} <= {name.split(" ")[0] for name in names.values()}


def test_spans_of_one_stream_or_thread_never_overlap(traced: tuple[Path, Record]) -> None:
    assert_disjoint(read_timeline(traced[0]))


def test_the_steps_are_those_of_the_record(traced: tuple[Path, Record]) -> None:
    path, record = traced
    steps = read_timeline(path).steps
    assert [step.work for step in steps] == [
        f"step {number}" for number in range(NUM_STEPS - NUM_TRACED_STEPS + 1, NUM_STEPS + 1)
    ]
    assert [step.end - step.start for step in steps] == pytest.approx(
        record.step_seconds[-NUM_TRACED_STEPS:], abs=1e-5
    )
    assert record.job.trace == str(path)


def test_a_layer_has_arrived_when_its_forward_pass_starts(traced: tuple[Path, Record]) -> None:
    if traced[1].job.method != "hydra":  # whose shards keep their weights from one turn to the next
        assert_arrived(read_timeline(traced[0]), at_least=4)


def test_the_disk_is_read_before_an_update_and_written_after_it(traced: tuple[Path, Record]) -> None:
    spans = sorted(
        (span for span in read_timeline(traced[0]).spans if span.of == "layers.3"),
        key=lambda span: span.start,
    )
    order = [span.work for span in spans if span.work in ("read", "update", "write")]
    if traced[1].job.method == "stronghold":
        whole = order[order.index("read") :]
        assert whole[:3] == ["read", "update", "write"]


@pytest.mark.heavy
def test_a_traced_job_has_the_key_and_the_losses_of_one_that_is_not(tmp_path: Path, forked: None) -> None:
    job = resolve(Job("stronghold", WORKLOAD, steps=3, warmup=1))[0]
    other = resolve(Job("stronghold", WORKLOAD, steps=3, warmup=1, trace=str(tmp_path / "trace.json")))[0]
    assert job.key() == other.key() and "trace" not in job.to_dict()
    events: list[dict] = []
    records = [
        Sweep(tmp_path, report=events.append).run([resolve(traced_job)])[0]
        for traced_job in (job, other, other)
    ]
    assert len({tuple(record.losses) for record in records}) == 1
    # The first, its reference, and the second, which has a trace then.
    assert [event["event"] for event in events].count("start") == 3


@pytest.mark.heavy
def test_a_method_that_tells_nothing_of_its_streams_is_named(tmp_path: Path) -> None:
    events: list[dict] = []
    job = Job("resident", WORKLOAD, {}, steps=2, warmup=1, trace=str(tmp_path / "trace.json"))
    launch(job, lambda: "key", tmp_path, report=events.append)
    assert [event["text"] for event in events if event["event"] == "warning"] == [
        "resident names no work on its streams: the trace holds its steps alone"
    ]
    assert (
        read_timeline(tmp_path / "trace.json").spans == []
        and len(read_timeline(tmp_path / "trace.json").steps) == 2
    )


def test_host_memory_is_told_of_whenever_its_taking_has_taken_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And once more where all is taken; in the lines that people read with its rate."""
    events: list[dict] = []
    monkeypatch.setattr(trace, "FIRST_REPORT_SECONDS", 0.0)
    taking = Taking("cpu", events.append)
    with Device("cpu") as device:
        device.room(1000, torch.float32, host=True)
        taking.next_seconds = 1000.0
        device.room(500, torch.float32, host=True)
        taking.end()
        device.room(500, torch.float32, host=True)
    assert [event["bytes"] for event in events] == [4000, 6000] and events[0]["seconds"] < events[1][
        "seconds"
    ]
    lines: list[str] = []
    _Lines(lines.append).report({"event": "memory", "bytes": 3 * 2**30, "seconds": 2.0})
    assert lines == ["  host memory: 3.0 GiB of 0 bytes taken, 1.5 GiB/s"]


def test_virtual_work_ends_when_virtual_time_does(virtual: VirtualRun) -> None:
    assert max(span.end for span in virtual.spans) == pytest.approx(virtual.total_seconds)
    assert virtual.timeline({}).steps[-1].end == virtual.step_ends[-1]


def test_virtual_streams_and_workers_do_what_they_are_charged_with(virtual: VirtualRun) -> None:
    """Two workers share an update: they take half the time of one."""
    busy: dict[str, float] = defaultdict(float)
    for span in virtual.spans:
        busy[span.track] += span.end - span.start
    charged = virtual.busy_seconds
    assert busy["inbound"] == pytest.approx(charged["inbound"])
    assert busy["outbound"] == pytest.approx(charged["outbound"])
    assert busy["update"] == pytest.approx(charged["workers"] / 2)
    assert busy["compute"] >= charged["compute"] * (1 - 1e-9)


def test_virtual_spans_are_in_order_too(virtual: VirtualRun) -> None:
    assert_disjoint(virtual.timeline({}))
    assert_arrived(virtual.timeline({}), at_least=2 * 7)


def test_a_virtual_trace_says_so_and_is_read_as_it_was_written(virtual: VirtualRun, tmp_path: Path) -> None:
    write_timeline(virtual.timeline({"title": "by hand"}), tmp_path / "trace.json")
    timeline = read_timeline(tmp_path / "trace.json")
    assert timeline.about == {"title": "by hand", "clock": "virtual"}
    assert len(timeline.spans) == len(virtual.spans) and [step.work for step in timeline.steps] == [
        "step 1",
        "step 2",
        "step 3",
    ]


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(ValueError, match=r"trace.json: expected a trace of this harness"):
        read_timeline(tmp_path / "trace.json")


def test_shares_by_hand() -> None:
    """Compute from 0 to 4 and 6 to 8, a copy from 3 to 5, one from 3.5 to 6.5, an update from 5 to 12; a step to 10."""
    spans = [
        Span("compute", "forward", "", 0, 4),
        Span("compute", "backward", "", 6, 8),
        Span("inbound", "weights", "", 3, 5),
        Span("outbound 2", "gradient", "", 3.5, 6.5),
        Span("update", "update", "", 5, 12),
    ]
    of = share(spans, Span("steps", "step 1", "", 0, 10))
    assert (of.step, of.compute) == (10, 6)
    assert (of.hidden["copies"], of.exposed["copies"]) == (1.5, 2)
    assert (of.hidden["updates"], of.exposed["updates"]) == (2, 3)
    assert (of.hidden["disk"], of.exposed["disk"]) == (0, 0)


def test_intervals_by_hand() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]
    assert intersection([(0, 2), (3, 6)], [(1, 4), (5, 7)]) == [(1, 2), (3, 4), (5, 6)]
    assert total_seconds([(0, 2), (3, 4)]) == 3


def slack_seconds(timeline: Timeline) -> float:
    return SLACK_SECONDS.get(timeline.about["clock"], 1e-7)


def assert_disjoint(timeline: Timeline) -> None:
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        tracks[span.track].append(span)
    for track in tracks.values():
        for one, other in pairwise(sorted(track, key=lambda span: span.start)):
            assert one.end <= other.start + slack_seconds(timeline), f"{one} and {other}"


def assert_arrived(timeline: Timeline, at_least: int) -> None:
    """Whenever a layer's weights are fetched, they are there when it is computed next, in either pass."""
    seen = 0
    passes: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.work in ("forward", "backward"):
            passes[span.of].append(span)
    for fetch in (span for span in timeline.spans if span.work == "weights"):
        later = [span.start for span in passes[fetch.of] if span.end > fetch.start]
        if later:
            assert fetch.end <= min(later) + slack_seconds(timeline), fetch
            seen += 1
    assert seen >= at_least


def test_the_figure_tells_what_is_measured_and_what_is_virtual(virtual: VirtualRun, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    path = tmp_path / "traces" / "overlap_demo.json"
    spans = [Span("compute", "forward", "", 0.0, 0.4), Span("inbound", "weights", "", 0.3, 0.6)]
    write_timeline(Timeline(spans, steps([0.0, 1.0, 2.0], 1), {"clock": "sim", "title": "by hand"}), path)
    with pytest.raises(ValueError, match=r"got none; try ./run.sh case overlap --profile demo"):
        overlap.timelines_shown(DEMO.name, tmp_path, [])
    options = {"placement": "W4", "clipping": "deferred"}
    job = dataclasses.replace(DEMO.job("stronghold", 4), options=options, trace=str(path))
    measured: dict[str, Any] = {"losses": [5.0] * job.steps, "step_seconds": [1.0] * job.steps}
    record = Record(job, "key", "ok", clock="sim", gate=Gate("exact"), **measured)
    record.write(tmp_path / "log_1.json")
    write_timeline(
        virtual.timeline({"title": "on h200"}), tmp_path / "traces" / "virtual_h200_48_deferred.json"
    )

    overlap.make_timelines(DEMO, tmp_path, tmp_path / "out", "draw", lambda event: None)
    with (tmp_path / "out" / "overlap_demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["clock"], row["step"]) for row in rows] == [("sim", "step 1"), ("virtual", "step 2")]
    names = ("step_seconds", "compute_seconds", "copies_hidden_seconds", "copies_exposed_seconds")
    assert [float(rows[0][name]) for name in names] == pytest.approx([1.0, 0.4, 0.1, 0.2])
    figure = overlap.timeline_figure(overlap.timelines_shown(DEMO.name, tmp_path, [record]), "")
    titles = [axes.get_title(loc="left") for axes in figure.axes[::2]]
    assert titles[0].startswith("measured: stronghold, 4 layers, W4") and titles[1].startswith(
        "virtual, nothing measured"
    )


def put_trace(folder: Path, at: Path = Path("results")) -> Record:
    """A trace of case overlap among the results, written as if it were in the folder `at`; returns its record."""
    where = Path("traces") / "overlap_demo.json"
    (folder / "traces").mkdir(parents=True)
    spans = [Span("compute", "forward", "1", 0.0, 0.4), Span("inbound", "weights", "2", 0.3, 0.6)]
    about = {"clock": "sim", "title": f"stronghold disk={at}/states", "job": {"trace": str(at / where)}}
    write_timeline(Timeline(spans, steps([0.0, 1.0, 2.0], 1), about), folder / where)
    options = {"placement": "W4", "clipping": "deferred"}
    job = dataclasses.replace(DEMO.job("stronghold", 4), options=options, trace=str(at / where))
    return measured(job, "traced")


def test_what_hid_behind_what_is_shown_where_it_was_traced(tmp_path: Path) -> None:
    written, _ = report.write_report(records.write(tmp_path, RECORDS[0], put_trace(tmp_path)))
    page = Page(written.read_text())
    caption = "Case overlap, profile demo: the numbers of the figure"
    assert page.column(caption, "copies_exposed_seconds") == ["0.200000000"]
    assert page.column(caption, "records") == ["#2"]
    assert any(
        str(attributes.get("alt")).startswith("Case overlap")
        for tag, attributes in page.elements
        if tag == "img"
    )
    assert any("./run.sh case overlap --profile demo" in text for text in page.pres)


def test_a_trace_that_is_gone_leaves_the_report_as_it_was(tmp_path: Path) -> None:
    record = put_trace(tmp_path)
    (tmp_path / "traces" / "overlap_demo.json").unlink()
    assert (
        "Case overlap" not in report.write_report(records.write(tmp_path, RECORDS[0], record))[0].read_text()
    )


def test_timelines_without_steps_are_written_too(tmp_path: Path) -> None:
    write_timeline(Timeline([Span("compute", "forward", "", 1.0, 2.0)], [], {}), tmp_path / "trace.json")
    assert [(span.start, span.end) for span in read_timeline(tmp_path / "trace.json").spans] == [(1.0, 2.0)]
