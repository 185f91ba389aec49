"""A capturer without an arena, where there is no memory for one. Training continues without it.

It captures nothing, so no rank captures anything. `ReconnectingCapturer` asks now and then whether
the mover still has its arena. The answer here is no, so it asks the mover for a new arena. Once
there is room, that arena takes this capturer's place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from holdfast.checkpoint.capture.chunked_copy import CopyListener, SkippedCapture
from holdfast.core.json_parsing import Json
from holdfast.errors import HoldfastError
from holdfast.policy.saving.destinations import DURABLE, SaveDestinations

ROOM_CHECK_INTERVAL_S = 10.0
"""Seconds between two requests for memory. Each may cost the snapshots of older generations."""


class NoRoomCapturer:
    """As `Capturer`, with nothing to capture into."""

    def __init__(self, reason: str, clock: Callable[[], float] = time.monotonic) -> None:
        """reason: why there is no arena."""
        self._reason, self._clock = reason, clock
        self._asked_at = clock()

    @property
    def nbytes(self) -> int:
        return 0

    def has_free_slot(self) -> bool:
        return False

    def is_connected(self) -> bool:
        """Return False if it is time to ask for memory again."""
        if self._clock() - self._asked_at < ROOM_CHECK_INTERVAL_S:
            return True
        self._asked_at = self._clock()
        return False

    def report_orphaned_saves(self, steps: Sequence[int]) -> None:
        """Do nothing: no save was handed over."""

    def begin(self, step: int, wait: float = 0.0) -> SkippedCapture:
        return SkippedCapture(step, self._reason)

    def capture(self, step: int, wait: float = 0.0) -> SkippedCapture:
        return SkippedCapture(step, self._reason)

    def fence(self) -> float:
        return 0.0

    def call_when_copied(self, step: int, listener: CopyListener) -> NoReturn:
        raise HoldfastError(f"step {step} was not captured: {self._reason}")

    def announce(
        self, step: int, meta: Mapping[str, Json], destinations: SaveDestinations = DURABLE
    ) -> SkippedCapture:
        return SkippedCapture(step, self._reason)

    def drop_capture(self, step: int) -> None:
        """Do nothing: nothing was captured."""

    def poll_save_end(self, step: int, wait_s: float) -> tuple[bool, str | None]:
        return True, self._reason

    def close(self) -> None:
        """Do nothing: there is no memory to return."""
