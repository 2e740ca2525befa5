"""The race detector: finds accesses to one buffer that nothing orders, though a CPU always runs them in order.

Every stream and host thread counts what it does, and knows by a vector clock how far each of the others has certainly
got. It learns that by waiting: for an event, a stream, a task. Two accesses to the same bytes, one of them a write, are
a race when the agent of the later one did not know that the earlier one was over; on a GPU they may then overlap or
swap. Freed device memory counts as written by the stream that it came from, for the allocator gives it out again there.

Source: Lamport 1978; Mattern 1989, vector clocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from harness.core.data import token_batches
from harness.core.job import Room, Workload
from harness.core.method import Method, Trained, Training
from harness.simulation.fake_streams import DEVICE, Agent, watch_streams
from harness.simulation.watched_ops import Access, Memory, Op

NUM_WORKERS = 64  # more than there are updates in a test: nothing but the code itself orders two of them


@dataclass(frozen=True)
class Race:
    """Two unordered accesses, in the order in which the code called for them."""

    memory: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.memory}: {self.second} does not wait until {self.first}"


class Note(NamedTuple):
    """A past access: the agent's so-many-eth deed, on bytes [start, end)."""

    agent: str
    tick: int
    op: str
    start: int
    end: int
    is_write: bool

    def __str__(self) -> str:
        return f"{self.agent} {'writes' if self.is_write else 'reads'} it ({self.op})"

    def is_known(self, now: Counter[str]) -> bool:
        return now[self.agent] >= self.tick

    def conflicts(self, other: Note) -> bool:
        return (self.is_write or other.is_write) and self.start < other.end and other.start < self.end

    def replaces(self, other: Note) -> bool:
        """Whether whoever is ordered after this note is ordered after the other, too, which it knows."""
        return self.start <= other.start and other.end <= self.end and (self.is_write or not other.is_write)


class VectorClock:
    """An agent's `now`: how many deeds of each agent are over as far as it knows, its own included."""

    def __init__(self) -> None:
        self.zero: Counter[str] = Counter()
        self.races: list[Race] = []

    def join(self, one: Counter[str], other: Counter[str]) -> Counter[str]:
        """The greater count of each."""
        if one is other:
            return one
        joined = one.copy()
        for name, count in other.items():
            joined[name] = max(joined[name], count)
        return joined

    def load(self, thread: Agent) -> float:
        return thread.now[thread.name]

    def queued(self, thread: Agent, op: Op) -> None: ...

    def ran(self, agent: Agent, op: Op) -> None:
        agent.now = agent.now.copy()
        agent.now[agent.name] += 1
        for access in op.accesses:
            self._note(agent.name, agent.now, access, op.name)

    def freed(self, agent: Agent, now: Counter[str], memory: Memory) -> None:
        end = max((note.end for note in memory.notes), default=0)
        self._note(agent.name, now, Access(memory, 0, end, end, is_write=True), "allocated anew")

    def _note(self, agent: str, now: Counter[str], access: Access, op: str) -> None:
        note = Note(agent, now[agent], op, access.start, access.end, access.is_write)
        notes = access.memory.notes
        for past in notes:
            if past.conflicts(note) and not past.is_known(now):
                race = Race(str(access.memory), str(past), str(note))
                if race not in self.races:
                    self.races.append(race)
        notes[:] = [past for past in notes if not (past.is_known(now) and note.replaces(past))]
        notes.append(note)


def find_races(method: Method, workload: Workload, steps: int = 3) -> list[Race]:
    """Train, then read what is left as the gate does; every race on the way."""
    training = method.settled(method.plan(workload, Room())).train(
        workload, token_batches(workload, steps), DEVICE
    )
    clock = VectorClock()
    with watch_streams(clock, NUM_WORKERS):
        for state in finish(training).tensors:
            state.weight.clone()
            if state.exp_avg is not None:
                state.exp_avg.clone()
    return clock.races


def finish(training: Training) -> Trained:
    """Take every step; what the training leaves behind."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            return end.value
