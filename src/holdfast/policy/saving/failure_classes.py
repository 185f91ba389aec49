"""Classes of failures, by what they destroy and so by the tier that recovery needs. Pure.

    0  a process: its node's memory still has the state        (killed worker, hang)
    1  a node and its memory: another machine's memory has it  (mover or agent gone, power cut)
    2  several machines at once, peers among them: the run store has it
    3  the run store: the bucket has it

`hazard` estimates how often the run breaks. This module estimates the share of each class. It
counts failures of each class and begins with a prior (the mean of a Dirichlet distribution). So the
first failures of a run move the shares by about as much as the prior is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_FAILURE_COUNTS = (1.0, 0.8, 0.15, 0.05)
"""Failures of each class that are assumed in advance: two in all. Every second took a process
alone, and every tenth more than one node. A share that is wrong by a factor of two costs 6 % of
what its tier loses. (The loss has a flat minimum: (x + 1/x) / 2 at x = the root of 2.)"""


@dataclass(frozen=True)
class FailureClassCounts:
    """Failures seen, by class, the prior's included."""

    counts: tuple[float, ...] = PRIOR_FAILURE_COUNTS

    def to_json(self) -> list[float]:
        return list(self.counts)

    @staticmethod
    def from_json(counts: Sequence[float]) -> FailureClassCounts:
        return FailureClassCounts(tuple(counts))

    def with_failure(self, level: int) -> FailureClassCounts:
        """One more failure of this class."""
        counts = list(self.counts)
        counts[level] += 1
        return FailureClassCounts(tuple(counts))

    def rate_by_tier(self, rate: float, tiers: Sequence[int]) -> dict[int, float]:
        """`rate` failures a second, shared out: by tier, those that it survives and no lower one of
        `tiers`. Failures that none of them survives are counted with the highest. A restart returns
        to what that tier holds, or to the beginning, which no interval changes."""
        ordered, total = sorted(tiers), sum(self.counts)
        out = dict.fromkeys(ordered, 0.0)
        for level, count in enumerate(self.counts):
            for tier in ordered:
                if tier >= level:
                    break
            out[tier] += rate * count / total
        return out
