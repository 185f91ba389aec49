"""Expected goodput of a layout under a cluster's failure rates: throughput times availability.

The state of a run is how many nodes of each pool are absent. Each state has a chance
(`losses.py`), a layout and its throughput. The layout is complete replicas of the same shape,
or another shape on the rest if that is faster. Losses and returns of nodes pause the run. A pause
that another loss interrupts begins again: it takes (e^(vR) - 1)/v seconds (Daly, 2006). What a loss
needs says which tier must hold the state. `policy/saving/tier_choice.py` chooses the intervals of
the tiers for these rates, as the runtime does, and says what they lose. So

    goodput = sum over states (chance x tokens/s) / (1 + pauses + saves and lost work)

with the pauses, saves and lost work in seconds for each second of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import expm1, inf, prod

from holdfast.plan.cost.choice import Choice, replicas_within
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.objective.losses import (
    Loss,
    absent_chances,
    absent_share,
    domain_losses,
    losses_per_second,
    node_losses,
)
from holdfast.plan.objective.occupancy import (
    RECOMPUTE_WORDS,
    nodes_used,
    reshaped,
    with_recompute,
    with_replicas,
)
from holdfast.plan.objective.recovery_costs import RecoveryCosts
from holdfast.policy.recovery.ladder import CONTINUES, FROM_MEMORY, FROM_STORE, LOSS_CLASSES
from holdfast.policy.saving.interval import IntervalBounds, TierCost, lost_time_share
from holdfast.policy.saving.tier_choice import decide_tiers
from holdfast.policy.saving.tiers import DISK, PEERS

MAX_STATES = 400
"""States of a cluster that are costed, the likely ones. The rest counts as the last of them."""
RETURNS = -1
"""Nodes return: a pause may be for that, too."""
WELL_USED = 0.95
"""If fewer of the same replicas use so much of what is left, no other shape is costed."""
MAX_INTERVAL_S = 86_400.0
"""Longest interval between saves of a plan."""


@dataclass(frozen=True)
class ExpectedGoodput:
    """What a layout is expected to do. All but rates and intervals are shares of time."""

    tokens_per_s: float
    full: float  # tokens a second with all nodes and no failure
    fewer: float  # throughput that absent nodes take
    pauses: Mapping[str, float]  # by what the run needs
    saves: float
    lost_work: float
    interruptions_per_day: float  # those that hit a rank while the run trains
    losses_per_day: float  # nodes of the pools that the layout uses, whether it trains or not
    intervals_s: Mapping[int, float]  # between saves, by tier
    present: Mapping[str, float]  # of a node, by pool

    @property
    def availability(self) -> float:
        """Expected throughput, of that without failures; 1 where a layout on fewer nodes is faster
        than the one without failures."""
        return min(1.0, self.tokens_per_s / self.full)


@dataclass(frozen=True)
class _State:
    """So many nodes are present."""

    chance: float
    nodes: Mapping[str, int]  # by pool
    layout: Choice | None
    tokens_per_s: float


@dataclass
class GoodputModel:
    """Computes expected goodput for one problem. It remembers costs of layouts."""

    problem: Problem
    costs: RecoveryCosts = field(default_factory=RecoveryCosts)
    evaluator: Evaluator = field(init=False)
    _layouts: dict[object, tuple[Choice | None, float]] = field(default_factory=dict)
    _found: dict[Choice, StepCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.problem)

    def expected(self, choice: Choice, cost: StepCost) -> ExpectedGoodput:
        full = self.problem.workload.step_tokens / cost.step_s
        states = self._states(choice, cost)
        rate = sum(state.chance * state.tokens_per_s for state in states)
        pauses, needs, hits = self._pauses(choice, states)
        pauses["domains"] = self._without_domains(choice, cost, states[0])
        saves, lost, intervals = self._saving(choice, cost, needs)
        present, pools = self.present_of(choice), {p.name: p for p in self.problem.cluster.pools}
        lost_nodes = sum(
            pools[name].nodes * pools[name].losses_per_day * n for name, n in present.items()
        )
        lost_nodes += 86_400 * sum(
            loss.rate * loss.nodes for loss in domain_losses(self.problem.cluster, choice)
        )
        useful = 1 / (1 + sum(pauses.values()) + saves + lost)
        return ExpectedGoodput(
            rate * useful,
            full,
            1 - rate / full,
            pauses,
            saves,
            lost,
            86_400 * hits,
            lost_nodes,
            intervals,
            present,
        )

    def at_most(self, choice: Choice, step_s: float, fastest: float = 0.0) -> float:
        """Tokens a second that this layout can hardly exceed; costs no other layout. fastest: of
        all layouts known; no layout on fewer nodes is taken to be faster."""
        full = self.problem.workload.step_tokens / step_s
        complete = 1.0
        for name, used in nodes_used(self.problem.cluster, choice).items():
            pool = self.problem.cluster.pool(name)
            complete *= sum(self._chances(pool)[: pool.nodes - used + 1])
        return complete * full + (1 - complete) * max(full, fastest)

    def present_of(self, choice: Choice) -> dict[str, float]:
        """Share of its time in which a node of each pool of a layout is there."""
        used = nodes_used(self.problem.cluster, choice)
        pools = map(self.problem.cluster.pool, used)
        return {pool.name: 1 - absent_share(*self._rates(pool)) for pool in pools}

    # --- states ---------------------------------------------------------------------------------
    def _rates(self, pool: NodePool) -> tuple[float, float]:
        """Losses of a node a second, and seconds until it returns."""
        return losses_per_second(pool), self.costs.return_s(pool.is_spot)

    def _chances(self, pool: NodePool) -> list[float]:
        return absent_chances(pool.nodes, *self._rates(pool), pool.burst)

    def _states(self, choice: Choice, cost: StepCost) -> list[_State]:
        used = nodes_used(self.problem.cluster, choice)
        pools = [pool for pool in self.problem.cluster.pools if pool.name in used]
        likely = sorted(
            (
                (prod(chance for _, chance in found), tuple(k for k, _ in found))
                for found in product(*(list(enumerate(self._chances(pool))) for pool in pools))
            ),
            reverse=True,
        )[:MAX_STATES]
        total = sum(chance for chance, _ in likely)
        states = []
        for chance, absent in likely:
            nodes = {p.name: p.nodes - k for p, k in zip(pools, absent, strict=True)}
            layout, rate = self.layout_on(choice, cost, nodes)
            states.append(_State(chance / total, nodes, layout, rate))
        return states

    def layout_on(
        self, choice: Choice, cost: StepCost, nodes: Mapping[str, int]
    ) -> tuple[Choice | None, float]:
        """(layout, tokens a second) on so many nodes of each pool: the same replicas, fewer of
        them, or other shapes. (None, 0.0) if nothing fits: the run waits."""
        pool_of = self.problem.cluster.pool
        devices = {name: number * pool_of(name).devices for name, number in nodes.items()}
        same = with_replicas(choice, replicas_within(choice.replicas, devices))
        tokens = self.problem.workload.step_tokens
        if same is choice:
            return choice, tokens / cost.step_s
        key = (choice, tuple(sorted(nodes.items())))
        if key not in self._layouts:
            offers = [same] if same is not None else []
            if same is None or self._used(same, nodes) < WELL_USED:
                offers += reshaped(self.problem.cluster, choice, nodes)
            best: tuple[Choice | None, float] = None, 0.0
            for offer in offers:
                offer, found = self._fitting(offer)
                if found.fits and tokens / found.step_s > best[1]:
                    best = offer, tokens / found.step_s
            self._layouts[key] = best
        return self._layouts[key]

    def _used(self, layout: Choice, nodes: Mapping[str, int]) -> float:
        """Share of the time of the devices in these nodes for which the layout has work."""
        devices = sum(n * self.problem.cluster.pool(name).devices for name, n in nodes.items())
        most = max(group.microbatches for group in layout.replicas)
        dealt = layout.microbatches / (layout.number_of_replicas * most)
        return layout.devices / devices * dealt

    def _fitting(self, offer: Choice) -> tuple[Choice, StepCost]:
        """The layout, with as much recomputation as it needs to fit."""
        found = self._cost(offer)
        for word in RECOMPUTE_WORDS[1:]:
            if found.fits:
                break
            offer = with_recompute(offer, word)
            found = self._cost(offer)
        return offer, found

    def _cost(self, choice: Choice) -> StepCost:
        if choice not in self._found:
            self._found[choice] = self.evaluator.cost(choice)
        return self._found[choice]

    # --- pauses ---------------------------------------------------------------------------------
    def _pauses(
        self, choice: Choice, states: list[_State]
    ) -> tuple[dict[str, float], dict[int, float], float]:
        """(seconds of pause for each second by need, needs a second, hits a second)."""
        pauses = dict.fromkeys((*LOSS_CLASSES.values(), "returns"), 0.0)
        needs, hits = dict.fromkeys(LOSS_CLASSES, 0.0), 0.0
        takes = {need: self.pause_s(choice, need) for need in (*LOSS_CLASSES, RETURNS)}
        for state in states:
            if state.layout is None:
                continue
            found = list(self.losses(state.layout, state.nodes))
            broken = sum(loss.rate * sum(loss.needs) for loss in found)
            hits += state.chance * broken
            for loss in found:
                for need, chance in enumerate(loss.needs):
                    rate = state.chance * loss.rate * chance
                    pauses[LOSS_CLASSES[need]] += rate * self._again(broken, takes[need])
                    needs[need] += rate
            pools = map(self.problem.cluster.pool, state.nodes)
            absent = ((pool, pool.nodes - state.nodes[pool.name]) for pool in pools)
            returns = sum(n / self.costs.return_s(pool.is_spot) for pool, n in absent)
            pauses["returns"] += state.chance * returns * takes[RETURNS]
        return pauses, needs, hits

    def _without_domains(self, choice: Choice, cost: StepCost, state: _State) -> float:
        """Seconds of throughput that lost domains take, for each second: from the most
        likely state, until they return."""
        cluster, lost = self.problem.cluster, 0.0
        for loss in domain_losses(cluster, choice):
            zone = cluster.pool(loss.pool).zone
            left = {
                name: 0
                if loss.domain == "zone" and cluster.pool(name).zone == zone
                else number - loss.nodes * (loss.domain != "zone" and name == loss.pool)
                for name, number in state.nodes.items()
            }
            left = {name: max(0, number) for name, number in left.items()}
            rate = self.layout_on(choice, cost, left)[1]
            share = 1 - rate / state.tokens_per_s if state.tokens_per_s else 0.0
            lost += loss.rate * self.costs.domain_return_s * share
        return lost

    def losses(self, layout: Choice, nodes: Mapping[str, int]) -> Iterator[Loss]:
        """Losses that hit a layout on so many nodes."""
        cluster = self.problem.cluster
        for name, present in nodes.items():
            yield from node_losses(cluster.pool(name), layout, present)
        yield from domain_losses(cluster, layout)

    @staticmethod
    def _again(rate: float, seconds: float) -> float:
        """Seconds of a pause that begins again at each loss."""
        return expm1(min(rate * seconds, 50.0)) / rate if rate > 0 else seconds

    def pause_s(self, choice: Choice, need: int) -> float:
        """Seconds in which nothing is trained: by need of a loss, or RETURNS of nodes."""
        costs, pools = self.costs, nodes_used(self.problem.cluster, choice)
        types = (self.problem.cluster.pool(n).device_type(self.problem.devices) for n in pools)
        groups = 0.0 if all(each.name == "cpu" for each in types) else costs.communicator_s
        state = self._state_bytes()
        if need == CONTINUES:
            return costs.detection_s + costs.rung_s[0] + groups
        if need == RETURNS:
            return costs.rung_s[5] + groups
        slowest, nodes = self._slowest_node(pools), sum(pools.values())
        if need == FROM_MEMORY:
            return costs.detection_s + costs.rung_s[4] + groups + state / nodes / slowest
        read = choice.number_of_replicas * state / nodes / costs.store_bandwidth
        return costs.detection_s + costs.rung_s[6] + groups + read

    def _slowest_node(self, pools: Iterable[str]) -> float:
        """Bytes a second that the slowest node of these pools sends."""
        found = map(self.problem.cluster.pool, pools)
        return min(pool.devices * pool.outside.bandwidth for pool in found)

    def _state_bytes(self) -> float:
        workload = self.problem.workload
        return workload.parameters * workload.state.optimizer

    # --- saves ----------------------------------------------------------------------------------
    def _saving(
        self, choice: Choice, cost: StepCost, needs: Mapping[int, float]
    ) -> tuple[float, float, dict[int, float]]:
        """(share of saves, share of lost work, seconds between saves by tier)."""
        pools = nodes_used(self.problem.cluster, choice)
        nodes = sum(pools.values())
        share = self._state_bytes() / nodes
        sent, pause = share / self._slowest_node(pools), self.costs.save_pause_s
        stored = share / self.costs.store_bandwidth
        memory_s, store_s = (self.pause_s(choice, need) for need in (FROM_MEMORY, FROM_STORE))
        costs = [
            TierCost(PEERS, pause + self.costs.sent_share * sent, sent, memory_s),
            TierCost(DISK, pause, stored, store_s),
        ]
        rates = {PEERS: needs[FROM_MEMORY], DISK: needs[FROM_STORE]}
        bounds = IntervalBounds(cost.step_s, max(MAX_INTERVAL_S, cost.step_s))
        decisions = decide_tiers(costs, rates, bounds)
        saves, lost, carried = 0.0, 0.0, 0.0
        intervals = {}
        for each, made in zip(costs, decisions, strict=True):
            carried += rates[each.tier]
            if made.seconds == inf:
                continue
            intervals[each.tier] = made.seconds
            saves += each.cost_s / made.seconds
            if carried:
                both = lost_time_share(made.seconds, each.cost_s, carried)
                lost += max(0.0, both - each.cost_s / made.seconds)
            carried = 0.0
        return saves, lost, intervals
