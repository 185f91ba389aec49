"""Input and output of a planner, which makes the layout of the next generation.

In: the run file, the nodes that are there with their places for workers, and what is placed now.
Out: a Topology, and the present rank of each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.config.run import RunConfig
from holdfast.layout import Topology
from holdfast.policy.placement import Machine


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """A present node, with its places for workers."""

    name: str
    places: int
    speed: float = 1.0  # relative to that of other nodes
    machine: Machine | None = None  # where it stands; None: not known


@dataclass(frozen=True)
class PresentPlacement:
    """The present placement."""

    topology: Topology
    lost_ranks: frozenset[int] = frozenset()  # whose process has exited, with its state


@dataclass(frozen=True)
class LayoutPlan:
    """The layout of the next generation. came_from[rank]: which rank of the present topology the
    process of a new rank was; None for one that holds nothing."""

    topology: Topology
    came_from: tuple[int | None, ...]
    untouched_replicas: int  # replicas without any change
    moved_bytes: int  # of state that have to travel, about
    idle_places: int = 0  # places without a worker
    idle_reason: str = ""
    step_s: float = 0.0  # predicted seconds of a step; 0: nothing was predicted
    simple_because: str = ""  # why the simple planner made it although a search was asked for


class Planner(Protocol):
    """Any planner. Raises LayoutError where nothing can be run on these nodes."""

    def __call__(
        self,
        config: RunConfig,
        nodes: Sequence[NodePlaces],
        generation: int,
        /,
        present: PresentPlacement | None = None,
    ) -> LayoutPlan: ...
