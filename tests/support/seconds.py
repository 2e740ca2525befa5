"""The seconds that each test takes, for plain.py and for the order of tests for several processes.

seconds.json holds the tests that took SHORT seconds or more, on two idle cores. To measure all anew:

    ./test.sh --all --junitxml FILE && .venv/bin/python -m tests.support.seconds FILE
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

FILE = Path(__file__).parent.parent / "seconds.json"
SHORT = 0.2  # seconds: a test that takes less is not in the file
LONG = 10.0  # seconds: a module that takes more is among those with which a process begins
SERVERS = "tests/places"  # modules that share servers: one process runs them, and so starts each server once


def measured() -> dict[str, float]:
    """Return the seconds of the tests that are not short, by node id."""
    return json.loads(FILE.read_text())


def order(items: list[pytest.Item], num_processes: int) -> list[pytest.Item]:
    """Return the tests so that each process begins with long modules, and the processes' seconds are about equal.

    pytest-xdist's worksteal gives each process as many tests of the list, in order. A process that has none left takes
    from the end of another's. Long modules are dealt longest first, each to the process with the fewest seconds."""
    seconds = measured()
    modules: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        module = item.nodeid.partition("::")[0]
        modules[SERVERS if module.startswith(SERVERS) else module].append(item)
    totals = {module: sum(seconds.get(item.nodeid, 0.0) for item in modules[module]) for module in modules}
    parts: list[list[pytest.Item]] = [[] for _ in range(num_processes)]
    loads = [0.0] * num_processes
    for module in sorted(
        (module for module in modules if totals[module] > LONG), key=lambda module: -totals[module]
    ):
        process = loads.index(min(loads))
        loads[process] += totals[module]
        parts[process] += modules.pop(module)
    rest = [item for module in modules.values() for item in module]
    share = -(-len(items) // num_processes)
    for part in parts:
        num_missing = max(0, share - len(part))
        part += rest[:num_missing]
        del rest[:num_missing]
    return sum(parts, rest)


def read(report: Path) -> dict[str, float]:
    """Return the seconds by node id of a report in JUnit's format, sorted by node id."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    seconds = {
        _node_id(case.get("classname", ""), case.get("name", "")): float(case.get("time", 0))
        for case in cases
    }
    return {node_id: round(value, 1) for node_id, value in sorted(seconds.items()) if value >= SHORT}


def _node_id(module: str, name: str) -> str:
    return f"{module.replace('.', '/')}.py::{name}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(read(Path(sys.argv[1])), indent=0) + "\n")
