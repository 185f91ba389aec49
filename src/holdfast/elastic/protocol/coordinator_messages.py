"""Messages between agents and the coordinator, with their HTTP paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.peers.config import Peer
from holdfast.core.json_parsing import JsonObject
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.hung_worker import HungWorkers, StallReport
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.protocol.worker_pace import WorkerPace
from holdfast.policy.membership.node_identity import NodeIdentity
from holdfast.policy.membership.transitions import Directive, NodeCommand, NodeStage

JOIN_PATH, HEARTBEAT_PATH = "/join", "/beat"


JOIN_FIRST_COMMAND, REPLACED_COMMAND = "join", "replaced"
"""Orders to an agent that the coordinator does not know, or knows as another process by now."""


REFUSED_COMMAND = "refused"
"""Order to an agent that may not join; `reason` says why."""
HANG_REASON = "hang"
"""Reason for ending a generation whose workers all wait."""


@dataclass(frozen=True)
class AgentFacts:
    """Facts about an agent that do not depend on its work.

    address: "host:port", where it listens. peer: its mover; None: it has none. identity: what of
    its node decides the bits that it computes; None for an older agent, and in a run of one node.
    """

    address: str = ""
    peer: Peer | None = None
    identity: NodeIdentity | None = None

    def to_json(self) -> JsonObject:
        told: JsonObject = {
            "address": self.address,
            "peer": None if self.peer is None else self.peer.to_json(),
        }
        return told if self.identity is None else told | {"identity": self.identity.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> AgentFacts:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        peer, identity = value.get("peer"), value.get("identity")
        return AgentFacts(
            str(value.get("address", "")),
            Peer.from_json(peer) if peer else None,
            NodeIdentity.from_json(identity) if identity else None,
        )


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


@dataclass(frozen=True)
class JoinRequest:
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

    name: str
    mark: str
    places: int
    facts: AgentFacts
    at: int
    stage: NodeStage
    held: NodeOutcome | None = None
    ready: int | None = None
    wait: float = 0.0

    def to_json(self) -> JsonObject:
        return {
            "name": self.name,
            "mark": self.mark,
            "places": self.places,
            "told": self.facts.to_json(),
            "at": self.at,
            "stage": self.stage.value,
            "held": _held_json(self.held),
            "ready": self.ready,
            "wait": self.wait,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> JoinRequest:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        return JoinRequest(
            str(value["name"]),
            str(value["mark"]),
            int(value["places"]),
            AgentFacts.from_json(value["told"]),
            int(value["at"]),
            NodeStage(value["stage"]),
            _held(value),
            _ready_workers(value),
            float(value.get("wait", 0.0)),
        )


@dataclass(frozen=True)
class Heartbeat:
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
    stalled: StallReport | None = None
    paces: tuple[WorkerPace, ...] = ()
    wait: float = 0.0

    def to_json(self) -> JsonObject:
        return {
            "name": self.name,
            "mark": self.mark,
            "term": self.term,
            "doing": [self.doing.command.value, self.doing.generation],
            "leaving": self.leaving,
            "at": self.at,
            "stage": self.stage.value,
            "held": _held_json(self.held),
            "ready": self.ready,
            **({"misses": list(self.misses)} if self.misses else {}),
            **({} if self.stalled is None else {"still": self.stalled.to_json()}),
            **({"paces": [pace.to_json() for pace in self.paces]} if self.paces else {}),
            "wait": self.wait,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Heartbeat:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        (order, generation), stalled = value["doing"], value.get("still")
        return Heartbeat(
            str(value["name"]),
            str(value["mark"]),
            int(value["term"]),
            Directive(NodeCommand(order), int(generation)),
            int(value["at"]),
            NodeStage(value["stage"]),
            float(value.get("leaving", 0.0)),
            _held(value),
            _ready_workers(value),
            tuple(map(str, value.get("misses", ()))),
            StallReport.from_json(stalled) if stalled else None,
            tuple(WorkerPace.from_json(row) for row in value.get("paces", ())),
            float(value["wait"]),
        )


@dataclass(frozen=True)
class NodeSituation:
    """The situation of a node, as the coordinator sees it.

    is_outside: the other nodes work without it. may_leave: it was asked to leave the run. is_idle:
    no node works, and several are there.
    """

    is_outside: bool = False
    may_leave: bool = False
    is_idle: bool = False


@dataclass(frozen=True)
class HeartbeatReply:
    """The coordinator's answer to a JoinRequest or a Heartbeat.

    term        its own
    order       a NodeCommand, or JOIN_FIRST_COMMAND, REPLACED_COMMAND or REFUSED_COMMAND
    generation  that the order concerns; None for the two other orders, and to refuse
    situation   None where the coordinator has nothing to say of it
    start       for the order to start: what the node begins from
    reason      for the orders to halt and to pause, and for a refusal: why
    run_end     for the order to leave: verdict and kind of the run's end
    hung        workers that the node must kill
    """

    term: int
    order: str
    generation: int | None = None
    situation: NodeSituation | None = None
    start: StartState | None = None
    reason: str | None = None
    run_end: tuple[str, str] | None = None
    hung: HungWorkers | None = None

    def to_json(self) -> JsonObject:
        reply: JsonObject = {"term": self.term, "order": self.order}
        if self.generation is not None:
            reply["generation"] = self.generation
        if (node := self.situation) is not None:
            reply |= {"outside": node.is_outside, "go": node.may_leave, "free": node.is_idle}
        if self.start is not None:
            reply["begin"] = self.start.to_json()
        if self.reason is not None:
            reply["reason"] = self.reason
        if self.run_end is not None:
            reply |= dict(zip(("verdict", "kind"), self.run_end, strict=True))
        if self.hung is not None:
            reply["blamed"] = self.hung.to_json()
        return reply

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> HeartbeatReply:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        generation, start, hung = (value.get(key) for key in ("generation", "begin", "blamed"))
        outside, may_leave, is_idle = (value.get(key) for key in ("outside", "go", "free"))
        has_situation = (outside, may_leave, is_idle) != (None, None, None)
        is_end = "verdict" in value or "kind" in value
        return HeartbeatReply(
            int(value["term"]),
            str(value["order"]),
            None if generation is None else int(generation),
            NodeSituation(bool(outside), bool(may_leave), bool(is_idle)) if has_situation else None,
            None if start is None else StartState.from_json(start),
            str(value["reason"]) if "reason" in value else None,
            (str(value.get("verdict", "")), str(value.get("kind", ""))) if is_end else None,
            None if hung is None else HungWorkers.from_json(hung),
        )


@dataclass(frozen=True)
class TermReply:
    """An agent's answer to the question for its term.

    node: its name. hears_leader: it hears the coordinator of that term. role: its role there.
    """

    node: str
    term: int
    hears_leader: bool
    role: str

    def to_json(self) -> JsonObject:
        return {
            "node": self.node,
            "term": self.term,
            "hears": self.hears_leader,
            "standing": self.role,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TermReply:
        """Parse the message. Raises TypeError and ValueError if it is malformed."""
        return TermReply(
            str(value.get("node", "")),
            int(value.get("term", 0)),
            bool(value.get("hears")),
            str(value.get("standing", "")),
        )


def _held_json(held: NodeOutcome | None) -> JsonObject:
    return {} if held is None else held.to_json()


def _held(value: Mapping[str, Any]) -> NodeOutcome | None:
    return NodeOutcome.from_json(value["held"]) if value.get("held") else None


def _ready_workers(value: Mapping[str, Any]) -> int | None:
    """Return the ready places; None from an older agent, which does not send them."""
    return None if value.get("ready") is None else int(value["ready"])
