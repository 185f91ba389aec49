"""Decides whether a run stops because of what its steps report (`train.stop`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean


@dataclass(frozen=True)
class StopRule:
    """Ends a run by the mean of a metric over its newest steps. One limit is given."""

    metric: str  # loss, grad_norm, or a name in the steps' metrics
    steps: int  # length of the mean
    below: float | None = None
    above: float | None = None
    falls: float | None = None  # by so much below the best mean so far
    is_failure: bool = False


@dataclass(frozen=True)
class StopDecision:
    """Why a run stops. sentence: without a place."""

    rule: int  # number of the rule
    sentence: str
    is_failure: bool


@dataclass
class _Watch:
    """One rule with the values that count for it."""

    rule: StopRule
    values: dict[int, float] = field(default_factory=dict)  # step -> value
    best: float = -inf  # highest mean so far

    def add(self, step: int, value: float) -> str:
        """Return why the run stops, or ""."""
        rule = self.rule
        self.values[step] = value  # a step that is done again replaces itself
        while len(self.values) > rule.steps:
            del self.values[min(self.values)]
        if len(self.values) < rule.steps:
            return ""
        mean = fmean(self.values.values())
        said = f"{rule.metric} is {mean:.4g} in the mean of {rule.steps} steps"
        if rule.below is not None and mean < rule.below:
            return f"{said}, below {rule.below:g}"
        if rule.above is not None and mean > rule.above:
            return f"{said}, above {rule.above:g}"
        if rule.falls is not None and self.best - mean > rule.falls:
            return f"{said}, more than {rule.falls:g} below its best mean {self.best:.4g}"
        self.best = max(self.best, mean)
        return ""


class StopRules:
    """All rules of a run, with what they need of its steps."""

    def __init__(self, rules: Sequence[StopRule]) -> None:
        self._watches = [_Watch(rule) for rule in rules]

    def add(self, step: int, values: Mapping[str, float]) -> StopDecision | None:
        """Take what a step reports. Return the first rule that ends the run."""
        found = None
        for number, watch in enumerate(self._watches):
            if watch.rule.metric not in values:
                continue
            why = watch.add(step, values[watch.rule.metric])
            if why and found is None:
                found = StopDecision(number, why, watch.rule.is_failure)
        return found
