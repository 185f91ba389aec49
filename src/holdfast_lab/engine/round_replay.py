"""Replays sites that come and go through the rounds of a run with learners. Pure.

The runtime's own functions decide. `plan_layout` says which worker computes which learner, and
`policy/recovery/ladder.py` what a loss costs. `MembershipRules` has the times of membership.
`plan/cost/rounds.py` gives seconds and bytes of a round, for the sites that are there.

    lost       the open round has not happened. After `node_timeout_s` and the rung's price, the
               round begins again on the nodes that are left
    joined     after the start of its processes and `settle_time_s`, the node takes part from the
               next round on
    notice     the nodes that stay continue without the node from the next round on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from holdfast.config.run import RunConfig
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import learner_shares
from holdfast.layout import Topology
from holdfast.plan.cost.rounds import CodecChoice, RoundCost, RoundModel
from holdfast.plan.placing.interface import NodePlaces, PresentPlacement
from holdfast.plan.placing.planner import plan_layout
from holdfast.policy.membership.state import node_timeout_s
from holdfast.policy.placement import Machine, place_copies
from holdfast.policy.recovery.ladder import (
    FROM_MEMORY,
    FROM_STORE,
    Loss,
    Successor,
    came_from_left,
    recover,
)
from holdfast.policy.recovery.survivors import first_missing_tensor
from holdfast.policy.saving.tiers import DISK, MEMORY, PEERS
from holdfast_lab.engine.fleet import Fleet, instants
from holdfast_lab.engine.interfaces import Node
from holdfast_lab.traces.events import TraceEvent

SiteOf = Callable[[Node], str]
"""The name of a node's site."""


@dataclass(frozen=True)
class RoundRun:
    """A run with learners as it is simulated."""

    config: RunConfig
    model: RoundModel  # of all sites
    codec: CodecChoice
    site_of: SiteOf
    rung_s: Mapping[int, float]  # fixed part of each rung of the ladder
    start_s: float  # of the processes of a node

    def cost(self, topology: Topology, nodes: Mapping[str, Node]) -> RoundCost:
        """Return the cost of a round of these workers. The slowest node holds it."""
        shares = learner_shares(self.config.outer.learners, len(topology.replicas))
        by_site: dict[str, list[int]] = {}
        for replica, node in enumerate(topology.nodes):
            by_site.setdefault(self.site_of(nodes[node]), []).append(replica)
        known = {site.name: site for site in self.model.sites}
        sites = tuple(replace(known[name], workers=len(own)) for name, own in by_site.items())
        slow = max(nodes[name].slow for name in topology.nodes)
        model = replace(
            self.model,
            shares=tuple(shares[replica] for own in by_site.values() for replica in own),
            sites=sites,
            inner_s=self.model.inner_s * slow,
        )
        return model.cost(self.config.outer.every_steps, self.codec)


@dataclass(frozen=True)
class RoundGeneration:
    """A membership, and the rounds that it did."""

    started_s: float  # its first round
    first_round: int
    rounds: int
    reason: str  # start, lost, joined, notice
    rung: int  # of the recovery ladder; -1: nothing was recovered
    repeated: int  # rounds of the generation before that were done again
    hosts: Mapping[str, tuple[int, ...]]  # the learners that a node computes
    sites: tuple[str, ...]
    round_s: float


