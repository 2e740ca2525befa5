"""Finds the fastest placement for a machine's rates and memories. A linear program chooses how many layers of each kind
the placement has.

A step takes at least as long as its busiest resource. The resources are the device, each direction of the link and both
together, the host's memory, the host's cores and the disk. A row is the busy time of one resource, and is linear in the
number of layers of each kind. If the model's layers are unequal, a layer counts as its share of the mean layer:

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
from collections import Counter
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
from methods.streaming.placement.placed_layers import params_of
from methods.streaming.placement.placement import spread

KINDS = "RPWSDQ"
BACKWARD, FORWARD = 0, 1  # two pools of time, for deferred updates; other updates have one pool, 0
SLACK = 0.02  # share of the step time given up for fewer copies; less than the rates' error
Counts = Mapping[str, float]  # number of layers of each kind, or bytes of each memory
# returns the plan for these numbers of layers of each kind
PlanOf = Callable[[Workload, dict[str, int]], Plan]


class ResourceRow(NamedTuple):
    """The seconds for which a resource is busy in one pool of time: a constant, and for each kind of layer the seconds
    of one layer."""

    resource: str
    pool: int
    seconds: float
    per_layer: dict[str, float]

    def total_seconds(self, counts: Counts) -> float:
        return self.seconds + sum(self.per_layer.get(kind, 0.0) * count for kind, count in counts.items())


class CarriedBytes(NamedTuple):
    """The bytes that cross the link for each parameter of a layer, into the device and out of it. Each pair has the
    bytes of both pools of time."""

    inbound: tuple[float, float]
    outbound: tuple[float, float]


@dataclass(frozen=True)
class StepCosts:
    """The quantities that, with the number of layers of each kind, decide how long a step keeps each resource busy.
    `clipping`: None, deferred or speculate. `boundary_bytes`: bytes of layers' inputs that go to the host in the
    forward pass and come back in the backward pass. `ends`: home of embedding and head."""

    workload: Workload
    rates: Rates
    clipping: str | None
    boundary_bytes: int = 0
    ends: str = "device"

    @property
    def is_deferred(self) -> bool:
        return self.clipping == "deferred"

    @property
    def layer_params(self) -> int:
        """Parameters of a layer; if layers are unequal, the mean (see weighed_counts())."""
        return self.workload.mean_layer_params

    @property
    def stored_bytes(self) -> int:
        """Bytes of a layer on the disk: its master and moments. A step reads these bytes once and writes them once."""
        return state_bytes(self.workload)["optimizer"] * stored_numel(self.layer_params)

    def carried_bytes(self) -> dict[str, CarriedBytes]:
        """Return the bytes that cross the link for each parameter of a layer of each kind. A gradient has as many bytes
        as its weight. A deferred update on the device fetches the gradient again. Without deferred updates all bytes
        are in the first pool."""
        bytes_at_home = state_bytes(self.workload)
        weight_bytes, optimizer_bytes = bytes_at_home["weights"], bytes_at_home["optimizer"]
        sent_gradient = weight_bytes if self.clipping else 0
        fetched_gradient = weight_bytes if self.is_deferred else 0
        if self.workload.lora:  # frozen weights come in for each pass, and nothing goes out
            pools = (weight_bytes, weight_bytes) if self.is_deferred else (2 * weight_bytes, 0)
            return {"R": CarriedBytes((0, 0), (0, 0)), "W": CarriedBytes(pools, (0, 0))}
        carried_by_kind = {
            "R": CarriedBytes((0, 0), (0, 0)),
            "P": CarriedBytes((0, weight_bytes), (weight_bytes, 0)),
            "W": CarriedBytes((weight_bytes, weight_bytes), (weight_bytes, 0)),
            "S": CarriedBytes(
                (weight_bytes, weight_bytes + optimizer_bytes + fetched_gradient),
                (sent_gradient, weight_bytes + optimizer_bytes),
            ),
            "Q": CarriedBytes((0, optimizer_bytes + fetched_gradient), (sent_gradient, optimizer_bytes)),
            "D": CarriedBytes((weight_bytes, weight_bytes), (weight_bytes, 0)),
        }
        if self.is_deferred:
            return carried_by_kind
        return {
            kind: CarriedBytes((sum(carried.inbound), 0), (sum(carried.outbound), 0))
            for kind, carried in carried_by_kind.items()
        }

    def rows(self) -> list[ResourceRow]:
        """Return the rows of every resource that bounds a step."""
        rows = [*self._compute_rows(), *self._host_and_disk_rows(), *self._link_rows()]
        return self._with_hosted_ends(rows) if self.ends == "host" else rows

    def _compute_rows(self) -> list[ResourceRow]:
        workload, rates = self.workload, self.rates
        forward_seconds, backward_seconds = compute_seconds(workload, rates)
        if workload.lora:
            adapter_seconds = device_update_seconds(workload.num_trained, workload, rates)
            return self._rows_of_passes(forward_seconds, backward_seconds, adapter_seconds, {})
        layer_seconds = device_update_seconds(self.layer_params, workload, rates)
        ends_seconds = (
            0.0 if self.ends == "host" else device_update_seconds(workload.end_params, workload, rates)
        )
        update_seconds = {"R": layer_seconds} | dict.fromkeys("SQ", rates.streamed_cost * layer_seconds)
        if rates.is_host:
            update_seconds |= dict.fromkeys("PWD", self._host_update_seconds())
        return self._rows_of_passes(forward_seconds, backward_seconds, ends_seconds, update_seconds)

    def _rows_of_passes(
        self,
        forward_seconds: float,
        backward_seconds: float,
        ends_seconds: float,
        update_seconds: dict[str, float],
    ) -> list[ResourceRow]:
        """Return the device's rows. `update_seconds`: by kind, the update of one layer."""
        if not self.is_deferred:
            step_seconds = forward_seconds + backward_seconds + ends_seconds
            return [ResourceRow("compute", BACKWARD, step_seconds, update_seconds)]
        return [
            ResourceRow("compute", FORWARD, forward_seconds + ends_seconds, update_seconds),
            ResourceRow("compute", BACKWARD, backward_seconds, {}),
        ]

    def _host_update_seconds(self) -> float:
        return seconds_of("host cores", self._ahead_cost * self.layer_params, self.rates)

    @property
    def _ahead_cost(self) -> float:
        return self.rates.ahead_cost if self.clipping == "speculate" else 1.0

    @property
    def _update_pool(self) -> int:
        """The pool in which updates are made."""
        return FORWARD if self.is_deferred else BACKWARD

    def _host_and_disk_rows(self) -> list[ResourceRow]:
        if self.workload.lora:  # no layer is updated
            return []
        stored_bytes = self.stored_bytes
        bytes_by_resource = {
            "disk reads": stored_bytes,
            "disk writes": stored_bytes,
            "disk both ways": 2 * stored_bytes,
        }
        return [
            ResourceRow(
                "host cores", self._update_pool, 0.0, dict.fromkeys("PWD", self._host_update_seconds())
            ),
            *(
                ResourceRow(
                    resource, self._update_pool, 0.0, {"D": seconds_of(resource, num_bytes, self.rates)}
                )
                for resource, num_bytes in bytes_by_resource.items()
            ),
        ]

    def _link_rows(self) -> list[ResourceRow]:
        """Return the rows of the link and of the host's memory, pool by pool."""
        carried_by_kind, params = self.carried_bytes(), self.layer_params
        rows: list[ResourceRow] = []
        for pool in range(self._update_pool + 1):
            inbound = {kind: params * carried.inbound[pool] for kind, carried in carried_by_kind.items()}
            outbound = {kind: params * carried.outbound[pool] for kind, carried in carried_by_kind.items()}
            both_ways = {kind: inbound[kind] + outbound[kind] for kind in carried_by_kind}
            # bytes of host memory that an update touches for each parameter
            update_bytes = 0.0
            if pool == self._update_pool and not self.workload.lora:
                update_bytes = self._ahead_cost * UPDATE_BYTES[self.workload.dtype]
            update_traffic = dict.fromkeys("PWD", params * update_bytes)
            update_traffic["D"] += 2 * self.stored_bytes if update_bytes else 0
            touched_bytes = {
                kind: num_bytes + update_traffic.get(kind, 0) for kind, num_bytes in both_ways.items()
            }
            boundaries_in = self.boundary_bytes * (pool == BACKWARD)
            boundaries_out = self.boundary_bytes * (pool == self._update_pool)
            # by resource: bytes that do not depend on the kinds of layers, and bytes of a layer of each kind
            bytes_by_resource = {
                "link inbound": (boundaries_in, inbound),
                "link outbound": (boundaries_out, outbound),
                "link both ways": (boundaries_in + boundaries_out, both_ways),
                "host memory": (boundaries_in + boundaries_out, touched_bytes),
            }
            for resource, (constant_bytes, layer_bytes) in bytes_by_resource.items():
                per_layer = {
                    kind: seconds_of(resource, num_bytes, self.rates)
                    for kind, num_bytes in layer_bytes.items()
                }
                rows.append(
                    ResourceRow(resource, pool, seconds_of(resource, constant_bytes, self.rates), per_layer)
                )
        return rows

    def _with_hosted_ends(self, rows: list[ResourceRow]) -> list[ResourceRow]:
        """Return the rows with the work of ends on the host added, as for parked layers, and with a row for the
        embedding. The embedding's gradient is known last and its weights are needed first, so the device has no pass to
        make while the embedding is updated."""
        workload, rates = self.workload, self.rates
        compute_row = rows[0]  # the device's passes in the last pool, which ends on the host do not lengthen
        # ends are not updated ahead
        parked_rows = StepCosts(workload, rates, self.clipping if self.is_deferred else None).rows()
        share = workload.end_params / self.layer_params
        with_ends = [
            row._replace(seconds=row.seconds + share * parked_row.per_layer.get("P", 0.0))
            for row, parked_row in zip(rows, parked_rows, strict=True)
        ]
        embedding_params = workload.anatomy.end_parts[0]
        embedding_bytes = workload.weight_bytes * embedding_params
        update_seconds = max(host_update_seconds(embedding_params, workload, rates))
        outbound_seconds = seconds_of("link outbound", embedding_bytes, rates)
        copied_seconds = outbound_seconds + seconds_of("link inbound", embedding_bytes, rates)
        seconds = compute_row.seconds + copied_seconds + update_seconds
        return [*with_ends, ResourceRow("the embedding's way home", compute_row.pool, seconds, {})]

    def forecast(self, counts: Counts) -> Forecast:
        return forecast(self.rows(), counts)

    def least_seconds(
        self, needs: Mapping[str, Counts], free_bytes: Counts, kinds: str
    ) -> tuple[float, dict[str, float]] | None:
        """Return the lower bound of the step time over all placements, in seconds, and the numbers of layers of each
        kind. Of all numbers within SLACK of the bound these copy the fewest bytes. Return None if no placement fits or
        scipy is missing.

        `needs`: bytes of a layer, by memory and kind; `free_bytes`: bytes that are left for layers, by memory.
        """
        try:
            from scipy.optimize import linprog  # a slow import, needed only for plans by rates
        except ImportError:
            return None

        pools = range(2 if self.is_deferred else 1)
        upper_rows, limits = [], []
        for row in self.rows():
            per_pool = [-1.0 if row.pool == pool else 0.0 for pool in pools]
            upper_rows.append([row.per_layer.get(kind, 0.0) for kind in kinds] + per_pool)
            limits.append(-row.seconds)
        for memory, num_bytes in free_bytes.items():
            upper_rows.append([needs[memory].get(kind, 0.0) / 2**30 for kind in kinds] + [0.0 for _ in pools])
            limits.append(num_bytes / 2**30)
        all_layers = {"A_eq": [[1.0] * len(kinds) + [0.0 for _ in pools]], "b_eq": [self.workload.num_layers]}
        time_row = [0.0] * len(kinds) + [1.0 for _ in pools]
        fastest_solution = linprog(time_row, A_ub=upper_rows, b_ub=limits, **all_layers)
        if fastest_solution.status:
            return None
        carried_row = [*self._moved_bytes(kinds)] + [0.0 for _ in pools]
        least_copies = linprog(
            carried_row,
            A_ub=[*upper_rows, time_row],
            b_ub=[*limits, fastest_solution.fun * (1 + SLACK)],
            **all_layers,
        )
        chosen_counts = (fastest_solution if least_copies.status else least_copies).x
        return float(fastest_solution.fun), dict(zip(kinds, map(float, chosen_counts), strict=False))

    def _moved_bytes(self, kinds: str) -> list[float]:
        """Return the bytes that a step copies for each parameter of a layer, for each of these kinds."""
        carried_by_kind, moved_bytes = self.carried_bytes(), []
        for kind in kinds:
            carried = carried_by_kind[kind]
            moved_bytes.append(float(sum(carried.inbound) + sum(carried.outbound)))
            if kind == "D":
                moved_bytes[-1] += 2 * self.stored_bytes / self.layer_params
        return moved_bytes


