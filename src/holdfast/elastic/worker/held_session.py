"""The session that a worker holds, and the state in it, over all its generations."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

from holdfast.data.stream.batch import Batches
from holdfast.elastic.worker.generation_connection import GenerationConnection
from holdfast.elastic.worker.http_store import HttpStore
from holdfast.elastic.worker.worker_setup import WorkerSetup
from holdfast.errors import PeerLostError
from holdfast.events import SettingIgnored, ShardAwaited
from holdfast.layout import Topology
from holdfast.parallel.axes.process_groups import connect
from holdfast.plan.placing.planner import dealer_of
from holdfast.policy.recovery.survivors import HeldState, RejectedStep
from holdfast.training.engine.build import (
    TrainingSession,
    build_engine,
    connect_settings,
    make_session,
)
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.vote import StepVerdict
from holdfast.training.recover.recover import GenerationEntry

logger = logging.getLogger(__name__)

_GROUP_WAIT_TIMEOUT_S = 1800.0  # seconds that bound every wait in a group; a halt ends them before


class HeldSession:
    """A process's training session, which may lack its state, or be absent altogether.

    build      a session of the present generation, without values
    recover    go into the next generation with the state that the survivors hold between them
    discard    leave the old generation without the state
    report     tell what this process could continue from

    step: the state is that after this step. has_state: the session's state has its values.
    is_live: the state came from the generation before, not from a checkpoint. verdict: of the step
    that this generation continued from.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.session: TrainingSession | None = None
        self.has_state = False
        self.is_live = False
        self.verdict: StepVerdict | None = None

    @property
    def current(self) -> TrainingSession:
        if self.session is None:
            raise RuntimeError("begin() comes first, and nothing after close() or a failed adopt()")
        return self.session

    @property
    def engine(self) -> StepEngine | None:
        """The session's engine. A failed recovery may have taken it out of its session."""
        return getattr(self.session, "engine", None)

    @property
    def is_usable(self) -> bool:
        """Return True if there is a state to continue from."""
        engine = self.engine
        return self.has_state and engine is not None and not engine.status.is_torn

    def build(self, setup: WorkerSetup, connection: GenerationConnection) -> None:
        """Connect the generation's groups, and build this rank's engine, without values. Raises
        LayoutError if their data takes a slow way without need."""
        store = connection.rendezvous.store
        try:
            self.session = _build_session(setup, connection.topology, connection.rank, store)
        except PeerLostError:
            setup.transport.log_unread()  # perhaps the backend says why
            raise
        setup.transport.refuse_slow(connection.topology, setup.config.layout)

    def recover(
        self,
        setup: WorkerSetup,
        connection: GenerationConnection,
        came_from: Sequence[int | None],
        before: Topology,
    ) -> None:
        """Enter the generation with the state that the survivors hold between them.

        Collective over the topology of `connection`. came_from: in ranks of `before`.
        """
        topology, rank, rendezvous = connection.topology, connection.rank, connection.rendezvous
        entry = GenerationEntry(
            setup.config if self.session is None else self.session.config,
            topology,
            rank,
            rendezvous.store,
            setup.device,
            before,
            came_from,
            dealer=dealer_of(topology, setup.config.layout.schedule),
            on_meeting=rendezvous.on_peers_met,
        )
        if self.session is not None:
            found = entry.recover(self.session, self.step)
        else:
            found = entry.join(setup.open_batches(), setup.task)
        # Take over the new generation's session, and emit events of the old one that
        # the journal may lack.
        self.session, self.step, self.has_state = found.session, found.step, True
        self.verdict, self.is_live = found.verdict, True
        for event in found.events:
            connection.reporter.emit(event)
        parts = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in found.phases.items())
        logger.info("goes on from step %d as rank %d: %s", found.step, connection.rank, parts)
        _report_waits(setup.open_batches(), connection)
        slow = setup.transport.find_slow(topology)
        if slow is not None and not setup.config.layout.allow_tcp:  # a run that trains continues
            reason = f"{slow.sentence}; {slow.advice}"
            connection.reporter.emit(SettingIgnored("layout.allow_tcp", reason, step=self.step))

    def discard(self, step: int) -> None:
        """Leave the old generation without the state. The next one continues from `step`."""
        session, self.session, self.has_state, self.is_live = self.session, None, False, False
        if session is not None and hasattr(session, "engine"):
            session.groups.abort()
            session.close()
            del session.engine, session.evaluator, session.groups, session
            gc.collect()  # the new model needs its room
        self.step = step

    def close(self) -> None:
        """Leave the present generation in an orderly way."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def report(
        self, generation: int, rank: int, kind: str, text: str, bad_step: RejectedStep | None
    ) -> HeldState:
        """Return the state that this process, which is `rank` of `generation`, could continue from.

        kind, text: why it stopped. bad_step: the step for which it stopped.
        """
        if not self.is_usable:
            return HeldState(generation, rank, self.step, None, True, kind, text, bad=bad_step)
        engine = self.current.engine
        groups, whole = engine.groups, engine.status.reduced_step
        place = (groups.topology.generation, groups.rank)
        # perhaps in a recovery that did not come to its end
        applied = engine.status.applied_step or self.step
        return HeldState(generation, rank, applied, whole, False, kind, text, place, bad_step)


def _build_session(
    setup: WorkerSetup, topology: Topology, rank: int, store: HttpStore
) -> TrainingSession:
    """Connect the groups of `topology`, and build this rank's engine, without values."""
    config, device, task, batches = setup.config, setup.device, setup.task, setup.open_batches()
    settings = connect_settings(config, store, device, _GROUP_WAIT_TIMEOUT_S)
    groups = connect(settings, topology, rank)
    try:
        # The weights of the replicas may differ.
        dealer = dealer_of(topology, config.layout.schedule)
        engine = build_engine(config, groups, device, dealer=dealer, task=task)
    except BaseException:
        groups.abort()
        groups.close()
        raise
    return make_session(config, engine, batches, device, task)


def _report_waits(batches: object, connection: GenerationConnection) -> None:
    """Have long waits for the dataset's shards reported to the run."""
    if isinstance(batches, Batches) and (cache := batches.dataset.cache) is not None:
        rank, reporter = connection.rank, connection.reporter
        cache.on_wait = lambda key, why: reporter.emit(ShardAwaited(rank, key, why))
