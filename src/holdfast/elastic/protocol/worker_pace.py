"""The speed of a worker, between a node and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.json_parsing import JsonRow


@dataclass(frozen=True)
class WorkerPace(JsonRow):
    """A worker's time for its microbatches since it was last reported.

    position: its place in its replica; workers with equal positions do the same work.
    """

    pid: int
    position: str
    seconds: float
    microbatches: int
