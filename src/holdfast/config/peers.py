"""`checkpoint.peers` and `checkpoint.machine`: other machines' memory, and what fails together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field, field_validator

from holdfast.config.base import Section

ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):([0-9]{1,5})")
"""host:port, the host in brackets for IPv6."""
EVERYWHERE = ("0.0.0.0", "::", "[::]")
"""Addresses that stand for all of a machine: fit to be listened on, and not to be told."""


class MachineConfig(Section):
    """Where a machine stands: what it shares with others fails together with them. What is left
    out is unknown, and counts as shared with nobody."""

    name: str = Field(
        "self", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="in events, metrics and logs"
    )
    node: str = Field("", description="the host, where several movers share one; else the name")
    rack: str = Field("", description="the rack it stands in")
    power: str = Field("", description="the power domain it hangs on")
    pool: str = Field("", description="the spot pool it comes from")
    zone: str = Field("", description="the zone it stands in")


class PeerConfig(MachineConfig):
    """A machine that keeps this one's snapshots in its memory: another trainer of the same run,
    or one that runs `holdfast stage`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="in events, metrics and logs"
    )
    address: str = Field(description="host:port that it listens on")
    stable: bool = Field(False, description="one that stays: it gets the first copy of everybody")
    memory_gb: float = Field(0, ge=0, description="what it keeps for others at most; 0: as it says")

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        found = ADDRESS.fullmatch(value)
        if found is None or not 0 < int(found[2]) < 65536:
            raise ValueError(f"{value} is not an address: use host:port, such as 10.0.0.7:7600")
        return value


def unreachable(peers: Sequence[PeerConfig], interface: str, advertise: str) -> str | None:
    """Why a peer could not read from this machine, as a sentence with a remedy; None if it can."""
    told = advertise or interface
    if peers and told in EVERYWHERE:
        return (
            f"peers cannot be told to read from {told}: name an address of this machine in "
            "peer_advertise, such as 10.0.0.5"
        )
    away = [peer for peer in peers if not _loopback(peer.address.rpartition(":")[0])]
    if away and _loopback(told.rpartition(":")[0] if told.count(":") == 1 else told):
        return (
            f"{away[0].name} at {away[0].address} cannot read from {told}: name an address of this "
            "machine in peer_interface, such as 10.0.0.5"
        )
    return None


def _loopback(host: str) -> bool:
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")
