"""A user's own configuration trains as it says, judged by the gate, or is refused in one line."""

from __future__ import annotations

import ast
import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Budget, Job, Room, Workload
from harness.core.method import create
from harness.core.record import Record
from harness.gate.probe import NONE
from harness.jobs.job_key import method_identity
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from methods.engines import deepspeed_file
from methods.engines.deepspeed import engine_config
from methods.engines.deepspeed_config import zero_plan
from methods.engines.deepspeed_method import DeepSpeedMethod
from tests.support import cli

OURS = Path(__file__).parent / "configurations"
EXAMPLE = ROOT / "examples/zero2_offload.json"
LOAD = Workload(
    num_layers=3, hidden_size=64, num_heads=4, seq_len=32, batch_size=4, vocab_size=512, learning_rate=0.05
)
HALF = dataclasses.replace(LOAD, dtype="bf16")
PARTS = dataclasses.replace(HALF, micro_batches=2)


def as_text(**entries: Any) -> str:
    return json.dumps(entries)


def zero(**entries: Any) -> str:
    return as_text(zero_optimization=entries)


def planned(
    config: str | Path, load: Workload = LOAD, name: str = "deepspeed", **options: Any
) -> dict[str, Any]:
    """The options that a plan settles."""
    return create(name, {"config": str(config), **options}).plan(load, Room()).options


def refusal(config: str | Path, load: Workload = LOAD, name: str = "deepspeed", **options: Any) -> str:
    with pytest.raises(ValueError, match=r"expected|cannot") as told:
        planned(config, load, name, **options)
    text = str(told.value)
    assert len(text.splitlines()) == 1
    return text


SAYS: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # entries, changes of the workload, what is told
    (
        {"gradient_accumulation_steps": 8},
        {"micro_batches": 4},
        "expected gradient_accumulation_steps 4, as --micro-batches says, got 8; try --micro-batches 8",
    ),
    ({"train_batch_size": 16}, {}, "expected train_batch_size 4, as -b 4 says, got 16; try -b 16"),
    (
        {"train_micro_batch_size_per_gpu": 4},
        {"micro_batches": 2},
        "expected train_micro_batch_size_per_gpu 2, as -b 4, 2 micro-batches says, got 4; try -b 8",
    ),
    (
        {"gradient_clipping": 0.5},
        {},
        "expected gradient_clipping 1.0, as --clip says, got 0.5; try --clip 0.5",
    ),
    (
        {"bf16": {"enabled": True}},
        {},
        "expected bf16.enabled false, as --dtype fp32 says, got true; try --dtype bf16",
    ),
    (
        {"fp16": {"enabled": False}},
        {"dtype": "fp16"},
        'expected fp16.enabled true, as --dtype fp16 says, got false; try "auto"',
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}},
        {},
        "expected optimizer.params.lr 0.05, as --lr says, got 3e-05; try --lr 3e-05",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.999]}}},
        {},
        'expected optimizer.params.betas [0.9, 0.999], as the reference\'s AdamW says, got [0.8, 0.999]; try "auto"',
    ),
]


