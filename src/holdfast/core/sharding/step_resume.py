"""Resumes a step after a loss: computed leaves stay, the rest is dealt again.

The tree of `reduction_tree` decides every addition, whichever replica computes a leaf. So a partial
sum that a replica holds when a step is interrupted is a piece: a subtree, which is sent unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.core.sharding.reduction_tree import ReductionTree, Shares, TreeNode, maximal_subtrees

Computed = tuple[tuple[int, ...], ...]
"""By replica: the leaves that it has computed already."""


def partial_sums(
    leaves: int, share: Sequence[int], done: Sequence[int]
) -> list[tuple[TreeNode, tuple[int, int]]]:
    """Return the partial sums of a share after its first leaves, `done`, have been computed. Each
    has its (piece, depth) in the binary counter: depth 0 of a piece, or above it.

    These are the maximal subtrees inside `done`, because the counter carries at once.
    """
    tree = ReductionTree(leaves)
    whole = {node: number for number, node in enumerate(maximal_subtrees(tree, share))}
    found: list[tuple[TreeNode, tuple[int, int]]] = []
    depth = current = 0
    for node in maximal_subtrees(tree, done):
        if node in whole:
            found.append((node, (whole[node], 0)))
            continue
        if depth == 0:
            current = next(
                n for piece, n in whole.items() if piece.start <= node.start < piece.stop
            )
        found.append((node, (0, depth) if depth else (current, 0)))
        depth += 1
    return found


def deal_rest(leaves: int, computed: Computed, base: Shares) -> Shares:
    """Deal the leaves that are left; every replica keeps those that it has computed. All end as
    near to their share in `base` as possible. The rest is dealt in runs, for each piece costs the
    bytes of a gradient."""
    taken = {leaf for done in computed for leaf in done}
    rest = [leaf for leaf in range(leaves) if leaf not in taken]
    wanted = [max(0, len(share) - len(done)) for share, done in zip(base, computed, strict=True)]
    while sum(wanted) > len(rest):  # a replica has computed more than its share
        wanted[max(range(len(wanted)), key=lambda r: (wanted[r], r))] -= 1
    shares: list[tuple[int, ...]] = []
    start = 0
    for done, count in zip(computed, wanted, strict=True):
        shares.append(tuple(sorted((*done, *rest[start : start + count]))))
        start += count
    return tuple(shares)


def deal_away_from(shares: Shares, avoid: Mapping[int, Collection[int]]) -> Shares:
    """Return the same dealing, but with leaves in `avoid` moved away from the replicas listed
    there. A leaf changes places with a leaf of another replica, so all have as much to do as
    before. If no replica can change with it, it stays."""
    owner = {leaf: replica for replica, share in enumerate(shares) for leaf in share}
    settled: set[int] = set()
    for leaf in sorted(avoid.keys() & owner.keys()):
        at = owner[leaf]
        if at not in avoid[leaf]:
            continue
        for step in range(1, len(shares)):
            to = (at + step) % len(shares)
            there = (
                other
                for other in shares[to]
                if owner[other] == to and other not in settled and at not in avoid.get(other, ())
            )
            other = next(there, None) if to not in avoid[leaf] else None
            if other is not None:
                owner[leaf], owner[other] = to, at
                settled |= {leaf, other}
                break
    return tuple(
        tuple(sorted(leaf for leaf, replica in owner.items() if replica == index))
        for index in range(len(shares))
    )
