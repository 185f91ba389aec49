"""What a replica holds in the midst of a share, and how the rest is dealt."""

from __future__ import annotations

import random

from holdfast.core.sharding.reduction_tree import (
    ReductionTree,
    TreeNode,
    check_dealing,
    deal,
    maximal_subtrees,
    plan_accumulation,
)
from holdfast.core.sharding.step_resume import deal_rest, partial_sums


def _replayed(leaves: int, share: tuple[int, ...], count: int) -> dict[tuple[int, int], set[int]]:
    """The leaves that each slot of the binary counter holds after `count` turns."""
    slots: dict[tuple[int, int], set[int]] = {}
    for turn in plan_accumulation(ReductionTree(leaves), share)[:count]:
        slot = (0, turn.depth) if turn.depth else (turn.piece, 0)
        slots[slot] = {turn.leaf} | (slots[slot] if turn.accumulates else set())
        depth = turn.depth
        for _ in range(turn.carries):
            below = (turn.piece, 0) if depth == 1 else (0, depth - 1)
            slots[below] |= slots.pop((0, depth))
            depth -= 1
    return slots


def test_the_partial_sums_are_those_of_the_counter() -> None:
    draw = random.Random(3)
    for _ in range(400):
        leaves = draw.randint(1, 40)
        share = tuple(sorted(draw.sample(range(leaves), draw.randint(1, leaves))))
        count = draw.randint(0, len(share))
        held = partial_sums(leaves, share, share[:count])
        assert [node for node, _ in held] == list(
            maximal_subtrees(ReductionTree(leaves), share[:count])
        )
        assert {slot: set(range(n.start, n.stop)) for n, slot in held} == _replayed(
            leaves, share, count
        )


def test_the_rest_is_dealt_once_and_evenly() -> None:
    draw = random.Random(4)
    for _ in range(400):
        leaves, replicas = draw.randint(1, 40), draw.randint(1, 6)
        old = deal(leaves, replicas + draw.randint(0, 2))
        computed = tuple(share[: draw.randint(0, len(share))] for share in old[:replicas])
        base = deal(leaves, replicas)
        shares = deal_rest(leaves, computed, base)
        check_dealing(leaves, shares)
        for share, done, usual in zip(shares, computed, base, strict=True):
            assert set(done) <= set(share)
            assert len(share) <= max(len(usual), len(done))


def test_a_replica_that_has_more_than_its_share_gets_nothing() -> None:
    assert deal_rest(6, ((0, 1, 2, 3), ()), ((0, 1, 2), (3, 4, 5))) == ((0, 1, 2, 3), (4, 5))
    assert partial_sums(6, (0, 1, 2, 3), (0, 1, 2)) == [
        (TreeNode(0, 2), (0, 0)),
        (TreeNode(2, 3), (0, 1)),
    ]
