"""The exchange by collectives of a group, which every backend has. It has the bits of `direct.py`.

For each bucket, once all own pieces of it are final:

    send    one all-to-all for each piece: every owner gets its chunk of it
    sum     the owner adds the pieces up by the reduction plan
    gather  one all-gather of the sums. If some members do not receive, one all-to-all instead

A collective matches those of the other ranks by its place in the group's order. So one thread
launches them for all reducers of a rank, bucket by bucket and cell by cell, as every rank does. A
bucket is summed after the next bucket of the same group has been sent. This order depends on the
buckets alone. So members may hold unlike numbers of pieces, or none.

A piece waits until its bucket is due, so a member with several pieces overlaps less. But there is
room for the pieces of two buckets only. `direct.py` has room for those of all.

On a device the collectives, and the sums between them, are work of a stream next to the passes
(`comm/lanes.py`). On a CPU the same code runs in the launching thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from holdfast.parallel.comm.abortable_wait import AbandonedError, AbortableWait
from holdfast.parallel.comm.device_group import DeviceGroup
from holdfast.parallel.comm.lanes import Lane
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.gradients.exchange import ExchangeRound
from holdfast.parallel.gradients.reduction_plan import ReductionPlan, execute_additions
from holdfast.parallel.torch_compat import Work

if TYPE_CHECKING:
    from holdfast.parallel.gradients.reducer import Reducer


class GatheredLauncher:
    """Launches the collectives of one step for all reducers of a rank, in one order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_stopped = False
        self._rounds: list[GatheredRound] = []
        self._lanes: list[Lane] = []
        self._wait: AbortableWait | None = None

    def reset(self) -> None:
        """Begin another step."""
        self.join()
        self._rounds, self._lanes = [], []
        self._is_stopped, self._wait = False, None

    def add(self, host: Reducer, plan: ReductionPlan) -> GatheredRound:
        """The round of one more reducer. All ranks add the cells that they share in one order."""
        made = GatheredRound(self, host, plan)
        self._rounds.append(made)
        return made

    def start(self) -> None:
        """All rounds of the step are there."""
        if not self._rounds:
            return
        rounds = self._rounds
        self._wait = wait = AbortableWait(lambda errand: self._run(rounds, errand), "reducer")
        for peers in self._peers():
            peers.add_wait(wait)
        wait.start()

    def join(self) -> None:
        """Wait for the thread of this step, or leave it to a message that never comes in full.

        Raises DeviceStuckError if a device does not end what it was given."""
        wait, self._wait = self._wait, None
        if wait is None:
            return
        try:
            wait.join()
        except RuntimeError as error:
            self._rounds[0].host.fail(error)
        finally:
            for peers in self._peers():
                peers.forget_wait(wait)
            for lane in self._lanes:
                lane.settle()
            for each in self._rounds:
                each.release()  # an abandoned thread is not to keep the buffers

    def stop(self) -> None:
        """Let the thread end at its next look."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def on_ready(self, ready: list[int], index: int) -> None:
        """One more own piece of bucket `index` is final."""
        with self._changed:
            ready[index] += 1
            self._changed.notify_all()

    def _peers(self) -> list[PeerGroup | DeviceGroup]:
        return list({id(each.peers): each.peers for each in self._rounds}.values())

    def _run(self, rounds: Sequence[GatheredRound], errand: AbortableWait) -> None:
        current = rounds[0]
        queues = {id(peers): _GroupQueue(peers.lane(errand)) for peers in self._peers()}
        self._lanes = [queue.lane for queue in queues.values()]
        count = max(each.bucket_count for each in rounds)
        due = [(i, each) for i in range(count) for each in rounds if i < each.bucket_count]
        try:
            for index, each in due:
                current = each
                if not self._await_own(each, index):
                    return
                queues[id(each.peers)].send(each, index)
            for queue in queues.values():
                queue.drain()
            for queue in queues.values():
                queue.lane.finish()
        except AbandonedError:
            raise
        except Exception as error:  # stored, and raised by finish()
            current.host.fail(error)

    def _await_own(self, each: GatheredRound, index: int) -> bool:
        """Wait until all own pieces of a bucket are final; False when the step is given up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or each.is_ready(index))
            return not self._is_stopped


@dataclass(frozen=True)
class _Arrivals:
    """The pieces of a bucket on their way. sources: by their number in the plan."""

    works: tuple[Work, ...]
    sources: dict[int, Tensor]


@dataclass(frozen=True)
class _Sums:
    """The sums of a bucket on their way. copies: (where a sum belongs, where it arrives)."""

    work: Work
    copies: tuple[tuple[Tensor, Tensor], ...] = ()


