"""The best layout of a run on a cluster: every layout that may be, bounded and costed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.errors import LayoutError
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost

Objective = Callable[[Choice, StepCost], float]
"""What the search makes as small as it can; `step_seconds` is the simplest."""


def step_seconds(_: Choice, cost: StepCost) -> float:
    return cost.step_s


@dataclass(frozen=True)
class Limits:
    """What a run file fixes. A number of 0 is free. microbatch: samples of a logical microbatch.
    schedules, recompute: words that may be chosen."""

    pp: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0
    microbatch: int = 0
    zero: tuple[int, ...] = (1, 3)
    schedules: tuple[str, ...] = ("1f1b",)
    recompute: tuple[str, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Found:
    """A layout with its cost. score: by the objective; the least is the best."""

    choice: Choice
    cost: StepCost
    score: float


@dataclass(frozen=True)
class SearchResult:
    """best first; `runners_up` follow it. tried: layouts that were costed."""

    best: Found
    runners_up: tuple[Found, ...]
    tried: int


def search(
    problem: Problem, limits: Limits | None = None, objective: Objective = step_seconds
) -> SearchResult:
    """Raises LayoutError where nothing fits, with the nearest that would."""
    evaluator, found, tried = Evaluator(problem), list[Found](), 0
    nearest: Found | None = None
    for choice in candidates(problem, limits or Limits()):
        tried += 1
        cost = evaluator.cost(choice)
        each = Found(choice, cost, objective(choice, cost))
        if cost.fits:
            found.append(each)
        elif nearest is None or cost.short_of < nearest.cost.short_of:
            nearest = each
    if not found:
        raise _nothing_fits_error(nearest)
    found.sort(key=lambda each: each.score)
    return SearchResult(found[0], tuple(found[1:9]), tried)


def _nothing_fits_error(nearest: Found | None) -> LayoutError:
    if nearest is None:
        return LayoutError(
            "no layout divides these devices and this batch",
            where="layout",
            remedy="use a batch that is a multiple of the microbatch",
        )
    return LayoutError(
        f"no layout fits: the nearest lacks {nearest.cost.short_of / 1e9:.1f} GB on a device",
        where="layout",
        remedy="use more devices, or train.recompute=full",
    )


def candidates(problem: Problem, limits: Limits) -> Iterator[Choice]:
    """Layouts of equal replicas over all devices of the first pool."""
    pool, workload = problem.cluster.pools[0], problem.workload
    blocks = len(workload.blocks)
    for tp in _degrees(limits.tp, pool.devices):
        for cp in _degrees(limits.cp or 1, pool.size // tp):
            for pp in _degrees(limits.pp, pool.size // tp // cp):
                rest = pool.size // tp // cp // pp
                if pp > blocks:
                    continue
                for dp_shard in _degrees(limits.dp_shard, rest):
                    yield from _with_batches(problem, limits, (pp, dp_shard, cp, tp))


def _with_batches(
    problem: Problem, limits: Limits, mesh: tuple[int, int, int, int]
) -> Iterator[Choice]:
    pp, dp_shard, cp, tp = mesh
    pool, workload = problem.cluster.pools[0], problem.workload
    count = pool.size // (pp * dp_shard * cp * tp)
    samples = workload.batch // count
    if samples * count != workload.batch:
        return
    each, more = divmod(len(workload.blocks), pp)
    stages = tuple(each + (stage >= pp - more) for stage in range(pp)) if pp > 1 else ()
    for microbatch in _degrees(limits.microbatch, samples):
        number = samples // microbatch
        if microbatch % dp_shard or number < pp:
            continue
        for word in limits.recompute:
            for zero in limits.zero if dp_shard > 1 else limits.zero[:1]:
                group = ReplicaChoice(count, *mesh, stages, (pool.name,), number, (word,))
                yield Choice((group,), microbatch, limits.schedules[0], 1, zero)


def _degrees(fixed: int, most: int) -> list[int]:
    """The divisors of `most`, or the fixed degree if it is one."""
    found = [n for n in range(1, most + 1) if most % n == 0]
    return [n for n in found if n == fixed] if fixed else found
