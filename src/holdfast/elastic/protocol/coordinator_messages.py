"""Messages between agents and the coordinator, with their HTTP paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.policy.membership.transitions import Directive, NodeCommand, NodeStage

JOIN_PATH, HEARTBEAT_PATH = "/join", "/beat"


JOIN_FIRST_COMMAND, REPLACED_COMMAND = "join", "replaced"
"""Orders to an agent that the coordinator does not know, or knows as another process by now."""


REFUSED_COMMAND = "refused"
"""Order to an agent that may not join; `why` says why."""
IDENTITY_KEY = "identity"
"""Key in `JoinRequest.told` of the node's `policy.membership.node_identity.NodeIdentity` as JSON.
Older agents, and those of a run of one node, send none."""


HANG_REASON = "hang"
"""Reason for ending a generation whose workers all wait."""


@dataclass
class NodeReport:
    """An agent's report, beyond what the decisions need.

    join_info: from when it joined.
    node_outcome: the states of its stopped workers, and how `generation` ended there; None: nothing
        yet.
    """

    join_info: Mapping[str, Any]
    node_outcome: NodeOutcome | None = None
    generation: int = 0


@dataclass(frozen=True)
class JoinRequest:
    """An agent's request to join.

    mark     random: tells apart the agents that have had this name
    places   how many workers its node has room for
    told     "address": where it listens; "peer": its mover, if it has one
    at       the newest generation that it has begun; 0: none
    stage    what its workers do there
    held     their states, sent in the stages HELD and DONE only
    ready    places with a process that works or could at once; None: unknown
    wait     seconds; always 0: a join is answered at once
    """

    name: str
    mark: str
    places: int
    told: Mapping[str, Any]
    at: int
    stage: NodeStage
    held: NodeOutcome | None = None
    ready: int | None = None
    wait: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mark": self.mark,
            "places": self.places,
            "told": dict(self.told),
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
            dict(value["told"]),
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
    still     workers without progress, as the hang monitor reports them; {}: none
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
    still: Mapping[str, Any] = field(default_factory=dict)
    paces: Sequence[Sequence[Any]] = ()
    wait: float = 0.0

    def to_json(self) -> dict[str, Any]:
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
            **({"still": self.still} if self.still else {}),
            **({"paces": self.paces} if self.paces else {}),
            "wait": self.wait,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Heartbeat:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        order, generation = value["doing"]
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
            dict(value.get("still", {})),
            value.get("paces", ()),
            float(value["wait"]),
        )


def _held_json(held: NodeOutcome | None) -> dict[str, Any]:
    return {} if held is None else held.to_json()


def _held(value: Mapping[str, Any]) -> NodeOutcome | None:
    return NodeOutcome.from_json(value["held"]) if value.get("held") else None


def _ready_workers(value: Mapping[str, Any]) -> int | None:
    """Return the ready places; None from an older agent, which does not send them."""
    return None if value.get("ready") is None else int(value["ready"])
