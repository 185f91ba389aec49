"""State on its way between live processes: real groups, real messages, bit by bit."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast.core.sharding.boxes import Box, whole_box
from holdfast.core.sharding.reshard_plan import plan_reshard
from holdfast.core.sharding.state_table import TensorSpec, local_boxes
from holdfast.errors import LayoutError, PeerLostError
from holdfast.layout import Layout, Replica, Topology, place_layout
from holdfast.parallel.axes.reshard import LocalShard, move
from holdfast.parallel.comm.transport import PeerGroup
from tests.support.dying_rank import dies_sending
from tests.support.processes import runs
from tests.support.ranks import RankContext, rank_values, ranks, wait_until

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
TABLE = (
    TensorSpec("rows", "F64", (7, 5), 0),
    TensorSpec("columns", "F32", (3, 8), 1),
    TensorSpec("short", "BF16", (2, 3), 0),  # empty on the last of three shards
    TensorSpec("scalar", "F32", ()),
    TensorSpec("heads", "F32", (8, 3), 0, 0, 4, (0,)),  # of the first block
    TensorSpec("out", "F64", (3, 8), 0, 1, 4, (1,)),  # of the second; columns by tp, then rows
    TensorSpec("tied", "F32", (9, 2), 0, 0, 9, (-1, 2)),  # on the first and the last stage
)


@dataclass(frozen=True)
class Part:
    name: str
    tensor: torch.Tensor
    box: Box


def full(spec: TensorSpec) -> torch.Tensor:
    count = torch.Size(spec.shape).numel()
    return (torch.arange(count) % 251 + 1).to(DTYPES[spec.dtype]).view(spec.shape)


def held(topology: Topology, rank: int, filled: bool) -> list[Part]:
    out = []
    for spec, box in zip(TABLE, local_boxes(topology, TABLE, rank), strict=True):
        value = full(spec)
        for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            value = value.narrow(dim, start, length)
        out.append(Part(spec.name, value.clone() if filled else value.clone().fill_(-1), box))
    return out


def world(generation: int, shapes: list[list[int]], order: list[int]) -> Topology:
    """Replicas of the given (pp, dp_shard, tp), of a model of two blocks, over the ranks of
    `order`."""
    replicas = []
    start = 0
    for index, (pp, dp_shard, tp) in enumerate(shapes):
        ranks = tuple(order[start : start + pp * dp_shard * tp])
        start += len(ranks)
        replicas.append(Replica(index, ranks, (pp, dp_shard, 1, tp), (1, 1) if pp == 2 else ()))
    return Topology(generation, tuple(replicas), ("node",) * len(order))


def _moved(
    rank: RankContext,
    before: list[Any],
    after: list[Any],
    came_from: list[int | None],
    limit: int,
    window: int,
) -> int:
    old, new = world(1, *before), world(2, *after)
    peers = PeerGroup(rank.store(), "move", rank.rank, rank.world_size, seconds=120)
    moves = plan_reshard(old, new, TABLE, came_from, rank.rank, limit=limit, window=window)
    was = came_from[rank.rank]
    mine: dict[str, LocalShard] = {} if was is None else {p.name: p for p in held(old, was, True)}
    parts = held(new, rank.rank, False)
    move(mine, parts, moves, peers, list(range(rank.world_size)), step=7)
    assert not mine
    for got, want in zip(parts, held(new, rank.rank, True), strict=True):
        assert got.tensor.dtype == want.tensor.dtype
        assert torch.equal(got.tensor, want.tensor), got.name
    peers.close()
    return moves.rounds


@pytest.mark.parametrize("window", [24, 1 << 20])
@pytest.mark.parametrize(
    ("before", "after", "came_from"),
    [
        (([[1, 2, 1], [1, 1, 1]], [0, 1, 2]), ([[1, 3, 1]], [2, 0, 1]), [1, 2, 0]),
        (([[1, 3, 1]], [0, 1, 2]), ([[1, 1, 1], [2, 1, 1]], [1, 2, 0]), [0, 1, 2]),
        (([[1, 1, 1]] * 2, [0, 1]), ([[1, 3, 1], [1, 1, 1]], [3, 1, 0, 2]), [None, 1, 0, None]),
        (([[1, 2, 1]] * 2, [0, 1, 2, 3]), ([[1, 2, 1]], [0, 1]), [3, 0]),
        (([[2, 1, 2]], [0, 1, 2, 3]), ([[1, 2, 2]], [3, 0, 1, 2]), [2, 3, 1, 0]),
        (([[1, 1, 4]], [0, 1, 2, 3]), ([[2, 1, 1], [1, 1, 2]], [1, 0, 3, 2]), [0, 1, 2, 3]),
    ],
)
def test_every_dtype_and_shape_arrives_whole(
    before: list[Any], after: list[Any], came_from: list[int | None], window: int
) -> None:
    arguments = {
        "before": before,
        "after": after,
        "came_from": came_from,
        "limit": 16,
        "window": window,
    }
    rounds = rank_values(_moved, len(came_from), arguments)
    assert len(set(rounds)) == 1
    assert (rounds[0] > 1) == (window == 24)


@ranks(2)
@pytest.mark.parametrize("what", ["different rebuilds", "state after step 7"])
def test_ranks_that_do_not_agree_refuse(rank: RankContext, what: str) -> None:
    other = rank.rank if what == "different rebuilds" else 0
    old = place_layout(Layout(dp_replicate=2), 1, ("node",) * 2)
    new = place_layout(Layout(dp_shard=2), 2 + other, ("node",) * 2)
    peers = PeerGroup(rank.store(), "move", rank.rank, 2, seconds=120)
    moves = plan_reshard(old, new, TABLE, (0, 1), rank.rank)
    mine: dict[str, LocalShard] = {p.name: p for p in held(old, rank.rank, True)}
    with pytest.raises(LayoutError, match=what):
        move(mine, held(new, rank.rank, False), moves, peers, (0, 1), step=7 + rank.rank)
    assert len(mine) == len(TABLE)  # nothing was given up


@ranks(3, dies={2: "SIGKILL"})
def test_a_peer_that_dies_on_the_way_is_an_error_in_all_others(rank: RankContext) -> None:
    old = place_layout(Layout(dp_shard=3), 1, ("node",) * 3)
    new = place_layout(Layout(dp_replicate=3), 2, ("node",) * 3)
    peers = PeerGroup(rank.store(), "move", rank.rank, 3, seconds=600)
    moves = plan_reshard(old, new, TABLE, (0, 1, 2), rank.rank)
    mine: dict[str, LocalShard] = {p.name: p for p in held(old, rank.rank, True)}
    if rank.rank == 2:  # agrees to the plan, and is killed before it has sent its part
        peers.send = lambda *_: rank.kill(2)  # type: ignore[method-assign]
    with pytest.raises(PeerLostError):
        move(mine, held(new, rank.rank, False), moves, peers, (0, 1, 2), step=7)


@ranks(4, dies=dict.fromkeys((1, 2, 3), "SIGALRM"))
def test_who_is_sent_state_by_a_peer_that_dies_can_be_woken(rank: RankContext) -> None:
    """In the midst of a piece of 128 MB: gloo itself wakes nobody then. Three try to end there."""
    if rank.rank > 0:
        _sent_state(rank, rank.rank)
    cut = [peer for peer in (1, 2, 3) if _sent_state(rank, peer)]
    assert cut, "nobody was in the midst of it"


def _sent_state(rank: RankContext, peer: int) -> bool:
    """By that peer to rank 0; whether it ended in the midst of it."""
    table = (TensorSpec("large", "F32", (32 << 20,)),)
    old, new = world(1, [[1, 1, 1]], [0]), world(2, [[1, 1, 1]] * 2, [0, 1])
    me = min(rank.rank, 1)
    peers = PeerGroup(rank.store(), f"move{peer}", me, 2, seconds=600)
    came_from = [None, 0]  # rank 0 is new
    moves = plan_reshard(old, new, table, came_from, me, limit=1 << 30, window=1 << 30)
    tensor = torch.full(table[0].shape, float(me))
    part = Part("large", tensor, whole_box("large", table[0].shape))
    if me:
        dies_sending(rank, peers)
        move({"large": part}, [part], moves, peers, (0, 1), step=7)
        rank.wait_mark("never", 0)

    def end() -> None:
        wait_until(lambda: not runs(rank.pid(peer)), what="its end")
        peers.abort()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(PeerLostError):
        move({}, [part], moves, peers, (0, 1), step=7)
    ending.join()
    return bool(tensor[0] != 0) and bool(tensor[-1] == 0)


def test_a_tensor_of_another_size_or_dtype_is_never_sent() -> None:
    one = world(1, [[1, 1, 1]], [0])
    moves = plan_reshard(one, world(2, [[1, 1, 1]], [0]), TABLE, (0,), 0)
    alone = PeerGroup(torch.distributed.HashStore(), "move", 0, 1)
    for wrong in (torch.ones(7, 4, dtype=torch.float64), torch.ones(7, 5)):
        mine: dict[str, LocalShard] = {p.name: p for p in held(one, 0, True)}
        mine["rows"] = Part("rows", wrong, whole_box("rows", (7, 5)))
        with pytest.raises(RuntimeError, match="rows"):
            move(mine, held(one, 0, False), moves, alone, (0,), step=7)
