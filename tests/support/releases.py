"""Releases of engines that tests take from the package index."""

from __future__ import annotations

from harness.core.refusals import Unavailable
from methods.engines.release import Release
from tests.support.packages import missing


def need(package: str, version: str) -> Release:
    """Return the release, installed; where the package index cannot be reached the test is skipped."""
    release = Release(package, version)
    try:
        release.install()
    except Unavailable as error:
        if "cannot be reached" in str(error):
            missing(str(error))
        raise
    return release
