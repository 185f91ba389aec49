"""Whether a model can fit, before its blocks are split: how many blocks each rank has room for.

The bytes of a stage grow by the same amount with each block, and with each microbatch in flight. So
a few calls of the memory formulas give the most blocks of each rank, and all blocks must fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.search.limits import Limits
from holdfast.plan.search.space import Shape

_ROUNDING = 1e-6
_SUMMED = 3  # microbatches of a replica from which on it holds a partial sum too


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Bytes of a stage."""

    state: float  # of a block
    kept: float  # of a block and a rank's sample in flight
    rest: float  # with no block

    def blocks(self, room: float, in_flight: float) -> float:
        """Return the most blocks that fit."""
        each = self.state + in_flight * self.kept
        return (room - self.rest) / each + _ROUNDING if each > 0 else inf


@dataclass
class Room:
    """Remembers bytes by the degrees that they depend on."""

    evaluator: Evaluator
    limits: Limits
    _bytes: dict[object, BlockBytes] = field(default_factory=dict)
    _rooms: dict[str, float] = field(default_factory=dict)

    def can_fit(
        self, shape: Shape, zero: int, kept: Sequence[float], microbatches: int = 1
    ) -> bool:
        """Return False if no split of the blocks fits, with the recompute that keeps least.
        kept: microbatches in flight at each index on pp, or fewer. microbatches: see
        `block_bytes`."""
        most = self.most_blocks(shape, zero, kept, self.words(shape)[-1], microbatches)
        return self.has_room(most)

    def has_room(self, most: Sequence[float]) -> bool:
        """Return False if ranks with at most so many blocks each do not hold all."""
        return min(most) >= 1 and sum(map(int, most)) >= self._blocks

    def words(self, shape: Shape) -> list[str]:
        return shape.words(self.limits.recompute)

    def most_blocks(
        self, shape: Shape, zero: int, kept: Sequence[float], word: str, microbatches: int = 1
    ) -> list[float]:
        """Return the most blocks that each index on pp has room for."""
        bytes_, local = self.block_bytes(shape, zero, word, microbatches), shape.cut.local
        found, index, blocks = list[float](), 0, float(self._blocks)
        for name, number in zip(shape.site.pools, shape.slots, strict=True):
            room = self.room(name) - bytes_.rest
            before, most = -1.0, blocks
            for in_flight in kept[index : index + number]:
                if in_flight != before:
                    each = bytes_.state + in_flight * local * bytes_.kept
                    most = min(blocks, room / each + _ROUNDING) if each > 0 else blocks
                    before = in_flight
                found.append(most)
            index += number
        return found

    def by_word(
        self, shape: Shape, zero: int, kept: Sequence[float], microbatches: int
    ) -> list[list[float]]:
        """Return the most blocks of each index on pp under each word; [] if all do not fit. If all
        fit under the first word, only under that."""
        *words, last = self.words(shape)
        least = self.most_blocks(shape, zero, kept, last, microbatches)
        if not self.has_room(least):
            return []
        found = list[list[float]]()
        for word in words:
            found.append(self.most_blocks(shape, zero, kept, word, microbatches))
            if len(found) == 1 and sum(map(int, found[0])) >= self._blocks:
                return found
        return [*found, least]

    def shortest(self, shape: Shape, zero: int, microbatches: int) -> float:
        """Return the least pp whose ranks have room for all blocks, one microbatch in flight at
        least. Of a site with one pool."""
        most = self.block_bytes(shape, zero, self.words(shape)[-1], microbatches).blocks(
            self.room(shape.site.pools[0]), 0.5 * shape.cut.local
        )
        return self._blocks / int(most) if most >= 1 else inf

    @property
    def _blocks(self) -> int:
        return len(self.evaluator.problem.workload.layers) - 2

    def room(self, pool: str) -> float:
        if pool not in self._rooms:
            self._rooms[pool] = self.evaluator.room(pool)
        return self._rooms[pool]

    def block_bytes(self, shape: Shape, zero: int, word: str, microbatches: int = 1) -> BlockBytes:
        """Return what each rank needs at least. microbatches: of the replica that has most, or
        fewer. A step's gradients are summed in a tree, where more of them have partial sums."""
        few = min(microbatches, _SUMMED) if shape.pp > 1 else 1
        key = (word, shape.mesh[1:], shape.ep, zero, shape.pp > 1, few)
        if key in self._bytes:
            return self._bytes[key]
        # of the least of each, where blocks differ; the first rank has the fewest messages
        kinds = self.evaluator.problem.workload.kinds
        blocks = [number for number, layer in enumerate(kinds) if layer.kind == "block"]
        mesh = (3 if shape.pp > 1 else 1, *shape.mesh[1:])
        group = ReplicaChoice(1, *mesh, (1,) * mesh[0], shape.site.pools[:1], few, (word,))
        least = [inf, inf, inf]
        shards, host = mesh[1], self.limits.offloads[0]
        choice = Choice((group,), shards, zero=zero, ep=shape.ep, host=host)
        for kind in blocks:
            one, two = (
                self.evaluator.bytes_of(choice, group, 0, ((kind, number),)) for number in (1, 2)
            )
            base, first, second = one.peak(0.0, None), one.peak(1.0, None), two.peak(0.0, None)
            state = second - base
            found = (state, two.peak(1.0, None) - second - (first - base), base - state)
            least = [min(pair) for pair in zip(least, found, strict=True)]
        bytes_ = BlockBytes(least[0], max(0.0, least[1]), max(0.0, least[2]))
        self._bytes[key] = bytes_
        return bytes_
