"""What a planner is given, and what it answers: the layout of the next generation.

In: the run file, the nodes that are there with their places for workers, and what is placed now.
Out: a Topology, and where everybody came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.config.run import RunConfig
from holdfast.layout import Topology


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """A node that is there, with its places for workers. speed: beside the others' speeds."""

    name: str
    places: int
    speed: float = 1.0


@dataclass(frozen=True)
class Present:
    """What is placed now. lost: ranks whose process is gone, with what it held."""

    topology: Topology
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    """came_from[rank]: which rank of the present topology the process of a new rank was; None for
    one that holds nothing. untouched: replicas of which nobody changes. moved: bytes of state that
    have to travel, about. idle: places without a worker; why says the reason."""

    topology: Topology
    came_from: tuple[int | None, ...]
    untouched: int
    moved: int
    idle: int = 0
    why: str = ""


class Planner(Protocol):
    """Any planner. Raises LayoutError where nothing can be run on these nodes."""

    def __call__(
        self, config: RunConfig, nodes: Sequence[NodePlaces], generation: int, /,
        present: Present | None = None,
    ) -> Plan: ...  # fmt: skip
