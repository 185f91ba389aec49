"""The fixed reduction tree: its form, dealings, pieces, and the binary counter that sums them."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.sharding.reduction_tree import (
    ReductionTree,
    TreeNode,
    check_dealing,
    count_pieces,
    deal,
    maximal_subtrees,
    piece_sizes,
    plan_accumulation,
)


def _run_counter(
    tree: ReductionTree, share: tuple[int, ...], values: list[float], pairs: bool
) -> list[float]:
    """Execute the turns on a stack of slots, as the reducer does on gradients."""
    done: list[float] = []
    slots: dict[int, float] = {}
    held: float | None = None
    for turn in plan_accumulation(tree, share, pairs):
        if turn.stays_in_place:
            assert held is None
            held = values[turn.leaf]
            continue
        base = slots[turn.depth] if turn.accumulates else None
        value = values[turn.leaf] if held is None else held + values[turn.leaf]
        held = None
        slots[turn.depth] = value if base is None else base + value
        depth = turn.depth
        for _ in range(turn.carries):
            slots[depth - 1] = slots[depth - 1] + slots.pop(depth)
            depth -= 1
        if turn.completes_piece:
            assert depth == 0
            assert turn.piece == len(done)
            done.append(slots.pop(0))
    assert not slots
    return done


@st.composite
def _dealt(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, ...], ...]]:
    leaves = draw(st.integers(1, 40))
    replicas = draw(st.integers(1, 7))
    owner = draw(st.lists(st.integers(0, replicas - 1), min_size=leaves, max_size=leaves))
    shares = [tuple(j for j in range(leaves) if owner[j] == r) for r in range(replicas)]
    return leaves, tuple(shares)


def test_left_subtree_is_the_largest_power_of_two_below() -> None:
    splits = [TreeNode(0, n).split()[0].leaves for n in range(2, 18)]
    assert splits == [1, 2, 2, *[4] * 4, *[8] * 8, 16]


def test_pieces_of_the_drawn_example() -> None:
    tree = ReductionTree(5)
    assert maximal_subtrees(tree, (0, 1, 2)) == (TreeNode(0, 2), TreeNode(2, 3))
    assert maximal_subtrees(tree, (3, 4)) == (TreeNode(3, 4), TreeNode(4, 5))
    assert maximal_subtrees(tree, ()) == ()


def test_piece_sizes_are_those_of_the_maximal_subtrees() -> None:
    for leaves, start in product(range(1, 20), range(20)):
        for stop in range(start, leaves + 1):
            nodes = maximal_subtrees(ReductionTree(leaves), range(start, stop))
            assert piece_sizes(leaves, start, stop) == [node.leaves for node in nodes]


@given(_dealt(), st.randoms(use_true_random=False), st.booleans())
def test_any_dealing_sums_to_the_same_bits(dealt, random, pairs) -> None:  # type: ignore[no-untyped-def]
    leaves, shares = dealt
    tree = ReductionTree(leaves)
    values = [random.uniform(-1, 1) * 10 ** random.randint(-8, 8) for _ in range(leaves)]
    check_dealing(leaves, shares)
    held: dict[TreeNode, float] = {}
    for share in shares:
        nodes = maximal_subtrees(tree, share)
        assert sorted(j for n in nodes for j in range(n.start, n.stop)) == list(share)
        held.update(zip(nodes, _run_counter(tree, share, values, pairs), strict=True))
    assert tree.fold(held, lambda a, b: a + b) == tree.sum(values)


@given(_dealt())
def test_partial_sums_grow_with_the_logarithm_only(dealt) -> None:  # type: ignore[no-untyped-def]
    leaves, shares = dealt
    for share in shares:
        deepest = max((t.depth for t in plan_accumulation(ReductionTree(leaves), share)), default=0)
        assert deepest <= max(0, (max(1, len(share)) - 1).bit_length() - 1)


@given(st.integers(1, 64), st.integers(1, 12))
def test_default_dealing_is_balanced_and_complete(leaves: int, replicas: int) -> None:
    shares = deal(leaves, replicas)
    check_dealing(leaves, shares)
    sizes = [len(s) for s in shares]
    assert max(sizes) - min(sizes) <= 1
    assert [j for share in shares for j in share] == list(range(leaves))


def test_default_dealing_takes_the_fewest_pieces() -> None:
    def total(leaves: int, sizes: list[int]) -> int:
        tree, start, count = ReductionTree(leaves), 0, 0
        for size in sizes:
            count += len(maximal_subtrees(tree, tuple(range(start, start + size))))
            start += size
        return count

    for leaves, replicas in ((5, 3), (7, 3), (12, 5), (10, 4), (9, 6)):
        floor, larger = divmod(leaves, replicas)
        every = {
            total(leaves, [floor + (mask >> r & 1) for r in range(replicas)])
            for mask in range(2**replicas)
            if mask.bit_count() == larger
        }
        assert total(leaves, [len(s) for s in deal(leaves, replicas)]) == min(every)


def test_weights_apportion_leaves() -> None:
    assert [len(s) for s in deal(8, 3, weights=(1, 1, 2))] == [2, 2, 4]
    assert [len(s) for s in deal(7, 2, weights=(0.0, 1.0))] == [0, 7]
    assert [len(s) for s in deal(10, 3, weights=(1, 1, 1))] == [4, 3, 3]


@given(
    leaves=st.integers(1, 64),
    parts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=12),
)
def test_weighted_shares_are_within_a_leaf_of_their_part(
    leaves: int, parts: list[tuple[int, int]]
) -> None:
    weights, least = tuple(w for w, _ in parts), tuple(n for _, n in parts)
    plain = deal(leaves, len(parts), weights)
    check_dealing(leaves, plain)
    for share, weight in zip(plain, weights, strict=True):
        assert abs(len(share) - leaves * weight / sum(weights)) < 1
        assert list(share) == list(range(share[0], share[-1] + 1)) if share else True
    bounded = deal(leaves, len(parts), weights, least)
    check_dealing(leaves, bounded)
    if sum(least) > leaves:
        assert bounded == plain
        return
    assert all(len(share) >= bound for share, bound in zip(bounded, least, strict=True))
    # Those above their bound share what is left by weight.
    above = [r for r, share in enumerate(bounded) if len(share) > least[r] + 1]
    for one in above:
        for other in above:
            mine, theirs = len(bounded[one]), len(bounded[other])
            assert (mine - 1) / weights[one] < (theirs + 1) / weights[other]


@given(leaves=st.integers(1, 16), weights=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_weighted_dealing_takes_the_least_time(leaves: int, weights: list[int]) -> None:
    shares = deal(leaves, len(weights), tuple(weights))
    slowest = max(len(share) / weight for share, weight in zip(shares, weights, strict=True))
    parts = [leaves * weight / sum(weights) for weight in weights]
    every = product(*({int(part), -int(-part // 1)} for part in parts))
    best = min(
        max(size / weight for size, weight in zip(sizes, weights, strict=True))
        for sizes in every
        if sum(sizes) == leaves
    )
    assert slowest == best


def test_a_weighted_dealing_takes_few_pieces() -> None:
    # In the order of the replicas, the second share would be cut at the middle of the tree.
    assert [len(s) for s in deal(8, 3, (1, 2, 1))] == [2, 4, 2]
    assert sum(len(maximal_subtrees(ReductionTree(8), s)) for s in deal(8, 3, (1, 2, 1))) == 3
    shares = deal(12, 4, (1, 2, 2, 1))
    assert sum(len(maximal_subtrees(ReductionTree(12), s)) for s in shares) == 4


@given(st.integers(1, 200), st.data())
def test_pieces_are_counted_by_arithmetic(leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, leaves))
    stop = data.draw(st.integers(start, leaves))
    share = tuple(range(start, stop))
    assert count_pieces(leaves, start, stop) == len(maximal_subtrees(ReductionTree(leaves), share))


def test_more_replicas_than_microbatches_leaves_some_idle() -> None:
    shares = deal(2, 5)
    check_dealing(2, shares)
    assert sorted(len(s) for s in shares) == [0, 0, 0, 1, 1]
