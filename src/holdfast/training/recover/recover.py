"""The next generation, entered by the processes that are alive.

    control    all ranks of the new topology meet, newcomers too
    agree      they say what they hold, and find the step to resume from (`recovery_agreement.py`)
    apply      a rank that lags behind applies that step with the gradient that it holds
    groups     a replica that is as it was keeps everything inside it: model, mesh, FSDP's state,
               buffers. New are the groups between replicas. Any other rank rebuilds its engine
    next step  if nothing of it was summed anywhere, what was computed of it stays, and only the
               lost ranks' microbatches are dealt again (`core/sharding/step_resume.py`)
    move       ranks that have a part of the state send it to those that lack it
               (`parallel/axes/reshard.py`)

Nothing is taken from a session before the agreement, and nothing at all if the inside stays.
If a peer is lost meanwhile, the session can therefore be given to `recover` once more. Once its
groups are new, only its state counts: the computed and summed parts of the open step are void.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdfast.config.run import RunConfig
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.reshard_plan import ReshardPlan, plan_reshard
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.step_resume import deal_rest
from holdfast.events import BatchFed, Event, OuterRound, StepDone
from holdfast.layout import Topology
from holdfast.parallel.axes.process_groups import complete, join_control
from holdfast.parallel.axes.reshard import LocalShard, move
from holdfast.parallel.comm.transport import PeerGroup
from holdfast.parallel.torch_compat import Store
from holdfast.policy.recovery.step_resolution import StepResolution
from holdfast.training.engine.build import (
    TrainingSession,
    build_engine,
    connect_settings,
    make_session,
)
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.step_plan import Dealer
from holdfast.training.engine.step_status import REMEMBERED_STEPS, PhaseTimer
from holdfast.training.engine.task import EngineTask, TaskBatchSource
from holdfast.training.engine.vote import StepVerdict
from holdfast.training.engine.weights_digest import WeightsDigester, digest_of_weights
from holdfast.training.objectives.registry import sum_names
from holdfast.training.recover.recovery_agreement import (
    NO_STATE,
    Agreement,
    RankStatement,
    agree,
    statement_of,
)


@dataclass(frozen=True)
class RecoveryResult:
    """A process in its new generation.

    step: its state is that after this step. events: what the journal would otherwise miss of it.
    resolution: what was decided, by new rank; verdict: of `step`, if any rank still knew it.
    computed_leaves: microbatches of the next step that need not be computed again, by all replicas.
    kept_replica: the model and all that lies inside the replica were not touched.
    phases: seconds.
    """

    session: TrainingSession
    step: int
    events: list[Event]
    resolution: StepResolution
    verdict: StepVerdict | None
    kept_replica: bool
    computed_leaves: int
    phases: dict[str, float]


def _discard_engine(engine: StepEngine | None) -> None:
    """Close an engine that never got its state: its groups would be in the way of the next."""
    if engine is not None:
        engine.groups.abort()
        engine.close()


def _take_state(session: TrainingSession, *, nothing: bool) -> dict[str, LocalShard]:
    """The state out of a session that cannot stay; its callers' references do not keep memory."""
    engine = session.engine
    tensors: dict[str, LocalShard] = {} if nothing else {held.name: held for held in engine.state()}
    engine.groups.abort()  # no rank may wait for this process in a group that it leaves
    engine.close()
    del session.engine, session.evaluator, session.groups
    return tensors


