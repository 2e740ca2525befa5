"""The archive: whole, checked by sha256sum, the same every time, and without a name in it."""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import re
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import case7
from harness.base.checkout import ROOT
from harness.base.console import readable_output
from harness.core.job import Job
from harness.core.record import Gate, Record, read_all
from papers.report import bundle, page
from papers.report.redact import ADDRESS, HOST, USER, Names, hosts_of_node_list, names_to_remove
from tests.cases.test_case7 import left_by_measuring
from tests.cli.test_main import run
from tests.papers.figures.test_case import DEMO as CASE_DEMO
from tests.papers.figures.test_case import record as case_record
from tests.papers.report.test_page import DEMO, MACHINE, RECORDS, measured
from tests.run.test_trace import put_trace
from tests.support import records
from tests.support.tiny import TINY

NAMES = Names(
    {"node17": HOST, "alice": USER, "10.1.2.3": ADDRESS, "stronghold": HOST},
    {"/home/alice": "~/", "/data/alice/checkout": ""},
    frozenset({"stronghold", "v100-vm"}),
)
TRACEBACK = """File "/data/alice/checkout/harness/run/worker.py", line 3
File "/home/alice/.venv/lib/python3.11/site-packages/torch/nn.py", line 4
[W] client of node17.example.edu:29500 (10.1.2.3), alice@node17, left /scratch/alice/nvme/part.bin
"""
TOLD = measured(
    DEMO.probe("l2l", 3),
    "k6",
    status="crash",
    reason="no room in /home/alice/x/y",
    gate=Gate(),
    machine={**MACHINE, "gpu_uuid": "GPU-01234567-89ab-cdef-0123-456789abcdef"},
    evidence={"traceback": TRACEBACK},
)
NO_CASE = records.record(Job("l2l", TINY))  # has no figure, whose drawing takes a second


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = records.write(tmp_path_factory.mktemp("bundle") / "results", *RECORDS, TOLD)
    (folder / "log_5.txt").write_text(TRACEBACK)
    return folder


