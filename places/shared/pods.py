"""A job's pods on Kubernetes: reads their states, and the events and records in their logs, and derives the job's end.

A pod's log holds the JSON lines that places/shared/torchrun_node.py prints, mixed with lines of other programs.
"""

from __future__ import annotations

import functools
import json
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.json_object import JsonObject
from harness.core import failures, log_lines
from harness.core.record import Record
from harness.run.launch import Events
from harness.run.place import ORDERED, OrderedJob, Report
from harness.run.ranks import merge_nodes
from places.docker import memory_limit
from places.shared.cluster import ClusterReport, complete, killed, late, out_of_memory, unavailable

INDEX = "batch.kubernetes.io/job-completion-index"  # annotation of a pod that holds the number of its node
MAIN = "job"  # name of the container that trains
OUTPUT_LENGTH = 4096
POD_SECONDS = 60.0  # seconds within which a cluster makes a pod, even if no node has room for the pod
# Kubernetes' reasons why a container will never start, such as a wrong image, or a program that the image lacks.
NEVER_STARTING_REASONS = (
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "CreateContainerConfigError",
    "ContainerCannotRun",
    "StartError",
)
UNPLACED_REASONS = ("Unschedulable", "SchedulingGated")


class PodState(NamedTuple):
    """The state of a pod, as Kubernetes reports it. `reason`, `message` and `exit_code` say why the pod failed or
    cannot start, if it did."""

    name: str
    number: int  # the pod's completion index: its number among the job's nodes, from 0
    phase: str  # Pending, Running, Succeeded or Failed
    node: str = ""  # name of the machine that runs the pod; empty: none yet
    reason: str = ""
    message: str = ""
    exit_code: int = 0
    has_log: bool = False

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def state_of(pod: JsonObject) -> PodState:
    """Return a pod's state, read from Kubernetes' JSON."""
    metadata, status = pod["metadata"], pod.get("status", {})
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    states = [(container["name"], container.get("state", {})) for container in containers]
    failed_terminations = [state.get("terminated", {}) for _, state in states]
    failed_terminations = [end for end in failed_terminations if end.get("exitCode")]
    never_starting = [state.get("waiting", {}) for _, state in states]
    never_starting = [wait for wait in never_starting if wait.get("reason") in NEVER_STARTING_REASONS]
    conditions = {
        (condition["type"], condition["status"]): condition for condition in status.get("conditions", ())
    }
    explanations = [
        *([status] if status.get("reason") else []),
        conditions.get(("DisruptionTarget", "True")),
        *failed_terminations,
        *never_starting,
        conditions.get(("PodScheduled", "False")),
    ]
    cause: JsonObject = next((explanation for explanation in explanations if explanation is not None), {})
    return PodState(
        metadata["name"],
        int(metadata.get("annotations", {}).get(INDEX, 0)),
        status.get("phase", "Pending"),
        pod.get("spec", {}).get("nodeName", ""),
        cause.get("reason", ""),
        cause.get("message", ""),
        failed_terminations[0]["exitCode"] if failed_terminations else 0,
        any(name == MAIN and state.keys() & {"running", "terminated"} for name, state in states),
    )


def end_of_pod(state: PodState, phase: str, limit_bytes: int, image: str) -> failures.Failure:
    """Return the end of a job, derived from the state of the pod that ended it."""
    message = ": ".join(filter(None, (state.reason, " ".join(state.message.split()))))
    if state.reason == "OOMKilled":
        return out_of_memory(phase, limit_bytes)
    if state.reason == "DeadlineExceeded":
        return late(
            phase, f"its pod ran longer than it may, at {phase}: lower -l or --steps, or raise --timeout"
        )
    if state.reason in NEVER_STARTING_REASONS:
        text = f"no pod starts with the image {image}: {message}; try --kubernetes image=NAME, which the nodes can pull"
        return unavailable(text, "image")
    if state.reason in UNPLACED_REASONS:
        text = f"no node takes its pod: {message}; try less --host-memory, gpus or cpus, or a longer --kubernetes wait"
        return unavailable(text, "node")
    if state.exit_code in (0, 128 + signal.SIGKILL) or state.reason not in ("", "Error"):
        return killed(phase, f"Kubernetes says {message}" if message else "its pod is gone")
    return failures.of_process(failures.End(phase, state.exit_code))


