"""The workers of one generation, as the agent sees them: who is alive, and who makes progress."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.events import Event, event_from_json


@dataclass
class Member:
    """One worker. `since` is when it last got further, on the agent's monotonic clock; `marks`
    counts how often it did within its step."""

    rank: int
    pid: int
    pidfd: int  # -1 where the system has none
    since: float
    step: int = 0
    phase: str = "fork"
    marks: int = 0
    next_event: int = 0
    ready: bool = False
    outcome: tuple[str, int] | None = None  # ("finished" or "left", step)
    unsaved: str | None = None  # why the state after that step is not durable
    code: int | None = None  # as os.waitstatus_to_exitcode gives it

    @property
    def alive(self) -> bool:
        return self.code is None

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Members:
    """Bookkeeping only: it decides nothing and touches nothing but the pidfds it was given."""

    def __init__(self, generation: int, world_size: int) -> None:
        self.generation = generation
        self.world_size = world_size
        self._members: dict[int, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    @property
    def alive(self) -> list[Member]:
        return [member for member in self if member.alive]

    @property
    def all_ready(self) -> bool:
        return len(self._members) == self.world_size and all(m.ready for m in self)

    def expect(self, rank: int, now: float) -> None:
        """A fork was asked for: the worker's first report may overtake the news of its birth."""
        self._members[rank] = Member(rank, 0, -1, now)

    def forked(self, rank: int, pid: int) -> Member:
        member = self._members[rank]
        member.pid, member.pidfd = pid, _pidfd(pid)
        return member

    def ready(self, rank: int) -> bool:
        """A worker is about to compute; whether it is the last of all to say so."""
        self._members[rank].ready = True
        return self.all_ready

    def exited(self, rank: int, pid: int, code: int) -> Member | None:
        """The member that ended; None for one of an older generation."""
        member = self._members.get(rank)
        if member is None or member.pid != pid:
            return None
        member.code = code
        member.close()
        return member

    def report(self, body: dict[str, Any], now: float) -> list[Event]:
        """Take one report; the events in it that are new.

        `first` numbers the first of its events: what has been seen is not taken again, and a
        gap is what the worker had to drop. Raises KeyError for a rank that is not a member or an
        event of an unknown kind.
        """
        member = self._members[int(body["rank"])]
        progress = (int(body["step"]), str(body["phase"]), int(body["marks"]))
        if progress != (member.step, member.phase, member.marks):
            member.step, member.phase, member.marks = progress
            member.since = now
        first, events = int(body["first"]), list(body["events"])
        seen = max(0, member.next_event - first)
        fresh = [event_from_json(str(item["kind"]), item["event"]) for item in events[seen:]]
        member.next_event = max(member.next_event, first + len(events))
        if "outcome" in body:
            told = body["outcome"]
            member.outcome = (str(told["kind"]), int(told["step"]))
            member.unsaved = told["unsaved"]
        return fresh

    def hung(self, now: float, limit: float) -> Member | None:
        """The worker to blame when none has got further for `limit` seconds; else None.

        When one hangs, the others go on to the next collective and wait there; as long as any
        of them gets further, the run does. So all must have stood still, and the one that got
        least far is what they wait for.
        """
        if not self.alive or any(now - member.since <= limit for member in self.alive):
            return None
        return min(self.alive, key=lambda m: (m.step, m.marks, m.since))

    def forgive(self, seconds: float) -> None:
        """The agent itself was stopped for so long: nobody could have reported."""
        for member in self:
            member.since += seconds

    def kill(self) -> None:
        """Kill every worker and what it started, without the template's help."""
        for member in self.alive:
            if still_running(member.pidfd):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(member.pid, signal.SIGKILL)

    def close(self) -> None:
        for member in self:
            member.close()


def _pidfd(pid: int) -> int:
    """A handle that follows this process and never a later one of the same number."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1


def still_running(pidfd: int) -> bool:
    """Whether the process is alive (or a zombie that its parent has not reaped)."""
    if pidfd < 0:
        return False
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError:
        return False
    return True
