"""Trained adapters are saved as peft loads them."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers

from harness.core import hub_config
from harness.core.method import TensorState
from harness.models.gpt import initial
from harness.models.saved_weights import SavedAdapters
from tests.support.configured import configured
from tests.support.training import train

LOAD = configured("qwen3", lora="4", lora_targets="q_proj,down_proj")


def test_peft_loads_saved_adapters_onto_the_base(tmp_path: Path) -> None:
    result = train("stronghold", LOAD, 3)
    states = list(SavedAdapters(LOAD, tmp_path / "saved").passing(result.trained.tensors))
    config = hub_config.parsed(str(LOAD.config))
    causal = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    for name, weight in causal.named_parameters():
        weight.data.copy_(initial(name, weight.shape, LOAD))
    loaded = dict(peft.PeftModel.from_pretrained(causal, tmp_path / "saved").named_parameters())
    trained = [state for state in states if LOAD.anatomy.is_trained(state.name)]
    assert len(trained) == 3 * 4
    for state in trained:
        assert torch.equal(loaded[f"base_model.model.{state.name}"], state.weight)


def test_a_missing_adapter_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    states = [TensorState(name, torch.zeros(2)) for name in LOAD.anatomy.names(3)[:-1]]
    with pytest.raises(ValueError, match="expected all adapters of the model to save, got none of 1 tensors"):
        list(SavedAdapters(LOAD, tmp_path / "saved").passing(states))
    assert not (tmp_path / "saved").exists()
