"""Other releases of an engine are installed once, each from one archive, and imported before the installed one."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.base.executed_code import site_folder
from harness.core.refusals import Unavailable
from methods.engines import release
from methods.engines.release import Release, importing
from tests.support import forks
from tests.support.ports import free_ports

PACKAGE = "tiny-engine"


def wheel(folder: Path, version: str, code: str = "") -> Path:
    """Write the archive of a release of PACKAGE, whose module `tiny` has this code."""
    path, info = folder / f"tiny_engine-{version}-py3-none-any.whl", f"tiny_engine-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/__init__.py", code)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of archives, the only place where pip looks; releases are installed into another folder."""
    (folder := tmp_path / "index").mkdir()
    monkeypatch.setattr(release, "ENGINES", tmp_path / "engines")
    for name in os.environ:
        if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


def test_a_release_is_known_by_its_archive(index: Path) -> None:
    archive = wheel(index, "1.2.3")
    wanted = Release(PACKAGE, "1.2.3")
    assert wanted.identity() == {} and wanted.description() == "tiny-engine 1.2.3"
    assert wanted.to_install() == "tiny-engine 1.2.3, once, into a folder of its own, about 20 seconds"
    wanted.install()
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert wanted.to_install() is None and wanted.identity() == {"tiny-engine 1.2.3": digest}
    assert wanted.description() == f"tiny-engine 1.2.3 ({archive.name}, sha256 {digest})"


def test_code_of_a_release_counts_by_its_version(index: Path) -> None:
    packages = Release(PACKAGE, "1.2.3").packages
    assert site_folder(str(packages / "tiny" / "__init__.py")) == str(packages)


def _imported(folder: Path, version: str) -> tuple[str, str]:
    """Return what the module says after its release was chosen, and the version of its package."""
    release.ENGINES = folder
    with importing(Release(PACKAGE, version), ""):
        found = importlib.import_module("tiny").FOUND
    return found, importlib.metadata.version(PACKAGE)


def test_each_process_imports_the_release_that_it_chose(index: Path) -> None:
    for version in ("1.2.3", "1.3.0"):
        wheel(index, version, f"FOUND = 'the module of {version}'")
        Release(PACKAGE, version).install()
        assert forks.call(_imported, release.ENGINES, version) == (f"the module of {version}", version)


def test_a_release_that_does_not_import_is_unavailable_in_one_line(index: Path) -> None:
    wheel(index, "1.2.3", "raise AttributeError('torch has\\n no such name')")
    Release(PACKAGE, "1.2.3").install()
    told = r"^tiny-engine 1\.2\.3 does not import under torch \S+ \(AttributeError: torch has no such name\)$"
    with pytest.raises(Unavailable, match=told):
        forks.call(_imported, release.ENGINES, "1.2.3")


def test_of_the_installed_engine_only_its_absence_is_unavailable() -> None:
    with (
        pytest.raises(Unavailable, match=r"^needs tiny \(ImportError: no tiny\)$"),
        importing(None, "needs tiny"),
    ):
        raise ImportError("no tiny")
    with pytest.raises(AttributeError), importing(None, "needs tiny"):
        raise AttributeError


def test_what_is_not_installed_is_unavailable(index: Path) -> None:
    with pytest.raises(Unavailable, match=r"^tiny-engine 1\.2\.3 is not installed: run once without --on$"):
        Release(PACKAGE, "1.2.3").use()


def test_a_release_that_the_index_lacks_names_the_newest_ones(index: Path) -> None:
    for version in ("1.0.0", "1.1.0", "1.2.3", "1.3.0"):
        wheel(index, version)
    wanted = Release(PACKAGE, "9.9.9")
    told = (
        "expected a release of tiny-engine, got 9.9.9, which the package index lacks; try 1.1.0, 1.2.3, 1.3.0"
    )
    with pytest.raises(Unavailable, match=f"^{told}$"):
        wanted.install()
    with pytest.raises(Unavailable, match=f"^{told}$"):  # so says the run, in another process
        wanted.use()
    assert wanted.to_install()  # the next run tries again


