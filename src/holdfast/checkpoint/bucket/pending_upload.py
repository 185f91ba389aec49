"""The upload that a mover has not finished, as it answers its agent."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.json_parsing import JsonObject, ParsedJson


@dataclass(frozen=True)
class PendingUpload:
    """The upload of the newest checkpoint, which the bucket does not have yet.

    key: its commit object. stalled_for_s: seconds without progress. failure: the reason of the last
    failure; "" without one. is_over: the mover does not try again.
    """

    key: str
    sent_bytes: int
    total_bytes: int
    stalled_for_s: float
    failure: str
    is_over: bool

    def to_json(self) -> JsonObject:
        return {
            "key": self.key,
            "sent": self.sent_bytes,
            "total": self.total_bytes,
            "still": self.stalled_for_s,
            "reason": self.failure,
            "over": self.is_over,
        }

    @staticmethod
    def from_json(value: ParsedJson) -> PendingUpload:
        """Parse the answer. Raises KeyError, TypeError and ValueError if it is malformed."""
        return PendingUpload(
            str(value["key"]),
            int(value["sent"]),
            int(value["total"]),
            float(value["still"]),
            str(value["reason"]),
            bool(value["over"]),
        )
