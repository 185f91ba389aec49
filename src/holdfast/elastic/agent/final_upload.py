"""The end of a run and its bucket: the last checkpoint is there before the run says it has ended.

A machine that was rented for the run is often gone a minute after it. So the end waits, for as long
as bytes move; where none has moved for `checkpoint.bucket_wait_seconds` it is said what the bucket
does not have, and the run is stopped rather than finished: the same command again sends the rest.
A signal meanwhile leaves at once. A run that leaves before its end has said so in the journal
before it waits, and waits no longer than a notice leaves it: what kills it meanwhile is no failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.checkpoint.restore.catalog import step_of
from holdfast.elastic.event_log import Say
from holdfast.elastic.node.mover_supervisor import MoverLink
from holdfast.errors import HoldfastError

TELL_SECONDS = 5.0
POLL_SECONDS = 1.0


class LastUpload:
    """`missing` is what the bucket does not have yet, in words, while that is waited for."""

    def __init__(self, mover: MoverLink, patience: float, say: Say) -> None:
        self._mover, self._patience, self._say = mover, patience, say
        self.missing = ""

    async def arrived(
        self, generation: int, before: Callable[[], Awaitable[None]] | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> str | None:  # fmt: skip
        """Wait until the newest checkpoint is in the bucket; None then, or where there is none to
        wait for. Else what it does not have, and why. `before` is done before anything is waited
        for; `seconds_left`: until the machine is gone, None where nobody said so."""
        told = 0.0
        try:
            while True:
                try:
                    left = await self._mover.upload(generation, POLL_SECONDS)
                except HoldfastError as error:
                    return f"the bucket may not have the last checkpoint: {error}"
                if left is None:
                    return None
                if before is not None:
                    await before()
                    before = None
                self.missing = _words(left)
                if left["over"] or left["still"] > self._patience:
                    return self.missing
                if told <= 0.0:
                    self._say(f"waiting for the bucket: {self.missing} (Ctrl-C: leave at once)")
                    told = TELL_SECONDS
                remaining = seconds_left()
                if remaining is not None and remaining <= 0.0:
                    return f"{self.missing}; time was up"
                told -= POLL_SECONDS
        finally:
            self.missing = ""


def _words(left: dict[str, Any]) -> str:
    sent, total = left["sent"] / 1e6, left["total"] / 1e6
    done = f"{sent:.1f} of {total:.1f} MB were sent" if total else "nothing was sent"
    reason = f", {left['reason']}" if left["reason"] else ""
    return f"the bucket does not have step {step_of(left['key'])} yet: {done}{reason}"
