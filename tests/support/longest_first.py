"""The order of tests for several test processes: each begins with long files, so that none ends long after the others.

pytest-xdist's worksteal gives each process as many tests of the list, in order; one that has none left takes from the
end of another's.
"""

from __future__ import annotations

import pytest

# Longest first; those that need the same server follow each other, and so have one.
LONGEST = (
    "places/test_slurm", "places/test_accounting", "places/test_docker", "cli/test_demo", "bench/test_gpu_calls",
    "methods/test_engines", "methods/test_varuna", "core/test_method", "jobs/test_largest_size", "figures/test_case",
    "run/test_ranks", "methods/sharding/test_rehearsal", "jobs/test_next_calls", "methods/pipeline/test_partition",
    "methods/pipeline/test_morphs", "devices/test_sim", "methods/pipeline/test_pipeline", "run/test_launch",
)  # fmt: skip
ONE_SERVER = 3  # of the first, for one process


def order(items: list[pytest.Item], num_processes: int) -> list[pytest.Item]:
    """As many items a process, the long files dealt to the processes in turn; a file's items stay in order."""
    parts: list[list[pytest.Item]] = [[] for _ in range(num_processes)]
    for place, name in enumerate(LONGEST):
        parts[max(0, place - ONE_SERVER + 1) % num_processes] += [item for item in items if _is_in(item, name)]
    rest = [item for item in items if not any(_is_in(item, name) for name in LONGEST)]
    each = -(-len(items) // num_processes)
    for part in parts:
        room = max(0, each - len(part))
        part += rest[:room]
        del rest[:room]
    return sum(parts, rest)


def _is_in(item: pytest.Item, name: str) -> bool:
    return item.path.as_posix().endswith(f"tests/{name}.py")
