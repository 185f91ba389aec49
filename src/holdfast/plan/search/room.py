"""Whether a model can fit, before its blocks are split: how many blocks each rank has room for.

The bytes of a stage grow by the same amount with each block, and with each microbatch in flight. So
a few calls of the memory formulas give the most blocks of each rank, and all blocks must fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.search.limits import Limits
from holdfast.plan.search.space import Shape

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """state: bytes of a block. kept: of a block and a rank's sample in flight. rest: what a stage
    needs with no block."""

    state: float
    kept: float
    rest: float

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

    def can_fit(self, shape: Shape, zero: int, kept: Sequence[float]) -> bool:
        """Return False if no split of the blocks fits, with the recompute that keeps least.
        kept: microbatches in flight at each index on pp, or fewer."""
        most = self.most_blocks(shape, zero, kept, self.words(shape)[-1])
        return min(most) >= 1 and sum(map(int, most)) >= self._blocks

    def words(self, shape: Shape) -> list[str]:
        """Words of `train.recompute` that a run file may have."""
        return [word for word in self.limits.recompute if shape.ep == 1 or word != "selective"]

    def most_blocks(self, shape: Shape, zero: int, kept: Sequence[float], word: str) -> list[float]:
        """Return the most blocks that each index on pp has room for."""
        bytes_, local = self._block_bytes(shape, zero, word), shape.cut.local
        found, index, blocks = list[float](), 0, float(self._blocks)
        for name, number in zip(shape.site.pools, shape.slots, strict=True):
            room = self.room(name) - bytes_.rest
            for in_flight in kept[index : index + number]:
                each = bytes_.state + in_flight * local * bytes_.kept
                found.append(min(blocks, room / each + _ROUNDING) if each > 0 else blocks)
            index += number
        return found

    def shortest(self, shape: Shape, zero: int) -> float:
        """Return the least pp whose ranks have room for all blocks, one microbatch in flight at
        least. Of a site with one pool."""
        most = self._block_bytes(shape, zero, self.words(shape)[-1]).blocks(
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

    def _block_bytes(self, shape: Shape, zero: int, word: str) -> BlockBytes:
        key = (word, shape.dp_shard, shape.cp, shape.tp, shape.ep, zero, shape.pp > 1)
        if key not in self._bytes:
            self._bytes[key] = self._measured(shape, zero, word)
        return self._bytes[key]

    def _measured(self, shape: Shape, zero: int, word: str) -> BlockBytes:
        """Of the least of each, where blocks differ."""
        kinds = self.evaluator.problem.workload.kinds
        blocks = [number for number, layer in enumerate(kinds) if layer.kind == "block"]
        mesh = (3 if shape.pp > 1 else 1, *shape.mesh[1:])
        pools = shape.site.pools[:1]
        group = ReplicaChoice(1, *mesh, (1,) * mesh[0], pools, mesh[0], (word,))
        least = [inf, inf, inf]
        choice = Choice((group,), shape.dp_shard, zero=zero, ep=shape.ep)
        choice = replace(choice, host=self.limits.offloads[0])
        for kind in blocks:
            at = [
                self.evaluator.memory_of(choice, group, mesh[0] // 2, kept, ((kind, number),)).peak
                for number, kept in ((1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0))
            ]
            state = at[1] - at[0]
            found = (state, at[3] - at[1] - (at[2] - at[0]), at[0] - state)
            least = [min(one, other) for one, other in zip(least, found, strict=True)]
        return BlockBytes(least[0], max(0.0, least[1]), max(0.0, least[2]))
