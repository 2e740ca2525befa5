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
MOST_METRIC_LINES = 200_000
# Matches the file name of a log. The artifact wrote _hs- for the hidden size; its README says _h-.
LOG_NAME = re.compile(
    r"log_(?P<method>[A-Za-z0-9.+-]+)_l-(?P<num_layers>\d{1,9})_hs?-(?P<hidden_size>\d{1,9})_bs?-(?P<batch_size>\d{1,9})"
    r"_ws?-(?P<window>\d{1,9})(?:_(?P<day>\d{4}-\d\d-\d\d)(?:\.(?P<unix>\d{1,12}))?)?\.(?:txt|log)"
)
# COLOR matches the codes for colors that programs put into a line. PREFIX matches the time, rank or host that launchers
# put before a line, such as "[2024-01-02 03:04:05] worker-0:".
COLOR_CODE = re.compile(r"\x1b\[[\d;]{0,20}m")
LINE_PREFIX = re.compile(
    r"(?:\[[\d :.,/TZ+-]{8,40}\] ?|\d{4}-\d\d-\d\d[ T][\d:.,]{5,15}(?:Z|[+-]\d\d:?\d\d)? ?|\[\w{1,20}\d\]: ?"
    r"|(?:[A-Za-z][\w.-]{0,40})?\d: )*"
)
ARGUMENT_LINE = re.compile(r"^ {0,8}(\w+) \.{2,} (.+)$")
KNOWN_ARGUMENTS = frozenset(
    (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "batch_size",
        "hidden_dropout",
        "clip_grad",
        "lr",
        "seed",
        "params_dtype",
        "train_iters",
        "log_interval",
        "gl_window_size",
        "data_path",
        "global_batch_size",
        "rampup_batch_size",
        "world_size",
        "data_parallel_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "model_parallel_size",
    )
)
NUMBER = r"([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|nan|inf)\b)"
OWN_HEADER = re.compile(r"^method (\S+) with (.*), (\d{1,9}) steps on (\w+), Workload\((.*)\)\s*$")
OWN_END = re.compile(
    r"^ended as ([a-z-]{2,20}) at ([a-z]{2,20}(?: \d{1,9})?), after (\d{1,9}) of \d{1,9} steps(?:: (.*))?$"
)
EXACT_PARAMETERS = re.compile(r"number of parameters on \([^:]{1,80}: (\d{1,18})\s*$")
PADDED_VOCABULARY = re.compile(r"\(new size: (\d{1,9})\)")
# Anything may stand before the word: Megatron since 2024 writes a time in brackets, launchers write other prefixes.
ITERATION_LINE = re.compile(r"iteration +(\d{1,12}) */ *(\d{1,12}) *\|(.*)$")
# A line with both, or with the start of Megatron's form, looks like one about a step, whatever its form is.
STEP_NUMBER = re.compile(
    r"(?<![-\w])(?:iteration|iter|(?:global_?)?step|epoch)s?\b[\"' :=#\[(]{0,8}\d", re.IGNORECASE
)
LOSS_WORD = re.compile(r"(?<![a-z])loss(?![ _-]?scal)", re.IGNORECASE)
CUT_ITERATION_LINE = re.compile(r"iteration +\d{1,12} */")
# word of a line about no training step
EVALUATION_WORD = re.compile(r"\b(?:validation|valid|test|eval)", re.IGNORECASE)
# For each name of a step's time: its unit in milliseconds.
MS_PER_UNIT_OF_TIME_FIELD = {
    "elapsed time per iteration (ms)": 1.0,
    PLAIN_WORDS["elapsed time per iteration (ms)"]: 1.0,
    "elapsed time per iteration (s)": 1000.0,
}
ITERATION_FIELDS = frozenset(
    (
        *MS_PER_UNIT_OF_TIME_FIELD,
        "learning rate",
        "global batch size",
        "loss scale",
        "grad norm",
        "number of skipped iterations",
        "number of nan iterations",
        "consumed samples",
        "num zeros",
        "params norm",
        "throughput per GPU (TFLOP/s/GPU)",
        "consumed tokens",
        "samples per second",
        "actual seqlen",
        "TFLOPs",
        "tokens per gpu per second (tgs)",
    )
)
NUMBER_FIELD = re.compile(rf"([A-Za-z][\w/ ().-]*): *{NUMBER}")
METRIC_PATTERNS = {  # by field of RawLog: the pattern of a line that has one value for this field
    "parameters_billion": re.compile(
        rf"(?:total parameters|{PLAIN_WORDS['total parameters']}|model parallel rank 0) +{NUMBER} B"
    ),
    "interval_speeds": re.compile(rf"(?:SamplesPerSecond|{PLAIN_WORDS['SamplesPerSecond']}): {NUMBER}"),
    "cumulative_speeds": re.compile(rf"SamplesPerSec={NUMBER}"),
    "tera_flops": re.compile(rf"Effective Tera Flops per GPU: {NUMBER}"),
}
MEMORY_LINE = re.compile(r"after \d+ iterations\)? memory \(MB\) \|(.*)$")
# Patterns of the number of samples that a step trains, and of the number of GPUs that share the training.
SAMPLES_PER_STEP = re.compile(r"\bSamplesPerStep: (\d{1,9})\b|\btrain_batch_size \.+ (\d{1,9})\s*$")
WORLD_SIZE = re.compile(r"\busing world size: (\d{1,6})\b|\bNumWorkers: (\d{1,6})\b")
EXIT_LINE = re.compile(r"exiting (?:the )?program at iteration +(\d{1,12})")