def forecast(rows: list[ResourceRow], counts: Counts) -> Forecast:
    """Return the lower bound of the step time for these numbers of layers, and the names of the rows that set it."""
    longest_rows = []
    for pool in {row.pool for row in rows}:
        rows_of_pool = [row for row in rows if row.pool == pool]
        longest_rows.append(max(rows_of_pool, key=lambda row: row.total_seconds(counts)))
    binds = " then ".join(dict.fromkeys(row.resource for row in longest_rows))
    return Forecast(sum(row.total_seconds(counts) for row in longest_rows), binds)


def choose_counts(
    costs: StepCosts, room: Room, plan_of: PlanOf, kinds: str, mean_plan_of: PlanOf | None = None
) -> dict[str, int] | None:
    """Return the numbers of layers of each kind. Of all numbers that fit, and whose step by the rates is within SLACK
    of the shortest step, these copy the fewest bytes. Return None if no placement fits. `mean_plan_of`: returns the
    plan for any numbers of layers, each as large as the mean; None: layers are equal, and plan_of() does so."""
    rows = costs.rows()
    candidates: dict[tuple[int, ...], tuple[float, int]] = {}
    for used_kinds in _with_and_without(kinds.replace("R", "")):
        for near_counts in _near_optimum(costs, room, mean_plan_of or plan_of, "R" + used_kinds):
            counts = dict.fromkeys(kinds, 0) | near_counts
            plan = plan_of(costs.workload, counts)
            if plan.shortfall(room) is None:
                weighed: Counts = counts
                if (
                    costs.workload.layer_numels
                ):  # only then the order of kinds counts, which takes time to arrange
                    kinds_of_layers = arrange_kinds(counts, costs.clipping)
                    weighed = weighed_counts(costs.workload, kinds_of_layers, counts)
                seconds = forecast(rows, weighed).seconds
                candidates[tuple(counts.values())] = (seconds, plan.moved_bytes + 2 * plan.disk_bytes)
    if not candidates:
        return None
    least_seconds = min(seconds for seconds, _ in candidates.values())
    near_keys = [key for key, (seconds, _) in candidates.items() if seconds <= least_seconds * (1 + SLACK)]
    best_key = min(near_keys, key=lambda key: (candidates[key][1], candidates[key][0]))
    return dict(zip(kinds, best_key, strict=True))


