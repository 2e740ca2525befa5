"""Scripts made for the published artifact's logs read ours: stand-ins that take the same lines by the same fields."""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cli import job_verbs
from cli.job_options import make_jobs
from harness.core import method
from harness.core.job import Job, Workload
from harness.core.log_lines import header_lines, interval_lines
from harness.core.record import log_stem
from papers.logs import parse
from tests.support.logs import PUBLISHED, needs_published

PUBLISHED_METHODS = ["megatron-lm", "l2l", "zero-offload", "zero-infinity", "stronghold"]
# Fields between slashes, commas, underscores, colons, blanks: ./results/log_METHOD_l-N_hs-N_bs-N_ws-N_DAY.SECOND.txt
SIZES = "grep -H 'total parameters' ./results/*.txt | awk -F '[/,_: ]' '{print $4, $5, $20, $21}' | sort -u"
SPEEDS = """
grep -H 'SamplesPerSec' ./results/*zero*.txt | awk -F '[/,_:= ]' '{print $5, $6, $4, $22, $23}'
ls ./results/*.txt | grep -v zero | xargs grep -H 'SamplesPerSecond' |
    awk -F '[/,_: ]' '{print $5, $6, $4, $(NF-2), $NF}'
"""
TIMES = """
grep -H 'elapsed time per iteration' ./results/*stronghold*ws-15*.txt |
    sed 's/^\\(.*\\.txt\\):.*(ms): *\\([0-9.]*\\) .*/\\1 \\2/' | awk -F '[/_ ]' '{print $5, $NF}'
"""
WINDOWS = TIMES.replace("*stronghold*ws-15*", "*stronghold*l-32*").replace("$5", "$8")
ORDER = ("megatron-lm", "l2l", "zero-offload", "zero-infinity", "stronghold")  # of the published bars


def extracted(folder: Path, script: str) -> list[list[str]]:
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def seconds_of(name: str) -> list[float]:
    return [1.0 + 0.01 * step + len(name) for step in range(50)]


def write_log(folder: Path, name: str, num_layers: int, window: int) -> None:
    job = Job(name, Workload(num_layers=num_layers), steps=50)
    done = {"losses": [9.0] * 50, "step_seconds": seconds_of(name), "grad_norms": [1.0] * 50}
    lines = header_lines(job)
    for step in range(10, 51, 10):
        measured = {key: values[:step] for key, values in done.items()} | {
            "loss_scales": [],
            "skipped_steps": [],
        }
        lines += interval_lines(job, measured, {"device_allocated": 2**30}, method.load(name).log_dialect)
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / f"{log_stem(job, window, 1656730240)}.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ./results: a log of 50 steps of each published method, of 32 layers with window 15."""
    for name in PUBLISHED_METHODS:
        write_log(tmp_path, name, 32, 15 if name == "stronghold" else 4)
    return tmp_path


def drawn(number: int, folder: Path) -> dict[str, float]:
    """A stand-in for the artifact's caseN_draw.py: the bars of its figure, by label, as matplotlib has them."""
    largest = {row[0]: row[1] for row in sorted(extracted(folder, SIZES), key=lambda row: float(row[2]))}
    speeds = extracted(folder, SPEEDS)
    if number == 1:  # the largest size of each method
        pairs, height = [(row[0], row[2]) for row in extracted(folder, SIZES)], max
    elif number == 2:  # each baseline at its largest size, and STRONGHOLD there
        pairs = [(name, (name, ORDER[-1])) for name in ORDER[:-1]]
        pairs = [
            (f"{name}/{row[2]}", row[4])
            for name, both in pairs
            for row in speeds
            if row[0] == largest[name] and row[2] in both
        ]
        height = statistics.fmean
    elif number == 3:  # all methods at one size
        pairs, height = [(row[2], row[4]) for row in speeds if row[0] == "l-32"], statistics.fmean
    else:  # the median step by layers; by window
        pairs, height = extracted(folder, TIMES if number == 4 else WINDOWS), statistics.median
    labels = list(dict.fromkeys(label for label, _ in pairs))
    axes = Figure().subplots()
    axes.bar(labels, [height(float(value) for bar, value in pairs if bar == label) for label in labels])
    axes.figure.savefig(folder / f"case{number}.png")
    return dict(zip(labels, (bar.get_height() for bar in axes.patches), strict=True))


def test_the_sizes_of_all_methods_are_extracted(folder: Path) -> None:
    assert extracted(folder, SIZES) == [[name, "l-32", "1.717", "B"] for name in sorted(PUBLISHED_METHODS)]


def test_five_speeds_of_each_method_are_extracted_and_drawn(folder: Path) -> None:
    """The engines' are means since the third step, the others' of their interval, as published."""
    rows = extracted(folder, SPEEDS)
    for name in PUBLISHED_METHODS:
        of_method = [row for row in rows if row[:3] == ["l-32", "hs-2048", name]]
        assert {row[3] for row in of_method} == {"SamplesPerSec" if "zero" in name else "SamplesPerSecond"}
        seconds = seconds_of(name)
        ends = range(10, 51, 10)
        expected = [
            4 / statistics.fmean(seconds[2:end] if "zero" in name else seconds[end - 10 : end])
            for end in ends
        ]
        assert [float(row[4]) for row in of_method] == pytest.approx(expected)


