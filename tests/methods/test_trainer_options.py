"""Trainer by another release, and Trainer with DeepSpeed: each trains as the reference does, or the gate says that it
does not."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Budget, Job, Room, Workload
from harness.core.method import Method, create
from harness.core.record import Record
from harness.gate.probe import NONE
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from methods.engines import deepspeed_config, release
from methods.engines.release import OLDER_NAMES, training_arguments_of
from tests.support import releases
from tests.support.configured import configured

LOAD = Workload(
    num_layers=3, hidden_size=64, num_heads=4, seq_len=32, batch_size=4, vocab_size=512, learning_rate=0.05
)
PARTS = dataclasses.replace(LOAD, micro_batches=2)
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
ALL_ON_HOST = {**ON_HOST, "offload_param": {"device": "cpu"}}
ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}
OTHER = "5.20.2"  # a release of transformers that is not the installed one


def zero(**entries: Any) -> str:
    return json.dumps({"zero_optimization": entries})


def settled(config: str, load: Workload = LOAD) -> Method:
    """The method as a run gets it."""
    trained = create("hf-trainer", {"config": config})
    return trained.settled(trained.plan(load, Room()))


def run(results: Path, load: Workload, **options: Any) -> Record:
    job = resolve(Job("hf-trainer", load, options, steps=5, warmup=1))[0]
    return Sweep(results).run([resolve(job)])[0]


def test_another_release_is_installed_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "ENGINES", tmp_path)
    trained = create("hf-trainer", {"release": OTHER})
    assert str(trained.to_build()).startswith(f"transformers {OTHER}, once")
    assert trained.describe(LOAD, "cpu")["implementation"] == f"upstream: Trainer of transformers {OTHER}"


def test_a_text_that_is_no_release_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"release: expected a version of transformers such as .*, got 'newest'"
    ):
        create("hf-trainer", {"release": "newest"})


def test_a_model_by_its_config_is_the_installed_releases() -> None:
    with pytest.raises(ValueError, match=f"release: expected none for .*, got {OTHER}: .*leave release out"):
        create("hf-trainer", {"release": OTHER}).plan(configured("llama"), Room())


def test_a_release_gets_arguments_by_the_names_that_it_knows() -> None:
    older = dataclasses.make_dataclass("Older", [("learning_rate", float), *OLDER_NAMES.values()])
    made = training_arguments_of(older, learning_rate=0.5, **dict.fromkeys(OLDER_NAMES, True))
    assert dataclasses.asdict(made) == {"learning_rate": 0.5, **dict.fromkeys(OLDER_NAMES.values(), True)}


def test_an_argument_that_a_release_lacks_is_not_dropped() -> None:
    with pytest.raises(KeyError, match="clip"):
        training_arguments_of(dataclasses.make_dataclass("Older", []), clip=1.0)


@pytest.mark.parametrize("config", [zero(stage=2, **ON_HOST), zero(stage=3), zero(stage=0)])
def test_a_plan_has_the_states_of_deepspeeds(config: str) -> None:
    ours, theirs = (
        create(name, {"config": config}).plan(PARTS, Room()) for name in ("hf-trainer", "deepspeed")
    )
    for kind in ("weights", "gradients", "optimizer"):
        assert ours.device.get(kind) == theirs.device.get(kind) and ours.host.get(kind) == theirs.host.get(
            kind
        )


def test_the_settled_configuration_needs_no_file_and_settles_to_itself() -> None:
    first = (
        create("hf-trainer", {"config": str(ROOT / "examples/zero2_offload.json")}).plan(LOAD, Room()).options
    )
    again = (
        create("hf-trainer", first)
        .plan(dataclasses.replace(LOAD, dtype="bf16", micro_batches=4), Room())
        .options
    )
    assert first == again and "optimizer" in json.loads(first["config"])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (json.dumps({"gradient_clipping": 0.5}), "expected gradient_clipping 1.0, as --clip says, got 0.5"),
        (json.dumps({"gradient_accumulation_steps": 2}), "expected gradient_accumulation_steps 1, .* got 2"),
        (zero(stge=2), 'got "zero_optimization.stge"; did you mean stage'),
    ],
)
def test_a_configuration_that_says_otherwise_is_refused(config: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        create("hf-trainer", {"config": config}).plan(LOAD, Room())


@pytest.mark.parametrize(
    ("entries", "kernel", "optimizer"),
    [
        ({"zero_optimization": {"stage": 2}}, None, "torch AdamW, fused, device"),
        ({"zero_optimization": {"stage": 2, **ON_HOST}}, "cpu_adam", "DeepSpeedCPUAdam"),
        (
            {"zero_optimization": {"stage": 3, **ALL_ON_HOST}, "zero_force_ds_cpu_optimizer": False},
            None,
            "torch AdamW, fused, host",
        ),
        ({"zero_optimization": {"stage": 1}, "optimizer": ADAMW}, "fused_adam", "DeepSpeed's FusedAdam"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, None, "torch AdamW, op by op"),
    ],
    ids=str,
)
def test_adam_and_its_kernel_are_those_of_the_configuration(
    entries: dict[str, Any], kernel: str | None, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_config, "is_kernel_built", lambda name, release=None: False)
    monkeypatch.setattr(deepspeed_config, "missing_to_build", lambda name, release=None: None)
    trained = settled(json.dumps(entries))
    assert trained.describe(LOAD, "cpu")["optimizer"] == optimizer
    assert (kernel or "None") in str(trained.to_build())


TRAINED = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 1, **ON_HOST},
    {"stage": 2, **ON_HOST},
    {"stage": 3, **ON_HOST},
    {"stage": 3, **ALL_ON_HOST},
]


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("micro_batches", [2, 1])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
@pytest.mark.parametrize("entries", TRAINED, ids=str)
@pytest.mark.cover(2)
def test_trainer_with_deepspeed_trains_as_the_reference_does(
    entries: dict[str, Any], clip_norm: float, micro_batches: int, dtype: str, shared_results: Path
) -> None:
    load = dataclasses.replace(LOAD, dtype=dtype, micro_batches=micro_batches, clip_norm=clip_norm)
    config = json.dumps({"zero_optimization": entries, "zero_force_ds_cpu_optimizer": False})
    record = run(shared_results, load, config=config)
    assert record.gate.passed, record.reason or record.gate.text
    assert all(tensor["exp_avg"] and tensor["exp_avg_sq"] for tensor in record.tensors.values())


@pytest.mark.heavy
@pytest.mark.timeout(1800)  # the first to need the compiled kernel builds it
@pytest.mark.usefixtures("with_engines")
def test_trainer_with_deepspeeds_own_adam_trains_as_deepspeed_does(shared_results: Path) -> None:
    """Without the gate's probe, to whose rounding the kernel's bias corrections in fp32 come near."""
    jobs = [
        Job(name, PARTS, {"config": zero(stage=2, **ON_HOST)}, steps=5, warmup=1)
        for name in ("hf-trainer", "deepspeed")
    ]
    ours, theirs = Sweep(shared_results, probe=NONE).run([resolve(job) for job in jobs])
    assert ours.gate.passed, ours.reason or ours.gate.text
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-6)


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
def test_trainer_decays_biases_and_norms_if_the_configuration_has_an_optimizer(shared_results: Path) -> None:
    """Trainer then gives DeepSpeed all parameters as one group; DeepSpeed's method here gives it two."""
    config = json.dumps(
        {"zero_optimization": {"stage": 2}, "optimizer": {**ADAMW, "params": {"torch_adam": True}}}
    )
    record = run(shared_results, LOAD, config=config)
    assert (record.gate.verdict, record.gate.reason) == ("failed", "weights"), (
        record.reason or record.gate.text
    )
    assert ".ln" in record.gate.text


