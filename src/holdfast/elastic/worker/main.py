"""What a worker does between its fork and its exit code.

    connect -> build -> restore (a committed checkpoint, or initial weights) -> train -> leave
                                                                   '-> adopt -'

The training loop knows three protocols (`train/protocols.py`); here they meet this process: events
go to the agent through the reporter, state goes into the mover's arena, and the agent's wishes
come back with its answers. Nothing here writes to a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from holdfast.checkpoint.capture import Capturer, Skipped
from holdfast.checkpoint.mover_client import SETTLE_SLICE, MoverClient, MoverGoneError
from holdfast.checkpoint.pieces import Cost
from holdfast.config.checkpoint import CheckpointConfig
from holdfast.config.run import RunConfig
from holdfast.data.batch import Batches
from holdfast.data.dataset import Dataset
from holdfast.elastic import exits
from holdfast.elastic.boot import WorkerBoot
from holdfast.elastic.worker.reporter import Reporter
from holdfast.elastic.worker.restoring import RottenError, restore
from holdfast.elastic.worker.store import HttpStore
from holdfast.errors import (
    FencedError,
    HoldfastError,
    NonFiniteError,
    PeerLostError,
    UserError,
)
from holdfast.events import (
    CheckpointCaptured,
    CheckpointSkipped,
    SettingIgnored,
    WorkerReady,
)
from holdfast.layout import Topology
from holdfast.policy.classes import Classes
from holdfast.policy.hazard import Hazard
from holdfast.policy.save import Into
from holdfast.policy.tiers import BUCKET, DISK, PEERS
from holdfast.spec.order import BatchSchedule
from holdfast.spec.state import state_table
from holdfast.train.adopt import adopt
from holdfast.train.build import Session, build
from holdfast.train.cadence import Known
from holdfast.train.memory import keep_freed_memory
from holdfast.train.precision import same_products_on_any_threads
from holdfast.train.runner import Outcome
from holdfast.train.runner import run as train
from holdfast.train.state import LocalTensor
from holdfast.train.vote import Wishes
from holdfast.wire.client import Client
from holdfast.wire.secret import Secret

Made = TypeVar("Made")

_LAST_WORDS = 2.0
"""Seconds that a worker tries to be heard in a generation that is over."""


def run(boot: WorkerBoot, secret: Secret) -> int:
    """Take part in one generation; returns the exit code that tells the agent how it ended."""
    same_products_on_any_threads()
    if boot.device == "cpu":
        keep_freed_memory()
    worker = Worker(boot, secret)
    try:
        try:
            worker.begin()
            outcome = worker.train()
        finally:
            worker.close()
    except PeerLostError as error:
        return _end(worker.reporter, exits.PEER_LOST, error)
    except FencedError as error:
        return _end(worker.reporter, exits.FENCED, error)
    except NonFiniteError as error:
        return _end(worker.reporter, exits.NON_FINITE, error)
    except RottenError as error:
        return _end(worker.reporter, exits.ROTTEN, error)
    if outcome.unsaved is not None:
        print(f"the state after step {outcome.step} is not durable: {outcome.unsaved}", flush=True)
    worker.reporter.outcome(outcome.kind, outcome.step, outcome.unsaved)
    worker.reporter.close()
    return exits.FENCED if worker.reporter.fenced else exits.DONE


class Worker:
    """One process of a run, and what it holds, over all generations that it takes part in.

    begin     once: connect, build, restore a checkpoint or make initial weights
    train     until the run is finished, somebody wishes to leave, or a peer is lost
    adopt     join the next generation with the state as it is; then `train` again

    step: the state is that after this step. reporter: this process's voice in the present
    generation; each has its own, because the agent hears only the newest. Belongs to one thread.
    """

    def __init__(self, boot: WorkerBoot, secret: Secret) -> None:
        self.step = boot.start_step
        self._boot, self._secret = boot, secret
        self._config = RunConfig.model_validate(boot.config)
        self._session: Session | None = None
        self._saver: ArenaSaver | None = None
        self._speak(boot.placed(), boot.rank)

    def begin(self) -> None:
        """Ready to compute the first step of the generation that this process was forked for."""
        config, boot = self._config, self._boot
        batches = Batches(Dataset.open(boot.dataset), config.data, config.train, config.seed)
        self._session = build(
            config, batches, self._topology, self._rank, self._store, torch.device(boot.device)
        )
        restore(boot, self._session, self.reporter, self._secret)
        self._equip(boot.forked)

    def adopt(self, topology: Topology, rank: int, came_from: Sequence[int | None]) -> None:
        """Become `rank` of `topology`, which is that of a newer generation, and keep the state.

        Collective over `topology`, of which all processes hold the state after the same step. The
        agent and the mover must have begun the generation. came_from: see `spec.moves.transfers`.
        Raises LayoutError, PeerLostError and FencedError; the state is lost to this process then.
        """
        begun = time.monotonic()
        session, self._session = self._present, None
        self._let_go()
        self.reporter.close(_LAST_WORDS)
        before = self._client, self._store  # the old groups need theirs until they are closed
        self._speak(topology, rank)
        self.reporter.progress(self.step, "adopt")
        self._session = adopt(session, topology, rank, self._store, came_from, step=self.step)
        before[0].close()
        self._equip(begun)

    def train(self) -> Outcome:
        """From the state after `step` on. Raises as `train.runner.run` does; `step` is right then
        too, and the state is whole unless a replica was sharded over a process that is gone."""
        session, saver = self._present, self._saver
        assert saver is not None, "the capturer is made with the session"
        try:
            with session.loader(self.step) as loader:
                return train(
                    session.engine, loader, AgentMembership(self.reporter), self.reporter, saver,
                    session.evaluator, self._config, rank=self._rank, start_step=self.step,
                    known=_known(self._boot), durations=lambda: self.reporter.wishes.durations,
                )  # fmt: skip
        finally:
            saver.fence()  # the snapshot of a step that is complete is worth having in any case
            self.step = session.engine.applied or self.step

    def close(self) -> None:
        """Leave the present generation in an orderly way. The reporter can still be heard."""
        self._let_go()
        if self._session is not None:
            self._session.close()
            self._session = None

    # --- parts --------------------------------------------------------------------------------
    def _let_go(self) -> None:
        """Of the saver, which refers to the state."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    @property
    def _present(self) -> Session:
        if self._session is None:
            raise RuntimeError("begin() comes first, and nothing after close() or a failed adopt()")
        return self._session

    def _speak(self, topology: Topology, rank: int) -> None:
        """Connect to the agent as `rank` of a generation."""
        boot = self._boot
        self._topology, self._rank = topology, rank
        self._client = Client(boot.agent, self._secret, topology.generation)
        self._store = HttpStore(self._client)
        self.reporter = Reporter(
            self._client, rank, heartbeat=boot.heartbeat_seconds, on_error=_complain
        )
        self.reporter.start()

    def _equip(self, begun: float) -> None:
        """An arena for the state of the session, which is ready then."""
        boot, config, session = self._boot, self._config, self._present
        tensors = {local.name: local.tensor for local in session.engine.state()}
        mover = MoverClient(boot.mover_socket, self._secret, self._topology.generation)
        table = state_table(config.model, config.train.precision)

        def make(slots: int) -> Capturer:
            return Capturer(
                mover, self._topology, table, self._rank, tensors, run=config.name, slots=slots
            )

        capturer = where_there_is_room(make, config.checkpoint, self._ignored)
        self._saver = ArenaSaver(capturer, self.reporter, self._rank, config)
        seconds = time.monotonic() - begun
        self.reporter.emit(WorkerReady(self._rank, seconds, step=self.step))

    def _ignored(self, key: str, reason: str) -> None:
        self.reporter.emit(SettingIgnored(key, reason, step=self.step))


