"""`checkpoint:` when state is saved and how long it is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from holdfast.config.base import Section
from holdfast.config.peers import MachineConfig, PeerConfig, unreachable


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0, description="0: only when leaving and at the end")
    every_seconds: float = Field(0, ge=0, description="0: by steps only")
    interval: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="adaptive: as often as loses least time, by the measured cost of a save and "
        "the failures seen; every_steps and every_seconds are not used then",
    )
    min_seconds: float = Field(1.0, gt=0, description="adaptive: no more often")
    max_seconds: float = Field(1800, gt=0, description="adaptive: no less often")
    node_mtbf_hours: float = Field(
        1.5, gt=0, description="adaptive: expected hours between failures of one node, before any"
    )
    memory_every_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="snapshots that stay in memory; 0: only what is saved durably; auto: as often "
        "as loses least time",
    )
    hidden: bool = Field(
        True, description="copy while the next step computes; false: training waits for the copy"
    )
    keep_last: int = Field(3, ge=1, description="newest checkpoints that are kept")
    keep_every: int = Field(0, ge=0, description="also keep each step that this divides; 0: none")
    folder_survives: bool = Field(
        True,
        description="false: the run folder lies on a node's own disk, and is lost with the node; a "
        "notice then saves to peers or into the bucket",
    )
    bucket: str = Field(
        "", description="address of a bucket that gets every checkpoint too: s3://bucket/prefix"
    )
    bucket_every_seconds: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="checkpoints in between stay out of the bucket; 0: it gets all that it can "
        "take; auto: as often as loses least time",
    )
    bucket_keep_last: int = Field(3, ge=1, description="newest checkpoints kept in the bucket")
    bucket_wait_seconds: float = Field(
        180,
        ge=0,
        description="at its end the run waits for the bucket while bytes move; so long "
        "where none does",
    )
    slots: Annotated[int, Field(ge=2, le=3)] | Literal["auto"] = Field(
        "auto",
        description="snapshots that fit into memory; auto: 3 where memory gets snapshots that the "
        "disk does not, one of which may be written meanwhile, else 2",
    )
    extent_mb: int = Field(16, ge=1, description="bytes under one checksum, in MiB")
    machine: MachineConfig = MachineConfig()
    peers: tuple[PeerConfig, ...] = Field(
        (), description="machines whose memory holds copies of the snapshots; none: no listener"
    )
    peer_every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1,
        description="of the snapshots in memory, those of such steps are copied to peers; auto: as "
        "often as loses least time",
    )
    peer_copies: int = Field(1, ge=1, description="peers that hold each snapshot")
    peer_mbps: float = Field(
        0, ge=0, description="megabits a second that copies may take; 0: no bound"
    )
    peer_memory_gb: float = Field(0, ge=0, description="memory for the snapshots of others")
    peer_interface: str = Field("127.0.0.1", description="address that peers are listened to on")
    peer_port: int = Field(0, ge=0, le=65535, description="0: any free one")
    peer_advertise: str = Field(
        "", description="host or host:port that peers are told; left out: what is listened on"
    )

    @property
    def most_slots(self) -> int:
        """What `auto` stands for, where there is room."""
        return self.slots if self.slots != "auto" else 3 if self.memory_every_steps else 2

    @property
    def by_steps(self) -> int:
        """The rule by steps; an adaptive interval replaces it."""
        return self.every_steps if self.interval == "fixed" else 0

    @model_validator(mode="after")
    def _bounds(self) -> CheckpointConfig:
        if self.min_seconds > self.max_seconds:
            raise ValueError(
                f"min_seconds {self.min_seconds:g} is more than max_seconds "
                f"{self.max_seconds:g}; use {self.max_seconds:g} or less"
            )
        return self

    @model_validator(mode="after")
    def _peers_are_told_apart(self) -> CheckpointConfig:
        names = [peer.name for peer in self.peers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two peers are called {twice}: give each a name of its own")
        stable = [peer.name for peer in self.peers if peer.stable]
        if len(stable) > 1:
            raise ValueError(
                f"{' and '.join(stable)} are both stable: say so of one, and use peer_copies: "
                f"{len(stable)} for a copy on each"
            )
        others = [peer for peer in self.peers if peer.name != self.machine.name]
        refused = unreachable(others, self.peer_interface, self.peer_advertise)
        if refused is not None:
            raise ValueError(refused)
        return self
