"""Two models behind one address: which one answers, and when the second one stops.

A mean of numbers in [0, 1] has bounds that hold at all times together (a confidence sequence). At
each n the chance to miss is alpha / (n (n + 1)) by Hoeffding's inequality, and these add up to
alpha. So a decision may be looked for after each request.
"""

from __future__ import annotations

import math
import random
import threading
from dataclasses import dataclass, field
from typing import Any

ALPHA = 0.05
"""Chance to stop an equal model, over all requests; chance to see a drift that is none."""


@dataclass
class Mean:
    """The mean of numbers in [0, 1]."""

    n: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.n, self.total = self.n + 1, self.total + value

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return what the true mean lies between, at all n together, but for a chance of alpha."""
        if not self.n:
            return 0.0, 1.0
        radius = math.sqrt(math.log(2 * self.n * (self.n + 1) / alpha) / (2 * self.n))
        mean = self.total / self.n
        return max(0.0, mean - radius), min(1.0, mean + radius)


@dataclass
class Arm:
    """One model's requests."""

    name: str
    errors: Mean = field(default_factory=Mean)  # 1: the request failed
    ratings: Mean = field(default_factory=Mean)  # 1: the best

    def to_json(self) -> dict[str, Any]:
        means = {"errors": self.errors, "ratings": self.ratings}
        return {"model": self.name} | {
            key: {"n": mean.n, "mean": mean.total / mean.n if mean.n else None}
            for key, mean in means.items()
        }


class Arms:
    """Deals requests to a first and a second model. May be called from any thread.

    Args:
        share: of requests for the second model; its count is never off by more than one.
        stops: stop the second model when it is worse.
    """

    def __init__(self, first: str, second: str | None, share: float, stops: bool, seed: int = 0):
        self.first, self.second = Arm(first), None if second is None else Arm(second)
        self._share, self._stops, self._draw = share, stops, random.Random(seed)
        self._asked, self._block, self._next = 0, 0, 0
        self.stopped = ""  # why the second model gets no more requests
        self._lock = threading.Lock()
        self._draw_next()

    def _draw_next(self) -> None:
        """Draw the request of the next block that the second model gets."""
        drawn = math.floor((self._block + self._draw.random()) / self._share)
        self._next, self._block = max(self._next + bool(self._block), drawn), self._block + 1

    def deal(self) -> Arm:
        """Return the model of the next request."""
        with self._lock:
            number, self._asked = self._asked, self._asked + 1
            if self.second is None or number != self._next:
                return self.first
            self._draw_next()
            return self.first if self.stopped else self.second

    def failed(self, arm: Arm, is_error: bool) -> None:
        """Take how a request has ended."""
        with self._lock:
            arm.errors.add(float(is_error))
            self._decide()

    def rate(self, arm: Arm, rating: float) -> None:
        """Take the rating of a reply."""
        with self._lock:
            arm.ratings.add(rating)
            self._decide()

    def _decide(self) -> None:
        """Stop the second model if it has surely more errors, or surely lower ratings."""
        if self.second is None or self.stopped or not self._stops:
            return
        alpha = ALPHA / 4  # of each of four means
        low, high = self.second.errors.bounds(alpha)[0], self.first.errors.bounds(alpha)[1]
        if low > high:
            self.stopped = (
                f"its error rate is above {low:.3f}, and the first one's below {high:.3f}"
            )
        high, low = self.second.ratings.bounds(alpha)[1], self.first.ratings.bounds(alpha)[0]
        if high < low:
            self.stopped = f"its rating is below {high:.3f}, and the first one's above {low:.3f}"

    def to_json(self) -> dict[str, Any]:
        arms = [arm.to_json() for arm in (self.first, self.second) if arm is not None]
        return {"share": self._share, "arms": arms, "stopped": self.stopped}


class Drift:
    """Tells whether live prompts have other losses than a baseline's.

    The rank of a live loss among the baseline's has the mean 1/2 if both are of one kind. Drift is
    a mean that surely differs from it, by more than the baseline's own error.
    """

    def __init__(self, baseline: list[float]):
        self._baseline, self._ranks = sorted(baseline), Mean()
        self._error = math.sqrt(math.log(4 / ALPHA) / (2 * len(baseline)))

    def add(self, loss: float) -> dict[str, Any] | None:
        """Take a live prompt's loss. Return the finding if there is drift."""
        below = sum(each < loss for each in self._baseline)
        equal = sum(each == loss for each in self._baseline)
        self._ranks.add((below + equal / 2) / len(self._baseline))
        low, high = self._ranks.bounds(ALPHA / 2)
        if low <= 0.5 + self._error and high >= 0.5 - self._error:
            return None
        return {
            "prompts": self._ranks.n,
            "mean_rank": self._ranks.total / self._ranks.n,
            "bounds": [low, high],
            "baseline": len(self._baseline),
            "baseline_error": self._error,
        }
