"""Reads the raw values of one log, either of this project or of the published artifact, whose five methods print
different lines (dialects).

One reader serves all dialects, because all use the same forms of lines; a dialect only leaves out some of the forms.
The reader skips lines that are cut, garbled, unknown or binary. to_record.py decides what a missing value means.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.log_lines import PLAIN_WORDS

LONGEST_LINE_BYTES = 16384  # a longer line is split
# most lines of one kind in a log; the published schedule of 320,000 iterations logs 32,000 lines
MOST_METRICS = 200_000
# Matches the file name of a log. The artifact wrote _hs- for the hidden size; its README says _h-.
NAME = re.compile(
    r"log_(?P<method>[A-Za-z0-9.+-]+)_l-(?P<num_layers>\d{1,9})_hs?-(?P<hidden_size>\d{1,9})_bs?-(?P<batch_size>\d{1,9})"
    r"_ws?-(?P<window>\d{1,9})(?:_(?P<day>\d{4}-\d\d-\d\d)(?:\.(?P<unix>\d{1,12}))?)?\.(?:txt|log)"
)
# COLOR matches the codes for colors that programs put into a line. PREFIX matches the time, rank or host that launchers
# put before a line, such as "[2024-01-02 03:04:05] worker-0:".
COLOR = re.compile(r"\x1b\[[\d;]{0,20}m")
PREFIX = re.compile(r"(?:\[[\d :.,/TZ+-]{8,40}\] ?|\[\w{1,20}\d\]: |(?:[A-Za-z][\w.-]{0,40})?\d: )*")
ARGUMENT = re.compile(r"^ {2}(\w+) \.+ (.+)$")
ARGUMENTS = frozenset((
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "batch_size",
    "hidden_dropout", "clip_grad", "lr", "seed", "params_dtype", "train_iters", "log_interval", "gl_window_size",
    "data_path",
))  # fmt: skip
NUMBER = r"([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|nan|inf)\b)"
OWN_HEADER = re.compile(r"^method (\S+) with (.*), (\d{1,9}) steps on (\w+), Workload\((.*)\)\s*$")
OWN_END = re.compile(
    r"^ended as ([a-z-]{2,20}) at ([a-z]{2,20}(?: \d{1,9})?), after (\d{1,9}) of \d{1,9} steps(?:: (.*))?$"
)
EXACT_PARAMETERS = re.compile(r"number of parameters on \([^:]{1,80}: (\d{1,18})\s*$")
PADDED_VOCABULARY = re.compile(r"\(new size: (\d{1,9})\)")
ITERATION = re.compile(r"^\s*iteration +(\d{1,12})/ *(\d{1,12}) \|(.*)$")
STEP_TIME = ("elapsed time per iteration (ms)", PLAIN_WORDS["elapsed time per iteration (ms)"])
ITERATION_FIELDS = frozenset((
    *STEP_TIME, "learning rate", "global batch size", "loss scale", "grad norm",
    "number of skipped iterations", "number of nan iterations", "consumed samples", "num zeros", "params norm",
    "throughput per GPU (TFLOP/s/GPU)",
))  # fmt: skip
FIELD = re.compile(rf"([a-z][A-Za-z0-9/ ()-]*): +{NUMBER}")
METRICS = {  # by field of RawLog: the pattern of a line that has one value for this field
    "parameters_billion": re.compile(
        rf"(?:total parameters|{PLAIN_WORDS['total parameters']}|model parallel rank 0) +{NUMBER} B"
    ),
    "interval_speeds": re.compile(rf"(?:SamplesPerSecond|{PLAIN_WORDS['SamplesPerSecond']}): {NUMBER}"),
    "cumulative_speeds": re.compile(rf"SamplesPerSec={NUMBER}"),
    "tera_flops": re.compile(rf"Effective Tera Flops per GPU: {NUMBER}"),
}
MEMORY = re.compile(r"after \d+ iterations\)? memory \(MB\) \|(.*)$")
EXIT = re.compile(r"exiting (?:the )?program at iteration +(\d{1,12})")

# A log may have gigabytes. So only lines with one of these words are searched for the patterns in ENDS.
END_SIGNS = (
    "memory", "Memory", "ALLOC_FAILED", "line ", "return code", "Killed", "Terminated", "Interrupt", "Error",
    "Exception", "Unavailable", "can not create", "exitcode", "oom",
)  # fmt: skip
# Ways in which a run can end early, the most specific first. Each has a status, the pattern of a log line that shows
# this end, and an explanation, which is empty if the line explains itself.
ENDS = (
    ("oom-device", re.compile(r"(?:CUDA|sim device|CUDA error:) out of memory|ALLOC_FAILED"), ""),
    ("oom-host", re.compile(r"can't allocate memory|Cannot allocate memory|^MemoryError|sim (?:host|pinned) out of "
                            r"memory"), ""),
    ("oom-host", re.compile(r"\bline \d+: +\d+ Killed|^Killed\s*$|exits with return code = -9\b|"
                            r"exitcode *: -9\b|oom[-_]kill"),
     "SIGKILL that nothing in the log asked for: the host ran out of memory (inferred)"),
    ("does-not-fit", re.compile(r"layers needs [\d.]+ \w+ of (?:\w+ )?memory .*"), ""),
    ("interrupted", re.compile(r"^KeyboardInterrupt|\bline \d+: +\d+ (?:Interrupt|Hangup)\b"), ""),
    ("killed", re.compile(r"\bline \d+: +\d+ Terminated|^Terminated\s*$|exits with return code = -15\b"), ""),
    ("unavailable", re.compile(r"^(?:ModuleNotFoundError|ImportError|[\w.]*Unavailable): .*"), ""),
    ("oom-host", re.compile(r"can not create \w+.*"), "the artifact's README: how running out of memory may look"),
    ("crash", re.compile(r"^(?:[\w.]*(?:Error|Exception)|AssertionError)\b.*|\bline \d+: +\d+ (?:Segmentation fault|"
                         r"Aborted|Bus error|Illegal instruction).*|exits with return code = -?[1-9]\d*"), ""),
)  # fmt: skip


LITERALS = {"True": True, "False": False, "None": None}


class NotALog(ValueError):
    """The file is not the log of a training. The text of the error is the reason."""


@dataclass
class Interval:
    """The values of one line about an iteration. A value that is missing or garbled is None."""

    iteration: int
    total: int
    elapsed_ms: float | None
    loss: float | None  # NaN if a complete line has no loss, because the dialects leave out a loss that is not finite
    grad_norm: float | None


@dataclass
class RawLog:
    """The values that a log's name and lines have, in the units that the log prints."""

    name: dict[str, Any]
    sha256: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)  # values of the first line of a log by this project
    # status, phase, number of steps and reason in the last line of a log by this project
    own_end: tuple[str, str, int, str] | None = None
    parameters: list[int] = field(default_factory=list)
    parameters_billion: list[float] = field(default_factory=list)
    vocab_size: int | None = None
    intervals: list[Interval] = field(default_factory=list)
    interval_speeds: list[float] = field(default_factory=list)
    cumulative_speeds: list[float] = field(default_factory=list)
    tera_flops: list[float] = field(default_factory=list)
    memory_mb: dict[str, float] = field(default_factory=dict)
    timers_ms: list[dict[str, float]] = field(default_factory=list)
    exit_iteration: int | None = None
    ends: dict[int, str] = field(default_factory=dict)  # by index in ENDS: the text in the log that tells of this end


