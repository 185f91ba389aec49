"""Parcae: each minute a migration to the layout that its forecast favours, or to a saved one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import fmean, pstdev, pvariance

from holdfast_lab.engine.interfaces import (
    NOTHING,
    STEP,
    Change,
    Decision,
    SavePlan,
    Transition,
    View,
    slowest,
)
from holdfast_lab.rivals.grid_cost import RECOVERY, STARTUP, GridModel, Shape, regroup_s, restart_s
from holdfast_lab.rivals.liveput import INTERVAL_S, LOOK_AHEAD, LiveputOptimizer, SharedMigration

PAST = {14: 17, 12: 12, 10: 10, 9: 9, 8: 8, 7: 8, 5: 10}
"""Minutes that a forecast of so many minutes looks back."""
_GROWTH = 3  # A forecast stays within so many nodes of its first value
_OUTLIER_MINUTES = (3, 2, 1)
"""Excursions of so many minutes that end where they began are smoothed away."""


@dataclass(frozen=True)
class ForecastBounds:
    """Nodes that a forecast never leaves. The code has 8 to 32 for its trace."""

    least: int = 8
    most: int = 32


def without_excursions(counts: Sequence[float]) -> list[float]:
    """Short excursions are smoothed away, and everything before the last extreme is levelled."""
    out = list(counts)
    for size in _OUTLIER_MINUTES:
        for i in range(len(out) - 1 - size):
            between = out[i + 1 : i + 1 + size]
            if out[i] == out[i + 1 + size] and all(value != out[i] for value in between):
                out[i + 1 : i + 1 + size] = [out[i]] * size
    low, high = min(out), max(out)
    target = low if low < min(out[0], out[-1]) else high if high > max(out[0], out[-1]) else None
    if target is not None:
        last = max(i for i, value in enumerate(out) if value == target)
        out[:last] = [target] * last
    return out


def fit_differences(counts: Sequence[float]) -> tuple[float, float]:
    """(constant, coefficient) of d_t = constant + coefficient * d_(t-1), d: differences."""
    steps = [b - a for a, b in itertools.pairwise(counts)]
    before, after = steps[:-1], steps[1:]
    if len(before) < 2:
        return 0.0, 0.0
    spread = pvariance(before) * len(before)
    mean_before, mean_after = fmean(before), fmean(after)
    if spread <= 0:
        return mean_after, 0.0
    pairs = zip(before, after, strict=True)
    slope = sum((x - mean_before) * (y - mean_after) for x, y in pairs) / spread
    slope = max(-0.95, min(0.95, slope))
    return mean_after - slope * mean_before, slope


def forecast(
    counts: Sequence[int],
    removed: Sequence[int],
    minutes: int,
    bounds: ForecastBounds,
    draw: random.Random,
) -> list[int]:
    """Nodes of the next `minutes` minutes.

    Parcae's forecast: ARIMA(1, 1, 0) with the rules of its code (JF-D/Parcae,
    liveput/trace_prediction.py and trace.py, commit 7cb3059; Duan et al., NSDI 2024, section 5).
    The autoregression is fitted by least squares on the differences of the window, where the
    original calls a library's maximum likelihood.

    counts, removed: nodes, and nodes that went, of the minutes before, the newest last. If the
    autoregression sees no change after a window with losses, losses are drawn from a Poisson
    distribution, as in the code.
    """
    if counts.count(counts[-1]) == len(counts):  # no change, and no draw, in any of the rules below
        return [min(bounds.most, max(bounds.least, counts[-1]))] * minutes
    window = without_excursions([float(count) for count in counts])
    last = window[-1]
    if pstdev(window) == 0:
        ahead = [last] * minutes
    else:
        constant, slope = fit_differences(window)
        step, value, ahead = window[-1] - window[-2], last, []
        for _ in range(minutes):
            step = constant + slope * step
            value += step
            ahead.append(float(round(value)))
    first = ahead[0]
    ahead = [min(first + _GROWTH, max(first - _GROWTH, value)) for value in ahead]
    ahead = [float(min(bounds.most, max(bounds.least, value))) for value in ahead]
    drawn = [0] * minutes
    if pstdev(ahead) == 0 and pstdev(window) != 0 and removed:
        rate = min(pstdev(removed), pvariance(removed), fmean(removed))
        drawn = [_poisson(rate, draw) for _ in range(minutes)]
    grows, shrinks = _penalties(window)
    out, now, before = [], last, last
    for value, loss in zip(ahead, drawn, strict=True):
        change = value - before
        now += change * grows if change > 0 else change * shrinks
        now = max(0.0, float(round(now - loss * shrinks)))
        before = value
        out.append(int(now))
    return out


def _penalties(window: Sequence[float]) -> tuple[float, float]:
    """Factors on growth and on losses that are forecast, after a long climb or fall."""

    def factor(height: float) -> float:
        return 0.5 if height >= 10 else 0.75 if height >= 5 else 1.0

    pairs = list(itertools.pairwise(window))
    grows = factor(window[-1] - min(window)) if all(a <= b for a, b in pairs) else 1.0
    shrinks = factor(max(window) - window[-1]) if all(a >= b for a, b in pairs) else 1.0
    return grows, shrinks


def _poisson(mean: float, draw: random.Random) -> int:
    limit, product, count = exp(-mean), draw.random(), 0
    while product > limit:
        product *= draw.random()
        count += 1
    return count


# --- the policy -----------------------------------------------------------------------------------
GRADIENT_SHARE = 1 / 6
"""Bytes of a gradient in 16 bits, of those of a parameter and two moments in fp32."""
_AFTER_EVENTS_S = 0.01  # A minute's decision comes so long after the events of its first instant

Chooser = Callable[[int, Sequence[int], Sequence[int], Shape | None], Shape | None]
"""From the minute, nodes and lost nodes of each minute until now, and the layout at work."""


@dataclass
class MinutelyPolicy:
    """Takes a layout once a minute and after each loss, and moves to it in living processes.

    A server outside the spot nodes holds a copy of the state after each step, so no loss goes
    further back (Parcae's ParcaePS). Each stage sends it the reduced gradient of a step, of which
    training feels the same share as of a save. Its price is not charged: the paper's machines for
    it are not in the trace. A change of depth moves every stage. One of width needs new groups, and
    moves a stage that has too few copies.
    """

    cost: GridModel
    chooser: Chooser
    name: str = "parcae"
    _counts: list[int] = field(default_factory=list)
    _lost: list[int] = field(default_factory=list)
    _decided: int = -1
    _shape: Shape | None = None

    def decide(self, view: View, change: Change) -> Decision:
        minute = int(view.now / INTERVAL_S + 1e-9)
        self._record(minute, len(view.nodes), len(change.lost))
        transition = None
        if change.lost or (minute > self._decided and (change.review or view.point is None)):
            self._decided = minute
            transition = self._move(view, change, self._wanted(view, minute))
        next_minute = (minute + 1) * INTERVAL_S + _AFTER_EVENTS_S
        if minute > self._decided:
            next_minute = max(view.now, minute * INTERVAL_S + _AFTER_EVENTS_S)
        return Decision(transition, max(1e-3, next_minute - view.now))

    def _record(self, minute: int, nodes: int, lost: int) -> None:
        while len(self._counts) <= minute:
            self._counts.append(self._counts[-1] if self._counts else nodes)
            self._lost.append(0)
        self._counts[-1] = nodes
        self._lost[-1] += lost

    def _wanted(self, view: View, minute: int) -> Shape | None:
        """The chosen layout, or what is left of it: fewer replicas of the same depth."""
        nodes = len(view.nodes)
        chosen = self.chooser(minute, self._counts, self._lost, self._shape)
        if chosen is None:
            return None
        dp, pp = chosen
        for replicas in range(min(dp, nodes // pp), 0, -1):
            if self.cost.shaped(replicas, pp) is not None:
                return replicas, pp
        best = self.cost.point(nodes)
        return (best.replicas, best.nodes_per_replica) if best else None

    def _move(self, view: View, change: Change, wanted: Shape | None) -> Transition | None:
        costs, before = self.cost.costs, self._shape
        if wanted is None:
            self._shape = None
            lost = change.lost or view.point is not None
            return Transition(None, loses=STEP, reason="too few nodes") if lost else None
        if wanted == before and not change.lost:
            return None
        dp, pp = wanted
        point = self.cost.shaped(dp, pp)
        assert point is not None
        self._shape = wanted
        if view.point is None:
            pause = restart_s(costs, dp * pp, dp)
            used = tuple(view.nodes)[: dp * pp]
            return Transition(point, ((STARTUP, pause),), used=used, reason="start")
        stages = view.point.nodes_per_replica
        if (view.point.replicas, stages) == wanted and not change.lost:  # it stays after all
            return Transition(point, used=tuple(view.used))
        used, moved = place_nodes(view, change.lost, stages, wanted)
        pause = regroup_s(costs, moved) + (costs.detection_s if change.lost else 0.0)
        pause = max(pause, view.pause_left)
        loses = STEP if change.lost else NOTHING
        reason = "migrates" if pp == stages else "changes depth"
        return Transition(point, ((RECOVERY, pause),), loses, used=used, reason=reason)

    def saves(self, view: View) -> SavePlan:
        return SavePlan()

    def slowdown(self, view: View) -> float:
        """Slow nodes, and what training feels of the gradients that go to the server."""
        costs, point = self.cost.costs, view.point
        if point is None or point.step_s <= 0:
            return slowest(view)
        sent = GRADIENT_SHARE * costs.peer_s(point.nodes_per_replica)
        return slowest(view) * (1 + costs.sent_share * sent / point.step_s)


def place_nodes(
    view: View, lost: Sequence[int], stages: int, wanted: Shape
) -> tuple[tuple[str, ...], float]:
    """(nodes in the order of ranks, share of the state that one of them receives at most)."""
    dp, pp = wanted
    gone = set(lost)
    left = [(place, name) for place, name in enumerate(view.used) if place not in gone]
    names = [name for _, name in left]
    spare = [name for name in view.nodes if name not in set(names)]
    if pp != stages:
        return tuple((names + spare)[: dp * pp]), 1 / pp
    holders: list[list[str]] = [[] for _ in range(pp)]
    surplus: list[str] = []
    for place, name in left:
        stage = holders[place % pp]
        (stage if len(stage) < dp else surplus).append(name)
    free = iter([*surplus, *spare])
    moved = 0.0
    for stage in holders:
        while len(stage) < dp:
            stage.append(next(free))
            moved = 1 / pp
    in_order = tuple(stage[replica] for replica in range(dp) for stage in holders)
    return in_order, moved


def forecast_chooser(
    cost: GridModel,
    optimizer: LiveputOptimizer | None = None,
    look_ahead: int = LOOK_AHEAD,
    seed: int = 0,
) -> Chooser:
    """Parcae's own choice: its forecast, then the dynamic programme over it.

    optimizer: one that several runs share.
    """
    optimizer = optimizer or LiveputOptimizer(cost, SharedMigration(cost.costs))
    draw = random.Random(f"{seed}/parcae")
    past = PAST.get(look_ahead, look_ahead)
    bounds = ForecastBounds(min(d * p for d, p in cost.shapes), max(d * p for d, p in cost.shapes))

    def choose(
        minute: int, counts: Sequence[int], lost: Sequence[int], shape: Shape | None
    ) -> Shape | None:
        nodes = counts[-1]
        ahead = [nodes] * look_ahead
        if len(counts) > past:
            ahead = forecast(counts[-past:], lost[-past:], look_ahead, bounds, draw)
            ahead[0] = nodes  # this minute's is known
        if shape is not None and shape[0] * shape[1] > nodes:
            shape = (nodes // shape[1], shape[1]) if nodes >= shape[1] else None
        best = cost.point(nodes)
        is_flat = all(count == nodes for count in ahead)
        if is_flat and best and shape == (best.replicas, best.nodes_per_replica):
            return shape
        return optimizer.choose(nodes, shape, net_changes([nodes, *ahead]))

    return choose


def net_changes(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(joined, lost) from each count to the next."""
    return [(max(0, b - a), max(0, a - b)) for a, b in itertools.pairwise(counts)]
