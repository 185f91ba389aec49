"""The next plans: for each likely loss, the layout to move to and the bytes to move.

next_plans(model, choice, cost)          with `search` for the rest: the best layout there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from holdfast.errors import LayoutError
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem, StepCost
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.losses import domains_of
from holdfast.plan.objective.occupancy import nodes_used
from holdfast.plan.objective.recoveries import recovery_of

Rest = Callable[[Problem], Choice | None]
"""Finds the best layout of a problem; None: nothing fits."""


@dataclass(frozen=True)
class NextPlan:
    """What to do after one loss."""

    loss: str  # "node", "rack", "power", "zone", "half of the spot pool"
    lost: Mapping[str, int]  # nodes by pool
    left: Mapping[str, int]  # nodes by pool
    layout: Choice | None  # the one to move to; None: nothing fits, so the run waits
    rung: int  # of the recovery ladder
    moved_bytes: float  # received by all devices
    pause_s: float  # until training continues
    tokens_per_s: float  # afterwards
    share: float  # of the tokens a second before


def next_plans(
    model: GoodputModel, choice: Choice, cost: StepCost, rest: Rest | None = None
) -> tuple[NextPlan, ...]:
    """Return a plan for each likely loss. rest: searches what is left of a cluster; None: the same
    replicas, or other shapes of them."""
    return tuple(
        _plan(model, choice, cost, loss, lost, rest)
        for loss, lost in likely_losses(model.problem.cluster, choice)
    )


def likely_losses(cluster: Cluster, choice: Choice) -> Iterator[tuple[str, dict[str, int]]]:
    """(loss, nodes by pool) of each pool that a layout uses."""
    used = nodes_used(cluster, choice)
    pools = [pool for pool in cluster.pools if pool.name in used]
    for pool in pools:
        yield "node", {pool.name: 1}
    for pool in pools:
        for domain, nodes in domains_of(pool).items():
            yield domain, {pool.name: nodes}
    for pool in pools:
        if pool.is_spot and pool.nodes > 2:
            yield "half of the spot pool", {pool.name: ceil(pool.nodes / 2)}
    for zone in dict.fromkeys(pool.zone for pool in pools if pool.zone):
        yield "zone", {pool.name: pool.nodes for pool in pools if pool.zone == zone}


def _plan(
    model: GoodputModel,
    choice: Choice,
    cost: StepCost,
    loss: str,
    lost: dict[str, int],
    rest: Rest | None,
) -> NextPlan:
    problem = model.problem
    used = nodes_used(problem.cluster, choice)
    left = {name: problem.cluster.pool(name).nodes - lost.get(name, 0) for name in used}
    layout, rate = model.layout_on(choice, cost, left)
    if rest is not None:
        layout, rate = _better(model, choice, left, rest, (layout, rate))
    before = problem.workload.step_tokens / cost.step_s
    pools = map(problem.cluster.pool, used)
    nodes = {pool.name: [f"{pool.name}/{n}" for n in range(pool.nodes)] for pool in pools}
    gone = {node for name, number in lost.items() for node in nodes[name][:number]}
    found, moved = recovery_of(problem, choice, layout, nodes, gone)
    pause = model.pause_s(choice, found.loss_class)
    return NextPlan(loss, lost, left, layout, found.rung, moved, pause, rate, rate / before)


def _better(
    model: GoodputModel,
    choice: Choice,
    left: Mapping[str, int],
    rest: Rest,
    known: tuple[Choice | None, float],
) -> tuple[Choice | None, float]:
    """The layout of a search on the rest, if it is faster. Its logical microbatch is the run's."""
    pool_of = model.problem.cluster.pool
    pools = tuple(replace(pool_of(name), nodes=n) for name, n in left.items() if n)
    if not pools:
        return known
    cluster = replace(model.problem.cluster, pools=pools)
    try:
        found = rest(replace(model.problem, cluster=cluster))
    except LayoutError:
        return known
    if found is None or found.microbatch != choice.microbatch:
        return known
    rate = model.problem.workload.step_tokens / model.evaluator.cost(found).step_s
    return (found, rate) if rate > known[1] else known
