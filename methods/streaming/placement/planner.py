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
from dataclasses import replace
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


def carried(workload: Workload, clipping: str | None) -> dict[str, Carried]:
    """Return the bytes that cross the link for each parameter of a layer of each kind. A gradient has as many bytes as
    its weight. A deferred update on the device fetches the gradient again. Without deferred updates all bytes are in
    the first pool."""
    at_home = state_bytes(workload)
    size, rest = at_home["weights"], at_home["optimizer"]
    sent, fetched = size if clipping else 0, size if clipping == "deferred" else 0
    found = {
        "R": Carried((0, 0), (0, 0)),
        "P": Carried((0, size), (size, 0)),
        "W": Carried((size, size), (size, 0)),
        "S": Carried((size, size + rest + fetched), (sent, size + rest)),
        "Q": Carried((0, rest + fetched), (sent, rest)),
        "D": Carried((size, size), (size, 0)),
    }
    if clipping == "deferred":
        return found
    return {kind: Carried((sum(each.inbound), 0), (sum(each.outbound), 0)) for kind, each in found.items()}


def rows(
    workload: Workload, rates: Rates, clipping: str | None, boundaries: int = 0, ends: str = "device"
) -> list[Row]:
    """Return the rows of every resource that bounds a step. `clipping`: None, deferred or speculate. `boundaries`:
    bytes of layers' inputs that go to the host in the forward pass and come back in the backward pass. `ends`: home of
    embedding and head."""
    deferred = clipping == "deferred"
    ahead = rates.ahead_cost if clipping == "speculate" else 1.0
    forward, backward = compute_seconds(workload, rates)
    on_device, of_ends = (
        device_update_seconds(params, workload, rates)
        for params in (workload.layer_params, workload.end_params)
    )
    on_host = seconds_of("host cores", ahead * workload.layer_params, rates)
    updates = {"R": on_device} | dict.fromkeys("SQ", rates.streamed_cost * on_device)
    updates |= dict.fromkeys("PWD", on_host) if rates.is_host else {}
    stored, last = stored_bytes(workload), FORWARD if deferred else BACKWARD
    on_disk = {"disk reads": stored, "disk writes": stored, "disk both ways": 2 * stored}
    found = [
        Row(
            "compute",
            last,
            forward + (0.0 if deferred else backward) + (0.0 if ends == "host" else of_ends),
            updates,
        ),
        *([Row("compute", BACKWARD, backward, {})] if deferred else []),
        Row("host cores", last, 0.0, dict.fromkeys("PWD", on_host)),
        *(Row(name, last, 0.0, {"D": seconds_of(name, size, rates)}) for name, size in on_disk.items()),
    ]
    for pool in range(last + 1):
        touched = ahead * UPDATE_BYTES[workload.dtype] if pool == last else 0.0
        into, out = boundaries * (pool == BACKWARD), boundaries * (pool == last)
        always = {
            "link inbound": into,
            "link outbound": out,
            "link both ways": into + out,
            "host memory": into + out,
        }
        found += _link_rows(workload, rates, clipping, pool, touched, always)
    return _with_hosted_ends(found, workload, rates, clipping) if ends == "host" else found


def _with_hosted_ends(found: list[Row], workload: Workload, rates: Rates, clipping: str | None) -> list[Row]:
    """Return the rows with the work of ends on the host added, as for parked layers, and with a row for the embedding.
    The embedding's gradient is known last and its weights are needed first, so the device has no pass to make while the
    embedding is updated."""
    compute = found[0]  # the device's passes in the last pool, which ends on the host do not lengthen
    parked = rows(workload, rates, clipping if clipping == "deferred" else None)  # ends are not updated ahead
    share = workload.end_params / workload.layer_params
    found = [
        row._replace(seconds=row.seconds + share * layers.per_layer.get("P", 0.0))
        for row, layers in zip(found, parked, strict=True)
    ]
    embedding = workload.anatomy.end_parts[0]
    size, updated = workload.weight_bytes * embedding, max(host_update_seconds(embedding, workload, rates))
    copied = seconds_of("link outbound", size, rates) + seconds_of("link inbound", size, rates)
    return [*found, Row("the embedding's way home", compute.pool, compute.seconds + copied + updated, {})]


