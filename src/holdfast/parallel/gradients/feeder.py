"""The gradients of one rank, cell by cell: which part of a gradient belongs to which reducer.

A rank may be a member of several cells (`core/sharding/reduction_cells.py`). Examples: norms that
all tensor-parallel ranks hold, next to matrices that they cut; the halves of a matrix that another
replica cuts differently. Each cell has a reducer with its own flat buffer. A parameter's gradient
is cut into the boxes of those cells, and each box is one slice of one buffer. A bucket is complete
when all of its slices have come. If a cell takes all of a parameter, nothing is cut.

What all members of a cell must agree on is a function of the cell's boxes alone: the order of
slices, their places, the buckets. So replicas of unlike shapes sum the same buckets.

`Feeder` is what both producers share: `parallel/replicated.py` (hooks of plain parameters) and
`parallel/fsdp.py` (FSDP2's units). The engine drives either by the same calls: `begin`, `finish`
and `squares` once per step, `start_leaf`, `end_leaf` and `check` once per microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.reduction_cells import Cell
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.step_resume import Computed, standing
from holdfast.parallel.comm.transport import Peers
from holdfast.parallel.gradients.buckets import arrange
from holdfast.parallel.gradients.grad_norm import sum_of_squares
from holdfast.parallel.gradients.reducer import Reducer, Slot, Team

Cells = Sequence[tuple[Cell, Team]]


def alike(boxes: Mapping[str, Box], peers: Peers) -> Cells:
    """One cell of all that is held: replicas of one shape, one member of `peers` each."""
    team = Team.of(peers)
    return [(Cell(team.members, tuple(box for box in boxes.values() if box.size)), team)]


@dataclass(frozen=True)
class Patch:
    """The part of a tensor that lies in one slice of one cell's buffer.

    number: of the slice. region: which part of the tensor; None is all of it.
    """

    cell: int
    number: int
    bucket: int
    region: tuple[slice, ...] | None

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor, as a view."""
        return tensor if self.region is None else tensor[self.region]


