"""A plan for people, in the manner of a cloud launcher, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from math import isinf
from pathlib import Path
from typing import Any

from holdfast.cli.plan_request import PlanRequest
from holdfast.core.schedule.draw import draw_svg, draw_text
from holdfast.errors import LayoutError
from holdfast.plan.auto.choices import values_of
from holdfast.plan.auto.objective import end_in_words, fastest_of
from holdfast.plan.auto.search_run import RunPlan, plan_run
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.explain.figures import Figures, words_of_layout, words_of_way
from holdfast.plan.explain.neighbours import Neighbour, neighbours_of
from holdfast.plan.explain.timeline import drawn_microbatches, timeline_of
from holdfast.plan.explain.warnings import warnings_of
from holdfast.plan.explain.what_if import after_loss
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.next_plans import NextPlan, next_plans
from holdfast.plan.search.limits import SEARCHED, Found
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_plural,
    format_si,
)
from holdfast.show.output import print_table, write_text

_HEAD = (
    "layout",
    "schedule",
    "zero",
    "recompute",
    "microbatch",
    "step",
    "tokens/s",
    "MFU",
    "memory",
    "$/hour",
    "$/1e9 tokens",
    "kWh/1e9 tokens",
    "",
)
_UNKNOWN = "?"


def print_plan(request: PlanRequest) -> None:
    """Print the table, the parts of a step, the memory of each stage, and warnings."""
    print(_title(request))
    found = [request.plan.best, *request.plan.result.runners_up]
    print_table([_row(request, each, each is found[0]) for each in found], _HEAD)
    print(_parts(found[0]))
    print(_memory(request.figures(found[0])))
    if failures := _failures(request, found[0]):
        print(failures)
    print(_length(request, request.figures(found[0])))
    if end := end_in_words(request.loaded, request.problem, found[0]):
        print(end)
    for sentence in warnings_of(
        request.problem, request.machines, found[0], request.plan.result.gap
    ):
        print(f"note: {sentence}")


def _length(request: PlanRequest, figures: Figures) -> str:
    """How long the run takes, and what it costs."""
    steps = request.loaded.config.train.steps
    if figures.usd_per_hour is None:
        cost = "its price is not known (usd_per_hour of docs/reference/cluster-file.md)"
    else:
        cost = f"${figures.usd_of(steps):,.2f}"
    return f"{format_count(steps)} steps: {format_duration(steps * figures.step_s)}; {cost}"


def _title(request: PlanRequest) -> str:
    workload, tried = request.problem.workload, request.plan.result.tried
    pools = " + ".join(
        f"{pool.nodes} x {pool.devices} {pool.device}" for pool in request.machines.cluster.pools
    )
    layouts = "layout" if tried == 1 else "layouts"
    precision: str = request.loaded.config.train.precision
    if precision != workload.precision:
        precision += f" (timed as {workload.precision})"
    return (
        f"{request.loaded.config.name}: {format_si(workload.parameters)} parameters, "
        f"{format_count(workload.step_tokens)} tokens a step, {precision}, on "
        f"{request.machines.name}: {pools}; best by {request.loaded.config.plan.objective} of "
        f"{format_count(tried)} {layouts}{_source(request.plan.result.source)}"
    )


def _source(source: str) -> str:
    return "" if source == SEARCHED else f", {source}"


def _row(request: PlanRequest, found: Found, is_chosen: bool) -> list[str]:
    figures = request.figures(found)
    return [
        words_of_layout(found.choice, request.problem.cluster),
        *words_of_way(found.choice),
        str(found.choice.microbatch),
        format_duration(figures.step_s),
        format_si(figures.tokens_per_second),
        format_percent(figures.mfu) if figures.mfu else _UNKNOWN,
        format_bytes(figures.peak_bytes),
        _money(figures.usd_per_hour),
        _money(figures.usd_per_tokens),
        format_si(figures.kwh_per_tokens) if figures.kwh_per_hour else _UNKNOWN,
        "<- chosen" if is_chosen else "",
    ]


def _money(usd: float | None) -> str:
    return _UNKNOWN if usd is None else f"{usd:,.2f}"


def _parts(found: Found) -> str:
    """The parts of a step's seconds, the largest first."""
    step = found.cost.step_s
    parts = sorted(found.cost.parts.items(), key=lambda item: -item[1])
    words = [
        f"{name} {format_duration(seconds)} ({seconds / step:.0%})"
        for name, seconds in parts
        if seconds >= step / 1000
    ]
    return f"a step of {format_duration(step)}: " + ", ".join(words)


def _failures(request: PlanRequest, found: Found) -> str:
    """Throughput that is expected with the failures of the cluster file; "" without any."""
    if not any(pool.losses_per_day for pool in request.problem.cluster.pools):
        return ""
    expected = GoodputModel(request.problem).expected(found.choice, found.cost)
    return (
        f"with failures, {expected.losses_per_day:.2g} nodes lost a day, in "
        f"{expected.interruptions_per_day:.2g} interruptions of training: "
        f"{format_si(expected.tokens_per_s)} tokens/s expected, availability "
        f"{format_percent(expected.availability)}"
    )


