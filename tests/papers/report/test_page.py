"""The page and the review: of the records and nothing else, self-contained, and what failed is marked."""

from __future__ import annotations

import csv
import dataclasses
import html
import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.base import console
from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from harness.gate.probe import LEFT_OUT
from harness.jobs.command import command_of
from papers.claims import claims, judge, verify
from papers.claims.judge import Finding
from papers.figures import case
from papers.report import conclusion, tables
from papers.report import page as report
from tests.cli.test_main import run
from tests.support import browser, packages, records
from tests.support.records import write

MACHINE = {"cpu": "Some CPU", "cores": 2, "host_bytes": 2**34}
HOSTILE = (
    '</td></script><script>alert(1)</script><img src=x onerror=alert(2)>" | $\\frac{ \n# [x](http://x) $ {{ 7*7 }}'
    "\x1b]0;owned\x07\u202e"
)
DEMO = case.profile_of("demo", None, MACHINE)
A4_LANDSCAPE_PIXELS = 1031  # 297 mm less two margins of 12, at 96 pixels an inch
FAILED = Gate("failed", "loss", f"it did not learn {HOSTILE}")


def measured(job: Job, key: str, **changes: Any) -> Record:
    """A run as it would be on record, in a tenth of a second a step for every layer."""
    defaults: dict[str, Any] = {
        "key": key,
        "phase": "done",
        "clock": "sim",
        "machine": MACHINE,
        "software": {"python": "3.11.7", "commit": "0123456789ab"},
        "started": 1.7e9,
        "losses": [5.0] * job.steps,
        "data_sha256": "ab" * 32,
        "gate": Gate("exact", "", "bit-equal"),
        "peaks": {"device_allocated": 2**20, "host_anonymous": 2**21},
        "tensors": {"a": {"changed": 1.0, "moved": 1.0}},
    }
    return records.record(job, job.workload.num_layers / 10, **{**defaults, **changes})


RECORDS = [
    measured(DEMO.probe("l2l", 2), "k1"),
    measured(DEMO.probe("l2l", 10), "k2"),
    measured(DEMO.probe("l2l", 11), "k3", status="oom-host", reason=f"out of memory {HOSTILE}", gate=Gate()),
    measured(DEMO.probe("stronghold", 9), "k4", gate=FAILED, kernels=[HOSTILE], software={"commit": HOSTILE}),
    measured(Job("gone", Workload(num_layers=3), {"option": HOSTILE}), "k5", evidence={"bad": "\ud800"}),
]


@pytest.fixture
def chromium() -> Iterator[browser.Browser]:
    packages.need(("chromium",), *browser.NAMES)
    with browser.Browser() as opened:
        yield opened


class Page(HTMLParser):
    """Elements with their attributes; text of the cells of each table by its caption; texts of <pre>."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.pres: list[str] = []
        self._rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "pre":
            self.pres.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            continue

    def handle_data(self, data: str) -> None:
        if "caption" in self._open:
            self.tables[data] = self._rows
        elif "td" in self._open or "th" in self._open:
            self._rows[-1][-1] += data
        elif "pre" in self._open:
            self.pres[-1] += data

    def head(self, caption: str) -> list[str]:
        """Columns of the first table whose caption begins so."""
        return next(
            rows[0] for caption_of_table, rows in self.tables.items() if caption_of_table.startswith(caption)
        )

    def column(self, caption: str, name: str) -> list[str]:
        head, *rows = self.tables[caption]
        return [row[head.index(name)].strip() for row in rows]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page, _ = report.write_report(write(tmp_path_factory.mktemp("report") / "results", *RECORDS))
    return page


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page(written.read_text())


PIPELINES = "varuna.over-pipelines-simulated"
ALL, CLAIMS = "Every record, oldest first", "Claims that "


def test_what_ranks_took_is_no_fact_of_the_machine() -> None:
    ranks = [{"rank": 0, "resident_peak_bytes": 7}]
    assert report.lasting_facts({**MACHINE, "load_average": 2.0, "ranks": ranks}) == MACHINE


def test_the_page_refers_to_nothing_outside_of_it(page: Page, written: Path) -> None:
    values = [
        value or ""
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data")
    ]
    beside = {path.name for path in written.parent.glob("*.csv")}
    assert beside and beside <= set(values)
    assert all(value.startswith(("#", "data:image/svg+xml;base64,")) for value in set(values) - beside)
    assert not re.search(r"@import|url\(", written.read_text())


def luminance(color: str) -> float:
    """WCAG 2's relative luminance of #rgb or #rrggbb."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [part / 255 for part in bytes.fromhex(digits)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_ink_of_the_page_is_legible_on_each_ground(scheme: str, written: Path) -> None:
    """WCAG 2.1, 1.4.3: a contrast of at least 4.5 to 1; text of a failed row stands on a ground of its own."""
    light, dark = re.findall(r":root \{(.*?)\}", written.read_text(), flags=re.DOTALL)
    colors = dict(re.findall(r"--(\w+): (#\w+)", light if scheme == "light" else dark))
    for ground in ("paper", "failed", "code"):
        for ink in ("ink", "soft", "good", "bad", "open", "link"):
            lighter, darker = sorted((luminance(colors[ink]), luminance(colors[ground])), reverse=True)
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, ground)


