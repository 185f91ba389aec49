"""How many copies of its gradients a rank holds while microbatches and replicas are summed.

A run sums gradients in the order of a binary tree, whatever its layout. So a rank has partial sums
(`core/sharding/reduction_tree.py`), and pieces of other ranks arrive in buffers of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from holdfast.core.sharding.reduction_tree import (
    ReductionTree,
    deal,
    maximal_subtrees,
)

_LOOKED_AT = 32
"""Replicas whose shares are counted."""


@dataclass(frozen=True)
class GradientCopies:
    """In parts of all gradients that a rank sums. sums: the sum and partial ones. arrivals: pieces
    of other ranks."""

    sums: float = 1.0
    arrivals: float = 0.0


@lru_cache(maxsize=4096)
def gradient_copies(microbatches: int, replicas: int, ranks: int) -> GradientCopies:
    """Count the copies of the fullest rank.

    Args:
        microbatches: of a step, all replicas together.
        replicas: those that share them.
        ranks: of one replica that sum the same gradients.
    """
    tree, shares = ReductionTree(microbatches), _shares(microbatches, replicas)
    pieces = [[piece.leaves for piece in maximal_subtrees(tree, share)] for share in shares]
    sums = max((len(own) + _deepest(max(own)) for own in pieces if own), default=1)
    numbers, members = [len(own) for own in pieces], replicas * ranks
    arriving = members * fmean(numbers) - min(numbers)
    return GradientCopies(float(sums), arriving / members if members > 1 else 0.0)


def _shares(microbatches: int, replicas: int) -> Sequence[Sequence[int]]:
    """The shares of the replicas; of many, those of some that stand for all."""
    if replicas <= _LOOKED_AT:
        return deal(microbatches, replicas)
    some = (number * replicas // _LOOKED_AT for number in range(_LOOKED_AT))
    ends = ((n * microbatches // replicas, (n + 1) * microbatches // replicas) for n in some)
    return [range(*each) for each in ends]


def _deepest(leaves: int) -> int:
    """Partial sums of a piece at once, without its sum: the depth of a binary counter."""
    return max(0, (leaves - 1).bit_length() - 1)
