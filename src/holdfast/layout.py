"""Layout (how a model is spread) and Topology (which rank sits where).

A Layout is a plan for a world size; a Topology is that plan placed on actual ranks of one
generation. Both are immutable values: a second Topology can be built while the first lives.
Replicas stand outside the mesh: each has its own mesh over (pp, dp_shard, cp, tp), and a
rank's number inside its replica is its mesh rank (row-major over the axes).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from holdfast.errors import LayoutError

AXES = ("pp", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis; `dp_replicate` is the number of replicas."""

    dp_replicate: int = 1
    pp: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, degree in asdict(self).items():
            if degree < 1:
                raise LayoutError(
                    f"degree {degree} is impossible", where=f"layout.{name}", remedy="use 1 or more"
                )

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def replica_size(self) -> int:
        return prod(self.mesh_shape)

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.replica_size


@dataclass(frozen=True)
class Replica:
    """One complete copy of the model: ranks in mesh order, over (pp, dp_shard, cp, tp)."""

    index: int
    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...] = (1, 1, 1, 1)

    def __post_init__(self) -> None:
        if len(self.ranks) != prod(self.mesh_shape):
            raise LayoutError(
                f"{len(self.ranks)} ranks do not fill a mesh of {self.mesh_shape}",
                where=f"replica {self.index}",
            )


@dataclass(frozen=True)
class Coordinate:
    """Where one rank sits: its replica, its mesh rank inside it, its index on every axis."""

    replica: int
    mesh_rank: int
    pp: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """Replicas placed on ranks and nodes, in one generation. `nodes[rank]` names rank's node."""

    generation: int
    replicas: tuple[Replica, ...]
    nodes: tuple[str, ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for replica in self.replicas for rank in replica.ranks)
        if ranks != list(range(len(ranks))) or len(self.nodes) != len(ranks):
            raise LayoutError(f"ranks {ranks} on {len(self.nodes)} nodes are not a topology")

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def coordinate(self, rank: int) -> Coordinate:
        for replica in self.replicas:
            if rank in replica.ranks:
                mesh_rank = replica.ranks.index(rank)
                return Coordinate(replica.index, mesh_rank, *unravel(mesh_rank, replica.mesh_shape))
        raise LayoutError(f"rank {rank} is not in a world of {self.world_size}")

    def replica_of(self, rank: int) -> Replica:
        return next(r for r in self.replicas if rank in r.ranks)

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "replicas": [
                {"index": r.index, "ranks": list(r.ranks), "mesh_shape": list(r.mesh_shape)}
                for r in self.replicas
            ],
            "nodes": list(self.nodes),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Topology:
        replicas = tuple(
            Replica(r["index"], tuple(r["ranks"]), tuple(r["mesh_shape"]))
            for r in value["replicas"]
        )
        return Topology(value["generation"], replicas, tuple(value["nodes"]))


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major coordinates of `index` in `shape`."""
    out: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        out.append(rest)
    return tuple(reversed(out))


def place(layout: Layout, generation: int, nodes: tuple[str, ...]) -> Topology:
    """Fill ranks in order: replica by replica, mesh order inside. `nodes[rank]` names the node.

    Raises LayoutError when the number of nodes' ranks is not the layout's world size.
    """
    if len(nodes) != layout.world_size:
        raise LayoutError(
            f"the layout needs {layout.world_size} ranks, there are {len(nodes)}", where="layout"
        )
    size = layout.replica_size
    replicas = tuple(
        Replica(i, tuple(range(i * size, (i + 1) * size)), layout.mesh_shape)
        for i in range(layout.dp_replicate)
    )
    return Topology(generation, replicas, nodes)
