"""Profiles, the scales of an experiment: the published sizes, or sizes that take minutes, fit one GPU, or fit this
machine.

A smaller profile divides the widths (hidden size, tokens, vocabulary) by a factor f, and the memories by f**2. Then the
same depths fit, because layers, embedding, head, activations and logits all shrink to 1 / f**2 of their bytes. Each
published depth becomes a depth of the profile on a stretched scale: 32 becomes `common`, a depth that every method
trains, and 92 becomes `deepest`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.job import Budget, Job, Room, Workload, gib
from harness.devices import cuda_budget, machine, named_machines, sim
from harness.plan.fit import scale_down
from methods.shared.memory_needs import state_bytes

PROFILE_NAMES = ("demo", "quick", "paper", "fit")
PUBLISHED_COMMON, PUBLISHED_DEEPEST = 32, 92
PUBLISHED_WINDOW = 15  # number of layers in the window, in cases that are not about the window
PROBE_LENGTH = {
    "steps": 5,
    "warmup": 2,
}  # number of steps of a search's runs: memory use does not grow after these
PLANNED_SHARE = (
    0.9  # share of a budget that a plan's own choices may fill, because plans do not count all memory
)


@dataclass(frozen=True)
class CaseProfile:
    """The settings that all runs of a case share. `workload`: the workload with one layer. `window`: number of layers
    in the window, in cases that are not about the window."""

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
        """Return the profile's kind, which is one of NAMES."""
        return self.name.split("_")[0]

    @property
    def room(self) -> Room:
        """Return the memories that plans may fill. These are the budgets; a GPU's budget is reduced by the assumed size
        of its context. These sizes are the same on every machine on which the profile runs."""
        room = self.budget.room
        if self.device != "cuda" or room.device_bytes is None:
            return room
        return dataclasses.replace(room, device_bytes=cuda_budget.tensor_bytes(room.device_bytes))

    def depth(self, published: int) -> int:
        """Return the depth that stands for a published depth in this profile, at least 2 layers."""
        if published <= PUBLISHED_COMMON:
            return max(2, round(published * self.common / PUBLISHED_COMMON))
        stretch = (self.deepest - self.common) / (PUBLISHED_DEEPEST - PUBLISHED_COMMON)
        return round(self.common + (published - PUBLISHED_COMMON) * stretch)

    def window_at(self, num_layers: int) -> int:
        return min(self.window, num_layers)

    def job(self, name: str, num_layers: int, **options: Any) -> Job:
        """Return the job of a timed run. The job has the plan's options that are integers, so that its record can be
        found again. The machine that runs the job chooses the other options, such as kernels."""
        workload, device_bytes = self.workload.at_depth(num_layers), self.room.device_bytes
        planned_bytes = device_bytes and int(PLANNED_SHARE * device_bytes)
        room = dataclasses.replace(self.room, device_bytes=planned_bytes)
        plan = method.create(name, options).plan(workload, room)
        planned_options = {key: value for key, value in plan.options.items() if isinstance(value, int)}
        return Job(
            name, workload, {**planned_options, **options}, self.budget, self.device, self.steps, self.warmup
        )

    def probe(self, name: str, num_layers: int = 1) -> Job:
        """Return the job of a probe in a search for the largest size. The search chooses the options."""
        workload = self.workload.at_depth(num_layers)
        return Job(
            name, workload, {}, self.budget, self.device, PROBE_LENGTH["steps"], PROBE_LENGTH["warmup"]
        )

    def largest_planned(self, name: str, **options: Any) -> int:
        """Return the largest number of layers with which the method's plan, with these options, fits the profile's
        memories."""
        trained, room = method.create(name, options), self.room
        return method.largest_depth(
            lambda depth: trained.plan(self.workload.at_depth(depth), room).shortfall(room) is None
        )

    def is_of(self, job: Job) -> bool:
        """True if the job has this profile's workload, budget, device and steps. Its depth and method do not matter."""
        own_setting = (self.workload, self.budget, self.device)
        if (job.workload.at_depth(1), job.budget, job.device) != own_setting:
            return False
        lengths = ((self.steps, self.warmup), (PROBE_LENGTH["steps"], PROBE_LENGTH["warmup"]))
        return (job.steps, job.warmup) in lengths

    def check_machine(self) -> None:
        """Raise ValueError if this machine lacks the device, or has less memory than the budgets."""
        if self.device == "cuda" and machine.devices()[0] != "cuda":
            raise ValueError(
                f"profile {self.name} needs a GPU and a torch that uses it: try --profile demo or fit"
            )
        device_bytes, host_needed = self.budget.device_bytes, self.budget.host_bytes or 0
        gpu_bytes = None
        if self.device == "cuda":
            gpu_bytes = machine.gpu().get("gpu_bytes")
        else:  # the device's memory is the host's
            host_needed += device_bytes or 0
        memories = (("device", device_bytes, gpu_bytes), ("host", host_needed, machine.host_bytes()))
        for memory, needed_bytes, machine_bytes in memories:
            if machine_bytes is not None and needed_bytes and needed_bytes > machine_bytes:
                raise ValueError(
                    f"profile {self.name} needs {gib(needed_bytes)} of {memory} memory, this machine has"
                    f" {gib(machine_bytes)}: try --profile fit or demo"
                )


