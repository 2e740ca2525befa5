"""Chooses a placement: the fastest placement by the machine's rates or, without rates, the placement with the most
resident layers. Also chooses the homes of ends and boundaries, for STRONGHOLD and for L2L. This file does not import
torch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from harness.core.job import Plan, Room, Workload
from harness.core.method import largest_depth
from harness.plan.resources import gather_sent_bytes
from methods.shared.data_parallel import rank_part
from methods.shared.memory_needs import shared_numel, writable_folder
from methods.streaming.placement.placed_layers import PlacedLayers, Sizes, UserSizes, is_adapted
from methods.streaming.placement.placement import (
    CLIPPINGS,
    RESIDENT_AND_WINDOWED,
    ends_on_host,
    home_of_boundaries,
    parse,
    placement_text,
    with_frozen,
)
from methods.streaming.placement.planner import (
    Counts,
    StepCosts,
    arrange_kinds,
    choose_counts,
    hosted_boundary_bytes,
    weighed_counts,
    with_forecast,
)

# one slot computes, one loads, one empties; more slots gain less than more resident layers
DEFAULT_WINDOW = 3


@dataclass(frozen=True)
class PlacementChoice:
    """A workload, the memories for it, and STRONGHOLD's options. plan() chooses a value for each option that is
    None."""

    workload: Sizes
    room: Room
    window_size: int | None = None
    resident_layers: int | None = None
    placement: str | None = None
    clipping: str | None = None
    ends: str | None = None
    disk: str | None = None
    activations: str | None = None
    world_size: int = 1

    def plan(self) -> Plan:
        """Return the plan with the widest window, at most DEFAULT_WINDOW, with which some placement fits the memories.
        With this window the plan has the fastest placement or, without rates, the placement with the most resident
        layers. If `clipping` is None, updates wait for the norm, because a clipped step discards speculative updates.
        with_homes() chooses the homes of ends and boundaries. Raises ValueError for options that contradict each other,
        or that the workload does not allow."""
        if self.disk:
            writable_folder(self.disk)
        if self.clipping not in (None, *CLIPPINGS):
            raise ValueError(f"clipping: expected one of {', '.join(CLIPPINGS)}, got {self.clipping!r}")
        if is_adapted(self.workload) and self.placement:
            self._check_kinds("with --lora, where no layer has a state")
        if self.world_size > 1:
            return self._of_a_rank()
        ends_may_move = isinstance(self.workload, Workload) and not is_adapted(self.workload)
        return with_homes(self._at_homes, self.room, self.ends, self.activations, ends_may_move=ends_may_move)

    def _at_homes(self, ends: str | None, activations: str | None) -> Plan:
        """Return the plan whose ends lie in the memory `ends`, and whose boundaries wait in the memory `activations`.
        None: the device's."""
        choice_at_homes = replace(self, ends=ends, activations=activations)
        plan = choice_at_homes._fastest() or choice_at_homes._most_resident()
        if self.room.rates is None or isinstance(self.workload, UserSizes):
            return plan
        counts = weighed_counts(self.workload, parse(plan.options["placement"], self.workload.num_layers))
        return with_forecast(plan, self.workload, self.room.rates, counts)

    def _of_a_rank(self) -> Plan:
        """Return the plan of one of several ranks, whose placement has the kinds R and W only. The placement is chosen
        without rates, because the linear program has no rows for exchanges between ranks. Raises ValueError for other
        kinds of layers, and for options that several ranks do not support."""
        assert isinstance(self.workload, Workload)
        ranks_text = f"with --ranks {self.world_size}"
        if self.clipping == "speculate":
            raise ValueError(
                f"clipping: expected deferred {ranks_text}, got speculate; try --option clipping=deferred"
            )
        if self.disk:
            raise ValueError(f"disk: expected none {ranks_text}, got {self.disk}; try without --disk")
        self._check_kinds(ranks_text)
        rank_choice = replace(
            self, workload=rank_part(self.workload, self.world_size), room=replace(self.room, rates=None)
        )
        plan = with_homes(
            rank_choice._at_homes, rank_choice.room, self.ends, self.activations, ends_may_move=False
        )
        return replace(plan, options={**plan.options, "world_size": self.world_size})

    def _check_kinds(self, circumstance: str) -> None:
        """Raise ValueError if a placement is given that has other kinds than R and W. `circumstance`: why."""
        kinds = parse(self.placement, self.workload.num_layers) if self.placement else ""
        if other_kinds := sorted(set(kinds) - set(RESIDENT_AND_WINDOWED)):
            tried = "".join(kind if kind in RESIDENT_AND_WINDOWED else "W" for kind in kinds)
            expected_text = f"expected only layers R and W {circumstance}, got {', '.join(other_kinds)}"
            raise ValueError(f"placement: {expected_text}; try --placement {placement_text(tried)}")

    def _windows(self) -> Iterator[int]:
        """Yield the window sizes to try, the widest first. Raises ValueError if the window that was asked for is too
        wide or too narrow."""
        num_layers = self.workload.num_layers
        default_windows = range(min(DEFAULT_WINDOW, num_layers), 0, -1)
        for window in default_windows if self.window_size is None else [self.window_size]:
            if not 1 <= window <= num_layers:
                raise ValueError(
                    f"-w: expected a window of 1 to {num_layers}, the number of layers, got {window}"
                )
            yield window

    def _fastest(self) -> Plan | None:
        """Return the fastest plan; None if there are no rates, if the placement is given, or if no placement fits."""
        room, fixed_options = self.room, (self.placement, self.resident_layers)
        if room.rates is None or room.device_bytes is None or fixed_options != (None, None):
            return None
        clipping = (self.clipping or "deferred") if self.workload.waits_for_norm else None
        return next(filter(None, (self._fastest_in(window, clipping) for window in self._windows())), None)

    def _fastest_in(self, window: int, clipping: str | None) -> Plan | None:
        workload, room = self.workload, self.room
        assert isinstance(workload, Workload)  # a user's model has no known FLOPs, so its room has no rates
        assert room.rates is not None

        def mean_plan_of(workload_of_plan: Workload, counts: Counts) -> Plan:
            """Return the plan for these numbers of layers, each as large as the mean. The bytes do not depend on the
            order of equal layers, except for the top layer, to which arranged() gives the same kind."""
            kinds = "".join(kind * int(counts.get(kind, 0)) for kind in "RPWDS")
            return self._needs(kinds, window, clipping, workload_of_plan, is_ordered=False)

        def arranged_plan_of(workload_of_plan: Workload, counts: Counts) -> Plan:
            return self._needs(arrange_kinds(counts, clipping), window, clipping, workload_of_plan)

        plan_of = arranged_plan_of if workload.layer_numels else mean_plan_of
        boundary_bytes = hosted_boundary_bytes(plan_of(workload, {"R": workload.num_layers}))
        costs = StepCosts(workload, room.rates, clipping, boundary_bytes, self.ends or "device")
        kinds_of_plan = "RW" if workload.lora else "RPWS"
        counts = choose_counts(costs, room, plan_of, kinds_of_plan, mean_plan_of)
        if counts is None and not workload.lora and self.disk and clipping != "speculate":
            # the host cannot hold all states: try the disk
            counts = choose_counts(costs, room, plan_of, "RPWSD", mean_plan_of)
        if counts is None:
            return None
        return self._placed(arrange_kinds(counts, clipping), window, clipping)

    def _most_resident(self) -> Plan:
        """Return the plan of the first pair from _fillings() that fits. States go to the disk only if no pair fits
        without the disk. If no pair fits with the disk either, return the plan of the narrowest window."""
        room, clipping, fillings = self.room, self.clipping or "deferred", list(self._fillings())
        fillings_on_disk = (
            (window, self._to_disk(window, kinds)) for window, kinds in (fillings if self.disk else ())
        )
        for window, kinds in itertools.chain(fillings, fillings_on_disk):
            plan = self._placed(kinds, window, clipping)
            if plan.shortfall(room) is None:
                return plan
        narrowest = fillings[-1][0]
        window, kinds = next(filling for filling in fillings if filling[0] == narrowest)
        return self._placed(self._to_disk(window, kinds) if self.disk else kinds, window, clipping)

    def _fillings(self) -> Iterator[tuple[int, str]]:
        """Yield pairs of a window size and a letter for each layer, the preferred pair first.

        Resident layers save host memory, and a narrow window leaves room for more of them. The last pairs have the
        kinds that need the least memory. If device and host are one memory, resident layers alone come first, because
        they need no slots. Then come streamed layers: they keep no gradient on the host if no update waits for the
        norm, and their updates in mixed precision make no temporary copies there.
        """
        num_layers, num_resident = self.workload.num_layers, self.resident_layers
        if num_resident is not None and not 0 <= num_resident <= num_layers:
            raise ValueError(
                f"resident_layers: expected 0 to {num_layers}, the number of layers, got {num_resident}"
            )
        spares_room = not self.workload.waits_for_norm or self.workload.dtype != "fp32"
        spares_room &= not is_adapted(self.workload)
        fixed_kinds = parse(self.placement, num_layers) if self.placement is not None else None
        if fixed_kinds is not None and num_resident not in (None, fixed_kinds.count("R")):
            raise ValueError(
                f"placement {self.placement} and resident_layers={num_resident} differ: leave one out"
            )
        for window in self._windows():
            yield window, fixed_kinds or self._fill(window, "W")
        if (
            fixed_kinds is None
            and num_resident is None
            and self.room.device_bytes is None
            and self.room.host_bytes
        ):
            yield window, "R" * num_layers
        if fixed_kinds is None and spares_room and self.world_size == 1:
            yield window, self._fill(window, "S")

    def _fill(self, window: int, letter: str) -> str:
        """Return a letter for each layer, with as many resident bottom layers as the device has room for, or as
        `resident_layers` asks for. The other layers are of kind `letter`. If the device's memory is unknown and
        `resident_layers` is None, no layer is resident."""
        device_bytes, num_layers = self.room.device_bytes or 0, self.workload.num_layers
        num_resident = self.resident_layers

        def kinds(num_resident: int) -> str:
            return ("R" * num_resident).ljust(num_layers, letter)

        if num_resident is None:
            num_resident = largest_depth(
                lambda count: (
                    count <= num_layers and self._needs(kinds(count), window).device_bytes <= device_bytes
                )
            )
        return kinds(num_resident)

    def _to_disk(self, window: int, kinds: str) -> str:
        """Move the states of as few layers as necessary from the host to the disk, beginning at the top, because the
        top layer's updated state is needed last."""
        if self.placement is not None:
            return kinds
        host_bytes = self.room.host_bytes
        is_fixed = self.room.device_bytes or self.resident_layers is not None
        movable = len(kinds) - (kinds.count("R") if is_fixed else 0)

        def with_disk(count: int) -> str:
            return kinds[: len(kinds) - count] + "D" * count

        def suffices(count: int) -> bool:
            plan = self._needs(with_disk(count), window)
            return host_bytes is None or plan.pooled(self.room).host_bytes <= host_bytes

        return with_disk(min(movable, bisect.bisect_left(range(movable + 1), True, key=suffices)))

    def _placed(self, kinds: str, window: int, clipping: str | None, workload: Sizes | None = None) -> Plan:
        workload = workload or self.workload
        kinds = _possible_kinds(kinds, workload)
        options = {
            "window_size": window,
            "resident_layers": kinds.count("R"),
            "placement": placement_text(kinds),
        }
        options |= _homes_as_options(self.ends, self.activations)
        if "D" in kinds:
            options["disk"] = str(writable_folder(self.disk))
        if workload.waits_for_norm:
            options["clipping"] = clipping
        return replace(self._needs(kinds, window, clipping, workload), options=options)

    def _needs(
        self,
        kinds: str,
        window: int,
        clipping: str | None = None,
        workload: Sizes | None = None,
        *,
        is_ordered: bool = True,
    ) -> Plan:
        workload = workload or self.workload
        kinds = _possible_kinds(kinds, workload)
        norm_clipping = (clipping or self.clipping or "deferred") if workload.waits_for_norm else None
        hosted_ends = (
            ends_on_host(workload, self.ends, self.world_size) if isinstance(workload, Workload) else []
        )
        boundaries_home = home_of_boundaries(self.activations)
        return PlacedLayers(
            workload,
            kinds,
            window,
            norm_clipping,
            self.world_size,
            boundaries_home,
            hosted_ends,
            is_ordered,
        ).plan()


