"""A run as spans: one trace, with sessions, and in them steps, saves, validations and recoveries.

Ids follow from the run's key and the record. So a span that is sent again is the same span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from holdfast.events import (
    CheckpointCommitted,
    Evaluated,
    Event,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
)
from holdfast.report.ledger.incidents import IncidentBook
from holdfast.report.ledger.timeledger import TimeLedger

_ENDS: dict[type[Event], str] = {
    RunFinished: "finished",
    RunStopped: "stopped",
    RunFailed: "failed",
}
RUN, STEP = "run", "step"


@dataclass(frozen=True)
class RunSpan:
    """key: what its id follows from. parent: the key of the span around it; "" for the run."""

    name: str
    key: str
    parent: str
    start: float  # seconds since 1970
    stop: float
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    is_error: bool = False


def span_id(run_key: str, key: str) -> int:
    return _number(f"{run_key} {key}", 8)


def trace_id(run_key: str) -> int:
    return _number(run_key, 16)


def _number(text: str, nbytes: int) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:nbytes]) or 1


class SpanMaker:
    """Feed it the records of a run in the order of `ordering.order_records`."""

    def __init__(self) -> None:
        self._ledger, self._book = TimeLedger(), IncidentBook()
        self._began_at = 0.0  # of the run
        self._session: tuple[str, float] | None = None  # key, start
        self._now = 0.0

    def observe(self, record: Record) -> list[RunSpan]:
        """Return the spans that this record ends."""
        event = record.event
        self._ledger.observe(record)
        ended = self._book.observe(record, self._ledger.wall)
        spans: list[RunSpan] = []
        if isinstance(event, RunStarted):
            spans += self._end_session("lost")
            self._began_at = self._began_at or record.time
            self._session = f"session {record.generation}", record.time
        elif self._session is None:
            return []
        self._now = max(self._now, record.time)
        if isinstance(event, StepDone | Evaluated | CheckpointCommitted):
            spans.append(self._work(record, event))
        elif type(event) in _ENDS:
            spans += self._end_session(_ENDS[type(event)])
        if ended is not None and ended.seconds is not None:
            start = self._began_at + ended.began
            name = "membership change" if ended.is_planned else "recovery"
            key = f"incident {ended.generation} {ended.began:.6f}"
            about: dict[str, str | int | float] = {"title": ended.title, "rung": ended.rung}
            about["steps_lost"] = ended.steps_lost
            spans.append(self._inside(name, key, start, ended.seconds, about, not ended.is_planned))
        return spans

    def _work(self, record: Record, event: StepDone | Evaluated | CheckpointCommitted) -> RunSpan:
        about: dict[str, str | int | float] = {"step": event.step}
        match event:
            case StepDone():
                name = STEP
                about |= {"loss": event.loss, "tokens": event.tokens}
                about |= {f"seconds.{phase}": s for phase, s in event.phases.items()}
            case Evaluated():
                name = "validation"
                about["loss"] = event.loss
            case CheckpointCommitted():
                name = "save"
                about["bytes"] = event.bytes
        key = f"{name} {record.generation} {event.step}"
        return self._inside(name, key, record.time - event.seconds, event.seconds, about)

    def _inside(
        self,
        name: str,
        key: str,
        start: float,
        seconds: float,
        about: Mapping[str, str | int | float],
        is_error: bool = False,
    ) -> RunSpan:
        parent = RUN if self._session is None else self._session[0]
        return RunSpan(name, key, parent, start, start + seconds, about, is_error)

    def _end_session(self, how: str) -> Iterator[RunSpan]:
        """Yield the session, and the run up to now."""
        if self._session is None:
            return
        key, start = self._session
        is_error = how in ("lost", "failed")
        yield RunSpan("session", key, RUN, start, self._now, {"ended": how}, is_error)
        yield RunSpan("run", RUN, "", self._began_at, self._now, {"ended": how}, is_error)
        self._session = None
