"""`search largest`: the search of harness/jobs/depth_search.py over real runs, each an ordinary record, and its table.

The first guess is the plan's. Two small runs then show what a method takes beyond its plan, and later depths are
planned in the room that is left: options that follow memory (a window, resident layers) are chosen anew at each depth.
A probe near the edge runs against its plan, unless it would exhaust this machine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.core import method
from harness.core.job import MOST_LAYERS, Job, Plan, Room, gib, params_text
from harness.core.record import Record
from harness.devices import machine
from harness.jobs.depth_search import DepthAnswer, DepthOutcome, extrapolate, search
from harness.jobs.sweep import Sweep

BEYOND_PLAN = 4  # depths up to this many times the planned one are tried, and up to 64 layers
BUDGETED = {"pinned": "host", "shm": "host"}  # kinds of memory that count towards another's budget
FEWEST_STEPS = 5  # of a probe: memory has settled when steps repeat with the optimizer's state in place


class Probes:
    """The runs of one method, by depth; calling it with a depth runs the next one there."""

    def __init__(self, sweep: Sweep, job: Job) -> None:
        self.sweep, self.job = sweep, job
        self.room = machine.rank_room(job)
        self.records: list[Record] = []
        self.excess: dict[str, list[tuple[int, dict[str, int]]]] = {}  # by memory, beyond the plan: depth, phases
        self.lacking: dict[str, int] = {}  # the least excess, by failures that the plan did not foresee
        self.decided: dict[int, Job] = {}  # by depth: the job for repeats
        self.least = min(MOST_LAYERS, method.largest_depth(lambda depth: not self._has_plan(depth)) + 1)
        self._check()

    def _check(self) -> None:
        """Raise the ValueError of options that fit no depth, or of a placement that fits one depth only."""
        if not self.job.options.get("placement"):
            self._planned(self.least)
            return
        try:
            self._planned(self.least + 1 if self._has_plan(self.least) else 1)
        except ValueError as error:
            told = "a search is over depths: leave --placement out, or give its last run no length, as in R2W"
            raise ValueError(f"{error}; {told}") from error

    def __call__(self, num_layers: int) -> DepthOutcome:
        """Run at this depth. If a run fails against its plan and other options should need less memory, try them, too:
        a depth is too large if no options train it."""
        if num_layers in self.decided:
            return self._run(self.decided[num_layers])
        job, plan = self._planned(num_layers)
        if refused := self._refusal(plan):
            return DepthOutcome(False, evidence=refused)
        tried, outcome = [job], self._run(job)
        while not outcome.passed and not outcome.stop:
            self._learn(outcome.evidence, plan)
            job, plan = self._planned(num_layers)
            if job in tried or not self._fits(plan, num_layers):
                break
            tried.append(job)
            outcome = self._run(job)
        self.decided[num_layers] = tried[-1]
        return outcome

    def _run(self, job: Job) -> DepthOutcome:
        number = 1 + sum(record.job == job for record in self.records)
        record = self.sweep.attempt(job, number, {"role": f"probe {len(self.records) + 1}"})
        self.records.append(record)
        stop = "" if record.is_result else f"{record.status}: {record.reason}"
        return DepthOutcome(record.status == "ok", memory_of(record), stop, record)

    def guess(self) -> int:
        """Layers of the deepest model whose plan and expected excess fit."""
        return method.largest_depth(lambda depth: depth < self.least or self._fits(self._planned(depth)[1], depth))

    def _fits(self, plan: Plan, num_layers: int) -> bool:
        room = self._room_at(num_layers)
        return plan.shortfall(room) is None and not self._refusal(plan)

    def refine(self) -> int:
        """guess() with the excess that small runs have shown."""
        self.lacking.clear()
        for record in (record for record in self.records if record.status == "ok"):
            planned = Plan(record.predicted["device"], record.predicted["host"]).pooled(self.room)
            for memory, size in measured(record).items():
                beyond = {"run": size - getattr(planned, f"{memory}_bytes")}
                self.excess.setdefault(memory, []).append((record.job.workload.num_layers, beyond))
        return self.guess()

    def _has_plan(self, num_layers: int) -> bool:
        try:
            self._planned(num_layers)
        except ValueError:  # such as a window beyond these few layers
            return False
        return True

    def _planned(self, num_layers: int) -> tuple[Job, Plan]:
        """The job at this depth with the options that its method chooses in the room there is."""
        workload = self.job.workload.at_depth(num_layers)
        trained = method.create(self.job.method, self.job.options, self.sweep.folders)
        plan = trained.plan(workload, self._room_at(num_layers))
        options = plan.options or dataclasses.asdict(trained)  # type: ignore[call-overload]
        return dataclasses.replace(self.job, workload=workload, options=options), plan

    def _learn(self, record: Record, plan: Plan) -> None:
        """A run failed although its plan fitted: it takes more beyond the plan than was left."""
        num_layers, lacked = record.job.workload.num_layers, memory_of(record)
        memory, room = BUDGETED.get(lacked, lacked), self._room_at(num_layers)
        have, planned = (getattr(item, f"{memory}_bytes", None) for item in (room, plan.pooled(room)))
        if have is not None and planned is not None and planned <= have:
            beyond = getattr(self.room, f"{memory}_bytes") - planned + 1
            self.lacking[memory] = max(beyond, 2 * self.lacking.get(memory, 0))

    def _room_at(self, num_layers: int) -> Room:
        """The budget less the expected excess at this depth."""
        rooms = {}
        for memory in {**self.excess, **self.lacking}:
            have = getattr(self.room, f"{memory}_bytes")
            beyond = [extrapolate(self.excess[memory], num_layers)] if memory in self.excess else []
            beyond += [self.lacking[memory]] if memory in self.lacking else []
            if have is not None:
                rooms[f"{memory}_bytes"] = max(1, have - max(beyond))
        return dataclasses.replace(self.room, **rooms)

    def _refusal(self, plan: Plan) -> str:
        """Return the memory that a probe would exhaust: the disk's budget, or the whole host."""
        disk, host = self.room.disk_bytes, machine.host_bytes()
        if disk is not None and plan.disk_bytes > disk:
            return f"disk, by plan: {gib(plan.disk_bytes)} of {gib(disk)}"
        at_host = plan.host_bytes + (0 if self.job.device == "cuda" else plan.device_bytes)
        return f"host, by plan: {gib(at_host)} of {gib(host)}" if at_host * self.job.world_size > host else ""


