"""Snapshots of a worker's state: the arena that the mover makes for them, and their announcements.

A saver serves one generation: it refers to the state, and the mover rejects older generations. If
the mover is being replaced, the saver waits for it.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from typing import Any, TypeVar

from holdfast.checkpoint.capture.capturer import Capturer, SkippedCapture
from holdfast.checkpoint.capture.chunked_copy import CopyTiming
from holdfast.checkpoint.capture.no_room_capturer import NoRoomCapturer
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.mover.client import COMMIT_POLL_S, MoverGoneError
from holdfast.checkpoint.save.held_save import MESSAGE_INTERVAL_S
from holdfast.config.run import RunConfig
from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.errors import FencedError, HoldfastError, NoRoomError, UserError
from holdfast.events import CheckpointCaptured, CheckpointSkipped, SaveWaiting
from holdfast.policy.saving.destinations import DURABLE, SaveDestinations
from holdfast.training.engine.build import TrainingSession
from holdfast.training.engine.runner import TrainingOutcome
from holdfast.training.engine.state import LocalTensor
from holdfast.training.engine.vote import StepVerdict

Made = TypeVar("Made")

_MOVER_RETURN_TIMEOUT_S = 30.0  # that a mover which is gone is given to come back
_MOVER_RETRY_DELAY_S = 0.1
_ANNOUNCEMENT_POLL_S = 0.005, 0.2  # seconds between two looks: at first, and at most

LAST_COMMIT_TIMEOUT_S = 600.0
"""Seconds for the last save of a run that was asked to stop, while its disk takes it."""
_LEAVING_SLOT_TIMEOUT_S = 60.0
"""Seconds for a free slot of the save of workers that cannot continue."""
_LEDGER_PATIENCE_S = 10.0
"""Seconds until the last snapshot is handed over though the journal lacks its steps."""
_LEDGER_UNSTORED = "the journal could not be written"


def make_with_fewer_slots(
    make: Callable[[int], Made],
    rules: CheckpointConfig,
    on_setting_ignored: Callable[[str, str], None],
) -> Made:
    """Call `make` with the most slots; if that fails and `checkpoint.slots` is auto, with two."""
    slots = rules.most_slots
    try:
        return make(slots)
    except HoldfastError as error:
        other = isinstance(error, FencedError | MoverGoneError | UserError)
        if other or rules.slots != "auto" or slots == 2:
            raise
        on_setting_ignored(
            "checkpoint.slots", f"{error}; with two, some saves will wait for each other"
        )
        return make(2)


def make_unless_no_room(
    make: Callable[[], Made], on_setting_ignored: Callable[[str, str], None]
) -> Made | NoRoomCapturer:
    """Call `make`; if there is no memory for an arena, return a capturer that captures nothing."""
    try:
        return make()
    except (NoRoomError, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        reason = str(error) or "no memory for an arena"
        on_setting_ignored(
            "checkpoint", f"{reason}; training continues without snapshots until there is room"
        )
        return NoRoomCapturer(reason)


def wait_until_announced(
    status: Callable[[], Mapping[str, Any]], generation: int, wait: Callable[[float], None]
) -> None:
    """Wait until the mover knows of a generation, or of a newer one.

    The agent announces it while the workers begin, and the mover first makes its start durable.
    status: returns the mover's status. `wait` lets seconds pass, and may raise."""
    pause_s = _ANNOUNCEMENT_POLL_S[0]
    while int(status()["generation"]) < generation:
        wait(pause_s)
        pause_s = min(2 * pause_s, _ANNOUNCEMENT_POLL_S[1])


def retry_until_mover_is_up(make: Callable[[], Made], wait: Callable[[float], None]) -> Made:
    """Call `make` until a mover serves it. `wait` lets seconds pass, and may raise.

    Raises MoverGoneError if there is none for long.
    """
    end: float | None = None  # one that stands still may have kept the first question for long
    while True:
        try:
            return make()
        except MoverGoneError:
            end = time.monotonic() + _MOVER_RETURN_TIMEOUT_S if end is None else end
            if time.monotonic() >= end:
                raise
        wait(_MOVER_RETRY_DELAY_S)


