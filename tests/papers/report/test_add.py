"""Results that others send: judged again from the records that came together, marked by their machine, or refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest

from harness.base import child_process
from harness.core.job import Job
from harness.core.record import Gate, Record, added_folders, read_all
from harness.gate.probe import FOLDER as PROBES
from harness.gate.probe import LEARNING_RATE
from papers.report import bundle, page
from papers.report.bundle import add_results
from tests.cli.test_main import run
from tests.papers.report.test_page import RECORDS
from tests.support import records
from tests.support.configured import config_of, configured
from tests.support.tiny import TINY

THERE, HERE = {"cpu": "Abacus 9", "cores": 4}, {"cpu": "Sliderule 1", "cores": 2}
TENSORS: Any = {"w": {"changed": 1.0, "moved": 1.0, "size": 1.0, "sketch": [1.0], "sha256": "a"}}
PROBED = dataclasses.replace(TINY, learning_rate=LEARNING_RATE)


def trained(name: str, started: float, seconds: float = 1.0, workload: Any = TINY, **changes: Any) -> Record:
    """A training whose bits are the reference's, with a verdict that says so."""
    changes = {
        "machine": THERE,
        "software": {"source": name},
        "tensors": TENSORS,
        "key": f"{name}{started}",
        **changes,
    }
    return records.record(Job(name, workload), seconds, started=started, **changes)


REFERENCE, RUN = trained("resident", 1e9), trained("l2l", 1e9 + 60, 2.0)


def test_what_was_bundled_there_is_named_by_its_machine_here(tmp_path: Path) -> None:
    sender = records.write(tmp_path / "theirs", REFERENCE, RUN)
    mine = records.write(
        tmp_path / "mine", *(trained(name, 1e9 + 5, machine=HERE) for name in ("resident", "l2l"))
    )
    assert run("bundle", "--results", sender).returncode == 0
    done = run("add", sender / "bundle.tar.gz", "--results", mine)
    assert done.returncode == 0, done.stderr
    (folder,) = added_folders(mine)
    assert folder.name.startswith("Abacus-9-4-cores-") and done.stdout.splitlines()[-1] == str(folder)
    assert [record.gate.verdict for record in read_all(folder)[0].values()] == ["exact", "exact"]
    assert run("report", "--results", mine).returncode == 0
    page = (mine / "report" / "index.html").read_text()
    assert "Sent in by others" in page and "Abacus 9, 4 cores" in page
    assert "2 records of Abacus 9, 4 cores" in (mine / "report" / "review.md").read_text()
    output = run("compare", "l2l", "resident", "--results", mine).stdout
    assert "A, on Abacus 9, 4 cores: l2l" in output and "A, on Sliderule 1, 2 cores: l2l" in output
    assert run("add", sender / "bundle.tar.gz", "--results", mine).returncode == 2
    assert len(added_folders(mine)) == 1


def refused(source: Path, results: Path, match: str) -> None:
    """Check that the verb ends in one line and code 2, and leaves nothing."""
    done = run("add", source, "--results", results)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and match in done.stderr
    assert not (results / "added").exists()


def test_a_copy_of_what_is_there_is_refused(tmp_path: Path) -> None:
    mine = records.write(tmp_path / "mine", REFERENCE, RUN)
    refused(records.write(tmp_path / "theirs", REFERENCE, RUN), mine, "expected a new run, got 2 known")


def test_of_copies_and_others_the_others_are_added(tmp_path: Path) -> None:
    mine = records.write(tmp_path / "mine", REFERENCE)
    (*_, last) = add_results(records.write(tmp_path / "theirs", REFERENCE, RUN), mine)
    assert [record.job.method for record in read_all(Path(last))[0].values()] == ["l2l"]


def test_a_verdict_is_what_the_records_give_not_what_they_say(tmp_path: Path) -> None:
    wrong = dataclasses.replace(RUN, losses=[2.0] * RUN.job.steps)
    assert wrong.gate.verdict == "exact" and wrong.samples_per_second
    *lines, last = add_results(records.write(tmp_path / "theirs", REFERENCE, wrong), tmp_path / "mine")
    taken = next(record for record in read_all(Path(last))[0].values() if record.job.method == "l2l")
    assert (taken.gate.verdict, taken.gate.reason, taken.samples_per_second) == ("failed", "forward", None)
    assert any("no throughput" in line and "(sent as exact)" in line for line in lines)


