"""plan: what it says, that it says it without torch, and what machines by name do to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from harness.base.checkout import ROOT
from harness.core import method
from harness.core.job import GIB, STATE_KINDS, Plan, Room, Workload, gib
from harness.core.rates import rates_from_facts
from harness.devices import machine, named_machines
from harness.plan.resources import least_seconds
from methods.shared.memory_needs import file_system
from tests.support.cli import jobs_of, run

SMALL = ["-l", "4", "-h", "128", "--seq", "64", "--vocab", "512", "--heads", "4"]


def plan(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["run.sh", "plan", *arguments, "--json"])
    main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def fails(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The one line on standard error of a call that ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["run.sh", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_every_method_has_a_row_by_kind_that_adds_up(capsys, monkeypatch) -> None:
    rows = plan(capsys, monkeypatch, "-m", "all", *SMALL)
    assert [row["method"] for row in rows] == method.names()
    for row in rows:
        for memory in ("device", "host", "disk"):
            assert (
                set(row[memory]) <= set(STATE_KINDS) and sum(row[memory].values()) == row[f"{memory}_bytes"]
            )


def test_the_largest_depth_fits_and_one_layer_more_does_not(capsys, monkeypatch) -> None:
    budget = ["--device-memory", "16MiB", "--host-memory", "64MiB", "--disk-memory", "64MiB"]
    for row in plan(
        capsys, monkeypatch, "-m", "resident,l2l,stronghold,zero-offload,zero-infinity", *SMALL, *budget
    ):
        depth = row["largest_layers"]
        sizes = ["-m", row["method"], *SMALL[2:], *budget]
        (fits,) = plan(capsys, monkeypatch, *sizes, "-l", str(depth))
        (fails,) = plan(capsys, monkeypatch, *sizes, "-l", str(depth + 1))
        assert fits["fits"] and not fails["fits"] and row["binding"] in fails["shortfall"], row["method"]


def test_a_resident_run_is_bound_by_the_device_and_a_streamed_one_by_the_host(capsys, monkeypatch) -> None:
    budget = ["--device-memory", "16MiB", "--host-memory", "64MiB"]
    rows = plan(capsys, monkeypatch, "-m", "resident,l2l,stronghold", *SMALL, *budget)
    assert {row["method"]: row["binding"] for row in rows} == {
        "resident": "device",
        "l2l": "host",
        "stronghold": "host",
    }
    largest = {row["method"]: row["largest_layers"] for row in rows}
    assert largest["resident"] < largest["l2l"] <= largest["stronghold"]


def test_a_size_that_cannot_be_has_its_reason(capsys, monkeypatch) -> None:
    (row,) = plan(capsys, monkeypatch, "-m", "stronghold", *SMALL, "-w", "9")
    assert "a window of 1 to 4, the number of layers, got 9" in row["error"]


@pytest.mark.heavy
def test_the_exact_device_peak_comes_with_it_where_a_method_can_rehearse(capsys, monkeypatch) -> None:
    l2l, engine = plan(capsys, monkeypatch, "-m", "l2l,zero-offload", *SMALL, "--exact")
    assert l2l["exact"]["device_bytes"] == pytest.approx(l2l["device_bytes"], rel=0.1)
    assert "has no memory rehearsal" in engine["exact"]["unavailable"]


def test_where_nothing_can_be_planned_one_line_says_why(capsys, monkeypatch) -> None:
    assert "cannot write to the folder /no/such" in fails(
        capsys, monkeypatch, "plan", "-m", "stronghold", "-l", "4:8:4", "--disk", "/no/such"
    )


@pytest.mark.skipif(file_system(Path("/dev/shm")) != "tmpfs", reason="needs a folder in memory")
def test_a_folder_in_memory_is_no_disk(capsys, monkeypatch) -> None:
    """Its files would take host memory that no budget counts, and the largest size would be false."""
    assert "expected a folder on a disk, got /dev/shm on tmpfs, in memory" in fails(
        capsys, monkeypatch, "plan", "-m", "stronghold", "-l", "4:8:4", "--disk", "/dev/shm"
    )


def test_the_table_is_for_people(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.sh", "plan", "-m", "resident,zero-infinity-nvme", *SMALL])
    main()
    text = capsys.readouterr().out
    assert all(word in text for word in ("device", "host", "disk", "activations", "binds", "resident"))


def test_a_terminal_of_100_columns_cuts_nothing_off(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(sys, "argv", ["run.sh", "plan", "-m", "all", "-l", "32", "--host-memory", "90GiB"])
    main()
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    needs = text.partition("What comes of it")[0].splitlines()
    assert max(map(len, needs)) <= 100 and "zero-infinity-nvme" in text and "activations" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


MACHINE = "mine: {device_memory: 24GiB, facts: {gpu_tflops: 9, link_gb_per_second: 9, host_adam_gparams_per_second: 1}}"


@pytest.mark.parametrize("verb", ["plan", "advise"])
def test_the_memories_that_are_assumed_and_where_each_is_from(tmp_path: Path, verb: str) -> None:
    """By hand: (24 - 0.25) * 31 / 32 = 23.0 GiB; who asks for memories is told so."""
    (file := tmp_path / "mine.yaml").write_text(MACHINE)
    arguments = (verb, "-m", "resident", "-l", "2", "--machine")

    def memories(*arguments: object) -> str:
        return next(
            line
            for line in run(*arguments).stdout.splitlines()
            if line.startswith("memories that plans fill: ")
        )

    entry = f"mine in {file}"
    line = memories(*arguments, "mine", "--machines", file)
    assert (
        f"device 23.0 GiB ({entry}: 24GiB, less a reserve); host 64.0 GiB (assumed: {entry} has none;" in line
    )
    line = memories(*arguments, "v100-vm")
    assert line.endswith(
        "29.9 GiB (v100-vm in machines.yaml: 31900MiB, less a reserve); host 90.4 GiB (v100-vm in machines.yaml)"
    )
    assert "host 9.0 GiB (--host-memory)" in memories(
        *arguments, "mine", "--machines", file, "--host-memory", "9GiB"
    )
    assert "(--device-memory" in memories(*arguments, "v100-vm", "--device-memory", "9GiB")
    assert f"host {gib(machine.host_bytes())} (this machine's" in memories(*arguments[:-1])


@pytest.mark.parametrize("verb", ["plan", "advise"])
def test_a_part_of_a_gpu_is_told_as_one(verb: str) -> None:
    assert (
        "\nh200: Assumed, not measured. A part of an H200"
        in run(verb, "-m", "resident", "-l", "2", "--machine", "h200").stdout
    )


def test_several_ranks_are_planned_on_a_named_machine(capsys, monkeypatch) -> None:
    arguments = ["-m", "varuna", "-l", "32", "--machine", "rtx3090"]
    alone, four = (plan(capsys, monkeypatch, *arguments, *more)[0] for more in ([], ["--ranks", "4"]))
    assert not alone["fits"] and four["fits"] and four["options"]["num_stages"] > 1


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['run.sh', 'plan', '-m', 'all', '-l', '4', '--machine', 'v100-vm'];"
        "from cli.main import main; main(); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_published_machine_tells_what_bound_the_published_runs(capsys, monkeypatch) -> None:
    rows = plan(capsys, monkeypatch, "-m", "resident", "-l", "32", "--machine", "v100-vm")
    published = {row["published"]["method"]: row["published"] for row in rows if "published" in row}
    assert {name: (row["published_layers"], row["binding"]) for name, row in published.items()} == {
        "Megatron-LM": (32, "device"),
        "L2L": (78, "device"),
        "ZeRO-Offload": (48, "device"),
        "ZeRO-Infinity": (48, "host"),
        "STRONGHOLD": (100, "host"),
    }
    other = plan(capsys, monkeypatch, "-m", "resident", "-l", "32", "-h", "1024", "--machine", "v100-vm")
    assert not [row for row in other if "published" in row]


def test_resident_training_of_the_published_size_fits_the_published_machine(capsys, monkeypatch) -> None:
    (row, *_) = plan(capsys, monkeypatch, "-m", "resident", "-l", "32", "--machine", "v100-vm")
    # 16 bytes a parameter of 36 layers are 28.6 GiB of the 29.9; of 38 they would be 30.1.
    assert row["fits"] and row["binding"] == "device" and 35 <= row["largest_layers"] <= 37
    assert 16 * Workload(num_layers=38).num_params > named_machines.load("v100-vm").room.device_bytes  # type: ignore[operator]


def test_a_machines_budgets_are_defaults(capsys, monkeypatch) -> None:
    arguments = ["-m", "resident", "-l", "32", "--machine", "v100-vm"]
    (wide, *_) = plan(capsys, monkeypatch, *arguments, "--device-memory", "80GiB")
    (listed, *_) = plan(capsys, monkeypatch, *arguments)
    assert wide["largest_layers"] > listed["largest_layers"]
    assert plan(capsys, monkeypatch, *arguments[:-2], "--gpu", "V100 VM")[0] == listed  # as advise spells it


def test_a_machine_of_ones_own_is_an_entry(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("desk:\n  device_memory: 24GiB\n  disk_memory: 1TiB\n  facts: {gpu: mine}\n")
    mine = named_machines.load("desk", file)
    assert mine.device_bytes == 24 * GIB and mine.room.disk_bytes == 1024 * GIB
    assert mine.room.host_bytes is None and mine.facts == {"gpu": "mine"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("desk: {device_memory: 24GX}", "24GX"),
        ("desk: {device_memory: 64MiB}", "expected at least 521MiB for a GPU, got 64MiB"),
        ("desk: {device: 24GiB}", "unknown field device; try the fields about, device_memory"),
        ("desk: {facts: {link_gb_per_secnd: 25}}", "'link_gb_per_secnd': did you mean link_gb_per_second?"),
        ("desk: 24GiB", "expected a dictionary, got '24GiB'"),
        ("[1, 2]", "expected a valid dictionary, got "),
        ("desk: {", "does not load"),
    ],
)
def test_an_entry_that_makes_no_sense_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        named_machines.load("desk", file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("verb", [["run"], ["sweep"], ["plan"], ["search", "largest"]])
def test_an_unknown_machine_names_the_nearest(capsys, monkeypatch, verb: list[str]) -> None:
    assert "did you mean v100-vm?" in fails(capsys, monkeypatch, *verb, "-m", "l2l", "--machine", "v100-wm")


@pytest.mark.parametrize("size", ["12", "-1GiB", "32GB?", "0GiB"])
@pytest.mark.parametrize("option", ["--device-memory", "--host-memory", "--disk-memory"])
def test_a_bad_size_is_one_line(capsys, monkeypatch, option: str, size: str) -> None:
    assert "expected a positive size" in fails(capsys, monkeypatch, "plan", "-m", "l2l", f"{option}={size}")


@pytest.mark.parametrize("verb", [["run"], ["sweep"], ["search", "largest"]])
def test_no_run_is_given_more_than_there_is_and_a_plan_is(capsys, monkeypatch, verb: list[str]) -> None:
    more = ["-m", "l2l", *SMALL, "--device", "cpu", "--host-memory", f"{machine.host_bytes() // GIB + 1}GiB"]
    assert "MiB on this machine, got " in fails(capsys, monkeypatch, *verb, *more)
    assert plan(capsys, monkeypatch, *more)[0]["fits"]


def test_a_machine_with_a_device_is_simulated_where_there_is_none() -> None:
    sizes = "-l 4 -h 128 -b 2 --heads 4 --seq 64 --vocab 512"
    (job,) = jobs_of(f"./run.sh -m l2l {sizes} --machine v100-vm")
    assert job.device == ("sim" if "cuda" not in machine.devices() else "cuda")
    assert job.budget.device_bytes == named_machines.load("v100-vm").budget_on(job.device).device_bytes


def test_where_megatron_lm_holds_less_than_was_published_the_reason_is_said() -> None:
    """By hand: 32 layers are 1.717 B parameters; 20 bytes of each are 32.0 GiB, 16 are 25.6, of 29.9."""
    text = run("plan", "-m", "megatron-lm", "-l", "32", "--machine", "v100-vm").stdout
    assert "-l 29" in text and "Megatron-LM here: 20 bytes a parameter instead of 16: without Apex" in text
    assert 16 * Workload(num_layers=32).num_params < 29.9 * GIB < 20 * Workload(num_layers=32).num_params


@pytest.mark.parametrize(("names", "methods"), [("l2l", []), ("l2l,stronghold", ["stronghold"])])
def test_seconds_that_a_plan_foretells_are_told_apart_from_bounds(names: str, methods: list[str]) -> None:
    lines = run("plan", "-m", names, "-l", "32", "--machine", "v100-vm").stdout.splitlines()
    assert [line.split()[2].rstrip(":") for line in lines if line.startswith("seconds of ")] == methods


def test_no_step_is_planned_shorter_than_its_arithmetic_its_copies_or_the_hosts_adam() -> None:
    """By hand: 4 * 32 * (24 T D^2 + 2 T S D) + 6 T V D = 57.5e12 operations at 10e12 a second; 400 GB of copies over a
    link of 10 GB/s each way; 8 GB of moments, so 1e9 parameters, at 0.05 billion a second."""
    rates = rates_from_facts(
        {"gpu_tflops": 10, "link_gb_per_second": 10, "host_adam_gparams_per_second": 0.05}
    )
    load = Workload(num_layers=32)
    assert least_seconds(load, Plan({}), rates) == pytest.approx(5.75, rel=1e-3)
    assert least_seconds(load, Plan({}, moved_bytes=40 * 10**10), rates) == 20
    assert least_seconds(load, Plan({}, {"optimizer": 8 * 10**9}), rates) == 20
    assert least_seconds(load, Plan({}, {"optimizer": 8 * 10**9}, updates_on_host=False), rates) < 6
    assert least_seconds(load, Plan({}), rates_from_facts({})) is None


def test_no_step_is_planned_shorter_than_what_it_reads_and_writes_in_the_hosts_memory() -> None:
    """By hand: 1e9 parameters of 28 bytes and 2e9 bytes of copies at 1e9 bytes a second."""
    facts = {"gpu_tflops": 10, "link_gb_per_second": 10, "host_adam_gparams_per_second": 5}
    rates = rates_from_facts({**facts, "host_memory_gb_per_second": 1})
    plan = Plan({}, {"optimizer": 8 * 10**9}, moved_bytes=2 * 10**9)
    assert least_seconds(Workload(num_layers=32), plan, rates) == 30


def test_no_step_is_planned_shorter_than_what_it_reads_from_a_disk_and_writes_there() -> None:
    """By hand: 60e9 bytes each way at 2e9 and 1e9 bytes a second, both ways at once; whatever its states are at home,
    no parameter is updated twice."""
    facts = {"gpu_tflops": 10, "link_gb_per_second": 10, "host_adam_gparams_per_second": 5}
    rates = rates_from_facts({**facts, "disk_read_gb_per_second": 2, "disk_write_gb_per_second": 1})
    load = Workload(num_layers=32)
    assert least_seconds(load, Plan({}, disk={"weights": 6 * 10**10}), rates) == 40
    slow = rates_from_facts({**facts, "host_adam_gparams_per_second": 0.1})
    assert (
        least_seconds(load, Plan({}, disk={"optimizer": 12 * load.num_params}), slow) == load.num_params / 1e8
    )


def test_the_bound_is_below_the_published_times_of_what_trained() -> None:
    """Megatron-LM at 32 layers 5.34 s, ZeRO-Offload at 48 layers 15.8 s (published logs)."""
    rates = named_machines.load("v100-vm").room.rates
    for name, num_layers, seconds in (("megatron-lm", 32, 5.34), ("zero-offload", 48, 15.84)):
        load = Workload(num_layers=num_layers)
        bound = least_seconds(load, method.create(name, {}).plan(load, Room()), rates)
        assert bound is not None and 0.3 * seconds < bound <= seconds


def test_dropout_takes_room_of_a_simulated_device_and_none_of_a_gpu(capsys, monkeypatch) -> None:
    arguments = ["-m", "resident", *SMALL, "--device-memory", "16MiB", "--host-memory", "64MiB"]
    without, with_it = (plan(capsys, monkeypatch, *arguments, "--dropout", rate)[0] for rate in ("0", "0.1"))
    assert with_it["largest_layers"] < without["largest_layers"]
    arguments = ["-m", "megatron-lm", "-l", "8", "--machine", "v100-vm"]
    without, with_it = (plan(capsys, monkeypatch, *arguments, "--dropout", rate)[0] for rate in ("0", "0.1"))
    assert with_it["largest_layers"] == without["largest_layers"] == 29
