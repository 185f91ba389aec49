"""`checkpoint.peers` and `checkpoint.machine`: other machines' memory, and what fails together."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from holdfast.config.base import Section

ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):([0-9]{1,5})")
"""host:port, the host in brackets for IPv6."""


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
