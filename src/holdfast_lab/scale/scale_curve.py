"""How a run scales: the best layout on 8, 16, ... devices, and where more devices stop to pay.

The batch is the run's, so more devices share the same work (strong scaling). `kept` is the same
curve for a run that keeps the degrees of its smallest size and only adds replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.errors import LayoutError
from holdfast.layout import AXES
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem, StepCost
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.objective.energy import COMPUTING, WAITING, pools_without_price, usd_per_hour
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.objectives import TOKENS
from holdfast.plan.objective.recovery_costs import RecoveryCosts
from holdfast.plan.search.search import Found, Limits, search

SIZES = tuple(2**power for power in range(3, 15))
"""Devices: 8 to 16,384."""
KNEE_GAIN = 1.5
"""A doubling of devices pays if throughput grows by at least this factor: half of what is added."""


@dataclass(frozen=True)
class Point:
    """One size. exposed: share of a step in which a device waits for communication; bubble: for
    other stages. available: expected throughput with failures, of that without. usd: of 1e9
    tokens; None: the pool has no price."""

    devices: int
    choice: Choice
    step_s: float
    tokens_per_s: float
    exposed: float
    bubble: float
    available: float
    usd: float | None


@dataclass(frozen=True)
class Curve:
    """points: sizes on which a layout fits, rising. missing: why the rest has none."""

    points: tuple[Point, ...]
    missing: dict[int, str]

    def efficiency(self, point: Point) -> float:
        """Tokens a second of a device, of the most that one reaches at any size."""
        most = max(each.tokens_per_s / each.devices for each in self.points)
        return point.tokens_per_s / point.devices / most

    @property
    def knee(self) -> Point | None:
        """The last size up to which each doubling pays; None: no size has a layout."""
        found: Point | None = None
        for point in self.points:
            if found is not None:
                added = point.devices / found.devices - 1
                if point.tokens_per_s < found.tokens_per_s * (1 + (KNEE_GAIN - 1) * added):
                    return found
            found = point
        return found


def shown_knee(curve: Curve) -> Point | None:
    """The knee, unless it is the largest size that was searched."""
    knee = curve.knee
    return None if knee is None or knee == curve.points[-1] else knee


def scale_curve(
    problem: Problem,
    limits: Limits,
    sizes: Sequence[int] = SIZES,
    costs: RecoveryCosts | None = None,
    on_size: Callable[[int], None] = lambda devices: None,
    allows: Callable[[Choice], bool] = lambda choice: True,
) -> Curve:
    """Search the best layout by time on each size, made of nodes of the cluster's first pool."""
    points, missing = [], {}
    for devices in sizes:
        on_size(devices)
        part = _with_devices(problem, devices)
        if part is None:
            missing[devices] = "no complete nodes"
            continue
        try:
            best = search(part, limits, allows=allows).best
        except LayoutError as error:
            missing[devices] = error.message
            continue
        points.append(_point(part, best, devices, costs or RecoveryCosts()))
    return Curve(tuple(points), missing)


def kept_curve(
    problem: Problem,
    limits: Limits,
    curve: Curve,
    allows: Callable[[Choice], bool] = lambda choice: True,
) -> Curve:
    """The curve with the degrees of the smallest size, and more replicas."""
    if not curve.points:
        return curve
    group = curve.points[0].choice.replicas[0]
    same = limits.with_degrees(dict(zip(AXES, group.mesh_shape, strict=True)))
    return scale_curve(problem, same, [each.devices for each in curve.points], allows=allows)


def _with_devices(problem: Problem, devices: int) -> Problem | None:
    pool = problem.cluster.pools[0]
    if devices < pool.devices:
        smaller = replace(pool, nodes=1, devices=devices)
    elif devices % pool.devices:
        return None
    else:
        smaller = replace(pool, nodes=devices // pool.devices)
    # Fewer nodes than a rack have are in one rack.
    in_racks = replace(smaller, burst=min(smaller.burst, smaller.nodes))
    return replace(problem, cluster=Cluster((in_racks,)))


def _point(problem: Problem, best: Found, devices: int, costs: RecoveryCosts) -> Point:
    rate = problem.workload.step_tokens / best.cost.step_s
    expected = GoodputModel(problem, costs).expected(best.choice, best.cost)
    hourly = usd_per_hour(problem.cluster, best.choice)
    return Point(
        devices,
        best.choice,
        best.cost.step_s,
        rate,
        _share(best.cost, lambda part: part not in (*COMPUTING, *WAITING)),
        _share(best.cost, lambda part: part in WAITING),
        expected.availability,
        None if pools_without_price(problem.cluster) else hourly / 3600 / rate * TOKENS,
    )


def _share(cost: StepCost, counts: Callable[[str], bool]) -> float:
    return sum(s for part, s in cost.parts.items() if counts(part)) / cost.step_s
