"""Learners of `outer.mode: free`: a round closes without those that are late.

The close is that of `parallel/outer/round_close.py`, and the fates are those of
`core/data/learner_fates.py`. A learner that is not used keeps the state of its optimizer. So the
weights after a round are a function of the data and of the inner steps that each learner did. One
process with the record of these steps (`recorded`) computes the round again.

With `late: discount`, the change of an interrupted learner is a part of the learner's state, with
its weight. It travels when the next round begins, as a second payload of the learner, and counts in
that round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.data.learner_fates import LATE, LearnerProgress, decide_fates
from holdfast.core.sharding.state_table import ERROR_PREFIX, LATE_PREFIX, LATE_ROW
from holdfast.core.weights import to_units
from holdfast.errors import CorruptError
from holdfast.parallel.axes.process_groups import ProcessGroups
from holdfast.parallel.outer.codecs import Codec
from holdfast.parallel.outer.payloads import PayloadRound
from holdfast.parallel.outer.round_close import RoundClose
from holdfast.training.engine.executors import Share
from holdfast.training.engine.learners import GradientsOfAll, LearnerExecutor, flat_of, rows_of
from holdfast.training.engine.objective import IGNORED_TARGET
from holdfast.training.engine.stage_work import GradientListener
from holdfast.training.engine.state import LocalTensor


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

    def __init__(self, config: RunConfig, groups: ProcessGroups, *parts: Any) -> None:
        super().__init__(config, groups, *parts)
        count, device = self._learners, self._working[0].device
        self._late = torch.zeros(count, dtype=torch.float64, device=device)  # weights, by learner
        self._next_late, self._divisor = self._late.clone(), 1.0
        self._payload_shares = self._shares
        if config.outer.keeps_late:  # the late payload of learner k is number learners + k
            self._payload_shares = tuple((*s, *(count + k for k in s)) for s in self._shares)

    def train(self, share: Share, listener: GradientListener, losses: list[Tensor]) -> None:
        """Run the learners until each is done or the round closes. The loss of a learner that is
        not used is 0."""
        if not isinstance(listener, GradientsOfAll):  # a search for what is not finite
            super().train(share, listener, losses)
            return
        codec, count = self._codec, sum(t.numel() for t in self._working)
        assert codec is not None, "its learners send payloads"
        size = codec.payload_bytes(count)
        exchange = PayloadRound(self._groups.control, self._payload_shares, size, self._exchange)
        self._exchange, close = exchange, self._open_close()
        self._close = close
        late = {k for k, weight in enumerate(self._late.tolist()) if weight}
        try:
            self.times.start()
            self._send_late(late, exchange, codec)
            for learner, batch in share:
                loss, done = self._run_round(learner, batch, listener)
                self.times.lap("inner")
                progress = self._progress(batch, close.steps_of(learner, done))
                is_used = progress.steps == self._every or self._outer.free.late == "use"
                if is_used and progress.steps:
                    changes = self._changes(progress.tokens)
                    exchange.send(learner, self._encode(learner, changes, codec))
                    self.times.lap("codec")
                else:
                    self._keep_late(learner, progress)
                    # What is not finite fails the round if it counts in the next one.
                    loss = loss * 0 if self._outer.keeps_late else torch.zeros_like(loss)
                losses.append(loss)
                close.report(learner, progress)
                listener.check()
        finally:
            self._close = None
            self._parameters.refresh()
        how = self._outer.free.late, self._outer.free.discount
        self.fates = decide_fates(self.step(), self._every, close.wait_for_all(), *how)
        used = [row.learner for row in self.fates if row.is_used]
        used += [self._learners + learner for learner in late]
        payloads, device = exchange.wait_for_all(used), self._working[0].device
        self.times.lap("wait")
        nothing = torch.zeros(count, device=device)
        for row in self.fates:
            flat = nothing
            if row.is_used:
                flat = codec.decode(payloads[row.learner].to(device), count)
                self.times.lap("codec")
            elif row.learner in self._own and row.fate != LATE:
                self._keep_state(self._own.index(row.learner))
            if row.learner in late:
                payload = payloads[self._learners + row.learner]
                flat = flat + codec.decode(payload.to(device), count)
            self._give(row.learner, self._split(flat), listener)
            self.times.lap("give")
        self._settle_late()

    def _send_late(self, late: set[int], exchange: PayloadRound, codec: Codec) -> None:
        """Send what learners of this rank did too late for the last round."""
        changes = self._kept(LATE_PREFIX, self._states) or []
        for row, learner in enumerate(self._own):
            if learner in late:
                flat = flat_of([change[row] for change in changes])
                exchange.send(self._learners + learner, codec.encode(flat).cpu())
                self.times.lap("codec")

    @torch.no_grad()
    def _keep_late(self, learner: int, progress: LearnerProgress) -> None:
        """Keep the change of an interrupted learner for the next round."""
        kept, row = self._kept(LATE_PREFIX, self._next_states), self._own.index(learner)
        if kept is not None and progress.steps:
            changes = self._changes(self._outer.free.discount * progress.tokens)
            torch._foreach_copy_([tensor[row] for tensor in kept], changes)
            self._keep_state(row, ERROR_PREFIX)

    @torch.no_grad()
    def _settle_late(self) -> None:
        """Decide what the sum of the round is divided by, and what is late for the next one."""
        weights = [row.weight if row.fate == LATE else 0.0 for row in self.fates]
        for tensor in self._kept(LATE_PREFIX, self._next_states) or []:
            for row, learner in enumerate(self._own):
                if not weights[learner]:
                    tensor[row].zero_()
        used = sum(row.weight for row in self.fates if row.is_used)
        self._divisor = used + sum(self._late.tolist()) or 1.0
        self._next_late.copy_(torch.tensor(weights, dtype=torch.float64))

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
        """Return True if so many inner steps of a learner are used, now or in the next round."""
        return steps == self._every or (steps > 0 and self._outer.free.late != "drop")

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
        return self._divisor

    def commit(self) -> None:
        """See `LearnerStates`."""
        super().commit()
        self._late.copy_(self._next_late)

    def reset(self) -> None:
        """See `LearnerStates`."""
        super().reset()
        self._late.zero_()

    def state(self) -> list[LocalTensor]:
        """See `LearnerStates`."""
        late = LocalTensor(LATE_ROW, self._late, (0,), tuple(self._late.shape))
        return [*super().state(), *([late] if self._outer.keeps_late else [])]
