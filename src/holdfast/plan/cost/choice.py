"""A layout as the planner sees it: every degree, who stands where, and how steps are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

Recompute = str
"""A word of `train.recompute`: none, selective, full."""


@dataclass(frozen=True)
class ReplicaChoice:
    """Like replicas. `count` of them, each a mesh over (pp, dp_shard, cp, tp).

    stages: blocks of each pipeline stage (`pp` x `virtual` of them). pools: the pool of each index
    on pp; one name stands for all. microbatches: logical microbatches of each replica in a step.
    recompute: a word for each index on pp; one stands for all.
    """

    count: int
    pp: int
    dp_shard: int
    cp: int
    tp: int
    stages: tuple[int, ...]
    pools: tuple[str, ...]
    microbatches: int
    recompute: tuple[Recompute, ...] = ("none",)

    @property
    def mesh_shape(self) -> tuple[int, int, int, int]:
        return self.pp, self.dp_shard, self.cp, self.tp

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The first block of each stage, and the number of blocks."""
        return tuple(accumulate(self.stages, initial=0))

    @property
    def size(self) -> int:
        """Devices of one replica."""
        return prod(self.mesh_shape)

    @property
    def devices(self) -> int:
        """Devices of all replicas of this kind."""
        return self.count * self.size

    def pool_at(self, pp: int) -> str:
        return self.pools[pp] if len(self.pools) > 1 else self.pools[0]

    def recompute_at(self, pp: int) -> Recompute:
        return self.recompute[pp] if len(self.recompute) > 1 else self.recompute[0]


@dataclass(frozen=True)
class Choice:
    """A complete layout. microbatch: samples of a logical microbatch, which dp_shard shares. ep:
    ranks of dp_shard x cp that share experts. host: kinds of state on the host ("optimizer",
    "gradients", "parameters", "activations")."""

    replicas: tuple[ReplicaChoice, ...]
    microbatch: int
    schedule: str = "1f1b"
    virtual: int = 1
    zero: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    host: frozenset[str] = frozenset()

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.replicas)

    @property
    def number_of_replicas(self) -> int:
        if len(self.replicas) == 1:  # nearly always, and searches ask often
            return self.replicas[0].count
        return sum(group.count for group in self.replicas)

    @property
    def microbatches(self) -> int:
        """Logical microbatches of a step."""
        if len(self.replicas) == 1:
            return self.replicas[0].count * self.replicas[0].microbatches
        return sum(group.count * group.microbatches for group in self.replicas)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "host": sorted(self.host)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Choice:
        """Read what `to_json` wrote. Raises KeyError or TypeError for other values."""
        groups = tuple(
            ReplicaChoice(**{name: _without_lists(given) for name, given in group.items()})
            for group in value["replicas"]
        )
        return Choice(**{**value, "replicas": groups, "host": frozenset(value["host"])})


def _without_lists(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given
