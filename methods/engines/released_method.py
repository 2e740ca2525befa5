"""The base class of a method that trains with an engine of which other releases than the installed one can run."""

from __future__ import annotations

from typing import ClassVar

from harness.core.method import Method
from methods.engines.release import Release


class ReleasedMethod(Method):
    package: ClassVar[str]  # the engine's name on the package index
    release: str | None = None  # version of the engine; None: the installed one
    release_option = "release"

    def __post_init__(self) -> None:
        assert self.beside or not self.release  # Release() raises ValueError if the text is no version

    @property
    def beside(self) -> Release | None:
        """The release that runs beside the installed one; None: the installed one runs."""
        return Release(self.package, self.release) if self.release else None

    @property
    def implementation(self) -> str:
        """The method's implementation for the fairness table."""
        return f"upstream: {self.beside.described() if self.beside else self.package}"

    def identity(self) -> dict[str, str]:
        return self.beside.identity() if self.beside else {}

    def to_build(self) -> str | None:
        return self.beside.to_install() if self.beside else None

    def build(self) -> None:
        if self.beside:
            self.beside.install()
