"""Connections between the ranks of a generation.

Two kinds of groups. Bare ones (`transport.PeerGroup`) carry what must survive the loss of other
ranks, or must not wait in a collective's order. Those *between* replicas are made again in each
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

from holdfast.core.device_progress import GroupProgress
from holdfast.core.sharding.reduction_cells import Cell
from holdfast.errors import LayoutError, PeerLostError
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.parallel.axes.replica_groups import (
    ConnectSettings,
    ReplicaGroups,
    join_lockstep,
    join_replica_groups,
)
from holdfast.parallel.comm import transport
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.device_group import DeviceGroup
from holdfast.parallel.comm.devices import check_backends
from holdfast.parallel.comm.trace import SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.cell_team import FIRST_TAG, TAGS_PER_REDUCER, CellTeam
from holdfast.parallel.torch_compat import check_version

_READY_TAG = 13  # of the exchange in `control` before groups of a device are made


@dataclass
class ProcessGroups:
    """Everything that one rank communicates through in one generation.

    control: all ranks, numbered by `positions`: replica by replica, in mesh order inside each.
    replica_groups: what joins the ranks of my replica.
    """

    topology: Topology
    rank: int
    coordinate: Coordinate
    control: PeerGroup
    replica_groups: ReplicaGroups
    settings: ConnectSettings
    _groups_by_ranks: dict[tuple[int, ...], PeerGroup | DeviceGroup] = field(default_factory=dict)

    # --- where I am -----------------------------------------------------------------------
    @property
    def replica_count(self) -> int:
        return len(self.topology.replicas)

    @property
    def traffic(self) -> TrafficCounter | None:
        """Counts the bytes that leave this rank, if it was asked for."""
        return self.settings.traffic

    @property
    def recorder(self) -> SpanRecorder | None:
        """Notes when what happens, if it was asked for."""
        return self.settings.recorder

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
    def is_first_stage(self) -> bool:
        """Return True if this rank has the first stage of its pipeline."""
        return self.coordinate.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Return True if this rank has the last stage of its pipeline."""
        return self.coordinate.pp == self.replica.last_pp

    @property
    def feeds_ledger(self) -> bool:
        """Return True if this rank enters its samples into the ledger: one rank does for each
        sample."""
        return self.is_first_stage and self.coordinate.cp == 0 and self.coordinate.tp == 0

    # --- whom I talk to -------------------------------------------------------------------
    @property
    def is_lockstep(self) -> bool:
        """Return True if other ranks compute together with this one, and other replicas do not.
        Then none of them may stop alone for what happens between replicas."""
        return len(self.replica.ranks) > 1 and self.replica_count > 1

    def axis(self, name: str) -> dist.ProcessGroup:
        """torch's group along one cut axis of the mesh, or along "ep"."""
        return self.replica_groups.axis(name)

    @property
    def expert_degree(self) -> int:
        """The ranks that share the experts of my replica."""
        return self.replica.expert_degree(self.settings.ep)

    def teams(self, cells: Sequence[Cell]) -> tuple[CellTeam, ...]:
        """A team for each of this rank's reduction cells; collective over their members.

        Groups are joined in one order of their ranks on every rank, so no cycle of waits arises.
        Those of a device's backend are made once all ranks have said that they are ready for it.
        """
        if self._uses_device_groups:
            generation = torch.tensor([self.topology.generation])
            transport.exchange(self.control, generation, [1] * self.control.size, _READY_TAG)
        for ranks in sorted({cell.ranks for cell in cells}):
            self._join_ranks(ranks)
        used: dict[tuple[int, ...], int] = {}
        teams = []
        for cell in cells:
            number = used[cell.ranks] = used.get(cell.ranks, -1) + 1
            order = self.positions if len(cell.ranks) == self.topology.world_size else cell.ranks
            teams.append(
                CellTeam(
                    self._groups_by_ranks[cell.ranks],
                    cell.members,
                    [member.rank for member in cell.members].index(self.rank),
                    tuple(order.index(member.rank) for member in cell.members),
                    FIRST_TAG + number * TAGS_PER_REDUCER,
                    self.recorder,
                    self.settings.exchange,
                )
            )
        return tuple(teams)

    def _join_ranks(self, ranks: tuple[int, ...]) -> None:
        if ranks in self._groups_by_ranks:
            return
        on_device = self._uses_device_groups and len(ranks) > 1
        if len(ranks) == self.topology.world_size and not on_device:
            self._groups_by_ranks[ranks] = self.control
            return
        name = f"generation{self.topology.generation}/cell/{'-'.join(map(str, ranks))}"
        order = self.positions if len(ranks) == self.topology.world_size else ranks
        at, size = order.index(self.rank), len(ranks)
        self._groups_by_ranks[ranks] = (
            self.settings.connect_device(self.settings.kind.between, name, at, size)
            if on_device
            else self.settings.connect_peers(name, at, size)
        )

    @property
    def _uses_device_groups(self) -> bool:
        """Return True if gradients travel between replicas by the device's own backend."""
        return self.settings.exchange == "gathered" and not self.settings.kind.between_has_tags

    def device_progress(self) -> tuple[GroupProgress, ...]:
        """Return how far this rank's device is with the exchanges between replicas."""
        known = tuple(self._groups_by_ranks.values())
        return tuple(each.progress() for each in known if isinstance(each, DeviceGroup))

    def received_bytes(self) -> int:
        """Return the bytes that have come to this rank between replicas by the host's network."""
        groups = {id(each): each for each in self._groups_between_replicas()}.values()
        return sum(each.received_bytes() for each in groups if isinstance(each, PeerGroup))

    # --- the end --------------------------------------------------------------------------
    def abort_between_replicas(self) -> None:
        """Wake the ranks that wait for this one between replicas; those groups are of no use
        afterwards. The groups inside a replica stay."""
        for peers in self._groups_between_replicas():
            peers.abort()

    def abort(self) -> None:
        """Wake the ranks that wait for this one, inside its replica as well; the groups are of no
        use afterwards. Those of a device abort at the same time: none of these calls waits."""
        self.abort_between_replicas()
        self.replica_groups.abort()

    def close_between_replicas(self) -> None:
        """Leave the groups between replicas; another `ProcessGroups` owns the inside now."""
        for peers in self._groups_between_replicas():
            peers.abort() if isinstance(peers, DeviceGroup) else peers.close()
        for peers in self._groups_between_replicas():
            peers.close()
        self._groups_by_ranks.clear()

    def close(self) -> None:
        """Leave in an orderly way: nothing of this generation stays in torch's registry."""
        self.close_between_replicas()
        self.replica_groups.close()

    def _groups_between_replicas(self) -> list[PeerGroup | DeviceGroup]:
        known = (*self._groups_by_ranks.values(), self.control)
        return list({id(peers): peers for peers in known}.values())


