"""The knowledge of one term's coordinator, as values: the state of the machine in `membership`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import inf

from holdfast.core.json_parsing import JsonRow


class Phase(StrEnum):
    GATHERING = "gathering"  # too few nodes, or a short wait for more
    OPENING = "opening"  # the next generation's object is being made
    STARTING = "starting"  # its nodes get the order, their workers build and take up the state
    TRAINING = "training"
    HALTING = "halting"  # over: its nodes are notified and report when their workers have stopped
    FENCED = "fenced"  # there is a newer term
    ENDED = "ended"


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.GATHERING: frozenset({Phase.OPENING, Phase.FENCED, Phase.ENDED}),
    Phase.OPENING: frozenset({Phase.STARTING, Phase.GATHERING, Phase.FENCED, Phase.ENDED}),
    Phase.STARTING: frozenset({Phase.TRAINING, Phase.HALTING, Phase.FENCED, Phase.ENDED}),
    Phase.TRAINING: frozenset({Phase.HALTING, Phase.FENCED, Phase.ENDED}),
    Phase.HALTING: frozenset({Phase.OPENING, Phase.GATHERING, Phase.FENCED, Phase.ENDED}),
    Phase.FENCED: frozenset(),
    Phase.ENDED: frozenset(),
}


TERMINAL_PHASES = (Phase.FENCED, Phase.ENDED)


class NodeStage(StrEnum):
    """The stage of a node's workers in the generation that it holds."""

    IDLE = "idle"  # none has a rank
    BUILDING = "building"
    WORKING = "working"
    BROKEN = "broken"  # one is lost, errs or hangs, or cannot continue: the generation is over
    HELD = "held"  # all have stopped and hold what they have
    DONE = "done"  # they ended as they should


STAGE_TRANSITIONS: dict[NodeStage, frozenset[NodeStage]] = {
    NodeStage.IDLE: frozenset({NodeStage.BUILDING}),
    NodeStage.BUILDING: frozenset(
        {NodeStage.WORKING, NodeStage.BROKEN, NodeStage.HELD, NodeStage.DONE}
    ),
    NodeStage.WORKING: frozenset({NodeStage.BROKEN, NodeStage.HELD, NodeStage.DONE}),
    NodeStage.BROKEN: frozenset({NodeStage.HELD}),
    NodeStage.HELD: frozenset({NodeStage.BUILDING, NodeStage.IDLE, NodeStage.DONE}),
    NodeStage.DONE: frozenset({NodeStage.IDLE, NodeStage.BUILDING}),
}
"""Of one node, from one report to the next that the coordinator sees (it may miss some between)."""


WORKER_JOINED_REASON = "worker_joined"
"""Reason of a generation that is begun for processes of nodes that took part before."""

STOPPED_STAGES = (NodeStage.IDLE, NodeStage.HELD, NodeStage.DONE)
"""No worker works there."""


class NodeCommand(StrEnum):
    WAIT = "wait"  # nothing to do: be there
    START = "start"  # take part in the generation
    WORK = "work"  # continue
    PAUSE = "pause"  # end the step that is under way, then hold
    HALT = "halt"  # stop in the midst of the step, and hold
    LEAVE = "leave"  # the run is over
    REFUSE = "refuse"  # I am no coordinator any more


@dataclass(frozen=True)
class Directive(JsonRow):
    command: NodeCommand
    generation: int = 0


@dataclass(frozen=True)
class StageReport:
    """A node's own report, as in Node."""

    name: str
    incarnation: str
    generation: int
    stage: NodeStage
    ready_workers: int | None = None


@dataclass(frozen=True)
class NodeRecord:
    """A node as its coordinator knows it. Times are of the coordinator's clock."""

    name: str
    incarnation: str  # its agent's process; a restarted agent has another one
    places: int
    joined_at: float
    last_heard: float
    generation: int = 0  # that it holds
    stage: NodeStage = NodeStage.IDLE  # of its workers there
    leaving_at: float = inf  # it said that it will be lost by then
    is_banned: bool = False  # sick: not taken again in this term
    must_report: bool = False  # it has to speak, or be lost, before a next generation is made
    ready_workers: int | None = None  # places with a process that works or could; None: not known
    ready_changed_at: float = -inf  # when `ready_workers` changed
    used_places: int = 0  # that the generation uses


@dataclass(frozen=True)
class UnreachablePair:
    """Two nodes that reach the coordinator, and not each other."""

    one: str
    other: str
    retry_at: float  # when it is tried again
    wait: float  # for how long it was not


MISSED_HEARTBEATS_UNTIL_LOST = 3
"""Heartbeats of a node that do not come, after which it is lost."""


def node_timeout_s(heartbeat_s: float) -> float:
    """Return the silence after which a node is lost, in seconds."""
    return MISSED_HEARTBEATS_UNTIL_LOST * heartbeat_s


