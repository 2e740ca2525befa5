"""Jobs under a real Slurm with two nodes: their records, how they end there, and what the same call does again."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Budget, Job
from harness.core.method import Unavailable
from harness.core.record import Record, read_all
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from harness.run.place import OrderedJob
from methods.pipeline.launch.folder import read_lines
from places.docker import PYTHON
from places.shared.cluster import place_options
from places.slurm import Options, Slurm, SlurmState, end_of_job
from tests.run.test_ranks import MEETING, SHARDED, holders, training_ranks
from tests.support import cli, tiny
from tests.support.packages import still_running
from tests.support.slurm import cluster
from tests.support.tiny import TINY, write_ending, write_endless
from tests.support.until import until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
WORDS = [*tiny.WORDS, "--on", "slurm"]
ENDINGS = """
if self.how == "memory":
    torch.ones(2**30)
elif self.how == "killed":
    os.kill(os.getppid(), 9)
elif self.how == "cancelled":
    subprocess.run(["scancel", os.environ["SLURM_JOB_ID"]])
while True:
    time.sleep(1)
"""


@pytest.fixture
def place(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("SLURM_CONF", str(slurm))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    return Slurm({"partition": "tests"})


def test_a_job_on_cuda_asks_for_a_gpu_of_each_rank_unless_told(place: Slurm, tmp_path: Path) -> None:
    job = Job("resident", TINY, {"world_size": 2}, device="cuda")
    assert place.parameters(job, tmp_path, ())["gpus_per_node"] == 2
    place.options |= {"nodes": 2}
    assert place.parameters(job, tmp_path, ())["gpus_per_node"] == 1
    place.options |= {"gpus": 4}
    assert place.parameters(job, tmp_path, ())["gpus_per_node"] == 4
    assert "gpus_per_node" not in Slurm({}).parameters(dataclasses.replace(job, device="cpu"), tmp_path, ())


def test_six_jobs_have_six_records_and_the_same_call_runs_those_without_a_result(
    place: Slurm, tmp_path: Path
) -> None:
    folders = (write_ending(tmp_path, ENDINGS),)
    jobs = [Job("resident", dataclasses.replace(TINY, seed=seed), steps=4, warmup=1) for seed in range(2)]
    for how in ("memory", "killed", "times out", "cancelled"):
        budget = Budget(seconds=1.0 if how == "times out" else None)  # over before it has trained
        jobs.append(Job("ending", TINY, {"how": how}, budget, steps=3, warmup=1))
    records = Sweep(tmp_path, folders, place=place).run([resolve(job, folders) for job in jobs])
    assert [record.status for record in records[:2]] == ["ok"] * 2
    records_by_end = {record.job.options["how"]: record for record in records[2:]}
    ends = {
        how: (record.status, record.evidence.get("slurm", {}).get("state"))
        for how, record in records_by_end.items()
    }
    assert ends["memory"][0] == "oom-host" and records_by_end["memory"].evidence["oom_kills"], ends["memory"]
    assert ends["times out"] == ("timeout", "COMPLETED"), ends
    assert ends["killed"][0] == "killed" and ends["cancelled"] == ("interrupted", "CANCELLED"), ends
    assert {record.machine["nodes"] for record in records} == {"n1", "n2"}
    records, complaints = read_all(tmp_path)
    assert complaints == [] and len(records) == 6  # references are among them
    before = set(records)
    assert not any(records_by_end[how].is_lasting for how in records_by_end)
    repeated = [job for job in jobs if job.options.get("how") in (None, "killed", "cancelled")]
    again = Sweep(tmp_path, folders, place=place).run([resolve(job, folders) for job in repeated])
    ran = [record.job.options["how"] for path, record in read_all(tmp_path)[0].items() if path not in before]
    assert sorted(ran) == ["cancelled", "killed"]
    assert [record.status for record in again] == ["ok", "ok", "killed", "interrupted"]
    assert not list(tmp_path.glob(".slurm-*"))


def test_the_same_job_here_and_on_a_node_trains_to_the_same_bits(place: Slurm, tmp_path: Path) -> None:
    job = resolve(Job("resident", TINY, steps=6, warmup=2))[0]
    (on_host,) = Sweep(tmp_path).run([resolve(job)])
    (in_cluster,) = Sweep(tmp_path, place=place).run([resolve(job)])
    assert in_cluster.key != on_host.key and in_cluster.machine["on"] == "slurm"
    provenance = {"key", "machine", "software", "started", "gate", "step_seconds", "phase_seconds", "peaks"}
    same = [field.name for field in dataclasses.fields(Record) if field.name not in provenance]
    assert [getattr(on_host, name) for name in same] == [getattr(in_cluster, name) for name in same]
    assert in_cluster.gate.verdict == on_host.gate.verdict == "exact"


def test_an_interrupt_cancels_what_was_submitted(place: Slurm, tmp_path: Path) -> None:
    call = [*WORDS, *write_endless(tmp_path), "--results", str(tmp_path)]
    run = cli.start(*call)
    cli.wait_for_steps(tmp_path)
    run.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout == ""
    (record,) = read_all(tmp_path)[0].values()
    assert record.status == "interrupted" and record.losses
    assert record.evidence["slurm"]["state"] == "CANCELLED"


def test_two_ranks_on_two_nodes_train_as_the_reference_does(place: Slurm, tmp_path: Path) -> None:
    """By torch's own processes, and by an engine that starts them itself."""
    spread = Slurm({**place.options, "nodes": 2})
    jobs = [SHARDED, dataclasses.replace(SHARDED, method="zero-offload")]
    for record in Sweep(tmp_path, place=spread).run([resolve(job) for job in jobs]):
        assert record.gate.verdict == "tolerance", f"{record.job.method}: {record.gate.text} {record.reason}"
        assert record.machine["nodes"] == "n[1-2]" and [rank["rank"] for rank in record.machine["ranks"]] == [
            0,
            1,
        ]
    assert {path.name.split("_")[0] for path in tmp_path.iterdir()} == {"log"}  # no record of a single node