# A log may have gigabytes. So only lines with one of these words are searched for the patterns in RUN_ENDS.
RUN_END_WORDS = (
    "emory",
    "MEMORY",
    "ALLOC_FAILED",
    "line ",
    "return code",
    "Killed",
    "Terminated",
    "Interrupt",
    "Error",
    "Exception",
    "Unavailable",
    "can not create",
    "exitcode",
    "oom",
    "CANCELLED",
    "DUE TO",
    "us error",
    "task",
)
# Ways in which a run can end early, the most specific first. Each has a status, the pattern of a log line that shows
# this end, and an explanation, which is empty if the line explains itself. Slurm's lines are those of slurmstepd and
# srun; their statuses are those that places/slurm.py gives to the states of the same name.
RUN_ENDS = (
    (
        "oom-device",
        re.compile(r"(?:CUDA|sim device|CUDA error:) out of memory|ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY"),
        "",
    ),
    (
        "oom-host",
        re.compile(
            r"can't allocate memory|Cannot allocate memory|^MemoryError|sim (?:host|pinned) out of "
            r"memory|insufficient shared memory"
        ),
        "",
    ),
    (
        "oom-host",
        re.compile(
            r"\b(?:OUT OF MEMORY|Out Of Memory|OUT_OF_MEMORY)\b.{0,40}|Out of memory: Kill.{0,80}|"
            r"oom[-_]kill|[Ee]xceeded (?:\w+ )?memory limit"
        ),
        "",
    ),
    ("timeout", re.compile(r"\bDUE TO (?:TIME ?LIMIT|DEADLINE)\b"), "Slurm's limit of time"),
    (
        "killed",
        re.compile(r"\bDUE TO (?:JOB )?(?:PREEMPTION|NODE FAIL(?:URE)?|REQUEUE)\b"),
        "Slurm ended the job",
    ),
    (
        "interrupted",
        re.compile(r"(?:JOB|STEP) [\w.+]{1,40} ON \S{1,80} CANCELLED AT [\dT:-]{8,30}"),
        "somebody cancelled the job",
    ),
    (
        "oom-host",
        re.compile(
            r"\bline \d+: +\d+ Killed|^Killed\s*$|exits with return code = -9\b|"
            r"exitcode *: -9\b"
        ),
        "SIGKILL that nothing in the log asked for: the host ran out of memory (inferred)",
    ),
    ("does-not-fit", re.compile(r"layers? needs [\d.]+ \w+ of (?:\w+ )?memory .*"), ""),
    ("interrupted", re.compile(r"^KeyboardInterrupt|\bline \d+: +\d+ (?:Interrupt|Hangup)\b"), ""),
    (
        "killed",
        re.compile(
            r"\bline \d+: +\d+ Terminated|^Terminated\s*$|exits with return code = -15\b|"
            r"\btasks? [\d,-]+: (?:Killed|Terminated)\b"
        ),
        "",
    ),
    ("unavailable", re.compile(r"^(?:ModuleNotFoundError|ImportError|[\w.]*Unavailable): .*"), ""),
    (
        "oom-host",
        re.compile(r"can not create \w+.*"),
        "the artifact's README: how running out of memory may look",
    ),
    (
        "crash",
        re.compile(
            r"^(?:[\w.]*(?:Error|Exception)|AssertionError)\b.*|\bline \d+: +\d+ (?:Segmentation fault|"
            r"Aborted|Bus error|Illegal instruction).*|exits with return code = -?[1-9]\d*|"
            r"\b(?:Bus error|bus error encountered)\b.*|"
            r"\btasks? [\d,-]+: (?:Segmentation fault|Aborted|Exited with exit code [1-9]).*"
        ),
        "",
    ),
)


