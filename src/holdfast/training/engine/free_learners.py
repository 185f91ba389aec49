"""Learners of `outer.mode: free`: a round closes without those that are late.

The close is that of `parallel/outer/round_close.py`, and the fates are those of
`core/data/learner_fates.py`. A learner that is not used keeps the state of its optimizer. So the
weights after a round are a function of the data and of the inner steps that each learner did. One
process with the record of these steps (`recorded`) computes the round again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.core.data.learner_fates import LearnerProgress, decide_fates
from holdfast.core.weights import to_units
from holdfast.errors import CorruptError
from holdfast.parallel.outer.payloads import PayloadRound
from holdfast.parallel.outer.round_close import RoundClose
from holdfast.training.engine.executors import Share
from holdfast.training.engine.learners import GradientsOfAll, LearnerExecutor, rows_of
from holdfast.training.engine.objective import IGNORED_TARGET
from holdfast.training.engine.stage_work import GradientListener


class _Close(Protocol):
    """What a round asks of its close; see `RoundClose`."""

    def stops(self, learner: int, steps: int) -> bool: ...
    def steps_of(self, learner: int, steps: int) -> int: ...
    def report(self, learner: int, progress: LearnerProgress) -> None: ...
    def wait_for_all(self) -> list[LearnerProgress]: ...


class RecordedClose:
    """The close of a round that was computed before. steps: by learner. limits: those that count,
    which are computed again."""

    def __init__(self, steps: Sequence[int], limits: Sequence[int]) -> None:
        self._steps, self._limits = steps, limits
        self._progress: dict[int, LearnerProgress] = {}

    def stops(self, learner: int, steps: int) -> bool:
        return steps >= self._limits[learner]

    def steps_of(self, learner: int, steps: int) -> int:
        return self._steps[learner]

    def report(self, learner: int, progress: LearnerProgress) -> None:
        self._progress[learner] = progress

    def wait_for_all(self) -> list[LearnerProgress]:
        return [self._progress[learner] for learner in sorted(self._progress)]


class FreeLearnerExecutor(LearnerExecutor):
    """Runs rounds that close before all learners are done.

    recorded: the inner steps of each learner, by round, if rounds are computed again.
    """

    recorded: Mapping[int, Sequence[int]] | None = None
    _exchange: PayloadRound | None = None
    _close: _Close | None = None

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        """Run the learners until each is done or the round closes. The loss of a learner that is
        not used is 0."""
        if not isinstance(listener, GradientsOfAll):  # a search for what is not finite
            super().train(share, listener, losses)
            return
        codec, count = self._codec, sum(t.numel() for t in self._working)
        assert codec is not None, "its learners send payloads"
        size = codec.payload_bytes(count)
        exchange = PayloadRound(self._groups.control, self._shares, size, self._exchange)
        self._exchange, close = exchange, self._open_close()
        self._close = close
        try:
            self.times.start()
            for learner, batch in share:
                loss, done = self._run_round(learner, batch, listener)
                self.times.lap("inner")
                progress = self._progress(batch, close.steps_of(learner, done))
                if self._counts(progress.steps):
                    changes = self._changes(progress.tokens)
                    exchange.send(learner, self._encode(learner, changes, codec))
                    self.times.lap("codec")
                else:
                    loss = torch.zeros_like(loss)
                losses.append(loss)
                close.report(learner, progress)
                listener.check()
        finally:
            self._close = None
            self._parameters.refresh()
        uses_late = self._outer.free.uses_late
        self.fates = decide_fates(
            self.step(), self._every, close.wait_for_all(), uses_late=uses_late
        )
        used = [row.learner for row in self.fates if row.is_used]
        payloads, device = exchange.wait_for_all(used), self._working[0].device
        self.times.lap("wait")
        nothing = torch.zeros(count, device=device)
        for row in self.fates:
            flat = nothing
            if row.is_used:
                flat = codec.decode(payloads[row.learner].to(device), count)
                self.times.lap("codec")
            elif row.learner in self._own:
                self._keep_state(self._own.index(row.learner))
            self._give(row.learner, self._split(flat), listener)
            self.times.lap("give")

    def _open_close(self) -> _Close:
        free, recorded = self._outer.free, self.recorded
        if recorded is not None:
            if len(recorded.get(self.step(), ())) != self._learners:
                raise CorruptError(
                    f"the journal has no ledger of all learners of round {self.step()}"
                )
            steps = [max(0, min(done, self._every)) for done in recorded[self.step()]]
            return RecordedClose(steps, [done if self._counts(done) else 0 for done in steps])
        return RoundClose(
            self._groups.control,
            self._shares,
            quorum=self._outer.quorum,
            grace_s=free.grace_seconds,
            every=self._every,
        )

    def _counts(self, steps: int) -> bool:
        """Return True if a learner is used that did so many inner steps."""
        return steps == self._every or (steps > 0 and self._outer.free.uses_late)

    def _stops(self, learner: int, steps: int) -> bool:
        return self._close is not None and self._close.stops(learner, steps)

    def _progress(self, batch: Any, steps: int) -> LearnerProgress:
        """What a learner read of its slice in so many inner steps."""
        size = len(batch.inputs) // self._every
        read = (rows_of(batch, 0, steps * size).targets != IGNORED_TARGET).sum()
        return LearnerProgress(steps, int(read), int(batch.tokens) - int(read))

    def used_units(self, batches: Sequence[Any]) -> int:
        """See `LearnerStates`."""
        own = (row for row in self.fates if row.learner in self._own and row.is_used)
        return sum(to_units(row.tokens) for row in own)

    def divisor(self, tokens: float) -> float:
        """See `LearnerStates`."""
        return sum(row.weight for row in self.fates) or 1.0
