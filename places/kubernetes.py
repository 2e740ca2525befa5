"""Runs jobs on Kubernetes. Each job is a JobSet or, if the cluster has no JobSets, an Indexed Job; its pods run
torchrun.

The pods share no volume. A pod gets this checkout's code and the order from a ConfigMap, and packages from the image.
The pod's log brings back events, logs and the record (places/shared/pods.py). The Job owns all objects that
were made for it, so Kubernetes deletes these objects together with the Job: at the end, at Ctrl-C or, if the call was
killed, an hour after the pods have ended.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
import math
import secrets
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from harness.base.checkout import ROOT, install_extra
from harness.base.foreign_file import NO_OTHER_FIELDS
from harness.base.json_object import JsonObject
from harness.core.job import Job
from harness.core.method import Unavailable
from harness.core.option import opt
from harness.core.record import new_stem
from harness.devices import machine
from harness.plan.run_time import deadline_seconds
from harness.run.place import KeyedJobs, OrderedJob, Place, PlaceCall, Report
from places.docker import PYTHON, READ, SCRATCH, WRITTEN, default_image, memory_limit
from places.shared.cluster import killed, num_nodes, place_options, unavailable
from places.shared.container_user import CODE, USER
from places.shared.kubernetes_api import CALL, JOBSET, LABEL, Cluster
from places.shared.pods import INDEX, MAIN, PodJob
from places.shared.torchrun_node import PORT

POLL_SECONDS = 0.5
WAIT_SECONDS = 600  # seconds that a job waits for nodes before it ends as unavailable
START_SECONDS = 600.0  # seconds that a pod may take beyond the job's own time, for imports and a compiler
# if Kubernetes gives no answer for this many seconds, the jobs are recorded as killed
SILENCE_SECONDS = 600.0
CANCEL_SECONDS = 90.0
GRACE_SECONDS = 60  # seconds from a pod's SIGTERM to its SIGKILL; torchrun gives the run 30 of these seconds
KEPT_SECONDS = 3600  # seconds for which ended Jobs are kept if the call that made them was killed
# ports of torchrun's store and of rank 0's agent; jobs may share them, because each pod has an address of its own
STORE_PORT, AGENT_PORT = 29400, 29401
# most bytes of packed code: code and order share a ConfigMap of at most 1 MiB
MOST_CODE_BYTES = 2**20 - 2**16
JOB = {"apiVersion": "batch/v1", "kind": "Job"}
ORDER, WORK = "/order", "/work"  # folders in a pod; the code is in WORK/harness
CODE_FILE, ORDER_FILE = "code.tar.gz", "order.json"
MOUNTS = {
    "order": ORDER,
    "work": WORK,
    "tmp": "/tmp",
    "shm": "/dev/shm",
}  # a pod's volumes, and where they appear
EMPTY_VOLUMES = [
    {"name": "work", "emptyDir": {}},
    {"name": "tmp", "emptyDir": {}},
    {"name": "shm", "emptyDir": {"medium": "Memory"}},
]
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


@dataclass(frozen=True)
class PodOptions:
    """The options of --kubernetes."""

    __pydantic_config__ = NO_OTHER_FIELDS
    namespace: str | None = None  # None: the kubeconfig's namespace
    image: str | None = None  # None: the name that ./run.sh image build gives
    nodes: PositiveInt | None = None
    gpus: PositiveInt | None = None  # GPUs of each node; None: on CUDA one for each rank or device, else 0
    cpus: PositiveInt | None = None  # CPUs of each node; None: no request
    node_selector: str | None = None  # LABEL=VALUE that a node must have; None: any node
    wait: NonNegativeInt | None = None  # seconds that a job may wait for nodes; None: WAIT_SECONDS


class PackedCode(NamedTuple):
    """An archive of this checkout's code and of folders of methods. `folders`: the paths in a pod, relative to WORK, at
    which the folders of methods are unpacked."""

    archive: bytes
    folders: list[str]


def pack_code(folders: tuple[Path, ...]) -> PackedCode:
    """Return this checkout's code and the Python files of the folders of methods. Raises ValueError if the archive is
    too large for a ConfigMap."""
    folder_names = [f"methods-{number}" for number in range(len(folders))]
    path_of_entry = {
        f"harness/{path.relative_to(ROOT)}": path for pattern in CODE for path in ROOT.glob(pattern)
    }
    for folder, name in zip(folders, folder_names, strict=True):
        path_of_entry |= {f"{name}/{path.relative_to(folder)}": path for path in folder.rglob("*.py")}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, path in sorted(path_of_entry.items()):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.add(path, name, recursive=False, filter=_anonymous)
    code = PackedCode(buffer.getvalue(), folder_names)
    if len(code.archive) > MOST_CODE_BYTES:
        raise ValueError(
            f"expected at most {MOST_CODE_BYTES} bytes of packed code, got {len(code.archive)}; try less in --methods"
        )
    return code


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an archive's entry without the file's owner, time and mode, so that equal code is packed into equal
    bytes."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def import_client() -> None:
    """If the package kubernetes is missing, install it into .venv. Raises Unavailable if this is not possible."""
    if importlib.util.find_spec("kubernetes"):
        return
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        raise Unavailable("--on kubernetes needs the package kubernetes: try pip install kubernetes")
    if not install_extra("kubernetes"):
        raise Unavailable(
            "--on kubernetes needs the package kubernetes, which could not be installed: see .venv.log"
        )


def files_named(job: Job) -> list[str]:
    """Return the options by which a job names files of this machine. --disk with the folder SCRATCH is not returned,
    because each pod has a SCRATCH of its own, where a method may keep its states."""
    path_of_option = {"--data": job.workload.corpus, "--weights": job.workload.weights}
    path_of_option |= {option: job.options.get(name) for name, option in (WRITTEN | READ).items()}
    return [
        option
        for option, path in path_of_option.items()
        if path and (option, path) != (WRITTEN["disk"], SCRATCH)
    ]


@dataclass(frozen=True)
class KubernetesSettings:
    kubernetes: tuple[str, ...] = opt(
        (),
        "--kubernetes",
        "Setting of --on kubernetes: namespace, image, nodes, gpus, cpus,"
        " node_selector or wait (seconds); or a YAML file of settings.",
        metavar="NAME=VALUE|FILE",
        is_repeated=True,
    )


class Kubernetes(Place):
    """The place --on kubernetes, with these options. `cluster` raises Unavailable if no cluster can be reached."""

    is_parallel, uses_this_venv = True, False
    cli_options = KubernetesSettings

    @classmethod
    def of(cls, options: KubernetesSettings, call: PlaceCall) -> Kubernetes:
        place = cls(place_options("kubernetes", options.kubernetes, PodOptions), call.device)
        if not call.is_dry_run:
            import_client()
            place.cluster  # noqa: B018 - connect now, before anything is planned
        return place

    @classmethod
    def asks_for_gpus(cls, options: KubernetesSettings) -> bool:
        return bool(place_options("kubernetes", options.kubernetes, PodOptions).get("gpus"))

    def __init__(self, options: JsonObject, device: str = "cpu") -> None:
        self.options = {"image": default_image(device), "wait": WAIT_SECONDS, "nodes": 1, **options}

    @functools.cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.options.get("namespace"))

    def context(self) -> dict[str, str]:
        """Return the image and the options that choose nodes. In a job's key these values replace the facts of the
        machine that submits the job."""
        node_options = {
            name: str(self.options.get(name)) for name in ("nodes", "gpus", "cpus", "node_selector")
        }
        replaced = dict.fromkeys(("cpu", "cores", "affinity", "gpu"), "")
        node_facts = {f"kubernetes_{name}": value for name, value in node_options.items()}
        return {**replaced, "image": self.options["image"], **node_facts}

    def draft(self, jobs: KeyedJobs, folders: tuple[Path, ...]) -> str:
        """Return the manifests as YAML, without the packed code. If no cluster answers, the manifests are those of
        Indexed Jobs."""
        import yaml

        try:
            has_jobsets, note = self.cluster.has_jobsets, ""
        except (Unavailable, ImportError) as error:
            why = "no client is installed here" if isinstance(error, ImportError) else error
            has_jobsets, note = False, f"# For a cluster without JobSet, because none was asked: {why}\n"
        code, document_texts = pack_code(folders), []
        for job, key in jobs:
            draft, labels = OrderedJob(job, key, Path("log")), {LABEL: "harness-draft", CALL: "draft"}
            for document in self.manifest(draft, code, labels, has_jobsets):
                if "binaryData" in document:
                    document["binaryData"] = {CODE_FILE: f"({len(code.archive)} bytes)"}
                # Copy the document without shared objects, which YAML would write as aliases.
                plain = json.loads(json.dumps(document))
                document_texts.append(yaml.safe_dump(plain, sort_keys=False))
        return note + "---\n".join(document_texts)

    def launch(self, jobs: KeyedJobs, results: Path, folders: tuple[Path, ...], report: Report) -> list[Path]:
        """Run the jobs; return the paths of their records.

        At a KeyboardInterrupt this call deletes the jobs, which may still finish their records. Then KeyboardInterrupt
        is raised again.
        """
        call, image, code = secrets.token_hex(5), self.options["image"], pack_code(folders)
        running: list[PodJob] = []
        is_interrupted = False
        try:
            for job, key in jobs:
                self._submit(OrderedJob(job, key, new_stem(results.resolve(), job)), code, call, running)
            if len(running) == 1:
                # events of several jobs would mix, so they are reported only for a single job
                running[0].report_to(report)
            self._wait(running, call, report, math.inf)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            stopped = [pod_job for pod_job in running if not pod_job.is_over]
            for pod_job in running:
                self._delete(pod_job, report)
            self._wait(stopped, call, report, CANCEL_SECONDS)
            paths = [pod_job.complete(is_interrupted and pod_job in stopped, image) for pod_job in running]
        if is_interrupted:
            raise KeyboardInterrupt
        return paths

    def _submit(self, ordered: OrderedJob, code: PackedCode, call: str, running: list[PodJob]) -> None:
        """Create the Kubernetes objects of a job, and append a PodJob for the job to `running`.

        If Kubernetes refuses one of the objects, take the PodJob off the list again, delete the job's objects and log,
        and raise the error. If the job names files of this machine, create no objects: the PodJob has ended already, as
        unavailable.
        """
        if option_names := files_named(ordered.job):
            running.append(PodJob(ordered, "", 1))
            text = f"pods see no folder of this machine: leave {' and '.join(option_names)} out, or try another --on"
            text += f"; --disk {SCRATCH} is each pod's own" if WRITTEN["disk"] in option_names else ""
            running[-1].end = unavailable(text, "file")
            return
        name = f"harness-{secrets.token_hex(5)}"
        documents = self.manifest(ordered, code, {LABEL: name, CALL: call}, self.cluster.has_jobsets)
        running.append(PodJob(ordered, name, self._num_nodes(ordered.job)))
        try:
            self.cluster.create(documents)
        except (ValueError, Unavailable):
            self.cluster.delete(running.pop().name)
            Path(f"{ordered.stem}.txt").unlink()
            raise

    def _delete(self, job: PodJob, report: Report) -> None:
        """Delete a job's objects. If Kubernetes does not delete them, report the command by which the user can delete
        them."""
        try:
            if job.name:
                job.is_deleted = True
                self.cluster.delete(job.name)
        except (ValueError, Unavailable) as error:
            report({"event": "warning", "text": f"{job.name} was not deleted: {error}; kubectl delete it"})

    def _num_nodes(self, job: Job) -> int:
        return num_nodes(job.world_size, self.options["nodes"], "--kubernetes nodes")

    def manifest(
        self, ordered: OrderedJob, code: PackedCode, labels: dict[str, str], has_jobsets: bool
    ) -> list[JsonObject]:
        """Return the documents of a job: the JobSet or Job, the ConfigMap with the order and the code and, for a Job
        with several pods, the Service by which the pods find one another. `labels`: the labels of all these objects;
        the label LABEL holds the job's name."""
        name, nodes = labels[LABEL], self._num_nodes(ordered.job)
        metadata = {"name": name, "labels": labels}
        pod = self._pod(ordered.job, name, nodes, has_jobsets)
        template = {"metadata": {"labels": labels}, "spec": pod}
        spec: JsonObject = {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"}
        spec |= {"backoffLimit": 0, "template": template}
        if has_jobsets:
            template = {"metadata": {"labels": labels}, "spec": spec}
            spec = {
                "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": template}],
                "failurePolicy": {"maxRestarts": 0},
                "network": {"enableDNSHostnames": True},
            }
        kind = {"apiVersion": "/".join(JOBSET), "kind": "JobSet"} if has_jobsets else JOB
        owner = {**kind, "metadata": metadata, "spec": {**spec, "ttlSecondsAfterFinished": KEPT_SECONDS}}
        order = {**ordered.order(()), "stem": f"results/{ordered.stem.name}", "folders": code.folders}
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "immutable": True,
            "data": {ORDER_FILE: json.dumps(order)},
            "binaryData": {CODE_FILE: base64.b64encode(code.archive).decode()},
        }
        headless = {"clusterIP": "None", "selector": {LABEL: name}, "publishNotReadyAddresses": True}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": headless}
        return [owner, config_map, *([service] if nodes > 1 and not has_jobsets else [])]

    def _pod(self, job: Job, name: str, nodes: int, has_jobsets: bool) -> JsonObject:
        """Return the spec of a job's pods. In each pod, the first container unpacks the code, and the second container
        runs torchrun."""
        seconds = (job.budget.seconds or deadline_seconds(job)) + START_SECONDS
        first = f"{name}-nodes-0-0.{name}" if has_jobsets else f"{name}-0.{name}"
        run = [PYTHON, "-m", "torch.distributed.run", "-m", "places.shared.torchrun_node"]
        limit = memory_limit(job)
        memory = {"memory": str(limit)} if limit else {}
        unpacking = {
            "name": "unpack",
            "command": [PYTHON, "-m", "tarfile", "-e", f"{ORDER}/{CODE_FILE}", WORK],
            **self._of_each_container(),
            "resources": {"requests": memory, "limits": memory},
        }
        resources = memory | self._cpus_and_gpus(job, nodes)
        training = {
            "name": MAIN,
            "command": [*run, f"{ORDER}/{ORDER_FILE}"],
            "env": _variables(name, nodes, first if nodes > 1 else "127.0.0.1"),
            **self._of_each_container(),
            "resources": {"requests": resources, "limits": resources},
        }
        spec: JsonObject = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": math.ceil(seconds),
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": POD_SECURITY,
            "initContainers": [unpacking],
            "containers": [training],
            "volumes": [{"name": "order", "configMap": {"name": name}}, *EMPTY_VOLUMES],
        }
        if nodes > 1 and not has_jobsets:  # a JobSet makes its own Service, and sets this name for its pods
            spec["subdomain"] = name
        if selector := self.options.get("node_selector"):
            label, _, value = selector.partition("=")
            spec["nodeSelector"] = {label: value}
        return spec

    def _of_each_container(self) -> JsonObject:
        return {
            "image": self.options["image"],
            "imagePullPolicy": "IfNotPresent",
            "workingDir": WORK,
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in MOUNTS.items()],
            "securityContext": CONTAINER_SECURITY,
        }

    def _cpus_and_gpus(self, job: Job, nodes: int) -> dict[str, str]:
        """Return the CPUs and GPUs that the training on one node requests, by Kubernetes' names of these resources."""
        gpus = self.options.get("gpus", machine.num_gpus(job) // nodes if job.device == "cuda" else 0)
        resources = {"cpu": str(self.options["cpus"])} if "cpus" in self.options else {}
        return resources | ({"nvidia.com/gpu": str(gpus)} if gpus else {})

    def _wait(self, jobs: list[PodJob], call: str, report: Report, seconds: float) -> None:
        """Wait at most `seconds` until the jobs have ended. Report each change in the states of their pods."""
        reported_text, began = "", time.monotonic()
        answered = began
        while time.monotonic() - began < seconds:
            running_jobs = [pod_job for pod_job in jobs if not pod_job.is_over]
            if not running_jobs:
                return
            try:
                pods = self.cluster.pods(call)
                answered = time.monotonic()
            except (ValueError, Unavailable) as error:
                if time.monotonic() - answered > SILENCE_SECONDS:
                    for pod_job in running_jobs:
                        pod_job.end = killed(pod_job.events.phase, str(error))
                time.sleep(POLL_SECONDS)
                continue
            for pod_job in running_jobs:
                pod_job.take(
                    pods.get(pod_job.name, []), self.cluster.log, self.options["image"], self.options["wait"]
                )
            phases = [pod.phase for pod_job in jobs for pod in pods.get(pod_job.name, [])]
            text = ", ".join(f"{phases.count(name)} {name.lower()}" for name in sorted(set(phases)))
            if text and text != reported_text:
                reported_text = text
                report({"event": "wait", "text": f"pods under Kubernetes: {text}"})
            time.sleep(POLL_SECONDS)


def _variables(name: str, nodes: int, first_address: str) -> list[JsonObject]:
    """Return the environment variables of a job's pods, as Kubernetes' JSON; by them torchrun finds the job's nodes.
    `first_address`: address of the first node."""
    variables = {
        "PYTHONPATH": f"{WORK}/harness",
        "PYTHONSAFEPATH": "1",
        "HOME": "/tmp",
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": first_address,
        "PET_MASTER_PORT": str(STORE_PORT),
        PORT: str(AGENT_PORT),
        "PET_RDZV_ID": name,
    }
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    variable_entries = [{"name": variable, "value": value} for variable, value in variables.items()]
    return [*variable_entries, {"name": "PET_NODE_RANK", "valueFrom": index}]
