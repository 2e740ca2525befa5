"""The engines are the real ones, end where resident training ends, and leave nothing on the disk."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.base.checkout import ROOT
from harness.base.scratch import mark
from harness.core import native_build
from harness.core.data import token_batches
from harness.core.job import GIB, Budget, Job, Room, Workload
from harness.core.method import Unavailable, create
from harness.core.record import Record, records_of
from harness.devices import machine, room
from harness.gate import probe
from harness.jobs.sweep import Sweep
from harness.plan.fit import most_layers, resolve
from harness.run.prepare import prepare
from methods import zero_infinity_nvme
from methods.engines import deepspeed, deepspeed_config
from tests.support import cli, engine_runs, forks
from tests.support.configured import configured
from tests.support.small_disk import small_disk
from tests.support.training import tiny

# Large enough that parameters really leave memory: at 4 layers x 256 the wrong gradients below do not show.
LARGE = Workload(num_layers=8, hidden_size=512, num_heads=8, seq_len=64, batch_size=2, vocab_size=8192)
SMALL = Workload(
    num_layers=3, hidden_size=64, num_heads=4, seq_len=32, batch_size=2, vocab_size=512, learning_rate=0.05
)
ENGINES = {
    "megatron-lm": "megatron.core",
    "zero-offload": "deepspeed",
    "zero-infinity": "deepspeed",
    "fsdp2-offload": "torch.distributed.fsdp",
}

pytestmark = pytest.mark.timeout(1800)  # the first to need a compiled kernel builds it


def run(results: Path, name: str, workload: Workload, **options) -> Record:
    job = resolve(Job(name, workload, options, steps=5, warmup=1))[0]
    return Sweep(results).run([resolve(job)])[0]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ENGINES)
def test_weights_end_where_residents_do_and_the_library_is_the_real_one(name: str) -> None:
    """Five steps; a relative distance of 1e-3 is far above rounding (1e-5 seen) and far below a lost update (1)."""
    distances, modules = forks.call(engine_runs.distances, name, SMALL)
    assert max(distances.values()) < 1e-3, sorted(distances.items(), key=lambda item: -item[1])[:3]
    assert ENGINES[name] in modules


def test_fsdp2_sums_micro_batches_as_resident_training_does() -> None:
    """In half precision each rounds its own sums: bf16 by up to 2**-8."""
    of_three, of_two = {"batch_size": 6, "micro_batches": 3}, {"batch_size": 4, "micro_batches": 2}
    loads = {
        "fp32": tiny(**of_three),
        "fp32, not clipped": tiny(**of_three, clip_norm=0.0),
        "fp16": tiny(**of_three, dtype="fp16"),
        "bf16": configured("qwen2", **of_two, dtype="bf16"),
    }
    found = forks.call(engine_runs.differences, "fsdp2-offload", loads)
    assert (
        max(found["fp32"], found["fp32, not clipped"]) < 1e-6 and max(found["fp16"], found["bf16"]) < 2**-8
    ), found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", [*ENGINES, "hf-trainer", "resident", "stronghold", "l2l", "varuna"])
@pytest.mark.cover(0)
def test_every_starting_value_is_drawn_once_by_several_threads(name: str, dtype: str) -> None:
    call = forks.call if name in ENGINES else lambda function, *arguments: function(*arguments)
    drawn, num_threads = call(engine_runs.drawn, name, dataclasses.replace(SMALL, dtype=dtype))
    assert set(drawn.values()) == {1} and len(drawn) == 3 + 12 * SMALL.num_layers + 1
    assert num_threads > 1


def _addresses() -> list[str]:
    """On which a process listens whose DeepSpeed has trained a step."""
    import psutil

    training = create("zero-infinity", {}).train(tiny(), list(token_batches(tiny(), 2)), "cpu")
    next(training)
    found = [one.laddr.ip for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    next(training)
    return found


def test_deepspeed_listens_on_this_machine_alone() -> None:
    assert set(forks.call(_addresses)) <= {"127.0.0.1"}


@pytest.mark.heavy
def test_a_run_compiles_nothing_and_starts_no_program_to_count_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compiler would make ninja compile anew; one that cannot compile would end the run."""
    job = Job("zero-offload", SMALL, {"adam": "deepspeed"}, steps=4, warmup=1)
    prepare(job, tmp_path, (), lambda event: None)  # builds the kernel where it is missing
    program, started = tmp_path / "numactl", tmp_path / "started"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CXX", "/bin/false")
    record = Sweep(tmp_path).run([resolve(job)])[0]
    assert not started.exists()
    assert record.gate.passed, record.reason
    assert record.description["optimizer"] == "DeepSpeedCPUAdam"


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize(
    ("name", "world_size", "dtype", "micro_batches"),
    [
        ("zero-offload", 4, "fp32", 1),
        ("zero-infinity", 2, "fp32", 1),
        ("zero-offload", 2, "bf16", 1),
        ("zero-infinity", 4, "bf16", 1),
        ("fsdp2-offload", 2, "fp32", 2),
        ("fsdp2-offload", 2, "fp16", 2),
    ],
)
def test_ranks_train_as_the_reference_does_on_the_whole_batch(
    name: str, world_size: int, dtype: str, micro_batches: int, shared_results: Path
) -> None:
    load = dataclasses.replace(SMALL, batch_size=4, micro_batches=micro_batches, dtype=dtype)
    record = run(shared_results, name, load, world_size=world_size)
    assert record.gate.passed, record.gate.text
    assert len(record.machine["ranks"]) == world_size
    assert all(tensor["exp_avg"] and tensor["exp_avg_sq"] for tensor in record.tensors.values())
    if dtype == "fp32":
        assert record.gate.evidence["loss_difference"] <= 1e-6


