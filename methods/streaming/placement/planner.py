"""Finds the fastest placement for a machine's rates and memories. A linear program chooses how many layers of each kind
the placement has.

A step takes at least as long as its busiest resource. The resources are the device, each direction of the link and both
together, the host's memory, the host's cores and the disk. A row is the busy time of one resource, and is linear in the
number of layers of each kind:

    R resident   all of it on the device, updated there
    P parked     weights on the device, states on the host, updated there
    W windowed   fetched for each pass, states on the host, updated there
    S streamed   fetched for each pass, with its states for the update, on the device
    Q            as P, but its states come to the device for the update: for the bound only, no method has this kind
    D on disk    as W, but its states are on the disk

Without clipping, or with updates ahead of the norm (`speculate`), a step is one pool of time. With `deferred` updates a
step is two pools: the backward pass, then the updates with the next forward pass. `clipping` is None or one of these
two.

Source of the idea: Jiang et al. 2025 (GreedySnake) choose their overlap by a linear program, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from harness.core.job import MEMORIES, Plan, Room, Workload
from harness.core.rates import Rates
from harness.plan.resources import (
    UPDATE_BYTES,
    Forecast,
    compute_seconds,
    device_update_seconds,
    host_update_seconds,
    seconds_of,
)
from methods.shared.memory_needs import state_bytes, stored_numel
from methods.streaming.placement.placement import spread

KINDS = "RPWSDQ"
BACKWARD, FORWARD = 0, 1  # two pools of time, for deferred updates; other updates have one pool, 0
SLACK = 0.02  # share of the step time given up for fewer copies; less than the rates' error
Counts = Mapping[str, float]  # number of layers of each kind, or bytes of each memory
# returns the plan for these numbers of layers of each kind
PlanOf = Callable[[Workload, dict[str, int]], Plan]


class Row(NamedTuple):
    """The seconds for which a resource is busy in one pool of time: a constant, and for each kind of layer the seconds
    of one layer."""

    name: str
    pool: int
    seconds: float
    per_layer: dict[str, float]

    def total(self, counts: Counts) -> float:
        return self.seconds + sum(self.per_layer.get(kind, 0.0) * count for kind, count in counts.items())


class Carried(NamedTuple):
    """The bytes that cross the link for each parameter of a layer, into the device and out of it. Each pair has the
    bytes of both pools of time."""

    inbound: tuple[float, float]
    outbound: tuple[float, float]


@dataclass(frozen=True)
class StepCosts:
    """The quantities that, with the number of layers of each kind, decide how long a step keeps each resource busy.
    `clipping`: None, deferred or speculate. `boundaries`: bytes of layers' inputs that go to the host in the forward
    pass and come back in the backward pass. `ends`: home of embedding and head."""

    workload: Workload
    rates: Rates
    clipping: str | None
    boundaries: int = 0
    ends: str = "device"

    @property
    def is_deferred(self) -> bool:
        return self.clipping == "deferred"

    @property
    def stored_bytes(self) -> int:
        """Bytes of a layer on the disk: its master and moments. A step reads these bytes once and writes them once."""
        return state_bytes(self.workload)["optimizer"] * stored_numel(self.workload.layer_params)

    def carried(self) -> dict[str, Carried]:
        """Return the bytes that cross the link for each parameter of a layer of each kind. A gradient has as many bytes
        as its weight. A deferred update on the device fetches the gradient again. Without deferred updates all bytes
        are in the first pool."""
        at_home = state_bytes(self.workload)
        size, rest = at_home["weights"], at_home["optimizer"]
        sent, fetched = size if self.clipping else 0, size if self.is_deferred else 0
        of_kinds = {
            "R": Carried((0, 0), (0, 0)),
            "P": Carried((0, size), (size, 0)),
            "W": Carried((size, size), (size, 0)),
            "S": Carried((size, size + rest + fetched), (sent, size + rest)),
            "Q": Carried((0, rest + fetched), (sent, rest)),
            "D": Carried((size, size), (size, 0)),
        }
        if self.is_deferred:
            return of_kinds
        return {
            kind: Carried((sum(sizes.inbound), 0), (sum(sizes.outbound), 0))
            for kind, sizes in of_kinds.items()
        }

    def rows(self) -> list[Row]:
        """Return the rows of every resource that bounds a step."""
        rows = [*self._compute_rows(), *self._host_and_disk_rows(), *self._link_rows()]
        return self._with_hosted_ends(rows) if self.ends == "host" else rows

    def _compute_rows(self) -> list[Row]:
        workload, rates = self.workload, self.rates
        forward, backward = compute_seconds(workload, rates)
        of_layer = device_update_seconds(workload.layer_params, workload, rates)
        of_ends = 0.0 if self.ends == "host" else device_update_seconds(workload.end_params, workload, rates)
        updates = {"R": of_layer} | dict.fromkeys("SQ", rates.streamed_cost * of_layer)
        if rates.is_host:
            updates |= dict.fromkeys("PWD", self._host_update_seconds())
        if not self.is_deferred:
            return [Row("compute", BACKWARD, forward + backward + of_ends, updates)]
        return [
            Row("compute", FORWARD, forward + of_ends, updates),
            Row("compute", BACKWARD, backward, {}),
        ]

    def _host_update_seconds(self) -> float:
        return seconds_of("host cores", self._ahead_cost * self.workload.layer_params, self.rates)

    @property
    def _ahead_cost(self) -> float:
        return self.rates.ahead_cost if self.clipping == "speculate" else 1.0

    @property
    def _last(self) -> int:
        """The pool in which updates are made."""
        return FORWARD if self.is_deferred else BACKWARD

    def _host_and_disk_rows(self) -> list[Row]:
        stored = self.stored_bytes
        on_disk = {"disk reads": stored, "disk writes": stored, "disk both ways": 2 * stored}
        return [
            Row("host cores", self._last, 0.0, dict.fromkeys("PWD", self._host_update_seconds())),
            *(
                Row(name, self._last, 0.0, {"D": seconds_of(name, size, self.rates)})
                for name, size in on_disk.items()
            ),
        ]

    def _link_rows(self) -> list[Row]:
        """Return the rows of the link and of the host's memory, pool by pool."""
        table, params = self.carried(), self.workload.layer_params
        rows: list[Row] = []
        for pool in range(self._last + 1):
            inbound = {kind: params * sizes.inbound[pool] for kind, sizes in table.items()}
            outbound = {kind: params * sizes.outbound[pool] for kind, sizes in table.items()}
            both = {kind: inbound[kind] + outbound[kind] for kind in table}
            # bytes of host memory that an update touches for each parameter
            per_update = self._ahead_cost * UPDATE_BYTES[self.workload.dtype] if pool == self._last else 0.0
            on_host = dict.fromkeys("PWD", params * per_update)
            on_host["D"] += 2 * self.stored_bytes if per_update else 0
            touched = {kind: size + on_host.get(kind, 0) for kind, size in both.items()}
            into, out = self.boundaries * (pool == BACKWARD), self.boundaries * (pool == self._last)
            amounts = {  # by row: bytes that do not depend on the kinds of layers, and bytes of a layer of each kind
                "link inbound": (into, inbound),
                "link outbound": (out, outbound),
                "link both ways": (into + out, both),
                "host memory": (into + out, touched),
            }
            for name, (always, of_layers) in amounts.items():
                per_layer = {kind: seconds_of(name, size, self.rates) for kind, size in of_layers.items()}
                rows.append(Row(name, pool, seconds_of(name, always, self.rates), per_layer))
        return rows

    def _with_hosted_ends(self, rows: list[Row]) -> list[Row]:
        """Return the rows with the work of ends on the host added, as for parked layers, and with a row for the
        embedding. The embedding's gradient is known last and its weights are needed first, so the device has no pass to
        make while the embedding is updated."""
        workload, rates = self.workload, self.rates
        compute = rows[0]  # the device's passes in the last pool, which ends on the host do not lengthen
        # ends are not updated ahead
        parked = StepCosts(workload, rates, self.clipping if self.is_deferred else None).rows()
        share = workload.end_params / workload.layer_params
        with_ends = [
            row._replace(seconds=row.seconds + share * layers.per_layer.get("P", 0.0))
            for row, layers in zip(rows, parked, strict=True)
        ]
        embedding = workload.anatomy.end_parts[0]
        size = workload.weight_bytes * embedding
        updated = max(host_update_seconds(embedding, workload, rates))
        copied = seconds_of("link outbound", size, rates) + seconds_of("link inbound", size, rates)
        seconds = compute.seconds + copied + updated
        return [*with_ends, Row("the embedding's way home", compute.pool, seconds, {})]

    def forecast(self, counts: Counts) -> Forecast:
        return forecast(self.rows(), counts)

    def least_seconds(
        self, needs: Mapping[str, Counts], free: Counts, kinds: str
    ) -> tuple[float, dict[str, float]] | None:
        """Return the lower bound of the step time over all placements, in seconds, and the numbers of layers of each
        kind. Of all numbers within SLACK of the bound these copy the fewest bytes. Return None if no placement fits or
        scipy is missing.

        `needs`: bytes of a layer, by memory and kind; `free`: bytes that are left for layers, by memory.
        """
        try:
            from scipy.optimize import linprog  # a slow import, needed only for plans by rates
        except ImportError:
            return None

        pools = range(2 if self.is_deferred else 1)
        upper, limits = [], []
        for row in self.rows():
            per_pool = [-1.0 if row.pool == pool else 0.0 for pool in pools]
            upper.append([row.per_layer.get(kind, 0.0) for kind in kinds] + per_pool)
            limits.append(-row.seconds)
        for memory, size in free.items():
            upper.append([needs[memory].get(kind, 0.0) / 2**30 for kind in kinds] + [0.0 for _ in pools])
            limits.append(size / 2**30)
        whole = {"A_eq": [[1.0] * len(kinds) + [0.0 for _ in pools]], "b_eq": [self.workload.num_layers]}
        time = [0.0] * len(kinds) + [1.0 for _ in pools]
        fastest = linprog(time, A_ub=upper, b_ub=limits, **whole)
        if fastest.status:
            return None
        carries = [*self._moved_bytes(kinds)] + [0.0 for _ in pools]
        least = linprog(carries, A_ub=[*upper, time], b_ub=[*limits, fastest.fun * (1 + SLACK)], **whole)
        chosen = (fastest if least.status else least).x
        return float(fastest.fun), dict(zip(kinds, map(float, chosen), strict=False))

    def _moved_bytes(self, kinds: str) -> list[float]:
        """Return the bytes that a step copies for each parameter of a layer, for each of these kinds."""
        table, moved = self.carried(), []
        for kind in kinds:
            moved.append(float(sum(table[kind].inbound) + sum(table[kind].outbound)))
            if kind == "D":
                moved[-1] += 2 * self.stored_bytes / self.workload.layer_params
        return moved


