"""The last lines of a plan: layouts that are better by another objective or another key."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.cli.plan_request import PlanRequest
from holdfast.errors import UserError
from holdfast.plan.auto.objective import objective_of
from holdfast.plan.auto.search_run import plan_run
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.explain.figures import words_of_layout
from holdfast.plan.hardware.devices import DeviceType, device_named
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.search.limits import Found
from holdfast.report.formatting import format_si

_BETTER = 0.01  # Share of a score by which another layout must be better to be named

_ENDS = {"fastest": "time", "cheapest": "tokens_per_usd", "most robust": "goodput"}
"""What the last lines of a plan name, and the objective that finds it."""


def alternatives_of(request: PlanRequest) -> dict[str, tuple[str, Found | None]]:
    """By name, (the override that chooses it, the fastest, cheapest or most robust layout). None:
    it is the chosen one. A named microbatch has a line if a free one is faster, and fp32
    one if bf16 is."""
    pools, chosen = request.problem.cluster.pools, request.plan.best
    asked = {name: ("plan.objective", word) for name, word in _ENDS.items()}
    if any(pool.usd_per_hour is None for pool in pools):
        del asked["cheapest"]
    if not any(pool.losses_per_day for pool in pools):
        del asked["most robust"]
    if request.plan.limits.microbatch:
        asked["another microbatch"] = ("train.microbatch_size", "auto")
    if request.loaded.config.train.precision == "fp32" and _gains_from_bf16(request.problem):
        asked["another precision"] = ("train.precision", "bf16")
    out: dict[str, tuple[str, Found | None]] = {}
    for name, (key, word) in asked.items():
        changed = request.loaded.with_values({key: (0 if word == "auto" else word, "asked")})
        try:
            found = plan_run(changed, request.machines, cache=request.cache).best
        except UserError:
            continue
        score = objective_of(changed, request.problem, None)
        is_better = found.score < score(chosen.choice, chosen.cost) * (1 - _BETTER)
        if is_better or name in _ENDS:
            out[name] = f"{key}={word}", found if is_better else None
    return out


def print_alternatives(request: PlanRequest, command: Callable[[str], str]) -> None:
    """Print layouts that are better by another objective, each with the command that chooses it.
    command: of an override."""
    found = alternatives_of(request)
    if same := [name for name, (_, each) in found.items() if each is None]:
        print(f"{', '.join(same)}: this layout")
    for name, (override, each) in found.items():
        if each is not None:
            figures = request.figures(each)
            words = [words_of_layout(each.choice, request.problem.cluster)]
            words.append(f"{format_si(figures.tokens_per_second)} tokens/s")
            if figures.usd_per_tokens is not None:
                words.append(f"${figures.usd_per_tokens:,.2f} per 1e9 tokens")
            if name == "most robust":
                expected = GoodputModel(request.problem).expected(each.choice, each.cost)
                words.append(f"{format_si(expected.tokens_per_s)} tokens/s with failures")
            print(f"{name}: {', '.join(words)}: {command(override)}")


def _gains_from_bf16(problem: Problem) -> bool:
    """Return True if all devices have bf16, and one of them computes faster in it than in fp32."""
    names = {pool.device for pool in problem.cluster.pools}
    devices = [device_named(name, problem.devices) for name in names]
    rates = [(_rate(each, "bf16"), _rate(each, "fp32")) for each in devices if each.has_bf16]
    is_complete = len(rates) == len(devices) and all(bf16 > 0 for bf16, _ in rates)
    return is_complete and any(bf16 > fp32 for bf16, fp32 in rates)


def _rate(device: DeviceType, precision: str) -> float:
    """FLOP/s that products reach; 0: no peak is known."""
    return device.flops.get(precision, 0.0) * device.reached(precision).compute
