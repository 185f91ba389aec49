"""The run's list of skipped microbatches with their reasons; it only grows.

A skipped microbatch keeps its place in the order of the run. Its positions are used up, and it is
dealt like any other. Its ledger entry says why nothing of it was learned. It travels as JSON with a
worker's boot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Skip:
    """Microbatch `microbatch` (from 0) of step `step`. Raises ValueError without a reason."""

    step: int
    microbatch: int
    reason: str

    def __post_init__(self) -> None:
        if self.step < 1 or self.microbatch < 0:
            raise ValueError(f"step {self.step} has no microbatch {self.microbatch}")
        if not self.reason:
            raise ValueError("nothing is skipped without a reason")


class Skips:
    """A set of them, at most one of a microbatch: the first reason stands."""

    def __init__(self, skips: Iterable[Skip] = ()):
        self._reasons: dict[tuple[int, int], str] = {}
        for skip in skips:
            self._reasons.setdefault((skip.step, skip.microbatch), skip.reason)

    def reason(self, step: int, microbatch: int) -> str:
        """Return why it is skipped; "" for one that is not."""
        return self._reasons.get((step, microbatch), "")

    def with_skips(self, skips: Iterable[Skip]) -> Skips:
        return Skips([*self, *skips])

    def __iter__(self) -> Iterator[Skip]:
        return iter(sorted(Skip(*at, why) for at, why in self._reasons.items()))

    def __len__(self) -> int:
        return len(self._reasons)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Skips) and self._reasons == other._reasons

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"step": skip.step, "microbatch": skip.microbatch, "reason": skip.reason}
            for skip in self
        ]

    @staticmethod
    def from_json(value: Sequence[Mapping[str, Any]] | None) -> Skips:
        """None is an empty list. Raises ValueError, KeyError or TypeError for what is none."""
        return Skips(
            Skip(int(each["step"]), int(each["microbatch"]), str(each["reason"]))
            for each in value or ()
        )