def test_who_hears_or_tabs_through_the_page_misses_nothing(page: Page, written: Path) -> None:
    """What axe checks and a file can show: a language, one name for each id, images with a text, fields with a label,
    tables with a caption and heads with a scope, regions that scroll in reach of the keyboard and named, headings
    without a gap."""
    elements = page.elements
    of = {tag: [attributes for name, attributes in elements if name == tag] for tag, _ in elements}
    assert of["html"] == [{"lang": "en"}] and len(of["title"]) == len(of["main"]) == len(of["h1"]) == 1
    ids = [name["id"] for _, name in elements if "id" in name]
    assert len(ids) == len(set(ids))
    assert all(name.get("alt") for name in of["img"]) and all(name.get("scope") == "col" for name in of["th"])
    assert len(page.tables) == len(of["caption"]) == len(of["table"])
    assert len(re.findall(r"<label>[^<]+<input ", written.read_text())) == len(of["input"])
    scrolling = [name for name in of["div"] if name.get("class") == "scroll"]
    assert all(
        (name["tabindex"], name["role"]) == ("0", "region") and name["aria-label"] for name in scrolling
    )
    levels = [int(tag[1]) for tag, _ in elements if re.fullmatch(r"h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_hostile_text_is_text(page: Page) -> None:
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and tags.count("img") == tags.count("figure")  # the page's own
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert HOSTILE.split("\n")[0] in page.column(ALL, "why")[2]
    assert "49" not in " ".join(page.column(ALL, "why"))


def test_the_same_records_give_the_same_bytes(written: Path, tmp_path: Path) -> None:
    results = written.parent.parent
    again = report.write_report(results, tmp_path / "a" / "page.html", None, None)
    assert [path.read_bytes() for path in again] == [
        written.read_bytes(),
        (written.parent / "review.md").read_bytes(),
    ]


def test_only_a_run_that_passed_the_gate_has_a_throughput(page: Page) -> None:
    assert page.column(ALL, "samples/s") == ["20", "4", "", "", "13.33"]
    assert page.column(ALL, "trained?") == [
        "passed (exact)",
        "passed (exact)",
        "ended: oom-host",
        "FAILED THE GATE",
        "passed (exact)",
    ]


def test_every_number_of_a_figure_is_one_click_from_its_record(page: Page) -> None:
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    links = {
        str(attributes["href"])[1:]
        for tag, attributes in page.elements
        if tag == "a" and str(attributes["href"]).startswith("#")
    }
    assert links <= ids
    caption = "Case 1, profile demo: the numbers of the figure"
    rows = zip(
        page.column(caption, "method"),
        page.column(caption, "layers"),
        page.column(caption, "records"),
        page.column(caption, "origin"),
        strict=True,
    )
    measured_cells = [row[:3] for row in rows if row[3] == "run"]
    assert measured_cells == [("l2l", "10", "#2"), ("l2l", "11", "#3"), ("stronghold", "9", "#4")]


def test_a_record_is_shown_whole_but_for_its_tensors(page: Page) -> None:
    shown = json.loads(page.pres[-2])
    assert shown.pop("tensors") == "1, in log_3.json"
    assert shown == {name: value for name, value in RECORDS[3].to_dict().items() if name != "tensors"}


@pytest.mark.parametrize(("left", "options"), [("", ""), (f"; {LEFT_OUT}", " --no-probe")])
def test_the_call_that_repeats_a_run_leaves_the_probe_out_where_the_run_did(left: str, options: str) -> None:
    run = dataclasses.replace(RECORDS[0], gate=Gate("exact", "", f"bit-equal{left}"))
    again = dict(tables.Entry(1, Path("log.json"), run).facts)["run again"]
    assert again == f"{command_of(run.job)}{options} --rerun"


def test_claims_end_as_verify_says(page: Page, written: Path) -> None:
    findings = verify.findings(written.parent.parent, None, None)
    published = {
        finding.claim.id: finding for finding in verify.findings(written.parent.parent, judge.PUBLISHED, None)
    }
    rows = [row for caption, rows in page.tables.items() if caption.startswith(CLAIMS) for row in rows[1:]]
    assert len(rows) == len(findings)
    for finding in findings:
        (row,) = [row for row in rows if f" {finding.claim.id}: " in row[0]]
        assert row[0].startswith(finding.claim.text) and row[2].startswith(finding.values_text)
        assert row[1].startswith(published[finding.claim.id].values_text) and row[3].startswith(
            finding.verdict
        )


def test_the_conclusion_comes_first_then_figures_claims_how_it_was_measured_and_the_records(
    written: Path,
) -> None:
    text = written.read_text()
    assert re.findall(r'<h2 id="(\w+)"', text) == ["figures", "claims", "summary", "measured", "all"]
    before = text.partition('<h2 id="figures"')[0]
    assert all(
        sentence in html.unescape(before)
        for sentence in report.template_values(written.parent.parent)["conclusion"]
    )


def test_the_conclusion_says_what_was_measured_where_and_which_claims_hold() -> None:
    first, pipelines = (
        next(claim for claim in claims.load_claims() if claim.id == name) for name in ("6a.order", PIPELINES)
    )
    findings = [
        Finding(first, "PASS"),
        *(Finding(pipelines, verdict) for verdict in ("FAIL", "XFAIL", "N/A")),
    ]
    clock = "by the clock sim (a CPU whose device memory and link are simulated)"
    slow = '"On commodity networks other pipelines take up to 26 % longer"'
    assert conclusion.opening_sentences(RECORDS, findings, ["Some CPU, 2 cores"]) == [
        f"On Some CPU, 2 cores, {clock}, 3 of 5 runs of 3 methods trained as the reference does, 1 failed the gate,"
        " and 1 ran out of host memory.",
        'Of 4 claims of the papers 3 could be tested: 1 holds ("STRONGHOLD trains the largest model, then L2L, then'
        f' both ZeRO methods, then Megatron-LM"), and 2 do not hold ({slow}; {slow}).',
    ]
    untested = [Finding(first, "NOT TESTED"), Finding(pipelines, "SIMULATED")]
    measured, judged = conclusion.opening_sentences([LOG], untested, [])
    assert measured == "In imported logs, 1 of 1 run of 1 method trained as the reference does."
    assert judged == "None of 2 claims of the papers could be tested by them."


def test_no_page_holds_a_character_that_commands_a_terminal_or_turns_text(written: Path) -> None:
    texts = [path.read_text() for path in written.parent.iterdir() if path.suffix in (".md", ".html", ".csv")]
    assert len(texts) > 2 and not any(console.CONTROL_CHARACTERS.search(text) for text in texts)
    assert "\\x1b]0;owned" in (written.parent / "review.md").read_text()


def test_a_figure_has_a_caption_on_the_page(written: Path) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", written.read_text(), flags=re.DOTALL)
    assert captions and captions[0].startswith("Measured: profile demo; Some CPU")


def test_a_figures_data_lies_beside_the_page(page: Page, written: Path) -> None:
    with (written.parent / "case1-demo.csv").open(newline="") as file:
        data = list(csv.reader(file))
    shown = page.tables["Case 1, profile demo: the numbers of the figure"]
    # all but the links
    assert data[0] == [name.strip() for name in shown[0][:-1]] and len(data) == len(shown)


def test_of_many_sizes_those_are_shown_that_leave_no_methods_row_empty() -> None:
    large = [measured(DEMO.probe("l2l", depth), f"k{depth}") for depth in range(3, 12)]
    runs = [measured(DEMO.probe(name, 2), name) for name in ("l2l", "stronghold")] + large
    summary = tables.summary_table(
        [tables.Entry(number, Path("log.json"), run) for number, run in enumerate(runs, start=1)]
    )
    by_method = dict(zip(("l2l", "stronghold"), summary.values.tolist(), strict=True))
    assert [cell.links for cell in by_method["stronghold"]] == [(), (2,), (), (), (), (), ()]
    assert [cell.links for cell in by_method["l2l"]] == [(), (1,), (7,), (8,), (9,), (10,), (11,)]


def test_a_method_has_a_row_and_a_size_a_column(page: Page) -> None:
    head, *rows = next(
        rows for caption, rows in page.tables.items() if caption.startswith("Samples/s, verdict")
    )
    assert [row[0] for row in rows] == ["l2l", "stronghold", "gone"] and len(head) == 1 + 5
    assert "4/s" in rows[0][3] or any("4/s" in cell for cell in rows[0])
    assert any("FAILED THE GATE" in cell and "/s" not in cell for cell in rows[1])


def test_claims_that_the_records_decide_are_shown_the_others_are_folded(page: Page, written: Path) -> None:
    all_claims = claims.load_claims()
    verdicts = ["N/A", "NOT TESTED", "FAIL", "NOT DISTINGUISHABLE", "PASS", "XFAIL", "SIMULATED"]
    findings = [Finding(claim, verdict) for claim, verdict in zip(all_claims[:7], verdicts, strict=True)]
    shown = tables.shown_claim_tables(findings, [Finding(claim, "PASS") for claim in all_claims], [])
    assert [[cell.text for cell in group["verdict"]] for group in shown] == [
        ["PASS", "FAIL", "XFAIL", "NOT DISTINGUISHABLE"],
        ["SIMULATED"],
        ["NOT TESTED"],
        ["N/A"],
    ]
    assert [list(group) for group in shown] == [["sentence", "published", "here", "verdict"]] * 4
    folded = re.findall(r"<summary>\d+ (claims [\w ]+)</summary>", written.read_text())
    # none is decided
    assert folded == [caption.lower() for caption in page.tables if caption.startswith(CLAIMS)]


def test_each_peak_says_of_which_memory_it_is_and_each_clock_has_a_row() -> None:
    """The same cell by two clocks was shown once, without the clock."""
    job = DEMO.probe("l2l", 2)
    both = [measured(job, "a"), measured(dataclasses.replace(job, device="cpu"), "b", clock="cpu")]
    entries = [tables.Entry(number, Path("log.json"), record) for number, record in enumerate(both, start=1)]
    summary = tables.summary_table(entries)
    assert [cell.text for cell in summary["clock"]] == ["sim", "cpu"]
    assert [cell.more for cell in summary.iloc[:, -1]] == ["exact, device 1.0 MiB, host 2.0 MiB"] * 2
    assert "clock" not in tables.summary_table(entries[:1])


def test_a_methods_cell_shows_the_newest_judged_record_and_its_window() -> None:
    job = dataclasses.replace(DEMO.probe("l2l", 2), options={"window_size": 3})
    judged = measured(job, "a", started=1.6e9)
    later = [measured(job, "a", gate=Gate()), measured(job, "a", status="interrupted", gate=Gate())]
    summary = tables.summary_table(
        [tables.Entry(n, Path("log.json"), record) for n, record in enumerate([judged, *later], start=1)]
    )
    (cell,) = summary.iloc[:, -1]
    assert cell.links == (1,) and cell.more.startswith("exact, window 3, device")


def test_the_review_has_every_verdict_in_a_table_that_hostile_text_does_not_break(written: Path) -> None:
    text = (written.parent / "review.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows} == {len(rows[0])}
    verdicts = [(row[1].strip(), row[4].strip()) for row in rows[2:]]
    assert verdicts == [
        (finding.claim.id, finding.verdict) for finding in verify.findings(written.parent.parent, None, None)
    ]
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    assert "<script" not in prose.replace("\\<", "") and "\n    ./run.sh case all --profile demo\n" in text


def test_a_profile_with_two_names_has_its_figures_once() -> None:
    gpu = {**MACHINE, "gpu": "Some GPU", "gpu_bytes": 2**37}
    job = case.profile_of("quick", None, gpu).probe("l2l", 8)
    case_tables = report.case_tables([measured(job, "k", clock="cuda", machine=gpu)])
    assert [(used.name, number) for used, number, _ in case_tables if number == 1] == [("quick", 1)]


def test_files_that_are_no_records_are_named(tmp_path: Path) -> None:
    results = write(tmp_path, *RECORDS[:1])
    (results / "log_bad.json").write_text("{")
    page, review = report.write_report(results)
    for path in (page, review):
        assert "log_bad.json is not a record" in path.read_text() and str(tmp_path) not in path.read_text()


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], "", "no record in"),
        (RECORDS[:1], "--profile some", "--profile: expected one of demo, quick, paper, fit"),
        (RECORDS[:1], "--profile quick", "no record of profile quick: try ./run.sh case all --profile quick"),
        (RECORDS[:1], "--machine h100", "try --machine with one of ['Some CPU, 2 cores']"),
        (RECORDS[:1], "--out /proc/page.html", "cannot use /proc/"),
        (
            [RECORDS[0], dataclasses.replace(RECORDS[1], machine={"cpu": "Other"})],
            "",
            "try --machine with one of",
        ),
    ],
)
def test_what_cannot_be_reported_is_one_line(tmp_path: Path, runs: list, options: str, message: str) -> None:
    done = run("report", "--results", str(write(tmp_path / "results", *runs)), *options.split())
    assert (
        (done.returncode, done.stdout) == (2, "")
        and message in done.stderr
        and len(done.stderr.splitlines()) == 1
    )


