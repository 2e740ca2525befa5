"""Writes one page that shows everything that was measured, and a review to paste into a form. Both are made only from
records and traces.

The page needs no network, because it contains its figures, style and script. The same records give the same bytes.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame

from cases import overlap
from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.base.whole_file import check_replaceable, own_folder, write_page
from harness.core import method
from harness.core.record import Record, added_folders, read_all
from harness.devices import named_machines
from harness.jobs.command import repeat_command
from harness.plan import advise
from papers.claims import fairness, verify
from papers.claims.judge import IMPORTED, PUBLISHED, VERDICTS, Finding, is_of_logs, shortened
from papers.figures import case, plot
from papers.figures import profile as scaled
from papers.figures.point import MIN_RUNS_FOR_INTERVAL, FigureRow, machine_of
from papers.figures.profile import CaseProfile
from papers.report import conclusion
from papers.report import tables as pages
from papers.report.tables import Cell, Entry

TEMPLATES = Path(__file__).parent
PAGE, REVIEW = "index.html", "review.md"
# facts that belong to a run, not to its machine
CHANGING_FACTS = ("load_average", "foreign_processes", "ranks", "peak_rank", "source")


@dataclass(frozen=True)
class PageSection:
    """A figure of the page, with its table. `svg`: the figure as a data URI."""

    case: str  # the case's number, or `overlap`
    profile: str
    title: str
    svg: str
    notes: list[str]  # the notes of the figure's small print
    table: DataFrame
    sender: str = ""  # name of the records' folder if others sent them in; "": own records

    @property
    def id(self) -> str:
        return f"case{self.case}-{self.profile}" + (f"-{self.sender}" if self.sender else "")

    @property
    def csv(self) -> str:
        """Return the name of the CSV file with the section's table; the file is in the folder of the page."""
        return f"{self.id}.csv"


@dataclass(frozen=True)
class SentIn:
    """The results of one machine that others sent in, with their figures."""

    machine: str
    entries: list[Entry]
    sections: list[PageSection]
    records: DataFrame


def write_report(
    results: Path, out: Path | None = None, profile: str | None = None, machine: str | None = None
) -> list[Path]:
    """Write the page and, beside it, the review; return their paths.

    `out`: the page's path; None: a file in `results`. `profile`: only its figures are shown; None: all. `machine`: only
    records of machines with this text in their name are shown. Raises ValueError if there are no records, no figure of
    the profile, or records of several machines.
    """
    page = out or results / "report" / PAGE
    if page.name == REVIEW:
        raise ValueError(
            f"--out: expected a name other than {REVIEW}, the review's: try --out {page.parent / PAGE}"
        )
    check_replaceable(page, b"<!DOCTYPE html>")
    check_replaceable(page.parent / REVIEW, b"# Review of measurements")
    values = template_values(results, profile, machine)
    texts = {page: _render("report.html.j2", values), page.parent / REVIEW: _render("review.md.j2", values)}
    if out is None:
        own_folder(page.parent)
    page.parent.mkdir(parents=True, exist_ok=True)
    for section in (
        *values["sections"],
        *(section for sent in values["sent_in"] for section in sent.sections),
    ):
        data = pages.cell_texts(section.table).to_csv(index=False, lineterminator="\n")
        write_page(page.parent / section.csv, data)
    for path, text in texts.items():
        write_page(path, text)
    return list(texts)


def read_records(results: Path) -> tuple[dict[Path, Record], list[str]]:
    """Return the records by their paths, and a complaint about each file that is not a valid record. Raises ValueError
    if there is no valid record."""
    records, complaints = read_all(results)
    if not records and complaints:
        problems = shortened(sorted(complaints))
        raise ValueError(
            f"expected readable records in {results}, got none: {problems}; try another --results folder"
        )
    if not records and (sent := added_folders(results)):
        raise ValueError(
            f"expected your own records in {results}, got only records sent in: try --results {sent[0]}"
        )
    if not records:
        raise ValueError(
            f"no record in {results}: try ./run.sh case all --profile demo, or another --results folder"
        )
    return records, complaints


