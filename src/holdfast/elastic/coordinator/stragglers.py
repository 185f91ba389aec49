"""At the coordinator: what the workers took for a microbatch, beside each other.

Every heartbeat of a node says how long each of its workers has computed since the last one, and how
many microbatches. When all have spoken that is one comparison for `policy.detection.stragglers`,
which says who is slow beyond doubt: by the median of its kind, so what slows all cancels out. A
slow worker gets fewer microbatches in the next generation (`speeds`, which weigh its replica); one
for which that is not enough makes its node a standby, where the run can do without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.policy.detection.stragglers import Change, Limits, Pace, Stragglers, Timing

Worker = tuple[str, int]
"""A node and one of its processes: that stays when ranks change."""


def worker_of(change: Change) -> Worker:
    """Whom it is about."""
    who = change.who
    assert isinstance(who, tuple), "workers are known by node and process"
    node, pid = who
    return str(node), int(pid)


class Pacing:
    """Lives as long as a term."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._found = Stragglers(limits)
        self._generation = 0
        self._known: set[Worker] = set()  # who has told of itself in this generation
        self._pending: dict[Worker, Timing] = {}
        self._slower: dict[Worker, float] = {}  # of those who are not well

    def hear(
        self, name: str, generation: int, rows: Iterable[Sequence[Any]]
    ) -> tuple[Change, ...]:  # fmt: skip
        """What a node says of its workers; who is judged otherwise from now on. Raises ValueError,
        TypeError for what makes no sense."""
        if generation != self._generation:
            self._generation, self._known, self._pending = generation, set(), {}
        for pid, position, seconds, microbatches in rows:
            who = (name, int(pid))
            before = self._pending.get(who)
            told = Timing(who, str(position), float(seconds), int(microbatches))
            if before is not None:
                told = Timing(who, told.position, told.seconds + before.seconds,
                              told.microbatches + before.microbatches)  # fmt: skip
            self._known.add(who)
            self._pending[who] = told
        if len(self._pending) < max(2, len(self._known)):
            return ()
        timings, self._pending = list(self._pending.values()), {}
        changes = self._found.observe(timings)
        for change in changes:
            who = worker_of(change)
            if change.after is Pace.WELL:
                self._slower.pop(who, None)
            else:
                self._slower[who] = max(1.0, change.slower)
        return changes

    @property
    def speeds(self) -> dict[Worker, float]:
        """Beside the others' 1, of those who are slow."""
        return {who: round(1 / slower, 2) for who, slower in self._slower.items() if slower > 1.0}

    def resting(self, name: str) -> bool:
        """Whether no worker of this node that takes part is to have work."""
        here = {who for who in self._known if who[0] == name}
        return bool(here) and here <= self._found.left_out.keys()
