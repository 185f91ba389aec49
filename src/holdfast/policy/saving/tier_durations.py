"""Past durations of each tier, from the journal: seconds and bytes a second. Pure.

    save     tier 1: SnapshotKept           from its turn to the peer's last answer
             tier 2: CheckpointCommitted    from the first captured header to the commit object
             tier 3: CheckpointUploaded     from its turn to the bucket's commit object
    restore  CheckpointRestored             a rank's; it counts for the highest tier that it read

Until a tier was read once, a restore from it counts as long as a complete save into it. The
medians of the last few are kept. They follow a disk that fills up, and ignore one outlier. The
agent updates them while it runs, and reads them from the journal when a run resumes. So the first
emergency of a session already knows the bandwidths of the last session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated

from holdfast.core.json_parsing import JsonMessage, Key
from holdfast.events import (
    CheckpointCommitted,
    CheckpointRestored,
    CheckpointUploaded,
    Event,
    Record,
    SnapshotKept,
    StepDone,
)

MEASURED_SAVES = 9
"""Saves over which a tier is measured, and restores."""
_PEERS = 1
_TIER_OF_SOURCE = {"memory": 0, "run store": 2, "bucket": 3}
"""Tiers by the sources that CheckpointRestored names; a peer's has the peer's name."""


@dataclass(frozen=True)
class TierDurations(JsonMessage):
    """Seconds by tier. save_s: until a save is done. restore_s: until a rank has read its state.
    Tiers that nothing was seen of are left out."""

    absent_if_default = frozenset({"restore_s"})
    save_s: Annotated[Mapping[int, float], Key("durations")] = field(default_factory=dict)
    restore_s: Annotated[Mapping[int, float], Key("restores")] = field(default_factory=dict)


class TierMeasurements:
    """Takes records; belongs to one thread."""

    def __init__(self) -> None:
        self._saves: dict[int, list[tuple[float, int]]] = {}  # tier -> (seconds, bytes sent)
        self._size: dict[int, int] = {}  # tier -> bytes of its newest save, sent or not
        self._restores: dict[int, list[float]] = {}
        self._steps: list[float] = []

    def observe(self, record: Record) -> None:
        event: Event = record.event
        match event:
            case SnapshotKept():
                self._record_save(1, event.seconds, event.bytes - event.spared)
                self._size[1] = event.bytes
            case CheckpointCommitted():
                self._record_save(2, event.seconds, event.bytes)
            case CheckpointUploaded():
                self._record_save(3, event.seconds, event.bytes)
            case CheckpointRestored() if event.sources:
                tier = max(_TIER_OF_SOURCE.get(name, _PEERS) for name in event.sources)
                found = self._restores.setdefault(tier, [])
                found.append(event.seconds)
                del found[:-MEASURED_SAVES]
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

    def durations(self) -> TierDurations:
        """Return the medians; a tier that was never read has the time of a complete save."""
        saves = {tier: median(s for s, _ in found) for tier, found in self._saves.items()}
        restores = {tier: median(found) for tier, found in self._restores.items()}
        return TierDurations(
            saves, {t: self._complete_save_s(t, saves[t]) for t in saves} | restores
        )

    def _complete_save_s(self, tier: int, seconds: float) -> float:
        speed = self.bytes_per_second(tier)
        return self._size[tier] / speed if speed and tier in self._size else seconds

    def bytes_per_second(self, tier: int) -> float | None:
        """None where nothing was seen, or only what had no bytes to send."""
        found = [n / s for s, n in self._saves.get(tier, ()) if s > 0 and n > 0]
        return median(found) if found else None
