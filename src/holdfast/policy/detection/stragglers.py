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

If steps are long, 16 comparisons take minutes. Then four suffice that contain eight seconds of
computing. The worker has to be slower by 3 in each, and by 4 in their median.

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

_PARTS_STEPS = 16  # comparisons that say what a slowdown came from
_LONG_COMPARISONS, _LONG_COMPARISONS_S = 4, 8.0  # that suffice for the first rule, if so long

WorkerName = Hashable
"""A worker, by a name that stays when ranks change."""


class Pace(StrEnum):
    WELL = "well"
    SLOW = "slow"  # gets fewer microbatches
    STANDBY = "standby"  # gets none, and is tried again after a rest
    TRIAL = "trial"  # back at work, and looked at
    OUT = "out"  # left out for good


PACE_TRANSITIONS: dict[Pace, frozenset[Pace]] = {
    Pace.WELL: frozenset({Pace.SLOW}),
    Pace.SLOW: frozenset({Pace.WELL, Pace.STANDBY}),
    Pace.STANDBY: frozenset({Pace.TRIAL}),
    Pace.TRIAL: frozenset({Pace.WELL, Pace.SLOW, Pace.OUT}),
    Pace.OUT: frozenset(),
}


def advance(pace: Pace, to: Pace) -> Pace:
    """Return the new pace. Raises ValueError for a transition that is not in the table."""
    if to not in PACE_TRANSITIONS[pace]:
        raise ValueError(f"a worker that is {pace} cannot become {to}")
    return to


@dataclass(frozen=True, slots=True)
class StragglerRule:
    """Slow beyond doubt: by `min_slowdown` in the median of so many blocks, of which
    `min_agreeing_blocks` are above `min_block_slowdown`."""

    min_slowdown: float
    blocks: int
    min_agreeing_blocks: int
    min_block_slowdown: float


@dataclass(frozen=True)
class StragglerLimits:
    """Limits of the comparison."""

    block_steps: int = 8  # that one comparison takes
    rules: tuple[StragglerRule, ...] = (  # the least slow last
        StragglerRule(4.0, 2, 2, 3.0),
        StragglerRule(2.0, 4, 4, 1.8),
        StragglerRule(1.35, 24, 18, 1.15),
    )
    normal_slowdown: float = 1.15  # that still counts as quick
    standby_slowdown: float = 2.0  # at which a slow worker gets no work
    standby_after_blocks: int = 4  # as slow as that
    recover_after_blocks: int = 8  # as quick as the rest: well again
    standby_blocks: int = 64  # on standby before a trial


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One worker's work in one step: `microbatches` in `seconds` of computing. position: equal for
    all workers that do the same work on a microbatch."""

    worker: WorkerName
    position: Hashable
    seconds: float
    microbatches: int
    waited_s: float = 0.0  # of `seconds`: ready to run, without a processor
    elements: float = 0.0  # of the microbatches; 0: not known

    def plus(self, other: StepTiming) -> StepTiming:
        """Return both together, of the same worker and position."""
        return StepTiming(
            self.worker,
            self.position,
            self.seconds + other.seconds,
            self.microbatches + other.microbatches,
            self.waited_s + other.waited_s,
            self.elements + other.elements,
        )


@dataclass(frozen=True)
class SlowdownParts:
    """What a worker's slowdown came from."""

    waited_share: float = 0.0  # of the additional seconds: waiting for a processor
    work_ratio: float = 0.0  # elements of a microbatch, relative to the rest; 0: not known


@dataclass(frozen=True)
class PaceChange:
    """A transition, and the sentence that says why."""

    worker: WorkerName
    before: Pace
    after: Pace
    slowdown: float
    reason: str
    parts: SlowdownParts = SlowdownParts()


@dataclass
class _WorkerPace:
    pace: Pace = Pace.WELL
    # times slower, of the steps of this block
    step_slowdowns: list[float] = field(default_factory=list)
    block_slowdowns: deque[float] = field(default_factory=deque)  # the newest last
    blocks_in_pace: int = 0  # blocks in this pace
    speed: float = 1.0
    timings: deque[StepTiming] = field(default_factory=lambda: deque(maxlen=_PARTS_STEPS))
    newest_slowdowns: deque[float] = field(default_factory=lambda: deque(maxlen=_LONG_COMPARISONS))


