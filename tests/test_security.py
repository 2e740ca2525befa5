"""What SECURITY.md says of code that comes from elsewhere: nothing that is only read is run."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from harness.core.method import ROOT
from tests.support import cli

# Names whose call can run what a file or another process holds, and the files that may say them, each for a reason.
RUNNERS = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "read_pickle", "eval", "exec",
    "unsafe_load", "full_load", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "allow_pickle",
}  # fmt: skip
ALLOWED = {
    "methods/pipeline/checkpoint_reader.py": {"pickle"},  # an unpickler of an allow-list
    "methods/sharding/device_process.py": {"pickle"},  # of a pipe to a process that this one has forked
}


def said(path: Path) -> set[str]:
    """Of RUNNERS, those that a file imports, calls or passes; a method of a model, such as model.eval(), is none."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {item.name.partition(".")[0] for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module).partition(".")[0], *(item.name for item in node.names)}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword):
            found.add(str(node.arg))
        elif isinstance(node, ast.Attribute) and node.attr not in ("eval", "exec"):
            found.add(node.attr)
    return found & RUNNERS


def test_no_file_has_a_loader_that_can_run_code_but_those_with_a_reason() -> None:
    folders = ("harness", "methods", "cases", "bench", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): names for path in files if (names := said(path))}
    assert found == ALLOWED


def test_torch_loads_plain_values_only_and_yaml_makes_no_objects() -> None:
    for path in (path for folder in ("harness", "methods", "cases", "bench") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                told = ast.unparse(node)
                if told.startswith("torch.load"):
                    assert "weights_only=True" in told, path
                if told.startswith("yaml.load"):
                    assert "BaseLoader" in told and "SafeLoader" in told, path


class Touches:
    """Whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


LOG = "log_l2l_l-1_hs-32_bs-2_ws-0_2022-07-02.1656730240.txt"
SMALL = ("-l", "1", "-h", "32", "--heads", "2", "--seq", "16", "--vocab", "64", "-b", "2", "--steps", "3", "--no-probe")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["log_a.json"], ["compare", "l2l", "stronghold", "--results", "."]),
        (["log_a.json", "calibration.json"], ["report", "--results", "."]),
        (["log_a.json"], ["bundle", "--results", "."]),
        (["log_a.json"], ["verify", "--results", ".", "--claims", "log_a.json"]),
        ([LOG], ["import", LOG, "--results", "."]),
        (["machines.yaml"], ["plan", "-m", "l2l", "--machine", "h200", "--machines", "machines.yaml"]),
        (["text.bin", "text.idx"], ["-m", "resident", *SMALL, "--data", "text", "--results", "."]),
        (["slurm.yaml"], ["-m", "resident", *SMALL, "--on", "slurm", "--slurm", "slurm.yaml", "--results", "."]),
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
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(pickle.dumps(Touches(tmp_path / "touched")))
    done = cli.run(*words)
    assert not (tmp_path / "touched").exists()
    assert "Traceback" not in done.stderr and done.returncode in (0, 1, 2, 3), done.stderr


def test_the_pickle_of_these_tests_would_touch_its_file(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Touches(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()
