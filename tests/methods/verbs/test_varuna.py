"""The verbs of pipelines at the door: what they print and draw, and how they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from methods.pipeline.config import measured_profile
from methods.pipeline.config.profile import read_profile
from methods.verbs.varuna import varuna
from tests.support import cli, forks
from tests.support.configured import configured


def simulated(*arguments: object) -> dict[str, float]:
    done = cli.run("varuna", "simulate", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {row["schedule"]: row["step_seconds"] for row in map(json.loads, done.stdout.splitlines())}


def test_one_micro_batch_takes_its_passes_and_messages() -> None:
    """Two stages, F 1 s, R 1 s, B 2 s, messages of 0.25 s; only Varuna's last stage is spared its recompute, and only
    its first one recomputes while the gradient is on its way."""
    seconds = simulated("--stages", 2, "--micro-batches", 1, "--send", 0.25)
    assert seconds == {"varuna": 1 + 0.25 + 3 + 0.25 + 2, "1f1b": 2 + 0.5 + 6, "gpipe": 2 + 0.5 + 6}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_named_gpts_passes_come_from_the_machines_rates_in_its_dtype(dtype: str) -> None:
    """All FLOPs of one sample on one stage."""
    from harness.core.job import Workload
    from harness.devices import named_machines
    from harness.models.named_models import load

    rates = named_machines.load("h200").rates(dtype)
    assert rates
    workload = Workload(**load("varuna-355m").sizes, batch_size=1)
    arguments = (
        "--model",
        "varuna-355m",
        "--machine",
        "h200",
        "--stages",
        1,
        "--micro-batches",
        1,
        "--schedule",
        "gpipe",
    )
    seconds = simulated(*arguments, "--dtype", dtype)["gpipe"]
    assert seconds == pytest.approx(workload.flops_per_step / rates.device_flops_per_second)


def test_a_step_is_drawn(tmp_path: Path) -> None:
    out = tmp_path / "step.pdf"
    done = cli.run("varuna", "simulate", "--stages", 3, "--micro-batches", 4, "--jitter", 0.3, "--out", out)
    assert done.stdout.splitlines()[-2:] == [str(out), str(out.with_suffix(".png"))]
    assert out.read_bytes().startswith(b"%PDF") and out.with_suffix(".png").stat().st_size > 5000


def test_the_largest_named_gpt_gets_stages_that_fit() -> None:
    """8.3 B parameters take 124 GiB with Adam's moments: more than half of a device for fewer than two stages."""
    arguments = (
        "--model",
        "varuna-8.3b",
        "--machine",
        "h200",
        "--gpus",
        16,
        "--batch",
        64,
        "--memory",
        "40GiB",
    )
    done = cli.run("varuna", "configure", *arguments)
    assert done.returncode == 0, done.stderr
    _, memory, network, chosen = done.stdout.splitlines()[:4]
    assert memory == "memory of a device: 40.0 GiB (--memory)"
    assert network == "messages and sums of gradients: 0 s (assumed; try --network)"
    assert chosen.startswith("chosen: ") and int(chosen.split()[1]) >= 4 and chosen.endswith(" of 16 devices")


def test_the_20_best_configurations_are_shown_with_what_limits_each() -> None:
    """Of 97. All that is shown fits the memory of the entry, but for its reserve; two stages fit nowhere."""
    arguments = (
        "varuna",
        "configure",
        "--model",
        "varuna-8.3b",
        "--machine",
        "h200",
        "--gpus",
        16,
        "--batch",
        64,
    )
    done, every = cli.run(*arguments), cli.run(*arguments, "--json").stdout.splitlines()
    assert "\nmemory of a device: 29.8 GiB (h200 in machines.yaml: 31GiB, less a reserve)\n" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line[:7].strip().isdigit()]
    assert len(rows) == 20 and all(line.rstrip().endswith("passes") for line in rows)
    assert f"the best 20 of {len(every)} configurations; --json prints all" in done.stdout


@pytest.mark.parametrize(("gpus", "message"), [(2, "more devices"), (64, "more CutPoints")])
def test_where_nothing_fits_only_what_can_help_is_named(gpus: int, message: str) -> None:
    """It was smaller micro-batches, of one sample each."""
    arguments = ("--machine", "h200", "-l", 8, "-h", 65536, "--gpus", gpus, "--batch", 64)
    done = cli.run("varuna", "configure", *arguments)
    assert done.returncode == 4 and done.stderr.endswith(
        f"; try {message}, devices of more memory or a smaller model\n"
    )


