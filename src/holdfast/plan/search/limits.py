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
    """What a run file fixes. A number of 0 is free. microbatch: samples of a logical microbatch.
    schedules, recompute: what may be chosen, the preferred ones first. virtual: stages of
    each rank, under a schedule that leaves them free. sequence_parallel: with tp. replicas,
    devices: of a layout. effort: groups of layouts that are opened without a better layout; 0: by
    the number of devices. offloads: kinds of state on the host, the preferred ones first
    (`Choice.host`). Those after the first are tried if nothing fits, or on few devices."""

    pp: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0
    ep: int = 0
    microbatch: int = 0
    zero: tuple[int, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = SYNCHRONOUS
    recompute: tuple[str, ...] = ("none", "selective", "full")
    virtual: int = 0
    sequence_parallel: bool = True
    replicas: int = 0
    devices: int = 0
    effort: int = 0
    offloads: tuple[frozenset[str], ...] = (frozenset(),)

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
    """A layout with its cost. score: by the objective; the least is the best."""

    choice: Choice
    cost: StepCost
    score: float


@dataclass(frozen=True)
class Phase:
    """A part of a search. work: groups that were opened. gap: as that of the result, at its end."""

    work: float
    gap: float


@dataclass(frozen=True)
class SearchResult:
    """best first; `runners_up` follow it. tried: layouts whose timeline was executed. bounded:
    layouts and groups of layouts that have a bound. gap: share by which a layout that was not
    looked at may be better, at most. With 0 none is better. source: how it was found, in words.
    phases: with like replicas, and with unlike ones."""

    best: Found
    runners_up: tuple[Found, ...]
    tried: int
    bounded: int = 0
    gap: float = 0.0
    source: str = SEARCHED
    phases: tuple[Phase, ...] = ()
