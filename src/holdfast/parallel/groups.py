"""How the ranks of a generation are connected.

Two kinds of groups. Bare ones (`transport.Peers`) carry what must survive the loss of others, or
must not wait in a collective's order: `control` joins all ranks, `line` the stages of a pipeline,
and each reduction cell (`spec/cells.py`) the ranks that sum a gradient together. torch's own
registry knows only the inside of a replica: the default world of a process *is* its replica, with
a DeviceMesh over those of (pp, dp_shard, cp, tp) that are cut, so the loss of another replica
touches nothing that torch knows of. Every name carries the generation, so nothing of an older one
can be met.

This file alone feeds torch's registry, and tears it down.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.errors import LayoutError, PeerLostError
from holdfast.layout import AXES, Coordinate, Replica, Topology
from holdfast.parallel.reducer import FIRST_TAG, TAGS, Team
from holdfast.parallel.timeline import Recorder
from holdfast.parallel.torch_compat import PrefixStore, Store, check_version, forget_meshes
from holdfast.parallel.traffic import Traffic
from holdfast.parallel.transport import Peers, hang_up
from holdfast.spec.cells import Cell


@dataclass
class Groups:
    """Everything that one rank communicates through in one generation.

    control: all ranks, numbered by `positions`: replica by replica, in mesh order inside each.
    line: the stages of my pipeline, numbered by stage; None without a pipeline.
    mesh: the cut axes of my replica, registered with torch; None where a replica is one rank.
    traffic: counts the bytes that leave this rank, recorder: notes when what happens, where
        somebody asked for it.
    """

    topology: Topology
    rank: int
    coordinate: Coordinate
    control: Peers
    line: Peers | None
    mesh: DeviceMesh | None
    traffic: Traffic | None
    recorder: Recorder | None
    _store: Store
    _interface: str
    _seconds: float
    _joined: dict[tuple[int, ...], Peers] = field(default_factory=dict)

    # --- where I am -----------------------------------------------------------------------
    @property
    def replicas(self) -> int:
        return len(self.topology.replicas)

    @property
    def replica(self) -> Replica:
        """The one this rank is part of."""
        return self.topology.replicas[self.coordinate.replica]

    def degree(self, axis: str) -> int:
        """Of an axis of my replica's mesh."""
        return self.replica.degree(axis)

    @property
    def positions(self) -> tuple[int, ...]:
        """Ranks in the order in which `control` numbers them."""
        return tuple(rank for replica in self.topology.replicas for rank in replica.ranks)

    @property
    def first_stage(self) -> bool:
        return self.coordinate.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.coordinate.pp == self.degree("pp") - 1

    @property
    def feeds(self) -> bool:
        """Whether this rank enters the samples it was fed into the ledger: one does for each."""
        return self.first_stage and self.coordinate.cp == 0 and self.coordinate.tp == 0

    # --- whom I talk to -------------------------------------------------------------------
    def axis(self, name: str) -> dist.ProcessGroup:
        """torch's group along one cut axis of the mesh."""
        assert self.mesh is not None
        return self.mesh.get_group(_axis_name(name, self.topology.generation))

    def shard_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of `dp_shard`, for FSDP2."""
        assert self.mesh is not None
        return self.mesh[_axis_name("dp_shard", self.topology.generation)]

    def teams(self, cells: Sequence[Cell]) -> tuple[Team, ...]:
        """A team for each of this rank's reduction cells; collective over their members.

        Groups are joined in one order of their ranks on every rank, so nobody waits in a circle.
        """
        for ranks in sorted({cell.ranks for cell in cells}):
            self._join(ranks)
        used: dict[tuple[int, ...], int] = {}
        teams = []
        for cell in cells:
            number = used[cell.ranks] = used.get(cell.ranks, -1) + 1
            order = self.positions if len(cell.ranks) == self.topology.world_size else cell.ranks
            teams.append(
                Team(
                    self._joined[cell.ranks], cell.members,
                    [member.rank for member in cell.members].index(self.rank),
                    tuple(order.index(member.rank) for member in cell.members),
                    FIRST_TAG + number * TAGS, self.recorder,
                )
            )  # fmt: skip
        return tuple(teams)

    def _join(self, ranks: tuple[int, ...]) -> None:
        if ranks in self._joined:
            return
        if len(ranks) == self.topology.world_size:
            self._joined[ranks] = self.control
            return
        name = "-".join(map(str, ranks))
        self._joined[ranks] = Peers(
            self._store, f"generation{self.topology.generation}/cell/{name}",
            ranks.index(self.rank), len(ranks), interface=self._interface, seconds=self._seconds,
            traffic=self.traffic,
        )  # fmt: skip

    # --- the end --------------------------------------------------------------------------
    def abort(self) -> None:
        """Wake whoever waits for this rank, in torch's own groups as well (a sharded layer's
        gather does); the groups are of no use afterwards."""
        for peers in self._all():
            peers.abort()
        for group in self._registered():
            hang_up(group, [peer for peer in range(group.size()) if peer != group.rank()])

    def close(self) -> None:
        """Leave in an orderly way: nothing of this generation stays in torch's registry."""
        for peers in self._all():
            peers.close()
        self._joined.clear()
        if self.mesh is not None:
            self.mesh = None
            dist.destroy_process_group()
            forget_meshes()

    def _registered(self) -> list[dist.ProcessGroup]:
        if self.mesh is None or self.mesh.device_type != "cpu":
            return []
        return [self.mesh.get_group(name) for name in self.mesh.mesh_dim_names or ()]

    def _all(self) -> list[Peers]:
        known = (self.control, self.line, *self._joined.values())
        return list({id(peers): peers for peers in known if peers is not None}.values())