@pytest.mark.heavy
@pytest.mark.usefixtures("compiled_sim", "with_engines")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("entries", TRAINED, ids=str)
@pytest.mark.cover(1)
def test_trainer_with_deepspeed_takes_no_more_than_its_plan(
    entries: dict[str, Any], dtype: str, shared_results: Path
) -> None:
    """On sim, but for 5 % and 4 MiB of what no plan counts, such as norms and the batch."""
    load = Workload(
        num_layers=4, hidden_size=256, num_heads=4, seq_len=128, batch_size=8, vocab_size=2048, dtype=dtype
    )
    sized = {"reduce_bucket_size": "auto", **entries}
    config = json.dumps({"zero_optimization": sized, "zero_force_ds_cpu_optimizer": False})
    asked = Job("hf-trainer", load, {"config": config}, Budget(2**30), device="sim", steps=3, warmup=1)
    record = Sweep(shared_results, probe=NONE).run([resolve(asked)])[0]
    assert record.status == "ok", record.evidence
    for memory, peak in (("device", "device_allocated"), ("host", "host_accounted")):
        planned = sum(record.predicted[memory].values())
        assert record.peaks[peak] <= 1.05 * planned + 4 * 2**20, (memory, record.predicted, record.peaks)


@pytest.mark.heavy
@pytest.mark.parametrize("options", [{}, {"config": zero(stage=2)}], ids=["alone", "with DeepSpeed"])
def test_another_release_trains_as_the_reference_does_and_its_record_names_it(
    options: dict[str, str], shared_results: Path
) -> None:
    releases.need("transformers", OTHER)
    record = run(shared_results, PARTS, release=OTHER, **options)
    assert record.gate.passed, record.reason or record.gate.text
    assert version("transformers") != OTHER and "unlisted" not in record.software
    assert f"transformers {OTHER} (" in record.description["implementation"]
