"""Measures a newcomer's first minute: clones COMMIT (default: HEAD), runs the README's first command, and repeats the
command at another model size.

    .venv/bin/python -m bench.first_minute [COMMIT]

Prints the seconds of each part. If COMMIT is old and lacks an option, the command leaves this option out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.base.checkout import ROOT

COMMAND = ["-m", "stronghold", "-l", "4", "-h", "256", "-b", "2", "--seq", "256"]
OTHER_SIZE = ["-m", "stronghold", "-l", "6", "-h", "256", "-b", "2", "--seq", "256"]
PARTS = {"[1/1] ": "run", "(reference) ": "reference", "(probe) ": "probe", "stronghold ": "gate and end"}
IMPORTS = ("process", "start", "import")


def called(project: Path, words: list[str]) -> dict[str, float]:
    """Run the project's run.sh with the arguments `words`. Return the seconds of each part of the run, and of the whole
    run as `all`. A part begins with an output line that starts with a key of PARTS.
    """
    began = last = time.monotonic()
    part, found = "set-up", dict[str, float]()
    command = [str(project / "run.sh"), *words, "--results", "results"]
    process = subprocess.Popen(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    for line in process.stdout:
        now = time.monotonic()
        following = next((name for start, name in PARTS.items() if line.startswith(start)), None)
        following = "compile" if "building" in line else "run" if part == "compile" else following
        if following:
            found[part] = found.get(part, 0.0) + now - last
            part, last = following, now
        sys.stderr.write(line)
    if process.wait():
        sys.exit(f"expected a verdict, got exit code {process.returncode}")
    found[part] = found.get(part, 0.0) + time.monotonic() - last
    return {**found, "all": time.monotonic() - began}


def import_seconds(project: Path) -> float:
    """Return the seconds that the run's record has for the start of the worker process, up to the imports of torch and
    of the method.
    """
    (path,) = (project / "results").glob("log_stronghold_l-4*.json")
    phases = json.loads(path.read_text())["phase_seconds"]
    return sum(phases.get(name, 0.0) for name in IMPORTS)


def main() -> None:
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    with tempfile.TemporaryDirectory() as temporary:
        project = Path(temporary) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(project)], check=True)
        subprocess.run(["git", "-C", str(project), "checkout", "-q", commit], check=True)
        first = called(project, COMMAND)
        rows = {
            **first,
            "import (in run)": import_seconds(project),
            "other size": called(project, OTHER_SIZE)["all"],
        }
    print("\n".join(f"{name:<16} {seconds:6.1f} s" for name, seconds in rows.items()))


if __name__ == "__main__":
    main()
