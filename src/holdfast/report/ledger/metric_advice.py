"""The metrics of an objective over a run, and advice about those outside their healthy range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

NEWEST = 20
"""Steps whose mean is compared with a range."""


@dataclass(frozen=True)
class HealthyRange:
    """The range in which a metric is usually well, as axolotl names it. It is advice alone."""

    low: float | None = None
    high: float | None = None
    below: str = ""  # what a mean below `low` means
    above: str = ""  # what a mean above `high` means


HEALTHY: Mapping[str, HealthyRange] = {
    "frac_reward_zero_std": HealthyRange(
        high=0.8,
        above="most groups have one reward for all completions, and teach nothing: use prompts "
        "that are neither too easy nor too hard, or rollout.filter no_variance",
    ),
    "entropy": HealthyRange(
        0.05,
        0.5,
        "the policy hardly tries anything else: lower the learning rate, or raise "
        "objective.entropy_coef or objective.beta",
        "the policy is close to noise: fine-tune it longer before, or lower the learning rate",
    ),
    "kl": HealthyRange(
        high=0.5,
        above="the policy leaves its reference (above 2: it has left it): raise objective.beta, or "
        "lower the learning rate",
    ),
    "completions/clipped_ratio": HealthyRange(
        high=0.8, above="most completions end at rollout.max_tokens: raise it"
    ),
}


@dataclass(frozen=True)
class MetricSummary:
    """A metric over a run."""

    name: str
    first: float  # mean of the first steps that have it
    last: float  # mean of the newest ones
    advice: str = ""  # "" in its healthy range, or if it has none


def summarise_metrics(steps: Sequence[Mapping[str, float]]) -> tuple[MetricSummary, ...]:
    """Return each metric of the steps, in the order in which they come. steps: metrics of each."""
    values: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return tuple(
        MetricSummary(name, fmean(seen[:NEWEST]), last := fmean(seen[-NEWEST:]), advise(name, last))
        for name, seen in values.items()
    )


def advise(name: str, mean: float) -> str:
    """Return what a mean outside the healthy range of a metric says; "" inside."""
    healthy = HEALTHY.get(name, HealthyRange())
    said = f"{name} is {mean:.3g} in the mean of the last steps"
    if healthy.low is not None and mean < healthy.low:
        return f"{said}, below {healthy.low:g}: {healthy.below}"
    if healthy.high is not None and mean > healthy.high:
        return f"{said}, above {healthy.high:g}: {healthy.above}"
    return ""
