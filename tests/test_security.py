"""What SECURITY.md says: each of its sentences has a test, here or where PROMISES names it."""

from __future__ import annotations

import ast
import pickle
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Job
from harness.devices import machine
from methods.pipeline.checkpoint import files
from tests.support import cli, records
from tests.support.ranks import on_ranks
from tests.support.tiny import TINY
from tests.test_packages import HOUSES

# Names whose call can run what a file or another process holds, and the files that may say them, each for a reason.
RUNNERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "read_pickle",
    "eval",
    "exec",
    "unsafe_load",
    "full_load",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "allow_pickle",
    "runpy",
    "exec_module",
    "torch.load",
    "torch.jit",
    "torch.hub",
    "torch.package",
    "torch.serialization",
    "torch.distributed.checkpoint",
    "torch.distributed.rpc",
}
ALLOWED = {
    "cases/_paced_gpt.py": {"exec_module"},  # an example of this project
    # The classes of a table of contents.
    "methods/pipeline/checkpoint/checkpoints.py": {"torch.distributed.checkpoint"},
    # An unpickler of an allow-list, which also reads other ranks' tables, and torch's reader with it; plain values.
    "methods/pipeline/checkpoint/files.py": {"pickle", "torch.distributed.checkpoint", "torch.load"},
    "methods/pipeline/launch/agent.py": {"runpy"},  # the script that the caller names
    "methods/sharding/device_process.py": {"pickle"},  # of a pipe to a process that this one has forked
    # The class of layers that are refused.
    "methods/sharding/user_model.py": {"torch.jit"},
    "methods/streaming/users/model.py": {"torch.jit"},
}
OPENED = list[str]()  # files that this process opens, from now on
sys.addaudithook(lambda event, told: OPENED.append(str(told[0])) if event == "open" else None)

