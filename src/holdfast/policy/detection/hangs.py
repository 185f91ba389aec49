"""Finds hung workers by comparing workers that do the same work. Pure: times are arguments.

A step ends only when every worker has finished. A hung worker therefore blocks all the remaining
workers: they report that they wait, and it does not. Three signs, the surest first:

    stopped   the operating system says that the process is stopped, and it has used no processor
    silent    it has not been heard, though the reporting thread has nothing else to do: the
              interpreter is held, or the process does not run; and another worker waits
    behind    it is heard but makes no progress, while most workers are further and wait, or
              sleep in a wait for it

If all workers are heard and wait, a device may hang. It has not reached an exchange in which the
devices of the rest wait, so its worker is named. If the devices show nothing, no worker is named.
All receive a notice to stop, and the worker that does not stop is the hung one. A worker that works
alone receives it after ten times the usual limit of a step.

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

from holdfast.core.device_progress import GroupProgress, find_late_devices

WorkerRank = int
"""A worker: its rank in the generation."""

HANG_LIMIT_STEPS, HANG_LIMIT_EXTRA_S = 3.0, 1.0
"""A hung worker is named after this many normal steps and seconds."""
STOPPED_LIMIT_STEPS, STOPPED_LIMIT_EXTRA_S = 1.5, 0.4
"""A worker that the operating system has stopped is named sooner: that sign leaves no doubt."""
SLOW_PHASE_LIMIT_FACTOR = 10.0
"""Factor on the limit during work of unknown length (validation, a save, the data)."""
FIRST_STEP_LIMIT_FACTOR = 3.0
"""Factor on the limit in the first step of a generation."""
BLOCKED_LIMIT_FACTOR = 2.0
"""Factor on the limit of a worker asleep in a wait: the rank it waits for is named meanwhile."""
DEADLOCK_LIMIT_FACTOR = 3.0
"""Factor on the limit if all workers wait: then none is excluded, but all stop and continue."""
DEFAULT_STEP_S = 1.0
"""Seconds assumed for a step before the first one has been measured."""

_RECENT_STEPS = 4  # newest steps; if these were slow, the normal step is as slow now
# of a core: a worker that uses this much runs, and is short of cores at worst
_RUNNING_CPU_SHARE = 0.05
_UNHEARD_RUNNING_CPU_SHARE = 0.1  # of a core: this much, if the worker is not heard; see `silent`


@dataclass(frozen=True, slots=True)
class ProgressMark:
    """The last sign of progress of a worker. is_waiting: it reports that it waits for other ranks,
    so it is not the one that they wait for. is_blocked_in_collective: it reports that it sleeps
    where ranks wait for each other, as the partner of a hung rank does."""

    point: int  # a higher one is further; equal points wait for the same thing
    reached_at: float  # by the clock of the caller that compares
    cpu_seconds: float | None = None  # of CPU used since then; None: not known
    is_waiting: bool = False
    silent_for_s: float = 0.0  # since its last message of any kind
    limit_factor: float = 1.0  # on the limit, for its current work
    is_blocked_in_collective: bool = False
    device_progress: tuple[GroupProgress, ...] = ()  # how far its device is with exchanges


@dataclass(frozen=True)
class Suspect:
    """A worker that is named."""

    stalled_for_s: float  # length of its hang
    sign: str  # silent, behind or device


def normal_step_s(steps: Sequence[float]) -> float | None:
    """Return the seconds that a step takes now; None before the first one.

    That is the median of all steps, or the median of the newest ones if that is more.
    """
    if not steps:
        return None
    return max(median(steps), median(steps[-_RECENT_STEPS:]))


def stopped_process_limit(normal: float | None, wakeup_lag_s: float = 0.0) -> float:
    """Return the seconds after which a process stopped by the operating system is given up."""
    step_s = DEFAULT_STEP_S if normal is None else normal
    return STOPPED_LIMIT_STEPS * step_s + STOPPED_LIMIT_EXTRA_S + wakeup_lag_s


def hang_limit(normal: float, mark: ProgressMark, wakeup_lag_s: float = 0.0) -> float:
    """Return the seconds that a worker may hang while other workers wait for it."""
    return mark.limit_factor * (HANG_LIMIT_STEPS * normal + HANG_LIMIT_EXTRA_S) + wakeup_lag_s


def find_hung(
    marks: Mapping[WorkerRank, ProgressMark],
    normal: float | None,
    now: float,
    *,
    wakeup_lag_s: float = 0.0,
) -> dict[WorkerRank, Suspect]:
    """Return the workers named as hung; of several signs only those with the surest."""
    if normal is None:
        return {}
    if found := find_unresponsive(marks, normal, now, wakeup_lag_s=wakeup_lag_s):
        return {who: Suspect(seconds, "silent") for who, seconds in found.items()}
    return {
        who: Suspect(seconds, "behind")
        for who, seconds in find_stopped(marks, [normal], now, wakeup_lag_s=wakeup_lag_s).items()
    }


def find_unresponsive(
    marks: Mapping[WorkerRank, ProgressMark],
    normal: float,
    now: float,
    *,
    wakeup_lag_s: float = 0.0,
) -> dict[WorkerRank, float]:
    """Return the workers that are not heard any more while a heard worker waits for them, with
    seconds.

    While one thread holds the interpreter's lock, each other thread looks for it 200 times a
    second. That takes a few hundredths of a core and is no work.
    """
    found: dict[WorkerRank, float] = {}
    for who, mark in marks.items():
        limit = hang_limit(normal, ProgressMark(0, 0.0), wakeup_lag_s)
        if (
            mark.silent_for_s <= limit
            or _working_time(mark, now, mark.silent_for_s, _UNHEARD_RUNNING_CPU_SHARE) <= limit
        ):
            continue
        if any(
            other.silent_for_s <= limit
            and other.point >= mark.point
            and _is_idle(other, now)
            and now - other.reached_at > limit
            for name, other in marks.items()
            if name != who
        ):
            found[who] = now - mark.reached_at
    return found


def find_stopped(
    marks: Mapping[WorkerRank, ProgressMark],
    steps: Sequence[float],
    now: float,
    *,
    wakeup_lag_s: float = 0.0,
) -> dict[WorkerRank, float]:
    """Return the workers that make no progress while other workers have finished and wait, with
    seconds.

    Args:
        marks: Each worker's last sign of progress.
        steps: Seconds of past steps, the newest last.
        now: Time by the caller's clock.
        wakeup_lag_s: How late the caller was woken up. If the caller is late, every worker may be.

    No worker is named before the first step has passed, because that one compiles, connects and
    warms up. None is named if no worker waits: then all are slow, or all wait for something
    outside.
    """
    normal = normal_step_s(steps)
    if normal is None or len(marks) < 2:
        return {}
    furthest = max(mark.point for mark in marks.values())
    waiting = max(mark.reached_at for mark in marks.values() if mark.point == furthest)
    behind = _blocking_candidates(marks, furthest)
    if len(behind) > len(marks) // 2:
        return {}
    if not all(mark.is_waiting for mark in behind.values()):
        behind = {who: mark for who, mark in behind.items() if not mark.is_waiting}
    if any(not _is_idle(mark, now) for mark in behind.values()):  # the rest waits for these
        behind = {who: mark for who, mark in behind.items() if not _is_idle(mark, now)}
    found: dict[WorkerRank, float] = {}
    for who, mark in behind.items():
        waited = now - max(waiting, mark.reached_at)
        patience = BLOCKED_LIMIT_FACTOR if mark.is_blocked_in_collective else 1.0
        if _working_time(mark, now, waited) > patience * hang_limit(normal, mark, wakeup_lag_s):
            found[who] = waited
    return found


def _blocking_candidates(
    marks: Mapping[WorkerRank, ProgressMark], furthest: int
) -> dict[WorkerRank, ProgressMark]:
    """Return the workers that the rest may wait for.

    These are workers that are less far and do not sleep in a wait for another rank. If there is
    none, the hung worker has the same point as the sleepers or a later one. For inside a replica,
    ranks wait for each other between two points of a step.
    """
    behind = {who: mark for who, mark in marks.items() if mark.point < furthest}
    awake = {who: mark for who, mark in behind.items() if not mark.is_blocked_in_collective}
    if not awake and any(mark.is_blocked_in_collective for mark in marks.values()):
        awake = {
            who: m
            for who, m in marks.items()
            if not m.is_blocked_in_collective and not m.is_waiting
        }
    return awake or behind


def find_deadlock(
    marks: Mapping[WorkerRank, ProgressMark],
    normal: float | None,
    now: float,
    *,
    wakeup_lag_s: float = 0.0,
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
        limit = hang_limit(normal, mark, wakeup_lag_s)
        patience = DEADLOCK_LIMIT_FACTOR * limit
        if alone:
            patience = max(patience, SLOW_PHASE_LIMIT_FACTOR * limit / mark.limit_factor)
        heard = alone or mark.silent_for_s <= limit
        if not _is_idle(mark, now) or not heard or now - mark.reached_at <= patience:
            return None
    return min(now - mark.reached_at for mark in marks.values())


def find_hung_devices(
    marks: Mapping[WorkerRank, ProgressMark], now: float
) -> dict[WorkerRank, Suspect]:
    """Return the workers whose devices the rest waits for. Call it if all workers have waited for
    too long."""
    late = find_late_devices({who: mark.device_progress for who, mark in marks.items()})
    return {who: Suspect(now - marks[who].reached_at, "device") for who in late}


def find_furthest_behind(
    marks: Mapping[WorkerRank, ProgressMark], now: float, seconds: float
) -> WorkerRank | None:
    """Return the worker to blame if all have hung for `seconds` and no other sign says more.

    That is the worker that is least far: the rest waits for it.
    """
    if not marks or any(now - mark.reached_at <= seconds for mark in marks.values()):
        return None
    return min(marks, key=lambda who: (marks[who].point, marks[who].reached_at))


def _is_running(mark: ProgressMark, now: float, share: float = _RUNNING_CPU_SHARE) -> bool:
    least = share * max(now - mark.reached_at, 1e-9)
    return mark.cpu_seconds is not None and mark.cpu_seconds >= least


def _is_idle(mark: ProgressMark, now: float) -> bool:
    """Return True if the worker waits: by its own report, or because it uses no processor."""
    return mark.is_waiting or (mark.cpu_seconds is not None and not _is_running(mark, now))


def _working_time(
    mark: ProgressMark, now: float, waited: float, share: float = _RUNNING_CPU_SHARE
) -> float:
    """Return the part of the wait in which the worker could work.

    That is all of it, unless the worker runs and was kept from working.
    """
    if mark.cpu_seconds is not None and _is_running(mark, now, share):
        return min(waited, mark.cpu_seconds)
    return waited
