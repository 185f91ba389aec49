"""How many copies of its gradients a rank holds while microbatches and replicas are summed.

A run sums gradients in the order of a binary tree, whatever its layout. So a rank has partial sums
(`core/sharding/reduction_tree.py`), and pieces of other ranks arrive in buffers of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from holdfast.core.sharding.reduction_tree import deal, piece_sizes

_LOOKED_AT = 32
"""Replicas whose shares are counted."""


@dataclass(frozen=True)
class GradientCopies:
    """In parts of all gradients that a rank sums. sums: the sum and partial ones. arrivals: pieces
    of other ranks."""

    sums: float = 1.0
    arrivals: float = 0.0


def gradient_copies(microbatches: int, replicas: int, ranks: int) -> GradientCopies:
    """Count the copies of the fullest rank.

    Args:
        microbatches: of a step, all replicas together.
        replicas: those that share them.
        ranks: of one replica that sum the same gradients.
    """
    sums, mean, fewest = _pieces(microbatches, replicas)
    members = replicas * ranks
    arriving = members * mean - fewest
    return GradientCopies(sums, arriving / members if members > 1 else 0.0)


@lru_cache(maxsize=4096)
def _pieces(microbatches: int, replicas: int) -> tuple[float, float, int]:
    """Copies that the fullest replica sums, and the mean and the least number of pieces."""
    pieces = [piece_sizes(microbatches, *share) for share in _shares(microbatches, replicas)]
    sums = max((len(own) + _deepest(max(own)) for own in pieces if own), default=1)
    numbers = [len(own) for own in pieces]
    return float(sums), sum(numbers) / len(numbers), min(numbers)


def _shares(microbatches: int, replicas: int) -> Sequence[tuple[int, int]]:
    """The first leaf of each replica's share and the one after it; of many replicas, those of some
    that stand for all."""
    if replicas <= _LOOKED_AT:
        ends = [0, *accumulate(map(len, deal(microbatches, replicas)))]
        return list(pairwise(ends))
    some = (number * replicas // _LOOKED_AT for number in range(_LOOKED_AT))
    return [(n * microbatches // replicas, (n + 1) * microbatches // replicas) for n in some]


def _deepest(leaves: int) -> int:
    """Partial sums of a piece at once, without its sum: the depth of a binary counter."""
    return max(0, (leaves - 1).bit_length() - 1)
