"""Layout (how a model is spread) and Topology (which rank sits where).

A Layout is a plan for a world size; a Topology is that plan placed on actual ranks of one
generation. Both are immutable values: a second Topology can be built while the first lives.
Replicas stand outside the mesh: each has its own mesh over (pp, dp_shard, cp, tp), and a
rank's number inside its replica is its mesh rank (row-major over the axes). Replicas need not
be alike; only the model they hold is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import gcd, prod
from typing import Any

from holdfast.errors import LayoutError

AXES = ("pp", "dp_shard", "cp", "tp")
MeshShape = tuple[int, int, int, int]
Stages = tuple[int, ...]
_MAX_RANKS_NAMED = 3  # ranks that a sentence names; of more it says that there are more


class _Mesh:
    """What follows from the mesh of a replica and its stages."""

    stages: Stages

    @property
    def mesh_shape(self) -> MeshShape:
        raise NotImplementedError

    @property
    def kind(self) -> tuple[MeshShape, Stages]:
        """Replicas of one kind hold the same boxes at the same mesh rank."""
        return self.mesh_shape, self.stages if self.mesh_shape[0] > 1 else ()

    @property
    def is_sharded(self) -> bool:
        """Return True if ranks share parameters or optimizer state."""
        return self.mesh_shape[1] > 1

    @property
    def token_shares(self) -> int:
        """The ranks among which the tokens of a microbatch are shared out."""
        _, dp_shard, cp, _ = self.mesh_shape
        return dp_shard * cp


@dataclass(frozen=True)
class Layout(_Mesh):
    """Degrees of every axis; `dp_replicate` is the number of replicas.

    `stages`: decoder blocks of each pipeline stage, in order; () where there is no pipeline, or
    where nobody has planned it yet (such a layout can be placed, but has no model on it). Several
    stages a rank go round the ranks, or, `is_folded`, down the ranks and up again.
    """

    dp_replicate: int = 1
    pp: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    stages: Stages = ()
    is_folded: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("dp_replicate", *AXES):
            degree = getattr(self, name)
            if degree < 1:
                raise LayoutError(
                    f"degree {degree} is impossible", where=f"layout.{name}", remedy="use 1 or more"
                )
        _check_stages(self.stages, self.pp, self.is_folded, "layout.stages")

    @staticmethod
    def of_mesh(mesh: MeshShape, stages: Stages = (), *, is_folded: bool = False) -> Layout:
        """Return the layout of one replica."""
        return Layout(1, *mesh, stages, is_folded=is_folded)

    @property
    def mesh_shape(self) -> MeshShape:
        return self.pp, self.dp_shard, self.cp, self.tp

    @property
    def replica_size(self) -> int:
        return self.pp * self.dp_shard * self.cp * self.tp

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.replica_size

    def replica(self, index: int, first: int, weight: int = 1) -> Replica:
        """Return one of its replicas, on the ranks from `first` on."""
        ranks = tuple(range(first, first + self.replica_size))
        return Replica(index, ranks, self.mesh_shape, self.stages, weight, self.is_folded)


@dataclass(frozen=True)
class Replica(_Mesh):
    """One complete copy of the model: ranks in mesh order, over (pp, dp_shard, cp, tp).

    `stages`, `is_folded` as in Layout. A position in the model is -1 for the embedding, i for block
    i, and the number of blocks for the last norm and the head. `weight`: how much of a step's work
    it is given, beside the other replicas' weights.
    """

    index: int
    ranks: tuple[int, ...]
    mesh_shape: MeshShape = (1, 1, 1, 1)
    stages: Stages = ()
    weight: int = 1
    is_folded: bool = False

    def __post_init__(self) -> None:
        where = f"replica {self.index}"
        if len(self.mesh_shape) != len(AXES) or any(degree < 1 for degree in self.mesh_shape):
            raise LayoutError(f"{self.mesh_shape} is not a mesh over {AXES}", where=where)
        if len(self.ranks) != prod(self.mesh_shape):
            raise LayoutError(
                f"{len(self.ranks)} ranks do not fill a mesh of {self.mesh_shape}", where=where
            )
        if self.weight < 1:
            raise LayoutError(
                f"the weight {self.weight} gives no work", where=where, remedy="use 1 or more"
            )
        _check_stages(self.stages, self.degree("pp"), self.is_folded, where)

    def degree(self, axis: str) -> int:
        return self.mesh_shape[AXES.index(axis)]

    def expert_degree(self, ep: int) -> int:
        """The ranks that share the experts if `layout.ep` is `ep`. A smaller replica than the run
        file's may not have as many."""
        return gcd(ep, self.token_shares)

    @property
    def last_pp(self) -> int:
        """The index on `pp` of the ranks with the last stage."""
        return self.pp_of(len(self.stages) - 1) if self.stages else self.degree("pp") - 1

    def holder_of(self, position: int) -> int:
        """The index on `pp` of the ranks that hold a position of the model.

        Raises LayoutError for a pipeline whose stages are not planned.
        """
        if self.degree("pp") == 1 or position < 0:
            return 0
        stages = _stages_by_block(self._planned_stages())
        return self.pp_of(stages[position] if position < len(stages) else len(self.stages) - 1)

    def pp_of(self, stage: int) -> int:
        """The index on `pp` that a pipeline stage has."""
        return pp_of_stage(stage, self.degree("pp"), self.is_folded)

    @property
    def neighbours(self) -> tuple[tuple[int, int], ...]:
        """The pairs of indices on `pp` between which activations and gradients travel, rising. If
        stages go round the ranks, the last one has the first one for a neighbour."""
        pp = self.degree("pp")
        goes_round = len(self.stages) > pp > 2 and not self.is_folded
        return tuple((a, a + 1) for a in range(pp - 1)) + (((0, pp - 1),) if goes_round else ())

    def stages_at(self, pp: int) -> tuple[int, ...]:
        """The pipeline stages of the ranks at an index on `pp`, rising."""
        return stages_at(pp, self.degree("pp"), max(1, len(self.stages)), self.is_folded)

    def stage_blocks(self, stage: int) -> range:
        """The blocks of one pipeline stage. Raises LayoutError if the stages are not planned."""
        first = sum(self._planned_stages()[:stage])
        return range(first, first + self.stages[stage])

    def blocks(self, pp: int) -> tuple[int, ...] | None:
        """The blocks that ranks at an index on `pp` hold, rising; None is all of them, because
        there is no pipeline.

        Raises LayoutError for a pipeline whose stages are not planned.
        """
        if self.degree("pp") == 1:
            return None
        self._planned_stages()
        return tuple(b for stage in self.stages_at(pp) for b in self.stage_blocks(stage))

    def _planned_stages(self) -> Stages:
        if not self.stages:
            raise LayoutError(
                f"a pipeline of {self.degree('pp')} stages does not say which blocks each holds",
                where=f"replica {self.index}",
                remedy="give the number of blocks of each stage",
            )
        return self.stages

    def rank_at(self, pp: int = 0, dp_shard: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at a coordinate of the mesh."""
        return self.ranks[index_of((pp, dp_shard, cp, tp), self.mesh_shape)]


def component_degree(degree: int, tp: int) -> int:
    """The parts that `tp` makes of a component of a block. degree: that of its own along tp; 0: it
    has none. A replica may have a smaller tp than the run file."""
    return gcd(degree or tp, tp)


def pp_of_stage(stage: int, pp: int, is_folded: bool) -> int:
    """The index on `pp` that a stage of a pipeline of `pp` ranks has."""
    return 2 * pp - 1 - stage if is_folded and stage >= pp else stage % pp


def stages_at(index: int, pp: int, stages: int, is_folded: bool) -> tuple[int, ...]:
    """Of so many stages, those of the ranks at an index on `pp`, rising."""
    if is_folded and stages > pp:
        return index, 2 * pp - 1 - index
    return tuple(range(index, stages, pp))


def set_share(count: int, sets: int, index: int) -> tuple[slice, int]:
    """Of `count` samples or tokens, those that set `index` of ranks computes, and how many of them
    count. A set beyond the last one computes that once more, which does not count."""
    size = -(-count // sets)
    first = index * size
    counted = max(0, min(size, count - first))
    start = min(first, count - 1)
    return slice(start, start + max(1, counted)), counted


@lru_cache(maxsize=64)
def _stages_by_block(stages: Stages) -> tuple[int, ...]:
    return tuple(stage for stage, blocks in enumerate(stages) for _ in range(blocks))


def _check_stages(stages: Stages, pp: int, is_folded: bool, where: str) -> None:
    if not stages:
        return
    if len(stages) != 2 * pp if is_folded else len(stages) % pp:
        raise LayoutError(
            f"a pipeline of {pp} cannot have the stages {stages}",
            where=where,
            remedy=f"give {2 * pp if is_folded else pp} numbers of blocks",
        )
    for stage, blocks in enumerate(stages):
        if blocks < 1:  # also of the embedding's and of the head's: they have none alone
            raise LayoutError(
                f"stage {stage} of {stages} holds {blocks} blocks",
                where=where,
                remedy="give every stage a block",
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
    """Replicas placed on ranks and nodes, in one generation. `nodes[rank]` names rank's node.

    Raises LayoutError unless replicas are numbered from 0 in order, every rank of the world
    stands in exactly one of them, and all of them hold equally many blocks.
    """

    generation: int
    replicas: tuple[Replica, ...]
    nodes: tuple[str, ...]

    def __post_init__(self) -> None:
        numbers = [replica.index for replica in self.replicas]
        if not numbers or numbers != list(range(len(numbers))):
            raise LayoutError(
                f"replicas are numbered {numbers}",
                where="topology",
                remedy="number them 0, 1, 2, ... in order",
            )
        self._check_ranks()
        blocks = {sum(replica.stages): replica.index for replica in self.replicas if replica.stages}
        if len(blocks) > 1:
            (some, one), (others, two) = sorted(blocks.items())[:2]
            raise LayoutError(
                f"the stages of replica {one} hold {some} blocks, those of replica {two} {others}",
                where="topology",
                remedy="give every replica all blocks of the model",
            )

    def _check_ranks(self) -> None:
        seen: dict[int, int] = {}
        for replica in self.replicas:
            for rank in replica.ranks:
                if rank in seen:
                    places = f"in replica {replica.index}"
                    if seen[rank] != replica.index:
                        places = f"in replica {seen[rank]} and in replica {replica.index}"
                    raise LayoutError(
                        f"rank {rank} stands twice, {places}",
                        where="topology",
                        remedy="give every rank one place",
                    )
                seen[rank] = replica.index
        if seen.keys() != set(range(len(seen))):
            # Lazily: the largest rank may be any number, the first gaps are found at once.
            missing = list(
                islice((r for r in range(max(seen)) if r not in seen), _MAX_RANKS_NAMED + 1)
            )
            unknown = sorted(rank for rank in seen if rank < 0)
            what, wrong = (unknown, "negative") if unknown else (missing, "missing")
            more = " and more" if len(what) > _MAX_RANKS_NAMED else ""
            raise LayoutError(
                f"ranks {what[:_MAX_RANKS_NAMED]}{more} are {wrong}",
                where="topology",
                remedy=f"use ranks 0 to {len(seen) - 1}",
            )
        if len(self.nodes) != len(seen):
            raise LayoutError(
                f"{len(seen)} ranks, but nodes for {len(self.nodes)}",
                where="topology",
                remedy="name the node of each rank",
            )

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def kinds(self) -> tuple[tuple[MeshShape, Stages], ...]:
        """The kinds of replicas there are, in the order in which they first appear."""
        return tuple(dict.fromkeys(replica.kind for replica in self.replicas))

    def coordinate(self, rank: int) -> Coordinate:
        replica = self.replica_of(rank)
        mesh_rank = replica.ranks.index(rank)
        return Coordinate(replica.index, mesh_rank, *coordinates_of(mesh_rank, replica.mesh_shape))

    def replica_of(self, rank: int) -> Replica:
        for replica in self.replicas:
            if rank in replica.ranks:
                return replica
        raise LayoutError(f"rank {rank} is not in a world of {self.world_size}")

    def to_json(self) -> dict[str, Any]:
        """`stages` is written only where there are any, a weight only where it is not 1, and
        `is_folded` only where it is true. So a topology without a pipeline, of equal replicas,
        reads as it always has."""
        return {
            "generation": self.generation,
            "replicas": [
                {"index": r.index, "ranks": list(r.ranks), "mesh_shape": list(r.mesh_shape)}
                | ({"stages": list(r.stages)} if r.stages else {})
                | ({"weight": r.weight} if r.weight != 1 else {})
                | ({"is_folded": True} if r.is_folded else {})
                for r in self.replicas
            ],
            "nodes": list(self.nodes),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Topology:
        replicas = tuple(
            Replica(
                r["index"],
                tuple(r["ranks"]),
                tuple(r["mesh_shape"]),
                tuple(r.get("stages", ())),
                r.get("weight", 1),
                r.get("is_folded", False),
            )
            for r in value["replicas"]
        )
        return Topology(value["generation"], replicas, tuple(value["nodes"]))


def coordinates_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major coordinates of `index` in `shape`."""
    out: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        out.append(rest)
    return tuple(reversed(out))


def index_of(at: Iterable[int], shape: Sequence[int]) -> int:
    """The inverse of `unravel`. Raises LayoutError for a place outside the shape."""
    index = 0
    for place_on_axis, size in zip(at, shape, strict=True):
        if not 0 <= place_on_axis < size:
            raise LayoutError(f"{tuple(at)} is not in a mesh of {tuple(shape)}")
        index = index * size + place_on_axis
    return index


def place_layout(layout: Layout, generation: int, nodes: tuple[str, ...]) -> Topology:
    """Fill ranks in order: replica by replica, mesh order inside. `nodes[rank]` names the node.

    Raises LayoutError when the number of nodes' ranks is not the layout's world size.
    """
    return place_replicas((layout,), generation, nodes)


def place_replicas(layouts: Sequence[Layout], generation: int, nodes: tuple[str, ...]) -> Topology:
    """As `place`, for several layouts one after another: replicas of unlike shapes side by side.

    Raises LayoutError when the number of nodes' ranks is not the sum of the world sizes.
    """
    needed = sum(layout.world_size for layout in layouts)
    if len(nodes) != needed:
        raise LayoutError(
            f"the layout needs {needed} ranks, there are {len(nodes)}", where="layout"
        )
    replicas: list[Replica] = []
    first = 0
    for layout in layouts:
        for _ in range(layout.dp_replicate):
            replicas.append(layout.replica(len(replicas), first))
            first += layout.replica_size
    return Topology(generation, tuple(replicas), nodes)
