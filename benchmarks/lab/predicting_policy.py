"""A policy of the engine that asks a predictor, and acts as `policy/prediction/response.py` says.

It wraps Holdfast's own policy. Once in a horizon it asks for the chance of each node in use. The
largest one decides: nodes of one zone are lost together, so their chances are not independent. On
"save" the quickest tier is saved into more often until the horizon ends. On "move" spare nodes take
the places of those in danger at a step boundary. The engine prices every save as one of the
complete state, so the price of a false alarm is an upper bound. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol, Self

from holdfast.policy.prediction.history import NodeChange
from holdfast.policy.prediction.response import ResponsePolicy, ResponsePrices
from holdfast_lab.engine.holdfast import HoldfastPolicy
from holdfast_lab.engine.interfaces import NOTHING, Change, Decision, SavePlan, Transition, View

_RETRY_S = 30.0
"""A question that falls into a pause is asked again so much later."""


class Predictor(Protocol):
    """As `policy.prediction.predictor.NodePredictor`."""

    def update_all(self, changes: Sequence[NodeChange]) -> Self: ...

    def probability(self, node: str, horizon_s: float, now_s: float) -> float: ...


@dataclass(frozen=True)
class Oracle:
    """Knows when each node is lost: what no predictor can beat. losses: node -> times."""

    losses: Mapping[str, Sequence[float]]

    def update_all(self, changes: Sequence[NodeChange]) -> Self:
        return self

    def probability(self, node: str, horizon_s: float, now_s: float) -> float:
        return float(any(now_s < at <= now_s + horizon_s for at in self.losses.get(node, ())))


@dataclass
class PredictingPolicy:
    """One run's decisions. actions: how often each was taken.

    may_move: spare nodes may take over. offset_s: time of the trace at the start of the run.
    """

    inner: HoldfastPolicy
    predictor: Predictor
    response: ResponsePolicy
    may_move: bool = True
    name: str = "prediction"
    actions: Counter[str] = field(default_factory=Counter)
    _known: dict[str, str] = field(default_factory=dict)
    _alarm: tuple[float, frozenset[str], float] | None = None  # chance, nodes, until
    _every_s: float = 0.0
    _ask_at: float = 0.0

    def decide(self, view: View, change: Change) -> Decision:
        self._follow(view)
        decision = self.inner.decide(view, change)
        if view.now + 1e-9 >= self._ask_at:
            is_calm = decision.transition is None and view.point is not None and not view.pause_left
            self._ask_at = view.now + (self.response.horizon_s if is_calm else _RETRY_S)
            moved = self._ask(view) if is_calm else None
            if moved is not None:
                decision = Decision(moved, decision.review_s)
        return replace(decision, review_s=min(decision.review_s, self._ask_at - view.now))

    def saves(self, view: View) -> SavePlan:
        plan = self.inner.saves(view)
        tiers = plan.tiers
        if tiers and self._every_s:
            quick = tiers[0]
            more = replace(quick, interval_s=min(quick.interval_s, self._every_s))
            tiers = (more, *tiers[1:])
        # Asked again as soon as the predictor has been.
        return SavePlan(tiers, min(plan.review_s, max(0.0, self._ask_at - view.now)))

    def slowdown(self, view: View) -> float:
        return self.inner.slowdown(view)

    # --- the predictor --------------------------------------------------------------------------
    def _follow(self, view: View) -> None:
        """Take in which nodes joined and went, and end the alarm whose time is over."""
        now = view.now
        lost = [name for name in self._known if name not in view.nodes]
        changes = [NodeChange(now, "lost", name, self._known.pop(name)) for name in lost]
        for name, node in view.nodes.items():
            if name not in self._known:
                self._known[name] = node.zone
                changes.append(NodeChange(now, "join", name, node.zone))
        if changes:
            self.predictor = self.predictor.update_all(changes)
        if self._alarm is None:
            return
        chance, nodes, until = self._alarm
        if nodes & set(lost) or now + 1e-9 >= until:
            self.response = self.response.with_outcome(chance, bool(nodes & set(lost)))
            self._alarm, self._every_s = None, 0.0

    def _ask(self, view: View) -> Transition | None:
        horizon = self.response.horizon_s
        chances = {name: self.predictor.probability(name, horizon, view.now) for name in view.used}
        highest = max(chances.values(), default=0.0)
        if highest < self.response.threshold or highest <= 0:
            return None
        limit = max(self.response.threshold, highest / 2)
        danger = frozenset(name for name, chance in chances.items() if chance >= limit)
        self._alarm = (highest, danger, view.now + horizon)
        spares = [name for name in view.nodes if name not in set(view.used)]
        safe = [
            name for name in spares if self.predictor.probability(name, horizon, view.now) < limit
        ]
        prices = self._prices(view, len(danger) <= len(safe))
        found = self.response.decide(highest, prices)
        self.actions[found.action] += 1
        self._every_s = found.every_s
        if found.action != "move":
            return None
        return self._move(view, danger, safe, prices.move_s)

    def _prices(self, view: View, has_room: bool) -> ResponsePrices:
        costs, point = self.inner.cost.costs, view.point
        assert point is not None
        plan = self.inner.saves(view)
        quick = plan.tiers[0] if plan.tiers else None
        rung = self.inner.rules.rung_s
        back = costs.peer_s(point.nodes) if self.inner.rules.peers else costs.store_s(point.nodes)
        moving = rung[5] + costs.communicator_s + costs.peer_s(point.nodes_per_replica)
        return ResponsePrices(
            quick.blocked_s if quick else inf,
            quick.interval_s if quick else inf,
            costs.detection_s + costs.communicator_s + rung[4] + back,
            moving if has_room and self.may_move else inf,
        )

    def _move(
        self, view: View, danger: frozenset[str], safe: Sequence[str], seconds: float
    ) -> Transition:
        takers = iter(safe)
        used = tuple(next(takers) if name in danger else name for name in view.used)
        pauses = (("recovery", seconds),)
        return Transition(view.point, pauses, NOTHING, used=used, reason="prediction", rung=5)