def _possible_kinds(kinds: str, workload: Sizes) -> str:
    """Return the kinds that the layers have, of which some may be frozen."""
    if isinstance(workload, UserSizes) and workload.are_frozen:
        return with_frozen(kinds, workload.are_frozen)
    return kinds


def one_layer_plan(
    workload: Workload, room: Room, ends: str | None, activations: str | None, num_ranks: int
) -> Plan:
    """Return L2L's plan, in which the layers take turns in one slot. with_homes() chooses those homes of ends and
    boundaries that are None. Raises ValueError for an unknown home."""
    rank_workload = rank_part(workload, num_ranks)
    may_move = num_ranks == 1 and not workload.lora

    def plan_at(ends: str | None, activations: str | None) -> Plan:
        hosted_ends = ends_on_host(rank_workload, ends, num_ranks)
        boundaries_home = home_of_boundaries(activations)
        kinds = "W" * rank_workload.num_layers
        layers = PlacedLayers(
            rank_workload, kinds, 1, num_ranks=num_ranks, activations=boundaries_home, hosted_ends=hosted_ends
        )
        plan = layers.plan()
        # Unlike STRONGHOLD, L2L fetches the top layer's weights again when the backward pass begins, and frozen ones of
        # the bottom layer when a step begins.
        numels = rank_workload.layer_numels or (rank_workload.layer_params,)
        refetched = [numels[-1], *numels[:1]] if workload.lora else [numels[-1]]
        refetched_bytes = rank_workload.weight_bytes * sum(
            shared_numel(numel, num_ranks) for numel in refetched
        )
        exchanged_bytes = {
            **plan.exchanged,
            "gathers": plan.exchanged["gathers"] + gather_sent_bytes(refetched_bytes, num_ranks),
        }
        options = {"world_size": num_ranks} | _homes_as_options(ends, activations)
        return replace(
            plan,
            moved_bytes=plan.moved_bytes + refetched_bytes // num_ranks,
            exchanged=exchanged_bytes,
            options=options,
        )

    return with_homes(plan_at, room, ends, activations, ends_may_move=may_move)


