"""What travels between neighbouring stages, over a backend whose messages have no tags.

Each pair of neighbours has a group of two for activations and one for gradients. In each of them
one rank only sends and the other only receives. So nothing waits for an operation that was started
before it, and messages match in their order. Both ranks take it from the schedule's table.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from holdfast.parallel.comm.device_group import Abort, DeviceGroup
from holdfast.parallel.torch_compat import Work


class PipelinePipes:
    """groups: by the neighbour's stage, and whether gradients travel in it."""

    def __init__(self, groups: Mapping[tuple[int, bool], DeviceGroup]) -> None:
        self._groups = dict(groups)

    def send(self, tensor: Tensor, stage: int, gradient: bool) -> Work:
        group = self._groups[stage, gradient]
        return group.send(tensor, 1 - group.rank, "pp")

    def receive(self, tensor: Tensor, stage: int, gradient: bool) -> Work:
        group = self._groups[stage, gradient]
        return group.receive(tensor, 1 - group.rank)

    def abort(self) -> None:
        """Give all groups up; return at once."""
        for group in self._groups.values():
            group.abort()

    @property
    def aborts(self) -> list[Abort]:
        return [abort for group in self._groups.values() for abort in group.aborts]
