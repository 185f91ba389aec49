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
- The rate may change within that time, so the weights follow a linear differential equation. Its
  solution is exact for any time (`_Weights.after`).
- A regime ends once in thirty failures, at any rate. The next rate is near, and less likely the
  further off it is. So a burst is believed after two or three failures, a quiet week after a few
  usual gaps. Old evidence is forgotten at the pace of the machines: within hours in a spot pool,
  within months in a cluster.

The lost time is linear in the rate, so a decision needs the mean of the distribution, and no
quantile. Rates are those of one node. How they grow with the number of nodes differs from fleet to
fleet. If machines fail one by one, twice as many nodes fail twice as often. If a cloud takes back
all of them together, the number does not matter. So there are two hypotheses, an exponent of 1 and
one of 0, and each has a distribution of its own. Both say the same of the number of nodes that the
run had first. They compete as soon as the number changes.

Pure: a value; `with_observation` gives the next one. Time comes in as seconds that have passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, isfinite, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
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

PRIOR_NODE_COUNT_EXPONENT = 0.5
"""Before anything is known, a run on n nodes fails n to this power times as often as one on a
single node. In public spot traces the exponent lies near the middle: a departure takes two nodes in
the mean, and often many."""

NODE_COUNT_EXPONENTS = (0.0, 1.0)
"""Failures follow the number of nodes, relative to the first one, to one of these powers. A mean of
two hypotheses lies between them, so a power between them needs no hypothesis of its own."""

PRIOR_SHAPE = 0.5
"""Shape of the gamma prior, in failures that it is worth. The logarithm of such a variable spreads
by 2.2 either way (the root of the trigamma function), a factor of 9. A rate far below the mean is
learnt by waiting. After a time T without a failure, the mean is shape / (shape x mtbf + T)."""

PRIOR_NODE_MTBF_S = 1.5 * _HOUR_S
"""Seconds between failures of one node before anything is known, the mean of the prior: as in the
worst published spot pool. Too low a rate costs more than too high a one. A high rate is learnt by
losing work, and from the few failures of a short run. A low rate is learnt by waiting, while saves
are a little too frequent for some hours of a long run."""

_MOST_NODE_S = 1e11  # a longer quiet, of over 3,000 years, says no more


@dataclass(slots=True)
class _Weights:
    """The weights after a failure, and at first: an array of shape (exponents, FAILURE_RATES). All
    together add up to one. packed: its bytes. Nothing changes it; `_by_mode` is worked out once."""

    packed: bytes = field(repr=False)
    _by_mode: Array | None = field(default=None, repr=False, compare=False)

    @property
    def by_rate(self) -> Array:
        return np.ndarray(_SHAPE, np.float64, self.packed)

    def after(self, quiet: tuple[float, float]) -> Array:
        """Return the weights by mode, after a quiet of so many node-seconds by exponent.

        A regime of rate r ends at the rate e r. e is 1 / FAILURES_PER_REGIME. The next regime has
        the rate s with the chance C(r, s). So the row w of weights follows this equation.

            dw/dt = w R (e C - (1 + e) I)         R: the rates, on the diagonal

        C is symmetric. With v = w R^(1/2) the matrix is symmetric too. So it has orthogonal modes.
        Each of them falls as exp(-l t).
        """
        if self._by_mode is None:
            self._by_mode = self.by_rate.dot(_TO_MODES)
        low, high = quiet
        if high > _MOST_NODE_S or low > _MOST_NODE_S:
            low, high = min(low, _MOST_NODE_S), min(high, _MOST_NODE_S)
        fall: Array = np.exp(np.array(((low,), (high,))).dot(_MODE_GROWTH))
        fall *= self._by_mode
        return fall


