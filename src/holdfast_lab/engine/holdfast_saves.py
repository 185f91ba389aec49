"""How often Holdfast saves in a simulation: the objects of `policy/saving` decide.

They choose tiers and intervals from the failures seen so far. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.interval import IntervalBounds, IntervalDecision, SaveCost
from holdfast.policy.saving.tier_choice import TierChoices
from holdfast.policy.saving.tier_durations import TierDurations
from holdfast.policy.saving.tiers import (
    DISK,
    MEMORY,
    PEERS,
    SaveCosts,
    TierSettings,
    tier_choices,
    tier_costs,
)
from holdfast_lab.engine.interfaces import Costs, OperatingPoint, SavePlan, TierSave, View

MIN_REVIEW_S = 60.0
REVIEW_SHARE = 0.25
REVIEW_FAILURES = 1.0
"""Intervals are decided again when a failure was to be expected, at the latest after this share of
the time since the last one."""
SAME_RATE = 0.83
"""A rate within this factor moves no interval. An interval goes with the root of the rate, and
`policy/saving/tier_choice.py` keeps one that would change by less than a tenth."""
_MAX_LAYOUTS = 64  # layouts whose saves are remembered


def _are_near(rates: Mapping[int, float], before: Mapping[int, float]) -> bool:
    near = [SAME_RATE * rate < rates[tier] < rate / SAME_RATE for tier, rate in before.items()]
    return False not in near


@dataclass(slots=True)
class _SavesOn:
    """What saves of a layout take by tier, and the choices of tiers. planned: its saves by the
    decisions `planned_by`."""

    each: Mapping[int, TierSave]
    choices: TierChoices
    planned_by: Mapping[int, IntervalDecision] | None = None
    planned: tuple[TierSave, ...] = ()


@dataclass(slots=True)
class HoldfastSaves:
    """Tiers and intervals of one run.

    given: seconds between saves into each tier that there is; 0: decided here. bounds: of the
    intervals, in seconds. prior_mtbf_s: of one node, before a failure was seen. restores_s: seconds
    of a restore by tier, for a layout.
    """

    costs: Costs
    given: Mapping[int, float]
    bounds: tuple[float, float]
    prior_mtbf_s: float
    restores_s: Callable[[OperatingPoint], Mapping[int, float]]
    rate: FailureRate = field(init=False)
    settings: TierSettings = field(init=False)
    classes: FailureClassCounts = field(default_factory=FailureClassCounts)
    _since: float = 0.0
    _node_s: float = 0.0
    _counted_at: float = 0.0
    _last_failure: float = 0.0
    _decide_at: float = 0.0
    _decided_for: int = 0
    _decided_rates: Mapping[int, float] = field(default_factory=dict)
    _saves: dict[tuple[int, int], _SavesOn] = field(default_factory=dict)
    _current: dict[int, IntervalDecision] = field(default_factory=dict)
    _shares: Mapping[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self.rate = FailureRate.from_prior(self.prior_mtbf_s)
        least, most = self.bounds
        memory = IntervalBounds(min(1e-3, most), most)
        decided = frozenset(tier for tier, seconds in self.given.items() if not seconds)
        bounds = {MEMORY: memory, PEERS: memory, DISK: IntervalBounds(least, most)}
        # A node's own memory holds each step. Its saves cost nothing and are not simulated.
        self.settings = TierSettings((MEMORY, *self.given), decided, bounds)
        self._shares = self.classes.rate_by_tier(1.0, self.settings.present)

    def interval(self, tier: int) -> float:
        """Seconds between saves into a tier; inf: none are made."""
        if given := self.given.get(tier, inf):
            return given
        made = self._current.get(tier)
        return made.seconds if made else inf

    # --- what is seen ---------------------------------------------------------------------------
    def count_nodes(self, view: View) -> None:
        """Time passed at risk on the nodes of the present layout, which may change now."""
        used = view.point.nodes if view.point else 1
        self._node_s += used * (view.now - self._counted_at)
        self._counted_at = view.now

    def add_failure(self, view: View, level: int) -> None:
        """A failure of a class of `policy/saving/failure_classes.py` came now."""
        self._observe(view, failures=1)
        self._last_failure = self._decide_at = view.now
        self.classes = self.classes.with_failure(level)
        self._shares = self.classes.rate_by_tier(1.0, self.settings.present)

    def _observe(self, view: View, failures: int = 0) -> None:
        """Time passed at risk, on the mean number of nodes since the last look; then failures."""
        if view.now > self._counted_at:
            self.count_nodes(view)
        passed = view.now - self._since
        nodes = self._node_s / passed if passed > 0 else 1.0
        self.rate = self.rate.with_observation(passed, nodes if nodes > 1 else 1.0, failures)
        self._since, self._node_s = view.now, 0.0

    # --- what is decided ------------------------------------------------------------------------
    def plan(self, view: View) -> SavePlan:
        """Decided again after a failure, and when the belief may have moved."""
        point, now = view.point, view.now
        assert point is not None
        nodes = point.nodes
        if not self.settings.automatic:
            return SavePlan(self._tiers(point))
        is_due = now >= self._decide_at
        if is_due or nodes != self._decided_for:
            if is_due and now > self._since:
                self._observe(view)
            rate = self.rate.failures_per_second(nodes)
            quiet = REVIEW_SHARE * (now - self._last_failure)
            self._decide_at = now + max(MIN_REVIEW_S, REVIEW_FAILURES / rate, quiet)
            self._decided_for = nodes
            rates = {tier: rate * share for tier, share in self._shares.items()}
            if not self._decided_rates or not _are_near(rates, self._decided_rates):
                made = self._saves_on(point).choices.decide(rates, self._current)
                self._decided_rates = rates
                self._current = {decision.tier: decision for decision in made}
        return SavePlan(self._tiers(point), max(MIN_REVIEW_S, self._decide_at - now))

    def _tiers(self, point: OperatingPoint) -> tuple[TierSave, ...]:
        """The saves of the intervals in force. They stay the same object as long as they hold."""
        saves = self._saves_on(point)
        if saves.planned_by is not self._current:
            saves.planned_by = self._current
            saves.planned = tuple(
                [
                    TierSave(tier, interval, save.blocked_s, save.durable_s, save.bytes)
                    for tier, save in saves.each.items()
                    if tier in self.given and (interval := self.interval(tier)) < inf
                ]
            )
        return saves.planned

    def _saves_on(self, point: OperatingPoint) -> _SavesOn:
        """What a save into each tier takes, and a restore from it, for this layout. That depends on
        its nodes and replicas alone."""
        key = point.nodes, point.replicas
        found = self._saves.get(key)
        if found is None:
            costs, nodes = self.costs, point.nodes
            sent = costs.save_pause_s + costs.sent_share * costs.peer_s(nodes)
            size, stored = costs.state_bytes, costs.store_s(nodes)
            each = {
                PEERS: TierSave(PEERS, inf, sent, costs.peer_s(nodes), size),
                DISK: TierSave(DISK, inf, costs.save_pause_s, stored, size),
            }
            paid = {tier: SaveCost(save.blocked_s) for tier, save in each.items()}
            durable = {tier: save.durable_s for tier, save in each.items()}
            save_costs = SaveCosts({MEMORY: SaveCost(0.0), **paid})
            durations = TierDurations(durable, self.restores_s(point))
            prices = tier_costs(self.settings, save_costs, durations)
            found = _SavesOn(each, tier_choices(self.settings, prices, self.given))
            if len(self._saves) >= _MAX_LAYOUTS:
                self._saves.clear()
            self._saves[key] = found
        return found
