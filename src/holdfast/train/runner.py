"""The loop that drives a StepEngine from one step boundary to the next.

It decides nothing of its own: what a step is stands in the engine, when to save in
`policy/save.py`, who takes part in a Membership. Wishes (stop, save) and room for a snapshot ride
in the vote of the step, so all ranks act on them after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from holdfast.config.run import RunConfig
from holdfast.errors import NonFiniteError
from holdfast.events import (
    BatchFed,
    CheckpointSkipped,
    Evaluated,
    NonFinite,
    SaveInterval,
    StepDone,
    StepTraced,
)
from holdfast.policy.hazard import Hazard
from holdfast.policy.save import due
from holdfast.train.cadence import Cadence
from holdfast.train.engine import StepEngine
from holdfast.train.evaluate import Evaluator
from holdfast.train.protocols import Feed, Membership, Reporter, Saver, StepBatch
from holdfast.train.vote import Verdict, Wishes

_LAST_WAIT = 60.0  # seconds for a free slot, where a capture must not be skipped
_FULL = "a rank has no free slot: every one is still being saved"


@dataclass(frozen=True)
class Outcome:
    """How the loop ended after `step`. `unsaved`: why that state is not durable, or None."""

    kind: Literal["finished", "left"]
    step: int
    unsaved: str | None = None


@dataclass
class _Watch:
    """Seconds of one step, by phase."""

    clock: Callable[[], float]
    phases: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)  # of the step before
    _since: float = 0.0

    def start(self) -> None:
        self.before, self.phases = self.phases, {}
        self._since = self.clock()

    def lap(self, phase: str) -> None:
        now = self.clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._since
        self._since = now


def run(
    engine: StepEngine, loader: Feed, membership: Membership, reporter: Reporter, saver: Saver,
    evaluator: Evaluator, config: RunConfig, *, rank: int, start_step: int,
    settle_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic,
    hazard: Hazard | None = None,
) -> Outcome:  # fmt: skip
    """Train from the state after `start_step` to the last step, or until somebody wishes to stop.

    loader: this rank's shares, beginning with step `start_step` + 1. hazard: how often the run has
    broken so far, where the interval between saves is adaptive.
    Raises PeerLostError when a rank is gone, and NonFiniteError on every rank alike, journalled
    by rank 0; in both cases the step was not applied.
    """
    loop = _Loop(
        engine, membership, reporter, saver, evaluator, config, rank, start_step, clock, hazard
    )
    if start_step >= config.train.steps:
        return Outcome("finished", start_step)
    for batch in loader:
        stopping = loop.step(batch)
        if batch.step >= config.train.steps or stopping:
            unsaved = saver.settle(batch.step, settle_seconds)
            finished = batch.step >= config.train.steps
            return Outcome("finished" if finished else "left", batch.step, unsaved)
    raise RuntimeError(f"batches ended before step {config.train.steps}")


class _Loop:
    """One rank's loop; its only memory beyond the engine is when it saved last."""

    def __init__(
        self, engine: StepEngine, membership: Membership, reporter: Reporter, saver: Saver,
        evaluator: Evaluator, config: RunConfig, rank: int, start_step: int,
        clock: Callable[[], float], hazard: Hazard | None,
    ):  # fmt: skip
        self.engine, self.membership, self.reporter = engine, membership, reporter
        self.saver, self.evaluator, self.config, self.rank = saver, evaluator, config, rank
        self.clock = clock
        self.watch = _Watch(clock)
        self.watch.start()
        self.recorder = engine.groups.recorder
        self.saved_step, self.saved_at = start_step, clock()
        self.owed = False  # a durable save found no slot: it is made as soon as there is one
        nodes = len(set(engine.groups.topology.nodes))
        self.cadence = Cadence(config.checkpoint, hazard, nodes, clock())

    def step(self, batch: StepBatch) -> bool:
        """One step from the arrival of its batch to its boundary; whether to leave after it."""
        step, watch = batch.step, self.watch
        watch.lap("data")
        if self.recorder is not None:
            self.recorder.spans = []  # what a validation left is not of this step
        self.reporter.progress(step, "compute")
        self.engine.begin(step)
        self.engine.compute(batch.microbatches)
        watch.lap("compute")
        self.reporter.progress(step, "reduce")
        verdict = self._reduce(step)
        watch.lap("reduce")
        rate = self.engine.apply(verdict)
        watch.lap("apply")
        self._trace(step)
        captured = self._capture(step, verdict)
        self._report(batch, verdict, rate)
        self._evaluate(step)
        if captured is not None:
            meta = {"loss": verdict.mean_loss, "tokens": verdict.tokens}
            self.saver.announce(step, meta, captured == "durable")
        watch.start()
        return verdict.wishes.stop

    def _trace(self, step: int) -> None:
        """Report the spans of the step that somebody wants to see."""
        if self.recorder is not None and step == self.config.layout.trace_step:
            found = [[s.track, s.name, s.start, s.stop] for s in self.recorder.spans]
            self.reporter.emit(StepTraced(self.rank, found, step=step))

    def _reduce(self, step: int) -> Verdict:
        """The vote comes after the fence: who has voted holds the snapshot before whole."""
        if self.saver.fence():
            self.watch.lap("capture")
        wishes = self.membership.wishes(step)
        timely = self.rank == 0 and self._due_by_time(step)
        wishes = Wishes(wishes.stop, wishes.save or timely, not self.saver.ready())
        try:
            return self.engine.reduce(wishes)
        except NonFiniteError as error:
            if self.rank == 0:
                self.reporter.emit(NonFinite(error.rank, error.parameter, step=step))
            raise

    def _due_by_time(self, step: int) -> bool:
        """Seconds are one rank's to judge; its answer travels with the vote."""
        now, every = self.clock(), self.config.train.evaluate.every
        # Stood still: from the capture's begin in the step before to the fence in this one.
        stood = self.watch.before.get("capture", 0.0) + self.watch.phases.get("capture", 0.0)
        decided = self.cadence.tick(
            now, stood if self.saved_step == step - 1 else None,
            usual=not (every and (step - 1) % every == 0),
        )  # fmt: skip
        if decided is not None:
            self.reporter.emit(
                SaveInterval(decided.tier, decided.seconds, decided.reason, step=step)
            )
        reason = due(
            step, self.config.train.steps, every_steps=0, every_seconds=self.cadence.seconds,
            seconds_since_save=now - self.saved_at, last_saved=self.saved_step,
        )  # fmt: skip
        return reason is not None

    def _capture(self, step: int, verdict: Verdict) -> Literal["durable", "memory"] | None:
        """Begin to copy the state if the policy or somebody's wish says so, and unless some rank
        has no room: the same on all ranks."""
        rules = self.config.checkpoint
        reason = due(
            step, self.config.train.steps, every_steps=rules.by_steps,
            stopping=verdict.wishes.stop, last_saved=self.saved_step,
        )  # fmt: skip
        remembered = rules.memory_every_steps and step % rules.memory_every_steps == 0
        durable = reason is not None or verdict.wishes.save or bool(remembered and self.owed)
        if not durable and not remembered:
            return None
        last = reason in ("end", "stop")
        self.reporter.progress(step, "capture")
        captured = (last or not verdict.wishes.full) and self.saver.capture(
            step, self.engine.state(), _LAST_WAIT if last else 0.0, durable
        )
        if durable and captured:
            self.saved_step, self.saved_at, self.owed = step, self.clock(), False
        elif durable:
            # What is owed is said once; by the clock, rank 0 wishes for it again at every step.
            full = verdict.wishes.full and not last
            said = self.owed and (reason is None or bool(rules.memory_every_steps))
            if self.rank == 0 and full and not said:
                self.reporter.emit(CheckpointSkipped(0, _FULL, step=step))
            self.owed = full
        self.watch.lap("capture")
        return None if not captured else "durable" if durable else "memory"

    def _report(self, batch: StepBatch, verdict: Verdict, rate: float) -> None:
        if self.engine.groups.feeds:
            self.reporter.emit(BatchFed(self.rank, batch.entries, step=batch.step))
        if self.rank != 0:
            return
        phases = self.watch.phases
        self.reporter.emit(
            StepDone(
                loss=verdict.mean_loss, tokens=verdict.tokens, grad_norm=verdict.mean_norm,
                learning_rate=rate, seconds=sum(phases.values()),
                samples=self.engine.samples(batch.step), phases=phases, step=batch.step,
            )
        )  # fmt: skip

    def _evaluate(self, step: int) -> None:
        every, last = self.config.train.evaluate.every, step >= self.config.train.steps
        if not last and not (every and step % every == 0):
            return
        begun = self.clock()
        found = self.evaluator.run(lambda: self.reporter.progress(step, "evaluate"))
        if found is not None and self.rank == 0:
            seconds = self.clock() - begun
            self.reporter.emit(
                Evaluated(found.loss, found.bits_per_byte, found.tokens, seconds, step=step)
            )
