"""Reads from records how a search for the largest size ended."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core import method
from harness.core.record import Record
from harness.jobs.size_search import SizeAnswer, SizeOutcome, SizeTrial
from papers.figures.points import repeats_of
from papers.figures.profile import PROBE_LENGTH


def largest_and_failed(name: str, records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return two lists of records from the method's search. The first has the repeats of the largest depth that trained
    and is below every failure. The second has one record of the smallest depth that failed and is above every success.
    Either list may be empty."""
    probes = _probes(name, records)
    depths, answer = _search(probes)
    best = [record for record in depths.get(answer.largest_size, []) if record.status == "ok"]
    failed = depths[answer.failing_size] if answer.failing_size else []
    if not depths:
        failed = probes  # no depth has a result: the last record tells why
    return repeats_of(best[-1].job, best) if best else [], failed[-1:]


def is_searched(name: str, records: Sequence[Record]) -> bool:
    """True if the method's search is over. Then every depth up to the largest trained one passed, and the next depth
    failed or was not run because its plan takes more host memory than the machine has."""
    depths, answer = _search(_probes(name, records))
    if answer.failing_size is None:
        best = depths.get(answer.largest_size)
        return best is not None and _is_refused_beyond(best[-1])
    return (
        answer.smallest_failing == answer.largest_size + 1
        and answer.failing_size == answer.largest_passing + 1
    )


def _probes(name: str, records: Sequence[Record]) -> list[Record]:
    probe_setting = (name, PROBE_LENGTH["steps"], PROBE_LENGTH["warmup"])
    jobs = [(record, record.job) for record in records]
    return [record for record, job in jobs if (job.method, job.steps, job.warmup) == probe_setting]


def _search(probes: Sequence[Record]) -> tuple[dict[int, list[Record]], SizeAnswer]:
    """Return the records that have a result, by number of layers, and the answer of a search with these trials."""
    depths: dict[int, list[Record]] = {}
    for record in probes:
        if record.is_result and record.phase != "plan":
            depths.setdefault(record.job.workload.num_layers, []).append(record)
    passed = {depth: any(record.status == "ok" for record in runs) for depth, runs in depths.items()}
    trials = [SizeTrial(depth, SizeOutcome(has_trained)) for depth, has_trained in passed.items()]
    return depths, SizeAnswer(trials=trials)


def _is_refused_beyond(record: Record) -> bool:
    """True if a plan with one more layer than the record's takes more host memory than the record's machine has."""
    job, host_bytes = record.job, record.machine.get("host_bytes")
    if host_bytes is None or job.method not in method.names():
        return False
    try:
        deeper = job.workload.at_depth(job.workload.num_layers + 1)
        trained = method.create(job.method, job.options)
        if trained.names_file():
            return False
        plan = trained.plan(deeper, job.budget.room)
    except ValueError:  # the present code does not know these options
        return False
    planned_bytes = plan.host_bytes + (0 if job.device == "cuda" else plan.device_bytes)
    return planned_bytes > host_bytes


def largest_depths(names: Sequence[str], records: Sequence[Record]) -> dict[str, int]:
    """Return, by method, the largest depth that trained and passed the gate. A method without such a depth is left
    out."""
    best_runs = {name: largest_and_failed(name, records)[0] for name in names}
    return {
        name: best[-1].job.workload.num_layers
        for name, best in best_runs.items()
        if best and best[-1].gate.passed
    }