class Feeder:
    """The reducers of all cells of a rank, and the way of each gradient into them.

    boxes: by parameter, in forward order, what this rank computes gradients of, in global
        coordinates; may be empty. wanted: what it needs of the sum; by default the same.
    cells: every cell that this rank is a member of.
    dtype: of all sums, whatever the gradients' own is.
    by_unit: a bucket is a block, as FSDP2 produces them; all ranks must be given the same.
    fast: the backend's own all-reduce, where one cell is all there is and its team allows it.
    Raises ValueError where a cell has a box that this rank does not hold, or the cells do not
    give it all that it needs.
    """

    def __init__(
        self, boxes: Mapping[str, Box], cells: Cells, *, dtype: torch.dtype, device: torch.device,
        bucket_bytes: int, by_unit: bool = False, fast: bool = False, pairs: bool = False,
        wanted: Mapping[str, Box] | None = None,
    ):  # fmt: skip
        self.device = device
        self._cells, self._by_unit, self._fast = [cell for cell, _ in cells], by_unit, fast
        self._error: Exception | None = None
        self.reducers: list[Reducer] = []
        self._arranged: list[list[Box]] = []
        for cell, team in cells:
            order, layout = arrange(cell.boxes, bucket_bytes, dtype.itemsize, by_unit)
            self._arranged.append([cell.boxes[i] for i in order])
            self.reducers.append(
                Reducer(layout, team, dtype=dtype, device=device, pairs=pairs,
                        fast=fast and len(cells) == 1, failed=self.fail)
            )  # fmt: skip
        self._contributing = [i for i, r in enumerate(self.reducers) if r.team.own.contributes]
        self._receiving = [i for i, r in enumerate(self.reducers) if r.team.own.receives]
        self._counted = _counted(cells)
        self.patches = self._cut(boxes, self._contributing)
        self._copies: list[tuple[Tensor, Tensor]] = []  # (part of a gradient, its slice)
        self._results = self._collect(boxes if wanted is None else wanted, dtype)
        self._views: dict[Slot, list[list[Tensor]]] = {}
        self._target: list[list[Tensor]] = []
        self._due: list[list[int]] = []  # slices that a bucket waits for, by cell and bucket
        self._peers = list({id(r.peers): r.peers for r in self.reducers}.values())
        self._patient = False
        self._done: list[int] = []  # leaves of the step that is open
        self._open_leaf: int | None = None

    # --- a step ---------------------------------------------------------------------------
    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a step of `leaves` microbatches, dealt to the replicas as in `shares`. A step that
        was `keep`-ed continues with what the replicas have `computed` of it.

        The step before must have been voted on: its sends are forgotten here, once for all
        cells. Raises PeerLostError when a peer is known to be lost, unless it is patient.
        """
        self._error = None
        self._done, self._open_leaf = [], None
        if self._moved:
            self._views.clear()
        for peers in self._peers:
            peers.forget_sends()
        for reducer in self.reducers:
            reducer.begin(leaves, shares, computed)
        self._spread()

    @property
    def computed(self) -> tuple[int, ...]:
        """Return the leaves of the open step that were computed and can be kept. There are none
        if one was interrupted midway, or if a sum has overwritten what was computed."""
        kept = self._open_leaf is None and not self.summed and not self._moved and not self._fast
        return tuple(self._done) if kept else ()

    @property
    def summed(self) -> bool:
        """Return True if something of the open step was summed."""
        return any(reducer.summed for reducer in self.reducers)

    @property
    def sound(self) -> bool:
        """Return True if all that this rank has added to the sums of the open step was finite."""
        return all(reducer.sound for reducer in self.reducers)

    def keep(self, share: Sequence[int]) -> None:
        """Let what was `computed` of the share that was begun be part of the step begun next."""
        for reducer in self.reducers:
            reducer.join()
        held = self._done and self._contributing and self.reducers[self._contributing[0]].hold
        if held:
            leaves = self.reducers[self._contributing[0]].plan.tree.leaves
            _, slot = standing(leaves, share, self._done)[-1]
            self._flush(self._seen(slot))
        for cell in self._contributing:
            self.reducers[cell].keep(share, self._done)

    @property
    def _moved(self) -> bool:
        return any(reducer.moved for reducer in self.reducers)

    def _flush(self, target: list[list[Tensor]]) -> None:
        """Move a leaf that is held where it was computed into its place in a slot."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return when `gradients` hold the full sum. Raises PeerLostError when they cannot."""
        for reducer in self.reducers:
            reducer.join()
        self._raise()
        for part, found in self._copies:
            part.copy_(found)

    def check(self) -> None:
        """Between leaves: raise the first stored error, unless this feeder is patient."""
        if not self.patient:
            self._raise()

    @property
    def patient(self) -> bool:
        """True if errors wait for `finish`, because other ranks compute in lockstep with this one
        and would wait for ever."""
        return self._patient

    @patient.setter
    def patient(self, patient: bool) -> None:
        self._patient = patient
        for reducer in self.reducers:
            reducer.patient = patient

    def regroup(self, cells: Cells, by_unit: bool) -> bool:
        """Continue with other members of the same cells, in the same buffers. If the cells are
        cut differently than before, return False and change nothing. Nothing of an open step is
        `computed` any more: it was dealt to other members."""
        for reducer in self.reducers:
            reducer.join()
        if by_unit != self._by_unit or len(cells) != len(self._cells):
            return False
        for (cell, team), old, reducer in zip(cells, self._cells, self.reducers, strict=True):
            own, was = team.own, reducer.team.own
            same = (own.contributes, own.receives) == (was.contributes, was.receives)
            if not same or cell.boxes != old.boxes:
                return False
        for (_, team), reducer in zip(cells, self.reducers, strict=True):
            reducer.regroup(team, self._fast and len(cells) == 1)
        self._done, self._open_leaf = [], None
        self._cells, self._counted = [cell for cell, _ in cells], _counted(cells)
        self._peers = list({id(r.peers): r.peers for r in self.reducers}.values())
        return True

    def _raise(self) -> None:
        """Raise the first stored error, as PeerLostError where a connection broke."""
        for reducer in self.reducers:
            reducer.check()

    def fail(self, error: Exception) -> None:
        """Give the step up in all cells: who waits is woken, here and at the peers."""
        self._error = self._error or error
        for reducer in self.reducers:
            reducer.fail(error)

    def _spread(self) -> None:
        """A reducer may have failed before the next one had begun, which cleared the error."""
        if self._error is not None:
            self.fail(self._error)

    def gradients(self) -> list[Tensor]:
        """The summed gradient of each parameter's wanted box, in forward order.

        The same tensors in every step: a view of a buffer where the box is one slice, otherwise
        memory that `finish` fills. The optimizer may overwrite them.
        """
        return self._results

    def squares(self) -> float:
        """The sum of squares of what this rank answers for; all ranks of a replica together
        answer for each element once (`Cell.counts`)."""
        return sum(float(sum_of_squares(self.reducers[cell].gradient)) for cell in self._counted)

    # --- a leaf ---------------------------------------------------------------------------
    def start_leaf(self, leaf: int) -> None:
        """The next backward pass belongs to `leaf`."""
        raise NotImplementedError

    def end_leaf(self) -> None:
        """The backward pass is over."""
        raise NotImplementedError

    def _open(self, leaf: int) -> Slot | None:
        """The gradients that come now belong to `leaf`. Returns the slot they go to, which is the
        same in all cells; None where they are to stay in `.grad`."""
        slot: Slot = (0, 0)
        self._open_leaf = leaf
        for cell in self._contributing:
            slot = self.reducers[cell].start_leaf(leaf)
        if self._contributing and self.reducers[self._contributing[0]].hold:
            return None
        self._target = self._seen(slot)
        self._due = [[b.last - b.first for b in r.layout.buckets] for r in self.reducers]
        return slot

    def _seen(self, slot: Slot) -> list[list[Tensor]]:
        """Every parameter's slices of a slot."""
        if slot not in self._views:
            self._views[slot] = [
                [self._slice(patch, self.reducers[patch.cell].slot(slot)) for patch in patches]
                for patches in self.patches
            ]
        return self._views[slot]

    def _close(self) -> None:
        """All gradients of the leaf have come."""
        if self._open_leaf is not None:
            self._done.append(self._open_leaf)
            self._open_leaf = None

    @property
    def accumulate(self) -> bool:
        """Return True if the current leaf is added to its slot's content, False if it replaces
        it."""
        return bool(self._contributing) and self.reducers[self._contributing[0]].accumulate

    def _take(self, index: int, gradient: Tensor | None) -> None:
        """Add a parameter's gradient (None: zero) to the current slot, and send what is ready."""
        accumulate = self.accumulate
        for patch, target in zip(self.patches[index], self._target[index], strict=True):
            if gradient is None:
                if not accumulate:
                    target.zero_()
            elif accumulate:
                target.add_(patch.of(gradient))
            else:
                target.copy_(patch.of(gradient))
        self._came(index)

    def _came(self, index: int) -> None:
        """A parameter's slices are in place."""
        for patch in self.patches[index]:
            due = self._due[patch.cell]
            due[patch.bucket] -= 1
            if due[patch.bucket] == 0:
                try:
                    self.reducers[patch.cell].done(patch.bucket)
                except Exception as error:  # raised by check(), not inside the backward
                    self.fail(error)

    # --- where everything lies --------------------------------------------------------------
    def _slice(self, patch: Patch, flat: Tensor) -> Tensor:
        """A patch's slice of a flat buffer of its cell.  flat: [layout.size] -> [*box]"""
        return self.reducers[patch.cell].layout.slices[patch.number].view(flat)

    def _cut(self, boxes: Mapping[str, Box], cells: Sequence[int]) -> list[list[Patch]]:
        """The patches of each parameter in some cells."""
        patches: dict[str, list[Patch]] = {name: [] for name in boxes}
        for cell in cells:
            bucket, buckets = 0, self.reducers[cell].layout.buckets
            for number, box in enumerate(self._arranged[cell]):
                if number >= buckets[bucket].last:
                    bucket += 1
                held = boxes.get(box.name)
                if held is None or not held.contains(box):
                    raise ValueError(f"a cell has {box}, this rank holds {held}")
                patches[box.name].append(Patch(cell, number, bucket, _region(box, held)))
        return list(patches.values())

    def _collect(self, wanted: Mapping[str, Box], dtype: torch.dtype) -> list[Tensor]:
        """Return the sum of each wanted box, in place if possible."""
        results: list[Tensor] = []
        cut = self._cut(wanted, self._receiving)
        for (name, box), patches in zip(wanted.items(), cut, strict=True):
            found = [self._slice(patch, self.reducers[patch.cell].gradient) for patch in patches]
            if sum(part.numel() for part in found) != box.size:
                raise ValueError(f"the cells do not give all of {box} of {name}")
            if len(patches) == 1 and patches[0].region is None:
                results.append(found[0])
                continue
            whole = torch.zeros(box.lengths, dtype=dtype, device=self.device)
            results.append(whole)
            self._copies += [(p.of(whole), part) for p, part in zip(patches, found, strict=True)]
        return results


def _counted(cells: Cells) -> list[int]:
    """The cells of whose norm this rank answers for its replica."""
    return [i for i, (cell, team) in enumerate(cells) if cell.counts(team.own.rank)]


def _region(box: Box, held: Box) -> tuple[slice, ...] | None:
    """`box` inside a tensor that holds `held`."""
    if box.lengths == held.lengths:
        return None
    return tuple(
        slice(offset - start, offset - start + length)
        for offset, start, length in zip(box.offsets, held.offsets, box.lengths, strict=True)
    )
