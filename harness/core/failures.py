"""Classifies the end of a run that failed: its status, the evidence for the status, and one line that tells people what
to change.

If training raised an exception, the exception's innermost cause decides. The cause's message is read before its type,
because one type, such as RuntimeError, is raised for several memories. If the process left no record, the parent's
observations decide: exit code, kernel kills, log. A status of out of memory needs evidence: an exception, a message, or
the kernel's count of the processes that it killed.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.base.imported_file import failing_line
from harness.base.json_object import JsonObject
from harness.core.job import gib
from harness.core.method import Unavailable

Raised = TypeVar("Raised", bound=BaseException)
MOST_TEXT_CHARACTERS = 200
LEAST_SHARE_NEAR_LIMIT = 0.95
# A thread cannot start if its stack does not fit the host's budget, or if the system allows no further thread. The
# budget was the reason if fewer bytes than these, which a thread takes by default, were left.
NO_THREAD_MESSAGE, THREAD_BYTES = "can't start new thread", 9 * 2**20


class Kind(NamedTuple):
    status: str
    resource: (
        str  # what ran out or is missing: device, host, pinned, shm, disk, import, time; "": none of these
    )
    source: (
        str  # source of the evidence for the status, such as allocator; a record has it as evidence["class"]
    )


# For each kind: a pattern of the messages of its exceptions. The most specific patterns come first. The messages are
# those of PyTorch's allocators, CUDA's libraries, glibc and the kernel.
MESSAGES = (
    (r"sim pinned out of memory", Kind("oom-host", "pinned", "allocator")),
    (r"sim host out of memory", Kind("oom-host", "host", "allocator")),
    (r"sim device out of memory|CUDA out of memory", Kind("oom-device", "device", "allocator")),
    (r"CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Failed to CUDA \w*alloc", Kind("oom-device", "device", "library")),
    (r"page-lock|cudaHost(Alloc|Register)|mlock", Kind("oom-host", "pinned", "allocator")),
    (r"CUDA error: out of memory", Kind("oom-device", "device", "ambiguous")),
    (r"allocate shared memory|shared memory(?s:.)*No space left", Kind("oom-host", "shm", "allocator")),
    (
        r"DefaultCPUAllocator: (can't|not enough)|std::bad_alloc|Caught \S*MemoryError|Memory allocation still failed",
        Kind("oom-host", "host", "allocator"),
    ),
    (
        r"annot allocate memory|failed to map segment|[Uu]nable to (mmap|allocate) ",
        Kind("oom-host", "host", "allocator"),
    ),
    (r"No space left on device", Kind("does-not-fit", "disk", "file system")),
)
# Pattern of the last log lines of a native library that aborts because it gets no memory.
ABORT_LINE = re.compile(r"what\(\):.*bad_alloc|Memory allocation still failed|MemoryError$", re.MULTILINE)
CHILD_KILLED_TEXT = re.compile(r"killed by signal|exited unexpectedly|terminated abruptly|\bSIGKILL\b")
# Pattern of the messages of a rank that lost its connection to another rank.
LOST_RANK = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|communicator was aborted"
)
NOT_FINITE = re.compile(r"\b(nan|infs?|infinite|non-?finite|not finite)\b", re.IGNORECASE)
# Pairs: a size's name in the evidence, and a pattern that finds the size in a message. If several patterns of one name
# match, the first pattern counts.
SIZE_PATTERNS = (
    ("asked_bytes", r"(?:tried|unable) to (?:allocate|mmap) ([\d.]+) ?(bytes|[KMGTPE]iB)"),
    ("in_use_bytes", r"(\d+) of \d+ (bytes) in use|([\d.]+) (\w+) is allocated by PyTorch"),
    ("limit_bytes", r"\d+ of (\d+) (bytes) in use|([\d.]+) (\w+) allowed"),
    ("limit_bytes", r"total capacity of ([\d.]+) (\w+)"),
)
UNIT_BYTES = {
    unit: 2 ** (10 * power) for power, unit in enumerate(("bytes", "kib", "mib", "gib", "tib", "pib", "eib"))
}

MEMORY_ADVICE = {
    "device": ("device memory", "lower -l, -b, --seq or -w, or raise --device-memory"),
    "host": ("host memory", "lower -l or -b, or raise --host-memory"),
    "pinned": (
        "pinned host memory",
        "lower -l or raise --host-memory: pinned blocks are rounded up to powers of two",
    ),
    "shm": ("shared memory", "enlarge /dev/shm (in docker: --shm-size) or pass less through it"),
    "disk": ("room on the disk", "free some, or name another folder with --disk or --results"),
}


@dataclass(frozen=True)
class Failure:
    """The end of a failed run: a status of record.STATUSES, one line for people, and the evidence for the status."""

    status: str
    reason: str
    evidence: JsonObject = field(default_factory=dict)

    def changes(self, evidence: JsonObject) -> JsonObject:
        """Return the new values of the fields that this failure changes in the run's record. `evidence`: the record's
        evidence so far, to which this failure's evidence is added."""
        return {"status": self.status, "reason": self.reason, "evidence": {**evidence, **self.evidence}}


