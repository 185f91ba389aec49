"""What both ways of exchanging pieces and sums have in common: `direct.py` and `gathered.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.parallel.gradients.reduction_plan import ReductionPlan

if TYPE_CHECKING:
    from holdfast.parallel.gradients.reducer import Reducer


class ExchangeRound:
    """The exchange of one step of one reducer, `host`.

    order: of the members. In this order those that receive own the chunks of a bucket.
    """

    def __init__(self, host: Reducer, plan: ReductionPlan, order: Iterable[int]) -> None:
        self.host, self.team, self.peers, self._plan = host, host.team, host.team.peers, plan
        self._buckets = host.layout.buckets
        owners = [member for member in order if self.team.members[member].receives]
        self._owners = {member: number for number, member in enumerate(owners)}
        # by member: the number of its first piece in the plan
        self._firsts = [sum(len(p) for p in plan.pieces[:m]) for m in range(len(plan.pieces))]
        self._ready_pieces = [0] * len(self._buckets)  # own pieces finished, per bucket
        self._marks: list[list[object]] = [[] for _ in self._buckets]

    def piece_ready(self, index: int, ordinal: int) -> None:
        """Own piece number `ordinal` of bucket `index` is final, once the device has done what the
        calling thread gave to it."""
        raise NotImplementedError

    def join(self) -> None:
        """Return when the exchange is over; errors are stored in the host. Raises
        DeviceStuckError."""
        raise NotImplementedError

    def stop(self) -> None:
        """Let the exchange end at its next look."""
        raise NotImplementedError

    def _chunk(self, index: int, member: int) -> tuple[int, int]:
        """Return the part of a bucket that `member` owns; nothing if it does not receive."""
        number = self._owners.get(member)
        return (0, 0) if number is None else self._buckets[index].chunk(number, len(self._owners))
