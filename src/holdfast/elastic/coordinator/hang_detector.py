"""Find the hung worker by comparing what all nodes report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from holdfast.elastic.protocol.hung_worker import _STEP_BITS, Blame
from holdfast.policy.detection.hangs import (
    SECONDS,
    STEPS,
    Mark,
    all_still,
    judge,
    stuck,
)


@dataclass
class _Told:
    """What one node has told. of: how many of its workers are at work; progress: seconds without
    progress anywhere that it bears."""

    at: float
    normal: float | None
    late: float
    of: int
    progress: float
    marks: dict[int, Mark] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> step, marks


class Comparing:
    """What the nodes of one generation have told of those who stand still."""

    def __init__(self) -> None:
        self._generation = self._furthest = 0
        self._told: dict[str, _Told] = {}

    def hear(
        self, name: str, generation: int, still: Mapping[str, Any], now: float, heard: float = inf
    ) -> list[Blame]:
        """What a node says with a question; who of its workers is to be given up. heard: when that
        member was heard from which the last word is oldest: nobody is behind before all have been
        heard again, for he may wait for one that is cut off. Raises KeyError, TypeError and
        ValueError for what makes no sense."""
        if generation != self._generation:
            self._generation, self._told, self._furthest = generation, {}, 0
        if not still:
            self._told.pop(name, None)
            return []
        self._told[name] = told = _told(still, now)
        limit = self.limit
        self._furthest = max(self._furthest, *(mark.point for mark in told.marks.values()))
        if limit is None or not any(
            now - mark.at > limit
            and (
                mark.point < self._furthest or mark.quiet > limit or not (mark.waits or mark.asleep)
            )
            for mark in told.marks.values()
        ):  # most who tell of themselves wait for another: that costs nothing
            return []
        named = judge(self._marks, self.normal, now, lag=told.late)
        return [
            Blame(rank, *told.places[rank], named[rank].sign, named[rank].seconds)
            for rank, mark in told.marks.items() if rank in named
            if named[rank].sign != "behind" or heard > mark.at + limit
        ]  # fmt: skip

    @property
    def names(self) -> frozenset[str]:
        """The nodes of those who stand still."""
        return frozenset(self._told)

    @property
    def _marks(self) -> dict[int, Mark]:
        return {rank: mark for one in self._told.values() for rank, mark in one.marks.items()}

    @property
    def normal(self) -> float | None:
        """By the slowest node's word."""
        return max((t.normal for t in self._told.values() if t.normal is not None), default=None)

    @property
    def limit(self) -> float | None:
        """Seconds that somebody may keep the others waiting; None before that is known."""
        normal = self.normal
        return None if normal is None else STEPS * normal + SECONDS

    def waiting(self, since: float) -> float | None:
        """When those began to wait who do, by what was told later than `since`; None: nobody."""
        return max(
            (mark.at for told in self._told.values() if told.at >= since
             for mark in told.marks.values() if mark.waits), default=None,
        )  # fmt: skip

    def stuck(self, now: float, members: frozenset[str]) -> float | None:
        """For how long all workers of these nodes have waited for one another."""
        if not members <= self._told.keys():
            return None
        if any(one.of != len(one.marks) for one in self._told.values()):
            return None
        late = max(one.late for one in self._told.values())
        return stuck(self._marks, self.normal, now, lag=late)

    def hung(self, now: float, members: frozenset[str]) -> tuple[str, Blame] | None:
        """Where every worker of these nodes has stood still for long, and nothing says more of
        them: the node and the worker that got least far."""
        if not members <= self._told.keys():
            return None
        told = {name: self._told[name] for name in members}
        if any(one.of != len(one.marks) for one in told.values()):
            return None
        seconds = max(one.progress for one in told.values())
        found = all_still(self._marks, now, seconds)
        for name, one in told.items():
            if found is not None and found in one.places:
                return name, Blame(found, *one.places[found], "progress", seconds)
        return None


def _told(still: Mapping[str, Any], now: float) -> _Told:
    normal = still["normal"]
    told = _Told(
        now, None if normal is None else float(normal), float(still["late"]), int(still["of"]),
        float(still["progress"]),
    )  # fmt: skip
    for rank, step, marks, age, computed, waits, quiet, times, asleep in still["ranks"]:
        told.places[int(rank)] = int(step), int(marks)
        told.marks[int(rank)] = Mark(
            (int(step) << _STEP_BITS) + int(marks), now - float(age),
            None if computed is None else float(computed), bool(waits), float(quiet), float(times),
            bool(asleep),
        )  # fmt: skip
    return told
