"""How a worker's state becomes snapshots: the arena that the mover makes for it, and who says what
about them when.

A saver is made for one generation and let go with it: it refers to the state, and the mover takes
nothing from an older generation. A mover that is being replaced is waited for. Where training goes
on with the state that it has, nothing is to be captured before the end of its first step: the arena
is made while that step computes (`LateSaver`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from holdfast.checkpoint.capture.capturer import Capturer, Skipped
from holdfast.checkpoint.capture.chunked_copy import Cost
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.mover.client import SETTLE_SLICE, MoverGoneError
from holdfast.config.checkpoint import CheckpointConfig
from holdfast.config.run import RunConfig
from holdfast.core.data.sample_order import BatchSchedule
from holdfast.elastic.worker.reporter import Reporter
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.events import CheckpointCaptured, CheckpointSkipped
from holdfast.policy.saving.destinations import Into
from holdfast.train.state import LocalTensor

Made = TypeVar("Made")

_MOVER_SECONDS = 30.0  # that a mover which is gone is given to come back
_MOVER_PAUSE = 0.1
_LATE_SECONDS = 2.0
"""A step whose work is done waits so long for a saver in the making; then it does without."""


def where_there_is_room(
    make: Callable[[int], Made], rules: CheckpointConfig, ignored: Callable[[str, str], None]
) -> Made:
    """With as many slots as the run file asks for, or one fewer where that is left to us."""
    slots = rules.most_slots
    try:
        return make(slots)
    except HoldfastError as error:
        other = isinstance(error, FencedError | MoverGoneError | UserError)
        if other or rules.slots != "auto" or slots == 2:
            raise
        ignored("checkpoint.slots", f"{error}; with two, some saves will wait for each other")
        return make(2)


def while_replaced(make: Callable[[], Made], wait: Callable[[float], None]) -> Made:
    """What needs the mover, made as soon as there is one. `wait` lets seconds pass, and may raise.
    Raises MoverGoneError when there is none for long."""
    end: float | None = None  # one that stands still may have kept the first question for long
    while True:
        try:
            return make()
        except MoverGoneError:
            end = time.monotonic() + _MOVER_SECONDS if end is None else end
            if time.monotonic() >= end:
                raise
        wait(_MOVER_PAUSE)


class ArenaSaver:
    """Snapshots into the mover's arena, announced in order behind the events of their steps."""

    def __init__(
        self, capturer: Capturer | ReconnectingCapturer, reporter: Reporter, rank: int,
        config: RunConfig, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`check` raises when what waits is to stop."""
        self._check = check
        self._capturer, self._reporter, self._rank = capturer, reporter, rank
        self._hidden = config.checkpoint.hidden
        self._schedule = BatchSchedule(
            config.train.batch_size,
            [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup],
        )

    def ready(self) -> bool:
        return self._capturer.ready()

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        """`state` is what the capturer was made with: its storage stays the same."""
        made = (self._capturer.begin if self._hidden else self._capturer.capture)(step, wait)
        if isinstance(made, Skipped):
            self._reporter.emit(CheckpointSkipped(self._rank, made.reason, step=step))
            return False

        def tell(cost: Cost) -> None:
            if cost.error is None:  # else the announcement will say that there is nothing to save
                event = CheckpointCaptured(
                    self._rank, cost.blocked, self._capturer.bytes, cost.copy, cost.fence, durable,
                    step=step,
                )  # fmt: skip
                self._reporter.mention(event)

        self._capturer.after(step, tell)
        self._reporter.foretell()
        return True

    def fence(self) -> float:
        return self._capturer.fence()

    def announce(self, step: int, meta: Mapping[str, Any], into: Into) -> None:
        """The mover is told on the reporter's thread, once everything before it is in the
        journal; that thread is asked when the copy is whole, so that it never waits for one."""
        position = self._schedule.position(step + 1)

        def tell() -> None:
            skipped = self._capturer.announce(
                step, {**meta, "position": position}, into.durable, into.copied, into.uploaded
            )
            if skipped is not None:
                self._reporter.emit(CheckpointSkipped(self._rank, skipped.reason, step=step))

        self._capturer.after(step, lambda cost: self._reporter.then(tell))

    def close(self) -> None:
        self._capturer.close()

    def settle(self, step: int, seconds: float, durable: bool = True) -> str | None:
        """A slow disk is not a hang: progress is reported for as long as this waits."""
        deadline = time.monotonic() + seconds
        self._capturer.fence()
        unsaved = until_stored(self._reporter, step, deadline, self._check)
        if unsaved is not None or not durable:
            return unsaved  # else the mover has it: what becomes of it the agent hears
        alive = partial(_alive, self._reporter, step, self._check)
        return self._capturer.settle(step, max(0.0, deadline - time.monotonic()), alive)


def until_stored(
    reporter: Reporter, step: int, deadline: float, check: Callable[[], None]
) -> str | None:
    """Wait until the agent has stored the last reports, or why it has not by `deadline`, of
    time.monotonic(). Raises what `check` raises."""
    while not reporter.flush(min(SETTLE_SLICE, deadline - time.monotonic())):
        if reporter.fenced or time.monotonic() >= deadline:
            return "the agent could not store the last reports"
        _alive(reporter, step, check)
    return None


def _alive(reporter: Reporter, step: int, check: Callable[[], None]) -> None:
    check()
    reporter.progress(step, "save")


class LateSaver:
    """An `ArenaSaver` that is made on a thread of its own. Until it is there this rank has no room,
    as with a mover that is away: so nobody captures anything."""

    def __init__(
        self, make: Callable[[], ArenaSaver], skipped: Callable[[Skipped], None],
        reporter: Reporter, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """What `make` raises is raised by the next question for room. skipped: told of a capture
        that was asked for all the same. `check` raises when what waits is to stop."""
        self._make, self._skipped = make, skipped
        self._reporter, self._check = reporter, check
        self._saver: ArenaSaver | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._waits = _LATE_SECONDS
        threading.Thread(target=self._run, name="equipping", daemon=True).start()

    def _run(self) -> None:
        try:
            self._saver = self._make()
        except BaseException as error:  # the training thread's to answer for
            self._error = error
        finally:
            self._done.set()

    def _within(self, seconds: float) -> ArenaSaver | None:
        self._done.wait(seconds)
        if self._error is not None:
            raise self._error
        return self._saver

    def ready(self) -> bool:
        waits, self._waits = self._waits, 0.0  # once
        saver = self._within(waits)
        return saver is not None and saver.ready()

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        begun = time.monotonic()
        saver = self._within(wait)
        if saver is None:
            self._skipped(Skipped(step, "the mover has made no arena yet"))
            return False
        return saver.capture(step, state, max(0.0, wait - (time.monotonic() - begun)), durable)

    def fence(self) -> float:
        return 0.0 if self._saver is None else self._saver.fence()

    def announce(self, step: int, meta: Mapping[str, Any], into: Into) -> None:
        if self._saver is not None:  # else nothing was captured
            self._saver.announce(step, meta, into)

    def settle(self, step: int, seconds: float, durable: bool = True) -> str | None:
        if self._saver is None:
            unsaved = until_stored(self._reporter, step, time.monotonic() + seconds, self._check)
            return unsaved or ("the mover has made no arena" if durable else None)
        return self._saver.settle(step, seconds, durable)

    def close(self) -> None:
        """What is being made refers to the state, too: its end is waited for."""
        self._done.wait()
        if self._saver is not None:
            self._saver.close()
