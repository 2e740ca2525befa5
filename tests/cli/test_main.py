"""The door: the published words, bad input in one line, exit codes as documented."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cli import job_verbs
from cli.job_options import Call, make_jobs
from cli.main import FIRST_CALLS, door
from cli.options import Bytes, Numbers
from harness.core.job import GIB, Budget, Job, Workload
from harness.devices import machine, named_machines
from harness.jobs.command import command_of, size_text
from tests.support import records
from tests.support.cli import run
from tests.support.tiny import TINY

ENDS = ("see", "train", "compare", "which", "make")  # what begins to explain a call
SMALL = "-l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 4".split()


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ("--on slurm --slurm gpus=1", "cuda"),
        ("--on kubernetes --kubernetes gpus=2", "cuda"),
        ("--on slurm --slurm cpus=1", "sim"),
        ("--on slurm --slurm gpus=1 --device cpu", "cpu"),
    ],
)
def test_a_place_that_is_asked_for_gpus_trains_on_them(
    monkeypatch: pytest.MonkeyPatch, arguments: str, device: str
) -> None:
    monkeypatch.setattr(machine, "devices", lambda: ["cpu", "sim"])
    monkeypatch.setattr(machine, "gpu", dict)
    values = job_verbs.run.make_context(
        "run", ["-m", "resident", "--device-memory", "24GiB", *arguments.split()]
    ).params
    assert make_jobs(values, ())[0].device == device


def test_calls_that_are_advised_go_to_the_place_of_the_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "devices", lambda: ["cpu", "sim"])
    monkeypatch.setattr(machine, "gpu", dict)
    place = "--on slurm --slurm gpus=1 --slurm cpus=8"
    arguments = f"-m stronghold -l 400 --device-memory 80GiB --host-memory 64GiB {place}"
    job_verbs._print_next_calls(Call.of(job_verbs.run.make_context("run", arguments.split()).params, None))
    calls = [line for line in capsys.readouterr().out.splitlines() if line.startswith("try ")]
    assert calls and all(call.endswith(" --on slurm --slurm gpus=1 --slurm cpus=8") for call in calls)
    assert not any("--disk" in call for call in calls)


@pytest.mark.shows("bad input is one line and exit code 2")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m strongholt", "did you mean stronghold"),
        ("-l 4", "-m: expected a method, got none; try all"),
        ("-m resident -h", "help is --help"),
        ("-m resident -h 250", "try -h 240 or 256"),
        ("-m resident -l 0", "num_layers: expected at least 1, got 0"),
        ("-m resident -l -3", "num_layers: expected at least 1, got -3"),
        ("plan -m l2l -l 1000000000", "num_layers: expected at most 1048576"),
        ("-m resident --data=", "expected the prefix of PREFIX.bin and PREFIX.idx, got ''; leave --data out"),
        (
            "varuna launch --machine-list README.md --batch-size 4 --stall-minutes nan a.py",
            "minutes above 0, got nan",
        ),
        (
            "varuna launch --machine-list README.md --batch-size 4 --stall-minutes -1 a.py",
            "minutes above 0, got -1",
        ),
        ("-m resident -b 0", "batch_size: expected at least 1"),
        (
            "-m resident -b 6 --micro-batches 4",
            "--micro-batches: expected a divisor of batch 6 (1, 2, 3, 6), got 4",
        ),
        ("-m resident --micro-batches 2 --dropout 0.1", "dropout and micro-batches exclude each other"),
        ("-m resident -l four", "expected numbers such as 4, 1,2,4 or 2:8:2, got 'four'"),
        ("-m resident -l 8:2", "expected a range first:last:step such as 2:8:2, got '8:2'"),
        ("-m stronghold -l 4 -w 5", "-w: expected a window of 1 to 4, the number of layers, got 5"),
        ("-m stronghold -l 4 -w 0", "-w: expected a window of 1 to 4, the number of layers, got 0"),
        ("-m stronghold -l 4 --placement R2X2", "placement: expected runs of R (resident"),
        ("-m stronghold -l 4 --placement R2W3", "expected the model's 4 layers, got 5"),
        ("-m stronghold --option windows=3", "it has window_size, resident_layers"),
        ("-m stronghold --option 3", "NAME=VALUE"),
        (
            "-m stronghold -l 4 -w 2 --option window_size=3",
            "expected one of -w and --option window_size, got both, 2 and 3; try -w 3",
        ),
        (
            "-m fsdp2-offload --ranks 2 --option world_size=4",
            "expected one of --ranks and --option world_size, got both, 2 and 4; try --ranks 4",
        ),
        ("-m stronghold --as sc22 --option window_size=3", "got both, 4 and 3; try -w 3"),
        ("-m resident --data /nowhere/corpus", "cannot read the corpus /nowhere/corpus.idx"),
        ("-m resident --results /proc/results", "try another folder with --results"),
        ("-m resident --results /dev/null", "--results"),
        ("case 4 --profile demo --results /tmp --out /proc/figures", "try another folder with --out"),
        (
            "-m hydra -l 2 -h 32 --models 2 --devices 2 --device sim",
            "leave --devices out, or add --device cpu",
        ),
        ("-m resident --dtype fp64", "fp32, bf16 or fp16"),
        ("-m hydra --dtype fp16", "no loss scale for fp16: try --dtype bf16, or -m deepspeed, fsdp2-offload"),
        ("-m resident --dropout 1", "--dropout: expected from 0 to below 1, got 1.0"),
        ("-m resident --clip -1", "--clip: expected 0 (off) or a positive norm"),
        ("-m resident --steps 0", "steps: expected at least 1"),
        ("-m resident --warmup 20", "--warmup: expected 0 to 19"),
        ("-m resident --timeout 0", "budget: expected a positive and finite seconds"),
        ("-m resident --timeout nan", "positive and finite seconds, got nan"),
        ("-m resident --timeout inf", "positive and finite seconds, got inf"),
        ("-m resident --device-memory 12", "expected a positive size"),
        (f"-m resident --device-memory {'9' * 400}GiB", "expected a positive size"),
        (f"-m resident -l {'9' * 400}", "num_layers: expected at most 1048576"),
        (f"-m resident -l 1 --steps {'9' * 400}", "steps: expected at most 1000000000"),
        (f"-m hydra -l 1 --models {'9' * 400}", "option num_models: expected -1000000000 to 1000000000"),
        ("-m resident,l2l -l 2 --trace /tmp/trace.json", "--trace needs a single run on this machine"),
        (
            "-m l2l -l 2 --no-probe --probe-layers all",
            "--no-probe, or --probe, --probe-layers and --probe-steps, got",
        ),
        ("-m l2l -l 2 --probe-layers some", "'some' is not a valid"),
        ("-m l2l -l 2 --probe-steps 61", "61 is not in the range 20<=x<=60"),
        ("-m l2l -l 2 --trace /proc/traces/trace.json", "try another folder with --trace"),
        ("-m l2l -l 2 --trace /dev/null", "/dev/null: expected a new file, or a file to replace"),
        (f"-m l2l -l 2 --trace {__file__}", "expected a new file, or one that an earlier call wrote"),
        (f"sweep -m l2l -l 2 --out {__file__}", "expected a new file, or one that an earlier call wrote"),
        (f"bundle --results /tmp --out {__file__}", "expected a new file, or one that an earlier call wrote"),
        ("bundle --results /tmp --out /dev/null", "/dev/null: expected a new file, or a file to replace"),
        ("verify --results=", "expected a path, got nothing"),
        ("-m resident -l 1:1000000000", "expected at most 10000 numbers, got '1:1000000000'"),
        ("verify --results /nowhere/\x1b[2J", "no folder /nowhere/\\x1b[2J"),
        ("compare " + "x" * 300 + " l2l", "File name too long"),
        (
            "case overlaps",
            "expected a case of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, overlap, or all, got 'overlaps'",
        ),
        ("-m resident --methods /nowhere", "/nowhere"),
        ("-m resident --device cuda", "--device: expected cpu or sim on this machine, got cuda"),
        ("no-such-verb", "No such command"),
        (
            "--results /tmp plan -m l2l",
            "expected the verb as the first word, got plan after others; try ./run.sh plan",
        ),
        ("-m resident --no-such-option", "No such option"),
        ("plan --tokens 7B", "No such option '--tokens'; advise has it\n"),
        ("plan --model llama", "no model 'llama': did you mean llama-7b"),
    ],
)
def test_bad_input_is_one_line_and_exit_2_and_writes_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    if "cuda" in arguments and (Path("/dev/nvidia0")).exists():
        pytest.skip("there is a CUDA device here")
    results = [] if "--results" in arguments else ["--results", str(tmp_path / "new")]
    call_arguments = arguments.split()
    # What follows a trailing -h would be its value.
    done = (
        run(*call_arguments)
        if call_arguments[-1] == "-h"
        else run(*call_arguments, *(results if call_arguments[0].startswith("-") else []))
    )
    assert done.returncode == 2, done.stdout
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert message in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", ["image shell", "-m resident --on docker"])
def test_where_no_container_engine_answers_the_line_names_what_to_install(arguments: str) -> None:
    done = run(*arguments.split(), DOCKER_HOST="unix:///nowhere/docker.sock")
    assert done.returncode == 7 and len(done.stderr.splitlines()) == 1
    assert "apt-get install docker.io" in done.stderr and "--on" not in done.stderr


def test_without_words_the_door_shows_five_calls_that_it_takes() -> None:
    calls = [shlex.split(line)[1:] for line in FIRST_CALLS.splitlines() if line.startswith("  ./run.sh")]
    assert run().stdout.strip() == FIRST_CALLS and len(calls) == 5
    for arguments in calls:
        call = arguments[
            : next((place for place, word in enumerate(arguments) if place and word in ENDS), None)
        ]
        verb, *rest = call if call[0] in door.commands else ["run", *call]
        door.commands[verb].make_context(verb, rest)


def test_the_door_explains_itself() -> None:
    done = run("--help")
    assert done.returncode == 0
    for message in ("./run.sh -m stronghold -l 4", "stronghold", "l2l", "resident", "sweep"):
        assert message in done.stdout


def test_a_run_ends_in_one_closing_line(tmp_path: Path) -> None:
    done = run("-m", "stronghold", *SMALL, "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "stronghold window_size=2 resident_layers=0 placement=W2 clipping=deferred, 2"
    )


def test_json_is_one_object_a_line(tmp_path: Path) -> None:
    done = run("-m", "resident", *SMALL, "--results", str(tmp_path), "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]
    assert events[-1]["record"]["gate"] == "exact"


@pytest.mark.heavy
def test_a_sweep_crosses_its_lists_and_takes_each_job_once(tmp_path: Path, forked: None) -> None:
    done = run(
        "sweep",
        "-m",
        "l2l,stronghold",
        "-w",
        "1,2",
        *SMALL,
        "-l",
        "1:3:2",
        "--json",
        "--results",
        str(tmp_path),
    )
    ends = [json.loads(line)["record"] for line in done.stdout.splitlines() if '"end"' in line]
    points = [(end["method"], end["num_layers"], end["options"].get("window_size")) for end in ends]
    assert points == [
        ("l2l", 1, None),
        ("l2l", 3, None),
        ("stronghold", 1, 1),
        ("stronghold", 3, 1),
        ("stronghold", 3, 2),
    ]
    assert done.stderr.splitlines() == [
        "left out: stronghold, 1 layer: -w: expected a window of 1 to 1, the number of layers, got 2"
    ]


def test_a_results_folder_elsewhere_is_made(tmp_path: Path, forked: None) -> None:
    assert run("-m", "resident", *SMALL, "--results", str(tmp_path / "a" / "b")).returncode == 0
    assert len(list((tmp_path / "a" / "b").glob("*.json"))) == 1


@pytest.mark.parametrize(
    ("text", "numbers"), [("4", [4]), ("1,2,4", [1, 2, 4]), ("2:8:2", [2, 4, 6, 8]), ("1,3:5", [1, 3, 4, 5])]
)
def test_lists_and_ranges(text: str, numbers: list[int]) -> None:
    assert Numbers().convert(text, None, None) == numbers


@pytest.mark.parametrize(
    "job",
    [
        Job("l2l", Workload(num_layers=3, micro_batches=2)),
        Job(
            "stronghold",
            Workload(2, 128, 4, 64, 1, 1, 512, dropout=0.1, clip_norm=0.0, learning_rate=1e-3, seed=7),
            {"window_size": 2, "resident_layers": 1},
            Budget(12345678, 3 * GIB, None, 60, 2**28),
            "sim",
            5,
            2,
        ),
        Job(
            "zero-infinity-nvme",
            Workload(dtype="bf16", corpus="a folder/text"),
            {"disk": "some folder", "pipelined": True, "reentrant": False},
            Budget(disk_bytes=7),
        ),
    ],
    ids=lambda job: job.method,
)
def test_the_command_of_a_job_makes_that_job(job: Job) -> None:
    arguments = shlex.split(command_of(job))[1:]
    parsed = job_verbs.run.make_context("run", arguments).params
    assert make_jobs(parsed, ()) == [job]


def test_an_option_of_a_method_may_be_given_twice_alike() -> None:
    arguments = (
        "-m stronghold -l 4 -w 2 --option window_size=2 --placement R2W2 --option placement=R2W2".split()
    )
    (job,) = make_jobs(job_verbs.run.make_context("run", arguments).params, ())
    assert job.options == {"window_size": 2, "placement": "R2W2"}


@pytest.mark.parametrize(
    "arguments", ["-m l2l --models 4", "-m l2l,resident --placement R2", "-m l2l --hybrid off"]
)
def test_a_word_that_no_method_has_a_use_for_is_an_error(arguments: str) -> None:
    parsed = job_verbs.run.make_context("run", arguments.split()).params
    with pytest.raises(
        ValueError,
        match=f"{arguments.split()[2]} does not apply to {arguments.split()[1]}".replace(",", ", "),
    ):
        make_jobs(parsed, ())


@pytest.mark.parametrize(
    ("text", "size"),
    [("1.5GiB", GIB * 3 // 2), ("64GB", 64 * 10**9), ("64gb", 64 * 10**9), ("16 gib", 16 * GIB)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert Bytes().convert(text, None, None) == size


@pytest.mark.parametrize("size", [64 * 10**9, 24 * GIB, 31900 * 2**20, 12345678, 3 * 2**40])
def test_the_command_of_a_job_has_its_sizes_to_the_byte(size: int) -> None:
    assert Bytes().convert(size_text(size), None, None) == size and len(size_text(size)) < 20


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "4090", "NVIDIA GeForce RTX 4090", "rtx-4090"])
def test_a_gpu_is_found_as_people_write_it(name: str) -> None:
    assert named_machines.spelled(name) == "rtx4090"


def test_a_gpu_that_several_names_match_stays_as_it_was_written() -> None:
    assert named_machines.spelled("a100-80gb") == "a100-80" and named_machines.spelled("a100") == "a100"


@pytest.mark.parametrize("verb", ["run", "plan", "sweep", "advise", "search largest"])
def test_the_same_words_give_sizes_in_every_verb(verb: str) -> None:
    command: Any = door
    for word in verb.split():
        command = command.commands[word]
    arguments = {word for param in command.params for word in param.opts}
    assert arguments >= set(
        "-l -h -b -w --heads --seq --vocab --dtype --model --params --micro-batches --disk".split()
    )
    assert arguments >= {"--device-memory", "--host-memory", "--disk-memory", "--machine", "--machines"}


@pytest.mark.parametrize("arguments", ["--params 7B", "--model 7b", "--model 7.0B"])
def test_a_number_of_parameters_makes_a_model_of_that_size(arguments: str) -> None:
    (job,) = make_jobs(job_verbs.run.make_context("run", ["-m", "l2l", *arguments.split()]).params, ())
    assert job.workload.num_params == pytest.approx(7e9, rel=0.05) and job.workload.hidden_size == 4096


def test_a_model_of_our_architecture_is_said_to_be_none_of_its_name() -> None:
    message = run("plan", "-m", "l2l", "--model", "opt-1.3b").stderr
    assert message.startswith("opt-1.3b here is the published GPT at its size") and message.count("\n") == 1
    assert run("plan", "-m", "l2l", "--model", "gpt2-xl").stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        "compare l2l resident",
        "fairness",
        "verify",
        "case 3 --draw",
        "advise -m l2l -l 2 -h 64 --gpu rtx4090",
        "bundle",
    ],
)
def test_each_verb_that_reads_results_names_the_files_that_it_cannot_use(
    tmp_path: Path, arguments: str
) -> None:
    kept = [
        records.record(Job(name, TINY), started=1e9, software={"source": "a"}) for name in ("l2l", "resident")
    ]
    records.write(tmp_path, *kept, kept[0])
    (tmp_path / "log_bad.json").write_text("{}")
    message = run(*arguments.split(), "--results", tmp_path).stderr
    for line in ("log_bad.json is not a record: ", "log_2.json: the same measurement as log_0.json"):
        assert re.search(rf"^warning: \S*{line}", message, re.MULTILINE), message
