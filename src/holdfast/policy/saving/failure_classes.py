"""What a failure takes with it, and so which tier is needed to come back. Pure.

    0  a process: its node's memory still has the state        (killed worker, hang)
    1  a node and its memory: another machine's memory has it  (mover or agent gone, power cut)
    2  several machines at once, peers among them: the run store has it
    3  the run store: the bucket has it

How often the run breaks is `hazard`'s to say; here is how the failures are shared out among these
classes: a count of each, begun with a prior (the mean of a Dirichlet distribution), so that the
first failures of a run move the shares by about as much as the prior is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PRIOR = (1.0, 0.8, 0.15, 0.05)
"""Failures of each class that are assumed to have been seen: two in all, of which every second took
a process alone, and every tenth more than one node. A share that is wrong by a factor of two costs
6 % of what its tier loses (the loss has a flat minimum: (x + 1/x) / 2 at x = the root of 2)."""


@dataclass(frozen=True)
class Classes:
    """Failures seen, by class, the prior's included."""

    counts: tuple[float, ...] = PRIOR

    def after(self, level: int) -> Classes:
        """One more failure of this class."""
        counts = list(self.counts)
        counts[level] += 1
        return replace(self, counts=tuple(counts))

    def rates(self, rate: float, tiers: Sequence[int]) -> dict[int, float]:
        """`rate` failures a second, shared out: by tier, those that it survives and no lower one
        of `tiers`. What none of them survives is counted with the highest: a restart goes back to
        what that holds, or to the beginning, which no interval changes."""
        out = dict.fromkeys(sorted(tiers), 0.0)
        for level, count in enumerate(self.counts):
            tier = next((t for t in out if t >= level), max(out))
            out[tier] += rate * count / sum(self.counts)
        return out