LITERAL_VALUES = {"True": True, "False": False, "None": None}


class NotALog(ValueError):
    """The file is not the log of a training. The text of the error is the reason."""


@dataclass
class Interval:
    """The values of one line about an iteration. A value that is missing or garbled is None."""

    iteration: int
    total: int
    elapsed_ms: float | None
    # NaN if a complete line has no loss, because the dialects leave out a loss that is not finite
    loss: float | None
    grad_norm: float | None
    batch_size: float | None = None  # samples of a step, of all GPUs together
    consumed: float | None = None  # samples since the training's start
    unread: str = ""  # first part of the line that is no number with a name


@dataclass
class RawLog:
    """The values that a log's name and lines have, in the units that the log prints."""

    name: dict[str, Any]
    sha256: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    starts: set[int] = field(
        default_factory=set
    )  # numbers of iteration lines before an argument or `first_line`
    # values of the first line of a log by this project
    first_line: dict[str, Any] = field(default_factory=dict)
    # status, phase, number of steps and reason in the last line of a log by this project
    last_line: tuple[str, str, int, str] | None = None
    parameters: list[int] = field(default_factory=list)
    parameters_billion: list[float] = field(default_factory=list)
    vocab_size: int | None = None
    samples_per_step: int | None = None  # of all GPUs together
    world_size: int | None = None  # number of GPUs
    num_unread_steps: int = 0  # number of lines that look like a step's, but have no known form
    unread_step: str = ""  # the first of these lines
    intervals: list[Interval] = field(default_factory=list)
    interval_speeds: list[float] = field(default_factory=list)
    cumulative_speeds: list[float] = field(default_factory=list)
    tera_flops: list[float] = field(default_factory=list)
    memory_mb: dict[str, float] = field(default_factory=dict)
    timers_ms: list[dict[str, float]] = field(default_factory=list)
    exit_iteration: int | None = None
    # by index in RUN_ENDS: the text in the log that tells of this end
    ends: dict[int, str] = field(default_factory=dict)


def read_log(path: Path) -> RawLog:
    """Read a log. Raises NotALog if its name, its lines or their number are unlike a training log's, OSError if the
    file cannot be read."""
    match = LOG_NAME.fullmatch(path.name)
    if match is None:
        raise NotALog("its name is not log_METHOD_l-N_hs-N_bs-N_ws-N_DATE.UNIX.txt")
    parts = match.groupdict()
    name = {key: int(parts[key]) for key in ("num_layers", "hidden_size", "batch_size", "window")}
    log = RawLog({"method": parts["method"], **name, "day": parts["day"], "unix": int(parts["unix"] or 0)})
    digest = hashlib.sha256()
    for line in _lines(path, digest.update):
        _take_line(log, line)
    log.sha256 = digest.hexdigest()
    num_speeds = max(len(log.interval_speeds), len(log.cumulative_speeds))
    if max(len(log.intervals), len(log.timers_ms), num_speeds) > MOST_METRIC_LINES:
        raise NotALog(f"more than {MOST_METRIC_LINES} of its lines are metrics of one kind")
    if not (log.arguments or log.first_line or log.parameters or log.intervals or log.ends):
        raise NotALog("not one of its lines is a training log's")
    return log


def _lines(path: Path, update: Callable[[bytes], None]) -> Iterator[str]:
    """Yield the lines of a file; long lines are cut into pieces, so that a file without line ends can be read, too.
    `update` is called with the bytes of each piece."""
    with open(path, "rb") as file:
        while piece := file.readline(LONGEST_LINE_BYTES):
            update(piece)
            text = COLOR_CODE.sub("", piece.decode(errors="replace").rstrip("\r\n"))
            yield text[LINE_PREFIX.match(text).end() :]  # type: ignore[union-attr]


def _take_line(log: RawLog, line: str) -> None:
    if match := ITERATION_LINE.search(line):
        log.intervals.append(_parsed_interval(int(match[1]), int(match[2]), match[3]))
    elif line.startswith("time (ms) |"):
        log.timers_ms.append(_number_fields(line.partition("|")[2]))
    elif match := ARGUMENT_LINE.match(line):
        if match[1] in KNOWN_ARGUMENTS:
            log.arguments[match[1]] = match[2].strip()[:300]
            log.starts.add(len(log.intervals))
    elif match := MEMORY_LINE.search(line):
        log.memory_mb.update(_number_fields(match[1]))
    elif match := OWN_HEADER.match(line):
        log.starts.add(len(log.intervals))
        log.first_line = {"method": match[1], "steps": int(match[3]), "device": match[4]}
        log.first_line |= {
            "options": _named_values(r"'(\w+)': ([^,}]+)", match[2]),
            "workload": _named_values(r"\b(\w+)=([^,]+)", match[5]),
        }
    elif match := OWN_END.match(line):
        log.last_line = (match[1], match[2], int(match[3]), printable_line(match[4] or "", 1000))
    else:
        _take_single_values(log, line)


