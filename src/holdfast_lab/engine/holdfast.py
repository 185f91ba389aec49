"""Holdfast's own policy in a simulation: the runtime's policy objects decide.

`holdfast_saves.py` says how often it saves. `policy/recovery/ladder.py` says what a loss costs.
`policy/placement.py` says which nodes have copies in their memory. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from holdfast.layout import Replica, Topology
from holdfast.plan.objective.recovery_costs import RUNG_S
from holdfast.policy.placement import Machine, place_copies
from holdfast.policy.recovery.ladder import (
    FROM_STORE,
    LOSS_CLASSES,
    Holders,
    Recovery,
    Successor,
    find_source,
    loss_of_nodes,
    recover,
)
from holdfast.policy.recovery.state_parts import StateSizes
from holdfast.policy.saving.failure_rate import PRIOR_NODE_MTBF_S
from holdfast.policy.saving.tiers import DISK, MEMORY, PEERS
from holdfast_lab.engine.fleet import seats
from holdfast_lab.engine.holdfast_saves import HoldfastSaves
from holdfast_lab.engine.interfaces import (
    NOTHING,
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


def topology_by_place(point: OperatingPoint) -> Topology:
    """Return the topology on nodes "0", "1", ..."""
    return point.topology or _topology(point.nodes, point.replicas)


@lru_cache(maxsize=1024)
def _topology(nodes: int, replicas: int) -> Topology:
    places = tuple(map(str, range(nodes)))
    if replicas > nodes:  # several on a node
        alone = tuple(Replica(index, (index,)) for index in range(replicas))
        return Topology(0, alone, tuple(places[i * nodes // replicas] for i in range(replicas)))
    each = nodes // replicas
    found: list[Replica] = []
    for index in range(replicas):
        last = nodes if index == replicas - 1 else (index + 1) * each
        ranks = tuple(range(index * each, last))
        found.append(Replica(index, ranks, (1, len(ranks), 1, 1)))
    return Topology(0, tuple(found), places)


def topology_on(point: OperatingPoint, names: Sequence[str]) -> Topology:
    """Return the topology on nodes with these names, in the order of ranks."""
    placed = topology_by_place(point)
    return replace(placed, nodes=tuple([names[int(place)] for place in placed.nodes]))


def sizes_of(point: OperatingPoint, state_bytes: float) -> StateSizes:
    """Return the bytes of the state by layer. They add up to `state_bytes`."""
    if point.sizes is None:
        return StateSizes(blocks=(state_bytes,))
    sizes = point.sizes
    factor = state_bytes / (sizes.first + sum(sizes.blocks) + sizes.last)
    if factor == 1:
        return sizes
    blocks = tuple(factor * block for block in sizes.blocks)
    return StateSizes(factor * sizes.first, blocks, factor * sizes.last)


@lru_cache(maxsize=1024)
def growth_rung(before: OperatingPoint, after: OperatingPoint) -> int:
    """Return the rung on which a run takes another layout if no node is lost."""
    loss = loss_of_nodes(topology_by_place(before), (), {})
    return recover(loss, Successor(topology_by_place(after))).rung


# --- the policy -----------------------------------------------------------------------------------
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


_STORE: Mapping[int, Holders | None] = {DISK: None}
_PRICES = {rung: rung for rung in RUNG_S} | {5: 3}
"""By rung of a loss: the rung whose price it has. A loss to which a larger layout answers waits for
new processes, as on rung 3."""
FALSE_NOTICE_S = 60.0  # A node that is still there so long after its notice stays


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


def _without_newcomers(point: OperatingPoint, lost: Sequence[int]) -> Recovery:
    """Return what the recovery ladder says if no process comes for those that were lost."""
    if point.topology is None and point.nodes % point.replicas == 0:  # replicas are alike
        each = point.nodes_per_replica
        hit = Counter([place // each for place in lost]).values() if len(lost) > 1 else (1,)
        return _by_replicas(point, tuple(sorted(hit)))
    return recover(
        loss_of_nodes(topology_by_place(point), [str(place) for place in lost], _STORE), None
    )


@lru_cache(maxsize=256)
def _by_replicas(point: OperatingPoint, hit: tuple[int, ...]) -> Recovery:
    """hit: nodes that each of some replicas has lost."""
    each = point.nodes_per_replica
    lost = [str(number * each + k) for number, count in enumerate(hit) for k in range(count)]
    return recover(loss_of_nodes(topology_by_place(point), lost, _STORE), None)


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
        point, lost = self.cost.point(len(view.nodes)), change.lost
        found = self._recovery(view, point, lost, self.rules.peers)
        if view.pause_left == 0:
            self.cadence.add_failure(view, found.loss_class)
        if found.tier == PEERS and self.cadence.interval(PEERS) == inf:
            found = self._recovery(view, point, lost, has_copies=False)
        reason = LOSS_CLASSES[found.loss_class]
        if point is None:
            return Decision(Transition(None, (), SAVE, (DISK,), reason=reason, rung=6))
        costs, rules = self.cost.costs, self.rules
        seconds = costs.detection_s + costs.communicator_s + rules.rung_s[_PRICES[found.rung]]
        tiers: tuple[int, ...] = (DISK,)
        read = {MEMORY if found.tier is None else found.tier: found.nbytes} if found.nbytes else {}
        if found.rung == 0:
            hit = {place // view.point.nodes_per_replica for place in lost}
            seconds += self._moving(view, point, hit)
        elif found.loss_class == FROM_STORE:
            seconds += costs.store_s(point.nodes, point.replicas)
        else:
            tiers = (PEERS, DISK)
            seconds += costs.peer_s(point.nodes_per_replica)
        loses = STEP if found.tier is None else SAVE
        pauses = (("recovery", seconds),)
        return Decision(Transition(point, pauses, loses, tiers, None, read, reason, found.rung))

    def _recovery(
        self, view: View, point: OperatingPoint | None, lost: Sequence[int], has_copies: bool
    ) -> Recovery:
        """Return what the recovery ladder says. point: the layout that follows."""
        assert view.point is not None
        goes_on = self.rules.replicas_go_on
        alone = _without_newcomers(view.point, lost) if goes_on else None
        if alone is not None and alone.rung == 0:
            return alone
        before = topology_on(view.point, view.used)
        gone = {view.used[place] for place in lost}
        tiers = _STORE
        if has_copies:
            here: Holders = {name: (name,) for name in view.used}
            tiers = {MEMORY: here, PEERS: self._holders(view.used, gone), **_STORE}
        loss = loss_of_nodes(before, gone, tiers)
        if not goes_on:  # no process keeps its state
            loss = replace(loss, lost_ranks=frozenset(range(before.world_size)))
        if point is None:
            tier, loss_class = find_source(loss)
            return Recovery(6, tier, 0.0, loss_class)
        after = topology_on(point, seats(view.used, view.nodes, point.nodes))
        sizes = sizes_of(point, self.cost.costs.state_bytes)
        return recover(loss, Successor(after), sizes)

    def _holders(self, used: Sequence[str], lost: Collection[str]) -> Holders:
        if self.rules.staged:
            return dict.fromkeys(lost, ("staging node",))
        if len(lost) == 1:  # wherever the copy is, it is on another node
            return {name: [other for other in used if other != name] for name in lost}
        machines = [Machine(name) for name in used]
        return place_copies(dict.fromkeys(used, 1), machines).holders

    def _moving(self, view: View, point: OperatingPoint, hit: Collection[int] = ()) -> float:
        """Seconds until nodes have a new part of the state. They take one if a replica is added, or
        if replicas lie on another number of nodes. hit: replicas that lost a node."""
        now, each = view.point, point.nodes_per_replica
        if now is None or each != now.nodes_per_replica:
            return self.cost.costs.peer_s(each)
        complete = now.replicas - sum([number < now.replicas for number in hit])
        return self.cost.costs.peer_s(each) if point.replicas > complete else 0.0

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
        rung = self._planned_rung(view, point, used)
        return Transition(
            point, (("recovery", pause),), NOTHING, used=tuple(used), reason="notice", rung=rung
        )

    def _planned_rung(self, view: View, point: OperatingPoint, used: Sequence[str]) -> int:
        """Return the rung of a move that loses nothing."""
        if view.point is None:
            return 5
        loss = loss_of_nodes(topology_on(view.point, view.used), (), _STORE)
        came = set(used) - set(view.used)
        return recover(loss, Successor(topology_on(point, used), newcomers=len(came))).rung

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
        rung, pauses = growth_rung(view.point, point), (("recovery", pause),)
        return Decision(Transition(point, pauses, NOTHING, reason="grow", rung=rung))

    def _is_better(self, point: OperatingPoint, now: OperatingPoint) -> bool:
        return point.tokens_per_s > now.tokens_per_s * (1 + self.rules.grow_gain) + 1e-9

    def slowdown(self, view: View) -> float:
        return slowest(view) if self._is_slowed else 1.0

    def saves(self, view: View) -> SavePlan:
        return self.cadence.plan(view)
