"""The verbs that read results (fairness, verify, compare, report, bundle, notebook), and the verbs that take in
measurements by others: import (logs), add (records)."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import click

from cli import options
from cli.exit_codes import CHECK_FAILED, of_baseline
from cli.options import FILE, check_writable
from harness.base.checkout import ROOT, install_extra
from harness.core.record import records_of


@click.command()
@options.results
@options.added
@options.as_json
def fairness(results: Path, as_json: bool) -> None:
    """Show what each recorded method ran with: implementation, kernels, precision, recompute, clipping, data."""
    from papers.claims.fairness import fairness_lines, fairness_rows

    table = fairness_rows(records_of(results))
    if not table:
        raise ValueError(
            f"no record of a run that trained in {results}: try ./run.sh -m all -l 4 -h 256 first"
        )
    if as_json:
        for row in table:
            print(json.dumps(row))
    else:
        print("\n".join(fairness_lines(table, shutil.get_terminal_size((120, 24)).columns)))


@click.command(name="import")
@click.argument(
    "logs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="LOGS..."
)
@options.results
@options.added
@click.option(
    "--reference",
    metavar="METHOD",
    help="Method to judge losses by; default: one that keeps all on the device.",
)
def import_(logs: tuple[Path, ...], results: Path, reference: str | None) -> None:
    """Read logs of the published artifact or of this harness into records. Folders are searched for logs."""
    from papers.logs import import_logs

    check_writable(results)
    skipped: list[Path] = []

    def skip(path: Path, why: str) -> None:
        skipped.append(path)
        print(f"skipped {_printable_path(path)}: {why}", file=sys.stderr)

    records = []
    for record, is_new in import_logs.import_logs(logs, results, reference, skip):
        records.append(record)
        print(import_logs.record_line(record) + ("" if is_new else " [recorded before]"))
    if not records and not skipped:
        raise ValueError(
            f"no log in {', '.join(map(_printable_path, logs))}: try log files, or folders with log_*.txt"
        )
    sys.exit(CHECK_FAILED if skipped else 0)


def _printable_path(path: Path) -> str:
    """Return a path as text in which every byte that is not valid UTF-8 is replaced, so that it can be printed."""
    return os.fsencode(path).decode(errors="replace")


@click.command()
@options.results
@options.added
@click.option(
    "--against", type=click.Choice(["published"]), help="Judge the numbers that the original published."
)
@options.machine_of_records
@options.as_json
def verify(results: Path, against: str | None, machine: str | None, as_json: bool) -> None:
    """Judge the papers' claims by the records. Exit code 1: a claim fails, or an expected failure passes."""
    from papers.claims.verify import findings, has_bad_verdict, print_findings

    if against is None and not results.is_dir():
        raise ValueError(
            f"no folder {results}: try --results with a folder of records, which ./run.sh case all writes"
        )
    judged_claims = findings(results, against, machine)
    print_findings(judged_claims, as_json)
    sys.exit(CHECK_FAILED if has_bad_verdict(judged_claims) else 0)


@click.command()
@click.argument("names", nargs=-1, metavar="A B")
@options.results
@options.added
@click.option(
    "--baseline", metavar="BASE", help="Check that A (default: --results) trains like BASE, and no slower."
)
@options.as_json
def compare(names: tuple[str, ...], results: Path, baseline: str | None, as_json: bool) -> None:
    """Compare the throughput of A and B: each a record, a folder of results, a commit, or METHOD[:option=value,...].

    Exit code 1: A and B cannot be compared. With --baseline, also 5: A does not train like the baseline; 8: A trains
    like the baseline, but slower.
    """
    from papers.claims.baseline import print_baseline_comparisons
    from papers.claims.compare import print_comparisons

    if baseline is None:
        if len(names) != 2:
            raise ValueError(f"expected two arguments, A and B, got {len(names)}; or try --baseline BASE")
        a, b = names
        sys.exit(0 if print_comparisons(a, b, results, as_json) else CHECK_FAILED)
    if len(names) > 1:
        raise ValueError(f"expected at most one argument with --baseline, got {len(names)}")
    new = names[0] if names else str(results)
    sys.exit(of_baseline(*print_baseline_comparisons(baseline, new, results, as_json)))


@click.command()
@options.results
@options.added
@click.option("--out", type=FILE, help="File to write the page to; default: RESULTS/report/index.html.")
@click.option("--profile", metavar="NAME", help="Show only the figures of this profile; default: all.")
@options.machine_of_records
def report(results: Path, out: Path | None, profile: str | None, machine: str | None) -> None:
    """Write one page of claims, figures and records, and review.md beside it, to paste into a review."""
    from papers.report import page

    for path in page.write_report(results, out, profile, machine):
        print(path)


@click.command()
@options.results
@options.added
@click.option("--out", type=FILE, help="File to write the archive to; default: RESULTS/bundle.tar.gz.")
def bundle(results: Path, out: Path | None) -> None:
    """Pack records, logs, figures, report and a manifest into one archive, without names of hosts and users."""
    from papers.report.bundle import write_archive

    print(write_archive(results, out))


@click.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True), metavar="FILE|FOLDER")
@options.results
@options.added
def add(source: Path, results: Path) -> None:
    """Take in results that others have sent. They are checked, judged again from their records, and kept beside one's
    own.

    FILE is an archive that `bundle` wrote, FOLDER a folder of results. Exit code 2: a file is wrong, or no record is
    new; then nothing is written.
    """
    from papers.report.bundle import add_results

    for line in add_results(source, results):
        print(line)


@click.command()
@click.option("--no-browser", is_flag=True, help="Print the notebook's address, and open no browser.")
@click.option("--ip", default="localhost", help="Address that Jupyter listens on; in a container: 0.0.0.0.")
def notebook(no_browser: bool, ip: str) -> None:
    """Open the notebook of figures and claims in Jupyter. If Jupyter is missing, it is installed into .venv."""
    jupyter = ROOT / ".venv/bin/jupyter-lab"
    if not jupyter.exists() and not install_extra("notebook"):
        raise ValueError(
            "Jupyter could not be installed (see .venv.log); try again, or open notebooks/ae.ipynb elsewhere"
        )
    arguments = [
        f"--ServerApp.ip={ip}",
        *["--no-browser"] * no_browser,
        *["--allow-root"] * (os.getuid() == 0),
    ]
    os.execv(jupyter, [str(jupyter), str(ROOT / "notebooks/ae.ipynb"), *arguments])


VERBS = (fairness, import_, verify, compare, report, bundle, add, notebook)