# Each option meets each dtype and each number of ranks.
PARALLEL: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {"world_size": 2, "distributed_optimizer": True}),
    ("fp32", {"world_size": 4, "pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
    ("bf16", {"world_size": 2, "pipeline_parallel": 2}),
    ("bf16", {"world_size": 4, "pipeline_parallel": 2, "distributed_optimizer": True}),
    (
        "bf16",
        {"world_size": 4, "tensor_parallel": 2, "sequence_parallel": True, "distributed_optimizer": True},
    ),
]


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize(
    ("dtype", "options"), PARALLEL, ids=[f"{dtype} {' '.join(more)}" for dtype, more in PARALLEL]
)
def test_megatrons_ranks_train_as_the_reference_does(options: dict, dtype: str, shared_results: Path) -> None:
    load = dataclasses.replace(SMALL, num_layers=4, batch_size=4, micro_batches=2, dtype=dtype)
    record = run(shared_results, "megatron-lm", load, **options)
    assert record.gate.passed and len(record.tensors) == 52, record.gate.text
    assert len(record.machine["ranks"]) == options["world_size"]
    if dtype == "fp32":
        assert record.gate.evidence["loss_difference"] <= 1e-6


@pytest.mark.heavy
@pytest.mark.probe
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize("name", ["zero-offload", "megatron-lm"])
def test_an_engine_passes_in_fp16_where_its_probe_skips_other_steps(name: str, tmp_path: Path) -> None:
    """DeepSpeed doubles the loss scale one step later after an overflow. Megatron has the reference's rule, so there a
    rounding may decide which steps overflow, by the processor. Then the probe keeps its scale, and the verdict says so.
    """
    record = run(tmp_path, name, dataclasses.replace(SMALL, dtype="fp16"))
    assert record.gate.passed, record.gate.text
    probes = [model for each in records_of(tmp_path / probe.FOLDER) for model in each.models()]
    skipped = {(*each.skipped_steps,) for each in probes if each.job.workload.loss_scale_window}
    assert () not in skipped and (len(skipped) > 1 or name == "megatron-lm")
    assert ("a step that fp16 skips was not tested" in record.gate.text) is (len(skipped) > 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"world_size": 4, "tensor_parallel": 3}, "tensor_parallel: expected a divisor of --ranks 4, got 3"),
        (
            {"world_size": 3, "tensor_parallel": 3},
            "tensor_parallel: expected a divisor of num_heads 4, got 3",
        ),
        (
            {"world_size": 2, "sequence_parallel": True},
            "sequence_parallel: expected tensor_parallel above 1, got 1",
        ),
        ({"world_size": 3}, "a batch of 2 samples splits over 1, 2 ranks, not over 3; try -b 3"),
        (
            {"world_size": 3, "pipeline_parallel": 2},
            "pipeline_parallel: expected a divisor of --ranks 3, got 2; try",
        ),
        ({"world_size": 2, "pipeline_parallel": 2}, "a divisor of the 3 layers, got 2; try -l 2 or 4"),
        (
            {"world_size": 6, "tensor_parallel": 2, "pipeline_parallel": 2},
            "--ranks divided by tensor_parallel.*, got 2",
        ),
        (
            {"world_size": 2, "micro": 2},
            "--micro-batches: expected a divisor of the 1 sample of a rank, got 2",
        ),
    ],
)
def test_ranks_that_megatron_cannot_have_are_told(options: dict, told: str) -> None:
    load = dataclasses.replace(SMALL, micro_batches=options.pop("micro", 1))
    with pytest.raises(ValueError, match=told):
        create("megatron-lm", options).plan(load, Room())


