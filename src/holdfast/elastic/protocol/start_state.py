"""The state that a generation's nodes begin from, sent with the order to start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.peers.config import Peer
from holdfast.core.json_parsing import JsonMessage, JsonObject, Key


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
