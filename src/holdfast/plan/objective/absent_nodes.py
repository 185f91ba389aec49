"""How many nodes of a pool are absent at a random moment.

Nodes are lost at a rate l each and return after a time T on average. If they are lost one by one,
each is absent with the probability lT / (1 + lT), independently: a binomial distribution. If an
interruption takes several, their number is taken as geometric with mean b. Absent nodes of such
batches that return one by one are negative binomial with r = v T / (1 - 1/b), for v interruptions a
second. (The generating function of the M^X/M/infinity queue: the integral of X(1 + (z - 1) y) - 1
over dy / y is -ln(1 - (b - 1)(z - 1)) / (1 - 1/b).)
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p

from holdfast.plan.hardware.cluster import NodePool

LEAST_CHANCE = 1e-5
"""Numbers of absent nodes that are less likely than this are left out."""
MAX_BATCHES = 64
"""Sizes of interruptions that are counted one by one."""


def absent_share(losses_per_s: float, return_s: float) -> float:
    """Share of its time in which a node is absent."""
    return losses_per_s * return_s / (1 + losses_per_s * return_s)


def absent_chances(nodes: int, losses_per_s: float, return_s: float, burst: float) -> list[float]:
    """[k]: chance that k of the nodes are absent; the chances add up to 1."""
    share = absent_share(losses_per_s, return_s)
    if share <= 0 or nodes == 0:
        return [1.0]
    if burst <= 1:
        found = [exp(_log_binomial(nodes, k, share)) for k in range(nodes + 1)]
    else:
        quick = 1 - 1 / burst
        rate = nodes * (1 - share) * losses_per_s / burst
        found = [exp(_log_negative(k, rate * return_s / quick, burst)) for k in range(nodes + 1)]
    while len(found) > 1 and found[-1] < LEAST_CHANCE:
        found.pop()
    total = sum(found)
    return [chance / total for chance in found]


def batch_chances(burst: float, most: int) -> list[tuple[int, float]]:
    """(nodes that one interruption takes, chance): geometric, `most` at most."""
    if burst <= 1 or most <= 1:
        return [(1, 1.0)]
    stop, stay = 1 / burst, 1 - 1 / burst
    last = min(most, MAX_BATCHES)
    found = [(size, stop * stay ** (size - 1)) for size in range(1, last)]
    return [*found, (last, stay ** (last - 1))]


def losses_per_second(pool: NodePool) -> float:
    """Of one node."""
    return pool.losses_per_day / 86_400.0


def _log_binomial(nodes: int, k: int, share: float) -> float:
    ways = lgamma(nodes + 1) - lgamma(k + 1) - lgamma(nodes - k + 1)
    return ways + k * log(share) + (nodes - k) * log1p(-share)


def _log_negative(k: int, r: float, burst: float) -> float:
    """Of the negative binomial distribution with mean r (burst - 1)."""
    ways = lgamma(k + r) - lgamma(k + 1) - lgamma(r)
    return ways - r * log(burst) + k * log1p(-1 / burst)