def _with_and_without(optional_kinds: str) -> Iterator[str]:
    """Yield every subset of these kinds, because a kind's buffers cost memory even for one layer."""
    for num_kinds in range(len(optional_kinds) + 1):
        for used_kinds in itertools.combinations(optional_kinds, num_kinds):
            yield "".join(used_kinds)


def _near_optimum(costs: StepCosts, room: Room, plan_of: PlanOf, kinds: str) -> Iterator[dict[str, int]]:
    """Return whole numbers of layers of each kind near the solution of the linear program."""
    num_layers = costs.workload.num_layers
    needs, free_bytes = _linear_needs(costs.workload, room, plan_of, kinds)
    if not may_fit(num_layers, needs, free_bytes):
        return
    solution = costs.least_seconds(needs, free_bytes, kinds)
    if solution is None:
        return
    if costs.workload.layer_numels:
        yield from _with_any_residents(solution[1], num_layers)
        return
    count_ranges = [range(max(0, int(count) - 1), int(count) + 3) for count in solution[1].values()]
    for counts in itertools.product(*count_ranges):
        if sum(counts) == num_layers:
            yield dict(zip(kinds, counts, strict=True))


def _with_any_residents(solution: Counts, num_layers: int) -> Iterator[dict[str, int]]:
    """Yield numbers of layers with each number of resident layers, the others of the kinds and about in the shares of
    the linear program's solution. If layers are unequal, the solution itself may be far from the fastest numbers:
    which layers are resident decides how large a slot must be."""
    others = {kind: count for kind, count in solution.items() if kind != "R"}
    for num_resident in range(num_layers + 1):
        scale = (num_layers - num_resident) / max(sum(others.values()), 1e-9)
        ranges = [range(int(scale * count), int(scale * count) + 2) for count in others.values()]
        for counts in itertools.product(*ranges):
            if num_resident + sum(counts) == num_layers:
                yield {"R": num_resident, **dict(zip(others, counts, strict=True))}


