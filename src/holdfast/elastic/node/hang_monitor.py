"""Detection of hung workers: an agent checks its own workers, the coordinator compares nodes.

    HangMonitor     on each node: reads the workers' reports and the state that the operating system
                    gives. It names a worker that is stopped (SIGSTOP). If all ranks of the
                    generation are on this node, it also names a worker that blocks the rest.
    HangDetector    at the coordinator, if ranks are on several nodes. A node reports a worker that
                    makes no progress for longer than a step. The report goes with the next
                    heartbeat, which is then sent at once. While all is well nothing is sent.

`policy.detection.hangs` decides. Ages travel, never times: clocks of two nodes are not compared.
The coordinator reports the hung worker to its node. The node checks again before it kills it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.elastic.node.worker_status import Member, Members
from holdfast.elastic.protocol.hung_worker import _ALL_MARKS, _STEP_BITS, NOBODY, Blame
from holdfast.elastic.protocol.worker_messages import AT_WORK
from holdfast.policy.detection.hangs import (
    FIRST,
    PATIENT,
    Found,
    Mark,
    frozen_limit,
    judge,
    normal_step,
    stuck,
)

WAITING = ("reduce", "vote")
"""Phases in which a worker only waits for other ranks."""
KEPT_STEPS = 32
"""Number of past steps that define the normal step time."""
OWN_CALLS = 10.0
"""Seconds that a worker's reporter may be busy with something else after its events were stored."""


_FIRST = 0.3  # beside a normal step: standing still for so long is told
_AGAIN, _WAITS_AGAIN = 1.2, 2.0  # times as old as when it was told last: it is told again
_ASLEEP = 1.0  # seconds late: this agent was stopped itself, and nobody could report


@dataclass(frozen=True)
class Process:
    """The operating system's view of a process.

    state: the letter of its state.
    cpu_seconds: CPU time of all its threads.
    """

    state: str
    cpu: float


def process_of(pid: int) -> Process | None:
    """Return the operating system's view of a process, or None if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Process(fields[0].decode(), ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Watch:
    """The actions on a hung worker.

    step_times: seconds of past steps, over generations.
    kill_process: ends a process, with the reason.
    report_to_coordinator: called when the coordinator must learn of a stalled worker.
    is_first_step_compiled: a first step may take as long as a compiler does.
    """

    steps: deque[float] = field(default_factory=deque)
    kill: Callable[[int, str], None] = lambda pid, why: None
    tell: Callable[[], None] = lambda: None
    compiles: bool = False


@dataclass
class _Seen:
    """The observations of one worker's process."""

    at: float  # its last progress, at which `base` was read
    base: float | None = None
    cpu: float | None = None  # without what its own reports took
    frozen: float | None = None  # since when it was seen stopped
    frozen_cpu: float = 0.0
    told: float = 0.0  # its age when it was told of last
    waits: bool = False


class Lookout:
    """Checks the workers of one generation on this node. Lives in one event loop."""

    def __init__(
        self, members: Members, world_size: int, steps: deque[float], progress_seconds: float,
        compare: bool = True, look: Callable[[int], Process | None] = process_of, *,
        compiles: bool = False,
    ) -> None:  # fmt: skip
        """Set up the monitor of one generation.

        Args:
            step_times: seconds of past steps, of this generation and older ones.
            can_compare: if False, only `progress_timeout_s` counts.
            is_first_step_compiled: as in `HangHooks`.
        """
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
        """Record the step time of a worker's report.

        Only the step itself counts, as the worker has timed it: between two steps a loader may
        wait, or a validation may run. A worker's first report may be of its third step.
        """
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
        """Check all workers; return those that this node alone can declare hung.

        is_over: the generation has ended, so no worker computes any more.
        """
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
        """Find hung workers when all ranks are on this node."""
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
        """Return True if the worker that the coordinator named has made no progress since."""
        member = next((one for one in self._watched if one.rank == blame.rank), None)
        return member is not None and (member.step, member.marks) == (blame.step, blame.marks)

    # --- one worker -----------------------------------------------------------------------------
    @property
    def _watched(self) -> list[Member]:
        return [m for m in self._members.alive if m.held is None and m.outcome is None]

    def _frozen(self, member: Member, now: float) -> Blame | None:
        """Read the process state; return the worker if it was stopped (SIGSTOP) for too long."""
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
        """Return the progress marks of every worker here that computes, or holds for a pause."""
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
        """Return the factor by which this worker's phase may exceed the usual time."""
        if member.phase not in AT_WORK or (self._compiles and not self._begun):
            return PATIENT
        return 1.0 if self._begun else FIRST

    # --- reports to the coordinator -------------------------------------------------------------
    def due(self, now: float) -> bool:
        """Return True if the coordinator must learn of a stalled worker at once."""
        if self._here:
            return False
        for rank, mark in self._still(now).items():
            seen, age = self._seen[rank], now - mark.at
            if age >= seen.told * (_WAITS_AGAIN if mark.waits and not mark.quiet else _AGAIN):
                return True
        return False

    def told(self, now: float) -> dict[str, Any]:
        """Return the stall report for the next heartbeat; {} while no worker is stalled."""
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
