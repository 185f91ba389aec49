"""Noticing who stands still: an agent looks at its own workers, the coordinator compares nodes.

    Lookout     on each node: what the workers say of themselves, and what the operating system
                says of them. A worker that is stopped is named here; where all ranks of the
                generation are here, so is one that the others wait for.
    Comparing   at the coordinator, where ranks sit on several nodes: whoever stands still for
                longer than a step is told of with the node's next question, which is asked at once
                then; while all is well nothing is sent.

The judgement is `policy.standstill`'s. Ages travel, never times: clocks of two nodes are not
compared. Who is named is told to his node, which looks once more before it kills.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from holdfast.elastic.members import AT_WORK, Member, Members
from holdfast.policy.standstill import (
    FIRST,
    PATIENT,
    SECONDS,
    STEPS,
    Found,
    Mark,
    all_still,
    frozen_limit,
    judge,
    normal_step,
    stuck,
)

WAITING = ("reduce", "vote")
"""Phases in which a worker has nothing to do but wait for others."""
KEPT_STEPS = 32
"""Steps by which the normal one is known."""
OWN_CALLS = 10.0
"""Seconds that a worker's reporter may be busy with something else after its events were stored."""

NOBODY = -1
"""Of all ranks: they stand still, and nothing says for whom they wait."""

_FIRST = 0.3  # beside a normal step: standing still for so long is told
_AGAIN, _WAITS_AGAIN = 1.2, 2.0  # times as old as when it was told last: it is told again
_ASLEEP = 1.0  # seconds late: this agent was stopped itself, and nobody could report
_STEP_BITS = 32
_ALL_MARKS = (1 << _STEP_BITS) - 1  # whoever holds has passed all points of its step


@dataclass(frozen=True)
class Process:
    """What the operating system says of a process. state: its letter. cpu: seconds that all its
    threads have computed."""

    state: str
    cpu: float


def process_of(pid: int) -> Process | None:
    """None where that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Process(fields[0].decode(), ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Blame:
    """Who is given up, where it stood, and why. sign: stopped, silent, behind, progress; stuck, of
    nobody."""

    rank: int
    step: int
    marks: int
    sign: str
    seconds: float

    def to_json(self) -> list[Any]:
        return [self.rank, self.step, self.marks, self.sign, round(self.seconds, 3)]

    @staticmethod
    def from_json(row: Iterable[Any]) -> Blame:
        rank, step, marks, sign, seconds = row
        return Blame(int(rank), int(step), int(marks), str(sign), float(seconds))

    def cause(self, phase: str) -> str:
        where = f"in step {self.step}, {phase}"
        match self.sign:
            case "stopped":
                return f"its process was stopped for {self.seconds:.1f} s {where}"
            case "silent":
                return f"not heard for {self.seconds:.1f} s {where}, while others wait for it"
            case "behind":
                return f"no progress for {self.seconds:.1f} s {where}, while others wait for it"
        return f"no progress for {self.seconds:.3g} s {where}"


@dataclass(frozen=True)
class Watch:
    """What is done about who stands still. steps: what past steps took, over generations; kill:
    ends a process, with the reason; tell: somebody stands still of whom the coordinator is to
    know. compiles: whether a first step may take as long as a compiler does."""

    steps: deque[float] = field(default_factory=deque)
    kill: Callable[[int, str], None] = lambda pid, why: None
    tell: Callable[[], None] = lambda: None
    compiles: bool = False


@dataclass
class _Seen:
    """What is known of one worker's process."""

    at: float  # its last progress, at which `base` was read
    base: float | None = None
    cpu: float | None = None  # without what its own reports took
    frozen: float | None = None  # since when it was seen stopped
    frozen_cpu: float = 0.0
    told: float = 0.0  # its age when it was told of last
    waits: bool = False


