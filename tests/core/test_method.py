"""The contract that every method keeps, and the registry that finds them."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli import method_contract
from harness.base.checkout import ROOT
from harness.core import method
from tests.support import tiny
from tests.support.cli import run
from tests.support.page import page_blocks
from tests.support.tiny import TINY

# The whole method on the page, as a student would begin with it.
ONE_FILE = page_blocks("python")[0]


@pytest.fixture
def added(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "plain_loop.py").write_text(ONE_FILE)
    return folder


@pytest.mark.heavy
def test_a_file_that_does_not_load_is_named_and_stops_no_other_method(tmp_path: Path, added: Path) -> None:
    (added / "half_done.py").write_text("class HalfDone:\n    def train(self, ")
    (added / "exits.py").write_text("raise SystemExit(1)")
    options = [*"-l 1 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 2 --methods".split(), str(added)]
    done = run("-m", "plain-loop", *options, "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    every = run("plan", "-m", "all", *options)
    assert every.returncode == 0 and "plain-loop" in every.stdout
    assert [text.split(" does not load: ")[0] for text in every.stderr.splitlines()] == [
        f"left out: exits: {added}/exits.py",
        f"left out: half-done: {added}/half_done.py",
    ]
    one = run("-m", "half-done", *options)
    assert (one.returncode, len(one.stderr.splitlines())) == (
        2,
        1,
    ) and "half_done.py does not load" in one.stderr
    for help_call in (("--help", "--methods", str(added)), ("--methods", str(added), "--help")):
        done = run(*help_call)
        assert done.returncode == 0 and "plain-loop" in done.stdout and "unavailable: " in done.stdout


def test_a_plan_that_fails_is_named_and_stops_no_other_method(tmp_path: Path) -> None:
    (tmp_path / "wrong_plan.py").write_text(ONE_FILE.replace("workload.num_params", "workload.number"))
    done = run("plan", "-m", "resident,wrong-plan", "-l", "2", "--methods", str(tmp_path))
    assert done.returncode == 0 and "resident" in done.stdout
    assert "wrong_plan.py's plan() fails: AttributeError" in done.stdout


ARITHMETIC_VERBS = ["run", "plan", "sweep", "search largest", "advise --gpu rtx4090", "run --scale fit"]


@pytest.mark.parametrize("verb", ARITHMETIC_VERBS)
@pytest.mark.parametrize(
    "mistake", ["workload.number", "raise SystemExit(0)", "raise BaseException('of its own')"]
)
def test_a_plan_that_fails_is_one_line_with_its_file_and_line(
    verb: str, mistake: str, tmp_path: Path
) -> None:
    """It was a traceback and exit code 1, or no word and 0."""
    name = tmp_path.name  # no two tests have a module of the same name
    text = ONE_FILE.replace("params = workload.num_params", mistake)
    (tmp_path / f"{name}.py").write_text(text)
    line = next(number for number, line in enumerate(text.splitlines(), start=1) if line.strip() == mistake)
    size = ["-l", "2"] * ("search" not in verb) + ["-h", "64", "--heads", "4"]
    folder = ["--results", tmp_path / "results"] * (verb.split()[0] in ("run", "sweep", "search"))
    done = run(*verb.split(), "-m", name.replace("_", "-"), *size, "--methods", tmp_path, *folder)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    assert f"{tmp_path}/{name}.py's plan() " in done.stderr
    assert f", {name}.py line {line}: {mistake}" in done.stderr


def keep(check: method_contract.Check, *subject) -> None:
    try:
        check(method_contract.Subject(*subject))
    except method.Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("check", method_contract.BY_ARITHMETIC)
def test_keeps_the_contract_on_paper(
    method_name: str, check: str, folders: tuple[Path, ...], shared_results: Path
) -> None:
    keep(method_contract.BY_ARITHMETIC[check], method_name, folders, shared_results)


@pytest.mark.shows("every method trains and passes the gate, or fails it by design")
@pytest.mark.timeout(1800)  # the first to need a compiled kernel builds it
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(name, marks=[pytest.mark.heavy] * ("bf16" in name))
        for name in method_contract.BY_TRAINING
    ],
)
def test_keeps_the_contract_in_training(
    method_name: str, check: str, folders: tuple[Path, ...], shared_results: Path, quick: None, forked: None
) -> None:
    keep(method_contract.BY_TRAINING[check], method_name, folders, shared_results)


def checked(folder: Path, old: str = "", new: str = "") -> tuple[int, list[str]]:
    """What check-method says of the page's method with a change, in a folder with another script."""
    file = folder / f"{folder.name}.py"  # no two tests have a module of the same name
    file.write_text(ONE_FILE.replace(old, new) if old else ONE_FILE)
    (folder / "script.py").write_text("raise SystemExit('was run')")
    done = run("check-method", file)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_a_check_that_fails_is_one_line_and_exit_1(tmp_path: Path) -> None:
    code, lines = checked(tmp_path, "workload.num_params", "workload.number")
    assert code == 1 and len(lines) == 7
    assert [line.split()[0] for line in lines].count("failed") == 5
    first, *others = [line.partition(": ")[2] for line in lines if line.startswith("failed")]
    assert "AttributeError" in first and others == ["as told above"] * 4


