"""What the tests share: the methods under test, a folder of results, and what must be installed."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import methods
from harness.base import cgroup
from harness.base.checkout import ROOT
from harness.core import method
from harness.core.job import Job
from harness.core.method import source_hash
from harness.core.record import new_stem
from harness.core.refusals import Unavailable
from harness.devices import machine, sim
from harness.gate import probe
from methods.offload import adamw_kernel
from methods.shared.memory_needs import MEMORY_FILE_SYSTEMS, file_system
from tests.support import closing_lines, covering, forks, packages, plain, seconds

_serial = itertools.count()
hypothesis.settings.register_profile("harness", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("harness")
# Models this small gain nothing from a second thread, and two that spin on a busy machine cost much.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if (
    file_system(Path(tempfile.gettempdir())) in MEMORY_FILE_SYSTEMS
):  # no folder for states that are kept on the disk
    os.environ["TMPDIR"] = tempfile.tempdir = "/var/tmp"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Devices are taken in turns by locks in one folder: tests side by side have a device each.
    os.environ["TMPDIR"] = os.environ["HARNESS_LOCKS"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
    # After multiprocessing has removed its own folder in it.
    multiprocessing.util.Finalize(
        None, shutil.rmtree, (tempfile.tempdir,), {"ignore_errors": True}, exitpriority=-200
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="run the heavy tests, too; install and compile what they need"
    )
    parser.addoption(
        "--methods", action="append", default=[], help="another folder of methods to put to the contract"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Compile the host's AdamW, and with --all the device sim, before any process of the tests trains: a process that
    found none counts other bytes than one that found it."""
    closing_lines.pytest_configure(config)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for library in (adamw_kernel, sim) if config.getoption("--all") else (adamw_kernel,):
            if library.to_build():
                with contextlib.suppress(Unavailable):  # tests of the library are then skipped
                    library.build()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin the grids. Unless --all, an expression of -m or a test's own name asks for more, leave out what costs much:
    see the marks `heavy` and `shows`."""
    covering.thin(config, items)
    is_named = any("::" in argument for argument in config.args)
    if not (config.getoption("--all") or config.getoption("-m") or is_named):
        closing_lines.leave_out(config, items, plain.left_out(items))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = seconds.order(items, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what tests make, not at torch: that took a tenth of their time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """Let tests share an environment, and so the process that forks their workers."""
    del os.environ["PYTEST_CURRENT_TEST"]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Let fixtures share it, too."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`method_name` runs over every method there is, so that a new file is tested unasked."""
    if "method_name" in metafunc.fixturenames:
        metafunc.parametrize("method_name", method.names(_folders(metafunc.config)))


@pytest.fixture(autouse=True)
def uncalibrated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are the same on every machine: no test sees the rates of this one, or of another test."""
    file = tmp_path_factory.getbasetemp() / f"calibration-{next(_serial)}" / "calibration.json"
    monkeypatch.setattr(machine, "CALIBRATION", file)


@pytest.fixture(autouse=True)
def quick_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are sketched by forks of a process that has torch: a process of its own imports it for seconds."""
    monkeypatch.setattr("harness.core.anatomy.ask", forks.ask)


@pytest.fixture(autouse=True)
def without_probes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps judge without the gate's probe, which takes several trainings: but for the tests marked `probe`."""
    extent = probe.Extent() if request.node.get_closest_marker("probe") else probe.NONE
    monkeypatch.setattr("harness.jobs.sweep.DEFAULT_EXTENT", extent)


@pytest.fixture(autouse=True)
def forgotten_methods() -> Iterator[None]:
    """Two tests may write a method of the same name: a process imports each name once."""
    before = list(methods.__path__)
    yield
    added = {
        folder
        for folder in methods.__path__
        if folder not in before and not Path(folder).is_relative_to(ROOT)
    }
    if added:
        methods.__path__[:] = [folder for folder in methods.__path__ if folder not in added]
        for name, module in list(sys.modules.items()):
            if name.startswith("methods.") and str(Path(module.__file__ or "").parent) in added:
                del sys.modules[name]


