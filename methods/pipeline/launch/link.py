"""The link between a rank and its launcher. The link brings orders to the rank and a report of each step to the
launcher.

SIGUSR1 asks the ranks to save a checkpoint and end. The signal reaches the ranks at different moments, perhaps during
an update. Therefore the signal stays blocked, and at the beginning of each step the ranks agree whether any of them has
received it. If one has, the script's handler runs on all ranks, between the same two steps.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.base.json_object import JsonObject

LINK_VARIABLE = "VARUNA_LINK"  # set by methods/pipeline/launch/agent.py
ALIVE_SECONDS = 5.0  # seconds between two messages that show the launcher that a rank lives


@functools.cache
def link_to_launcher() -> Link | None:
    """Return this process's link to its launcher; None in a process that no launcher has started."""
    fields = os.environ.get(LINK_VARIABLE)
    return Link(**json.loads(fields)) if fields else None


@dataclass
class Link:
    """A rank's end of the link. `descriptor`: file descriptor of the pipe to the agent. `folder`: folder of the
    checkpoints. `checkpoint_every`: most steps that are trained again after a rank has died; None: the script saves by
    itself. `cuts`: the CutPoints that the launcher chose; None: the model chooses them."""

    descriptor: int
    folder: str
    checkpoint_every: int | None
    cuts: list[int] | None
    rank: int
    round: int
    # step of the checkpoint in the folder that this process saved or loaded last
    saved_step: int | None = field(default=None, init=False)
    is_stopping: bool = field(default=False, init=False)
    told_alive_at: float = field(default=0.0, init=False)  # time of the last message that the rank lives

    def tell(self, kind: str, **facts: Any) -> None:
        """Send a message as one line. The line is short enough that the system writes it in one piece."""
        os.write(
            self.descriptor,
            (json.dumps({"kind": kind, "rank": self.rank, "round": self.round, **facts}) + "\n").encode(),
        )

    def tell_alive(self) -> None:
        if time.monotonic() > self.told_alive_at + ALIVE_SECONDS:
            self.told_alive_at = time.monotonic()
            self.tell("alive")

    def at_boundary(self, model: Any) -> None:
        """If any rank has received SIGUSR1, run the script's handler. If none has, and a checkpoint is due, save it.
        All ranks call this between two steps."""
        if self.is_stopping:
            return
        has_signal = torch.tensor([float(signal.SIGUSR1 in signal.sigpending())])
        dist.all_reduce(has_signal)
        if has_signal.item():
            self.is_stopping = True
            self.tell("stopping", step=model.num_steps)
            signal.raise_signal(signal.SIGUSR1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the handler runs here
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        elif self._is_checkpoint_due(model.num_steps):
            pending = model.checkpoint()
            if self.checkpoint_every == 1:
                pending.result()

    def _is_checkpoint_due(self, num_steps: int) -> bool:
        """Return whether a checkpoint is due. A checkpoint is surely on disk only when the next one begins, so a rank's
        death can cost two intervals between checkpoints. Therefore an interval is half of `checkpoint_every`."""
        if not self.checkpoint_every or not num_steps:
            return False
        return num_steps % max(1, self.checkpoint_every // 2) == 0

    def tell_step(self, model: Any, inputs: Mapping[str, Any], facts: JsonObject) -> None:
        """Report a step after its passes and before its update. Ranks of the first stage also report the number and a
        hash of the samples in `inputs`."""
        if model.stage == 0:
            samples = sample_digests(inputs)
            facts = {**facts, "samples": len(samples), "data": sum(samples) % 2**48}
        self.tell("step", **facts)


def sample_digests(inputs: Mapping[str, Any]) -> list[int]:
    """Return a hash of each sample of a batch, over all the sample's values. The sum of all hashes does not depend on
    how replicas split the batch."""
    batch_tensors = [
        (name, value) for name, value in sorted(inputs.items()) if isinstance(value, Tensor) and value.ndim
    ]
    num_samples = max((value.shape[0] for _, value in batch_tensors), default=0)
    hashes = [hashlib.blake2b(digest_size=6) for _ in range(num_samples)]
    for name, value in batch_tensors:
        if value.shape[0] == num_samples:
            for sample_hash, sample in zip(hashes, value.detach().cpu().contiguous(), strict=True):
                sample_hash.update(name.encode() + sample.reshape(-1).view(torch.uint8).numpy().tobytes())
    return [int.from_bytes(sample_hash.digest(), "big") for sample_hash in hashes]


def count_updates(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of updates that the optimizer has counted for its first parameter; 0 if the optimizer counts no
    updates."""
    counts = (state["step"] for state in optimizer.state.values() if "step" in state)
    return int(next(counts, 0))


def completed_future() -> Future:
    future: Future = Future()
    future.set_result(None)
    return future
