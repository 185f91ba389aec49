"""Rules that combine the changes of learners of which some may be wrong.

A fault or a liar moves a mean to any place. These rules bound what a minority can do. All are
functions of the changes alone, row by row in the order of the learners, so every rank gets the same
bits. x: [learners, n].

    median            the middle value of each coordinate, or the mean of the two in the middle
    trimmed_mean      of each coordinate, without the `faulty` smallest and largest
                      (Yin et al., 2018)
    geometric_median  the point with the least sum of distances, by Weiszfeld's iteration
                      (Pillutla et al., 2022)
    krum              the change that is nearest to its learners - faulty - 1 nearest ones
                      (Blanchard et al., 2017)
    multi_krum        the mean of the learners - faulty best by that score
    centred_clipping  start + the mean of what leads away from it, each cut to a radius
                      (Karimireddy et al., 2021)

A change that is not finite is left out before. Each one counts as one of the `faulty` ones.

`rda` bounds nothing. It keeps the length of changes that point in unlike directions, whose mean is
shorter than each of them (Decoupled DiLoCo, 2604.21428).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

_WEISZFELD_ITERATIONS = 32
_CLIPPING_ITERATIONS = 5


def combine(rule: str, changes: Tensor, faulty: int) -> Tensor:
    """Return what a rule of the run file makes of the changes; NaN if none of them is finite.

    changes: [learners, n] -> [n]. Raises ValueError for an unknown rule.
    """
    x = changes[torch.isfinite(changes).all(1)]
    if not len(x):
        return torch.full_like(changes[0], torch.nan)
    left = max(0, min(faulty - (len(changes) - len(x)), (len(x) - 1) // 2))
    if rule == "median":
        return median(x)
    if rule == "trimmed_mean":
        return trimmed_mean(x, left)
    if rule == "geometric_median":
        return geometric_median(x, _WEISZFELD_ITERATIONS, 1e-12)
    if rule == "krum":
        return krum(x, left)
    if rule == "multi_krum":
        return multi_krum(x, left)
    if rule == "centred_clipping":
        middle = median(x)
        radius = float(median(torch.linalg.vector_norm(x - middle, dim=1)[:, None]))
        return centred_clipping(x, middle, radius, _CLIPPING_ITERATIONS)
    raise ValueError(f"no rule {rule!r}")


def rda(x: Tensor, sizes: Sequence[int], plain: Collection[int]) -> Tensor:
    """Return for each tensor the mean norm of its changes, along the mean of their directions.

    x: [learners, n] -> [n]. sizes: values of each tensor, in their order in x. plain: the places of
    tensors that get the mean.
    """
    results = []
    for place, part in enumerate(torch.split(x, list(sizes), dim=1)):
        norms = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        direction = (part / norms.clamp_min(1e-30)).mean(0)
        length = torch.linalg.vector_norm(direction).clamp_min(1e-30)
        results.append(part.mean(0) if place in plain else direction * (norms.mean() / length))
    return torch.cat(results)


def median(x: Tensor) -> Tensor:
    """x: [learners, n] -> [n]"""
    ordered, count = x.sort(0).values, len(x)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def trimmed_mean(x: Tensor, faulty: int) -> Tensor:
    """x: [learners, n] -> [n]. faulty: values that are left out at each end."""
    return x.sort(0).values[faulty : len(x) - faulty].mean(0)


def geometric_median(x: Tensor, iterations: int, smoothing: float) -> Tensor:
    """x: [learners, n] -> [n]. It starts from 0. smoothing: the least distance that counts."""
    point = torch.zeros_like(x[0])
    for _ in range(iterations):
        distances = torch.linalg.vector_norm(x - point, dim=1).clamp_min(smoothing)
        weights = 1 / distances
        point = (weights / weights.sum()) @ x
    return point


def krum(x: Tensor, faulty: int) -> Tensor:
    """x: [learners, n] -> [n], one of them; of equals the first."""
    return x[int(_scores(x, faulty).argmin())]


def multi_krum(x: Tensor, faulty: int) -> Tensor:
    """x: [learners, n] -> [n]"""
    best = _scores(x, faulty).sort(stable=True).indices[: len(x) - faulty]
    return x[best.sort().values].mean(0)


def _scores(x: Tensor, faulty: int) -> Tensor:
    """Mean squared distance to the nearest ones, of which there are learners - faulty - 1."""
    squares = torch.stack([(x - row).square().sum(1) for row in x])
    return squares.sort(1).values[:, 1 : max(2, len(x) - faulty)].mean(1)


def centred_clipping(x: Tensor, start: Tensor, radius: float, iterations: int) -> Tensor:
    """x: [learners, n], start: [n] -> [n]"""
    point = start
    for _ in range(iterations):
        away = x - point
        norms = torch.linalg.vector_norm(away, dim=1, keepdim=True)
        point = point + (away * (radius / norms.clamp_min(1e-30)).clamp_max(1.0)).mean(0)
    return point
