"""The forecast that is held beside a record is one of the steps that the record timed."""

from __future__ import annotations

import pytest

from harness.core.job import Job, Workload
from harness.core.method import create


@pytest.mark.parametrize(
    ("norms", "clipping"),
    [
        ([3.0] * 10, "deferred"),  # every step follows a clipped one
        ([0.5] * 10, "speculate"),
        ([3.0] * 5 + [0.5] * 5, "speculate"),  # only the first of the five timed steps follows a clipped one
        ([0.5] * 5 + [3.0] * 5, "deferred"),
    ],
)
def test_most_timed_steps_say_whether_speculation_is_foretold(norms: list[float], clipping: str) -> None:
    job = Job("stronghold", Workload(clip_norm=1.0), {"clipping": "speculate"}, steps=10, warmup=5)
    assert create("stronghold", job.options).as_timed(job, norms) == create("stronghold", {"clipping": clipping})
