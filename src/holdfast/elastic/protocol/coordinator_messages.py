"""Messages between agents and the coordinator, with their HTTP paths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.peers.config import Peer
from holdfast.core.json_parsing import JsonMessage, JsonObject, JsonRow, Key
from holdfast.elastic.protocol.generation_outcome import FailedOutcome, NodeOutcome
from holdfast.elastic.protocol.hung_worker import HungWorkers, StallReport
from holdfast.policy.membership.node_identity import NodeIdentity
from holdfast.policy.membership.transitions import Directive, NodeStage
from holdfast.policy.spending import NodePrice


@dataclass(frozen=True)
class StartState(JsonMessage):
    """
    step            the step after which the state is; 0: initial weights
    restore_point   what the workers restore; None just where they hold the state themselves
    peers           the movers of the nodes that take part; None: one node alone, whose mover knows
                    by itself whom to ask and to send to
    extra_sources   movers of nodes that do not, but may have what is restored
    rendezvous      "host:port" where the generation's workers find each other
    """

    required = frozenset({"step", "extra_sources", "rendezvous"})
    step: int = 0
    restore_point: Annotated[RestorePoint | None, Key("newest")] = None
    peers: Annotated[tuple[Peer, ...] | None, Key("machines")] = None
    extra_sources: Annotated[tuple[Peer, ...], Key("sources")] = ()
    rendezvous: Annotated[str, Key("meet")] = ""

    @cached_property
    def _json(self) -> JsonObject:
        """Return the JSON value. Made once: it is sent to every node, and names every node."""
        return super().to_json()

    def to_json(self) -> JsonObject:
        return self._json


@dataclass(frozen=True)
class WorkerPace(JsonRow):
    """A worker's time for its microbatches since it was last reported.

    position: its place in its replica; workers with equal positions do the same work.
    load: seconds in which it was ready to run and had no processor; elements of the microbatches.
    """

    absent_if_default = frozenset({"load"})
    pid: int
    position: str
    seconds: float
    microbatches: int
    load: tuple[float, float] = (0.0, 0.0)


JOIN_PATH, HEARTBEAT_PATH = "/join", "/beat"

JOIN_FIRST_COMMAND, REPLACED_COMMAND = "join", "replaced"
"""Orders to an agent that the coordinator does not know, or knows as another process by now."""

REFUSED_COMMAND = "refused"
"""Order to an agent that may not join; `reason` says why."""
HANG_REASON = "hang"
"""Reason for ending a generation whose workers all wait."""


@dataclass(frozen=True)
class AgentFacts(JsonMessage):
    """Facts about an agent that do not depend on its work.

    address: "host:port", where it listens. peer: its mover; None: it has none. identity: what of
    its node decides the bits that it computes; None for an older agent, and in a run of one node.
    cores: equal for nodes that share one machine's cores (`machine/limits.py`); "": unknown.
    price: of an hour of its node; None: not told.
    """

    absent_if_default = frozenset({"identity", "cores", "price"})
    address: str = ""
    peer: Peer | None = None
    identity: NodeIdentity | None = None
    cores: str = ""
    price: NodePrice | None = None


@dataclass
class NodeReport:
    """An agent's report, beyond what the decisions need.

    facts: from when it joined.
    node_outcome: the states of its stopped workers, and how `generation` ended there; None: nothing
        yet.
    """

    facts: AgentFacts
    node_outcome: NodeOutcome | None = None
    generation: int = 0

    @property
    def failure(self) -> FailedOutcome | None:
        """Return why the node's workers failed, if a restart would not repair that."""
        ending = None if self.node_outcome is None else self.node_outcome.ending
        return ending if isinstance(ending, FailedOutcome) and ending.sentence else None


@dataclass(frozen=True)
class JoinRequest(JsonMessage):
    """An agent's request to join.

    mark     random: tells apart the agents that have had this name
    places   how many workers its node has room for
    facts    about the agent
    at       the newest generation that it has begun; 0: none
    stage    what its workers do there
    held     their states, sent in the stages HELD and DONE only
    ready    places with a process that works or could at once; None: unknown
    wait     seconds; always 0: a join is answered at once
    """

    empty_if_none = frozenset({"held"})
    name: str
    mark: str
    places: int
    facts: Annotated[AgentFacts, Key("told")]
    at: int
    stage: NodeStage
    held: NodeOutcome | None = None
    ready: int | None = None
    wait: float = 0.0


@dataclass(frozen=True)
class Heartbeat(JsonMessage):
    """An agent's report and question: it is answered once there is something else to do.

    term      the newest that it knows
    doing     the directive that it follows
    leaving   seconds until its node ends; 0: it stays
    at, stage, held, ready, mark: as in JoinRequest
    misses    nodes whose agents it does not reach
    stalled   workers without progress, as the hang monitor reports them; None: none
    paces     what workers took for their microbatches; (): nothing to tell now
    wait      seconds after which it is to be answered in any case
    """

    absent_if_default = frozenset({"misses", "stalled", "paces"})
    empty_if_none = frozenset({"held"})
    name: str
    mark: str
    term: int
    doing: Directive
    at: int
    stage: NodeStage
    leaving: float = 0.0
    held: NodeOutcome | None = None
    ready: int | None = None
    misses: tuple[str, ...] = ()
    stalled: Annotated[StallReport | None, Key("still")] = None
    paces: tuple[WorkerPace, ...] = ()
    wait: float = 0.0


@dataclass(frozen=True)
class NodeSituation(JsonMessage):
    """The situation of a node, as the coordinator sees it.

    is_outside: the other nodes work without it. may_leave: it was asked to leave the run. is_idle:
    no node works, and several are there. has_replacement: free places elsewhere can take its
    workers.
    """

    absent_if_default = frozenset({"has_replacement"})

    is_outside: Annotated[bool, Key("outside")] = False
    may_leave: Annotated[bool, Key("go")] = False
    is_idle: Annotated[bool, Key("free")] = False
    has_replacement: Annotated[bool, Key("instead")] = False


@dataclass(frozen=True)
class RunEnd(JsonMessage):
    verdict: str = ""
    kind: str = ""


@dataclass(frozen=True)
class HeartbeatReply(JsonMessage):
    """The coordinator's answer to a JoinRequest or a Heartbeat.

    term        its own
    order       a NodeCommand, or JOIN_FIRST_COMMAND, REPLACED_COMMAND or REFUSED_COMMAND
    generation  that the order concerns; None for the two other orders, and to refuse
    situation   None where the coordinator has nothing to say of it
    start       for the order to start: what the node begins from
    reason      for the orders to halt and to pause, and for a refusal: why
    run_end     for the order to leave
    hung        workers that the node must kill
    """

    absent_if_default = frozenset({"generation", "start", "reason", "hung"})
    merged = frozenset({"situation", "run_end"})
    term: int
    order: str
    generation: int | None = None
    situation: NodeSituation | None = None
    start: Annotated[StartState | None, Key("begin")] = None
    reason: str | None = None
    run_end: RunEnd | None = None
    hung: Annotated[HungWorkers | None, Key("blamed")] = None


@dataclass(frozen=True)
class TermReply(JsonMessage):
    """An agent's answer to the question for its term.

    node: its name. hears_leader: it hears the coordinator of that term. role: its role there.
    """

    node: str = ""
    term: int = 0
    hears_leader: Annotated[bool, Key("hears")] = False
    role: Annotated[str, Key("standing")] = ""