def read(path: Path) -> RawLog:
    """Read a log. Raises NotALog if its name, its lines or their number are unlike a training log's, OSError if the
    file cannot be read."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise NotALog("its name is not log_METHOD_l-N_hs-N_bs-N_ws-N_DATE.UNIX.txt")
    words = match.groupdict()
    name = {key: int(words[key]) for key in ("num_layers", "hidden_size", "batch_size", "window")}
    log = RawLog({"method": words["method"], **name, "day": words["day"], "unix": int(words["unix"] or 0)})
    digest = hashlib.sha256()
    for line in _lines(path, digest.update):
        _take(log, line)
    log.sha256 = digest.hexdigest()
    if max(len(log.intervals), len(log.timers_ms), len(log.interval_speeds), len(log.cumulative_speeds)) > MOST_METRICS:
        raise NotALog(f"more than {MOST_METRICS} of its lines are metrics of one kind")
    if not (log.arguments or log.own or log.parameters or log.intervals or log.ends):
        raise NotALog("not one of its lines is a training log's")
    return log


def _lines(path: Path, update: Callable[[bytes], None]) -> Iterator[str]:
    """Yield the lines of a file; long lines are cut into pieces, so that a file without line ends can be read, too.
    `update` is called with the bytes of each piece."""
    with open(path, "rb") as file:
        while piece := file.readline(LONGEST_LINE_BYTES):
            update(piece)
            text = COLOR.sub("", piece.decode(errors="replace").rstrip("\r\n"))
            yield text[PREFIX.match(text).end() :]  # type: ignore[union-attr]


def _take(log: RawLog, line: str) -> None:
    if match := ITERATION.match(line):
        log.intervals.append(_interval(int(match[1]), int(match[2]), match[3]))
    elif line.startswith("time (ms) |"):
        log.timers_ms.append(_fields(line.partition("|")[2]))
    elif match := ARGUMENT.match(line):
        if match[1] in ARGUMENTS:
            log.arguments[match[1]] = match[2].strip()[:300]
    elif match := MEMORY.search(line):
        log.memory_mb.update(_fields(match[1]))
    elif match := OWN_HEADER.match(line):
        log.own = {"method": match[1], "steps": int(match[3]), "device": match[4]}
        log.own |= {"options": _pairs(r"'(\w+)': ([^,}]+)", match[2]), "workload": _pairs(r"\b(\w+)=([^,]+)", match[5])}
    elif match := OWN_END.match(line):
        log.own_end = (match[1], match[2], int(match[3]), clean(match[4] or "", 1000))
    else:
        _take_number(log, line)


def _take_number(log: RawLog, line: str) -> None:
    """Add to the log the values that stand alone on a line. If two processes wrote at once, a line has several of
    them."""
    if match := EXACT_PARAMETERS.search(line):
        log.parameters.append(int(match[1]))
    for name, pattern in METRICS.items():
        if (match := pattern.search(line)) and (value := number(match[1])) is not None and math.isfinite(value):
            getattr(log, name).append(value)
    if "padded vocab" in line and (match := PADDED_VOCABULARY.search(line)):
        log.vocab_size = int(match[1])
    if match := EXIT.search(line):
        log.exit_iteration = int(match[1])
    if any(sign in line for sign in END_SIGNS):
        for place, (_, pattern, _) in enumerate(ENDS):
            if match := pattern.search(line):
                log.ends.setdefault(place, clean(match[0]))
                break


def _interval(iteration: int, total: int, rest: str) -> Interval:
    values = _fields(rest)
    elapsed = next((values[name] for name in STEP_TIME if name in values), None)
    elapsed = elapsed if elapsed and 1e-3 < elapsed < 1e12 else None  # a garbled number is dropped
    loss = values.get("lm loss")
    is_whole = rest.rstrip().endswith("|") and rest.count("|") == len(values) and "number of nan iterations" in values
    if (is_whole and set(values) <= ITERATION_FIELDS) or (loss is not None and values.get("number of nan iterations")):
        loss = math.nan
    return Interval(iteration, total, elapsed, loss, values.get("grad norm"))


def _fields(text: str) -> dict[str, float]:
    """Return, by name, the numbers in a text such as `name: number | name: number`."""
    matches = (FIELD.fullmatch(part.strip()) for part in text.split("|"))
    return {match[1]: value for match in matches if match and (value := number(match[2])) is not None}


def _pairs(pattern: str, text: str) -> dict[str, Any]:
    return {match[1]: scalar(match[2].strip()) for match in re.finditer(pattern, text)}


def scalar(text: str) -> Any:
    """Return the value of a word that is a number, True, False, None or a text in quotes. Any other word is returned as
    it is."""
    if text in LITERALS:
        return LITERALS[text]
    value = int(text) if re.fullmatch(r"[-+]?\d{1,18}", text) else number(text)
    return text.strip("'\"") if value is None else value


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def clean(text: str, longest: int = 200) -> str:
    """Return the text's printable characters in one line, cut to at most `longest` characters."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:longest]