SelectNodes = Callable[[Sequence[NodeRecord]], Sequence[str]]
"""The planner's answer: which of some nodes a generation would use; () where it cannot be."""


@dataclass(frozen=True)
class MembershipRules:
    """Limits, in seconds."""

    select_nodes: SelectNodes
    node_timeout_s: float = 6.0  # silence after which a node is lost
    gather_wait_s: float = 5.0  # of the first generation for more nodes, if they would be used
    settle_time_s: float = 2.0  # that a newcomer was there before a generation is ended for it
    gather_timeout_s: float = inf  # wait of too few nodes for more
    retry_pair_after_s: float = 60.0  # two nodes are kept apart so long; it doubles each time
    is_full: Callable[[Sequence[NodeRecord]], bool] = lambda nodes: False
    """Return True if more nodes than these would not be used."""
    can_add_workers: Callable[[Sequence[NodeRecord]], bool] = lambda nodes: False
    """Return True if these nodes could make more workers than the generation has."""


@dataclass(frozen=True)
class CoordinatorState:
    """The knowledge of the coordinator of `term`; see the module."""

    term: int
    phase: Phase = Phase.GATHERING
    generation: int = 0
    members: frozenset[str] = frozenset()  # names of the generation's nodes
    nodes: tuple[NodeRecord, ...] = ()  # in the order of their names
    node_names: tuple[str, ...] = ()  # the same names, to be looked up by
    phase_since: float = 0.0  # when the phase began
    reason: str = "start"
    at_step_end: bool = False  # the change can wait for the end of a step
    pending_nodes: frozenset[str] = frozenset()  # of the generation that is being made
    lost_members: tuple[tuple[str, str], ...] = ()  # since it began, each with the reason
    unreachable_pairs: tuple[UnreachablePair, ...] = ()
    end_reason: str = ""  # why it ended without being done
    failed_growths: int = 0  # times in turn that a grown generation broke before it worked
    is_saving_last: bool = False  # all members leave: the generation saves and ends

    def __post_init__(self) -> None:
        if len(self.node_names) != len(self.nodes):
            object.__setattr__(self, "node_names", tuple(node.name for node in self.nodes))

    def node(self, name: str) -> NodeRecord | None:
        place = bisect_left(self.node_names, name)
        there = place < len(self.node_names) and self.node_names[place] == name
        return self.nodes[place] if there else None

    def with_node(self, node: NodeRecord) -> CoordinatorState:
        """With this node, in the place of the one that has its name."""
        place = bisect_left(self.node_names, node.name)
        there = place < len(self.node_names) and self.node_names[place] == node.name
        nodes = (*self.nodes[:place], node, *self.nodes[place + there :])
        return replace(self, nodes=nodes)

    def with_nodes(self, nodes: Mapping[str, NodeRecord]) -> CoordinatorState:
        """With these, all of them known, in the places of those that have their names."""
        if len(nodes) < 4:
            reign = self
            for node in nodes.values():
                reign = reign.with_node(node)
            return reign
        return replace(self, nodes=tuple(nodes.get(node.name, node) for node in self.nodes))

    @cached_property
    def free_places(self) -> dict[str, int]:
        """Places of nodes that stay which have a process and no rank, by node; without the nodes
        that have none. It is computed once, because every heartbeat asks."""
        found = {}
        for node in self.nodes:
            ready = node.places if node.ready_workers is None else node.ready_workers
            free = ready - (node.used_places if node.name in self.members else 0)
            if free > 0 and node.leaving_at == inf and not node.is_banned:
                found[node.name] = free
        return found

    @cached_property
    def all_free_places(self) -> int:
        return sum(self.free_places.values())

    @property
    def are_workers_computing(self) -> bool:
        """Return True if its workers compute, even if only to the end of the current step."""
        ending = self.phase is Phase.HALTING and self.at_step_end
        return ending or self.phase in (Phase.STARTING, Phase.TRAINING)

    @property
    def pending_generation(self) -> tuple[int, frozenset[str]] | None:
        """The generation that is to be made in the run store, and its nodes."""
        return (self.generation + 1, self.pending_nodes) if self.phase is Phase.OPENING else None


def begin_term(
    term: int,
    now: float,
    generation: int = 0,
    members: Sequence[NodeRecord] = (),
    reason: str = "start",
) -> CoordinatorState:
    """Begin a term. `generation` is the newest in the run store, with its nodes as stored there;
    these have the usual time to be heard."""
    fresh = (replace(n, generation=0, stage=NodeStage.IDLE, must_report=True) for n in members)
    expected = tuple(replace(node, joined_at=now, last_heard=now) for node in fresh)
    return CoordinatorState(
        term,
        Phase.STARTING if expected else Phase.GATHERING,
        generation,
        frozenset(node.name for node in expected),
        tuple(sorted(expected, key=lambda node: node.name)),
        phase_since=now,
        reason=reason,
    )
