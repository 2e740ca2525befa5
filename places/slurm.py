"""Runs jobs on a Slurm cluster: submits all jobs at once, waits until they have ended, and derives each job's end from
the job's state in Slurm.

On a node, launch.py runs as on this machine and writes the record into the same folder of results, which all nodes must
see. If the ranks of a job are spread over several nodes, each node has an agent and a record; the submitter merges the
records.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import PositiveInt

from harness.base.checkout import ROOT
from harness.base.console import counted
from harness.base.foreign_file import NO_OTHER_FIELDS
from harness.base.json_object import JsonObject
from harness.core import failures
from harness.core.job import Job
from harness.core.method import Unavailable
from harness.core.option import opt
from harness.core.record import Record, new_stem
from harness.devices import machine
from harness.plan.run_time import deadline_seconds
from harness.run.place import ORDERED, KeyedJobs, OrderedJob, Place, PlaceCall, Report
from harness.run.ranks import merge_nodes
from places.docker import PYTHON, job_mounts, memory_limit
from places.shared.cluster import (
    ClusterReport,
    complete,
    killed,
    late,
    num_nodes,
    out_of_memory,
    place_options,
)
from places.shared.slurm_node import node_stem, perform_on_node

POLL_SECONDS = 1.0
START_SECONDS = 600.0  # seconds that a job may take beyond its own time, for imports and a compiler
# seconds to wait for the record of a job that Slurm calls completed: a network file system may show a file late
LATE_SECONDS = 15.0
CANCEL_SECONDS = 60.0
# part of the message that slurmstepd writes when the kernel kills a process for want of memory
OOM_KILL_MESSAGE = "oom-kill event"
# sbatch's names of those options of --slurm that sbatch names differently
SBATCH_NAMES = {"gpus": "gpus_per_node", "cpus": "cpus_per_task"}
NON_FINAL_STATES = (
    "PENDING",
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "RESIZING",
    "STAGE_OUT",
    "",
)


@dataclass(frozen=True)
class Options:
    """The options of --slurm: options of sbatch, and the image of the container that srun starts. None: not set."""

    __pydantic_config__ = NO_OTHER_FIELDS
    partition: int | str | None = None
    account: int | str | None = None
    qos: int | str | None = None
    time: int | str | None = None
    gpus: int | str | None = None  # GPUs of each node; None: on CUDA one for each rank or device, else 0
    cpus: int | None = None  # CPUs of each task; a node has one task
    nodes: PositiveInt | None = None
    requeue: Literal["yes", "no"] | None = None  # whether Slurm restarts a job that the cluster preempted
    container_image: str | None = None


class SlurmState(NamedTuple):
    """A job's state as Slurm writes it: a name such as COMPLETED, FAILED or TIMEOUT, an exit code and a signal such as
    0:9, and the names of the nodes."""

    name: str = ""
    exit_code: str = ""
    nodes: str = ""

    @property
    def is_final(self) -> bool:
        return self.name not in NON_FINAL_STATES


def is_bundle(image: str) -> bool:
    """True if the image is the folder of an OCI bundle. Slurm itself runs a bundle; other images need the plugin
    pyxis."""
    return (Path(image) / "config.json").is_file()


def check_containers(image: str) -> None:
    """Raise Unavailable if Slurm here cannot run a container from this image."""
    if is_bundle(image):
        process = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
        lines = [line for line in process.stdout.splitlines() if line.startswith("SLURM_CONF ")]
        files = [line.partition("=")[2].strip() for line in lines]
        if not files or not Path(files[0]).with_name("oci.conf").exists():
            raise Unavailable("this Slurm cannot run OCI bundles without oci.conf: leave container_image out")
    elif "--container-image" not in subprocess.run(["srun", "--help"], capture_output=True, text=True).stdout:
        raise Unavailable(
            "this Slurm has no --container-image: have pyxis installed, or leave container_image out"
        )


@dataclass(frozen=True)
class SlurmSettings:
    slurm: tuple[str, ...] = opt(
        (),
        "--slurm",
        "Setting of --on slurm: partition, account, qos, time (minutes), gpus, cpus, nodes,"
        " requeue or container_image; or a YAML file of settings.",
        metavar="NAME=VALUE|FILE",
        is_repeated=True,
    )


class Slurm(Place):
    """The place --on slurm, with these options. The constructor raises Unavailable if Slurm is missing or cannot run
    the container image."""

    is_parallel = True
    cli_options = SlurmSettings

    @classmethod
    def of(cls, options: SlurmSettings, call: PlaceCall) -> Slurm:
        return cls(place_options("slurm", options.slurm, Options))

    @classmethod
    def asks_for_gpus(cls, options: SlurmSettings) -> bool:
        return bool(place_options("slurm", options.slurm, Options).get("gpus"))

    def __init__(self, options: dict[str, Any]) -> None:
        for command in ("sbatch", "srun", "scontrol"):
            if not shutil.which(command):
                raise Unavailable(f"no {command} here: try --on slurm on a machine that submits Slurm jobs")
        self.options = {name: value for name, value in options.items() if name != "container_image"}
        self.image = options.get("container_image")
        self.uses_this_venv = not self.image
        if self.image:
            check_containers(self.image)

    def context(self) -> dict[str, str]:
        """Return the partition, the options that choose nodes, and the image. In a job's key these values replace the
        facts of the machine that submits the job."""
        node_options = {name: str(self.options.get(name)) for name in ("partition", "gpus", "cpus", "nodes")}
        node_options |= {"image": str(self.image)} if self.image else {}
        replaced = dict.fromkeys(("cpu", "cores", "affinity", "gpu"), "")
        return replaced | {f"slurm_{name}": value for name, value in node_options.items()}

    def launch(self, jobs: KeyedJobs, results: Path, folders: tuple[Path, ...], report: Report) -> list[Path]:
        """Run the jobs; return the paths of their records.

        At a KeyboardInterrupt this call cancels the jobs, which may still finish their records. Then KeyboardInterrupt
        is raised again.
        """
        # Use a new folder for each call: the folder of an earlier call could hold the result of another job with the
        # same number.
        logs = Path(tempfile.mkdtemp(prefix=".slurm-", dir=results.resolve()))
        ordered_jobs = [OrderedJob(job, key, new_stem(results.resolve(), job)) for job, key in jobs]
        ids: list[str] = []
        is_interrupted = False
        try:
            for ordered in ordered_jobs:
                ids.append(self._submit(ordered.job, ordered.order(folders), results.resolve(), logs))
            self._wait(ids, report, math.inf)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            if ids and (is_interrupted or len(ids) < len(jobs)):
                subprocess.run(["scancel", *ids], capture_output=True)
                self._wait(ids, report, CANCEL_SECONDS)
            for ordered in ordered_jobs[len(ids) :]:
                Path(f"{ordered.stem}.txt").unlink()
            states = slurm_states(ids)
            submitted = zip(ordered_jobs, ids, strict=False)
            paths = [self._complete(ordered, number, states[number], logs) for ordered, number in submitted]
            shutil.rmtree(logs, ignore_errors=True)
        if is_interrupted:
            raise KeyboardInterrupt
        return paths

    def parameters(self, job: Job, results: Path, folders: tuple[Path, ...]) -> dict[str, Any]:
        """Return submitit's parameters for a job: options of sbatch, and options of srun, which starts the
        container."""
        seconds = (job.budget.seconds or deadline_seconds(job)) + START_SECONDS
        parameters: dict[str, Any] = {
            "time": math.ceil(seconds / 60),
            "ntasks_per_node": 1,
            "signal_delay_s": 30,
        }
        if job.device == "cuda":
            parameters["gpus_per_node"] = machine.num_gpus(job) // self._num_nodes(job)
        options = {name: value for name, value in self.options.items() if name != "requeue"}
        parameters |= {SBATCH_NAMES.get(name, name): value for name, value in options.items()}
        if requeue := self.options.get("requeue"):
            parameters["additional_parameters"] = {"requeue" if requeue == "yes" else "no_requeue": True}
        parameters |= {"job_name": f"{job.method}-{job.workload.num_layers}", "nodes": self._num_nodes(job)}
        parameters |= {"srun_args": self._container(job, results, folders)}
        # reserve whole nodes, because two jobs that each hold a part of the nodes that both need would wait forever
        if parameters["nodes"] > 1:
            parameters |= {"exclusive": True, "srun_args": ["--kill-on-bad-exit=1", *parameters["srun_args"]]}
        limit = memory_limit(job)
        return parameters | ({"mem": f"{math.ceil(limit / 2**20)}M"} if limit else {})

    def _num_nodes(self, job: Job) -> int:
        return num_nodes(job.world_size, self.options.get("nodes", 1), "--slurm nodes")

    def _container(self, job: Job, results: Path, folders: tuple[Path, ...]) -> list[str]:
        if not self.image:
            return []
        if is_bundle(self.image):  # the bundle's own configuration names the folders that its container sees
            return [f"--container={Path(self.image).resolve()}"]
        mounts = job_mounts(job, results, folders, hashlib.sha256(self.image.encode()).hexdigest()[:12])
        mounts_text = ",".join(
            f"{mount.outside}:{mount.inside}{':ro' * mount.is_read_only}" for mount in mounts
        )
        return [
            f"--container-image={self.image}",
            f"--container-mounts={mounts_text}",
            f"--container-workdir={ROOT}",
        ]

    def _submit(self, job: Job, order: JsonObject, results: Path, logs: Path) -> str:
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        executor = SlurmExecutor(logs, python=PYTHON if self.image else None)
        executor.update_parameters(**self.parameters(job, results, tuple(map(Path, order["folders"]))))
        try:
            # hide submitit's output: the error's text contains sbatch's output anyway
            with contextlib.redirect_stderr(io.StringIO()):
                order = {**order, "num_nodes": self._num_nodes(job), "folder": str(logs)}
                return str(executor.submit(perform_on_node, order).job_id)
        except (FailedJobError, subprocess.CalledProcessError, RuntimeError) as error:
            text = " ".join(str(getattr(error, "stderr", "") or error).split())
            if subprocess.run(["scontrol", "ping"], capture_output=True).returncode:
                raise Unavailable(f"Slurm does not answer, try without --on slurm: {text}") from error
            raise ValueError(
                f"Slurm refuses a job with {self.options or 'no options'}: {text}; see --slurm"
            ) from error

    def _wait(self, ids: list[str], report: Report, seconds: float) -> None:
        """Wait at most `seconds` until all jobs have ended. Report each change of a job's state."""
        reported_text, deadline = "", time.monotonic() + seconds
        while True:
            names = [state.name for state in slurm_states(ids).values()]
            text = ", ".join(
                f"{names.count(name)} {name.lower() or 'unknown'}" for name in sorted(set(names))
            )
            if text != reported_text:
                reported_text = text
                report({"event": "wait", "text": f"{counted(len(ids), 'job')} under Slurm: {text}"})
            if time.monotonic() > deadline or all(state.is_final for state in slurm_states(ids).values()):
                return
            time.sleep(POLL_SECONDS)

    def _complete(self, ordered: OrderedJob, number: str, state: SlurmState, logs: Path) -> Path:
        job, stem = ordered.job, ordered.stem
        deadline = time.monotonic() + (LATE_SECONDS if state.name == "COMPLETED" else 1.0)
        while not ordered.record.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        slurm_facts = {"job": number, "state": state.name, "exit_code": state.exit_code, "nodes": state.nodes}
        stems = [stem, *(node_stem(logs, stem, index) for index in range(1, self._num_nodes(job)))]
        record_paths = [path for path in (Path(f"{node}.json") for node in stems) if path.exists()]
        record = merge_nodes(list(map(Record.read, record_paths))) if record_paths else None
        error_files = sorted(logs.glob(f"{number}_*.err"))
        output = "".join(file.read_text(errors="replace")[-2000:] for file in error_files)
        # FAILED says only that srun failed; its standard error says why
        if state.name == "FAILED" and OOM_KILL_MESSAGE in output:
            state = state._replace(name="OUT_OF_MEMORY")
        end = end_of_job(state, record.phase if record else ORDERED, memory_limit(job) or 0)
        place = {"on": "slurm", "slurm_job": number, "nodes": state.nodes}
        place |= {"image": self.image} if self.image else {}
        return complete(ordered, record, end, ClusterReport(place, {"slurm": slurm_facts}, output))


