"""Models by their config.json compute and train as transformers' own do in a plain loop of PyTorch. The oracle is a
process without this project's code (tests/support/oracle.py), which also draws the weights.

In bf16 two trainings may differ by twice what the oracle's bf16 differs from its fp32, because each rounds as much, and
by twice that, because how much is chance. Of several tensors the one counts that differs most.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from harness.base.checkout import ROOT
from harness.core.data import batches, token_batches
from harness.core.job import Workload
from harness.models.model import build
from tests.support import oracle, packages
from tests.support.configured import FAMILIES, MIXTURES, OTHERS, config_of, configured, in_parts
from tests.support.training import train

STEPS = 10
TOLERANCE = 1e-5  # in fp32
QUICK = (*FAMILIES, "gemma3", "gpt2")
ALL = (*FAMILIES, *OTHERS, *MIXTURES)
OWN = {
    "gemma2": "eager",
    "gpt_oss": "eager",
}  # the attention that transformers chooses, and the only one; elsewhere it is sdpa
# GPT-NeoX's, with the keys' bias, whose gradient is mostly rounding
FUSED_BIAS = "attention.query_key_value.bias"
Told = dict[str, Tensor]


def _cases(*attentions: str) -> list[Any]:
    return [
        pytest.param(family, attention, marks=[pytest.mark.heavy] * (family not in QUICK))
        for family in ALL
        for attention in (attentions if family not in OWN else (OWN[family],))
    ]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the oracle's results for a family are. One process trains all quick families, one the heavy ones; whichever
    of the tests' processes needs them first starts it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def find(family: str) -> Path:
        families = [each for each in ALL if (each in QUICK) == (family in QUICK)]
        folder = base / f"oracle-{families[0]}"
        with packages.locked(base / "oracle.lock"):
            if not (folder / "modules.json").exists():
                tokens = batches(configured("llama"), STEPS).tolist()
                order = {"folder": str(folder), "configs": {each: config_of(each) for each in families}}
                words = [sys.executable, "-P", oracle.__file__]  # -P: no file beside it is imported
                subprocess.run(words, input=json.dumps({**order, "batches": tokens}), text=True, check=True)
        return folder / family

    return find


@functools.cache
def theirs(folder: Path, dtype: str, attention: str) -> Told:
    return load_file(folder / f"{dtype}-{attention}.safetensors")


@functools.cache
def ours(folder: Path, dtype: str) -> Told:
    """The same of the harness: logits by its parts, gradients by the whole model, and a training by `resident`."""
    workload = workload_of(folder, dtype)
    inputs, targets = token_batches(workload, 1)[0]
    whole = build(workload)
    whole(inputs, targets).backward()
    ends, layers = in_parts(workload, whole)
    x = ends.embed(inputs)
    for layer in layers:
        x = layer(x)
    losses, norms, trained = train("resident", workload, STEPS)
    return {
        "logits": ends.logits(x).float(),
        **{f"gradient {name}": weight.grad.float() for name, weight in whole.named_parameters()},
        **{f"weight {each.name}": each.weight for each in trained.tensors},
        "losses": torch.tensor(losses),
        "norms": torch.tensor(norms),
    }


def workload_of(folder: Path, dtype: str) -> Workload:
    return configured(folder.name, dtype=dtype, weights=str(folder / "weights"))


def differences(folder: Path, dtype: str, attention: str, what: str) -> dict[str, float]:
    """The relative differences of the oracle's tensors whose names begin so."""
    return _differences(ours(folder, dtype), theirs(folder, dtype, attention), what, folder)


def allowed(folder: Path, dtype: str, attention: str, what: str) -> float:
    if dtype == "fp32":
        return TOLERANCE
    told = (theirs(folder, each, attention) for each in (dtype, "fp32"))
    return 4 * max(_differences(*told, what, folder).values())


def _differences(found: Told, expected: Told, what: str, folder: Path) -> dict[str, float]:
    anatomy = workload_of(folder, "fp32").anatomy

    def is_rounding(name: str) -> bool:
        within = anatomy.within(name.partition(" ")[2])
        return within in anatomy.kinds[0].noise or (within == FUSED_BIAS and what == "weight")

    names = [name for name in expected if name.startswith(what) and not is_rounding(name)]
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in names}


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize(("family", "attention"), _cases("sdpa"))
def test_logits_have_the_bits_of_transformers(
    family: str, attention: str, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    assert torch.equal(ours(folder, dtype)["logits"], theirs(folder, dtype, attention)["logits"])


@pytest.mark.parametrize("what", ["logits", "gradient", "losses", "norms", "weight"])
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize(("family", "attention"), _cases("eager", "sdpa"))
def test_it_agrees_with_transformers(
    family: str, attention: str, dtype: str, what: str, folder_of: Callable[[str], Path]
) -> None:
    """Of the first step logits and gradients; of 10 steps losses, gradient norms and trained weights."""
    folder = folder_of(family)
    found, most = differences(folder, dtype, attention, what), allowed(folder, dtype, attention, what)
    assert found and {name: each for name, each in found.items() if not each <= most} == {}


def test_the_oracle_s_process_has_nothing_of_this_project(folder_of: Callable[[str], Path]) -> None:
    imported = json.loads((folder_of("llama").parent / "modules.json").read_text())
    assert "transformers" in imported
    assert not {path.name for path in ROOT.iterdir()}.intersection(imported)