def connect(
    topology: Topology, rank: int, store: Store, device: torch.device, *,
    interface: str = "lo", seconds: float = 1800.0, traffic: Traffic | None = None,
    recorder: Recorder | None = None,
) -> Groups:  # fmt: skip
    """Join all groups of `rank`. Collective over the topology; `seconds` bounds every wait.

    Raises LayoutError for a topology that this version cannot run, and PeerLostError when a
    peer does not come.
    """
    check_version()
    _check(topology, device)
    coordinate = topology.coordinate(rank)
    replica = topology.replicas[coordinate.replica]
    prefix = f"generation{topology.generation}"
    order = [r for each in topology.replicas for r in each.ranks]
    control = Peers(
        store, f"{prefix}/control", order.index(rank), len(order),
        interface=interface, seconds=seconds, traffic=traffic,
    )  # fmt: skip
    line, mesh = None, None
    if replica.mesh_shape[0] > 1:
        name = f"{prefix}/line{replica.index}.{coordinate.dp_shard}.{coordinate.cp}.{coordinate.tp}"
        line = Peers(
            store, name, coordinate.pp, replica.mesh_shape[0],
            interface=interface, seconds=seconds, traffic=traffic,
        )  # fmt: skip
    if len(replica.ranks) > 1:
        try:
            mesh = _register(topology, replica, coordinate, store, device, interface, seconds)
        except PeerLostError:
            control.abort()  # the others need not wait for this one
            raise
    return Groups(
        topology,
        rank,
        coordinate,
        control,
        line,
        mesh,
        traffic,
        recorder,
        store,
        interface,
        seconds,
    )


def _check(topology: Topology, device: torch.device) -> None:
    if [r.index for r in topology.replicas] != list(range(len(topology.replicas))):
        raise LayoutError("replicas must be numbered from 0 in order", where="topology")
    if any(replica.mesh_shape[AXES.index("cp")] > 1 for replica in topology.replicas):
        raise LayoutError("context parallelism is not built yet", where="layout.cp",
                          remedy="set cp to 1")  # fmt: skip
    if device.type != "cpu" and topology.world_size > 1:
        raise LayoutError(
            f"more than one worker on {device.type} has not been run yet and is refused",
            where="layout.workers", remedy="use 1 worker, or device: cpu",
        )  # fmt: skip


def _register(
    topology: Topology, replica: Replica, coordinate: Coordinate, store: Store,
    device: torch.device, interface: str, seconds: float,
) -> DeviceMesh:  # fmt: skip
    """Make this replica torch's default world. Its mesh axes carry the generation, because
    DTensor's caches would take two meshes with equal names for one."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface  # the only way to tell init_process_group
    name = f"generation{topology.generation}/replica{replica.index}"
    cut = [(axis, n) for axis, n in zip(AXES, replica.mesh_shape, strict=True) if n > 1]
    try:
        dist.init_process_group(
            "gloo", store=PrefixStore(name, store), rank=coordinate.mesh_rank,
            world_size=len(replica.ranks), timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        return init_device_mesh(
            device.type, tuple(n for _, n in cut),
            mesh_dim_names=tuple(_axis_name(axis, topology.generation) for axis, _ in cut),
        )  # fmt: skip
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise PeerLostError(f"replica {replica.index} did not come together: {error}") from error


def _axis_name(axis: str, generation: int) -> str:
    return f"{axis}_generation{generation}"
