"""The place of each parameter's gradient: slices of the flat buffers of a rank's cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.parallel.gradients.buckets import Slot
from holdfast.parallel.gradients.reducer import MakeBuffer, Reducer


@dataclass(frozen=True)
class GradientPatch:
    """The part of a tensor that lies in one slice of one cell's buffer.

    slice_index: of the slice. region: which part of the tensor; None is all of it.
    """

    cell: int
    slice_index: int
    bucket: int
    region: tuple[slice, ...] | None

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor, as a view."""
        return tensor if self.region is None else tensor[self.region]


class GradientPlacement:
    """The slices that the gradients of a rank come into, and those that hold what it needs of the
    sum.

    reducers: of all cells; arranged: the boxes of each cell, in the order of its buffer. boxes,
    wanted: see `feeder.GradientFeeder`. make_buffer: of a sum that lies in several cells.
    contributed_cells: those that this rank adds gradients to. patches: of each parameter, in these
    cells. results: the sum of each wanted box.
    """

    def __init__(
        self,
        reducers: Sequence[Reducer],
        arranged: Sequence[Sequence[Box]],
        boxes: Mapping[str, Box],
        wanted: Mapping[str, Box],
        make_buffer: MakeBuffer,
    ):
        self._reducers, self._arranged = reducers, arranged
        self.contributed_cells = [
            i for i, r in enumerate(reducers) if r.team.own_member.contributes
        ]
        self.patches = self._cut_into_patches(boxes, self.contributed_cells)
        self._copies: list[tuple[Tensor, Tensor]] = []  # (part of a gradient, its slice)
        self.results = self._result_views(wanted, make_buffer)
        self._views: dict[Slot, list[list[Tensor]]] = {}

    def slot_views(self, slot: Slot) -> list[list[Tensor]]:
        """Every parameter's slices of a slot."""
        if slot not in self._views:
            self._views[slot] = [
                [self._slice_of(patch, self._reducers[patch.cell].slot(slot)) for patch in patches]
                for patches in self.patches
            ]
        return self._views[slot]

    def forget_slots(self) -> None:
        """The slots of the buffers lie elsewhere from now on."""
        self._views.clear()

    def fill_results(self) -> None:
        """Gather the sums of those wanted boxes that are not one slice of a buffer."""
        for part, found in self._copies:
            part.copy_(found)

    def _slice_of(self, patch: GradientPatch, flat: Tensor) -> Tensor:
        """A patch's slice of a flat buffer of its cell.  flat: [layout.size] -> [*box]"""
        return self._reducers[patch.cell].layout.slices[patch.slice_index].view(flat)

    def _cut_into_patches(
        self, boxes: Mapping[str, Box], cells: Sequence[int]
    ) -> list[list[GradientPatch]]:
        """The patches of each parameter in some cells."""
        patches: dict[str, list[GradientPatch]] = {name: [] for name in boxes}
        for cell in cells:
            bucket, buckets = 0, self._reducers[cell].layout.buckets
            for number, box in enumerate(self._arranged[cell]):
                if number >= buckets[bucket].last:
                    bucket += 1
                held = boxes.get(box.name)
                if held is None or not held.contains(box):
                    raise ValueError(f"a cell has {box}, this rank holds {held}")
                patches[box.name].append(GradientPatch(cell, number, bucket, _region(box, held)))
        return list(patches.values())

    def _result_views(self, wanted: Mapping[str, Box], make_buffer: MakeBuffer) -> list[Tensor]:
        """Return the sum of each wanted box, in place if possible."""
        received = [i for i, r in enumerate(self._reducers) if r.team.own_member.receives]
        results: list[Tensor] = []
        cut = self._cut_into_patches(wanted, received)
        for (name, box), patches in zip(wanted.items(), cut, strict=True):
            found = [
                self._slice_of(patch, self._reducers[patch.cell].gradient) for patch in patches
            ]
            if sum(part.numel() for part in found) != box.size:
                raise ValueError(f"the cells do not give all of {box} of {name}")
            if len(patches) == 1 and patches[0].region is None:
                results.append(found[0])
                continue
            whole = make_buffer(box.size).view(box.lengths)
            results.append(whole)
            self._copies += [(p.of(whole), part) for p, part in zip(patches, found, strict=True)]
        return results


def _region(box: Box, held_box: Box) -> tuple[slice, ...] | None:
    """`box` inside a tensor that holds `held_box`."""
    if box.lengths == held_box.lengths:
        return None
    return tuple(
        slice(offset - start, offset - start + length)
        for offset, start, length in zip(box.offsets, held_box.offsets, box.lengths, strict=True)
    )