def memory_of(record: Record) -> str:
    """The memory that a failed run lacked, by its evidence, else by its status."""
    return str(record.evidence.get("resource") or record.status.removeprefix("oom-"))


def measured(record: Record) -> dict[str, int]:
    """Peak bytes by memory, as each budget counts them: of the host tensors alone on a device that accounts for it,
    else the whole process, or an average rank."""
    peaks = record.peaks
    sizes = {
        "device": peaks.get("device_reserved") or peaks.get("device_allocated", 0),
        "host": peaks.get("host_accounted", record.host_peak_bytes // record.job.world_size),
    }
    return {memory: size for memory, size in sizes.items() if size}


def find(probes: Probes, repeats: int, most: int) -> dict[str, Any]:
    """Search one method; returns its row of the table, with the record that decides the exit code."""
    guess = probes.guess()
    most = min(most, max(64, probes.least, BEYOND_PLAN * guess))
    answer = search(probes, guess, least=probes.least, most=most, repeats=repeats, refine=probes.refine)
    passed = [trial.outcome.evidence for trial in answer.trials if trial.num_layers == answer.largest]
    best: Record | None = passed[-1] if passed else None
    stop = probes.records[-1] if answer.stopped and probes.records and not probes.records[-1].is_result else None
    return {
        "method": probes.job.method,
        "largest": answer.largest if best else 0,
        "num_params": best.job.workload.num_params if best else 0,
        "options": best.job.options if best else {},
        "fails_at": answer.failed_above,
        "is_sharp": answer.is_sharp,
        "mixed": answer.mixed(),
        "binding": _binding(answer, best, probes.room),
        "gate": best.gate.verdict if best else "",
        "trials": len(probes.records),
        "stopped": answer.stopped,
        "record": stop or best,
    }


def _binding(answer: DepthAnswer, best: Record | None, room: Room) -> str:
    """The memory that binds, and the largest run's share of it."""
    if answer.is_unlimited:
        return f"none up to {answer.most} layers, the most tried"
    above = [trial.outcome for trial in answer.trials if trial.num_layers == answer.failed_above]
    if not above or isinstance(above[0].evidence, str):
        return above[0].evidence if above else ""
    memory, evidence = above[0].memory, above[0].evidence
    asked, used, limit = (evidence.evidence.get(f"{name}_bytes") for name in ("asked", "in_use", "limit"))
    if used and limit:
        return f"{memory}: {gib(used)} of {gib(limit)} in use" + (f", {gib(asked)} more asked for" if asked else "")
    peak, have = measured(best).get(memory) if best else 0, getattr(room, f"{memory}_bytes", None)
    return f"{memory}: the largest takes {gib(peak)} of {gib(have)}" if peak and have else memory


def texts(result: dict[str, Any]) -> dict[str, str]:
    """A row of the table for people."""
    mixed = f" (both passes and failures from {result['mixed'][0]} to {result['mixed'][-1]})" if result["mixed"] else ""
    return {
        "method": result["method"],
        "largest": str(result["largest"] or ("" if result["stopped"] else "none")),
        "parameters": params_text(result["num_params"]) if result["num_params"] else "",
        "fails at": f"{result['fails_at'] or ''}{mixed}",
        "what binds": f"no answer: {result['stopped']}" if result["stopped"] else result["binding"],
        "gate": result["gate"],
        "trials": str(result["trials"]),
    }