@pytest.fixture
def folders(request: pytest.FixtureRequest) -> tuple[Path, ...]:
    return _folders(request.config)


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps read the project's own files once for all tests, not for each key of a job: nothing changes them."""
    monkeypatch.setattr(method, "source_hash", _source_hash)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, read_once: None) -> None:
    """Sweeps train in this process instead of a worker's: for tests of what they do with the records."""
    from harness.run import worker

    gc.freeze()  # a worker collects garbage before it trains: let it search no more than one has

    def launch(
        job: Job, key: Any, results: Path, folders: tuple[Path, ...], report: Any, recorded: Any, **turn: Any
    ) -> Path:
        if existing := recorded(before := key()):
            return existing
        path = Path(f"{new_stem(results, job)}.json")
        worker.train_here(job, before, folders, lambda event: None).write(path)
        return path

    monkeypatch.setattr("harness.jobs.sweep.launch", launch)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, read_once: None) -> None:
    """Sweeps train in forks of a process that has torch: for tests of methods, not of the process of a worker."""
    monkeypatch.setattr("harness.jobs.sweep.launch", forks.launch)


@pytest.fixture
def own_server() -> Iterator[None]:
    """Workers are forked by another process than before and afterwards: for tests that change what it inherits."""
    with forks.own_server():
        yield


@pytest.fixture(scope="session")
def shared_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results for tests that may share the reference's."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="session")
def libaio() -> None:
    """What asynchronous I/O is built against, where it can be had."""
    packages.install(("libaio-dev",), "/usr/include/libaio.h")


@pytest.fixture
def quick(request: pytest.FixtureRequest, method_name: str, folders: tuple[Path, ...]) -> None:
    """Skips a method for which DeepSpeed would compile for minutes; with --all it does, and has what it builds on."""
    if request.config.getoption("--all"):
        request.getfixturevalue("libaio")
    elif "DeepSpeed" in (what := _to_build(method_name, folders)):
        pytest.skip(f"compiles {what}: ./run.sh setup or ./test.sh --all does")


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """The address of a container engine that has the tests' image."""
    from tests.support.engine import engine

    with engine() as address:
        yield address


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a running Slurm with two nodes."""
    from tests.support.slurm import cluster

    with cluster(tmp_path_factory.mktemp("slurm")) as configuration:
        yield configuration


@pytest.fixture(scope="session")
def compiled_sim() -> None:
    """The device sim, compiled; where there is nothing to compile it with, what needs it is skipped."""
    if sim.to_build():
        subprocess.run([sys.executable, "-m", "harness.devices.sim"], cwd=ROOT, check=True)
    elif not sim.is_built():
        pytest.skip("no C++ compiler here: sim counts bytes in Python, without streams and link")


@pytest.fixture
def make_memory_group() -> Iterator[Callable[[int], cgroup.Group]]:
    """Makes a group of so many bytes, as a container has one; gone afterwards."""
    made = []

    def make(limit_bytes: int) -> cgroup.Group:
        group = cgroup.make_group(limit_bytes)
        if group is None:
            pytest.skip("no memory group can be made here: it takes root, and cgroups that can be written")
        made.append(group)
        return group

    yield make
    for group in made:
        group.remove()


def _source_hash(name: str, folders: tuple[Path, ...] = ()) -> str:
    return (_own_source_hash if all(map(_is_own, folders)) else source_hash)(name, folders)


def _is_own(folder: Path) -> bool:
    return folder.resolve().is_relative_to(ROOT)


_own_source_hash = functools.cache(source_hash)


def _to_build(method_name: str, folders: tuple[Path, ...]) -> str:
    """What is compiled before the method trains, in words."""
    created = method.create(method_name, {}, folders)
    return getattr(created, "to_build", lambda: None)() or ""


def _folders(config: pytest.Config) -> tuple[Path, ...]:
    return tuple(Path(folder).resolve() for folder in config.getoption("--methods"))
