"""Who has stopped: said by comparing workers that do the same work. Pure: times are arguments.

A step ends when everybody has done his part, so whoever stops makes all others wait; they say so,
and he does not. Three signs, the surest first:

    stopped   the operating system says that the process is stopped, and it has used no processor
    silent    it has not been heard, though the thread that speaks has nothing else to do: the
              interpreter is held, or the process does not run; and others wait
    behind    it is heard, and gets no further, while most of the others are further and wait, or
              sleep where they wait for it

Where all are heard and wait, nobody is named: all are told to stop, and who does not is the one.
One that works alone is told so after ten times the limit of a usual step.

What is long follows the step time: three normal steps and a second. Where a worker runs, the
seconds of processor that it had are counted instead: a load on all cores keeps it from working, but
uses up none of them. Nobody is named where nobody waits: then all are slow, or wait for something
outside. Beside the arithmetic of a step (validation, a save, the data, a first step that compiles)
it is ten times as long; in any other first step of a generation, where connections are made and
memory is touched for the first time, three times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Who = int
"""A worker: its rank in the generation."""

STEPS, SECONDS = 3.0, 1.0
"""A worker that has stopped is named after so many normal steps and seconds."""
FROZEN_STEPS, FROZEN_SECONDS = 1.5, 0.4
"""One that the operating system has stopped, sooner: that is no matter of opinion."""
PATIENT = 10.0
"""Times as long, where what is done takes as long as it takes."""
FIRST = 3.0
"""Times as long, in the first step of a generation."""
ASLEEP = 2.0
"""Times as long, for one that sleeps where ranks wait: whom it waits for is told of meanwhile."""
ALL = 3.0
"""Times as long, where all wait: nobody is excluded then, but all stop and go on."""
UNKNOWN_STEP = 1.0
"""Seconds of a step, before there was one."""

_RECENT = 4  # newest steps; if these were slow, then what is normal is so now
_RUNS = 0.05  # of a core: whoever uses so much runs, and is short of cores at worst
_SPEAKS = 0.1  # and so much, whoever is not heard; see `silent`


@dataclass(frozen=True, slots=True)
class Mark:
    """The last sign of progress of a worker. point: how far it has come; who is further has the
    higher one, and equal ones wait for the same. at: when it came there, by the clock of the one
    who compares. computed: seconds of CPU it has used since; None: not known. waits: it says that
    it waits for others now, so it is not the one that they wait for. quiet: seconds since it was
    last heard, whatever it said. times: what it does now may take so many times as long. asleep: by
    its own word it sleeps where ranks wait for each other: the partner of one that hangs does."""

    point: int
    at: float
    computed: float | None = None
    waits: bool = False
    quiet: float = 0.0
    times: float = 1.0
    asleep: bool = False


@dataclass(frozen=True)
class Found:
    """seconds: for how long it has stood still. sign: silent or behind."""

    seconds: float
    sign: str


def normal_step(steps: Sequence[float]) -> float | None:
    """Seconds that a step takes now: the median, or that of the newest ones if it is more. None
    before there was one."""
    if not steps:
        return None
    return max(median(steps), median(steps[-_RECENT:]))


def frozen_limit(normal: float | None, lag: float = 0.0) -> float:
    """Seconds after which a process that the operating system has stopped is given up."""
    return FROZEN_STEPS * (UNKNOWN_STEP if normal is None else normal) + FROZEN_SECONDS + lag


def limit_of(normal: float, mark: Mark, lag: float = 0.0) -> float:
    """Seconds that a worker may stand still while others wait for it."""
    return mark.times * (STEPS * normal + SECONDS) + lag


def judge(
    marks: Mapping[Who, Mark], normal: float | None, now: float, *, lag: float = 0.0
) -> dict[Who, Found]:
    """Who is named; of several signs only those with the surest."""
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
    """Who is not heard any more, and for how long, while somebody who is waits for it.

    While one thread holds the interpreter's lock each other one looks for it 200 times a second: a
    few hundredths of a core, which are no work.
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
    """Who makes no progress while others have finished and wait, and for how long.

    steps: seconds of past steps, the newest last. lag: how late the one who compares was woken
    up: if he is late himself, so is everybody.

    Nobody is named before the first step has passed (it compiles, connects, warms up), nor where
    nobody waits: then all are slow, or all wait for something outside.
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
    if any(not _idles(mark, now) for mark in behind.values()):  # the others wait for these
        behind = {who: mark for who, mark in behind.items() if not _idles(mark, now)}
    found: dict[Who, float] = {}
    for who, mark in behind.items():
        waited = now - max(waiting, mark.at)
        patience = ASLEEP if mark.asleep else 1.0
        if _spent(mark, now, waited) > patience * limit_of(normal, mark, lag):
            found[who] = waited
    return found


def _behind(marks: Mapping[Who, Mark], furthest: int) -> dict[Who, Mark]:
    """Whom the others may wait for: whoever got less far, and is not asleep in waiting for another
    itself. Where all of those are, or nobody got less far, the one they wait for stands where they
    do, or further: inside a replica ranks wait for each other between two points of a step."""
    behind = {who: mark for who, mark in marks.items() if mark.point < furthest}
    awake = {who: mark for who, mark in behind.items() if not mark.asleep}
    if not awake and any(mark.asleep for mark in marks.values()):
        awake = {who: m for who, m in marks.items() if not m.asleep and not m.waits}
    return awake or behind


def stuck(
    marks: Mapping[Who, Mark], normal: float | None, now: float, *, lag: float = 0.0
) -> float | None:
    """For how long all have stood still, are heard and wait, where it is too long for a message
    that is late: somebody does not do what the others wait for, and nothing says who. They are to
    stop, all of them: whoever does not is the one. One that works alone is waited for by nobody:
    only where it uses no processor for longer still, heard or not."""
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
    """The one to blame where everybody has stood still for so long, and nothing says more: whoever
    got least far is what the others wait for."""
    if not marks or any(now - mark.at <= seconds for mark in marks.values()):
        return None
    return min(marks, key=lambda who: (marks[who].point, marks[who].at))


def _runs(mark: Mark, now: float, share: float = _RUNS) -> bool:
    return mark.computed is not None and mark.computed >= share * max(now - mark.at, 1e-9)


def _idles(mark: Mark, now: float) -> bool:
    """Whether it waits, by its word or because it uses no processor."""
    return mark.waits or (mark.computed is not None and not _runs(mark, now))


def _spent(mark: Mark, now: float, waited: float, share: float = _RUNS) -> float:
    """Of that time, what it had to work: all, unless it runs and was kept from it."""
    if mark.computed is not None and _runs(mark, now, share):
        return min(waited, mark.computed)
    return waited
