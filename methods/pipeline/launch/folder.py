"""The folder of a launched job: its lock, its state, and the record of its steps. Needs only the standard library.

- job.json: what is trained, and how it ended
- steps.jsonl: each step once, in order
- lost_steps.jsonl: steps that were trained again, because their updates were lost
- events.jsonl: rounds, and what ended them
- checkpoints, logs: folders; slow_machines.txt: ranks slower than others of their stage
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.base.foreign_file import read_text
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole
from methods.pipeline.checkpoint.folders import STEP_PREFIX, complete_steps, step_of

LOCK, WORKERS_LOCK = "launcher.lock", "workers.lock"
TAKEOVER_SECONDS = 20.0  # longest wait until the ranks of an earlier launcher, which was killed, have ended
NUMBER_KEYS = ("step", "round")
NUM_KEPT_CHECKPOINTS = 2  # number of complete checkpoints that are kept


def read_lines(path: Path, *needed_keys: str) -> list[JsonObject]:
    """Read lines of JSON; [] if there is no file. Each line must have the numbers named in `needed_keys`. A last line
    without an end is left out: a process was killed while it wrote the line. Raises ValueError, with the line's number,
    for a line that no launcher writes."""
    if not path.exists():
        return []
    *lines, _ = read_text(path).split("\n")
    return [
        _parse_line(line, f"{path}, line {line_number}", needed_keys)
        for line_number, line in enumerate(lines, start=1)
    ]


def _parse_line(text: str, source: str, needed_keys: Sequence[str] = ()) -> JsonObject:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    is_known = isinstance(values, dict) and set(needed_keys) <= values.keys()
    has_numbers = is_known and all(type(values.get(name, 0)) is int for name in NUMBER_KEYS)
    if not has_numbers or type(values.get("saved") or 0) is not int:
        raise ValueError(
            f"{source}: expected JSON that a launcher wrote, got {text[:60]!r}; try another --folder"
        )
    return values


def step_line(reports: Mapping[int, Mapping[str, Any]]) -> JsonObject:
    """Return the record's line for a step. `reports`: the report of each rank, by the rank's number. The number of
    samples is the sum over the first stage's ranks, because only these ranks report samples."""
    first_stage_reports = [report for report in reports.values() if "data" in report]
    data_hash = sum(report["data"] for report in first_stage_reports) % 2**48
    kept_keys = ("step", "loss", "grad_norm", "overflow", "learning_rate", "updates", "loss_scale", "seconds")
    facts = {name: reports[0][name] for name in kept_keys}
    return {
        **facts,
        "samples": sum(report["samples"] for report in first_stage_reports),
        "data": f"{data_hash:012x}",
    }


class Folder:
    """The job's folder. One launcher at a time holds it, until the launcher's process ends. Raises ValueError if
    another launcher holds the folder, or if the folder contains another job."""

    def __init__(self, path: Path, identity: JsonObject) -> None:
        self.path = path
        for name in ("checkpoints", "logs"):
            (path / name).mkdir(parents=True, exist_ok=True)
        self.locks = [open(path / name, "a+") for name in (LOCK, WORKERS_LOCK)]  # noqa: SIM115
        self._lock(self.locks[0], "a running launcher in it", 0.0)
        self._lock(self.locks[1], "an earlier launcher's running job in it", TAKEOVER_SECONDS)
        self.locks.pop().close()  # Free the workers' lock: from now on the agents hold it.
        job_file = path / "job.json"
        stored_state = _parse_line(read_text(job_file), str(job_file)) if job_file.exists() else {}
        changed_names = [
            name for name, value in identity.items() if stored_state and stored_state.get(name) != value
        ]
        if changed_names:
            name = changed_names[0]
            raise ValueError(
                f"{path}: expected a job with {name} {identity[name]}, got {stored_state.get(name)}; try another"
                " --folder"
            )
        # `saved`: the step at which the script last saved its state by itself; None: the script never did
        self.state = {"round": 0, "end": None, "saved": None, **stored_state, **identity}
        self.keep_state()
        self.steps = open(path / "steps.jsonl", "a")  # noqa: SIM115
        self.events = open(path / "events.jsonl", "a")  # noqa: SIM115

    def _lock(self, file: Any, holder: str, limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"{self.path}: expected an unused folder, got {holder}; end it, or try another --folder"
                )
            time.sleep(0.05)

    def keep_state(self, **changes: Any) -> None:
        self.state.update(changes)
        write_whole(self.path / "job.json", json.dumps(self.state, indent=1) + "\n")

    def note_event(self, event: str, **facts: Any) -> None:
        self.events.write(json.dumps({"time": time.time(), "event": event, **facts}) + "\n")
        self.events.flush()

    def record_step(self, step: JsonObject) -> None:
        self.steps.write(json.dumps(step) + "\n")
        self.steps.flush()

    def last_step(self) -> int:
        return max((line["step"] for line in read_lines(self.path / "steps.jsonl", "step")), default=0)

    def other_code(self, code: str) -> str:
        """Return, as text, that the steps of the record were trained by other code; empty if they were not. `code`: the
        hash of the present code."""
        last_step = self.last_step()
        if not last_step or self.state.get("code", code) == code:
            return ""
        return f"the script, or what it imports, is not the code that trained the {last_step} steps there"

    # ---- Checkpoints

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def saved_steps(self) -> list[int]:
        """Return the steps from which the job can continue, in order: the steps of complete checkpoints. If the script
        saves its state by itself, return only the step that the script saved last."""
        saved = self.state["saved"]
        return complete_steps(self.checkpoints) if saved is None else [saved]

    def resume(self) -> int | None:
        """Return the newest saved step that the record includes, and remove later steps from the record. Return None if
        the job must start from the beginning."""
        path = self.path / "steps.jsonl"
        lines = read_lines(path, "step")
        # The record lacks the steps that ranks took after their launcher or an agent was killed.
        reached_step = lines[-1]["step"] if lines else 0
        saved_steps = self.saved_steps()
        recorded_steps = [saved_step for saved_step in saved_steps if saved_step <= reached_step]
        step = max(recorded_steps, default=min(saved_steps, default=None))
        lost_lines = [line for line in lines if line["step"] > (step or 0)]
        self.steps.close()
        if lost_lines:
            with open(self.path / "lost_steps.jsonl", "a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lost_lines))
        kept_lines = lines[: len(lines) - len(lost_lines)]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept_lines))
        self.steps = open(path, "a")  # noqa: SIM115
        return step

    def prune_checkpoints(self) -> None:
        """Remove the checkpoints that are older than the newest NUM_KEPT_CHECKPOINTS complete checkpoints."""
        steps = complete_steps(self.checkpoints)
        if len(steps) > NUM_KEPT_CHECKPOINTS:
            for path in self.checkpoints.glob(f"{STEP_PREFIX}*"):
                if (step := step_of(path)) is not None and step < steps[-NUM_KEPT_CHECKPOINTS]:
                    shutil.rmtree(path, ignore_errors=True)

    def last_log_line(self, name: str) -> str:
        """Return the last line of an agent's log that is not blank; "" if there is none."""
        with contextlib.suppress(OSError):
            lines = (self.path / "logs" / name).read_text(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""
