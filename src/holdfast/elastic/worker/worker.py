"""The worker: its state, its engine and what it reports, over all generations."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.checkpoint.capture.capturer import SkippedCapture
from holdfast.config.run import RunConfig
from holdfast.core.data.skips import Skips
from holdfast.data.batch import Batches
from holdfast.data.dataset import Dataset
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.checkpointer import LateSaver, SnapshotSaver, save_last_step
from holdfast.elastic.worker.commands import (
    Begin,
    CommandClient,
    GenerationHalts,
    PreviousGeneration,
    WorkerHeldState,
)
from holdfast.elastic.worker.http_store import HttpStore, Rendezvous
from holdfast.elastic.worker.output import redirect_output
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.elastic.worker.restore import restore
from holdfast.elastic.worker.saver_factory import SaverFactory
from holdfast.elastic.worker.sockets import shut_down_connections
from holdfast.elastic.worker.step_requests import AgentMembership
from holdfast.elastic.worker.stuck_threads import ThreadId, ThreadWatcher
from holdfast.elastic.worker.warmth import warm_up
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import BatchFed, CheckpointSkipped, SettingIgnored
from holdfast.layout import Topology
from holdfast.plan.planner import dealer_of
from holdfast.policy.detection.bad_steps import StepRetry
from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.train.build import TrainingSession, build_engine, connect_groups, make_session
from holdfast.train.recover import RecoveryResult, join_generation, recover
from holdfast.train.runner import TrainingOutcome
from holdfast.train.runner import run_training as train
from holdfast.train.save_cadence import FailureStats
from holdfast.train.vote import StepVerdict
from holdfast.wire import process_log
from holdfast.wire.http.client import Client
from holdfast.wire.secret import Secret

logger = logging.getLogger(__name__)

_ANNOUNCE_FLUSH_TIMEOUT_S = 0.5
"""Seconds that a stopping worker waits for its snapshots' announcements, if no other replica has
its state. The next generation begins when all have stopped, and the mover refuses later
announcements."""


_GROUP_WAIT_TIMEOUT_S = 1800.0  # seconds that bound every wait in a group; a halt ends them before


class Worker:
    """One process of a run, and the state that it holds, over all its generations.

    begin_generation   connect, build, restore a checkpoint or make initial weights
    train              until the run is finished, a node asks to leave, or a peer is lost
    adopt_generation   join the next generation with the present state; then `train` again
    apply_command      begin, adopt, or join as a newcomer, as the agent ordered
    stop_generation    abandon an ended generation; `held_state` reports what remains

    step: the state is that after this step. reporter: the connection to the agent in the present
    generation. Each generation has its own, because the agent accepts only the newest. Belongs to
    one thread.
    """

    def __init__(
        self, spec: WorkerSpec, secret: Secret, commands: CommandClient | None = None
    ) -> None:
        self.step = spec.start_step
        self._spec, self._secret, self._commands = spec, secret, commands
        self._config = RunConfig.model_validate(spec.config)
        self._batches: Batches | None = None
        self._session: TrainingSession | None = None
        self._has_state = False  # whether the session's state has its values
        self.is_training = False  # as opposed to being on the way into a generation
        self._is_live = False  # the state came from the generation before, not from a checkpoint
        self._verdict: StepVerdict | None = None  # of the step that this generation went on from
        self._snapshot_saver: SnapshotSaver | LateSaver | None = None
        self._had_capturer = False  # whether there has been one
        self._reporter: AgentReporter | None = None

    @property
    def reporter(self) -> AgentReporter:
        if self._reporter is None:
            raise RuntimeError("a process without a rank has no reporter")
        return self._reporter

    @property
    def generation(self) -> int:
        return self._topology.generation if self._reporter is not None else self._spec.generation

    def prepare(self) -> None:
        """Do the work that needs no place in a generation."""
        self._open_batches()
        warm_up()

    # --- into a generation --------------------------------------------------------------------
    def begin_generation(self) -> None:
        """Get ready to compute the first step of the spec's generation."""
        boot, self.is_training = self._spec, False
        if self._reporter is None:
            self._connect_reporter(boot.parse_topology(), boot.rank)
        with self._halts.interruptible(self._interrupt_joining):
            self._session = _build_session(
                self._config,
                self._open_batches(),
                self._topology,
                self._rank,
                self._rendezvous.store,
                self._device,
            )
            restore(boot, self._session, self.reporter, self._secret, self._halts.check)
            self._has_state = True
            self._attach_capturer(boot.forked)

    def adopt_generation(
        self, topology: Topology, rank: int, came_from: Sequence[int | None]
    ) -> None:
        """Become `rank` of `topology`, which is that of a newer generation, and keep the state.

        Collective over `topology`. The agent and the mover must have begun the generation.
        came_from: see `core.sharding.reshard_plan.plan_reshard`. Raises LayoutError, PeerLostError,
        FencedError and HaltedError; `held_state` then reports whether this process has lost the
        state.
        """
        before = PreviousGeneration(self._current_session.groups.topology, self.step)
        boot = replace(
            self._spec, topology=topology.to_json(), generation=topology.generation, rank=rank
        )
        self.apply_command(Begin(boot, tuple(came_from), before))

    def apply_command(self, command: Begin) -> None:
        """Get ready to compute in the ordered generation. Raises what `begin_generation` and
        `adopt_generation` raise."""
        begun = time.monotonic()
        self._apply_spec(replace(command.spec, forked=begun))
        if command.came_from is not None:
            self._recover_live(command, begun)
            return
        boot = self._spec
        self._discard_state()
        self.step = boot.start_step
        self._connect_reporter(boot.parse_topology(), boot.rank, boot.start_step)
        self.begin_generation()

    def train(self) -> TrainingOutcome:
        """Train on from the state after `step`. Raises what `train.runner.run_training` raises;
        `step` is right then, too. The state is then intact, unless a replica was sharded over a
        lost process.
        """
        session, saver = self._current_session, self._snapshot_saver
        assert saver is not None, "the capturer is made with the session"
        if self._is_live and self.step >= self._config.train.steps:
            waking = self._halts.interruptible(self._interrupt_training)
            return save_last_step(
                session, saver, self.reporter, self._rank, self.step, self._verdict, waking
            )
        membership = AgentMembership(
            self.reporter, self.generation, self._on_outdated, _spans_nodes(self._topology)
        )
        self._open_batches()  # of what is left out a newer boot may know more
        retry = None if self._spec.again is None else StepRetry.from_json(self._spec.again)
        if retry is not None and retry.step > self.step:
            session.engine.plan.deal_elsewhere(retry.step, retry.avoid)
        engine, replica = session.engine, session.engine.groups.coordinate.replica
        self.reporter.progress_meter.microbatch_count = lambda: len(engine.dealt_shares[replica])
        self.is_training = True
        try:
            inside = len(session.groups.replica.ranks) > 1  # where nothing else ends a wait
            waking = self._halts.interruptible(self._interrupt_training, exits_if_stuck=inside)
            with waking, session.loader(self.step) as loader:
                return train(
                    session.engine,
                    loader,
                    membership,
                    self.reporter,
                    saver,
                    session.evaluator,
                    self._config,
                    rank=self._rank,
                    start_step=self.step,
                    stats=_failure_stats(self._spec),
                    tier_durations_s=lambda: self.reporter.requests.tier_durations_s,
                    retry=retry,
                )
        finally:
            self.step = session.engine.status.applied_step or self.step
            saver.fence()  # the snapshot of a step that is complete is worth having in any case

    # --- out of one ---------------------------------------------------------------------------
    def stop_generation(self, is_orderly: bool) -> None:
        """Stop the generation. Unless that is done already (`is_orderly`), release all ranks that
        wait for this one, inside its replica or outside."""
        engine = getattr(self._session, "engine", None)
        if engine is not None and not is_orderly:
            engine.interrupt(True)
        if self._reporter is None or not self._reporter.has_pending_callbacks:
            return
        if len(self._topology.replicas) == 1 or _spans_nodes(self._topology):
            self._reporter.flush(_ANNOUNCE_FLUSH_TIMEOUT_S)

    def held_state(
        self, kind: str, text: str, bad_step: dict[str, Any] | None = None
    ) -> WorkerHeldState:
        """Return the state that this process could continue from. bad_step: the step for which it
        stopped."""
        rank = self._rank if self._reporter is not None else -1
        if not self._has_usable_state:
            return WorkerHeldState(
                self.generation, rank, self.step, None, True, kind, text, bad=bad_step
            )
        engine = self._current_session.engine
        groups, whole = engine.groups, engine.progress.reduced_step
        place = (groups.topology.generation, groups.rank)
        applied = (
            engine.status.applied_step or self.step
        )  # perhaps in a recovery that did not come to its end
        return WorkerHeldState(
            self.generation, rank, applied, whole, False, kind, text, place, bad_step
        )

    def report_and_leave(self, outcome: TrainingOutcome) -> int:
        """Report how the run ended for this process; return the exit code."""
        self.report_outcome(outcome)
        self.reporter.close()
        return exit_codes.FENCED if self.reporter.is_fenced else exit_codes.DONE

    def report_outcome(self, outcome: TrainingOutcome) -> bool:
        """Report the outcome; return False if a newer generation has replaced this one."""
        if outcome.unsaved_reason is not None:
            logger.warning(
                "the state after step %d is not durable: %s", outcome.step, outcome.unsaved_reason
            )
        self.reporter.report_outcome(outcome.kind, outcome.step, outcome.unsaved_reason)
        self.reporter.flush()
        return not self.reporter.is_fenced

    def close(self) -> None:
        """Leave the present generation in an orderly way. The reporter stays connected."""
        self._detach_capturer()
        if self._session is not None:
            self._session.close()
            self._session = None

    # --- the state ----------------------------------------------------------------------------
    @property
    def _has_usable_state(self) -> bool:
        """Return True if there is a state to continue from. A failed recovery may have taken the
        engine out of its session."""
        engine = getattr(self._session, "engine", None)
        return self._has_state and engine is not None and not engine.status.is_torn

    def _recover_live(self, command: Begin, begun_at: float) -> None:
        """Enter the generation with the state that the survivors hold between them."""
        assert command.came_from is not None
        if command.previous is None:
            raise HoldfastError("the command to recover live names no previous topology")
        topology, rank, before = (
            command.spec.parse_topology(),
            command.spec.rank,
            command.previous.topology,
        )
        self.is_training = False
        self._detach_capturer()
        if command.came_from[rank] is None or not self._has_usable_state:
            self._discard_state()
            self.step = command.previous.step
        self._connect_reporter(topology, rank, self.step)
        self.reporter.progress(self.step, "recover")
        with self._halts.interruptible(self._interrupt_joining):
            if self._session is not None:
                found = recover(
                    self._session,
                    topology,
                    rank,
                    self._rendezvous.store,
                    command.came_from,
                    step=self.step,
                    old_topology=before,
                    dealer=dealer_of(topology, self._config.layout.schedule),
                    on_meeting=self._rendezvous.on_peers_met,
                )
            else:
                found = join_generation(
                    self._config,
                    self._open_batches(),
                    topology,
                    rank,
                    self._rendezvous.store,
                    self._device,
                    before,
                    command.came_from,
                    dealer=dealer_of(topology, self._config.layout.schedule),
                    on_meeting=self._rendezvous.on_peers_met,
                )
            self._enter_recovered(found)
            self._attach_capturer(begun_at, in_background=True)

    def _enter_recovered(self, recovered: RecoveryResult) -> None:
        """Take over the new generation's session, and emit events of the old one that the journal
        may lack."""
        self._session, self.step, self._has_state = recovered.session, recovered.step, True
        self._verdict, self._is_live = recovered.verdict, True
        for event in recovered.events:
            self.reporter.emit(event)
        parts = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in recovered.phases.items())
        logger.info("goes on from step %d as rank %d: %s", recovered.step, self._rank, parts)

    def _discard_state(self) -> None:
        """Leave the old generation without the state."""
        self._detach_capturer()
        session, self._session, self._has_state, self._is_live = self._session, None, False, False
        if session is not None and hasattr(session, "engine"):
            session.groups.abort()
            session.close()
            del session.engine, session.evaluator, session.groups, session
            gc.collect()  # the new model needs its room

    # --- parts --------------------------------------------------------------------------------
    def _open_batches(self) -> Batches:
        """Return the data, opened once."""
        if self._batches is None:
            config = self._config
            dataset = Dataset.open(self._spec.dataset)
            self._batches = Batches(dataset, config.data, config.train, config.seed)
        self._batches.skips = Skips.from_json(self._spec.skips)
        return self._batches

    def _apply_spec(self, spec: WorkerSpec) -> None:
        """Apply a newer spec to this process."""
        if spec.config != self._spec.config or spec.dataset != self._spec.dataset:
            self._config, self._batches = RunConfig.model_validate(spec.config), None
        if spec.threads != self._spec.threads:
            torch.set_num_threads(spec.threads)
        if spec.log and spec.log != self._spec.log:
            redirect_output(spec.log)
        process_log.enter(spec.generation, spec.rank)
        self._spec = spec

    @property
    def _device(self) -> torch.device:
        return torch.device(self._spec.device)

    def _detach_capturer(self) -> None:
        """Close the saver, which refers to the state."""
        if self._snapshot_saver is not None:
            self._snapshot_saver.close()
            self._snapshot_saver = None

    @property
    def _current_session(self) -> TrainingSession:
        if self._session is None:
            raise RuntimeError("begin() comes first, and nothing after close() or a failed adopt()")
        return self._session

    def _connect_reporter(self, topology: Topology, rank: int, start_step: int = 0) -> None:
        """Connect to the agent as `rank` of a generation that continues from the state after
        `start_step`. Unsent events of the previous generation are sent now."""
        boot, untold = self._spec, None
        if self._reporter is not None:
            untold = self._reporter.close_and_take_unsent().up_to_step(start_step)
            if topology.generation > self.generation + 1:  # others went on without it
                untold = untold.without_kind(BatchFed)
            self._rendezvous.close()  # the groups that needed it are closed
        self._topology, self._rank = topology, rank
        self._halts = GenerationHalts(self._commands, topology.generation)
        meet = Client(boot.meet or boot.agent, self._secret, topology.generation)
        self._rendezvous: Rendezvous = Rendezvous(meet, self._halts)
        self._reporter = AgentReporter(
            Client(boot.agent, self._secret, topology.generation),
            rank,
            heartbeat_s=boot.heartbeat_seconds,
            on_error=_print_reporter_error,
            unsent=untold,
            is_asleep=ThreadWatcher(ThreadId.current()).is_asleep,
        )
        self._reporter.start()

    def _attach_capturer(self, begun_at: float, *, in_background: bool = False) -> None:
        """Make an arena for the session's state, and report the worker as ready then.
        in_background: make it while the first step computes, if the agent sends commands."""
        factory = SaverFactory(
            self._config,
            self._spec.mover_socket,
            self._secret,
            self._topology,
            self._rank,
            self.step,
            self.reporter,
            self._halts,
            self,
            has_released_old_memory=self._had_capturer,
        )
        state = self._current_session.engine.state()
        self._had_capturer = True
        self._snapshot_saver = factory.make(state, begun_at, in_background=in_background)

    def on_capture_skipped(self, skipped: SkippedCapture) -> None:
        """Note that a snapshot was not captured."""
        event = CheckpointSkipped(self._rank, skipped.reason, step=skipped.step)
        self.reporter.emit(event)

    def on_setting_ignored(self, key: str, reason: str) -> None:
        """Note that a setting could not be followed."""
        self.reporter.emit(SettingIgnored(key, reason, step=self.step))

    # --- being interrupted --------------------------------------------------------------------
    def _interrupt_joining(self, inside: bool) -> None:
        """Wake the training thread on its way into a generation. The first call ends waits for
        ranks to come, and for state. The second ends waits for ranks that came and got stuck."""
        if self._rendezvous.abort():
            return
        groups = getattr(self._session, "groups", None)
        if groups is not None:  # its inside may have been kept: not any more
            groups.replica_groups.is_aborted = True
        shut_down_connections(self._spec.agent)

    def _interrupt_training(self, inside: bool) -> None:
        self._current_session.engine.interrupt(inside)

    def _on_outdated(self, step: int) -> None:
        """Handle a newer generation before `step` is voted on: the vote must not happen. If the
        agent sends commands, the ranks of a replica reach the end of the step together."""
        if self._commands is None:
            raise FencedError(f"a newer generation began before step {step} was voted on")
        self._current_session.engine.interrupt(False)


