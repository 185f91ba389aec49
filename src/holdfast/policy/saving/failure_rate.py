"""A running estimate of a run's rate of failures, from past ones.

Failures of spot machines and of clusters come in bursts. Their rate changes over a day: by a factor
of five within the hours of one published spot trace. An average over all failures ever seen follows
too late. One over the last hours says nothing about a cluster that breaks once a week. So the rate
is a hidden state that may change. The forward algorithm of a hidden Markov model carries its
distribution along (Rabiner, Proceedings of the IEEE 77(2), 1989):

- The state is one of 52 rates, each half as high again as the one before. The distribution begins
  as a gamma prior whose mean the run file gives.
- A time without a failure multiplies the weight of rate r by the chance of that, exp(-r x time). A
  failure multiplies it by r.
- A regime ends once in thirty failures, at any rate. The next rate is near, and less likely the
  further off it is. So a burst is believed after two or three failures, a quiet week after a few
  usual gaps. Old evidence is forgotten at the pace of the machines: within hours in a spot pool,
  within months in a cluster.

The lost time is linear in the rate, so a decision needs the mean of the distribution, and no
quantile. Rates are those of one node. A run on n nodes fails more often by the square root of n, so
a run that grows is at more risk at once.

Pure: a value; `after` gives the next one. Time comes in as seconds that have passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log, pow
from typing import Any

_HOUR_S = 3600.0

_RATE_FACTOR = 1.5
FAILURE_RATES = tuple(1e-9 * _RATE_FACTOR**k for k in range(52))
"""Failures per node and second: from one in thirty years to one a second. No rate is further than a
factor of 1.23 from one of these, an error that costs half a per cent of the lost time."""

FAILURES_PER_REGIME = 30
"""Failures in the mean until the rate changes. Within a regime the rate is then known to about a
fifth (one over the root of 30). That error costs half a per cent of the lost time. Rates that
change over a day are followed, for machines with such rates fail many times a day."""

MEAN_LOG_RATE_JUMP = 1.0
"""Size of a change of the rate: the mean of the absolute change of its logarithm. The hours of a
spot trace differ by a factor of e. A hundredfold change is still believed after two or three
failures, as each of them then tells more than the leap costs."""

NODE_COUNT_EXPONENT = 0.5
"""A run on n nodes fails n to this power times as often as one on a single node. The exponent is 1
if machines fail independently, and 0 if all fail together. In public spot traces it lies near the
middle: a departure takes two nodes in the mean, and often many."""

PRIOR_SHAPE = 0.25
"""Shape of the gamma prior, in failures that it is worth. The logarithm of such a variable spreads
by 4.1 either way (the root of the trigamma function), a factor of 60. Published rates lie between 4
failures in 1,000 node-days (a large cluster) and 15 in one (a spot pool)."""

PRIOR_NODE_MTBF_S = 1.5 * _HOUR_S
"""Seconds between failures of one node before anything is known, the mean of the prior: as in the
worst published spot pool. Too low a rate costs more than too high a one. A high rate is learnt by
losing work, and from the few failures of a short run. A low rate is learnt by waiting, while saves
are a little too frequent for some hours of a long run."""

_MAX_FAILURES_PER_UPDATE = 0.25  # failures expected within a piece of time that is taken in one go


@dataclass(frozen=True)
class FailureRate:
    """The knowledge about the rate of failures. Begin with `FailureRate.from_prior`.

    weights: of RATES, adding up to one. failures, seconds: seen so far, for people.
    """

    mtbf: float
    weights: tuple[float, ...]
    failures: int = 0
    seconds: float = 0.0

    @staticmethod
    def from_prior(mtbf: float = PRIOR_NODE_MTBF_S) -> FailureRate:
        """Nothing seen yet; `mtbf`: expected seconds between failures of one node."""
        if not (isfinite(mtbf) and mtbf > 0):
            raise ValueError(f"the mean time between failures must be positive, not {mtbf}")
        return FailureRate(mtbf, _gamma_prior_density(mtbf))

    def failures_per_second(self, nodes: float = 1.0) -> float:
        """Failures a second of a run on `nodes` nodes."""
        return pow(nodes, NODE_COUNT_EXPONENT) * _mean_rate(self.weights)

    def with_observation(
        self, seconds: float, nodes: float = 1.0, failures: int = 0
    ) -> FailureRate:
        """`nodes` nodes were at risk for `seconds`; then so many failures came, at one instant.

        What was foretold and saved in time is no failure: it loses no work. Nodes that go
        together are one failure.
        """
        weights, left = list(self.weights), pow(nodes, NODE_COUNT_EXPONENT) * seconds
        while left > 0:
            # Pieces in which hardly anything is expected: what is believed changes between them.
            piece = min(left, _MAX_FAILURES_PER_UPDATE / _mean_rate(weights))
            weights, left = _update_without_failure(weights, piece), left - piece
        for _ in range(failures):
            weights = _normalise([w * rate for w, rate in zip(weights, FAILURE_RATES, strict=True)])
        return replace(
            self,
            weights=tuple(weights),
            failures=self.failures + failures,
            seconds=self.seconds + max(0.0, seconds),
        )

    @property
    def evidence(self) -> str:
        """For the reason of a decision: '3 failures in 2 h'."""
        if not self.failures:
            return f"no failure in {format_duration(self.seconds)}"
        noun = "failure" if self.failures == 1 else "failures"
        return f"{self.failures} {noun} in {format_duration(self.seconds)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "mtbf": self.mtbf,
            "weights": list(self.weights),
            "failures": self.failures,
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> FailureRate:
        """Read the value; restart from the prior if it has other rates."""
        mtbf, weights = float(value["mtbf"]), tuple(map(float, value["weights"]))
        if len(weights) != len(FAILURE_RATES):
            return FailureRate.from_prior(mtbf)
        return FailureRate(mtbf, weights, int(value["failures"]), float(value["seconds"]))


def _mean_rate(weights: Sequence[float]) -> float:
    return sum(weight * rate for weight, rate in zip(weights, FAILURE_RATES, strict=True))


def _update_without_failure(weights: Sequence[float], passed: float) -> list[float]:
    """Return the weights after `passed` seconds of one node without a failure. In that time a
    regime of rate r may have ended at the rate r / REGIME. A rate that came in meanwhile had to be
    quiet for the rest of the time only. That factor is the mean of exp(-r t) over it."""
    stayed, moved = [], []
    for weight, rate in zip(weights, FAILURE_RATES, strict=True):
        left = weight * exp(-rate * passed * (1 + 1 / FAILURES_PER_REGIME))
        # out of the regime, quiet until then
        moved.append((weight - left) / (1 + FAILURES_PER_REGIME))
        stayed.append(left)
    for index, (share, rate) in enumerate(
        zip(_spread_regime_change(moved), FAILURE_RATES, strict=True)
    ):
        at_risk = rate * passed
        stayed[index] += share * ((1 - exp(-at_risk)) / at_risk if at_risk > 1e-9 else 1.0)
    return _normalise(stayed)


def _spread_regime_change(weights: Sequence[float]) -> list[float]:
    """Each weight dealt out to both sides, falling by the same factor from rate to rate."""
    fall = exp(-log(_RATE_FACTOR) / MEAN_LOG_RATE_JUMP)
    out = [0.0] * len(weights)
    for order in (range(len(weights)), range(len(weights) - 1, -1, -1)):
        carried = 0.0
        for index in order:
            carried = carried * fall + weights[index]
            out[index] += carried
    whole = (1 + fall) / (1 - fall)
    return [(o - w) / whole for o, w in zip(out, weights, strict=True)]


def _gamma_prior_density(mtbf: float) -> tuple[float, ...]:
    """The prior's density over the logarithm of the rate, at each of RATES."""
    scale = PRIOR_SHAPE * mtbf
    return tuple(_normalise([rate**PRIOR_SHAPE * exp(-scale * rate) for rate in FAILURE_RATES]))


def _normalise(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def format_duration(seconds: float) -> str:
    """'40 ms', '16.5 s', '12 min', '3.4 h', '5 days', 'ever': three digits at most."""
    if seconds == float("inf"):
        return "ever"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"