@pytest.mark.parametrize(
    ("old", "new"), [("workload.num_params", "workload.number"), ("frozen=True", "frozen=")]
)
def test_a_check_that_fails_names_the_users_file(old: str, new: str, tmp_path: Path) -> None:
    """It named a copy in a temporary folder."""
    failed = [line for line in checked(tmp_path, old, new)[1] if line.startswith("failed")]
    assert f"{tmp_path}/{tmp_path.name}.py" in failed[0]


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "__import__('os')._exit(0)"])
def test_a_plan_that_would_end_the_process_fails_its_checks(ending: str, tmp_path: Path) -> None:
    code, lines = checked(tmp_path, "params = workload.num_params", ending)
    assert code == 1 and len(lines) == 7
    assert [line.split()[0] for line in lines].count("failed") == 5
    assert "SystemExit" in next(line for line in lines if line.startswith("failed"))


@pytest.mark.heavy
def test_a_crash_while_it_is_checked_names_its_line_and_a_log_that_is_there(tmp_path: Path) -> None:
    _, lines = checked(tmp_path, "loss.backward()", "loss.backwards()")
    (line,) = [line for line in lines if "fp32" in line]
    assert ": loss.backwards(); its log has the traceback (" in line
    log = Path(line.rsplit("(", 1)[1].rstrip(")"))
    assert "AttributeError" in log.read_text()
    shutil.rmtree(log.parent)


@pytest.mark.heavy
def test_a_wrong_gradient_is_named_with_its_tensor(tmp_path: Path) -> None:
    wrong = "loss.backward(); model.layers[1].fc1.weight.grad.mul_(0.5)"
    _, lines = checked(tmp_path, "loss.backward()", wrong)
    (line,) = [line for line in lines if "fp32:" in line]
    assert line.endswith(
        "; beside the others' the gradient of step 1 is wrong in layers.1.fc1.weight (0.5 times)"
    )


def test_a_file_without_a_method_is_one_line_and_exit_1(tmp_path: Path) -> None:
    code, (line,) = checked(tmp_path, "@dataclass(frozen=True)")
    assert (
        code == 1 and line.startswith("failed  its file loads: ") and "must hold one frozen dataclass" in line
    )


def test_what_is_no_methods_file_is_refused() -> None:
    done = run("check-method", ROOT / "README.md")
    assert (done.returncode, done.stdout) == (
        2,
        "",
    ) and "expected a method's file, such as my_method.py" in done.stderr


@pytest.mark.heavy
def test_the_method_on_the_page_passes_every_check(tmp_path: Path, forked: None) -> None:
    code, lines = checked(tmp_path)
    assert code == 0 and [line.split()[0] for line in lines] == ["passed"] * 7