def weighed_counts(workload: Workload, letters: str, counts: Counts | None = None) -> Counts:
    """Return the number of layers of each kind, where a layer counts as the ratio of its parameters to the mean
    layer's. `letters`: the kind of each layer, bottom first. `counts`: the answer for equal layers."""
    if not workload.layer_numels:
        return counts or Counter(letters)
    mean_params = workload.mean_layer_params
    return {kind: params / mean_params for kind, params in params_of(workload, letters).items()}


def hosted_boundary_bytes(plan: Plan) -> int:
    """Return the bytes of boundaries that the host keeps from the forward pass to the backward pass."""
    return plan.host.get("activations", 0)


def may_fit(num_layers: int, needs: Mapping[str, Counts], free_bytes: Counts) -> bool:
    """Return False if certainly no placement fits, because even the least bytes that layers need in one memory, or in a
    weighted sum of two memories, are too many. Return True if a placement may fit; the linear program may still find
    none.

    For models that hardly fit, this check saves 95 of 100 linear programs (results/LOG.md).
    """
    if min(free_bytes.values(), default=0) < 0:
        return False
    shares = []  # for each memory, the share of its free bytes that the layers need if all are of one kind
    for memory, need_of_kind in needs.items():
        shares.append([num_layers * need / max(free_bytes[memory], 1.0) for need in need_of_kind.values()])
    for share_pair in itertools.combinations_with_replacement(shares, 2):
        for weight in range(11):
            pairs_of_kinds = zip(*share_pair, strict=True)
            if min(weight * share + (10 - weight) * other for share, other in pairs_of_kinds) > 10:
                return False
    return True


