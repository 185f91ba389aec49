"""The fixed binary tree in which gradients are summed, and the dealing of its leaves.

Floating-point addition is not associative, so the bits of a sum depend on its order. Here the
number of logical microbatches alone fixes the order. Leaf j is the gradient of microbatch j. The
left subtree of a node with n leaves holds the largest power of two below n. A dealing table says
which replica computes a leaf, and may change at any step. A **piece** is a maximal subtree that
lies completely inside one share. A piece is summed where it was computed and travels once; the
nodes above the pieces are summed afterwards, in tree order. So the sum has the same bits for any
dealing.

    leaves 5, dealt (0 1 2 | 3 4)            [0,5)
                                            /     \\
                                        [0,4)     4          pieces of share 0: [0,2) and 2
                                        /    \\                pieces of share 1: 3 and 4
                                   [0,2)    [2,4)
                                   0   1    2   3

Pieces are summed like a binary counter: a finished subtree waits on a stack until its sibling is
complete. So a piece of n leaves never needs more than about log2(n) partial sums at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Shares = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, order=True)
class TreeNode:
    """The subtree over leaves [start, stop)."""

    start: int
    stop: int

    @property
    def leaves(self) -> int:
        return self.stop - self.start

    def split(self) -> tuple[TreeNode, TreeNode]:
        """The two children. The left one holds the largest power of two below `leaves`."""
        middle = self.start + (1 << ((self.leaves - 1).bit_length() - 1))
        return TreeNode(self.start, middle), TreeNode(middle, self.stop)


@dataclass(frozen=True)
class ReductionTree:
    """The tree over `leaves` logical microbatches; nothing else decides its form."""

    leaves: int

    def __post_init__(self) -> None:
        if self.leaves < 1:
            raise ValueError(f"a tree needs a leaf, got {self.leaves}")

    @property
    def root(self) -> TreeNode:
        return TreeNode(0, self.leaves)

    def fold(
        self, values: Mapping[TreeNode, T], add: Callable[[T, T], T], node: TreeNode | None = None
    ) -> T:
        """Sum up to `node` (the root), in tree order, from the values of subtrees that cover it.

        Raises KeyError with the first leaf that no subtree in `values` covers.
        """
        node = node or self.root
        if node in values:
            return values[node]
        if node.leaves == 1:
            raise KeyError(node.start)
        left, right = node.split()
        return add(self.fold(values, add, left), self.fold(values, add, right))

    def sum(self, values: Sequence[float]) -> float:
        """The sum of one number per leaf, in tree order: the same for any dealing."""
        if len(values) != self.leaves:
            raise ValueError(f"{len(values)} values for {self.leaves} leaves")
        leaves = {TreeNode(j, j + 1): value for j, value in enumerate(values)}
        return self.fold(leaves, lambda a, b: a + b)


def maximal_subtrees(tree: ReductionTree, share: Sequence[int]) -> tuple[TreeNode, ...]:
    """The maximal subtrees wholly inside `share`, from left to right.

    Raises ValueError when a leaf stands in `share` twice or is not in the tree.
    """
    held = set(share)
    if len(held) != len(share) or any(not 0 <= j < tree.leaves for j in held):
        raise ValueError(f"share {tuple(share)} is not a set of leaves below {tree.leaves}")
    # Runs of neighbouring leaves, so that "wholly inside" is one comparison for each node.
    end_of_run: dict[int, int] = {}
    for j in sorted(held, reverse=True):
        end_of_run[j] = end_of_run.get(j + 1, j + 1)
    ordered = sorted(held)

    def walk(node: TreeNode) -> Iterator[TreeNode]:
        if end_of_run.get(node.start, -1) >= node.stop:
            yield node
        elif node.leaves > 1:
            for child in node.split():
                at = bisect_left(ordered, child.start)
                if at < len(ordered) and ordered[at] < child.stop:
                    yield from walk(child)

    return tuple(walk(tree.root))


@dataclass(frozen=True)
class LeafAction:
    """The handling of one leaf of a share.

    With `stays_in_place` the value stays where it was computed, and the next leaf, its sibling, is
    added to it there. Otherwise the value goes to the partial sum at `depth` of piece number
    `piece`. With `accumulates` it is added to that sum, and replaces it otherwise. Then, `carries`
    times, the sum at the present depth is added to the one below. `completes_piece`: the piece is
    now complete at depth 0.
    """

    leaf: int
    stays_in_place: bool
    piece: int
    depth: int
    accumulates: bool
    carries: int
    completes_piece: bool


def plan_accumulation(
    tree: ReductionTree, share: Sequence[int], pairs: bool = False
) -> tuple[LeafAction, ...]:
    """Return the binary counter that sums a share's pieces, one turn per leaf in rising order.

    A right child is added straight to its finished left sibling. With `pairs`, the left one of two
    sibling leaves is held where it was computed. This saves writing it to a partial sum, as
    autograd adds to a gradient that is already there. The bits are the same.
    """
    turns: list[LeafAction] = []
    for number, piece in enumerate(maximal_subtrees(tree, share)):
        parents: dict[TreeNode, TreeNode] = {}  # right child -> its left sibling's parent
        _right_children(piece, parents)
        stack: list[TreeNode] = []
        j = piece.start
        while j < piece.stop:
            node = TreeNode(j, j + 1)
            pair = parents.get(TreeNode(j + 1, j + 2))
            if pairs and pair == TreeNode(j, j + 2):
                turns.append(LeafAction(j, True, number, 0, False, 0, False))
                node, j = pair, j + 1
            accumulate = _is_complete(node, stack, parents)
            if accumulate:
                node = parents[node]
                stack.pop()
            depth, carries = len(stack), 0
            while _is_complete(node, stack, parents):
                node, carries = parents[node], carries + 1
                stack.pop()
            stack.append(node)
            turns.append(LeafAction(j, False, number, depth, accumulate, carries, node == piece))
            j += 1
    return tuple(turns)


def _right_children(node: TreeNode, parents: dict[TreeNode, TreeNode]) -> None:
    if node.leaves == 1:
        return
    left, right = node.split()
    parents[right] = node
    _right_children(left, parents)
    _right_children(right, parents)


def _is_complete(node: TreeNode, stack: list[TreeNode], parents: dict[TreeNode, TreeNode]) -> bool:
    parent = parents.get(node)
    return parent is not None and bool(stack) and stack[-1] == TreeNode(parent.start, node.start)


@lru_cache(maxsize=64)  # asked for at every step
def deal(
    leaves: int,
    replicas: int,
    weights: Sequence[float] | None = None,
    least: Sequence[int] | None = None,
) -> Shares:
    """Return contiguous shares, one per replica; any other dealing is as legal.

    A share differs by less than a leaf from its replica's part by weight (without weights, all
    parts are equal). Of those dealings, the function takes the ones with the least maximum of
    leaves for their weight. Of these it takes one with few pieces, for each piece costs the bytes
    of one gradient. least: leaves that each replica gets at least, whatever its weight; ignored if
    there are too few leaves. Without it, a replica gets an empty share if there are fewer leaves
    than replicas.
    """
    if replicas < 1:
        raise ValueError(f"{replicas} replicas cannot share {leaves} microbatches")
    if weights is None:
        weights = (1,) * replicas
    if len(weights) != replicas or any(w < 0 for w in weights) or sum(weights) <= 0:
        raise ValueError(f"weights {tuple(weights)} do not weigh {replicas} replicas")
    floors, extra = _least_shares(leaves, weights, least)
    tree = ReductionTree(leaves)
    # Contiguous shares that cut the tree into few pieces: of `floors`, or one more if `extra`
    # allows it. Large shares are first or last, or in the order of the replicas.
    natural = list(range(len(floors)))
    rising = sorted(natural, key=lambda r: (weights[r], floors[r], r))
    orders = [natural] if len({*weights}) == 1 else [natural, rising[::-1], rising]
    found = [
        (*_choose_sizes(tree, [floors[r] for r in order], [extra[r] for r in order]), order)
        for order in orders
    ]
    _, sizes, order = min(found, key=lambda each: each[0])
    shares: list[tuple[int, ...]] = [()] * len(floors)
    start = 0
    for replica, size in zip(order, sizes, strict=True):
        shares[replica] = tuple(range(start, start + size))
        start += size
    return tuple(shares)


def _least_shares(
    leaves: int, weights: Sequence[float], least: Sequence[int] | None
) -> tuple[list[int], list[bool]]:
    """Return the least leaves of each share, and whether it may have one more.

    A replica that would get less than its `least` by weight gets that. The rest is shared out among
    the remaining replicas, until none would get less. One more is for those that then need the
    least time.
    """
    bounds = [0] * len(weights) if least is None or sum(least) > leaves else list(least)
    exact = [Fraction(w) for w in weights]
    fixed: set[int] = set()
    while True:
        free = [r for r in range(len(exact)) if r not in fixed]
        total = sum((exact[r] for r in free), Fraction(0))
        left = leaves - sum(bounds[r] for r in fixed)
        part = {r: left * exact[r] / total if total else Fraction(0) for r in free}
        short = {r for r in free if part[r] < bounds[r]}
        if not short:
            break
        fixed |= short
    floors = [bounds[r] if r in fixed else int(part[r]) for r in range(len(exact))]
    able = {r: (floors[r] + 1) / exact[r] for r in free if part[r].denominator > 1}
    larger = leaves - sum(floors)
    longest = sorted(able.values())[larger - 1] if larger else 0
    return floors, [r in able and able[r] <= longest for r in range(len(exact))]


_Chosen = tuple["_Chosen", int] | None  # those before, and whether this one is larger
# partial dealings that are followed; for fewer than so many larger shares, all are
_BEAM_WIDTH = 64


def _choose_sizes(
    tree: ReductionTree, floors: Sequence[int], extra: Sequence[bool]
) -> tuple[int, list[int]]:
    """(pieces, sizes): which shares get one leaf more.

    Dynamic programming over (shares dealt, larger ones among them), which fixes the boundary.
    """
    larger = tree.leaves - sum(floors)
    able = sum(extra)
    best: dict[int, tuple[int, _Chosen]] = {0: (0, None)}
    start = 0
    for floor, may in zip(floors, extra, strict=True):
        able -= may
        following: dict[int, tuple[int, _Chosen]] = {}
        for used, (cost, chosen) in best.items():
            for more in (1, 0) if may else (0,):
                now_used = used + more
                if not larger - able <= now_used <= larger:
                    continue
                first = start + used
                now = cost + count_pieces(tree.leaves, first, first + floor + more)
                if now_used not in following or now < following[now_used][0]:
                    following[now_used] = (now, (chosen, more))
        if len(following) > _BEAM_WIDTH:
            kept = sorted(following, key=lambda used: (following[used][0], used))[:_BEAM_WIDTH]
            following = {used: following[used] for used in kept}
        best = following
        start += floor
    cost, last = best[larger]
    sizes = list(floors)
    for index in reversed(range(len(sizes))):
        assert last is not None
        last, more = last
        sizes[index] += more
    return cost, sizes


def count_pieces(leaves: int, start: int, stop: int) -> int:
    """Pieces of the contiguous share [start, stop) in the tree over `leaves`, by arithmetic.

    Subtrees are aligned blocks of powers of two, cut off at the tree's right edge. From `start`
    they grow up to the most aligned boundary inside the share, then shrink.
    """
    if start >= stop:
        return 0
    if stop < leaves:
        bits = (start ^ stop).bit_length() - 1
        middle = (stop >> bits) << bits
        return (middle - start).bit_count() + (stop - middle).bit_count()
    found = 1
    while start and (start := start + (start & -start)) < leaves:
        found += 1
    return found


def piece_sizes(leaves: int, start: int, stop: int) -> list[int]:
    """Leaves of each piece of the contiguous share [start, stop), from left to right."""
    found = list[int]()
    while start < stop:
        size = start & -start or 1 << (leaves - 1).bit_length()  # of the largest subtree from here
        while min(start + size, leaves) > stop:
            size //= 2
        found.append(min(size, leaves - start))
        start += size
    return found


def check_dealing(leaves: int, shares: Shares) -> None:
    """Raises ValueError unless every leaf stands in exactly one share."""
    dealt = sorted(j for share in shares for j in share)
    if dealt != list(range(leaves)):
        raise ValueError(f"dealing {shares} does not give out {leaves} microbatches once each")
