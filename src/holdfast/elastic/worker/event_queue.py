"""The events of a worker that its agent has not acknowledged yet, in order, with their numbers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice

from holdfast.events import Event

_MAX_BATCH_EVENTS = 500  # events in one request


@dataclass(frozen=True)
class UnsentEvents:
    """The events of a reporter that were not acknowledged, with their numbers, for the next
    reporter.

    The agent may have taken some of them: the numbers tell.

    stream_id: names the numbering, which is this process's own.
    next_number: the number of the next event.
    """

    stream_id: str
    next_number: int = 0
    events: tuple[tuple[int, Event], ...] = ()

    def up_to_step(self, step: int) -> UnsentEvents:
        """Drop the events of steps that a generation from the state after `step` will repeat."""
        return replace(self, events=tuple(e for e in self.events if e[1].step <= step))

    def without_kind(self, kind: type[Event]) -> UnsentEvents:
        """Drop events of this kind. Used by a process that skipped a generation.

        Its steps may have been repeated there, and the coordinator repairs the ledger.
        """
        return replace(self, events=tuple(e for e in self.events if not isinstance(e[1], kind)))


class EventQueue:
    """Numbers events and hands them out in batches. Its owner's lock guards it."""

    def __init__(self, unsent: UnsentEvents) -> None:
        self.stream_id = unsent.stream_id
        self._events: deque[tuple[int, Event]] = deque(unsent.events)  # number, event
        self.next_number = unsent.next_number
        """The number of the next event."""
        self.urgent_below = self.next_number
        """The number behind the last event that is sent at once."""
        self._single_events_left = 0  # events of a refused batch that are still to be sent alone

    def __bool__(self) -> bool:
        return bool(self._events)

    def append(self, event: Event) -> None:
        self._events.append((self.next_number, event))
        self.next_number += 1

    def mark_urgent(self) -> None:
        """Mark all present events as urgent: they are sent at once."""
        self.urgent_below = self.next_number

    @property
    def has_urgent(self) -> bool:
        return bool(self._events) and self._events[0][0] < self.urgent_below

    @property
    def has_lazy(self) -> bool:
        """Return True if the last event is not urgent."""
        return bool(self._events) and self._events[-1][0] >= self.urgent_below

    def is_sent_up_to(self, step: int) -> bool:
        """Return True if no event of a step up to `step` is left. Needs no lock."""
        try:
            return not self._events or self._events[0][1].step > step
        except IndexError:  # the other thread has just taken the last one
            return True

    def next_batch(self) -> list[tuple[int, Event]]:
        """Return the next events whose numbers are consecutive; they stay in the queue."""
        most = islice(self._events, 1 if self._single_events_left else _MAX_BATCH_EVENTS)
        return [each for at, each in enumerate(most) if each[0] == self._events[0][0] + at]

    def number_behind(self, batch: list[tuple[int, Event]]) -> int | None:
        """Return the number of the first event behind the next batch, or None if there is none."""
        return self._events[len(batch)][0] if len(self._events) > len(batch) else None

    def drop(self, batch: list[tuple[int, Event]]) -> None:
        """Remove a batch that the agent has taken."""
        for _ in batch:
            self._events.popleft()
        self._single_events_left = max(0, self._single_events_left - len(batch))

    def send_singly(self, batch: list[tuple[int, Event]]) -> None:
        """Hand out the events of a batch one by one from now on."""
        self._single_events_left = len(batch)

    def unsent(self) -> UnsentEvents:
        return UnsentEvents(self.stream_id, self.next_number, tuple(self._events))