class _GroupQueue:
    """What is under way in one group: one bucket's pieces, and the sums of the one before.

    All that touches an arrived tensor runs in the lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._sent: tuple[GatheredRound, int, _Arrivals] | None = None
        self._sums: _Sums | None = None

    def send(self, each: GatheredRound, index: int) -> None:
        """Send a bucket's pieces, and then sum the bucket that was sent before it."""
        for mark in each.marks(index):
            self.lane.follow(mark)
        if self.lane.runs_later:  # a sum may begin at any time from here on
            each.host.is_summed = True
        self.lane.run(lambda: self._send(each, index))

    def drain(self) -> None:
        """Bring what is under way to its end."""
        self.lane.run(self._drain)

    def _send(self, each: GatheredRound, index: int) -> None:
        before = self._sent
        self._sent = each, index, each.send_pieces(index)
        if before is not None:
            self._sum(*before)

    def _drain(self) -> None:
        if self._sent is not None:
            self._sum(*self._sent)
        self._collect()

    def _sum(self, each: GatheredRound, index: int, arrivals: _Arrivals) -> None:
        with each.team.span(f"bucket {index}"):
            for work in arrivals.works:
                self.lane.wait(work)
            self._collect()
            self._sums = each.gather_sums(index, arrivals.sources)

    def _collect(self) -> None:
        """Put the sums that were gathered last where they belong."""
        if self._sums is not None:
            self.lane.wait(self._sums.work)
            for into, arrived in self._sums.copies:
                into.copy_(arrived)
            self._sums = None


class GatheredRound(ExchangeRound):
    """The exchange of one step of one reducer; `GatheredLauncher` drives it.

    Members are taken in the order of their place in the group. A collective lays out what it sends
    and receives in that order.
    """

    def __init__(self, launcher: GatheredLauncher, host: Reducer, plan: ReductionPlan):
        positions = host.team.positions
        self._order = sorted(range(len(host.team.members)), key=positions.__getitem__)
        super().__init__(host, plan, self._order)
        self._launcher = launcher

    @property
    def bucket_count(self) -> int:
        return len(self._buckets)

    def is_ready(self, index: int) -> bool:
        """Return True if all own pieces of a bucket are final."""
        return self._ready_pieces[index] >= len(self._plan.pieces[self.team.own_index])

    def piece_ready(self, index: int, ordinal: int) -> None:
        self._marks[index].append(self.peers.mark())
        self._launcher.on_ready(self._ready_pieces, index)

    def marks(self, index: int) -> list[object]:
        """Return what `piece_ready` has marked of a bucket."""
        return self._marks[index]

    def join(self) -> None:
        self._launcher.join()

    def stop(self) -> None:
        self._launcher.stop()

    def release(self) -> None:
        """Keep no buffer from now on."""
        del self.host

    # --- the launcher's thread ------------------------------------------------------------
    def send_pieces(self, index: int) -> _Arrivals:
        """Start one all-to-all for each piece that any member has of this bucket."""
        host, plan, own = self.host, self._plan, self.team.own_index
        chunks = [self._chunk_size(index, member) for member in self._order]
        mine = self._chunk_size(index, own)
        total = sum(len(pieces) for pieces in plan.pieces)
        room = host.scratch(("arrivals", index % 2), total * mine)
        works, sources, at = [], dict[int, Tensor](), 0
        for ordinal in range(plan.stride - 1):
            senders = [m for m in self._order if ordinal < len(plan.pieces[m])]
            into = room[at : at + len(senders) * mine]
            at += into.numel()
            for row, member in enumerate(senders):
                sources[self._firsts[member] + ordinal] = into[row * mine : (row + 1) * mine]
            gives = ordinal < len(plan.pieces[own])
            works.append(
                self.peers.all_to_all(
                    into,
                    self._buckets[index].view(host.slot((ordinal, 0)))
                    if gives
                    else host.gradient[:0],
                    [mine if member in senders else 0 for member in self._order],
                    chunks if gives else [0] * len(chunks),
                )
            )
        return _Arrivals(tuple(works), sources)

    def gather_sums(self, index: int, sources: dict[int, Tensor]) -> _Sums:
        """Sum my chunk of a bucket, and start to bring all chunks to all that receive."""
        host, bucket = self.host, self._buckets[index]
        host.is_summed = True
        own_size = self._chunk_size(index, self.team.own_index)
        sizes = [self._chunk_size(index, member) for member in self._order]
        whole = bucket.view(host.gradient)
        if len(self._owners) < len(self._order):
            # Send my sum to each member that receives, and to no other.
            own_size = self._chunk_size(index, self.team.own_index)
            receives = self.team.own_member.receives
            room = self.host.scratch(("part", index % 2), own_size * len(self._owners))
            if own_size:
                execute_additions(self._plan, sources, room[:own_size])
                room.view(-1, own_size)[1:] = room[:own_size]
            return _Sums(
                self.peers.all_to_all(
                    whole if receives else whole[:0],
                    room,
                    sizes if receives else [0] * len(sizes),
                    [own_size if member in self._owners else 0 for member in self._order],
                )
            )
        if len(set(sizes)) == 1:  # the sums arrive where they belong
            number = self._owners[self.team.own_index]
            part = whole[number * own_size : (number + 1) * own_size]
            execute_additions(self._plan, sources, part)
            return _Sums(self.peers.all_gather(whole, part))
        longest = max(sizes)
        part = host.scratch(("part", index % 2), longest)
        execute_additions(self._plan, sources, part[:own_size])
        part[own_size:].zero_()
        room = host.scratch(("sums", index % 2), longest * len(sizes))
        copies, at = [], 0
        for number, size in enumerate(sizes):
            copies.append((whole[at : at + size], room[number * longest :][:size]))
            at += size
        return _Sums(self.peers.all_gather(room, part), tuple(copies))

    def _chunk_size(self, index: int, member: int) -> int:
        start, stop = self._chunk(index, member)
        return stop - start
