"""Finds slow workers and decides what to do about them. Pure: times come in as arguments. Hung
workers are found by `hangs`.

A comparison decides who is slow: a worker's seconds per microbatch, divided by a median. That is
the median of the other workers with the same work at the same time (same kind of replica, same
stage). What slows all, such as a foreign load, cancels out; one slow step vanishes in a median.
Comparisons cover one step, or all steps between two heartbeats, and are gathered in blocks. The
slower a worker is, the fewer blocks are needed to be sure:

    slower by    blocks of 8 comparisons
    4            2
    2            4
    1.35         24, of which 18 are above 1.15 each

    well --slow--> slow --twice as slow, for long--> standby --a rest--> trial --still slow--> out
     ^              |                                                     |
     '---as quick as the rest, for long-----------------------------------'

A slow worker gets fewer microbatches: `speeds` weighs the next dealing. If that does not help,
because the worker is more than twice as slow, it gets none at all. Between 1.15 and 1.35 nothing
changes, so no worker alternates between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

Who = Hashable
"""A worker, by a name that stays when ranks change."""


class Pace(StrEnum):
    WELL = "well"
    SLOW = "slow"  # gets fewer microbatches
    STANDBY = "standby"  # gets none, and is tried again after a rest
    TRIAL = "trial"  # back at work, and looked at
    OUT = "out"  # left out for good


TRANSITIONS: dict[Pace, frozenset[Pace]] = {
    Pace.WELL: frozenset({Pace.SLOW}),
    Pace.SLOW: frozenset({Pace.WELL, Pace.STANDBY}),
    Pace.STANDBY: frozenset({Pace.TRIAL}),
    Pace.TRIAL: frozenset({Pace.WELL, Pace.SLOW, Pace.OUT}),
    Pace.OUT: frozenset(),
}


def advance(pace: Pace, to: Pace) -> Pace:
    """Return the new pace. Raises ValueError for a transition that is not in the table."""
    if to not in TRANSITIONS[pace]:
        raise ValueError(f"a worker that is {pace} cannot become {to}")
    return to


@dataclass(frozen=True, slots=True)
class Sure:
    """Slow beyond doubt: by `times` in the median of so many blocks, of which `agree` are above
    `each`."""

    times: float
    blocks: int
    agree: int
    each: float


@dataclass(frozen=True)
class Limits:
    """Limits of the comparison.

    Attributes:
        block: Steps that one comparison takes.
        sure: The least slow last.
        same: Factor of slowness that still counts as quick.
        demote: Factor at which a slow worker gets no work, after `patience` blocks.
        recover: Blocks as quick as the rest until a worker is well again.
        rest: Blocks on standby before a trial.
    """

    block: int = 8
    sure: tuple[Sure, ...] = (
        Sure(4.0, 2, 2, 3.0), Sure(2.0, 4, 4, 1.8), Sure(1.35, 24, 18, 1.15),
    )  # fmt: skip
    same: float = 1.15
    demote: float = 2.0
    patience: int = 4
    recover: int = 8
    rest: int = 64

    @property
    def most(self) -> int:
        """Blocks that are looked at."""
        return max(sure.blocks for sure in self.sure)


@dataclass(frozen=True, slots=True)
class Timing:
    """One worker's work in one step: `microbatches` in `seconds` of computing. position: equal for
    all workers that do the same work on a microbatch."""

    who: Who
    position: Hashable
    seconds: float
    microbatches: int


@dataclass(frozen=True)
class Change:
    """A transition, and the sentence that says why."""

    who: Who
    before: Pace
    after: Pace
    slower: float
    why: str


@dataclass
class _Worker:
    pace: Pace = Pace.WELL
    now: list[float] = field(default_factory=list)  # times slower, of the steps of this block
    blocks: deque[float] = field(default_factory=deque)  # the newest last
    since: int = 0  # blocks in this pace
    speed: float = 1.0


class Stragglers:
    """Takes the timings of every step and returns the changes. Equal timings give equal answers on
    every node."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._workers: dict[Who, _Worker] = {}
        self._steps = 0

    def pace(self, who: Who) -> Pace:
        return self._workers[who].pace if who in self._workers else Pace.WELL

    @property
    def speeds(self) -> dict[Who, float]:
        """Weights of replicas relative to the 1 of quick workers, which are not listed."""
        return {who: w.speed for who, w in self._workers.items() if w.speed != 1.0}

    @property
    def left_out(self) -> dict[Who, Pace]:
        """Workers that get no rank."""
        idle = (Pace.STANDBY, Pace.OUT)
        return {who: w.pace for who, w in self._workers.items() if w.pace in idle}

    def observe(self, timings: Iterable[Timing]) -> tuple[Change, ...]:
        """Take one step. Changes come at the end of a block."""
        at: dict[Hashable, dict[Who, float]] = {}
        for t in timings:
            if t.microbatches > 0 and t.seconds > 0:
                at.setdefault(t.position, {})[t.who] = t.seconds / t.microbatches
        for paces in at.values():
            for who, slower in _slower(paces).items():
                self._workers.setdefault(who, _Worker()).now.append(slower)
        self._steps += 1
        if self._steps % self.limits.block:
            return ()
        changes = [change for who, w in self._workers.items() if (change := self._judge(who, w))]
        return tuple(changes)

    def forget(self, who: Who) -> None:
        """Drop a worker's history: it is another process or machine now."""
        self._workers.pop(who, None)

    def _judge(self, who: Who, worker: _Worker) -> Change | None:
        worker.since += 1
        if len(worker.now) * 2 >= self.limits.block:
            worker.blocks.append(median(worker.now))
            while len(worker.blocks) > self.limits.most:
                worker.blocks.popleft()
        worker.now.clear()
        found = self._next(worker)
        if found is None:
            return None
        to, slower, why = found
        before, worker.pace = worker.pace, advance(worker.pace, to)
        worker.since = 0
        worker.speed = round(1 / slower, 2) if to is Pace.SLOW else 1.0
        if to is not Pace.SLOW:
            worker.blocks.clear()
        return Change(who, before, to, slower, why)

    def _next(self, worker: _Worker) -> tuple[Pace, float, str] | None:
        if worker.pace is Pace.OUT:
            return None
        if worker.pace is Pace.STANDBY:
            if worker.since < self.limits.rest:
                return None
            return (
                Pace.TRIAL,
                1.0,
                f"it has rested for {self.limits.rest * self.limits.block} comparisons",
            )
        if worker.pace is Pace.SLOW:
            return self._of_slow(worker)
        slower, steps = self._is_slow(worker), len(worker.blocks) * self.limits.block
        if slower is not None:
            again = worker.pace is Pace.TRIAL and slower >= self.limits.demote
            why = f"{slower:.2g} times slower than the others in the last {steps} comparisons"
            return (Pace.OUT, slower, f"{why}, after a rest") if again else (Pace.SLOW, slower, why)
        if worker.pace is Pace.TRIAL and len(worker.blocks) >= self.limits.recover:
            slower = median(worker.blocks)
            if slower < self.limits.same:
                return Pace.WELL, slower, f"as quick as the others in the last {steps} comparisons"
        return None

    def _of_slow(self, worker: _Worker) -> tuple[Pace, float, str] | None:
        """Decide on a worker with less work already: is that enough, or not needed any more?"""
        limits, blocks = self.limits, list(worker.blocks)
        lately = blocks[-limits.patience :]
        slower = median(lately)
        steps = len(lately) * limits.block
        if worker.since >= limits.patience and min(lately) >= limits.demote:
            why = f"still {slower:.2g} times slower after {steps} comparisons"
            return Pace.STANDBY, slower, why
        lately = blocks[-limits.recover :]
        if worker.since >= limits.recover and max(lately) < limits.sure[-1].times:
            slower = median(lately)
            if slower < limits.same:
                steps = len(lately) * limits.block
                return Pace.WELL, slower, f"as quick as the others in the last {steps} comparisons"
        return None

    def _is_slow(self, worker: _Worker) -> float | None:
        """Return how many times slower the worker is; None if it is not, or if that is not sure
        yet."""
        for sure in self.limits.sure:
            lately = list(worker.blocks)[-sure.blocks :]
            slower = median(lately) if len(lately) == sure.blocks else 0.0
            if slower >= sure.times and sum(b >= sure.each for b in lately) >= sure.agree:
                return slower
        return None


def _slower(paces: Mapping[Who, float]) -> dict[Who, float]:
    """Return each worker's ratio to the median of the rest; empty for a worker that is alone."""
    if len(paces) < 2:
        return {}
    order = sorted(paces, key=lambda who: paces[who])
    rest = len(order) - 1  # workers without that one

    def others(at: int, place: int) -> float:
        """Return the `place`-th pace without the worker at `at`."""
        return paces[order[place + (place >= at)]]

    return {
        who: 2 * paces[who] / (others(at, (rest - 1) // 2) + others(at, rest // 2))
        for at, who in enumerate(order)
    }