def test_the_verb_says_where_it_wrote(tmp_path: Path) -> None:
    done = run("report", "--results", str(write(tmp_path, *RECORDS[:2])), "--profile", "demo")
    assert done.stdout.split() == [str(tmp_path / "report" / name) for name in ("index.html", "review.md")]
    assert done.returncode == 0 and all(Path(path).exists() for path in done.stdout.split())


LOG = dataclasses.replace(RECORDS[0], key="k9", origin="imported", machine={}, gate=Gate("tolerance"))


def test_imported_logs_are_marked_and_counted_apart(tmp_path: Path) -> None:
    page, review = report.write_report(write(tmp_path, *RECORDS, LOG))
    shown = Page(page.read_text())
    assert [tables.IMPORTED_LOG_TEXT in text for text in shown.column(ALL, "method")] == [False] * 5 + [True]
    assert "6 records: 5 measured here, 1 read from logs</h1>" in page.read_text()
    assert "<li>1 imported: trained and passed the gate</li>" in page.read_text()
    assert "5 of them measured here" in review.read_text() and "1 read from logs" in review.read_text()


def test_verdicts_on_logs_alone_are_called_so(tmp_path: Path) -> None:
    page, review = report.write_report(write(tmp_path, LOG))
    log = dataclasses.replace(
        LOG, job=Job("megatron-lm", Workload(num_layers=32), device="cuda"), clock="cuda"
    )
    assert "imported logs" not in Page(page.read_text()).head(CLAIMS)  # of a size that nothing is said of
    page, review = report.write_report(write(tmp_path, log))
    assert (
        "imported logs" in Page(page.read_text()).head(CLAIMS) and "By imported logs:" in review.read_text()
    )