def test_without_its_reference_a_run_has_no_verdict(tmp_path: Path) -> None:
    *_, last = add_results(records.write(tmp_path / "theirs", RUN), tmp_path / "mine")
    (taken,) = read_all(Path(last))[0].values()
    assert (taken.gate.verdict, taken.gate.reason) == ("untested", "no-reference")


@pytest.mark.parametrize(("tensor", "verdict"), [("a", "exact"), ("b", "failed")])
def test_the_probe_is_judged_again_too(tensor: str, verdict: str, tmp_path: Path) -> None:
    """A probe whose weights ended elsewhere, beside another rounding of the reference that ended where it did."""
    probed = dataclasses.replace(RUN, gate=Gate("exact", evidence={"probe": {"fp32": "p"}}))
    sender = records.write(tmp_path / "theirs", REFERENCE, probed)
    other = {"w": {**TENSORS["w"], "sha256": tensor, "sketch": [1.0 if tensor == "a" else 9.0]}}
    rounded = trained("rounded", 1e9, workload=PROBED)
    records.write(
        sender / PROBES,
        trained("resident", 1e9, workload=PROBED),
        rounded,
        trained("l2l", 1e9, workload=PROBED, key="p", tensors=other),
    )
    *_, last = add_results(sender, tmp_path / "mine")
    taken = next(record for record in read_all(Path(last))[0].values() if record.job.method == "l2l")
    assert taken.gate.verdict == verdict and "probe" in taken.gate.text


def test_another_sources_probe_is_none(tmp_path: Path) -> None:
    probed = dataclasses.replace(RUN, gate=Gate("exact", evidence={"probe": {"fp32": "p"}}))
    sender = records.write(tmp_path / "theirs", REFERENCE, probed)
    other = trained("l2l", 1e9, workload=PROBED, key="p", software={"source": "other"})
    records.write(sender / PROBES, trained("resident", 1e9, workload=PROBED), other)
    *_, last = add_results(sender, tmp_path / "mine")
    gate = list(read_all(Path(last))[0].values())[-1].gate
    assert gate.text.startswith("0 of the 1 probes that its verdict names came with it")
    assert (gate.verdict, gate.reason) == ("untested", "probe")


@pytest.mark.parametrize("sent", ["failed", "untested", "twin", "tolerance"])
def test_no_run_is_judged_better_than_it_was_sent(sent: str, tmp_path: Path) -> None:
    """Its probe, which failed, stayed with the sender."""
    probed = dataclasses.replace(RUN, gate=Gate(sent, "update", "the update is off (probe in fp32)"))
    *_, last = add_results(records.write(tmp_path / "theirs", REFERENCE, probed), tmp_path / "mine")
    taken = next(record for record in read_all(Path(last))[0].values() if record.job.method == "l2l")
    assert taken.gate.verdict == sent and "(probe in fp32)" in taken.gate.text


def test_a_model_that_is_not_known_is_left_out_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a sketch would make tensors as large as the sender chose
    monkeypatch.setattr(child_process, "_run_module", pytest.fail)
    foreign = configured(
        "mistral", config=json.dumps(config_of("mistral", num_key_value_heads=1)), learning_rate=1e-3
    )
    sender = records.write(tmp_path / "theirs", REFERENCE, RUN, trained("l2l", 1e9 + 70, workload=foreign))
    *lines, last = add_results(sender, tmp_path / "mine")
    assert (
        "left out: 1 record of models that are not known here (mistral): train them first, then add again"
        in lines
    )
    assert len(read_all(Path(last))[0]) == 2
    alone = records.write(tmp_path / "alone", trained("l2l", 1e9 + 70, workload=foreign))
    refused(alone, tmp_path / "other", "expected a record of a run, got none of a model that is known here")


def test_a_log_that_is_added_commands_no_terminal(tmp_path: Path) -> None:
    sender = records.write(tmp_path / "theirs", REFERENCE)
    (sender / "log_0.txt").write_text("step 1 \x1b[2J\u202e\n")
    *_, last = add_results(sender, tmp_path / "mine")
    assert (Path(last) / "log_0.txt").read_text() == "step 1 \\x1b[2J\\u202e\n"


def test_a_run_that_its_sender_had_not_judged_yet_is_judged(tmp_path: Path) -> None:
    *_, last = add_results(
        records.write(tmp_path / "theirs", REFERENCE, dataclasses.replace(RUN, gate=Gate())), tmp_path
    )
    assert [record.gate.verdict for record in read_all(Path(last))[0].values()] == ["exact", "exact"]


