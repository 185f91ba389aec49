"""How far one rank has come in its steps, and what it remembers of those before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.data.learner_fates import LearnerFate
from holdfast.events import Evaluated
from holdfast.policy.recovery.step_resolution import StepStage, advance
from holdfast.training.engine.vote import StepAccount, StepVerdict

REMEMBERED_STEPS = 32
"""Steps whose numbers every rank remembers, so that any rank can report them without rank 0."""


@dataclass
class StepHistory:
    """What a process knows of the steps before the open one, and can report of them.

    applied_verdicts: the last few steps that it has applied, each with its verdict.
    unreported_step: a step that was applied and that no rank has reported yet. validated_step: the
    newest step up to which this rank knows that every validation was computed; None until it
    trains. last_validation: the newest one that it has computed itself. learner_fates: a round that
    it has applied, and what became of its learners.
    """

    applied_verdicts: deque[tuple[int, StepVerdict]] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED_STEPS)
    )
    unreported_step: int = 0
    validated_step: int | None = None
    last_validation: Evaluated | None = None
    learner_fates: tuple[int, Sequence[LearnerFate]] = (0, ())

    def fates_of(self, step: int) -> list[dict[str, Any]]:
        """Return the ledger of a round, if this process has applied it last."""
        applied, fates = self.learner_fates
        return [row.to_json() for row in fates] if applied == step else []


@dataclass
class StepStatus:
    """Which state an engine has, and how far the step after it has come.

    applied_step: the newest step whose update was made by this engine; None before the first.
    is_torn: an update has begun and has not ended. step: the one that is open, or was last.
    verdict, account: of the newest step that has come so far; that of `verdict_step`.
    """

    applied_step: int | None = None
    is_torn: bool = False
    step: int = 0
    stage: StepStage = StepStage.COMPUTING
    verdict: StepVerdict | None = None
    verdict_step: int = 0
    account: StepAccount | None = None

    def begin(self, step: int) -> None:
        """Open a step."""
        self.stage = advance(self.stage, StepStage.COMPUTING)
        if self.verdict_step == step:  # that verdict is of an attempt that no rank applied
            self.verdict, self.verdict_step = None, 0
        self.step = step

    def record_account(self, account: StepAccount) -> None:
        """The complete gradient is here, and what all ranks say of their shares."""
        self.account = account
        self.stage = advance(self.stage, StepStage.REDUCED)

    def record_verdict(self, verdict: StepVerdict) -> None:
        """Every vote is known."""
        self.verdict, self.verdict_step = verdict, self.step
        if verdict.can_be_applied and self.stage is StepStage.REDUCED:
            self.stage = advance(self.stage, StepStage.VOTED)

    def finish_update(self) -> None:
        """The state is that of this step."""
        self.applied_step, self.is_torn = self.step, False
        self.stage = advance(self.stage, StepStage.APPLIED)

    def set_applied(self, step: int) -> None:
        """The state is that after `step`: it was brought from elsewhere."""
        self.applied_step, self.is_torn, self.stage = step, False, StepStage.APPLIED

    def reopen(self) -> None:
        """Nothing of an open step counts any more."""
        if self.stage is not StepStage.APPLIED:
            self.stage = advance(self.stage, StepStage.COMPUTING)

    @property
    def is_rejected(self) -> bool:
        """Return True if the open step was voted down, though its gradient is complete."""
        if self.verdict is None or self.verdict_step != self.step:
            return False
        return not self.verdict.can_be_applied

    @property
    def reduced_step(self) -> int | None:
        """The step after the applied one, if its complete reduced gradient is here."""
        return self.step if self.stage in (StepStage.REDUCED, StepStage.VOTED) else None


class PhaseTimer:
    """Seconds of each phase, of a step for example. clock: seconds; it does not jump."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self._since = clock, clock()
        self.phases: dict[str, float] = {}
        self.previous_phases: dict[str, float] = {}  # of the step before

    def start(self) -> None:
        """Begin another step."""
        self.previous_phases, self.phases = self.phases, {}
        self._since = self.clock()

    def lap(self, phase: str) -> None:
        """End a phase."""
        now = self.clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
        self._since = now