# Each sentence's first words, with the tests that show it; none where the sentence warns and promises nothing.
PROMISES = {
    "**Code.** Nothing is imported from the folder": [
        "test_folder_of_the_call.py::test_no_process_of_a_run_imports_from_the_folder_of_the_call",
        "test_security.py::test_torch_loads_plain_values_only_and_yaml_makes_no_objects",
        "test_security.py::test_no_text_goes_through_a_shell",
    ],
    "No file is unpickled but checkpoints": [
        "test_security.py::test_no_file_has_a_loader_that_can_run_code_but_those_with_a_reason",
        "test_security.py::test_a_pickle_is_run_by_no_entry_point",
        "methods/pipeline/checkpoint/test_checkpoint.py::test_nothing_in_a_checkpoint_is_run",
    ],
    "Code that a model's config.json names": [
        "models/test_hub_model.py::test_code_that_a_configuration_names_is_not_run"
    ],
    "**Methods.** The gate finds mistakes.": [
        "bench/test_gate_power.py::test_a_planted_fault_is_seen_and_named"
    ],
    "A method's file runs as you": [],
    "Read what you run.": [],
    "Code that a run's processes load is in its identity": [
        "core/test_identity.py::test_of_the_executed_files_those_are_told_that_the_hash_lacks",
        "run/test_launch.py::test_code_that_a_run_executes_beyond_its_identity_is_on_record",
        "gate/test_verdict.py::test_a_run_of_code_that_its_identity_lacks_is_untested",
    ],
    "**Packages.** Set-up installs only files": [
        "test_setup.py::test_a_file_of_another_hash_is_refused_by_name",
        "test_security.py::test_the_image_installs_what_set_up_installs_on_a_base_of_one_digest",
    ],
    "Whoever trusts a file that a mirror built": ["test_setup.py::test_changed_pins_are_installed"],
    "The base image is named by its digest.": [
        "test_security.py::test_the_image_installs_what_set_up_installs_on_a_base_of_one_digest"
    ],
    "A release that `--option release` names is taken": [
        "methods/test_engine_releases.py::test_a_record_holds_the_release_and_its_archives_hash"
    ],
    "Not hashed:": [],
    "**Files.** JSON is read from regular files alone": [
        "base/test_foreign_file.py::test_a_link_is_not_followed",
        "base/test_foreign_file.py::test_a_pipe_is_not_waited_for",
        "base/test_foreign_file.py::test_a_file_beyond_the_limit_is_not_read",
        "base/test_foreign_file.py::test_what_is_no_record_is_named",
        "base/test_foreign_file.py::test_yaml_that_repeats_itself_too_often_is_refused_before_it_is_built",
    ],
    "A configuration that a record names is not read.": [
        "plan/test_accuracy.py::test_a_record_that_names_a_file_is_not_planned"
    ],
    "A model's sizes are found by a process of at most 4 GiB.": [
        "models/test_hub_model.py::test_a_sketch_that_needs_too_much_memory_is_one_line"
    ],
    "What you name with `--out` or `--trace`": [
        "base/test_whole_file.py::test_what_is_no_regular_file_is_not_replaced",
        "base/test_whole_file.py::test_a_file_that_cannot_be_written_whole_stays_as_it_was",
        "base/test_whole_file.py::test_a_file_has_the_rights_that_the_umask_leaves",
    ],
    "Of folders that a killed run left": [
        "run/test_launch.py::test_a_folder_of_a_users_own_stays_whatever_its_name_is",
        "methods/test_engines.py::test_a_folder_on_the_disk_that_no_run_marked_stays",
    ],
    "A lock of a device is a regular file": [
        "devices/test_budgets.py::test_what_is_no_file_of_locks_is_refused_and_not_waited_for"
    ],
    "**Terminal and pages.** Whatever is printed": [
        "base/test_console.py::test_what_would_command_a_terminal_is_shown_as_an_escape",
        "papers/report/test_page.py::test_no_page_holds_a_character_that_commands_a_terminal_or_turns_text",
        "papers/report/test_add.py::test_a_log_that_is_added_commands_no_terminal",
    ],
    "Cells of CSV files": [
        "papers/figures/test_case.py::test_a_cell_that_a_spreadsheet_would_compute_is_text_and_is_read_back"
    ],
    "**Network.** A run of one process listens nowhere.": [
        "run/test_ranks.py::test_a_run_of_one_process_listens_nowhere"
    ],
    "`--ranks` on one machine listens on 127.0.0.1": [
        "run/test_ranks.py::test_nothing_listens_beyond_this_machine",
        "test_security.py::test_no_rank_loads_a_class_that_another_one_names",
        "methods/pipeline/checkpoint/test_checkpoint.py::test_of_several_ranks_none_unpickles_what_another_one_sends",
    ],
    "DeepSpeed's process group": ["methods/test_engines.py::test_deepspeed_listens_on_this_machine_alone"],
    "`--ranks` over several Slurm nodes": [
        "test_security.py::test_no_rank_loads_a_class_that_another_one_names",
        "methods/pipeline/checkpoint/test_checkpoint.py::test_of_several_ranks_none_unpickles_what_another_one_sends",
    ],
    "**Containers.** Every capability dropped": [
        "places/test_docker.py::test_a_job_has_no_rights_beyond_its_folders",
        "places/test_docker.py::test_of_a_corpus_folder_a_container_sees_the_corpus_alone",
    ],
    "They run as the caller.": [
        "places/test_docker.py::test_a_job_of_a_caller_other_than_root_runs_as_that_caller"
    ],
    "Where root calls, they run as user 1000": [
        "places/test_docker.py::test_a_job_has_no_rights_beyond_its_folders",
        "places/test_docker.py::test_of_what_a_job_plants_beside_its_record_nothing_reaches_the_results",
    ],
    "Root reads the record from there": [
        "places/test_docker.py::test_of_what_a_job_plants_beside_its_record_nothing_reaches_the_results",
        "places/test_docker.py::test_what_is_no_record_of_the_job_is_refused_by_its_kind",
    ],
    "While the job runs, its log belongs to user 1000": [],
    "**Pods.** As containers": [
        "places/test_kubernetes.py::test_a_pod_has_the_jobs_memory_a_gpu_for_each_of_its_ranks_and_no_rights"
    ],
    "What a pod tells is only read": [
        "places/test_kubernetes.py::test_a_record_of_another_job_is_refused",
        "places/test_kubernetes.py::test_a_pod_writes_to_its_own_logs_alone",
    ],
    "**Results of others.** `add` reads all of an archive into memory": [
        "base/test_foreign_archive.py::test_an_entry_is_refused_that_is",
        "base/test_foreign_archive.py::test_what_comes_out_is_limited_whatever_it_was_packed_as",
        "base/test_foreign_archive.py::test_the_number_of_files_is_limited",
        "papers/report/test_add.py::test_an_archive_with_code_in_it_leaves_nothing",
        "papers/report/test_add.py::test_a_link_among_the_records_leaves_nothing",
    ],
    "It takes over records and logs of runs": [
        "papers/report/test_add.py::test_code_in_a_folder_stays_there"
    ],
    "Each verdict is judged anew": [
        "papers/report/test_add.py::test_a_verdict_is_what_the_records_give_not_what_they_say",
        "papers/report/test_add.py::test_no_run_is_judged_better_than_it_was_sent",
    ],
    "A run that its sender never judged": [
        "papers/report/test_add.py::test_the_page_says_which_runs_their_sender_had_not_judged"
    ],
    "Left out are copies of records": [
        "papers/report/test_add.py::test_of_copies_and_others_the_others_are_added",
        "papers/report/test_add.py::test_a_model_that_is_not_known_is_left_out_and_not_made",
    ],
    "**Bundles.** Names of hosts, users": [
        "papers/report/test_bundle.py::test_no_name_is_in_any_text_of_it",
        "papers/report/test_bundle.py::test_what_names_others_or_opens_doors_is_taken_out",
    ],
    "Patterns find them": [],
}


