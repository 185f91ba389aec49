"""A plan for people, in the manner of a cloud launcher, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from holdfast.cli.plan_request import PlanRequest
from holdfast.plan.auto.choices import values_of
from holdfast.plan.auto.objective import end_in_words
from holdfast.plan.explain.figures import Figures, words_of_layout, words_of_way
from holdfast.plan.explain.warnings import warnings_of
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.search.limits import SEARCHED, Found
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_si,
)
from holdfast.show.output import print_table

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
    if end := end_in_words(request.loaded, request.problem, found[0]):
        print(end)
    for sentence in warnings_of(
        request.problem, request.machines, found[0], request.plan.result.gap
    ):
        print(f"note: {sentence}")


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
    is_priced = figures.usd_per_hour > 0
    return [
        words_of_layout(found.choice, request.problem.cluster),
        *words_of_way(found.choice),
        str(found.choice.microbatch),
        format_duration(figures.step_s),
        format_si(figures.tokens_per_second),
        format_percent(figures.mfu) if figures.mfu else _UNKNOWN,
        format_bytes(figures.peak_bytes),
        f"{figures.usd_per_hour:,.2f}" if is_priced else _UNKNOWN,
        f"{figures.usd_per_tokens:,.2f}" if is_priced else _UNKNOWN,
        format_si(figures.kwh_per_tokens) if figures.kwh_per_hour else _UNKNOWN,
        "<- chosen" if is_chosen else "",
    ]


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
        f"with failures, {expected.interruptions_per_day:.2g} interruptions a day: "
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
        "layouts": [_layout_as_json(request, each) for each in found],
        "notes": [
            *request.notes,
            *filter(None, [end_in_words(request.loaded, request.problem, request.plan.best)]),
            *warnings_of(
                request.problem, request.machines, request.plan.best, request.plan.result.gap
            ),
        ],
    }


def _layout_as_json(request: PlanRequest, found: Found) -> dict[str, Any]:
    return {
        "values": values_of(found.choice),
        "score": found.score,
        "parts": dict(found.cost.parts),
        "memory_parts": [[asdict(s) for s in group.memory] for group in found.cost.groups],
        **request.figures(found).to_json(),
    }
