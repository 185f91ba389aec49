"""The knowledge of one term's coordinator, as values: the state of the machine in `membership`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf


class Phase(StrEnum):
    GATHERING = "gathering"  # too few nodes, or a short wait for more
    OPENING = "opening"  # the next generation's object is being made
    STARTING = "starting"  # its nodes get the order, their workers build and take up the state
    TRAINING = "training"
    HALTING = "halting"  # over: its nodes are notified and report when their workers have stopped
    FENCED = "fenced"  # there is a newer term
    ENDED = "ended"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.OPENING, Phase.FENCED, Phase.ENDED}),
    Phase.OPENING: frozenset({Phase.STARTING, Phase.GATHERING, Phase.FENCED, Phase.ENDED}),
    Phase.STARTING: frozenset({Phase.TRAINING, Phase.HALTING, Phase.FENCED, Phase.ENDED}),
    Phase.TRAINING: frozenset({Phase.HALTING, Phase.FENCED, Phase.ENDED}),
    Phase.HALTING: frozenset({Phase.OPENING, Phase.GATHERING, Phase.FENCED, Phase.ENDED}),
    Phase.FENCED: frozenset(),
    Phase.ENDED: frozenset(),
}


OVER = (Phase.FENCED, Phase.ENDED)


class Stage(StrEnum):
    """The stage of a node's workers in the generation that it holds."""

    IDLE = "idle"  # none has a rank
    BUILDING = "building"
    WORKING = "working"
    BROKEN = "broken"  # one is lost, errs or hangs, or cannot continue: the generation is over
    HELD = "held"  # all have stopped and hold what they have
    DONE = "done"  # they ended as they should


STAGES: dict[Stage, frozenset[Stage]] = {
    Stage.IDLE: frozenset({Stage.BUILDING}),
    Stage.BUILDING: frozenset({Stage.WORKING, Stage.BROKEN, Stage.HELD, Stage.DONE}),
    Stage.WORKING: frozenset({Stage.BROKEN, Stage.HELD, Stage.DONE}),
    Stage.BROKEN: frozenset({Stage.HELD}),
    Stage.HELD: frozenset({Stage.BUILDING, Stage.IDLE, Stage.DONE}),
    Stage.DONE: frozenset({Stage.IDLE, Stage.BUILDING}),
}
"""Of one node, from one report to the next that the coordinator sees (it may miss some between)."""


WORKER_JOINED = "worker_joined"
"""Reason of a generation that is begun for processes of nodes that took part before."""

LET_GO = (Stage.IDLE, Stage.HELD, Stage.DONE)
"""No worker works there."""


class Order(StrEnum):
    WAIT = "wait"  # nothing to do: be there
    START = "start"  # take part in the generation
    WORK = "work"  # continue
    PAUSE = "pause"  # end the step that is under way, then hold
    HALT = "halt"  # stop in the midst of the step, and hold
    LEAVE = "leave"  # the run is over
    REFUSE = "refuse"  # I am no coordinator any more


@dataclass(frozen=True)
class Directive:
    order: Order
    generation: int = 0


@dataclass(frozen=True)
class Report:
    """A node's own report, as in Node."""

    name: str
    mark: str
    at: int
    stage: Stage
    ready: int | None = None


@dataclass(frozen=True)
class Node:
    """A node as its coordinator knows it. Times are of the coordinator's clock.

    Attributes:
        mark: Its agent's process; a restarted agent has another one.
        at: The generation that it holds, with its workers' stage there.
        ready: Number of its places with a process that works or could at once; None if unknown.
        grew: When `ready` changed.
        taken: Number of places that the generation uses.
    """

    name: str
    mark: str
    places: int
    came: float
    heard: float
    at: int = 0
    stage: Stage = Stage.IDLE
    until: float = inf  # it said that it will be lost by then
    banned: bool = False  # sick: not taken again in this term
    expected: bool = False  # it has to speak, or be lost, before a next generation is made
    ready: int | None = None
    grew: float = -inf
    taken: int = 0


@dataclass(frozen=True)
class Apart:
    """Two nodes that reach the coordinator, and not each other. until: when it is tried again;
    wait: for how long it was not."""

    one: str
    other: str
    until: float
    wait: float


Fits = Callable[[Sequence[Node]], Sequence[str]]
"""The planner's answer: which of some nodes a generation would use; () where it cannot be."""


@dataclass(frozen=True)
class Rules:
    """Limits, in seconds.

    Attributes:
        lost_after: Silence after which a node is lost.
        gather: Wait of the first generation for more nodes, if more than the present ones would be
            used.
        settle: Time that a newcomer has been there before a generation is ended for it.
        patience: Wait of too few nodes for more.
        apart: Time that two nodes that do not reach each other are kept apart; it doubles each
            time.
    """

    fits: Fits
    lost_after: float = 6.0
    gather: float = 5.0
    settle: float = 2.0
    patience: float = inf
    apart: float = 60.0
    full: Callable[[Sequence[Node]], bool] = lambda nodes: False
    """Return True if more nodes than these would not be used."""
    more: Callable[[Sequence[Node]], bool] = lambda nodes: False
    """Return True if these nodes could make more workers than the generation has."""


@dataclass(frozen=True)
class Reign:
    """The knowledge of the coordinator of `term`; see the module.

    members: names of the generation's nodes. nodes: in the order of their names, which `names`
    repeats, to be looked up by. since: when the phase began. wanted: the nodes of the
    generation that is being made. lost: which members were lost, and why, since it began.
    misgrown: how often in turn a generation that was made to grow broke before it worked.
    """

    term: int
    phase: Phase = Phase.GATHERING
    generation: int = 0
    members: frozenset[str] = frozenset()
    nodes: tuple[Node, ...] = ()
    names: tuple[str, ...] = ()
    since: float = 0.0
    reason: str = "start"
    gentle: bool = False  # the change can wait for the end of a step
    wanted: frozenset[str] = frozenset()
    lost: tuple[tuple[str, str], ...] = ()
    apart: tuple[Apart, ...] = ()
    verdict: str = ""  # why it ended without being done
    misgrown: int = 0

    def __post_init__(self) -> None:
        if len(self.names) != len(self.nodes):
            object.__setattr__(self, "names", tuple(node.name for node in self.nodes))

    def node(self, name: str) -> Node | None:
        place = bisect_left(self.names, name)
        there = place < len(self.names) and self.names[place] == name
        return self.nodes[place] if there else None

    def put(self, node: Node) -> Reign:
        """With this node, in the place of the one that has its name."""
        place = bisect_left(self.names, node.name)
        there = place < len(self.names) and self.names[place] == node.name
        nodes = (*self.nodes[:place], node, *self.nodes[place + there :])
        return replace(self, nodes=nodes)

    def put_all(self, known: Mapping[str, Node]) -> Reign:
        """With these, all of them known, in the places of those that have their names."""
        if len(known) < 4:
            reign = self
            for node in known.values():
                reign = reign.put(node)
            return reign
        return replace(self, nodes=tuple(known.get(node.name, node) for node in self.nodes))

    @property
    def at_work(self) -> bool:
        """Return True if its workers compute, even if only to the end of the current step."""
        ending = self.phase is Phase.HALTING and self.gentle
        return ending or self.phase in (Phase.STARTING, Phase.TRAINING)

    @property
    def opening(self) -> tuple[int, frozenset[str]] | None:
        """The generation that is to be made in the run store, and its nodes."""
        return (self.generation + 1, self.wanted) if self.phase is Phase.OPENING else None
