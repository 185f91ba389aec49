"""How much slower a synchronous group is than its members: order statistics of the jitter.

A step of n pods takes as long as the slowest of n draws. F is the distribution of a pod's time
over its mean, and s the factor of each slow pod. The group's distribution is the product of
F(x/s) over its pods (David and Nagaraja, Order Statistics, 2003, section 2.1). Its mean is exact
for the given ratios: nothing is sampled. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median

from holdfast.errors import DataError
from holdfast_lab.traces.events import EventStream

SHIPPED_SIGMA = 0.114
"""Standard deviation of the logarithm of a pod's time from step to step. The one of ByteDance's
three published jobs whose slowness changes with the step (SE: lengths of sequences) has 0.114."""

_POINTS = 400


@dataclass
class JitterProfile:
    """Times of a pod over its mean, from step to step; each ratio is as likely as any other."""

    ratios: tuple[float, ...]
    source: str
    _known: dict[tuple[float, ...], float] = field(default_factory=dict, repr=False)

    def expected_max(self, factors: Sequence[float]) -> float:
        """Mean of the slowest of independent draws, one for each factor and scaled by it."""
        key = tuple(sorted(factors))
        if key not in self._known:
            self._known[key] = _expected_max(self.ratios, key)
        return self._known[key]


def lognormal_profile(sigma: float = SHIPPED_SIGMA) -> JitterProfile:
    """The shipped generator: a lognormal distribution, at evenly spaced quantiles."""
    if sigma == 0:
        return JitterProfile((1.0,), "no jitter")
    normal = NormalDist(0.0, sigma)
    values = [2.718281828459045 ** normal.inv_cdf((k + 0.5) / _POINTS) for k in range(_POINTS)]
    return JitterProfile(_with_mean_one(values), f"lognormal, sigma {sigma:g}")


def profile_of_trace(stream: EventStream) -> JitterProfile:
    """The jitter of a trace of operations. Each rank's steps are divided by the median of that
    rank: a rank that is always slow is a slow node and no jitter. Raises DataError."""
    ranks = {event.node for event in stream.events if event.kind == "join"}
    factors: dict[str, dict[object, float]] = defaultdict(dict)
    steps: set[object] = set()
    for event in stream.events:
        if event.kind == "slow" and "step" in event.extra:
            factors[event.node][event.extra["step"]] = event.value
            steps.add(event.extra["step"])
    if len(steps) < 2:
        raise DataError(
            "this trace has no two steps in which a rank is slow",
            where=stream.header.source,
            remedy="give a trace of operations, or leave --jitter out",
        )
    ratios: list[float] = []
    for rank in sorted(ranks):
        values = [factors[rank].get(step, 1.0) for step in sorted(steps, key=str)]
        middle = median(values)
        ratios += [value / middle for value in values]
    ratios.sort()
    if len(ratios) > _POINTS:
        ratios = [ratios[int((k + 0.5) / _POINTS * len(ratios))] for k in range(_POINTS)]
    name = f"{len(ranks)} ranks, {len(steps)} steps of {stream.header.source}"
    return JitterProfile(_with_mean_one(ratios), name)


def _with_mean_one(values: Sequence[float]) -> tuple[float, ...]:
    mean = fmean(values)
    return tuple(sorted(value / mean for value in values))


def _expected_max(ratios: tuple[float, ...], factors: tuple[float, ...]) -> float:
    groups: dict[float, int] = {}
    for factor in factors:
        groups[factor] = groups.get(factor, 0) + 1
    points = sorted({ratio * factor for ratio in ratios for factor in groups})
    mean, below, n = 0.0, 0.0, len(ratios)
    for x in points:
        share = 1.0
        for factor, number in groups.items():
            share *= (bisect_right(ratios, x / factor * (1 + 1e-12)) / n) ** number
        mean += x * (share - below)
        below = share
    return mean
