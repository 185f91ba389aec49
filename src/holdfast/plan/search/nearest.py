"""The nearest thing that would work, if no layout does. Each is tried before it is named."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from holdfast.errors import LayoutError
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.hardware.devices import CPU
from holdfast.plan.search.limits import DEGREES, Limits

Fits = Callable[[Problem, Limits], Choice | None]
"""Returns any layout that fits."""

_MOST_TIMES = 64  # times as many nodes as the cluster has, up to which more nodes are tried
_FREE = dict.fromkeys(DEGREES, 0)


def nothing_fits_error(problem: Problem, limits: Limits, fits: Fits) -> LayoutError:
    """Return the error that names what is too much, and the nearest that would work."""
    for what, change, remedy in _changes(limits):
        choice = fits(problem, change)
        if choice is not None:
            return LayoutError(what, where="layout", remedy=remedy(choice))
    kept = replace(limits, devices=0)
    free = replace(kept.with_degrees(_FREE), replicas=0)
    for tried in dict.fromkeys((kept, free)):
        if nodes := _more_nodes(problem, tried, fits):
            fixed = [f"layout.{axis}" for axis in DEGREES if getattr(limits, axis)]
            without = f", without {' and '.join(fixed)}" if fixed and tried == free else ""
            name = problem.cluster.pools[0].name
            like = "like this machine" if name == CPU else f"of {name}"
            return LayoutError(
                f"no layout fits {_name(problem)}",
                where="layout",
                remedy=f"use {nodes} more node{'s' * (nodes > 1)} {like}{without}",
            )
    return LayoutError(
        f"no layout fits {_name(problem)}, nor {_MOST_TIMES} times as many nodes",
        where="layout",
        remedy="use a smaller model, or devices with more memory",
    )


def _name(problem: Problem) -> str:
    size = problem.cluster.size
    return f"{problem.workload.name} on {size} device{'s' * (size > 1)}"


def _changes(limits: Limits) -> Iterator[tuple[str, Limits, Callable[[Choice], str]]]:
    """(what is too much, limits with one of them changed, the remedy for a layout that fits)."""
    no = "no layout fits with"
    if limits.devices:
        yield (
            f"no layout fits {limits.devices} device{'s' * (limits.devices > 1)}",
            replace(limits, devices=0),
            lambda choice: f"use layout.workers={choice.devices}",
        )
    if limits.recompute != ("full",):
        word = " or ".join(limits.recompute)
        changed = replace(limits, recompute=("full",))
        if "full" not in limits.recompute:
            yield f"{no} train.recompute {word}", changed, lambda _: "use train.recompute=full"
    if limits.zero and 3 not in limits.zero:
        plain = tuple(name for name in limits.schedules if name in ("1f1b", "gpipe"))
        changed = replace(limits, zero=(3,), schedules=plain or ("1f1b",))
        yield f"{no} layout.zero {limits.zero[-1]}", changed, lambda _: "use layout.zero=3"
    for axis in (each for each in DEGREES if getattr(limits, each)):
        yield (
            f"{no} layout.{axis} {getattr(limits, axis)}",
            limits.with_degrees({axis: 0}),
            partial(_degrees_of, [axis]),
        )
    fixed = [axis for axis in DEGREES if getattr(limits, axis)]
    if len(fixed) > 1:
        given = " and ".join(f"layout.{axis} {getattr(limits, axis)}" for axis in fixed)
        changed = limits.with_degrees(_FREE)
        yield f"{no} {given}", changed, partial(_degrees_of, fixed)
    if limits.microbatch > 1:
        yield (
            f"{no} train.microbatch_size {limits.microbatch}",
            replace(limits, microbatch=0),
            lambda choice: f"use train.microbatch_size={choice.microbatch}",
        )


def _degrees_of(axes: Sequence[str], choice: Choice) -> str:
    degrees = {each: getattr(choice.replicas[0], each) for each in DEGREES if each != "ep"}
    degrees["ep"] = choice.ep
    return "use " + ", ".join(f"layout.{axis}={degrees[axis]}" for axis in axes)


def _more_nodes(problem: Problem, limits: Limits, fits: Fits) -> int:
    """The fewest more nodes of the first pool with which a layout fits; 0 if none is known."""
    own = problem.cluster.pools[0].nodes
    more = 1
    while not fits(_with_nodes(problem, own + more), limits):
        more *= 2
        if more > _MOST_TIMES * own:
            return 0
    between = range(more // 2 + 1, more)
    fitting = bisect_left(
        between, True, key=lambda n: fits(_with_nodes(problem, own + n), limits) is not None
    )
    return between.start + fitting


def _with_nodes(problem: Problem, nodes: int) -> Problem:
    first, *rest = problem.cluster.pools
    pools = (replace(first, nodes=nodes), *rest)
    return replace(problem, cluster=replace(problem.cluster, pools=pools))