@pytest.mark.parametrize(
    ("entries", "changes", "told"), SAYS, ids=[next(iter(entries)) for entries, *_ in SAYS]
)
def test_what_the_workload_gives_is_filled_in_or_must_be_the_same(
    entries: dict[str, Any], changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    load, file = dataclasses.replace(LOAD, **changes), tmp_path / "ds_config.json"
    file.write_text(json.dumps(entries))
    assert refusal(file, load) == f"ds_config.json: {told}"


def test_auto_and_the_same_value_are_the_configuration_without_it() -> None:
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    load = dataclasses.replace(LOAD, micro_batches=2)
    expected = planned(zero(stage=1), load)
    same = dict(zip(names, (4, 2, 2, 1), strict=True)) | {"bf16": {"enabled": False}}
    for entries in (dict.fromkeys(names, "auto") | {"bf16": {"enabled": "auto"}}, same):
        assert planned(as_text(**entries, zero_optimization={"stage": 1}), load) == expected


REFUSED = [
    (zero(stage=4), "expected zero_optimization.stage 0, 1, 2 or 3, got 4"),
    (zero(stge=2), 'expected entries of known names, got "zero_optimization.stge"; did you mean stage?'),
    (as_text(zero_optimisation={}), 'got "zero_optimisation"; did you mean zero_optimization?'),
    (as_text(zero_optimization=True), "expected zero_optimization as a section of entries, got true"),
    (zero(stage=2, overlap_comm="yes"), 'expected zero_optimization.overlap_comm as bool, got "yes"'),
    (zero(stage=2, cpu_offload=True), "its name is now offload_optimizer, with device cpu; try that"),
    (zero(stage=2, offload_optimizer={"device": "nvme"}), "got nvme; try -m zero-infinity-nvme"),
    (
        zero(stage=0, offload_optimizer={"device": "cpu"}),
        "expected stage 1 or higher for offload_optimizer, got 0",
    ),
    (
        zero(stage=2, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        "expected stage 3 or higher for offload_param, got 2; try stage 3",
    ),
    (
        zero(stage=3, offload_param={"device": "cpu"}),
        "expected offload_optimizer on cpu beside offload_param, got none",
    ),
    (zero(stage=2, zenflow={"topk_ratio": 0.1}), "expected zero_optimization.zenflow switched off"),
    (
        zero(stage=3, zero_quantized_weights=True),
        "expected zero_optimization.zero_quantized_weights false, got true",
    ),
    (as_text(optimizer={"type": "Lion"}), 'expected optimizer.type AdamW, as the reference, got "Lion"'),
    (
        as_text(optimizer={"type": "Adam", "params": {"adam_w_mode": False}}),
        "expected optimizer.params.adam_w_mode true, got false",
    ),
    (
        as_text(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 100}}),
        "expected scheduler.params.warmup_num_steps left out, got 100: the workload gives the rate of each step",
    ),
    (as_text(scheduler={"type": "WarmupLR"}), 'expected scheduler.params, each "auto", got none'),
    (
        as_text(scheduler={"type": "WarmupLR", "params": {}}),
        'expected scheduler.params, each "auto", got none',
    ),
    *(
        (json.dumps(entries), f'expected {path} as a value, because nothing fills it in, got "auto"')
        for path, entries in {
            "prescale_gradients": {"prescale_gradients": "auto"},
            "gradient_allreduce_op": {"gradient_allreduce_op": "auto"},
            "optimizer.params.torch_adam": {"optimizer": {"type": "AdamW", "params": {"torch_adam": "auto"}}},
            "fp16.hysteresis": {"fp16": {"hysteresis": "auto"}},
            "zero_optimization.stage": {"zero_optimization": {"stage": "auto"}},
            "zero_optimization.offload_optimizer.pin_memory": {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
                }
            },
        }.items()
    ),
    (as_text(amp={"enabled": True}), "expected amp switched off"),
    (as_text(curriculum_learning={"enabled": True}), "expected curriculum_learning switched off"),
    (as_text(sparse_attention={"mode": "fixed"}), "expected sparse_attention switched off"),
    (
        as_text(compression_training={"weight_quantization": {"a": 1}}),
        "expected compression_training switched off",
    ),
    (as_text(pipeline={"stages": 2}), "try -m megatron-lm"),
    (as_text(expert_parallel={"enabled": True}), "expected expert_parallel switched off"),
    (
        as_text(activation_checkpointing={"cpu_checkpointing": True}),
        "expected activation_checkpointing.cpu_checkpointing false or 0 or null, got true",
    ),
    (as_text(data_types={"param_dtype": "bf16"}), 'expected data_types.param_dtype left out, got "bf16"'),
    ("{", "option config: cannot read the text: Expecting property name"),
]


@pytest.mark.parametrize(("config", "told"), REFUSED, ids=[config[:60] for config, _ in REFUSED])
def test_an_entry_that_cannot_be_honored_is_refused_by_name(config: str, told: str) -> None:
    assert told in refusal(config)