def test_the_stages_of_megatron_have_all_weights_and_the_tied_embedding_twice() -> None:
    """By hand; the first stage keeps the inputs of two micro-batches for each of its layers, the last one of one."""
    load = dataclasses.replace(LARGE, batch_size=4, micro_batches=4)
    trained = create("megatron-lm", {"world_size": 2, "pipeline_parallel": 2})
    assert sum(trained._stage_params(load, stage) for stage in (0, 1)) == load.num_params + 8192 * 512
    first, last = (trained._stage_bytes(load, stage, 1) for stage in (0, 1))
    assert sorted(trained.plan(load, Room()).stages.values()) == sorted(
        [sum(first.values()), sum(last.values())]
    )


def test_a_rank_of_megatron_plans_its_part() -> None:
    """By hand: two ranks share each matrix, the embedding and the biases of columns; two groups share the moments."""
    load, room = dataclasses.replace(LARGE, batch_size=4), Room()
    one, shared, grouped = (
        create("megatron-lm", options).plan(load, room).device
        for options in (
            {},
            {"world_size": 2, "tensor_parallel": 2},
            {"world_size": 2, "distributed_optimizer": True},
        )
    )
    small = (6 * 8 + 2 + 64) * 512  # norms and biases of rows of 8 layers, the last norm, 64 positions
    assert shared["weights"] == 4 * (small + (load.num_params - small) / 2)
    assert grouped["weights"] == one["weights"] and grouped["optimizer"] * 2 == one["optimizer"]


@pytest.mark.parametrize("num_layers", [3, 9, 12, 15, 21])
def test_the_deepest_pipeline_that_fits_is_found_among_depths_that_stages_divide(num_layers: int) -> None:
    load, options = (
        dataclasses.replace(LARGE, num_layers=3, batch_size=3),
        {"world_size": 3, "pipeline_parallel": 3},
    )
    trained = create("megatron-lm", options)
    needed = trained.plan(load.at_depth(num_layers), Room()).device_bytes
    assert most_layers(Job("megatron-lm", load, options), Room(needed)) == num_layers


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize("pipelined", [True, False])
def test_ranks_share_what_lies_on_the_disk(
    pipelined: bool, tmp_path: Path, shared_results: Path, libaio: None
) -> None:
    options = {"world_size": 2, "pipelined": pipelined, "disk": str(tmp_path)}
    record = run(shared_results, "zero-infinity-nvme", dataclasses.replace(SMALL, batch_size=4), **options)
    assert record.gate.passed and record.gate.evidence["loss_difference"] <= 1e-6, record.gate.text
    assert list(tmp_path.iterdir()) == []


