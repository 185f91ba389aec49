"""Plans the transfers of boxes between ranks when a live run changes its layout.

A rebuild takes the state as the old topology spread it to where the new one wants it. Both spreads
are boxes, so the plan is box arithmetic, as a restore is. Each box that a new rank wants is cut
along the boxes that the survivors hold, and every piece gets one source.

    source   the rank itself, if it holds the piece; otherwise a rank on its node; otherwise any.
             Among equals the one that has the fewest bytes to send so far.

The plan is a pure function of (old topology, new topology, table, origin of each rank). Every rank
computes all of it and keeps its own part, so two ends of a transfer need no negotiation. It is
built in one fixed order, and cut into rounds. A round is as much as any rank may have in flight at
once, so memory stays bounded. It ends when all ranks have received their parts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import pairwise, product

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.state_table import ITEM_BYTES, StateTable, TensorSpec, local_boxes
from holdfast.errors import LayoutError
from holdfast.layout import Topology

# bytes of one transfer: small enough to share a large tensor out over holders
MAX_TRANSFER_BYTES = 16 << 20
MAX_ROUND_BYTES = 256 << 20  # bytes that one rank sends and receives in one round


@dataclass(frozen=True, slots=True)
class Transfer:
    """`box` goes from one rank of the new generation to another, in round `round`.

    number: how many transfers of the same source and target come before it. Both ends count
    alike, so it tells messages between two ranks apart.
    """

    source: int
    target: int
    box: Box
    round: int
    number: int


@dataclass(frozen=True)
class ReshardPlan:
    """One rank's part of the plan.

    sends, receives: in the order of the plan, so their rounds rise. copies: what this process
    keeps: the common part of its old and its new box, per tensor. rounds: number of rounds of the
    plan; the same on every rank. digest: of what the plan was made from; ranks with equal digests
    have parts of one plan.
    """

    rank: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copies: tuple[Box, ...]
    rounds: int
    digest: str


def plan_reshard(
    old: Topology,
    new: Topology,
    table: StateTable,
    came_from: Sequence[int | None],
    rank: int,
    *,
    limit: int = MAX_TRANSFER_BYTES,
    window: int = MAX_ROUND_BYTES,
) -> ReshardPlan:
    """Return what rank `rank` of the new topology sends, receives and keeps.

    came_from[rank] is the old rank of the same process; None for one that holds nothing yet. Old
    ranks that no process came from are lost, with the state that they held. limit: bytes of one
    transfer at most, unless a single element is larger. window: bytes that a rank sends and
    receives in one round at most; `limit` is lowered to it.

    Raises LayoutError for a `came_from` that does not fit the topologies, and when elements of a
    tensor are wanted that no survivor holds.
    """
    stayed = [rank for rank in came_from if rank is not None]
    fits = len(came_from) == new.world_size and all(0 <= r < old.world_size for r in stayed)
    if not fits or len(set(stayed)) != len(stayed):
        raise LayoutError(
            f"{list(came_from)} does not say for each of {new.world_size} ranks which one of "
            f"{old.world_size} old ranks it was",
            where="came_from",
            remedy="name each old rank at most once, None for a newcomer",
        )
    every, rounds = _plan_transfers(old, new, table, came_from, min(limit, window), window)
    return ReshardPlan(
        rank,
        tuple(t for t in every if t.source == rank),
        tuple(t for t in every if t.target == rank),
        _kept_boxes(old, new, table, came_from[rank], rank),
        rounds,
        _digest(old, new, table, came_from, limit, window),
    )


def _kept_boxes(
    old: Topology, new: Topology, table: StateTable, old_rank: int | None, rank: int
) -> tuple[Box, ...]:
    if old_rank is None:
        return ()
    both = zip(local_boxes(old, table, old_rank), local_boxes(new, table, rank), strict=True)
    return tuple(common for a, b in both if (common := a.intersect(b)) is not None)


def _plan_transfers(
    old: Topology,
    new: Topology,
    table: StateTable,
    came_from: Sequence[int | None],
    limit: int,
    window: int,
) -> tuple[list[Transfer], int]:
    """Every transfer of the rebuild, in order, and the number of rounds."""
    survivors = [(rank, was) for rank, was in enumerate(came_from) if was is not None]
    held = [(rank, local_boxes(old, table, was)) for rank, was in survivors]
    wanted = [(rank, local_boxes(new, table, rank)) for rank in range(new.world_size)]
    sources, out = _SenderChooser(new.nodes), _RoundPlanner(window)
    for row, spec in enumerate(table):
        holders = _by_box((rank, boxes[row]) for rank, boxes in held)
        item = ITEM_BYTES[spec.dtype]
        for box, targets in _by_box((rank, boxes[row]) for rank, boxes in wanted).items():
            for piece in _cut_into_pieces(spec, box, list(holders), item, limit):
                able = [r for b, ranks in holders.items() if b.contains(piece) for r in ranks]
                _assign_senders(piece, item, sorted(able), targets, sources, out)
    return out.transfers, out.rounds


def _assign_senders(
    piece: Box,
    item: int,
    able_ranks: list[int],
    targets: list[int],
    sources: _SenderChooser,
    out: _RoundPlanner,
) -> None:
    """Give `piece` to each of `targets` from one of the ranks that are `able_ranks` to send it."""
    holders = tuple(able_ranks)
    own = set(able_ranks)
    nbytes = piece.size * item
    for target in targets:
        if target not in own:
            out.add(sources.pick(holders, target, nbytes), target, piece, nbytes)


def _by_box(held: Iterator[tuple[int, Box]]) -> dict[Box, list[int]]:
    """Boxes that are not empty, with the ranks that have each."""
    out: dict[Box, list[int]] = {}
    for rank, box in held:
        if box.size:
            out.setdefault(box, []).append(rank)
    return out


def _cut_into_pieces(
    spec: TensorSpec, wanted: Box, held: list[Box], item: int, limit: int
) -> Iterator[Box]:
    """`wanted`, cut so that each piece lies inside or outside of every box of `held`.

    Boxes that are held may overlap: replicas of different shapes cut one tensor differently.
    """
    common = [part for box in held if (part := wanted.intersect(box)) is not None]
    edges = [
        sorted(
            {wanted.offsets[dim], wanted.stops[dim]}.union(
                *({part.offsets[dim], part.stops[dim]} for part in common)
            )
        )
        for dim in range(len(wanted.lengths))
    ]
    for cell in product(*(pairwise(edge) for edge in edges)):
        starts, lengths = tuple(a for a, _ in cell), tuple(b - a for a, b in cell)
        piece = Box(spec.name, starts, lengths)
        if not any(part.contains(piece) for part in common):
            raise LayoutError(
                f"nobody who is left holds {spec.name}{[list(span) for span in cell]}",
                remedy="restore this run from a checkpoint",
            )
        yield from _halve(piece, max(1, limit // item))


def _halve(box: Box, most: int) -> Iterator[Box]:
    """Halve a box along its first dim that can be, until no part has more than `most` elements.

    Parts of a box that is contiguous in memory are contiguous too.
    """
    dim = next((d for d, length in enumerate(box.lengths) if length > 1), None)
    if box.size <= most or dim is None:
        yield box
        return
    half = box.lengths[dim] // 2
    for start, length in ((0, half), (half, box.lengths[dim] - half)):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim] += start
        lengths[dim] = length
        yield from _halve(Box(box.name, tuple(offsets), tuple(lengths)), most)


class _SenderChooser:
    """Chooses a source among holders: on the target's node if possible, then the least loaded."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self._nodes = nodes
        self._load: Counter[int] = Counter()  # bytes that each rank sends
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def pick(self, holders: tuple[int, ...], target: int, nbytes: int) -> int:
        """The sender of `nbytes` to `target`; counts them."""
        node = self._nodes[target]
        near = tuple(rank for rank in holders if self._nodes[rank] == node) or holders
        heap = self._heaps.setdefault(near, [(0, rank) for rank in near])
        while (top := heap[0])[0] != self._load[top[1]]:  # has sent for another set since
            heapreplace(heap, (self._load[top[1]], top[1]))
        rank = top[1]
        self._load[rank] += nbytes
        heapreplace(heap, (self._load[rank], rank))
        return rank


class _RoundPlanner:
    """Collects transfers; a new round begins where a rank would have more than `window` bytes."""

    def __init__(self, window: int) -> None:
        self.transfers: list[Transfer] = []
        self._window, self._round = window, 0
        self._bytes_in_round: Counter[int] = Counter()
        self._numbers: Counter[tuple[int, int]] = Counter()

    @property
    def rounds(self) -> int:
        return self._round + 1 if self.transfers else 0

    def add(self, source: int, target: int, box: Box, nbytes: int) -> None:
        most = max(self._bytes_in_round[source], self._bytes_in_round[target])
        if most and most + nbytes > self._window:
            self._round += 1
            self._bytes_in_round.clear()
        for rank in (source, target):
            self._bytes_in_round[rank] += nbytes
        number = self._numbers[source, target]
        self._numbers[source, target] += 1
        self.transfers.append(Transfer(source, target, box, self._round, number))


def _digest(
    old: Topology,
    new: Topology,
    table: StateTable,
    came_from: Sequence[int | None],
    limit: int,
    window: int,
) -> str:
    made_from = [old.to_json(), new.to_json(), [s.to_json() for s in table], list(came_from)]
    text = json.dumps([*made_from, limit, window], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
