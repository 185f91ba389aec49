"""Groups of a device's own backend that each rank joins, and the device memory that they take.

The count follows `parallel/axes/replica_groups.py` and `parallel/axes/process_groups.py`: inside a
replica one group for each axis that is cut, and two for each neighbour in a pipeline. `ep` has one,
and one more for the ranks with the same experts. Between replicas, one for each set of ranks that
sums gradients together.
"""

from __future__ import annotations

from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator, run_device_kind
from holdfast.core.sharding.run_table import run_cells
from holdfast.layout import Topology

BYTES_EACH = 688_000_000
"""Device memory of one group, as a report on an old NCCL has it for more than two A100s (544 MB for
two). Not measured here."""


def communicators_by_rank(config: RunConfig, topology: Topology) -> tuple[int, ...]:
    """Return the number of groups of each rank; 0 for all on a CPU."""
    if not is_accelerator(config.device):
        return (0,) * topology.world_size
    return tuple(_of_rank(config, topology, rank) for rank in range(topology.world_size))


def _of_rank(config: RunConfig, topology: Topology, rank: int) -> int:
    kind, at = run_device_kind(config), topology.coordinate(rank)
    replica, count = topology.replicas[at.replica], 0
    if not kind.inside_has_tags:
        neighbours = sum(at.pp in pair for pair in replica.neighbours)
        count += sum(degree > 1 for degree in replica.mesh_shape) + 2 * neighbours
        ep, shares = replica.expert_degree(config.layout.ep), replica.token_shares
        count += (ep > 1) + (1 < ep < shares and replica.is_sharded)
    if not kind.between_has_tags and config.layout.exchange != "direct":
        teams = {cell.ranks for cell in run_cells(config, topology, rank)}
        count += sum(len(ranks) > 1 for ranks in teams)
    return count