def _build_session(
    config: RunConfig,
    batches: Batches,
    topology: Topology,
    rank: int,
    store: HttpStore,
    device: torch.device,
) -> TrainingSession:
    """Connect the groups of `topology`, and build this rank's engine, without values."""
    groups = connect_groups(config, topology, rank, store, device, _GROUP_WAIT_TIMEOUT_S)
    try:
        # The weights of the replicas may differ.
        dealer = dealer_of(topology, config.layout.schedule)
        engine = build_engine(config, groups, device, dealer=dealer)
    except BaseException:
        groups.abort()
        groups.close()
        raise
    return make_session(config, engine, batches, device)


def _spans_nodes(topology: Topology) -> bool:
    """Return True if a replica lies on several nodes: one that leaves may take the only copy of a
    part of the state."""
    nodes = topology.nodes
    return any(len({nodes[rank] for rank in each.ranks}) > 1 for each in topology.replicas)


def _failure_stats(spec: WorkerSpec) -> FailureStats:
    """Return the failure statistics that the agent has sent."""
    hazard = None if spec.hazard is None else FailureRate.from_json(spec.hazard)
    return FailureStats(
        hazard, FailureClassCounts(tuple(spec.classes)) if spec.classes else FailureClassCounts()
    )


def _print_reporter_error(error: BaseException) -> None:
    logger.warning("reporter: %s: %s", type(error).__name__, error)
