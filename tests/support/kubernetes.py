"""A Kubernetes of the tests' own: its API is kmock's, its controllers and nodes are here.

A pod's containers are processes of this machine, with the commands and variables of the manifest. Folders stand for its
volumes, this Python for the image's, loopback for the names of pods, and free ports for theirs. What a test plants
for a node's pod, a status and a log, is shown in place of a process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil

from places.docker import PYTHON
from places.shared.pods import INDEX, MAIN
from tests.support.packages import missing, still_running
from tests.support.ranks import free_ports

TURN_SECONDS = 0.05
NAMESPACE = "default"
PODS, CONFIG_MAPS, SERVICES, JOBS, JOBSETS = (
    "v1/pods",
    "v1/configmaps",
    "v1/services",
    "batch/v1/jobs",
    "jobset.x-k8s.io/v1alpha2/jobsets",
)


class LoopbackPod:
    """A pod, and the process of the container that runs."""

    def __init__(self, job: str, index: int, spec: dict[str, Any]) -> None:
        self.job, self.index, self.spec = job, index, spec
        self.lines: list[bytes] = []
        self.process: asyncio.subprocess.Process | None = None
        self.is_stopping, self.has_ended = False, False


class LoopbackCluster:
    """An API server, its controllers and its nodes. `planted`: by node, a status and log lines in a process's place."""

    def __init__(self, folder: Path, has_jobsets: bool) -> None:
        import kmock

        self.folder, self.planted = folder, dict[int, tuple[dict[str, Any], list[bytes]]]()
        self.kmock, self.handler = kmock, kmock.KubernetesEmulator()
        self.kinds = [JOBS, *([JOBSETS] if has_jobsets else [])]
        for resource in (PODS, CONFIG_MAPS, SERVICES, *self.kinds):
            self.handler.resources[resource] = {}
        for resource in self.kinds:
            self.handler["post", kmock.resource(resource)] << self._create
        self.handler["get", kmock.resource(PODS), kmock.subresource("log")] << self._log
        self.pods: dict[str, LoopbackPod] = {}
        self.ports: dict[tuple[str, str], str] = {}
        self.made: set[str] = set()
        self.numbers = itertools.count(1)
        self.loop = asyncio.new_event_loop()
        self.tasks: list[asyncio.Task[None]] = []

    # ---- For tests, from their thread

    def start(self) -> str:
        """Return the address of the API."""
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        return str(asyncio.run_coroutine_threadsafe(self._start(), self.loop).result())

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    def left(self) -> list[str]:
        """Return the names of all objects that are there, once the pods of deleted Jobs have ended."""

        async def turns() -> list[str]:
            self._turn()
            while any(pod.job not in self._of(*self.kinds) for pod in self.pods.values()):
                await asyncio.sleep(TURN_SECONDS)
                self._turn()
            return [f"{resource.plural} {name}" for resource, name, _ in self._objects()]

        return asyncio.run_coroutine_threadsafe(turns(), self.loop).result()

    # ---- API

    async def _start(self) -> Any:
        await self.handler.__aenter__()
        self.server = self.kmock.Server(self.handler)
        await self.server.__aenter__()
        self.tasks.append(asyncio.create_task(self._control()))
        return self.server.url

    async def _stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        for pod in self.pods.values():
            await self._kill(pod)
        await self.server.__aexit__(None, None, None)
        await self.handler.__aexit__(None, None, None)

    def _objects(self) -> list[tuple[Any, str, Any]]:
        return [(key[0], key[2], each) for key, each in self.handler.objects.items() if not each.deleted]

    def _of(self, *resources: str) -> dict[str, Any]:
        kinds = [self.kmock.resource(each) for each in resources]
        return {name: each for resource, name, each in self._objects() if resource in kinds}

    async def _create(self, request: Any) -> Any:
        """As the server does, give a new object its uid."""
        made = self.handler.objects[request.resource, NAMESPACE, request.data["metadata"]["name"]]
        made.patch({"metadata": {"uid": f"uid-{next(self.numbers)}"}})
        return made.raw

    async def _log(self, request: Any) -> AsyncIterator[bytes]:
        if request.name not in self.pods:
            raise self.kmock.KubernetesObjectNotFoundError
        pod, told = self.pods[request.name], 0
        yield b""
        while not (pod.has_ended and told == len(pod.lines)):
            for line in pod.lines[told:]:
                yield line
                told += 1
            await asyncio.sleep(TURN_SECONDS)

    # ---- Controllers

    async def _control(self) -> None:
        while True:
            self._turn()
            await asyncio.sleep(TURN_SECONDS)

    def _turn(self) -> None:
        """Make pods of new Jobs, end those of failed ones, and remove what belonged to those that are gone."""
        jobs = self._of(*self.kinds)
        for name, job in jobs.items():
            if name not in self.made:
                self.made.add(name)
                self._make_pods(name, job.raw)
        uids = {job.raw["metadata"].get("uid") for job in jobs.values()}
        for each in self._of(CONFIG_MAPS, SERVICES).values():
            owners = each.raw["metadata"].get("ownerReferences", ())
            if owners and owners[0]["uid"] not in uids:
                each.delete()
        for name, pod in list(self.pods.items()):
            is_gone = pod.job not in jobs
            if is_gone or self._of(PODS)[name].raw["status"]["phase"] == "Failed":
                self._stop_pods(pod.job, is_gone)

    def _make_pods(self, name: str, job: dict[str, Any]) -> None:
        spec, stem = job["spec"], name
        if "replicatedJobs" in spec:
            (replicated,) = spec["replicatedJobs"]
            spec, stem = replicated["template"]["spec"], f"{name}-{replicated['name']}-0"
        for index in range(spec["completions"]):
            pod = LoopbackPod(name, index, spec["template"]["spec"])
            self.pods[f"{stem}-{index}"] = pod
            metadata = {
                "name": f"{stem}-{index}",
                "namespace": NAMESPACE,
                "annotations": {INDEX: str(index)},
                "labels": spec["template"]["metadata"]["labels"],
            }
            document = {
                "metadata": metadata,
                "spec": {"nodeName": f"node-{index}"},
                "status": {"phase": "Pending"},
            }
            self.handler.objects[PODS, NAMESPACE, metadata["name"]] = document
            self.tasks.append(asyncio.create_task(self._run(metadata["name"], pod)))

    def _stop_pods(self, job: str, is_gone: bool) -> None:
        """Stop what runs of a job; where the job is gone, its pods go when they have ended."""
        for name, pod in list(self.pods.items()):
            if pod.job == job and pod.has_ended and is_gone:
                self._of(PODS)[name].delete()
                del self.pods[name]
            elif pod.job == job and not pod.has_ended and not pod.is_stopping:
                pod.is_stopping = True
                if pod.index in self.planted:
                    pod.has_ended = True
                elif pod.process and pod.process.returncode is None:
                    pod.process.send_signal(signal.SIGTERM)

    # ---- Nodes

    def _tell(self, name: str, status: dict[str, Any]) -> None:
        if name in self._of(PODS):
            self._of(PODS)[name].patch({"status": status})

    async def _run(self, name: str, pod: LoopbackPod) -> None:
        if pod.index in self.planted:
            status, pod.lines = self.planted[pod.index]
            pod.has_ended = status["phase"] in ("Succeeded", "Failed")
            self._tell(name, status)
            return
        volumes = [(each, self.folder / name / each["name"]) for each in pod.spec["volumes"]]
        while not all(self._mount(each, folder) for each, folder in volumes):
            if pod.is_stopping:
                pod.has_ended = True
                return
            await asyncio.sleep(TURN_SECONDS)  # until what it mounts is there
        code = 0
        for container in (*pod.spec["initContainers"], *pod.spec["containers"]):
            if not code and not pod.is_stopping:
                code = await self._run_container(name, pod, container)
        ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed"}
        status = {"name": MAIN, "state": {"terminated": ended}}
        self._tell(name, {"phase": "Failed" if code else "Succeeded", "containerStatuses": [status]})
        pod.has_ended = True

    def _mount(self, volume: dict[str, Any], folder: Path) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" not in volume:
            return True
        found = self._of(CONFIG_MAPS).get(volume["configMap"]["name"])
        if found is None:
            return False
        for name, text in found.raw["data"].items():
            (folder / name).write_text(text)
        for name, data in found.raw["binaryData"].items():
            (folder / name).write_bytes(base64.b64decode(data))
        return True

    async def _run_container(self, name: str, pod: LoopbackPod, container: dict[str, Any]) -> int:
        mounts = {
            each["mountPath"]: str(self.folder / name / each["name"]) for each in container["volumeMounts"]
        }

        def here(text: str) -> str:
            for there, folder in mounts.items():
                if text == there or text.startswith(f"{there}/"):
                    return folder + text.removeprefix(there)
            return sys.executable if text == PYTHON else text

        own = dict.fromkeys(("TMPDIR", "HARNESS_LOCKS"), mounts["/tmp"])  # each pod has a machine of its own
        environment = {"PATH": os.environ["PATH"], **own}
        for each in container.get("env", ()):
            value = each.get("value")
            if value is None:
                assert each["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{INDEX}']"
                value = str(pod.index)
            environment[each["name"]] = self._addressed(pod, each["name"], here(value))
        command = [here(word) for word in container["command"]]
        pod.process = await asyncio.create_subprocess_exec(
            *command,
            cwd=here(container["workingDir"]),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=2**28,
            start_new_session=True,
        )
        if pod.is_stopping:  # since the process was ordered
            pod.process.send_signal(signal.SIGTERM)
        if container["name"] == MAIN:
            running = {"name": MAIN, "state": {"running": {"startedAt": "now"}}}
            self._tell(name, {"phase": "Running", "containerStatuses": [running]})
        reading = [
            asyncio.create_task(self._read(pod, stream))
            for stream in (pod.process.stdout, pod.process.stderr)
        ]
        code = await pod.process.wait()
        await self._kill(pod)
        await asyncio.gather(*reading)
        return code

    def _addressed(self, pod: LoopbackPod, variable: str, value: str) -> str:
        """Return a variable's value on this machine: names of pods are those of the Job's Service or of the JobSet."""
        names = [f"{pod.job}-nodes-0-0.{pod.job}"] if pod.job in self._of(*self.kinds[1:]) else []
        if pod.spec.get("subdomain") in self._of(SERVICES):
            names.append(f"{pod.job}-0.{pod.spec['subdomain']}")
        if variable.endswith("_PORT"):
            if (pod.job, value) not in self.ports:
                self.ports[pod.job, value] = str(free_ports(1)[0])
            return self.ports[pod.job, value]
        return "127.0.0.1" if value in names else value

    async def _read(self, pod: LoopbackPod, stream: Any) -> None:
        while line := await stream.readline():
            pod.lines.append(line)

    async def _kill(self, pod: LoopbackPod) -> None:
        """Kill what is left of a container, as its end does."""
        for name, each in self.pods.items():
            if each is pod:
                for pid in still_running(str(self.folder / name)):
                    with contextlib.suppress(psutil.Error):
                        psutil.Process(pid).kill()
        if pod.process:
            await pod.process.wait()


def need_package(*names: str) -> None:
    """Skip the test where one of these modules is not installed."""
    for name in names:
        if not importlib.util.find_spec(name):
            missing(f"no package {name} here: ./test.sh installs it")


@contextlib.contextmanager
def loopback_cluster(folder: Path, has_jobsets: bool = False) -> Iterator[LoopbackCluster]:
    """A cluster, which the kubeconfig in its folder names. Nothing is left running."""
    need_package("kmock", "kubernetes")
    folder.mkdir()
    cluster = LoopbackCluster(folder, has_jobsets)
    address = cluster.start().rstrip("/")
    try:
        named = {"name": "tests"}
        context = {"cluster": "tests", "user": "tests", "namespace": NAMESPACE}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "users": [{**named, "user": {}}],
            "clusters": [{**named, "cluster": {"server": address}}],
            "contexts": [{**named, "context": context}],
        }
        (folder / "kubeconfig").write_text(json.dumps(kubeconfig))
        yield cluster
    finally:
        cluster.stop()