def _linear_needs(
    workload: Workload, room: Room, plan_of: PlanOf, kinds: str
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return, by memory, the bytes of one more layer of each kind, and the bytes that all other memory needs leave for
    layers."""
    base_counts = dict.fromkeys(KINDS, 0) | dict.fromkeys(kinds, 4)  # more layers than slots
    num_layers = sum(base_counts.values())
    # a model of unequal layers has no more layers than its configuration, but its plan by the mean has
    base_workload, workload_of_one_more = (
        workload if workload.layer_numels else workload.at_depth(number)
        for number in (num_layers, num_layers + 1)
    )
    base_plan = plan_of(base_workload, base_counts)
    plan_with_one_more = {kind: plan_of(workload_of_one_more, {**base_counts, kind: 5}) for kind in kinds}
    needs, free_bytes = {}, {}
    for field_name in (f"{memory}_bytes" for memory in MEMORIES):
        limit, base_bytes = getattr(room, field_name), getattr(base_plan, field_name)
        if limit is not None:
            needs[field_name] = {
                kind: float(getattr(plan, field_name) - base_bytes)
                for kind, plan in plan_with_one_more.items()
            }
            free_bytes[field_name] = float(limit - (base_bytes - 4 * sum(needs[field_name].values())))
    return needs, free_bytes


def arrange_kinds(counts: Counts, clipping: str | None = "deferred") -> str:
    """Return a letter for each layer, bottom first.

    Resident layers are at the bottom, so that the layers above them, which the host updates, are needed late in the
    next step. Streamed layers are spread among the others: the streamed layers' states then load the link as steadily
    as the other layers' updates load the host. Unless updates are deferred, most resident layers are spread, too: the
    link carries states while resident layers compute. One of the other layers is on top: its gradient comes home soon
    after the turn from forward to backward pass, so that the host soon has an update to make.
    """
    num_resident, num_streamed = (int(counts.get(kind, 0)) for kind in "RS")
    upper_kinds = spread("".join(kind * int(counts.get(kind, 0)) for kind in "PWD"), "S", num_streamed)
    num_at_bottom = num_resident // 4 if num_streamed and clipping != "deferred" else num_resident
    return "R" * num_at_bottom + spread(upper_kinds, "R", num_resident - num_at_bottom)


def costs_of(plan: Plan, workload: Workload, rates: Rates) -> StepCosts:
    """Return the costs of a step with this plan, whose options have been chosen."""
    options = plan.options
    return StepCosts(
        workload, rates, options.get("clipping"), hosted_boundary_bytes(plan), options.get("ends", "device")
    )


def with_forecast(plan: Plan, workload: Workload, rates: Rates, counts: Counts) -> Plan:
    """Return the plan with the lower bound of its step time, and the names of the resources that set this bound."""
    bound = costs_of(plan, workload, rates).forecast(counts)
    return replace(plan, step_seconds=bound.seconds, binds=bound.binds)
