"""When a round of `outer.mode: free` closes, and how far each learner came by then.

    report   each rank tells rank 0 of each of its learners: done, or interrupted by the close
    close    rank 0 tells all ranks to stop: all learners are done, or a quorum is and its grace
             is over. The pace of the quorum gives every worker time for its own share
    rows     rank 0 tells all ranks how far each learner came, once it has every report

A rank looks for the close between two inner steps. So a slow one costs the other ranks one of its
inner steps at most. Each rank reports each of its learners once in a round, so no message of a
round is left for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

import torch

from holdfast.core.data.learner_fates import LearnerProgress
from holdfast.errors import PeerLostError
from holdfast.parallel.comm.abortable_wait import AbortableWait
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.outer.payloads import lost_while_exchanged

_REPORT_TAG, _CLOSE_TAG, _ROWS_TAG = 1 << 11, (1 << 11) - 1, (1 << 11) - 2
_LEADER = 0


class RoundClose:
    """The close of one round, on one rank.

    peers: all ranks; the sends of the round before are over. learners: by rank in `peers`. quorum:
    learners. grace_s: seconds after the quorum. every: inner steps of a learner that is done.
    Raises PeerLostError.
    """

    def __init__(
        self,
        peers: PeerGroup,
        learners: Sequence[Sequence[int]],
        *,
        quorum: int,
        grace_s: float,
        every: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._peers, self._learners, self._every = peers, learners, every
        self._quorum, self._grace_s, self._clock = quorum, grace_s, clock
        self._count = sum(map(len, learners))
        self._begun, self._lock, self._closed = clock(), threading.Lock(), threading.Event()
        self._progress: dict[int, LearnerProgress] = {}
        self._paces: list[float] = []  # seconds of a learner, of those that are done
        self._timer: threading.Timer | None = None
        self._waits: list[AbortableWait] = []
        self._close, self._rows = torch.zeros(1), torch.zeros(self._count, 3, dtype=torch.int64)
        try:
            if peers.rank == _LEADER:
                for peer in peers.others:
                    if learners[peer]:
                        self._expect_reports(peer)
            else:
                self._expect_close()
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error

    def _expect_reports(self, peer: int) -> None:
        records = [torch.zeros(3, dtype=torch.int64) for _ in self._learners[peer]]
        tags = [_REPORT_TAG + learner for learner in self._learners[peer]]
        receipts = [
            self._peers.receive(record, peer, tag)
            for record, tag in zip(records, tags, strict=True)
        ]

        def take(errand: AbortableWait) -> None:
            named = zip(self._learners[peer], records, receipts, strict=True)
            for number, (learner, record, receipt) in enumerate(named, 1):
                errand.wait(receipt)
                self._take(learner, number, LearnerProgress(*record.tolist()))

        self._start(take)

    def _expect_close(self) -> None:
        receipts = [
            self._peers.receive(self._close, _LEADER, _CLOSE_TAG),
            self._peers.receive(self._rows, _LEADER, _ROWS_TAG),
        ]

        def take(errand: AbortableWait) -> None:
            close, rows = receipts
            errand.wait(close)
            self._closed.set()
            errand.wait(rows)

        self._start(take)

    def _start(self, job: Callable[[AbortableWait], None]) -> None:
        wait = AbortableWait(job, "close of a round")
        self._waits.append(wait)
        self._peers.start_wait(wait)

    # --- what a rank calls ----------------------------------------------------------------
    def stops(self, learner: int, steps: int) -> bool:
        """Return True if a learner begins no further inner step after `steps`."""
        return self._closed.is_set()

    def steps_of(self, learner: int, steps: int) -> int:
        """Return the inner steps that a learner of this rank did. steps: those done here."""
        return steps

    def report(self, learner: int, progress: LearnerProgress) -> None:
        """Report a learner of this rank, which is done or was interrupted; in the order of its
        share. Raises PeerLostError."""
        try:
            if self._peers.rank == _LEADER:
                number = self._learners[_LEADER].index(learner) + 1
                self._take(learner, number, progress)
            else:
                words = [progress.steps, progress.tokens, progress.rest]
                record = torch.tensor(words, dtype=torch.int64)
                self._peers.send(record, _LEADER, _REPORT_TAG + learner, "control")
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error

    def wait_for_all(self) -> list[LearnerProgress]:
        """Return how far each learner came, once every rank has reported its own. Raises
        PeerLostError."""
        try:
            for wait in self._waits:
                self._peers.join_wait(wait)
            if self._peers.rank == _LEADER:
                self._end_round()
                found = [self._progress[learner] for learner in range(self._count)]
                rows = [[p.steps, p.tokens, p.rest] for p in found]
                self._rows = torch.tensor(rows, dtype=torch.int64)
                for peer in self._peers.others:
                    self._peers.send(self._rows, peer, _ROWS_TAG, "control")
        except RuntimeError as error:
            raise lost_while_exchanged(error) from error
        finally:
            if self._timer is not None:
                self._timer.cancel()
        return [LearnerProgress(*row) for row in self._rows.tolist()]

    # --- rank 0 ---------------------------------------------------------------------------
    def _take(self, learner: int, number: int, progress: LearnerProgress) -> None:
        """Note a report. number: of the learner in its rank's share, from 1."""
        with self._lock:
            self._progress[learner] = progress
            if progress.steps == self._every:
                self._paces.append((self._clock() - self._begun) / number)
            is_quorum = len(self._paces) >= self._quorum and self._timer is None
            if is_quorum and len(self._progress) < self._count:
                largest = max(map(len, self._learners))
                ends = self._begun + max(self._paces) * largest + self._grace_s
                self._timer = threading.Timer(max(0.0, ends - self._clock()), self._close_late)
                self._timer.daemon = True
                self._timer.start()
        if len(self._progress) == self._count:
            self._end_round()

    def _close_late(self) -> None:
        with suppress(RuntimeError, PeerLostError):  # the group was given up: every wait says so
            self._end_round()

    def _end_round(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        for peer in self._peers.others:
            self._peers.send(self._close, peer, _CLOSE_TAG, "control")
