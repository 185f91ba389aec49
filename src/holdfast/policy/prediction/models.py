"""The chance that a node is lost within a horizon, by models that a fit has filled in. Pure.

    never       0: the floor of every judgement
    base rate   one rate for all nodes at all times
    last event  one rate if the zone lost a node within the horizon before, another if it did not
    hazard      a table by age and zone, from lives that may be censored (a piecewise constant
                hazard: losses by exposure; Friedman, Annals of Statistics 10(1), 1982)
    smoothing   losses by exposure of the zone with exponential forgetting, times a factor of the
                node, each shrunk to what is usual (gamma prior)

Probabilities are for the horizon of the fit. For another one, the hazard counts as constant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import expm1, inf, pow
from typing import Any, Protocol, cast

from holdfast.policy.prediction.history import NodeSignals

MIN_RATE = 1e-12
"""Losses a second that stand in for none, where a logarithm is taken: one in thirty millennia."""


class Model(Protocol):
    """A fitted model."""

    @property
    def name(self) -> str: ...

    def probability(self, signals: NodeSignals, horizon_s: float) -> float:
        """The chance that the node is lost within `horizon_s` seconds."""
        ...


def chance(rate: float, seconds: float) -> float:
    """The chance of at least one event of `rate` a second."""
    return -expm1(-rate * seconds)


def rescale(probability: float, horizon_s: float, to_s: float) -> float:
    """A chance within one horizon as that within another."""
    if horizon_s == to_s or probability in (0.0, 1.0):
        return probability
    return 1.0 - pow(1.0 - probability, to_s / horizon_s)


@dataclass(frozen=True)
class NeverModel:
    name: str = "never"

    def probability(self, signals: NodeSignals, horizon_s: float) -> float:
        return 0.0


@dataclass(frozen=True)
class BaseRateModel:
    """rate: losses a second of a working node."""

    rate: float
    name: str = "base rate"

    def probability(self, signals: NodeSignals, horizon_s: float) -> float:
        return chance(self.rate, horizon_s)


@dataclass(frozen=True)
class LastEventModel:
    """Rates after a loss in the zone within `within_s`, and without one."""

    within_s: float
    rate_after: float
    rate_else: float
    name: str = "last event"

    def probability(self, signals: NodeSignals, horizon_s: float) -> float:
        since = signals.since_zone_loss_s
        is_recent = since is not None and since <= self.within_s
        return chance(self.rate_after if is_recent else self.rate_else, horizon_s)


@dataclass(frozen=True)
class HazardModel:
    """Losses a second by age."""

    edges_s: tuple[float, ...]  # lower ends of the ages, from 0
    rates: Mapping[str, tuple[float, ...]]  # by zone; "" for a zone that the fit has not seen
    name: str = "hazard"

    def __post_init__(self) -> None:
        lengths = {len(row) for row in self.rates.values()}
        if "" not in self.rates or lengths != {len(self.edges_s)}:
            raise ValueError("a hazard table has one rate for each age, and a row for other zones")

    def rate(self, zone: str, age_s: float) -> float:
        table = self.rates.get(zone) or self.rates[""]
        return table[bisect_right(self.edges_s, age_s) - 1]

    def probability(self, signals: NodeSignals, horizon_s: float) -> float:
        table = self.rates.get(signals.zone) or self.rates[""]
        at, end, total = signals.age_s, signals.age_s + horizon_s, 0.0
        index = bisect_right(self.edges_s, at) - 1
        while at < end:
            upper = self.edges_s[index + 1] if index + 1 < len(self.edges_s) else inf
            total += table[index] * (min(upper, end) - at)
            at, index = upper, index + 1
        return -expm1(-total)


@dataclass(frozen=True)
class SmoothingModel:
    """Exponential smoothing."""

    zone_half: int  # which half-life of the history a zone takes
    node_half: int  # the same of a node
    usual_rate: float  # of a node
    zone_weight: float  # losses that the prior is worth
    node_weight: float  # the same; infinite: nodes are alike
    name: str = "smoothing"

    def rate(self, signals: NodeSignals) -> float:
        """Losses a second of the node."""
        zone = zone_rate(signals, self.zone_half, self.usual_rate, self.zone_weight)
        return zone * node_factor(signals, self.node_half, self.usual_rate, self.node_weight)

    def probability(self, signals: NodeSignals, horizon_s: float) -> float:
        return chance(self.rate(signals), horizon_s)


def zone_rate(signals: NodeSignals, half: int, usual: float, weight: float) -> float:
    """Losses a second of a node of the zone in the recent past."""
    losses, exposure = signals.zone_count.losses[half], signals.zone_count.exposure_s[half]
    return (losses + weight) / (exposure + weight / usual)


def node_factor(signals: NodeSignals, half: int, usual: float, weight: float) -> float:
    """By how much a node is lost more often than usual, from its own past."""
    if weight == inf:
        return 1.0
    expected = signals.node.exposure_s[half] * usual
    return (signals.node.losses[half] + weight) / (expected + weight)


# --- to and from JSON ---------------------------------------------------------------------------
def model_to_json(model: Any) -> dict[str, Any]:
    """A model of this module as JSON; an infinite weight is written as null."""
    value = asdict(model)
    return {key: None if each == inf else each for key, each in value.items()}


def model_from_json(value: Mapping[str, Any]) -> Model:
    """Read what `model_to_json` wrote. Raises KeyError, TypeError and ValueError."""
    fields = {key: _parsed(each) for key, each in value.items() if key != "name"}
    for kind in (NeverModel, BaseRateModel, LastEventModel, HazardModel, SmoothingModel):
        if kind.name == value["name"]:
            return cast(Model, kind(**fields))
    raise ValueError(f"there is no model {value['name']!r}")


def _parsed(value: Any) -> Any:
    if isinstance(value, dict):
        return {zone: _parsed(row) for zone, row in value.items()}
    if isinstance(value, list):
        return tuple(map(float, value))
    return inf if value is None else value if isinstance(value, int) else float(value)
