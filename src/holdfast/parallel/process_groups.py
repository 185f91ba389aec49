"""Connections between the ranks of a generation.

Two kinds of groups. Bare ones (`transport.Peers`) carry what must survive the loss of other ranks,
or must not wait in a collective's order. Those *between* replicas are made again in each
generation: `control` joins all ranks, and each reduction cell (`core/sharding/reduction_cells.py`)
the ranks that sum a gradient together. Torch's own registry may know the groups *inside* a replica
(`replica_groups.py`). The loss of another replica does not touch them, so a generation can keep
them. Every name carries its generation, so it cannot meet a group of an older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from holdfast.core.sharding.reduction_cells import Cell
from holdfast.errors import LayoutError, PeerLostError
from holdfast.layout import AXES, Coordinate, Replica, Topology
from holdfast.parallel.comm.comm_stats import Traffic
from holdfast.parallel.comm.transport import Peers
from holdfast.parallel.gradients.reducer import FIRST_TAG, TAGS, Team
from holdfast.parallel.replica_groups import Inside, Joining, join_inside, join_meeting
from holdfast.parallel.torch_compat import Store, check_version
from holdfast.parallel.trace import Recorder


@dataclass
class Groups:
    """Everything that one rank communicates through in one generation.

    control: all ranks, numbered by `positions`: replica by replica, in mesh order inside each.
    inside: what joins the ranks of my replica.
    recorder: notes when what happens, if the run file asks for it.
    """

    topology: Topology
    rank: int
    coordinate: Coordinate
    control: Peers
    inside: Inside
    recorder: Recorder | None
    joining: Joining
    _joined: dict[tuple[int, ...], Peers] = field(default_factory=dict)

    # --- where I am -----------------------------------------------------------------------
    @property
    def replicas(self) -> int:
        return len(self.topology.replicas)

    @property
    def traffic(self) -> Traffic | None:
        """Counts the bytes that leave this rank, if it was asked for."""
        return self.joining.traffic

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
        """Return True if this rank enters its samples into the ledger: one rank does for each
        sample."""
        return self.first_stage and self.coordinate.cp == 0 and self.coordinate.tp == 0

    # --- whom I talk to -------------------------------------------------------------------
    @property
    def line(self) -> Peers | None:
        """The stages of my pipeline, numbered by stage; None without a pipeline."""
        return self.inside.line

    @property
    def mesh(self) -> DeviceMesh | None:
        """The cut axes of my replica, registered with torch; None where it is one rank."""
        return self.inside.mesh

    @property
    def lockstep(self) -> bool:
        """Return True if other ranks compute together with this one, and other replicas do not.
        Then none of them may stop alone for what happens between replicas."""
        return len(self.replica.ranks) > 1 and self.replicas > 1

    def axis(self, name: str) -> dist.ProcessGroup:
        """torch's group along one cut axis of the mesh."""
        return self.inside.axis(name)

    def shard_mesh(self) -> DeviceMesh:
        """The one-dimensional mesh of `dp_shard`, for FSDP2."""
        return self.inside.shard_mesh()

    def teams(self, cells: Sequence[Cell]) -> tuple[Team, ...]:
        """A team for each of this rank's reduction cells; collective over their members.

        Groups are joined in one order of their ranks on every rank, so no cycle of waits arises.
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
        name = f"generation{self.topology.generation}/cell/{'-'.join(map(str, ranks))}"
        self._joined[ranks] = self.joining.peers(name, ranks.index(self.rank), len(ranks))

    # --- the end --------------------------------------------------------------------------
    def abort_between(self) -> None:
        """Wake the ranks that wait for this one between replicas; those groups are of no use
        afterwards. The groups inside a replica stay."""
        for peers in self._between():
            peers.abort()

    def abort(self) -> None:
        """Wake the ranks that wait for this one, inside its replica as well; the groups are of no
        use afterwards."""
        self.abort_between()
        self.inside.abort()

    def close_between(self) -> None:
        """Leave the groups between replicas; another `Groups` owns the inside now."""
        for peers in self._between():
            peers.close()
        self._joined.clear()

    def close(self) -> None:
        """Leave in an orderly way: nothing of this generation stays in torch's registry."""
        self.close_between()
        self.inside.close()

    def _between(self) -> list[Peers]:
        known = (self.control, *self._joined.values())
        return list({id(peers): peers for peers in known}.values())

    def _all(self) -> list[Peers]:
        return [*self._between(), *self.inside.peers()]


def connect(
    topology: Topology, rank: int, store: Store, device: torch.device, *,
    interface: str = "lo", seconds: float = 1800.0, traffic: Traffic | None = None,
    recorder: Recorder | None = None,
) -> Groups:  # fmt: skip
    """Join all groups of `rank`. Collective over the topology; `seconds` bounds every wait.

    Raises LayoutError for a topology that this version cannot run, and PeerLostError when a
    peer does not come.
    """
    joining = Joining(store, interface, seconds, traffic)
    control = join_control(joining, topology, rank, device)
    return complete(joining, topology, rank, device, control, recorder)


def join_control(joining: Joining, topology: Topology, rank: int, device: torch.device) -> Peers:
    """The group of all ranks; collective over the topology. Raises as `connect`."""
    check_version()
    _check(topology, device)
    order = [r for each in topology.replicas for r in each.ranks]
    name = f"generation{topology.generation}/control"
    return joining.peers(name, order.index(rank), len(order))


def complete(
    joining: Joining, topology: Topology, rank: int, device: torch.device, control: Peers,
    recorder: Recorder | None, inside: Inside | None = None,
) -> Groups:  # fmt: skip
    """Make all groups of a rank that has met the other ranks in `control`. inside: kept from an
    older generation: its replica has the same ranks in the same places. Collective over each
    replica.

    Raises PeerLostError when one of its ranks does not come.
    """
    at, generation = topology.coordinate(rank), topology.generation
    replica, alone = topology.replicas[at.replica], len(topology.replicas) == 1
    try:
        if inside is None:
            inside = join_inside(joining, generation, replica, at, device, alone=alone)
        elif not alone:
            join_meeting(inside, joining, generation, replica, at)
    except PeerLostError:
        control.abort()  # the other ranks need not wait for this one
        raise
    return Groups(topology, rank, at, control, inside, recorder, joining)


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
