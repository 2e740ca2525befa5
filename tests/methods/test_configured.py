"""Models by their config.json: methods that stream have the bits of resident, the others pass the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.core import hub_config
from harness.core.job import Job
from harness.core.method import check, create, loadable
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from tests.methods.test_agree import difference, largest_difference
from tests.support.configured import FAMILIES, MIXTURES, OTHERS, config_of, configured
from tests.support.training import train, train_resident

STEPS = 4
SELDOM = [family for family in OTHERS if family not in ("gemma3", "gpt2")]  # families that --all tests
IN_TWO = {"micro_batches": 2}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
STREAMED: list[tuple[str, dict[str, Any]]] = [
    ("l2l", {}),
    ("stronghold", {"placement": "W3", "window_size": 2}),
    ("stronghold", {"placement": "R1W1S1", "window_size": 1}),
    ("stronghold", {"placement": "P1S2", "window_size": 2}),
]


@pytest.mark.shows("a model by its config.json trains exactly")
@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("method", "options"), STREAMED, ids=[f"{name} {list(each.values())}" for name, each in STREAMED]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_training_has_the_bits_of_resident(
    family: str, method: str, options: dict[str, Any]
) -> None:
    workload = configured(family)
    assert difference(train(method, workload, STEPS, **options), train_resident(workload, STEPS)) == ""


@pytest.mark.parametrize("changes", [{"dtype": "bf16"}, {"dtype": "fp16"}, IN_TWO], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_so_it_has_in_half_precision_and_by_micro_batches(family: str, changes: dict[str, Any]) -> None:
    workload = configured(family, **changes)
    streamed = train("stronghold", workload, STEPS, placement="W3", window_size=2)
    assert difference(streamed, train_resident(workload, STEPS)) == ""


@pytest.mark.parametrize(
    "family", ["gemma3", "gpt2", *(pytest.param(name, marks=pytest.mark.heavy) for name in SELDOM)]
)
def test_so_it_has_for_other_families(family: str) -> None:
    workload = configured(family)
    streamed = train("stronghold", workload, STEPS, placement="W3", window_size=2)
    assert difference(streamed, train_resident(workload, STEPS)) == ""


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "family",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.heavy) for name in MIXTURES if name != "mixtral")],
)
def test_so_it_has_for_mixtures_of_experts(family: str, dtype: str) -> None:
    workload = configured(family, dtype=dtype)
    resident = train_resident(workload, STEPS)
    for method, options in STREAMED:
        assert difference(train(method, workload, STEPS, **options), resident) == "", (method, options)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # as Qwen publishes it, and samples beyond the positions that the model was published for
        ("qwen3", {"rope_scaling": YARN, "max_position_embeddings": 8}),
        ("llama", {"pad_token_id": 7}),
    ],
    ids=["yarn beyond the positions", "padding"],
)
def test_so_it_has_for_conventions_that_hinder_nothing(family: str, changes: dict[str, Any]) -> None:
    config = hub_config.text_of(config_of(family, **changes))
    workload = configured(family, config=config)
    streamed = train("stronghold", workload, STEPS, placement="W3", window_size=2)
    assert difference(streamed, train_resident(workload, STEPS)) == ""


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("hydra", {}),
        ("fsdp2-offload", {}),
        ("zero-offload", {}),
        ("zero-infinity", {}),
        ("hydra", IN_TWO),
        ("fsdp2-offload", {**IN_TWO, "dtype": "bf16"}),
    ],
    ids=str,
)
def test_engines_that_take_the_model_apart_pass_the_gate(
    name: str, changes: dict[str, Any], family: str, shared_results: Path
) -> None:
    job = resolve(Job(name, configured(family, **changes), steps=5, warmup=1))[0]
    assert Sweep(shared_results).run([resolve(job)])[0].gate.passed


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
def test_states_on_the_disk_pass_the_gate_where_layers_are_recomputed_by_torchs_older_way(
    tmp_path: Path, libaio: None
) -> None:
    """Of a model so large that weights leave memory."""
    sizes = {"num_layers": 8, "hidden_size": 512, "vocab_size": 8192, "seq_len": 64}
    workload = configured("llama", learning_rate=0.05, **sizes)
    job = resolve(Job("zero-infinity-nvme", workload, {"disk": str(tmp_path)}, steps=5, warmup=1))[0]
    (record,) = Sweep(tmp_path).run([resolve(job)])
    assert record.gate.passed, record.gate.text


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *(("varuna", family) for family in ("llama", "qwen2", "gpt2")),
        *(("hf-trainer", family) for family in ("llama", "qwen2")),
        *(pytest.param("hf-trainer", name, marks=pytest.mark.heavy) for name in SELDOM),
    ],
)
def test_a_pipeline_of_one_stage_and_trainer_train_as_resident(method: str, family: str) -> None:
    """Its head apart from the embedding, or tied to it; names are the model's."""
    workload = configured(family)
    piped, resident = train(method, workload, STEPS), train_resident(workload, STEPS)
    assert largest_difference(piped.losses, resident.losses) < 1e-6
    names = [[tensor.name for tensor in result.trained.tensors] for result in (piped, resident)]
    assert sorted(names[0]) == sorted(names[1])


@pytest.mark.heavy
@pytest.mark.usefixtures("with_engines")
@pytest.mark.parametrize(
    ("family", "schedule", "num_stages"),
    [("llama", "varuna", 2), ("qwen2", "varuna", 3), ("qwen2", "1f1b", 2)],
)
def test_a_pipeline_of_stages_passes_the_gate(
    family: str, schedule: str, num_stages: int, shared_results: Path
) -> None:
    options = {"world_size": num_stages, "num_stages": num_stages, "schedule": schedule}
    job = resolve(Job("varuna", configured(family), options, steps=5, warmup=1))[0]
    (record,) = Sweep(shared_results).run([resolve(job)])
    assert record.gate.passed, record.gate.text


def test_methods_that_train_the_published_gpt_alone_say_so() -> None:
    workload = configured("llama")
    for name, cls in loadable(()).items():
        if not cls.takes_config:
            with pytest.raises(
                ValueError, match=r"trains only the published GPT, not llama: try -m .*resident"
            ):
                check(create(name, {}), workload)
