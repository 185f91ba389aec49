"""The fixed binary tree in which gradients are summed, and who computes which leaf.

Floating-point addition is not associative, so the bits of a sum depend on its order. Here the
order is fixed by the number of logical microbatches alone: leaf j is the gradient of microbatch
j, and the left subtree of a node with n leaves holds the largest power of two below n. *Who*
computes a leaf is a dealing table and may change at any step; a **piece** is a maximal subtree
that lies wholly inside one share. A piece is summed where it was computed and travels once; what
lies above the pieces is summed afterwards, in tree order. So the sum has the same bits for any
dealing.

    leaves 5, dealt (0 1 2 | 3 4)            [0,5)
                                            /     \\
                                        [0,4)     4          pieces of share 0: [0,2) and 2
                                        /    \\                pieces of share 1: 3 and 4
                                   [0,2)    [2,4)
                                   0   1    2   3

Pieces are summed like a binary counter: a finished subtree waits on a stack until its sibling is
there, so a piece of n leaves never needs more than about log2(n) partial sums at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Shares = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, order=True)
class Node:
    """The subtree over leaves [start, stop)."""

    start: int
    stop: int

    @property
    def leaves(self) -> int:
        return self.stop - self.start

    def split(self) -> tuple[Node, Node]:
        """The two children. The left one holds the largest power of two below `leaves`."""
        middle = self.start + (1 << ((self.leaves - 1).bit_length() - 1))
        return Node(self.start, middle), Node(middle, self.stop)


@dataclass(frozen=True)
class ReductionTree:
    """The tree over `leaves` logical microbatches; nothing else decides its form."""

    leaves: int

    def __post_init__(self) -> None:
        if self.leaves < 1:
            raise ValueError(f"a tree needs a leaf, got {self.leaves}")

    @property
    def root(self) -> Node:
        return Node(0, self.leaves)

    def fold(
        self, values: Mapping[Node, T], add: Callable[[T, T], T], node: Node | None = None
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
        leaves = {Node(j, j + 1): value for j, value in enumerate(values)}
        return self.fold(leaves, lambda a, b: a + b)


def pieces(tree: ReductionTree, share: Sequence[int]) -> tuple[Node, ...]:
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

    def walk(node: Node) -> Iterator[Node]:
        if end_of_run.get(node.start, -1) >= node.stop:
            yield node
        elif node.leaves > 1:
            for child in node.split():
                if _any_between(ordered, child):
                    yield from walk(child)

    return tuple(walk(tree.root))


def _any_between(ordered: list[int], node: Node) -> bool:
    at = bisect_left(ordered, node.start)
    return at < len(ordered) and ordered[at] < node.stop


@dataclass(frozen=True)
class Turn:
    """What happens to one leaf of a share.

    With `hold` the value stays where it was computed, and the next leaf, its sibling, is added
    to it there. Otherwise the value goes to the partial sum at `depth` of piece number `piece`
    (is added to what is there if `accumulate`, replaces it otherwise); then, `carries` times, the
    sum at the present depth is added to the one below. `finished`: the piece now lies complete
    at depth 0.
    """

    leaf: int
    hold: bool
    piece: int
    depth: int
    accumulate: bool
    carries: int
    finished: bool


def counter(tree: ReductionTree, share: Sequence[int], pairs: bool = False) -> tuple[Turn, ...]:
    """The binary counter that sums a share's pieces, one turn per leaf in rising order.

    What is a right child is added straight to its finished left sibling. With `pairs`, the left
    one of two sibling leaves is held where it was computed, which saves writing it to a partial
    sum (autograd adds to a gradient that is already there). The bits are the same.
    """
    turns: list[Turn] = []
    for number, piece in enumerate(pieces(tree, share)):
        parents: dict[Node, Node] = {}  # right child -> its left sibling's parent
        _right_children(piece, parents)
        stack: list[Node] = []
        j = piece.start
        while j < piece.stop:
            node = Node(j, j + 1)
            pair = parents.get(Node(j + 1, j + 2))
            if pairs and pair == Node(j, j + 2):
                turns.append(Turn(j, True, number, 0, False, 0, False))
                node, j = pair, j + 1
            accumulate = _completes(node, stack, parents)
            if accumulate:
                node = parents[node]
                stack.pop()
            depth, carries = len(stack), 0
            while _completes(node, stack, parents):
                node, carries = parents[node], carries + 1
                stack.pop()
            stack.append(node)
            turns.append(Turn(j, False, number, depth, accumulate, carries, node == piece))
            j += 1
    return tuple(turns)


def _right_children(node: Node, parents: dict[Node, Node]) -> None:
    if node.leaves == 1:
        return
    left, right = node.split()
    parents[right] = node
    _right_children(left, parents)
    _right_children(right, parents)


def _completes(node: Node, stack: list[Node], parents: dict[Node, Node]) -> bool:
    parent = parents.get(node)
    return parent is not None and bool(stack) and stack[-1] == Node(parent.start, node.start)


@lru_cache(maxsize=64)  # asked for at every step
def deal(leaves: int, replicas: int, weights: Sequence[float] | None = None) -> Shares:
    """Contiguous shares, one per replica; any other dealing is as legal.

    Without weights, shares differ by at most one leaf, and among those dealings one with the
    fewest pieces is taken, for each piece costs the bytes of one gradient. With weights (the
    speeds of the replicas), leaves are apportioned to them by largest remainder. A replica gets
    an empty share when there are fewer leaves than replicas.
    """
    if replicas < 1:
        raise ValueError(f"{replicas} replicas cannot share {leaves} microbatches")
    if weights is None:
        sizes = _fewest_pieces(ReductionTree(leaves), replicas)
    else:
        sizes = _apportion(leaves, replicas, weights)
    shares: list[tuple[int, ...]] = []
    start = 0
    for size in sizes:
        shares.append(tuple(range(start, start + size)))
        start += size
    return tuple(shares)


def _fewest_pieces(tree: ReductionTree, replicas: int) -> list[int]:
    """Sizes `floor` and `floor + 1` in the order that cuts the tree into the fewest pieces.

    Dynamic programming over (shares dealt, larger ones among them), which fixes the boundary.
    """
    floor, larger = divmod(tree.leaves, replicas)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for dealt in range(replicas):
        following: dict[int, tuple[int, list[int]]] = {}
        for used, (cost, sizes) in best.items():
            start = dealt * floor + used
            for extra in (1, 0):
                now_used = used + extra
                if now_used > larger or larger - now_used > replicas - dealt - 1:
                    continue
                stop = start + floor + extra
                now = cost + _count_inside(tree.root, start, stop)
                if now_used not in following or now < following[now_used][0]:
                    following[now_used] = (now, [*sizes, floor + extra])
        best = following
    return best[larger][1]


def _count_inside(node: Node, start: int, stop: int) -> int:
    """Pieces of the contiguous share [start, stop) below `node`."""
    if node.stop <= start or stop <= node.start:
        return 0
    if start <= node.start and node.stop <= stop:
        return 1
    return sum(_count_inside(child, start, stop) for child in node.split())


def _apportion(leaves: int, replicas: int, weights: Sequence[float]) -> list[int]:
    if len(weights) != replicas or any(w < 0 for w in weights) or sum(weights) <= 0:
        raise ValueError(f"weights {tuple(weights)} do not weigh {replicas} replicas")
    exact = [leaves * w / sum(weights) for w in weights]
    sizes = [int(e) for e in exact]
    by_remainder = sorted(range(replicas), key=lambda r: (sizes[r] - exact[r], r))
    for r in by_remainder[: leaves - sum(sizes)]:
        sizes[r] += 1
    return sizes


def check_dealing(leaves: int, shares: Shares) -> None:
    """Raises ValueError unless every leaf stands in exactly one share."""
    dealt = sorted(j for share in shares for j in share)
    if dealt != list(range(leaves)):
        raise ValueError(f"dealing {shares} does not give out {leaves} microbatches once each")
