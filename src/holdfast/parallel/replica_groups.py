"""Communication groups inside a replica, which outlive the loss of every other replica.

The default torch world of a process *is* its replica, with a DeviceMesh over those of (pp,
dp_shard, cp, tp) that are cut. `line` joins the stages of a pipeline. `meeting` joins all ranks of
the replica, so that they can agree on events outside it. They compute in lockstep. If one rank
stopped alone, the remaining ranks would wait for ever.

A new generation may keep all of this: names carry the generation in which it was made, which need
not be the present one. This file alone feeds torch's registry, and tears it down.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.errors import PeerLostError
from holdfast.layout import AXES, Coordinate, Replica
from holdfast.parallel.comm.comm_stats import Traffic
from holdfast.parallel.comm.transport import Peers, hang_up
from holdfast.parallel.torch_compat import (
    PrefixStore,
    Store,
    count_groups_anew,
    forget_meshes,
)


@dataclass
class Inside:
    """The groups inside one replica, as one of its ranks sees them.

    line: the stages of my pipeline, numbered by stage; None without a pipeline. mesh: the cut axes
    of the replica, registered with torch; None where it is one rank. meeting: all its ranks,
    numbered by mesh rank; None until there is more than one replica. broken: a rank has given it
    up, so no rank may communicate in it any more. store: kept for as long as torch may use it.
    """

    generation: int
    line: Peers | None
    mesh: DeviceMesh | None
    meeting: Peers | None
    store: Store
    broken: bool = False

    def axis(self, name: str) -> dist.ProcessGroup:
        """torch's group along one cut axis of the mesh."""
        assert self.mesh is not None
        return self.mesh.get_group(axis_name(name, self.generation))

    def shard_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of `dp_shard`, for FSDP2."""
        assert self.mesh is not None
        return self.mesh[axis_name("dp_shard", self.generation)]

    def abort(self) -> None:
        """Wake all threads that wait inside the replica, also in torch's own groups (such as a
        sharded layer's gather)."""
        self.broken = True
        for peers in self.peers():
            peers.abort()
        for group in self._registered():
            hang_up(group, [peer for peer in range(group.size()) if peer != group.rank()])

    def close(self) -> None:
        """Nothing stays in torch's registry."""
        for peers in self.peers():
            peers.close()
        if self.mesh is not None:
            self.mesh = None
            dist.destroy_process_group()
            forget_meshes()

    def peers(self) -> list[Peers]:
        """Return the bare groups. If a replica is one pipeline, its `line` is its `meeting` too."""
        known = [peers for peers in (self.line, self.meeting) if peers is not None]
        return list({id(peers): peers for peers in known}.values())

    def _registered(self) -> list[dist.ProcessGroup]:
        if self.mesh is None or self.mesh.device_type != "cpu":
            return []
        return [self.mesh.get_group(name) for name in self.mesh.mesh_dim_names or ()]


@dataclass(frozen=True)
class Joining:
    """The means by which a rank joins its groups. seconds: bounds every wait."""

    store: Store
    interface: str
    seconds: float
    traffic: Traffic | None

    def peers(self, name: str, rank: int, size: int) -> Peers:
        """A bare group; collective. Raises PeerLostError."""
        return Peers(
            self.store, name, rank, size, interface=self.interface, seconds=self.seconds,
            traffic=self.traffic,
        )  # fmt: skip


def join_inside(
    joining: Joining, generation: int, replica: Replica, at: Coordinate, device: torch.device,
    *, alone: bool,
) -> Inside:  # fmt: skip
    """Make the groups of a replica; collective over it. alone: it is the only one.

    Raises PeerLostError when one of its ranks does not come.
    """
    inside = Inside(generation, None, None, None, joining.store)
    if replica.mesh_shape[0] > 1:
        name = f"generation{generation}/line{replica.index}.{at.dp_shard}.{at.cp}.{at.tp}"
        inside.line = joining.peers(name, at.pp, replica.mesh_shape[0])
    if not alone:
        join_meeting(inside, joining, generation, replica, at)
    if len(replica.ranks) > 1:
        inside.mesh = _register(joining, generation, replica, at, device)
    return inside


def join_meeting(
    inside: Inside, joining: Joining, generation: int, replica: Replica, at: Coordinate
) -> None:
    """Create the group in which a replica's ranks agree, if there is none; collective over it."""
    if inside.meeting is not None or len(replica.ranks) == 1:
        return
    if inside.line is not None and inside.line.size == len(replica.ranks):
        inside.meeting = inside.line
        return
    name = f"generation{generation}/meeting{replica.index}"
    inside.meeting = joining.peers(name, at.mesh_rank, len(replica.ranks))


def _register(
    joining: Joining, generation: int, replica: Replica, at: Coordinate, device: torch.device
) -> DeviceMesh:
    """Make this replica torch's default world. Its mesh axes carry the generation, because
    DTensor's caches would take two meshes with equal names for one."""
    os.environ["GLOO_SOCKET_IFNAME"] = joining.interface  # the only way to tell torch
    name = f"generation{generation}/replica{replica.index}"
    cut = [(axis, n) for axis, n in zip(AXES, replica.mesh_shape, strict=True) if n > 1]
    try:
        dist.init_process_group(
            "gloo", store=PrefixStore(name, joining.store), rank=at.mesh_rank,
            world_size=len(replica.ranks), timeout=timedelta(seconds=joining.seconds),
        )  # fmt: skip
        return init_device_mesh(
            device.type, tuple(n for _, n in cut),
            mesh_dim_names=tuple(axis_name(axis, generation) for axis, _ in cut),
        )  # fmt: skip
    except BaseException as error:  # a store that was interrupted raises an error of its own
        if dist.is_initialized():
            dist.destroy_process_group()
        count_groups_anew()
        if not isinstance(error, RuntimeError):
            raise
        raise PeerLostError(f"replica {replica.index} did not come together: {error}") from error


def axis_name(axis: str, generation: int) -> str:
    """The name of a mesh axis."""
    return f"{axis}_generation{generation}"
