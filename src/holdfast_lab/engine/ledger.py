"""What became of a simulated run: seconds by label, work, recoveries, traffic, money and energy.

Nothing in it grows with the time that is simulated: distributions are kept in bins whose edges are
5 % apart. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, floor, log
from typing import Any

from holdfast_lab.engine.interfaces import LABELS

_BIN = log(1.02)


@dataclass
class Sketch:
    """Values by bin; a quantile is off by 1 % at most. count, total and most are exact."""

    bins: dict[int, int] = field(default_factory=dict)
    zeros: int = 0
    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if value > self.most:
            self.most = value
        if value <= 1e-9:
            self.zeros += 1
        else:
            place = floor(log(value) / _BIN)
            self.bins[place] = self.bins.get(place, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        wanted = share * self.count
        seen = float(self.zeros)
        if not self.count or seen >= wanted:
            return 0.0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= wanted:
                return min(self.most, exp((place + 0.5) * _BIN))
        return self.most

    def to_json(self) -> dict[str, float]:
        return {
            "count": self.count,
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "worst": self.most,
        }


@dataclass
class Ledger:
    """Totals of one run.

    seconds: by label; they add up to `wall_s`. tokens: kept. tokens_lost: trained and lost again.
    ideal_tokens: what the fastest layout on the nodes alive would have trained, without failures.
    full_tokens: the same with all nodes that the run wants. lost_s: work lost by an interruption.
    rto_s: from a fault to the end of the first step after it. by_reason: interruptions. changes:
    of layout. node_s: of nodes alive. used_node_s: of nodes with work. saved_bytes, read_bytes,
    saves: by tier.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LABELS, 0.0))
    tokens: float = 0.0
    tokens_lost: float = 0.0
    ideal_tokens: float = 0.0
    full_tokens: float = 0.0
    lost_s: Sketch = field(default_factory=Sketch)
    lost_steps: Sketch = field(default_factory=Sketch)
    rto_s: Sketch = field(default_factory=Sketch)
    interruptions: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    changes: int = 0
    node_s: float = 0.0
    used_node_s: float = 0.0
    saves: dict[int, int] = field(default_factory=dict)
    saved_bytes: dict[int, float] = field(default_factory=dict)
    read_bytes: dict[int, float] = field(default_factory=dict)
    usd: float = 0.0
    joules: float = 0.0
    grams_co2: float = 0.0
    finished: bool = False
    ended: str = ""

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the wall time in which work was done that counts."""
        return self.seconds["productive"] / self.wall_s if self.wall_s else 0.0

    @property
    def g(self) -> float:
        """Capacity-normalised goodput: kept tokens, of those that the nodes alive could have
        trained with the fastest layout on them and no failure. Above 1, a policy has a faster
        layout than the cost model's best."""
        return self.tokens / self.ideal_tokens if self.ideal_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0

    @property
    def kwh(self) -> float:
        return self.joules / 3.6e6

    def to_json(self) -> dict[str, Any]:
        return {
            "wall_seconds": self.wall_s,
            "seconds_by_class": dict(self.seconds),
            "tokens": self.tokens,
            "tokens_lost": self.tokens_lost,
            "tokens_per_second": self.tokens_per_s,
            "goodput": self.goodput,
            "g": self.g,
            "interruptions": self.interruptions,
            "by_reason": dict(self.by_reason),
            "layout_changes": self.changes,
            "rpo_seconds": self.lost_s.to_json(),
            "rpo_steps": self.lost_steps.to_json(),
            "rto_seconds": self.rto_s.to_json(),
            "node_hours": self.node_s / 3600,
            "used_node_hours": self.used_node_s / 3600,
            "saves": _by_tier(self.saves),
            "saved_bytes": _by_tier(self.saved_bytes),
            "read_bytes": _by_tier(self.read_bytes),
            "usd": self.usd,
            "kwh": self.kwh,
            "co2_kg": self.grams_co2 / 1e3,
            "finished": self.finished,
            "ended": self.ended,
        }


def _by_tier(values: Mapping[int, float]) -> dict[str, float]:
    return {str(tier): values[tier] for tier in sorted(values)}
