"""Decides what can still be saved before a machine is lost, from a deadline and bandwidths. Pure.

A notice leaves seconds. Bytes that stay on the machine are lost with it, so only tiers that survive
it are worth saving to. The tier that completes first is first, because an incomplete save is
useless. Tiers that share a link share its time, one after the other: two halves are no save.

A prediction that names nodes asks for less: only the boxes which the ranks on them own. Of those,
only boxes that no rank elsewhere holds must travel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.ownership import owned_boxes
from holdfast.core.sharding.state_table import ITEM_BYTES, StateTable
from holdfast.layout import Topology
from holdfast.policy.saving.failure_rate import format_duration

DEADLINE_MARGIN_SHARE = 0.2
"""Share of the deadline that is not planned with. The bandwidth was measured in other minutes, and
other nodes on the same switch have had the same notice."""


@dataclass(frozen=True)
class SaveRoute:
    """A way into a tier, as measured."""

    tier: int
    bytes_per_second: float
    overhead_s: float = 0.0  # of a save without its bytes: copy, opening, committing
    survives_loss: bool = True  # what goes: tier 0, and tier 2 on the same node, go with it
    link: str = "network"

    def seconds_for(self, nbytes: int) -> float:
        if nbytes <= 0:
            return self.overhead_s
        if self.bytes_per_second <= 0:
            return float("inf")
        return self.overhead_s + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class EmergencyPlan:
    """The decision: save into `tiers`, in this order."""

    tiers: tuple[int, ...]
    done_after_s: tuple[float, ...]  # from now, one per tier
    reason: str


def plan_emergency(deadline_s: float, nbytes: int, routes: Sequence[SaveRoute]) -> EmergencyPlan:
    """Return the tiers that will be complete `deadline_s` seconds from now, the surest first. If
    there is none, the reason says so."""
    usable = deadline_s * (1 - DEADLINE_MARGIN_SHARE)
    size = f"{nbytes / 1e6:,.0f} MB"
    busy: dict[str, float] = {}
    tiers, done, late = [], [], []
    surviving = [route for route in routes if route.survives_loss]
    for route in sorted(surviving, key=lambda r: (r.seconds_for(nbytes), -r.tier)):
        ready = busy.get(route.link, 0.0) + route.seconds_for(nbytes)
        if ready <= usable:
            busy[route.link] = ready
            tiers.append(route.tier)
            done.append(ready)
        else:
            late.append(f"tier {route.tier} would need {format_duration(ready)}")
    if not surviving:
        return EmergencyPlan((), (), "nothing can be saved: no tier survives what is about to go")
    told = f"of the {format_duration(deadline_s)} left, {format_duration(usable)} are planned with"
    others = ", ".join(late)
    if not tiers:
        why = f"nothing can be complete in time: {told}, and for {size} {others}"
        return EmergencyPlan((), (), why)
    saved = ", then ".join(
        f"tier {t} by {format_duration(d)}" for t, d in zip(tiers, done, strict=True)
    )
    reason = f"{size} into {saved}: {told}{f'; {others}' if others else ''}"
    return EmergencyPlan(tuple(tiers), tuple(done), reason)


@dataclass(frozen=True)
class BoxesAtRisk:
    """Boxes that nodes about to leave own, by rank: the size that an emergency plans with.

    The save itself is of the complete state, each rank's own part of it. For a step counts only if
    every rank's part is there. So boxes that ranks elsewhere hold too are neither left out nor sent
    last.
    """

    boxes: dict[int, tuple[Box, ...]]
    bytes: int


def boxes_at_risk(topology: Topology, table: StateTable, nodes: Collection[str]) -> BoxesAtRisk:
    """The boxes that the ranks on `nodes` own. Raises ValueError for a node that is not there."""
    unknown = sorted(set(nodes) - set(topology.nodes))
    if unknown:
        raise ValueError(
            f"no rank is on node {unknown[0]}; there are {sorted(set(topology.nodes))}"
        )
    going = [rank for rank, node in enumerate(topology.nodes) if node in nodes]
    item = {spec.name: ITEM_BYTES[spec.dtype] for spec in table}
    boxes = {rank: owned_boxes(topology, table, rank) for rank in going}
    return BoxesAtRisk(
        boxes, sum(box.size * item[box.name] for own in boxes.values() for box in own)
    )
