"""Payload bytes that leave a rank, against the formulas."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.reduction_tree import ReductionTree, Shares, deal, maximal_subtrees
from holdfast.parallel.axes.replicated import ReplicatedGradients
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.trace import SpanRecorder
from holdfast.parallel.comm.transport import PeerGroup, exchange
from tests.support.gradient_cells import single_cell
from tests.support.ranks import RankContext, rank_values

DEALINGS: dict[int, list[tuple[int, Shares]]] = {
    2: [(2, deal(2, 2)), (8, deal(8, 2)), (8, ((0, 1, 4, 5), (2, 3, 6, 7)))],
    3: [(6, ((0, 1), (2, 3), (4, 5))), (8, ((0, 1, 4), (2, 3, 5), (6, 7)))],
    4: [(8, deal(8, 4)), (8, ((0, 4), (1, 5), (2, 6), (3, 7)))],
}


def _sent(rank: RankContext, fast: bool) -> list[list[float]]:
    """(pieces of this rank, what it sent as a fraction of the gradient) of each dealing."""
    traffic = TrafficCounter()
    peers = PeerGroup(rank.store(), "g1", rank.rank, rank.world_size, seconds=120, traffic=traffic)
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 50))
    named = dict(model.named_parameters())
    boxes = {name: whole_box(name, p.shape) for name, p in named.items()}
    feeder = ReplicatedGradients(
        named, boxes, single_cell(boxes, peers), dtype=torch.float32, bucket_bytes=60_000, fast=fast
    )
    size = sum(p.nbytes for p in named.values())
    out = []
    for leaves, shares in DEALINGS[rank.world_size]:
        traffic.reset()
        feeder.begin(leaves, shares)
        for leaf in shares[rank.rank]:
            feeder.start_leaf(leaf)
            model(torch.ones(2, 100)).sum().backward()
            feeder.end_leaf()
        feeder.finish()
        assert set(traffic.bytes_by_kind) == {"reduce"}
        count = 1 if fast else len(maximal_subtrees(ReductionTree(leaves), shares[rank.rank]))
        out.append([count, traffic.bytes_by_kind["reduce"] / size])
        exchange(peers, torch.zeros(3, dtype=torch.int64), [3] * rank.world_size, tag=1)
        assert traffic.bytes_by_kind["control"] == 24 * (rank.world_size - 1)
    return out


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_reducer_sends_k_plus_1_parts_for_k_pieces(size: int, fast: bool) -> None:
    seen = set()
    for values in rank_values(_sent, size, {"fast": fast}):
        for k, fraction in values:
            assert fraction == pytest.approx((k + 1) * (size - 1) / size, rel=0.02)
            seen.add(k)
    assert seen == ({1} if fast else {1, 2})


def test_an_unknown_kind_is_refused() -> None:
    traffic = TrafficCounter()
    traffic.add("tp", 3)
    traffic.add("tp", 4)
    assert traffic.bytes_by_kind == {"tp": 7}
    with pytest.raises(ValueError, match="no kind of traffic"):
        traffic.add("gossip", 1)
    traffic.reset()
    assert traffic.bytes_by_kind == {}


def test_seconds_under_way_are_counted_once_and_only_waits_are_exposed() -> None:
    recorder = SpanRecorder()
    traffic = TrafficCounter(recorder)
    start = time.monotonic()
    with traffic.exposed("tp"):
        pass
    traffic.note("tp", "gather", start - 2.0)
    traffic.note("tp", "scatter", start - 1.0)
    seconds, exposed = traffic.seconds_by_kind["tp"]
    assert 0.0 < exposed < 1.0
    assert 2.0 <= seconds < 3.0 - 1e-9 + exposed
    assert [(s.track, s.name) for s in recorder.spans] == [("tp", "gather"), ("tp", "scatter")]
    traffic.reset()
    assert traffic.seconds_by_kind == {}
