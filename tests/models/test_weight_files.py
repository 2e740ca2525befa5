"""Weights in and out: transformers writes what we start from, and loads what we write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from harness.core import hub_config
from harness.core.data import batches, token_batches
from harness.core.job import Job, Workload
from harness.core.method import TensorState
from harness.jobs.job_key import files_read_by, method_context
from harness.models import named_models, weight_files
from harness.models.model import build
from harness.models.saved_weights import SavedWeights
from tests.support import cli, oracle
from tests.support.configured import config_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHARD = 20_000  # bytes: several files of a tiny model


def written(folder: Path, family: str = "qwen2", dtype: str = "fp32", **changes: Any) -> Path:
    """A model of transformers' own with weights that no seed of ours draws, in shards."""
    config = transformers.AutoConfig.for_model(**config_of(family, eos_token_id=[7, 9], **changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.data.normal_(0.5 if weight.ndim == 1 else 0.0, 0.05, generator=generator)
    model.save_pretrained(folder, max_shard_size=SHARD)
    return folder


def starting_from(folder: Path, **changes: Any) -> Workload:
    config, _ = hub_config.read_config(folder)
    sizes = {**hub_config.sizes_of(config), "seq_len": 16, "batch_size": 2, "learning_rate": 1.0}
    named = {"model": folder.name, "config": hub_config.text_of(config), "weights": str(folder)}
    return Workload(**{**sizes, **named, **changes})


def save(workload: Workload, folder: Path, file_bytes: int = SHARD) -> None:
    """Write the workload's starting values, as if they were trained."""
    states = [TensorState(name, weight.data.float()) for name, weight in build(workload).named_parameters()]
    assert [*SavedWeights(workload, folder, file_bytes).passing(states)] == states


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as transformers loads them, in the dtype that the folder says."""
    return dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", "fp32"), ("llama3.1", "bf16"), ("phi3", "fp32"), ("gpt_neox", "bf16"), ("gpt2", "fp32")],
)
def test_what_goes_in_and_out_is_bit_equal(family: str, dtype: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "in", family, dtype)
    assert len(list(folder.glob("*.safetensors"))) > 1
    workload = starting_from(folder, dtype=dtype)
    weight_files.check(workload)
    expected = loaded(folder)
    assert all(torch.equal(expected[name], weight) for name, weight in build(workload).named_parameters())
    save(workload, tmp_path / "out")
    saved = loaded(tmp_path / "out")
    assert saved.keys() == expected.keys()
    assert all(
        torch.equal(saved[name], weight) and saved[name].dtype == DTYPES[dtype]
        for name, weight in expected.items()
    )


def test_the_saved_configuration_is_the_given_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "in", attention_dropout=0.1)
    save(starting_from(folder), tmp_path / "out")
    config_before, config_after = (
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out")
    )
    assert config_after == config_before


def test_no_file_is_larger_than_asked_unless_one_tensor_is(tmp_path: Path) -> None:
    save(starting_from(written(tmp_path / "in")), tmp_path / "out")
    files = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert all(len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= SHARD for held in files)
    assert len(files) > 2


def test_a_model_of_one_file_needs_no_index(tmp_path: Path) -> None:
    save(starting_from(written(tmp_path / "in")), tmp_path / "out", 2**30)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert weight_files.check(starting_from(tmp_path / "out")) is None


def test_names_may_lack_the_name_of_the_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "in", "llama3.1")
    weights = {name.removeprefix("model."): tensor for name, tensor in loaded(folder).items()}
    (tmp_path / "bare").mkdir()
    save_file(
        {name: tensor.detach().clone() for name, tensor in weights.items()},
        tmp_path / "bare" / "model.safetensors",
    )
    workload = starting_from(folder, weights=str(tmp_path / "bare"))
    weight_files.check(workload)
    assert all(
        torch.equal(loaded(folder)[name], weight) for name, weight in build(workload).named_parameters()
    )


def with_tensors(folder: Path, new: Path, **changes: torch.Tensor | None) -> Path:
    """The same model in one file, with these tensors changed or, for None, without them. Underscores are dots."""
    new.mkdir()
    weights = {
        name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()
    }
    weights |= {name.replace("__", "."): weight for name, weight in changes.items()}
    save_file(
        {name: weight for name, weight in weights.items() if weight is not None}, new / "model.safetensors"
    )
    (new / "config.json").write_text((folder / "config.json").read_text())
    return new


LEFT_OUT = {
    "a bias": "model__layers__0__mlp__down_proj__bias",
    "a layer": "model__layers__3__input_layernorm__weight",
    "a norm": "model__layers__1__self_attn__q_norm__weight",
    "another head": "score__weight",
}


@pytest.mark.parametrize("name", LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_tensor_that_the_model_lacks_is_named(name: str, tmp_path: Path) -> None:
    """transformers warns of it, loads the rest, and trains another model than the one that was saved."""
    folder = with_tensors(written(tmp_path / "in"), tmp_path / "new", **{name: torch.ones(32)})
    with pytest.raises(
        ValueError, match=rf"got {name.replace('__', '.')}, one of 1 that it lacks and would not train"
    ):
        weight_files.check(starting_from(folder))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "model__layers__0__self_attn__rotary_emb__inv_freq"),
        ("gpt2", "transformer__h__0__attn__bias"),
        ("gpt_neox", "gpt_neox__layers__1__attention__masked_bias"),
    ],
)
def test_buffers_that_older_versions_wrote_are_ignored(family: str, name: str, tmp_path: Path) -> None:
    folder = with_tensors(written(tmp_path / "in", family), tmp_path / "new", **{name: torch.ones(4)})
    weight_files.check(starting_from(folder))


def test_layers_that_are_left_out_may_be_in_the_files(tmp_path: Path) -> None:
    weight_files.check(starting_from(written(tmp_path / "in"), num_layers=2))


def test_a_tied_head_in_the_files_has_the_values_of_the_embedding(tmp_path: Path) -> None:
    """Else transformers does not tie it."""
    folder = written(tmp_path / "in")
    table = loaded(folder)["model.embed_tokens.weight"].detach().clone()
    equal = with_tensors(folder, tmp_path / "equal", lm_head__weight=table.clone())
    weight_files.check(starting_from(equal))
    other = with_tensors(folder, tmp_path / "other", lm_head__weight=table + 1)
    causal = transformers.AutoModelForCausalLM.from_pretrained(other)
    assert not torch.equal(causal.lm_head.weight, causal.model.embed_tokens.weight)
    with pytest.raises(
        ValueError, match=r"config.json ties them, got another; write tie_word_embeddings: false into"
    ):
        weight_files.check(starting_from(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e-4}, "got a config.json with rms_norm_eps 1e-06 instead of 0.0001; try --model"),
        ({"rope_theta": 1e4}, "with rope_parameters .*1000000.* instead of .*10000"),
        ({"pad_token_id": 3}, "with pad_token_id None instead of 3"),
    ],
    ids=str,
)
def test_weights_of_a_model_that_computes_otherwise_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Their tensors have the same names and shapes."""
    folder = written(tmp_path / "in")
    with pytest.raises(ValueError, match=message):
        weight_files.check(starting_from(folder, config=hub_config.text_of(config_of("qwen2", **changes))))
    same = config_of("qwen2", max_position_embeddings=128, bos_token_id=3, use_sliding_window=False)
    weight_files.check(starting_from(folder, config=hub_config.text_of(same)))


def test_names_with_another_prefix_have_a_way_out(tmp_path: Path) -> None:
    folder = written(tmp_path / "in")
    prefixed = {name: None for path in folder.glob("*.safetensors") for name in load_file(path)}
    weights = {
        f"module.{name}": weight.detach().clone()
        for name, weight in loaded(folder).items()
        if name in prefixed
    }
    new = with_tensors(folder, tmp_path / "new", **prefixed, **weights)
    with pytest.raises(
        ValueError, match=r"got module\.model\.\S+; save the files again without module\. before each"
    ):
        weight_files.check(starting_from(new))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"got pytorch_model\.bin, which only unpickling reads: try from_pretrained\("),
        (
            "pytorch_model-00001-of-00002.bin",
            r"try from_pretrained\(.*\) and save_pretrained of transformers",
        ),
        ("adapter_config.json", "expected weights of a whole model, got an adapter .*; merge it"),
    ],
)
def test_files_that_are_not_read_have_a_way_out(file: str, message: str, tmp_path: Path) -> None:
    workload = starting_from(written(tmp_path / "in"), weights=str(tmp_path / "new"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / file).touch()
    with pytest.raises(ValueError, match=message):
        weight_files.check(workload)


def test_the_part_for_texts_of_a_model_of_texts_and_images_is_trained_alone(tmp_path: Path) -> None:
    """Its sizes are in text_config, where those that transformers takes by default are missing, and its tensors have
    names of their own."""
    texts = {**config_of("gemma3"), "num_key_value_heads": 4, "vocab_size": 262208, "head_dim": 256}
    seen = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=texts, vision_config=seen, mm_tokens_per_image=4)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    for name in ("vocab_size", "num_key_value_heads", "head_dim"):
        del saved["text_config"][name]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert named_models.load(str(tmp_path)).note == "the part for texts of a gemma3, without the others"
    workload = starting_from(tmp_path)
    weight_files.check(workload)
    ((inputs, targets),) = token_batches(workload, 1)
    with torch.no_grad():
        logits = whole(input_ids=inputs).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert build(workload)(inputs, targets).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_run_trains_what_transformers_loads_and_saves_what_it_loads_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "in")
    sizes = ["--seq", "16", "-b", "2", "--steps", "3", "--lr", "1", "--no-probe"]
    arguments = [
        "-m",
        "stronghold",
        "--model",
        folder,
        "--weights",
        folder,
        "--save",
        tmp_path / "out",
        *sizes,
    ]
    done = cli.run(*arguments, "--results", tmp_path / "results")
    assert done.returncode == 0 and "gate passed" in done.stdout, done.stderr
    assert f"weights and config.json, for transformers: {tmp_path / 'out'}" in done.stdout
    tokens = torch.from_numpy(batches(starting_from(folder), 3))
    trained = oracle.trained(folder, "fp32", "sdpa", tokens)
    start, saved = loaded(folder), loaded(tmp_path / "out")
    for name in start:
        weight = trained[f"weight {name}"]
        moved, apart = (weight - start[name]).norm(), (weight - saved[name]).norm()
        # whose gradient is little but rounding
        assert apart < 1e-3 * moved or name.endswith("k_proj.bias"), name
    assert len(list((tmp_path / "results").glob("*.json"))) == 2


