"""The verbs that only read results, and the one that brings in those of others."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import click

from harness.cli.job_options import FOLDER, check_writable
from harness.core import method
from harness.core.record import read_all

CLAIM_FAILED = 1


@click.command()
@click.option("--results", type=FOLDER, default=method.ROOT / "results")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def fairness(results: Path, as_json: bool) -> None:
    """What each recorded method ran with: who implements it, kernels, precision, recompute, clipping, data."""
    from harness.evidence import fairness as table

    rows = table.rows(list(read_all(results)[0].values()))
    if not rows:
        raise ValueError(
            f"no run that trained is recorded in {results}: run some first, as ./run.sh -m all -l 4 -h 256"
        )
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        print("\n".join(table.lines(rows, shutil.get_terminal_size((120, 24)).columns)))


@click.command(name="import")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True), metavar="LOGS...")
@click.option("--results", type=FOLDER, default=method.ROOT / "results")
@click.option("--reference", metavar="METHOD", help="Judge by this method; default: one that keeps all on the device.")
def import_(logs: tuple[Path, ...], results: Path, reference: str | None) -> None:
    """Read logs of the published artifact, or of this harness, into records; folders are searched."""
    from harness.artifact_logs import import_logs

    check_writable(results)
    skipped: list[Path] = []

    def skip(path: Path, why: str) -> None:
        skipped.append(path)
        print(f"skipped {readable(path)}: {why}", file=sys.stderr)

    records = []
    for record, is_new in import_logs.import_logs(logs, results, reference, skip):
        records.append(record)
        print(import_logs.line(record) + ("" if is_new else " [recorded before]"))
    if not records and not skipped:
        raise ValueError(f"no log in {', '.join(map(readable, logs))}: name files, or folders of log_*.txt")
    sys.exit(1 if skipped else 0)


def readable(path: Path) -> str:
    """A file's name as any terminal can show it."""
    return os.fsencode(path).decode(errors="replace")


@click.command()
@click.option("--results", type=FOLDER, default=method.ROOT / "results")
@click.option("--against", type=click.Choice(["published"]), help="Judge the original's own numbers.")
@click.option("--machine", metavar="NAME", help="Whose records to judge, by a part of the name; v100-vm: the paper's.")
@click.option("--claims", "folder", type=FOLDER, help="Another folder of claims.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def verify(results: Path, against: str | None, machine: str | None, folder: Path | None, as_json: bool) -> None:
    """Judge the papers' claims by what was measured. Exit code 1 where one fails, or holds unexpectedly."""
    from harness.evidence import claims
    from harness.evidence import verify as judging

    if against is None and not results.is_dir():
        raise ValueError(f"no folder {results}: --results takes a folder of records, as ./run.sh case all writes it")
    found = judging.findings(results, against, machine, folder or claims.FOLDER)
    judging.show(found, as_json)
    sys.exit(CLAIM_FAILED if judging.failed(found) else 0)


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--results", type=FOLDER, default=method.ROOT / "results")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def compare(a: str, b: str, results: Path, as_json: bool) -> None:
    """Is A faster than B? Each is a record, a folder of results, or METHOD[:option=value,...] among the results.

    Exit code 1 where they cannot be compared.
    """
    from harness.evidence import compare as comparing

    sys.exit(0 if comparing.run(a, b, results, as_json) else CLAIM_FAILED)


@click.command()
@click.option("--results", type=FOLDER, default=method.ROOT / "results")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The page: RESULTS/report/index.html.")
@click.option("--profile", metavar="NAME", help="Only the figures of this profile; default: all there are.")
@click.option("--machine", metavar="NAME", help="Whose records to report, by a part of the name.")
def report(results: Path, out: Path | None, profile: str | None, machine: str | None) -> None:
    """One page of everything measured: claims, figures, every record; and beside it review.md, to paste into a form."""
    from harness.report import page

    for path in page.write(results, out, profile, machine):
        print(path)


@click.command()
@click.option("--results", type=FOLDER, default=method.ROOT / "results")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The archive: RESULTS/bundle.tar.gz.")
def bundle(results: Path, out: Path | None) -> None:
    """Records, logs, figures, report and a manifest in one archive, without names of hosts and users."""
    from harness.report import bundle as packing

    print(packing.write(results, out))


VERBS = (fairness, import_, verify, compare, report, bundle)
