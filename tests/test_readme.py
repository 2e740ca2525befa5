"""README and its pages say what is there: paths, links, methods, the order of imports."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import click
import pytest

from cli import main
from harness.base.checkout import ROOT
from harness.core import method
from papers.report import record_schema
from tests.support import calls
from tests.test_packages import HOUSES, LIBRARIES, ORDER, SEEN_BY_METHODS, package_of

PAGES = {path: path.read_text() for path in calls.PAGES}
README = PAGES[ROOT / "README.md"]
FOLDERS = "harness|places|papers|cli|methods|cases|claims|tests|docs|bench|examples|notebooks|docker"
NOT_THERE_YET = {"cases/case11.py", "methods/my_method.py", "places/ssh.py"}


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_path_of_the_tree_exists() -> None:
    parent, shown = ROOT, set()
    for indent, names, text in re.findall(
        r"^    ( *)([^\s,]+(?:, [^\s,]+)*)  +(.*)$", section("The tree"), flags=re.MULTILINE
    ):
        parent = parent if indent else ROOT
        for name in names.split(", "):
            assert (parent / name).exists(), name
            shown.add((parent / name).relative_to(ROOT).as_posix())
        folder = parent / names if names.endswith("/") else ROOT
        for name in re.findall(r"(?<!/)\b\w+\.(?:py|yaml|csv|sh|md|txt|ipynb)\b|Dockerfile", text):
            assert "caseN" in name or (folder / name).exists(), f"{folder}: {name}"
        parent = parent if indent else folder
    packages = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/__init__.py")}
    assert {name for name in packages if not name.startswith("tests/")} <= shown


@pytest.mark.parametrize("path", [*PAGES, ROOT / "results" / "LOG.md"], ids=lambda path: path.name)
def test_every_path_in_a_page_exists(path: Path) -> None:
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./]+|results/[\w-]+\.(?:json|md))`", path.read_text()))
    assert not [
        name for name in sorted(named - NOT_THERE_YET) if "caseN" not in name and not (ROOT / name).exists()
    ]


def test_every_file_begins_with_what_it_is() -> None:
    for folder in (*HOUSES, "bench", "tests", "examples"):
        paths = list((ROOT / folder).rglob("*.py"))
        assert paths, folder
        for path in paths:
            text = path.read_text()
            assert not text or ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[path]):
        name, _, anchor = target.partition("#")
        found = (path.parent / name) if name else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_the_page_of_records_is_made_from_their_types() -> None:
    made = record_schema.page()
    assert PAGES[ROOT / "docs" / "records.md"] == made, (
        "python -m papers.report.record_schema > docs/records.md"
    )
    assert "| `grad_norms` |" in made and "| `sha256` |" in made
    rows = [line for line in made.splitlines() if line.startswith("| `")]
    # each has a meaning
    assert [row for row in rows if row.split(" | ")[-1].strip(" |") in ("", "required")] == []
    assert not re.search(r"\| (Not)?Required\[", made)


def test_readme_leads_to_every_page() -> None:
    linked = {(ROOT / name).resolve() for name in re.findall(r"\]\(([\w./-]+)", README)}
    assert not [path.name for path in PAGES if path not in linked and path.name != "README.md"]


def test_every_method_has_its_row() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)` \|", section("Methods"), flags=re.MULTILINE))
    assert rows == set(method.names())


def test_the_import_order_is_the_one_that_is_checked() -> None:
    text = section("Imports")
    shown = [
        name
        for line in re.findall(r"^    (.*)$", text, flags=re.MULTILINE)
        for name in re.findall(r"[\w/]+", line)
    ]
    assert shown == [name for name in ORDER if name not in ("harness", "bench", "tests")]
    prose = text.rsplit("\n\n", 1)[1]
    assert all(f"`{name}`" in prose for name in SEEN_BY_METHODS)


def test_what_a_method_may_import_is_there_and_allowed() -> None:
    page = PAGES[ROOT / "docs" / "methods-and-placements.md"].split("## What a method may import\n")[1]
    rows = re.findall(r"^\| (`.*?`) \| (.*) \|$", page, flags=re.MULTILINE)
    assert len(rows) > 10
    for sources, offered in rows:
        modules = [importlib.import_module(name) for name in re.findall(r"`([\w.]+)`", sources)]
        assert all(package_of(each.__name__) in SEEN_BY_METHODS | LIBRARIES for each in modules), sources
        for name in set(re.findall(r"`(\w+)`", offered)) - {"cpu", "cuda", "sim"}:
            assert any(hasattr(each, name) for each in modules), f"{sources}: {name}"


def test_the_afternoon_path_is_read_in_an_afternoon() -> None:
    steps = re.split(r"^\d+\. ", section("The afternoon path").split("\n\nLeft for")[0], flags=re.MULTILINE)[
        1:
    ]
    sources = {}
    for step in steps:
        own = {name: (ROOT / name).read_text() for name in re.findall(r"`([\w/]+\.py)`", step)}
        for function in re.findall(r"`(\w+)`", step):
            assert f"def {function}(" in "".join(own.values()), step
        sources |= own
    assert len(sources) > 10
    assert sum(len(text.splitlines()) for text in sources.values()) < 3600


def test_the_glossary_has_each_word_once() -> None:
    rows = re.findall(r"^\| ([\w, ]+) \|", PAGES[ROOT / "docs" / "glossary.md"], flags=re.MULTILINE)
    words = [word for row in rows[1:] for word in row.split(", ")]
    assert len(words) == len(set(words)) > 15


def test_help_names_the_options_of_every_method() -> None:
    with click.Context(main.door, info_name="./run.sh") as context:
        text = " ".join(main.door.get_help(context).split())
    for name in method.names():
        options = method.option_names(method.load(name))
        assert not options or f"(options: {', '.join(options)})" in text, name


def test_pages_are_short_and_fit_any_screen() -> None:
    assert len(README.splitlines()) <= 200
    for path, text in PAGES.items():
        rows = [line for line in text.splitlines() if not line.startswith("|")]
        assert max(map(len, rows)) <= 120, path.name
    for name in ("figure.png", "releases.png"):
        assert (ROOT / "docs" / name).stat().st_size < 150_000
