"""What a mover is told about other machines: who they are, and its own place among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.policy.placement import Machine


@dataclass(frozen=True)
class Peer:
    """Another mover: where its listener is, and where its machine stands."""

    machine: Machine
    address: str  # "host:port"

    @property
    def name(self) -> str:
        return self.machine.name


@dataclass(frozen=True)
class PeerSettings:
    """`interface` and `port` are bound, `advertise` ("host:port" or "host", "" for what is bound)
    is told to others. Nothing is guessed from the host's name."""

    machine: Machine = field(default_factory=lambda: Machine("self"))
    peers: tuple[Peer, ...] = ()
    interface: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    every_steps: int = 1
    copies: int = 1
    stable: str | None = None
    bytes_per_second: float = 0.0  # 0: no bound
    room: int = 0  # bytes of memory for others
    mirror_seconds: float = 5.0
    """How long a part is waited for that is captured here as well; then it is pulled."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PeerSettings:
        peers = tuple(Peer(Machine(**p["machine"]), p["address"]) for p in value["peers"])
        return PeerSettings(**{**value, "machine": Machine(**value["machine"]), "peers": peers})

    def advertised(self, bound: str) -> str:
        """The address that others are told: `bound` is "host:port" of the socket."""
        host, _, port = bound.rpartition(":")
        named = self.advertise or host
        has_port = named.rpartition(":")[2].isdecimal() and not named.endswith("]")
        return named if has_port else f"{named}:{port}"
