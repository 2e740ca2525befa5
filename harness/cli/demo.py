"""The verbs `setup` and `demo`: everything ready before any run, then everything shown once in minutes.

A demo is each method at one size that all of them train, the six cases, and the report, all under the profile demo, in
the folder of results where the same call goes on or only writes the page again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from harness.core import method
from harness.core.job import Job
from harness.core.record import Record
from harness.evidence import collect
from harness.figures import case
from harness.figures.profile import Profile
from harness.jobs.progress import reporter
from harness.jobs.sweep import Sweep, resolve
from harness.report import page as report
from harness.run.prepare import prepare


def jobs(used: Profile) -> list[Job]:
    """Each method at the depth that all of them train; the options are those of the cases, so no run is made twice."""
    return [resolve(used.job(name, used.common))[0] for name in method.names()]


def setup(results: Path, as_json: bool) -> None:
    """Compile what the methods and the device sim need, for the packages that are installed."""
    with reporter(as_json) as tell:
        for job in jobs(case.profile_of("demo", None)):
            prepare(job, results, (), tell)


def demo(results: Path, as_json: bool) -> list[Record]:
    """Returns the records of what was run for it now or before."""
    setup(results, as_json)
    started = time.monotonic()
    used = case.profile_of("demo", None)
    with reporter(as_json) as tell:
        finished = Sweep(results, report=tell).run(jobs(used))
    finished += collect.main("all", "demo", None, None, None, results, None, None, as_json)
    page, review = report.write(results)
    minutes = (time.monotonic() - started) / 60
    if as_json:
        print(json.dumps({"event": "demo", "minutes": minutes, "report": str(page), "review": str(review)}))
    else:
        print(f"demo: {minutes:.1f} minutes; open {page}; to paste into a review: {review}")
    return finished
