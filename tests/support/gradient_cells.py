"""One cell of all that ranks of one shape have."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.reduction_cells import Cell
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.cell_team import CellTeam, ExchangeKind
from holdfast.parallel.gradients.feeder import Cells


def single_cell(
    boxes: Mapping[str, Box], peers: PeerGroup, exchange: ExchangeKind = "direct"
) -> Cells:
    """Return one cell of all that is there: replicas of one shape, one member of `peers` each."""
    team = CellTeam.of_replicas(peers, exchange)
    return [(Cell(team.members, tuple(box for box in boxes.values() if box.size)), team)]