def test_where_nothing_fits_each_row_says_what_it_lacks_the_least_first() -> None:
    arguments = ("--model", "varuna-8.3b", "--machine", "h200", "--gpus", 2, "--batch", 4)
    done = cli.run("varuna", "configure", *arguments)
    lacks = [float(number) for number in re.findall(r"does not fit: lacks ([\d.]+) GiB", done.stdout)]
    assert done.returncode == 4 and len(lacks) == 5 and lacks == sorted(lacks)
    assert f"{lacks[0]} GiB more than the 29.8 GiB there are" in done.stderr and "chosen" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            (),
            "forward 1 s, recompute 1 s, backward 2 s (assumed; try --passes, or --model and --machine); messages: 0 s",
        ),
        (
            ("--passes", 2, 0, 3, "--send", 1),
            "forward 2 s, recompute 0 s, backward 3 s (--passes); messages: 1 s (--send)",
        ),
        (
            ("--model", "gpt2", "--machine", "h200"),
            "(GPT at the rates of h200 in machines.yaml); messages: 0 s (assumed",
        ),
    ],
)
def test_a_simulated_step_tells_the_passes_and_messages_that_it_is_of(arguments: tuple, line: str) -> None:
    done = cli.run("varuna", "simulate", "--stages", 2, "--micro-batches", 2, *arguments)
    assert done.stdout.startswith("passes of a stage: ") and line in done.stdout.splitlines()[0]


@pytest.mark.parametrize("option", ["--send", "--jitter", "--pass-jitter", "--sum"])
def test_seconds_beyond_all_time_are_refused(option: str) -> None:
    done = cli.run("varuna", "simulate", "--stages", 2, "--micro-batches", 2, option, "1e308")
    assert done.returncode == 2 and "1e+308 is not in the range" in done.stderr


def test_what_is_written_by_default_is_no_change_of_the_checkout() -> None:
    commands = varuna.commands
    folders = [
        option.default
        for name in ("profile", "launch")
        for option in commands[name].params
        if option.name == "folder"
    ]
    assert {f"/{folder}/" for folder in folders} <= set((ROOT / ".gitignore").read_text().splitlines())
    assert len(folders) == 2


@pytest.mark.heavy
def test_the_published_gpt_is_measured_and_stages_are_chosen(tmp_path: Path) -> None:
    """A layer has 12 D^2 + 13 D parameters, and its output is T x D numbers."""
    arguments = (
        "-l",
        2,
        "-h",
        32,
        "--heads",
        2,
        "--seq",
        16,
        "--vocab",
        100,
        "--ranks",
        2,
        "--micro-batches",
        "1,2",
    )
    done = cli.run("varuna", "profile", *arguments, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    measured = read_profile(tmp_path)
    assert [section.num_params for section in measured.sections] == [
        12 * 32**2 + 13 * 32 + (100 + 16) * 32,
        12 * 32**2 + 13 * 32,
        100 * 32 + 2 * 32,
    ]
    assert [section.costs[1].activation_bytes for section in measured.sections] == [2 * 16 * 32 * 4] * 2 + [0]
    assert (
        measured.messages
        and measured.sums
        and all(section.update_seconds > 0 for section in measured.sections)
    )
    done = cli.run("varuna", "configure", "--profile", tmp_path, "--gpus", 2, "--batch", 8)
    assert "chosen: " in done.stdout and len(done.stdout.splitlines()) > 6


def test_a_model_by_its_config_is_measured_and_foretold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sections are the embedding with the first layer, layers, and the untied head with its norm."""
    monkeypatch.setattr(measured_profile, "ask", forks.ask)
    model = ("--model", "tiny-llama", "--seq", 16)
    done = cli.run("varuna", "profile", *model, "--dtype", "bf16", "--micro-batches", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    anatomy = configured("llama").anatomy
    table, layer, norm = 101 * 32, anatomy.layer_params, 32
    assert [section.num_params for section in read_profile(tmp_path).sections] == [
        table + layer,
        layer,
        layer,
        norm + table,
    ]
    done = cli.run("varuna", "configure", *model, "--machine", "h200", "--gpus", 3, "--batch", 8)
    assert done.returncode == 0 and "chosen: " in done.stdout
    done = cli.run("varuna", "simulate", *model, "--machine", "h200", "--stages", 2, "--micro-batches", 2)
    assert "(tiny-llama at the rates of h200" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "simulate --stages 2 --micro-batches 2 --schedule ours",
            "expected varuna or 1f1b or gpipe, got 'ours'",
        ),
        ("simulate --stages 5 --micro-batches 2 --machine h200 -l 4", "--stages: expected at most 4"),
        ("simulate --stages 2 --micro-batches 2 -l 4", "--machine: expected a machine whose rates"),
        ("simulate --stages 2 --micro-batches 2 --send nan", "'--send': expected a finite number, got nan"),
        (
            "simulate --stages 1000000 --micro-batches 1000",
            "expected at most 100000000 stages times micro-batches",
        ),
        ("profile", "expected -l and -h, or --model NAME"),
        ("profile -l 2 --model gpt2,gpt2-xl", "expected one model, got several"),
        ("profile --model gpt2,gpt2-xl", "expected one model, got several"),
        ("simulate --stages 4 --micro-batches 8 --model gpt2,gpt2-xl", "expected one model, got several"),
        ("configure --gpus 2 --batch 2", "expected --profile FOLDER, or --model NAME and --machine NAME"),
        (
            "simulate --stages 500 --micro-batches 500 --out /tmp/step.pdf --schedule gpipe",
            "expected at most 20000 stages",
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: str, message: str) -> None:
    done = cli.run("varuna", *arguments.split())
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
