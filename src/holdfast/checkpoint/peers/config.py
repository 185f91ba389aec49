"""A mover's configuration of other machines: their names, and its own place among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.checkpoint.peers.client import split_address
from holdfast.core.json_parsing import JsonMessage, JsonObject, ParsedJson
from holdfast.policy.placement import Machine


@dataclass(frozen=True)
class Peer:
    """Another mover: the address of its listener, and the place of its machine."""

    machine: Machine
    address: str  # "host:port"

    @property
    def name(self) -> str:
        return self.machine.name

    def to_json(self) -> JsonObject:
        return self.machine.to_json() | {"address": self.address}

    @staticmethod
    def from_json(value: ParsedJson) -> Peer:
        """Raises KeyError, TypeError and ValueError for what is no machine."""
        split_address(str(value["address"]))
        return Peer(Machine.from_json(value), str(value["address"]))


@dataclass(frozen=True)
class Cohort:
    """The movers of one generation, as this one sees them. `peers`: the other movers that take
    part. `sources`: more that may hold what the generation begins from. `leader_peer`: the mover
    that commits (`commit_protocol.py`), None for this one. `previous_placement`: the placement of
    copies that was in force, so that later members plan the same."""

    own_node: str
    peers: tuple[Peer, ...] = ()
    sources: tuple[Peer, ...] = ()
    leader_peer: Peer | None = None
    previous_placement: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def build(
        own_node: str,
        nodes: Sequence[str],
        machines: Iterable[Peer],
        sources: Iterable[Peer] = (),
        previous_placement: Mapping[str, Sequence[str]] | None = None,
    ) -> Cohort:
        """`nodes`: the node of each rank, as in a Topology: the first rank's mover leads.

        Raises ValueError where that one is not among the machines.
        """
        known = {peer.name: peer for peer in machines}
        if nodes[0] != own_node and nodes[0] not in known:
            raise ValueError(f"{nodes[0]}, which has the first rank, is not among the machines")
        return Cohort(
            own_node,
            tuple(peer for peer in known.values() if peer.name != own_node),
            tuple(peer for peer in sources if peer.name != own_node and peer.name not in known),
            None if nodes[0] == own_node else known[nodes[0]],
            {owner: tuple(held) for owner, held in (previous_placement or {}).items()},
        )

    def own_ranks(self, nodes: Sequence[str]) -> frozenset[int]:
        """Those of this node."""
        return frozenset(rank for rank, node in enumerate(nodes) if node == self.own_node)


@dataclass(frozen=True)
class PeerSettings(JsonMessage):
    """`interface` and `port` are bound. `advertise` ("host:port" or "host", "" for what is bound)
    is the address that other machines use. Nothing is guessed from the host's name."""

    machine: Machine = field(default_factory=lambda: Machine("self"))
    peers: tuple[Peer, ...] = ()
    interface: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    every_steps: int = 1
    copies: int = 1
    stable: str | None = None
    bytes_per_second: float = 0.0  # 0: no bound
    room: int = 0  # bytes of memory for other machines' copies

    def advertised_address(self, bound_address: str) -> str:
        """Return the address that other machines use: `bound_address` is "host:port" of the
        socket."""
        host, _, port = bound_address.rpartition(":")
        named = self.advertise or host
        has_port = named.rpartition(":")[2].isdecimal() and not named.endswith("]")
        return named if has_port else f"{named}:{port}"
