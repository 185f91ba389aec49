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

Why no send is ever waited for, and why buffers may still be reused:

- A piece arrived if the result came back; a result arrived if its receiver voted.
- A contributor that does not receive learns from the vote alone. Its piece arrived if the owner
  voted, because an owner votes after it has summed.
- An owner that does not contribute reuses nothing but its sum, as any other.

So all sends of a step are over when its vote is. `Peers.forget_sends` belongs between the vote and
the next `begin`, once for all reducers that share the peers. See `transport.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.core.sharding.reduction_cells import Member
from holdfast.core.sharding.reduction_tree import LeafAction, Shares
from holdfast.core.sharding.step_resume import Computed, partial_sums
from holdfast.errors import PeerLostError
from holdfast.parallel.comm.abortable_wait import AbandonedError, AbortableWait
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.buckets import FlatLayout, GradientBucket
from holdfast.parallel.gradients.reduction_plan import (
    ReductionPlan,
    execute_additions,
    make_reduction_plan,
)
from holdfast.parallel.torch_compat import Work, is_peer_loss
from holdfast.parallel.trace import REDUCE, SpanRecorder

FIRST_TAG = 16  # lower tags are free for small exchanges in the same group
TAGS_PER_REDUCER = 1 << 20  # what one reducer may use from its first tag on

Slot = tuple[int, int]
"""(piece, 0) is where a piece ends up; (0, depth) with depth > 0 a partial sum above it."""


@dataclass(frozen=True)
class CellTeam:
    """The members that sum one cell, and how they reach each other.

    own_index: index of this rank in `members`. positions: each member's number in `peers`, which
    may connect more ranks than these. first_tag: reducers that share peers need `TAGS` tags each.
    recorder: notes when each bucket is summed.
    Raises ValueError if two members contribute the same part of one replica, or none receives.
    """

    peers: PeerGroup
    members: tuple[Member, ...]
    own_index: int
    positions: tuple[int, ...]
    first_tag: int = FIRST_TAG
    recorder: SpanRecorder | None = None

    def __post_init__(self) -> None:
        given = [(m.replica, m.part) for m in self.members if m.contributes]
        if len(set(given)) != len(given):
            raise ValueError(f"a part of a replica is contributed twice in {self.members}")
        if not any(m.receives for m in self.members):
            raise ValueError(f"nobody receives in {self.members}")

    @staticmethod
    def of_replicas(peers: PeerGroup) -> CellTeam:
        """One member per replica, which is its number in `peers`; all contribute and receive."""
        everybody = range(peers.size)
        members = tuple(Member(i, i, 0, contributes=True, receives=True) for i in everybody)
        return CellTeam(peers, members, peers.rank, tuple(everybody))

    @property
    def own_member(self) -> Member:
        return self.members[self.own_index]

    @property
    def others(self) -> tuple[int, ...]:
        """Every member but this one, beginning with the next, so that not all write to one."""
        size = len(self.members)
        return tuple((self.own_index + i) % size for i in range(1, size))

    @property
    def is_plain_all_reduce(self) -> bool:
        """Return True if the backend's own all-reduce over `peers` would be the same sum."""
        return len(self.members) == self.peers.size and all(
            m.contributes and m.receives for m in self.members
        )


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
    defers_errors: `begin` raises nothing either. Other ranks compute in lockstep with this one, and
        must not wait for it until all of them come to `finish`.
    A bare `Peers` is a team with one member per replica.
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
    ):
        self.team = team if isinstance(team, CellTeam) else CellTeam.of_replicas(team)
        self.layout, self.peers, self.pairs = layout, self.team.peers, pairs
        self.fast, self._on_error = fast and self.team.is_plain_all_reduce, on_error
        self.defers_errors = self.is_summed = self.are_slots_moved = False
        self._spare_buffers: list[Tensor] = []  # buffers of slots that are not used now
        self.gradient = torch.zeros(layout.size, dtype=dtype, device=device)
        self._slots: dict[Slot, Tensor] = {(0, 0): self.gradient}
        self._plan: ReductionPlan | None = None
        self._step_dealing: tuple[int, Shares, Computed] | None = None
        self._leaf_action: LeafAction | None = None
        self._round: ReductionRound | None = None
        self._error: Exception | None = None
        self._arrivals = torch.empty(0, dtype=dtype)
        self._kept = 0  # pieces that were there when the step began
        self._looks: list[Tensor] = []  # the sum of the elements of each bucket of own pieces

    def begin(self, leaves: int, shares: Shares, computed: Computed = ()) -> None:
        """Start a step of `leaves` microbatches, dealt to the replicas as in `shares`. If the
        replicas have `computed` some of it, continue with what `keep` has kept.

        The step before must have been voted on and its sends forgotten.
        Raises PeerLostError when a peer is known to be lost, unless it is `defers_errors`.
        """
        self._error, self.is_summed, self._looks = None, False, []
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
            self._round = ReductionRound(self, self.plan)
            for index in range(len(self.layout.buckets)):
                for ordinal in range(self._kept):
                    self._round.piece_ready(index, ordinal)
            self._stop_round()  # by another thread, before it could be stopped
        except RuntimeError as error:
            self.fail(error)
            if not self.defers_errors:
                self.check()

    def regroup(self, team: CellTeam, fast: bool) -> None:
        """Continue with other members, in the same buffers. Only what was kept of an open step
        survives. All waits in the old team must have been woken."""
        self.join()
        self.team, self.peers = team, team.peers
        self.fast = fast and team.is_plain_all_reduce
        self._step_dealing, self.is_summed = None, False

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
        return (
            (self._leaf_action.piece, 0)
            if self._leaf_action.depth == 0
            else (0, self._leaf_action.depth)
        )

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
            self._slots[slot] = torch.zeros_like(self.gradient) if spare is None else spare
        return self._slots[slot]

    def bucket_done(self, index: int) -> None:
        """Bucket `index` of the current leaf is complete: carry, and send a finished piece."""
        turn, bucket = self._leaf_action, self.layout.buckets[index]
        if turn is None:
            raise RuntimeError("start_leaf() comes before done()")
        depth = turn.depth
        for _ in range(turn.carries):
            below = (turn.piece, 0) if depth == 1 else (0, depth - 1)
            _bucket_view(self.slot(below), bucket).add_(_bucket_view(self.slot((0, depth)), bucket))
            depth -= 1
        if not turn.completes_piece:
            return
        self._looks.append(_bucket_view(self.slot((turn.piece, 0)), bucket).sum())
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

    def arrival_buffer(self, rows: int, columns: int) -> Tensor:
        """Room for `rows` pieces of `columns` elements from other replicas, kept between steps."""
        if self._arrivals.numel() < rows * columns:
            self._arrivals = torch.empty(rows * columns, dtype=self.gradient.dtype)
        return self._arrivals[: rows * columns].view(rows, columns)


def _bucket_view(flat: Tensor, bucket: GradientBucket) -> Tensor:
    return flat[bucket.start : bucket.stop]


class ReductionRound:
    """The communication of one step, and the thread that does an owner's part of it."""

    def __init__(self, reducer: Reducer, plan: ReductionPlan):
        self._reducer, self._plan, self._peers = reducer, plan, reducer.peers
        self._team = reducer.team
        self._buckets = reducer.layout.buckets
        owners = [i for i, member in enumerate(self._team.members) if member.receives]
        self._owners = {member: number for number, member in enumerate(owners)}
        self._changed = threading.Condition()
        self._ready_pieces = [0] * len(self._buckets)  # own pieces finished, per bucket
        self._is_stopped = False
        self._pieces: list[list[tuple[int, Tensor, Work]]] = [[] for _ in self._buckets]
        self._results: list[Work] = []
        self._wait: AbortableWait | None = None
        if not self._team.own_member.receives:
            return
        if not reducer.fast:
            self._post_receives()
        work = self._all_reduce if reducer.fast else self._reduce_own_chunks
        self._wait = AbortableWait(lambda errand: self._run(work, errand), "reducer")
        self._peers.start_wait(self._wait)

    def piece_ready(self, index: int, ordinal: int) -> None:
        """Own piece number `ordinal` of a bucket is final: send it to the owners of its chunks."""
        if not self._reducer.fast:
            slot = self._reducer.slot((ordinal, 0))
            for member in self._team.others:
                start, stop = self._chunk(index, member)
                if start < stop:
                    to = self._team.positions[member]
                    self._peers.send(slot[start:stop], to, self._tag(index, ordinal))
        with self._changed:
            self._ready_pieces[index] += 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread of this step, or leave it to a message that never comes in full."""
        if self._wait is not None:
            try:
                self._peers.join_wait(self._wait)
            except RuntimeError as error:
                self._reducer.fail(error)
                del self._reducer, self._pieces, self._results  # that thread is not to keep them

    def stop(self) -> None:
        """Let the thread end at its next look."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _tag(self, index: int, ordinal: int) -> int:
        return self._team.first_tag + index * self._plan.stride + ordinal

    def _chunk(self, index: int, member: int) -> tuple[int, int]:
        """Return the part of a bucket that `member` owns; nothing if it does not receive."""
        number = self._owners.get(member)
        return (0, 0) if number is None else self._buckets[index].chunk(number, len(self._owners))

    def _post_receives(self) -> None:
        """One receive for each piece of my chunks."""
        team, plan = self._team, self._plan
        mine = [self._chunk(index, team.own_index) for index in range(len(self._buckets))]
        firsts = [sum(len(p) for p in plan.pieces[:member]) for member in range(len(plan.pieces))]
        held = sum(len(plan.pieces[member]) for member in team.others)
        room = self._reducer.arrival_buffer(held, sum(stop - start for start, stop in mine))
        at = 0
        for index, (start, stop) in enumerate(mine):
            row = 0
            for member in team.others:
                peer = team.positions[member]
                for ordinal in range(len(plan.pieces[member])):
                    into = room[row, at : at + stop - start]
                    row += 1
                    if start < stop:
                        work = self._peers.receive(into, peer, self._tag(index, ordinal))
                        self._pieces[index].append((firsts[member] + ordinal, into, work))
            at += stop - start

    def _expect_results(self, index: int) -> None:
        """All pieces of a bucket have come: the sums of other owners may overwrite mine."""
        self._reducer.is_summed = True
        for member in self._team.others:
            start, stop = self._chunk(index, member)
            if start < stop:
                into = self._reducer.gradient[start:stop]
                peer, tag = self._team.positions[member], self._tag(index, self._plan.stride - 1)
                self._results.append(self._peers.receive(into, peer, tag))

    def _run(self, work: Callable[[AbortableWait], None], errand: AbortableWait) -> None:
        try:
            work(errand)
        except AbandonedError:
            raise
        except Exception as error:  # stored, and raised by finish()
            self._reducer.fail(error)

    def _await_own(self, index: int, count: int) -> bool:
        """Wait until `count` own pieces of a bucket are final; False when the step is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._ready_pieces[index] >= count)
            return not self._is_stopped

    def _reduce_own_chunks(self, errand: AbortableWait) -> None:
        """Add up my chunk of every bucket and send it to all; then collect the other chunks."""
        team, plan = self._team, self._plan
        own, first = (
            len(plan.pieces[team.own_index]),
            sum(len(p) for p in plan.pieces[: team.own_index]),
        )
        receivers = [team.positions[m] for m in team.others if m in self._owners]
        unowned: list[int] = []  # buckets of which I have no chunk, so that I do not see them come
        for index in range(len(self._buckets)):
            if not self._await_own(index, own):
                return
            start, stop = self._chunk(index, team.own_index)
            if start == stop:
                unowned.append(index)
                continue
            with self._span(f"bucket {index}"):
                sources: dict[int, Tensor] = {}
                for source, tensor, work in self._pieces[index]:
                    errand.wait(work)
                    sources[source] = tensor
                self._expect_results(index)
                for ordinal in range(own):
                    sources[first + ordinal] = self._reducer.slot((ordinal, 0))[start:stop]
                total = self._reducer.gradient[start:stop]
                execute_additions(plan, sources, total)
                for peer in receivers:
                    self._peers.send(total, peer, self._tag(index, plan.stride - 1))
        for index in unowned:
            self._expect_results(index)
        with self._span("sums of the others"):
            for work in self._results:
                errand.wait(work)

    def _span(self, name: str) -> AbstractContextManager[None]:
        recorder = self._team.recorder
        return recorder.span(REDUCE, name) if recorder else nullcontext()

    def _all_reduce(self, errand: AbortableWait) -> None:
        """`reduction: fast`: the backend's own sum of the same buckets, in bucket order."""
        works: list[Work] = []
        expected = 1 if self._plan.leaf_actions else 0
        for index, bucket in enumerate(self._buckets):
            if not self._await_own(index, expected):
                return
            self._reducer.is_summed = True
            works.append(self._peers.all_reduce(_bucket_view(self._reducer.gradient, bucket)))
        for work in works:
            errand.wait(work)
