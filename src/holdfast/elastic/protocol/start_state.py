"""The state that a generation's nodes begin from, sent with the order to start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.peers.config import Peer
from holdfast.core.json_parsing import JsonObject


@dataclass(frozen=True)
class StartState:
    """
    step            the step after which the state is; 0: initial weights
    restore_point   what the workers restore; None just where they hold the state themselves
    peers           the movers of the nodes that take part; None: one node alone, whose mover knows
                    by itself whom to ask and to send to
    extra_sources   movers of nodes that do not, but may have what is restored
    rendezvous      "host:port" where the generation's workers find each other
    """

    step: int = 0
    restore_point: RestorePoint | None = None
    peers: tuple[Peer, ...] | None = None
    extra_sources: tuple[Peer, ...] = ()
    rendezvous: str = ""

    def to_json(self) -> JsonObject:
        return self._json

    @cached_property
    def _json(self) -> JsonObject:
        """Return the JSON value. Made once: it is sent to every node, and names every node."""
        peers, newest = self.peers, self.restore_point
        return {
            "step": self.step,
            "newest": None if newest is None else newest.to_json(),
            "machines": None if peers is None else [peer.to_json() for peer in peers],
            "sources": [peer.to_json() for peer in self.extra_sources],
            "meet": self.rendezvous,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StartState:
        """Parse the message. Raises KeyError, TypeError and ValueError if it is malformed."""
        newest, machines = value.get("newest"), value["machines"]
        return StartState(
            int(value["step"]),
            None if newest is None else RestorePoint.from_json(newest),
            None if machines is None else tuple(Peer.from_json(row) for row in machines),
            tuple(Peer.from_json(row) for row in value["sources"]),
            str(value["meet"]),
        )
