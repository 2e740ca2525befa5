"""Runs jobs in containers. In a container, launch.py runs as on this machine, but with Python and the engines of an
image, and within the job's limit of host memory.

The container sees this checkout, the folder of results and the folders that the job names, all at the same paths as on
this machine. Source code comes from this checkout, packages come from the image. The container has no network, never
runs as root (container_user.py), and ends when this process ends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.checkout import ROOT
from harness.base.json_object import JsonObject
from harness.core import failures
from harness.core.corpus_files import corpus_files
from harness.core.job import Job
from harness.core.method import Unavailable
from harness.core.option import opt
from harness.core.record import Record, new_stem
from harness.devices import budgets, machine
from harness.devices.device_lock import turn
from harness.models import weight_files
from harness.plan.run_time import deadline_seconds
from harness.run.launch import GRACE_SECONDS, Events
from harness.run.place import ORDERED, KeyedJobs, OrderedJob, Place, PlaceCall, Report, place_record
from places.shared import container_user
from places.shared.container_user import CODE, ExchangeFolder

PYTHON = "/harness/.venv/bin/python"  # as in docker/Dockerfile
# bytes of host memory for the worker's parent process in the container; when measured, the process took 60 MiB
PARENT_BYTES = 96 * 2**20
# seconds that a container may take beyond the job's own time, to start, and to end after its worker has ended
START_SECONDS = 120.0
POLL_SECONDS = 0.5
# The engine sends a container's output in frames, each with the number of its stream; standard output has number 1. The
# engine has no stream -1: Running._read() puts this number into its queue after the last frame of all streams.
STDOUT_STREAM, ALL_STREAMS_ENDED = 1, -1
# The options of methods that name a folder, each with its spelling on the command line. A job writes to the folders of
# WRITTEN, and only reads those of READ.
WRITTEN, READ = {"disk": "--disk", "checkpoint": "--option checkpoint"}, {"resume": "--resume"}
SCRATCH = "/tmp"  # the only folder of the image that a job may write to; its files are kept in memory
# A folder of the image that the container's user may not enter. If a mounted path lies below this folder, an empty
# folder, which the user may enter, is mounted over this folder.
CLOSED_FOLDER = Path("/root")
MOST_PROCESSES = 4096
LABEL, STEM, KEY = "harness.results", "harness.stem", "harness.key"
NO_ENGINE = (
    "no container engine answers: apt-get install docker.io, start docker, or let DOCKER_HOST name one"
)


def default_image(device: str) -> str:
    """Return the name of the image for a device. The image's tag is a hash of the files that pin the packages. If one
    of these files changes, the name changes, and a new image must be built."""
    digest = hashlib.sha256()
    names = (ROOT / name for name in ("docker/Dockerfile", "venv.sh", "pyproject.toml"))
    for path in (*names, *sorted((ROOT / "requirements").glob("*.txt"))):
        digest.update(path.read_bytes())
    return f"harness:{'cuda' if device == 'cuda' else 'cpu'}-{digest.hexdigest()[:12]}"


@functools.cache
def engine() -> Any:
    """Return a client of the container engine that DOCKER_HOST names or, without DOCKER_HOST, of the system's engine.
    Raises Unavailable if no engine answers."""
    from docker.client import from_env
    from docker.errors import DockerException

    try:
        client = from_env()
        client.ping()
    except DockerException as error:
        raise Unavailable(NO_ENGINE) from error
    return client


@dataclass(frozen=True)
class DockerOptions:
    image: str | None = opt(
        None, "--image", "Image for --on docker; default: what ./run.sh image build makes.", metavar="NAME"
    )


class Docker(Place):
    """The place --on docker: a container engine, and one of its images. The constructor raises Unavailable if the
    engine or the image is missing."""

    uses_this_venv = False
    cli_options = DockerOptions

    @classmethod
    def of(cls, options: DockerOptions, call: PlaceCall) -> Docker:
        return cls(options.image or default_image(call.device))

    def __init__(self, image: str) -> None:
        self.client = engine()
        from docker.errors import ImageNotFound

        try:
            self.image = self.client.images.get(image)
        except ImageNotFound as error:
            raise Unavailable(
                f"no image {image} here: try ./run.sh image build, or --image with another"
            ) from error

    def context(self) -> dict[str, str]:
        return {"image": self.image.id}

    def launch(self, jobs: KeyedJobs, results: Path, folders: tuple[Path, ...], report: Report) -> list[Path]:
        return [self._launch(job, key, results.resolve(), folders, report) for job, key in jobs]

    def _launch(self, job: Job, key: str, results: Path, folders: tuple[Path, ...], report: Report) -> Path:
        """Run the job; return the path of its record.

        At the first KeyboardInterrupt the worker may still finish its record; at the second this call ends the
        container. Then KeyboardInterrupt is raised again.
        """
        with turn(job, report):
            ordered = OrderedJob(job, key, new_stem(results, job))
            self._clean_up_after_killed_calls(results, report)
            exchange = None if os.getuid() else ExchangeFolder(ordered.stem)
            try:
                settings = self._settings(ordered, folders, exchange)
                running = Running(self.client, settings, job, report)
            except Unavailable as error:
                if exchange:
                    exchange.close(key)
                return ordered.write_end(failures.ended("unavailable", "engine", str(error)))
            try:
                running.follow(ordered.order(folders))
            finally:
                path = self._complete(running, ordered, exchange)
        if running.stopped == "interrupt":
            raise KeyboardInterrupt
        return path

    def _clean_up_after_killed_calls(self, results: Path, report: Report) -> None:
        """Clean up after calls that were killed: remove the calls' ended containers and, if root made the calls, take
        the records that the containers left."""
        from docker.errors import APIError

        containers = self.client.containers.list(
            all=True, filters={"label": f"{LABEL}={results}"}, ignore_removed=True
        )
        container_of_stem = {container.labels.get(STEM): container for container in containers}
        ended_containers = [container for container in containers if container.status == "exited"]
        for exchange in container_user.leftover_exchanges(results):
            container, path = container_of_stem.get(exchange.stem.name), Path(f"{exchange.stem}.json")
            if container and container.status == "running":
                exchange.release()
                continue
            exchange.close(container.labels[KEY] if container else None)
            if exchange.refusal:
                report({"event": "warning", "text": f"{exchange.stem.name}: {exchange.refusal}"})
            elif container and path.exists():
                place_record(path, self._facts(container.attrs["Image"]), {}, None)
            ended_containers += [container] if container and container.status == "created" else []
        for container in ended_containers:
            with contextlib.suppress(APIError):  # another call has already removed the container
                container.remove()

    def _facts(self, image: str) -> dict[str, str]:
        """Return the facts of the place that the records of its jobs keep."""
        return {"on": "docker", "image": image, "engine": self.client.version()["Version"]}

    def _mounts(
        self, ordered: OrderedJob, folders: tuple[Path, ...], exchange: ExchangeFolder | None
    ) -> list[Mounted]:
        """Return the mounts of the job's container. If there is an exchange folder, open it, and mount it in place of
        the folder of results."""
        results, image = ordered.stem.parent, self.image.short_id.removeprefix("sha256:")
        mounts = job_mounts(ordered.job, results, folders, image)
        if not exchange:
            return mounts
        exchange.open()
        exchange_mount = Mounted(exchange.folder, results, False)
        mounts = [exchange_mount if mount.inside == results else mount for mount in mounts]
        return [*mounts, Mounted(exchange.path, exchange.path, False)]

    def _settings(
        self, ordered: OrderedJob, folders: tuple[Path, ...], exchange: ExchangeFolder | None
    ) -> dict[str, Any]:
        from docker.types import DeviceRequest, Mount

        job, mounts = ordered.job, self._mounts(ordered, folders, exchange)
        user, group = container_user.ids()
        tmpfs = {SCRATCH: "exec,mode=1777"}
        if any(CLOSED_FOLDER in mount.inside.parents for mount in mounts):
            tmpfs[str(CLOSED_FOLDER)] = f"uid={user},gid={group}"
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        limit, gpus = memory_limit(job), machine.gpu_uuids(job) if job.device == "cuda" else []
        return {
            "image": self.image.id,
            "command": [PYTHON, "-m", "harness.run.place"],
            "working_dir": str(ROOT),
            "mounts": [
                Mount(str(mount.inside), str(mount.outside), "bind", read_only=mount.is_read_only)
                for mount in mounts
            ],
            "user": f"{user}:{group}",
            "network_mode": "none",
            "init": True,
            "stdin_open": True,
            "environment": {"PYTHONPATH": str(ROOT), "HOME": SCRATCH},
            "labels": {LABEL: str(ordered.stem.parent), STEM: ordered.stem.name, KEY: ordered.key},
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "pids_limit": MOST_PROCESSES,
            "read_only": True,
            "tmpfs": tmpfs,
            "mem_limit": limit,
            "memswap_limit": limit,
            "shm_size": limit or machine.host_bytes() // 2,
            "cpuset_cpus": ",".join(map(str, cores)) or None,
            "device_requests": [DeviceRequest(device_ids=gpus, capabilities=[["gpu"]])] if gpus else None,
        }

    def _complete(self, running: Running, ordered: OrderedJob, exchange: ExchangeFolder | None) -> Path:
        """Add the engine's report on the container's end to the job's record; if the job left no record, write one that
        tells the job's end. Return the record's path."""
        state = running.end()
        if exchange:
            exchange.close(ordered.key)
        reported = {name: state.get(name) for name in ("OOMKilled", "ExitCode", "Error")}
        path, replacement = ordered.record, None
        end = failures.End(
            running.events.phase,
            state.get("ExitCode", 0),
            running.stopped,
            running.seconds,
            oom_kills=int(bool(reported["OOMKilled"])),
            owns_group=True,
            host_limit_bytes=memory_limit(ordered.job) or 0,
            log_tail=running.errors[-4096:],
        )
        if not path.exists():
            refused = exchange.refusal if exchange else ""
            failure = failures.ended("crash", "record", refused) if refused else failures.of_process(end)
            ordered.write_end(failure, running.events.fields())
        elif reported["OOMKilled"] and Record.read(path).status in ("killed", "crash"):
            replacement = failures.of_killed_child(end, Record.read(path).reason, "")
        evidence: JsonObject = {"docker": reported} if Record.read(path).status != "ok" else {}
        if exchange and exchange.other_names:
            evidence["left_in_container"] = exchange.other_names
        return place_record(path, self._facts(self.image.id), evidence, replacement)


class Mounted(NamedTuple):
    """A folder or file that a container sees. `outside`: its path on this machine. `inside`: its path in the container.
    `is_read_only`: True if the container may not write to it."""

    outside: Path
    inside: Path
    is_read_only: bool


def job_mounts(job: Job, results: Path, folders: tuple[Path, ...], image: str) -> list[Mounted]:
    """Return the mounts of a container of this job: the folders and files that the container sees.

    A mount's two paths differ only for .venv: as .venv the container sees a folder of this machine with files that were
    compiled in this image for the container's user. A folder that the job writes to is made if it is missing. Raises
    Unavailable if the container's user may not read or write a path that the job must read or write.
    """
    corpus, weights = job.workload.corpus, job.workload.weights
    files = [*(corpus_files(str(Path(corpus).resolve())) if corpus else [])]
    if weights:  # in the Hub's cache, files of weights are links to files elsewhere
        files += [Path(weights).resolve(), *weight_files.paths(weights)]
    folder_of_option = {
        name: Path(job.options[name]).resolve() for name in (*WRITTEN, *READ) if job.options.get(name)
    }
    written_folders = {folder_of_option[name] for name in WRITTEN if name in folder_of_option}
    read_paths = {*files, *folder_of_option.values()} - written_folders
    if Path(SCRATCH) in written_folders:
        raise Unavailable(
            f"--disk: expected a folder on the disk, got {SCRATCH}, which is in memory in a container; try --disk DIR"
        )
    if not os.getuid() and results in (ROOT, *folders, *folder_of_option.values()):
        raise Unavailable(
            f"--results: expected a folder of results alone, got {results}, which the job reads; try another folder"
        )
    patterns_of = {**dict.fromkeys(read_paths, ("**/*",)), **dict.fromkeys(folders, ("*.py",)), ROOT: CODE}
    for path, patterns in patterns_of.items():
        container_user.check_readable(path, patterns)
    compiled_folder = ROOT / ".venv" / f"image-{image}-{container_user.ids()[0]}"
    for folder in (*written_folders, compiled_folder):
        container_user.make_writable(folder)
    written_folders.add(results)
    read_only = {ROOT, *folders, *read_paths} - written_folders
    same_path_mounts = [
        Mounted(path, path, path in read_only) for path in (*sorted(read_only), *sorted(written_folders))
    ]
    return [*same_path_mounts, Mounted(compiled_folder.resolve(), ROOT / ".venv", False)]


def memory_limit(job: Job) -> int | None:
    """Return the container's memory limit in bytes, swap included: the worker's limit plus PARENT_BYTES; None if the
    worker has no limit."""
    limit_bytes = budgets.wall_bytes(job)
    return limit_bytes + PARENT_BYTES if limit_bytes else None


class Running:
    """A started container: reads its events, and ends it. The constructor raises Unavailable if the engine refuses the
    container."""

    def __init__(self, client: Any, settings: dict[str, Any], job: Job, report: Report) -> None:
        from docker.errors import APIError

        self.events, self.stopped, self.errors = Events(ORDERED, report), "", ""
        self.seconds = job.budget.seconds or deadline_seconds(job)
        self.container: Any = None
        try:
            self.container = client.containers.create(**settings)
            self.socket = self.container.attach_socket(
                params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            )
            self.container.start()
        except APIError as error:
            if self.container:
                self.container.remove(force=True)
            raise Unavailable(engine_error(error)) from error

    def follow(self, order: JsonObject) -> None:
        """Send the order to the container and read its events until the container has ended or end() must end it."""
        self.socket._sock.sendall((json.dumps(order) + "\n").encode())
        frames: queue.Queue[tuple[int, bytes]] = queue.Queue()
        threading.Thread(target=self._read, args=(frames,), daemon=True).start()
        deadline, stopping = time.monotonic() + self.seconds + START_SECONDS, 0.0
        while True:
            try:
                stream, data = frames.get(timeout=POLL_SECONDS)
                if stream == ALL_STREAMS_ENDED:
                    return
                if stream == STDOUT_STREAM:
                    self.events.feed(data)
                else:
                    self.errors += data.decode(errors="replace")
            except queue.Empty:
                now = time.monotonic()
                if stopping and now - stopping > 2 * GRACE_SECONDS:
                    return
                if not stopping and now > deadline:
                    self.stopped, stopping = "deadline", now
                    self.kill(signal.SIGINT)
            except KeyboardInterrupt:
                self.stopped = "interrupt"
                if stopping:
                    return
                stopping = time.monotonic()
                self.kill(signal.SIGINT)

    def _read(self, frames: queue.Queue[tuple[int, bytes]]) -> None:
        from docker.utils.socket import frames_iter

        with contextlib.suppress(OSError):
            for frame in frames_iter(self.socket, tty=False):
                frames.put(frame)
        frames.put((ALL_STREAMS_ENDED, b""))

    def kill(self, number: signal.Signals) -> None:
        from docker.errors import APIError

        with contextlib.suppress(APIError):  # the container has ended meanwhile
            self.container.kill(number.name)

    def end(self) -> JsonObject:
        """End the container if it still runs, remove it, and return the engine's report on its last state."""
        from docker.errors import APIError
        from requests.exceptions import ConnectionError, Timeout

        try:
            with contextlib.suppress(ConnectionError, Timeout):
                self.container.wait(timeout=0.1 if self.stopped else GRACE_SECONDS)
            self.container.reload()
            if self.container.status == "running":
                self.kill(signal.SIGKILL)
                self.container.wait(timeout=GRACE_SECONDS)
                self.container.reload()
            return dict(self.container.attrs["State"])
        except APIError as error:  # another process has removed the container
            return {"ExitCode": 137, "OOMKilled": False, "Error": engine_error(error)}
        finally:
            self.socket._response.close() if hasattr(self.socket, "_response") else self.socket.close()
            with contextlib.suppress(APIError):
                self.container.remove(force=True)


def engine_error(error: Any) -> str:
    """Return the engine's error as one line of text, with a remedy if one is known."""
    text = " ".join(str(error.explanation or error).split())
    if "could not select device driver" in text:
        return f"the engine hands out no GPU: install the NVIDIA container toolkit and restart it ({text})"
    return f"the engine says: {text}"