def test_the_page_says_which_runs_their_sender_had_not_judged(tmp_path: Path) -> None:
    """Nothing tells a run that was never judged from one whose verdict was removed."""
    [
        *add_results(
            records.write(tmp_path / "theirs", REFERENCE, dataclasses.replace(RUN, gate=Gate())), tmp_path
        )
    ]
    (sent,) = page.read_sent_in(tmp_path, None, 0)
    reasons = dict(zip(map(str, sent.records["method"]), map(str, sent.records["why"]), strict=True))
    assert ["judged here, not by the sender" in why for why in reasons.values()] == [False, True], reasons


def test_a_record_that_is_none_leaves_nothing(tmp_path: Path) -> None:
    sender = records.write(tmp_path / "theirs", REFERENCE, RUN)
    (sender / "log_9.json").write_bytes(pickle.dumps({"a": 1}))
    refused(sender, tmp_path / "mine", "log_9.json is not a record")


def test_a_link_among_the_records_leaves_nothing(tmp_path: Path) -> None:
    sender = records.write(tmp_path / "theirs", REFERENCE, RUN)
    (sender / "log_9.json").symlink_to(sender / "log_0.json")
    refused(sender, tmp_path / "mine", "expected a regular file, got a symbolic link")


def test_models_that_cannot_be_leave_nothing(tmp_path: Path) -> None:
    sender = records.write(tmp_path / "theirs", REFERENCE, RUN)
    data = json.loads((sender / "log_1.json").read_text())
    other = {"workload": {"num_layers": "many"}, "losses": [1.0], "grad_norms": [], "tensors": TENSORS}
    options = {"num_models": 2, "num_batch_sizes": "x"}
    data |= {"others": [other], "job": {**data["job"], "options": options}}
    (sender / "log_1.json").write_text(json.dumps(data))
    refused(sender, tmp_path / "mine", "log_1.json: expected a record that can be judged")


def test_an_archive_with_code_in_it_leaves_nothing(tmp_path: Path) -> None:
    stage = records.write(tmp_path / bundle.FOLDER, REFERENCE, RUN)
    (stage / "method.py").write_text("import os")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in stage.iterdir()]
    (stage / bundle.MANIFEST).write_text("\n".join(lines))
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        tar.add(stage, bundle.FOLDER)
    refused(tmp_path / "b.tar.gz", tmp_path / "mine", "expected only data files")


def test_code_in_a_folder_stays_there(tmp_path: Path) -> None:
    sender = records.write(tmp_path / "theirs", REFERENCE)
    (sender / "method.py").write_text("import os")
    (sender / "log_0.txt").write_text("step 1")
    *_, last = add_results(sender, tmp_path / "mine")
    files = {path.name for path in Path(last).rglob("*") if path.is_file()}
    assert files == {"log_0.json", "log_0.txt"}


def test_a_case_is_drawn_for_each_machine_by_itself(tmp_path: Path) -> None:
    mine = records.write(tmp_path / "mine", *RECORDS)
    sender = (
        dataclasses.replace(run, machine=THERE, step_seconds=[7.0] * len(run.step_seconds)) for run in RECORDS
    )
    (mine / "added").mkdir()
    records.write(mine / "added" / "Abacus-9-1", *sender)
    done = run("case", "1", "--profile", "demo", "--extract", "--results", mine)
    line = f"case 1, sent in, on Abacus 9, 4 cores: {mine}/figures/Abacus-9-1/case1_demo.csv"
    assert done.returncode == 0 and line in done.stderr.splitlines()
    assert "Abacus" not in (mine / "figures" / "case1_demo.csv").read_text()
    assert "Abacus" in (mine / "figures" / "Abacus-9-1" / "case1_demo.csv").read_text()


def test_an_archive_has_the_probes_by_which_it_is_judged(tmp_path: Path) -> None:
    probed = dataclasses.replace(RUN, gate=Gate("exact", evidence={"probe": {"fp32": "p"}}))
    sender = records.write(tmp_path / "theirs", REFERENCE, probed)
    records.write(
        sender / PROBES,
        trained("resident", 1e9, workload=PROBED),
        trained("l2l", 1e9, workload=PROBED, key="p"),
    )
    *lines, last = add_results(bundle.write_archive(sender), tmp_path / "mine")
    assert any("l2l" in line and f"probe: {RUN.job.steps} steps in fp32" in line for line in lines)
    assert len(read_all(Path(last) / PROBES)[0]) == 2
