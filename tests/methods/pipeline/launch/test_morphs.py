"""Morphs: the gate names each part of the state that is lost; whole jobs on machines that leave, come and die."""

from __future__ import annotations

import math
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from bench.judge_launch import judge, judge_folder
from bench.morphs import random_schedule
from cases._morphs import (
    CHECKPOINT_EVERY,
    SMALL_MODEL,
    Change,
    Schedule,
    run_morphing_job,
    run_undisturbed_job,
)
from harness.base import fork_server
from harness.base.checkout import ROOT
from harness.base.child_process import child_environment
from methods.pipeline.checkpoint.checkpoints import Checkpoints
from methods.pipeline.launch import link
from methods.pipeline.launch.folder import Folder, read_lines, step_line
from methods.pipeline.launch.job import NUM_TIMED_STEPS, LaunchJob, Pace, Spread, SpreadChoice
from methods.pipeline.launch.launcher import Launcher
from methods.pipeline.launch.machines import (
    MachineLine,
    Remote,
    agent_command,
    is_this_machine,
    read_machine_list,
)
from methods.pipeline.pipeline import Varuna
from tests.methods.pipeline import user_model
from tests.support import forks
from tests.support.until import until

SIZE, BEFORE, AFTER = 8, 6, 3  # samples; steps before and after a morph
SCALE = 2.0**17  # the first step overflows