class Lookout:
    """Looks at the workers of one generation that sit on this node. Lives in one event loop."""

    def __init__(
        self, members: Members, world_size: int, steps: deque[float], progress_seconds: float,
        compare: bool = True, look: Callable[[int], Process | None] = process_of, *,
        compiles: bool = False,
    ) -> None:  # fmt: skip
        """steps: what past steps took, of this generation and older ones. compare: False: only
        `progress_seconds` count. compiles: as in `Watch`."""
        self._members, self._steps, self._look = members, steps, look
        self._here = members.world_size == world_size  # nobody sits elsewhere
        self._progress_seconds, self._compare = progress_seconds, compare
        self._compiles = compiles
        self._seen: dict[int, _Seen] = {}
        self._furthest: int | None = None  # the newest step that was begun
        self._worked: dict[int, tuple[float, int]] = {}  # of each rank, what is counted
        self._begun = 0  # steps that have passed in this generation
        self._last: float | None = None
        self._late: deque[float] = deque([0.0], maxlen=5)

    @property
    def normal(self) -> float | None:
        return normal_step(tuple(self._steps))

    def heard(self, member: Member) -> None:
        """A worker has reported. What counts is the step alone, as the worker has timed it: between
        two a loader may wait, or a validation run. Its first report may be of its third step."""
        seconds, steps = member.worked
        if self._furthest is None and not steps:
            if member.phase == "compute":
                self._furthest = member.step
            return
        if self._furthest is not None and member.step <= self._furthest:
            return
        self._furthest = member.step
        self._begun += 1
        before, counted = self._worked.get(member.rank, (0.0, 0))
        self._worked[member.rank] = member.worked
        if steps > counted:
            self._steps.append((seconds - before) / (steps - counted))
            while len(self._steps) > KEPT_STEPS:
                self._steps.popleft()

    def tick(self, now: float, beat: float, over: bool = False) -> list[Blame]:
        """Look at all of them; who is to be given up by what is known here. over: the generation
        is, and nobody works any more."""
        late = 0.0 if self._last is None else max(0.0, now - self._last - beat)
        self._last = now
        if late > _ASLEEP:
            self._members.forgive(late)
            for seen in self._seen.values():
                seen.at += late
                seen.frozen = None
            late = 0.0
        self._late.append(late)
        found = [blame for member in self._watched if (blame := self._frozen(member, now))]
        if not self._compare:
            found = []
        return found if found or over or not self._here else self._judged(now)

    def _judged(self, now: float) -> list[Blame]:
        """All ranks are here."""
        marks = self.marks(now)
        named = judge(marks, self.normal, now, lag=max(self._late)) if self._compare else {}
        if named:
            return [self._blame(rank, one) for rank, one in named.items()]
        if self._compare and (waited := stuck(marks, self.normal, now, lag=max(self._late))):
            return [Blame(NOBODY, 0, 0, "stuck", waited)]
        hung = self._members.hung(now, self._progress_seconds)
        if hung is None:
            return []
        return [Blame(hung.rank, hung.step, hung.marks, "progress", self._progress_seconds)]

    def _blame(self, rank: int, found: Found) -> Blame:
        member = self._members[rank]
        return Blame(rank, member.step, member.marks, found.sign, found.seconds)

    def confirms(self, blame: Blame) -> bool:
        """Whether the worker that the coordinator has named stands where it stood."""
        member = next((one for one in self._watched if one.rank == blame.rank), None)
        return member is not None and (member.step, member.marks) == (blame.step, blame.marks)

    # --- one worker -----------------------------------------------------------------------------
    @property
    def _watched(self) -> list[Member]:
        return [m for m in self._members.alive if m.held is None and m.outcome is None]

    def _frozen(self, member: Member, now: float) -> Blame | None:
        """Read what the operating system says; whether it has stopped the process for too long."""
        seen = self._seen.setdefault(member.rank, _Seen(member.since))
        process = self._look(member.pid) if member.pid else None
        if process is None:
            seen.cpu = seen.frozen = None
            return None
        seen.cpu = process.cpu - member.reporting
        if seen.at != member.since or seen.base is None:
            seen.at, seen.base, seen.told = member.since, seen.cpu, 0.0
        if process.state != "T" or member.answering:
            seen.frozen = None
            return None
        if seen.frozen is None or member.heard > seen.frozen or process.cpu > seen.frozen_cpu:
            seen.frozen, seen.frozen_cpu = now, process.cpu
        seconds = now - seen.frozen
        if seconds <= frozen_limit(self.normal, max(self._late)):
            return None
        return Blame(member.rank, member.step, member.marks, "stopped", seconds)

    def marks(self, now: float) -> dict[int, Mark]:
        """Of every worker here that is at work, or holds for a pause."""
        there = (m for m in self._members.alive if m.outcome is None)
        return {m.rank: self._mark(m, now) for m in there if m.held is None or m.pauses}

    def _mark(self, member: Member, now: float) -> Mark:
        seen = self._seen.setdefault(member.rank, _Seen(member.since))
        if member.pauses:  # it has done all that was asked of it
            return Mark((member.step << _STEP_BITS) + _ALL_MARKS, member.since, waits=True)
        known = seen.cpu is not None and seen.base is not None and seen.at == member.since
        computed = seen.cpu - seen.base if known else None  # type: ignore[operator]
        quiet = 0.0 if member.answering else now - member.heard
        if member.excused:
            quiet = max(0.0, quiet - OWN_CALLS)
        return Mark(
            (member.step << _STEP_BITS) + member.marks, member.since, computed,
            member.phase in WAITING, quiet, self._times(member), member.asleep,
        )  # fmt: skip

    def _times(self, member: Member) -> float:
        """How many times as long as usual what this worker does may take."""
        if member.phase not in AT_WORK or (self._compiles and not self._begun):
            return PATIENT
        return 1.0 if self._begun else FIRST

    # --- what the coordinator is told -----------------------------------------------------------
    def due(self, now: float) -> bool:
        """Whether it is to hear at once of somebody who stands still."""
        if self._here:
            return False
        for rank, mark in self._still(now).items():
            seen, age = self._seen[rank], now - mark.at
            if age >= seen.told * (_WAITS_AGAIN if mark.waits and not mark.quiet else _AGAIN):
                return True
        return False

    def told(self, now: float) -> dict[str, Any]:
        """What goes along with a question; {} while nobody stands still."""
        if self._here:
            return {}
        still = self._still(now)
        if not still:
            return {}
        rows = []
        for rank, mark in still.items():
            age = now - mark.at
            self._seen[rank].told = age
            member = self._members[rank]
            rows.append([
                rank, member.step, mark.point & _ALL_MARKS, round(age, 3),
                None if mark.computed is None else round(mark.computed, 2), mark.waits,
                round(mark.quiet, 3), mark.times, mark.asleep,
            ])  # fmt: skip
        normal = self.normal if self._compare else None  # without it nobody is compared
        return {"normal": normal, "late": max(self._late), "of": len(self.marks(now)),
                "progress": self._progress_seconds, "ranks": rows}  # fmt: skip

    def _still(self, now: float) -> dict[int, Mark]:
        first = (self.normal or 2.0) + _FIRST if self._compare else self._progress_seconds
        marks = self.marks(now)
        return {rank: mark for rank, mark in marks.items() if now - mark.at > first}


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
