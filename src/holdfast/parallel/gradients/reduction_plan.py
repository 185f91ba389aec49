"""The effect of a dealing on the members of a cell: their pieces, and how these add up.

The tree of `core/sharding/reduction_tree.py` is the same for every part of a cell. Here it becomes
a list of additions over all pieces that arrive at an owner. The list is the same for each bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast.core.sharding.reduction_cells import Member
from holdfast.core.sharding.reduction_tree import (
    LeafAction,
    ReductionTree,
    Shares,
    TreeNode,
    check_dealing,
    maximal_subtrees,
    plan_accumulation,
)
from holdfast.core.sharding.step_resume import Computed


@dataclass(frozen=True)
class ReductionPlan:
    """The effect of a dealing on one member. The same for all buckets.

    pieces: of every member, in their order; all of them, one after another, are the sources of
    a sum. additions: (i, j) adds source j to source i; the last one completes the sum.
    `whole_source`: the source that is the sum if there is nothing to add; None without any source.
    stride: tags per bucket; the last one is the result's.
    """

    tree: ReductionTree
    leaf_actions: dict[int, LeafAction]
    pieces: tuple[tuple[TreeNode, ...], ...]
    additions: tuple[tuple[int, int], ...] = ()
    whole_source: int | None = None

    @property
    def stride(self) -> int:
        return max(len(p) for p in self.pieces) + 1


def make_reduction_plan(
    leaves: int,
    shares: Shares,
    members: Sequence[Member],
    own_index: int,
    fast: bool,
    pairs: bool,
    computed: Computed = (),
) -> ReductionPlan:
    """The plan of member number `own_index`. fast: no tree, each replica sums its share in
    sequence. computed: what each replica has of its share when the step begins; those pieces come
    first.

    Raises ValueError when the dealing does not give out every leaf once.
    """
    check_dealing(leaves, shares)
    tree = ReductionTree(leaves)
    own = members[own_index]
    share = shares[own.replica] if own.contributes else ()
    if fast:  # each replica sums its share in sequence, into one buffer
        share, last = tuple(sorted(share)), len(share) - 1
        turns = tuple(LeafAction(j, False, 0, 0, i > 0, 0, i == last) for i, j in enumerate(share))
        return ReductionPlan(tree, {t.leaf: t for t in turns}, tuple(() for _ in members))
    known = computed or tuple(() for _ in shares)
    rests = [
        tuple(leaf for leaf in share if leaf not in done)
        for share, done in zip(shares, map(frozenset, known), strict=True)
    ]
    first = len(maximal_subtrees(tree, known[own.replica])) if own.contributes else 0
    rest = rests[own.replica] if own.contributes else ()
    turns = tuple(replace(t, piece=t.piece + first) for t in plan_accumulation(tree, rest, pairs))
    of_replica = [
        maximal_subtrees(tree, done) + maximal_subtrees(tree, rest)
        for done, rest in zip(known, rests, strict=True)
    ]
    held = tuple(of_replica[m.replica] if m.contributes else () for m in members)
    additions, whole = _additions(tree, members, held)
    return ReductionPlan(tree, {t.leaf: t for t in turns}, held, additions, whole)


def _additions(
    tree: ReductionTree, members: Sequence[Member], held: Sequence[Sequence[TreeNode]]
) -> tuple[tuple[tuple[int, int], ...], int | None]:
    """The additions that sum each part's tree, and then the parts in order of their number."""
    parts: dict[int, dict[TreeNode, int]] = {}
    source = 0
    for member, nodes in zip(members, held, strict=True):
        for node in nodes:
            parts.setdefault(member.part, {})[node] = source
            source += 1
    additions: list[tuple[int, int]] = []

    def add(left: int | None, right: int | None) -> int | None:
        if left is None or right is None:
            return right if left is None else left
        additions.append((left, right))
        return left

    def walk(sources: dict[TreeNode, int], node: TreeNode) -> int | None:
        if node in sources or node.leaves == 1:
            return sources.get(node)
        left, right = node.split()
        return add(walk(sources, left), walk(sources, right))

    whole: int | None = None
    for part in sorted(parts):
        whole = add(whole, walk(parts[part], tree.root))
    return tuple(additions), whole


def execute_additions(plan: ReductionPlan, sources: dict[int, Tensor], out: Tensor) -> None:
    """Sum the sources by the plan into `out`. They are overwritten.

    `out` may be one of them: it is written last, and read element by element.
    """
    for into, source in plan.additions[:-1]:
        sources[into].add_(sources[source])
    if plan.additions:
        left, right = plan.additions[-1]
        torch.add(sources[left], sources[right], out=out)
    elif plan.whole_source is None:
        out.zero_()
    elif sources[plan.whole_source].data_ptr() != out.data_ptr():
        out.copy_(sources[plan.whole_source])
