"""Layouts that differ from the chosen one in one thing, and the reason why each of them lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from holdfast.config.run import RunConfig
from holdfast.layout import AXES
from holdfast.plan.auto.objective import refusal_of
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.explain.figures import words_of_layout
from holdfast.plan.search.search import Limits, SearchResult
from holdfast.plan.search.splits import even_split

_AXES = ("dp_replicate", *AXES)
_SAME = 0.001  # share of a step below which two layouts are equally fast


@dataclass(frozen=True)
class Neighbour:
    """A layout next to the chosen one."""

    choice: Choice
    words: str  # what differs
    why: str  # the reason, one clause
    slower: float  # share of the chosen layout's step that it takes more; inf: it cannot run

    @property
    def sentence(self) -> str:
        return f"{self.words}: {self.why}"


def neighbours_of(
    config: RunConfig, problem: Problem, limits: Limits, result: SearchResult
) -> list[Neighbour]:
    """The neighbours within the limits, the nearest to the chosen layout first. Of degrees that the
    search executed, its own layout.

    For replicas of one kind; layouts of several have none."""
    evaluator, out = Evaluator(problem), dict[Choice, Neighbour]()
    found = result.best
    executed = {each.choice.degrees: each.choice for each in reversed(result.runners_up)}
    for words, changed in _changed(problem, limits, found.choice):
        choice = changed
        if changed.degrees != found.choice.degrees:
            choice = executed.get(changed.degrees, changed)
        if choice in out or choice == found.choice:
            continue
        if refusal := refusal_of(config, choice):
            out[choice] = Neighbour(choice, words, refusal.partition(":")[0], float("inf"))
            continue
        cost = evaluator.cost(choice)
        slower = cost.step_s / found.cost.step_s - 1
        reason = _reason(cost, found.cost, slower)
        out[choice] = Neighbour(choice, words, reason, slower if cost.fits else float("inf"))
    return sorted(out.values(), key=lambda each: each.slower)


def _reason(cost: StepCost, best: StepCost, slower: float) -> str:
    """The part that grew most, or what is short."""
    if not cost.fits:
        return f"does not fit: {cost.short_of / 2**30:.1f} GiB are short on a device"
    name, grown = largest_growth(cost, best)
    if slower < -_SAME:
        return f"{-slower:.1%} faster, but worse by the objective"
    if slower <= _SAME or grown <= 0:
        return "as fast"
    return f"{slower:.1%} slower: {name} adds {_time(grown)} to a step"


def largest_growth(cost: StepCost, other: StepCost) -> tuple[str, float]:
    """The part of a step that is larger than the other layout's by most, and by how much."""
    names = dict.fromkeys([*cost.parts, *other.parts])
    grown = {name: cost.parts.get(name, 0.0) - other.parts.get(name, 0.0) for name in names}
    name = max(grown, key=lambda each: grown[each])
    return name, grown[name]


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _changed(problem: Problem, limits: Limits, choice: Choice) -> Iterator[tuple[str, Choice]]:
    """(what differs, the layout) for each change of one thing."""
    if len(choice.replicas) != 1:
        return
    group = choice.replicas[0]
    for up, down in permutations(_AXES, 2):
        if getattr(group, down) % 2 == 0 and _is_free(limits, up) and _is_free(limits, down):
            moved = replace(group, **{up: getattr(group, up) * 2, down: getattr(group, down) // 2})
            if (dealt := _dealt(problem, choice, moved, choice.microbatch)) is not None:
                yield words_of_layout(dealt), dealt
    for zero in limits.zero if group.is_sharded else ():
        yield f"zero {zero}", replace(choice, zero=zero)
    for word in limits.recompute:
        yield f"recompute {word}", replace(choice, replicas=(replace(group, recompute=(word,)),))
    for size in () if limits.microbatch else (choice.microbatch * 2, choice.microbatch // 2):
        if size and (dealt := _dealt(problem, choice, group, size)) is not None:
            yield f"microbatch {size}", dealt


def _is_free(limits: Limits, axis: str) -> bool:
    return axis == "dp_replicate" or getattr(limits, axis) == 0


def _dealt(problem: Problem, choice: Choice, group: ReplicaChoice, size: int) -> Choice | None:
    """The layout with these replicas and equal shares; None if the batch or the blocks do not
    divide."""
    blocks, samples = len(problem.workload.blocks), group.dp_replicate * size
    number, rest = divmod(problem.workload.batch, samples)
    virtual = choice.virtual if group.pp > 1 else 1
    chunks = group.pp * virtual
    if rest or number < group.pp or size % group.dp_shard or chunks > blocks:
        return None
    stages = even_split(blocks, chunks) if group.pp > 1 else ()
    pools, words = group.pools[:1], group.recompute[:1]
    moved = replace(group, stages=stages, pools=pools, recompute=words, microbatches=number)
    return replace(choice, replicas=(moved,), microbatch=size, virtual=virtual)
