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
    """The last report of one node. of: its workers at work. progress: seconds that it tolerates
    without progress of any worker."""

    at: float
    normal: float | None
    late: float
    of: int
    progress: float
    marks: dict[int, Mark] = field(default_factory=dict)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> step, marks


class Comparing:
    """The nodes' reports of one generation on workers without progress."""

    def __init__(self) -> None:
        self._generation = self._furthest = 0
        self._told: dict[str, _Told] = {}

    def hear(
        self, name: str, generation: int, still: Mapping[str, Any], now: float, heard: float = inf
    ) -> list[Blame]:
        """Take a node's report; return those of its workers that the node must kill.

        heard: the oldest of the members' last heartbeats. No worker counts as behind before all
        members were heard again, because it may wait for one that is cut off.
        Raises KeyError, TypeError and ValueError for a malformed report."""
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
        ):  # most reported workers wait for another rank: return early for them
            return []
        named = judge(self._marks, self.normal, now, lag=told.late)
        return [
            Blame(rank, *told.places[rank], named[rank].sign, named[rank].seconds)
            for rank, mark in told.marks.items() if rank in named
            if named[rank].sign != "behind" or heard > mark.at + limit
        ]  # fmt: skip

    @property
    def names(self) -> frozenset[str]:
        """Nodes that have workers without progress."""
        return frozenset(self._told)

    @property
    def _marks(self) -> dict[int, Mark]:
        return {rank: mark for one in self._told.values() for rank, mark in one.marks.items()}

    @property
    def normal(self) -> float | None:
        """Seconds that a step normally takes, as the slowest node reports."""
        return max((t.normal for t in self._told.values() if t.normal is not None), default=None)

    @property
    def limit(self) -> float | None:
        """Seconds that one worker may keep other workers waiting; None until known."""
        normal = self.normal
        return None if normal is None else STEPS * normal + SECONDS

    def waiting(self, since: float) -> float | None:
        """Return when the last of the waiting workers began to wait; None if none waits. Only
        reports after `since` count."""
        return max(
            (mark.at for told in self._told.values() if told.at >= since
             for mark in told.marks.values() if mark.waits), default=None,
        )  # fmt: skip

    def stuck(self, now: float, members: frozenset[str]) -> float | None:
        """Return the seconds that all workers of these nodes have waited for one another."""
        if not members <= self._told.keys():
            return None
        if any(one.of != len(one.marks) for one in self._told.values()):
            return None
        late = max(one.late for one in self._told.values())
        return stuck(self._marks, self.normal, now, lag=late)

    def hung(self, now: float, members: frozenset[str]) -> tuple[str, Blame] | None:
        """Return the node and the worker with the least progress if all workers hang.

        This is the last resort, if every worker of these nodes has made no progress for long."""
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
