"""`checkpoint.peers` and `checkpoint.machine`: memory of other machines, and failure domains."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field, field_validator

from holdfast.config.sections.base import Section

ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):([0-9]{1,5})")
"""host:port, the host in brackets for IPv6."""
WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")
"""Wildcard addresses: valid to listen on, invalid as the address that peers connect to."""


class MachineConfig(Section):
    """Failure domains of a machine. Machines that share a domain may fail together. A domain that
    is left out is unknown, and counts as shared with no other machine."""

    name: str = Field("self", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """in events, metrics and logs"""
    node: str = Field("", description="the host if several movers share it; empty: the name")
    rack: str = Field("", description="its rack")
    power: str = Field("", description="its power domain")
    pool: str = Field("", description="its spot pool")
    zone: str = Field("", description="its zone")


class PeerConfig(MachineConfig):
    """A machine that keeps this one's snapshots in its memory: another trainer of the same run,
    or one that runs `holdfast stage`."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """in events, metrics and logs"""
    address: str = Field(description="host:port that it listens on")
    stable: bool = Field(False, description="not preemptible: gets the first copy of each machine")
    memory_gb: float = Field(0, ge=0, description="most that it keeps; 0: the peer's own limit")

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        found = ADDRESS.fullmatch(value)
        if found is None or not 0 < int(found[2]) < 65536:
            raise ValueError(f"{value} is not an address: use host:port, such as 10.0.0.7:7600")
        return value


def why_unreachable(peers: Sequence[PeerConfig], interface: str, advertise: str) -> str | None:
    """Return why a peer cannot read from this machine, with a remedy; None if it can."""
    told = advertise or interface
    if peers and told in WILDCARD_HOSTS:
        return (
            f"peers cannot be told to read from {told}: name an address of this machine in "
            "peer_advertise, such as 10.0.0.5"
        )
    away = [peer for peer in peers if not is_loopback(peer.address.rpartition(":")[0])]
    if away and is_loopback(told.rpartition(":")[0] if told.count(":") == 1 else told):
        return (
            f"{away[0].name} at {away[0].address} cannot read from {told}: name an address of this "
            "machine in peer_interface, such as 10.0.0.5"
        )
    return None


def is_loopback(host: str) -> bool:
    """Return True for an address that only processes of the same machine reach."""
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")
