"""What the seconds of a job's step are spent on, on its nodes. Closed form. Pure.

It separates what a rank waits for:

    uneven       microbatches that do not divide by the pods of a shrunk job
    jitter       the slowest of a group that are all healthy: straggler amplification
    slow_node    what slow nodes add to that: the amplification by their factor
    collective   sums of gradients that no backward hides, in the best place
    slow_link    what the sums cost more here, across racks or zones
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median

from holdfast.core.sharding.reduction_tree import deal
from holdfast.errors import DataError
from holdfast.plan.cost.collectives import allreduce_s
from holdfast.plan.hardware.link import Link
from holdfast_lab.admission.fabric import Fabric
from holdfast_lab.admission.jobs import Job
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
        """Mean of the slowest of independent draws, one for each factor and scaled by it.

        F is the distribution of a pod's time over its mean, and s a factor. The group's
        distribution is the product of F(x/s) over its pods (David and Nagaraja, Order Statistics,
        2003, section 2.1). Its mean is exact for the given ratios: nothing is sampled."""
        key = tuple(sorted(factors))
        if key not in self._known:
            ratios = self.ratios
            groups: dict[float, int] = {}
            for factor in key:
                groups[factor] = groups.get(factor, 0) + 1
            points = sorted({ratio * factor for ratio in ratios for factor in groups})
            mean, below, n = 0.0, 0.0, len(ratios)
            for x in points:
                share = 1.0
                for factor, number in groups.items():
                    share *= (bisect_right(ratios, x / factor * (1 + 1e-12)) / n) ** number
                mean += x * (share - below)
                below = share
            self._known[key] = mean
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


# --- steps ----------------------------------------------------------------------------------------
PARTS = ("useful", "uneven", "jitter", "slow_node", "collective", "slow_link")
"""Labels of the seconds of a step, in the order of `StepTime.parts`."""

BUCKET_BYTES = 25 * 2**20
"""The last bucket of gradients (torch's default size), which no backward hides."""

_BACKWARD = 2 / 3  # of a microbatch's computation


@dataclass(frozen=True)
class StepTime:
    """parts: seconds by `PARTS`."""

    parts: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.parts)


@dataclass
class StepModel:
    """Step times of jobs on the nodes of a cluster. slow: factor of each slow node by number."""

    fabric: Fabric
    jitter: JitterProfile
    slow: dict[int, float]

    def ideal_s(self, job: Job) -> float:
        """Seconds of a step on all pods in the best place, with jitter and no slow node."""
        compute = job.compute_s * self.jitter.expected_max((1.0,) * job.pods)
        return compute + self._exposed_s(job, job.pods, self._best_link(job, job.pods))

    def step(self, job: Job, nodes: Sequence[int]) -> StepTime:
        """The step of a job whose pods stand on these nodes, one entry for each pod."""
        n = len(nodes)
        compute = job.compute_s * _largest_share(job, n) / job.microbatches
        useful = job.compute_s * job.pods / n
        healthy = self.jitter.expected_max((1.0,) * n)
        actual = self.jitter.expected_max([self.slow.get(node, 1.0) for node in nodes])
        best = self._exposed_s(job, n, self._best_link(job, n))
        here = self._exposed_s(job, n, self.fabric.ring_link(nodes)) if n > 1 else 0.0
        return StepTime(
            (
                useful,
                compute - useful,
                compute * (healthy - 1),
                compute * (actual - healthy),
                best,
                max(0.0, here - best),
            )
        )

    def _best_link(self, job: Job, pods: int) -> Link:
        return self.fabric.best_link(pods, job.devices)

    def _exposed_s(self, job: Job, pods: int, link: Link) -> float:
        """Seconds of the sum that the backward of the last microbatch does not hide."""
        if pods == 1 or job.gradient_bytes == 0:
            return 0.0
        last = min(job.gradient_bytes, BUCKET_BYTES / job.devices)
        hidden = _BACKWARD * job.compute_s / job.microbatches
        rest = allreduce_s(link, job.gradient_bytes - last, pods)
        return allreduce_s(link, last, pods) + max(0.0, rest - hidden)


def _largest_share(job: Job, pods: int) -> int:
    """Microbatches of the pod that has most, as the runtime deals them."""
    if pods == job.pods:
        return job.microbatches
    shares = deal(job.microbatches * job.pods, pods)
    return max(len(share) for share in shares)