def _take_single_values(log: RawLog, line: str) -> None:
    """Add to the log the values that stand alone on a line. If two processes wrote at once, a line has several of
    them."""
    if match := EXACT_PARAMETERS.search(line):
        log.parameters.append(int(match[1]))
    for name, pattern in METRIC_PATTERNS.items():
        match = pattern.search(line)
        value = parsed_number(match[1]) if match else None
        if value is not None and math.isfinite(value):
            getattr(log, name).append(value)
    if "padded vocab" in line and (match := PADDED_VOCABULARY.search(line)):
        log.vocab_size = int(match[1])
    if ("SamplesPerStep" in line or "train_batch_size" in line) and (match := SAMPLES_PER_STEP.search(line)):
        log.samples_per_step = int(match[1] or match[2])
    if ("world size" in line or "NumWorkers" in line) and (match := WORLD_SIZE.search(line)):
        log.world_size = int(match[1] or match[2])
    if match := EXIT_LINE.search(line):
        log.exit_iteration = int(match[1])
    if end := _run_end(line):
        log.ends.setdefault(*end)
    elif _is_like_a_step(line):
        log.num_unread_steps += 1
        log.unread_step = log.unread_step or printable_line(line, 80)


def _run_end(line: str) -> tuple[int, str] | None:
    """Return the index in RUN_ENDS and the text of the end that the line tells; None if it tells no end."""
    if any(sign in line for sign in RUN_END_WORDS):
        for index, (_, pattern, _) in enumerate(RUN_ENDS):
            if match := pattern.search(line):
                return index, printable_line(match[0])
    return None


def _is_like_a_step(line: str) -> bool:
    """True if the line looks like one about a step of the training, not of an evaluation."""
    if (
        "loss" in line.lower()
        and LOSS_WORD.search(line)
        and STEP_NUMBER.search(line)
        and not EVALUATION_WORD.search(line)
    ):
        return True
    return CUT_ITERATION_LINE.search(line) is not None


def _parsed_interval(iteration: int, total: int, fields_text: str) -> Interval:
    values = _number_fields(fields_text)
    times = [unit * values[name] for name, unit in MS_PER_UNIT_OF_TIME_FIELD.items() if name in values]
    elapsed = times[0] if times else None
    elapsed = elapsed if elapsed and 1e-3 < elapsed < 1e12 else None  # a garbled number is dropped
    loss = values.get("lm loss")
    texts = [text for text in fields_text.split("|") if text.strip() and _number_field(text) is None]
    unread = printable_line(texts[0], 60) if texts else ""
    is_whole = (
        fields_text.rstrip().endswith("|")
        and fields_text.count("|") == len(values)
        and "number of nan iterations" in values
    )
    lacks_loss = is_whole and set(values) <= ITERATION_FIELDS
    has_nan_iterations = loss is not None and values.get("number of nan iterations")
    if lacks_loss or has_nan_iterations:
        loss = math.nan
    return Interval(
        iteration,
        total,
        elapsed,
        loss,
        values.get("grad norm"),
        values.get("global batch size"),
        values.get("consumed samples"),
        unread,
    )


def _number_fields(text: str) -> dict[str, float]:
    """Return, by name, the numbers in a text such as `name: number | name: number`."""
    fields = [_number_field(field_text) for field_text in text.split("|")]
    return dict(field for field in fields if field is not None)


def _number_field(text: str) -> tuple[str, float] | None:
    """Return name and number of a text such as `name: number`; None if the text has another form."""
    match = NUMBER_FIELD.fullmatch(text.strip())
    value = parsed_number(match[2]) if match else None
    return None if match is None or value is None else (match[1], value)


def _named_values(pattern: str, text: str) -> dict[str, Any]:
    return {match[1]: parsed_scalar(match[2].strip()) for match in re.finditer(pattern, text)}


def parsed_scalar(text: str) -> Any:
    """Return the value of a word that is a number, True, False, None or a text in quotes. Any other word is returned as
    it is."""
    if text in LITERAL_VALUES:
        return LITERAL_VALUES[text]
    value = int(text) if re.fullmatch(r"[-+]?\d{1,18}", text) else parsed_number(text)
    return text.strip("'\"") if value is None else value


def parsed_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def printable_line(text: str, longest: int = 200) -> str:
    """Return the text's printable characters in one line, cut to at most `longest` characters."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:longest]
