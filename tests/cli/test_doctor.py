"""doctor: what it says of this machine, what a calibration finds and who uses it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.core import method
from harness.core.job import Budget, Workload
from harness.core.rates import NEEDED_FACTS, Rates, rates_from_facts
from harness.devices import cuda_budget, machine, named_machines, room
from tests.support.cli import run

SMALL = Workload(num_layers=1, hidden_size=64, num_heads=2, seq_len=32, batch_size=2, vocab_size=128)
# What a calibration might have found, in round numbers.
FOUND: dict[str, Any] = {
    "compute": {"layer": {"forward_seconds": 1.0, "backward_seconds": 3.0}, "head_seconds": 5.0},
    "copies": {"inbound_page_locked": 10e9, "outbound_page_locked": 20e9, "both_ways": 15e9},
    "updates": {
        "alone": {"1": 1e9, "2": 2e9},
        "ahead": 1.25e9,
        "under_copies": {"threads": 2, "params_per_second": 1.5e9, "copied_bytes_per_second": 20e9},
        "on_device": 1e10,
        "streamed": 8e9,
    },
    "disk": {"read": 2e9, "write": 1e9, "both_ways": 1.5e9},
}


def entry(workload: Workload, flops_per_second: float) -> dict[str, Any]:
    rates = dataclasses.asdict(Rates(flops_per_second))
    flops = workload.layer_flops
    return {"device": "cpu", "dtype": workload.dtype, "forward_flops": flops, "rates": rates}


def test_doctor_tells_of_the_machine_and_of_every_method() -> None:
    output = run("doctor", "--device", "cpu").stdout
    lines = {line[:20].strip(): line[20:] for line in output.splitlines()}
    assert {"cpu", "gpu", "disk", "compiler", *method.names()} <= set(lines)
    assert "NVIDIA GPUs only" in lines["superoffload"] and lines["resident"] == "ready on cpu"
    assert "./run.sh doctor --calibrate" in lines["calibration"]


def test_doctor_ends_with_exit_code_7_where_nothing_can_run(monkeypatch) -> None:
    monkeypatch.setattr(method, "names", lambda folders=(): ["superoffload"])
    assert run("doctor", "--device", "cpu").returncode == 7


def test_a_calibration_that_cannot_be_kept_is_not_measured(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CALIBRATION", Path("/proc/results/calibration.json"))
    done = run("doctor", "--calibrate", "--device", "cpu", "--results", tmp_path)
    assert done.returncode == 2 and "calibrating" not in done.stdout
    assert (
        done.stderr.startswith("error: cannot write to /proc/results: ")
        and len(done.stderr.splitlines()) == 1
    )


def test_rates_of_a_calibration_by_hand() -> None:
    """A layer takes 1 s forward and 3 s backward, the head 5 s; 28 bytes a parameter pass through the host's memory,
    alone 56 GB/s and under copies 42 + 20."""
    from methods.streaming.placement.calibrate import rates_of

    workload = Workload(num_layers=10)
    rates = rates_of(FOUND, workload, "cuda")
    tokens = 4 * 1024
    assert rates.device_flops_per_second == pytest.approx(
        4 * (24 * tokens * 2048**2 + 2 * tokens * 1024 * 2048) / 4
    )
    assert (rates.forward_share, rates.head_flops_per_second) == (0.25, 6 * tokens * 50304 * 2048 / 5)
    assert (rates.duplex_share, rates.host_bytes_per_second) == (0.5, 62e9)
    assert (rates.host_adam_params_per_second, rates.device_bytes_per_second) == (2e9, 28e10)
    assert rates.streamed_cost == 1.25
    assert (rates.ahead_cost, rates.disk_duplex_share, rates.disk_read_bytes_per_second) == (1.6, 0.5, 2e9)


def test_a_real_calibration_makes_rates_and_is_shown(monkeypatch, tmp_path: Path) -> None:
    from methods.streaming.placement import calibrate
    from tests.support import short_calibration

    short_calibration.shorten(monkeypatch)
    measured = calibrate.measure_machine(SMALL, "cpu", tmp_path)
    rates = calibrate.rates_of(measured, SMALL, "cpu")
    computed = {"batch_size": 2, "seq_len": 32}
    sizes = {
        "hidden_size": 64,
        "batch_size": 2,
        "seq_len": 32,
        "date": "today",
        "load_average": 1000.0,
        "computed": computed,
    }
    machine.keep_calibration(
        {**entry(SMALL, 1), **sizes, "measured": measured, "rates": dataclasses.asdict(rates)}
    )
    output = run("doctor", "--device", "cpu").stdout
    assert "64 wide, 2 x 32 tokens" in output and "the machine was busy" in output
    assert room.room_within(Budget(), "sim", SMALL).rates == rates


def test_the_calibration_of_the_nearest_size_is_used() -> None:
    small, large = Workload(hidden_size=512), Workload(hidden_size=4096)
    machine.keep_calibration(entry(small, 1e12))
    machine.keep_calibration(entry(large, 2e12))
    for hidden_size, rate in ((768, 1e12), (2048, 2e12)):
        rates = machine.rates("cpu", Workload(hidden_size=hidden_size))
        assert rates is not None and rates.device_flops_per_second == rate
    assert machine.rates("cpu", Workload(dtype="bf16")) is None and machine.rates("cuda", small) is None


@pytest.mark.parametrize(("load", "is_busy"), [(0.5, False), (1000.0, True)])
@pytest.mark.parametrize("verb", ["plan", "advise"])
def test_who_uses_rates_that_were_measured_beside_other_work_says_so(
    verb: str, load: float, is_busy: bool
) -> None:
    machine.keep_calibration({**entry(Workload(), 1e12), "load_average": load})
    output = run(verb, "-m", "resident", "-l", "2").stdout
    assert (f"caution: this machine's rates were measured at a load of {load:.3g} on " in output) == is_busy
    assert "caution" not in run(verb, "-m", "resident", "-l", "2", "--machine", "v100-vm").stdout


def test_the_entry_of_this_machine_gives_elsewhere_the_rates_that_were_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "devices", lambda: ["cuda", "cpu", "sim"])
    monkeypatch.setattr(machine, "gpu", lambda: {"gpu": "NVIDIA X 1", "gpu_bytes": 24 * 2**30, "driver": "1"})
    monkeypatch.setattr(machine, "has_bf16", lambda: True)
    measured_rates = Rates(
        1e14,
        0.3,
        9e11,
        2.5e10,
        2.4e10,
        0.8,
        5e10,
        2e9,
        disk_read_bytes_per_second=3e9,
        disk_write_bytes_per_second=2e9,
    )
    kept = {
        **entry(Workload(dtype="bf16"), 1),
        "device": "cuda",
        "dtype": "bf16",
        "rates": dataclasses.asdict(measured_rates),
    }
    machine.keep_calibration(kept)
    (file := tmp_path / "mine.yaml").write_text(run("rates", "--results", tmp_path).stdout)
    machine_of_file = named_machines.load("nvidiax1", file)
    # Of the directions of a link the slower one, over which devices exchange, too.
    slower = dataclasses.replace(
        measured_rates, inbound_bytes_per_second=2.4e10, exchange_bytes_per_second=2.4e10
    )
    assert machine_of_file.rates("bf16") == slower
    assert (
        machine_of_file.device_bytes == 24 * 2**30 - cuda_budget.context_bytes()
        and "Measured there" in machine_of_file.about
    )
    assert run("advise", "--gpu", "nvidiax1", "--machines", file, "-m", "resident", "-l", "2").returncode == 0


def test_a_machine_without_a_gpu_is_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "devices", lambda: ["cpu", "sim"])
    ended = run("rates")
    assert ended.returncode == 2 and "expected a GPU, got none" in ended.stderr


def test_a_calibration_that_lacks_a_rate_is_none() -> None:
    old = entry(SMALL, 1)
    del old["rates"]["ahead_cost"]
    machine.keep_calibration(old)
    assert machine.calibrations() == [] and room.room_within(Budget(), "cpu", SMALL).rates is None


def test_a_later_calibration_takes_the_place_of_its_own_last_one() -> None:
    for rate in (1e12, 2e12):
        machine.keep_calibration(entry(SMALL, rate))
    (kept,) = machine.calibrations()
    assert kept["rates"]["device_flops_per_second"] == 2e12


@pytest.mark.parametrize("change", [{"cores": 1024}, {"cpu": "another"}, {"torch": "0"}])
def test_the_calibration_of_another_machine_is_not_used(change: dict[str, Any]) -> None:
    machine.keep_calibration(entry(SMALL, 1e12))
    data = json.loads(machine.CALIBRATION.read_text())
    machine.CALIBRATION.write_text(json.dumps({**data, "machine": data["machine"] | change}))
    assert machine.rates("cpu", SMALL) is None


def test_a_calibration_that_was_cut_off_is_none() -> None:
    machine.CALIBRATION.parent.mkdir(exist_ok=True)
    machine.CALIBRATION.write_text('{"machine": {')
    assert machine.calibrations() == []


def test_a_simulated_link_is_the_links_rate() -> None:
    machine.keep_calibration(entry(SMALL, 1e12))
    rates = room.room_within(Budget(link_bytes_per_second=2**30), "sim", SMALL).rates
    assert rates is not None and rates.inbound_bytes_per_second == rates.outbound_bytes_per_second == 2**30


@pytest.mark.parametrize("missing", NEEDED_FACTS)
def test_facts_without_a_rate_that_is_needed_make_none(missing: str) -> None:
    facts = dict.fromkeys(NEEDED_FACTS, 1.0)
    assert rates_from_facts(facts) is not None and rates_from_facts({**facts, missing: "fast"}) is None
    assert rates_from_facts({name: value for name, value in facts.items() if name != missing}) is None


@pytest.mark.parametrize(
    "rates",
    [
        {"device_flops_per_second": 0},
        {"device_flops_per_second": 5e-324},
        {"device_flops_per_second": 1e308},
        {"device_flops_per_second": math.inf},
        {"inbound_bytes_per_second": math.nan},
        {"forward_share": 1.0},
        {"duplex_share": 1e-300},
    ],
)
def test_rates_of_no_machine_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got"):
        Rates(**{"device_flops_per_second": 1e12, **rates})


def test_a_fact_of_no_machine_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"^a machine's device_flops_per_second: expected 1 to .*, got 1e-08$"
    ):
        rates_from_facts(dict.fromkeys(NEEDED_FACTS, 1e-20))
