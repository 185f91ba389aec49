"""The bytes that workers send each other in a round of learners.

The planner predicts with these functions, and the codecs take the length of a payload from them. So
a prediction and the counter of the event `outer_round` differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from holdfast.core.sharding.reduction_tree import ReductionTree, Shares, maximal_subtrees

BLOCK = 256  # values with one scale
CHUNK = 4096  # values among which the largest are chosen; an index of 16 bits reaches all
ITEM_BYTES = 4  # of a value of a change, of a scale, and of the two magnitudes of int2


def payload_bytes(codec: str, share: float, values: int) -> int:
    """Return the bytes of one coded change. codec: `outer.codec.name`. share: of the values that
    `topk` keeps. Raises ValueError for an unknown name."""
    if codec == "none":
        return ITEM_BYTES * values
    if codec == "bf16":
        return 2 * values
    if codec in ("int8", "int4", "int2"):
        bits = int(codec.removeprefix("int"))
        return runs_of(values, BLOCK) * (BLOCK * bits // 8 + ITEM_BYTES)
    if codec == "topk":
        return runs_of(values, CHUNK) * kept_of(share) * 4
    raise ValueError(f"no codec {codec!r}")


def low_rank_bytes(shapes: Iterable[Sequence[int]], rank: int) -> int:
    """Return the bytes of one change that `powersgd` coded. shapes: of the tensors."""
    return sum(
        2 * rank * (shape[0] + prod(shape[1:])) if is_factored(shape, rank) else 2 * prod(shape)
        for shape in shapes
    )


def is_factored(shape: Sequence[int], rank: int) -> bool:
    """Return True if `powersgd` sends two factors of a tensor: they are shorter than it."""
    n, m = prod(shape[:1]), prod(shape[1:])
    return len(shape) > 1 and rank * (n + m) < n * m


def kept_of(share: float) -> int:
    """Return how many values of a chunk `topk` keeps."""
    return max(1, round(share * CHUNK))


def runs_of(values: int, size: int) -> int:
    """Return how many runs of `size` hold so many values."""
    return -(-values // size)


def bytes_to_each(shares: Shares, values: int, payload: int) -> tuple[float, ...]:
    """Return the bytes that each worker sends to each other worker in a round.

    Args:
        shares: the learners of each worker.
        values: of a change.
        payload: bytes of a coded change, which goes to all; 0: sums travel in fp32. Then a worker
            sends the pieces of the fixed tree that it has, and the sums of its part of the values.
    """
    if payload:
        return tuple(float(len(share) * payload) for share in shares)
    tree = ReductionTree(sum(len(share) for share in shares))
    part = ITEM_BYTES * values / len(shares)
    return tuple((len(maximal_subtrees(tree, share)) + 1) * part for share in shares)
