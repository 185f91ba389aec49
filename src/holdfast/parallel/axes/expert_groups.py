"""The groups inside a replica over which its experts are spread.

Ranks of one stage and one index on tp that see other tokens are numbered along dp_shard, and inside
of that along cp. These numbers are cut in `ep` parts of neighbours. Each part has some experts. So
rank i has the i-th part of the experts' state, cut evenly (`core/sharding/state_table.cut_box`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from holdfast.errors import PeerLostError
from holdfast.layout import Replica, index_of

if TYPE_CHECKING:
    from holdfast.parallel.axes.replica_groups import ConnectSettings


@dataclass(frozen=True)
class ExpertGroups:
    """One rank's. unlike: the ranks that its tokens travel to, in the order of their experts.
    alike: the mesh of those with the same experts, for FSDP2, whose ranks share their state; None
    without dp_shard: then they have copies."""

    unlike: dist.ProcessGroup
    alike: DeviceMesh | None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.unlike,) if self.alike is None else (self.unlike, self.alike.get_group())

    @property
    def used_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those with other ranks in them: nothing ever travels in the rest."""
        return tuple(group for group in self.groups if group.size() > 1)


def join_expert_groups(
    replica: Replica, settings: ConnectSettings, mesh_name: str
) -> ExpertGroups | None:
    """Make the groups of torch's default world, which is a replica; collective over it. mesh_name:
    of the axis for FSDP2. None if each rank has all experts. Raises PeerLostError."""
    ep, seconds = settings.ep, settings.seconds
    if replica.expert_degree(ep) == 1:
        return None
    try:
        unlike = _own_group(unlike_experts(replica, ep), seconds)
        if replica.degree("dp_shard") == 1:
            return ExpertGroups(unlike, None)
        same = _own_group(alike_experts(replica, ep), seconds)
        mesh = DeviceMesh.from_group(same, settings.device.type, mesh_dim_names=(mesh_name,))
        return ExpertGroups(unlike, mesh)
    except RuntimeError as error:
        raise PeerLostError(f"replica {replica.index} did not come together: {error}") from error


def unlike_experts(replica: Replica, ep: int) -> Iterator[list[int]]:
    """Mesh ranks that together have all experts once, each set in the order of its experts."""
    width = replica.token_shares // replica.expert_degree(ep)
    for shares in _token_shares(replica):
        for first in range(width):
            yield shares[first::width]


def alike_experts(replica: Replica, ep: int) -> Iterator[list[int]]:
    """Mesh ranks that have the same experts."""
    width = replica.token_shares // replica.expert_degree(ep)
    for shares in _token_shares(replica):
        for first in range(0, len(shares), width):
            yield shares[first : first + width]


def _token_shares(replica: Replica) -> Iterator[list[int]]:
    """Mesh ranks of each stage and each index on tp, by dp_shard and then by cp."""
    pp, dp_shard, cp, tp = map(range, replica.mesh_shape)
    for stage, part in product(pp, tp):
        places = ((stage, shard, context, part) for shard, context in product(dp_shard, cp))
        yield [index_of(place, replica.mesh_shape) for place in places]


def _own_group(every: Iterator[list[int]], seconds: float) -> dist.ProcessGroup:
    """Make all groups, as each rank of the world must, and return this rank's."""
    own: Any = None
    for ranks in every:
        made = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
        if dist.get_rank() in ranks:
            own = made
    assert isinstance(own, dist.ProcessGroup)
    return own
