"""The smallest job that trains, as a workload and as words, and a method that does what a test asks for."""

from __future__ import annotations

import textwrap
from pathlib import Path

from harness.core.job import Workload

TINY = Workload(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)
WORDS = "-m resident -l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97".split()
# of a model with layers for some stages
SIZES = "-l 4 -h 32 -b 4 --heads 2 --seq 16 --vocab 97 --lr 0.1".split()
# Lines of the method `ending`: it lasts, after ten of its steps, until it is ended.
ENDLESS = "loss += 1\nwhile loss > 11:\n    time.sleep(0.05)"
METHOD = """
from dataclasses import dataclass
from harness.core.method import Method, Step, Trained, Unavailable
from harness.core.job import Plan

@dataclass(frozen=True)
class Ending(Method):
    how: str = ""

    def plan(self, workload, budget):
        return Plan(device={"weights": 1})

    def train(self, workload, batches, device):
        import ctypes, mmap, os, signal, subprocess, sys, tempfile, time, torch
        loss = 1.5
        for inputs, targets in batches:
            yield Step(torch.tensor(loss))
LINES
        return Trained([])
"""
COMPILING = """
import subprocess, sys
from dataclasses import dataclass
from pathlib import Path
from harness.core.method import Method, Unavailable
from harness.core.job import Plan

@dataclass(frozen=True)
class Compiling(Method):
    release: str = ""

    def identity(self):
        return {"kernel": self.release}

    def plan(self, workload, budget):
        return Plan(device={"weights": 1})

    def train(self, workload, batches, device):
        raise Unavailable("it is not compiled")

    def to_build(self):
        return "a kernel"

    def build(self):
LINES
"""


def write_ending(folder: Path, lines: str) -> Path:
    """The folder of a method `ending` that runs `lines` after each of its steps."""
    return _write(folder, "ending", METHOD, lines, 12)


def write_endless(folder: Path) -> list[str]:
    """The words, to be put behind WORDS, of a training that lasts until it is ended."""
    return ["-m", "ending", "--steps", "12", "--methods", str(write_ending(folder, ENDLESS))]


def write_compiling(folder: Path, lines: str) -> Path:
    """The folder of a method `compiling` that runs `lines` to compile what it needs, and never has it."""
    return _write(folder, "compiling", COMPILING, lines, 8)


def _write(folder: Path, name: str, text: str, lines: str, indent: int) -> Path:
    methods = folder / "methods"
    methods.mkdir(exist_ok=True)
    text = text.replace("LINES", textwrap.indent(textwrap.dedent(lines).strip(), " " * indent))
    (methods / f"{name}.py").write_text(text)
    return methods