def end_of_job(state: SlurmState, phase: str, limit_bytes: int) -> failures.Failure:
    """Return the end of a job, derived from its state under Slurm."""
    code, _, number = state.exit_code.partition(":")
    if state.name == "OUT_OF_MEMORY":
        return out_of_memory(phase, limit_bytes)
    if state.name in ("TIMEOUT", "DEADLINE"):
        return late(phase, f"ran into Slurm's limit of time at {phase}: --slurm time=MINUTES raises it")
    if state.name == "CANCELLED":
        return failures.of_stop(failures.End(phase, stopped="interrupt"))
    if state.name in ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL") or number == str(int(signal.SIGKILL)):
        return killed(phase, f"Slurm says {state.name}")
    return failures.of_process(failures.End(phase, int(code or 0)))


def slurm_states(ids: list[str]) -> dict[str, SlurmState]:
    """Return the state of each job, by its number.

    The states come from sacct, whose output submitit parses. If Slurm keeps no accounts, sacct gives no states; then
    the states come from scontrol, which forgets a job some minutes after its end.
    """
    from submitit.slurm.slurm import SlurmInfoWatcher

    forgotten, jobs_by_number = SlurmState(), {}
    if ids and shutil.which("sacct"):
        command = ["sacct", "-X", "-P", "-o", "JobID,State,ExitCode,NodeList", "-j", ",".join(ids)]
        process = subprocess.run(command, capture_output=True, text=True)
        jobs_by_number = SlurmInfoWatcher().read_info(process.stdout)
    if ids and not jobs_by_number:
        process = subprocess.run(["scontrol", "-o", "show", "jobs"], capture_output=True, text=True)
        lines = process.stdout.splitlines()
        jobs = [dict(field.partition("=")[::2] for field in line.split()) for line in lines]
        jobs_by_number = {job["JobId"]: {**job, "State": job["JobState"]} for job in jobs if "JobId" in job}
        if process.returncode == 0:
            # scontrol succeeded, so jobs that it does not list have ended and were forgotten
            forgotten = SlurmState("FORGOTTEN")
    states = dict.fromkeys(ids, forgotten)
    for number in ids:
        if job := jobs_by_number.get(number):
            # Keep only the first word: sacct writes "CANCELLED by 1000".
            states[number] = SlurmState(job["State"].split()[0], job["ExitCode"], job.get("NodeList", ""))
    return states
