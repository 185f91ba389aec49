"""The next plans: for each likely loss, the layout to move to and the bytes to move.

    next_plans(model, choice, cost)          with `search` for the rest: the best layout there
    NextPlans.on({"spot": 7})                the plan for the nodes that are left

They are values, and JSON in a run folder. So a change of membership needs no search.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from holdfast.errors import LayoutError
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem, StepCost
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.losses import domains_of
from holdfast.plan.objective.occupancy import nodes_used
from holdfast.plan.objective.recoveries import recovery_of

FORMAT = 1
"""Version of the JSON form."""
Rest = Callable[[Problem], Choice | None]
"""Finds the best layout of a problem; None: nothing fits."""


@dataclass(frozen=True)
class NextPlan:
    """What to do after one loss.

    loss: "node", "rack", "power", "zone", "half of the spot pool". lost, left: nodes by pool.
    layout: the one to move to; None: nothing fits, so the run waits. rung: of the recovery ladder.
    moved_bytes: received by all devices. pause_s: until training continues. tokens_per_s:
    afterwards; share: of those before.
    """

    loss: str
    lost: Mapping[str, int]
    left: Mapping[str, int]
    layout: Choice | None
    rung: int
    moved_bytes: float
    pause_s: float
    tokens_per_s: float
    share: float


@dataclass(frozen=True)
class NextPlans:
    """present: the layout that they follow."""

    present: Choice
    plans: tuple[NextPlan, ...]

    def on(self, nodes: Mapping[str, int]) -> NextPlan | None:
        """The plan for so many nodes of each pool, if one was made."""
        found = {name: number for name, number in nodes.items() if number}
        return next(
            (
                plan
                for plan in self.plans
                if {name: number for name, number in plan.left.items() if number} == found
            ),
            None,
        )

    def to_json(self) -> str:
        value = asdict(self)
        return json.dumps({"format": FORMAT, **value}, default=sorted)

    @staticmethod
    def from_json(text: str) -> NextPlans | None:
        """None for another version's form: the plans are made again."""
        value = json.loads(text)
        if value.get("format") != FORMAT:
            return None
        plans = (
            NextPlan(
                **{**plan, "layout": Choice.from_json(plan["layout"]) if plan["layout"] else None}
            )
            for plan in value["plans"]
        )
        return NextPlans(Choice.from_json(value["present"]), tuple(plans))


def next_plans(
    model: GoodputModel, choice: Choice, cost: StepCost, rest: Rest | None = None
) -> NextPlans:
    """Return a plan for each likely loss. rest: searches what is left of a cluster; None: the same
    replicas, or other shapes of them."""
    found = tuple(
        _plan(model, choice, cost, loss, lost, rest)
        for loss, lost in likely_losses(model.problem.cluster, choice)
    )
    return NextPlans(choice, found)


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
    nodes = {name: _names(problem.cluster.pool(name)) for name in used}
    gone = {node for name, number in lost.items() for node in nodes[name][:number]}
    found, moved = recovery_of(problem, choice, layout, nodes, gone)
    pause = model.pause_s(choice, found.loss_class)
    return NextPlan(loss, lost, left, layout, found.rung, moved, pause, rate, rate / before)


def _names(pool: NodePool) -> list[str]:
    return [f"{pool.name}/{number}" for number in range(pool.nodes)]


def _better(
    model: GoodputModel,
    choice: Choice,
    left: Mapping[str, int],
    rest: Rest,
    known: tuple[Choice | None, float],
) -> tuple[Choice | None, float]:
    """The layout of a search on the rest, if it is faster. Its logical microbatch is the run's."""
    pools = tuple(
        _smaller(model.problem.cluster.pool(name), number)
        for name, number in left.items()
        if number
    )
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


def _smaller(pool: NodePool, nodes: int) -> NodePool:
    return replace(pool, nodes=nodes)


def _choice(value: dict[str, Any] | None) -> Choice | None:
    return None if value is None else Choice.from_json(value)
