"""This project's own case: which releases of the engines train? A map of verdicts, settings by releases.

Each cell is a run of a small model by one release of an engine, which the gate compares with plain PyTorch. The case
runs the installed releases; `./run.sh releases` installs and runs others. The figure shows every release that has a
record. A failed cell is marked where no public report is known that says the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cases import _case10_figure
from cases._release_words import UNTESTED
from cases._releases import ENGINES, OPTION, ROWS, columns_of, order
from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.core.record import Record
from methods.engines.release import Release
from papers.figures import plot
from papers.figures.case import Case
from papers.figures.point import FigureRow, row_of
from papers.figures.profile import CaseProfile

LAYERS = 4
WORKLOAD = Workload(num_layers=LAYERS, hidden_size=64, num_heads=4, seq_len=64, batch_size=8, vocab_size=512)
# Few steps, because the rate rises from 0: of more steps the first ones, where faults show, would be a smaller part.
LENGTH: dict[str, Any] = {"steps": 4, "warmup": 1, "repeats": 1}


class ReleaseMap(Case):
    metric = "loss_difference"
    methods = tuple(dict.fromkeys(row.method for row in ROWS.values()))
    in_all = False

    def profiles(self, case_profile: CaseProfile) -> Sequence[CaseProfile]:
        """Return a profile for each workload of the map. Its sizes do not depend on the asked profile; only its device
        does."""
        loads = dict.fromkeys(workload_of(name) for name in ROWS)
        return [_profile(case_profile, load) for load in loads]

    def jobs(self, case_profile: CaseProfile, sizes: dict[str, int]) -> list[Job]:
        """Return the jobs of the installed releases, which install nothing."""
        installed = ((name, ENGINES[row.engine].installed) for name, row in ROWS.items())
        return [
            job_of(case_profile, name, release) for name, release in installed if release in columns_of(name)
        ]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return a row for each cell with a record. `series` is the name of its row, `group` its release, and `reason`
        the text of the gate, also of a cell that passes, or how the run ended."""
        cells: dict[tuple[str, str], list[Record]] = {}
        for cell, record in _placed(records, case_profile):
            cells.setdefault(cell, []).append(record)
        names = list(ROWS)
        in_order = sorted(cells, key=lambda cell: (names.index(cell[0]), order(cell[1])))
        return [_cell_row(name, release, cells[name, release]) for name, release in in_order]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _case10_figure.figure(rows, note)


def workload_of(name: str) -> Workload:
    return replace(WORKLOAD, **ROWS[name].workload)


def job_of(case_profile: CaseProfile, name: str, release: str | None = None) -> Job:
    """Return the job of a cell: a row, by its name, and a release; None: the installed one."""
    row = ROWS[name]
    is_other = release not in (None, ENGINES[row.engine].installed)
    options = {**row.options, **({OPTION: release} if is_other else {})}
    return _profile(case_profile, workload_of(name)).job(row.method, LAYERS, **options)


def _profile(case_profile: CaseProfile, load: Workload) -> CaseProfile:
    device = "cuda" if case_profile.device == "cuda" else "cpu"
    return replace(case_profile, workload=load.at_depth(1), budget=Budget(), device=device, **LENGTH)


def _placed(records: Sequence[Record], case_profile: CaseProfile) -> Iterator[tuple[tuple[str, str], Record]]:
    """Yield each record of a cell after the cell: the name of its row, and its release."""
    rows = [(name, _by_installed(job_of(case_profile, name))) for name in ROWS]
    for record in records:
        with contextlib.suppress(ValueError):
            # the method no longer has one of the record's options; no version
            job = _by_installed(record.job)
            for name in (name for name, job_of_row in rows if job_of_row == job):
                engine = ENGINES[ROWS[name].engine]
                version = (
                    record.job.options.get(OPTION) or record.software.get(engine.package) or engine.installed
                )
                # torch's build is behind a +
                release = Release(engine.package, str(version).partition("+")[0])
                yield (name, release.version), record


def _by_installed(job: Job) -> Job:
    """Return the job by the installed release, with every option of its method."""
    options = {name: value for name, value in job.options.items() if name != OPTION}
    return replace(job, options=dataclasses.asdict(method.create(job.method, options)))  # type: ignore[call-overload]


def _cell_row(name: str, release: str, records: Sequence[Record]) -> FigureRow:
    """Return the row of a cell: that of its newest result or, without one, of its newest record."""
    newest = next((record for record in reversed(records) if record.is_result), records[-1])
    row, gate = row_of(ReleaseMap.metric, [newest]), newest.gate
    begin = f"{UNTESTED}: " if gate.verdict == UNTESTED else ""
    reason = f"{begin}{gate.text}" if newest.status == "ok" else newest.reason
    return replace(row, series=name, group=release, reason=reason)