def where_there_is_room(
    make: Callable[[int], Made], rules: CheckpointConfig, ignored: Callable[[str, str], None]
) -> Made:
    """With as many slots as the run file asks for, or one fewer where that is left to us."""
    slots = rules.most_slots
    try:
        return make(slots)
    except HoldfastError as error:
        other = isinstance(error, FencedError | MoverGoneError | UserError)
        if other or rules.slots != "auto" or slots == 2:
            raise
        ignored("checkpoint.slots", f"{error}; with two, some saves will wait for each other")
        return make(2)


class AgentMembership:
    """What the agent wishes, as of its last answer: asked without waiting."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._done = 0  # the newest request that has been passed on

    def wishes(self, step: int) -> Wishes:
        """Raises FencedError when a newer generation has been opened: this step must not be."""
        if self._reporter.fenced:
            raise FencedError(f"a newer generation began before step {step} was voted on")
        told = self._reporter.wishes
        into, self._done = (told.into if told.request > self._done else ()), told.request
        return Wishes(
            stop=told.stop, brief=told.brief, save=DISK in into, remember=PEERS in into,
            copy=PEERS in into, upload=BUCKET in into,
        )  # fmt: skip


class ArenaSaver:
    """Snapshots into the mover's arena, announced in order behind the events of their steps."""

    def __init__(
        self, capturer: Capturer, reporter: Reporter, rank: int, config: RunConfig
    ) -> None:
        self._capturer, self._reporter, self._rank = capturer, reporter, rank
        self._hidden = config.checkpoint.hidden
        self._schedule = BatchSchedule(
            config.train.batch_size,
            [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup],
        )

    def ready(self) -> bool:
        return self._capturer.ready()

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float, durable: bool) -> bool:
        """`state` is what the capturer was made with: its storage stays the same."""
        made = (self._capturer.begin if self._hidden else self._capturer.capture)(step, wait)
        if isinstance(made, Skipped):
            self._reporter.emit(CheckpointSkipped(self._rank, made.reason, step=step))
            return False

        def tell(cost: Cost) -> None:
            if cost.error is None:  # else the announcement will say that there is nothing to save
                event = CheckpointCaptured(
                    self._rank, cost.blocked, self._capturer.bytes, cost.copy, cost.fence, durable,
                    step=step,
                )  # fmt: skip
                self._reporter.emit(event)

        self._capturer.after(step, tell)
        return True

    def fence(self) -> float:
        return self._capturer.fence()

    def announce(self, step: int, meta: Mapping[str, Any], into: Into) -> None:
        """The mover is told on the reporter's thread, once everything before it is in the
        journal; that thread is asked when the copy is whole, so that it never waits for one."""
        position = self._schedule.position(step + 1)

        def tell() -> None:
            skipped = self._capturer.announce(
                step, {**meta, "position": position}, into.durable, into.copied, into.uploaded
            )
            if skipped is not None:
                self._reporter.emit(CheckpointSkipped(self._rank, skipped.reason, step=step))

        self._capturer.after(step, lambda cost: self._reporter.then(tell))

    def close(self) -> None:
        self._capturer.close()

    def settle(self, step: int, seconds: float, durable: bool = True) -> str | None:
        """A slow disk is not a hang: progress is reported for as long as this waits."""
        deadline = time.monotonic() + seconds
        self._capturer.fence()

        def alive() -> None:
            self._reporter.progress(step, "save")

        while not self._reporter.flush(min(SETTLE_SLICE, deadline - time.monotonic())):
            if self._reporter.fenced or time.monotonic() >= deadline:
                return "the agent could not store the last reports"
            alive()
        if not durable:
            return None  # the mover has it: what becomes of it the agent hears
        return self._capturer.settle(step, max(0.0, deadline - time.monotonic()), alive)


def _end(reporter: Reporter, code: int, error: BaseException) -> int:
    """Leave with a reason: into the log, and what was reported before it to the agent."""
    print(f"{type(error).__name__}: {error}", flush=True)
    reporter.close(2.0)
    return code


def _known(boot: WorkerBoot) -> Known:
    """What the agent has seen break."""
    hazard = None if boot.hazard is None else Hazard.from_json(boot.hazard)
    return Known(hazard, Classes(tuple(boot.classes)) if boot.classes else Classes())


def _complain(error: BaseException) -> None:
    print(f"reporter: {type(error).__name__}: {error}", flush=True)
