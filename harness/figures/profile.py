"""Profiles, the scales of an experiment: the published sizes, or scaled to minutes, to one GPU, or to this machine.

Widths (hidden size, tokens, vocabulary) over f and memories over f**2 keep the depths: layers, ends, activations and
logits all take 1 / f**2 of their bytes. Depths are the published ones, stretched between two anchors: `common`, which
every method trains (published: 32), and `deepest` (published: 92).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.core import method
from harness.core.job import Budget, Job, Workload, gib
from harness.devices import machine, named_machines, sim

NAMES = ("demo", "quick", "paper", "fit")
PUBLISHED_COMMON, PUBLISHED_DEEPEST = 32, 92
PUBLISHED_ON = "v100-vm"  # of machines.yaml
STATE_BYTES = 16  # a parameter: weight, gradient and two moments in fp32, on the host if its layer is streamed
PROBE = {"steps": 5, "warmup": 2}  # of a search: memory has settled
ROOM = 0.9  # of a budget: what a plan with free choices may fill, as plans leave something out


@dataclass(frozen=True)
class Profile:
    """What the runs of a case share. `workload` is at depth 1; `window` is of cases about something else."""

    name: str
    workload: Workload
    budget: Budget
    device: str
    steps: int
    warmup: int
    repeats: int
    window: int
    common: int = PUBLISHED_COMMON
    deepest: int = PUBLISHED_DEEPEST

    @property
    def kind(self) -> str:
        """One of NAMES, the key of a case's RUNS."""
        return self.name.split("_")[0]

    def depth(self, published: int) -> int:
        """A published depth on this profile's scale, at least 2 layers."""
        if published <= PUBLISHED_COMMON:
            return max(2, round(published * self.common / PUBLISHED_COMMON))
        stretch = (self.deepest - self.common) / (PUBLISHED_DEEPEST - PUBLISHED_COMMON)
        return round(self.common + (published - PUBLISHED_COMMON) * stretch)

    def window_at(self, num_layers: int) -> int:
        return min(self.window, num_layers)

    def job(self, name: str, num_layers: int, **options: Any) -> Job:
        """A timed run. The plan settles options that are numbers, so that the record can be found again; the choice of
        kernels is left to the measuring machine."""
        workload = self.workload.at_depth(num_layers)
        room = self.budget
        if room.device_bytes:
            room = dataclasses.replace(room, device_bytes=int(ROOM * room.device_bytes))
        plan = method.create(name, options).plan(workload, room)
        settled = {key: value for key, value in plan.options.items() if isinstance(value, int)}
        return Job(name, workload, {**settled, **options}, self.budget, self.device, self.steps, self.warmup)

    def probe(self, name: str, num_layers: int = 1) -> Job:
        """A run of a search for the largest size, which chooses the options."""
        return Job(
            name, self.workload.at_depth(num_layers), {}, self.budget, self.device, PROBE["steps"], PROBE["warmup"]
        )

    def largest_planned(self, name: str) -> int:
        """Layers that should fit, by the method's plan."""

        def fits(num_layers: int) -> bool:
            plan = method.create(name, {}).plan(self.workload.at_depth(num_layers), self.budget)
            return plan.shortfall(self.budget) is None

        return method.largest_depth(fits)

    def is_of(self, job: Job) -> bool:
        """True if a job is of this profile, at any depth and of any method."""
        mine = (self.workload, self.budget, self.device)
        steps = ((self.steps, self.warmup), (PROBE["steps"], PROBE["warmup"]))
        return (job.workload.at_depth(1), job.budget, job.device) == mine and (job.steps, job.warmup) in steps

    def check_machine(self) -> None:
        """Raises ValueError if this machine lacks the device, or memory for the budgets."""
        if self.device == "cuda" and machine.devices()[0] != "cuda":
            raise ValueError(f"profile {self.name} needs a GPU and a torch that uses it: try --profile demo or fit")
        there = machine.budget(Budget(), "cuda" if self.device == "cuda" else "cpu")
        host_needed = (self.budget.host_bytes or 0) + (0 if self.device == "cuda" else self.budget.device_bytes or 0)
        for memory, need in (("device", self.budget.device_bytes), ("host", host_needed)):
            have = getattr(there, f"{memory}_bytes")
            if have is not None and need and need > have:
                raise ValueError(
                    f"profile {self.name} needs {gib(need)} of {memory} memory, this machine has {gib(have)}:"
                    " try --profile fit or demo"
                )