@pytest.mark.heavy
def test_a_rate_that_is_not_set_fails_the_training_checks(tmp_path: Path, forked: None) -> None:
    code, lines = checked(tmp_path, "workload.learning_rate_at(step)", "0.01")
    failed = [line for line in lines if line.startswith("failed")]
    assert code == 1 and ["it trains as" in line for line in failed] == [True, True]


def unclipped(text: str) -> str:
    """The page's method without clipping, which says so."""
    clip = text.split("norm = ")[1].split("\n")[0]
    return text.replace(clip, "None").replace("bit_exact = False", "clips = bit_exact = False")


@pytest.mark.usefixtures("in_process")
def test_a_method_that_does_not_clip_is_run_without_clipping_alone(tmp_path: Path) -> None:
    (tmp_path / "never_clips.py").write_text(unclipped(ONE_FILE))
    options = [
        *tiny.WORDS,
        "-m",
        "never-clips",
        "--lr",
        "0.1",
        "--steps",
        "3",
        "--methods",
        tmp_path,
        "--results",
        tmp_path,
    ]
    refused, trained = run(*options), run(*options, "--clip", "0")
    assert refused.returncode == 2 and "does not clip gradients: try --clip 0, or -m " in refused.stderr
    assert trained.returncode == 0 and "gate passed" in trained.stdout


@pytest.mark.heavy
def test_the_contract_runs_a_method_that_does_not_clip_as_it_is(tmp_path: Path, forked: None) -> None:
    code, lines = checked(tmp_path, ONE_FILE, unclipped(ONE_FILE))
    assert code == 0 and [line.split()[0] for line in lines] == ["passed"] * 7


def test_a_method_is_one_file_in_any_folder(added: Path) -> None:
    assert "plain-loop" in method.names((added,))
    assert method.load("plain-loop", (added,)).label == "My method"