def naming_ranks(error: Raised, ranks: Sequence[int]) -> Raised:
    """Return the error, which a rank raises because these other ranks are lost or have failed. The evidence of the
    rank's end names them."""
    error.__dict__["lost_ranks"] = list(ranks)
    return error


def of_exception(
    error: BaseException, phase: str, memory: dict[str, int], folder: Path | None = None
) -> Failure:
    """Classify an exception that training raised.

    `memory`: bytes in use and bytes allowed when training ended, as budgets.lift() returns them; these sizes are used
    if a message names none. `folder`: the folder of the method's file; the reason of a crash names the failing line in
    this folder. None: the reason names no line.
    """
    failure = _of_causes(error, phase, memory, folder)
    lost_ranks = set[int]()
    for cause, _ in _innermost_first(error):
        lost_ranks.update(getattr(cause, "lost_ranks", ()))
    if not lost_ranks:
        return failure
    return replace(failure, evidence={**failure.evidence, "lost_ranks": sorted(lost_ranks)})


def _of_causes(error: BaseException, phase: str, memory: dict[str, int], folder: Path | None) -> Failure:
    kinds = [(cause, _kind(cause, is_explicit, memory)) for cause, is_explicit in _innermost_first(error)]
    known = [(cause, kind) for cause, kind in kinds if kind is not None]
    if not known:
        is_numeric = isinstance(error, ArithmeticError) or NOT_FINITE.search(str(error))
        line = failing_line(folder, error)[:MOST_TEXT_CHARACTERS]
        reason = f"{_error_text(error)} at {phase}{line}; its log has the traceback"
        return ended("crash", "numeric" if is_numeric else "exception", reason)
    # If only a package is missing, the outermost error is shown, because this error may name the command that installs
    # the package.
    cause, kind = next((pair for pair in known if pair[1].status != "unavailable"), known[-1])
    evidence: JsonObject = {}
    if kind.resource == "host" and "host_limit_bytes" in memory:
        evidence = {"class": "rlimit"}
    if cause is not error:
        evidence = {
            "class": "swallowed" if kind.resource in MEMORY_ADVICE else kind.source,
            "wrapped_in": _error_text(error),
        }
    return _failure(kind, phase, _error_text(cause), **evidence, **_sizes(str(cause), kind, memory))


def _failure(kind: Kind, phase: str, text: str, /, **evidence: Any) -> Failure:
    """Return a failure of this kind. The failure's line for people shows the bytes in `evidence`."""
    facts = {"class": kind.source, "resource": kind.resource, **evidence}
    return Failure(kind.status, _reason_line(kind, phase, facts, text), facts)


def ended(status: str, source: str, reason: str, resource: str = "", **evidence: Any) -> Failure:
    """Return a failure whose cause is no lack of memory. `source`: the source of the evidence, as evidence["class"]."""
    return Failure(status, reason, {**evidence, "class": source, "resource": resource})


@dataclass(frozen=True)
class End:
    """The end of a worker process, as its parent process saw it."""

    phase: str
    code: int = 0  # exit code of the process; -N: signal N ended it
    # the parent's reason to stop the worker: "deadline", "silence", "interrupt"; "": not stopped
    stopped: str = ""
    seconds: float = 0.0  # time limit of the run
    oom_kills: int = 0  # processes that the kernel killed in the worker's memory group during the run
    owns_group: bool = False  # True: the memory group held this worker alone
    system_oom_kills: int = 0  # processes that the kernel killed on the whole machine during the run
    host_peak_bytes: int = 0
    host_limit_bytes: int = 0
    shm_free_bytes: int | None = None  # fewest free bytes seen in /dev/shm; None: not seen
    log_tail: str = ""


