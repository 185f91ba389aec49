"""Gradients of logical microbatches, summed over replicas in one fixed tree order.

Not DDP's all-reduce, whose order of additions depends on the number of ranks and on bucket
rebuilds. Here the tree of `spec/tree.py` decides every addition, so the result has the same bits
for any number of replicas and any dealing, at the bytes of a ring (for one piece per replica).

One step of rank r out of n, for each bucket of the flat gradient buffer:

    leaf by leaf   its gradient goes into a partial sum of the binary counter (hooks, during the
                   backward); a finished piece leaves at once, cut in n chunks, one to each owner
    owner          waits for everybody's pieces of its chunk, adds up the tree above the pieces
    owner -> all   the summed chunk, received straight into the gradient buffer

The first two overlap the backward pass; a thread of the step does the owner's part, bucket by
bucket in a fixed order. Errors are stored and raised by `check` and `finish`, never inside a
backward. With one replica nothing is sent, and the tree is summed in the buffer itself.

Why no send is ever waited for, and why buffers may still be reused: a piece arrived if the
result came back; a result arrived if its receiver voted. See `transport.py`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from holdfast.errors import PeerLostError
from holdfast.parallel.buckets import Bucket, FlatLayout
from holdfast.parallel.torch_compat import Work, is_peer_loss
from holdfast.parallel.transport import Peers
from holdfast.spec.tree import Node, ReductionTree, Shares, Turn, check_dealing, counter, pieces

_FIRST_TAG = 16  # lower tags are free for small exchanges in the same group

Slot = tuple[int, int]
"""(piece, 0) is where a piece ends up; (0, depth) with depth > 0 a partial sum above it."""


@dataclass(frozen=True)
class Plan:
    """What a dealing means for one rank. The same for all buckets.

    pieces: of every rank, in rank order. stride: tags per bucket; the last one is the result's.
    """

    tree: ReductionTree
    turns: dict[int, Turn]
    pieces: tuple[tuple[Node, ...], ...]

    @property
    def stride(self) -> int:
        return max(len(p) for p in self.pieces) + 1


@lru_cache(maxsize=16)
def make_plan(leaves: int, shares: Shares, rank: int, fast: bool, pairs: bool) -> Plan:
    """Raises ValueError when the dealing does not give out every leaf once."""
    check_dealing(leaves, shares)
    tree = ReductionTree(leaves)
    if fast:  # each replica sums its share in sequence, into one buffer
        share = sorted(shares[rank])
        last = len(share) - 1
        turns = tuple(Turn(j, False, 0, 0, i > 0, 0, i == last) for i, j in enumerate(share))
        return Plan(tree, {t.leaf: t for t in turns}, tuple(() for _ in shares))
    turns = counter(tree, shares[rank], pairs)
    return Plan(tree, {t.leaf: t for t in turns}, tuple(pieces(tree, s) for s in shares))


class Reducer:
    """Sums a step's gradients into `gradient`, a flat buffer laid out by `layout`.

    Whoever produces gradients (hooks of replicated parameters, FSDP2's buckets) asks for
    the slot of the current leaf, writes one bucket, and calls `done(bucket)`. With `pairs` it is
    asked to `hold` every left one of two sibling leaves and to add the right one to it.
    """

    def __init__(
        self, layout: FlatLayout, peers: Peers, *, dtype: torch.dtype, device: torch.device,
        fast: bool = False, pairs: bool = False,
    ):  # fmt: skip
        self.layout, self.peers, self.fast, self.pairs = layout, peers, fast, pairs
        self.gradient = torch.zeros(layout.size, dtype=dtype, device=device)
        self._slots: dict[Slot, Tensor] = {(0, 0): self.gradient}
        self._plan: Plan | None = None
        self._turn: Turn | None = None
        self._round: Round | None = None
        self._error: Exception | None = None
        self._arrivals = torch.empty(0, dtype=dtype)

    def begin(self, leaves: int, shares: Shares) -> None:
        """Start a step of `leaves` microbatches, dealt to the replicas as in `shares`.

        The step before must have been voted on: its sends are forgotten here.
        Raises PeerLostError when a peer is known to be gone.
        """
        self._error = None
        self.peers.forget_sends()
        self._plan = make_plan(leaves, shares, self.peers.rank, self.fast, self.pairs)
        if self.peers.size == 1:
            return
        if not shares[self.peers.rank] and self.fast:
            self.gradient.zero_()
        try:
            self._round = Round(self, self._plan)
        except RuntimeError as error:
            self.fail(error)
            self.check()

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("begin() comes before a leaf")
        return self._plan

    def start_leaf(self, leaf: int) -> Slot:
        """The gradients that come now belong to `leaf`. Returns the slot they go to."""
        self._turn = self.plan.turns[leaf]
        return (self._turn.piece, 0) if self._turn.depth == 0 else (0, self._turn.depth)

    @property
    def hold(self) -> bool:
        """Whether the current leaf stays where it is, for the next one to be added to it."""
        return self._turn is not None and self._turn.hold

    @property
    def accumulate(self) -> bool:
        """Whether the current leaf is added to what its slot holds, or replaces it."""
        return self._turn is not None and self._turn.accumulate

    def slot(self, slot: Slot) -> Tensor:
        """The flat buffer of a slot. Made on first use and kept for later steps."""
        if slot not in self._slots:
            self._slots[slot] = torch.zeros_like(self.gradient)
        return self._slots[slot]

    def done(self, index: int) -> None:
        """Bucket `index` of the current leaf is complete: carry, and send a finished piece."""
        turn, bucket = self._turn, self.layout.buckets[index]
        if turn is None:
            raise RuntimeError("start_leaf() comes before done()")
        depth = turn.depth
        for _ in range(turn.carries):
            below = (turn.piece, 0) if depth == 1 else (0, depth - 1)
            _part(self.slot(below), bucket).add_(_part(self.slot((0, depth)), bucket))
            depth -= 1
        if turn.finished and self._round is not None:
            self._round.piece_ready(index, turn.piece)

    def finish(self) -> None:
        """Return when `gradient` holds the whole sum. Raises PeerLostError when it cannot."""
        if self._round is not None:
            self._round.join()
            self._round = None
        self.check()

    def fail(self, error: Exception) -> None:
        """Store the first error of the step; wake everybody who waits, here and at the peers."""
        if self._error is None:
            self._error = error
            self.peers.abort()
            if self._round is not None:
                self._round.stop()

    def check(self) -> None:
        """Raise the stored error, as PeerLostError where a connection broke."""
        error = self._error
        if error is None:
            return
        if is_peer_loss(error):
            raise PeerLostError(f"a peer was lost during the reduction: {error}") from error
        raise error

    def arrivals(self, rows: int, columns: int) -> Tensor:
        """Room for `rows` pieces of `columns` elements from other replicas, kept between steps."""
        if self._arrivals.numel() < rows * columns:
            self._arrivals = torch.empty(rows * columns, dtype=self.gradient.dtype)
        return self._arrivals[: rows * columns].view(rows, columns)


def _part(flat: Tensor, bucket: Bucket) -> Tensor:
    return flat[bucket.start : bucket.stop]


class Round:
    """The communication of one step, and the thread that does an owner's part of it."""

    def __init__(self, reducer: Reducer, plan: Plan):
        self._reducer, self._plan, self._peers = reducer, plan, reducer.peers
        self._buckets = reducer.layout.buckets
        self._changed = threading.Condition()
        self._ready = [0] * len(self._buckets)  # own pieces finished, per bucket
        self._stopped = False
        self._pieces: list[list[tuple[Node, Tensor, Work]]] = [[] for _ in self._buckets]
        self._results: list[Work] = []
        if not reducer.fast:
            self._post_receives()
        work = self._all_reduce if reducer.fast else self._own
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="reducer")
        self._thread.start()

    def piece_ready(self, index: int, ordinal: int) -> None:
        """Own piece number `ordinal` of a bucket is final: send it to the owners of its chunks."""
        if not self._reducer.fast:
            slot, bucket = self._reducer.slot((ordinal, 0)), self._buckets[index]
            for peer in self._peers.others:
                start, stop = bucket.chunk(peer, self._peers.size)
                if start < stop:
                    self._peers.send(slot[start:stop], peer, self._tag(index, ordinal))
        with self._changed:
            self._ready[index] += 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread of this step; every wait inside it is bounded."""
        self._thread.join()

    def stop(self) -> None:
        """Let the thread end at its next look."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _tag(self, index: int, ordinal: int) -> int:
        return _FIRST_TAG + index * self._plan.stride + ordinal

    def _post_receives(self) -> None:
        """One receive for each piece of my chunks, and one for each chunk that others own."""
        me, size, result = self._peers.rank, self._peers.size, self._plan.stride - 1
        mine = [bucket.chunk(me, size) for bucket in self._buckets]
        held = sum(len(self._plan.pieces[peer]) for peer in self._peers.others)
        room = self._reducer.arrivals(held, sum(stop - start for start, stop in mine))
        at = 0
        for index, (start, stop) in enumerate(mine):
            row = 0
            for peer in self._peers.others:
                for ordinal, node in enumerate(self._plan.pieces[peer]):
                    into = room[row, at : at + stop - start]
                    row += 1
                    if start < stop:
                        work = self._peers.receive(into, peer, self._tag(index, ordinal))
                        self._pieces[index].append((node, into, work))
                begin, end = self._buckets[index].chunk(peer, size)
                if begin < end:
                    into = self._reducer.gradient[begin:end]
                    tag = self._tag(index, result)
                    self._results.append(self._peers.receive(into, peer, tag))
            at += stop - start

    def _run(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except Exception as error:  # stored, and raised by finish()
            self._reducer.fail(error)

    def _await_own(self, index: int, count: int) -> bool:
        """Wait until `count` own pieces of a bucket are final; False when the step is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._ready[index] >= count)
            return not self._stopped

    def _own(self) -> None:
        """Add up my chunk of every bucket and give it to all; then collect the others' chunks."""
        me, size, result = self._peers.rank, self._peers.size, self._plan.stride - 1
        own = self._plan.pieces[me]
        for index, bucket in enumerate(self._buckets):
            if not self._await_own(index, len(own)):
                return
            start, stop = bucket.chunk(me, size)
            if start == stop:
                continue
            values: dict[Node, Tensor] = {}
            for node, tensor, work in self._pieces[index]:
                work.wait()
                values[node] = tensor
            for ordinal, node in enumerate(own):
                values[node] = self._reducer.slot((ordinal, 0))[start:stop]
            total = self._reducer.gradient[start:stop]
            _sum_tree(self._plan.tree, values, total)
            for peer in self._peers.others:
                self._peers.send(total, peer, self._tag(index, result))
        for work in self._results:
            work.wait()

    def _all_reduce(self) -> None:
        """`reduction: fast`: the backend's own sum of the same buckets, in bucket order."""
        works: list[Work] = []
        expected = 1 if self._plan.turns else 0
        for index, bucket in enumerate(self._buckets):
            if not self._await_own(index, expected):
                return
            works.append(self._peers.all_reduce(_part(self._reducer.gradient, bucket)))
        for work in works:
            work.wait()


def _sum_tree(tree: ReductionTree, values: dict[Node, Tensor], out: Tensor) -> None:
    """Add up the tree above the pieces, in tree order, into `out`. The pieces are overwritten.

    `out` may be one of the pieces: the root, written last, reads and writes element by element.
    """
    if tree.root in values:
        if values[tree.root].data_ptr() != out.data_ptr():
            out.copy_(values[tree.root])
        return
    left, right = (tree.fold(values, Tensor.add_, child) for child in tree.root.split())
    torch.add(left, right, out=out)
