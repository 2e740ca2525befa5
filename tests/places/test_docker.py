"""Jobs in containers of a real engine: the same training, and how it ends there."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from harness.core.job import Budget, Job
from harness.core.method import Unavailable
from harness.core.record import Record, read_all
from harness.jobs.sweep import Report, Sweep
from harness.plan.fit import resolve
from harness.run.place import OrderedJob
from places import docker as container
from places.docker import Docker
from places.shared import container_user
from places.shared.container_user import ExchangeFolder
from places.shared.docker_image import image
from tests.devices.test_budgets import with_gpus
from tests.support import cli
from tests.support.engine import BASE, FIXED_FOLDERS, IMAGE, PACKAGES, docker, in_memory, start, stop
from tests.support.packages import need, still_running
from tests.support.tiny import SIZES, TINY, WORDS, write_compiling, write_ending, write_endless
from tests.support.until import until

# Files with their sums, but for what the image makes beside them.
LIST = "find . -type f ! -path './.venv*' ! -path './results/*' | sort | xargs sha256sum"
# What a container may leave in its record's place, by what the refusal says.
PLANTED: dict[str, Callable[[Path], object]] = {
    "a regular file": os.mkfifo,
    "2 hard links": lambda path: (path.with_name("log").touch(), os.link(path.with_name("log"), path)),
    "at most 268435456 bytes": lambda path: (path.touch(), os.truncate(path, 2**28 + 1)),
    "Expecting property name": lambda path: path.write_text("{" * 9),
    "expected a record with key key, got other": lambda path: Record(
        Job("ending", TINY), "other", "ok"
    ).write(path),
}

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


@pytest.fixture
def engine(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    container.engine.cache_clear()
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    return docker_engine


def run_there(
    tmp_path: Path, line: str, budget: Budget | None = None, report: Report | None = None
) -> Record:
    """The record of a method that does this after its first step."""
    methods = write_ending(tmp_path, line)
    job = Job("ending", TINY, budget=budget or Budget(), steps=3, warmup=1)
    return Sweep(tmp_path, (methods,), report, place=Docker(IMAGE)).run([resolve(job, (methods,))])[0]


def test_the_image_alone_trains_without_network_and_without_root(engine: str) -> None:
    line = "./run.sh -m stronghold -l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 6 && id -u"
    command = docker(engine, "run", "--rm", "--network", "none", IMAGE, "bash", "-c", line)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "gate passed (exact)" in done.stdout, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1000"


def test_dockers_own_build_sends_a_plain_checkout_as_image_build_does(engine: str) -> None:
    """By its first stage, which holds what was sent: the same files as in the image."""
    project = Path(engine.removeprefix("unix://")).parent / "project"
    arguments = [
        "build",
        "-q",
        "-f",
        "docker/Dockerfile",
        "--target",
        "checkout",
        "--build-arg",
        f"BASE={BASE}",
        ".",
    ]
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(
        docker(engine, *arguments), cwd=project, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    sent, in_image = (
        subprocess.run(
            docker(engine, "run", "--rm", "--network", "none", image, "sh", "-c", f"cd {folder} && {LIST}"),
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        for image, folder in ((done.stdout.strip(), "/checkout"), (IMAGE, "/harness"))
    )
    assert sent == in_image and {"./examples/own_gpt.py", "./notebooks/ae.ipynb"} <= {
        line.split()[1] for line in sent
    }


def test_an_image_goes_by_a_file_to_another_engine(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "image.tar"
    assert cli.run("image", "save", file, "--image", BASE).returncode == 0
    subprocess.run(docker(engine, "rmi", "--no-prune", BASE), check=True, stdout=subprocess.DEVNULL)
    done = cli.run("image", "load", file)
    assert (done.returncode, done.stdout) == (0, f"loaded {BASE}\n")
    file.write_text("nothing")
    done = cli.run("image", "load", file)
    assert done.returncode == 2 and "expected a file that ./run.sh image save wrote" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_image_that_takes_longer_to_pack_than_a_request_is_saved(engine: str, tmp_path: Path) -> None:
    client, pid = container.engine(), int((Path(engine.removeprefix("unix://")).parent / "pid").read_text())
    client.api.timeout = 1
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(3, os.kill, (pid, signal.SIGCONT)).start()
    done = CliRunner().invoke(image, ["save", str(tmp_path / "image.tar"), "--image", BASE])
    assert done.exit_code == 0, done.exception


def test_the_same_job_here_and_in_a_container_trains_to_the_same_bits(engine: str, tmp_path: Path) -> None:
    job = resolve(Job("stronghold", TINY, steps=6, warmup=2))[0]
    (on_host,) = Sweep(tmp_path).run([resolve(job)])
    (in_container,) = Sweep(tmp_path, place=Docker(IMAGE)).run([resolve(job)])
    assert in_container.losses == on_host.losses and in_container.grad_norms == on_host.grad_norms
    assert in_container.tensors == on_host.tensors and in_container.gate.verdict == "exact"
    assert in_container.key != on_host.key and in_container.machine["on"] == "docker"
    provenance = {"key", "machine", "software", "started", "gate", "step_seconds", "phase_seconds", "peaks"}
    assert in_container.description["optimizer"].startswith("torch AdamW, fused, host")
    # The tests' image has no compiler for our own.
    in_container.description["optimizer"] = on_host.description["optimizer"]
    in_container.kernels[in_container.kernels.index("fused_adamw")] = "adamw"
    same = [field.name for field in dataclasses.fields(Record) if field.name not in provenance]
    assert [getattr(on_host, name) for name in same] == [getattr(in_container, name) for name in same]
    assert {path.stat().st_uid for path in tmp_path.iterdir()} == {os.getuid()}


def test_ranks_in_a_container_leave_checkpoints_that_others_go_on_from(engine: str, tmp_path: Path) -> None:
    """The folders lie outside the results, where a container sees only what it is shown."""
    folder, place = tmp_path / "new" / "checkpoints", ["--on", "docker", "--image", IMAGE]
    call = ["-m", "varuna", *SIZES, *place, "--results", tmp_path / "results"]
    options = [f"checkpoint={folder}", "checkpoint_every=4", "num_stages=2"]
    first = cli.run(
        *call, "--ranks", "4", "--steps", "4", *(word for option in options for word in ("--option", option))
    )
    assert first.returncode == 0 and "gate passed (tolerance)" in first.stdout, first.stderr + first.stdout
    done = cli.run(*call, "--ranks", "2", "--steps", "8", "--resume", folder)
    assert done.returncode == 0 and "gate passed (tolerance)" in done.stdout, done.stderr + done.stdout
    record = next(
        record for record in read_all(tmp_path / "results")[0].values() if record.job.options.get("resume")
    )
    assert record.schedule["resumed_steps"] == 4 and record.machine["on"] == "docker"


def test_a_job_has_no_rights_beyond_its_folders(engine: str, tmp_path: Path) -> None:
    line = "print(open('/proc/self/status').read(), flush=True); open('/etc/new', 'w')"
    record = run_there(tmp_path, line)
    assert "Read-only file system: '/etc/new'" in record.reason
    log = log_of(tmp_path).read_text()
    status = dict(line.split(":\t", 1) for line in log.splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1"
    assert "0" not in status["Uid"].split() + status["Gid"].split()


def test_a_job_of_a_caller_other_than_root_runs_as_that_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 5678)
    assert container_user.ids() == (1234, 5678)


def test_of_what_a_job_plants_beside_its_record_nothing_reaches_the_results(
    engine: str, tmp_path: Path
) -> None:
    """A link in its record's place, one in its compiler's log's, other files; and the log made a program of root's."""
    planted = f"""
        from pathlib import Path
        (log,) = Path({str(tmp_path)!r}).glob('log_*.txt')
        log.chmod(0o4755)
        log.with_suffix('.json').symlink_to('/etc/passwd')
        log.with_name('build_ending.txt').symlink_to('/etc/passwd')
        log.with_name('log_other.json').write_text('{{}}')
        (log.parent / 'folder').mkdir()
    """
    record = run_there(tmp_path, planted)
    assert record.status == "crash" and "symbolic link" in record.reason, record.reason
    assert set(record.evidence["left_in_container"]) == {"build_ending.txt", "'folder'", "'log_other.json'"}
    (kept,) = tmp_path.glob("*.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [kept.name, log_of(tmp_path).name, "methods"]
    )
    status = log_of(tmp_path).stat()
    assert status.st_mode & 0o7111 == 0 and status.st_uid == kept.stat().st_uid == os.getuid()


@pytest.mark.skipif(os.getuid() != 0, reason="only root's containers have another user")
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_record_of_the_job_is_refused_by_its_kind(tmp_path: Path, kind: str) -> None:
    stem = tmp_path / "log_ending_l-2_hs-32_bs-2_ws-0_2026-01-01.1"
    exchange = ExchangeFolder(stem)
    exchange.open()
    PLANTED[kind](exchange.folder / f"{stem.name}.json")
    exchange.close("key")
    assert kind in exchange.refusal
    assert [path.name for path in tmp_path.iterdir()] == [f"{stem.name}.txt"]


def test_a_folder_that_the_containers_user_may_not_use_is_one_line(engine: str, tmp_path: Path) -> None:
    place, disk = ["--on", "docker", "--image", IMAGE, "--results", tmp_path / "results"], tmp_path / "disk"
    disk.mkdir(0o755)
    options = ["--option", f"checkpoint={disk}", "--option", "num_stages=2"]
    done = cli.run("-m", "varuna", *SIZES, *place, "--ranks", "2", "--steps", "2", *options)
    assert (
        done.returncode == 7
        and f"got {disk}, owned by root; try chown -R 1000 {disk}" in done.stdout.splitlines()[-1]
    )
    methods = write_ending(tmp_path, "pass")
    (methods / "ending.py").chmod(0o600)
    done = cli.run(*WORDS, "-m", "ending", "--methods", methods, *place)
    assert done.returncode == 7 and f"try chmod -R a+rX {methods}" in done.stdout.splitlines()[-1]
    done = cli.run(*WORDS, *place[:-1], methods, "--methods", methods)
    assert done.returncode == 7 and "a folder of results alone" in done.stdout.splitlines()[-1]


@pytest.mark.skipif(os.getuid() != 0, reason="only root's containers have another user")
def test_a_checkout_that_only_root_may_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "run.py").touch(0o600)
    tmp_path.chmod(0o755)
    with pytest.raises(Unavailable, match=f"run.py, owned by root, mode 600; try chmod -R a[+]rX {tmp_path}"):
        container_user.check_readable(tmp_path, container_user.CODE)


def test_results_in_roots_home_are_written_too(engine: str) -> None:
    """The image's own folder of that name is closed to others than root."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        os.chmod(folder, 0o755)
        assert run_there(Path(folder), "pass").losses