def of_process(end: End) -> Failure:
    """Classify the end of a worker that left no record."""
    signal_number = max(0, end.code - 128)
    if end.code < 0:
        signal_number = -end.code
    observed: Any = {
        "returncode": end.code,
        "oom_kills": end.oom_kills,
        "system_oom_kills": end.system_oom_kills,
    }
    if end.stopped:
        failure = of_stop(end)
        return replace(failure, evidence={**observed, **failure.evidence})
    if signal_number == signal.SIGKILL:
        is_near_limit = end.host_peak_bytes >= LEAST_SHARE_NEAR_LIMIT * end.host_limit_bytes
        if end.oom_kills or (end.system_oom_kills and is_near_limit):
            return _kernel_kill(end, "killed by the kernel", **observed, inferred=not end.oom_kills)
        text = f"killed by SIGKILL from outside at {end.phase}: the kernel counted no kill for lack of memory"
        return ended("killed", "signal", text, **observed)
    if signal_number == signal.SIGBUS and end.shm_free_bytes is not None and end.shm_free_bytes < 2**20:
        kind, text = Kind("oom-host", "shm", "signal"), "SIGBUS, /dev/shm was full"
        return _failure(kind, end.phase, text, **observed, inferred=True, shm_free_bytes=end.shm_free_bytes)
    match = ABORT_LINE.search(end.log_tail)
    if match and (signal_number == signal.SIGABRT or end.code > 0):
        return _failure(Kind("oom-host", "host", "log"), end.phase, match[0], **observed, text=match[0])
    source, text = "exit", f"exit {end.code} without a result"
    if signal_number in set(signal.Signals):
        source, text = "signal", f"ended by {signal.Signals(signal_number).name}"
    advice = "its log has what it printed last"
    if not end.code:  # exit code 0, but no record: the method's code has ended the process
        advice = f"look for sys.exit() and os._exit() in the method's file; {advice}"
    return ended("crash", source, f"{text} at {end.phase}; {advice}", **observed)


def of_rank(failure: Failure, rank: int, world_size: int) -> Failure:
    """Return this failure with the number of the rank that failed, one of `world_size`, in its line and evidence."""
    return Failure(
        failure.status, f"rank {rank} of {world_size}: {failure.reason}", {**failure.evidence, "rank": rank}
    )


def of_stop(end: End) -> Failure:
    """Classify the end of a worker that the parent stopped for the reason `end.stopped`."""
    if end.stopped == "interrupt":
        return ended("interrupted", "interrupt", f"interrupted at {end.phase}")
    if end.stopped == "silence":
        source = "hang"
        text = f"hangs at {end.phase}: nothing heard for {end.seconds:g} seconds; --timeout sets a limit"
    else:
        source, advice = "deadline", "lower -l or --steps, or raise --timeout"
        text = f"ran longer than its {end.seconds:g} seconds, at {end.phase}: {advice}"
    return ended("timeout", source, text, "time", last_phase=end.phase, seconds=end.seconds)


def of_killed_child(end: End, reason: str, trace: str) -> Failure | None:
    """Classify a worker's crash as out of host memory if the kernel killed one of the worker's processes; else return
    None. If several runs share a memory group, the killed process may belong to another run. So in a shared group the
    crash's `reason` or `trace` must mention a killed process."""
    if not end.oom_kills or not (end.owns_group or CHILD_KILLED_TEXT.search(reason + trace)):
        return None
    text = f"the kernel killed a process of this run; {reason}"
    return _kernel_kill(end, text, oom_kills=end.oom_kills, inferred=not end.owns_group)


def _kernel_kill(end: End, text: str, /, **evidence: Any) -> Failure:
    used = {"in_use_bytes": end.host_peak_bytes, "limit_bytes": end.host_limit_bytes}
    return _failure(Kind("oom-host", "host", "kernel-kill"), end.phase, text, **evidence, **used)


