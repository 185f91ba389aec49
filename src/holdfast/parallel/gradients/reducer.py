"""Gradients of logical microbatches, summed over replicas in one fixed tree order.

Not DDP's all-reduce, whose order of additions depends on the number of ranks and on bucket
rebuilds. Here the tree of `core/sharding/reduction_tree.py` decides every addition. So the result
has the same bits for any number of replicas and any dealing. It costs the bytes of a ring (for
one piece per replica).

One step of a member, for each bucket of the flat gradient buffer:

    leaf by leaf   its gradient goes into a partial sum of the binary counter (hooks, during the
                   backward); a finished piece leaves at once, cut in chunks, one to each owner
    owner          waits for all pieces of its chunk, adds up the tree above the pieces
    owner -> all   the summed chunk, received straight into the gradient buffer

The first two overlap the backward pass; a thread of the step does the owner's part, bucket by
bucket in a fixed order. Errors are stored and raised by `check` and `finish`, never inside a
backward. With one member nothing is sent, and the tree is summed in the buffer itself.

The members of a team (`core/sharding/reduction_cells.py`) are of one or several *parts*: ranks of
one replica whose gradients of the same box are partial. Leaves are dealt to replicas, so each part
has its own tree over all of them. The owner sums tree by tree and then adds the parts in order.
Only members that receive own chunks and get sums; only those that contribute have pieces. If a
part lives in some replicas only, its tree has gaps, and what there is of it is added in its order.

A step that was interrupted before anything of it was summed may continue among other members.
The partial sums that this one holds are then pieces of their own (`keep`). A sum of another owner
is received only once all pieces of that bucket have come here, so that nothing is overwritten.

The pieces and sums travel in one of two ways: by messages from rank to rank (`direct.py`), or by
collectives of the group (`gathered.py`). The bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from holdfast.core.sharding.reduction_tree import LeafAction, Shares
from holdfast.core.sharding.step_resume import Computed, partial_sums
from holdfast.errors import PeerLostError
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.buckets import FlatLayout, Slot
from holdfast.parallel.gradients.cell_team import TAGS_PER_REDUCER, CellTeam
from holdfast.parallel.gradients.direct import DirectRound
from holdfast.parallel.gradients.exchange import ExchangeRound
from holdfast.parallel.gradients.gathered import GatheredLauncher
from holdfast.parallel.gradients.reduction_plan import ReductionPlan, make_reduction_plan
from holdfast.parallel.torch_compat import is_peer_loss

MakeBuffer = Callable[[int], Tensor]
"""Returns zeros: so many elements of the dtype of the sums."""


class Reducer:
    """Sums a step's gradients into `gradient`, a flat buffer laid out by `layout`.

    A producer of gradients (hooks of replicated parameters, FSDP2's buckets) asks for
    the slot of the current leaf, writes one bucket, and calls `done(bucket)`. With `pairs` it is
    asked to `stays_in_place` every left one of two sibling leaves and to add the right one to it.
    fast: use the backend's own all-reduce instead of the tree, if the team is all of its peers
        and each of them contributes and receives. Any other team keeps the tree.
    on_error: called with the first error of a step, so that other reducers of this rank stop too.
    is_summed: something of this step was summed here, or received; what was computed is lost.
    are_slots_moved: slots do not lie where they do in other steps, because a step was resumed.
    buffers: gives the memory of the sums, zeros for a number of elements; None: on the device.
    launcher: of a rank with several reducers, which all use it; its owner starts it when each of
        them has begun. Without it this reducer has one of its own.
    A bare `PeerGroup` is a team with one member per replica.
    """

    def __init__(
        self,
        layout: FlatLayout,
        team: CellTeam | PeerGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fast: bool = False,
        pairs: bool = False,
        on_error: Callable[[Exception], None] | None = None,
        launcher: GatheredLauncher | None = None,
        buffers: MakeBuffer | None = None,
    ):
        self.team = team if isinstance(team, CellTeam) else CellTeam.of_replicas(team)
        self.layout, self.peers, self.pairs = layout, self.team.peers, pairs
        self.fast, self._on_error = fast and self.team.is_plain_all_reduce, on_error
        self.is_summed = self.are_slots_moved = False
        self._spare_buffers: list[Tensor] = []  # buffers of slots that are not used now
        self._make_buffer = buffers or partial(torch.zeros, dtype=dtype, device=device)
        self.gradient = self._make_buffer(layout.size)
        self._slots: dict[Slot, Tensor] = {(0, 0): self.gradient}
        self._plan: ReductionPlan | None = None
        self._step_dealing: tuple[int, Shares, Computed] | None = None
        self._leaf_action: LeafAction | None = None
        self._round: ExchangeRound | None = None
        self._launcher, self._owns_launcher = launcher or GatheredLauncher(), launcher is None
        self._error: Exception | None = None
        self._scratch: dict[Hashable, Tensor] = {}
        self._kept = 0  # pieces that were there when the step began
        self._looks: list[Tensor] = []  # the sum of the elements of each bucket of own pieces

    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a step of `leaves` microbatches, dealt to the replicas as in `shares`. If the
        replicas have `computed` some of it, continue with what `keep` has kept.

        The step before must have been voted on and its sends forgotten. `check` raises what failed.
        """
        self._drop_void_sum()
        self._error, self._looks = None, []
        if self._step_dealing != (leaves, shares, computed):
            self._plan = make_reduction_plan(
                leaves,
                shares,
                self.team.members,
                self.team.own_index,
                self.fast,
                self.pairs,
                computed,
            )
            self._step_dealing = leaves, shares, computed
            self._check_tags(self._plan)
        if not (computed and computed[self.team.own_member.replica]):
            self._restore()  # other ranks may have kept a part; an older attempt's rest is void
        if len(self.team.members) == 1 and len(self.plan.pieces[0]) <= 1:
            return
        if self.fast and not self.plan.leaf_actions:
            self.gradient.zero_()
        try:
            self._round = self._open_round()
            for index in range(len(self.layout.buckets)):
                for ordinal in range(self._kept):
                    self._round.piece_ready(index, ordinal)
            self._stop_round()  # by another thread, before it could be stopped
        except RuntimeError as error:
            self.fail(error)

    def _open_round(self) -> ExchangeRound:
        if self.team.exchange == "direct" or self.fast or len(self.team.members) == 1:
            return DirectRound(self, self.plan)
        if self._owns_launcher:
            self._launcher.reset()
        opened = self._launcher.add(self, self.plan)
        if self._owns_launcher:
            self._launcher.start()
        return opened

    def regroup(self, team: CellTeam, fast: bool) -> None:
        """Continue with other members, in the same buffers. Only what was kept of an open step
        survives. All waits in the old team must have been woken."""
        self.join()
        self.team, self.peers = team, team.peers
        self.fast = fast and team.is_plain_all_reduce
        self._step_dealing = None
        self._drop_void_sum()

    def keep(self, share: Sequence[int], done_leaves: Sequence[int]) -> None:
        """Keep the partial sums of the leaves in `done_leaves`, which are computed leaves of the
        `share` that was begun. They are the next step's first pieces. Nothing may be
        `is_summed`."""
        self.join()
        held = partial_sums(self.plan.tree.leaves, share, done_leaves)
        buffers = [self.slot(slot) for _, slot in held]
        used = {id(buffer) for buffer in buffers}
        self._spare_buffers += [b for b in self._slots.values() if id(b) not in used]
        self._slots = {(ordinal, 0): buffer for ordinal, buffer in enumerate(buffers)}
        self._kept, self.are_slots_moved = len(held), True

    def _drop_void_sum(self) -> None:
        """Forget what was summed of a step. If that was given up, a collective may have left void
        values, also in the gaps between tensors. No pass writes there, and the norm reads them."""
        if self.is_summed and self._error is not None:
            self.gradient.zero_()
        self.is_summed = False

    def _restore(self) -> None:
        """The slots of a step that begins at its beginning: the first is the gradient itself."""
        if self.are_slots_moved:
            self._spare_buffers += [b for b in self._slots.values() if b is not self.gradient]
            self._slots = {(0, 0): self.gradient}
            self._kept, self.are_slots_moved = 0, False

    @property
    def plan(self) -> ReductionPlan:
        if self._plan is None:
            raise RuntimeError("begin() comes before a leaf")
        return self._plan

    def start_leaf(self, leaf: int) -> Slot:
        """The gradients that come now belong to `leaf`. Returns the slot they go to."""
        self._leaf_action = self.plan.leaf_actions[leaf]
        turn = self._leaf_action
        return (turn.piece, 0) if turn.depth == 0 else (0, turn.depth)

    @property
    def stays_in_place(self) -> bool:
        """Return True if the current leaf stays in place, and the next one is added to it."""
        return self._leaf_action is not None and self._leaf_action.stays_in_place

    @property
    def accumulates(self) -> bool:
        """Return True if the current leaf is added to its slot's content, False if it replaces
        it."""
        return self._leaf_action is not None and self._leaf_action.accumulates

    def slot(self, slot: Slot) -> Tensor:
        """The flat buffer of a slot. Made on first use and kept for later steps."""
        if slot not in self._slots:
            spare = self._spare_buffers.pop() if self._spare_buffers else None
            self._slots[slot] = self._make_buffer(self.layout.size) if spare is None else spare
        return self._slots[slot]

    def bucket_done(self, index: int) -> None:
        """Bucket `index` of the current leaf is complete: carry, and send a finished piece."""
        turn, bucket = self._leaf_action, self.layout.buckets[index]
        if turn is None:
            raise RuntimeError("start_leaf() comes before done()")
        depth = turn.depth
        for _ in range(turn.carries):
            below = (turn.piece, 0) if depth == 1 else (0, depth - 1)
            bucket.view(self.slot(below)).add_(bucket.view(self.slot((0, depth))))
            depth -= 1
        if not turn.completes_piece:
            return
        self._looks.append(bucket.view(self.slot((turn.piece, 0))).sum())
        if self._round is not None:
            self._round.piece_ready(index, turn.piece)

    @property
    def is_finite(self) -> bool:
        """Return True if all that this member has given to the sum of this step was finite. It
        is read only if the sum is not finite, so usually no thread waits for it."""
        return all(bool(torch.isfinite(look)) for look in self._looks)

    def join(self) -> None:
        """Wait until the step's communication is over, well or badly."""
        if self._round is not None:
            with self.team.exposed():
                self._round.join()
            self._round = None

    def finish(self) -> None:
        """Return when `gradient` holds the complete sum. Raises PeerLostError when it cannot."""
        self.join()
        self.check()

    def fail(self, error: Exception) -> None:
        """Store the first error of the step; wake all waiters, here and at the peers."""
        first = self._error is None
        if first:
            self._error = error
            self.peers.abort()
        self._stop_round()  # not only the first time: the round may have been in the making then
        if first and self._on_error is not None:
            self._on_error(error)

    def _stop_round(self) -> None:
        if self._error is not None and self._round is not None:
            self._round.stop()

    def check(self) -> None:
        """Raise the stored error, as PeerLostError where a connection broke."""
        error = self._error
        if error is None:
            return
        if is_peer_loss(error):
            raise PeerLostError(f"a peer was lost during the reduction: {error}") from error
        raise error

    def _check_tags(self, plan: ReductionPlan) -> None:
        needed = len(self.layout.buckets) * plan.stride
        if needed > TAGS_PER_REDUCER:
            raise ValueError(
                f"{len(self.layout.buckets)} buckets of {plan.stride - 1} pieces need {needed} "
                f"message tags, there are {TAGS_PER_REDUCER}: use larger buckets"
            )

    def scratch(self, key: Hashable, elements: int) -> Tensor:
        """Room for `elements`, kept between steps under `key`; its content is void."""
        room = self._scratch.get(key)
        if room is None or room.numel() < elements:
            room = self._scratch[key] = self._make_buffer(elements)
        return room[:elements]
