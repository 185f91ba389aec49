"""The request of `holdfast doctor` to an agent, and the answer: the node's state, memory, links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from holdfast.core.json_parsing import JsonMessage, Key

NODE_CHECK_PATH = "/check"
"""HTTP path of a check on the agent's control port."""

LISTENS = "listens"
"""Outcome of a link that works; the other outcomes are names of a `ProbeResult`, too."""


@dataclass(frozen=True)
class NodeCheck(JsonMessage):
    """The request. agents: the addresses that the agent is to connect to, by node."""

    agents: Mapping[str, str]


@dataclass(frozen=True)
class LinkResult(JsonMessage):
    """The way from one agent to another one.

    outcome: "listens", "refused", "silent" or "unknown". seconds: round trip of the quickest of a
    few connections; None without one.
    """

    outcome: str
    seconds: float | None = None


@dataclass(frozen=True)
class NodeMemory(JsonMessage):
    """Bytes of memory on a node.

    total, available: of the machine, or of the container if that has less. accelerators: of each
    device that the agent sees.
    """

    total: int
    available: int
    accelerators: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeCheckReply(JsonMessage):
    """The answer. state, step, committed_step: as `/healthz` has them. links: by node. spares:
    nodes that have joined and do not train, if the agent coordinates the run. health: address of
    `/healthz`."""

    absent_if_default = frozenset({"spares", "health"})
    state: str
    step: int
    committed_step: Annotated[int, Key("committed")]
    memory: NodeMemory
    links: Mapping[str, LinkResult]
    spares: tuple[str, ...] = ()
    health: str = ""
