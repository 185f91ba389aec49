"""The request of `holdfast notice` to the coordinator's agent, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from holdfast.core.json_parsing import JsonMessage, JsonObject, Key

NOTICE_PATH = "/notice"
"""HTTP path of a notice on the agent's control port."""


@dataclass(frozen=True)
class Notice:
    """A notice. seconds: time until the nodes end. must_leave: the run must end by then. source:
    does not travel, as each sender is a source of its own."""

    seconds: float
    nodes: tuple[str, ...] = ()
    must_leave: bool = False
    source: str = "notice"

    def to_json(self) -> JsonObject:
        return {"seconds": self.seconds, "nodes": list(self.nodes), "leave": self.must_leave}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Notice:
        """Parse a notice. Raises ValueError, KeyError and TypeError if it is malformed."""
        seconds, nodes = float(value["seconds"]), tuple(map(str, value.get("nodes", ())))
        if not 0 < seconds < 1e6:
            raise ValueError(f"a notice of {seconds:g} seconds makes no sense")
        return Notice(seconds, nodes, bool(value.get("leave", False)))


@dataclass(frozen=True)
class EmergencyReply(JsonMessage):
    """What the run does about a notice.

    tiers: where the state is saved. moves: the nodes that the run continues without; None if it
    does not. reason: a sentence.
    """

    absent_if_default = frozenset({"moves"})
    tiers: tuple[int, ...]
    reason: str
    moves: tuple[str, ...] | None = None


@dataclass(frozen=True)
class UnknownNodeReply(JsonMessage):
    """The refusal of a notice about a node that is not there. nodes: all that are."""

    reason: Annotated[str, Key("refused")]
    nodes: tuple[str, ...]


def notice_reply_from_json(value: Mapping[str, Any]) -> EmergencyReply | UnknownNodeReply:
    """Parse an answer. Raises KeyError, TypeError and ValueError if it is malformed."""
    reply = UnknownNodeReply if "refused" in value else EmergencyReply
    return reply.from_json(value)
