"""Every call of ./run.sh that this project writes: in pages, templates, data, scripts, and in the texts of its code."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cli import main
from harness.base.checkout import ROOT
from tests.support.packages import SHARED, locked

PAGES = (
    *(ROOT / name for name in ("README.md", "ARTIFACT.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
OTHERS = (
    "papers/**/*.j2",
    "papers/**/*.txt",
    "claims/*.yaml",
    "*.yaml",
    "cases/*.sh",
    "examples/*.sh",
    "docker/*",
    "notebooks/ae.py",
)
CODE = ("harness", "places", "methods", "papers", "cases", "cli", "bench")
# What stands for something of the reader's, and in the texts of the code for a value.
PLACEHOLDERS = {
    "DIR": str(ROOT),
    "LOGS": str(ROOT / "README.md"),
    "FILE": str(ROOT / "machines.yaml"),
    "N": "1",
    "METHOD": "l2l",
    "FOLDER": str(ROOT),
    "A": "stronghold",
    "B": "4",
    "BASE": "stronghold",
    "VERB": "plan",
}
OF_OPTIONS = {"--gpu": "rtx4090", "--machine": "rtx4090", "--model": "gpt2"}  # whose placeholder is NAME
VALUES = {
    "self.case": "3",
    "number": "3",
    "kind": "demo",
    "PAPER_MACHINE": "v100-vm",
    "arguments": "-m l2l -l 2 -h 256",
    "sizes": "-h 256 -b 2",
    "load.dtype": "fp32",
    "named_machines.options_text(machine_name)": "--machine v100-vm",
    "file.name": str(ROOT / "README.md"),
    "extra[1]": "doctor",
}
KEPT = ROOT / ".venv" / f"tests-calls-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}.json"
CALL = re.compile(r"\./run\.sh[^\n`<]*")
ENDS = re.compile(r"""  +|[;,)"'.:]+(?: |$)|'s\b| \\$""")  # what ends a call within a line
PROSE = re.compile(r"[a-z][a-z']*")  # a word that is left out at a call's end if the door does not take it


def sources() -> list[Path]:
    """Return every file that may write a call."""
    others = (path for pattern in OTHERS for path in sorted(ROOT.glob(pattern)))
    code = (path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")))
    return [*PAGES, *others, *code]


def texts() -> Iterator[str]:
    """Yield calls with what follows them in their lines."""
    for path in PAGES:
        text = path.read_text()
        yield from (line.strip() for line in text.splitlines() if line.startswith("    ./run.sh"))
        yield from re.findall(r"`(\./run\.sh[^`]*)`", " ".join(text.split()))
    for pattern in OTHERS:
        for path in sorted(ROOT.glob(pattern)):
            yield from CALL.findall(path.read_text())
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from _of_code(path)


def _of_code(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    within = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = ""
            for part in node.values:
                if isinstance(part, ast.Constant):
                    text += str(part.value)
                elif isinstance(part, ast.FormattedValue):
                    text += _value(part.value, path) if _ends_in_a_call(text) else ""
            yield from CALL.findall(text)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield from CALL.findall(node.value)


def _ends_in_a_call(text: str) -> bool:
    found = CALL.findall(text.rpartition("\n")[2])
    return bool(found) and not ENDS.search(f"{found[-1]}x")


def _value(expression: ast.expr, path: Path) -> str:
    """Return something real for an expression in a call."""
    if isinstance(expression, ast.IfExp):
        return _value(expression.body, path)
    if isinstance(expression, ast.Constant):
        return str(expression.value)
    if isinstance(expression, ast.JoinedStr):
        return "".join(_value(part, path) for part in expression.values)
    if isinstance(expression, ast.FormattedValue):
        return _value(expression.value, path)
    text = ast.unparse(expression)
    if text not in VALUES:
        raise KeyError(f"{path}: a call with {text}: add to VALUES what may stand for it")
    return VALUES[text]


def calls() -> list[str]:
    """Return each call once, without what follows it. All processes of a run, which collect the same tests, parse the
    sources once: the answer is kept with the sources' hash."""
    digest = hashlib.sha256(
        b"\0".join(path.read_bytes() for path in (Path(__file__), *sources()))
    ).hexdigest()
    with locked(SHARED / f"{KEPT.stem}.lock"):
        with contextlib.suppress(OSError, ValueError):
            kept = json.loads(KEPT.read_text())
            if kept["digest"] == digest:
                return kept["calls"]
        answer = parsed_calls()
        with contextlib.suppress(OSError):
            KEPT.write_text(json.dumps({"digest": digest, "calls": answer}))
        return answer


def parsed_calls() -> list[str]:
    calls = [ENDS.split(text)[0].strip() for text in texts()]
    return sorted({call for call in calls if call != "./run.sh"})


def filled(call: str) -> list[str]:
    """Return a call's words, with something real in place of what stands for it."""
    words = [word for word in shlex.split(call)[1:] if word != "..."]
    before = ["", *words]
    named = [
        OF_OPTIONS.get(before[place], word) if word == "NAME" else word for place, word in enumerate(words)
    ]
    return [PLACEHOLDERS.get(word, word) for word in named]


def parsed(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words that are the call, and its values; prose that follows is left out. Raises click.UsageError for
    what the door does not take."""
    while True:
        try:
            return words, _parse(words)
        except click.UsageError:
            if not words or not PROSE.fullmatch(words[-1]):
                raise
            words = words[:-1]


def _parse(words: list[str]) -> dict[str, Any]:
    command: click.Command = main.door
    while isinstance(command, click.Group) and words and words[0] != "--help":
        words = ["run", *words] if command is main.door and words[0].startswith("-") else words
        _, found, words = command.resolve_command(click.Context(command), words)
        assert found
        command = found
    if "--help" in words or isinstance(command, click.Group):
        return {}
    with command.make_context("it", words) as context:  # which forgets folders that the words name
        return context.params