def forecast(rows: list[Row], counts: Counts) -> Forecast:
    """Return the lower bound of the step time for these numbers of layers, and the names of the rows that set it."""
    longest = []
    for pool in {row.pool for row in rows}:
        longest.append(max((row for row in rows if row.pool == pool), key=lambda row: row.total(counts)))
    binds = " then ".join(dict.fromkeys(row.name for row in longest))
    return Forecast(sum(row.total(counts) for row in longest), binds)


def choose_counts(costs: StepCosts, room: Room, plan_of: PlanOf, kinds: str) -> dict[str, int] | None:
    """Return the numbers of layers of each kind. Of all numbers that fit, and whose step by the rates is within SLACK
    of the shortest step, these copy the fewest bytes. Return None if no placement fits."""
    rows = costs.rows()
    candidates: dict[tuple[int, ...], tuple[float, int]] = {}
    for used in _with_and_without(kinds.replace("R", "")):
        for near_counts in _near_optimum(costs, room, plan_of, "R" + used):
            counts = dict.fromkeys(kinds, 0) | near_counts
            plan = plan_of(costs.workload, counts)
            if plan.shortfall(room) is None:
                seconds = forecast(rows, counts).seconds
                candidates[tuple(counts.values())] = (seconds, plan.moved_bytes + 2 * plan.disk_bytes)
    if not candidates:
        return None
    least = min(seconds for seconds, _ in candidates.values())
    near = [key for key, (seconds, _) in candidates.items() if seconds <= least * (1 + SLACK)]
    best = min(near, key=lambda key: (candidates[key][1], candidates[key][0]))
    return dict(zip(kinds, best, strict=True))