def sentences() -> list[str]:
    """Of the bullets of SECURITY.md, each on one line."""
    bullets = re.findall(
        r"^- (.*?)(?=^- |\n\n|\Z)", (ROOT / "SECURITY.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [part for bullet in bullets for part in re.split(r"(?<=\.) (?=[A-Z`])", " ".join(bullet.split()))]


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def said(path: Path) -> set[str]:
    """Return those of RUNNERS that a file imports, calls or passes, under whatever other name; a method of a model,
    such as model.eval(), is none."""
    tree = ast.parse(path.read_text())
    imports = [(each, item) for each in ast.walk(tree) if isinstance(each, ast.Import) for item in each.names]
    called = {item.asname: item.name for _, item in imports if item.asname}
    found = {item.name for _, item in imports}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(item.name for item in node.names)}
            found |= {f"{node.module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword):
            found.add(str(node.arg))
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            found |= {f"{called.get(first, first)}.{rest}"} | ({node.attr} - {"eval", "exec"})
    parts = {".".join(name.split(".")[:depth]) for name in found for depth in range(1, name.count(".") + 2)}
    return parts & RUNNERS


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch as t\nt.load(f)", {"torch.load"}),
        ("from torch import load as read", {"torch.load"}),
        ("import torch.distributed.checkpoint as dcp", {"torch.distributed.checkpoint"}),
        ("from torch.distributed.checkpoint import FileSystemReader", {"torch.distributed.checkpoint"}),
        ("from torch import jit", {"torch.jit"}),
        ("import torch\ntorch.hub.load('a')", {"torch.hub"}),
        ("import pickle as p", {"pickle"}),
        ("from pickle import loads", {"pickle"}),
        ("model.eval()", set()),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", {"allow_pickle"}),
        ("eval(text)", {"eval"}),
        ("import torch.distributed as dist\ndist.gather_object(a)", {"gather_object"}),
    ],
)
def test_a_loader_is_seen_under_any_name(tmp_path: Path, text: str, names: set[str]) -> None:
    (tmp_path / "a.py").write_text(text)
    assert said(tmp_path / "a.py") == names


def test_no_file_has_a_loader_that_can_run_code_but_those_with_a_reason() -> None:
    files = sources(*HOUSES, "bench", "examples", "notebooks")
    found = {str(path.relative_to(ROOT)): names for path in files if (names := said(path))}
    assert found == ALLOWED


def test_torch_loads_plain_values_only_and_yaml_makes_no_objects() -> None:
    for path in sources(*HOUSES, "bench"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "load"
            ):
                told = ast.unparse(node)
                if told.startswith("torch.load"):
                    assert "weights_only=True" in told, path
                if told.startswith("yaml.load"):
                    assert "BaseLoader" in told and "SafeLoader" in told, path


def test_no_text_goes_through_a_shell() -> None:
    """A shell reads no text but set-up's own line, which is written in the source."""
    shells = [
        path
        for path in sources(*HOUSES)
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.keyword) and node.arg == "shell")
        or (
            isinstance(node, ast.Attribute)
            and node.attr in ("system", "popen", "create_subprocess_shell")
            and isinstance(node.value, ast.Name)
            and node.value.id in ("os", "asyncio")
        )
    ]
    assert shells == []
    lines = [
        ast.unparse(node.elts[2])
        for path in sources(*HOUSES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List | ast.Tuple)
        and [ast.unparse(part) for part in node.elts[1:2]] == ["'-c'"]
    ]
    assert lines == ["""'. "$0/venv.sh" "$1"'"""]


def test_the_image_installs_what_set_up_installs_on_a_base_of_one_digest() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert set(bases) == {"$BASE"} and re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert "venv.sh" in text and not re.search(r"pip3? install", text)


@pytest.mark.heavy
def test_no_rank_loads_a_class_that_another_one_names(tmp_path: Path) -> None:
    """A checkpoint's table names classes that its reader allows; nothing else does, whatever torch gathers."""
    folder = str(tmp_path / "checkpoints")
    jobs = [
        ("varuna", {"num_stages": 2, "schedule": schedule}, 2) for schedule in ("varuna", "1f1b", "gpipe")
    ]
    jobs += [("varuna", {"num_stages": 1, "checkpoint": folder, "checkpoint_every": 2}, 2)]
    jobs += [("varuna", {"num_stages": 2, "resume": folder}, 4), ("fsdp2-offload", {}, 2)]
    trainings = [
        {
            "kind": "unpickled",
            "ranks": 2,
            "method": name,
            "steps": steps,
            "options": {"world_size": 2, **options},
            "workload": asdict(TINY),
        }
        for name, options, steps in jobs
    ]
    allowed = {".".join(names) for names in files.ALLOWED_CLASSES}
    for of_rank in on_ranks(2, "tests.methods.pipeline.trainings:on_this_rank", trainings):
        assert [set(heard) - allowed for heard in of_rank] == [set()] * len(jobs)
        assert of_rank[4], "a resume reads a table"


@pytest.mark.parametrize("sentence", sentences())
def test_each_sentence_of_security_md_has_its_tests(sentence: str) -> None:
    ((_, tests),) = [each for each in PROMISES.items() if sentence.startswith(each[0])]
    for test in tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), test


class Touches:
    """Whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


LOG = "log_l2l_l-1_hs-32_bs-2_ws-0_2022-07-02.1656730240.txt"
SMALL = (
    "-l",
    "1",
    "-h",
    "32",
    "--heads",
    "2",
    "--seq",
    "16",
    "--vocab",
    "64",
    "-b",
    "2",
    "--steps",
    "3",
    "--no-probe",
)


JOB = (
    "varuna",
    "launch",
    "--machine-list",
    "list.txt",
    "--folder",
    "job",
    "--batch-size",
    "4",
    "--nstages",
    "1",
    "--chunk-size",
    "2",
    "a.py",
)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["log_a.json"], ["compare", "l2l", "resident", "--results", "."]),
        (["log_a.json"], ["report", "--results", "."]),
        (["log_a.json", "log_a.txt", "traces/a.json"], ["bundle", "--results", "."]),
        (["log_a.json"], ["verify", "--results", "."]),
        (["claims.yaml"], ["verify", "--results", ".", "--claims", "claims.yaml"]),
        (["log_a.json"], ["fairness", "--results", "."]),
        (["log_a.json"], ["advise", "-m", "l2l", "-l", "2", "-h", "64", "--results", "."]),
        (["calibration.json"], ["plan", "-m", "l2l"]),
        (["locks/harness-cpu.holders"], ["-m", "resident", *SMALL, "--results", "."]),
        (["list.txt"], list(JOB)),
        (["job/job.json"], list(JOB)),
        (["job/steps.jsonl"], list(JOB)),
        ([LOG], ["import", LOG, "--results", "."]),
        (["machines.yaml"], ["plan", "-m", "l2l", "--machine", "h200", "--machines", "machines.yaml"]),
        (["text.idx"], ["-m", "resident", *SMALL, "--data", "text", "--results", "."]),
        (
            ["slurm.yaml"],
            ["-m", "resident", *SMALL, "--on", "slurm", "--slurm", "slurm.yaml", "--results", "."],
        ),
        (["ck/step_00000003/.metadata"], ["-m", "varuna", *SMALL, "--resume", "ck", "--results", "."]),
        (["profile.json"], ["varuna", "configure", "--profile", ".", "--gpus", "2", "--batch", "4"]),
        (["case3_demo.csv"], ["case", "3", "--profile", "demo", "--draw", "--out", ".", "--results", "."]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_pickle_is_run_by_no_entry_point(
    names: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "CALIBRATION", tmp_path / "calibration.json")
    monkeypatch.setenv("HARNESS_LOCKS", str(tmp_path / "locks"))
    records.write(tmp_path, *(records.record(Job(name, TINY), started=1e9) for name in ("l2l", "resident")))
    (tmp_path / "list.txt").write_text("127.0.0.1\n")
    (tmp_path / "a.py").touch()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(pickle.dumps(Touches(tmp_path / "touched")))
    OPENED.clear()
    done = cli.run(*words)
    unopened = [name for name in names if not any(f"/{each}".endswith(f"/{name}") for each in OPENED)]
    # a worker does
    assert not [name for name in unopened if not name.startswith("ck/")], "the call does not read it"
    assert not (tmp_path / "touched").exists()
    assert "Traceback" not in done.stderr and done.returncode in (0, 1, 2, 3), done.stderr


def test_the_pickle_of_these_tests_would_touch_its_file(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Touches(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()