@dataclass
class GenerationEntry:
    """One process's way into a generation, and how long its parts took. It may be used once.

    Close the loader and end every capture first. rank: of this process in `topology`. came_from:
    see `core.sharding.reshard_plan.plan_reshard`, in ranks of `old_topology`. seconds: bounds every
    wait. on_meeting: receives the group of all, once they have come together; aborting it ends all
    waits.
    """

    config: RunConfig
    topology: Topology
    rank: int
    store: Store
    device: torch.device
    old_topology: Topology
    came_from: Sequence[int | None]
    dealer: Dealer = deal
    seconds: float = 1800.0
    on_meeting: Callable[[PeerGroup], None] = lambda control: None
    reshard_plan: ReshardPlan | None = None
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    def __post_init__(self) -> None:
        self.settings = connect_settings(self.config, self.store, self.device, self.seconds)

    def recover(self, session: TrainingSession, step: int) -> RecoveryResult:
        """Continue with all that `session` still holds. Collective over `topology`.

        A session of another generation than `old_topology` counts as without state. step: of the
        state, where this session's engine has not applied any step itself.

        Raises PeerLostError when a peer is lost meanwhile. Raises LayoutError when part of the
        state is lost or the layout cannot be run. The session is as good as before then, with one
        exception: if the rebuild of the replica had begun, `session.engine` and the state are lost.
        """
        engine, old = session.engine, session.engine.groups
        self.settings = replace(self.settings, traffic=old.traffic, recorder=old.recorder)
        old.abort_between_replicas()  # a thread that still waits there would wait in vain
        self.timer.lap("abort")
        here = self.old_topology.generation == old.topology.generation
        control, found = self.meet_and_agree(statement_of(engine, step) if here else NO_STATE)
        nothing = self.rank in found.resolution.receivers
        entries = [] if nothing else entries_of_open_step(engine)
        history = engine.history
        kept = self.topology.coordinate(self.rank).replica in found.kept_replicas
        built: StepEngine | None = None
        try:
            if self.rank in found.resolution.appliers:
                # Apply the step that another rank has applied, or whose complete
                # gradient all ranks hold.
                if found.verdict is None:
                    raise RuntimeError(f"nobody knows the verdict of step {found.resolution.step}")
                if kept:
                    engine.apply(found.verdict)
                else:  # what computes on copies follows when all is built
                    engine.update(found.verdict)
                self.timer.lap("apply")
            if kept:
                tensors = self.regroup(session, found, control)
            else:
                tensors = _take_state(session, nothing=nothing)
                del engine, old
                engine = built = self.build(control, session.task)
                engine.history = history
                batches, task = session.batches, session.task
                session = make_session(self.config, engine, batches, self.device, task)
            self.timer.lap("groups" if kept else "build")
            self.fill(engine, tensors, found, control, kept)
        except BaseException:
            control.abort()  # no rank is to wait for this process
            _discard_engine(built)
            raise
        return self.to_result(session, entries, found, kept)

    def join(self, batches: TaskBatchSource, task: EngineTask | None = None) -> RecoveryResult:
        """As `recover`, for a process that holds nothing: it is sent its part of the state. task:
        what is trained; None: the decoder."""
        control, found = self.meet_and_agree(NO_STATE)
        engine: StepEngine | None = None
        try:
            engine = self.build(control, task)
            self.timer.lap("build")
            self.fill(engine, {}, found, control, False)
        except BaseException:
            control.abort()
            _discard_engine(engine)
            raise
        session = make_session(self.config, engine, batches, self.device, task)
        return self.to_result(session, [], found, False)

    def meet_and_agree(self, statement: RankStatement) -> tuple[PeerGroup, Agreement]:
        """Come together, agree, and plan who sends what to whom."""
        control = join_control(self.settings, self.topology, self.rank)
        self.timer.lap("control")
        self.on_meeting(control)
        train = self.config.step_train
        largest = max([train.batch_size, *(stage.batch_size for stage in train.batch_warmup)])
        most = largest // train.microbatch_size
        before, came_from = self.old_topology, self.came_from
        sums = 2 * len(sum_names(self.config.objective, self.config.rollout))
        found = agree(control, statement, self.topology, before, came_from, most, sums)
        self.timer.lap("agree")
        if len(found.kept_replicas) < len(self.topology.replicas):
            table = run_state_table(self.config)
            topology, came_from = self.topology, found.came_from
            self.reshard_plan = plan_reshard(before, topology, table, came_from, self.rank)
            self.timer.lap("plan")
        return control, found

    def regroup(
        self, session: TrainingSession, found: Agreement, control: PeerGroup
    ) -> dict[str, LocalShard]:
        """Put a session whose replica is as it was among the new replicas; returns its state."""
        engine, old = session.engine, session.engine.groups
        topology, rank = self.topology, self.rank
        if found.computed_leaves and found.computed_leaves[topology.coordinate(rank).replica]:
            engine.keep_computed()
        groups = complete(self.settings, topology, rank, control, old.replica_groups)
        engine.regroup(groups, self.dealer)
        old.close_between_replicas()
        session.groups = groups
        session.evaluator.regroup(groups)
        return {held.name: held for held in engine.state()}

    def build(self, control: PeerGroup, task: EngineTask | None) -> StepEngine:
        """Build a new engine and its groups, on top of `control`."""
        gc.collect()  # modules and their hooks refer to each other; the new ones need their room
        groups = complete(self.settings, self.topology, self.rank, control)
        try:
            return build_engine(self.config, groups, self.device, dealer=self.dealer, task=task)
        except BaseException:
            groups.close()
            raise

    def fill(
        self,
        engine: StepEngine,
        tensors: dict[str, LocalShard],
        found: Agreement,
        control: PeerGroup,
        is_replica_kept: bool,
    ) -> None:
        """Bring the state after the agreed step here, from whichever rank has it."""
        step, groups = found.resolution.step, engine.groups
        if self.reshard_plan is not None:
            positions = [groups.positions.index(r) for r in range(self.topology.world_size)]
            move(tensors, engine.state(), self.reshard_plan, control, positions, step=step)
            if not is_replica_kept:
                engine.parameters.refresh()
            self.timer.lap("move")
        engine.set_applied_step(step)
        engine.history.validated_step = found.validated_step
        if found.computed_leaves:
            leaves = engine.plan.leaves(step + 1)
            base = self.dealer(leaves, len(self.topology.replicas))
            shares = deal_rest(leaves, found.computed_leaves, base)
            engine.plan.resume(step + 1, shares, found.computed_leaves)

    def to_result(
        self, session: TrainingSession, entries: list[dict[str, Any]], found: Agreement, kept: bool
    ) -> RecoveryResult:
        events = missing_events(entries, found, session.engine)
        if self.config.train.digest_every:  # a rank that was lost did not report its part
            digester = WeightsDigester(self.config, self.topology)
            step = found.resolution.step
            digest = digester.event(self.rank, step, session.engine.state()) if step else None
            events += [] if digest is None else [digest]
        if self.config.outer.is_on and (step := found.resolution.step):
            sha256 = digest_of_weights(self.config, session.engine.state())
            fates = session.engine.history.fates_of(step)
            events.append(OuterRound(self.rank, sha256, [], 0, fates=fates, step=step))
        survivors = [rank for rank, was in enumerate(found.came_from) if was is not None]
        if session.engine.learners is not None and survivors[:1] == [self.rank]:
            updates = session.engine.learners.events()  # rank 0 may have been lost before it told
            events += [event for event in updates if event.step == found.resolution.step]
        session.engine.history.unreported_step = 0
        self.timer.lap("events")
        return RecoveryResult(
            session,
            found.resolution.step,
            events,
            found.resolution,
            found.verdict,
            kept,
            sum(map(len, found.computed_leaves)),
            self.timer.phases,
        )