def make_profile(name: str, on: str | None, methods: Iterable[str], facts: JsonObject) -> CaseProfile:
    """Make the profile with this name. `on`: name of a machine in machines.yaml, whose memories the profile gets; None:
    the profile gets the memories in `facts`, which are those of this machine or of a record's machine.

    `paper` has the published widths, and `quick` a quarter of them. `fit` has the published widths, at depths planned
    for this machine; without a GPU, it has a sixteenth of the widths and runs on sim. `methods`: the methods that any
    case searches for the largest depth. Raises ValueError for a wrong name or machine, or if a GPU is missing.
    """
    if name not in PROFILE_NAMES:
        raise ValueError(f"no profile {name!r}: choose one of {', '.join(PROFILE_NAMES)}")
    if name == "demo" and on is not None:
        raise ValueError(
            "--machine: expected --profile quick, paper or fit, got demo, which has budgets of its own"
        )
    if name == "demo":
        return _demo_profile()
    is_whole = name == "paper" or (name == "fit" and "gpu" in facts)
    if is_whole:
        factor, device = 1, "cuda"
        memories = _memories_of_machine(on, facts, device)
    else:
        factor, device = (4, "cuda") if name == "quick" else (16, "sim")
        memories = _memories_of_machine(on or named_machines.PUBLISHED, {}, device)
    workload, budget = _shrunk_sizes(factor, memories, on_gpu=factor < 16)
    lengths = {"steps": 10, "warmup": 3, "repeats": 1}
    if name == "paper":
        lengths = {"steps": 20, "warmup": 5, "repeats": 3}
    profile = CaseProfile(
        f"{name}_{on}" if on else name, workload, budget, device, **lengths, window=PUBLISHED_WINDOW
    )
    return _fitted_profile(profile, methods) if name == "fit" and factor == 1 else profile


def _demo_profile() -> CaseProfile:
    """Make the profile `demo`, whose runs take minutes on two cores. A few layers fill its memories, and its link is so
    slow that the time of copies shows. Without a compiler, there is no slow link."""
    workload = Workload(num_layers=1, hidden_size=128, seq_len=64, vocab_size=512)
    link = 256 * 2**20 if sim.is_built() or sim.to_build() else None
    budget = Budget(device_bytes=12 * 2**20, host_bytes=24 * 2**20, link_bytes_per_second=link)
    return CaseProfile(
        "demo", workload, budget, "sim", **PROBE_LENGTH, repeats=1, window=2, common=2, deepest=6
    )


def _fitted_profile(profile: CaseProfile, methods: Iterable[str]) -> CaseProfile:
    """Return the profile with depths that are planned for its memories."""
    common = min(int(PLANNED_SHARE * profile.largest_planned(name)) for name in methods)
    # host memory for each parameter of a streamed layer, and the number of such layers that the host's budget holds
    bytes_per_param = sum(state_bytes(profile.workload).values())
    host_bytes = profile.budget.host_bytes or 0
    num_streamed = int(PLANNED_SHARE * host_bytes / (bytes_per_param * profile.workload.layer_params))
    return dataclasses.replace(profile, common=max(2, common), deepest=max(3, common + 1, num_streamed))


def _memories_of_machine(on: str | None, facts: JsonObject, device: str) -> Budget:
    if on is None and "gpu" not in facts:
        raise ValueError(
            f"expected a GPU here, got none: try --machine {' or '.join(named_machines.names())}"
        )
    if on is None:
        return Budget(facts["gpu_bytes"], facts["host_bytes"])
    budget = named_machines.load(on).budget_on(device)
    if not budget.device_bytes or not budget.host_bytes:
        raise ValueError(
            f"machine {on} needs device_memory and host_memory for a case; try another, or add both to its entry"
        )
    return budget


def _shrunk_sizes(factor: int, memories: Budget, *, on_gpu: bool) -> tuple[Workload, Budget]:
    """Divide the published widths by `factor`, and these memories by its square. A GPU's context keeps its size."""
    assert memories.device_bytes
    workload, budget = scale_down(
        Workload(num_layers=1), Budget(memories.device_bytes, memories.host_bytes), factor
    )
    if on_gpu and factor > 1:
        tensor_bytes = cuda_budget.tensor_bytes(memories.device_bytes) // factor**2
        budget = dataclasses.replace(budget, device_bytes=cuda_budget.budget_bytes(tensor_bytes))
    return workload, budget


def profile_command(number: int | str, profile: str) -> str:
    """Return the command that runs a case in a profile. The profile fit_v100-vm, for example, is `fit` with the
    memories of v100-vm."""
    kind, _, on = profile.partition("_")
    return f"./run.sh case {number} --profile {kind}" + (f" {named_machines.options_text(on)}" if on else "")
