"""What pytest prints last: how to run a failed test alone, which tests had not ended, what was left out."""

from __future__ import annotations

import os
import shlex
import signal
from typing import Any

import pytest

LEFT_OUT = "tests_left_out"  # what a process of pytest-xdist tells the first one
NUM_LEFT_OUT = pytest.StashKey[int]()
WHY = (
    "each needs a server, a system package or a compiler, or takes longer than a test that shows a like fact"
)


class ClosingLines:
    """Follows the tests in pytest's first process, whichever process runs them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.running: dict[str, None] = {}  # node ids, in the order of their starts
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # an end from outside is an interrupt, too

    @pytest.hookimpl(tryfirst=True)  # before the reporter prints its name
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.config.stash[NUM_LEFT_OUT] = getattr(node, "workeroutput", {}).get(LEFT_OUT, 0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        door = "./test.sh --all" if self.config.getoption("--all", default=False) else "./test.sh"
        reports = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", [])
        for node_id in dict.fromkeys(report.nodeid for report in reports if "::" in report.nodeid):
            write(f"alone: {door} -n 0 {shlex.quote(node_id)}")
        for node_id in self.running:
            write(f"had not ended: {node_id}")
        if count := self.config.stash.get(NUM_LEFT_OUT, 0):
            write(f"{count} tests were left out: {WHY}. Run all: ./test.sh --all")


def leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    """Deselect tests, and let the first process know how many."""
    config.hook.pytest_deselected(items=left_out)
    removed = set(left_out)
    items[:] = [item for item in items if item not in removed]
    config.stash[NUM_LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput[LEFT_OUT] = len(left_out)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(ClosingLines(config), "closing-lines")