def test_a_rank_plans_its_part_of_what_zero_shards() -> None:
    """By hand: ZeRO-2 shards 16 of 20 bytes a parameter, ZeRO-3 all 24; both split the batch's activations."""
    load, room = dataclasses.replace(LARGE, batch_size=4), Room()
    for name, whole in (("zero-offload", 4), ("zero-infinity", 0)):
        one, two = (create(name, {"world_size": n}).plan(load, room) for n in (1, 2))
        kept = whole * load.num_params
        assert two.host_bytes - kept == pytest.approx((one.host_bytes - kept) / 2, rel=1e-6)
        assert (
            two.device["activations"] < one.device["activations"]
            and two.moved_bytes <= one.moved_bytes // 2 + 1
        )


@pytest.mark.heavy
@pytest.mark.parametrize("workload", [LARGE, configured("llama")], ids=["gpt", "llama"])
def test_the_gate_catches_zenflows_start(workload: Workload, shared_results: Path, forked: None) -> None:
    assert run(shared_results, "zenflow", workload).gate.reason == "forward"


@pytest.mark.heavy
def test_the_gate_catches_the_wrong_gradients_of_nvme_without_reentrant_recompute(
    shared_results: Path, libaio: None, forked: None
) -> None:
    wrong = run(shared_results, "zero-infinity-nvme", LARGE, reentrant=False)
    assert wrong.gate.verdict == "failed", wrong.gate.text


@pytest.fixture(scope="module")
def on_disk(shared_results: Path, libaio: None) -> tuple[Record, set[str], list[Path]]:
    """A record, names of files that were seen on the disk during training, and what lies there afterwards."""
    folder = shared_results / "disk"
    folder.mkdir()
    seen: set[str] = set()

    def look(event: dict) -> None:
        seen.update(path.name for path in folder.rglob("*.swp"))

    job = resolve(
        Job("zero-infinity-nvme", LARGE, {"disk": str(folder), "pipelined": False}, steps=5, warmup=1)
    )[0]
    return Sweep(shared_results, report=look).run([resolve(job)])[0], seen, list(folder.iterdir())


@pytest.mark.heavy
def test_nvme_holds_the_model_in_files_meanwhile_and_leaves_none(on_disk: tuple) -> None:
    record, seen, left = on_disk
    assert record.gate.passed, record.gate.text
    assert any("exp_avg" in name for name in seen) and len(seen) > 10
    assert left == []


@pytest.mark.heavy
def test_what_a_killed_run_left_on_the_disk_goes_with_the_next(
    tmp_path: Path, shared_results: Path, libaio: None
) -> None:
    left, own = tmp_path / "harness-nvme-999999999", tmp_path / "harness-nvme-of-mine"
    for folder in (left, own):
        folder.mkdir()
    mark(left)
    run(shared_results, "zero-infinity-nvme", SMALL, disk=str(tmp_path))
    assert not left.exists() and own.exists()


def test_a_folder_on_the_disk_that_no_run_marked_stays(tmp_path: Path) -> None:
    (own := tmp_path / "harness-nvme-of-mine").mkdir()
    (left := tmp_path / "harness-nvme-999999999").mkdir()
    mark(left)
    with zero_infinity_nvme.swap_folder(tmp_path, 1):
        assert own.exists() and not left.exists()


@pytest.mark.heavy
def test_zenflow_ends_in_a_verdict_before_its_first_update_by_the_host(shared_results: Path) -> None:
    record = run(shared_results, "zenflow", SMALL, update_interval=8)  # of five steps
    assert record.status == "ok", record.reason


@pytest.mark.heavy
def test_nvme_needs_less_host_memory_than_zero_infinity(on_disk: tuple, shared_results: Path) -> None:
    on_host = run(shared_results, "zero-infinity", LARGE)
    assert on_disk[0].host_peak_bytes < on_host.host_peak_bytes