def entries_of_open_step(engine: StepEngine) -> list[dict[str, Any]]:
    """Return the ledger's entries of what this rank was fed in the open step, if it feeds the
    ledger."""
    if not engine.groups.feeds_ledger:
        return []
    return [entry for batch in engine.batches for entry in getattr(batch, "entries", ())]


def missing_events(
    entries: list[dict[str, Any]], agreement: Agreement, engine: StepEngine
) -> list[Event]:
    """What the journal lacks of the step that the survivors applied, and this rank of the new
    generation reports. entries: `entries_of_open_step` of the generation that is over.

    A rank that applies a step in a recovery has not reported it. Rank 0 may be lost before it
    reports the last few steps and the newest validation. Another rank that computed them reports
    them once more, and readers count each once (`core.data.lineage.DuplicateFilter`). What a lost
    rank fed the agent enters into the ledger (`elastic/coordinator/ledger_repair.py`).
    """
    rank, step, events = engine.groups.rank, agreement.resolution.step, list[Event]()
    if entries and rank in agreement.resolution.appliers:
        events.append(BatchFed(rank, entries, step=step))
    survivors = [r for r, was in enumerate(agreement.came_from) if was is not None]
    lived = 0 in agreement.came_from
    if lived:
        teller = agreement.came_from.index(0)
    else:  # one that applied the last steps reports them for a lost rank 0
        receivers = agreement.resolution.receivers
        teller = next((r for r in survivors if r not in receivers), survivors[0])
    quiet = rank in agreement.resolution.appliers or engine.history.unreported_step == step
    if rank == teller and (quiet or not lived):
        events += _step_events(engine, agreement, 1 if lived else REMEMBERED_STEPS)
    newest, told = engine.history.last_validation, lived and teller in agreement.validators
    if newest is not None and newest.step > step - REMEMBERED_STEPS and not told:
        events += [newest] * (rank in agreement.validators[:1])
    return events


def _step_events(engine: StepEngine, agreement: Agreement, max_steps: int) -> list[Event]:
    """Return the last `max_steps` steps that this rank knows of. Some may have been reported
    before."""
    step = agreement.resolution.step
    voted = {} if agreement.verdict is None else {step: agreement.verdict}
    voted.update(engine.history.applied_verdicts)  # with their loss scales
    return [
        StepDone(
            loss=verdict.mean_loss,
            tokens=verdict.tokens,
            grad_norm=engine.mean_norm(verdict),
            learning_rate=engine.shown_rate(number),
            seconds=0.0,
            samples=engine.plan.samples(number),
            phases={},
            skipped_at=verdict.skipped_at,
            metrics=engine.metrics(verdict),
            counts=engine.counts,
            step=number,
        )
        for number, verdict in sorted(voted.items())
        if step - max_steps < number <= step
    ]
