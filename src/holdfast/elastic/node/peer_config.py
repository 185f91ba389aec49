"""The mover's peer settings, out of the run file: the memory of other machines."""

from __future__ import annotations

from dataclasses import replace

from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.sections.peers import MachineConfig
from holdfast.machine.limits import available_memory
from holdfast.policy.placement import FAILURE_DOMAINS, Machine

GB = 1_000_000_000
BITS_PER_BYTE = 8


def make_peer_settings(
    config: CheckpointConfig, node: str = "", port: int = 0
) -> PeerSettings | None:
    """Return the peer settings; None if the run file names no peers and keeps no copies for them.

    All machines of a run may share one run file: this machine is no peer of its own.

    Args:
        node: this node's name in the topology, if the run may have several nodes. Its mover then
            always listens and keeps copies for the other nodes. If the run file sets no size for
            them, they get half of the free memory. The own ranks' arenas need some, too.
        port: the port that it had before, if the run file sets none.
    """
    others = [peer for peer in config.peers if peer.name not in (node, config.machine.name)]
    if not others and not config.peer_memory_gb and not node:
        return None
    own = _to_machine(config.machine)
    return PeerSettings(
        machine=replace(own, name=node, node=own.node or node) if node else own,
        peers=tuple(Peer(_to_machine(p, int(p.memory_gb * GB) or None), p.address) for p in others),
        interface=config.peer_host,
        port=config.peer_port or port,
        advertise=config.peer_advertise,
        every_steps=1 if config.peer_every_steps == "auto" else config.peer_every_steps,
        copies=config.peer_copies,
        stable=next((p.name for p in others if p.stable), None),
        bytes_per_second=config.peer_mbps * 1e6 / BITS_PER_BYTE,
        room=int(config.peer_memory_gb * GB) or (available_memory() // 2 if node else 0),
    )


def _to_machine(section: MachineConfig, room: int | None = None) -> Machine:
    return Machine(
        section.name, room=room, **{kind: getattr(section, kind) for kind in FAILURE_DOMAINS}
    )
