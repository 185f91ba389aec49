"""The flat gradient buffer: which parameter lies where, and which run of it is reduced together.

Slices stand in the order in which the backward pass produces gradients (the reverse of the
parameter order), each aligned to 16 elements. A bucket is a run of complete slices. It leaves for
its owners once its last gradient has come. Neither depends on the number of replicas.
Only the cuts of a bucket into chunks do, and a sum does not depend on its cuts.

FSDP2 produces the gradients of a block at once and in parameter order. So in a replica sharded by
it a bucket is a block in that order. The embedding, and the last norm with the head, come last.
No bucket is then of two pipeline stages. A rank with several stages needs that: each of them has
come to another microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.parallel.gradients.grad_norm import NORM_BLOCK

ALIGNMENT = 16
_EMBEDDING, _HEAD = "embed", "head"  # the buckets of what is in no block


def align(size: int, to: int = ALIGNMENT) -> int:
    """`size`, rounded up to a multiple of `to`."""
    return -(-size // to) * to


Slot = tuple[int, int]
"""(piece, 0) is where a piece ends up; (0, depth) with depth > 0 a partial sum above it."""


@dataclass(frozen=True)
class Slice:
    """A tensor's place: `size` elements from `start`, seen in `shape`."""

    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """This tensor's part of a flat buffer.  flat: [layout.size] -> [*shape]"""
        return flat.narrow(0, self.start, self.size).view(self.shape)


@dataclass(frozen=True)
class GradientBucket:
    """Elements [start, stop), holding the slices [first, last)."""

    start: int
    stop: int
    first: int
    last: int

    def view(self, flat: Tensor) -> Tensor:
        """Its elements of a flat buffer.  flat: [layout.size] -> [stop - start]"""
        return flat[self.start : self.stop]

    def chunk(self, index: int, parts: int) -> tuple[int, int]:
        """(start, stop) of the part that owner `index` of `parts` adds up; may be empty."""
        size = align(-(-(self.stop - self.start) // parts))
        start = min(self.start + index * size, self.stop)
        return start, min(start + size, self.stop)


@dataclass(frozen=True)
class FlatLayout:
    """The places of all slices in a buffer of `size` elements, a multiple of the norm's block."""

    slices: tuple[Slice, ...]
    buckets: tuple[GradientBucket, ...]
    size: int

    @staticmethod
    def build(groups: Sequence[Sequence[tuple[int, ...]]]) -> FlatLayout:
        """Lay out groups of tensors, one bucket per group, in the order given."""
        slices: list[Slice] = []
        buckets: list[GradientBucket] = []
        at = 0
        for group in groups:
            start, first = at, len(slices)
            for shape in group:
                slices.append(Slice(at, tuple(shape)))
                at = align(at + prod(shape))
            buckets.append(GradientBucket(start, at, first, len(slices)))
        return FlatLayout(tuple(slices), tuple(buckets), align(at, NORM_BLOCK))


def cut_into_runs(
    shapes: Sequence[tuple[int, ...]], bucket_bytes: int, item_bytes: int
) -> list[list[int]]:
    """Indices of tensors, cut into runs of at least `bucket_bytes` bytes each (but the last)."""
    groups: list[list[int]] = []
    held = bucket_bytes
    for index, shape in enumerate(shapes):
        if held >= bucket_bytes:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += prod(shape) * item_bytes
    return groups


def arrange_boxes(
    boxes: Sequence[Box], bucket_bytes: int, item_bytes: int, by_unit: bool
) -> tuple[list[int], FlatLayout]:
    """The order of boxes (given in forward order) as slices, and their layout.

    by_unit: one bucket per block, in parameter order inside; otherwise buckets of `bucket_bytes`.
    """
    if by_unit:
        units: dict[str, list[int]] = {}
        for index, box in enumerate(boxes):
            units.setdefault(_block_of(box.name), []).append(index)
        ends = [units.pop(name) for name in list(units) if name in (_EMBEDDING, _HEAD)]
        groups = [*reversed(units.values()), *ends]
    else:
        last = len(boxes) - 1
        shapes = [box.lengths for box in reversed(boxes)]
        groups = [
            [last - i for i in group] for group in cut_into_runs(shapes, bucket_bytes, item_bytes)
        ]
    layout = FlatLayout.build([[boxes[i].lengths for i in group] for group in groups])
    return [i for group in groups for i in group], layout


def _block_of(name: str) -> str:
    """The block that a parameter belongs to, or the end of the model."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return f"{first}.{rest.partition('.')[0]}"
    return _EMBEDDING if first == "embed" else _HEAD
