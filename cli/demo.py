"""The verbs `setup` and `demo`. `setup` compiles what later calls need; `demo` shows everything once, in minutes.

The demo trains each method at one size at which all methods fit, makes the seven cases and writes the report, all in
the profile `demo`. It leaves out a method that needs a long compilation, and prints a line about it. If a demo was
interrupted, the same call continues it; if it was finished, the same call writes the report again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from harness.core import method
from harness.core.record import Record
from harness.gate.probe import NONE
from harness.jobs.progress import reporter
from harness.jobs.sweep import Sweep
from harness.plan.fit import Planned, resolve
from harness.run.prepare import prepare
from papers.claims.campaign import CaseOutput, RunChoice, make_figures
from papers.figures import case
from papers.figures.profile import CaseProfile
from papers.report import page

MOST_BUILD_SECONDS = 20  # seconds; the demo leaves out a method whose compilation takes longer


def plans(profile: CaseProfile, names: Sequence[str]) -> list[Planned]:
    """Return a planned job for each method, at the depth that all methods of the profile train. The jobs have the same
    options as the cases' jobs, so that no run is made twice."""
    return [resolve(profile.job(name, profile.common)) for name in names]


def left_out(names: Sequence[str], device: str) -> dict[str, str]:
    """Return, by name, why the demo leaves a method out. Methods that it includes are not in the result."""
    reasons = {}
    for name in names:
        trained = method.create(name, {})
        to_build = trained.to_build() if trained.build_seconds > MOST_BUILD_SECONDS else None
        if why := trained.missing(device) or to_build:
            reasons[name] = (
                f"it compiles {to_build}: ./run.sh setup does, and demo adds it then" if to_build else why
            )
    return reasons


def set_up(results: Path, as_json: bool, names: Sequence[str] | None = None) -> None:
    """Compile what these methods and the device sim need, if their packages are installed. `names`: None: all
    methods."""
    with reporter(as_json) as tell:
        for planned in plans(case.profile_of("demo", None), names or method.names()):
            prepare(planned.job, results, (), tell)


def show(results: Path, as_json: bool, is_quick: bool = False) -> list[Record]:
    """Run the demo; return the records of all its runs, whether made now or earlier. The quick demo has two methods and
    three figures.

    The gate probes only methods that are declared bit-exact, because the probe of any other method takes minutes.
    """
    started = time.monotonic()
    quick = {
        number: case.load_case(number).quick for number in case.numbers() if case.load_case(number).quick
    }
    names = list(dict.fromkeys(chain.from_iterable(quick.values()))) if is_quick else method.names()
    reasons_to_leave_out = left_out(names, case.profile_of("demo", None).device)
    for name, why in reasons_to_leave_out.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    names = [name for name in names if name not in reasons_to_leave_out]
    set_up(results, as_json, names)
    # made after set_up(): its link's speed depends on whether sim is compiled
    profile = case.profile_of("demo", None)
    with reporter(as_json) as tell:
        finished = []
        for planned in [] if is_quick else plans(profile, names):
            probed = None if method.create(planned.job.method, planned.job.options).bit_exact else NONE
            finished += Sweep(results, report=tell, probe=probed).run([planned])
    numbers = list(quick) if is_quick else case.numbers_of_all()
    output, choice = CaseOutput(results, results / "figures"), RunChoice(names, probe=NONE)
    finished += make_figures(numbers, profile, output, choice, as_json)
    index, review = page.write_report(results)
    minutes = (time.monotonic() - started) / 60
    if as_json:
        print(json.dumps({"event": "demo", "minutes": minutes, "report": str(index), "review": str(review)}))
    else:
        print(f"demo: {minutes:.1f} minutes; open {index}; to paste into a review: {review}")
    return finished
