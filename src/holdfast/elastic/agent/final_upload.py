"""The final upload: waits for the last checkpoint in the bucket before the run reports its end.

A machine that is rented for the run often disappears a minute after its end. So the agent waits
while bytes move. If none has moved for `checkpoint.bucket_wait_seconds`, it reports what the
bucket lacks. The run then counts as stopped, not as finished, and the same command sends the rest.
A signal meanwhile leaves at once. A run that stops before its end first writes that into the
journal, so a kill during the wait is no failure. It waits no longer than its termination notice
allows.
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
    """The final upload of a run. missing: a sentence on what the bucket lacks, during a wait."""

    def __init__(self, mover: MoverLink, patience: float, say: Say) -> None:
        self._mover, self._patience, self._say = mover, patience, say
        self.missing = ""

    async def arrived(
        self, generation: int, before: Callable[[], Awaitable[None]] | None = None,
        seconds_left: Callable[[], float | None] = lambda: None,
    ) -> str | None:  # fmt: skip
        """Wait until the newest checkpoint is in the bucket, or until the wait is hopeless.

        Args:
            before: Called once, before the first wait.
            seconds_left: Returns the seconds until the machine is lost; None if not known.

        Returns:
            None if the bucket has all of it, otherwise what it lacks and why.
        """
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
