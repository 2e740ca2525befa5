"""Simulates a step of pipelines under a virtual clock: passes of stages, messages on the links between stages, and the
replicas' sum of gradients.

    simulate_step("varuna", [{"F": 1, "R": 1, "B": 2}] * 4, 16, Network(send_seconds=0.5, jitter=0.3)).step_seconds

Nothing here is measured. The number of messages under way on a link is limited in each direction. Jitter is a relative
standard deviation; it is drawn anew for each message and each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.simulation.event_core import run_lines
from methods.pipeline.config.partition import MOST_MESSAGES_IN_FLIGHT
from methods.pipeline.schedule import event_lines

if TYPE_CHECKING:
    from harness.simulation.event_core import Array

LEAST_SHARE = 0.05  # jitter shortens no duration below this share of its nominal value


@dataclass(frozen=True)
class Network:
    send_seconds: float = 0.0  # seconds of a message between neighboring stages on one machine
    long_send_seconds: float | None = None  # seconds of a message between machines; None: `send_seconds`
    stages_per_machine: int = 1
    jitter: float = 0.0  # relative standard deviation of a message's time
    # most messages under way on a link in each direction; further messages wait
    sends_at_once: int = MOST_MESSAGES_IN_FLIGHT
    # seconds of the sum of gradients over replicas, after the last pass of all replicas
    sum_seconds: float = 0.0

    def message_seconds(self, num_stages: int) -> list[float]:
        """Return the seconds of a message at each cut."""
        long_seconds = self.send_seconds if self.long_send_seconds is None else self.long_send_seconds
        return [
            long_seconds if (cut + 1) % self.stages_per_machine == 0 else self.send_seconds
            for cut in range(num_stages - 1)
        ]


@dataclass(frozen=True)
class PipelineRun:
    """The times of a step. `starts`, `ends`: seconds at which the first replica's passes start and end, with the axes
    (kinds F R B, stages, micro-batches); NaN for a pass that does not exist. `starts` and `ends` are None if units were
    not kept."""

    step_seconds: float
    bubble: float  # share of the stages' time, until the last pass ends, in which the stages run no pass
    starts: Array | None
    ends: Array | None


def simulate_step(
    schedule: str,
    seconds: Sequence[Mapping[str, float]],
    num_micro_batches: int,
    network: Network | None = None,
    *,
    num_replicas: int = 1,
    is_opportunistic: bool = True,
    pass_jitter: float = 0.0,
    seed: int = 0,
    keeps_units: bool = False,
) -> PipelineRun:
    """Simulate one step. `seconds`: for each stage, the seconds of its passes F, R and B. `network`: times of messages;
    None: messages take no time. `is_opportunistic`: True: in `varuna`, a forward pass may run before a recompute whose
    gradient is late. `pass_jitter`: relative standard deviation of a pass's time. `keeps_units`: True: keep the start
    and end of each pass."""
    import numpy as np

    network = network or Network()
    pipeline = (seconds, num_micro_batches, network.message_seconds(len(seconds)))
    runs = run_lines(
        event_lines(schedule, [pipeline] * num_replicas, is_opportunistic=is_opportunistic),
        sends_at_once=network.sends_at_once,
        noise=_make_noise(network.jitter, pass_jitter, seed),
        keeps_units=keeps_units,
    )
    end_seconds = np.max([run.ended for run in runs], axis=0)
    busy_seconds = sum(float(run.busy.sum()) for run in runs)
    return PipelineRun(
        float(end_seconds.max()) + (network.sum_seconds if num_replicas > 1 else 0.0),
        1 - busy_seconds / (num_replicas * len(seconds) * float(end_seconds.max())),
        runs[0].starts,
        runs[0].ends,
    )


def _make_noise(jitter: float, pass_jitter: float, seed: int) -> Callable[[Array, bool], Array]:
    """Return a function that draws durations around their nominal values. `jitter`: of messages."""
    import numpy as np

    generator = np.random.default_rng(seed)

    def add_noise(durations: Array, is_message: bool) -> Array:
        sigma = jitter if is_message else pass_jitter
        if not sigma:
            return durations
        return durations * np.maximum(LEAST_SHARE, 1 + sigma * generator.standard_normal(len(durations)))

    return add_noise