def template_values(results: Path, profile: str | None = None, machine: str | None = None) -> dict[str, Any]:
    """Return the values for the templates of the page and of the review, by the names that the templates use."""
    recorded_files, complaints = read_records(results)
    entries = _numbered_entries(recorded_files, machine)
    records = [entry.record for entry in entries]
    runs = [record for record in records if record.origin == "run"]
    findings = verify.findings(results, None, machine)
    published = verify.findings(results, PUBLISHED, None)
    sections = list(page_sections(entries, profile, results))
    advice = advise.advice_of_records(records)
    answers = fairness.column_answers(fairness.fairness_rows(records))
    machines = _unique(pages.machine_text(record) for record in runs)
    return {
        "conclusion": conclusion.opening_sentences(records, findings, machines),
        "sections": sections,
        "sent_in": list(read_sent_in(results, machine, len(entries))),
        "claims": pages.claim_table(findings, published, entries),
        "claims_shown": pages.shown_claim_tables(findings, published, entries),
        "summary": pages.summary_table(entries),
        "advice": advice and pages.advice_table(advice, entries),
        "findings": findings,
        "tally": count_verdicts(findings),
        "tally_published": count_verdicts(published),
        "fairness": pages.make_table("What each method ran with", answers),
        "records": pages.make_table("Every record, oldest first", map(pages.record_row, entries)),
        "entries": entries,
        "left_out": [complaint.replace(f"{results}/", "") for complaint in complaints],
        "others": len(recorded_files) - len(entries),
        "ends": Counter(pages.outcome_text(record) for record in runs),
        "log_ends": Counter(pages.outcome_text(record) for record in records if record.origin == IMPORTED),
        "untrained": untrained_entries(entries),
        "of_logs": is_of_logs(findings),
        "doubts": _doubt_texts(runs, len(records) - len(runs)),
        "commands": [
            *(["./run.sh import LOGS..."] if len(runs) < len(records) else []),
            *repeat_commands(runs, sections),
        ],
        "profiles": _unique(section.profile for section in sections),
        "clocks": _unique(plot.CLOCKS.get(record.clock, record.clock) for record in runs),
        "machines": machines,
        "facts": _unique(text for record in runs for text in _facts_texts(record)),
        "methods": _unique(record.job.method for record in records),
        "num_runs": len(runs),
        "days": _unique(entry.when[:10] for entry in entries if entry.record.origin == "run"),
    }


def _numbered_entries(recorded_files: dict[Path, Record], machine: str | None) -> list[Entry]:
    """Number the records of the machine; None: all records, which must be of one machine."""
    machine_records = verify.of_one_machine(list(recorded_files.values()), machine)
    ids = {id(record) for record in machine_records}
    files = [(path, record) for path, record in recorded_files.items() if id(record) in ids]
    return [Entry(number, path, record) for number, (path, record) in enumerate(files, start=1)]


def _facts_texts(record: Record) -> list[str]:
    return [pages.facts_text(lasting_facts(record.machine)), pages.facts_text(lasting_facts(record.software))]


def _doubt_texts(runs: Sequence[Record], num_imported: int) -> list[str]:
    """Return the texts on what speaks against the numbers of these runs."""
    commits = _unique(" ".join(str(record.software.get("commit")).split()) for record in runs)
    reasons = {
        "sim": any(record.clock == "sim" for record in runs),
        "commits": commits,
        "num_runs": len(runs),
        "dirty": any(commit.endswith("+") for commit in commits),
        "imported": num_imported,
        "fewest": MIN_RUNS_FOR_INTERVAL,
    }
    return _render("doubts.txt.j2", reasons).splitlines()


def read_sent_in(results: Path, machine: str | None, number: int) -> Iterator[SentIn]:
    """Yield the results that others sent in, one machine after another. On the page, the records of these results are
    numbered from `number` + 1 on."""
    for folder in added_folders(results):
        recorded_files = read_all(folder)[0].items()
        name_part = (machine or "").lower()
        files = [(path, record) for path, record in recorded_files if name_part in machine_of(record).lower()]
        entries = [
            Entry(entry_number, path, record)
            for entry_number, (path, record) in enumerate(files, start=number + 1)
        ]
        if not entries:
            continue
        number += len(entries)
        sections = [
            dataclasses.replace(section, sender=folder.name)
            for section in page_sections(entries, None, folder)
        ]
        name = pages.machine_text(entries[-1].record)
        yield SentIn(
            name, entries, sections, pages.make_table(f"Records of {name}", map(pages.record_row, entries))
        )


def page_sections(entries: Sequence[Entry], wanted: str | None, results: Path) -> Iterator[PageSection]:
    """Yield every figure of these records, one case after another. `wanted`: the only profile whose figures are
    yielded; None: all profiles. Raises ValueError if there is no figure of the wanted profile."""
    records = [entry.record for entry in entries]
    cases, traced = list(case_tables(records, results)), list(traced_timelines(records, results))
    profiles = (*(case_profile.name for case_profile, _, _ in cases), *(profile for profile, _ in traced))
    names = dict.fromkeys((*scaled.PROFILE_NAMES, *profiles))
    if wanted is not None and wanted not in names:
        raise ValueError(f"--profile: expected one of {', '.join(names)}, got {wanted!r}")
    cases = [entry for entry in cases if wanted in (None, entry[0].name, entry[0].kind)]
    traced = [entry for entry in traced if wanted in (None, entry[0], entry[0].split("_")[0])]
    if wanted is not None and not cases and not traced:
        raise ValueError(f"no record of profile {wanted}: try {scaled.profile_command('all', wanted)}")
    for case_profile, number, rows in cases:
        yield _case_section(case_profile, number, [*rows, *case.published_rows(number)], entries)
    for profile, timelines in traced:
        yield _overlap_section(profile, timelines, entries)


