"""The reducer: the same bits for any number of replicas and any dealing, and prompt errors."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from holdfast.core.sharding.boxes import whole_box
from holdfast.core.sharding.reduction_tree import ReductionTree, Shares, deal
from holdfast.errors import PeerLostError
from holdfast.parallel.axes.replicated import ReplicatedGradients
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.gradients.cell_team import ExchangeKind
from tests.support.gradient_cells import single_cell
from tests.support.ranks import RankContext, rank_values, ranks

DEALINGS: dict[int, list[tuple[int, Shares]]] = {
    1: [(7, deal(7, 1)), (8, deal(8, 1)), (12, deal(12, 1))],
    2: [(7, deal(7, 2)), (7, ((1, 2, 6), (0, 3, 4, 5))), (8, ((), tuple(range(8))))],
    3: [(8, deal(8, 3)), (7, ((6, 0), (5, 2), (1, 3, 4))), (12, deal(12, 3))],
    4: [
        (12, deal(12, 4)),
        (7, ((0, 6), (1, 5), (2, 4), (3,))),
        (8, ((0, 1, 2), (3,), (), (4, 5, 6, 7))),
    ],
    6: [(12, deal(12, 6)), (8, deal(8, 6)), (7, ((0,), (6,), (), (1, 2), (5,), (3, 4)))],
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(9, 33), nn.GELU(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3)
    )


def _loss(model: nn.Module, leaf: int) -> Tensor:
    generator = torch.Generator().manual_seed(leaf)
    x = torch.randn(4, 9, generator=generator) * 10.0 ** (leaf % 5 - 2)
    return model(x).square().sum()


def _feeder(
    model: nn.Module,
    peers: PeerGroup,
    fast: bool = False,
    exchange: ExchangeKind = "direct",
    dtype: torch.dtype = torch.float32,
) -> ReplicatedGradients:
    named = dict(model.named_parameters())
    boxes = {name: whole_box(name, p.shape) for name, p in named.items()}
    cells = single_cell(boxes, peers, exchange)
    return ReplicatedGradients(named, boxes, cells, dtype=dtype, bucket_bytes=600, fast=fast)


def _step(
    model: nn.Module, feeder: ReplicatedGradients, rank: int, leaves: int, shares: Shares
) -> None:
    feeder.begin(leaves, shares)
    for leaf in sorted(shares[rank]):
        feeder.start_leaf(leaf)
        _loss(model, leaf).backward()
        feeder.end_leaf()
    feeder.finish()
    exchange(feeder.reducers[0].peers, torch.zeros(1, dtype=torch.int64), [1] * len(shares), tag=1)


def _digest(feeder: ReplicatedGradients) -> str:
    return hashlib.sha256(feeder.reducers[0].gradient.numpy().tobytes()).hexdigest()


def _reference(leaves: int) -> list[Tensor]:
    """Gradients per leaf, added up in tree order by the definition, without a reducer."""
    model = _model()
    tree = ReductionTree(leaves)
    per_leaf = [
        torch.autograd.grad(_loss(model, j), list(model.parameters())) for j in range(leaves)
    ]
    nodes = {child: per_leaf[child.start] for child in _leaf_nodes(tree)}
    return list(tree.fold(nodes, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))))


def _leaf_nodes(tree: ReductionTree):  # type: ignore[no-untyped-def]
    from holdfast.core.sharding.reduction_tree import TreeNode

    return [TreeNode(j, j + 1) for j in range(tree.leaves)]


def _all_dealings(rank: RankContext, how: ExchangeKind) -> list[str]:
    """Each dealing twice in a row on one reducer, as two steps."""
    peers = PeerGroup(rank.store(), "g1/reduce", rank.rank, rank.world_size, seconds=120)
    model = _model()
    feeder = _feeder(model, peers, exchange=how)
    out = []
    for leaves, shares in DEALINGS[rank.world_size]:
        first = None
        for _ in range(2):
            _step(model, feeder, rank.rank, leaves, shares)
            first = first or _digest(feeder)
            assert _digest(feeder) == first
        for got, want in zip(feeder.gradients(), _reference(leaves), strict=True):
            assert torch.equal(got, want)
        out.append(f"{leaves}:{first}")
    return out


def test_bits_do_not_depend_on_replicas_or_dealing() -> None:
    seen: dict[str, set[str]] = {}
    for size in DEALINGS:
        for how in ("direct", "gathered") if size > 1 else ("direct",):
            for values in rank_values(_all_dealings, size, {"how": how}):
                for value in values:
                    leaves, digest = value.split(":")
                    seen.setdefault(leaves, set()).add(digest)
    assert {leaves: len(digests) for leaves, digests in seen.items()} == {"7": 1, "8": 1, "12": 1}


def _fast(rank: RankContext) -> None:
    peers = PeerGroup(rank.store(), "g1/reduce", rank.rank, rank.world_size, seconds=120)
    model = _model()
    feeder = _feeder(model, peers, fast=True)
    for leaves, shares in DEALINGS[rank.world_size]:
        _step(model, feeder, rank.rank, leaves, shares)
        for got, want in zip(feeder.gradients(), _reference(leaves), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_fast_reduction_is_the_same_sum_to_rounding(size: int) -> None:
    rank_values(_fast, size)


def test_a_sum_that_was_given_up_leaves_nothing_between_the_tensors() -> None:
    """An aborted collective may write anything where it receives: also where no pass writes."""
    model = _model()
    feeder = _feeder(model, PeerGroup(torch.distributed.HashStore(), "g1", 0, 1))
    _step(model, feeder, 0, 2, ((0, 1),))
    norm, (reducer,) = feeder.squared_norm(), feeder.reducers
    assert reducer.gradient.numel() > sum(p.numel() for p in model.parameters())
    feeder.begin(2, ((0, 1),))
    reducer.is_summed = True  # as one that receives does
    feeder.fail(PeerLostError("a peer was lost"))
    reducer.gradient.fill_(1e9)
    boxes = {name: whole_box(name, p.shape) for name, p in model.named_parameters()}
    survivors = PeerGroup(torch.distributed.HashStore(), "g2", 0, 1)
    assert feeder.regroup(single_cell(boxes, survivors, "direct"), by_unit=False)
    _step(model, feeder, 0, 2, ((0, 1),))
    assert feeder.squared_norm() == norm


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)})
    peers = PeerGroup(torch.distributed.HashStore(), "g1", 0, 1)
    feeder = _feeder(model, peers)
    for _ in range(2):
        feeder.begin(2, ((0, 1),))
        for leaf in range(2):
            feeder.start_leaf(leaf)
            model["used"](torch.ones(1, 3)).sum().backward()
            feeder.end_leaf()
        feeder.finish()
        gradients = feeder.gradients()
        assert torch.equal(gradients[0], torch.full((3, 3), 2.0))
        assert not gradients[2].any()
        assert not gradients[3].any()


@ranks(3, dies={1: "SIGKILL"})
@pytest.mark.parametrize("how", ["direct", "gathered", "fast"])
def test_a_peer_killed_within_a_step_is_an_error_in_the_others(rank: RankContext, how: str) -> None:
    peers = PeerGroup(rank.store(), "g1/reduce", rank.rank, rank.world_size, seconds=600)
    model = _model()
    gathered = how == "gathered"
    feeder = _feeder(model, peers, how == "fast", "gathered" if gathered else "direct")
    shares = deal(6, 3)
    _step(model, feeder, rank.rank, 6, shares)
    feeder.begin(6, shares)
    rank.barrier("begun")  # else begin() may already find the peer gone
    feeder.start_leaf(shares[rank.rank][0])
    loss = _loss(model, 0)
    if rank.rank == 1:
        rank.kill(1)
    loss.backward()
    feeder.end_leaf()
    feeder.start_leaf(shares[rank.rank][1])
    _loss(model, 1).backward()
    feeder.end_leaf()
    with pytest.raises(PeerLostError):
        feeder.finish()


@ranks(2, dies={1: "SIGKILL"})
def test_a_peer_killed_before_the_vote_is_an_error_in_the_exchange(rank: RankContext) -> None:
    peers = PeerGroup(rank.store(), "g1/control", rank.rank, rank.world_size, seconds=600)
    record = torch.arange(3, dtype=torch.int64) + rank.rank
    first = exchange(peers, record, [3, 3], tag=1)
    assert [t.tolist() for t in first] == [[0, 1, 2], [1, 2, 3]]
    if rank.rank == 1:
        rank.kill(1)
    with pytest.raises(PeerLostError):
        exchange(peers, record, [3, 3], tag=1)
