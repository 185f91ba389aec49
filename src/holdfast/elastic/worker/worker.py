"""The worker: its state, its engine and what it reports, over all generations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast.data.stream.loader import StepLoader
from holdfast.elastic.protocol.worker_commands import Begin
from holdfast.elastic.protocol.worker_messages import SCRIPT_END, SaveRequest
from holdfast.elastic.protocol.worker_spec import WorkerSpec
from holdfast.elastic.worker.checkpointer import SnapshotSaver, save_before_leaving, save_last_step
from holdfast.elastic.worker.commands import CommandClient
from holdfast.elastic.worker.device_wear import DeviceWear
from holdfast.elastic.worker.generation_connection import GenerationConnection
from holdfast.elastic.worker.held_session import HeldSession
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.elastic.worker.restore import restore
from holdfast.elastic.worker.saver_factory import SaverFactory
from holdfast.elastic.worker.warmth import warm_up
from holdfast.elastic.worker.worker_setup import WorkerSetup
from holdfast.errors import HoldfastError
from holdfast.layout import Topology
from holdfast.parallel.comm.flight_recorder import log_pending_operations
from holdfast.parallel.comm.gloo_sockets import shut_down_connections
from holdfast.policy.recovery.survivors import HeldState, RejectedStep
from holdfast.policy.saving.failure_classes import FailureClassCounts
from holdfast.policy.saving.tier_durations import TierDurations
from holdfast.policy.saving.tiers import BUCKET, DISK, MEMORY, PEERS
from holdfast.rollout.roles.batches import RolloutBatches
from holdfast.rollout.roles.feed import CompletionFeed
from holdfast.rollout.roles.link import TrainerPlace, connect_roles
from holdfast.training.engine.build import TrainingSession
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.protocols import ShareLoader
from holdfast.training.engine.reference import fill_reference
from holdfast.training.engine.runner import TrainingLoop, TrainingOutcome
from holdfast.training.engine.save_cadence import FailureStats
from holdfast.training.engine.step_profiler import StepProfiler
from holdfast.training.engine.vote import Wishes
from holdfast.wire.secret import Secret

logger = logging.getLogger(__name__)

_PROFILES_FOLDER = "profiles"
_ANNOUNCE_FLUSH_TIMEOUT_S = 0.5
"""Seconds that a stopping worker waits for its snapshots' announcements, if no other replica has
its state. The next generation begins when all have stopped, and the mover refuses later
announcements."""


class Worker:
    """One process of a run, and the state that it holds, over all its generations.

    begin_generation   connect, build, restore a checkpoint or make initial weights
    train              until the run is finished, a node asks to leave, or a peer is lost
    apply_command      get into the next generation as the agent ordered; then `train` again
    stop_generation    abandon an ended generation; `held_state` reports what remains

    step: the state is that after this step. held_session: the session with that state. connection:
    the rank and the connections in the present generation. Belongs to one thread.
    """

    def __init__(self, spec: WorkerSpec, secret: Secret, commands: CommandClient) -> None:
        self._secret, self._commands = secret, commands
        self._setup = WorkerSetup(spec)
        self.held_session = HeldSession(spec.start_step)
        self.is_training = False  # as opposed to being on the way into a generation
        self._snapshot_saver: SnapshotSaver | None = None
        self._had_capturer = False  # whether there has been one
        self._connection: GenerationConnection | None = None
        self._wear = DeviceWear(self._setup.kind)
        self._feed: CompletionFeed | None = None  # of a generation that waits for completions

    @property
    def is_worn(self) -> bool:
        """Return True if another process must take the place: the device bears no more groups."""
        return self._wear.is_worn(self.connection.rank)

    @property
    def step(self) -> int:
        return self.held_session.step

    @property
    def connection(self) -> GenerationConnection:
        if self._connection is None:
            raise RuntimeError("a process without a rank has no connection")
        return self._connection

    @property
    def reporter(self) -> AgentReporter:
        return self.connection.reporter

    @property
    def generation(self) -> int:
        connection = self._connection
        return self._setup.spec.generation if connection is None else connection.topology.generation

    def prepare(self) -> None:
        """Do the work that needs no place in a generation."""
        self._setup.open_batches()
        is_awaited = self._setup.spec.topology is not None  # other ranks wait for it
        warm_up(self._setup.config, None if is_awaited else self._setup.known_device)

    # --- into a generation --------------------------------------------------------------------
    def begin_generation(self) -> None:
        """Get ready to compute the first step of the spec's generation."""
        spec, self.is_training = self._setup.spec, False
        if self._connection is None:
            self._connect_reporter(spec.placed_topology, spec.rank)
        halts = self.connection.halts
        with halts.interruptible(self._interrupt_joining):
            self.held_session.build(self._setup, self.connection)
            restore(spec, self.held_session.current, self.reporter, self._secret, halts.check)
            self.held_session.has_state = True
            self._attach_capturer(spec.forked)

    def apply_command(self, command: Begin) -> None:
        """Get ready to compute in the ordered generation: as `begin_generation` does, or with the
        state that the survivors hold.

        The second is collective over the topology, and the mover must have begun the generation.
        Raises LayoutError, PeerLostError, FencedError and HaltedError; `held_state` then reports
        whether this process has lost the state."""
        begun = time.monotonic()
        self._setup.apply(replace(command.spec, forked=begun))
        if command.came_from is not None:
            self._recover_live(command, begun)
            return
        spec = self._setup.spec
        self._detach_capturer()
        self.held_session.discard(spec.start_step)
        self._connect_reporter(spec.placed_topology, spec.rank, spec.start_step)
        self.begin_generation()

    def train(self) -> TrainingOutcome:
        """Train on from the state after `step`. Raises what `TrainingLoop.run` raises;
        `step` is right then, too. The state is then intact, unless a replica was sharded over a
        lost process.
        """
        self._wear.read_memory(self._setup.device)
        held, saver = self.held_session, self._snapshot_saver
        session, connection, config = held.current, self.connection, self._setup.config
        assert saver is not None, "the capturer is made with the session"
        if self._setup.spec.saves_only:
            return save_before_leaving(session, saver, self.step, held.verdict)
        if held.is_live and self.step >= config.train.steps:
            waking = connection.halts.interruptible(self._interrupt_training)
            return save_last_step(
                session, saver, self.reporter, connection.rank, self.step, held.verdict, waking
            )
        membership = AgentMembership(
            self.reporter, self.generation, self._on_outdated, connection.has_replicas_across_nodes
        )
        self._setup.open_batches()  # of what is left out a newer boot may know more
        retry = self._setup.spec.retry
        if retry is not None and retry.step > self.step:
            session.engine.plan.deal_elsewhere(retry.step, retry.avoid)
        engine, replica = session.engine, session.engine.groups.coordinate.replica
        self.reporter.progress_meter.microbatch_count = lambda: len(engine.dealt_shares[replica])
        self.reporter.progress_meter.element_count = lambda: _count_elements(engine)
        self.reporter.progress_meter.device_progress = engine.groups.device_progress
        self.reporter.progress_meter.received_bytes = engine.groups.received_bytes
        self._fill_reference(session)
        self.is_training = True
        roles = self._connect_roles(session)
        try:
            inside = len(session.groups.replica.ranks) > 1  # where nothing else ends a wait
            waking = connection.halts.interruptible(self._interrupt_training, exits_if_stuck=inside)
            with waking, session.loader(self.step) as loader:
                self._watch_loader(loader)
                return TrainingLoop(
                    session.engine,
                    membership,
                    self.reporter,
                    saver,
                    session.evaluator,
                    config,
                    start_step=self.step,
                    stats=_failure_stats(self._setup.spec),
                    tier_durations=lambda: self.reporter.requests.tier_durations or TierDurations(),
                    is_in_danger=lambda: self.reporter.requests.is_in_danger,
                    retry=retry,
                    profiler=self._profiler(),
                ).run(loader)
        finally:
            self._feed = None
            if roles is not None:
                roles.detach()
            held.step = session.engine.status.applied_step or self.step
            saver.fence()  # the snapshot of a step that is complete is worth having in any case

    def _profiler(self) -> StepProfiler:
        spec, reporter = self._setup.spec, self.reporter
        return StepProfiler(
            self.connection.rank,
            self._setup.device,
            self._setup.config.train.profile,
            Path(spec.run_folder) / _PROFILES_FOLDER / f"{self.generation:010d}",
            reporter.emit,
            lambda: reporter.requests.profile,
        )

    def _connect_roles(self, session: TrainingSession) -> RolloutBatches | None:
        """Connect a run that generates its data with its actors; None for any other run."""
        batches, spec = session.batches, self._setup.spec
        if not isinstance(batches, RolloutBatches):
            return None
        place = TrainerPlace(
            spec.agent, self._secret, Path(spec.policies), self._setup.device, self.reporter.emit
        )
        self._feed = connect_roles(self._setup.config, batches, session.engine, place, self.step)
        return batches

    def _watch_loader(self, loader: ShareLoader) -> None:
        """Let waits for a step's data count as progress, and end with the generation."""
        if not isinstance(loader, StepLoader) or (feed := self._feed) is None:
            return
        reporter = self.reporter

        def wait() -> None:
            reporter.progress(feed.trained_step, "completions")

        def take(step: int) -> None:
            feed.trained_step = step

        loader.on_wait, loader.on_step, loader.on_close = wait, take, feed.interrupt

    def _fill_reference(self, session: TrainingSession) -> None:
        """Compute the reference log-probabilities that no node has. Raises what `train` raises."""
        inside, halts = len(session.groups.replica.ranks) > 1, self.connection.halts
        alive = partial(self.reporter.progress, self.step, "reference")
        with halts.interruptible(self._interrupt_training, exits_if_stuck=inside):
            fill_reference(session, self.step, self.reporter.emit, alive)

    # --- out of one ---------------------------------------------------------------------------
    def stop_generation(self, is_orderly: bool, is_planned: bool = False) -> None:
        """Stop the generation. Unless that is done already (`is_orderly`), release all ranks that
        wait for this one, inside its replica or outside. is_planned: no process was lost, so the
        snapshot of the last step is handed over first."""
        engine, connection = self.held_session.engine, self._connection
        if engine is not None and not is_orderly:
            engine.interrupt(True)
        if connection is None or not connection.reporter.has_pending_callbacks:
            return
        is_only_copy = len(connection.topology.replicas) == 1
        if is_only_copy or is_planned or connection.has_replicas_across_nodes:
            connection.reporter.flush(_ANNOUNCE_FLUSH_TIMEOUT_S)

    def held_state(self, kind: str, text: str, bad_step: RejectedStep | None = None) -> HeldState:
        """Return the state that this process could continue from. bad_step: the step for which it
        stopped."""
        rank = -1 if self._connection is None else self._connection.rank
        return self.held_session.report(self.generation, rank, kind, text, bad_step)

    def report_outcome(self, outcome: TrainingOutcome) -> bool:
        """Report the outcome; return False if a newer generation has replaced this one."""
        if outcome.unsaved_reason is not None:
            logger.warning(
                "the state after step %d is not durable: %s", outcome.step, outcome.unsaved_reason
            )
        self.reporter.report_outcome(outcome.kind, outcome.step, outcome.unsaved_reason)
        self.reporter.flush()
        return not self.reporter.is_fenced

    def finish_task(self, outcome: TrainingOutcome) -> None:
        """Let a script of a finished run do what comes after its loop. Raises ScriptError."""
        if outcome.kind == "finished":
            alive = partial(self.reporter.progress, outcome.step, SCRIPT_END)
            self.held_session.current.task.finish(alive)

    def close(self) -> None:
        """Leave the present generation in an orderly way. The reporter stays connected."""
        self._detach_capturer()
        self.held_session.close()

    # --- parts --------------------------------------------------------------------------------
    def _recover_live(self, command: Begin, begun_at: float) -> None:
        """Enter the generation with the state that the survivors hold between them."""
        assert command.came_from is not None
        if command.previous is None:
            raise HoldfastError("the command to recover live names no previous topology")
        topology, rank = command.spec.placed_topology, command.spec.rank
        self.is_training = False
        self._detach_capturer()
        if command.came_from[rank] is None or not self.held_session.is_usable:
            self.held_session.discard(command.previous.step)
        self._connect_reporter(topology, rank, self.step)
        self.reporter.progress(self.step, "recover")
        connection, before = self.connection, command.previous.topology
        with connection.halts.interruptible(self._interrupt_joining):
            self.held_session.recover(self._setup, connection, command.came_from, before)
            self._attach_capturer(begun_at, in_background=True)

    def _detach_capturer(self) -> None:
        """Close the saver, which refers to the state."""
        if self._snapshot_saver is not None:
            self._snapshot_saver.close()
            self._snapshot_saver = None

    def _connect_reporter(self, topology: Topology, rank: int, start_step: int = 0) -> None:
        """Connect to the agent as `rank` of a generation that continues from the state after
        `start_step`. Unsent events of the previous generation are sent now."""
        old = self._connection
        self._wear.regroups += 1
        unsent = None if old is None else old.close_for_next(topology.generation, start_step)
        self._connection = GenerationConnection.open(
            self._setup.spec, self._secret, self._commands, topology, rank, unsent
        )

    def _attach_capturer(self, begun_at: float, *, in_background: bool = False) -> None:
        """Make an arena for the session's state, and report the worker as ready then.
        in_background: make it while the first step computes."""
        factory = SaverFactory(
            self._setup.config,
            self._setup.spec.mover_socket,
            self._secret,
            self.connection,
            self.held_session,
            self._setup.describe_device(),
            has_released_old_memory=self._had_capturer,
        )
        self._had_capturer = True
        self._snapshot_saver = factory.make(begun_at, in_background=in_background)

    # --- being interrupted --------------------------------------------------------------------
    def _interrupt_joining(self, inside: bool) -> None:
        """Wake the training thread on its way into a generation. The first call ends waits for
        ranks to come, and for state. The second ends waits for ranks that came and got stuck."""
        if self.connection.rendezvous.abort():
            return
        groups = getattr(self.held_session.session, "groups", None)
        if groups is not None:  # its inside may have been kept: not any more
            groups.replica_groups.is_aborted = True
        shut_down_connections(self._setup.spec.agent)

    def _interrupt_training(self, inside: bool) -> None:
        if not self._setup.kind.inside_has_tags:
            log_pending_operations()
        self.held_session.current.engine.interrupt(inside)
        if (feed := self._feed) is not None:
            feed.interrupt()

    def _on_outdated(self, step: int) -> None:
        """Handle a newer generation before `step` is voted on: the vote must not happen. The ranks
        of a replica reach the end of the step together."""
        self.held_session.current.engine.interrupt(False)