class StragglerDetector:
    """Takes the timings of every step and returns the changes. Equal timings give equal answers on
    every node."""

    def __init__(self, limits: StragglerLimits | None = None):
        self.limits = limits or StragglerLimits()
        self._workers: dict[WorkerName, _WorkerPace] = {}
        self._steps = 0

    def pace(self, worker: WorkerName) -> Pace:
        return self._workers[worker].pace if worker in self._workers else Pace.WELL

    @property
    def speeds(self) -> dict[WorkerName, float]:
        """Weights of replicas relative to the 1 of quick workers, which are not listed."""
        return {who: w.speed for who, w in self._workers.items() if w.speed != 1.0}

    @property
    def excluded(self) -> dict[WorkerName, Pace]:
        """Workers that get no rank."""
        idle = (Pace.STANDBY, Pace.OUT)
        return {who: w.pace for who, w in self._workers.items() if w.pace in idle}

    def observe(self, timings: Iterable[StepTiming]) -> tuple[PaceChange, ...]:
        """Take one step. Changes come at the end of a block, or after a few long comparisons."""
        at: dict[Hashable, dict[WorkerName, float]] = {}
        for t in timings:
            if t.microbatches > 0 and t.seconds > 0:
                self._workers.setdefault(t.worker, _WorkerPace()).timings.append(t)
                at.setdefault(t.position, {})[t.worker] = t.seconds / t.microbatches
        for paces in at.values():
            for who, slower in _relative_slowdowns(paces).items():
                self._workers[who].step_slowdowns.append(slower)
                self._workers[who].newest_slowdowns.append(slower)
        self._steps += 1
        is_block_over = self._steps % self.limits.block_steps == 0
        decide = self._close_block if is_block_over else self._look_at_long_comparisons
        changes = [change for who, w in self._workers.items() if (change := decide(who, w))]
        return tuple(changes)

    def forget(self, worker: WorkerName) -> None:
        """Drop a worker's history: it is another process or machine now."""
        self._workers.pop(worker, None)

    def _close_block(self, name: WorkerName, worker: _WorkerPace) -> PaceChange | None:
        worker.blocks_in_pace += 1
        if len(worker.step_slowdowns) * 2 >= self.limits.block_steps:
            worker.block_slowdowns.append(median(worker.step_slowdowns))
            while len(worker.block_slowdowns) > max(sure.blocks for sure in self.limits.rules):
                worker.block_slowdowns.popleft()
        worker.step_slowdowns.clear()
        found = self._next_pace(worker)
        return (
            self._look_at_long_comparisons(name, worker)
            if found is None
            else self._change(name, worker, *found)
        )

    def _look_at_long_comparisons(self, name: WorkerName, worker: _WorkerPace) -> PaceChange | None:
        """Decide before a block is over, if the steps are long and the slowdown is large."""
        rule, lately = self.limits.rules[0], worker.newest_slowdowns
        seconds = sum(t.seconds for t in list(worker.timings)[-_LONG_COMPARISONS:])
        if (
            worker.pace is not Pace.WELL
            or len(lately) < _LONG_COMPARISONS
            or seconds < _LONG_COMPARISONS_S
            or min(lately) < rule.min_block_slowdown
            or (slower := median(lately)) < rule.min_slowdown
        ):
            return None
        why = f"{slower:.2g} times slower than the rest in {seconds:.0f} s of computing"
        return self._change(name, worker, Pace.SLOW, slower, why)

    def _change(
        self, name: WorkerName, worker: _WorkerPace, to: Pace, slower: float, why: str
    ) -> PaceChange:
        before, worker.pace = worker.pace, advance(worker.pace, to)
        worker.blocks_in_pace = 0
        worker.speed = round(1 / slower, 2) if to is Pace.SLOW else 1.0
        if to is not Pace.SLOW:
            worker.block_slowdowns.clear()
        return PaceChange(name, before, to, slower, why, self._slowdown_parts(name, worker))

    def _slowdown_parts(self, name: WorkerName, worker: _WorkerPace) -> SlowdownParts:
        """Return what sets a worker apart from the rest with the same work, lately."""

        def per_microbatch(pace: _WorkerPace) -> tuple[float, float, float]:
            done = sum(t.microbatches for t in pace.timings)
            sums = (
                sum(t.seconds for t in pace.timings),
                sum(t.waited_s for t in pace.timings),
                sum(t.elements for t in pace.timings),
            )
            return sums[0] / done, sums[1] / done, sums[2] / done

        position = worker.timings[-1].position if worker.timings else None
        rest = [
            per_microbatch(pace)
            for who, pace in self._workers.items()
            if who != name and pace.timings and pace.timings[-1].position == position
        ]
        if not rest:
            return SlowdownParts()
        seconds, waited, elements = per_microbatch(worker)
        usual_s, usual_waited, usual_elements = (median(one) for one in zip(*rest, strict=True))
        beyond = seconds - usual_s
        share = (waited - usual_waited) / beyond if beyond > 0 else 0.0
        ratio = elements / usual_elements if usual_elements > 0 else 0.0
        return SlowdownParts(round(min(1.0, max(0.0, share)), 2), round(ratio, 2))

    def _next_pace(self, worker: _WorkerPace) -> tuple[Pace, float, str] | None:
        if worker.pace is Pace.OUT:
            return None
        if worker.pace is Pace.STANDBY:
            if worker.blocks_in_pace < self.limits.standby_blocks:
                return None
            rest = self.limits.standby_blocks * self.limits.block_steps
            return Pace.TRIAL, 1.0, f"it has rested for {rest} comparisons"
        if worker.pace is Pace.SLOW:
            return self._next_pace_of_slow(worker)
        slower = self._certain_slowdown(worker)
        steps = len(worker.block_slowdowns) * self.limits.block_steps
        if slower is not None:
            again = worker.pace is Pace.TRIAL and slower >= self.limits.standby_slowdown
            why = f"{slower:.2g} times slower than the others in the last {steps} comparisons"
            return (Pace.OUT, slower, f"{why}, after a rest") if again else (Pace.SLOW, slower, why)
        if (
            worker.pace is Pace.TRIAL
            and len(worker.block_slowdowns) >= self.limits.recover_after_blocks
        ):
            slower = median(worker.block_slowdowns)
            if slower < self.limits.normal_slowdown:
                return Pace.WELL, slower, f"as quick as the others in the last {steps} comparisons"
        return None

    def _next_pace_of_slow(self, worker: _WorkerPace) -> tuple[Pace, float, str] | None:
        """Decide on a worker with less work already: is that enough, or not needed any more?"""
        limits, blocks = self.limits, list(worker.block_slowdowns)
        lately = blocks[-limits.standby_after_blocks :]
        slower = median(lately)
        steps = len(lately) * limits.block_steps
        if (
            worker.blocks_in_pace >= limits.standby_after_blocks
            and min(lately) >= limits.standby_slowdown
        ):
            why = f"still {slower:.2g} times slower after {steps} comparisons"
            return Pace.STANDBY, slower, why
        lately = blocks[-limits.recover_after_blocks :]
        if (
            worker.blocks_in_pace >= limits.recover_after_blocks
            and max(lately) < limits.rules[-1].min_slowdown
        ):
            slower = median(lately)
            if slower < limits.normal_slowdown:
                steps = len(lately) * limits.block_steps
                return Pace.WELL, slower, f"as quick as the others in the last {steps} comparisons"
        return None

    def _certain_slowdown(self, worker: _WorkerPace) -> float | None:
        """Return how many times slower the worker is; None if it is not, or if that is not sure
        yet."""
        for sure in self.limits.rules:
            lately = list(worker.block_slowdowns)[-sure.blocks :]
            slower = median(lately) if len(lately) == sure.blocks else 0.0
            if (
                slower >= sure.min_slowdown
                and sum(b >= sure.min_block_slowdown for b in lately) >= sure.min_agreeing_blocks
            ):
                return slower
        return None


def _relative_slowdowns(paces: Mapping[WorkerName, float]) -> dict[WorkerName, float]:
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
