"""How evenly a router spreads tokens over the experts of a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field

from holdfast.events import Event


class ExpertsRouted(Event, kind="experts_routed", absent_if_empty={"dropped", "loads"}):
    """Choices that the routers made for tokens of one rank, since its last event of this kind."""

    rank: int
    counts: dict[str, list[int]]  # number of a block -> choices by expert
    dropped: int = 0  # of these choices: those that no expert computed, for lack of capacity
    # With copies of experts, by block: choices of an even load, of the rank's own experts, and that
    # it computed. The last number is of its copies.
    loads: dict[str, list[int]] = field(default_factory=dict)


def load_entropy(counts: Sequence[int]) -> float:
    """Return the entropy of the load over that of an even one: 1 is even, 0 is one expert alone."""
    total = sum(counts)
    if not total or len(counts) < 2:
        return 1.0
    parts = (count / total for count in counts if count)
    return -sum(part * math.log(part) for part in parts) / math.log(len(counts))