# ---- The gate


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class LaunchedJob:
    """A script's training in this process, and its record as a launcher would write it."""

    def __init__(self, folder: Path, batch_size: int = SIZE) -> None:
        self.reports, self.folder, self.batch_size = folder / "told", folder / "checkpoints", batch_size
        self.descriptor = os.open(self.reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.model = Varuna(
            user_model.make(),
            "0;",
            lambda size, device=None: user_model.batch(0, size),
            batch_size,
            4,
            fp16=True,
            device="cpu",
            shared_weights=user_model.SHARED,
        )
        self.model._link = link.Link(self.descriptor, str(self.folder), None, None, 0, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0)
        self.model.set_optimizer(self.optimizer, init_loss_scale=SCALE)

    def train(self, first: int, num_steps: int, data: int = 0, rate: int = 0) -> None:
        """`data`, `rate`: how far the script counts samples and learning rate from another step."""
        for step in range(first, first + num_steps):
            for group in self.optimizer.param_groups:
                group["lr"] = user_model.LEARNING_RATE / (1 + step + rate)
            _, overflow = self.model.step(user_model.batch(step + data, self.batch_size), user_model.MAX_NORM)
            if not overflow:
                self.optimizer.step()

    def steps(self) -> list[dict[str, Any]]:
        return [step_line({0: line}) for line in read_lines(self.reports) if line["kind"] == "step"]


def forget_updates(self: Any, name: str, master: Any, values: Any) -> None:
    TAKE_STATE(self, name, master, values)
    if "step" in (state := self.optimizer.state.get(master, {})):
        state["step"].zero_()


TAKE_STATE = Checkpoints._take_state
MUTANTS: dict[str, dict[str, Any]] = {
    "": {},
    "data-order": {"data": -BEFORE},
    "learning-rate": {"rate": -BEFORE},
    "batch": {"batch_size": SIZE - 2},
    "optimizer-step-count": {"bug": ("_take_state", forget_updates)},
    "loss-scale": {"scale": SCALE},
}


@pytest.mark.parametrize("reason", MUTANTS)
def test_the_gate_names_what_a_morph_lost(
    reason: str, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the steps before a checkpoint, half after, in another model: with nothing lost, to the last bit."""
    whole = LaunchedJob(tmp_path)
    whole.train(0, BEFORE)
    whole.model.checkpoint().result()
    before = whole.steps()
    assert before[0]["overflow"] and before[-1]["updates"]
    whole.train(BEFORE, AFTER)
    bug = MUTANTS[reason].get("bug")
    if bug:
        monkeypatch.setattr(Checkpoints, *bug)
    (tmp_path / "again").mkdir()
    again = LaunchedJob(tmp_path / "again", MUTANTS[reason].get("batch_size", SIZE))
    assert again.model.load_checkpoint(tmp_path / "checkpoints") == BEFORE
    again.model.scale.value = MUTANTS[reason].get("scale", again.model.scale.value)
    again.train(BEFORE, AFTER, MUTANTS[reason].get("data", 0), MUTANTS[reason].get("rate", 0))
    verdict = judge([*before, *again.steps()], whole.steps(), tolerance=0.0)
    assert verdict.reason == reason, verdict.text


STEPS_OF_TWO = [
    {
        "step": step,
        "loss": 1.0,
        "samples": 8,
        "data": "",
        "updates": 0,
        "learning_rate": 1,
        "loss_scale": 1,
        "overflow": False,
    }
    for step in (1, 2, 3)
]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (STEPS_OF_TWO, ""),
        ([STEPS_OF_TWO[0], STEPS_OF_TWO[2]], "step-missing"),
        (STEPS_OF_TWO[:2], "step-missing"),
        ([*STEPS_OF_TWO[:2], *STEPS_OF_TWO[1:]], "step-twice"),
        (STEPS_OF_TWO[::-1], "step-order"),
        ([*STEPS_OF_TWO[:2], STEPS_OF_TWO[2] | {"loss": 1.0 + 2e-6}], "loss"),
    ],
)
def test_the_gate_counts_steps(record: list[dict[str, Any]], reason: str) -> None:
    assert judge(record, STEPS_OF_TWO).reason == reason


def test_a_step_that_was_done_again_must_have_been_right_before() -> None:
    assert judge(STEPS_OF_TWO, STEPS_OF_TWO, [STEPS_OF_TWO[1] | {"loss": 1.1}]).reason == "loss"


def test_a_digest_of_samples_does_not_depend_on_how_replicas_share_them() -> None:
    whole = user_model.batch(3, 6)
    parts = [link.sample_digests(user_model.share(whole, replica, 3)) for replica in range(3)]
    assert link.sample_digests(whole) == [number for part in parts for number in part]
    assert len(set(link.sample_digests(whole))) == 6


# ---- What the launcher decides


def test_an_address_on_two_lines_is_two_machines(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# ours\n10.0.0.1\n\n10.0.0.2  # slow\n10.0.0.1\n")
    assert read_machine_list(tmp_path / "list") == [
        MachineLine("10.0.0.1", 0),
        MachineLine("10.0.0.2", 0),
        MachineLine("10.0.0.1", 1),
    ]


def test_another_machine_is_reached_by_ssh_and_under_slurm_by_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_this_machine("127.0.0.3") and not is_this_machine("192.0.2.1")
    assert agent_command("192.0.2.1")[0] == "ssh" and agent_command("192.0.2.1")[-2] == "192.0.2.1"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "--nodelist=192.0.2.1" in agent_command("192.0.2.1")


@pytest.mark.parametrize(
    ("workers", "stages", "replicas"), [(8, 3, 2), (6, 3, 2), (5, 3, 1), (2, 2, 1), (1, 1, 1), (17, 3, 4)]
)
def test_the_global_batch_stays_and_the_rest_waits(workers: int, stages: int, replicas: int) -> None:
    spread = SpreadChoice(16, 1, 3, 2).spread(workers)
    assert (spread.num_stages, spread.num_replicas) == (stages, replicas)


def test_what_chooses_is_given_once() -> None:
    for options in ({}, {"num_stages": 2}, {"num_stages": 2, "chunk_size": 1, "profile": Path("x")}):
        with pytest.raises(
            ValueError, match="expected either --nstages and --chunk-size, or --profile FOLDER"
        ):
            SpreadChoice(16, 1, **options)


def test_slow_ranks_are_those_above_the_median_of_their_stage() -> None:
    """By hand: stages 0,2,4 and 1,3,5; rank 4 takes 1.2 times as long as ranks 0 and 2, rank 3 1.1 times as 1 and 5."""
    pace, seconds = Pace(2), {0: 1.0, 2: 1.0, 4: 1.2, 1: 5.0, 3: 5.5, 5: 5.0}
    for _ in range(NUM_TIMED_STEPS):
        pace.add(seconds)
        assert not pace.slow_ranks(Spread(2, 3, 1))
    pace.add(seconds)
    assert [str(slow) for slow in pace.slow_ranks(Spread(2, 3, 1))] == [
        "rank 4: 1.2 s of work a step, 20% above the median of stage 0"
    ]


def test_a_folder_holds_one_job_of_one_launcher(tmp_path: Path) -> None:
    held = Folder(tmp_path, {"script": "a.py"})
    with pytest.raises(ValueError, match="expected an unused folder, got a running launcher"):
        Folder(tmp_path, {"script": "a.py"})
    held.locks[0].close()
    with pytest.raises(ValueError, match=r"expected a job with script b.py, got a.py; try another --folder"):
        Folder(tmp_path, {"script": "b.py"})


def test_steps_that_another_state_of_the_script_has_trained_are_told(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("import _rates")
    (tmp_path / "_rates.py").write_text("RATE = 3e-3")
    job = LaunchJob(tmp_path / "list", "a.py", (), tmp_path, SpreadChoice(12, 1, 1, 2, None))
    held = Folder(tmp_path, job.identity())
    held.keep_state(code=job.code())
    held.record_step({"step": 7})
    script.write_text("import _rates  # the rates")
    assert held.other_code(job.code()) == ""
    (tmp_path / "_rates.py").write_text("RATE = 3e-4")
    assert (
        held.other_code(job.code())
        == "the script, or what it imports, is not the code that trained the 7 steps there"
    )


def test_the_record_goes_on_after_the_checkpoint(tmp_path: Path) -> None:
    """A line that a kill cut off does not count."""
    held = Folder(tmp_path, {})
    for step in (1, 2, 3):
        held.record_step({"step": step})
    held.steps.write('{"step": 4, "lo')
    held.steps.flush()
    (held.checkpoints / "step_00000002").mkdir()
    (held.checkpoints / "step_00000002" / ".metadata").touch()
    (held.checkpoints / "step_00000003").mkdir()
    assert held.resume() == 2
    assert [line["step"] for line in read_lines(tmp_path / "steps.jsonl")] == [1, 2]
    assert [line["step"] for line in read_lines(tmp_path / "lost_steps.jsonl")] == [3]


@pytest.mark.parametrize(
    "line", ['{"step": "evil"}', "{}", '{"round": 1}', "{bad", "[1]", "7", '{"round": null}', "[" * 100_000]
)
def test_a_line_that_no_launcher_writes_is_told_with_its_file_and_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "steps.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/steps.jsonl, line 2: expected JSON that a launcher wrote, got"
    ) as error:
        Folder(tmp_path, {}).last_step()
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_job_that_is_none_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("{bad")
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/job.json: expected JSON that a launcher wrote, got '{{bad'"
    ):
        Folder(tmp_path, {})


@pytest.mark.parametrize("name", ["job.json", "steps.jsonl"])
def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(tmp_path: Path, name: str) -> None:
    Folder(tmp_path, {})
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (tmp_path / name).unlink()
        make(tmp_path / name)
        with pytest.raises(OSError, match="expected a regular file"):
            read_lines(tmp_path / name) if name.endswith("l") else Folder(tmp_path, {})


def test_a_step_without_its_facts_is_told_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=rf"{tmp_path} or .*: expected steps as a launcher writes them"):
        judge_folder(tmp_path, tmp_path, most_lost=0)


def test_of_old_checkpoints_a_copy_of_another_name_is_kept(tmp_path: Path) -> None:
    held = Folder(tmp_path, {})
    for name in (
        "step_00000001",
        "step_00000002",
        "step_00000003",
        "step_00000004",
        "step_00000001.bak",
        "step_1",
    ):
        (held.checkpoints / name).mkdir()
        (held.checkpoints / name / ".metadata").touch()
    held.prune_checkpoints()
    left = ["step_00000001.bak", "step_00000003", "step_00000004", "step_1"]
    assert sorted(path.name for path in held.checkpoints.iterdir()) == left


def test_a_checkpoint_beyond_the_record_is_not_taken(tmp_path: Path) -> None:
    """Its steps would be missing: ranks that outlived their launcher wrote it."""
    held = Folder(tmp_path, {})
    held.record_step({"step": 1})
    for step in (1, 2):
        (held.checkpoints / f"step_0000000{step}").mkdir()
        (held.checkpoints / f"step_0000000{step}" / ".metadata").touch()
    assert held.resume() == 1


class RecordingAgent:
    """Keeps the orders of its ranks, and starts none."""

    is_lost = False

    def __init__(self, line: MachineLine) -> None:
        self.line, self.ranks = line, list[dict[str, Any]]()

    def send(self, order: dict[str, Any]) -> None:
        self.ranks += order.get("ranks", [])


def seat(folder: Path, addresses: Sequence[str], per_machine: int) -> tuple[Launcher, list[Any], list[str]]:
    """A launcher that has seated as many ranks as fit, its agents, and what it says."""
    (folder / "list").write_text("".join(f"{address}\n" for address in addresses))
    num_ranks, said = per_machine * len(addresses), list[str]()
    choice = SpreadChoice(num_ranks, per_machine, 1, 1)
    held = Folder(folder / "job", {})
    launcher = Launcher(LaunchJob(folder / "list", "script.py", [], folder, choice), held, said.append)
    agents: list[Any] = [*map(RecordingAgent, launcher.listed_machines)]
    launcher._start_ranks(launcher._start_round(choice.spread(num_ranks), agents), "127.0.0.1", 1)
    held.locks[0].close()
    return launcher, agents, said


@pytest.mark.parametrize(
    ("addresses", "per_machine", "local", "nodes"),
    [
        (["127.0.0.1", "127.0.0.2"], 1, "0/2 1/2", "00"),
        (["127.0.0.1", "127.0.0.1"], 2, "0/4 1/4 2/4 3/4", "0000"),
        (["127.0.0.1", "192.0.2.1", "localhost"], 1, "0/2 0/1 1/2", "010"),
        (["192.0.2.1", "192.0.2.2", "192.0.2.1"], 2, "0/4 1/4 0/2 1/2 2/4 3/4", "001100"),
    ],
)
def test_ranks_on_one_host_are_numbered_together(
    addresses: list[str], per_machine: int, local: str, nodes: str, tmp_path: Path
) -> None:
    """Two lines that are both this machine would take the same GPU."""
    _, agents, _ = seat(tmp_path, addresses, per_machine)
    orders = sorted((order for agent in agents for order in agent.ranks), key=lambda order: order["rank"])
    named = [order["environment"] for order in orders]
    assert (
        " ".join(f"{variables['LOCAL_RANK']}/{variables['LOCAL_WORLD_SIZE']}" for variables in named) == local
    )
    assert "".join(variables["GROUP_RANK"] for variables in named) == nodes
    assert all(f"--local_rank={order['environment']['LOCAL_RANK']}" in order["arguments"] for order in orders)


def test_the_launcher_says_what_a_rank_notes(tmp_path: Path) -> None:
    launcher, (agent,), said = seat(tmp_path, ["127.0.0.1"], 2)
    launcher._hear(
        agent, {"kind": "note", "round": 1, "rank": 0, "text": "all ranks compute on the CPU: why"}
    )
    assert said[-1] == "all ranks compute on the CPU: why"


def test_random_schedules_always_leave_a_machine() -> None:
    for seed in range(100):
        schedule = random_schedule(seed, 40)
        assert (
            all(1 <= change.num_machines <= 4 for change in schedule.changes) and len(schedule.changes) >= 3
        )


# ---- The examples


@pytest.mark.parametrize("name", ["own_gpt", "own_bert"])
def test_an_example_trains(
    name: str, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    arguments = [
        "--rank=0",
        "--local_rank=0",
        "--stage_to_rank_map=0;",
        "--chunk_size=4",
        "--batch-size=4",
        "--steps=30",
    ]
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--blocks=2", "--width=32"])
    handler = signal.getsignal(signal.SIGUSR1)
    try:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    finally:
        signal.signal(signal.SIGUSR1, handler)
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert (
        len(losses) == 30
        and losses[0] == pytest.approx(math.log(128), abs=0.1)
        and losses[-1] < losses[0] - 0.3
    )


# ---- Whole jobs


def launch(
    folder: Path,
    script: str,
    *options: str,
    script_arguments: Sequence[str] = (),
    machines: int = 1,
    gpus: str = "",
) -> tuple[int, str]:
    """A script's exit code, and what the launcher said. All rounds compute on one device: `gpus`, or the CPU."""
    folder.mkdir(exist_ok=True)
    (folder / "list").write_text("127.0.0.1\n" * machines)
    (folder / "script.py").write_text(script)
    call = [sys.executable, *"-m harness varuna launch --batch-size 4 --nstages 1 --chunk-size 1".split()]
    call += ["--machine-list", str(folder / "list"), "--folder", str(folder / "job")]
    call += [*options, "script.py", *script_arguments]
    process = subprocess.Popen(
        call,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment() | {"CUDA_VISIBLE_DEVICES": gpus},
    )
    (folder / "pid").write_text(str(process.pid))
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    return process.returncode, out + err


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    code, output = launch(tmp_path, "", "--chunk-size", "0")
    assert code == 2 and output == "error: --chunk-size: expected at least 1, got 0\n"


@pytest.mark.heavy
def test_agents_of_this_machine_share_one_import_and_depend_on_their_launcher_alone(tmp_path: Path) -> None:
    """Children of one process, which outlive it, and end when their orders end."""
    Folder(tmp_path, {}).locks[0].close()
    order = {"folder": str(tmp_path), "script": "script.py", "code_dir": str(tmp_path)}
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with forks.own_server():
        agents = [
            Remote(MachineLine("127.0.0.1", number), order, tmp_path / "log", reports) for number in range(2)
        ]
        processes = [psutil.Process(reports.get()[1]["pid"]) for _ in agents]
        server: Any = fork_server._server
        assert [process.ppid() for process in processes] == [server.process.pid] * 2
    for agent in agents:
        agent.send({"do": "end"})
    assert [reports.get()[1]["kind"] for _ in agents] == ["ended"] * 2
    for agent in agents:
        agent.close()
    psutil.wait_procs(processes)


@pytest.mark.heavy
def test_an_error_of_the_script_ends_the_job_with_it(tmp_path: Path) -> None:
    code, output = launch(tmp_path, "import sys\nprint('rank', sys.argv[1:])\nraise KeyError('mine')")
    assert code == 3 and output.rstrip().endswith("KeyError: 'mine'") and "round 2" not in output
    log = (tmp_path / "job" / "logs" / "rank-0.txt").read_text()
    expected = ["--rank=0", "--local_rank=0", "--stage_to_rank_map=0;", "--chunk_size=1", "--batch-size=4"]
    assert str(expected) in log


@pytest.mark.heavy
def test_three_kills_in_a_row_end_the_job(tmp_path: Path) -> None:
    code, output = launch(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert code == 3 and output.count("round ") == 3
    assert output.rstrip().endswith(
        "3 crashes in a row without progress since step 0: rank 0 was killed by signal 9"
    )


@pytest.mark.heavy
def test_a_script_that_is_silent_ends(tmp_path: Path) -> None:
    code, output = launch(
        tmp_path, "import signal\nwhile True:\n    signal.pause()", "--stall-minutes", "0.05"
    )
    assert code == 6 and "error: no progress for 3 s: rank 0" in output
    until(lambda: not left_of(tmp_path))


EXAMPLE = f"""
import signal, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import own_gpt
"""
SAVES_NOTHING = """
take = signal.signal
signal.signal = lambda number, handler: take(number, lambda *_: sys.exit())
"""


@pytest.mark.heavy
@pytest.mark.parametrize("handler", ["", SAVES_NOTHING])
def test_a_signal_to_the_launcher_reaches_the_script_whose_handler_must_save(
    handler: str, tmp_path: Path
) -> None:
    arguments = ("--steps=100000", "--blocks=2", "--width=32", "--tokens=16")
    steps = tmp_path / "job" / "steps.jsonl"

    def interrupt() -> None:
        until(lambda: steps.exists() and steps.read_text().count("\n") > 3)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGUSR1)

    threading.Thread(target=interrupt, daemon=True).start()
    script = f"{EXAMPLE}{handler}own_gpt.main()"
    code, output = launch(tmp_path, script, "--checkpoint-every", "0", script_arguments=arguments)
    is_warned = "was written at SIGUSR1: the steps after 0 are trained again" in output
    assert (code, is_warned, "no checkpoint" in output) == (130, bool(handler), bool(handler))
    until(lambda: not left_of(tmp_path))


SAVES_BY_ITSELF = f"""
import os, time, torch
from methods.pipeline.launch.link import completed_future
{EXAMPLE}

class Varuna(own_gpt.Varuna):
    def checkpoint(self):
        torch.save([dict(self.named_parameters()), self.optimizer.state_dict()], "own.pt")
        self.saved()
        return completed_future()

    def load_checkpoint(self, step):
        weights, state = torch.load("own.pt")
        for name, weight in self.named_parameters():
            weight.data.copy_(weights[name])
        self.optimizer.load_state_dict(state)
        self.num_steps = step

    def step(self, inputs, **words):
        if self.num_steps == 5 and not os.path.exists("own.pt"):
            with open("list", "a") as machines:
                machines.write("127.0.0.2\\n")
            while signal.SIGUSR1 not in signal.sigpending():
                time.sleep(0.01)
        return super().step(inputs, **words)

own_gpt.Varuna = Varuna
own_gpt.main()
"""


@pytest.mark.heavy
def test_a_script_that_saves_by_itself_goes_on_from_the_step_that_it_tells(tmp_path: Path) -> None:
    """It began again at step 1 of the record, and its good steps were lost."""
    arguments = ("--steps=9", "--blocks=2", "--width=32", "--tokens=16")
    code, output = launch(tmp_path, SAVES_BY_ITSELF, "--checkpoint-every", "0", script_arguments=arguments)
    assert code == 0 and "round 2: 2 workers on 2 machines" in output and "after step 5" in output, output
    lines = read_lines(tmp_path / "job" / "steps.jsonl")
    assert [(line["step"], line["round"]) for line in lines] == [(n, 1 + (n > 5)) for n in range(1, 10)]
    assert not (tmp_path / "job" / "lost_steps.jsonl").exists()


SLOW_SCRIPT = f"""
{EXAMPLE}
import itertools, os, types
from methods.pipeline import pipeline

ticks = itertools.count(step=3 if os.environ["RANK"] == "1" else 1)
pipeline.time = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
own_gpt.main()
"""


@pytest.mark.heavy
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    """Of two replicas one takes three times as long for its passes, by clocks that each look puts on."""
    arguments = ("--steps=12", "--blocks=2", "--width=32", "--tokens=16")
    code, output = launch(tmp_path, SLOW_SCRIPT, script_arguments=arguments, machines=2)
    assert code == 0, output
    [line] = (tmp_path / "job" / "slow_machines.txt").read_text().splitlines()
    assert line.startswith("127.0.0.1 rank 1: ") and line.endswith(" above the median of stage 0")


def left_of(folder: Path) -> list[int]:
    """Processes that hold a file of this folder open, as agents and ranks do their lock, or name it."""
    left = []
    for process in psutil.process_iter():
        try:
            held = [*process.cmdline(), *(file.path for file in process.open_files())]
            if any(str(folder) in path for path in held):
                left.append(process.pid)
        except psutil.Error:
            continue
    return left


ONE_GPU = """
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
"""


@pytest.mark.heavy
def test_two_local_ranks_with_one_gpu_train_on_the_cpu_and_the_launcher_says_why(tmp_path: Path) -> None:
    arguments = ("--steps=3", "--blocks=2", "--width=32", "--tokens=16")
    script = f"{ONE_GPU}{EXAMPLE}own_gpt.main()"
    code, output = launch(tmp_path, script, "--nstages", "2", script_arguments=arguments, machines=2)
    note = (
        "all ranks compute on the CPU: each needs a GPU of its own, "
        "and the machine of rank 0 has 2 ranks and 1 GPU\n"
    )
    assert code == 0 and output.count(note) == 1, output
    assert (tmp_path / "job" / "logs" / "rank-0.txt").read_text().startswith(note)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("machines", [1, 2])
def test_the_example_trains_on_a_machine_with_one_gpu(machines: int, tmp_path: Path) -> None:
    arguments = ("--steps=9", "--blocks=2", "--width=32", "--tokens=16")
    code, output = launch(
        tmp_path, f"{EXAMPLE}own_gpt.main()", script_arguments=arguments, machines=machines, gpus="0"
    )
    assert code == 0 and ("all ranks compute on the CPU" in output) == (machines == 2), output


@pytest.mark.heavy
def test_a_job_on_machines_that_leave_die_and_come_trains_as_one_process(tmp_path: Path) -> None:
    """4 -> 2 -> 4 -> 3 -> 1 workers: two leave by SIGTERM, two come, one dies by kill -9, two leave; then the launcher
    itself dies by kill -9, and another one takes over."""
    steps = 34
    changes = (
        Change(4, 2, "notice"),
        Change(8, 4),
        Change(16, 3, "death"),
        Change(20, 1),
        Change(26, 1, "launcher"),
    )
    alone = run_undisturbed_job(tmp_path / "alone", steps)
    job = run_morphing_job(tmp_path / "morphs", Schedule(4, 4, changes), steps, SMALL_MODEL)
    assert job.exit_code == 0, job.output
    verdict = judge_folder(tmp_path / "morphs" / "job", alone, CHECKPOINT_EVERY)
    assert verdict.passed, verdict.text
    rounds = [
        line for line in read_lines(tmp_path / "morphs" / "job" / "events.jsonl") if line["event"] == "round"
    ]
    assert [line["workers"] for line in rounds] == [4, 2, 4, 3, 1, 1], job.output
    until(lambda: not left_of(tmp_path))
