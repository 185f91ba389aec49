"""What `holdfast plan` says beyond its table: timeline, neighbours, a comparison, a loss."""

from __future__ import annotations

from dataclasses import replace
from math import isinf
from pathlib import Path
from typing import Any

from holdfast.cli.plan_request import PlanRequest
from holdfast.core.schedule.draw import draw_svg, draw_text
from holdfast.errors import LayoutError
from holdfast.plan.auto.objective import fastest_of
from holdfast.plan.auto.search_run import RunPlan, plan_run
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.explain.figures import words_of_layout
from holdfast.plan.explain.neighbours import neighbours_of
from holdfast.plan.explain.timeline import drawn_microbatches, timeline_of
from holdfast.plan.explain.what_if import after_loss
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.next_plans import NextPlan, next_plans
from holdfast.report.formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_plural,
    format_si,
)
from holdfast.show.output import print_table, write_text

_MOST_RANKS = 8
"""Ranks of a pipeline that are drawn as text: of more, labels do not fit."""
_MOST_NEIGHBOURS = 12
_SAME = 0.0005
"""Share of a step below which two plans are as fast."""


def print_timeline(request: PlanRequest) -> None:
    """Draw the passes of a pipeline. One stage has nothing to draw."""
    choice = request.plan.best.choice
    pp = choice.replicas[0].pp
    if pp > _MOST_RANKS:
        print(f"--svg FILE draws a step of the pipeline of {pp} ranks")
    if not 1 < pp <= _MOST_RANKS:
        return
    schedule, timeline = timeline_of(request.problem, choice)
    group = choice.replicas[0]
    drawn = drawn_microbatches(group)
    some = f", its first {drawn} of {group.microbatches} microbatches"
    print(f"one step of a replica{some if drawn < group.microbatches else ''}, in milliseconds:")
    print(draw_text(schedule, timeline, 100))


def write_timeline(request: PlanRequest, path: Path) -> None:
    """Write the timeline as SVG."""
    write_text(path, draw_svg(*timeline_of(request.problem, request.plan.best.choice)))


def print_neighbours(request: PlanRequest) -> None:
    """Print why each neighbour of the chosen layout lost."""
    found = neighbours_of(
        request.loaded.config, request.problem, request.plan.limits, request.plan.result
    )
    if found:
        print("why not:")
    for each in found[:_MOST_NEIGHBOURS]:
        print(f"  {each.sentence}")


def neighbours_as_json(request: PlanRequest) -> list[dict[str, Any]]:
    found = neighbours_of(
        request.loaded.config, request.problem, request.plan.limits, request.plan.result
    )
    return [
        {
            "layout": words_of_layout(each.choice),
            "differs": each.words,
            "why": each.why,
            "slower": None if isinf(each.slower) else each.slower,
        }
        for each in found
    ]


def print_comparison(requests: list[tuple[str, PlanRequest]]) -> None:
    """Print plans part by part, one column each."""
    found = [request.plan.best for _, request in requests]
    figures = [request.figures(request.plan.best) for _, request in requests]
    names = dict.fromkeys(name for each in found for name in each.cost.parts)
    rows = [
        [
            "layout",
            *(words_of_layout(r.plan.best.choice, r.problem.cluster) for _, r in requests),
        ],
        ["step", *(format_duration(each.cost.step_s) for each in found)],
        *(
            [f"  {name}", *(format_duration(each.cost.parts.get(name, 0.0)) for each in found)]
            for name in names
            if any(each.cost.parts.get(name, 0.0) for each in found)
        ),
        ["tokens/s", *(format_si(each.tokens_per_second) for each in figures)],
        ["MFU", *(format_percent(each.mfu) if each.mfu else "?" for each in figures)],
        ["memory", *(format_bytes(each.peak_bytes) for each in figures)],
        ["$/1e9 tokens", *(f"{e.usd_per_tokens:,.2f}" if e.usd_per_hour else "?" for e in figures)],
        ["kWh/1e9 tokens", *(format_si(each.kwh_per_tokens) for each in figures)],
    ]
    print_table(rows, ["", *(name for name, _ in requests)])
    one, other = figures[0].tokens_per_second, figures[-1].tokens_per_second
    faster, slower = (0, -1) if one >= other else (-1, 0)
    share = max(one, other) / min(one, other) - 1
    if share < _SAME:
        print("both are as fast")
    else:
        print(f"{requests[faster][0]} is {share:.1%} faster than {requests[slower][0]}")


