"""What a node's mover is told about the memory of other machines, out of the run file."""

from __future__ import annotations

from holdfast.checkpoint.peer_settings import Peer, PeerSettings
from holdfast.config.checkpoint import CheckpointConfig
from holdfast.config.peers import MachineConfig
from holdfast.policy.placement import DOMAINS, Machine

GB = 1_000_000_000
BITS = 8


def peer_settings(config: CheckpointConfig) -> PeerSettings | None:
    """None where the run file names no peers and keeps nothing for others: then nobody listens.

    All machines of a run may share one run file: this machine is no peer of its own.
    """
    others = [peer for peer in config.peers if peer.name != config.machine.name]
    if not others and not config.peer_memory_gb:
        return None
    return PeerSettings(
        machine=_machine(config.machine),
        peers=tuple(
            Peer(_machine(p, int(p.memory_gb * GB) or None), p.address) for p in others
        ),
        interface=config.peer_interface,
        port=config.peer_port,
        advertise=config.peer_advertise,
        every_steps=1 if config.peer_every_steps == "auto" else config.peer_every_steps,
        copies=config.peer_copies,
        stable=next((p.name for p in others if p.stable), None),
        bytes_per_second=config.peer_mbps * 1e6 / BITS,
        room=int(config.peer_memory_gb * GB),
    )  # fmt: skip


def _machine(section: MachineConfig, room: int | None = None) -> Machine:
    return Machine(section.name, room=room, **{kind: getattr(section, kind) for kind in DOMAINS})