def test_an_index_that_cannot_be_reached_is_told_as_such(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another place has releases of the package."""
    wheel(index, "1.2.3")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_ports(1)[0]}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(
        Unavailable, match=r"^tiny-engine 9\.9\.9 cannot be installed: the package index cannot be rea"
    ):
        Release(PACKAGE, "9.9.9").install()


@pytest.fixture
def server(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of PACKAGE's archives at an index that drops its first connection; pip uses it alone."""

    class Handler(SimpleHTTPRequestHandler):
        num_dropped = 0

        def do_GET(self) -> None:
            if Handler.num_dropped:
                super().do_GET()
            Handler.num_dropped = 1

        def log_message(self, *words: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(index))
    with ThreadingHTTPServer(("127.0.0.1", free_ports(1)[0]), handler) as served:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{served.server_port}")
        threading.Thread(target=served.serve_forever, args=(0.01,)).start()
        yield index / PACKAGE
        served.shutdown()


def test_a_connection_that_came_back_is_not_the_reason_of_a_failure(server: Path) -> None:
    server.mkdir()
    wheel(server, "1.2.3").write_text("no archive")
    with pytest.raises(Unavailable, match=r"^tiny-engine 1\.2\.3 cannot be installed: ERROR: .+$"):
        Release(PACKAGE, "1.2.3").install()


def test_an_index_that_answers_without_the_package_was_reached(server: Path) -> None:
    with pytest.raises(
        Unavailable, match=r"^expected a release of tiny-engine, got 1\.2\.3, which the package ind"
    ):
        Release(PACKAGE, "1.2.3").install()


def test_an_archives_name_is_without_the_query_of_its_address(tmp_path: Path) -> None:
    info = {
        "url": "https://mirror/tiny-1.2.3.whl?token=secret#sha256=ab",
        "archive_info": {"hashes": {"sha256": "ab"}},
    }
    (report := tmp_path / "report.json").write_text(json.dumps({"install": [{"download_info": info}]}))
    assert release._installed_archive(report) == {"archive": "tiny-1.2.3.whl", "sha256": "ab"}


def test_an_index_without_the_package_has_no_release_to_try(index: Path) -> None:
    told = "expected a release of tiny-engine, got 1.2.3, which the package index lacks"
    with pytest.raises(Unavailable, match=f"^{told}$"):
        Release(PACKAGE, "1.2.3").install()


def test_an_archive_that_is_none_is_told_in_one_line(index: Path) -> None:
    wheel(index, "1.2.3").write_text("no archive")
    with pytest.raises(Unavailable, match=r"^tiny-engine 1\.2\.3 cannot be installed: ERROR: .+$"):
        Release(PACKAGE, "1.2.3").install()


def test_an_interrupted_installation_is_done_again(index: Path) -> None:
    wheel(index, "1.2.3")
    wanted = Release(PACKAGE, "1.2.3")
    (wanted.packages / "tiny").mkdir(parents=True)
    (wanted.packages / "tiny" / "left.py").touch()
    with pytest.raises(Unavailable, match="is not installed"):
        wanted.use()
    wanted.install()
    assert {path.name for path in (wanted.packages / "tiny").glob("*.py")} == {"__init__.py"}


def test_a_failure_is_forgotten_once_the_release_is_installed(index: Path) -> None:
    wanted = Release(PACKAGE, "1.2.3")
    with pytest.raises(Unavailable):
        wanted.install()
    wheel(index, "1.2.3")
    wanted.install()
    assert wanted.failure() == "" and wanted.is_installed


def test_of_two_that_install_at_once_one_waits_and_finds_it_done(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins while the first one runs pip, and ends after it."""
    wheel(index, "1.2.3")
    wanted, run, lock = Release(PACKAGE, "1.2.3"), subprocess.run, fcntl.flock
    other, is_waiting, runs = threading.Thread(target=wanted.install), threading.Event(), []

    def watched_lock(*words: Any) -> None:
        if threading.current_thread() is other:
            is_waiting.set()
        lock(*words)

    def watched_run(*words: Any, **options: Any) -> Any:
        runs.append(threading.current_thread())
        if len(runs) == 1:
            other.start()
            is_waiting.wait()
        return run(*words, **options)

    monkeypatch.setattr(fcntl, "flock", watched_lock)
    monkeypatch.setattr(subprocess, "run", watched_run)
    wanted.install()
    other.join()
    assert len(runs) == 1 and wanted.is_installed


@pytest.mark.parametrize(
    "version", ["", "1", "latest", "0.18.x/..", "../0.18.9", "0.18.9 --pre", "0.18.9\n", "==0.18"]
)
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(
        ValueError, match=r"^release: expected a version of tiny-engine such as 0\.18\.9, got "
    ):
        Release(PACKAGE, version)
