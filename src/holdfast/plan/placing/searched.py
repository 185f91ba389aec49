"""The planner that searches: at every change of membership, the layout with the fastest steps.

1. Candidates are the meshes of the present replicas; before there are any, the run file's. More
   come from the search of `plan/search` and from a ranking by the cost model.
2. The simple planner (`planner.py`) places each candidate on the nodes with as little movement as
   it can. Leaving the workers idle that fill no replica is a candidate too.
3. The cost model predicts the step of each placed topology. A topology that does not fit into
   memory is out. The score is the step's time, and more for the state that has to travel.

A run that the cost model cannot describe keeps the simple planner, and the plan says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod

from holdfast.config.layout import LayoutConfig
from holdfast.config.run import RunConfig
from holdfast.errors import LayoutError
from holdfast.layout import MeshShape, Topology
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

_RANKED = 6
"""Meshes that are placed after the first ranking."""

_ALL_MESHES = 24
"""Workers up to which each possible mesh is ranked. Above, the search's meshes are, and if it finds
none, those whose degrees are powers of two."""

_PLANS_KEPT = 32


@dataclass(frozen=True)
class _Scored:
    """moving_s: seconds in which state travels."""

    plan: LayoutPlan
    moving_s: float
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
            self._plans[asked] = self._plan(config, nodes, present)
            self._later(partial(self.prepare, config, tuple(nodes)))
        known = self._plans[asked]
        return replace(known, topology=replace(known.topology, generation=generation))

    def prepare(self, config: RunConfig, nodes: Sequence[NodePlaces]) -> None:
        """Rank the meshes for the loss of any one node, so that the next plan comes at once."""
        if why_simple(config):
            return
        for index in range(len(nodes)):
            left = [*nodes[:index], *nodes[index + 1 :]]
            if left:
                self._best_meshes(config, left, TopologyCost(config, self._fleet, left))

    # --- one plan ---------------------------------------------------------------------------
    def _plan(
        self, config: RunConfig, nodes: Sequence[NodePlaces], present: PresentPlacement | None
    ) -> LayoutPlan:
        begun, costs = self._clock(), TopologyCost(config, self._fleet, nodes)
        scored, refused, short_of = list[_Scored](), None, 0.0
        seen: set[Topology] = set()
        is_late = False
        for changed in self._candidates(config, nodes, present, costs):
            if is_late := self._clock() - begun > self._limit_s:
                break
            try:
                plan = plan_layout(changed, nodes, 1, present)
            except LayoutError as error:
                refused = refused or error
                continue
            if plan.topology in seen:
                continue
            seen.add(plan.topology)
            cost = costs.cost(plan.topology)
            if cost.fits:
                planned = replace(plan, step_s=cost.step_s)
                scored.append(self._score(planned, len(nodes) if present else 0))
            else:
                short_of = min(short_of or cost.short_of, cost.short_of)
        if not scored and is_late:
            why = f"the search took more than {self._limit_s:g} s"
            return _simple(config, nodes, 1, present, why)
        if not scored:
            raise refused if refused and not short_of else _too_large_error(short_of, nodes)
        return _with_reason(_choose(scored))

    def _candidates(
        self,
        config: RunConfig,
        nodes: Sequence[NodePlaces],
        present: PresentPlacement | None,
        costs: TopologyCost,
    ) -> Iterator[RunConfig]:
        """The run file with each mesh, the present ones first. Then the same without the workers
        that fill no replica, and with one replica alone."""
        own = config.layout
        meshes: list[MeshShape] = [(own.pp, own.dp_shard, own.cp, own.tp)]
        if present is not None:
            meshes = [replica.mesh_shape for replica in present.topology.replicas]
        first = list(dict.fromkeys(meshes))
        yield from (_with_mesh(config, mesh) for mesh in first)
        workers = _workers(config, nodes)
        best = self._best_meshes(config, nodes, costs)
        rest = [mesh for mesh in best if mesh not in first]
        yield from (_with_mesh(config, mesh) for mesh in rest)
        for mesh in (*first, *rest):
            each = prod(mesh)
            for used in sorted({workers // each * each, each}):
                if 0 < used < workers:
                    yield _with_mesh(config, mesh, used)

    def _best_meshes(
        self, config: RunConfig, nodes: Sequence[NodePlaces], costs: TopologyCost
    ) -> tuple[MeshShape, ...]:
        """Those that the cost model puts first; remembered for as many nodes of the same kind."""
        workers = _workers(config, nodes)
        asked = (workers, tuple(sorted((node.places, round(node.speed, 2)) for node in nodes)))
        if asked not in self._ranked:
            meshes = dict.fromkeys(self._searched(config, costs))
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

    def _searched(self, config: RunConfig, costs: TopologyCost) -> list[MeshShape]:
        fixed = _fixed(config, self._limits)
        limits = replace(
            fixed,
            microbatch=config.train.microbatch_size or 1,
            zero=(config.layout.zero,),
            schedules=(config.layout.schedule,),
            recompute=config.train.recompute_words[:1],
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
        degrees = [
            [fixed] if fixed else every
            for fixed in (limits.pp, limits.dp_shard, limits.cp, limits.tp)
        ]
        for mesh in product(*degrees):
            if prod(mesh) <= workers and mesh in rules:
                yield mesh

    def _score(self, plan: LayoutPlan, receiving: int) -> _Scored:
        """receiving: nodes that state travels to; 0 where none holds any."""
        link = self._fleet.node.outside
        moving = plan.moved_bytes / link.bandwidth / receiving if receiving else 0.0
        return _Scored(plan, moving, plan.step_s * (1 + moving / BETWEEN_CHANGES_S))


def why_simple(config: RunConfig) -> str:
    """Why the cost model cannot plan this run, with the key; "" if it can."""
    if config.lora.rank:
        return f"lora.rank={config.lora.rank}: the cost model does not know adapters"
    if not config.trains_decoder:
        return f"task.name={config.task.name}: the shapes of its layers are not known"
    if config.layout.replicas:
        return "layout.replicas: the run file says what each replica is"
    if config.layout.is_asynchronous:
        return f"layout.schedule={config.layout.schedule}: its curve depends on layout.pp"
    return ""


def _fixed(config: RunConfig, limits: Limits) -> Limits:
    """Limits, with the degrees that other keys of the run file fix."""
    if len(config.train.recompute_words) > 1:  # a word for each stage
        limits = replace(limits, pp=config.layout.pp)
    if config.layout.quantized != "none":  # the curve depends on it
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


def _choose(scored: Sequence[_Scored]) -> LayoutPlan:
    """Of those close to the least score, the one that moves the least; then that with the most
    workers, then the first."""
    best = min(each.score for each in scored)
    close = [each for each in scored if each.score <= (1 + _MARGIN) * best]
    return min(close, key=lambda each: (each.moving_s, -each.plan.topology.world_size)).plan


def _with_reason(plan: LayoutPlan) -> LayoutPlan:
    if plan.idle_places and plan.idle_reason.startswith("layout.workers"):
        return replace(plan, idle_reason="with more workers a step would take longer (predicted)")
    return plan


def _with_mesh(config: RunConfig, mesh: MeshShape, workers: int = 0) -> RunConfig:
    """The run file with these degrees. workers: 0 for those that it has."""
    pp, dp_shard, cp, tp = mesh
    own: LayoutConfig = config.layout
    degrees = {"pp": pp, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    stages = own.stages if pp == own.pp else ()
    changes = {**degrees, "stages": stages, "workers": workers or own.workers}
    return config.model_copy(update={"layout": own.model_copy(update=changes)})


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
