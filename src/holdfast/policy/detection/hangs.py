"""Finds hung workers by comparing workers that do the same work. Pure: times are arguments.

A step ends only when every worker has finished. A hung worker therefore blocks all the remaining
workers: they report that they wait, and it does not. Three signs, the surest first:

    stopped   the operating system says that the process is stopped, and it has used no processor
    silent    it has not been heard, though the reporting thread has nothing else to do: the
              interpreter is held, or the process does not run; and another worker waits
    behind    it is heard but makes no progress, while most workers are further and wait, or
              sleep in a wait for it

If all workers are heard and wait, none is named. All receive a notice to stop, and the worker that
does not stop is the hung one. A worker that works alone receives it after ten times the usual limit
of a step.

The limit follows the step time: three normal steps and a second. For a running worker, the seconds
of processor that it had count instead. A load on all cores keeps it from working, but uses up none
of these seconds. If no worker waits, none is named: then all are slow, or wait for something
outside. The limit is ten times as long during work other than a step's arithmetic. That is
validation, a save, the data, or a first step that compiles. It is three times as long in any other
first step of a generation, which connects and touches memory for the first time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Who = int
"""A worker: its rank in the generation."""

STEPS, SECONDS = 3.0, 1.0
"""A hung worker is named after this many normal steps and seconds."""
FROZEN_STEPS, FROZEN_SECONDS = 1.5, 0.4
"""A worker that the operating system has stopped is named sooner: that sign leaves no doubt."""
PATIENT = 10.0
"""Factor on the limit during work of unknown length (validation, a save, the data)."""
FIRST = 3.0
"""Factor on the limit in the first step of a generation."""
ASLEEP = 2.0
"""Factor on the limit of a worker asleep in a wait: the rank it waits for is named meanwhile."""
ALL = 3.0
"""Factor on the limit if all workers wait: then none is excluded, but all stop and continue."""
UNKNOWN_STEP = 1.0
"""Seconds assumed for a step before the first one has been measured."""

_RECENT = 4  # newest steps; if these were slow, the normal step is as slow now
_RUNS = 0.05  # of a core: a worker that uses this much runs, and is short of cores at worst
_SPEAKS = 0.1  # of a core: this much, if the worker is not heard; see `silent`


@dataclass(frozen=True, slots=True)
class Mark:
    """The last sign of progress of a worker.

    Attributes:
        point: Progress of the worker. A higher point is further; equal points wait for the same
            thing.
        at: When it came there, by the clock of the caller that compares.
        computed: Seconds of CPU used since then; None if not known.
        waits: It reports that it waits for other ranks, so it is not the one that they wait for.
        quiet: Seconds since its last message of any kind.
        times: Factor on the limit for its current work.
        asleep: It reports that it sleeps where ranks wait for each other. The partner of a hung
            rank
            does.
    """

    point: int
    at: float
    computed: float | None = None
    waits: bool = False
    quiet: float = 0.0
    times: float = 1.0
    asleep: bool = False


@dataclass(frozen=True)
class Found:
    """A worker that is named. seconds: length of its hang. sign: silent or behind."""

    seconds: float
    sign: str


def normal_step(steps: Sequence[float]) -> float | None:
    """Return the seconds that a step takes now; None before the first one.

    That is the median of all steps, or the median of the newest ones if that is more.
    """
    if not steps:
        return None
    return max(median(steps), median(steps[-_RECENT:]))


def frozen_limit(normal: float | None, lag: float = 0.0) -> float:
    """Return the seconds after which a process stopped by the operating system is given up."""
    return FROZEN_STEPS * (UNKNOWN_STEP if normal is None else normal) + FROZEN_SECONDS + lag


def limit_of(normal: float, mark: Mark, lag: float = 0.0) -> float:
    """Return the seconds that a worker may hang while other workers wait for it."""
    return mark.times * (STEPS * normal + SECONDS) + lag


def judge(
    marks: Mapping[Who, Mark], normal: float | None, now: float, *, lag: float = 0.0
) -> dict[Who, Found]:
    """Return the workers named as hung; of several signs only those with the surest."""
    if normal is None:
        return {}
    if found := silent(marks, normal, now, lag=lag):
        return {who: Found(seconds, "silent") for who, seconds in found.items()}
    return {
        who: Found(seconds, "behind")
        for who, seconds in stopped(marks, [normal], now, lag=lag).items()
    }


def silent(
    marks: Mapping[Who, Mark], normal: float, now: float, *, lag: float = 0.0
) -> dict[Who, float]:
    """Return the workers that are not heard any more while a heard worker waits for them, with
    seconds.

    While one thread holds the interpreter's lock, each other thread looks for it 200 times a
    second. That takes a few hundredths of a core and is no work.
    """
    found: dict[Who, float] = {}
    for who, mark in marks.items():
        limit = limit_of(normal, Mark(0, 0.0), lag)
        if mark.quiet <= limit or _spent(mark, now, mark.quiet, _SPEAKS) <= limit:
            continue
        if any(
            other.quiet <= limit and other.point >= mark.point and _idles(other, now)
            and now - other.at > limit
            for name, other in marks.items() if name != who
        ):  # fmt: skip
            found[who] = now - mark.at
    return found


def stopped(
    marks: Mapping[Who, Mark], steps: Sequence[float], now: float, *, lag: float = 0.0
) -> dict[Who, float]:
    """Return the workers that make no progress while other workers have finished and wait, with
    seconds.

    Args:
        marks: Each worker's last sign of progress.
        steps: Seconds of past steps, the newest last.
        now: Time by the caller's clock.
        lag: How late the caller was woken up. If the caller is late, every worker may be.

    No worker is named before the first step has passed, because that one compiles, connects and
    warms up. None is named if no worker waits: then all are slow, or all wait for something
    outside.
    """
    normal = normal_step(steps)
    if normal is None or len(marks) < 2:
        return {}
    furthest = max(mark.point for mark in marks.values())
    waiting = max(mark.at for mark in marks.values() if mark.point == furthest)
    behind = _behind(marks, furthest)
    if len(behind) > len(marks) // 2:
        return {}
    if not all(mark.waits for mark in behind.values()):
        behind = {who: mark for who, mark in behind.items() if not mark.waits}
    if any(not _idles(mark, now) for mark in behind.values()):  # the rest waits for these
        behind = {who: mark for who, mark in behind.items() if not _idles(mark, now)}
    found: dict[Who, float] = {}
    for who, mark in behind.items():
        waited = now - max(waiting, mark.at)
        patience = ASLEEP if mark.asleep else 1.0
        if _spent(mark, now, waited) > patience * limit_of(normal, mark, lag):
            found[who] = waited
    return found


def _behind(marks: Mapping[Who, Mark], furthest: int) -> dict[Who, Mark]:
    """Return the workers that the rest may wait for.

    These are workers that are less far and do not sleep in a wait for another rank. If there is
    none, the hung worker has the same point as the sleepers or a later one. For inside a replica,
    ranks wait for each other between two points of a step.
    """
    behind = {who: mark for who, mark in marks.items() if mark.point < furthest}
    awake = {who: mark for who, mark in behind.items() if not mark.asleep}
    if not awake and any(mark.asleep for mark in marks.values()):
        awake = {who: m for who, m in marks.items() if not m.asleep and not m.waits}
    return awake or behind


def stuck(
    marks: Mapping[Who, Mark], normal: float | None, now: float, *, lag: float = 0.0
) -> float | None:
    """Return the seconds for which all workers have waited, if that is too long; None otherwise.

    All are heard and wait, for longer than a late message explains. So one worker does not do what
    the rest waits for, and no sign says which. All are asked to stop: the one that does not is
    hung. No rank waits for a worker that works alone. It counts as hung only if it uses no
    processor for longer still, whether it is heard or not.
    """
    if normal is None or not marks:
        return None
    alone = len(marks) == 1
    for mark in marks.values():
        limit = limit_of(normal, mark, lag)
        patience = ALL * limit
        if alone:
            patience = max(patience, PATIENT * limit / mark.times)
        heard = alone or mark.quiet <= limit
        if not _idles(mark, now) or not heard or now - mark.at <= patience:
            return None
    return min(now - mark.at for mark in marks.values())


def all_still(marks: Mapping[Who, Mark], now: float, seconds: float) -> Who | None:
    """Return the worker to blame if all have hung for `seconds` and no other sign says more.

    That is the worker that is least far: the rest waits for it.
    """
    if not marks or any(now - mark.at <= seconds for mark in marks.values()):
        return None
    return min(marks, key=lambda who: (marks[who].point, marks[who].at))


def _runs(mark: Mark, now: float, share: float = _RUNS) -> bool:
    return mark.computed is not None and mark.computed >= share * max(now - mark.at, 1e-9)


def _idles(mark: Mark, now: float) -> bool:
    """Return True if the worker waits: by its own report, or because it uses no processor."""
    return mark.waits or (mark.computed is not None and not _runs(mark, now))


def _spent(mark: Mark, now: float, waited: float, share: float = _RUNS) -> float:
    """Return the part of the wait in which the worker could work.

    That is all of it, unless the worker runs and was kept from working.
    """
    if mark.computed is not None and _runs(mark, now, share):
        return min(waited, mark.computed)
    return waited
