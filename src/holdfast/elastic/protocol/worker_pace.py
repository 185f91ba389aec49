"""The speed of a worker, between a node and the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.core.json_parsing import Json


@dataclass(frozen=True)
class WorkerPace:
    """A worker's time for its microbatches since it was last reported.

    position: its place in its replica; workers with equal positions do the same work.
    """

    pid: int
    position: str
    seconds: float
    microbatches: int

    def to_json(self) -> list[Json]:
        return [self.pid, self.position, self.seconds, self.microbatches]

    @staticmethod
    def from_json(row: Iterable[Any]) -> WorkerPace:
        """Parse a row. Raises TypeError and ValueError if it is malformed."""
        pid, position, seconds, microbatches = row
        return WorkerPace(int(pid), str(position), float(seconds), int(microbatches))