def make(name: str, on: str | None, methods: Sequence[str], facts: dict[str, Any]) -> Profile:
    """The named profile with the memories of the machine `on` (machines.yaml), else those in `facts`
    (harness/devices/machine.py, or a record's). `methods`: those of all cases.

    Raises ValueError for a wrong name or machine, or where a GPU is missing.
    """
    if name not in NAMES:
        raise ValueError(f"no profile {name!r}: choose one of {', '.join(NAMES)}")
    if name == "demo" and on is not None:
        raise ValueError("profile demo has budgets of its own: --machine goes with quick, paper and fit")
    if name == "demo":
        return _demo()
    if name == "quick":
        return _quick(on)
    return _paper(on, facts) if name == "paper" else _fit(on, methods, facts)


def default(facts: dict[str, Any]) -> str:
    return "quick" if "gpu" in facts else "demo"


def _demo() -> Profile:
    """Minutes on two cores: few layers fill the memories, and the link is slow enough for copies to show; without a
    compiler the link takes no time."""
    workload = Workload(num_layers=1, hidden_size=128, seq_len=64, vocab_size=512)
    link = 256 * 2**20 if sim.is_built() or sim.to_build() else None
    budget = Budget(device_bytes=12 * 2**20, host_bytes=24 * 2**20, link_bytes_per_second=link)
    return Profile("demo", workload, budget, "sim", **PROBE, repeats=1, window=2, common=2, deepest=6)


def _quick(on: str | None) -> Profile:
    """A quarter of the published widths in a sixteenth of the memories."""
    workload, budget = _shrunk(4, _memories(on or PUBLISHED_ON, {}))
    return Profile(_named("quick", on), workload, budget, "cuda", steps=10, warmup=3, repeats=1, window=15)


def _paper(on: str | None, facts: dict[str, Any]) -> Profile:
    workload, budget = _shrunk(1, _memories(on, facts))
    return Profile(_named("paper", on), workload, budget, "cuda", steps=20, warmup=5, repeats=3, window=15)


def _fit(on: str | None, methods: Sequence[str], facts: dict[str, Any]) -> Profile:
    """The published widths at the depths planned for this machine; without a GPU a sixteenth of the widths, on sim."""
    if "gpu" not in facts:
        workload, budget = _shrunk(16, _memories(on or PUBLISHED_ON, {}))
        return Profile(_named("fit", on), workload, budget, "sim", steps=10, warmup=3, repeats=1, window=15)
    workload, budget = _shrunk(1, _memories(on, facts))
    found = Profile(_named("fit", on), workload, budget, "cuda", steps=10, warmup=3, repeats=1, window=15)
    common = min(int(ROOM * found.largest_planned(name)) for name in methods)
    streamed = int(ROOM * (budget.host_bytes or 0) / (STATE_BYTES * workload.layer_params))
    return dataclasses.replace(found, common=max(2, common), deepest=max(3, common + 1, streamed))


def _memories(on: str | None, facts: dict[str, Any]) -> Budget:
    if on is None and "gpu" not in facts:
        raise ValueError(f"no GPU whose memory to take: try --machine {' or '.join(named_machines.names())}")
    if on is None:
        return Budget(facts["gpu_bytes"] - machine.CUDA_CONTEXT_BYTES, facts["host_bytes"])
    budget = named_machines.load(on).budget
    if not budget.device_bytes or not budget.host_bytes:
        raise ValueError(f"machine {on} needs device_memory and host_memory in {named_machines.FILE} for a case")
    return budget


def _shrunk(factor: int, memories: Budget) -> tuple[Workload, Budget]:
    """The published widths over `factor`, these memories over its square."""
    full = Workload(num_layers=1)
    widths = {name: getattr(full, name) // factor for name in ("hidden_size", "seq_len", "vocab_size")}
    assert memories.device_bytes and memories.host_bytes
    budget = Budget(memories.device_bytes // factor**2, memories.host_bytes // factor**2)
    return dataclasses.replace(full, **widths), budget


def _named(name: str, on: str | None) -> str:
    return f"{name}_{on}" if on else name


def call(number: int | str, profile: str) -> str:
    """The command of a case in a profile; fit_v100-vm is fit on that machine."""
    kind, _, on = profile.partition("_")
    return f"./run.sh case {number} --profile {kind}" + (f" --machine {on}" if on else "")