@dataclass(slots=True)
class FailureRate:
    """The knowledge about the rate of failures. Begin with `FailureRate.from_prior`.

    A value that nothing changes. It is not frozen, as that takes thrice as long to make, and a
    replay makes one at each look. A quiet adds to `quiet` alone. A question and a failure work
    it into the weights.
    """

    mtbf: float
    last: _Weights = field(repr=False)  # the weights after the last failure
    quiet: tuple[float, float] = (0.0, 0.0)  # since then, node-seconds at risk by exponent
    first_nodes: float = 0.0  # nodes of the first observation; 0: none yet
    failures: int = 0  # seen so far, for people
    seconds: float = 0.0  # seen so far, for people
    _means: tuple[float, float] | None = field(default=None, repr=False, compare=False)

    @property
    def weights(self) -> tuple[tuple[float, ...], ...]:
        """By exponent, of FAILURE_RATES; together they add up to one."""
        found = self._weights()
        return tuple(map(tuple, (found * (1 / found.sum())).tolist()))

    def _weights(self) -> Array:
        """They add up to less than one after a quiet."""
        if self.quiet == (0.0, 0.0):
            return self.last.by_rate
        found: Array = self.last.after(self.quiet).dot(_FROM_MODES)
        return np.abs(found, out=found)  # rounding leaves some of the least likely below 0

    @staticmethod
    def from_prior(mtbf: float = PRIOR_NODE_MTBF_S) -> FailureRate:
        """Nothing seen yet; `mtbf`: expected seconds between failures of one node."""
        if not (isfinite(mtbf) and mtbf > 0):
            raise ValueError(f"the mean time between failures must be positive, not {mtbf}")
        share = 1 / len(NODE_COUNT_EXPONENTS)
        prior = tuple(weight * share for weight in _gamma_prior_density(mtbf))
        packed = np.array((prior,) * len(NODE_COUNT_EXPONENTS)).tobytes()
        return FailureRate(mtbf, _Weights(packed))

    def failures_per_second(self, nodes: float = 1.0) -> float:
        """Failures a second of a run on `nodes` nodes."""
        if self._means is None:
            # By exponent: failures per node and second, times the weight of that exponent.
            (low, weight), (high, other) = self.last.after(self.quiet).dot(_SUMS).tolist()
            self._means = low / (weight + other), high / (weight + other)
        as_one, each = self._node_factors(nodes)
        return as_one * self._means[0] + each * self._means[1]

    def _node_factors(self, nodes: float) -> tuple[float, float]:
        """By exponent: failures of a run on `nodes` nodes, for one of a single node."""
        first = self.first_nodes or nodes
        at_first = first**PRIOR_NODE_COUNT_EXPONENT
        return at_first, at_first * nodes / first

    def with_observation(
        self, seconds: float, nodes: float = 1.0, failures: int = 0
    ) -> FailureRate:
        """`nodes` nodes were at risk for `seconds`; then so many failures came, at one instant.

        What was foretold and saved in time is no failure: it loses no work. Nodes that go
        together are one failure.
        """
        as_one, each = self._node_factors(nodes)
        seen = seconds if seconds > 0 else 0.0
        quiet = self.quiet[0] + as_one * seen, self.quiet[1] + each * seen
        first, number, seen = self.first_nodes or nodes, self.failures, self.seconds + seen
        now = FailureRate(self.mtbf, self.last, quiet, first, number + failures, seen)
        if not failures:
            return now
        weights = now._weights()
        for _ in range(failures):
            low, high = weights.dot(_RATES).tolist()
            total = as_one * low + each * high
            factors = np.array(((as_one / total,), (each / total,)))
            weights = weights * factors.dot(_RATES_ROW)
        now.last, now.quiet = _Weights(weights.tobytes()), (0.0, 0.0)
        return now

    def evidence_on(self, nodes: float) -> str:
        """For the reason of a decision: '3 failures in 2 h on 2 nodes'."""
        count = f"{self.failures or 'no'} failure{'s' if self.failures > 1 else ''}"
        where = f"{nodes:g} {'node' if nodes == 1 else 'nodes'}"
        return f"{count} in {format_duration(self.seconds)} on {where}"

    def to_json(self) -> dict[str, Any]:
        return {
            "mtbf": self.mtbf,
            "weights": self.last.by_rate.tolist(),
            "quiet": list(self.quiet),
            "first_nodes": self.first_nodes,
            "failures": self.failures,
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> FailureRate:
        """Read the value; restart from the prior if it has other rates or hypotheses."""
        prior = FailureRate.from_prior(float(value["mtbf"]))
        found = value["weights"]
        shapes = [len(each) if isinstance(each, list) else 0 for each in found]
        if shapes != [len(each) for each in prior.weights]:
            return prior
        low, high = value.get("quiet", (0.0, 0.0))
        return FailureRate(
            prior.mtbf,
            _Weights(np.array([list(map(float, each)) for each in found]).tobytes()),
            (float(low), float(high)),
            float(value["first_nodes"]),
            int(value["failures"]),
            float(value["seconds"]),
        )


def _quiet_modes() -> tuple[Array, Array, Array]:
    """The modes of `_Weights.after`: growth, to modes, from modes.

    Growth is per second, below 0, of shape (1, modes). Two matrices lead from weights to modes and
    back. Their shapes are (rates, modes) and (modes, rates).
    """
    ends = 1 / FAILURES_PER_REGIME
    root = np.sqrt(FAILURE_RATES)
    # The chance of each next rate: it falls to both sides by the same factor from rate to rate.
    fall = exp(-log(_RATE_FACTOR) / MEAN_LOG_RATE_JUMP)
    number = np.arange(len(FAILURE_RATES))
    changes: Array = fall ** np.abs(number[:, None] - number) * (1 - fall) / (1 + fall)
    change = ends * changes - (1 + ends) * np.eye(len(root))
    growth, modes = np.linalg.eigh(root[:, None] * change * root)
    return growth[None, :], root[:, None] * modes, modes.T / root


_SHAPE = len(NODE_COUNT_EXPONENTS), len(FAILURE_RATES)
_RATES = np.array(FAILURE_RATES)
_RATES_ROW = _RATES[None, :]
_MODE_GROWTH, _TO_MODES, _FROM_MODES = _quiet_modes()
_SUMS = _FROM_MODES.dot(np.stack([_RATES, np.ones(len(_RATES))], axis=1))
"""From modes to the sum of rates, and to that of weights: of shape (modes, 2)."""


def _gamma_prior_density(mtbf: float) -> tuple[float, ...]:
    """The prior's density over the logarithm of the rate, at each of RATES."""
    scale = PRIOR_SHAPE * mtbf
    density = [rate**PRIOR_SHAPE * exp(-scale * rate) for rate in FAILURE_RATES]
    total = sum(density)
    return tuple(each / total for each in density)


def format_duration(seconds: float) -> str:
    """'40 ms', '16.5 s', '12 min', '3.4 h', '5 days', 'ever': three digits at most."""
    if seconds == float("inf"):
        return "ever"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"
