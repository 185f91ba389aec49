"""What a run file leaves free, and what a search gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import StepCost

Objective = Callable[[Choice, StepCost], float]
"""What the search makes as small as it can; `step_seconds` is the simplest. It must not fall if a
step takes longer. An objective may have an attribute `least(choice, step_s)`: the least score of
any layout with the replicas of `choice` whose step takes at least `step_s`. The choice has no
stages yet. With it, the search drops degrees before it looks at their variants."""

SYNCHRONOUS = tuple(name for name, kind in SCHEDULE_KINDS.items() if not kind.is_asynchronous)
"""Schedules that give the curve of a run without a pipeline."""


DEGREES = ("tp", "pp", "cp", "dp_shard", "ep")
"""Limits that are degrees, in the order in which a remedy frees them."""

SEARCHED = "searched"
SEARCHED_FROM_CACHE = "searched from a cached plan"
FROM_CACHE = "from the plan cache"
"""Sources of a result: without hints, with the layout of an earlier search, and no search."""


def step_seconds(_: Choice, cost: StepCost) -> float:
    return cost.step_s


@dataclass(frozen=True)
class Limits:
    """What a run file fixes. A number of 0 is free. Of several words the preferred ones are first.
    offloads: kinds of state on the host (`Choice.host`). Those after the first are tried if nothing
    fits, or on few devices."""

    pp: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0
    microbatch: int = 0  # samples of a logical microbatch
    zero: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = SYNCHRONOUS
    recompute: tuple[str, ...] = ("none", "selective", "full")
    virtual: int = 0  # stages of each rank, under a schedule that leaves them free
    sequence_parallel: bool = True  # with tp
    replicas: int = 0  # of a layout
    devices: int = 0  # of a layout
    effort: int = 0  # groups that are opened without a better layout; 0: by the number of devices
    offloads: tuple[frozenset[str], ...] = (frozenset(),)
    by_part: bool = False  # attention and feed-forward may have lower degrees than tp

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        """The degrees in the order of `layout.AXES`."""
        return self.pp, self.dp_shard, self.cp, self.tp

    def with_degrees(self, degrees: Mapping[str, int]) -> Limits:
        """The same with other degrees, by axis."""
        changes: dict[str, Any] = dict(degrees)
        return replace(self, **changes)


@dataclass(frozen=True)
class Found:
    """A layout with its cost."""

    choice: Choice
    cost: StepCost
    score: float  # by the objective; the least is the best


@dataclass(frozen=True)
class Phase:
    """A part of a search."""

    work: float  # groups that were opened
    gap: float  # as that of the result, at its end


@dataclass(frozen=True)
class SearchResult:
    """What a search found. gap: share by which a layout that was not looked at may be better, at
    most. With 0 none is better."""

    best: Found
    runners_up: tuple[Found, ...]  # the best one first
    tried: int  # layouts whose timeline was executed
    bounded: int = 0  # layouts and groups of layouts that have a bound
    gap: float = 0.0
    source: str = SEARCHED  # how it was found, in words
    phases: tuple[Phase, ...] = ()  # with like replicas, and with unlike ones
