"""What the tests share: the folder of methods under test, and records made in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import method


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--methods", action="append", default=[], help="another folder of methods to put to the contract")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`method_name` runs over every method there is, so that a new file is tested unasked."""
    if "method_name" in metafunc.fixturenames:
        metafunc.parametrize("method_name", method.names(_folders(metafunc.config)))


@pytest.fixture
def folders(request: pytest.FixtureRequest) -> tuple[Path, ...]:
    return _folders(request.config)


def _folders(config: pytest.Config) -> tuple[Path, ...]:
    return tuple(Path(folder).resolve() for folder in config.getoption("--methods"))
