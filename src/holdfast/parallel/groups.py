"""How the ranks of a generation are connected.

Two kinds of groups. Bare ones (`transport.Peers`) carry what passes between replicas: `control`
joins all ranks, `reduce` joins the ranks that hold the same shard, one per replica. torch's own
registry knows only the inside of a replica: the default world of a process *is* its replica, so
the loss of another replica touches nothing that torch knows of. Every name carries the
generation, so nothing of an older one can be met.

This file alone feeds torch's registry, and tears it down.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.errors import LayoutError
from holdfast.layout import Coordinate, Topology
from holdfast.parallel.torch_compat import PrefixStore, Store, check_version, forget_meshes
from holdfast.parallel.transport import Peers


@dataclass
class Groups:
    """Everything that one rank communicates through in one generation.

    control: all ranks, numbered replica by replica, in mesh order inside each.
    reduce: the ranks that hold my shard; my number there is my replica's index. The same object
        as `control` where a replica is one rank.
    mesh: the shards of my replica, registered with torch; None where a replica is one rank.
    """

    topology: Topology
    coordinate: Coordinate
    control: Peers
    reduce: Peers
    mesh: DeviceMesh | None

    @property
    def replicas(self) -> int:
        return len(self.topology.replicas)

    @property
    def replica_size(self) -> int:
        return len(self.topology.replicas[0].ranks)

    def abort(self) -> None:
        """Wake whoever waits for this rank; the groups are of no use afterwards."""
        self.control.abort()
        self.reduce.abort()

    def close(self) -> None:
        """Leave in an orderly way: nothing of this generation stays in torch's registry."""
        self.control.close()
        self.reduce.close()
        if self.mesh is not None:
            self.mesh = None
            dist.destroy_process_group()
            forget_meshes()


def connect(
    topology: Topology,
    rank: int,
    store: Store,
    device: torch.device,
    *,
    interface: str = "lo",
    seconds: float = 1800.0,
) -> Groups:
    """Join all groups of `rank`. Collective over the topology; `seconds` bounds every wait.

    Raises LayoutError for a topology that this version cannot run, and PeerLostError when a
    peer does not come.
    """
    check_version()
    _check(topology, device)
    coordinate = topology.coordinate(rank)
    size = len(topology.replicas[0].ranks)
    prefix = f"generation{topology.generation}"
    control = Peers(
        store, f"{prefix}/control", coordinate.replica * size + coordinate.mesh_rank,
        topology.world_size, interface=interface, seconds=seconds,
    )  # fmt: skip
    if size == 1:
        return Groups(topology, coordinate, control, control, None)
    reduce = Peers(
        store, f"{prefix}/reduce{coordinate.mesh_rank}", coordinate.replica,
        len(topology.replicas), interface=interface, seconds=seconds,
    )  # fmt: skip
    mesh = _register(topology, coordinate, size, store, device, interface, seconds)
    return Groups(topology, coordinate, control, reduce, mesh)


def _check(topology: Topology, device: torch.device) -> None:
    shapes = {replica.mesh_shape for replica in topology.replicas}
    if [r.index for r in topology.replicas] != list(range(len(topology.replicas))):
        raise LayoutError("replicas must be numbered from 0 in order", where="topology")
    if len(shapes) > 1:
        raise LayoutError(f"replicas of different shapes {sorted(shapes)} cannot run together yet",
                          where="topology", remedy="give all of them one shape")  # fmt: skip
    pp, _, cp, tp = next(iter(shapes))
    if pp * cp * tp > 1:
        raise LayoutError("only replication and dp_shard are supported", where="layout",
                          remedy="set pp, cp and tp to 1")  # fmt: skip
    if device.type != "cpu" and topology.world_size > 1:
        raise LayoutError(
            f"more than one worker on {device.type} has not been run yet and is refused",
            where="layout.workers", remedy="use 1 worker, or device: cpu",
        )  # fmt: skip


def _register(
    topology: Topology, coordinate: Coordinate, size: int, store: Store, device: torch.device,
    interface: str, seconds: float,
) -> DeviceMesh:  # fmt: skip
    """Make this replica torch's default world. Its mesh axis carries the generation, because
    DTensor's caches would take two meshes with equal names for one."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface  # the only way to tell init_process_group
    name = f"generation{topology.generation}/replica{coordinate.replica}"
    dist.init_process_group(
        "gloo", store=PrefixStore(name, store), rank=coordinate.mesh_rank, world_size=size,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    axis = f"dp_shard_generation{topology.generation}"
    return init_device_mesh(device.type, (size,), mesh_dim_names=(axis,))