def _with_and_without(optional: str) -> Iterator[str]:
    """Yield every subset of these kinds, because a kind's buffers cost memory even for one layer."""
    for size in range(len(optional) + 1):
        for used in itertools.combinations(optional, size):
            yield "".join(used)


def _near_optimum(costs: StepCosts, room: Room, plan_of: PlanOf, kinds: str) -> Iterator[dict[str, int]]:
    """Return whole numbers of layers of each kind near the solution of the linear program."""
    num_layers = costs.workload.num_layers
    needs, free = _linear(costs.workload, room, plan_of, kinds)
    if not may_fit(num_layers, needs, free):
        return
    solution = costs.least_seconds(needs, free, kinds)
    if solution is None:
        return
    ranges = [range(max(0, int(count) - 1), int(count) + 3) for count in solution[1].values()]
    for counts in itertools.product(*ranges):
        if sum(counts) == num_layers:
            yield dict(zip(kinds, counts, strict=True))


def hosted_boundaries(plan: Plan) -> int:
    """Return the bytes of boundaries that the host keeps from the forward pass to the backward pass."""
    return plan.host.get("activations", 0)


def may_fit(num_layers: int, needs: Mapping[str, Counts], free: Counts) -> bool:
    """Return False if certainly no placement fits, because even the least bytes that layers need in one memory, or in a
    weighted sum of two memories, are too many. Return True if a placement may fit; the linear program may still find
    none.

    For models that hardly fit, this check saves 95 of 100 linear programs (results/LOG.md).
    """
    if min(free.values(), default=0) < 0:
        return False
    shares = []  # for each memory, the share of its free bytes that the layers need if all are of one kind
    for memory, of_kinds in needs.items():
        shares.append([num_layers * need / max(free[memory], 1.0) for need in of_kinds.values()])
    for pair in itertools.combinations_with_replacement(shares, 2):
        for weight in range(11):
            if min(weight * one + (10 - weight) * other for one, other in zip(*pair, strict=True)) > 10:
                return False
    return True