@dataclass
class RoundHistory:
    """What becomes of a run. Seconds and bytes are sums."""

    generations: list[RoundGeneration] = field(default_factory=list)
    rounds: int = 0
    wall_s: float = 0.0
    training_s: float = 0.0  # of rounds that count
    repeated_s: float = 0.0  # of rounds that were lost
    stopped_s: float = 0.0  # with too few nodes
    sites_lost: int = 0
    sites_regained: int = 0
    hosted_elsewhere: int = 0  # rounds of a learner on another site than with all sites there
    link_bytes: dict[str, float] = field(default_factory=dict)  # that left each site
    machine_usd: float | None = None
    link_usd: float = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds of starts and recoveries, and of the rounds that a loss interrupted."""
        return max(0.0, self.wall_s - self.training_s - self.repeated_s - self.stopped_s)


def replay_rounds(run: RoundRun, events: Iterable[TraceEvent], until_s: float) -> RoundHistory:
    """Replay the events until that time, or until the run is done."""
    replay = _Replay(run)
    for now, group in instants(events):
        if now >= until_s or replay.is_done:
            break
        replay.advance(now)
        replay.take(now, group)
    replay.advance(until_s)
    return replay.end()


class _Replay:
    """The state of a run while its events pass."""

    def __init__(self, run: RoundRun) -> None:
        self.run, self.config = run, run.config
        self.fleet = Fleet()
        self.history = RoundHistory()
        self.topology: Topology | None = None
        self.cost: RoundCost | None = None
        self.now = 0.0
        self.begins_s = inf  # when the next round begins
        self.round_seconds: list[float] = []  # of each round that is done
        self._last_end = 0.0  # of the newest round
        self._open: RoundGeneration | None = None
        self._home: dict[int, str] = {}  # by learner: its site when all sites were there first
        self._ready: dict[str, float] = {}  # by node: when it may take part
        self._leaving: set[str] = set()
        self._lost_sites: set[str] = set()

    @property
    def is_done(self) -> bool:
        return self.history.rounds >= self.config.train.steps

    # --- time ---------------------------------------------------------------------------------
    def advance(self, until_s: float) -> None:
        """Do rounds until that time. A round that is not done by then stays open."""
        while not self.is_done:
            if self.topology is None:
                times = sorted({max(ready_s, self.now) for ready_s in self._ready.values()})
                if not any(at_s <= until_s and self._begin(at_s, "start") for at_s in times):
                    break
                continue
            assert self.cost is not None
            nodes = self.topology.nodes
            due = min((s for name, s in self._ready.items() if name not in nodes), default=inf)
            if due <= self.begins_s and due <= until_s:
                self._regroup(self.begins_s, "joined")
                continue
            if self._leaving & set(nodes):
                self._regroup(self.begins_s, "notice")
                continue
            end = self.begins_s + self.cost.round_s
            if end > until_s:
                break
            self._commit(end)
        self._pass(until_s if not self.is_done else min(until_s, self._last_end))

    def _pass(self, until_s: float) -> None:
        seconds = max(0.0, until_s - self.now)
        history = self.history
        if self.topology is None:
            history.stopped_s += seconds
        hourly = self.run.model.usd_per_hour
        if hourly is not None:
            workers = sum(site.workers for site in self.run.model.sites)
            there = sum(self._places(node) for node in self.fleet.nodes.values())
            paid = hourly * min(there, workers) / workers * seconds / 3600
            history.machine_usd = (history.machine_usd or 0.0) + paid
        self.now = max(self.now, until_s)
        history.wall_s = self.now

    def _commit(self, end: float) -> None:
        assert self.cost is not None
        assert self._open is not None
        history, cost = self.history, self.cost
        history.rounds += 1
        history.training_s += cost.round_s
        self.round_seconds.append(cost.round_s)
        self._open = replace(self._open, rounds=self._open.rounds + 1)
        for name, leaving in cost.leaving_by_site.items():
            history.link_bytes[name] = history.link_bytes.get(name, 0.0) + leaving
        history.link_usd += cost.link_usd
        nodes = self.fleet.nodes
        for node, learners in self._open.hosts.items():
            site = self.run.site_of(nodes[node])
            history.hosted_elsewhere += sum(self._home.get(k, site) != site for k in learners)
        self.begins_s = self._last_end = end

    # --- nodes --------------------------------------------------------------------------------
    def take(self, now: float, group: Sequence[TraceEvent]) -> None:
        """Take in the events of one instant."""
        before = dict(self.fleet.nodes)
        places = {} if self.topology is None else {n: i for i, n in enumerate(self.topology.nodes)}
        taken = self.fleet.take(group, places.get)
        rules = self.config.cluster
        for name in taken.joined:
            self._ready[name] = now + self.run.start_s
            self._ready[name] += rules.settle_seconds if self.topology is not None else 0.0
            self._leaving.discard(name)
        for name in before.keys() - self.fleet.nodes.keys():
            self._ready.pop(name, None)
            self._leaving.discard(name)
        self._leaving.update(taken.noticed)
        self._count_sites(before)
        if taken.lost and self.topology is not None:
            self._after_loss(now, {node.name for node in taken.departed}, before)
        elif self.topology is not None and taken.slowed:
            self.cost = self.run.cost(self.topology, self.fleet.nodes)

    def _count_sites(self, before: Mapping[str, Node]) -> None:
        was = {self.run.site_of(node) for node in before.values()}
        now = {self.run.site_of(node) for node in self.fleet.nodes.values()}
        self.history.sites_lost += len(was - now)
        self.history.sites_regained += len((now - was) & self._lost_sites)
        self._lost_sites = (self._lost_sites | was) - now

    def _places(self, node: Node) -> int:
        return max(1, int(node.devices))

    def _nodes(self, at_s: float) -> list[NodePlaces]:
        """The nodes that may take part, in the order of a coordinator: by name."""
        found = []
        for name, node in sorted(self.fleet.nodes.items()):
            if self._ready.get(name, inf) <= at_s and name not in self._leaving:
                machine = Machine(name, zone=self.run.site_of(node))
                found.append(NodePlaces(name, self._places(node), machine=machine))
        return found

    def _is_full(self, nodes: Sequence[NodePlaces]) -> bool:
        """Return True if the run would not use more nodes than these."""
        wanted = self.config.layout.workers or self.config.outer.learners
        return sum(node.places for node in nodes) >= wanted

    # --- generations --------------------------------------------------------------------------
    def _begin(self, at_s: float, reason: str) -> bool:
        """Begin with the nodes that are ready, if they are enough."""
        nodes = self._nodes(at_s)
        if not self.history.generations and not self._is_full(nodes):
            at_s += self.config.cluster.gather_seconds
            nodes = self._nodes(at_s)
        if not nodes or len(nodes) < self.config.cluster.min_nodes:
            return False
        self._pass(at_s)
        rung = 6 if self.history.rounds else -1
        pause = self.run.rung_s[6] if self.history.rounds else 0.0
        self._enter(nodes, None, reason, rung, at_s + pause)
        return True

    def _regroup(self, at_s: float, reason: str) -> None:
        """Change the membership between two rounds. Nothing is lost."""
        assert self.topology is not None
        nodes = self._nodes(at_s)
        if len(nodes) < self.config.cluster.min_nodes:
            self._stop(at_s)
            return
        present = PresentPlacement(self.topology)
        self._enter(nodes, present, reason, 5, at_s + self.run.rung_s[5])

    def _stop(self, at_s: float) -> None:
        self._close()
        self._pass(at_s)
        self.topology, self.cost = None, None

    def _after_loss(self, now: float, lost: set[str], before: Mapping[str, Node]) -> None:
        assert self.topology is not None
        old = self.topology
        noticed = now + node_timeout_s(self.config.cluster.beat_seconds)
        nodes = self._nodes(noticed)
        ranks = frozenset(rank for rank, node in enumerate(old.nodes) if node in lost)
        present = PresentPlacement(old, ranks)
        if not nodes or len(nodes) < self.config.cluster.min_nodes:
            self._go_back(FROM_STORE)
            self._stop(noticed)
            return
        machines = [Machine(n, zone=self.run.site_of(before[n])) for n in dict.fromkeys(old.nodes)]
        copies = place_copies({machine.name: 1 for machine in machines}, machines).holders
        tiers: dict[int, Mapping[str, Sequence[str]] | None] = {DISK: None}
        if self.config.checkpoint.memory_every_steps:
            here = {machine.name: (machine.name,) for machine in machines}
            tiers = {MEMORY: here, PEERS: {k: tuple(v) for k, v in copies.items()}, DISK: None}
        after = self._plan(nodes, present)
        table = run_state_table(self.config)
        came_from = came_from_left(old, after, ranks)
        kept = frozenset(rank for rank in came_from if rank is not None)
        newcomers = after.world_size - len(kept)
        if first_missing_tensor(old, table, kept) is not None:
            # The states of the lost learners are in no process, so all ranks read the snapshot.
            came_from, kept = (None,) * after.world_size, frozenset()
        loss = Loss(old, frozenset(range(old.world_size)) - kept, frozenset(lost), tiers, table)
        found = recover(loss, Successor(after, came_from, newcomers, old.world_size))
        repeated = self._go_back(found.loss_class)
        begins = noticed + self.run.rung_s[found.rung]
        self._enter(nodes, present, "lost", found.rung, begins, repeated)

    def _go_back(self, loss_class: int) -> int:
        """Return how many rounds a loss takes back: those since the newest snapshot, or save."""
        every = {
            FROM_MEMORY: self.config.checkpoint.memory_every_steps,
            FROM_STORE: self.config.checkpoint.every_steps,
        }.get(loss_class, 1)
        done = self.history.rounds
        if not isinstance(every, int):  # auto: the newest round is taken for kept
            every = 1
        number = done % every if every else done
        if number:
            seconds = sum(self.round_seconds[-number:])
            del self.round_seconds[-number:]
            self.history.rounds -= number
            self.history.training_s -= seconds
            self.history.repeated_s += seconds
        return number

    def _plan(self, nodes: Sequence[NodePlaces], present: PresentPlacement | None) -> Topology:
        number = len(self.history.generations) + 2
        return plan_layout(self.config, nodes, number, present).topology

    def _enter(
        self,
        nodes: Sequence[NodePlaces],
        present: PresentPlacement | None,
        reason: str,
        rung: int,
        begins_s: float,
        repeated: int = 0,
    ) -> None:
        self._close()
        topology = self.topology = self._plan(nodes, present)
        self.cost = self.run.cost(topology, self.fleet.nodes)
        self.begins_s = begins_s
        shares = learner_shares(self.config.outer.learners, len(topology.replicas))
        hosts: dict[str, tuple[int, ...]] = {}
        for node, share in zip(topology.nodes, shares, strict=True):
            hosts[node] = (*hosts.get(node, ()), *share)
        site_of = {name: self.run.site_of(self.fleet.nodes[name]) for name in hosts}
        sites = dict.fromkeys(site_of.values())
        if not self._home and len(sites) == len(self.run.model.sites):
            self._home = {k: site_of[name] for name, learners in hosts.items() for k in learners}
        first = self.history.rounds + 1
        self._open = RoundGeneration(
            begins_s, first, 0, reason, rung, repeated, hosts, tuple(sites), self.cost.round_s
        )

    def _close(self) -> None:
        if self._open is not None:
            self.history.generations.append(self._open)
            self._open = None

    def end(self) -> RoundHistory:
        """Return the history, with the membership that was there last."""
        self._close()
        return self.history
