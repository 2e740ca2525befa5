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
from typing import Any

from harness.core import method
from harness.core.job import MOST_LAYERS, Job, Plan, Room, gib, params_text
from harness.core.record import Record
from harness.devices import machine
from harness.devices.room import device_limit_bytes, room_of
from harness.jobs.size_search import (
    LAYERS,
    OPTIONS,
    STEPPED,
    UNITS,
    SizeAnswer,
    SizeAxis,
    SizeOutcome,
    extrapolate,
    num_parts,
    search,
)
from harness.jobs.sweep import Sweep
from harness.plan.fit import Planned, next_planned

BEYOND_PLAN = 4  # the search tries sizes up to this many times the guess, and at least up to FEWEST_BEYOND
FEWEST_BEYOND = 64
BUDGETED = {"pinned": "host", "shm": "host"}  # by kind of memory: the kind whose budget also counts it
# fewest steps of a probe: by then the optimizer's state exists, and memory use no longer grows
FEWEST_STEPS = 5


class Probes:
    """The runs of one method at several sizes; a call of the object with a size makes a run at that size. `of`: the
    quantity that a size counts, such as LAYERS; all other quantities are as in `job`."""

    def __init__(self, sweep: Sweep, job: Job, of: str = LAYERS) -> None:
        self.sweep, self.job = sweep, job
        self.axis = SizeAxis(of, job.workload, num_parts(job.workload.micro_batches, job.world_size))
        self.room = room_of(job, counts_imports=False)
        self.records: list[Record] = []
        # by memory: pairs of a size and, by phase, the bytes that the run of this size took beyond its plan
        self.excess: dict[str, list[tuple[int, dict[str, int]]]] = {}
        # by memory: the bytes that later plans leave free, because a run failed in this memory although its plan fitted
        self.reserves: dict[str, int] = {}
        self.decided: dict[int, Planned] = {}  # by size: the job that all later runs at this size repeat
        self.least = 1
        if of in STEPPED:
            self.axis = self.axis.fitting(self.guess())
        self._start()
        self._check()

    def _start(self) -> None:
        """Set `least` to the least size that has a plan. Let the axis count only sizes that have a plan."""
        least = min(MOST_LAYERS, method.largest_depth(lambda size: self._next(size) is None) + 1)
        first, _ = self._next(least) or (least, None)
        second, _ = self._next(first + 1) or (first + 1, None)
        step = math.gcd(first, second - first)
        self.axis, self.least = self.axis.every(step), first // step

    def _check(self) -> None:
        """Raise ValueError if the options fit no size, or if a placement fits only one number of layers."""
        if not self.job.options.get("placement") or self.axis.of != LAYERS:
            self._planned(self.least)
            return
        try:
            self._planned(self.least + 1 if self._next(self.least) else 1)
        except ValueError as error:
            remedy = "a search tries other depths: leave --placement out, or give its last run no length, as in R2W"
            raise ValueError(f"{error}; {remedy}") from error

    def __call__(self, size: int) -> SizeOutcome:
        """Run the job at this size and return the outcome. If the run fails although its plan fitted, run it again with
        options that should need less memory. A size is too large only if no options train it."""
        if size in self.decided:
            return self._run(self.decided[size])
        try:
            planned = self._planned(size)
        except ValueError as error:  # the sequence is longer than the model accepts
            return SizeOutcome(False, evidence=str(error))
        if refused := self._refusal(planned.plan):
            return SizeOutcome(False, evidence=refused)
        tried_jobs, outcome = [planned.job], self._run(planned)
        self.decided[size] = planned
        while not outcome.passed and not outcome.stop:
            self._learn(outcome.evidence, planned.plan)
            planned = self._planned(size)
            if planned.job in tried_jobs or not self._fits(planned):
                break
            tried_jobs.append(planned.job)
            self.decided[size] = planned
            outcome = self._run(planned)
        return outcome

    def _run(self, planned: Planned) -> SizeOutcome:
        number = 1 + sum(record.job == planned.job for record in self.records)
        record = self.sweep.attempt(planned, number, {"role": f"probe {len(self.records) + 1}"})
        self.records.append(record)
        size_text = self.axis.text(self.axis.number(planned.job.workload))
        stop = "" if record.is_result else f"at {size_text}: {record.status}: {record.reason}"
        return SizeOutcome(record.status == "ok", memory_of(record), stop, record)

    def most(self, limit: int | None) -> int:
        """Return the size for this number of layers, samples or tokens; for None, the largest size to search."""
        if limit is None and self.axis.of != LAYERS:
            return MOST_LAYERS
        size: dict[str, Any] = {OPTIONS[self.axis.of]: limit or MOST_LAYERS}
        return max(1, self.axis.number(dataclasses.replace(self.job.workload, **size)))

    def guess(self) -> int:
        """Return the largest size that fits, counting its plan and the bytes that its run should take beyond the
        plan."""

        def fits(size: int) -> bool:
            if size < self.least:
                return True
            following = self._next(size)  # None if the sequence is longer than the model accepts
            return following is not None and self._fits(following[1])

        return method.largest_depth(fits)

    def _fits(self, planned: Planned) -> bool:
        return planned.shortfall is None and not self._refusal(planned.plan)

    def refine(self) -> int:
        """Return a better guess(): it counts the bytes that the two small runs took beyond their plans."""
        self.reserves.clear()
        for record in (record for record in self.records if record.status == "ok"):
            planned_bytes, options = record.predicted, record.job.options
            planned = Plan(planned_bytes["device"], planned_bytes["host"], options=options).pooled(self.room)
            for memory, num_bytes in measured_bytes(record).items():
                beyond = {"run": num_bytes - getattr(planned, f"{memory}_bytes")}
                self.excess.setdefault(memory, []).append((self.axis.number(record.job.workload), beyond))
        return self.guess()

    def _next(self, size: int) -> tuple[int, Planned] | None:
        """Return the first size from `size` on that has a plan, and the planned job; None if no such size has one."""
        return next_planned(self._planned, size, self.job.world_size)

    def _planned(self, size: int) -> Planned:
        """Return the planned job at this size. The method chooses its options for the room at this size. Raises
        ValueError if this size has no plan."""
        workload, room = self.axis.grown(size), self._room_at(size)
        trained = method.create(self.job.method, self.job.options, self.sweep.folders)
        plan = trained.plan(workload, room)
        options = plan.options or dataclasses.asdict(trained)  # type: ignore[call-overload]
        job = dataclasses.replace(self.job, workload=workload, options=options)
        return Planned(job, plan, plan.shortfall(room))

    def _learn(self, record: Record, plan: Plan) -> None:
        """Raise the reserve (`lacking`) that later plans leave free in a memory, because this run failed in that memory
        although its plan fitted.

        The plan's bytes and the reserve together must exceed the memory, so that the same plan no longer fits. The
        reserve at least doubles, so that a few runs suffice to find one that is large enough.
        """
        size, lacked_memory = self.axis.number(record.job.workload), memory_of(record)
        memory, room = BUDGETED.get(lacked_memory, lacked_memory), self._room_at(size)
        room_bytes = getattr(room, f"{memory}_bytes", None)
        planned_bytes = getattr(plan.pooled(room), f"{memory}_bytes", None)
        if room_bytes is not None and planned_bytes is not None and planned_bytes <= room_bytes:
            reserve = getattr(self.room, f"{memory}_bytes") - planned_bytes + 1
            self.reserves[memory] = max(reserve, 2 * self.reserves.get(memory, 0))

    def _room_at(self, size: int) -> Room:
        """Return the room that a plan at this size may fill: the budget less the bytes that the run should take beyond
        its plan. The larger of two estimates counts: the excess extrapolated from the two small runs, and the reserve
        that failed runs left."""
        rooms = {}
        for memory in {**self.excess, **self.reserves}:
            limit = getattr(self.room, f"{memory}_bytes")
            beyond = [extrapolate(self.excess[memory], size)] if memory in self.excess else []
            beyond += [self.reserves[memory]] if memory in self.reserves else []
            if limit is not None:
                rooms[f"{memory}_bytes"] = max(1, limit - max(beyond))
        return dataclasses.replace(self.room, **rooms)

    def _refusal(self, plan: Plan) -> str:
        """Return why a run by this plan must not start, as text; empty if it may start. Reasons: the plan exceeds the
        disk's budget or this machine's host memory."""
        disk, host = self.room.disk_bytes, machine.host_bytes()
        if disk is not None and plan.disk_bytes > disk:
            return f"disk, by plan: {gib(plan.disk_bytes)} of {gib(disk)}"
        at_host = plan.host_bytes + (0 if self.job.device == "cuda" else plan.device_bytes)
        return f"host, by plan: {gib(at_host)} of {gib(host)}" if at_host * self.job.world_size > host else ""


