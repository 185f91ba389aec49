"""The coordinator's straggler tracker: compares the workers' time per microbatch.

Every heartbeat of a node reports how long each of its workers has computed since the last one, and
how many microbatches. Once all workers are reported, `policy.detection.stragglers` compares them.
It names workers that are slow beyond doubt by the median of their kind, so a common slowdown
cancels out. A slow worker gets fewer microbatches in the next generation (`speeds`, which weigh its
replica). If that is not enough, its node becomes a standby, provided that the run does not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.policy.detection.stragglers import Change, Limits, Pace, Stragglers, Timing

Worker = tuple[str, int]
"""A node and one of its processes; both stay when ranks change."""


def worker_of(change: Change) -> Worker:
    """Return the worker that a change concerns."""
    who = change.who
    assert isinstance(who, tuple), "workers are known by node and process"
    node, pid = who
    return str(node), int(pid)


class Pacing:
    """The straggler tracker of one term."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._found = Stragglers(limits)
        self._generation = 0
        self._known: set[Worker] = set()  # workers that were reported in this generation
        self._pending: dict[Worker, Timing] = {}
        self._slower: dict[Worker, float] = {}  # of slow workers: time relative to normal

    def hear(
        self, name: str, generation: int, rows: Iterable[Sequence[Any]]
    ) -> tuple[Change, ...]:  # fmt: skip
        """Take a node's report on its workers; return the changed verdicts.

        Raises ValueError or TypeError for a malformed report."""
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
        """Relative speed of each slow worker; a normal one has 1."""
        return {who: round(1 / slower, 2) for who, slower in self._slower.items() if slower > 1.0}

    def resting(self, name: str) -> bool:
        """Return True if no worker of this node should get work."""
        here = {who for who in self._known if who[0] == name}
        return bool(here) and here <= self._found.left_out.keys()
