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

from holdfast.checkpoint.bucket.pending_upload import PendingUpload
from holdfast.checkpoint.restore.catalog import step_of
from holdfast.elastic.event_log import Say
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.errors import HoldfastError

UPLOAD_MESSAGE_INTERVAL_S = 5.0
UPLOAD_POLL_INTERVAL_S = 1.0


class FinalUpload:
    """The final upload of a run. missing_upload: a sentence on what the bucket lacks, during a
    wait."""

    def __init__(self, mover: MoverSupervisor, stall_timeout_s: float, say: Say) -> None:
        self._mover, self._stall_timeout_s, self._say = mover, stall_timeout_s, say
        self.missing_upload = ""

    async def wait(
        self,
        generation: int,
        before_waiting: Callable[[], Awaitable[None]] | None = None,
        time_left_s: Callable[[], float | None] = lambda: None,
    ) -> str | None:
        """Wait until the newest checkpoint is in the bucket, or until the wait is hopeless.

        Args:
            before_waiting: Called once, before the first wait.
            time_left_s: Returns the seconds until the machine is lost; None if not known.

        Returns:
            None if the bucket has all of it, otherwise what it lacks and why.
        """
        told = 0.0
        try:
            while True:
                try:
                    left = await self._mover.wait_for_upload(generation, UPLOAD_POLL_INTERVAL_S)
                except HoldfastError as error:
                    return f"the bucket may not have the last checkpoint: {error}"
                if left is None:
                    return None
                if before_waiting is not None:
                    await before_waiting()
                    before_waiting = None
                self.missing_upload = _describe_missing(left)
                if left.over or left.still > self._stall_timeout_s:
                    return self.missing_upload
                if told <= 0.0:
                    self._say(
                        f"waiting for the bucket: {self.missing_upload} (Ctrl-C: leave at once)"
                    )
                    told = UPLOAD_MESSAGE_INTERVAL_S
                remaining = time_left_s()
                if remaining is not None and remaining <= 0.0:
                    return f"{self.missing_upload}; time was up"
                told -= UPLOAD_POLL_INTERVAL_S
        finally:
            self.missing_upload = ""


def _describe_missing(left: PendingUpload) -> str:
    sent, total = left.sent / 1e6, left.total / 1e6
    done = f"{sent:.1f} of {total:.1f} MB were sent" if total else "nothing was sent"
    reason = f", {left.reason}" if left.reason else ""
    return f"the bucket does not have step {step_of(left.key)} yet: {done}{reason}"