def test_no_folder_for_nvme_is_one_line_and_exit_2(tmp_path: Path) -> None:
    words = [
        "-m",
        "zero-infinity-nvme",
        "-l",
        "2",
        "--disk",
        str(tmp_path / "none"),
        "--results",
        str(tmp_path / "r"),
    ]
    done = cli.run(*words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "try another with --disk DIR" in done.stderr and not (tmp_path / "r").exists()


@pytest.mark.heavy
def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, libaio: None) -> None:
    with small_disk(tmp_path, 1) as folder:
        record = run(tmp_path, "zero-infinity-nvme", LARGE, disk=str(folder))
        assert record.status == "does-not-fit" and "of disk" in record.reason
        assert list(folder.iterdir()) == []


def test_a_missing_engine_is_unavailable_with_the_line_that_installs_it(
    tmp_path: Path, own_server: None
) -> None:
    """An empty package in front of the real one, as on a machine without it."""
    for package in ("megatron", "deepspeed", "accelerate"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('not installed')\n")
    commands = {"megatron-lm": "megatron-core", "zero-offload": "deepspeed", "hf-trainer": "accelerate"}
    for name, package in commands.items():
        words = f"-m {name} -l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 3".split()
        done = cli.run(*words, "--results", tmp_path / "results", PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert done.returncode == 7 and f"pip install {package}" in done.stdout.splitlines()[-1], done.stdout


def test_without_a_compiler_a_method_that_needs_one_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "find_compiler", lambda: None)
    for module in (deepspeed_config, deepspeed):
        monkeypatch.setattr(module, "is_kernel_built", lambda kernel, release=None: False)
    assert create("zenflow", {}).to_build() is None
    with pytest.raises(Unavailable, match="apt-get install g\\+\\+"):
        next(create("zenflow", {}).train(SMALL, iter(()), "cpu"))


def test_a_plan_counts_what_locking_pages_rounds_up() -> None:
    """5,140,951,040 parameters, of which (13 x 100 + 2) x 2048 are biases and norms: as groups of 4 bytes a parameter
    2**35 and 2**24 bytes, of 2 bytes half of that."""
    workload = Workload(num_layers=100, dtype="bf16")
    plan = create("zero-offload", {}).plan(workload, Room(page_locks=True))
    masters = gradients = 2**35 + 2**24
    assert plan.host_bytes == masters + gradients + masters // 2 + 8 * 5_140_951_040


def test_stage_3_keeps_each_weight_that_it_page_locked_first() -> None:
    """4 layers x 2048 in fp32: of a layer's matrices 48 MiB take 64, the others 16, 64 and 64; the embedding 512, the
    positions 8, biases and norms 0.4 and so 0.5; 306,556,928 parameters, in groups of 100 million."""
    mib = 2**20
    plan = create("zero-infinity", {}).plan(Workload(num_layers=4), Room(page_locks=True))
    freed, flat = (4 * (64 + 16 + 64 + 64) + 512 + 8) * mib + mib // 2, 2048 * mib
    assert plan.host["buffers"] == flat + freed
    assert plan.host["gradients"] == 3 * 512 * mib + 32 * mib


def test_fsdp2_page_locks_each_weight_and_each_gradient() -> None:
    """As above; with two ranks each has half of every tensor."""
    mib = 2**20
    for num_ranks in (1, 2):
        plan = create("fsdp2-offload", {"world_size": num_ranks}).plan(
            Workload(num_layers=4), Room(page_locks=True)
        )
        each = ((4 * (64 + 16 + 64 + 64) + 512 + 8) * mib + mib // 2) // num_ranks
        assert (plan.host["weights"], plan.host["gradients"]) == (each, each)


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("sim", False), ("cuda", True)])
def test_only_a_gpu_locks_pages(monkeypatch: pytest.MonkeyPatch, device: str, expected: bool) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: {"gpu_bytes": 32 * GIB})
    assert room.room_within(Budget(), device).page_locks is expected


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["zero-offload", "zero-infinity"])
def test_trained_tensors_are_made_one_by_one_while_the_engine_lives(name: str) -> None:
    """40 tensors: 3 layers of 12, and 4 of the ends."""
    assert forks.call(engine_runs.read_one_by_one, name, SMALL) == [False, True, 38, False]


