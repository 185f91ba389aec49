"""Parcae's optimiser: the layout with the most work over the next minutes, losses expected. Pure.

Liveput is the throughput of a layout in expectation over the nodes that may go in an interval. The
dynamic programme picks a layout for each of the next intervals. Its aim is the most work after
the cost of the migrations between them. (Duan et al., NSDI 2024, section 4; JF-D/Parcae,
liveput/liveput.py and monte_carlo.py, commit 7cb3059.) The code draws the nodes that go; here the
chance that each stage keeps enough copies is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import comb
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast_lab.engine.interfaces import Costs
from holdfast_lab.rivals.grid_cost import GridModel, Shape, regroup_s

INTERVAL_S = 60.0
LOOK_AHEAD = 12  # intervals of the paper's evaluation
_MIN_SHARE = 0.8  # layouts far below the fastest on as many nodes are not looked at

Matrix = NDArray[np.float64]


class MigrationCosts(Protocol):
    """Seconds that training stands for a migration to a layout."""

    def intra_s(self, dp: int, pp: int) -> float:
        """Each stage keeps enough copies: only groups change."""
        ...

    def inter_s(self, dp: int, pp: int, grows: bool) -> float:
        """Some nodes take over another stage of the same pipeline depth."""
        ...

    def repartition_s(self, dp: int, pp: int, grows: bool) -> float:
        """Another pipeline depth."""
        ...


@dataclass(frozen=True)
class SharedMigration:
    """The constants that all policies pay."""

    costs: Costs

    def intra_s(self, dp: int, pp: int) -> float:
        return regroup_s(self.costs)

    def inter_s(self, dp: int, pp: int, grows: bool) -> float:
        return regroup_s(self.costs, 1 / pp)

    def repartition_s(self, dp: int, pp: int, grows: bool) -> float:
        return regroup_s(self.costs, 1 / pp)


@cache
def keep_chance(nodes: int, dp: int, pp: int, lost: int, wanted: int) -> float:
    """The chance that each of `pp` stages keeps `wanted` of its `dp` copies, if `lost` of all
    `nodes` go at random. Nodes beyond dp * pp are idle."""
    if wanted > dp:
        return 0.0
    if lost <= 0:
        return 1.0
    if lost > nodes:
        return 0.0
    ways = [1]  # ways to lose so many nodes of the stages so far
    for _ in range(pp):
        new = [0] * min(lost + 1, len(ways) + dp - wanted)
        for i, before in enumerate(ways):
            for k in range(min(dp - wanted, lost - i) + 1):
                if i + k < len(new):
                    new[i + k] += before * comb(dp, k)
        ways = new
    idle = max(0, nodes - dp * pp)
    good = sum(count * comb(idle, lost - i) for i, count in enumerate(ways) if lost - i <= idle)
    return good / comb(nodes, lost)


@dataclass
class LiveputOptimizer:
    """Chooses layouts for a grid. It remembers costs of migrations and its choices."""

    grid: GridModel
    migration: MigrationCosts
    min_share: float = _MIN_SHARE
    _tables: dict[tuple[int, int], Matrix] = field(default_factory=dict)
    _chosen: dict[Hashable, Shape | None] = field(default_factory=dict)

    @cached_property
    def layouts(self) -> tuple[Shape, ...]:
        """Those that are worth a look."""
        found = []
        for dp, pp in self.grid.shapes:
            point, best = self.grid.shaped(dp, pp), self.grid.point(dp * pp)
            if point and best and point.tokens_per_s >= self.min_share * best.tokens_per_s:
                found.append((dp, pp))
        return tuple(found)

    @cached_property
    def _rates(self) -> Matrix:
        points = (self.grid.shaped(dp, pp) for dp, pp in self.layouts)
        return np.array([point.tokens_per_s if point else 0.0 for point in points])

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return np.array([dp * pp for dp, pp in self.layouts], np.int64)

    def _row(self, shape: Shape | None, nodes: int, lost: int) -> Matrix:
        """Expected seconds from one layout to each."""
        return np.array([self._cost(shape, nodes, lost, to) for to in self.layouts])

    def _cost(self, shape: Shape | None, nodes: int, lost: int, to: Shape) -> float:
        (dp, pp) = to
        if shape is None:
            return self.migration.repartition_s(dp, pp, True)
        grows = dp * pp > shape[0] * shape[1] - lost
        if pp != shape[1]:
            return self.migration.repartition_s(dp, pp, grows)
        if to == shape and lost == 0:
            return 0.0
        chance = keep_chance(max(nodes, shape[0] * pp), shape[0], pp, lost, dp)
        inter = self.migration.inter_s(dp, pp, grows)
        return chance * self.migration.intra_s(dp, pp) + (1 - chance) * inter

    def _table(self, nodes: int, lost: int) -> Matrix:
        key = nodes, lost
        if key not in self._tables:
            rows = []
            for shape in self.layouts:
                fits = shape[0] * shape[1] <= nodes
                rows.append(
                    self._row(shape, nodes, lost) if fits else np.full(len(self.layouts), np.inf)
                )
            self._tables[key] = np.array(rows)
        return self._tables[key]

    def choose(
        self,
        nodes: int,
        shape: Shape | None,
        ahead: Sequence[tuple[int, int]],
        pause_s: float = 0.0,
    ) -> Shape | None:
        """The layout for the first of the next intervals; None if nothing fits.

        nodes: now. shape: at work. ahead: (joined, lost) of each interval. pause_s: that is left of
        an earlier migration.
        """
        key = nodes, shape, tuple(ahead), pause_s
        if key not in self._chosen:
            self._chosen[key] = self._choose(nodes, shape, ahead, pause_s)
        return self._chosen[key]

    def _choose(
        self, nodes: int, shape: Shape | None, ahead: Sequence[tuple[int, int]], pause_s: float
    ) -> Shape | None:
        now = nodes
        work: Matrix | None = None
        choices: list[Any] = []
        for joined, lost in ahead:
            after = now + joined - lost
            fits = self._sizes <= after
            if not fits.any():
                break
            if work is None:
                seconds = pause_s + self._row(shape, now, lost)
                work = self._rates * np.maximum(0.0, INTERVAL_S - seconds)
                work = np.where(fits, work, -np.inf)
                choices.append(np.arange(len(self.layouts)))
            else:
                gain = self._rates * np.maximum(0.0, INTERVAL_S - self._table(now, lost))
                total = work[:, None] + gain
                best = total.argmax(axis=0)
                work = np.where(fits, total[best, np.arange(len(best))], -np.inf)
                choices.append(best)
            now = after
        if work is None:
            return None
        place = int(work.argmax())
        for best in reversed(choices[1:]):
            place = int(best[place])
        return self.layouts[place]