def _memory(figures: Figures) -> str:
    rooms = {room for replica in figures.rooms for room in replica}
    every = dict.fromkeys(zip(figures.memory, figures.rooms, strict=True))
    if len(rooms) == 1:
        kinds = [_stages_in_words(list(map(format_bytes, memory))) for memory, _ in every]
        return f"memory of {format_bytes(figures.room)} on a device, by stage: {'; '.join(kinds)}"
    kinds = [
        _stages_in_words(
            [
                f"{format_bytes(used)} of {format_bytes(room)}"
                for used, room in zip(memory, there, strict=True)
            ]
        )
        for memory, there in every
    ]
    return f"memory of a device, by stage: {'; '.join(kinds)}"


def _stages_in_words(memory: Sequence[str]) -> str:
    """`65.0 GiB, 3 x 60.1 GiB`: equal neighbours once."""
    groups = [(words, len(list(same))) for words, same in groupby(memory)]
    return ", ".join(f"{n} x {words}" if n > 1 else words for words, n in groups)


def plan_as_json(request: PlanRequest) -> dict[str, Any]:
    """The plan's figures, the best layout first."""
    found = (request.plan.best, *request.plan.result.runners_up)
    return {
        "run": request.loaded.config.name,
        "machines": request.machines.name,
        "pools": [
            {"name": pool.name, "nodes": pool.nodes, "devices": pool.devices, "device": pool.device}
            for pool in request.machines.cluster.pools
        ],
        "objective": request.loaded.config.plan.objective,
        "parameters": request.problem.workload.parameters,
        "step_tokens": request.problem.workload.step_tokens,
        "tried": request.plan.result.tried,
        "source": request.plan.result.source,
        "layouts": [
            {
                "values": values_of(each.choice),
                "score": each.score,
                "parts": dict(each.cost.parts),
                "memory_parts": [[asdict(s) for s in group.memory] for group in each.cost.groups],
                **request.figures(each).to_json(),
            }
            for each in found
        ],
        "notes": [
            *request.notes,
            *filter(None, [end_in_words(request.loaded, request.problem, request.plan.best)]),
            *warnings_of(
                request.problem, request.machines, request.plan.best, request.plan.result.gap
            ),
        ],
    }


_MOST_RANKS = 8  # Ranks of a pipeline that are drawn as text: of more, labels do not fit
_MOST_NEIGHBOURS = 12
_SAME = 0.0005  # Share of a step below which two plans are as fast


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
    found = _neighbours(request)
    if found:
        print("why not:")
    for each in found[:_MOST_NEIGHBOURS]:
        print(f"  {each.sentence}")


def neighbours_as_json(request: PlanRequest) -> list[dict[str, Any]]:
    return [
        {
            "layout": words_of_layout(each.choice),
            "differs": each.words,
            "why": each.why,
            "slower": None if isinf(each.slower) else each.slower,
        }
        for each in _neighbours(request)
    ]


def _neighbours(request: PlanRequest) -> list[Neighbour]:
    plan = request.plan
    return neighbours_of(request.loaded.config, request.problem, plan.limits, plan.result)


def print_comparison(requests: list[tuple[str, PlanRequest]]) -> None:
    """Print plans part by part, one column each."""
    found = [request.plan.best for _, request in requests]
    figures = [request.figures(request.plan.best) for _, request in requests]
    names = dict.fromkeys(name for each in found for name in each.cost.parts)
    rows = [
        ["layout", *(words_of_layout(r.plan.best.choice, r.problem.cluster) for _, r in requests)],
        ["step", *(format_duration(each.cost.step_s) for each in found)],
        *(
            [f"  {name}", *(format_duration(each.cost.parts.get(name, 0.0)) for each in found)]
            for name in names
            if any(each.cost.parts.get(name, 0.0) for each in found)
        ),
        ["tokens/s", *(format_si(each.tokens_per_second) for each in figures)],
        ["MFU", *(format_percent(each.mfu) if each.mfu else "?" for each in figures)],
        ["memory", *(format_bytes(each.peak_bytes) for each in figures)],
        ["$/1e9 tokens", *(_money(each.usd_per_tokens) for each in figures)],
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
    size = request.plan.best.choice.microbatch  # a run keeps it
    kept = request.loaded.with_values({"train.microbatch_size": (size, "that of the run")})
    for workers in range(cluster.size, 0, -min(pool.devices for pool in cluster.pools)):
        try:  # fewer devices, if the batch does not divide by all of them
            part = machines.with_workers(workers)
            own = part.cluster.size
            return words, plan_run(kept, part, workers=own, cache=request.cache)
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

    limits = replace(request.plan.limits, microbatch=best.choice.microbatch)  # a run keeps it

    def search_rest(problem: Problem) -> Choice | None:
        try:
            found = request.cache.search(problem, limits, fastest_of(config))
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
