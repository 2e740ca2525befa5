"""The launcher's command: `./run.sh varuna launch`, or `python -m methods.varuna.run`, as in the original Varuna."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Any

import click

from methods.pipeline.launch.folder import Folder
from methods.pipeline.launch.job import LaunchJob, SpreadChoice
from methods.pipeline.launch.launcher import INTERRUPTED, OK, Launcher
from methods.pipeline.launch.machines import read_machine_list

PATH_TYPE = click.Path(path_type=Path)
ORIGINAL_SETTINGS = {
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],
}


@click.command(context_settings=ORIGINAL_SETTINGS)
@click.option(
    "--machine-list",
    "--machine_list",
    type=PATH_TYPE,
    required=True,
    help="File with one machine's address per line, read again during the job.",
)
@click.option(
    "--gpus-per-node",
    "--gpus_per_node",
    "per_machine",
    type=int,
    default=1,
    show_default=True,
    help="Number of ranks on each machine.",
)
@click.option(
    "--batch-size", "--batch_size", type=int, required=True, help="Samples per step, over all replicas."
)
@click.option(
    "--nstages",
    "num_stages",
    type=int,
    help="Number of stages; with fewer ranks than this, one stage per rank.",
)
@click.option("--chunk-size", "--chunk_size", type=int, help="Samples per micro-batch.")
@click.option(
    "--profile",
    type=PATH_TYPE,
    metavar="FOLDER",
    help="Choose --nstages and --chunk-size by the profile in FOLDER, which Profiler wrote.",
)
@click.option(
    "--code-dir",
    "--code_dir",
    type=PATH_TYPE,
    default=Path(),
    help="Working folder of the ranks; default: the current folder.",
)
@click.option(
    "--folder",
    type=PATH_TYPE,
    default=Path("varuna_job"),
    show_default=True,
    help="Folder of the job's record, checkpoints and logs; a job found there is continued.",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Most steps to repeat after a rank died; 0: the script saves its own checkpoints.",
)
@click.option(
    "--stall-minutes",
    type=float,
    default=30.0,
    show_default=True,
    help="End the job after this many minutes without progress.",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    machine_list: Path,
    code_dir: Path,
    folder: Path,
    checkpoint_every: int,
    stall_minutes: float,
    script: str,
    arguments: tuple[str, ...],
    **settings: Any,
) -> None:
    """Train a script with CutPoints on machines that come and go.

    Exit codes: 3 the script crashed, 6 no progress, 130 interrupted. After each of these the same call continues the
    job.
    """
    if not 0 < stall_minutes < math.inf:
        raise ValueError(f"--stall-minutes: expected minutes above 0, got {stall_minutes:g}; try 30")
    code_dir = code_dir.resolve()
    if not (code_dir / script).is_file():
        raise ValueError(f"{code_dir / script}: expected a script, got none; try --code-dir")
    choice = SpreadChoice(**settings)
    read_machine_list(machine_list)
    job = LaunchJob(
        machine_list.resolve(),
        script,
        arguments,
        code_dir,
        choice,
        checkpoint_every or None,
        60 * stall_minutes,
    )
    job_folder = Folder(folder.resolve(), job.identity())
    if job_folder.state["end"] == "done":
        code_text = job_folder.other_code(job.code())
        note = f"; {code_text}" if code_text else ""
        print(f"done before: {job_folder.path / 'steps.jsonl'}; --folder names another one{note}")
        sys.exit(OK)
    # As at Ctrl-C, ranks save a checkpoint and end.
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    sys.exit(Launcher(job, job_folder, lambda line: print(line, flush=True)).run())


def main() -> None:
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, signal.default_int_handler)
    try:
        launch.main(standalone_mode=False)
    except click.ClickException as error:
        print(f"error: {error.format_message().rstrip('.')}; see --help", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except click.Abort:  # Ctrl-C before the launcher ran
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
