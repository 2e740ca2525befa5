"""Figure 6a: how large a model does each method train in the same memories?

A search by real runs finds the largest depth (number of layers) that trains. A cross in the figure marks the smallest
larger depth that failed. The profile `paper` also tries the published sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.core.job import Job
from harness.core.record import Record
from papers.figures import plot, searches
from papers.figures.case import Case
from papers.figures.point import FigureRow, row_of
from papers.figures.profile import CaseProfile

PUBLISHED_DEPTHS = {"megatron-lm": 32, "l2l": 78, "zero-offload": 48, "zero-infinity": 48, "stronghold": 100}


class LargestModel(Case):
    metric = "params"
    methods = tuple(PUBLISHED_DEPTHS)
    searches = methods
    picks = True

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        if case_profile.kind != "paper":
            return []
        return [case_profile.probe(name, depth) for name, depth in PUBLISHED_DEPTHS.items()]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return up to two rows per method: the largest size that trained, then the smallest size above it that
        failed."""
        rows = []
        for name in self.methods:
            is_final = searches.is_searched(name, records)
            for repeats in searches.largest_and_failed(name, records):
                if repeats:
                    rows.append(replace(row_of(self.metric, repeats), is_final=is_final))
        return rows

    def pick(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        """Return up to two rows per method: the largest size that trained, then the next larger size that failed. A
        size that trained without passing the gate counts only if no size of the method passed the gate.
        """
        picked = []
        for name in self.methods:
            method_rows = sorted(
                (row for row in rows if row.method == name), key=lambda row: row.value or 0.0
            )
            trained = [row for row in method_rows if plot.succeeded(row)]
            best = next((row for row in reversed(trained) if row.valid), trained[-1] if trained else None)
            largest = (best.value or 0.0) if best else -1.0
            failed = [row for row in method_rows if not plot.succeeded(row) and (row.value or 0.0) > largest]
            picked += [replace(best, is_final=bool(failed))] if best else []
            picked += failed[:1]
        return picked
