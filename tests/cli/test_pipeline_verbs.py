"""The verbs of pipelines at the door: what they print and draw, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from methods.pipeline.profile import read
from tests.support import cli


def simulated(*words: object) -> dict[str, float]:
    done = cli.run("varuna", "simulate", "--json", *words)
    assert done.returncode == 0, done.stderr
    return {row["schedule"]: row["step_seconds"] for row in map(json.loads, done.stdout.splitlines())}


def test_one_micro_batch_takes_its_passes_and_messages() -> None:
    """Two stages, F 1 s, R 1 s, B 2 s, messages of 0.25 s; only Varuna's last stage is spared its recompute, and only
    its first one recomputes while the gradient is on its way."""
    found = simulated("--stages", 2, "--micro-batches", 1, "--send", 0.25)
    assert found == {"varuna": 1 + 0.25 + 3 + 0.25 + 2, "1f1b": 2 + 0.5 + 6, "gpipe": 2 + 0.5 + 6}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_named_gpts_passes_come_from_the_machines_rates_in_its_dtype(dtype: str) -> None:
    """All FLOPs of one sample on one stage."""
    from harness.core.job import Workload
    from harness.core.named_models import load
    from harness.devices import named_machines

    rates = named_machines.load("h200").rates(dtype)
    assert rates
    workload = Workload(**load("varuna-355m").sizes, batch_size=1)
    words = ("--model", "varuna-355m", "--machine", "h200", "--stages", 1, "--micro-batches", 1, "--schedule", "gpipe")
    found = simulated(*words, "--dtype", dtype)["gpipe"]
    assert found == pytest.approx(workload.flops_per_step / rates.device_flops_per_second)


def test_a_step_is_drawn(tmp_path: Path) -> None:
    out = tmp_path / "step.pdf"
    done = cli.run("varuna", "simulate", "--stages", 3, "--micro-batches", 4, "--jitter", 0.3, "--out", out)
    assert done.stdout.splitlines()[-2:] == [str(out), str(out.with_suffix(".png"))]
    assert out.read_bytes().startswith(b"%PDF") and out.with_suffix(".png").stat().st_size > 5000


def test_the_largest_named_gpt_gets_stages_that_fit() -> None:
    """8.3 B parameters take 124 GiB with Adam's moments: more than half of a device for fewer than two stages."""
    words = ("--model", "varuna-8.3b", "--machine", "h200", "--gpus", 16, "--batch", 64, "--memory", "40GiB")
    done = cli.run("varuna", "configure", *words)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1].split()[1]) >= 4


@pytest.mark.heavy
def test_the_published_gpt_is_measured_and_stages_are_chosen(tmp_path: Path) -> None:
    """A layer has 12 D^2 + 13 D parameters, and its output is T x D numbers."""
    words = ("-l", 2, "-h", 32, "--heads", 2, "--seq", 16, "--vocab", 100, "--ranks", 2, "--micro-batches", "1,2")
    done = cli.run("varuna", "profile", *words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path)
    assert [section.num_params for section in found.sections] == [
        12 * 32**2 + 13 * 32 + (100 + 16) * 32, 12 * 32**2 + 13 * 32, 100 * 32 + 2 * 32
    ]  # fmt: skip
    assert [section.costs[1].activation_bytes for section in found.sections] == [2 * 16 * 32 * 4] * 2 + [0]
    assert found.messages and found.sums and all(section.update_seconds > 0 for section in found.sections)
    done = cli.run("varuna", "configure", "--profile", tmp_path, "--gpus", 2, "--batch", 8)
    assert "chosen: " in done.stdout and len(done.stdout.splitlines()) > 6


@pytest.mark.parametrize(("words", "told"), [
    ("simulate --stages 2 --micro-batches 2 --schedule ours", "expected varuna or 1f1b or gpipe, got 'ours'"),
    ("simulate --stages 5 --micro-batches 2 --machine h200 -l 4", "--stages: expected at most 4"),
    ("simulate --stages 2 --micro-batches 2 -l 4", "expected --machine NAME with rates"),
    ("simulate --stages 2 --micro-batches 2 --send nan", "'--send': expected a finite number, got nan"),
    ("simulate --stages 1000000 --micro-batches 1000", "expected at most 100000000 stages times micro-batches"),
    ("profile", "expected -l and -h, or --model NAME"),
    ("configure --gpus 2 --batch 2", "expected --profile FOLDER, or --model NAME and --machine NAME"),
    ("simulate --stages 500 --micro-batches 500 --out /tmp/step.pdf --schedule gpipe", "expected at most 20000 stages"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line(words: str, told: str) -> None:
    done = cli.run("varuna", *words.split())
    assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1
