"""The time ledger: every second of a run under one class.

The ledger reads records in the order in which they happened and keeps, at any moment, totals whose
sum is the wall time so far. It works on one clock: the agent stamps every record when it receives
it. Workers say how long things took, never when; their durations are *claims* on a stretch of the
agent's time.

    stretch   from the start of a first step to a loss or to the session's end. Steps (with their
              captures) and validations claim their seconds; unclaimed time is "other"; claims
              above the stretch (two clocks never agree to the last digit) are scaled to fit.
    gap       from the session's start ("startup"), or from the last step before a loss
              ("recovery"), to the start of the next step.
    stopped   between the last word of one session and the first of the next.

If a step is repeated after a restart, all of its time moves from its classes to "rework". The
classes follow Google's ml-goodput taxonomy, with exposed communication as one of its own.

A closed stretch, gap or pause is a `Span`. The spans follow each other without a hole, so their
seconds add up to the wall time too. `rankledger.py` gives each rank its part of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.events import (
    CheckpointCommitted,
    Evaluated,
    Event,
    GenerationStarted,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
    TaskEvaluated,
    WorkerLost,
)

CLASSES: dict[str, str] = {
    "productive": "computing steps that count",
    "communication": "waiting for the reduction of gradients",
    "data_wait": "waiting for the next batch",
    "checkpoint": "blocked by copying or saving state",
    "evaluation": "validation",
    "startup": "from the start of a session to its first step",
    "recovery": "from the last step before a loss to the next step",
    "rework": "steps that were lost and done again",
    "stopped": "between two sessions, nothing running",
    "other": "not claimed by any of these",
}
_PHASES = {"compute": 0, "apply": 0, "reduce": 1, "data": 2, "capture": 3}
_COLUMNS = ("productive", "communication", "data_wait", "checkpoint", "other")
_WIDTH = len(_COLUMNS)
_ENDS = (RunStopped, RunFinished, RunFailed)


@dataclass(frozen=True)
class Span:
    """A stretch, gap or pause of the run."""

    start: float  # seconds since the first RunStarted
    stop: float
    seconds: Mapping[str, float]  # by class; they add up to stop - start


@dataclass
class _ClosedSpan:
    """A span whose time may still become rework."""

    start: float
    seconds: dict[str, float]
    first_row: int  # of its steps; those up to the next span's first row


class TimeLedger:
    """Feed it every record with `observe`; read `totals()`, `wall`, `goodput` at any moment."""

    def __init__(self) -> None:
        self._closed = dict.fromkeys(CLASSES, 0.0)  # everything before the open stretch or gap
        self._spans: list[_ClosedSpan] = []  # the same by span; they end where the next one starts
        self._now = 0.0
        self._mark = 0.0  # time up to which `_closed` accounts
        self._session = False
        self._gap: str | None = None  # class of the open gap, None in a stretch
        self._broken = 0  # the newest generation that lost a worker
        self._start = 0  # the step that the newest generation began from
        self._gap_evaluation = 0.0
        self._rows = array("d")  # claims of each step that still counts, _WIDTH a step
        self._steps = array("q")  # the step of each row, rising
        self._stretch_row = 0  # first row of the open stretch
        self._claims = [0.0] * _WIDTH  # sums of the open stretch's rows
        self._evaluation = 0.0  # claimed in the open stretch
        self._last_save = 0.0  # what the session's end waited for
        self._last_claim = 0.0  # time at which the last claim of the stretch was heard
        self._last_commit = 0.0

    # --- reading ----------------------------------------------------------------------------
    @property
    def wall(self) -> float:
        """Seconds since the first RunStarted, sessions and the pauses between them."""
        open_time = self._now - self._mark if self._session else 0.0
        return sum(self._closed.values()) + open_time

    @property
    def running(self) -> float:
        """Seconds in which something ran: `wall` without the pauses between sessions."""
        return self.wall - self._closed["stopped"]

    @property
    def goodput(self) -> float:
        """Useful training time / wall time; 0 before anything happened."""
        wall = self.wall
        return self.totals()["productive"] / wall if wall > 0 else 0.0

    @property
    def goodput_running(self) -> float:
        """Useful training time / running time."""
        running = self.running
        return self.totals()["productive"] / running if running > 0 else 0.0

    def totals(self) -> dict[str, float]:
        """Seconds by class; their sum is `wall`."""
        out = dict(self._closed)
        if self._session:
            for name, seconds in self._open(self._now).items():
                out[name] += seconds
        return out

    def spans(self) -> list[Span]:
        """The spans so far, in order; the open one ends now. Their seconds add up to `wall`."""
        spans = [(span.start, span.seconds) for span in self._spans]
        if self._session:
            spans.append((sum(self._closed.values()), self._open(self._now)))
        return [Span(start, start + sum(parts.values()), parts) for start, parts in spans]

    # --- feeding ----------------------------------------------------------------------------
    def observe(self, record: Record) -> None:
        event = record.event
        if isinstance(event, TaskEvaluated):
            return  # by another process, perhaps long after the run
        if isinstance(event, RunStarted):
            self._start_session(record)
        elif not self._session:
            if not isinstance(event, GenerationStarted):
                return
            self._start_session(record)  # a journal whose RunStarted is missing
        self._now = max(self._now, record.time)
        if isinstance(event, WorkerLost):
            self._broken = record.generation
        if isinstance(event, StepDone):
            # Told by who did it when its generation was over, or in the next one.
            late = self._gap is not None and (
                record.generation <= self._broken or event.step <= self._start
            )
            (self._late_step if late else self._step)(event)
        else:
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            if self._gap is None:
                self._evaluation += event.seconds
                self._last_claim = self._now
            else:
                self._gap_evaluation += event.seconds
        elif isinstance(event, CheckpointCommitted):
            self._last_commit = self._now
        elif isinstance(event, WorkerLost):
            self._open_gap("recovery", self._last_claim)
        elif isinstance(event, GenerationStarted):
            self._start = event.step
            self._open_gap("recovery", self._last_claim)
            # A generation begins from the state after `step`: what counted beyond it is rework.
            keep = bisect_right(self._steps, event.step)
            self._count_rework(keep)
            del self._rows[keep * _WIDTH :], self._steps[keep:]
            self._stretch_row = keep
        elif isinstance(event, _ENDS):
            self._end_session()

    def _count_rework(self, keep: int) -> None:
        """Move the time of the steps from row `keep` on, which are to be done again."""
        end = len(self._steps)
        for span in reversed(self._spans):
            first = max(keep, span.first_row)
            for column, name in enumerate(_COLUMNS):
                lost = sum(self._rows[first * _WIDTH + column : end * _WIDTH : _WIDTH])
                # Sums in two orders differ in the last digit: nothing falls below zero by that.
                lost = max(0.0, min(lost, span.seconds[name], self._closed[name]))
                for seconds in (span.seconds, self._closed):
                    seconds[name] -= lost
                    seconds["rework"] += lost
            end, span.first_row = min(end, span.first_row), min(keep, span.first_row)
            if end <= keep:
                return

    def _book(self, seconds: Mapping[str, float], first_row: int) -> None:
        """Add a span that begins where the last one ended."""
        start = sum(self._closed.values())
        complete = dict.fromkeys(CLASSES, 0.0) | dict(seconds)
        self._spans.append(_ClosedSpan(start, complete, first_row))
        for name, value in seconds.items():
            self._closed[name] += value

    def _start_session(self, record: Record) -> None:
        if self._session:
            self._end_session()  # the session before ended without a word
        if self._now:
            # Another machine's clock may be behind; a pause is never negative.
            pause = max(0.0, record.time - self._now)
            self._book({"stopped": pause}, len(self._steps))
        self._now = self._mark = self._last_claim = record.time
        self._session = True
        self._gap, self._gap_evaluation = "startup", 0.0

    def _end_session(self) -> None:
        if self._gap is None and self._last_commit > self._last_claim:
            # Nothing but the last save kept the session from ending.
            self._last_save = self._last_commit - self._last_claim
        self._close(self._now)
        self._session = False

    def _open_gap(self, name: str, since: float) -> None:
        if self._gap is None:
            self._close(max(since, self._mark))
            self._gap, self._gap_evaluation = name, 0.0

    def _step(self, event: StepDone) -> None:
        if self._gap is not None:
            self._close(max(self._mark, self._now - event.seconds))
            self._gap = None
        self._add_row(event.step, _claimed_seconds(event), open_stretch=True)
        self._last_claim = self._now

    def _late_step(self, event: StepDone) -> None:
        """A step of a broken generation, reported after the loss was noticed: it happened inside
        what looked like the beginning of the recovery."""
        claims = _claimed_seconds(event)
        scale = _scale(sum(claims), max(0.0, self._now - self._mark))
        claims = [seconds * scale for seconds in claims]
        self._book(dict(zip(_COLUMNS, claims, strict=True)), len(self._steps))
        self._mark += sum(claims)
        self._add_row(event.step, claims, open_stretch=False)

    def _add_row(self, step: int, claims: list[float], *, open_stretch: bool) -> None:
        self._steps.append(step)
        self._rows.extend(claims)
        if open_stretch:
            self._claims = [a + b for a, b in zip(self._claims, claims, strict=True)]
        else:
            self._stretch_row = len(self._steps)
            self._last_claim = self._mark

    # --- the open stretch or gap ------------------------------------------------------------
    def _open(self, until: float) -> dict[str, float]:
        """Seconds by class of what is not closed yet."""
        length = max(0.0, until - self._mark)
        if self._gap is not None:
            evaluation = min(self._gap_evaluation, length)
            return {"evaluation": evaluation, self._gap: length - evaluation}
        out = dict(zip(_COLUMNS, self._claims, strict=True))
        out["checkpoint"] += self._last_save
        out["evaluation"] = self._evaluation
        scale = _scale(sum(out.values()), length)
        out = {name: seconds * scale for name, seconds in out.items()}
        out["other"] = max(0.0, out["other"] + length - sum(out.values()))
        return out

    def _close(self, until: float) -> None:
        """Book the open stretch or gap up to `until`, and begin a new one there."""
        if self._gap is None:
            claimed = sum(self._claims) + self._last_save + self._evaluation
            scale = _scale(claimed, max(0.0, until - self._mark))
        self._book(self._open(until), self._stretch_row)
        if self._gap is None and scale < 1.0:
            rows = self._rows[self._stretch_row * _WIDTH :]
            self._rows[self._stretch_row * _WIDTH :] = array("d", [x * scale for x in rows])
        self._stretch_row = len(self._steps)
        self._claims = [0.0] * _WIDTH
        self._evaluation = self._last_save = 0.0
        self._mark = max(self._mark, until)


def _claimed_seconds(event: StepDone) -> list[float]:
    """Seconds of a step by column."""
    claims = [0.0] * _WIDTH
    for phase, seconds in event.phases.items():
        claims[_PHASES.get(phase, _WIDTH - 1)] += max(0.0, seconds)
    if event.phases:
        claims[-1] += max(0.0, event.seconds - sum(event.phases.values()))
    else:
        claims[0] = max(0.0, event.seconds)  # an unbroken total counts as useful
    return claims


def _scale(claimed: float, length: float) -> float:
    return length / claimed if claimed > length else 1.0
