"""A run of one layout while nodes come and go at random, event by event.

It checks `plan/objective/goodput.py`, which computes the same from formulas. Step times and pauses
are the plan's. The replay draws what the formulas average: the nodes that are lost, the replicas on
them, the last save. It also draws the place of copies in memory, and losses during a pause. Pure:
the random numbers come from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from holdfast.layout import Replica, Topology
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import StepCost
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.objective.goodput import RETURNS, GoodputModel
from holdfast.plan.objective.losses import losses_per_second
from holdfast.plan.objective.recoveries import ring
from holdfast.policy.recovery.ladder import (
    CONTINUES,
    FROM_MEMORY,
    FROM_STORE,
    find_source,
    loss_of_nodes,
)
from holdfast.policy.saving.tiers import DISK, PEERS
from holdfast_lab.engine.clock import Process, run_process

_TIERS = {FROM_MEMORY: (PEERS, DISK), FROM_STORE: (DISK,)}

Node = tuple[str, int]  # pool and number


@dataclass(frozen=True)
class Replay:
    """seconds: that were replayed. tokens: trained and kept. by_need: interruptions of the run."""

    seconds: float
    tokens: float
    by_need: Mapping[int, int]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run_layout(
    model: GoodputModel, choice: Choice, cost: StepCost, days: float, seed: int = 0
) -> Replay:
    """Replay so many days of a layout, with the intervals between saves that the plan has."""
    return _Run(model, choice, cost, random.Random(f"{seed}/layout")).run(days * 86_400)


@dataclass
class _Run(Process[None]):
    """One replay. replicas: nodes of each that trains. rate: tokens a second of the layout. since:
    tokens since the last save, by tier. pause: seconds until it trains again, and what for."""

    model: GoodputModel
    choice: Choice
    cost: StepCost
    draw: random.Random
    absent: set[Node] = field(default_factory=set)
    layout: Choice | None = None
    replicas: list[frozenset[Node]] = field(default_factory=list)
    rate: float = 0.0
    tokens: float = 0.0
    since: dict[int, float] = field(default_factory=dict)
    now: float = 0.0
    pause: float = 0.0
    paused_for: int = RETURNS
    by_need: dict[int, int] = field(default_factory=dict)
    _overhead: float = 1.0
    _intervals: Mapping[int, float] = field(default_factory=dict)
    _next: tuple[NodePool, bool] | None = None  # whose node changes, and whether it is lost

    def run(self, seconds: float) -> Replay:
        expected = self.model.expected(self.choice, self.cost)
        self._intervals = {t: s for t, s in expected.intervals_s.items() if s < inf}
        self._overhead = 1 + expected.saves
        self.since = dict.fromkeys(self._intervals, 0.0)
        self.by_need = dict.fromkeys((CONTINUES, FROM_MEMORY, FROM_STORE), 0)
        self._place()
        run_process(self, end=seconds)
        return Replay(seconds, self.tokens, self.by_need)

    def next_change(self, end: float) -> float:
        after, pool, is_loss = self._next_event()
        is_late = self.now + after >= end
        self._next = None if is_late or pool is None else (pool, is_loss)
        return end if is_late else self.now + after

    def elapse(self, until: float) -> bool:
        self._train(until - self.now)
        self.now = until
        return False

    def act(self) -> None:
        if self._next is not None:
            pool, is_loss = self._next
            (self._lose if is_loss else self._return)(pool)

    def _next_event(self) -> tuple[float, NodePool | None, bool]:
        """(seconds until it, pool, whether nodes are lost): the earliest of all."""
        best: tuple[float, NodePool | None, bool] = inf, None, False
        for pool in self.model.problem.cluster.pools:
            away = sum(name == pool.name for name, _ in self.absent)
            lost = (pool.nodes - away) * losses_per_second(pool) / max(1.0, pool.burst)
            back = away / self.model.costs.return_s(pool.is_spot)
            for rate, is_loss in ((lost, True), (back, False)):
                after = self.draw.expovariate(rate) if rate > 0 else inf
                if after < best[0]:
                    best = after, pool, is_loss
        return best

    def _train(self, seconds: float) -> None:
        waited = min(self.pause, seconds)
        self.pause -= waited
        done = self.rate * (seconds - waited) / self._overhead
        self.tokens += done
        for tier, interval in self._intervals.items():
            saved = self.rate * interval
            self.since[tier] = (self.since[tier] + done) % saved if saved else self.since[tier]

    def _lose(self, pool: NodePool) -> None:
        present = self._present(pool)
        size = 1
        while size < len(present) and self.draw.random() > 1 / max(1.0, pool.burst):
            size += 1
        lost = set(self.draw.sample(present, size))
        self.absent |= lost
        if not any(lost & nodes for nodes in self.replicas):
            return
        need = self._loss_class(lost)
        self.by_need[need] += 1
        for tier in _TIERS.get(need, ()):
            if tier in self.since:
                self.tokens -= self.since[tier]
                self.since = dict.fromkeys(self.since, 0.0)
                break
        self._place()
        self._pause(need)

    def _loss_class(self, lost: set[Node]) -> int:
        names = {node: f"{node[0]}/{node[1]}" for node in set().union(*self.replicas)}
        replicas: list[Replica] = []
        nodes: list[str] = []
        for each in self.replicas:
            ranks = tuple(range(len(nodes), len(nodes) + len(each)))
            replicas.append(Replica(len(replicas), ranks, (1, len(each), 1, 1)))
            nodes += [names[node] for node in sorted(each)]
        topology = Topology(0, tuple(replicas), tuple(nodes))
        copies = ring([names[node] for node in sorted(names)])
        gone = {names[node] for node in lost if node in names}
        return find_source(loss_of_nodes(topology, gone, {PEERS: copies, DISK: None}))[1]

    def _return(self, pool: NodePool) -> None:
        away = sorted(node for node in self.absent if node[0] == pool.name)
        self.absent.remove(self.draw.choice(away))
        before = self.layout
        self._place()
        if self.layout != before:
            self._pause(RETURNS)

    def _pause(self, need: int) -> None:
        """A pause that is under way begins again."""
        need = max(need, self.paused_for) if self.pause > 0 else need
        self.paused_for = need
        self.pause = self.model.pause_s(self.choice, need)

    def _present(self, pool: NodePool) -> list[Node]:
        every = ((pool.name, number) for number in range(pool.nodes))
        return [node for node in every if node not in self.absent]

    def _place(self) -> None:
        """Take the layout for the nodes that are present, and give its replicas nodes in order."""
        pools = self.model.problem.cluster.pools
        used = set(self.choice.devices_by_pool)
        nodes = {pool.name: self._present(pool) for pool in pools if pool.name in used}
        self.layout, self.rate = self.model.layout_on(
            self.choice, self.cost, {name: len(each) for name, each in nodes.items()}
        )
        self.replicas = []
        if self.layout is None:
            return
        begin = dict.fromkeys(nodes, 0)  # devices that are taken
        for group in self.layout.replicas:
            for _ in range(group.dp_replicate):
                found: set[Node] = set()
                for name, number in group.devices_by_pool.items():
                    each = self.model.problem.cluster.pool(name).devices
                    first, last = begin[name], begin[name] + number
                    found.update(nodes[name][first // each : -(-last // each)])
                    begin[name] = last
                self.replicas.append(frozenset(found))