def connect(settings: ConnectSettings, topology: Topology, rank: int) -> ProcessGroups:
    """Join all groups of `rank`. Collective over the topology.

    Raises LayoutError for a topology that this version cannot run, and PeerLostError when a
    peer does not come.
    """
    return complete(settings, topology, rank, join_control(settings, topology, rank))


def join_control(settings: ConnectSettings, topology: Topology, rank: int) -> PeerGroup:
    """The group of all ranks; collective over the topology. Raises as `connect`."""
    check_version()
    kind = settings.kind
    if [r.index for r in topology.replicas] != list(range(len(topology.replicas))):
        raise LayoutError("replicas must be numbered from 0 in order", where="topology")
    if topology.world_size > 1:
        check_backends(kind)
    if kind.most_workers and topology.world_size > kind.most_workers:
        raise LayoutError(
            f"a run on {kind.name} has one worker",
            where="layout.workers",
            remedy="use 1 worker, or device: cpu",
        )
    order = [r for each in topology.replicas for r in each.ranks]
    name = f"generation{topology.generation}/control"
    return settings.connect_peers(name, order.index(rank), len(order))


def complete(
    settings: ConnectSettings,
    topology: Topology,
    rank: int,
    control: PeerGroup,
    replica_groups: ReplicaGroups | None = None,
) -> ProcessGroups:
    """Make all groups of a rank that has met the other ranks in `control`. replica_groups: kept
    from an older generation: its replica has the same ranks in the same places. Collective over
    each replica.

    Raises PeerLostError when one of its ranks does not come.
    """
    at, generation = topology.coordinate(rank), topology.generation
    replica, alone = topology.replicas[at.replica], len(topology.replicas) == 1
    try:
        if replica_groups is None:
            replica_groups = join_replica_groups(
                settings, generation, replica, at, is_only_replica=alone
            )
        elif not alone:
            join_lockstep(replica_groups, settings, generation, replica, at)
    except PeerLostError:
        control.abort()  # the other ranks need not wait for this one
        raise
    return ProcessGroups(topology, rank, at, control, replica_groups, settings)