def with_homes(
    plan_at: Callable[[str | None, str | None], Plan],
    room: Room,
    ends: str | None,
    activations: str | None,
    *,
    ends_may_move: bool,
) -> Plan:
    """Return the plan of plan_at() for the chosen homes of ends and boundaries. Homes that were asked for are kept. The
    other homes are the device if the plan then fits. If it does not fit, up to three plans move the ends, the
    boundaries or both to the host: take the one that fits and is fastest by the forecast. Hosted ends delay a step,
    which begins with the embedding and waits for the embedding's update. Boundaries on the host cross the link while
    the device computes. If no plan fits, return the plan that moves all that may move or, if only the host lacks room,
    the plan that moves nothing. This plan's `tried_texts` names the other homes."""
    plan = plan_at(ends, activations)
    lacking_memories = plan.lacks(room)
    if room.device_bytes is None or not lacking_memories:
        return plan
    boundary_homes = [activations] if activations else [None, "host"]
    end_homes = [ends] if ends or not ends_may_move else [None, "host"]
    homes = [(ends_home, boundaries_home) for boundaries_home in boundary_homes for ends_home in end_homes]
    plans = [plan, *(plan_at(ends_home, boundaries_home) for ends_home, boundaries_home in homes[1:])]
    if fitting_plans := [plan for plan in plans if not plan.lacks(room)]:
        return min(fitting_plans, key=lambda plan: plan.step_seconds or 0.0)
    least_plan = plans[-1] if "device" in lacking_memories else plan
    tried_texts = []
    for (ends_home, boundaries_home), other_plan in zip(homes, plans, strict=True):
        if other_plan is not least_plan:
            changed_homes = _homes_as_options(
                None if ends else ends_home, None if activations else boundaries_home
            )
            tried_texts.append(" and ".join(f"{name}={value}" for name, value in changed_homes.items()))
    return replace(least_plan, tried=", ".join(options or "all on the device" for options in tried_texts))


def _homes_as_options(ends: str | None, activations: str | None) -> dict[str, str]:
    """Return, as options of a plan, the homes that are not None: homes that were asked for, and the host where the host
    was chosen."""
    return {name: home for name, home in (("ends", ends), ("activations", activations)) if home}
