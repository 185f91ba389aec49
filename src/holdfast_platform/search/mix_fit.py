"""From mixtures and their measured losses to the mixture with the least predicted loss.

RegMix (Liu et al. 2024, arXiv 2407.01492) fits a regression on many small runs with random
mixtures, and searches the simplex for its minimum. Here the regression is ridge on one of a few
sets of features of the shares, in logarithms of the loss. Its features and its penalty are those
with the least error of leave-one-out prediction. shares: float64 [runs, sources], each row with sum
1.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.core.seeds import key_seed

Shares = NDArray[np.float64]

HUNDRED = 100
"""Shares are integers with this sum, so that `data.mix` has them exactly."""
DRAWS, STARTS = 20_000, 8
"""Random mixtures whose loss is predicted, and the best ones of them that a search begins at."""
MOVED = (8, 4, 2, 1)
"""Hundredths that a step of that search moves from one source to another."""
FLOOR = 0.01
"""Added to a share before its logarithm."""
PENALTIES = tuple(10.0**power for power in range(-6, 2))
FEATURES = ("linear", "logarithmic", "linear and logarithmic", "quadratic")
LEAST_RUNS = 6


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return the integers with sum HUNDRED that are nearest to the ratio of weights."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * HUNDRED
    floor = np.floor(exact).astype(int)
    for index in np.argsort(floor - exact, kind="stable")[: HUNDRED - floor.sum()]:
        floor[index] += 1
    return [int(value) for value in floor]


def draw_shares(seed: int, number: int, sources: int) -> list[int]:
    """Return the random mixture of a run, in hundredths. Its spread is random as well, so some
    mixtures are near the middle of the simplex and some near its corners."""
    random = np.random.default_rng(key_seed(seed, "mixture", number))
    spread = 10.0 ** random.uniform(-0.5, 0.5)
    return whole_shares(random.dirichlet([spread] * sources).tolist())


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks; equal values share their mean rank."""
    if min(len(set(one)), len(set(other))) < 2:
        return 1.0
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.mean(places[value]) for value in values]


def _features(kind: str, shares: Shares) -> Shares:
    """[n, sources] -> [n, features]"""
    logs = np.log(shares + FLOOR)
    if kind == "quadratic":
        first, second = np.triu_indices(shares.shape[1])
        return np.hstack((shares, shares[:, first] * shares[:, second]))
    parts = {"linear": (shares,), "logarithmic": (logs,)}
    return np.hstack(parts.get(kind, (shares, logs)))


@dataclass(frozen=True)
class MixtureFit:
    """A regression of the logarithm of the loss."""

    features: str  # of FEATURES
    penalty: float
    rank_correlation: float  # of measured losses, and those predicted without their own run
    error: float  # of these predictions: root of the mean square, relative
    mean: Shares  # [features]
    coefficients: Shares  # [features]
    intercept: float

    def predict(self, shares: Shares) -> NDArray[np.float64]:
        """[n, sources] -> losses [n]"""
        moved = _features(self.features, shares) - self.mean
        return np.asarray(np.exp(moved @ self.coefficients + self.intercept))


def fit_losses(shares: Shares, losses: Sequence[float]) -> MixtureFit:
    """Fit the losses of at least LEAST_RUNS mixtures; losses are above 0."""
    fits = [
        _ridge(kind, penalty, shares, np.log(np.asarray(losses)))
        for kind in FEATURES
        for penalty in PENALTIES
    ]
    return min(fits, key=lambda fit: fit.error)


def _ridge(kind: str, penalty: float, shares: Shares, logs: NDArray[np.float64]) -> MixtureFit:
    raw = _features(kind, shares)
    count, mean = len(raw), raw.mean(axis=0)
    scale = np.maximum(raw.std(axis=0), 1e-9)
    x = (raw - mean) / scale
    solve = np.linalg.solve(x.T @ x + penalty * count * np.eye(x.shape[1]), x.T)
    centre = float(logs.mean())
    coefficients = solve @ (logs - centre)
    # Without its own run a prediction is off by its residual / (1 - leverage).
    leverage = np.minimum(np.einsum("nf,fn->n", x, solve) + 1 / count, 1 - 1e-9)
    off = (logs - centre - x @ coefficients) / (1 - leverage)
    return MixtureFit(
        features=kind,
        penalty=penalty,
        rank_correlation=rank_correlation(logs.tolist(), (logs - off).tolist()),
        error=float(np.sqrt(np.mean(off**2))),
        mean=mean,
        coefficients=coefficients / scale,
        intercept=centre,
    )


def best_shares(fit: MixtureFit, limits: Sequence[float], seed: int) -> list[int]:
    """Return the mixture with the least predicted loss, in hundredths.

    limits: the largest share of each source; their sum is at least 1.
    """
    room = np.floor(np.minimum(limits, 1.0) * HUNDRED + 1e-9)
    random = np.random.default_rng(key_seed(seed, "candidates"))
    sources = len(room)
    draws = random.dirichlet([0.7] * sources, DRAWS)
    order = np.argsort(fit.predict(draws), kind="stable")[:STARTS]
    starts = [_limited(np.array(whole_shares(draws[index].tolist())), room) for index in order]
    ends = [_descend(fit, start, room) for start in starts]
    return [int(value) for value in min(ends, key=lambda end: _loss(fit, end))]


def _limited(shares: NDArray[np.int64], room: Shares) -> NDArray[np.int64]:
    """Move what is above a limit to sources with room, the ones with the most room first."""
    shares = np.minimum(shares, room).astype(np.int64)
    while (left := HUNDRED - int(shares.sum())) > 0:
        index = int(np.argmax(room - shares))
        shares[index] += max(1, min(left, int(room[index] - shares[index]) // 2))
    return shares


def _loss(fit: MixtureFit, shares: NDArray[np.int64]) -> float:
    return float(fit.predict(shares[None, :] / HUNDRED)[0])


def _descend(fit: MixtureFit, shares: NDArray[np.int64], room: Shares) -> NDArray[np.int64]:
    """Move hundredths between two sources until no move lowers the predicted loss."""
    pairs = [(a, b) for a in range(len(shares)) for b in range(len(shares)) if a != b]
    while True:
        near = [
            np.array([s - m * (i == a) + m * (i == b) for i, s in enumerate(shares)])
            for m in MOVED
            for a, b in pairs
            if shares[a] >= m and shares[b] + m <= room[b]
        ]
        best = min(near, key=lambda each: _loss(fit, each), default=shares)
        if _loss(fit, best) >= _loss(fit, shares):
            return shares
        shares = best
