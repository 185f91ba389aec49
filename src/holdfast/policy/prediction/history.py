"""What is known of nodes that come and go: the state that every predictor reads. Pure.

Per node: since when it works, and its own losses. Per zone: how many nodes work, its losses, and a
short timeline. Losses and node-seconds at risk are kept with exponential forgetting, once for each
half-life, so a rate is losses by exposure of the recent past. A departure that is no failure (a
node that was moved or stopped by its owner) ends the exposure and counts as nothing: right
censoring.

Times are seconds of one clock that the caller chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Literal, NamedTuple

ChangeKind = Literal["join", "lost", "left"]


class NodeChange(NamedTuple):
    """A node is usable from now on (join), was lost, or left without a failure."""

    t_s: float
    kind: ChangeKind
    node: str
    zone: str = ""


class DecayedCount(NamedTuple):
    """Losses and unit-seconds at risk, forgotten with each half-life; as of `as_of_s`."""

    losses: tuple[float, ...]
    exposure_s: tuple[float, ...]
    as_of_s: float

    @staticmethod
    def empty(half_lives_s: tuple[float, ...], now_s: float) -> DecayedCount:
        return DecayedCount((0.0,) * len(half_lives_s), (0.0,) * len(half_lives_s), now_s)

    def at(self, now_s: float, units: float, half_lives_s: tuple[float, ...]) -> DecayedCount:
        """The same at a later time, after `units` units were at risk all the while."""
        passed = now_s - self.as_of_s
        if passed <= 0:
            return self
        keep = tuple(2.0 ** (-passed / half) for half in half_lives_s)
        return DecayedCount(
            tuple(loss * k for loss, k in zip(self.losses, keep, strict=True)),
            tuple(
                seen * k + units * half / log(2) * (1 - k)
                for seen, k, half in zip(self.exposure_s, keep, half_lives_s, strict=True)
            ),
            now_s,
        )

    def with_losses(self, count: int) -> DecayedCount:
        return self._replace(losses=tuple(loss + count for loss in self.losses))


class ZoneInstant(NamedTuple):
    """One instant at which a zone changed. up: nodes that work afterwards."""

    t_s: float
    lost: int
    joined: int
    up: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node. up_since_s: None while it does not work. loss_times_s: within the memory."""

    zone: str
    up_since_s: float | None
    count: DecayedCount
    loss_times_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ZoneRecord:
    """One zone. peak: most nodes that ever worked at once. timeline: within the memory."""

    up: int
    peak: int
    count: DecayedCount
    timeline: tuple[ZoneInstant, ...] = ()


class NodeSignals(NamedTuple):
    """What is known of a working node at one moment. since_*_loss_s: seconds since the last loss;
    None if none is remembered."""

    zone: str
    age_s: float
    node: DecayedCount
    zone_count: DecayedCount
    zone_up: int
    since_node_loss_s: float | None
    since_zone_loss_s: float | None


@dataclass(frozen=True)
class ClusterHistory:
    """The nodes and zones so far."""

    half_lives_s: tuple[float, ...]  # of the forgetting
    memory_s: float  # how far back timelines and times of losses reach
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    zones: Mapping[str, ZoneRecord] = field(default_factory=dict)

    def update(self, changes: Iterable[NodeChange]) -> ClusterHistory:
        """The history after these changes, which come in order of time."""
        nodes, zones = dict(self.nodes), dict(self.zones)
        for change in changes:
            self._apply(change, nodes, zones)
        return replace(self, nodes=nodes, zones=zones)

    def working_nodes(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.up_since_s is not None]

    def signals(self, node: str, now_s: float) -> NodeSignals | None:
        """What is known of a node; None if it does not work, or is unknown."""
        known = self.nodes.get(node)
        if known is None or known.up_since_s is None:
            return None
        zone = self.zones[known.zone]
        last = next((i.t_s for i in reversed(zone.timeline) if i.lost), None)
        own = known.loss_times_s[-1] if known.loss_times_s else None
        return NodeSignals(
            known.zone,
            max(0.0, now_s - known.up_since_s),
            known.count.at(now_s, 1.0, self.half_lives_s),
            zone.count.at(now_s, zone.up, self.half_lives_s),
            zone.up,
            None if own is None else now_s - own,
            None if last is None else now_s - last,
        )

    def _apply(
        self, change: NodeChange, nodes: dict[str, NodeRecord], zones: dict[str, ZoneRecord]
    ) -> None:
        now, halves = change.t_s, self.half_lives_s
        empty = DecayedCount.empty(halves, now)
        node = nodes.get(change.node) or NodeRecord(change.zone, None, empty)
        was_up, joins = node.up_since_s is not None, change.kind == "join"
        if was_up == joins:
            return  # nothing has changed
        lost = change.kind == "lost"
        zone = zones.get(node.zone) or ZoneRecord(0, 0, empty)
        times = tuple(t for t in node.loss_times_s if t >= now - self.memory_s)
        count = node.count.at(now, 1.0 if was_up else 0.0, halves)
        nodes[change.node] = NodeRecord(
            node.zone,
            now if joins else None,
            count.with_losses(1) if lost else count,
            (*times, now) if lost else times,
        )
        up = zone.up + (1 if joins else -1)
        seen = zone.count.at(now, zone.up, halves)
        zones[node.zone] = ZoneRecord(
            up,
            max(up, zone.peak),
            seen.with_losses(1) if lost else seen,
            self._timeline(zone.timeline, ZoneInstant(now, int(lost), int(joins), up)),
        )

    def _timeline(
        self, timeline: tuple[ZoneInstant, ...], new: ZoneInstant
    ) -> tuple[ZoneInstant, ...]:
        """Add an instant; those of one time are one, and those beyond the memory go."""
        if timeline and timeline[-1].t_s == new.t_s:
            last = timeline[-1]
            merged = ZoneInstant(new.t_s, last.lost + new.lost, last.joined + new.joined, new.up)
            return (*timeline[:-1], merged)
        oldest = new.t_s - self.memory_s
        cut = 0
        while cut < len(timeline) - 1 and timeline[cut + 1].t_s < oldest:
            cut += 1
        return (*timeline[cut:], new)