def memory_of(record: Record) -> str:
    """Return the memory that a failed run lacked, such as device, by the record's evidence or, without it, by its
    status."""
    return str(record.evidence.get("resource") or record.status.removeprefix("oom-"))


def measured_bytes(record: Record) -> dict[str, int]:
    """Return the peak bytes of the device's and the host's memory, counted as the budgets count them. Where the device
    keeps a count of the host's tensors, as sim does, the host's peak is that count. Otherwise it is the peak of the
    whole process or, with several ranks, the average of the ranks' peaks."""
    peaks = record.peaks
    sizes = {
        "device": peaks.get("device_reserved") or peaks.get("device_allocated", 0),
        "host": peaks.get("host_accounted", record.host_peak_bytes // record.job.world_size),
    }
    return {memory: size for memory, size in sizes.items() if size}


def find_largest(probes: Probes, repeats: int, most: int) -> dict[str, Any]:
    """Search one method's largest size; return its row of the table, with the record that decides the exit code."""
    guess = probes.guess()
    most = min(most, max(FEWEST_BEYOND, probes.least, BEYOND_PLAN * guess))
    answer = search(probes, guess, least=probes.least, most=most, repeats=repeats, refine=probes.refine)
    passed = [trial.outcome.evidence for trial in answer.trials if trial.size == answer.largest]
    best: Record | None = passed[-1] if passed else None
    stop = (
        probes.records[-1] if answer.stopped and probes.records and not probes.records[-1].is_result else None
    )
    axis, load = probes.axis, best.job.workload if best else None
    above = answer.failed_above and _amount(axis, answer.failed_above)
    return {
        "method": probes.job.method,
        "of": axis.of,
        "num_layers": probes.job.workload.num_layers if axis.of != LAYERS else None,
        "largest": axis.amount(answer.largest) if load else 0,
        "num_params": load.num_params if load else 0,
        "tokens": load.batch_size * load.seq_len if load else 0,
        "options": best.job.options if best else {},
        "fails_at": above,
        "is_sharp": answer.is_sharp,
        "mixed": [_amount(axis, size) for size in answer.mixed()],
        "binding": _binding(answer, best, probes),
        "gate": best.gate.verdict if best else "",
        "trials": len(probes.records),
        "stopped": answer.stopped,
        "record": stop or best,
    }


def _amount(axis: SizeAxis, size: int) -> int | None:
    """Return the number of layers, samples or tokens of a size; None if the model accepts no such size."""
    with contextlib.suppress(ValueError):
        return axis.amount(size)
    return None


def _binding(answer: SizeAnswer, best: Record | None, probes: Probes) -> str:
    """Return, as text, the memory that limits the size, and how much of it the run of the largest size took."""
    if answer.is_unlimited:
        return f"none up to {probes.axis.text(answer.most)}, the most tried"
    above = [trial.outcome for trial in answer.trials if trial.size == answer.failed_above]
    if not above or isinstance(above[0].evidence, str):
        return above[0].evidence if above else ""
    memory, evidence = above[0].memory, above[0].evidence
    requested, in_use, limit = (
        evidence.evidence.get(f"{name}_bytes") for name in ("asked", "in_use", "limit")
    )
    if in_use and limit:
        more = f", {gib(requested)} more asked for" if requested else ""
        return f"{memory}: {gib(in_use)} of {gib(limit)} in use{more}"
    limits = dataclasses.replace(probes.room, device_bytes=device_limit_bytes(probes.job))
    peak, limit = measured_bytes(best).get(memory) if best else 0, getattr(limits, f"{memory}_bytes", None)
    return f"{memory}: the largest takes {gib(peak)} of {gib(limit)}" if peak and limit else memory


def row_texts(result: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table as text, by the heads of its columns."""
    mixed = (
        f" (both passes and failures from {result['mixed'][0]} to {result['mixed'][-1]})"
        if result["mixed"]
        else ""
    )
    is_deep = result["of"] == LAYERS
    total = params_text(result["num_params"]) if is_deep else str(result["tokens"])
    return {
        "method": result["method"],
        **({} if is_deep else {"layers": str(result["num_layers"])}),
        f"largest, {UNITS[result['of']]}": str(result["largest"] or ("" if result["stopped"] else "none")),
        "parameters" if is_deep else "tokens a step": total if result["largest"] else "",
        "fails at": f"{result['fails_at'] or ''}{mixed}",
        "what binds": f"no answer: {result['stopped']}" if result["stopped"] else result["binding"],
        "gate": result["gate"],
        "trials": str(result["trials"]),
    }