def shorten(folder: Path) -> None:
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    path.write_bytes(path.read_bytes()[:-1])


def quantize(folder: Path) -> None:
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    held = load_file(path)
    save_file({name: weight.to(torch.float8_e4m3fn) for name, weight in held.items()}, path)


def lead_out(folder: Path) -> None:
    index = folder / weight_files.INDEX
    index.write_text(index.read_text().replace("model-00001", "../in/model-00001"))


def misname(folder: Path) -> None:
    (folder / weight_files.INDEX).write_text('{"weight_map": "model.safetensors"}')


REFUSED: list[tuple[str, Callable[[Path], Any], list[str]]] = [
    ("expected this file of weights, got none", lambda folder: next(folder.glob("*-00002-*")).unlink(), []),
    ("expected a file of safetensors, got", shorten, []),
    ("expected weights in F64, F32, BF16, F16, got F8_E4M3 for", quantize, []),
    ("expected a file name without a folder, got", lead_out, []),
    ("expected an object as weight_map, got", misname, []),
    ("expected a weight_map, got", lambda folder: (folder / weight_files.INDEX).write_text("{"), []),
    ("got a folder without either", lambda folder: (folder / weight_files.INDEX).unlink(), []),
    ("got no such folder", lambda folder: None, ["--weights", "nowhere"]),
    (
        "expected model.embed_tokens.weight of shape [50, 32], got [101, 32]",
        lambda folder: None,
        ["--vocab", "50"],
    ),
    (
        "expected weights of model.layers.3.self_attn.q_proj.weight, got none",
        lambda folder: None,
        ["-l", "4"],
    ),
]