def plan_after_loss(request: PlanRequest, text: str) -> tuple[str, RunPlan | None]:
    """(the loss in words, the plan for what is left). None: nothing fits there."""
    cluster, words = after_loss(request.plan.problem.cluster, text)
    if not cluster.pools:
        return words, None
    machines = replace(request.plan.machines, cluster=cluster, cores=0)
    for workers in range(cluster.size, 0, -min(pool.devices for pool in cluster.pools)):
        try:  # fewer devices, if the batch does not divide by all of them
            part = machines.with_workers(workers)
            own = part.cluster.size
            return words, plan_run(request.loaded, part, workers=own, cache=request.cache)
        except LayoutError:
            continue
    return words, None


def print_loss(request: PlanRequest, text: str) -> None:
    """Print which layout is left after a loss, and what it costs."""
    words, plan = plan_after_loss(request, text)
    if plan is None:
        print(f"without {words} no layout fits: the run waits for nodes, or saves and ends")
        return
    before, after = request.plan.best.cost.step_s, plan.best.cost.step_s
    print(
        f"without {words}: {words_of_layout(plan.best.choice, plan.problem.cluster)} on "
        f"{format_plural(plan.best.choice.devices, 'device')}, {format_duration(after)} a step, "
        f"{before / after:.1%} of the throughput"
    )


def loss_as_json(request: PlanRequest, text: str) -> dict[str, Any]:
    words, plan = plan_after_loss(request, text)
    if plan is None:
        return {"lost": words, "layout": None}
    after = plan.best.cost.step_s
    return {
        "lost": words,
        "layout": words_of_layout(plan.best.choice, plan.problem.cluster),
        "devices": plan.best.choice.devices,
        "step_s": after,
        "share": request.plan.best.cost.step_s / after,
    }


def next_plans_of(request: PlanRequest) -> tuple[NextPlan, ...]:
    """The layouts to move to after likely losses; none on one node."""
    if sum(pool.nodes for pool in request.problem.cluster.pools) < 2:
        return ()
    best, config = request.plan.best, request.loaded.config

    def search_rest(problem: Problem) -> Choice | None:
        try:
            found = request.cache.search(problem, request.plan.limits, fastest_of(config))
            return found.best.choice
        except LayoutError:
            return None

    return next_plans(GoodputModel(request.problem), best.choice, best.cost, search_rest)


def _layout_of(request: PlanRequest, plan: NextPlan) -> str | None:
    if plan.layout is None:
        return None
    return words_of_layout(plan.layout, request.problem.cluster)


def _pools_of(request: PlanRequest, plan: NextPlan) -> str:
    """` of kept`: whose nodes are lost, if there are several pools."""
    several = len(request.problem.cluster.pools) > 1 and plan.loss != "zone"
    return f" of {' and '.join(plan.lost)}" if several else ""


def print_next_plans(request: PlanRequest) -> None:
    """Print what follows a loss: layout, throughput, bytes that move, pause."""
    rows = [
        [
            f"  {each.loss}{_pools_of(request, each)}",
            _layout_of(request, each) or "none fits",
            f"{each.share:.0%}",
            format_bytes(each.moved_bytes),
            format_duration(each.pause_s),
        ]
        for each in next_plans_of(request)
    ]
    if rows:
        print("next plans:")
        print_table(rows, ["  if", "layout", "throughput", "moved", "pause"])


def next_plans_as_json(request: PlanRequest) -> list[dict[str, Any]]:
    return [
        {
            "loss": each.loss,
            "lost": dict(each.lost),
            "layout": _layout_of(request, each),
            "rung": each.rung,
            "moved_bytes": each.moved_bytes,
            "pause_s": each.pause_s,
            "share": each.share,
        }
        for each in next_plans_of(request)
    ]