def test_entries_that_change_no_training_are_left_out() -> None:
    quiet = {
        "steps_per_print": 10,
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True},
        "tensorboard": {},
        "comms_logger": {"enabled": True},
        "checkpoint": {"tag_validation": "Warn"},
        "amp": {"enabled": False},
        "activation_checkpointing": {"partition_activations": False},
        "zero_allow_untested_optimizer": True,
    }
    assert planned(as_text(**quiet, zero_optimization={"stage": 2})) == planned(zero(stage=2))


def test_no_entry_of_zero_in_the_installed_release_is_unknown() -> None:
    spec = find_spec("deepspeed")
    assert spec and spec.origin
    for name, section in {
        "runtime/zero/config.py": ("DeepSpeedZeroConfig", "zero_optimization"),
        "runtime/zero/offload_config.py": (
            "DeepSpeedZeroOffloadOptimizerConfig",
            "zero_optimization.offload_optimizer",
        ),
        "runtime/precision_config.py": ("DeepSpeedBF16Config", "bf16"),
    }.items():
        tree = ast.parse((Path(spec.origin).parent / name).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section[0]]
        fields = [
            item
            for item in found.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        for item in fields:
            assert isinstance(item.target, ast.Name)
            words = [word for call in ast.walk(item) if isinstance(call, ast.Call) for word in call.keywords]
            aliases = [ast.literal_eval(word.value) for word in words if word.arg == "alias"]
            path = f"{section[1]}.{(aliases or [item.target.id])[0]}"
            known = (*deepspeed_file.TABLE, f"{section[1]}.enabled")
            assert any(each == path or each.startswith(f"{path}.") for each in known), path


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(zero(stage=1))
    (link := tmp_path / "link.json").symlink_to(tmp_path / "file.json")
    assert refusal(link) == f"option config: cannot read {link}: expected a regular file, got a symbolic link"


def key(config: str | Path) -> str:
    job = resolve(Job("deepspeed", LOAD, {"config": str(config)}))[0]
    return job.key(**method_identity(job))


def test_the_same_content_elsewhere_has_the_same_key_and_another_content_another(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "elsewhere.json"
    first.write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}')
    second.write_text(
        '{\n"zero_optimization": {"reduce_bucket_size": 200000000, "stage": 2}, "steps_per_print": 5\n}\n'
    )
    assert key(first) == key(second) == key(first.read_text())
    assert (
        len(
            {
                key(first),
                key(zero(stage=2, reduce_bucket_size=100)),
                key(zero(stage=1, reduce_bucket_size=2e8)),
            }
        )
        == 3
    )


@pytest.mark.parametrize("name", ["zero2_offload", "zero3"])
def test_the_settled_configuration_needs_no_file_and_settles_to_itself(name: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text((EXAMPLE if name == EXAMPLE.stem else OURS / f"{name}.json").read_text())
    settled = planned(file)
    file.unlink()
    assert create("deepspeed", settled).plan(LOAD, Room()).options == settled
    # As a probe has it: another width, rate, clip, dtype and number of micro-batches.
    other = Workload(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        seq_len=8,
        batch_size=8,
        micro_batches=2,
        dtype="bf16",
        clip_norm=0.01,
        vocab_size=97,
        learning_rate=1.0,
    )
    assert create("deepspeed", settled).plan(other, Room()).options == settled


def configured(config: dict[str, Any], asked: Workload, trained: Workload) -> dict[str, Any]:
    """What DeepSpeed gets by a configuration for a workload, settled for another."""
    made = create("deepspeed", planned(json.dumps(config), asked))
    assert isinstance(made, DeepSpeedMethod)
    return engine_config(trained, made.settings(trained, is_on_gpu=False))


def test_sizes_of_auto_are_those_of_accelerate() -> None:
    sizes = configured(json.loads((OURS / "zero3.json").read_text()), LOAD, LOAD)["zero_optimization"]
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    assert [sizes[name] for name in names] == [64 * 64, int(0.9 * 64 * 64), 10 * 64]


def test_deepspeed_gets_the_files_entries_and_the_workloads() -> None:
    entries = {
        "zero_optimization": {"stage": 1, "round_robin_gradients": True},
        "prescale_gradients": True,
        "bf16": {"check_grad_overflow": False},
        "communication_data_type": "bf16",
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "foreach": False, "lr": "auto"}},
    }
    load = dataclasses.replace(HALF, clip_norm=0.0)
    config = configured(entries, load, load)
    assert (
        config["zero_optimization"] == entries["zero_optimization"] and config["prescale_gradients"] is True
    )
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert config["communication_data_type"] == "bf16" and config["gradient_clipping"] == 0
    given = {"lr": 0.05, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    assert config["optimizer"] == {"type": "Adam", "params": {**given, "torch_adam": True, "foreach": False}}
    probed = configured(entries, load, LOAD)
    assert probed["communication_data_type"] == "fp32" and probed["bf16"] == {"enabled": False}


def test_a_plan_counts_the_stage_the_offload_and_the_buckets_of_the_file() -> None:
    """On a device a bucket is as large as the file says; on a host it takes memory only as far as it is written."""
    for stage, offload, sections in ((1, None, ()), (2, "optimizer", ("offload_optimizer",)), (3, None, ())):
        on_host = {name: {"device": "cpu"} for name in sections}
        entries = {"stage": stage, **on_host, "overlap_comm": True, "stage3_max_live_parameters": 0}
        plan = create("deepspeed", {"config": zero(**entries)}).plan(LOAD, Room())
        expected = zero_plan(LOAD, Room(), stage, offload, 1)
        bucket = {"buffers": 4 * LOAD.num_params} if stage == 3 else {}
        assert (plan.device, plan.host) == ({**expected.device, **bucket}, expected.host)
    small, large = (
        create("deepspeed", {"config": zero(stage=2, reduce_bucket_size=size)}).plan(LOAD, Room(2**30))
        for size in (1000, 2001000)
    )
    assert large.device["gradients"] - small.device["gradients"] == 4 * 2_000_000


def test_without_an_optimizer_the_hosts_is_deepspeeds_unless_the_file_says_otherwise() -> None:
    on_host = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    for entries, expected in (({}, "deepspeed"), ({"zero_force_ds_cpu_optimizer": False}, "fused")):
        assert planned(as_text(**entries, zero_optimization=on_host))["adam"] == expected
    assert planned(zero(stage=2))["adam"] == "fused"


def test_an_option_that_says_otherwise_than_the_configuration_is_refused() -> None:
    told = "option stage: expected 3, as the configuration says, got 1; leave stage out"
    assert refusal(zero(stage=3), stage=1) == told
    told = "option stage: expected 3, as the configuration says, got 2; leave stage out"
    assert refusal(zero(stage=3), stage=2) == told  # given, though it is the default
    on_host = zero(stage=2, offload_optimizer={"device": "cpu"}, overlap_comm=True)
    assert "option offload: expected optimizer, as the configuration says, got None" in refusal(
        on_host, offload=None
    )
    assert "option adam: expected deepspeed, as the configuration says, got fused" in refusal(
        on_host, adam="fused"
    )
    assert "option overlap_comm: expected True" in refusal(on_host, overlap_comm=False)
    assert "option accumulation: expected accelerate" in refusal(
        OURS / "accelerate_zero1.yaml", accumulation="engine"
    )
    summed = {"name": "fsdp2-offload", "world_size": 2, "reshard_after_forward": True}
    assert "option reshard_after_forward: expected False" in refusal(
        OURS / "accelerate_fsdp2_kept.yaml", HALF, **summed
    )
    told = "option reshard_after_forward: expected True, as the configuration says, got False"
    assert told in refusal(
        OURS / "accelerate_fsdp2_offload.yaml", name="fsdp2-offload", reshard_after_forward=False
    )


def test_an_option_that_says_the_same_as_the_configuration_changes_nothing() -> None:
    config = zero(stage=2, offload_optimizer={"device": "cpu"})
    assert planned(config, stage=2, offload="optimizer", adam="deepspeed", overlap_comm=False) == planned(
        config
    )


def test_without_a_configuration_the_record_holds_each_options_default() -> None:
    settings = {"stage": 2, "offload": None, "overlap_comm": False, "accumulation": "engine", "adam": "fused"}
    assert resolve(Job("deepspeed", LOAD, {}))[0].options.items() >= settings.items()
    sums = {"reshard_after_forward": True, "reduce_dtype": "fp32"}
    assert resolve(Job("fsdp2-offload", LOAD, {}))[0].options.items() >= sums.items()


@pytest.mark.parametrize(
    ("options", "told"),
    [({"adam": "mine"}, "adam: expected one of fused"), ({"release": "new"}, "release: expected")],
)
def test_an_option_beside_a_configuration_is_checked_as_without_it(
    options: dict[str, Any], told: str
) -> None:
    assert told in refusal(zero(stage=2), **options)


EXAMPLES: list[tuple[str, str, Workload, int, dict[str, Any]]] = [  # file, method, workload, ranks, options
    ("zero1_torch_adam.json", "deepspeed", LOAD, 1, {"stage": 1, "offload": None, "adam": "published"}),
    ("zero3_offload.json", "deepspeed", LOAD, 1, {"stage": 3, "offload": "all", "adam": "deepspeed"}),
    ("zero3.json", "deepspeed", HALF, 2, {"stage": 3, "offload": None, "adam": "deepspeed"}),
    ("accelerate_zero1.yaml", "deepspeed", LOAD, 1, {"stage": 1, "offload": None, "adam": "fused"}),
    (
        "accelerate_zero2.yaml",
        "deepspeed",
        PARTS,
        2,
        {"stage": 2, "offload": None, "accumulation": "accelerate"},
    ),
    ("accelerate_zero2_offload.yaml", "deepspeed", LOAD, 1, {"stage": 2, "offload": "optimizer"}),
    ("accelerate_zero3.yaml", "deepspeed", LOAD, 1, {"stage": 3, "offload": None, "overlap_comm": True}),
    (
        "accelerate_zero3_offload.yaml",
        "deepspeed",
        LOAD,
        1,
        {"stage": 3, "offload": "all", "adam": "deepspeed"},
    ),
    ("accelerate_with_file.yaml", "deepspeed", LOAD, 1, {"stage": 1, "adam": "published"}),
    (
        "accelerate_fsdp2_offload.yaml",
        "fsdp2-offload",
        LOAD,
        1,
        {"reshard_after_forward": True, "config": None},
    ),
    ("accelerate_fsdp2_kept.yaml", "fsdp2-offload", HALF, 2, {"reshard_after_forward": False}),
]


@pytest.mark.parametrize(
    ("name", "method", "load", "ranks", "expected"),
    EXAMPLES,
    ids=[f"{each[0]} {each[3]}" for each in EXAMPLES],
)
def test_an_example_settles_to_what_it_says(
    name: str, method: str, load: Workload, ranks: int, expected: dict[str, Any]
) -> None:
    assert planned(OURS / name, load, method, world_size=ranks).items() >= expected.items()


EXAMPLES_REFUSED = [
    ("zero2_own_optimizer.json", "deepspeed", "try --lr 3e-05"),
    ("zero2_own_schedule.json", "deepspeed", "the workload gives the rate of each step"),
    ("accelerate_zero2.yaml", "deepspeed", "expected num_processes 1, as --ranks says, got 2; try --ranks 2"),
    ("accelerate_fsdp1.yaml", "fsdp2-offload", "expected fsdp_config.fsdp_version 2, got 1: FSDP1 flattens"),
    ("accelerate_fsdp2.yaml", "fsdp2-offload", "expected fsdp_config.fsdp_offload_params true, got false"),
    ("accelerate_fsdp1.yaml", "deepspeed", 'got "FSDP"; try -m fsdp2-offload'),
    ("accelerate_zero1.yaml", "fsdp2-offload", 'got "DEEPSPEED"; try -m deepspeed'),
    ("zero3.json", "fsdp2-offload", "expected accelerate's YAML, with distributed_type FSDP, got none"),
]


@pytest.mark.parametrize(
    ("name", "method", "told"), EXAMPLES_REFUSED, ids=[" ".join(e[:2]) for e in EXAMPLES_REFUSED]
)
def test_an_example_that_cannot_be_trained_is_refused(name: str, method: str, told: str) -> None:
    assert refusal(OURS / name, name=method).startswith(f"{name}: ") and told in refusal(
        OURS / name, name=method
    )


def test_each_example_is_shown_to_run_or_to_be_refused() -> None:
    shown = {each[0] for each in (*EXAMPLES, *EXAMPLES_REFUSED)}
    assert shown == {path.name for path in OURS.iterdir()}


def accelerate(**entries: Any) -> str:
    return as_text(distributed_type="DEEPSPEED", **entries)


ACCELERATE_REFUSED = [
    (
        accelerate(deepspeed_config={"zero_stge": 2}),
        'got "deepspeed_config.zero_stge"; did you mean zero_stage?',
    ),
    (
        accelerate(mixed_precision="bf16"),
        'expected mixed_precision "no", as --dtype fp32 says, got "bf16"; try --dtype',
    ),
    (
        accelerate(deepspeed_config={"gradient_accumulation_steps": 2}),
        "expected gradient_accumulation_steps 1, as --micro-batches says, got 2; try --micro-batches 2",
    ),
    (accelerate(deepspeed_config={"gradient_clipping": 0.5}), "got 0.5; try --clip 0.5"),
    (
        accelerate(deepspeed_config={"offload_optimizer_device": "nvme"}),
        "got nvme; try -m zero-infinity-nvme",
    ),
    (
        accelerate(deepspeed_config={"deepspeed_config_file": "a.json", "zero_stage": 2}),
        "expected no other entries beside deepspeed_config_file, got zero_stage; try them in a.json",
    ),
    (
        accelerate(deepspeed_config={"deepspeed_config_file": "a.json"}),
        "option config: cannot read a.json: No such file",
    ),
    (accelerate(dynamo_config={"dynamo_backend": "INDUCTOR"}), 'expected dynamo_config.dynamo_backend "NO"'),
    (accelerate(parallelism_config={"tp_size": 2}), "expected parallelism_config switched off"),
    (accelerate(compute_environment="AMAZON_SAGEMAKER"), 'expected compute_environment "LOCAL_MACHINE"'),
    (as_text(distributed_type="MULTI_GPU"), 'got "MULTI_GPU"; try a file for DEEPSPEED or FSDP'),
]


@pytest.mark.parametrize(
    ("config", "told"), ACCELERATE_REFUSED, ids=[config[:90] for config, _ in ACCELERATE_REFUSED]
)
def test_an_entry_of_accelerate_that_cannot_be_honored_is_refused_by_name(config: str, told: str) -> None:
    assert told in refusal(config)


def test_yamls_no_is_accelerates(tmp_path: Path) -> None:
    """YAML reads an unquoted no as false."""
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: DEEPSPEED\nmixed_precision: no\ndowncast_bf16: no\n")
    assert planned(file)["stage"] == 2


def test_auto_of_an_entry_of_zero_is_its_default() -> None:
    entries = {"stage": 2, "overlap_comm": "auto", "offload_optimizer": {"device": "auto"}}
    assert planned(zero(**entries)) == planned(zero(stage=2))


FSDP2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        (f"{FSDP2}  5: true\n", "fsdp2-offload", 'got "fsdp_config.fsdp_5"'),
        (f"{FSDP2}  2026-01-01: true\n", "fsdp2-offload", 'got "fsdp_config.fsdp_2026-01-01"'),
        (
            "distributed_type: [FSDP]\n",
            "deepspeed",
            'expected distributed_type DEEPSPEED, as -m deepspeed, got ["FSDP"]',
        ),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: [bf16]\n",
            "deepspeed",
            'got ["bf16"]; try no or bf16 or fp16',
        ),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: {2026-01-01: 1}\n",
            "deepspeed",
            "expected mixed_precision",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: [2]\n",
            "deepspeed",
            "expected deepspeed_config as a section",
        ),
    ],
)
def test_an_oddly_typed_yaml_is_refused_in_a_line(text: str, name: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    assert told in refusal(file, name=name)


@pytest.mark.shows("bad input is one line and exit code 2")
def test_a_configuration_that_is_not_there_is_one_line_and_exit_2(tmp_path: Path) -> None:
    words = [
        "-m",
        "deepspeed",
        "-l",
        "2",
        "--option",
        f"config={tmp_path}/none.json",
        "--results",
        tmp_path / "r",
    ]
    done = cli.run(*words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "none.json: No such file or directory" in done.stderr and not (tmp_path / "r").exists()


def run(results: Path, config: str | Path, load: Workload, name: str = "deepspeed", **options: Any) -> Record:
    job = resolve(Job(name, load, {"config": str(config), **options}, steps=5, warmup=1))[0]
    return Sweep(results).run([resolve(job)])[0]


TRAINED = [
    (EXAMPLE, LOAD, 1),
    (EXAMPLE, PARTS, 2),
    (OURS / "zero1_torch_adam.json", LOAD, 1),
    (OURS / "zero3_offload.json", HALF, 2),
    (OURS / "zero3.json", LOAD, 1),
    (OURS / "accelerate_zero2.yaml", PARTS, 2),
    (OURS / "accelerate_zero3_offload.yaml", LOAD, 1),
    (OURS / "accelerate_fsdp2_offload.yaml", LOAD, 1),
    (OURS / "accelerate_fsdp2_kept.yaml", HALF, 2),
]


@pytest.mark.heavy
@pytest.mark.timeout(1800)  # the first to need a compiled kernel builds it
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize(
    ("file", "load", "ranks"),
    TRAINED,
    ids=[f"{file.stem} {load.dtype} {ranks}" for file, load, ranks in TRAINED],
)
def test_a_configuration_trains_as_the_reference_does(
    file: Path, load: Workload, ranks: int, shared_results: Path
) -> None:
    name = "fsdp2-offload" if "fsdp" in file.name else "deepspeed"
    record = run(shared_results, file, load, name, world_size=ranks)
    assert record.gate.passed, record.reason or record.gate.text
    assert str(file) not in json.dumps(record.to_dict())
    if load.dtype == "fp32":
        assert record.gate.evidence["loss_difference"] <= 1e-6


ON_HOST = {"offload_optimizer": {"device": "cpu"}}
SIZED = [
    {"stage": 1, "reduce_bucket_size": 8_000_000, "overlap_comm": True},
    {"stage": 2, "reduce_bucket_size": "auto", **ON_HOST},
    {"stage": 3, "reduce_bucket_size": "auto"},
    {"stage": 3, "reduce_bucket_size": "auto", **ON_HOST},
    {"stage": 3, "reduce_bucket_size": 8_000_000, "offload_param": {"device": "cpu"}, **ON_HOST},
]


@pytest.mark.heavy
@pytest.mark.usefixtures("compiled_sim", "with_engines")
@pytest.mark.parametrize("entries", SIZED, ids=str)
def test_a_configuration_takes_no_more_than_its_plan(entries: dict[str, Any], shared_results: Path) -> None:
    """On sim, but for 5 % and 4 MiB of what no plan counts, such as norms and the batch."""
    load = Workload(num_layers=4, hidden_size=256, num_heads=4, seq_len=128, batch_size=8, vocab_size=2048)
    config = as_text(zero_optimization=entries, zero_force_ds_cpu_optimizer=False)
    asked = Job("deepspeed", load, {"config": config}, Budget(2**30), device="sim", steps=3, warmup=1)
    record = Sweep(shared_results, probe=NONE).run([resolve(asked)])[0]
    assert record.status == "ok", record.reason
    for memory, peak in (("device", "device_allocated"), ("host", "host_accounted")):
        planned = sum(record.predicted[memory].values())
        assert record.peaks[peak] <= 1.05 * planned + 4 * 2**20, (memory, record.predicted, record.peaks)


OTHERWISE = [
    # Gradients of two ranks are summed, not averaged.
    ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 1}}, LOAD, 2),
    # No weight in fp32: norms are lost to rounding.
    (
        {
            "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 2},
        },
        HALF,
        1,
    ),
]


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize(
    ("entries", "load", "ranks"), OTHERWISE, ids=[next(iter(each[0])) for each in OTHERWISE]
)
def test_the_gate_fails_a_configuration_that_trains_otherwise(
    entries: dict[str, Any], load: Workload, ranks: int, shared_results: Path
) -> None:
    record = run(shared_results, json.dumps(entries), load, world_size=ranks)
    assert record.gate.verdict == "failed", record.reason or record.gate.text