def test_the_method_on_the_page_runs_by_its_files_name_and_passes_the_gate(
    added: Path, tmp_path: Path, forked: None
) -> None:
    """At a rate that shows a wrong optimizer."""
    sizes = "-l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 4 --lr 0.1".split()
    done = run("-m", "plain-loop", *sizes, "--methods", str(added), "--results", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "gate passed" in done.stdout


def test_an_added_method_appears_in_help(added: Path) -> None:
    assert "plain-loop" in run("run", "--methods", str(added), "--help").stdout


def test_the_folder_of_an_added_method_may_be_named_before_the_verb(added: Path) -> None:
    call = ["plan", "-m", "plain-loop", "-l", "2", "-h", "64", "--heads", "4"]
    before, after = (
        run(*ordered_call)
        for ordered_call in (["--methods", str(added), *call], [*call, "--methods", str(added)])
    )
    assert before.returncode == 0 and before.stdout == after.stdout


def test_several_folders_of_methods_may_be_named_before_the_verb(added: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (other / "other_loop.py").write_text(ONE_FILE)
    call = ["plan", "-m", "plain-loop,other-loop", "-l", "2", "-h", "64", "--heads", "4"]
    folders = ["--methods", str(added), f"--methods={other}"]
    before, after = run(*folders, *call), run(*call, *folders)
    assert before.returncode == 0 and before.stdout == after.stdout


@pytest.mark.heavy
def test_an_added_method_gets_the_contract_tests_unasked(added: Path) -> None:
    chosen = "plain-loop and not unasked and not refused"
    options = ["-q", "--all", "tests/core/test_method.py", "-k", chosen, "--methods", str(added)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert "7 passed" in done.stdout, done.stdout


def test_an_unknown_method_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean stronghold"):
        method.load("strongholt")


def test_an_unknown_option_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no option 'windows': it has window_size"):
        method.create("stronghold", {"windows": 3})


@pytest.mark.parametrize("verb", ARITHMETIC_VERBS)
def test_a_plan_without_a_return_is_one_line(verb: str, tmp_path: Path) -> None:
    """It was a traceback and exit code 1."""
    name = tmp_path.name
    (tmp_path / f"{name}.py").write_text(ONE_FILE.replace("return Plan(", "Plan("))
    options = [*verb.split(), "-m", name.replace("_", "-"), "-h", "64", "--heads", "4", "--methods", tmp_path]
    done = run(*options, *(["--results", tmp_path / "results"] if verb.split()[0] != "plan" else []))
    message = f"{name}.py's plan() fails: TypeError: expected a Plan as the result, got NoneType\n"
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and done.stderr.endswith(message), done


def test_an_option_of_a_type_that_is_not_known_is_one_line(tmp_path: Path) -> None:
    """It was a traceback and exit code 1."""
    (tmp_path / "no_type.py").write_text(ONE_FILE.replace("fused: bool", "fused: 'Bool'"))
    done = run("plan", "-m", "no-type", "--methods", tmp_path)
    message = f"error: {tmp_path}/no_type.py's class fails: NameError: name 'Bool' is not defined\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_an_option_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ValueError, match="window_size takes int"):
        method.create("stronghold", {"window_size": "three"})
    with pytest.raises(ValueError, match=r"not None \(none, true, false and numbers are not read as text\)"):
        method.create("hydra", {"policy": None})


@pytest.mark.parametrize("name", ["resident.py", "plain-loop.py"])
def test_a_second_file_of_a_methods_name_is_refused(added: Path, name: str) -> None:
    (added / name).write_text(ONE_FILE)
    done = run("-m", "resident", "-l", "1", "--methods", str(added), "--results", str(added / "results"))
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert f"expected one file of method {name.removesuffix('.py')}, got " in done.stderr


def test_a_file_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_file.py").write_text("import no_such_module")
    with pytest.raises(ValueError, match=r"broken_file.py does not load: ModuleNotFoundError"):
        method.load("broken-file", (tmp_path,))
    (tmp_path / "ends").mkdir()
    (tmp_path / "ends" / "ends_all.py").write_text("raise BaseException('of its own')")
    with pytest.raises(ValueError, match=r"ends_all.py does not load: BaseException: of its own"):
        method.load("ends-all", (tmp_path / "ends",))


def test_comments_do_not_change_a_methods_identity(tmp_path: Path) -> None:
    path = tmp_path / "plain_loop_twice.py"
    path.write_text(ONE_FILE)
    before = method.source_hash("plain-loop-twice", (tmp_path,))
    path.write_text(ONE_FILE + "# a remark\n")
    assert method.source_hash("plain-loop-twice", (tmp_path,)) == before
    path.write_text(ONE_FILE.replace("Step(loss.detach(), norm)", "Step(loss.detach())"))
    assert method.source_hash("plain-loop-twice", (tmp_path,)) != before


@pytest.mark.parametrize("largest", [0, 1, 2, 7, 100, 4097])
def test_the_largest_depth_is_found(largest: int) -> None:
    assert method.largest_depth(lambda depth: depth <= largest) == largest


@pytest.mark.parametrize("label", ["this test's", "the other's"])
def test_a_test_loads_its_own_method_where_another_test_wrote_one_of_the_same_name(
    tmp_path: Path, label: str
) -> None:
    folder = tiny.write_ending(tmp_path, "pass")
    file = folder / "ending.py"
    file.write_text(f"{file.read_text()}\nEnding.label = {label!r}\n")
    assert method.load("ending", (folder,)).label == label


def test_a_method_that_cannot_sum_micro_batches_names_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    l2l = method.create("l2l", {})
    monkeypatch.setattr(type(l2l), "accumulates", False)
    with pytest.raises(
        ValueError, match=r"L2L does not sum gradients.*try --micro-batches 1, or -m [^!]*resident"
    ):
        method.check(l2l, dataclasses.replace(TINY, micro_batches=2))
