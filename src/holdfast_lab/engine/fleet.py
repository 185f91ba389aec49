"""The nodes that are there, as the events of a trace say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.policy.recovery.rank_assignment import fill_places
from holdfast_lab.engine.interfaces import Change, Node
from holdfast_lab.traces.events import TraceEvent

PlaceOf = Callable[[str], int | None]
"""The place of a node in the order of ranks; None if it is not in use."""


@dataclass(slots=True)
class Taken:
    """What the events of one instant changed. departed: nodes in use that were lost; lost:
    their places. levels: prices and intensities. is_new: nodes came or went, or prices changed."""

    lost: list[int]
    departed: list[Node]
    joined: list[str]
    noticed: list[str]
    slowed: list[str]
    levels: list[TraceEvent]
    is_new: bool = False

    def change(self) -> Change | None:
        """None if nothing happened to a node that matters to a run."""
        if not (self.lost or self.joined or self.noticed or self.slowed):
            return None
        lost = self.lost
        return Change(
            tuple(sorted(lost) if len(lost) > 1 else lost),
            tuple(self.joined),
            tuple(self.noticed),
            tuple(self.slowed),
        )


@dataclass
class Fleet:
    """nodes: those that are there, by name, the oldest first. links: the last event of each."""

    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[str, TraceEvent] = field(default_factory=dict)
    _failed: dict[str, Node] = field(default_factory=dict)

    def take(self, group: Sequence[TraceEvent], place_of: PlaceOf) -> Taken:
        """Take in the events of one instant."""
        taken = Taken([], [], [], [], [], [])
        for event in group:
            kind, name = event.kind, event.node
            if kind in ("preempt", "fail"):
                self._lose(event, place_of, taken)
            elif kind == "join":
                self.nodes[name] = Node(name, event.zone, event.gpu, event.t_s, event.value)
                taken.joined.append(name)
            elif kind == "recover":
                self._recover(event, taken)
            elif kind == "notice":
                if name in self.nodes:
                    self.nodes[name].leaves_s = event.t_s + event.value
                    taken.noticed.append(name)
            elif kind == "slow":
                if name in self.nodes:
                    self.nodes[name].slow = event.value
                    taken.slowed.append(name)
            elif kind == "net":
                self.links[name] = event
            else:
                taken.levels.append(event)
        taken.is_new = taken.is_new or bool(taken.joined or taken.levels)
        return taken

    def _lose(self, event: TraceEvent, place_of: PlaceOf, taken: Taken) -> None:
        node = self.nodes.pop(event.node, None)
        if node is None:
            return
        taken.is_new = True
        if event.kind == "fail":
            self._failed[event.node] = node
        place = place_of(event.node)
        if place is not None:
            taken.lost.append(place)
            taken.departed.append(node)

    def _recover(self, event: TraceEvent, taken: Taken) -> None:
        name = event.node
        node = self._failed.pop(name, None)
        if node is not None:
            node.joined_s, node.slow, node.leaves_s = event.t_s, 1.0, inf
            self.nodes[name] = node
            taken.joined.append(name)
        elif name in self.nodes:
            self.nodes[name].slow = 1.0
            taken.slowed.append(name)


def seats(used: Sequence[str], nodes: Mapping[str, Node], number: int) -> list[str]:
    """Names of `number` nodes in the order of ranks, or of all if there are fewer. A node in use
    keeps its place where that is possible. Nodes with a notice come last."""
    kept = [name for name in used if name in nodes]
    if len(used) > number:
        del kept[number:]
    if len(kept) == number:
        return kept
    taken = set(kept)
    free = [name for name in nodes if name not in taken]
    late = [name for name in free if nodes[name].leaves_s < inf]
    if late:
        free = [name for name in free if nodes[name].leaves_s == inf] + late
    if len(kept) == len(used):
        return kept + free[: number - len(kept)]
    return fill_places(used, taken, free, number)


def instants(events: Iterable[TraceEvent]) -> Iterator[tuple[float, list[TraceEvent]]]:
    """Events of one instant together."""
    group: list[TraceEvent] = []
    for event in events:
        if group and event.t_s != group[0].t_s:
            yield group[0].t_s, group
            group = []
        group.append(event)
    if group:
        yield group[0].t_s, group
