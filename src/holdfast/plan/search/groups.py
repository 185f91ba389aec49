"""Groups of layouts that a search has not opened, by the least score that any of them can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from holdfast.plan.search.fleets import Family
from holdfast.plan.search.layouts import Variant
from holdfast.plan.search.space import Cut, Shape


@dataclass(frozen=True, slots=True)
class Piped:
    """Layouts with this pipeline and schedule, of any number of shards."""

    cut: Cut
    slots: tuple[int, ...]
    schedule: str
    virtual: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """number: of replicas. fewer: numbers that follow. seconds: that the passes of any variant take
    at least. is_fitted: only variants are left that may fit."""

    piped: Piped
    shape: Shape
    variants: tuple[Variant, ...]
    number: int
    fewer: list[int]
    seconds: float = 0.0
    is_fitted: bool = False


Group = Cut | Piped | Scheduled | Family


@dataclass
class Groups:
    """A heap. fitted: makes a group fitted, or returns None if nothing of it can fit; with its
    score and its seconds. Only groups that come to the top are fitted: few do, and it takes long.
    """

    fitted: Callable[[Scheduled], tuple[float, float, Scheduled] | None]
    _heap: list[tuple[float, float, int, Group]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)

    @property
    def least(self) -> float:
        """The least score of a group; inf if there is none."""
        heap = self._heap
        while heap:
            group = heap[0][3]
            if not isinstance(group, Scheduled) or group.is_fitted:
                return heap[0][0]
            heappop(heap)
            found = self.fitted(group)
            if found is not None:
                self.push(*found)
        return inf

    def push(self, score: float, seconds: float, group: Group) -> None:
        """seconds: of groups with the same score, the fastest comes first."""
        heappush(self._heap, (score, seconds, next(self._order), group))

    def pop(self) -> Group:
        """Return the group with the least score. There must be one: see `least`."""
        return heappop(self._heap)[3]

    def clear(self) -> None:
        self._heap.clear()
