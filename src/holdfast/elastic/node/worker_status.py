"""The workers of one generation, as the agent sees them: which run, and which make progress."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.events import Event, event_from_json
from holdfast.policy.recovery.survivors import Held


@dataclass
class Member:
    """One worker's status.

    progress_at: when it last made progress, on the agent's monotonic clock.
    progress_count: how often it made progress within its step.
    blocked_in_collective: by its own report, it sleeps where ranks wait for each other.
    last_heard_at: when it last reported anything.
    reply_pending: its report is not answered yet, so it cannot report again.
    report_cpu_s: CPU seconds that its reports took.
    may_be_busy: by its own report, it may do something else before it reports again.
    """

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
        """Return True if it holds because it was asked to end its step and wait."""
        return self.held is not None and self.held.kind == "paused"


class Members:
    """The table of a generation's workers. It only keeps records."""

    def __init__(
        self, generation: int, world_size: int, voices: dict[str, int] | None = None
    ) -> None:
        """Create an empty table.

        event_cursors: for each process that ever reported, the number of its next event. Events
        that a process could not send in an older generation arrive in this one, with the same
        numbers.
        """
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
        """Add a worker. Its first report may arrive before the report of its fork."""
        self._members[rank] = Member(rank, pid, now, heard=now)

    def joined(self, rank: int, pid: int) -> Member:
        member = self._members[rank]
        member.pid = pid
        return member

    def ready(self, rank: int) -> bool:
        """Mark a worker as about to compute; return True if it is the last of all."""
        self._members[rank].ready = True
        return self.all_ready

    def exited(self, rank: int, pid: int, code: int) -> Member | None:
        """Record an exit; return the worker, or None if it belongs to an older generation."""
        member = self._members.get(rank)
        if member is None or member.pid != pid:
            return None
        member.code = code
        return member

    def report(self, body: dict[str, Any], now: float) -> list[Event]:
        """Process one report; return its new events.

        `first` numbers the first of its events. Events that were seen before are skipped; a gap is
        what the worker had to drop. Raises KeyError for a rank without a worker or an event of an
        unknown kind.
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
        """Note that a report of this worker is answered, so it can report again."""
        member = self._members.get(rank)
        if member is not None:
            member.heard, member.answering = now, False

    def hung(self, now: float, limit: float) -> Member | None:
        """Return the worker to blame if none has made progress for `limit_s` seconds; None
        otherwise.

        If one hangs, the other workers reach the next collective and wait there. While any of them
        makes progress, the run does. So all must have stalled. The worker with the least progress
        blocks the rest.
        """
        working = [member for member in self.alive if member.held is None]
        if not working or any(now - member.since <= limit for member in working):
            return None
        return min(working, key=lambda m: (m.step, m.marks, m.since))

    def forgive(self, seconds: float) -> None:
        """Move all times on: the agent itself was suspended, so no worker could report."""
        for member in self:
            member.since += seconds
            member.heard += seconds
