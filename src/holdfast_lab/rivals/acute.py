"""ACUTE's two levels: a stable node's memory first, storage behind it; and other hierarchies.

Cho et al., IEEE Access 12, 2024, pp. 116891-116904. Its abstract says 43.30 % less checkpoint time
than a multi-level baseline, and almost no delay of the makespan. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from holdfast.policy.saving.tiers import DISK, PEERS
from holdfast_lab.engine.interfaces import OperatingPoint, SavePlan, TierSave, View
from holdfast_lab.rivals.restart import RestartPolicy


@dataclass(frozen=True)
class Level:
    """One place of a hierarchy. bandwidth: bytes a second into and out of it. survives: the loss of
    a training node."""

    name: str
    tier: int
    bandwidth: float
    survives: bool = True


@dataclass(frozen=True)
class Hierarchy:
    """Levels that every save goes through, the nearest first.

    pause_s: for which training waits, of a save of one byte, and of any save. at_once: all levels
    are written at the same time, not one after the other.
    """

    name: str
    levels: tuple[Level, ...]
    pause_per_byte: float
    pause_fixed_s: float = 0.0
    at_once: bool = False

    def pause_s(self, nbytes: float) -> float:
        return self.pause_fixed_s + nbytes * self.pause_per_byte

    def durable_s(self, nbytes: float) -> dict[int, float]:
        """Seconds from the end of the pause until each level has a save."""
        out, spent = {}, 0.0
        for level in self.levels:
            seconds = nbytes / level.bandwidth
            spent = seconds if self.at_once else spent + seconds
            out[level.tier] = spent
        return out

    def checkpoint_s(self, nbytes: float) -> float:
        """Seconds until a save survives the loss of a training node."""
        durable = self.durable_s(nbytes)
        safe = [durable[level.tier] for level in self.levels if level.survives]
        return self.pause_s(nbytes) + min(safe, default=inf)

    def load_s(self, nbytes: float) -> float:
        """Seconds to read the newest save that survived."""
        return nbytes / max(level.bandwidth for level in self.levels if level.survives)


MEMCPY, LINK, STORAGE = 16e9, 1.25e9, 100e6
"""Bytes a second: a copy in memory, 10 Gbit/s, and network storage. The first is the floor of
`benchmarks.lab.acute` (667 MB in 0.04 s). Its settings are the other two."""
COPY_PAUSE = 0.1 / 1e9
"""Seconds for each byte that training waits while a save is copied. DCP with a kept stager takes
66.8 ms at 667 MB and 108.4 ms at 1.31 GB (`benchmarks.lab.acute`)."""
ACUTE_PAUSE_SHARE = 1 - 0.531  # of the baseline's pause that ACUTE keeps (not in its abstract)
STORE = Level("storage", DISK, STORAGE)
ACUTE = Hierarchy(
    "stable node, then storage (ACUTE)",
    (Level("stable node", PEERS, LINK), STORE),
    ACUTE_PAUSE_SHARE * COPY_PAUSE,
)


@dataclass
class HierarchyPolicy(RestartPolicy):
    """Restart from the newest save that survived, of one hierarchy.

    interval_s: seconds of training between saves; 0: Young's, for the pause of a save.
    """

    hierarchy: Hierarchy = ACUTE
    interval_s: float = 0.0
    name: str = field(default="acute", kw_only=True)

    @property
    def tiers(self) -> tuple[int, ...]:
        return tuple(level.tier for level in self.hierarchy.levels if level.survives)

    def start_s(self, point: OperatingPoint) -> float:
        costs = self.cost.costs
        load = self.hierarchy.load_s(costs.state_bytes)
        return costs.start_s + costs.regroup_s + costs.communicator_s + load

    def save_s(self, point: OperatingPoint) -> float:
        return self.hierarchy.checkpoint_s(self.cost.costs.state_bytes)

    def saves(self, view: View) -> SavePlan:
        nbytes = self.cost.costs.state_bytes
        pause, durable = self.hierarchy.pause_s(nbytes), self.hierarchy.durable_s(nbytes)
        wanted = self.interval_s or self._saves.interval_s(pause, view.now)
        tiers = []
        for place, level in enumerate(self.hierarchy.levels):
            # a level takes the next save when it has the one before
            interval = max(wanted, durable[level.tier])
            blocked = pause if place == 0 else 0.0
            tiers.append(TierSave(level.tier, interval, blocked, durable[level.tier], nbytes))
        return SavePlan(tuple(tiers), review_s=1800.0)
