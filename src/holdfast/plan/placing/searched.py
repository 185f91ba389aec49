"""The planner that searches: at every change of membership, the layout with the fastest steps.

1. Candidates are the meshes of the present replicas; before there are any, the run file's. More
   come from the search of `plan/search` and from a ranking by the cost model.
   Of up to 24 workers, unlike replicas are candidates: some of one mesh, and the rest as the best
   meshes for so few workers.
2. The simple planner (`planner.py`) places each candidate on the nodes with as little movement as
   it can. Leaving the workers idle that fill no replica is a candidate too.
3. The cost model predicts the step of each placed topology. A topology that does not fit into
   memory is out. The score is the step's time, and more for the state that has to travel.

After each plan, `prepare` makes the next plans: for each likely loss, the mesh to move to and the
workers to use. A change of membership that leaves such nodes needs one placement and no search.

A run that the cost model cannot describe keeps the simple planner, and the plan says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, prod

from holdfast.config.run import RunConfig
from holdfast.config.sections.layout import DegreesConfig
from holdfast.errors import LayoutError
from holdfast.layout import AXES, MeshShape, Topology
from holdfast.options.registry import unmodelled_option
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.run_workload import adapter_degrees, unmodelled_key
from holdfast.plan.placing.interface import LayoutPlan, NodePlaces, PresentPlacement
from holdfast.plan.placing.planner import plan_layout
from holdfast.plan.placing.replica_shapes import DegreeRules
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost
from holdfast.plan.search.search import Limits, search

BETWEEN_CHANGES_S = 516.0
"""Seconds for which a layout is expected to stay. In Bamboo's trace of spot p3 instances, an
interruption comes every 8.6 minutes."""

_MARGIN = 0.02
"""A layout whose steps are not faster by more than this is not worth moving state, or leaving
workers idle."""

_RANKED = 6  # meshes that are placed after the first ranking

_ALL_MESHES = 24
"""Workers up to which each possible mesh is ranked. Above, the search's meshes are, and if it finds
none, those whose degrees are powers of two."""

_FEWER = 1  # replicas by which the first kind of unlike ones may be fewer than fit
_OF_REST = 3  # meshes that are tried on the rest of the workers

_PLANS_KEPT = 32


@dataclass(frozen=True)
class _Scored:
    """A placed candidate."""

    changed: RunConfig  # the run file with the degrees of the plan
    choice: Choice  # its layout in the cost model
    plan: LayoutPlan
    moving_s: float  # seconds in which state travels
    score: float


class SearchedPlanner:
    """A Planner for one run. limits: degrees that the run file fixes. limit_s: seconds after which
    no more candidates are tried. later: is given work that makes the next plan come sooner."""

    def __init__(
        self,
        fleet: Fleet,
        limits: Limits | None = None,
        limit_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[Callable[[], None]], object] = lambda work: None,
    ):
        self._fleet, self._limits = fleet, limits or Limits()
        self._limit_s, self._clock, self._later = limit_s, clock, later
        self._plans: dict[object, LayoutPlan] = {}
        self._ranked: dict[object, tuple[MeshShape, ...]] = {}
        self._next: dict[object, _Scored] = {}

    def __call__(
        self,
        config: RunConfig,
        nodes: Sequence[NodePlaces],
        generation: int,
        /,
        present: PresentPlacement | None = None,
    ) -> LayoutPlan:
        """Raises LayoutError where nothing can be run on these nodes, or nothing fits."""
        if reason := why_simple(config):
            return _simple(config, nodes, generation, present, reason)
        asked = (tuple(nodes), present)
        if asked not in self._plans:
            if len(self._plans) == _PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            plan = self._plan(config, nodes, present)
            self._plans[asked] = plan
            self._later(partial(self.prepare, config, tuple(nodes), plan.topology))
        known = self._plans[asked]
        return replace(known, topology=replace(known.topology, generation=generation))

    def prepare(self, config: RunConfig, nodes: Sequence[NodePlaces], topology: Topology) -> None:
        """Make the next plans: for each likely loss, the degrees to move to and the workers to use.
        Those that follow the latest topologies are kept."""
        if why_simple(config):
            return
        found: dict[object, _Scored] = {}
        for left in nodes_left(nodes, self._fleet.node.is_spot):
            names = {node.name for node in left}
            lost = frozenset(r for r, name in enumerate(topology.nodes) if name not in names)
            present = PresentPlacement(topology, lost)
            with suppress(LayoutError):  # nothing fits there: said when it comes to it
                if scored := self._best(config, left, present, inf):
                    found[_next_key(left, present)] = scored
        latest = list(self._next.items())[-_PLANS_KEPT:]
        self._next = {**dict(latest), **found}  # never changed in place: a thread does this

    # --- one plan ---------------------------------------------------------------------------
    def _plan(
        self, config: RunConfig, nodes: Sequence[NodePlaces], present: PresentPlacement | None
    ) -> LayoutPlan:
        scored: _Scored | None = None
        if prepared := self._next.get(_next_key(nodes, present)):  # if it can be placed and fits
            costs = TopologyCost(config, self._fleet, nodes)
            trial = _Trial(self._fleet, costs, nodes, present)
            trial.add(prepared.changed, prepared)
            scored = next(iter(trial.scored), None)
        scored = scored or self._best(config, nodes, present, self._limit_s)
        if scored is None:
            why = f"the search took more than {self._limit_s:g} s"
            return _simple(config, nodes, 1, present, why)
        plan = scored.plan
        if plan.idle_places and plan.idle_reason.startswith(("layout.workers", "layout.replicas")):
            why = "with more workers a step would take longer (predicted)"
            return replace(plan, idle_reason=why)
        return plan

    def _best(
        self,
        config: RunConfig,
        nodes: Sequence[NodePlaces],
        present: PresentPlacement | None,
        limit_s: float,
    ) -> _Scored | None:
        """The best of all candidates; None if the time was over before one was placed. Raises
        LayoutError if none fits."""
        begun, costs = self._clock(), TopologyCost(config, self._fleet, nodes)
        trial = _Trial(self._fleet, costs, nodes, present)
        is_late = False
        for changed in self._candidates(config, nodes, present, costs):
            if is_late := self._clock() - begun > limit_s:
                break
            trial.add(changed)
        if trial.scored:
            # Of those close to the least score, the one that moves the least; then that
            # with the most workers, then the first.
            best = min(each.score for each in trial.scored)
            close = [each for each in trial.scored if each.score <= (1 + _MARGIN) * best]
            return min(close, key=lambda each: (each.moving_s, -each.plan.topology.world_size))
        if is_late:
            return None
        if trial.refused and not trial.short_of:
            raise trial.refused
        raise _too_large_error(trial.short_of, nodes)

    def _candidates(
        self,
        config: RunConfig,
        nodes: Sequence[NodePlaces],
        present: PresentPlacement | None,
        costs: TopologyCost,
    ) -> Iterator[RunConfig]:
        """The run file with each mesh, the present ones first. Then the same without the workers
        that fill no replica, and with one replica alone."""
        meshes: list[MeshShape] = [config.layout.mesh_shape]
        if present is not None:
            meshes = [replica.mesh_shape for replica in present.topology.replicas]
        first = list(dict.fromkeys(meshes))
        yield from (_with_mesh(config, mesh) for mesh in first)
        workers = _workers(config, nodes)
        best = self._best_meshes(config, nodes, costs)
        rest = [mesh for mesh in best if mesh not in first]
        yield from (_with_mesh(config, mesh) for mesh in rest)
        is_all_used = workers == self._limits.devices  # the run file asks for so many
        for mesh in () if is_all_used else (*first, *rest):
            each = prod(mesh)
            for used in sorted({workers // each * each, each}):
                if 0 < used < workers:
                    yield _with_mesh(config, mesh, used)
        yield from self._unlike(config, nodes, costs, [*first, *rest], is_all_used)

    def _unlike(
        self,
        config: RunConfig,
        nodes: Sequence[NodePlaces],
        costs: TopologyCost,
        meshes: Sequence[MeshShape],
        is_all_used: bool,
    ) -> Iterator[RunConfig]:
        """The run file with replicas of each mesh, and others on the rest of the workers.
        is_all_used: no worker may be idle."""
        workers = _workers(config, nodes)
        if workers > _ALL_MESHES:
            return
        for mesh in meshes:
            most = workers // prod(mesh)
            for number in range(most, max(0, most - _FEWER) - 1, -1):
                rest = workers - number * prod(mesh)
                if not number or not rest:
                    continue
                for other in self._best_meshes(config, nodes, costs, rest)[:_OF_REST]:
                    if other != mesh and not (is_all_used and rest % prod(other)):
                        others = (other,) * (rest // prod(other))
                        yield _with_replicas(config, (mesh,) * number + others)

    def _best_meshes(
        self,
        config: RunConfig,
        nodes: Sequence[NodePlaces],
        costs: TopologyCost,
        of_workers: int = 0,
    ) -> tuple[MeshShape, ...]:
        """Those that the cost model puts first; remembered for as many nodes of the same kind.
        of_workers: only so many are to be used; 0: all."""
        workers = of_workers or _workers(config, nodes)
        asked = (workers, of_workers, kinds_of(nodes))
        if asked not in self._ranked:
            found = [] if of_workers else self._searched(config, nodes, costs)
            meshes = dict.fromkeys(found)
            if workers <= _ALL_MESHES or not meshes:
                meshes |= dict.fromkeys(self._possible(config, workers))
            costed = [
                (costs.of(choice), mesh)
                for mesh in meshes
                if (choice := costs.equal_replicas(mesh, workers)) is not None
            ]
            ranked = sorted((cost.short_of, cost.step_s, mesh) for cost, mesh in costed)
            self._ranked[asked] = tuple(mesh for _, _, mesh in ranked[:_RANKED])
        return self._ranked[asked]

    def _searched(
        self, config: RunConfig, nodes: Sequence[NodePlaces], costs: TopologyCost
    ) -> list[MeshShape]:
        fixed = _fixed(config, self._limits)
        limits = replace(
            fixed,
            microbatch=config.train.microbatch_size or 1,
            zero=(config.layout.zero,),
            schedules=(config.layout.schedule,),
            recompute=config.train.recompute_words[:1],
            devices=fixed.devices if fixed.devices == _workers(config, nodes) else 0,
        )
        try:
            found = search(costs.problem, limits)
        except LayoutError:  # of equal replicas on all of the first pool's devices
            return []
        rules = DegreeRules(config)
        meshes = [
            group.mesh_shape
            for each in (found.best, *found.runners_up)
            for group in each.choice.replicas
        ]
        return [mesh for mesh in meshes if mesh in rules]

    def _possible(self, config: RunConfig, workers: int) -> Iterator[MeshShape]:
        limits, rules = _fixed(config, self._limits), DegreeRules(config)
        every = [n for n in range(1, workers + 1) if workers <= _ALL_MESHES or n & (n - 1) == 0]
        pp, shards, cp, tp = ([fixed] if fixed else every for fixed in limits.mesh)
        for mesh in product(pp, shards, cp, tp):
            if prod(mesh) <= workers and mesh in rules:
                yield mesh


@dataclass
class _Trial:
    """Places candidates on some nodes."""

    fleet: Fleet
    costs: TopologyCost
    nodes: Sequence[NodePlaces]
    present: PresentPlacement | None
    scored: list[_Scored] = field(default_factory=list)  # those that fit
    refused: LayoutError | None = None  # the first refusal of the simple planner
    short_of: float = 0.0  # bytes that the nearest of the rest lacks
    _seen: set[Topology] = field(default_factory=set)

    def add(self, changed: RunConfig, known: _Scored | None = None) -> None:
        """Place the run with these degrees, and score its topology if it is new and fits. known:
        placed before; if its layout is the same, its step is, too."""
        try:
            plan = plan_layout(changed, self.nodes, 1, self.present, cluster=self.fleet.whole)
        except LayoutError as error:
            self.refused = self.refused or error
            return
        if plan.topology in self._seen:
            return
        self._seen.add(plan.topology)
        choice = self.costs.choice(plan.topology)
        if known is not None and known.choice == choice:
            self.scored.append(self._score(changed, choice, plan, known.plan.step_s))
            return
        cost = self.costs.of(choice)
        if cost.fits:
            self.scored.append(self._score(changed, choice, plan, cost.step_s))
        else:
            self.short_of = min(self.short_of or cost.short_of, cost.short_of)

    def _score(
        self, changed: RunConfig, choice: Choice, plan: LayoutPlan, step_s: float
    ) -> _Scored:
        """State travels to all nodes at once; before the first plan none holds any."""
        receiving = len(self.nodes) if self.present else 0
        link = self.fleet.node.outside
        moving = plan.moved_bytes / link.bandwidth / receiving if receiving else 0.0
        score = step_s * (1 + moving / BETWEEN_CHANGES_S)
        return _Scored(changed, choice, replace(plan, step_s=step_s), moving, score)


def why_simple(config: RunConfig) -> str:
    """Why the cost model cannot plan this run, with the key; "" if it can."""
    key, why = unmodelled_key(config)
    return f"{key.replace(' ', '=')}: {why}" if key else ""


def fixed_limits(config: RunConfig) -> Limits:
    """What no change of nodes changes: the keys of `layout.fixed`."""
    values = {key: getattr(config.layout, key) for key in config.layout.fixed}
    return Limits(devices=values.pop("workers", 0), **values)


def _fixed(config: RunConfig, limits: Limits) -> Limits:
    """Limits, with the degrees that other keys of the run file fix."""
    if len(config.train.recompute_words) > 1:  # a word for each stage
        limits = replace(limits, pp=config.layout.pp)
    if config.lora.rank:
        limits = replace(limits, zero=(1,)).with_degrees(adapter_degrees(config))
    if unmodelled_option(config):  # the curve depends on it
        limits = replace(limits, dp_shard=config.layout.dp_shard)
    return limits


def _simple(
    config: RunConfig,
    nodes: Sequence[NodePlaces],
    generation: int,
    present: PresentPlacement | None,
    reason: str,
) -> LayoutPlan:
    return replace(plan_layout(config, nodes, generation, present), simple_because=reason)


def _next_key(nodes: Sequence[NodePlaces], present: PresentPlacement | None) -> object:
    """Of a change: what the nodes are that are left, and which topology the run has."""
    return kinds_of(nodes), replace(present.topology, generation=0) if present else None


def _with_mesh(config: RunConfig, mesh: MeshShape, workers: int = 0) -> RunConfig:
    """The run file with these degrees. workers: 0 for those that it has."""
    own = config.layout
    changes: dict[str, object] = dict(zip(AXES, mesh, strict=True))
    changes["stages"] = own.stages if mesh[0] == own.pp else ()
    changes["workers"] = workers or own.workers
    return config.model_copy(update={"layout": own.model_copy(update=changes)})


def _with_replicas(config: RunConfig, meshes: Sequence[MeshShape]) -> RunConfig:
    """The run file with a replica of each of these meshes."""
    alone = _with_mesh(config, (1, 1, 1, 1), sum(map(prod, meshes)))
    kinds = [DegreesConfig(**dict(zip(AXES, mesh, strict=True))) for mesh in meshes]
    layout = alone.layout.model_copy(update={"replicas": tuple(kinds)})
    return alone.model_copy(update={"layout": layout})


def _workers(config: RunConfig, nodes: Sequence[NodePlaces]) -> int:
    there = sum(node.places for node in nodes)
    return min(there, config.layout.workers or there)


def _too_large_error(short_of: float, nodes: Sequence[NodePlaces]) -> LayoutError:
    places = sum(node.places for node in nodes)
    return LayoutError(
        f"no layout of {places} workers fits: the nearest lacks {short_of / 1e9:.2g} GB on a "
        f"device",
        where="layout",
        remedy="wait for more nodes, or use train.recompute=full",
    )


_DOMAINS = ("rack", "power", "zone")


def kinds_of(nodes: Sequence[NodePlaces]) -> tuple[tuple[int, float], ...]:
    """Places and speed of each node, in order: nodes with the same ones are alike."""
    return tuple(sorted((node.places, round(node.speed, 2)) for node in nodes))


def nodes_left(nodes: Sequence[NodePlaces], is_spot: bool) -> Iterator[list[NodePlaces]]:
    """Yield the nodes left after each likely loss. Of losses that leave like nodes, the first."""
    seen = {kinds_of(nodes), ()}
    for lost in _losses(nodes, is_spot):
        left = [node for node in nodes if node.name not in lost]
        if kinds_of(left) not in seen:
            seen.add(kinds_of(left))
            yield left


def _losses(nodes: Sequence[NodePlaces], is_spot: bool) -> Iterator[set[str]]:
    yield from ({node.name} for node in nodes)
    for kind in _DOMAINS:
        found: dict[str, set[str]] = {}
        for node in nodes:
            if node.machine is not None and (name := node.machine.domain(kind)):
                found.setdefault(name, set()).add(node.name)
        yield from found.values()
    if is_spot:
        yield {node.name for node in nodes[: -(-len(nodes) // 2)]}
