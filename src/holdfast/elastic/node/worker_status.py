"""The workers of one generation, as the agent sees them: who is there, and who makes progress."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.events import Event, event_from_json
from holdfast.policy.recovery.survivors import Held


@dataclass
class Member:
    """One worker. `since` is when it last got further, on the agent's monotonic clock; `marks`
    counts how often it did within its step. asleep: by its own word it sleeps where ranks wait for
    each other. heard: when it last reported anything. answering: its
    report is not answered yet, so it cannot be heard. reporting: seconds of CPU that reports took
    it. excused: by its own
    word it may do something else before it reports again."""

    rank: int
    pid: int  # 0 until its fork is told
    since: float
    step: int = 0
    phase: str = "fork"
    marks: int = 0
    asleep: bool = False
    ready: bool = False
    outcome: tuple[str, int] | None = None  # ("finished" or "left", step)
    unsaved: str | None = None  # why the state after that step is not durable
    held: Held | None = None  # it has stopped, and waits for what comes next
    code: int | None = None  # as os.waitstatus_to_exitcode gives it
    lost: bool = False  # and that has been said
    heard: float = 0.0
    answering: bool = False
    excused: bool = False
    reporting: float = 0.0
    pace: tuple[float, int] = (0.0, 0)  # seconds of computing, and microbatches, in all
    paced: tuple[float, int] = (0.0, 0)  # of these, what has been passed on
    worked: tuple[float, int] = (0.0, 0)  # seconds of whole steps, without what lies between them

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def pauses(self) -> bool:
        """Whether it holds because it was asked to end its step and wait."""
        return self.held is not None and self.held.kind == "paused"


class Members:
    """Bookkeeping only: it decides nothing and touches nothing."""

    def __init__(
        self, generation: int, world_size: int, voices: dict[str, int] | None = None
    ) -> None:
        """`voices`: of each process that ever reported, the number of its next event; what one
        could not tell in an older generation it tells in this one, under the same numbers."""
        self.generation = generation
        self.world_size = world_size
        self._voices = {} if voices is None else voices
        self._members: dict[int, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __getitem__(self, rank: int) -> Member:
        return self._members[rank]

    @property
    def alive(self) -> list[Member]:
        return [member for member in self if member.alive]

    @property
    def all_ready(self) -> bool:
        return len(self._members) == self.world_size and all(m.ready for m in self)

    def expect(self, rank: int, now: float, pid: int = 0) -> None:
        """A worker of the generation: its first report may overtake the news of its birth."""
        self._members[rank] = Member(rank, pid, now, heard=now)

    def joined(self, rank: int, pid: int) -> Member:
        member = self._members[rank]
        member.pid = pid
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
        return member

    def report(self, body: dict[str, Any], now: float) -> list[Event]:
        """Take one report; the events in it that are new.

        `first` numbers the first of its events: what has been seen is not taken again, and a
        gap is what the worker had to drop. Raises KeyError for a rank that is not a member or an
        event of an unknown kind.
        """
        rank = int(body["rank"])
        member = self._members[rank]
        member.heard, member.answering, member.excused = now, True, bool(body.get("calls"))
        if "pace" in body:
            seconds, microbatches = body["pace"]
            member.pace = (float(seconds), int(microbatches))
        if "worked" in body:
            seconds, steps = body["worked"]
            member.worked = (float(seconds), int(steps))
        member.reporting = max(member.reporting, float(body.get("own", 0.0)))
        progress = (int(body["step"]), str(body["phase"]), int(body["marks"]))
        if progress != (member.step, member.phase, member.marks):
            member.step, member.phase, member.marks = progress
            member.since = now
        member.asleep = bool(body.get("asleep"))
        voice = str(body.get("voice", f"{self.generation}.{rank}"))
        following = self._voices.get(voice, 0)
        first, events = int(body["first"]), list(body["events"])
        seen = max(0, following - first)
        fresh = [event_from_json(str(item["kind"]), item["event"]) for item in events[seen:]]
        self._voices[voice] = max(following, first + len(events))
        if "outcome" in body:
            told = body["outcome"]
            member.outcome = (str(told["kind"]), int(told["step"]))
            member.unsaved = told["unsaved"]
        return fresh

    def answered(self, rank: int, now: float) -> None:
        """A report of this worker is answered: from here on it can be heard again."""
        member = self._members.get(rank)
        if member is not None:
            member.heard, member.answering = now, False

    def hung(self, now: float, limit: float) -> Member | None:
        """The worker to blame when none has got further for `limit` seconds; else None.

        When one hangs, the others go on to the next collective and wait there; as long as any
        of them gets further, the run does. So all must have stood still, and the one that got
        least far is what they wait for.
        """
        working = [member for member in self.alive if member.held is None]
        if not working or any(now - member.since <= limit for member in working):
            return None
        return min(working, key=lambda m: (m.step, m.marks, m.since))

    def forgive(self, seconds: float) -> None:
        """The agent itself was stopped for so long: nobody could have reported."""
        for member in self:
            member.since += seconds
            member.heard += seconds