def _linear(
    workload: Workload, room: Room, plan_of: PlanOf, kinds: str
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return, by memory, the bytes of one more layer of each kind, and the bytes that all other memory needs leave for
    layers."""
    several = dict.fromkeys(KINDS, 0) | dict.fromkeys(kinds, 4)  # more layers than slots
    deep = workload.at_depth(sum(several.values()))
    base = plan_of(deep, several)
    more = {kind: plan_of(workload.at_depth(deep.num_layers + 1), {**several, kind: 5}) for kind in kinds}
    needs, free = {}, {}
    for name in (f"{memory}_bytes" for memory in MEMORIES):
        limit, base_bytes = getattr(room, name), getattr(base, name)
        if limit is not None:
            needs[name] = {kind: float(getattr(plan, name) - base_bytes) for kind, plan in more.items()}
            free[name] = float(limit - (base_bytes - 4 * sum(needs[name].values())))
    return needs, free


def arranged(counts: Counts, clipping: str | None = "deferred") -> str:
    """Return a letter for each layer, bottom first.

    Resident layers are at the bottom, so that the layers above them, which the host updates, are needed late in the
    next step. Streamed layers are spread among the others: the streamed layers' states then load the link as steadily
    as the other layers' updates load the host. Unless updates are deferred, most resident layers are spread, too: the
    link carries states while resident layers compute. One of the other layers is on top: its gradient comes home soon
    after the turn from forward to backward pass, so that the host soon has an update to make.
    """
    resident, streamed = (int(counts.get(kind, 0)) for kind in "RS")
    rest = spread("".join(kind * int(counts.get(kind, 0)) for kind in "PWD"), "S", streamed)
    bottom = resident // 4 if streamed and clipping != "deferred" else resident
    return "R" * bottom + spread(rest, "R", resident - bottom)


def costs_of(plan: Plan, workload: Workload, rates: Rates) -> StepCosts:
    """Return the costs of a step with this plan, whose options have been chosen."""
    options = plan.options
    return StepCosts(
        workload, rates, options.get("clipping"), hosted_boundaries(plan), options.get("ends", "device")
    )


def with_forecast(plan: Plan, workload: Workload, rates: Rates, counts: Counts) -> Plan:
    """Return the plan with the lower bound of its step time, and the names of the resources that set this bound."""
    bound = costs_of(plan, workload, rates).forecast(counts)
    return replace(plan, step_seconds=bound.seconds, binds=bound.binds)
