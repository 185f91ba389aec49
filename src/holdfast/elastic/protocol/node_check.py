"""The request of `holdfast doctor` to an agent, and the answer: the node's state, memory, links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import JsonObject

NODE_CHECK_PATH = "/check"
"""HTTP path of a check on the agent's control port."""

LISTENS = "listens"
"""Outcome of a link that works; the other outcomes are names of a `ProbeResult`, too."""


@dataclass(frozen=True)
class NodeCheck:
    """The request. agents: the addresses that the agent is to connect to, by node."""

    agents: Mapping[str, str]

    def to_json(self) -> JsonObject:
        return {"agents": dict(self.agents)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NodeCheck:
        """Parse the request. Raises KeyError, TypeError and ValueError if it is malformed."""
        return NodeCheck({str(name): str(at) for name, at in dict(value["agents"]).items()})


@dataclass(frozen=True)
class LinkResult:
    """The way from one agent to another one.

    outcome: "listens", "refused", "silent" or "unknown". seconds: round trip of the quickest of a
    few connections; None without one.
    """

    outcome: str
    seconds: float | None = None

    def to_json(self) -> JsonObject:
        return {"outcome": self.outcome, "seconds": self.seconds}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LinkResult:
        """Parse a result. Raises KeyError, TypeError and ValueError if it is malformed."""
        seconds = value["seconds"]
        return LinkResult(str(value["outcome"]), None if seconds is None else float(seconds))


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of memory on a node.

    total, available: of the machine, or of the container if that has less. accelerators: of each
    device that the agent sees.
    """

    total: int
    available: int
    accelerators: tuple[int, ...] = ()

    def to_json(self) -> JsonObject:
        return {
            "total": self.total,
            "available": self.available,
            "accelerators": list(self.accelerators),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NodeMemory:
        """Parse the figures. Raises KeyError, TypeError and ValueError if they are malformed."""
        devices = tuple(map(int, value["accelerators"]))
        return NodeMemory(int(value["total"]), int(value["available"]), devices)


@dataclass(frozen=True)
class NodeCheckReply:
    """The answer. state, step, committed_step: as `/healthz` has them. links: by node."""

    state: str
    step: int
    committed_step: int
    memory: NodeMemory
    links: Mapping[str, LinkResult]

    def to_json(self) -> JsonObject:
        return {
            "state": self.state,
            "step": self.step,
            "committed": self.committed_step,
            "memory": self.memory.to_json(),
            "links": {name: link.to_json() for name, link in self.links.items()},
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NodeCheckReply:
        """Parse the answer. Raises KeyError, TypeError and ValueError if it is malformed."""
        return NodeCheckReply(
            str(value["state"]),
            int(value["step"]),
            int(value["committed"]),
            NodeMemory.from_json(value["memory"]),
            {str(n): LinkResult.from_json(link) for n, link in dict(value["links"]).items()},
        )