@pytest.mark.parametrize(
    ("message", "damage", "arguments"), REFUSED, ids=[message for message, _, _ in REFUSED]
)
def test_weights_that_cannot_be_read_are_one_line(
    message: str, damage: Callable[[Path], Any], arguments: list[str], tmp_path: Path
) -> None:
    folder = written(tmp_path / "in")
    damage(folder)
    call = ["-m", "resident", "--model", folder, "--weights", folder, "--seq", "16", "-b", "2", *arguments]
    done = cli.run(*call, "--results", tmp_path / "results")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not [*(tmp_path / "results").glob("*")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "resident", "--weights", "."], "--weights: expected a model with a config.json"),
        (
            ["-m", "resident,l2l", "--model", "Qwen3-0.6B", "--seq", "16", "--save", "new"],
            "--save needs a single run",
        ),
        (["-m", "resident", "--save", "new"], "of one model with a config.json"),
        (
            ["-m", "resident", "--model", "Qwen3-0.6B", "-l", "1", "--save", "there"],
            "expected a new or empty folder",
        ),
    ],
)
def test_what_cannot_be_started_from_or_saved_is_one_line(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    named = [str(tmp_path / word) if word in ("new", "there") else word for word in arguments]
    done = cli.run(*named, "--results", tmp_path / "results")
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1, (
        done.stderr
    )


def test_another_content_is_another_job(tmp_path: Path) -> None:
    folder = written(tmp_path / "in")
    job = Job("resident", starting_from(folder))
    before = job.key(**method_context(job.method, files_read_by(job)))
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert job.key(**method_context(job.method, files_read_by(job))) != before


def test_a_killed_writer_leaves_nothing_that_loads_and_the_next_one_removes_it(tmp_path: Path) -> None:
    workload, folder = starting_from(written(tmp_path / "in")), tmp_path / "out"
    states = [TensorState(name, weight.data) for name, weight in build(workload).named_parameters()]
    if not (child := os.fork()):
        for number, _ in enumerate(SavedWeights(workload, folder, SHARD).passing(states)):
            if number == len(states) - 1:
                os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    [left] = tmp_path.glob(".out.*")
    assert list(left.iterdir()) and not folder.exists()
    with pytest.raises(ValueError, match="Unrecognized model"):
        transformers.AutoModelForCausalLM.from_pretrained(left)
    save(workload, folder)
    assert loaded(folder) and not left.exists()


def test_weights_that_a_training_lacks_are_named(tmp_path: Path) -> None:
    workload = starting_from(written(tmp_path / "in"))
    states = [TensorState(name, weight.data) for name, weight in build(workload).named_parameters()]
    with pytest.raises(
        ValueError, match=r"expected all weights of the model to save, got none of model\.embed"
    ):
        list(SavedWeights(workload, tmp_path / "out").passing(states[1:]))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
