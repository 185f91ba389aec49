"""What travels between neighbours of a pipeline, over a backend whose messages have no tags.

Each pair of neighbours has two groups of two. In each of them one rank only sends and the other
only receives. So nothing waits for an operation that was started before it, and messages match in
their order. The order is the one in which the sender's row of the schedule gives them. If the
receiver needs a later one first, it takes those before it, too, and keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from holdfast.parallel.comm.device_group import Abort, DeviceGroup
from holdfast.parallel.torch_compat import Work


class PipelinePipes:
    """groups: by the neighbour's index on `pp`, and whether this rank sends in it."""

    def __init__(self, groups: Mapping[tuple[int, bool], DeviceGroup]) -> None:
        self._groups = dict(groups)

    def send(self, tensor: Tensor, peer: int) -> Work:
        group = self._groups[peer, True]
        return group.send(tensor, 1 - group.rank, "pp")

    def receive(self, tensor: Tensor, peer: int) -> Work:
        group = self._groups[peer, False]
        return group.receive(tensor, 1 - group.rank)

    def abort(self) -> None:
        """Give all groups up; return at once."""
        for group in self._groups.values():
            group.abort()

    @property
    def aborts(self) -> list[Abort]:
        return [abort for group in self._groups.values() for abort in group.aborts]