def test_of_a_corpus_folder_a_container_sees_the_corpus_alone(tmp_path: Path) -> None:
    job = Job("l2l", dataclasses.replace(TINY, corpus=str(tmp_path / "text")))
    shown = [inside for inside, _, _ in container.job_mounts(job, tmp_path / "results", (), "image")]
    assert [path.name for path in shown if path.parent == tmp_path] == ["text.bin", "text.idx", "results"]


def test_a_disk_that_a_container_has_in_memory_is_refused(tmp_path: Path) -> None:
    job = Job("zero-infinity-nvme", TINY, {"disk": "/tmp"})
    with pytest.raises(Unavailable, match="got /tmp, which is in memory in a container; try --disk DIR"):
        container.job_mounts(job, tmp_path / "results", (), "image")


def test_out_of_the_containers_memory_is_told_by_the_engine(engine: str, tmp_path: Path) -> None:
    # Shared memory, which no limit of a process counts.
    line = "shared = mmap.mmap(-1, 400 * 2**20); [shared.write(bytes(2**20)) for _ in range(400)]"
    record = run_there(tmp_path, line, Budget(host_bytes=300 * 2**20))
    assert record.status == "oom-host" and record.evidence["class"] == "kernel-kill", record.reason
    assert record.evidence["docker"]["OOMKilled"] is True


