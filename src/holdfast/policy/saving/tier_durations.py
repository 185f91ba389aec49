"""Past durations of each tier, from the journal: seconds and bytes a second. Pure.

    tier 1: SnapshotKept           from its turn to the peer's last answer
    tier 2: CheckpointCommitted    from the first captured header to the commit object
    tier 3: CheckpointUploaded     from its turn to the bucket's commit object

The medians of the last few are kept. They follow a disk that fills up, and ignore one outlier. The
agent updates them while it runs, and reads them from the journal when a run resumes. So the first
emergency of a session already knows the bandwidths of the last session.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from holdfast.events import (
    CheckpointCommitted,
    CheckpointUploaded,
    Event,
    Record,
    SnapshotKept,
    StepDone,
)

MEASURED_SAVES = 9
"""Saves over which a tier is measured."""


class TierMeasurements:
    """Takes records; belongs to one thread."""

    def __init__(self) -> None:
        self._saves: dict[int, list[tuple[float, int]]] = {}  # tier -> (seconds, bytes)
        self._steps: list[float] = []

    def observe(self, record: Record) -> None:
        event: Event = record.event
        match event:
            case SnapshotKept():
                self._record_save(1, event.seconds, event.bytes - event.spared)
            case CheckpointCommitted():
                self._record_save(2, event.seconds, event.bytes)
            case CheckpointUploaded():
                self._record_save(3, event.seconds, event.bytes)
            case StepDone():
                self._steps = [*self._steps, event.seconds][-MEASURED_SAVES:]

    def _record_save(self, tier: int, seconds: float, nbytes: int) -> None:
        found = self._saves.setdefault(tier, [])
        found.append((seconds, nbytes))
        del found[:-MEASURED_SAVES]

    @property
    def usual_step_s(self) -> float:
        """A usual step; 0 as long as none was seen."""
        return median(self._steps) if self._steps else 0.0

    def durations_s(self) -> dict[int, float]:
        """Until a save is done, by tier; tiers that nothing was seen of are left out."""
        return {tier: median(s for s, _ in found) for tier, found in self._saves.items()}

    def bytes_per_second(self, tier: int) -> float | None:
        """None where nothing was seen, or only what had no bytes to send."""
        found = [n / s for s, n in self._saves.get(tier, ()) if s > 0 and n > 0]
        return median(found) if found else None

    def to_json(self) -> dict[str, Any]:
        """Return what a worker receives: `durations_s`."""
        return {str(tier): seconds for tier, seconds in self.durations_s().items()}


def durations_from_json(value: Mapping[str, Any]) -> dict[int, float]:
    return {int(tier): float(seconds) for tier, seconds in value.items()}
