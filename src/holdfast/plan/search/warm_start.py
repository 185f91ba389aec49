"""Layouts of earlier searches, made to fit another problem: the first layouts of its search.

The cluster may have other nodes, the batch and the limits may differ. So replicas are left out or
added, and microbatches are dealt again. A layout that limits or devices no longer allow is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice, replicas_within
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.search.limits import Limits, Objective
from holdfast.plan.search.shares import dealt, with_best_shares
from holdfast.plan.search.space import tensor_degrees

MOST_FIRST = 9
"""Layouts that a search begins with: one to beat, and runners-up."""


def first_layouts(
    problem: Problem,
    limits: Limits,
    objective: Objective,
    allows: Callable[[Choice], bool],
    known: Iterable[Choice],
) -> list[Choice]:
    """Return those of these layouts that are still ones of this problem, the best first.

    known: layouts of the same model on any machines. allows: False for layouts that rules of a run
    file refuse."""
    evaluator, found = Evaluator(problem), dict[Choice, float]()
    for choice in dict.fromkeys(known):
        for adapted in _adapted(evaluator, choice, limits):
            cost = evaluator.least(adapted)
            if adapted not in found and cost.fits and allows(adapted):
                found[adapted] = objective(adapted, cost)
    return sorted(found, key=lambda choice: found[choice])[:MOST_FIRST]


def _adapted(evaluator: Evaluator, choice: Choice, limits: Limits) -> Iterator[Choice]:
    """The layout with its replicas, and with as many as the devices allow."""
    problem, kinds = evaluator.problem, _kinds(choice)
    total, rest = divmod(problem.workload.batch, choice.microbatch)
    if rest or not _is_within(choice, limits) or not all(_has_place(problem, g) for g in kinds):
        return
    sizes = {pool.name: pool.size for pool in problem.cluster.pools}
    numbers = [replicas_within(kinds, sizes)]
    if len(kinds) == 1:
        numbers.append(replicas_within([replace(kinds[0], dp_replicate=total)], sizes))
    for counts in dict.fromkeys(numbers):
        groups = [replace(g, dp_replicate=n) for g, n in zip(kinds, counts, strict=True) if n]
        found = _with_shares(evaluator, choice, groups, total)
        if (
            found is not None
            and limits.devices in (0, found.devices)
            and limits.replicas in (0, found.number_of_replicas)
        ):
            yield found


def _kinds(choice: Choice) -> list[ReplicaChoice]:
    """Replicas that differ in more than their microbatches."""
    found = dict[ReplicaChoice, int]()
    for group in choice.replicas:
        kind = replace(group, dp_replicate=1, microbatches=1)
        found[kind] = found.get(kind, 0) + group.dp_replicate
    return [replace(kind, dp_replicate=count) for kind, count in found.items()]


def _is_within(choice: Choice, limits: Limits) -> bool:
    """Return True if the limits allow what all replicas have in common, and their degrees."""
    is_piped = any(group.pp > 1 for group in choice.replicas)
    return (
        limits.microbatch in (0, choice.microbatch)
        and limits.ep in (0, choice.ep)
        and limits.sequence_parallel == choice.sequence_parallel
        and choice.zero in limits.zero
        and choice.host in limits.offloads
        and choice.schedule in (limits.schedules if is_piped else limits.schedules[:1])
        and (
            not is_piped
            or SCHEDULE_KINDS[choice.schedule].virtual > 0
            or limits.virtual in (0, choice.virtual)
        )
        and all(
            fixed in (0, own)
            for group in choice.replicas
            for fixed, own in zip(limits.mesh, group.mesh_shape, strict=True)
        )
        and all(word in limits.recompute for g in choice.replicas for word in g.recompute)
    )


def _has_place(problem: Problem, group: ReplicaChoice) -> bool:
    """Return True if the cluster has the pools of a replica, and nodes for its degree of tp."""
    pools = {pool.name: pool for pool in problem.cluster.pools}
    return all(
        name in pools
        and group.tp in tensor_degrees(problem.workload, pools[name].devices, pools[name].size)
        for name in group.pools
    )


def _with_shares(
    evaluator: Evaluator, choice: Choice, groups: list[ReplicaChoice], total: int
) -> Choice | None:
    """The layout with all microbatches of a step; None if a schedule needs more of them."""
    if len(groups) != 1:
        every = replace(choice, replicas=tuple(groups))
        return with_best_shares(evaluator, every, total) if groups else None
    [one] = groups
    number = min(one.dp_replicate, total)
    each, more = divmod(total, number)
    if each < SCHEDULE_KINDS[choice.schedule].least_microbatches(one.pp):
        return None
    return replace(choice, replicas=tuple(dealt(one, number, each, more)))