def test_a_compiler_that_the_containers_memory_does_not_hold_is_named_in_one_line(
    engine: str, tmp_path: Path
) -> None:
    warnings: list[str] = []

    def take(event: dict) -> None:
        warnings.extend([event["text"]] if event["event"] == "warning" else [])

    methods = write_compiling(
        tmp_path, "subprocess.run([sys.executable, '-c', 'bytearray(2**30)'], check=True)"
    )
    job = Job("compiling", TINY, budget=Budget(host_bytes=300 * 2**20), steps=3, warmup=1)
    (record,) = Sweep(tmp_path, (methods,), take, place=Docker(IMAGE)).run([resolve(job, (methods,))])
    assert record.status == "unavailable" and "not compiled" in record.reason
    assert len(warnings) == 1 and "out of host memory" in warnings[0] and "--host-memory" in warnings[0]


def test_a_container_killed_from_outside_is_not_out_of_memory(engine: str, tmp_path: Path) -> None:
    def kill(event: dict) -> None:
        if event["event"] == "step":
            subprocess.run(docker(engine, "kill", *containers(engine, tmp_path)), check=True)

    record = run_there(tmp_path, "while True: time.sleep(1)", report=kill)
    assert record.status == "killed" and record.evidence["docker"]["OOMKilled"] is False, record.reason


def test_an_interrupt_ends_the_container_and_leaves_a_record(engine: str, tmp_path: Path) -> None:
    call = [*WORDS, "--on", "docker", "--image", IMAGE, *write_endless(tmp_path), "--results", str(tmp_path)]
    run = cli.start(*call)
    cli.wait_for_steps(tmp_path)
    run.send_signal(signal.SIGINT)
    assert run.wait() == 130
    (record,) = read_all(tmp_path)[0].values()
    assert record.status == "interrupted" and record.losses
    assert containers(engine, tmp_path) == []


