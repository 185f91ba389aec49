"""The loop that drives a StepEngine from one step boundary to the next.

It decides nothing of its own: what a step is stands in the engine, when to save in
`policy/saving/destinations.py`, who takes part in a Membership. Wishes (stop, save) and room for a
snapshot ride in the vote of the step, so all ranks act on them after the same step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Literal

from holdfast.config.run import RunConfig
from holdfast.config.sections.train import ProfileConfig
from holdfast.core.sharding.run_table import run_state_table
from holdfast.errors import HoldfastError, NonFiniteError
from holdfast.events import (
    BatchFed,
    Blamed,
    CheckpointSkipped,
    NonFinite,
    OuterRound,
    SaveInterval,
    StateDiffers,
    StepDone,
    StepTraced,
)
from holdfast.parallel.comm.trace import REDUCE
from holdfast.parallel.outer.site_links import measure_site_links, pace_site_links
from holdfast.policy.detection.bad_steps import StepRetry
from holdfast.policy.detection.loss_spikes import LossJump, find_loss_jump
from holdfast.policy.saving.destinations import SaveDestinations, why_save_now
from holdfast.policy.saving.tier_durations import TierDurations
from holdfast.policy.saving.tiers import BUCKET, DISK, MEMORY, PEERS
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.evaluate import Evaluator
from holdfast.training.engine.fallbacks import Fallbacks
from holdfast.training.engine.protocols import EventReporter, Membership, Saver, StepFeed, StepShare
from holdfast.training.engine.replica_check import ReplicaChecker, outlier_ranks
from holdfast.training.engine.save_cadence import FailureStats, SaveCadence
from holdfast.training.engine.step_profiler import StepProfiler
from holdfast.training.engine.step_status import PhaseTimer
from holdfast.training.engine.vote import StepAccount, StepVerdict, Wishes
from holdfast.training.engine.weights_digest import WeightsDigester, digest_of_weights
from holdfast.training.memory.meters import ExpertMeter, MemoryMeter

_FINAL_SLOT_TIMEOUT_S = 60.0  # seconds for a free slot, where the run was asked to stop
_LEAVING_SLOT_TIMEOUT_S = 10.0  # and where a node is about to leave, which has twenty


@dataclass(frozen=True)
class TrainingOutcome:
    """How the loop ended after `step`. `unsaved_reason`: why that state is not durable, or None.

    paused: nothing is saved for it; every rank holds the state, and another generation begins.
    """

    kind: Literal["finished", "left", "paused"]
    step: int
    unsaved_reason: str | None = None


@dataclass(eq=False)
class _SaveScheduler:
    """When one rank copies its state, where the copy goes, and which saves are owed.

    durations: asked for the seconds of each tier's saves and restores. ends_with_snapshot: the
    run was left with a snapshot that is not to be durable. is_last_step_uncaptured: the last step
    was to be saved, and there was no room or no mover.
    """

    cadence: SaveCadence
    saver: Saver
    reporter: EventReporter
    config: RunConfig
    rank: int
    saved_step: int
    timer: PhaseTimer
    tier_durations: Callable[[], TierDurations]
    is_in_danger: Callable[[], bool]
    ends_with_snapshot: bool = False
    is_last_step_uncaptured: bool = False
    is_save_owed: bool = False  # a durable save found no slot: made as soon as there is one
    is_copy_owed: bool = False  # the same of a snapshot that peers were to get
    captured_steps: deque[int] = field(default_factory=lambda: deque(maxlen=3))  # the newest

    def add_due(self, step: int, wishes: Wishes) -> Wishes:
        """Add rank 0's wishes: it alone judges seconds, and its answer travels with the vote."""
        now, every = self.timer.clock(), self.config.train.evaluate.every
        # Length of the stall: from the capture's begin in the step before to this step's fence.
        phases = self.timer.previous_phases, self.timer.phases
        stood = sum(found.get("capture", 0.0) for found in phases)
        usual = not (every and (step - 1) % every == 0)
        for decided in self.cadence.tick(now, stood, usual, self.tier_durations()):
            seconds = 0.0 if decided.seconds == inf else decided.seconds
            self.reporter.emit(SaveInterval(decided.tier, seconds, decided.reason, step=step))
        by_steps = self._tiers_due_by_steps(step)
        due_tiers = self.cadence.due_tiers(now, by_steps) - by_steps
        return replace(
            wishes,
            save=wishes.save or DISK in due_tiers,
            snapshot=wishes.snapshot or bool({MEMORY, PEERS} & due_tiers),
            copy=wishes.copy or PEERS in due_tiers,
            upload=wishes.upload or BUCKET in due_tiers,
        )

    def _tiers_due_by_steps(self, step: int) -> frozenset[int]:
        """The tiers that are saved into at this step by a rule that every rank knows."""
        rules = self.config.checkpoint
        every = rules.memory_every_steps
        durable = self.is_save_owed or bool(rules.by_steps and step % rules.by_steps == 0)
        remembered = (
            durable or self.is_copy_owed or bool(every and every != "auto" and step % every == 0)
        )
        return frozenset([DISK] * durable + [MEMORY] * remembered)

    def capture(self, step: int, wishes: Wishes, engine: StepEngine) -> SaveDestinations | None:
        """Begin to copy the state if the policy or a rank's wish says so, unless some rank has no
        room: the same on all ranks. Returns the destinations; None: nothing was captured."""
        rules, by_steps = self.config.checkpoint, self._tiers_due_by_steps(step)
        reason = why_save_now(
            step,
            self.config.train.steps,
            every_steps=rules.by_steps,
            is_stopping=wishes.stop,
            last_saved=self.saved_step,
        )
        self.ends_with_snapshot = wishes.is_snapshot_enough and reason == "stop"
        durable = not self.ends_with_snapshot and (
            reason is not None or wishes.save or DISK in by_steps
        )
        remembered = wishes.snapshot or wishes.is_node_leaving or MEMORY in by_steps
        if not (durable or self.ends_with_snapshot or remembered):
            return None
        last = reason in ("end", "stop")
        waits = _LEAVING_SLOT_TIMEOUT_S if wishes.is_node_leaving else 0.0
        waits = (inf if reason == "end" else _FINAL_SLOT_TIMEOUT_S) if last else waits
        self.reporter.progress(step, "capture")
        captured = (bool(waits) or not wishes.has_no_slot) and self.saver.capture(
            step, engine.state(), waits, durable
        )
        # The destinations of a capture. The state left behind at the end goes to all.
        decided = PEERS in self.cadence.tiers.automatic
        wanted = wishes.copy or self.is_copy_owed or self.is_in_danger()
        copied = True if wanted or (last and (decided or wishes.is_snapshot_enough)) else None
        if decided and copied is None:
            copied = False
        every = self.config.checkpoint.bucket_every_seconds == 0
        into = SaveDestinations(durable, copied, every or wishes.upload or last)
        if captured:
            self.is_copy_owed = False
            self.captured_steps.append(step)
            if into.is_durable:
                self.saved_step, self.is_save_owed = step, False
            reached = {
                MEMORY: True,
                PEERS: into.to_peers is not False,
                DISK: into.is_durable,
                BUCKET: into.is_durable and into.to_bucket,
            }
            present = self.cadence.tiers.present
            self.cadence.record_save(self.timer.clock(), [t for t in present if reached[t]])
        else:
            self.is_last_step_uncaptured = last
            self.is_copy_owed = self.is_copy_owed or (wishes.copy and wishes.has_no_slot)
            if durable:
                self._record_owed_save(step, reason, wishes.has_no_slot and not last)
        self.timer.lap("capture")
        return into if captured else None

    def _record_owed_save(self, step: int, reason: str | None, full: bool) -> None:
        """A durable save found no slot. What is owed is said once: it is tried at every step."""
        said = self.is_save_owed and (
            reason is None or bool(self.config.checkpoint.memory_every_steps)
        )
        if self.rank == 0 and full and not said:
            self.reporter.emit(CheckpointSkipped(0, self._no_room_reason(), step=step))
        self.is_save_owed = full

    def _no_room_reason(self) -> str:
        """Return why a rank has no memory for a snapshot, and what helps."""
        slots = self.config.checkpoint.most_slots  # one keeps the newest complete snapshot
        steps = " and ".join(map(str, list(self.captured_steps)[1 - slots :]))
        if not steps:
            return "a rank has no memory for a snapshot yet; the next step that finds some is saved"
        return (
            f"the save of step {steps} has not ended: the disk is busy, or another node does not "
            "answer. The next step that finds room is saved; a faster disk or a larger "
            "checkpoint.every_steps helps, and holdfast doctor RUN names a silent node"
        )


