"""The exchange by messages from rank to rank: a piece leaves as soon as it is final.

Why no send is ever waited for, and why buffers may still be reused:

- A piece arrived if the result came back; a result arrived if its receiver voted.
- A contributor that does not receive learns from the vote alone. Its piece arrived if the owner
  voted, because an owner votes after it has summed.
- An owner that does not contribute reuses nothing but its sum, as any other.

So all sends of a step are over when its vote is. `PeerGroup.forget_sends` belongs between the vote
and the next step, once for all reducers that share the peers. See `comm/transport.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from holdfast.parallel.comm.abortable_wait import AbandonedError, AbortableWait
from holdfast.parallel.comm.lanes import Lane
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.buckets import GradientBucket
from holdfast.parallel.gradients.exchange import ExchangeRound
from holdfast.parallel.gradients.reduction_plan import ReductionPlan, execute_additions
from holdfast.parallel.torch_compat import Work

if TYPE_CHECKING:
    from holdfast.parallel.gradients.reducer import Reducer


class DirectRound(ExchangeRound):
    """The communication of one step, and the thread that does an owner's part of it."""

    def __init__(self, host: Reducer, plan: ReductionPlan):
        super().__init__(host, plan, range(len(host.team.members)))
        self._changed = threading.Condition()
        self._is_stopped = False
        self._lane: Lane | None = None
        self._pieces: list[list[tuple[int, Tensor, Work]]] = [[] for _ in self._buckets]
        self._results: list[Work] = []
        self._wait: AbortableWait | None = None
        if not self.team.own_member.receives:
            return
        if not host.fast:
            self._post_receives()
        work = self._all_reduce if host.fast else self._reduce_own_chunks
        self._wait = AbortableWait(lambda errand: self._run(work, errand), "reducer")
        self.peers.start_wait(self._wait)

    def piece_ready(self, index: int, ordinal: int) -> None:
        """Send the piece to the owners of its chunks."""
        if self.host.fast:
            self._marks[index].append(self.peers.mark())
        else:
            slot = self.host.slot((ordinal, 0))
            for member in self.team.others:
                start, stop = self._chunk(index, member)
                if start < stop:
                    to = self.team.positions[member]
                    self._messages.send(slot[start:stop], to, self._tag(index, ordinal))
        with self._changed:
            self._ready_pieces[index] += 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the thread of this step, or leave it to a message that never comes in full."""
        if self._wait is not None:
            try:
                self.peers.join_wait(self._wait)
            except RuntimeError as error:
                self.host.fail(error)
                del self.host, self._pieces, self._results  # that thread is not to keep them
            finally:
                if self._lane is not None:
                    self._lane.settle()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    @property
    def _messages(self) -> PeerGroup:
        """The group, which has tags: a backend without them is for `gathered` and `fast`."""
        assert isinstance(self.peers, PeerGroup)
        return self.peers

    def _tag(self, index: int, ordinal: int) -> int:
        return self.team.first_tag + index * self._plan.stride + ordinal

    def _post_receives(self) -> None:
        """One receive for each piece of my chunks."""
        team, plan = self.team, self._plan
        mine = [self._chunk(index, team.own_index) for index in range(len(self._buckets))]
        held = sum(len(plan.pieces[member]) for member in team.others)
        columns = sum(stop - start for start, stop in mine)
        room = self.host.scratch("arrivals", held * columns).view(held, columns)
        at = 0
        for index, (start, stop) in enumerate(mine):
            row = 0
            for member in team.others:
                peer = team.positions[member]
                for ordinal in range(len(plan.pieces[member])):
                    into = room[row, at : at + stop - start]
                    row += 1
                    if start < stop:
                        work = self._messages.receive(into, peer, self._tag(index, ordinal))
                        self._pieces[index].append((self._firsts[member] + ordinal, into, work))
            at += stop - start

    def _expect_results(self, index: int) -> None:
        """All pieces of a bucket have come: the sums of other owners may overwrite mine."""
        self.host.is_summed = True
        for member in self.team.others:
            start, stop = self._chunk(index, member)
            if start < stop:
                into = self.host.gradient[start:stop]
                peer, tag = self.team.positions[member], self._tag(index, self._plan.stride - 1)
                self._results.append(self._messages.receive(into, peer, tag))

    def _run(self, work: Callable[[AbortableWait], None], errand: AbortableWait) -> None:
        try:
            work(errand)
        except AbandonedError:
            raise
        except Exception as error:  # stored, and raised by finish()
            self.host.fail(error)

    def _await_own(self, index: int, count: int) -> bool:
        """Wait until `count` own pieces of a bucket are final; False when the step is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._ready_pieces[index] >= count)
            return not self._is_stopped

    def _reduce_own_chunks(self, errand: AbortableWait) -> None:
        """Add up my chunk of every bucket and send it to all; then collect the other chunks."""
        team, plan = self.team, self._plan
        own, first = len(plan.pieces[team.own_index]), self._firsts[team.own_index]
        receivers = [team.positions[m] for m in team.others if m in self._owners]
        unowned: list[int] = []  # buckets of which I have no chunk, so that I do not see them come
        for index in range(len(self._buckets)):
            if not self._await_own(index, own):
                return
            start, stop = self._chunk(index, team.own_index)
            if start == stop:
                unowned.append(index)
                continue
            with team.span(f"bucket {index}"):
                sources: dict[int, Tensor] = {}
                for source, tensor, work in self._pieces[index]:
                    errand.wait(work)
                    sources[source] = tensor
                self._expect_results(index)
                for ordinal in range(own):
                    sources[first + ordinal] = self.host.slot((ordinal, 0))[start:stop]
                total = self.host.gradient[start:stop]
                execute_additions(plan, sources, total)
                for peer in receivers:
                    self._messages.send(total, peer, self._tag(index, plan.stride - 1))
        for index in unowned:
            self._expect_results(index)
        with team.span("sums of the others"):
            for work in self._results:
                errand.wait(work)

    def _all_reduce(self, errand: AbortableWait) -> None:
        """`reduction: fast`: the backend's own sum of the same buckets, in bucket order."""
        works: list[Work] = []
        expected = 1 if self._plan.leaf_actions else 0
        self._lane = lane = self.peers.lane(errand)

        def start(bucket: GradientBucket) -> None:
            works.append(self.peers.all_reduce(bucket.view(self.host.gradient)))

        def wait() -> None:
            for work in works:
                lane.wait(work)

        for index, bucket in enumerate(self._buckets):
            if not self._await_own(index, expected):
                return
            self.host.is_summed = True
            for mark in self._marks[index]:
                lane.follow(mark)
            lane.run(partial(start, bucket))
        lane.run(wait)
        lane.finish()
