"""The gradients of one rank, cell by cell: which part of a gradient belongs to which reducer.

A rank may be a member of several cells (`core/sharding/reduction_cells.py`). Examples: norms that
all tensor-parallel ranks hold, next to matrices that they cut; the halves of a matrix that another
replica cuts differently. Each cell has a reducer with its own flat buffer. A parameter's gradient
is cut into the boxes of those cells, and each box is one slice of one buffer. A bucket is complete
when all of its slices have come. If a cell takes all of a parameter, nothing is cut.

What all members of a cell must agree on is a function of the cell's boxes alone: the order of
slices, their places, the buckets. So replicas of unlike shapes sum the same buckets.

`GradientFeeder` is what both producers share: `parallel/axes/replicated.py` (hooks of plain
parameters) and `parallel/axes/fsdp.py` (FSDP2's units). The engine drives either by the same calls:
`begin`, `finish` and `squares` once per step, `start_leaf`, `end_leaf` and `check` once per
microbatch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.reduction_cells import Cell
from holdfast.core.sharding.reduction_tree import Shares
from holdfast.core.sharding.step_resume import Computed, partial_sums
from holdfast.parallel.gradients.buckets import Slot, arrange_boxes
from holdfast.parallel.gradients.cell_team import CellTeam
from holdfast.parallel.gradients.gathered import GatheredLauncher
from holdfast.parallel.gradients.grad_norm import total_of_squares
from holdfast.parallel.gradients.leaf_progress import LeafProgress, StageParameters
from holdfast.parallel.gradients.placement import GradientPlacement
from holdfast.parallel.gradients.reducer import MakeBuffer, Reducer

Cells = Sequence[tuple[Cell, CellTeam]]


class GradientFeeder:
    """The reducers of all cells of a rank, and the way of each gradient into them.

    boxes: by parameter, in forward order, what this rank computes gradients of, in global
        coordinates; may be empty. wanted: what it needs of the sum; by default the same.
    cells: every cell that this rank is a member of.
    dtype: of all sums, whatever the gradients' own is.
    by_unit: a bucket is a block, as FSDP2 produces them; all ranks must be given the same.
    buffers: gives the memory of the sums; None: on the device.
    fast: the backend's own all-reduce, where one cell is all there is and its team allows it.
    Raises ValueError where a cell has a box that this rank does not hold, or the cells do not
    give it all that it needs.
    """

    def __init__(
        self,
        boxes: Mapping[str, Box],
        cells: Cells,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
        by_unit: bool = False,
        fast: bool = False,
        pairs: bool = False,
        wanted: Mapping[str, Box] | None = None,
        buffers: MakeBuffer | None = None,
    ):
        self.device = device
        self._cells, self._by_unit, self._fast = [cell for cell, _ in cells], by_unit, fast
        self._error: Exception | None = None
        self.reducers: list[Reducer] = []
        self.open_reducers = self.reducers  # those that take part in a step
        self._launcher = GatheredLauncher()
        arranged: list[list[Box]] = []
        make_reducer = partial(
            Reducer,
            dtype=dtype,
            device=device,
            pairs=pairs,
            fast=fast and len(cells) == 1,
            on_error=self.fail,
            launcher=self._launcher,
            buffers=buffers,
        )
        for cell, team in cells:
            order, layout = arrange_boxes(cell.boxes, bucket_bytes, dtype.itemsize, by_unit)
            arranged.append([cell.boxes[i] for i in order])
            self.reducers.append(make_reducer(layout, team))
        self._norm_cells = _norm_cells(cells)
        make_buffer = buffers or partial(torch.zeros, dtype=dtype, device=device)
        needed = boxes if wanted is None else wanted
        self.placement = GradientPlacement(self.reducers, arranged, boxes, needed, make_buffer)
        self._contributed_cells = self.placement.contributed_cells
        self._target: list[list[Tensor]] = []
        self._missing_slices: list[list[int]] = []  # by cell and bucket
        self._peers = list({id(r.peers): r.peers for r in self.reducers}.values())
        # Errors wait for `finish` if other ranks compute in lockstep with this one: they would wait
        # for ever.
        self.defers_errors = False
        self._progress = LeafProgress()  # of the step that is open
        self._is_listening = False
        self._missing_parameters: set[int] = set()  # of the leaf that is open

    # --- a step ---------------------------------------------------------------------------
    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a step of `leaves` microbatches, dealt to the replicas as in `shares`. A step that
        was `keep`-ed continues with what the replicas have `computed_leaves` of it.

        The step before must have been voted on: its sends are forgotten here, once for all
        cells. Raises PeerLostError when a peer is known to be lost, unless it is patient.
        """
        self._error, self._progress = None, LeafProgress()
        if self._are_slots_moved:
            self.placement.forget_slots()
        for peers in self._peers:
            peers.forget_sends()
        self._launcher.reset()
        for reducer in self.open_reducers:
            reducer.begin(leaves, shares, computed)
        self._launcher.start()
        self._spread_errors()
        self.check()

    @property
    def computed_leaves(self) -> tuple[int, ...]:
        """Return the leaves of the open step that were computed and can be kept. There are none
        if one was interrupted midway, or if a sum has overwritten what was computed."""
        if self._error is not None:
            for reducer in self.reducers:
                reducer.join()  # a sum that is under way may overwrite what was computed
        lost = self.is_summed or self._are_slots_moved or self._fast
        return () if lost else tuple(self._progress.done)

    @property
    def is_summed(self) -> bool:
        """Return True if something of the open step was summed."""
        return any(reducer.is_summed for reducer in self.open_reducers)

    @property
    def is_finite(self) -> bool:
        """Return True if all that this rank has added to the sums of the open step was finite."""
        return all(reducer.is_finite for reducer in self.open_reducers)

    def keep(self, share: Sequence[int]) -> None:
        """Let what was `computed_leaves` of the share that was begun be part of the step begun
        next."""
        for reducer in self.reducers:
            reducer.join()
        done = self._progress.done
        held = (
            done
            and self._contributed_cells
            and self.reducers[self._contributed_cells[0]].stays_in_place
        )
        if held:
            leaves = self.reducers[self._contributed_cells[0]].plan.tree.leaves
            _, slot = partial_sums(leaves, share, done)[-1]
            self._flush_held_leaf(self.placement.slot_views(slot))
        for cell in self._contributed_cells:
            self.reducers[cell].keep(share, done)

    @property
    def _are_slots_moved(self) -> bool:
        return any(reducer.are_slots_moved for reducer in self.reducers)

    def _flush_held_leaf(self, target: list[list[Tensor]]) -> None:
        """Move a leaf that is held where it was computed into its place in a slot."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return when `gradients` hold the full sum. Raises PeerLostError when they cannot."""
        for reducer in self.open_reducers:
            reducer.join()
        self._raise_stored()
        self.placement.fill_results()

    def check(self) -> None:
        """Between leaves: raise the first stored error, unless this feeder is patient."""
        if not self.defers_errors:
            self._raise_stored()

    def regroup(self, cells: Cells, by_unit: bool) -> bool:
        """Continue with other members of the same cells, in the same buffers. If the cells are
        cut differently than before, return False and change nothing. Nothing of an open step is
        `computed_leaves` any more: it was dealt to other members."""
        for reducer in self.reducers:
            reducer.join()
        if by_unit != self._by_unit or not _are_cut_alike(cells, self._cells, self.reducers):
            return False
        for (_, team), reducer in zip(cells, self.reducers, strict=True):
            reducer.regroup(team, self._fast and len(cells) == 1)
        self._progress = LeafProgress()
        self._cells, self._norm_cells = [cell for cell, _ in cells], _norm_cells(cells)
        self._peers = list({id(r.peers): r.peers for r in self.reducers}.values())
        return True

    def _raise_stored(self) -> None:
        """Raise the first stored error, as PeerLostError where a connection broke."""
        for reducer in self.open_reducers:
            reducer.check()

    def fail(self, error: Exception) -> None:
        """Give the step up in all cells: who waits is woken, here and at the peers."""
        self._error = self._error or error
        for reducer in self.open_reducers:
            reducer.fail(error)

    def _spread_errors(self) -> None:
        """A reducer may have failed before the next one had begun, which cleared the error."""
        if self._error is not None:
            self.fail(self._error)

    def gradients(self) -> list[Tensor]:
        """The summed gradient of each parameter's wanted box, in forward order.

        The same tensors in every step: a view of a buffer where the box is one slice, otherwise
        memory that `finish` fills. The optimizer may overwrite them.
        """
        return self.placement.results

    def squared_norm(self) -> float:
        """The sum of squares of what this rank answers for; see `total_of_squares`."""
        counted, rest = (
            [r.gradient for i in cells if (r := self.reducers[i]) in self.open_reducers]
            for cells in self._norm_cells
        )
        return total_of_squares(counted, rest, self.device)

    # --- a leaf ---------------------------------------------------------------------------
    def start_leaf(self, leaf: int, part: StageParameters | None = None) -> None:
        """The next backward pass belongs to `leaf`. part: gives gradients to nothing else; None:
        to all parameters. Each stage of a rank comes to the leaves in rising order."""
        raise NotImplementedError

    def end_leaf(self) -> None:
        """The backward pass is over."""
        raise NotImplementedError

    def give(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add to a parameter's gradient of the open leaf what no backward pass of autograd does."""
        raise NotImplementedError

    def _open_slot(self, leaf: int, stages: int = 1) -> Slot | None:
        """The gradients that come now belong to `leaf`. Returns the slot they go to, which is the
        same in all cells; None where they are to stay in `.grad`."""
        slot: Slot = (0, 0)
        self._progress.open(leaf, stages)
        for cell in self._contributed_cells:
            slot = self.reducers[cell].start_leaf(leaf)
        if self._contributed_cells and self.reducers[self._contributed_cells[0]].stays_in_place:
            return None
        self._target = self.placement.slot_views(slot)
        self._missing_slices = [[b.last - b.first for b in r.layout.buckets] for r in self.reducers]
        return slot

    @property
    def accumulates(self) -> bool:
        """Return True if the current leaf is added to its slot's content, False if it replaces
        it."""
        return (
            bool(self._contributed_cells) and self.reducers[self._contributed_cells[0]].accumulates
        )

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        """Return a hook that does not keep this object alive. torch holds the hooks of a tensor
        where the garbage collector cannot see them. A cycle over the parameters would outlive every
        rebuild, and with it the model and its gradients."""
        whose = weakref.ref(self)

        def listen(parameter: Tensor) -> None:
            me = whose()
            if me is not None and me._is_listening:
                me._missing_parameters.discard(index)
                me._take_gradient(index, parameter)

        return listen

    def _take_gradient(self, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        self._take(index, gradient)

    def _take(self, index: int, gradient: Tensor | None) -> None:
        """Add a parameter's gradient (None: zero) to the current slot, and send what is ready."""
        accumulate = self.accumulates
        for patch, target in zip(self.placement.patches[index], self._target[index], strict=True):
            if gradient is None:
                if not accumulate:
                    target.zero_()
            elif accumulate:
                target.add_(patch.of(gradient).to(target.device))
            else:
                target.copy_(patch.of(gradient))
        self._on_slices_filled(index)

    def _on_slices_filled(self, index: int) -> None:
        """A parameter's slices are in place."""
        for patch in self.placement.patches[index]:
            due = self._missing_slices[patch.cell]
            due[patch.bucket] -= 1
            if due[patch.bucket] == 0:
                try:
                    self.reducers[patch.cell].bucket_done(patch.bucket)
                except Exception as error:  # raised by check(), not inside the backward
                    self.fail(error)


def _are_cut_alike(cells: Cells, old_cells: Sequence[Cell], reducers: Sequence[Reducer]) -> bool:
    """Whether cells are those of these reducers, and this rank does the same in them."""
    if len(cells) != len(old_cells):
        return False
    for (cell, team), old, reducer in zip(cells, old_cells, reducers, strict=True):
        own, was = team.own_member, reducer.team.own_member
        same = (own.contributes, own.receives) == (was.contributes, was.receives)
        if not same or cell.boxes != old.boxes:
            return False
    return True


def _norm_cells(cells: Cells) -> tuple[list[int], list[int]]:
    """The cells of whose norm this rank answers for its replica, and those of its sums that have no
    part in the norm."""
    owns = [cell.answers_for_norm(team.own_member.rank) for cell, team in cells]
    rest = [not cell.is_in_norm and team.own_member.receives for cell, team in cells]
    return [i for i, own in enumerate(owns) if own], [i for i, one in enumerate(rest) if one]
