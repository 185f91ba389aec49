"""What the seconds of a job's step are spent on, on its nodes. Closed form. Pure.

It separates what a rank waits for:

    uneven       microbatches that do not divide by the pods of a shrunk job
    jitter       the slowest of a group that are all healthy: straggler amplification
    slow_node    what slow nodes add to that: the amplification by their factor
    collective   sums of gradients that no backward hides, in the best place
    slow_link    what the sums cost more here, across racks or zones
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.sharding.reduction_tree import deal
from holdfast.plan.cost.collectives import allreduce_s
from holdfast.plan.hardware.link import Link
from holdfast_lab.admission.fabric import Fabric
from holdfast_lab.admission.jobs import Job
from holdfast_lab.admission.stragglers import JitterProfile

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
