"""Models by name: their sizes against the published numbers of parameters, and how --model gives them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.core import ParameterSource

from cli import main
from cli.job_options import make_jobs
from harness.base.registry import read_entries
from harness.core.job import Workload
from harness.jobs.command import command_of
from harness.models import named_models
from tests.support import cli
from tests.support.configured import config_of


def sizes(*arguments: str) -> tuple[int, ...]:
    """Layers, hidden size, heads, tokens a sample and vocabulary that a call asks for."""
    values = main.door.commands[arguments[0]].make_context("it", list(arguments[1:])).params
    return (
        *values["num_layers"],
        *values["hidden_size"],
        values["num_heads"],
        *values["seq_len"],
        values["vocab_size"],
    )


# Parameters of the published checkpoints whose architecture is ours, but for what pads: 47 words of GPT-2's vocabulary,
# two positions of OPT's.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_its_published_parameters(name: str) -> None:
    model = Workload(**named_models.load(name).sizes)
    padding = 47 if name.startswith("gpt2") else -2
    assert model.num_params - padding * model.hidden_size == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in named_models.names() if re.search(r"\d[mb]$", name)])
def test_a_name_tells_the_number_of_parameters(name: str) -> None:
    """Less exactly where "our architecture" lacks a part."""
    number, unit = re.search(r"-([\d.]+)([mb])$", name).groups()  # type: ignore[union-attr]
    model = named_models.load(name)
    published = float(number) * {"m": 1e6, "b": 1e9}[unit]
    within = 0.14 if "our architecture" in model.about else 0.05
    # of a model by its config.json, whose sliding window may be short, the number depends on no sample
    sizes = {**model.sizes, "seq_len": 128} if "config" in model.sizes else model.sizes
    assert Workload(**sizes).num_params == pytest.approx(published, rel=within)


# Layers, width and heads by the comments of microsoft/varuna's examples/Megatron-LM/pretrain_gpt2_varuna.sh.
VARUNA = {"355m": (24, 1024, 16), "1.5b": (48, 1600, 16), "2.5b": (54, 1920, 20), "8.3b": (72, 3072, 32)}


@pytest.mark.parametrize("size", VARUNA)
def test_varunas_models_are_those_of_its_script(size: str) -> None:
    assert sizes("plan", "--model", f"varuna-{size}")[:4] == (*VARUNA[size], 1024)


# Layers, width, heads, tokens and words by the sources that models.yaml names.
OPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1.3b": (24, 2048, 32),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "66b": (64, 9216, 72),
    "175b": (96, 12288, 96),
}
LLAMA = {
    "llama-7b": (32, 4096, 32),
    "llama-13b": (40, 5120, 40),
    "llama-33b": (60, 6656, 52),
    "llama-65b": (80, 8192, 64),
    "llama2-7b": (32, 4096, 32),
    "llama2-13b": (40, 5120, 40),
    "llama2-70b": (80, 8192, 64),
}
TOKENS_AND_WORDS = {"llama": (2048, 32000), "llama2": (4096, 32000)}


@pytest.mark.parametrize("size", OPT)
def test_opts_are_those_of_its_launcher(size: str) -> None:
    assert sizes("plan", "--model", f"opt-{size}") == (*OPT[size], 2048, 50272)


@pytest.mark.parametrize("name", LLAMA)
def test_llamas_are_those_of_their_configurations(name: str) -> None:
    assert sizes("plan", "--model", name) == (*LLAMA[name], *TOKENS_AND_WORDS[name.split("-")[0]])


@pytest.mark.parametrize("verb", ["run", "sweep", "plan"])
def test_a_model_gives_the_sizes_that_are_not_given(verb: str) -> None:
    assert sizes(verb, "--model", "llama-7b") == (32, 4096, 32, 2048, 32000)
    assert sizes(verb, "-l", "2", "--seq", "128", "--model", "gpt2-xl") == (2, 1600, 25, 128, 50304)


def test_a_search_takes_the_sizes_of_a_model_and_its_depth_bounds_no_search() -> None:
    search = main.door.commands["search"].commands["largest"]  # type: ignore[attr-defined]
    context = search.make_context("it", ["-m", "l2l", "--model", "gpt2-xl"])
    values = context.params
    # --of batch takes the depth
    assert (values["hidden_size"], values["num_layers"], values["steps"]) == ([1600], [48], 5)
    assert context.get_parameter_source("num_layers") is ParameterSource.DEFAULT_MAP


def test_each_of_several_models_has_its_sizes_but_those_that_are_given() -> None:
    arguments = ["-m", "l2l", "-l", "2", "--seq", "64", "--model", "gpt2,tiny-llama,Qwen/Qwen3-0.6B"]
    jobs = make_jobs(main.door.commands["sweep"].make_context("it", arguments).params, ())
    shapes = [(job.workload.hidden_size, job.workload.num_heads, job.workload.vocab_size) for job in jobs]
    assert shapes == [(768, 12, 50304), (32, 4, 101), (1024, 16, 151936)]
    assert {(job.workload.num_layers, job.workload.seq_len) for job in jobs} == {(2, 64)}


def test_a_pattern_names_models_and_a_path_may_have_a_comma(tmp_path: Path) -> None:
    assert named_models.several("gpt2-*,gpt2") == ["gpt2-medium", "gpt2-large", "gpt2-xl", "gpt2"]
    assert len(named_models.several("tiny-*")) == 22
    folder = tmp_path / "a,gpt2"
    folder.mkdir()
    assert named_models.several(str(folder)) == [str(folder)]


def test_a_plan_of_several_models_names_them() -> None:
    planned = cli.run("plan", "-m", "l2l", "--model", "tiny-llama,gpt2", "-l", "2", "--seq", "16", "--json")
    assert [json.loads(line)["model_name"] for line in planned.stdout.splitlines()] == ["tiny-llama", "GPT"]


def test_a_model_by_its_config_is_shortened_by_its_layers() -> None:
    arguments = ["-l", "2", "-m", "resident", "--model", "Qwen/Qwen3-0.6B"]
    job = make_jobs(main.door.commands["run"].make_context("it", arguments).params, ())[0]
    load = job.workload
    assert (load.num_layers, load.hidden_size, load.num_heads, load.vocab_size) == (2, 1024, 16, 151936)
    assert load.layers_text == "Qwen3-0.6B, 2 of 28 layers"
    again = main.door.commands["run"].make_context("it", shlex.split(command_of(job))[1:]).params
    assert make_jobs(again, ())[0] == job


@pytest.mark.parametrize(
    ("name", "near"),
    [("gpt2xl", "gpt2-xl or gpt2 or gpt2-large"), ("llama3-8b", "Llama-3-8B or Llama-3.1-8B or llama-7b")],
)
def test_an_unknown_model_names_the_nearest_and_the_file_of_all(name: str, near: str) -> None:
    ended = cli.run("plan", "-m", "l2l", "--model", name)
    message = (
        f"no model '{name}': did you mean {near}? {named_models.FILE} lists all {len(named_models.names())}"
    )
    assert ended.returncode == 2 and message in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_a_folder_is_not_taken_for_the_model_whose_name_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("llama")))
    assert named_models.load(str(folder)).sizes["hidden_size"] == 32
    assert named_models.load("Qwen/Qwen3-8B").sizes["hidden_size"] == 4096


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B", "Llama-3-8B"),
        ("Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7b-hf"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
    ],
)
def test_ids_as_the_hub_spells_them_are_known(spelled: str, name: str) -> None:
    assert named_models.load(spelled) == named_models.load(name)


def test_no_id_is_that_of_two_models_or_an_entry() -> None:
    models = read_entries(named_models.FILE, named_models.EXAMPLE)
    ids = [spelled.rpartition("/")[2] for fields in models.values() for spelled in fields.get("ids", ())]
    assert len({*ids, *models}) == len(ids) + len(models)


def test_sizes_that_make_no_model_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("mine: {num_layers: 2, hidden_size: 100, num_heads: 16, seq_len: 64}")
    with pytest.raises(ValueError, match=r"mine: hidden size 100 is not divisible by 16 heads"):
        named_models.load("mine", file)