def test_a_pipelines_ranks_on_two_nodes_train_as_the_reference_does_and_go_on_from_checkpoints(
    place: Slurm, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    call = ["-m", "varuna", "--ranks", "4", *tiny.SIZES, "--on", "slurm", "--slurm", "nodes=2"]
    call += ["--option", "num_stages=2", "--results", str(tmp_path / "results")]
    first = cli.run(
        *call, "--steps", "4", "--option", f"checkpoint={folder}", "--option", "checkpoint_every=4"
    )
    assert first.returncode == 0 and "gate passed (tolerance)" in first.stdout, first.stderr + first.stdout
    done = cli.run(*call, "--steps", "8", "--resume", folder)
    assert done.returncode == 0 and "gate passed (tolerance)" in done.stdout, done.stderr + done.stdout
    record = next(
        record for record in read_all(tmp_path / "results")[0].values() if record.job.options.get("resume")
    )
    assert record.schedule["resumed_steps"] == 4 and record.machine["nodes"] == "n[1-2]"


def test_a_launched_job_that_slurm_takes_away_goes_on_where_it_was(place: Slurm, tmp_path: Path) -> None:
    """By the script of docs/pipelines.md, on two nodes: no step is lost, none is done twice."""
    num_steps, folder = 40, tmp_path / "job"
    (tmp_path / "pace").write_text("0.2")
    command = [
        sys.executable,
        "-m",
        "methods.varuna.run",
        "--machine-list",
        tmp_path / "list",
        "--folder",
        folder,
    ]
    command += ["--batch-size", 4, "--nstages", 2, "--chunk-size", 2, ROOT / "cases" / "_paced_gpt.py"]
    command += ["--steps", num_steps, "--blocks", 2, "--width", 32, "--tokens", 16]
    (tmp_path / "script").write_text(
        f"#!/bin/bash\n#SBATCH --requeue --nodes=2 --partition=tests --output={tmp_path}/output --open-mode=append\n"
        f'scontrol show hostnames "$SLURM_JOB_NODELIST" > {tmp_path}/list\n'
        f"export PACE_FILE={tmp_path}/pace OMP_NUM_THREADS=1\nexec {shlex.join(map(str, command))}\n"
    )
    submitted = subprocess.run(
        ["sbatch", "--parsable", tmp_path / "script"], capture_output=True, text=True, check=True
    )

    until(lambda: len(read_lines(folder / "steps.jsonl")) >= 5)
    subprocess.run(["scontrol", "requeue", submitted.stdout.strip()], check=True)
    until(lambda: any(line["event"] == "interrupted" for line in read_lines(folder / "events.jsonl")))
    (tmp_path / "pace").write_text("0")
    until(
        lambda: (
            subprocess.run(["squeue", "-h", "-o", "%T"], capture_output=True, text=True).stdout == "PENDING\n"
        )
    )
    at_once = [
        "scontrol",
        "update",
        f"JobId={submitted.stdout.strip()}",
        "StartTime=now",
    ]  # else in two minutes
    subprocess.run(at_once, check=True)
    until(lambda: any(line["event"] == "done" for line in read_lines(folder / "events.jsonl")))
    steps, events = read_lines(folder / "steps.jsonl"), read_lines(folder / "events.jsonl")
    assert [line["step"] for line in steps] == [*range(1, num_steps + 1)] and not (
        folder / "lost_steps.jsonl"
    ).exists()
    rounds = [line for line in events if line["event"] == "round"]
    first = [line["step"] for line in steps if line["round"] == 1]
    assert [line["machines"] for line in rounds] == [["n1", "n2"]] * 2 and rounds[1]["resume_step"] == first[
        -1
    ]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_killed_rank_ends_the_job_on_all_nodes_and_is_named(
    place: Slurm, tmp_path: Path, num_nodes: int
) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    killer = threading.Thread(target=lambda: training_ranks(tmp_path)[1].kill())
    killer.start()
    job = Job("meeting", TINY, {"world_size": 2, "is_endless": True}, steps=12, warmup=1)
    spread = Slurm({**place.options, "nodes": num_nodes})
    (record,) = Sweep(tmp_path, (tmp_path,), place=spread).run([resolve(job, (tmp_path,))])
    killer.join()
    assert record.status == "killed" and record.reason.startswith("rank 1 of 2: killed by SIGKILL"), (
        record.reason
    )
    assert record.evidence["rank"] == 1 and len(record.losses) == 10 and holders(tmp_path) == []


def test_a_container_is_srun_s_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is submitted, by commands that stand in for a cluster with the plugin."""
    for name, does in {
        "srun": "echo --container-image",
        "scontrol": "",
        "sbatch": 'cp "$1" script; echo job 7',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = Slurm({"container_image": "registry#harness:1", "requeue": "yes"})
    place._submit(
        SHARDED, OrderedJob(SHARDED, "key", tmp_path / "stem").order(()), tmp_path, tmp_path / "logs"
    )
    lines = (tmp_path / "script").read_text().splitlines()
    assert "#SBATCH --requeue" in lines
    (line,) = [line for line in lines if line.startswith("srun ")]
    assert "'--container-image=registry#harness:1'" in line and f"{PYTHON} -u -m submitit" in line
    assert f"{ROOT}:{ROOT}:ro,{tmp_path}:{tmp_path}," in line and f"--container-workdir={ROOT}" in line
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    with pytest.raises(Unavailable, match=r"without oci\.conf"):
        Slurm({"container_image": str(bundle)})


def test_a_slurm_without_containers_says_so_in_one_line(place: Slurm, tmp_path: Path) -> None:
    done = cli.run(*WORDS, "--slurm", "container_image=harness", "--results", str(tmp_path))
    assert done.returncode == 7 and "has no --container-image" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_cluster_leaves_nothing_behind(tmp_path: Path) -> None:
    with cluster(tmp_path) as configuration:
        command, environment = (
            ["srun", "printenv", "SLURM_JOB_ID"],
            {**os.environ, "SLURM_CONF": str(configuration)},
        )
        number = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        assert len(still_running(str(tmp_path))) == 4  # munge, the controller, two nodes
    assert still_running(str(tmp_path)) == []
    assert list(Path("/sys/fs/cgroup").glob(f"*/slurm_n[12]/*/job_{number}")) == []


def test_a_partition_that_does_not_exist_is_one_line(place: Slurm, tmp_path: Path) -> None:
    done = cli.run(*WORDS, "--slurm", "partition=no-such", "--results", str(tmp_path))
    assert done.returncode == 2 and "invalid partition" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_slurm_that_does_not_answer_is_unavailable(slurm: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=nowhere(127.0.0.1)\nSlurmctldPort=1\n"
        "AuthType=auth/none\nMessageTimeout=2\nNodeName=n1\n"
    )
    done = cli.run(*WORDS, "--results", str(tmp_path / "r"), SLURM_CONF=str(tmp_path / "slurm.conf"))
    assert done.returncode == 7 and "Slurm does not answer" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_slurm_and_with_unknown_options_one_line_says_so(tmp_path: Path) -> None:
    done = cli.run(*WORDS, PATH=str(tmp_path))
    assert done.returncode == 7 and "no sbatch here" in done.stderr and len(done.stderr.splitlines()) == 1
    for text in ("no=such", "no/such.yaml"):
        done = cli.run(*WORDS, "--slurm", text)
        assert done.returncode in (2, 7) and len(done.stderr.splitlines()) == 1


def test_ranks_spread_evenly_over_a_number_of_nodes(tmp_path: Path) -> None:
    done = cli.run(*WORDS, "--slurm", "nodes=none")
    assert done.returncode == 2 and "nodes: expected a valid integer, got 'none'" in done.stderr, done.stderr


@pytest.mark.parametrize("value", ["gpu\ntouch owned\n#", "a b", "'a'", "$(a)", "[" * 5000])
def test_an_option_that_would_be_more_than_a_value_is_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(f"partition: {json.dumps(value) if len(value) < 20 else value}")
    with pytest.raises(ValueError, match=r"^--slurm [^\n]*expected"):
        place_options("slurm", (str(tmp_path / "cluster.yaml"),), Options)


def test_options_come_from_words_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("partition: gpu\ntime: 30\n")
    texts = (str(tmp_path / "cluster.yaml"), "time=60")
    assert place_options("slurm", texts, Options) == {"partition": "gpu", "time": 60}


def test_slurms_states_are_named_by_more_than_their_exit_codes() -> None:
    ends = {
        SlurmState("OUT_OF_MEMORY", "0:0", "n1"): "oom-host",
        SlurmState("TIMEOUT", "0:0", "n1"): "timeout",
        SlurmState("NODE_FAIL", "0:0", "n1"): "killed",
        SlurmState("FAILED", "0:9", "n1"): "killed",
        SlurmState("CANCELLED", "0:0", ""): "interrupted",
        SlurmState("FAILED", "1:0", "n1"): "crash",
        SlurmState("COMPLETED", "0:0", "n1"): "crash",  # it left no record
    }
    assert {state: end_of_job(state, "step 1", 0).status for state in ends} == ends
