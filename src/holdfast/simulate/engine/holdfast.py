"""Holdfast's own policy in a simulation: the runtime's policy objects decide.

`policy/saving` chooses tiers and intervals from the failures seen so far. The recovery ladder
(docs/elastic.md) says what a loss costs. Rung 0: a complete replica is left. Rung 4: the memory of
other nodes has the state. Rung 6: only the run store has it. The copies of a node's
part lie in the memory of the next node in the order of ranks. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from holdfast.plan.objective.recovery_costs import RUNG_S
from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.failure_rate import PRIOR_NODE_MTBF_S, FailureRate
from holdfast.policy.saving.interval import IntervalBounds, IntervalDecision, SaveCost
from holdfast.policy.saving.tier_durations import TierDurations
from holdfast.policy.saving.tiers import SaveCosts, TierSettings, decide_intervals
from holdfast.simulate.engine.interfaces import (
    DISK,
    MEMORY,
    NOTHING,
    PEERS,
    SAVE,
    STAY,
    STEP,
    Change,
    CostModel,
    Costs,
    Decision,
    Node,
    OperatingPoint,
    SavePlan,
    TierSave,
    Transition,
    View,
    slowest,
)

CONTINUES, FROM_MEMORY, FROM_STORE = "continues", "from_memory", "from_store"
_LEVELS = {CONTINUES: 0, FROM_MEMORY: 1, FROM_STORE: 2}
"""Classes of `policy/saving/failure_classes.py`."""
MIN_REVIEW_S = 60.0
REVIEW_SHARE = 0.25
REVIEW_FAILURES = 1.0
"""Intervals are decided again when a failure was to be expected, at the latest after this share of
the time since the last one."""
SAME_RATE = 0.83
"""A rate within this factor moves no interval. An interval goes with the root of the rate, and
`policy/saving/interval.py` keeps one that would change by less than a tenth."""


@dataclass(frozen=True)
class HoldfastRules:
    """What a run file sets. Intervals in seconds; 0: decided by the policy.

    peers: whether other nodes keep snapshots. staged: they lie on a node of their own that is never
    lost (`holdfast stage`). grow_gain: a layout on more nodes is taken if it is faster by this
    share at least. grow_wait_s: seconds that new nodes wait for more of them.
    rung_s: fixed part of each rung of the ladder.
    """

    peers: bool = True
    staged: bool = False
    peer_interval_s: float = 0.0
    store_interval_s: float = 0.0
    min_interval_s: float = 5.0
    max_interval_s: float = 1800.0
    prior_mtbf_s: float = PRIOR_NODE_MTBF_S
    grow_gain: float = 0.0
    grow_wait_s: float = 0.0
    replicas_go_on: bool = True
    rung_s: Mapping[int, float] = field(default_factory=lambda: RUNG_S)


FALSE_NOTICE_S = 60.0
"""A node that is still there so long after its notice stays."""


def _stays(node: Node, now: float) -> bool:
    return node.leaves_s == inf or node.leaves_s + FALSE_NOTICE_S <= now


def restores_s(costs: Costs, rules: HoldfastRules, point: OperatingPoint) -> dict[int, float]:
    """Return the seconds of a restore by tier, detection and communicators left out."""
    return {
        PEERS: rules.rung_s[4] + costs.peer_s(point.nodes_per_replica),
        DISK: rules.rung_s[6] + costs.store_s(point.nodes, point.replicas),
    }


def holdfast(cost: CostModel, rules: HoldfastRules | None = None) -> HoldfastPolicy:
    """The policy for one run."""
    return HoldfastPolicy(cost, rules or HoldfastRules())


@dataclass
class HoldfastPolicy:
    """One run's decisions."""

    cost: CostModel
    rules: HoldfastRules
    name: str = "holdfast"
    rate: FailureRate = field(init=False)
    classes: FailureClassCounts = field(default_factory=FailureClassCounts)
    settings: TierSettings = field(init=False)
    _since: float = 0.0
    _is_warned: bool = False
    _node_s: float = 0.0
    _counted_at: float = 0.0
    _last_failure: float = 0.0
    _decide_at: float = 0.0
    _decided_for: int = 0
    _decided_rates: Mapping[int, float] = field(default_factory=dict)
    _saves: dict[int, dict[int, TierSave]] = field(default_factory=dict)
    _current: dict[int, IntervalDecision] = field(default_factory=dict)
    _planned_for: tuple[int, tuple[float, ...]] = (0, ())
    _planned: tuple[TierSave, ...] = ()

    def __post_init__(self) -> None:
        rules = self.rules
        self.rate = FailureRate.from_prior(rules.prior_mtbf_s)
        bounds = IntervalBounds(rules.min_interval_s, rules.max_interval_s)
        memory = IntervalBounds(min(1e-3, rules.max_interval_s), rules.max_interval_s)
        saved = (PEERS, DISK) if rules.peers else (DISK,)
        given = {PEERS: rules.peer_interval_s, DISK: rules.store_interval_s}
        decided = frozenset(tier for tier in saved if not given[tier])
        limits = {MEMORY: memory, PEERS: memory, DISK: bounds}
        # A node's own memory holds each step. Its saves cost nothing and are not simulated.
        self.settings = TierSettings((MEMORY, *saved), decided, limits)

    # --- nodes change ---------------------------------------------------------------------------
    def decide(self, view: View, change: Change) -> Decision:
        self._count_nodes(view)
        self._is_warned = self._is_warned or bool(change.noticed)
        if change.lost:
            return self._after_loss(view, change)
        if view.point is None:
            return self._start(view)
        if change.noticed and (moved := self._before_departure(view)):
            last = max(view.nodes[name].leaves_s for name in change.noticed)
            return Decision(moved, last + FALSE_NOTICE_S - view.now)
        return self._maybe_grow(view)

    def _start(self, view: View) -> Decision:
        """Nothing runs: begin as soon as any layout fits."""
        point = self.cost.point(len(view.nodes))
        if point is None:
            return STAY
        costs = self.cost.costs
        loading = costs.store_s(point.nodes, point.replicas) if view.tokens else 0.0
        pauses = (("startup", costs.start_s + costs.communicator_s + loading),)
        read = {DISK: point.replicas * costs.state_bytes} if view.tokens else {}
        return Decision(Transition(point, pauses, NOTHING, read=read, rung=6))

    def _after_loss(self, view: View, change: Change) -> Decision:
        need = self._need(view, change.lost)
        if view.pause_left == 0:
            self._observe(view, failures=1)
            self.classes = self.classes.with_failure(_LEVELS[need])
            self._decide_at = view.now
        if need == FROM_MEMORY and PEERS not in self._saved_tiers():
            need = FROM_STORE
        point = self.cost.point(len(view.nodes))
        costs = self.cost.costs
        if point is None:
            return Decision(Transition(None, (), SAVE, (DISK,), reason=need, rung=6))
        base = costs.detection_s + costs.communicator_s
        if need == CONTINUES:
            seconds = base + self.rules.rung_s[0] + self._moving(view, point)
            return Decision(Transition(point, (("recovery", seconds),), STEP, reason=need, rung=0))
        tier, rung = (PEERS, 4) if need == FROM_MEMORY else (DISK, 6)
        made = Transition(
            point,
            (("recovery", base + restores_s(self.cost.costs, self.rules, point)[tier]),),
            SAVE,
            (PEERS, DISK) if tier == PEERS else (DISK,),
            read={tier: costs.state_bytes * (1 if tier == PEERS else point.replicas)},
            reason=need,
            rung=rung,
        )
        return Decision(made)

    def _moving(self, view: View, point: OperatingPoint) -> float:
        """Seconds until nodes have a new part of the state. They take one if a replica is added, or
        if replicas lie on another number of nodes."""
        now = view.point
        if now is None or point.nodes_per_replica != now.nodes_per_replica:
            return self.cost.costs.peer_s(point.nodes_per_replica)
        nodes, each = view.nodes, now.nodes_per_replica
        hit = {place // each for place, name in enumerate(view.used) if name not in nodes}
        complete = now.replicas - sum(number < now.replicas for number in hit)
        return self.cost.costs.peer_s(each) if point.replicas > complete else 0.0

    def _need(self, view: View, lost: tuple[int, ...]) -> str:
        """What can have the state of the lost nodes: a replica, another node, or the store."""
        point, used = view.point, view.used
        assert point is not None
        each = point.nodes_per_replica
        hit = {place // each for place in lost}
        if self.rules.replicas_go_on and point.replicas > 1 and len(hit) < point.replicas:
            return CONTINUES
        number = len(used)
        gone = set(lost)
        safe = self.rules.staged or (
            number > 1 and all((place + 1) % number not in gone for place in lost)
        )
        return FROM_MEMORY if safe and PEERS in self.settings.present else FROM_STORE

    def _saved_tiers(self) -> set[int]:
        return {tier for tier in self.settings.present[1:] if self._interval(tier) < inf}

    def _interval(self, tier: int) -> float:
        if tier not in self.settings.automatic:
            rules = self.rules
            return rules.peer_interval_s if tier == PEERS else rules.store_interval_s
        made = self._current.get(tier)
        return made.seconds if made else inf

    def _before_departure(self, view: View) -> Transition | None:
        """Leave nodes with a notice at a step boundary, with the state they hold: nothing is
        lost."""
        staying = [name for name, node in view.nodes.items() if _stays(node, view.now)]
        leaving = len(set(view.used) & set(staying)) < len(view.used)
        point = self.cost.point(len(staying))
        if not leaving or point is None or view.pause_left > 0:
            return None
        costs = self.cost.costs
        due = (n.leaves_s for n in view.nodes.values() if not _stays(n, view.now))
        left = min(due) - view.now
        step = view.point.step_s if view.point else 0.0
        moving = self._moving(view, point)
        if step + moving > left:
            return None
        keep = [name for name in view.used if name in set(staying)]
        used = (keep + [name for name in staying if name not in set(keep)])[: point.nodes]
        pause = self.rules.rung_s[5] + costs.communicator_s + moving
        return Transition(
            point, (("recovery", pause),), NOTHING, used=tuple(used), reason="notice", rung=5
        )

    def _maybe_grow(self, view: View) -> Decision:
        """Take more nodes, if that is faster, at a step boundary. Nothing is lost."""
        if view.pause_left > 0:
            return Decision(None, view.pause_left)
        assert view.point is not None
        staying = len(view.nodes)
        if self._is_warned:
            staying = sum(_stays(node, view.now) for node in view.nodes.values())
        point = self.cost.point(max(staying, view.point.nodes))
        if point is None or not self._is_better(point, view.point):
            return STAY
        if self.rules.grow_wait_s and point.nodes < self.cost.wanted:
            newest = max(node.joined_s for node in view.nodes.values())
            ripe = newest + self.rules.grow_wait_s - view.now
            if ripe > 0:
                return Decision(None, ripe)
        moving = self._moving(view, point)
        costs = self.cost.costs
        pause = self.rules.rung_s[5] + costs.communicator_s + moving
        return Decision(Transition(point, (("recovery", pause),), NOTHING, reason="grow", rung=5))

    def _is_better(self, point: OperatingPoint, now: OperatingPoint) -> bool:
        return point.tokens_per_s > now.tokens_per_s * (1 + self.rules.grow_gain) + 1e-9

    def slowdown(self, view: View) -> float:
        return slowest(view)

    # --- saves ----------------------------------------------------------------------------------
    def _observe(self, view: View, failures: int = 0) -> None:
        """Time passed at risk, on the mean number of nodes since the last look; then failures."""
        self._count_nodes(view)
        passed = view.now - self._since
        nodes = self._node_s / passed if passed > 0 else 1.0
        self.rate = self.rate.with_observation(max(0.0, passed), max(1.0, nodes), failures)
        self._since, self._node_s = view.now, 0.0
        if failures:
            self._last_failure = view.now

    def _count_nodes(self, view: View) -> None:
        used = view.point.nodes if view.point else 1
        self._node_s += used * (view.now - self._counted_at)
        self._counted_at = view.now

    def saves(self, view: View) -> SavePlan:
        """Decided again after a failure, and when the belief may have moved."""
        point = view.point
        assert point is not None
        nodes = point.nodes
        each = self._saves_on(nodes)
        is_due = view.now >= self._decide_at
        if self.settings.automatic and (is_due or nodes != self._decided_for):
            if is_due and view.now > self._since:
                self._observe(view)
            rate = self.rate.failures_per_second(nodes)
            quiet = REVIEW_SHARE * (view.now - self._last_failure)
            self._decide_at = view.now + max(MIN_REVIEW_S, REVIEW_FAILURES / rate, quiet)
            self._decided_for = nodes
            rates = self.classes.rate_by_tier(rate, self.settings.present)
            before = self._decided_rates
            if not before or any(
                not SAME_RATE * before[tier] < now < before[tier] / SAME_RATE
                for tier, now in rates.items()
            ):
                self._decide_intervals(point, each)
                self._decided_rates = rates
        due = self._decide_at - view.now if self.settings.automatic else inf
        return SavePlan(self._planned_tiers(nodes, each), max(MIN_REVIEW_S, due))

    def _planned_tiers(self, nodes: int, each: Mapping[int, TierSave]) -> tuple[TierSave, ...]:
        """The saves of the intervals in force. They stay the same object as long as they hold."""
        saved = self.settings.present[1:]
        intervals = tuple([self._interval(tier) for tier in saved])
        if self._planned_for != (nodes, intervals):
            self._planned_for = nodes, intervals
            self._planned = tuple(
                replace(each[tier], interval_s=interval)
                for tier, interval in zip(saved, intervals, strict=True)
                if interval < inf
            )
        return self._planned

    def _saves_on(self, nodes: int) -> dict[int, TierSave]:
        """What a save into each tier takes on so many nodes."""
        if nodes not in self._saves:
            costs = self.cost.costs
            sent = costs.save_pause_s + costs.sent_share * costs.peer_s(nodes)
            size, stored = costs.state_bytes, costs.store_s(nodes)
            self._saves[nodes] = {
                PEERS: TierSave(PEERS, inf, sent, costs.peer_s(nodes), size),
                DISK: TierSave(DISK, inf, costs.save_pause_s, stored, size),
            }
        return self._saves[nodes]

    def _decide_intervals(self, point: OperatingPoint, each: Mapping[int, TierSave]) -> None:
        costs = {tier: SaveCost(save.blocked_s) for tier, save in each.items()}
        self._current = decide_intervals(
            self.settings,
            SaveCosts({MEMORY: SaveCost(0.0), **costs}),
            TierDurations(
                {tier: save.durable_s for tier, save in each.items()},
                restores_s(self.cost.costs, self.rules, point),
            ),
            self.rate,
            self.classes,
            point.nodes,
            {PEERS: self.rules.peer_interval_s, DISK: self.rules.store_interval_s},
            self._current,
        )