def stored_bytes(workload: Workload) -> int:
    """Return the bytes of a layer on the disk: its master and moments. A step reads these bytes once and writes them
    once."""
    return state_bytes(workload)["optimizer"] * stored_numel(workload.layer_params)


def _link_rows(
    workload: Workload, rates: Rates, clipping: str | None, pool: int, per_update: float, always: Counts
) -> list[Row]:
    """Return the rows of the link and of the host's memory in one pool of time. `per_update`: bytes of host memory that
    an update touches for each parameter. `always`: for each row, bytes that do not depend on the kinds of layers."""
    table, params = carried(workload, clipping), workload.layer_params
    inbound = {kind: params * each.inbound[pool] for kind, each in table.items()}
    outbound = {kind: params * each.outbound[pool] for kind, each in table.items()}
    both = {kind: inbound[kind] + outbound[kind] for kind in table}
    on_host = dict.fromkeys("PWD", params * per_update)
    on_host["D"] += 2 * stored_bytes(workload) if per_update else 0
    touched = {kind: size + on_host.get(kind, 0) for kind, size in both.items()}
    amounts = {
        "link inbound": inbound,
        "link outbound": outbound,
        "link both ways": both,
        "host memory": touched,
    }
    return [
        Row(
            name,
            pool,
            seconds_of(name, always[name], rates),
            {kind: seconds_of(name, size, rates) for kind, size in sizes.items()},
        )
        for name, sizes in amounts.items()
    ]


def forecast(found: list[Row], counts: Counts) -> Forecast:
    """Return the lower bound of the step time for these numbers of layers, and the names of the rows that set it."""
    pools = {row.pool for row in found}
    longest = [
        max((row for row in found if row.pool == pool), key=lambda row: row.total(counts)) for pool in pools
    ]
    binds = " then ".join(dict.fromkeys(row.name for row in longest))
    return Forecast(sum(row.total(counts) for row in longest), binds)


def least_seconds(
    workload: Workload,
    rates: Rates,
    needs: Mapping[str, Counts],
    free: Counts,
    *,
    clipping: str | None,
    kinds: str,
    boundaries: int = 0,
    ends: str = "device",
) -> tuple[float, dict[str, float]] | None:
    """Return the lower bound of the step time over all placements, in seconds, and the numbers of layers of each kind.
    Of all numbers within SLACK of the bound these copy the fewest bytes. Return None if no placement fits or scipy is
    missing.

    `needs`: bytes of a layer, by memory and kind; `free`: bytes that are left for layers, by memory; `boundaries`:
    bytes of layers' inputs that go to the host and come back.
    """
    try:
        from scipy.optimize import linprog  # a slow import, needed only for plans by rates
    except ImportError:
        return None

    pools = range(2 if clipping == "deferred" else 1)
    upper, limits = [], []
    for row in rows(workload, rates, clipping, boundaries, ends):
        per_pool = [-1.0 if row.pool == pool else 0.0 for pool in pools]
        upper.append([row.per_layer.get(kind, 0.0) for kind in kinds] + per_pool)
        limits.append(-row.seconds)
    for memory, size in free.items():
        upper.append([needs[memory].get(kind, 0.0) / 2**30 for kind in kinds] + [0.0 for _ in pools])
        limits.append(size / 2**30)
    whole = {"A_eq": [[1.0] * len(kinds) + [0.0 for _ in pools]], "b_eq": [workload.num_layers]}
    time = [0.0] * len(kinds) + [1.0 for _ in pools]
    fastest = linprog(time, A_ub=upper, b_ub=limits, **whole)
    if fastest.status:
        return None
    table = carried(workload, clipping)
    moved = {kind: float(sum(table[kind].inbound) + sum(table[kind].outbound)) for kind in kinds}
    if "D" in kinds:
        moved["D"] += 2 * stored_bytes(workload) / workload.layer_params
    carries = [*moved.values()] + [0.0 for _ in pools]
    least = linprog(carries, A_ub=[*upper, time], b_ub=[*limits, fastest.fun * (1 + SLACK)], **whole)
    chosen = (fastest if least.status else least).x
    return float(fastest.fun), dict(zip(kinds, map(float, chosen), strict=False))