@pytest.fixture(scope="module")
def archive(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle.write_archive(results, tmp_path_factory.mktemp("archive") / "some.tar.gz", NAMES)


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / bundle.FOLDER


@pytest.mark.heavy
def test_sha256sum_accepts_what_the_verb_wrote(results: Path, tmp_path: Path) -> None:
    done = run("bundle", "--results", str(results), "--out", str(tmp_path / "b.tar.gz"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'b.tar.gz'}\n")
    shutil.unpack_archive(tmp_path / "b.tar.gz", tmp_path, filter="data")
    check = ["sha256sum", "--strict", "-c", bundle.MANIFEST]
    done = subprocess.run(check, cwd=tmp_path / bundle.FOLDER, capture_output=True, text=True)
    files = [path for path in (tmp_path / bundle.FOLDER).rglob("*") if path.is_file()]
    assert done.returncode == 0 and done.stdout.count(": OK\n") == len(files) - 1  # all but itself


def test_records_logs_figures_and_report_are_in_it(unpacked: Path) -> None:
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    figures = {f"figures/case1_demo.{kind}" for kind in ("csv", "pdf", "png")}
    wanted = {"log_0.json", "log_5.json", "log_5.txt", "report/index.html", "report/review.md", bundle.ABOUT}
    assert wanted | figures <= files


def test_a_trace_its_figure_and_its_place_in_the_report_are_in_it_without_a_name(tmp_path: Path) -> None:
    results = tmp_path / "results"
    records.write(results, RECORDS[0], put_trace(results, Path("/home/alice/results")))
    (results / "traces" / "other.json").write_text("{}")
    with tarfile.open(bundle.write_archive(results, tmp_path / "b.tar.gz", NAMES)) as tar:
        tar.extractall(tmp_path, filter="data")
    folder = tmp_path / bundle.FOLDER
    texts = [(folder / name).read_text() for name in ("traces/overlap_demo.json", "figures/overlap_demo.csv")]
    assert not any("alice" in text for text in texts)
    assert "Case overlap, profile demo" in (folder / "report" / "index.html").read_text()
    assert {path.name for path in folder.glob("*/overlap_demo.*")} == {
        f"overlap_demo.{kind}" for kind in ("json", "csv", "pdf", "png")
    }
    assert not (folder / "traces" / "other.json").exists()  # no trace of ours: it may hold anything


def test_the_page_of_case_7_shows_what_was_measured_beside_its_runs(tmp_path: Path) -> None:
    """Steps foretold by a profile, named by stages x micro-batch, and the losses of the job that morphed."""
    left_by_measuring(tmp_path / "results")
    records.write(
        tmp_path / "results", *(case_record(job, 2.0) for job in case7.Pipelines().jobs(CASE_DEMO, {}))
    )
    with tarfile.open(bundle.write_archive(tmp_path / "results", tmp_path / "b.tar.gz", NAMES)) as tar:
        tar.extractall(tmp_path, filter="data")
    text = (tmp_path / bundle.FOLDER / "report" / "index.html").read_text()
    drawn = [
        base64.b64decode(image).decode()
        for image in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", text)
    ]
    assert len(drawn) == 1 and "<!-- 1 stage, micro-batches of 1 -->" in drawn[0]
    assert "<!-- morphed -->" in drawn[0] and "No morphed job here" not in drawn[0]


def test_the_same_results_give_the_same_bytes(results: Path, archive: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(results, tmp_path / "copy")
    for path in copied.iterdir():
        os.utime(path, (1, 1))
    assert bundle.write_archive(copied, tmp_path / "other.tar.gz", NAMES).read_bytes() == archive.read_bytes()


def test_no_name_is_in_any_text_of_it(unpacked: Path) -> None:
    texts = [
        path.read_text()
        for path in unpacked.rglob("*")
        if path.suffix in (".json", ".txt", ".html", ".md", ".csv")
    ]
    assert any(USER in text for text in texts)
    for name in ("alice", "node17", "example.edu", "10.1.2.3", "/home", "/scratch", "/data/", "456789abcdef"):
        assert not any(name in text for text in texts), name


def test_no_name_of_this_machine_is_in_a_bundle_made_here(tmp_path: Path) -> None:
    file = "cli/main.py"  # of this checkout, and of another
    reason = f"at {socket.gethostname()}: {Path.home()}/x, {ROOT}/{file}, /opt/other/{file}, {tmp_path}/some/file.bin"
    records.write(tmp_path / "results", dataclasses.replace(NO_CASE, status="crash", reason=reason))
    with tarfile.open(bundle.write_archive(tmp_path / "results")) as tar:
        member = tar.extractfile(f"{bundle.FOLDER}/log_0.json")
        assert member is not None
        data = member.read().decode()
    assert f'"at {HOST}: .../x, cli/main.py, cli/main.py, .../file.bin"' in data


def test_what_is_unpacked_is_a_folder_of_the_same_results(results: Path, unpacked: Path) -> None:
    before, after = (list(read_all(folder)[0].values()) for folder in (results, unpacked))
    assert [record.key for record in after] == [record.key for record in before]
    assert after[:3] == before[:3]  # nothing to take out, nothing changed
    outputs = [run("verify", "--results", str(folder), "--json").stdout for folder in (results, unpacked)]
    assert outputs[0].count("\n") > 30 and outputs[0] == outputs[1]


def test_a_word_of_the_records_stays_although_a_host_is_called_so(unpacked: Path) -> None:
    assert Record.read(unpacked / "log_3.json").job.method == "stronghold"
    assert (
        Names({"vm": HOST}, {}, frozenset({"v100-vm"})).text("v100-vm on vm:80, vm-ib0")
        == "v100-vm on HOST:80, HOST-ib0"
    )
    assert {"cpu", "gpu_uuid", "oom-host", "fit_v100-vm"} <= bundle.known_words([TOLD])


@pytest.mark.parametrize(
    "text",
    [
        "0.5 samples/s, 1/3200 of 10/ 20, and/or",
        "https://pytorch.org/docs/stable/index.html",
        "/dev/shm is full, says /usr/lib/python3.11/os.py",
        "20 steps within 1e-05 of resident (largest 7.6e-08)",
        "DeepSpeed 0.19.8, torch 2.13.0+cpu",
    ],
)
def test_text_without_a_name_is_left_as_it_is(text: str) -> None:
    assert NAMES.text(text) == text and names_to_remove().text(text) == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("at 10.7.8.9:29500, fe80::1:2:3:4", "at ADDRESS:29500, ADDRESS"),
        ("file:///home/bob/x and C:\\Users\\bob\\x", ".../x and ~\\x"),
        ("'/data/my runs/of bob/x.json'", "'.../x.json'"),
        ("/opt/bobs/models/x", ".../x"),
        ("HF_TOKEN=hf_abcdefghijklmnop https://bob:pw12@host/x", "HF_TOKEN=SECRET https://SECRET@host/x"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer SECRET"),
    ],
)
def test_what_names_others_or_opens_doors_is_taken_out(text: str, left: str) -> None:
    assert Names().text(text) == left


def test_hosts_of_other_machines_are_read_from_slurms_lists() -> None:
    hosts = list(hosts_of_node_list("login1,tux[1-3,07]-ib,gpu[9-10]"))
    assert hosts == ["login1", "tux1-ib", "tux2-ib", "tux3-ib", "tux07-ib", "gpu9", "gpu10"]


PIECES = [
    "alice",
    "node17",
    "node17.example.edu",
    "/home/alice",
    "/home/bob/x",
    "/data/alice/checkout/harness/cli/main.py",
    "x",
    "stronghold",
    "v100-vm",
    "10.1.2.3",
    "/usr/lib",
    "/scratch/bob/alice/n",
    "~",
    "./y",
    "\\",
]
JOINTS = st.sampled_from(["/", " ", ":", "@", "-", "_", ".", "'", '"', "\n", "[", "=", "//", ""])


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(PIECES), JOINTS), min_size=1, max_size=6))
def test_no_name_is_left_however_it_is_put(parts: list[tuple[str, str]]) -> None:
    text = NAMES.text("".join(piece + joint for piece, joint in parts))
    assert not re.search(r"(?<![A-Za-z0-9])(alice|node17)(?![A-Za-z0-9])", text)
    assert NAMES.text(text) == text


