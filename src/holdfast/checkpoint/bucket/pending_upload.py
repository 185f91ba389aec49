"""The upload that a mover has not finished, as it answers its agent."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.json_parsing import JsonMessage


@dataclass(frozen=True)
class PendingUpload(JsonMessage):
    """The upload of the newest checkpoint, which the bucket does not have yet."""

    key: str  # its commit object
    sent: int  # bytes
    total: int  # bytes
    still: float  # seconds without progress
    reason: str  # of the last failure; "": there was none
    over: bool  # the mover does not try again
