"""`search largest`: searches the largest size that trains, by real runs, and makes the table of the answers.

A size is a number of layers, samples or tokens (harness/jobs/size_search.py). harness/jobs/size_search.py chooses the
sizes to try; each run writes an ordinary record. The first guess is the largest size whose plan fits. Two small runs
then show how many bytes a method takes beyond its plan, and the plans of later sizes may fill only the remaining
memory. At each size, the method chooses anew the options that depend on memory (a window, resident layers). A size near
the largest is run even if its plan does not fit, unless the run would exhaust this machine's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math

from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.job import MOST_LAYERS, Job, Plan, Room, gib, params_text
from harness.core.record import Record
from harness.devices import machine
from harness.devices.room import device_limit_bytes, room_of
from harness.jobs.size_search import (
    GROWN_FIELDS,
    LAYERS,
    SIZE_UNITS,
    TOKEN_AXES,
    SizeAnswer,
    SizeAxis,
    SizeOutcome,
    extrapolate,
    search,
    total_micro_batches,
)
from harness.jobs.sweep import Sweep
from harness.plan.fit import Planned, next_planned

# The search tries sizes up to this many times the guess, and at least up to SMALLEST_SIZE_LIMIT.
MOST_TIMES_GUESS = 4
SMALLEST_SIZE_LIMIT = 64
BUDGET_MEMORIES = {"pinned": "host", "shm": "host"}  # by kind of memory: the kind whose budget also counts it
# fewest steps of a probe: by then the optimizer's state exists, and memory use no longer grows
FEWEST_STEPS = 5


class Probes:
    """The runs of one method at several sizes; a call of the object with a size makes a run at that size. `quantity`:
    what a size counts, such as LAYERS; all other quantities are as in `job`."""

    def __init__(self, sweep: Sweep, job: Job, quantity: str = LAYERS) -> None:
        self.sweep, self.job = sweep, job
        micro_batches = total_micro_batches(job.workload.micro_batches, job.world_size)
        self.axis = SizeAxis(quantity, job.workload, micro_batches)
        self.room = room_of(job, counts_imports=False)
        self.records: list[Record] = []
        # by memory: pairs of a size and, by phase, the bytes that the run of this size took beyond its plan
        self.excess_bytes: dict[str, list[tuple[int, dict[str, int]]]] = {}
        # by memory: the bytes that later plans leave free, because a run failed in this memory although its plan fitted
        self.reserve_bytes: dict[str, int] = {}
        self.planned_by_size: dict[
            int, Planned
        ] = {}  # by size: the job that all later runs at this size repeat
        self.least_size = 1
        if quantity in TOKEN_AXES:
            self.axis = self.axis.with_token_steps(self.guess())
        self._count_planned_sizes()
        self._check_options()

    def _count_planned_sizes(self) -> None:
        """Set `least_size` to the least size that has a plan. Let the axis count only sizes that have a plan."""
        least_size = min(MOST_LAYERS, method.largest_depth(lambda size: self._next_planned(size) is None) + 1)
        first_size, _ = self._next_planned(least_size) or (least_size, None)
        second_size, _ = self._next_planned(first_size + 1) or (first_size + 1, None)
        distance = math.gcd(first_size, second_size - first_size)
        self.axis, self.least_size = self.axis.counting_every(distance), first_size // distance

    def _check_options(self) -> None:
        """Raise ValueError if the options fit no size, or if a placement fits only one number of layers."""
        if not self.job.options.get("placement") or self.axis.quantity != LAYERS:
            self._plan_at(self.least_size)
            return
        try:
            self._plan_at(self.least_size + 1 if self._next_planned(self.least_size) else 1)
        except ValueError as error:
            remedy = "a search tries other depths: leave --placement out, or give its last run no length, as in R2W"
            raise ValueError(f"{error}; {remedy}") from error

    def __call__(self, size: int) -> SizeOutcome:
        """Run the job at this size and return the outcome. If the run fails although its plan fitted, run it again with
        options that should need less memory. A size is too large only if no options train it."""
        if size in self.planned_by_size:
            return self._run(self.planned_by_size[size])
        try:
            planned = self._plan_at(size)
        except ValueError as error:  # the sequence is longer than the model accepts
            return SizeOutcome(False, evidence=str(error))
        if reason := self._refusal_reason(planned.plan):
            return SizeOutcome(False, evidence=reason)
        tried_jobs, outcome = [planned.job], self._run(planned)
        self.planned_by_size[size] = planned
        while not outcome.has_passed and not outcome.stop_reason:
            self._raise_reserve(outcome.evidence, planned.plan)
            planned = self._plan_at(size)
            if planned.job in tried_jobs or not self._fits(planned):
                break
            tried_jobs.append(planned.job)
            self.planned_by_size[size] = planned
            outcome = self._run(planned)
        return outcome

    def _run(self, planned: Planned) -> SizeOutcome:
        number = 1 + sum(record.job == planned.job for record in self.records)
        record = self.sweep.attempt(planned, number, {"role": f"probe {len(self.records) + 1}"})
        self.records.append(record)
        size_text = self.axis.amount_text(self.axis.size_of(planned.job.workload))
        stop_reason = "" if record.is_result else f"at {size_text}: {record.status}: {record.reason}"
        return SizeOutcome(record.status == "ok", memory_of(record), stop_reason, record)

    def size_limit(self, limit: int | None) -> int:
        """Return the size for this number of layers, samples or tokens; for None, the largest size to search."""
        if limit is None and self.axis.quantity != LAYERS:
            return MOST_LAYERS
        grown_field: JsonObject = {GROWN_FIELDS[self.axis.quantity]: limit or MOST_LAYERS}
        return max(1, self.axis.size_of(dataclasses.replace(self.job.workload, **grown_field)))

    def guess(self) -> int:
        """Return the largest size that fits, counting its plan and the bytes that its run should take beyond the
        plan."""

        def fits(size: int) -> bool:
            if size < self.least_size:
                return True
            next_pair = self._next_planned(size)  # None if the sequence is longer than the model accepts
            return next_pair is not None and self._fits(next_pair[1])

        return method.largest_depth(fits)

    def _fits(self, planned: Planned) -> bool:
        return planned.shortfall is None and not self._refusal_reason(planned.plan)

    def refine(self) -> int:
        """Return a better guess(): it counts the bytes that the two small runs took beyond their plans."""
        self.reserve_bytes.clear()
        for record in self.records:
            if record.status != "ok":
                continue
            planned_bytes, size = record.predicted, self.axis.size_of(record.job.workload)
            plan = Plan(planned_bytes["device"], planned_bytes["host"], options=record.job.options)
            plan = plan.pooled(self.room)
            for memory, num_bytes in measured_bytes(record).items():
                excess = {"run": num_bytes - getattr(plan, f"{memory}_bytes")}
                self.excess_bytes.setdefault(memory, []).append((size, excess))
        return self.guess()

    def _next_planned(self, size: int) -> tuple[int, Planned] | None:
        """Return the first size from `size` on that has a plan, and the planned job; None if no such size has one."""
        return next_planned(self._plan_at, size, self.job.world_size)

    def _plan_at(self, size: int) -> Planned:
        """Return the planned job at this size. The method chooses its options for the room at this size. Raises
        ValueError if this size has no plan."""
        workload, room = self.axis.workload_at(size), self._room_at(size)
        configured_method = method.create(self.job.method, self.job.options, self.sweep.folders)
        plan = configured_method.plan(workload, room)
        options = plan.options or dataclasses.asdict(configured_method)  # type: ignore[call-overload]
        job = dataclasses.replace(self.job, workload=workload, options=options)
        return Planned(job, plan, plan.shortfall(room))

    def _raise_reserve(self, record: Record, plan: Plan) -> None:
        """Raise the bytes that later plans leave free in a memory (the reserve), because this run failed in that memory
        although its plan fitted.

        The plan's bytes and the reserve together must exceed the memory, so that the same plan no longer fits. The
        reserve at least doubles, so that a few runs suffice to find one that is large enough.
        """
        size, lacked_memory = self.axis.size_of(record.job.workload), memory_of(record)
        memory, room = BUDGET_MEMORIES.get(lacked_memory, lacked_memory), self._room_at(size)
        room_bytes = getattr(room, f"{memory}_bytes", None)
        planned_bytes = getattr(plan.pooled(room), f"{memory}_bytes", None)
        if room_bytes is not None and planned_bytes is not None and planned_bytes <= room_bytes:
            reserve = getattr(self.room, f"{memory}_bytes") - planned_bytes + 1
            self.reserve_bytes[memory] = max(reserve, 2 * self.reserve_bytes.get(memory, 0))

    def _room_at(self, size: int) -> Room:
        """Return the room that a plan at this size may fill: the budget less the bytes that the run is expected to
        take beyond its plan. The larger of two estimates counts: the excess extrapolated from the two small runs, and
        the reserve that failed runs left."""
        room_bytes = {}
        for memory in {**self.excess_bytes, **self.reserve_bytes}:
            estimates = []
            if memory in self.excess_bytes:
                estimates.append(extrapolate(self.excess_bytes[memory], size))
            if memory in self.reserve_bytes:
                estimates.append(self.reserve_bytes[memory])
            limit = getattr(self.room, f"{memory}_bytes")
            if limit is not None:
                room_bytes[f"{memory}_bytes"] = max(1, limit - max(estimates))
        return dataclasses.replace(self.room, **room_bytes)

    def _refusal_reason(self, plan: Plan) -> str:
        """Return why a run by this plan must not start, as text; empty if it may start. Reasons: the plan exceeds the
        disk's budget or this machine's host memory."""
        disk_bytes, host_bytes = self.room.disk_bytes, machine.host_bytes()
        if disk_bytes is not None and plan.disk_bytes > disk_bytes:
            return f"disk, by plan: {gib(plan.disk_bytes)} of {gib(disk_bytes)}"
        planned_bytes = plan.host_bytes + (0 if self.job.device == "cuda" else plan.device_bytes)
        if planned_bytes * self.job.world_size > host_bytes:
            return f"host, by plan: {gib(planned_bytes)} of {gib(host_bytes)}"
        return ""


def memory_of(record: Record) -> str:
    """Return the memory that a failed run lacked, such as device, by the record's evidence or, without it, by its
    status."""
    return str(record.evidence.get("resource") or record.status.removeprefix("oom-"))


def measured_bytes(record: Record) -> dict[str, int]:
    """Return the peak bytes of the device's and the host's memory, counted as the budgets count them. Where the device
    keeps a count of the host's tensors, as sim does, the host's peak is that count. Otherwise it is the peak of the
    whole process or, with several ranks, the average of the ranks' peaks."""
    peaks = record.peaks
    peak_bytes = {
        "device": peaks.get("device_reserved") or peaks.get("device_allocated", 0),
        "host": peaks.get("host_accounted", record.host_peak_bytes // record.job.world_size),
    }
    return {memory: num_bytes for memory, num_bytes in peak_bytes.items() if num_bytes}


def find_largest(probes: Probes, repeats: int, most_size: int) -> JsonObject:
    """Search one method's largest size; return its row of the table, with the record that decides the exit code."""
    guess = probes.guess()
    most_size = min(most_size, max(SMALLEST_SIZE_LIMIT, probes.least_size, MOST_TIMES_GUESS * guess))
    least_size = probes.least_size
    answer = search(
        probes, guess, least_size=least_size, most_size=most_size, repeats=repeats, refine=probes.refine
    )
    largest_runs = [trial.outcome.evidence for trial in answer.trials if trial.size == answer.largest_size]
    best_run: Record | None = largest_runs[-1] if largest_runs else None
    stopping_run = None
    if answer.stop_reason and probes.records and not probes.records[-1].is_result:
        stopping_run = probes.records[-1]
    axis, load = probes.axis, best_run.job.workload if best_run else None
    return {
        "method": probes.job.method,
        "of": axis.quantity,
        "num_layers": probes.job.workload.num_layers if axis.quantity != LAYERS else None,
        "largest": axis.amount(answer.largest_size) if load else 0,
        "num_params": load.num_params if load else 0,
        "tokens": load.batch_size * load.seq_len if load else 0,
        "options": best_run.job.options if best_run else {},
        "fails_at": answer.failing_size and _amount(axis, answer.failing_size),
        "is_sharp": answer.is_sharp,
        "mixed": [_amount(axis, size) for size in answer.contradicting_sizes()],
        "binding": _binding_text(answer, best_run, probes),
        "gate": best_run.gate.verdict if best_run else "",
        "trials": len(probes.records),
        "stopped": answer.stop_reason,
        "record": stopping_run or best_run,
    }


def _amount(axis: SizeAxis, size: int) -> int | None:
    """Return the number of layers, samples or tokens of a size; None if the model accepts no such size."""
    with contextlib.suppress(ValueError):
        return axis.amount(size)
    return None


def _binding_text(answer: SizeAnswer, best_run: Record | None, probes: Probes) -> str:
    """Return, as text, the memory that limits the size, and how much of it the run of the largest size took."""
    if answer.is_unlimited:
        return f"none up to {probes.axis.amount_text(answer.most_size)}, the most tried"
    failures = [trial.outcome for trial in answer.trials if trial.size == answer.failing_size]
    if not failures:
        return ""
    memory, evidence = failures[0].memory, failures[0].evidence
    if isinstance(evidence, str):
        return evidence
    requested_bytes = evidence.evidence.get("asked_bytes")
    used_bytes, limit_bytes = evidence.evidence.get("in_use_bytes"), evidence.evidence.get("limit_bytes")
    if used_bytes and limit_bytes:
        request = f", {gib(requested_bytes)} more asked for" if requested_bytes else ""
        return f"{memory}: {gib(used_bytes)} of {gib(limit_bytes)} in use{request}"
    room = dataclasses.replace(probes.room, device_bytes=device_limit_bytes(probes.job))
    peak_bytes = measured_bytes(best_run).get(memory) if best_run else 0
    limit_bytes = getattr(room, f"{memory}_bytes", None)
    if peak_bytes and limit_bytes:
        return f"{memory}: the largest takes {gib(peak_bytes)} of {gib(limit_bytes)}"
    return memory


def answer_texts(answer: JsonObject) -> dict[str, str]:
    """Return a row of the table as text, by the heads of its columns. `answer`: what find_largest() returned."""
    contradictions = ""
    if sizes := answer["mixed"]:
        contradictions = f" (both passes and failures from {sizes[0]} to {sizes[-1]})"
    largest = str(answer["largest"] or ("" if answer["stopped"] else "none"))
    texts = {"method": answer["method"]}
    if answer["of"] == LAYERS:
        total_head, total = "parameters", params_text(answer["num_params"])
    else:
        texts["layers"] = str(answer["num_layers"])
        total_head, total = "tokens a step", str(answer["tokens"])
    texts[f"largest, {SIZE_UNITS[answer['of']]}"] = largest
    texts[total_head] = total if answer["largest"] else ""
    texts["fails at"] = f"{answer['fails_at'] or ''}{contradictions}"
    texts["what binds"] = f"no answer: {answer['stopped']}" if answer["stopped"] else answer["binding"]
    return {**texts, "gate": answer["gate"], "trials": str(answer["trials"])}