def test_the_times_of_a_window_are_extracted(folder: Path) -> None:
    expected = [
        1000 * statistics.fmean(seconds_of("stronghold")[end - 10 : end]) for end in range(10, 51, 10)
    ]
    pairs = extracted(folder, TIMES)
    assert [row[0] for row in pairs] == ["l-32"] * 5
    assert [float(row[1]) for row in pairs] == pytest.approx(expected, abs=0.1)


def test_every_figure_is_drawn_from_our_logs(folder: Path) -> None:
    """The bars by hand: means of all intervals where the artifact took these, medians where it took those."""
    for name, num_layers, window in (("zero-offload", 48, 4), ("stronghold", 48, 15), ("stronghold", 32, 2)):
        write_log(folder, name, num_layers, window)
    ends, seconds = range(10, 51, 10), {name: seconds_of(name) for name in PUBLISHED_METHODS}
    intervals = {
        name: [statistics.fmean(values[end - 10 : end]) for end in ends] for name, values in seconds.items()
    }
    speed = {
        name: statistics.fmean(4 / interval for interval in values) for name, values in intervals.items()
    }
    for name in ("zero-offload", "zero-infinity"):
        speed[name] = statistics.fmean(4 / statistics.fmean(seconds[name][2:end]) for end in ends)
    step = 1000 * statistics.median(intervals["stronghold"])
    sizes = dict.fromkeys(PUBLISHED_METHODS, 1.717) | {"zero-offload": 2.522, "stronghold": 2.522}
    pairs = {f"{name}/{who}": speed[who] for name in ORDER[:-1] for who in (name, "stronghold")}
    assert drawn(1, folder) == sizes
    assert drawn(2, folder) == pytest.approx(pairs)
    assert drawn(3, folder) == pytest.approx(speed)
    assert drawn(4, folder) == pytest.approx({"l-32": step, "l-48": step}, abs=0.1)
    assert drawn(5, folder) == pytest.approx({"ws-2": step, "ws-15": step}, abs=0.1)


@pytest.mark.parametrize("script", [SIZES, SPEEDS, TIMES, WINDOWS])
def test_a_references_log_enters_no_table(folder: Path, script: str) -> None:
    before = extracted(folder, script)
    write_log(folder, method.reference(), 32, 15)
    assert extracted(folder, script) == before


def test_a_references_log_reads_as_any_other(folder: Path) -> None:
    write_log(folder, method.reference(), 32, 15)
    logs = {path.name.split("_")[1]: parse.read_log(path) for path in (folder / "results").glob("*.txt")}
    reference, other = logs[method.reference()], logs["megatron-lm"]
    assert [interval.elapsed_ms for interval in reference.intervals] == [
        pytest.approx(1000 * statistics.fmean(seconds_of("resident")[end - 10 : end]), abs=0.1)
        for end in range(10, 51, 10)
    ]
    assert [interval.loss for interval in reference.intervals] == [9.0] * 5
    assert reference.parameters_billion == other.parameters_billion
    assert len(reference.interval_speeds) == len(other.interval_speeds) == 5


@needs_published
def test_the_stand_ins_read_the_published_logs(tmp_path: Path) -> None:
    (tmp_path / "results").symlink_to(PUBLISHED / "logs")
    assert ["stronghold", "l-100", "5.141", "B"] in extracted(tmp_path, SIZES)
    rows = extracted(tmp_path, SPEEDS)
    assert ["l-32", "hs-2048", "megatron-lm", "SamplesPerSecond"] in [row[:4] for row in rows]
    assert [row[:4] for row in rows].count(["l-48", "hs-2048", "zero-offload", "SamplesPerSec"]) == 5
    assert len([row for row in extracted(tmp_path, TIMES) if row[0] == "l-32"]) == 5


def jobs_of(command: str) -> list[Job]:
    return make_jobs(job_verbs.run.make_context("run", command.split()).params, ())


def test_the_artifacts_settings_are_its_own_and_what_is_given_beside_overrides_them() -> None:
    jobs = jobs_of("-m all -l 32 --as sc22")
    assert [job.method for job in jobs] == PUBLISHED_METHODS
    assert {(job.steps, job.workload.dropout, job.workload.num_layers) for job in jobs} == {(50, 0.1, 32)}
    assert jobs[-1].options["window_size"] == 4
    (job,) = jobs_of("--as sc22 -m stronghold -w 15 --steps 20")
    assert (job.options["window_size"], job.steps, job.workload.dropout) == (15, 20, 0.1)


def test_the_artifacts_window_is_no_wider_than_the_model() -> None:
    assert [job.options["window_size"] for job in jobs_of("-m stronghold -l 2,4,8 --as sc22")] == [2, 4, 4]
    assert jobs_of("-m stronghold -l 2 -w 15 --as sc22")[0].options["window_size"] == 2


def test_published_names_the_five_methods_anywhere() -> None:
    assert [job.method for job in jobs_of("-m published,hydra")] == [*PUBLISHED_METHODS, "hydra"]
    assert jobs_of("-m l2l")[0].workload.dropout == 0
