"""A record: one attempt at a job, and its measurements. Its file holds raw values; properties derive other numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.base.foreign_file import NO_OTHER_FIELDS, checked, escape_surrogates, read_json
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole
from harness.core.anatomy import check_sizes
from harness.core.job import Job

SCHEMA_VERSION = 1
SPEED = "samples_per_second"
# The statuses that count as results: a job with a result is not run again when a later call asks for the job.
RESULTS = ("ok", "oom-device", "oom-host", "does-not-fit")
STATUSES = (*RESULTS, "timeout", "killed", "crash", "unavailable", "interrupted")
FORMER_BUDGET_FIELDS = ("rates", "page_locks")
SHORTEST_STEP_SECONDS = 1e-9  # seconds
CLOCK_SECONDS = 3600.0  # most seconds by which another machine's clock may be ahead of this one's
DEVICES = ("cpu", "cuda", "sim")
LATEST_TIME = 253_402_300_800.0  # Unix time of the year 10000
PASSING_VERDICTS = ("exact", "tolerance", "twin")
VERDICTS = (*PASSING_VERDICTS, "failed", "untested")
# how a text in a record's `kernels` begins that names the dtype of matrix products
PRODUCTS_IN = "products in "
ADDED = "added"  # name of the subfolder of a results folder that holds the records that others sent in
if TYPE_CHECKING:
    Values = list[float]
    Evidence: TypeAlias = JsonObject
    MachineFacts: TypeAlias = Evidence
    Other: TypeAlias = Evidence
    ScheduleFacts: TypeAlias = Evidence
    SoftwareFacts: TypeAlias = Evidence
    Tensor: TypeAlias = Evidence
else:
    from harness.core.record_parts import (
        Evidence,
        MachineFacts,
        Other,
        ScheduleFacts,
        SoftwareFacts,
        Tensor,
        Values,
    )


@dataclass(frozen=True)
class Gate:
    """The verdict: did the method train as the reference does? Programs read `reason`, people read `text`."""

    __pydantic_config__ = NO_OTHER_FIELDS

    verdict: str = "untested"  # exact, tolerance, twin, failed or untested
    reason: str = ""  # a word for programs
    text: str = "not compared with the reference"  # a sentence for people
    evidence: Evidence = field(default_factory=dict)  # the facts on which the verdict rests

    @property
    def passed(self) -> bool:
        return self.verdict in PASSING_VERDICTS


@dataclass(frozen=True)
class Record:
    """One attempt at a job, in seconds and bytes. Lists hold one value for each step, warm-up included. In an imported
    record, lists hold one value for every `interval_steps` steps, and None where the log lacks the value."""

    __pydantic_config__ = NO_OTHER_FIELDS

    job: Job  # what was run
    key: str  # hash of the job and its context: records with equal keys measure the same thing
    status: str  # how the run ended: one of STATUSES (harness/core/record.py)
    # the phase in which the run ended: start, import, data, build, step N, drain, inspect, done
    phase: str = ""
    reason: str = ""  # one line for people, if status is not ok
    evidence: Evidence = field(default_factory=dict)  # facts behind the status; if imported, facts of the log
    origin: str = "run"  # run, or imported: read from a log that another harness, or this one, printed
    interval_steps: int = 1  # each value of losses and step_seconds is the mean over this many steps
    clock: str = "cpu"  # the clock that measured the seconds: cpu, cuda or sim; if imported, the log's clock
    is_timed: bool = True  # False: other runs may have shared the device, so the seconds do not count
    machine: MachineFacts = field(default_factory=dict)  # facts of the machine that ran the job
    software: SoftwareFacts = field(default_factory=dict)  # versions and source of the code that ran
    started: float = 0.0  # Unix time of the start
    losses: Values = field(default_factory=list)  # the loss of each step, before its update
    # the global norm of each step's gradient, before clipping
    grad_norms: Values = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)  # the loss scale of each step in fp16
    # numbers, from 1, of steps whose gradient was not finite
    skipped_steps: list[int] = field(default_factory=list)
    step_seconds: Values = field(default_factory=list)  # seconds of each step
    # seconds of each phase: start, import, data, ...
    phase_seconds: dict[str, float] = field(default_factory=dict)
    # Bytes: device_allocated, device_reserved, host_anonymous, host_shared
    peaks: dict[str, int] = field(default_factory=dict)  # most bytes in use of each memory
    # how often torch's CUDA allocator had to empty its cache, which waits for the device
    num_alloc_retries: int = 0
    # the plan: bytes by memory and kind, least step_seconds
    predicted: dict[str, Any] = field(default_factory=dict)
    # the mechanism that enforces each limit of the budget
    limits: dict[str, str] = field(default_factory=dict)
    moved_bytes: int = 0  # bytes moved between device and host in all steps, both directions together
    # facts of a run of several models or after a checkpoint
    schedule: ScheduleFacts = field(default_factory=dict)
    data_sha256: str = ""  # hash of the samples that the run trained on
    # attention and optimizer kernels, dtypes of products: step 2
    kernels: list[str] = field(default_factory=list)
    description: dict[str, str] = field(default_factory=dict)  # the method's row in the fairness table
    bit_exact: bool = False  # True: the method promises the reference's bits on a CPU in this dtype
    is_exact: bool = True  # False: by design the method trains differently from the reference
    # changes of each trained tensor, by the tensor's name
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # if several models trained: results of all models but the first
    others: list[Other] = field(default_factory=list)
    gate: Gate = Gate()  # whether the method trained as the reference does

    @property
    def is_result(self) -> bool:
        return self.status in RESULTS

    @property
    def is_judged(self) -> bool:
        """True, unless the run ended ok and the call that ran it ended before the gate judged the run."""
        return self.status != "ok" or self.gate != Gate()

    def answers(self, job: Job) -> bool:
        """True if this record, whose key is the key of `job`, makes a run of `job` unnecessary. False if the job asks
        for a trace or saved weights that the recorded run did not write."""
        paths = ((job.trace, self.job.trace), (job.save, self.job.save))
        return all(
            path is None or (path == written_path and Path(path).exists()) for path, written_path in paths
        )

    @property
    def is_lasting(self) -> bool:
        """False if the same call would run the job again: the record is no result, the run ended by a full disk or by a
        memory limit of a cluster or shell, or its code or data changed meanwhile."""
        is_disk_full = self.status == "does-not-fit" and self.phase != "plan"
        is_of_this_place = is_disk_full or "limit_of" in self.evidence
        return self.is_result and not is_of_this_place and "changed" not in self.software

    @property
    def timed_seconds(self) -> list[float]:
        """Seconds of each step after warm-up; empty if the run is not timed. Warm-up begins after the steps that a
        checkpoint held, and leaves at least one step. An imported record has the means of the intervals after warm-up,
        and always of the last interval, because one published run was killed after its first interval."""
        if not self.is_timed:
            return []
        resumed = self.schedule.get("resumed_steps", 0)
        steps = max(resumed, min(resumed + self.job.warmup, self.job.steps - 1))
        warmup = -(-steps // self.interval_steps)
        if self.origin == "imported":
            warmup = min(warmup, len(self.step_seconds) - 1)
        return [seconds for seconds in self.step_seconds[warmup:] if seconds is not None]

    @property
    def median_step_seconds(self) -> float | None:
        """Median of timed_seconds, whatever the gate's verdict; None if there are no timed steps."""
        return statistics.median(self.timed_seconds) if self.timed_seconds else None

    @property
    def samples_per_step(self) -> int:
        """Samples of one step; if several models train, the sum over the models."""
        return self.job.workload.batch_size * self.schedule.get("num_models", 1)

    def models(self) -> list[Record]:
        """Return one record for each trained model, with its own workload and steps; the first is this record."""
        records = [self]
        for other in self.others:
            workload = dataclasses.replace(self.job.workload, **other["workload"])
            steps = self.job.steps * self.job.workload.batch_size // workload.batch_size  # the same samples
            job = dataclasses.replace(
                self.job, workload=workload, steps=steps, warmup=min(self.job.warmup, steps - 1)
            )
            kept = {name: value for name, value in other.items() if name != "workload"}
            records.append(dataclasses.replace(self, job=job, others=[], **kept))
        return records

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second in a step of median duration. None if the run did not end ok, has no timed steps, or did
        not pass the gate: a method that does not train as the reference does has no throughput."""
        seconds = self.median_step_seconds
        has_speed = self.status == "ok" and self.gate.passed and seconds
        return self.samples_per_step / seconds if has_speed and seconds else None

    @property
    def slowed_by(self) -> str:
        """Describe how nearly full device memory slowed the run; empty if it did not slow the run."""
        times = "once" if self.num_alloc_retries == 1 else f"{self.num_alloc_retries} times"
        return f"the allocator emptied its cache {times}" if self.num_alloc_retries else ""

    @property
    def first_step_seconds(self) -> float | None:
        """Seconds from the start of the process to the end of the first step: imports, data, building the model, one
        step. None if the first step's seconds are not known, as in most imported logs."""
        before = ("process", "start", "import", "data", "build")
        seconds_before = sum(self.phase_seconds.get(phase, 0.0) for phase in before)
        first = self.step_seconds[0] if self.step_seconds and self.interval_steps == 1 else None
        return None if first is None else seconds_before + first

    @property
    def host_peak_bytes(self) -> int:
        return self.peaks.get("host_anonymous", 0) + self.peaks.get("host_shared", 0)

    def to_dict(self) -> JsonObject:
        """Return the record as JSON data. If the gate passed, `gate` also has the run's speed, for other programs."""
        data = dataclasses.asdict(self)
        if (speed := self.samples_per_second) is not None:
            data["gate"][SPEED] = speed
        return {"schema_version": SCHEMA_VERSION, **_json_value(data)}

    @staticmethod
    def from_dict(data: Any) -> Record:
        """Return the record in this JSON data. Raises ValueError, one line, for data that is no valid record."""
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"expected schema version {SCHEMA_VERSION}, got {version}")
        fields = {name: value for name, value in data.items() if name != "schema_version"}
        if isinstance(verdict := fields.get("gate"), dict):  # the speed is derived anew
            fields["gate"] = {name: value for name, value in verdict.items() if name != SPEED}
        # older budgets have the fields FORMER_BUDGET_FIELDS
        with suppress(KeyError, TypeError, AttributeError):
            budget_fields = fields["job"]["budget"].items()
            budget = {name: value for name, value in budget_fields if name not in FORMER_BUDGET_FIELDS}
            fields["job"] = {**fields["job"], "budget": budget}
        record = checked(Record, fields)
        if wrong := record._contradiction():
            raise ValueError(wrong)
        return record

    def _contradiction(self) -> str:
        """Describe, in one line, the first value that no run can have measured; empty if all values are possible."""
        if wrong := wrong_num_models(self.schedule, self.others):
            return wrong
        if self.job.device not in DEVICES:
            return f"expected device {', '.join(DEVICES)}, got {self.job.device!r:.80}"
        if self.moved_bytes < 0:
            return f"expected moved_bytes of at least 0, got {self.moved_bytes}"
        for name in ("probe_layers", "probe_steps"):
            if (number := self.gate.evidence.get(name, 1)) < 1:
                return f"gate.evidence.{name}: expected at least 1, got {number}"
        if self.interval_steps < 1:
            return f"expected interval_steps of at least 1, got {self.interval_steps}"
        if not 0 <= self.started < LATEST_TIME:
            return f"expected started as seconds from 1970 to the year 9999, got {self.started:g}"
        if self.status not in STATUSES:
            return f"expected a status of {', '.join(STATUSES)}, got {self.status!r}"
        if negative := [name for name, size in self.peaks.items() if size < 0]:
            return f"expected a peak {negative[0]} of at least 0, got {self.peaks[negative[0]]}"
        if self.gate.verdict not in VERDICTS:
            return f"expected a verdict of {', '.join(VERDICTS)}, got {self.gate.verdict!r}"
        if self.gate.passed and self.status == "ok":
            # an imported log may hold fewer values
            least_values = self.job.steps if self.origin == "run" else 1
            for name, values in (("losses", self.losses), ("step_seconds", self.step_seconds)):
                num_finite = sum(value is not None and math.isfinite(value) for value in values)
                if num_finite < least_values or len(values) > self.job.steps:
                    expected = f"expected {least_values} finite {name} beside the verdict {self.gate.verdict}"
                    return f"{expected}, got {num_finite}"
        intervals = -(-self.job.steps // self.interval_steps)
        if len(self.step_seconds) > intervals:
            return f"expected at most {intervals} step_seconds, got {len(self.step_seconds)}"
        for seconds in self.step_seconds:
            if seconds is not None and not SHORTEST_STEP_SECONDS <= seconds < math.inf:
                return f"expected step_seconds from {SHORTEST_STEP_SECONDS:g} and finite, got {seconds}"
        return ""

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_dict(), indent=1, allow_nan=False))

    @staticmethod
    def read(path: Path) -> Record:
        """Return the record in a file. Raises ValueError, which names the file, if there is no valid record."""
        try:
            return Record.from_dict(read_json(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is not a record: {error}") from error


def wrong_num_models(schedule: Mapping[str, Any], others: Sequence[Any]) -> str:
    """Describe, in one line, a wrong `num_models` in a record's schedule; empty if the number is right. A wrong number
    would falsify samples_per_step."""
    num_models = 1 + len(others)
    scheduled = schedule.get("num_models", num_models)
    if scheduled == num_models:
        return ""
    return f"expected num_models {num_models}, one more than `others`, got {scheduled}"


def read_all(folder: Path) -> tuple[dict[Path, Record], list[str]]:
    """Return the records of a folder, oldest first, and complaints: one line for each file that holds no record, each
    copy of another record (left out, because it is no second measurement), and each record from the future."""
    records, complaints = {}, []
    for path in folder.glob("log_*.json"):
        try:
            records[path] = check_sizes(path, Record.read(path))
        except ValueError as error:
            complaints.append(str(error))
    ordered: dict[Path, Record] = {}
    first_path: dict[Any, Path] = {}  # for each value that marks() returns: the oldest file with this value
    now = time.time()
    for path, record in sorted(records.items(), key=lambda item: (_age(item[1], now), item[0].name)):
        if _age(record, now) != record.started:
            complaints.append(f"{path}: written by a clock that is ahead, so it counts as the oldest")
        paths_of_marks = [first_path.setdefault(mark, path) for mark in marks(record)]
        if other := next((first for first in paths_of_marks if first != path), None):
            complaints.append(f"{path}: the same measurement as {other.name}, which counts once")
        else:
            ordered[path] = record
    return ordered, complaints


def marks(record: Record) -> list[Any]:
    """Return values that no two measurements share: one from the run's start time, one from its steps' durations."""
    if record.origin != "run":
        # a log's file name tells the start only in whole seconds, so losses must differ, too
        return [(record.key, record.started, *record.losses, *record.step_seconds)]
    starts = [(record.key, record.started)] if record.started else []
    seconds = tuple(record.step_seconds)
    return [*starts, (record.key, seconds)] if len(set(seconds)) > 1 else starts


def records_of(folder: Path) -> list[Record]:
    """Return the records of a folder, oldest first. Print the complaints of read_all() to standard error."""
    records, complaints = read_all(folder)
    for complaint in complaints:
        print(f"warning: {complaint}", file=sys.stderr)
    return list(records.values())


def added_folders(results: Path) -> list[Path]:
    """Return the folders with results that others sent in. There is one folder for each machine in each archive."""
    return [
        path for path in sorted((results / ADDED).glob("[!.]*")) if path.is_dir() and not path.is_symlink()
    ]


def _age(record: Record, now: float) -> float:
    """Return the Unix time of the run's start; 0 if it is in the future, so that the record counts as the oldest."""
    return record.started if record.started <= now + CLOCK_SECONDS else 0.0


def new_stem(folder: Path, job: Job) -> Path:
    """Reserve a file name of the published pattern by creating an empty .txt log; return its path without .txt. The
    name contains the Unix time: if a name is taken, the next second is tried. The part ws is the option window_size; 0
    if there is none."""
    now = int(time.time())
    for second in range(now, now + 1000):
        # A suffix is appended as text: with_suffix() would cut the name at the dot before the seconds.
        stem = folder / log_stem(job, job.options.get("window_size") or 0, second)
        with suppress(FileExistsError):
            Path(f"{stem}.txt").touch(0o644, exist_ok=False)
            return stem
    raise ValueError(f"no free name for another log of {job.method} in {folder}: try another --results")


def log_stem(job: Job, window: int, second: int) -> str:
    """Return a log's file name by the published pattern, without .txt."""
    workload, day = job.workload, time.strftime("%Y-%m-%d", time.gmtime(second))
    sizes = f"l-{workload.num_layers}_hs-{workload.hidden_size}_bs-{workload.batch_size}_ws-{window}"
    return f"log_{job.method}_{sizes}_{day}.{second}"


def _json_value(value: Any) -> Any:
    """Return the value in a form for JSON: infinities and NaN become text that float() reads, surrogates escapes."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {escape_surrogates(key): _json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(entry) for entry in value]
    return escape_surrogates(value)