def _count_elements(engine: StepEngine) -> int:
    """Return the elements of the inputs of this rank's microbatches in the open step."""
    inputs = (engine.executor.arguments(batch)[0] for batch in engine.batches)
    tensors = (one.values() if isinstance(one, Mapping) else (one,) for one in inputs)
    return sum(tensor.numel() for several in tensors for tensor in several)


def _failure_stats(spec: WorkerSpec) -> FailureStats:
    """Return the failure statistics that the agent has sent."""
    return FailureStats(spec.failure_rate, spec.failure_classes or FailureClassCounts())


MAX_UNSENT_STEPS = 3
"""Steps whose events a process may still have to itself when it votes on the next one. If it is
killed, other processes report these steps (`training/recover/recover.py`), and the agent
completes the ledger (`elastic/coordinator/ledger_repair.py`)."""


class AgentMembership:
    """Reads the agent's requests, as of its last answer. It waits only if the ledger is too far
    behind."""

    def __init__(
        self,
        reporter: AgentReporter,
        generation: int,
        on_outdated: Callable[[int], None],
        spans_nodes: bool = False,
    ) -> None:
        """Bind the requests to a generation.

        Args:
            on_outdated: ends the step if a newer generation has been opened.
            spans_nodes: a replica lies on several nodes, so a node that leaves may take a part of
                the state with it.
        """
        self._reporter, self._generation, self._on_outdated = reporter, generation, on_outdated
        self._spans_nodes = spans_nodes
        self._last_save_request = 0  # the newest request that has been passed on

    def requests(self, step: int) -> Wishes:
        self._reporter.wait_until_sent(step - MAX_UNSENT_STEPS)
        if self._reporter.is_fenced:
            self._on_outdated(step)
        told = self._reporter.requests
        save = told.save or SaveRequest()
        into = save.tiers if save.number > self._last_save_request else ()
        self._last_save_request = save.number
        pause = told.pause_generation == self._generation
        parting = pause and told.is_node_leaving and self._spans_nodes
        return Wishes(
            stop=told.should_stop,
            is_snapshot_enough=told.is_peer_copy_enough,
            save=DISK in into,
            snapshot=MEMORY in into or PEERS in into,
            copy=PEERS in into,
            upload=BUCKET in into,
            pause=pause,
            is_node_leaving=parting,
        )
