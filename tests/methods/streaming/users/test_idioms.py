"""docs/own-model.md tells which idioms of training scripts are exact with a trainer, and with which words others are
refused: each idiom of its table runs here, beside plain PyTorch."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from harness.base.checkout import ROOT
from methods.l2l import L2LTrainer
from methods.streaming.users.training import UserTraining
from methods.stronghold import StrongholdTrainer
from tests.methods.streaming.users.idioms import IDIOMS, LAYERS, Net

TRAINERS = {
    "waits": (1.0, functools.partial(StrongholdTrainer, accumulates=True, placement="R1W1S1", window_size=1)),
    "waits, l2l": (1.0, L2LTrainer),
    "at once": (None, functools.partial(StrongholdTrainer, placement=f"W{LAYERS}", window_size=2)),
}
TABLE = re.findall(
    r"^\| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "own-model.md").read_text(), re.MULTILINE
)
ROWS = {name: (waits, at_once) for name, waits, at_once in TABLE if name in IDIOMS}


def test_the_page_has_all_idioms() -> None:
    assert list(ROWS) == list(IDIOMS)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_idiom_is_exact_or_refused_as_the_page_says(idiom: str, trainer: str) -> None:
    max_norm, make = TRAINERS[trainer]
    waits, at_once = ROWS[idiom]
    promise = waits if trainer != "at once" or at_once == "same" else at_once
    if promise == "exact":
        plain, seen = (IDIOMS[idiom].run(max_norm, trainer_of) for trainer_of in (None, make))
        assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
        return
    with pytest.raises(ValueError) as refused:
        IDIOMS[idiom].run(max_norm, make)
    assert "\n" not in str(refused.value)
    assert promise.strip("`") in str(refused.value)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_plain_loop_never_waits_for_its_updates(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a script that uses weights between steps has them brought home, and fetched again."""
    calls: list[str] = []
    for name in ("come_home", "refetch"):
        monkeypatch.setattr(UserTraining, name, lambda self, name=name: calls.append(name))
    max_norm, make = TRAINERS[trainer]
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    training = make(model, model.layers, optimizer, max_norm=max_norm, device="cpu")
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        training.step()
    training.__exit__(ValueError, None, None)
    assert calls == []