@pytest.mark.heavy
def test_records_of_two_machines_have_a_report_each(tmp_path: Path) -> None:
    other = dataclasses.replace(RECORDS[1], machine={"gpu": "NVIDIA H100/80"})
    with tarfile.open(bundle.write_archive(records.write(tmp_path, RECORDS[0], other))) as tar:
        pages = [name for name in tar.getnames() if name.endswith(".html")]
    assert pages == [
        f"{bundle.FOLDER}/report/{name}/index.html" for name in ("NVIDIA-H100-80", "Some-CPU-2-cores")
    ]


@pytest.mark.heavy
def test_the_report_of_an_archive_with_imported_logs_says_what_the_report_here_says(tmp_path: Path) -> None:
    log = dataclasses.replace(RECORDS[1], key="log", origin="imported", machine={}, clock="cuda")
    results = records.write(tmp_path / "results", RECORDS[0], log)
    _, review = page.write_report(results, tmp_path / "here" / "index.html")
    with tarfile.open(bundle.write_archive(results, tmp_path / "b.tar.gz", Names())) as tar:
        member = tar.extractfile(f"{bundle.FOLDER}/report/review.md")
        assert member is not None and member.read().decode() == review.read_text()


def test_what_is_no_file_of_its_own_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = records.write(tmp_path / "results", NO_CASE)
    (tmp_path / "secret").write_text("secret")
    (folder / "log_1.txt").symlink_to("../secret")
    os.mkfifo(folder / "log_2.txt")
    with tarfile.open(bundle.write_archive(folder, tmp_path / "b.tar.gz", NAMES)) as tar:
        assert not [name for name in tar.getnames() if name.endswith(("log_1.txt", "log_2.txt"))]
    assert capsys.readouterr().err.count("expected a regular file") == 2


def test_a_file_whose_name_the_manifest_cannot_list_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = records.write(tmp_path / "results", *RECORDS[:2])
    for name in (b"log_\xff.txt", b"log_a\nb.txt", b"log_\x1b.txt", b"log_1.txt"):
        (folder / os.fsdecode(name)).write_text("")
    (folder / "log_1.json").rename(folder / os.fsdecode(b"log_\xff.json"))
    with readable_output():
        archive = bundle.write_archive(folder, tmp_path / "b.tar.gz", NAMES)
    with tarfile.open(archive) as tar:
        assert sorted(Path(name).name for name in tar.getnames() if "log_" in name) == [
            "log_0.json",
            "log_1.txt",
        ]
    assert capsys.readouterr().err.count("expected a file name of letters") == 4


def test_the_name_of_a_file_has_no_name_of_a_host(tmp_path: Path) -> None:
    folder = records.write(tmp_path / "results", RECORDS[0])
    (folder / "log_node17_x.txt").write_text("")
    with tarfile.open(bundle.write_archive(folder, tmp_path / "b.tar.gz", NAMES)) as tar:
        assert [name for name in tar.getnames() if name.endswith("_x.txt")] == [
            f"{bundle.FOLDER}/log_{HOST}_x.txt"
        ]


def test_no_record_is_one_line_and_no_archive(tmp_path: Path) -> None:
    done = run("bundle", "--results", str(tmp_path))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "no record in" in done.stderr and not list(tmp_path.iterdir())


def test_records_that_cannot_be_read_are_one_line_that_names_them_and_no_archive(tmp_path: Path) -> None:
    (tmp_path / "log_a.json").write_text("{")
    (tmp_path / "log_b.json").symlink_to("nowhere")
    done = run("bundle", "--results", str(tmp_path))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    for problem in (
        "log_a.json is not a record: Expecting property name",
        "log_b.json is not a record: [Errno",
    ):
        assert problem in done.stderr
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_in_the_archive_tells_when_or_by_whom_it_was_made(archive: Path) -> None:
    data = archive.read_bytes()
    assert data[4:8] == bytes(4)  # gzip's time
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {(entry.mtime, entry.uid, entry.uname, entry.mode) for entry in tar} == {(0, 0, "", 0o644)}
