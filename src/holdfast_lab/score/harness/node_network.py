"""Nodes of a scored run in network namespaces of their own, for scenarios that change a link.

The network has two regions (`holdfast_lab.chaos.network`). A scenario's `net` events name the nodes
of the first one, as in "n1->rest". All other nodes, and helpers such as a store or a lighthouse,
are in the second one. The harness reads files and writes to pipes, so it needs no network.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from holdfast_lab.chaos.network import DEVICE, Network
from holdfast_lab.chaos.relay import LinkShape
from holdfast_lab.score.scenarios import ScenarioRun
from holdfast_lab.traces.events import TraceEvent

_HELPERS = "helpers"


def needs_network(run: ScenarioRun) -> bool:
    """Whether a scenario changes a link."""
    return any(event.kind == "net" for event in run.events)


class NodeNetwork:
    """The namespaces of one run's nodes. Raises UserError if this machine cannot make them."""

    def __init__(self, run: ScenarioRun) -> None:
        nodes = list(dict.fromkeys(e.node for e in run.events if e.kind == "join"))
        far = dict.fromkeys(e.node.partition("->")[0] for e in run.events if e.kind == "net")
        self._network = Network()
        try:
            self._network.up([_HELPERS, *nodes])
            self._link = self._network.split(list(far))
        except BaseException:
            self._network.down()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._network.down()

    def command(self, node: str = _HELPERS) -> list[str]:
        """What to put before a command so that it runs on a node, or where the helpers run."""
        return self._network.command(node)

    def address(self, node: str = _HELPERS) -> str:
        return self._network.address(node)

    def settings(self, node: str) -> list[str]:
        """Of a run file of Holdfast, for a node."""
        return self._network.settings(node)

    def environment(self) -> dict[str, str]:
        """For all processes of the run."""
        return {"GLOO_SOCKET_IFNAME": DEVICE}

    def degrade(self, event: TraceEvent) -> None:
        """Give the line between the regions the shape of a `net` event. A direction is late by half
        of the round trip."""
        self._link.shape(LinkShape(float(event.extra["rtt_ms"]) / 2000, 0.0, event.value))