def _case_section(
    case_profile: CaseProfile, number: int, rows: Sequence[FigureRow], entries: Sequence[Entry]
) -> PageSection:
    this_case, note = case.load_case(number), f"profile {case_profile.name}"
    table = pages.row_table(f"Case {number}, {note}: the numbers of the figure", rows, entries)
    return _section(number, case_profile.name, this_case.title, this_case.figure(rows, note), table)


def _overlap_section(
    profile: str, timelines: Sequence[overlap.StepTimeline], entries: Sequence[Entry]
) -> PageSection:
    title, note = str(overlap.__doc__).partition("\n")[0], f"profile {profile}"
    rows = overlap.timeline_table(timelines).to_dict("records")
    table = pages.make_table(f"Case overlap, {note}: the numbers of the figure", rows)
    keys = [[timeline.record.key] if timeline.record else [] for timeline in timelines]
    table["records"] = [Cell(links=pages.numbers_of(timeline_keys, entries)) for timeline_keys in keys]
    return _section(overlap.NAME, profile, title, overlap.timeline_figure(timelines, note), table)


def _section(
    name: int | str, profile: str, title: str, drawing: plot.Figure, table: DataFrame
) -> PageSection:
    svg = f"data:image/svg+xml;base64,{base64.b64encode(plot.svg(drawing).encode()).decode()}"
    return PageSection(str(name), profile, title, svg, plot.notes(drawing), table)


def case_tables(
    records: Sequence[Record], results: Path | None = None
) -> Iterator[tuple[CaseProfile, int, list[FigureRow]]]:
    """Yield each profile and case for which there are records, with this project's rows, without the published ones."""
    for case_profile in _profiles_of_runs(records):
        for number in case.numbers():
            with contextlib.suppress(ValueError):  # this case has no record
                yield case_profile, number, case.figure_rows(number, case_profile, records, results)


def traced_timelines(
    records: Sequence[Record], results: Path
) -> Iterator[tuple[str, list[overlap.StepTimeline]]]:
    """Yield, for each trace that belongs to these records, its profile and the timelines that its figure shows."""
    for profile in overlap.traced_profiles(records):
        with contextlib.suppress(ValueError):  # the trace's file is gone
            yield profile, overlap.timelines_shown(profile, results, records)


def _profiles_of_runs(records: Sequence[Record]) -> Iterator[CaseProfile]:
    """Yield each profile to which a run of these records belongs. A profile may have the memories of a machine in
    machines.yaml."""
    runs = [record for record in records if record.origin == "run"]
    wanted = itertools.product(scaled.PROFILE_NAMES, (None, *named_machines.names()))
    seen: list[CaseProfile] = []
    for case_profile in case.possible_profiles(wanted, runs[-1].machine if runs else {}):
        # two machines may give equal profiles
        nameless = dataclasses.replace(case_profile, name=case_profile.kind)
        if nameless not in seen and any(case.has_job(case_profile, record.job) for record in runs):
            seen.append(nameless)
            yield case_profile


def count_verdicts(findings: Sequence[Finding]) -> dict[str, int]:
    """Return the number of claims with each verdict that occurs."""
    counts = Counter(finding.verdict for finding in findings)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def untrained_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Return the runs that crashed or failed the gate. An interrupted run is left out if its job was completed
    later."""
    completed_keys = {entry.record.key for entry in entries if entry.record.is_result}
    bad_entries = [entry for entry in entries if entry.verdict.look == pages.BAD]
    return [
        entry for entry in bad_entries if entry.record.is_result or entry.record.key not in completed_keys
    ]


def repeat_commands(runs: Sequence[Record], sections: Sequence[PageSection]) -> list[str]:
    """Return the commands that repeat the runs: first the commands of cases, by profile, then the commands of jobs that
    belong to no case. The reference's runs need no command, because a run that is judged by the reference starts it."""
    of_all = [str(number) for number in case.numbers_of_all()]
    cases = _unique(
        scaled.profile_command("all" if section.case in of_all else section.case, section.profile)
        for section in sections
    )
    profiles_of_runs = list(_profiles_of_runs(runs))
    references = {
        record.gate.evidence.get("reference") for record in runs if record.job.method != method.reference()
    }
    commands_of_jobs = _unique(
        repeat_command(record)
        for record in runs
        if record.key not in references
        and not any(case.has_job(profile, record.job) for profile in profiles_of_runs)
    )
    return [*cases, *commands_of_jobs, "./run.sh verify", "./run.sh report"]


def lasting_facts(facts: JsonObject) -> JsonObject:
    """Return those facts of a machine, or of its software, that do not change from run to run."""
    return {name: fact for name, fact in facts.items() if name not in CHANGING_FACTS}


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _render(name: str, values: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": markdown_cell, "counted": counted}
    return environment.get_template(name).render(values)


def markdown_cell(text: str) -> str:
    """Return the text as one cell of a Markdown table, with Markdown's own characters escaped."""
    return " ".join(
        "".join(f"\\{character}" if character in "\\`*[<|" else character for character in text).split()
    )
