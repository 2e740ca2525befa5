"""Jobs on a Kubernetes of the tests' own, by its real client: their manifests, records and ends."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.base.checkout import ROOT
from harness.core import method
from harness.core.job import Budget, Job
from harness.core.record import Record, read_all
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from harness.run.place import OrderedJob
from places.docker import memory_limit
from places.kubernetes import CALL, LABEL, Kubernetes, PackedCode, files_named, pack_code
from places.shared.pods import PodLog, end_of_pod, state_of
from places.shared.torchrun_node import meet
from tests.run.test_ranks import SHARDED
from tests.support import cli, tiny
from tests.support.configured import configured
from tests.support.kubernetes import LoopbackCluster, loopback_cluster, need_package
from tests.support.packages import still_running
from tests.support.tiny import TINY

pytestmark = pytest.mark.timeout(600)
WORDS = [*tiny.WORDS, "--on", "kubernetes"]
ONE = Job("resident", TINY, steps=4, warmup=1)
END = {"name": "job", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
STARTED = [json.dumps({"event": "step", "step": 3, "loss": 4.5, "seconds": 0.1}).encode() + b"\n"]
# The status of a pod, as Kubernetes tells it; the end's status; and words of its line.
ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "memory": ({"phase": "Failed", "containerStatuses": [END]}, "oom-host", "killed by the kernel"),
    "evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
        "killed",
        "Evicted: The node was low on resource: memory.",
    ),
    "preempted": (
        {
            "phase": "Failed",
            "conditions": [
                {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": "PreemptionByScheduler",
                    "message": "for another",
                }
            ],
        },
        "killed",
        "PreemptionByScheduler",
    ),
    "late": ({"phase": "Failed", "reason": "DeadlineExceeded"}, "timeout", "--timeout"),
    "no node": (
        {
            "phase": "Pending",
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                }
            ],
        },
        "unavailable",
        "3 Insufficient nvidia.com/gpu.",
    ),
    "no image": (
        {
            "phase": "Pending",
            "initContainerStatuses": [
                {
                    "name": "unpack",
                    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                }
            ],
        },
        "unavailable",
        "the image harness:1: ImagePullBackOff: not found; try --kubernetes image=NAME",
    ),
    "no Python": (
        {
            "phase": "Failed",
            "initContainerStatuses": [
                {"name": "unpack", "state": {"terminated": {"exitCode": 128, "reason": "StartError"}}}
            ],
        },
        "unavailable",
        "StartError",
    ),
    "crash": (
        {
            "phase": "Failed",
            "containerStatuses": [
                {"name": "job", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
            ],
        },
        "crash",
        "exit 1 without a result",
    ),
}


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopbackCluster]:
    with loopback_cluster(tmp_path / "cluster", request.param) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "cluster" / "kubeconfig"))
        yield cluster
    assert still_running(str(tmp_path / "cluster")) == []


def of_kind(name: str) -> pytest.MarkDecorator:
    """On a cluster with Jobs alone, or with JobSets; both are servers."""
    jobset = pytest.param(name == "jobset", id=name, marks=pytest.mark.heavy)
    return pytest.mark.parametrize("cluster", [jobset], indirect=True)


only_jobs, only_jobsets = of_kind("job"), of_kind("jobset")


def place(**options: Any) -> Kubernetes:
    return Kubernetes({"image": "harness:1", **options})


def pod(status: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "pod", "annotations": {}}, "status": status}


def manifests(job: Job, has_jobsets: bool = False, **options: Any) -> dict[str, Any]:
    """The documents of a job, by their kinds."""
    draft, labels = OrderedJob(job, "key", Path("log")), {LABEL: "harness-1", CALL: "1"}
    documents = place(**options).manifest(draft, PackedCode(b"code", []), labels, has_jobsets)
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize("how", ENDS)
def test_an_end_is_named_by_the_state_of_its_pod(how: str) -> None:
    status, expected, message = ENDS[how]
    end = end_of_pod(state_of(pod(status)), "step 3", 2**30, "harness:1")
    assert end.status == expected and message in end.reason, end


@pytest.mark.parametrize("has_jobsets", [False, True])
def test_the_manifest_is_valid_for_kubernetes(has_jobsets: bool) -> None:
    need_package("kubernetes_validate")
    import kubernetes_validate

    budget = Budget(host_bytes=2**30, device_bytes=2**30, seconds=60)
    job = dataclasses.replace(SHARDED, device="cuda", budget=budget)
    documents = manifests(job, has_jobsets, nodes=2, cpus=4, node_selector="gpu.product=H100")
    assert documents.keys() == ({"JobSet", "ConfigMap"} if has_jobsets else {"Job", "ConfigMap", "Service"})
    if has_jobsets:  # its own schema is not among them; of its parts the Job is
        (replicated,) = documents.pop("JobSet")["spec"]["replicatedJobs"]
        documents["Job"] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "job"},
            **replicated["template"],
        }
    for document in documents.values():
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_a_pod_has_the_jobs_memory_a_gpu_for_each_of_its_ranks_and_no_rights() -> None:
    job = dataclasses.replace(
        SHARDED, device="cuda", budget=Budget(host_bytes=2**30), options={"world_size": 4}
    )
    spec = manifests(job, nodes=2)["Job"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"memory": str(memory_limit(job)), "nvidia.com/gpu": "2"}
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_has_a_gpu_for_each_device_of_its_job() -> None:
    job = dataclasses.replace(SHARDED, device="cuda", options={"num_devices": 2})
    (container,) = manifests(job)["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    ("has_jobsets", "nodes", "address"),
    [
        (False, 1, "127.0.0.1"),
        (False, 2, "harness-1-0.harness-1"),
        (True, 2, "harness-1-nodes-0-0.harness-1"),
    ],
)
def test_pods_meet_at_the_first_ones_name(has_jobsets: bool, nodes: int, address: str) -> None:
    documents = manifests(SHARDED, has_jobsets, nodes=nodes)
    spec = (
        documents["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        if has_jobsets
        else documents["Job"]["spec"]
    )
    (container,) = spec["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (spec["completions"], values["PET_NNODES"], values["PET_MASTER_ADDR"]) == (
        nodes,
        str(nodes),
        address,
    )


def test_a_pod_gets_the_harness_and_all_methods(tmp_path: Path) -> None:
    folder = tiny.write_ending(tmp_path, "pass")
    archive, folders = pack_code((folder,))
    with tarfile.open(fileobj=io.BytesIO(archive)) as code:
        names = set(code.getnames())
    assert folders == ["methods-0"] and {"methods-0/ending.py", "harness/models.yaml"} <= names
    houses = ("harness", "places", "methods")
    code = [path for name in houses for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".cpp")]
    assert code and {f"harness/{path.relative_to(ROOT)}" for path in code} <= names


def test_torchruns_variables_name_the_nodes_and_not_a_rank() -> None:
    torchruns = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "5",
        "TORCHELASTIC_RUN_ID": "id",
        "ROLE_RANK": "1",
        "HOME": "/tmp",
    }
    assert meet(torchruns) == {
        "HOME": "/tmp",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "6",
        "PET_RDZV_ID": "id",
    }
    with pytest.raises(ValueError, match="expected one process per node, got 2; try --nproc-per-node 1"):
        meet({**torchruns, "LOCAL_WORLD_SIZE": "2"})


def test_a_dry_run_prints_manifests_and_needs_no_cluster(tmp_path: Path) -> None:
    call = ["-m", "fsdp2-offload", "--ranks", "2", *WORDS[2:], "--kubernetes", "nodes=2", "--dry-run"]
    done = cli.run(*call, "--results", tmp_path, KUBECONFIG=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    job, files, service = yaml.safe_load_all(done.stdout)
    assert [document["kind"] for document in (job, files, service)] == ["Job", "ConfigMap", "Service"]
    assert (
        json.loads(files["data"]["order.json"])["job"]["method"] == "fsdp2-offload"
        and job["spec"]["completions"] == 2
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dry-run"], "--dry-run: expected --on kubernetes"),
        (["--kubernetes", "nodes=2"], "--kubernetes needs --on kubernetes"),
        (["--on", "kubernetes", "--kubernetes", "nodes=none"], "nodes: expected a valid integer, got 'none'"),
        (["--on", "kubernetes", "--kubernetes", "image=a b"], "image: expected a name, number or path"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    done = cli.run(*tiny.WORDS, *options, "--results", tmp_path)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_log_goes_on_after_its_last_line_where_a_connection_broke() -> None:
    need_package("kubernetes")
    from urllib3.exceptions import ProtocolError

    class Response:
        def __init__(self, *parts: bytes) -> None:
            self.parts = parts

        def stream(self, size: int) -> Iterator[bytes]:
            yield from self.parts
            if len(self.parts) == 2:
                raise ProtocolError("the connection broke")

    answers = iter([Response(b"one\ntw", b"o\nthr"), Response(b"one\n", b"two\nthree\n", b"four\n")])
    log = PodLog(lambda: next(answers))
    for _ in range(2):
        log.follow(True)
        assert log.thread
        log.thread.join()
    assert log.is_whole and [log.lines.get() for _ in range(4)] == [b"one", b"two", b"three", b"four"]
    assert log.lines.empty()


@pytest.mark.parametrize("how", ENDS)
@only_jobs
def test_a_job_ends_as_its_pod_did_and_is_deleted(cluster: LoopbackCluster, tmp_path: Path, how: str) -> None:
    status, expected, message = ENDS[how]
    has_log = "containerStatuses" in status
    cluster.planted[0] = status, STARTED if has_log else []
    (path,) = place(wait=0).launch([(ONE, "key")], tmp_path, (), lambda event: None)
    record = Record.read(path)
    assert record.status == expected and message in record.reason, record.reason
    assert record.losses == ([4.5] if has_log else []) and record.machine["nodes"] == "node-0"
    assert record.evidence["kubernetes"][0]["phase"] == status["phase"]
    assert cluster.left() == []


@only_jobsets
def test_of_two_pods_the_one_that_was_killed_names_the_end(cluster: LoopbackCluster, tmp_path: Path) -> None:
    """The other one lost it, and told so in its record."""
    job = resolve(SHARDED)[0]
    lost = Record(job, "key", "crash", reason="RuntimeError: Connection closed by peer at step 3").to_dict()
    exited = {"name": "job", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    line = json.dumps({"event": "record", "record": lost}).encode() + b"\n"
    cluster.planted[0] = {"phase": "Failed", "containerStatuses": [exited]}, [*STARTED, line]
    cluster.planted[1] = {"phase": "Failed", "containerStatuses": [END]}, []
    (path,) = place(nodes=2).launch([(job, "key")], tmp_path, (), lambda event: None)
    assert Record.read(path).status == "oom-host" and cluster.left() == []


@only_jobs
def test_a_record_of_another_job_is_refused(cluster: LoopbackCluster, tmp_path: Path) -> None:
    line = json.dumps({"event": "record", "record": Record(ONE, "other", "ok").to_dict()}).encode() + b"\n"
    ended = {"name": "job", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    cluster.planted[0] = {"phase": "Succeeded", "containerStatuses": [ended]}, [line]
    (path,) = place().launch([(ONE, "key")], tmp_path, (), lambda event: None)
    record = Record.read(path)
    assert record.status == "crash" and "expected a record with key key, got other" in record.reason


@only_jobs
def test_a_pod_writes_to_its_own_logs_alone(cluster: LoopbackCluster, tmp_path: Path) -> None:
    texts = [
        {"event": "text", "name": name, "text": "told\n"} for name in ("../planted.txt", "build_resident.txt")
    ]
    ended = {"name": "job", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    lines = [json.dumps(text).encode() + b"\n" for text in texts]
    cluster.planted[0] = {"phase": "Failed", "containerStatuses": [ended]}, lines
    results = tmp_path / "results"
    results.mkdir()
    place().launch([(ONE, "key")], results, (), lambda event: None)
    assert (results / "build_resident.txt").read_text() == "told\n" and not (
        tmp_path / "planted.txt"
    ).exists()


@only_jobs
def test_what_kubernetes_refuses_is_one_line_and_leaves_nothing(
    cluster: LoopbackCluster, tmp_path: Path
) -> None:
    refused = {"kind": "Status", "code": 403, "message": "harness is forbidden: exceeded quota"}
    cluster.handler["post", cluster.kmock.resource("v1/configmaps")] << 403 << refused
    done = cli.run(*WORDS, "--results", tmp_path / "results")
    assert done.returncode == 2 and "exceeded quota" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not list((tmp_path / "results").glob("log*"))
    assert [name for name in cluster.left() if "configmaps" not in name] == []


@only_jobs
def test_a_cluster_that_does_not_answer_is_unavailable(cluster: LoopbackCluster, tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    kubeconfig = (tmp_path / "cluster" / "kubeconfig").read_text()
    config.write_text(kubeconfig.replace(str(cluster.server.url).rstrip("/"), "http://127.0.0.1:1"))
    for file in (config, tmp_path / "none"):
        done = cli.run(*WORDS, "--results", tmp_path / "results", KUBECONFIG=str(file))
        assert done.returncode == 7 and "no Kubernetes answers" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("job", "option"),
    [
        (dataclasses.replace(ONE, workload=dataclasses.replace(TINY, corpus="/text")), "--data"),
        (dataclasses.replace(ONE, workload=configured("llama", weights="/model")), "--weights"),
        (Job("varuna", TINY, {"resume": "/checkpoints"}), "--resume"),
        (Job("varuna", TINY, {"checkpoint": "/checkpoints"}), "--option checkpoint"),
        (Job("zero-infinity-nvme", TINY, {"disk": "/scratch"}), "--disk"),
    ],
    ids=["data", "weights", "resume", "checkpoint", "disk"],
)
def test_files_of_this_machine_are_refused(tmp_path: Path, job: Job, option: str) -> None:
    (path,) = place().launch([(job, "key")], tmp_path, (), lambda event: None)
    record = Record.read(path)
    assert record.status == "unavailable" and f"leave {option} out" in record.reason


def test_states_on_the_disk_may_lie_in_a_pods_own_folder() -> None:
    assert files_named(Job("zero-infinity-nvme", TINY, {"disk": "/tmp"})) == []


@only_jobs
def test_two_ranks_in_two_pods_train_as_the_reference_does(cluster: LoopbackCluster, tmp_path: Path) -> None:
    """torchrun starts each pod's part, by the code that was sent."""
    events: list[dict[str, Any]] = []
    results = tmp_path / "results"
    results.mkdir()
    (record,) = Sweep(results, (), events.append, place=place(nodes=2)).run([resolve(SHARDED)])
    assert record.gate.verdict == "tolerance", record.gate.text or record.reason
    assert record.machine["nodes"] == "node-0,node-1" and [
        rank["node"] for rank in record.machine["ranks"]
    ] == [0, 1]
    assert {event["step"] for event in events if event["event"] == "step"} == set(range(1, 9))
    assert record.software["source"] == method.source_hash("fsdp2-offload")
    (log,) = results.glob("log_fsdp2-offload*.txt")
    assert log.read_text().splitlines()[-1].startswith("end")
    assert cluster.left() == [] and {path.name.split("_")[0] for path in results.iterdir()} == {"log"}


@only_jobsets
def test_an_interrupt_deletes_the_job_and_keeps_what_was_measured(
    cluster: LoopbackCluster, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    run = cli.start(*WORDS, "--steps", "30000", "--results", results, stdout=subprocess.PIPE)
    cli.wait_for_steps(results)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate()
    assert run.returncode == 130 and "pods under Kubernetes: 1 running" in output
    (record,) = read_all(results)[0].values()
    assert record.status == "interrupted" and record.losses and cluster.left() == []
