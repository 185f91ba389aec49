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
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.core.devices import DeviceKind, device_kind
from holdfast.errors import DeviceStuckError, PeerLostError
from holdfast.layout import AXES, Coordinate, Replica
from holdfast.parallel.axes.expert_groups import ExpertGroups, join_expert_groups
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.device_group import (
    Abort,
    DeviceGroup,
    PipelinePipes,
    open_group,
    wait_for_aborts,
)
from holdfast.parallel.comm.staged_group import register_staged_gloo
from holdfast.parallel.comm.trace import SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup, close_connections
from holdfast.parallel.gradients.cell_team import ExchangeKind
from holdfast.parallel.torch_compat import (
    PrefixStore,
    Store,
    forget_meshes,
    forget_registered_groups,
    registered_groups,
    reset_group_count,
)


@dataclass
class ReplicaGroups:
    """The groups inside one replica, as one of its ranks sees them.

    pipeline: the stages of my pipeline, numbered by stage; None without a pipeline. mesh: the cut
    axes of the replica, registered with torch; None where it is one rank. lockstep: all its ranks,
    numbered by mesh rank; None until there is more than one replica. pipes: on a device whose
    backend has no tags, what travels between neighbouring stages instead of over `pipeline`.
    experts: those over which experts are spread, if they are.
    is_aborted: a rank has given it up, so no rank may communicate in it any more. store: kept for
    as long as torch may use it. kind: of the device.
    """

    generation: int
    pipeline: PeerGroup | None
    mesh: DeviceMesh | None
    lockstep: PeerGroup | None
    store: Store
    kind: DeviceKind
    pipes: PipelinePipes | None = None
    experts: ExpertGroups | None = None
    is_aborted: bool = False
    _aborts: list[Abort] = field(default_factory=list)

    def axis(self, name: str) -> dist.ProcessGroup:
        """torch's group along one cut axis of the mesh, or the ranks with unlike experts: "ep"."""
        if name == "ep":
            assert self.experts is not None
            return self.experts.unlike
        assert self.mesh is not None
        return self.mesh.get_group(axis_name(name, self.generation))

    def shard_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of `dp_shard`, for FSDP2."""
        assert self.mesh is not None
        return self.mesh[axis_name("dp_shard", self.generation)]

    def expert_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of the ranks with the same experts, for FSDP2."""
        assert self.experts is not None
        assert self.experts.alike is not None
        return self.experts.alike

    def abort(self) -> None:
        """Wake all threads that wait inside the replica, also in torch's own groups (such as a
        sharded layer's gather)."""
        self.is_aborted = True
        self._abort_device_groups()  # first: each has a thread that does not wait
        for peers in self.bare_groups():
            peers.abort()
        for group in self.torch_groups() if self.kind.inside_has_tags else ():
            close_connections(group, [peer for peer in range(group.size()) if peer != group.rank()])

    def _abort_device_groups(self) -> None:
        """Begin to abort the groups of a backend that waits for lost peers, all at a time."""
        if self.pipes is not None:
            self.pipes.abort()
        has_groups = self.mesh is not None and not self.kind.inside_has_tags
        if has_groups and self.kind.can_abort and not self._aborts:
            self._aborts = [Abort(group) for group in registered_groups()]

    def close(self) -> None:
        """Nothing stays in torch's registry.

        Raises DeviceStuckError if the groups do not end, or were given up and cannot be."""
        if self.is_aborted and self.mesh is not None and not self.kind.can_abort:
            raise DeviceStuckError(
                f"groups of {self.kind.inside} cannot be given up: another process takes the place"
            )
        for peers in self.bare_groups():
            peers.close()
        if self.kind.inside_has_tags or not self.kind.can_abort:
            if self.mesh is not None:
                dist.destroy_process_group()
        else:
            self._abort_device_groups()
            wait_for_aborts([*self._aborts, *(self.pipes.aborts if self.pipes else ())])
            if self.mesh is not None:
                forget_registered_groups()
        if self.mesh is not None:
            self.mesh = self.experts = None
            forget_meshes()

    def bare_groups(self) -> list[PeerGroup]:
        """Return the bare groups. If a replica is one pipeline, its `pipeline` is its `lockstep`
        too."""
        known = [peers for peers in (self.pipeline, self.lockstep) if peers is not None]
        return list({id(peers): peers for peers in known}.values())

    def torch_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of torch's registry through which this rank communicates."""
        mesh = self.mesh
        axes = [] if mesh is None else [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
        return [*axes, *(self.experts.used_groups if self.experts is not None else ())]


@dataclass(frozen=True)
class ConnectSettings:
    """The means by which a rank joins its groups."""

    store: Store
    device: torch.device  # of the tensors that travel
    seconds: float = 1800.0  # bounds every wait
    interface: str = "lo"
    traffic: TrafficCounter | None = None
    recorder: SpanRecorder | None = None
    exchange: ExchangeKind = "direct"  # how gradients travel between replicas
    ep: int = 1  # `layout.ep`
    is_staged: bool = False  # all exchanges go over gloo, through the host's memory

    @property
    def kind(self) -> DeviceKind:
        kind = device_kind(self.device.type)
        return kind.staged(kind.ranks_per_device) if self.is_staged else kind

    def is_given_up(self) -> bool:
        """Return True if this rank is not to wait for other ranks any more."""
        return bool(getattr(self.store, "is_aborted", False))

    def connect_device(self, backend: str, name: str, rank: int, size: int) -> DeviceGroup:
        """A group of the device's backend; collective. The ranks have just met in another group.
        Raises PeerLostError."""
        made = DeviceGroup(
            backend,
            self.store,
            name,
            rank,
            size,
            self.device,
            seconds=self.seconds,
            traffic=self.traffic,
        )
        made.open(self.is_given_up)
        return made

    def connect_peers(self, name: str, rank: int, size: int) -> PeerGroup:
        """A bare group; collective. Raises PeerLostError."""
        return PeerGroup(
            self.store,
            name,
            rank,
            size,
            interface=self.interface,
            seconds=self.seconds,
            traffic=self.traffic,
            staged_type=self.device.type if self.is_staged or not self.kind.is_host else "",
        )


def join_replica_groups(
    settings: ConnectSettings,
    generation: int,
    replica: Replica,
    at: Coordinate,
    *,
    is_only_replica: bool,
) -> ReplicaGroups:
    """Make the groups of a replica; collective over it. is_only_replica: it is the only one.

    Raises PeerLostError when one of its ranks does not come.
    """
    inside = ReplicaGroups(generation, None, None, None, settings.store, settings.kind)
    if replica.mesh_shape[0] > 1:
        name = f"generation{generation}/line{replica.index}.{at.dp_shard}.{at.cp}.{at.tp}"
        inside.pipeline = settings.connect_peers(name, at.pp, replica.mesh_shape[0])
    if not is_only_replica:
        join_lockstep(inside, settings, generation, replica, at)
    try:
        if replica.mesh_shape[0] > 1 and not settings.kind.inside_has_tags:
            # The groups between my rank and its neighbours. Every rank opens its own in
            # the order of the replica's, so no cycle of waits arises.
            line = f"generation{generation}/pipes{replica.index}.{at.dp_shard}.{at.cp}.{at.tp}"
            groups: dict[tuple[int, bool], DeviceGroup] = {}
            for one, other in replica.neighbours:
                if at.pp not in (one, other):
                    continue
                for giver, taker in ((one, other), (other, one)):
                    gives = at.pp == giver
                    groups[taker if gives else giver, gives] = settings.connect_device(
                        settings.kind.inside, f"{line}/{giver}.{taker}", int(not gives), 2
                    )
            inside.pipes = PipelinePipes(groups)
        if len(replica.ranks) > 1:
            inside.mesh = _register(settings, generation, replica, at)
            name = axis_name("experts", generation)
            inside.experts = join_expert_groups(replica, settings, name)
            for each in () if settings.kind.inside_has_tags else inside.torch_groups():
                # All communicators now, while it is known that every rank is there.
                group: Any = each
                what = f"the device group {group.group_desc}"
                open_group(group, settings.device, settings.is_given_up, what)
    except PeerLostError:
        inside.abort()
        raise
    return inside


def join_lockstep(
    replica_groups: ReplicaGroups,
    settings: ConnectSettings,
    generation: int,
    replica: Replica,
    at: Coordinate,
) -> None:
    """Create the group in which a replica's ranks agree, if there is none; collective over it."""
    if replica_groups.lockstep is not None or len(replica.ranks) == 1:
        return
    if replica_groups.pipeline is not None and replica_groups.pipeline.size == len(replica.ranks):
        replica_groups.lockstep = replica_groups.pipeline
        return
    name = f"generation{generation}/meeting{replica.index}"
    replica_groups.lockstep = settings.connect_peers(name, at.mesh_rank, len(replica.ranks))


def _register(
    settings: ConnectSettings, generation: int, replica: Replica, at: Coordinate
) -> DeviceMesh:
    """Make this replica torch's default world. Its mesh axes carry the generation, because
    DTensor's caches would take two meshes with equal names for one."""
    os.environ["GLOO_SOCKET_IFNAME"] = settings.interface  # the only way to tell torch
    name = f"generation{generation}/replica{replica.index}"
    cut = [(axis, n) for axis, n in zip(AXES, replica.mesh_shape, strict=True) if n > 1]
    if settings.is_staged:
        register_staged_gloo()
    try:
        dist.init_process_group(
            settings.kind.inside,
            store=PrefixStore(name, settings.store),
            rank=at.mesh_rank,
            world_size=len(replica.ranks),
            timeout=timedelta(seconds=settings.seconds),
        )
        return init_device_mesh(
            settings.device.type,
            tuple(n for _, n in cut),
            mesh_dim_names=tuple(axis_name(axis, generation) for axis, _ in cut),
        )
    except BaseException as error:  # a store that was interrupted raises an error of its own
        if dist.is_initialized():
            if settings.kind.inside_has_tags:
                dist.destroy_process_group()
            else:
                wait_for_aborts([Abort(group) for group in registered_groups()])
                forget_registered_groups()
        reset_group_count()
        if not isinstance(error, RuntimeError):
            raise
        raise PeerLostError(f"replica {replica.index} did not come together: {error}") from error


def axis_name(axis: str, generation: int) -> str:
    """The name of a mesh axis."""
    return f"{axis}_generation{generation}"
