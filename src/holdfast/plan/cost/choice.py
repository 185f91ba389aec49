"""A layout as the planner sees it: layouts of its replicas, who stands where, how steps are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.layout import Layout

Recompute = str
"""A word of `train.recompute`: none, selective, full."""


@dataclass(frozen=True)
class ReplicaChoice(Layout):
    """The layout of like replicas, with more numbers of it. `Choice.schedule` says whether stages
    are folded."""

    pools: tuple[str, ...] = ()  # the pool of each index on pp; one name stands for all
    microbatches: int = 1  # logical microbatches of each replica in a step
    recompute: tuple[Recompute, ...] = ("none",)  # for each index on pp; one word stands for all

    def __post_init__(self) -> None:
        """Check nothing: a search makes thousands of valid ones."""

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The first block of each stage, and the number of blocks."""
        return tuple(accumulate(self.stages, initial=0))

    def pool_at(self, pp: int) -> str:
        return self.pools[pp] if len(self.pools) > 1 else self.pools[0]

    def recompute_at(self, pp: int) -> Recompute:
        return self.recompute[pp] if len(self.recompute) > 1 else self.recompute[0]

    @cached_property
    def devices_by_pool(self) -> Mapping[str, int]:
        """Devices of one replica in each pool."""
        stage, found = self.replica_size // self.pp, dict[str, int]()
        for index in range(self.pp):
            name = self.pool_at(index)
            found[name] = found.get(name, 0) + stage
        return found


def replicas_within(groups: Sequence[ReplicaChoice], devices: Mapping[str, int]) -> tuple[int, ...]:
    """Return how many replicas of each kind, at most those of its group, have devices in the pools.
    Nodes of broken replicas are put together, as the runtime does at a step boundary."""
    free, found = dict(devices), list[int]()
    for group in groups:
        needs = group.devices_by_pool
        fit = (free.get(name, 0) // need for name, need in needs.items())
        found.append(max(0, min(group.dp_replicate, *fit)))
        for name, need in needs.items():
            free[name] = free.get(name, 0) - found[-1] * need
    return tuple(found)


@dataclass(frozen=True)
class Choice:
    """A complete layout."""

    replicas: tuple[ReplicaChoice, ...]
    microbatch: int  # samples of a logical microbatch, which shards share
    schedule: str = "1f1b"
    virtual: int = 1  # pipeline stages of a rank
    zero: int = 1
    ep: int = 1  # ranks of a stage that share experts
    sequence_parallel: bool = True
    host: frozenset[str] = frozenset()  # kinds of state on the host: keys of `train.memory`
    part_tp: tuple[int, ...] = ()  # ranks of tp that share attention, and the feed-forward; (): all

    @property
    def devices(self) -> int:
        return sum(group.world_size for group in self.replicas)

    @property
    def is_folded(self) -> bool:
        """Return True if stages go down the ranks and up again."""
        return SCHEDULE_KINDS[self.schedule].is_folded

    @property
    def is_sharded(self) -> bool:
        return any(group.is_sharded for group in self.replicas)

    @property
    def number_of_replicas(self) -> int:
        if len(self.replicas) == 1:  # nearly always, and searches ask often
            return self.replicas[0].dp_replicate
        return sum(group.dp_replicate for group in self.replicas)

    @property
    def microbatches(self) -> int:
        """Logical microbatches of a step."""
        if len(self.replicas) == 1:
            return self.replicas[0].dp_replicate * self.replicas[0].microbatches
        return sum(group.dp_replicate * group.microbatches for group in self.replicas)

    @cached_property
    def devices_by_pool(self) -> Mapping[str, int]:
        """Devices that the layout uses of each pool."""
        found: dict[str, int] = {}
        for group in self.replicas:
            for name, number in group.devices_by_pool.items():
                found[name] = found.get(name, 0) + group.dp_replicate * number
        return found

    @property
    def degrees(self) -> object:
        """What tells layouts apart whose blocks may be split in any way."""
        return self.microbatch, tuple(
            (group.dp_replicate, group.mesh_shape, group.pools) for group in self.replicas
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "host": sorted(self.host)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Choice:
        """Read what `to_json` wrote. Raises KeyError or TypeError for other values."""
        groups: list[dict[str, Any]] = [
            {name: tuple(own) if isinstance(own, list) else own for name, own in group.items()}
            for group in value["replicas"]
        ]
        replicas = tuple(ReplicaChoice(**group) for group in groups)
        sets = {"host": frozenset(value["host"]), "part_tp": tuple(value.get("part_tp", ()))}
        return Choice(**{**value, "replicas": replicas, **sets})