class TrainingLoop:
    """One rank's loop; its only memory beyond the engine is in `saves`.

    stats: number of failures of the run so far, needed if a cadence is to be decided.
    tier_durations: asked at each step on rank 0 for the seconds of each tier's saves and restores.
    is_in_danger: asked at each snapshot whether this rank's part goes to peers in any case. retry:
    of a bad step.
    """

    def __init__(
        self,
        engine: StepEngine,
        membership: Membership,
        reporter: EventReporter,
        saver: Saver,
        evaluator: Evaluator,
        config: RunConfig,
        *,
        start_step: int,
        settle_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        stats: FailureStats | None = None,
        tier_durations: Callable[[], TierDurations] = TierDurations,
        is_in_danger: Callable[[], bool] = lambda: False,
        retry: StepRetry | None = None,
        profiler: StepProfiler | None = None,
    ):
        self.engine, self.membership, self.reporter = engine, membership, reporter
        self.saver, self.evaluator, self.config = saver, evaluator, config
        self.rank, self.start_step, self.settle_seconds = (
            engine.groups.rank,
            start_step,
            settle_seconds,
        )
        engine.on_vote_sent = lambda: reporter.progress(engine.step, "vote")
        if engine.learners is not None:
            engine.learners.on_progress = lambda: reporter.progress(engine.step, "compute")
        self.clock = clock
        self.replica_checker: ReplicaChecker | None = None
        self.digester: WeightsDigester | None = None
        if config.train.digest_every:
            self.digester = WeightsDigester(config, engine.groups.topology)
        self.timer = PhaseTimer(clock)
        places = engine.parameters.memory
        transfers = None if places is None or places.config.is_default else places.transfers
        self.memory = MemoryMeter(engine.device, clock, transfers)
        at, last_step = engine.groups.coordinate, config.train.steps
        self.experts = ExpertMeter(engine.objective, at, last_step, clock)
        self.recorder, self.traffic = engine.groups.recorder, engine.groups.traffic
        self.is_pausing = False  # the newest step was the last of this generation
        nodes = len(set(engine.groups.topology.nodes))
        cadence = SaveCadence(config.checkpoint, stats or FailureStats(), nodes, clock())
        self.saves = _SaveScheduler(
            cadence,
            saver,
            reporter,
            config,
            self.rank,
            start_step,
            self.timer,
            tier_durations,
            is_in_danger,
        )
        self.retry = retry
        self.profiler = profiler or StepProfiler(
            self.rank, engine.device, ProfileConfig(), Path(), reporter.emit
        )
        self.fallbacks = Fallbacks(config, engine.groups.topology, reporter.emit, engine.objective)
        judges = self.rank == 0 and config.cluster.loss_jumps == "roll_back"
        # An engine outlives generations, and this rank may have been 0 in the one before.
        engine.judge_loss = self._judge_loss if judges else lambda step, account: None

    def run(self, loader: StepFeed) -> TrainingOutcome:
        """Train from the state after `start_step` to the last step, or until a wish to stop or
        pause.

        loader: this rank's shares, beginning with step `start_step` + 1. Raises PeerLostError when
        a rank is lost. Raises on every rank alike JumpError and NonFiniteError, which rank 0
        journals. In all cases the step was not applied.
        """
        last_step = self.config.train.steps
        if self.start_step >= last_step:
            return TrainingOutcome("finished", self.start_step)
        self.resume_validation(self.start_step)
        try:
            outcome = self._run_steps(loader)
            if outcome.kind != "paused":
                self.profiler.wait_until_written()
            return outcome
        finally:
            self.profiler.close()

    def _run_steps(self, loader: StepFeed) -> TrainingOutcome:
        last_step = self.config.train.steps
        if self.config.outer.is_on:
            groups, cluster = self.engine.groups, self.config.cluster
            nodes = [groups.topology.nodes[rank] for rank in groups.positions]
            pace_site_links(groups.control, nodes, cluster)
            for link in measure_site_links(groups.control, nodes, cluster):
                self.reporter.emit(replace(link, step=self.start_step))
        for batch in self.engine.order_shares(loader):
            stopping = self.step(batch)
            if batch.step >= last_step or stopping:
                # A save that never began has no end to wait for. Reports are stored anyway.
                saves = self.saves
                waits = not (saves.ends_with_snapshot or saves.is_last_step_uncaptured)
                finished = batch.step >= last_step
                # Nothing continues after the last step, so its save may take as long as it takes.
                limit = inf if finished and waits else self.settle_seconds
                unsaved = self.saver.wait_until_committed(batch.step, limit, durable=waits)
                if saves.is_last_step_uncaptured and unsaved is None:
                    unsaved = "no snapshot could be made of it"
                return TrainingOutcome("finished" if finished else "left", batch.step, unsaved)
            if self.is_pausing:
                return TrainingOutcome("paused", batch.step)
        raise RuntimeError(f"batches ended before step {last_step}")

    def step(self, batch: StepShare) -> bool:
        """One step from the arrival of its batch to its boundary; whether to leave after it."""
        step, watch, profiler = batch.step, self.timer, self.profiler
        watch.lap("data")
        profiler.begin(step, "compute")
        if self.recorder is not None:
            # What a validation left is not of this step.
            self.recorder.begin(is_traced=self.config.layout.is_traced(step))
        if self.traffic is not None:
            self.traffic.reset()
        self.reporter.progress(step, "compute")
        self.engine.begin(step)
        if self.rank == 0:
            self.fallbacks.look(step, self.engine.dealt_shares)
        self.engine.compute(batch.microbatches)
        watch.lap("compute")
        profiler.phase("reduce")
        self.reporter.progress(step, "reduce")
        verdict = self._reduce(step)
        watch.lap("reduce")
        profiler.phase("apply")
        rate = self.engine.apply(verdict)
        _, verdict = self.engine.history.applied_verdicts[-1]
        watch.lap("apply")
        profiler.phase("save and report")
        self._check_replicas(step)
        if self.digester is not None:
            digest = self.digester.event(self.rank, step, self.engine.state())
            if digest is not None:
                self.reporter.emit(digest)
                watch.lap("digest")
        if self.config.outer.is_on:
            self.reporter.emit(self._outer_round(batch))
            for event in () if self.engine.learners is None else self.engine.learners.events():
                self.reporter.emit(event)
            watch.lap("digest")
        if self.config.server.is_on and self.engine.learners is not None and self.rank == 0:
            for event in self.engine.learners.events():
                self.reporter.emit(event)
        # Report the spans of the steps that the run file asks for.
        if self.recorder is not None and self.config.layout.is_traced(step):
            found = [[s.track, s.name, s.start, s.stop] for s in self.recorder.spans]
            self.reporter.emit(StepTraced(self.rank, found, step=step))
        into = self.saves.capture(step, verdict.requests, self.engine)
        self._report(batch, verdict, rate)
        self.engine.history.unreported_step = 0
        self._evaluate(step)
        if into is not None:
            meta = {"loss": verdict.mean_loss, "tokens": verdict.tokens}
            self.saver.announce(step, meta, into)
        profiler.end(step)
        watch.start()
        self.is_pausing = verdict.requests.pause
        self.reporter.progress(step, "data")
        return verdict.requests.stop

    def _outer_round(self, batch: StepShare) -> OuterRound:
        """What this rank tells of a round."""
        sha256 = digest_of_weights(self.config, self.engine.state())
        learners = list(self.engine.plan.share(batch.step))
        sent = 0 if self.traffic is None else self.traffic.bytes_by_kind.get(REDUCE, 0)
        times = {} if self.engine.learners is None else self.engine.learners.times.phases
        inner, codec, wait = (times.get(phase, 0.0) for phase in ("inner", "codec", "wait"))
        said = learners, sent, inner, codec, wait, self.engine.history.fates_of(batch.step)
        return OuterRound(self.rank, sha256, *said, step=batch.step)

    def _check_replicas(self, step: int) -> None:
        """Compare replicas, which must be bit-equal, before a capture: the state of a rank that
        differs is of no use. Raises HoldfastError there."""
        every = self.config.cluster.check_every_steps
        if not every or step % every:
            return
        groups = self.engine.groups
        if self.replica_checker is None:
            table = run_state_table(self.config)
            self.replica_checker = ReplicaChecker(groups.topology, table)
        found = self.replica_checker.check(groups, self.engine.state())
        if not found:
            return
        odd = outlier_ranks(found)
        tensors = list(dict.fromkeys(name for each in found for name in each.tensors))
        others = set(range(groups.topology.world_size)) - set(odd)
        if self.rank == min(others, default=0):
            self.reporter.emit(StateDiffers(list(odd), tensors, bool(others), step=step))
        if self.rank in odd:
            self.engine.status.is_torn = True
            raise HoldfastError(f"the state after step {step} is not that of the other ranks")

    def _reduce(self, step: int) -> StepVerdict:
        """Vote after the fence: a rank that has voted holds the snapshot before it completely."""
        if self.saver.fence():
            self.timer.lap("capture")
        wishes = replace(self.membership.requests(step), has_no_slot=not self.saver.has_free_slot())
        if self.rank == 0:
            wishes = self.saves.add_due(step, wishes)
        try:
            return self.engine.reduce(wishes)
        except NonFiniteError as error:
            if self.rank == 0:
                node, suspects = self.engine.groups.topology.nodes[error.rank], list(error.suspects)
                place = error.rank, error.parameter, node
                self.reporter.emit(NonFinite(*place, suspects, error.again, step=step))
            raise

    def _judge_loss(self, step: int, account: StepAccount) -> LossJump | None:
        """Compare the loss with those of the steps that this process has applied last."""
        retry = self.retry
        if retry is not None and retry.accept and retry.step == step:
            return None
        before = [verdict.mean_loss for _, verdict in self.engine.history.applied_verdicts]
        return find_loss_jump(before, account.losses, account.tokens)

    def _report(self, batch: StepShare, verdict: StepVerdict, rate: float) -> None:
        if self.engine.groups.feeds_ledger:
            self.reporter.emit(BatchFed(self.rank, batch.entries, step=batch.step))
        pauses = verdict.requests.pause
        is_last = pauses or verdict.requests.stop or batch.step >= self.config.train.steps
        for sample in (
            self.memory.sample_if_due(self.rank, batch.step, is_last=is_last),
            self.experts.sample_if_due(self.rank, batch.step, is_pausing=pauses),
        ):
            if sample is not None:
                self.reporter.emit(sample)
        if self.rank != 0:
            return
        phases = self.timer.phases
        self.reporter.emit(
            StepDone(
                loss=verdict.mean_loss,
                tokens=verdict.tokens,
                grad_norm=self.engine.mean_norm(verdict),
                learning_rate=rate,
                seconds=sum(phases.values()),
                samples=self.engine.plan.samples(batch.step),
                phases=phases,
                skipped_at=verdict.skipped_at,
                exchanges={} if self.traffic is None else self.traffic.seconds_by_kind,
                metrics=self.engine.metrics(verdict),
                counts=self.engine.counts,
                step=batch.step,
            )
        )
        if self.retry is not None and self.retry.step == batch.step and self.retry.if_passed:
            found = self.retry.if_passed
            causes = list(found.microbatches), list(found.devices)
            self.reporter.emit(Blamed(found.blame, *causes, found.why, step=batch.step))

    def resume_validation(self, start_step: int) -> None:
        """Compute the validation after the step that survivors resume from, unless one has it.
        A checkpoint is announced after its step's validation, so a start from one owes none."""
        if self.engine.history.validated_step is None:
            self.engine.history.validated_step = start_step
        if start_step > self.engine.history.validated_step:
            self._evaluate(start_step)
            self.timer.start()

    def _evaluate(self, step: int) -> None:
        every, last = self.config.train.evaluate.every, step >= self.config.train.steps
        if not last and not (every and step % every == 0):
            return
        begun = self.clock()
        found = self.evaluator.run(lambda: self.reporter.progress(step, "evaluate"))
        self.engine.history.validated_step = step
        if found is None:
            return
        seconds = self.clock() - begun
        event = found.event(step, seconds)
        self.engine.history.last_validation = event
        if self.rank == 0:
            self.reporter.emit(event)