def test_what_was_foretold_stands_beside_what_was_measured(page: Page, tmp_path: Path) -> None:
    """The published Megatron-LM run of 32 layers, by the published machine's rates; none of a machine nobody knows."""
    job = Job("megatron-lm", Workload(num_layers=32), device="cuda")
    shown = Page(
        report.write_report(write(tmp_path, measured(job, "k", origin="imported", clock="cuda")))[
            0
        ].read_text()
    )
    (caption,) = (caption for caption in shown.tables if caption.startswith("A step of 1.717 B"))
    row = shown.column(caption, "method").index("megatron-lm")
    assert float(shown.column(caption, "predicted s")[row]) == pytest.approx(5.3397, rel=0.01)
    assert shown.column(caption, "measured s")[row] == "3.2 #1"
    assert not any(caption.startswith("A step of") for caption in page.tables)


def test_a_run_that_was_broken_off_and_completed_later_is_not_told_as_one_that_did_not_train(
    tmp_path: Path,
) -> None:
    broken = dataclasses.replace(
        RECORDS[0], status="interrupted", reason="by Ctrl-C", started=1.6e9, gate=Gate()
    )
    never = dataclasses.replace(broken, key="another", reason="by a flood")
    _, review = report.write_report(write(tmp_path, broken, never, RECORDS[0]))
    section = review.read_text().partition("## Runs that did not train")[2].partition("## ")[0]
    assert "by a flood" in section and "by Ctrl-C" not in section