def test_a_container_ends_with_whoever_started_it_and_the_next_call_has_its_record(
    engine: str, tmp_path: Path
) -> None:
    call = [*WORDS, "--on", "docker", "--image", IMAGE, "--results", str(tmp_path)]
    run = cli.start(*call, *write_endless(tmp_path))
    cli.wait_for_steps(tmp_path)
    run.kill()
    run.wait()
    until(lambda: not containers(engine, tmp_path, "status=running"), poll_seconds=0.5)
    assert cli.run(*call, "--steps", "2").returncode == 0
    (record,) = (record for record in read_all(tmp_path)[0].values() if record.job.method == "ending")
    assert record.status == "interrupted" and record.losses and record.machine["on"] == "docker"
    assert {path.stat().st_uid for path in tmp_path.iterdir()} == {os.getuid()}
    assert containers(engine, tmp_path) == [] and list(tmp_path.glob(".exchange-*")) == []


def test_what_runs_for_another_call_is_left_to_it(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls for one folder, on devices of their own."""
    call = [*WORDS, "--on", "docker", "--image", IMAGE, "--results", str(tmp_path)]
    run = cli.start(*call, *write_endless(tmp_path))
    cli.wait_for_steps(tmp_path)
    monkeypatch.setenv("HARNESS_LOCKS", str(tmp_path))
    assert cli.run(*call, "--steps", "2").returncode == 0
    run.send_signal(signal.SIGINT)
    assert run.wait() == 130
    (record,) = (record for record in read_all(tmp_path)[0].values() if record.job.method == "ending")
    assert record.status == "interrupted"


@pytest.mark.parametrize(
    ("visible", "options", "gpus"), [("1,0", {}, ["GPU-b"]), ("2,0", {"num_devices": 2}, ["GPU-c", "GPU-a"])]
)
def test_a_container_gets_the_gpus_whose_locks_its_job_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, options: dict, gpus: list[str]
) -> None:
    with_gpus(monkeypatch, "GPU-a", "GPU-b", "GPU-c")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(container, "job_mounts", lambda *arguments: [])
    place = object.__new__(Docker)
    place.image = SimpleNamespace(id="sha256:1", short_id="sha256:1")
    for device, gpus_of_job in (("cuda", gpus), ("cpu", None)):
        job = OrderedJob(Job("some", TINY, options, device=device), "key", tmp_path / "log")
        settings = place._settings(job, (), None)
        (request,) = settings["device_requests"] or [{"DeviceIDs": None, "Count": 0}]
        assert (request["DeviceIDs"], request["Count"]) == (gpus_of_job, 0)


def test_without_the_gpus_runtime_a_gpu_is_unavailable_in_one_line(engine: str, tmp_path: Path) -> None:
    call = [*WORDS, "--on", "docker", "--image", IMAGE, "--device", "cuda", "--device-memory", "2GiB"]
    done = cli.run(*call, "--results", str(tmp_path))
    assert done.returncode == 7 and "NVIDIA container toolkit" in done.stdout.splitlines()[-1]


def test_an_image_that_is_not_there_or_cannot_be_built_is_one_line(engine: str, tmp_path: Path) -> None:
    missing = [*WORDS, "--on", "docker", "--image", "not:there"]
    no_package = [
        "image",
        "build",
        "--image",
        "tests/bad:1",
        "--base",
        BASE,
        "--build-arg",
        "PACKAGES=no-such",
    ]
    for call in (missing, ["image", "build", "--base", "not/there:1"], no_package):
        done = cli.run(*call)
        assert done.returncode == 7 and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_no_engine_and_an_unknown_place_are_one_line() -> None:
    done = cli.run(*WORDS, "--on", "docker", DOCKER_HOST="unix:///no/such/socket")
    assert done.returncode == 7 and "start docker" in done.stderr and len(done.stderr.splitlines()) == 1
    done = cli.run(*WORDS, "--on", "moon")
    assert done.returncode == 2 and "'local', 'docker'" in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_engine_leaves_nothing_behind() -> None:
    need(PACKAGES, "dockerd")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "engine"
        before = [Path(name).exists() for name in FIXED_FOLDERS]
        start(folder)
        stop(folder)
        assert list(Path(parent).iterdir()) == [] and not in_memory(folder).exists()
        assert parent not in Path("/proc/mounts").read_text() and still_running(parent) == []
    assert all(was or not Path(name).exists() for was, name in zip(before, FIXED_FOLDERS, strict=True))


def log_of(results: Path) -> Path:
    (log,) = results.glob("log_*.txt")
    return log


def containers(engine: str, results: Path, *filters: str) -> list[str]:
    options = [
        word
        for condition in (f"label=harness.results={results}", *filters)
        for word in ("--filter", condition)
    ]
    command = docker(engine, "ps", "-aq", *options)
    return subprocess.run(command, capture_output=True, text=True).stdout.split()
