"""Holdfast's own policy in a simulation: the runtime's policy objects decide.

`holdfast_saves.py` says how often it saves. The recovery ladder (docs/internals/elastic.md) says
what a loss costs. Rung 0: a complete replica is left. Rung 4: the memory of other nodes has the
state. Rung 6: only the run store has it. The copies of a node's part lie in the memory of the next
node in the order of ranks. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from holdfast.plan.objective.recovery_costs import RUNG_S
from holdfast.policy.saving.failure_rate import PRIOR_NODE_MTBF_S
from holdfast_lab.engine.holdfast_saves import HoldfastSaves
from holdfast_lab.engine.interfaces import (
    DISK,
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
    Transition,
    View,
    slowest,
)

CONTINUES, FROM_MEMORY, FROM_STORE = "continues", "from_memory", "from_store"
_LEVELS = {CONTINUES: 0, FROM_MEMORY: 1, FROM_STORE: 2}
"""Classes of `policy/saving/failure_classes.py`."""


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
    cadence: HoldfastSaves = field(init=False)
    _is_warned: bool = False
    _is_slowed: bool = False

    def __post_init__(self) -> None:
        rules = self.rules
        given = {PEERS: rules.peer_interval_s} if rules.peers else {}
        given[DISK] = rules.store_interval_s
        bounds = rules.min_interval_s, rules.max_interval_s
        costs = self.cost.costs
        self.cadence = HoldfastSaves(
            costs, given, bounds, rules.prior_mtbf_s, lambda point: restores_s(costs, rules, point)
        )

    # --- nodes change ---------------------------------------------------------------------------
    def decide(self, view: View, change: Change) -> Decision:
        self.cadence.count_nodes(view)
        self._is_warned = self._is_warned or bool(change.noticed)
        self._is_slowed = self._is_slowed or bool(change.slowed)
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
        assert view.point is not None
        each = view.point.nodes_per_replica
        hit = {place // each for place in change.lost}
        need = self._need(view, change.lost, len(hit))
        if view.pause_left == 0:
            self.cadence.add_failure(view, _LEVELS[need])
        if need == FROM_MEMORY and self.cadence.interval(PEERS) == inf:
            need = FROM_STORE
        point = self.cost.point(len(view.nodes))
        costs = self.cost.costs
        if point is None:
            return Decision(Transition(None, (), SAVE, (DISK,), reason=need, rung=6))
        seconds = costs.detection_s + costs.communicator_s
        loses, rung, read = STEP, 0, dict[int, float]()
        tiers: tuple[int, ...] = (DISK,)
        if need == CONTINUES:
            seconds = seconds + self.rules.rung_s[0] + self._moving(view, point, hit)
        elif need == FROM_MEMORY:
            loses, tiers, rung = SAVE, (PEERS, DISK), 4
            seconds += restores_s(costs, self.rules, point)[PEERS]
            read = {PEERS: costs.state_bytes}
        else:
            loses, rung = SAVE, 6
            seconds += restores_s(costs, self.rules, point)[DISK]
            read = {DISK: costs.state_bytes * point.replicas}
        pauses = (("recovery", seconds),)
        return Decision(Transition(point, pauses, loses, tiers, None, read, need, rung))

    def _moving(self, view: View, point: OperatingPoint, hit: Collection[int] = ()) -> float:
        """Seconds until nodes have a new part of the state. They take one if a replica is added, or
        if replicas lie on another number of nodes. hit: replicas that lost a node."""
        now, each = view.point, point.nodes_per_replica
        if now is None or each != now.nodes_per_replica:
            return self.cost.costs.peer_s(each)
        complete = now.replicas - sum([number < now.replicas for number in hit])
        return self.cost.costs.peer_s(each) if point.replicas > complete else 0.0

    def _need(self, view: View, lost: tuple[int, ...], hit: int) -> str:
        """What can have the state of the lost nodes: a replica, another node, or the store. hit:
        number of replicas that lost a node."""
        point, used = view.point, view.used
        assert point is not None
        if self.rules.replicas_go_on and point.replicas > 1 and hit < point.replicas:
            return CONTINUES
        number, gone = len(used), set(lost)
        safe = self.rules.staged or (
            number > 1 and all((place + 1) % number not in gone for place in lost)
        )
        return FROM_MEMORY if safe and self.rules.peers else FROM_STORE

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
        return slowest(view) if self._is_slowed else 1.0

    def saves(self, view: View) -> SavePlan:
        return self.cadence.plan(view)