def _innermost_first(error: BaseException) -> list[tuple[BaseException, bool]]:
    """Return the exception and its causes, innermost first, each with a flag. The flag is True for the exception itself
    and for explicit causes (`raise ... from`). It is False for an exception that was only being handled when another
    exception was raised."""
    causes: dict[int, tuple[BaseException, bool]] = {}

    def visit(cause: BaseException | None, is_explicit: bool) -> None:
        if cause is not None and id(cause) not in causes:
            causes[id(cause)] = cause, is_explicit
            visit(cause.__cause__, is_explicit)
            visit(cause.__context__, False)

    visit(error, True)
    return list(causes.values())[::-1]


def _kind(error: BaseException, is_explicit: bool, memory: dict[str, int]) -> Kind | None:
    """Return the kind of this exception, without a look at its causes; None if no kind fits."""
    types = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        in_shm = str(error.filename or "").startswith("/dev/shm") or "shared memory" in text
        if in_shm:
            return Kind("oom-host", "shm", "file system")
        return Kind("does-not-fit", "disk", "file system")
    if isinstance(error, (Exception, MemoryError)) and not isinstance(error, Unavailable):
        for pattern, kind in MESSAGES:
            if re.search(pattern, text):
                # CUDA gives the same "out of memory" for device memory and for pinned host memory. If more than a
                # twentieth of the device's memory is free, pinned host memory has run out.
                is_device_free = memory.get("device_free_bytes", 0) * 20 > memory.get(
                    "device_total_bytes", 2**63
                )
                if kind.source == "ambiguous" and is_device_free:
                    return Kind("oom-host", "pinned", "ambiguous")
                return kind
    left_bytes = memory.get("host_limit_bytes", 2**63) - memory.get("host_bytes", 0)
    if NO_THREAD_MESSAGE in text and left_bytes < THREAD_BYTES:
        return Kind("oom-host", "host", "thread")
    if "OutOfMemoryError" in types:
        return Kind("oom-device", "device", "allocator")
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return Kind("oom-host", "host", "allocator")
    if isinstance(error, (Unavailable, ImportError)) and is_explicit:
        return Kind("unavailable", "import", "import")
    return None


def _sizes(text: str, kind: Kind, memory: dict[str, int]) -> dict[str, int]:
    """Return the bytes that were asked for, in use and allowed, as far as the message `text` or `memory` tells them;
    an empty dict if the failure is no lack of memory."""
    sizes: dict[str, int] = {}
    for name, pattern in SIZE_PATTERNS if kind.resource in MEMORY_ADVICE else ():
        if match := re.search(pattern, text, re.IGNORECASE):
            number, unit = filter(None, match.groups())
            sizes.setdefault(name, int(float(number) * UNIT_BYTES[unit.lower()]))
    if kind.resource == "host" and "in_use_bytes" not in sizes:
        names_in_evidence = {"host_bytes": "in_use_bytes", "host_limit_bytes": "limit_bytes"}
        sizes |= {name: memory[key] for key, name in names_in_evidence.items() if key in memory}
    return sizes


def _reason_line(kind: Kind, phase: str, evidence: JsonObject, text: str) -> str:
    """Return a failure's line for people: the memory that ran out, the phase, bytes, what to change, and the original
    message. If no memory ran out, the line is the message and the phase."""
    if kind.resource not in MEMORY_ADVICE:
        return f"{text} (at {phase})"
    memory, advice = MEMORY_ADVICE[kind.resource]
    requested_bytes, used_bytes = evidence.get("asked_bytes"), evidence.get("in_use_bytes")
    limit_bytes = evidence.get("limit_bytes")
    numbers = [f"asked for {gib(requested_bytes)}"] if requested_bytes else []
    if used_bytes is not None:
        of_limit = f" of {gib(limit_bytes)}" if limit_bytes else ""
        numbers.append(f"{gib(used_bytes)}{of_limit} in use")
    sizes = f": {', '.join(numbers)}" if numbers else ""
    return f"out of {memory} at {phase}{sizes}; {advice} ({text})"


def _error_text(error: BaseException) -> str:
    # the status already says unavailable
    kind = "" if isinstance(error, Unavailable) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"[:MOST_TEXT_CHARACTERS]