class SnapshotSaver:
    """Captures snapshots into the mover's arena and announces them in order, after their steps'
    events."""

    def __init__(
        self,
        capturer: Capturer | ReconnectingCapturer,
        reporter: AgentReporter,
        rank: int,
        config: RunConfig,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises if the wait must end."""
        self._check, self._said_at = check, -inf
        self._hand_overs: deque[Callable[[], None]] = deque(maxlen=4)  # of all that have a slot
        self._capturer, self._reporter, self._rank = capturer, reporter, rank
        self._copies_in_background = config.checkpoint.hidden
        self._schedule = BatchSchedule(
            config.step_train.batch_size,
            [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup],
        )

    def has_free_slot(self) -> bool:
        return self._capturer.has_free_slot()

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        """Capture `state`, whose storage must be the storage that the capturer was made with."""
        begin = self._capturer.begin if self._copies_in_background else self._capturer.capture
        made = begin(step, COMMIT_POLL_S if wait == inf else wait)
        while wait == inf and isinstance(made, SkippedCapture) and not self._is_stopping:
            self._report_waiting(step, made.reason)
            self._hand_over_all()
            _report_alive(self._reporter, step, self._check)
            made = begin(step, COMMIT_POLL_S)
        if isinstance(made, SkippedCapture):
            self._reporter.emit(CheckpointSkipped(self._rank, made.reason, step=step))
            return False

        def tell(cost: CopyTiming) -> None:
            if cost.error is None:  # else the announcement will say that there is nothing to save
                event = CheckpointCaptured(
                    self._rank,
                    cost.blocked_s,
                    self._capturer.nbytes,
                    cost.copy_s,
                    cost.fence_s,
                    durable,
                    step=step,
                )
                self._reporter.emit_lazily(event)

        self._capturer.call_when_copied(step, tell)
        self._reporter.expect_callback()
        return True

    @property
    def _is_stopping(self) -> bool:
        return self._reporter.requests.should_stop

    def _report_waiting(self, step: int, reason: str) -> None:
        """Report once a minute that the last step's save has not begun."""
        if self._rank == 0 and time.monotonic() - self._said_at >= MESSAGE_INTERVAL_S:
            self._said_at = time.monotonic()
            self._reporter.emit(SaveWaiting(reason, "", "", 0, step=step))

    def _hand_over_all(self) -> None:
        """Hand over what waits for a journal that cannot be written.

        A second place may take the last step, and older steps need no slot then."""
        for hand_over in self._hand_overs:
            hand_over()

    def fence(self) -> float:
        return self._capturer.fence()

    def announce(self, step: int, meta: Mapping[str, Any], into: SaveDestinations) -> None:
        """Announce a snapshot to the mover on the reporter's thread, once all earlier events are
        durable.

        The call is queued when the copy is complete, so that the reporter's thread never waits for
        one.
        """
        position = self._schedule.position(step + 1)

        def tell() -> None:
            skipped = self._capturer.announce(step, {**meta, "position": position}, into)
            if skipped is not None:
                self._reporter.emit(CheckpointSkipped(self._rank, skipped.reason, step=step))

        pending = [tell]  # handed over once, by whichever thread comes first

        def hand_over() -> None:
            if pending:
                pending.pop()()

        self._hand_overs.append(hand_over)
        self._capturer.call_when_copied(
            step, lambda cost: self._reporter.call_when_durable(hand_over)
        )

    def close(self) -> None:
        self._capturer.close()

    def wait_until_committed(self, step: int, seconds: float, durable: bool = True) -> str | None:
        """Wait for the save's end. A slow disk is not a hang, so report progress meanwhile.

        seconds: inf for the run's last step. If the run store takes no write, wait then until it
        does or the run is asked to stop.
        """
        is_last, begun = seconds == inf, time.monotonic()
        deadline = begun + seconds
        alive = partial(_report_alive, self._reporter, step, self._check)
        self._capturer.fence()
        while not self._reporter.flush(min(COMMIT_POLL_S, deadline - time.monotonic())):
            over = self._is_stopping if is_last else time.monotonic() >= deadline
            if over or self._reporter.is_fenced:
                return _LEDGER_UNSTORED
            if is_last and durable and time.monotonic() - begun >= _LEDGER_PATIENCE_S:
                self._report_waiting(step, "the journal cannot be written, as a line before says")
                self._hand_over_all()
                if self._capturer.poll_save_end(step, 0.0) == (True, None):
                    return None
            alive()
        if not durable:
            return None  # the mover has it: what becomes of it the agent hears
        if not is_last:
            left = max(0.0, deadline - time.monotonic())
            return self._capturer.wait_until_committed(step, left, alive)
        while True:
            alive()
            ended, reason = self._capturer.poll_save_end(step, COMMIT_POLL_S)
            if ended:
                return reason
            if self._is_stopping:
                deadline = min(deadline, time.monotonic() + LAST_COMMIT_TIMEOUT_S)
                if reason is not None or time.monotonic() >= deadline:
                    return reason or f"not committed {LAST_COMMIT_TIMEOUT_S:g} s after the stop"


def _report_alive(reporter: AgentReporter, step: int, check: Callable[[], None]) -> None:
    check()
    reporter.progress(step, "save")


def save_last_step(
    session: TrainingSession,
    saver: SnapshotSaver,
    reporter: AgentReporter,
    rank: int,
    step: int,
    verdict: StepVerdict | None,
    waking: AbstractContextManager[None],
) -> TrainingOutcome:
    """Save the last step: it was applied, but its save was interrupted.

    verdict: of that step, if it is known. waking: within it, a halt wakes the evaluation.
    """
    captured = saver.capture(step, session.engine.state(), inf, True)
    begun = time.monotonic()
    with waking:
        found = session.evaluator.run(lambda: reporter.progress(step, "evaluate"))
    if found is not None and rank == 0:
        seconds = time.monotonic() - begun
        event = found.event(step, seconds)
        reporter.emit(event)
    return TrainingOutcome("finished", step, _commit(saver, captured, step, verdict, inf))


def save_before_leaving(
    session: TrainingSession, saver: SnapshotSaver, step: int, verdict: StepVerdict | None
) -> TrainingOutcome:
    """Save the state that all ranks hold: the run cannot continue, and no step follows."""
    captured = saver.capture(step, session.engine.state(), _LEAVING_SLOT_TIMEOUT_S, True)
    unsaved = _commit(saver, captured, step, verdict, LAST_COMMIT_TIMEOUT_S)
    return TrainingOutcome("left", step, unsaved)


def _commit(
    saver: SnapshotSaver, is_captured: bool, step: int, verdict: StepVerdict | None, seconds: float
) -> str | None:
    """Announce a snapshot and wait for its commit; return why there is none."""
    if not is_captured:
        return "no snapshot could be made of it"
    known = {} if verdict is None else {"loss": verdict.mean_loss, "tokens": verdict.tokens}
    saver.announce(step, known, DURABLE)
    return saver.wait_until_committed(step, seconds)