@pytest.mark.heavy
def test_in_a_browser_it_is_silent_sorts_and_opens_records(written: Path, chromium: browser.Browser) -> None:
    table = f"[...document.querySelectorAll('table')].find((t) => t.caption.textContent === '{ALL}')"
    header = f"[...{table}.tHead.rows[0].cells].find((c) => c.textContent.trim() === '%s')"
    layers = f"[...{table}.tBodies[0].rows].map((row) => row.cells[3].textContent)"
    chromium.open(written)
    chromium.click("document.querySelector('#records > summary')")
    assert chromium.value(layers) == ["2", "10", "11", "9", "3"]
    chromium.click(f"{header % 'layers'}.querySelector('button')")
    assert chromium.value(layers) == ["2", "3", "9", "10", "11"]  # as numbers
    assert chromium.value(f"{header % 'layers'}.ariaSort") == "ascending"
    chromium.press_enter()  # the button has the focus
    assert chromium.value(layers) == ["11", "10", "9", "3", "2"]
    assert chromium.value(f"{header % 'layers'}.ariaSort") == "descending"
    chromium.click(f"{header % 'samples/s'}.querySelector('button')")
    assert chromium.value(layers)[:3] == ["10", "3", "2"]  # what has no throughput comes last
    assert chromium.value(f"{header % 'layers'}.ariaSort") == "none"
    chromium.click(f"{table}.tBodies[0].rows[0].querySelector('a')")
    opened = "[...document.querySelectorAll('details[open] > summary > .number')].map((e) => e.textContent)"
    assert chromium.value(opened) == ["#2"]
    chromium.click("document.querySelector('[data-filter]')")
    chromium.write("L2L oom-host")
    assert chromium.value("document.querySelector('[role=status]').textContent") == "1 of 5 records"
    seen = "[...document.querySelectorAll('#records tbody tr, details[data-record]')].filter((e) => !e.hidden).length"
    assert chromium.value(seen) == 2  # its row, and what it says
    assert chromium.complaints == []
    assert {url.partition(":")[0] for url in chromium.requests} == {"file", "data"}


@pytest.mark.heavy
def test_on_paper_nothing_is_cut_off(written: Path, chromium: browser.Browser) -> None:
    chromium.open(written)
    assert chromium.printed_width(A4_LANDSCAPE_PIXELS) <= A4_LANDSCAPE_PIXELS


@pytest.mark.heavy
def test_no_table_is_wider_than_the_page(written: Path, chromium: browser.Browser) -> None:
    chromium.open(written)
    assert chromium.width(1400) <= 1400
    unfold = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
    wide = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
    wide += ".map((e) => e.ariaLabel)"
    assert chromium.value(f"({unfold}, {wide})") == []


@pytest.mark.heavy
def test_the_page_is_dark_for_who_wants_it(written: Path, chromium: browser.Browser) -> None:
    chromium.open(written)
    paper = "getComputedStyle(document.body).backgroundColor"
    assert [chromium.scheme(scheme) or chromium.value(paper) for scheme in ("light", "dark")] == [
        "rgb(255, 255, 255)",
        "rgb(22, 22, 22)",
    ]