STEPS_ELSEWHERE = """
import time
from methods.engines import deepspeed

if __name__ == "__main__":
    deepspeed.import_deepspeed("cpu")
    deepspeed.use_built_kernel_in_superoffload()
    import torch
    from deepspeed.runtime.superoffload.superoffload_utils import SuperOffloadCPUOptimizer

    group = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    optimizer = SuperOffloadCPUOptimizer([group], 0.5, 16, pin_memory=False)
    optimizer.async_step(0, 0, torch.zeros(16), torch.ones(16))
    while (result := optimizer.get_result()) is None:
        assert optimizer.cpuadam_process.is_alive()
        time.sleep(0.01)
    print("RESULT", result["updated_param"].unique().tolist())
    optimizer.cpuadam_process.kill()
"""


@pytest.mark.heavy
def test_superoffloads_process_compiles_nothing(tmp_path: Path) -> None:
    """Adam's first step is the learning rate against the gradient's sign. A compiler that fails would end it."""
    forks.call(deepspeed.compile_kernel, "cpu_adam")
    (tmp_path / "steps_elsewhere.py").write_text(STEPS_ELSEWHERE)
    environment = {**os.environ, "CXX": "/bin/false", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "steps_elsewhere.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "RESULT [-0.5]" in done.stdout, done.stderr[-2000:]


@pytest.mark.heavy
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_superoffload_trains_at_the_rate_of_each_step_tells_all_moments_and_keeps_what_is_planned(
    clip_norm: float,
) -> None:
    """Without clipping it updates inside the backward pass; the first sub-group on the device, the others beside it."""
    forks.call(deepspeed.compile_kernel, "cpu_adam")
    run = forks.call(
        engine_runs.superoffload_beside_resident, dataclasses.replace(SMALL, clip_norm=clip_norm)
    )
    assert run.losses[0] == pytest.approx(run.losses[1], rel=1e-6)
    assert len(run.apart) == 3 * 40 and max(run.apart) < 1e-3
    assert run.numels[0] == run.numels[1] and run.device_bytes[0] == run.device_bytes[1] > 0


def test_superoffload_keeps_a_tenth_of_the_sub_groups_rounded_down_on_the_device() -> None:
    """By hand: the embedding is a sub-group, the positions with two layers' matrices the next, then each two layers,
    and one is all vectors: of 42 the first four stay. The host shares the gradients of the others with a process that
    copies one sub-group's."""
    kept = 50304 * 2048 + 1024 * 2048 + 3 * 24 * 2048**2
    for num_layers, expected in ((80, kept), (16, 0)):
        load = Workload(num_layers=num_layers)
        plan, infinity = (create(name, {}).plan(load, Room()) for name in ("superoffload", "zero-infinity"))
        assert plan.device == {**infinity.device, "optimizer": 16 * expected}
        shared = 4 * (load.num_params - expected + 50304 * 2048)
        assert plan.host_bytes - infinity.host_bytes == shared - 12 * expected


@pytest.mark.heavy
def test_superoffloads_process_locks_no_pages_which_would_take_a_context_on_the_gpu() -> None:
    forks.call(deepspeed.compile_kernel, "cpu_adam")
    assert forks.call(engine_runs.superoffloads_locked_numels) == []


@pytest.mark.parametrize("has_gpu", [True, False])
def test_superoffloads_kernel_is_compiled_before_a_run_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: {"gpu": "Some GPU"} if has_gpu else {})
    monkeypatch.setattr(deepspeed_config, "is_kernel_built", lambda kernel, release=None: False)
    monkeypatch.setattr(native_build, "find_compiler", lambda: "g++")
    assert ("cpu_adam" in (create("superoffload", {}).to_build() or "")) is has_gpu