def choose(
    workload: Workload, room: Room, plan_of: PlanOf, kinds: str, clipping: str | None, ends: str = "device"
) -> dict[str, int] | None:
    """Return the numbers of layers of each kind. Of all numbers that fit, and whose step by the rates is within SLACK
    of the shortest step, these copy the fewest bytes. Return None if no placement fits."""
    assert room.rates is not None
    boundaries = hosted_boundaries(plan_of(workload, {**dict.fromkeys(kinds, 0), "R": workload.num_layers}))
    found = rows(workload, room.rates, clipping, boundaries, ends)
    candidates: dict[tuple[int, ...], tuple[float, int]] = {}
    # try with and without each kind: its buffers cost memory even for one layer
    optional = kinds.replace("R", "")
    for used in itertools.chain.from_iterable(
        itertools.combinations(optional, n) for n in range(len(optional) + 1)
    ):
        for some in _whole(workload, room, plan_of, "R" + "".join(used), clipping, boundaries, ends):
            counts = dict.fromkeys(kinds, 0) | some
            plan = plan_of(workload, counts)
            if plan.shortfall(room) is None:
                seconds = forecast(found, counts).seconds
                candidates[tuple(counts.values())] = (seconds, plan.moved_bytes + 2 * plan.disk_bytes)
    if not candidates:
        return None
    least = min(seconds for seconds, _ in candidates.values())
    near = [key for key, (seconds, _) in candidates.items() if seconds <= least * (1 + SLACK)]
    best = min(near, key=lambda key: (candidates[key][1], candidates[key][0]))
    return dict(zip(kinds, best, strict=True))


def _whole(
    workload: Workload,
    room: Room,
    plan_of: PlanOf,
    kinds: str,
    clipping: str | None,
    boundaries: int,
    ends: str,
) -> Iterator[dict[str, int]]:
    """Return whole numbers of layers of each kind near the solution of the linear program."""
    assert room.rates is not None
    needs, free = _linear(workload, room, plan_of, kinds)
    if not may_fit(workload.num_layers, needs, free):
        return
    solution = least_seconds(
        workload, room.rates, needs, free, clipping=clipping, kinds=kinds, boundaries=boundaries, ends=ends
    )
    ranges = (
        [range(max(0, int(count) - 1), int(count) + 3) for count in solution[1].values()] if solution else []
    )
    for counts in itertools.product(*ranges):
        if sum(counts) == workload.num_layers:
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
    shares = [
        [num_layers * need / max(free[memory], 1.0) for need in of_kinds.values()]
        for memory, of_kinds in needs.items()
    ]
    return all(
        min(weight * one + (10 - weight) * other for one, other in zip(*pair, strict=True)) <= 10
        for pair in itertools.combinations_with_replacement(shares, 2)
        for weight in range(11)
    )


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
    for size in (f"{memory}_bytes" for memory in MEMORIES):
        if (limit := getattr(room, size)) is not None:
            needs[size] = {
                kind: float(getattr(plan, size) - getattr(base, size)) for kind, plan in more.items()
            }
            free[size] = float(limit - (getattr(base, size) - 4 * sum(needs[size].values())))
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


def with_forecast(plan: Plan, workload: Workload, rates: Rates, counts: Counts) -> Plan:
    """Return the plan with the lower bound of its step time, and the names of the resources that set this bound."""
    options = plan.options
    found = rows(
        workload, rates, options.get("clipping"), hosted_boundaries(plan), options.get("ends", "device")
    )
    bound = forecast(found, counts)
    return replace(plan, step_seconds=bound.seconds, binds=bound.binds)
