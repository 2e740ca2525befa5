"""What the verbs `setup` and `demo` do: compile all that later calls need; then show everything once, in minutes.

The demo trains each method at one size that all of them fit, makes the six cases and writes the report, all under the
profile demo. The same call continues an interrupted demo, or writes the report again.
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
from harness.report import page
from harness.run.prepare import prepare


def jobs(used: Profile) -> list[Job]:
    """Each method at the depth that all of them train, with the options of the cases: no run is made twice."""
    return [resolve(used.job(name, used.common))[0] for name in method.names()]


def set_up(results: Path, as_json: bool) -> None:
    """Compile what the methods and the device sim need, for the packages that are installed."""
    with reporter(as_json) as tell:
        for job in jobs(case.profile_of("demo", None)):
            prepare(job, results, (), tell)


def show_all(results: Path, as_json: bool) -> list[Record]:
    """The records of all runs of the demo, new or old."""
    set_up(results, as_json)
    started = time.monotonic()
    with reporter(as_json) as tell:
        finished = Sweep(results, report=tell).run(jobs(case.profile_of("demo", None)))
    finished += collect.main("all", "demo", None, None, None, results, None, None, as_json)
    index, review = page.write(results)
    minutes = (time.monotonic() - started) / 60
    if as_json:
        print(json.dumps({"event": "demo", "minutes": minutes, "report": str(index), "review": str(review)}))
    else:
        print(f"demo: {minutes:.1f} minutes; open {index}; to paste into a review: {review}")
    return finished