class PodLog:
    """The log of a pod, read by a thread. If the thread's connection breaks, follow() starts another thread, which
    continues after the last line that was read."""

    def __init__(self, open_log: Callable[[], Any]) -> None:
        self.open_log = open_log
        self.lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.num_read, self.is_whole = 0, False
        self.thread: threading.Thread | None = None

    @property
    def is_reading(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def follow(self, has_ended: bool) -> None:
        """Start a thread that reads the log, unless a thread is reading or the log is complete. `has_ended`: True if
        the pod writes no more, so that the log is complete once it is read to its end."""
        if not self.is_reading and not self.is_whole:
            self.thread = threading.Thread(target=self._read, args=(has_ended,), daemon=True)
            self.thread.start()

    def _read(self, has_ended: bool) -> None:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        num_lines_to_skip, partial_line = self.num_read, b""
        try:
            for data in self.open_log().stream(2**16):
                *lines, partial_line = (partial_line + data).split(b"\n")
                new_lines, num_lines_to_skip = (
                    lines[num_lines_to_skip:],
                    max(0, num_lines_to_skip - len(lines)),
                )
                for line in new_lines:
                    self.lines.put(line)
                self.num_read += len(new_lines)
        except (HTTPError, OSError):
            return
        except ApiException:  # the node or the container has no log, so there is nothing to read
            pass
        self.is_whole = has_ended


class PodJob:
    """A job on the cluster: its pods, the data from their logs, and its end.

    `name`: the name of the job's objects in Kubernetes; "": there are no objects. `end`: a failure that is known before
    the pods have ended; None: no such failure.
    """

    def __init__(self, ordered: OrderedJob, name: str, num_nodes: int) -> None:
        self.ordered, self.name, self.num_nodes = ordered, name, num_nodes
        self.events = Events(ORDERED, lambda event: None)
        self.pods: dict[str, PodState] = {}
        self.gone_pods: set[str] = set()
        self.logs: dict[str, PodLog] = {}
        self.records: dict[int, Record] = {}
        # by node: the last OUTPUT_LENGTH characters of the pod's output, without events
        self.output: dict[int, str] = {}
        self.end: failures.Failure | None = None
        self.is_deleted = False
        self.began = time.monotonic()
        builds = [log_lines.BUILD_LOG.format(library) for library in (ordered.job.method, "sim")]
        # names of the files into which the texts from the first node's log are written
        self.texts = (f"{ordered.stem.name}.txt", *builds)

    def take(self, pods: list[PodState], open_log: Callable[[str], Any], image: str, wait: float) -> None:
        """Take the states of the job's pods, and the new lines of their logs. Set `end` if the job cannot start.
        `wait`: seconds for which the job may wait for nodes."""
        self.gone_pods |= self.pods.keys() - {pod.name for pod in pods}
        self.pods |= {pod.name: pod for pod in pods}
        for pod in pods:
            log = self.logs.setdefault(pod.name, PodLog(functools.partial(open_log, pod.name)))
            if pod.has_log:
                log.follow(pod.has_ended)
        for name, log in self.logs.items():
            while not log.lines.empty():
                self._hear(self.pods[name].number, log.lines.get())
        is_late = time.monotonic() - self.began >= wait
        stuck_pods = [
            pod
            for pod in pods
            if pod.reason in (*NEVER_STARTING_REASONS, *(UNPLACED_REASONS if is_late else ()))
        ]
        if stuck_pods and not self.end:
            self.end = end_of_pod(stuck_pods[0], self.events.phase, 0, image)
        waited = time.monotonic() - self.began
        if not self.pods and not self.end and not self.is_deleted and waited >= max(wait, POD_SECONDS):
            text = (
                f"Kubernetes made no pod for {self.name} in {waited:.0f} s: kubectl get events may tell why"
            )
            self.end = unavailable(text, "node")

    def report_to(self, report: Report) -> None:
        """From now on, pass the events of the first node to `report`."""
        self.events.report = report

    @property
    def is_over(self) -> bool:
        """True if the job has ended and no more data can come: either `end` is set, or all its pods have ended or are
        gone, and their logs are read to the end."""
        # After a pod has failed, Kubernetes makes no further pods for the job.
        has_failed = self.gone_pods or any(pod.phase == "Failed" for pod in self.pods.values())
        are_all = bool(self.pods) and (len(self.pods) >= self.num_nodes or bool(has_failed))
        return self.end is not None or (
            (are_all or self.is_deleted) and all(map(self._is_read, self.pods.values()))
        )

    def _is_read(self, pod: PodState) -> bool:
        log = self.logs[pod.name]
        if pod.name in self.gone_pods:
            return not log.is_reading and log.lines.empty()
        return pod.has_ended and log.lines.empty() and (log.is_whole or not pod.has_log)

    def _hear(self, node: int, line: bytes) -> None:
        """Take one line of a node's log, which is an event or another program's output."""
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            self.output[node] = (self.output.get(node, "") + line.decode(errors="replace") + "\n")[
                -OUTPUT_LENGTH:
            ]
            return
        if kind == "record":
            self._take_record(node, event["record"])
        elif node == 0 and kind == "text":
            if event["name"] in self.texts:
                with open(self.ordered.stem.with_name(event["name"]), "a") as log:
                    log.write(event["text"])
        elif node == 0:
            self.events.feed(line + b"\n")

    def _take_record(self, node: int, data: Any) -> None:
        try:
            record = Record.from_dict(data)
            if record.key != self.ordered.key:
                raise ValueError(f"expected a record with key {self.ordered.key}, got {record.key}")
            self.records[node] = record
        except ValueError as error:
            text = f"the record that its pod left was not taken: {error}"
            self.end = failures.ended("crash", "record", text)

    def complete(self, is_interrupted: bool, image: str) -> Path:
        """Write the job's record, from the nodes' records and the states of the pods; return its path."""
        end = self.end or self._end(is_interrupted, image)
        record = merge_nodes([self.records[node] for node in sorted(self.records)]) if self.records else None
        output = "".join(self.output[node] for node in sorted(self.output))
        pods = sorted(self.pods.values(), key=lambda pod: pod.number)
        place = {"on": "kubernetes", "image": image, "nodes": ",".join(pod.node for pod in pods)}
        evidence = {"kubernetes": [pod._asdict() for pod in pods]}
        report = ClusterReport(place, evidence, output, self.events.fields())
        return complete(self.ordered, record, end, report)

    def _end(self, is_interrupted: bool, image: str) -> failures.Failure:
        """Return the job's end, derived from one of the pods that did not succeed. Prefer a pod without a record; among
        such pods prefer a pod with a reason, and among these the pod of the lowest node."""
        if is_interrupted:
            return failures.of_stop(failures.End(self.events.phase, stopped="interrupt"))
        failed = [pod for pod in self.pods.values() if pod.phase != "Succeeded"]
        cause = min(
            failed, key=lambda pod: (pod.number in self.records, not pod.reason, pod.number), default=None
        )
        if cause is None:
            return failures.of_process(failures.End(self.events.phase))
        return end_of_pod(cause, self.events.phase, memory_limit(self.ordered.job) or 0, image)
