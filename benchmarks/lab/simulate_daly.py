"""The engine against Daly's closed form: random failures, one tier, a fixed interval.

    python -m benchmarks.lab.simulate_daly

Daly (FGCS 22(3), 2006) gives the expected wall time of useful work T. The interval is tau, a save
costs d, a restart R, and M is the mean time between failures. Failures may also hit saves and
restarts:

    M e^(R/M) (e^((tau + d)/M) - 1) T / tau

For each setting the table has the wall time of the engine over it (bar: within 1 %). It also has
the best interval of a sweep over the formula's best (bar: within 5 %). The sweep goes in steps of
6 % around the formula's best, with common failures. The curve is flat there, so a parabola through
all points gives the minimum.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import exp, expm1, log

from benchmarks.lab.published_runs import RestartFromSave
from benchmarks.runtime.interrupting import run_main
from holdfast.policy.saving.interval import daly_interval
from holdfast_lab.engine.interfaces import Costs
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.traces.events import TraceEvent

SETTINGS = (
    (3_600.0, 20.0, 60.0),
    (14_400.0, 60.0, 300.0),
    (86_400.0, 30.0, 600.0),
    (3_600.0, 120.0, 300.0),
)
"""M, d and R in seconds."""
FAILURES = 4_000
SWEPT = 1_500
"""Failures of a wall time, and of each point of a sweep."""
STEP = 1.06
POINTS = range(-4, 5)


def failures(mean: float, seed: int) -> Iterator[TraceEvent]:
    draw, at = random.Random(f"{seed}/daly"), 0.0
    yield TraceEvent(0.0, "join", "job", value=1.0)
    while True:
        at += draw.expovariate(1 / mean)
        yield TraceEvent(at, "fail", "job")
        yield TraceEvent(at + 1e-6, "recover", "job", value=1.0)


def wall_over_work(
    mean: float, save: float, restart: float, interval: float, number: int = FAILURES, seed: int = 0
) -> float:
    cost = linear_cost(1, 1.0, 0.0, Costs())
    policy = RestartFromSave(cost, interval, save, restart)
    simulation = Simulation(cost, policy, Limits(number * mean))
    ledger = simulation.run(failures(mean, seed))
    return ledger.wall_s / ledger.tokens


def formula(mean: float, save: float, restart: float, interval: float) -> float:
    return mean * exp(restart / mean) * expm1((interval + save) / mean) / interval


def best_by_formula(mean: float, save: float) -> float:
    """The minimum of the closed form, by bisection of its derivative's sign."""
    low, high = 1e-3 * mean, 10 * mean
    for _ in range(200):
        middle = (low + high) / 2
        rises = formula(mean, save, 0, middle * 1.0001) > formula(mean, save, 0, middle)
        low, high = (low, middle) if rises else (middle, high)
    return low


def best_by_sweep(mean: float, save: float, restart: float, around: float, seed: int) -> float:
    places = [around * STEP**power for power in POINTS]
    costs = [wall_over_work(mean, save, restart, each, SWEPT, seed) for each in places]
    return exp(_vertex([log(each) for each in places], costs))


def _vertex(xs: list[float], ys: list[float]) -> float:
    """The lowest point of the parabola that fits best (least squares)."""
    middle = sum(xs) / len(xs)
    us = [x - middle for x in xs]
    s2 = sum(u**2 for u in us)
    s4 = sum(u**4 for u in us)
    mean = sum(ys) / len(ys)
    slope = sum(u * y for u, y in zip(us, ys, strict=True)) / s2
    bend = sum((u**2 - s2 / len(us)) * (y - mean) for u, y in zip(us, ys, strict=True))
    bend /= s4 - s2**2 / len(us)
    return middle - slope / (2 * bend) if bend > 0 else middle


def main() -> int:
    print("     M      d      R   tau s  wall/Daly   best: sweep  formula   ratio  Daly's")
    worst_wall, worst_best = 0.0, 0.0
    for mean, save, restart in SETTINGS:
        best = best_by_formula(mean, save)
        for factor in (0.5, 1.0, 3.0):
            tau = best * factor
            ratio = wall_over_work(mean, save, restart, tau) / formula(mean, save, restart, tau)
            worst_wall = max(worst_wall, abs(ratio - 1))
            print(f"{mean:>6.0f} {save:>6.0f} {restart:>6.0f} {tau:>7.0f}  {ratio:.4f}", end="")
            if factor == 1.0:
                swept = best_by_sweep(mean, save, restart, best, 1)
                worst_best = max(worst_best, abs(swept / best - 1))
                own = daly_interval(save, 1 / mean)
                print(f"      {swept:>10.0f}  {best:>7.0f}  {swept / best:.3f}  {own:.0f}", end="")
            print()
    print(f"worst: wall time {worst_wall:.2%} off (bar 1 %), ", end="")
    print(f"best interval {worst_best:.2%} off (bar 5 %)")
    return 0


if __name__ == "__main__":
    run_main(main)
