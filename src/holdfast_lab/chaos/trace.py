"""Faults out of a trace of machines that come and go.

A trace tells how many machines were lost and when, not which of ours. Each instant with losses is a
fault three steps after the one before. It hits as large a part of our nodes, drawn by the seed.
Machines lost at one instant are lost in one step here. Nodes come back by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from holdfast_lab.chaos.catalog import FAULTS
from holdfast_lab.chaos.schedule import Draw

_STEPS_BETWEEN_INSTANTS = 3
"""Steps from one instant of a trace to the next."""


def draws_of_trace(shares: Iterable[float], seed: int, nodes: int) -> list[Draw]:
    """shares: of the machines that were there, how many went, instant by instant."""
    chance = random.Random(f"trace {seed}")
    draws = []
    for share in shares:
        gone = max(1, round(share * nodes))
        name = "everything" if gone >= nodes else "two-agents" if gone > 1 else "agent"
        fault = FAULTS[name if FAULTS[name].nodes <= nodes else "agent"]
        points = tuple(chance.choice(part.points) for part in fault.parts)
        draws.append(Draw(fault, points, chance.randrange(1 << 16), _STEPS_BETWEEN_INSTANTS))
    return draws
