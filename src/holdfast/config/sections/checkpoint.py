"""The section `checkpoint:` of a run file: when state is saved and how long it is kept."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.sections.base import Section
from holdfast.config.sections.peers import MachineConfig, PeerConfig, why_unreachable


class CheckpointConfig(Section):
    every_steps: int = Field(50, ge=0)
    """steps between saves; 0: only when leaving or at the end"""
    every_seconds: float = Field(0, ge=0, description="seconds between saves; 0: by steps only")
    interval: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the interval that loses the least time, from the measured cost of a save and past
    failures; every_steps and every_seconds are ignored"""
    min_seconds: float = Field(1.0, gt=0, description="adaptive: shortest interval")
    max_seconds: float = Field(1800, gt=0, description="adaptive: longest interval")
    node_mtbf_hours: float = Field(1.5, gt=0)
    """adaptive: hours between failures of a node, until one fails"""
    memory_every_steps: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """steps between snapshots that stay in memory; 0: only durable saves; auto: the interval that
    loses the least time"""
    hidden: bool = True
    """copy while the next step computes; false: training pauses for the copy"""
    keep_last: int = Field(3, ge=1, description="number of newest checkpoints to keep")
    keep_every: int = Field(0, ge=0)
    """also keep steps that this number divides; 0: none"""
    keep_best: int = Field(0, ge=0)
    """also keep so many checkpoints with the lowest validation loss, of steps that
    train.evaluate.every divides; 0: none"""
    folder_survives: bool = True
    """false: the run folder is on a node's own disk and is lost with it; a notice then saves to
    peers or into the bucket"""
    bucket: str = ""
    """bucket for copies of checkpoints: s3://bucket/prefix; empty: none"""
    bucket_every_seconds: Annotated[float, Field(ge=0)] | Literal["auto"] = 0
    """least seconds between copies into the bucket; 0: as many as its bandwidth allows; auto: the
    interval that loses the least time"""
    bucket_keep_last: int = Field(3, ge=1, description="number of newest checkpoints to keep in it")
    bucket_wait_seconds: float = Field(180, ge=0)
    """at its end the run waits for uploads to the bucket; it gives up if no byte moves for this
    long"""
    fallback: str = ""
    """folder or bucket that takes the last step's state if the run folder takes no checkpoint;
    empty: none"""
    seal: str = ""
    """file of the key that encrypts the checkpoints in the run folder, or env for
    HOLDFAST_SEAL_KEY; empty: not encrypted"""
    slots: Annotated[int, Field(ge=2, le=3)] | Literal["auto"] = "auto"
    """snapshots that fit into memory; auto: 3 if memory_every_steps is not 0 (one may be written to
    disk meanwhile), 2 otherwise"""
    extent_mb: int = Field(16, ge=1, description="bytes under one checksum, in MiB")
    machine: MachineConfig = MachineConfig()
    peers: tuple[PeerConfig, ...] = ()
    """machines whose memory holds copies of the snapshots; empty: no listener"""
    peer_every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """steps between snapshots that are copied to peers; auto: the interval that loses the least
    time"""
    peer_copies: int = Field(1, ge=1, description="number of peers that hold each snapshot")
    peer_mbps: float = Field(0, ge=0)
    """megabits a second that copies may use; 0: no limit"""
    peer_memory_gb: float = Field(0, ge=0, description="memory for snapshots of other machines")
    peer_interface: str = "auto"
    """address to listen on for peers; auto: that of cluster.interface, or this machine's address on
    the route to the first peer"""
    peer_port: int = Field(0, ge=0, le=65535, description="0: any free port")
    peer_advertise: str = ""
    """host or host:port that peers connect to; empty: the listening address"""

    @property
    def most_slots(self) -> int:
        """The number of slots that `auto` stands for if memory suffices."""
        return self.slots if self.slots != "auto" else 3 if self.memory_every_steps else 2

    @property
    def peer_host(self) -> str:
        """The address to listen on for peers; loopback if no address was planned for this node."""
        return "127.0.0.1" if self.peer_interface == "auto" else self.peer_interface

    @property
    def by_steps(self) -> int:
        """The fixed interval in steps; 0 if the interval is adaptive."""
        return self.every_steps if self.interval == "fixed" else 0

    def broken_rules(self) -> Iterator[str]:
        for key in ("bucket", "fallback") if self.seal else ():
            place = str(getattr(self, key))
            if place and not re.search("[?&]seal=", place):
                folder = place if os.path.isabs(place) else "/FOLDER"
                address = place if "://" in place else f"file://{folder}"
                yield (
                    f"seal encrypts the checkpoints, and those in {key} would not be: use {key}: "
                    f"{address}{'&' if '?' in address else '?'}seal={self.seal}"
                )
        if self.interval == "adaptive" and self.min_seconds > self.max_seconds:
            yield (
                f"min_seconds {self.min_seconds:g} is more than max_seconds "
                f"{self.max_seconds:g}; use {self.max_seconds:g} or less"
            )
        names = [peer.name for peer in self.peers]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            yield f"two peers are called {twice}: give each a name of its own"
        stable = [peer.name for peer in self.peers if peer.stable]
        if len(stable) > 1:
            yield (
                f"{' and '.join(stable)} are both stable: say so of one, and use peer_copies: "
                f"{len(stable)} for a copy on each"
            )
        others = [peer for peer in self.peers if peer.name != self.machine.name]
        yield why_unreachable(others, self.peer_interface, self.peer_advertise) or ""
