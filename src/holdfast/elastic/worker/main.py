"""What a worker does between its fork and its exit code.

    connect -> build -> restore (a committed checkpoint, or initial weights) -> train -> leave

The training loop knows three protocols (`train/protocols.py`); here they meet this process: events
go to the agent through the reporter, state goes into the mover's arena, and the agent's wishes
come back with its answers. Nothing here writes to a disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.checkpoint.capture import Capturer, Skipped
from holdfast.checkpoint.mover_client import SETTLE_SLICE, MoverClient
from holdfast.checkpoint.restore import Checkpoint
from holdfast.config.run import RunConfig
from holdfast.data.batch import Batches
from holdfast.data.dataset import Dataset
from holdfast.elastic import exits
from holdfast.elastic.boot import WorkerBoot
from holdfast.elastic.worker.reporter import Reporter
from holdfast.elastic.worker.store import HttpStore
from holdfast.errors import FencedError, NonFiniteError, PeerLostError
from holdfast.events import (
    CheckpointCaptured,
    CheckpointRestored,
    CheckpointSkipped,
    WorkerReady,
)
from holdfast.spec.boxes import Box
from holdfast.spec.order import BatchSchedule
from holdfast.spec.state import state_table
from holdfast.train.build import Session, build
from holdfast.train.precision import same_products_on_any_threads
from holdfast.train.runner import Outcome
from holdfast.train.runner import run as train
from holdfast.train.state import LocalTensor
from holdfast.train.vote import Wishes
from holdfast.wire.client import Client
from holdfast.wire.runstore import FolderStore
from holdfast.wire.secret import Secret


def run(boot: WorkerBoot, secret: Secret) -> int:
    """Take part in one generation; returns the exit code that tells the agent how it ended."""
    same_products_on_any_threads()
    config = RunConfig.model_validate(boot.config)
    client = Client(boot.agent, secret, boot.generation)
    reporter = Reporter(client, boot.rank, heartbeat=boot.heartbeat_seconds, on_error=_complain)
    reporter.start()
    try:
        outcome = _take_part(boot, secret, config, HttpStore(client), reporter)
    except PeerLostError as error:
        return _end(reporter, exits.PEER_LOST, error)
    except FencedError as error:
        return _end(reporter, exits.FENCED, error)
    except NonFiniteError as error:
        return _end(reporter, exits.NON_FINITE, error)
    if outcome.unsaved is not None:
        print(f"the state after step {outcome.step} is not durable: {outcome.unsaved}", flush=True)
    reporter.outcome(outcome.kind, outcome.step, outcome.unsaved)
    reporter.close()
    return exits.FENCED if reporter.fenced else exits.DONE


def _take_part(
    boot: WorkerBoot, secret: Secret, config: RunConfig, store: HttpStore, reporter: Reporter
) -> Outcome:
    topology = boot.placed()
    device = torch.device(boot.device)
    dataset = Dataset.open(boot.dataset)
    batches = Batches(dataset, config.data, config.train, config.seed)
    session = build(config, batches, topology, boot.rank, store, device)
    try:
        _restore(boot, session, reporter)
        table = state_table(config.model, config.train.precision)
        tensors = {local.name: local.tensor for local in session.engine.state()}
        capturer = Capturer(
            MoverClient(boot.mover_socket, secret, boot.generation), topology, table, boot.rank,
            tensors, run=config.name, slots=config.checkpoint.slots,
        )  # fmt: skip
        saver = ArenaSaver(capturer, reporter, boot.rank, config)
        reporter.emit(WorkerReady(boot.rank, time.monotonic() - boot.forked, step=boot.start_step))
        with session.loader(boot.start_step) as loader:
            return train(
                session.engine, loader, AgentMembership(reporter), reporter, saver,
                session.evaluator, config, rank=boot.rank, start_step=boot.start_step,
            )  # fmt: skip
    finally:
        session.close()


def _restore(boot: WorkerBoot, session: Session, reporter: Reporter) -> None:
    """The state after `boot.start_step`: read by boxes from the commit, or made from the seed.

    Raises CorruptError when a byte has changed since the checkpoint was verified: the next
    generation then begins from an older one.
    """
    if boot.restore_key is None:
        session.engine.initialise(session.config.seed)
        return
    begun = time.monotonic()
    checkpoint = Checkpoint.open(FolderStore(boot.run_folder), boot.restore_key)

    def read(box: Box, out: Tensor) -> None:
        reporter.progress(boot.start_step, "restore")
        checkpoint.read(box, out.view(-1).view(torch.uint8).numpy().data)

    session.engine.load(read)
    reporter.emit(
        CheckpointRestored(
            boot.rank, boot.restore_key, checkpoint.bytes_read, time.monotonic() - begun,
            step=boot.start_step,
        )
    )  # fmt: skip


class AgentMembership:
    """What the agent wishes, as of its last answer: asked without waiting."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def wishes(self, step: int) -> Wishes:
        """Raises FencedError when a newer generation has been opened: this step must not be."""
        if self._reporter.fenced:
            raise FencedError(f"a newer generation began before step {step} was voted on")
        return Wishes(stop=self._reporter.wishes.stop)


class ArenaSaver:
    """Snapshots into the mover's arena, announced in order behind the events of their steps."""

    def __init__(
        self, capturer: Capturer, reporter: Reporter, rank: int, config: RunConfig
    ) -> None:
        self._capturer, self._reporter, self._rank = capturer, reporter, rank
        self._schedule = BatchSchedule(
            config.train.batch_size,
            [(stage.from_step, stage.batch_size) for stage in config.train.batch_warmup],
        )

    def capture(self, step: int, state: Sequence[LocalTensor], wait: float) -> bool:
        """`state` is what the capturer was made with: its storage stays the same."""
        made = self._capturer.capture(step, wait)
        if isinstance(made, Skipped):
            self._reporter.emit(CheckpointSkipped(self._rank, made.reason, step=step))
            return False
        event = CheckpointCaptured(self._rank, made.seconds, made.bytes, step=step)
        self._reporter.emit(event)
        return True

    def announce(self, step: int, meta: Mapping[str, Any]) -> None:
        """Runs on the reporter's thread, once everything before it is in the journal."""
        position = self._schedule.position(step + 1)

        def tell() -> None:
            skipped = self._capturer.announce(step, {**meta, "position": position})
            if skipped is not None:
                self._reporter.emit(CheckpointSkipped(self._rank, skipped.reason, step=step))

        self._reporter.then(tell)

    def settle(self, step: int, seconds: float) -> str | None:
        """A slow disk is not a hang: progress is reported for as long as this waits."""
        deadline = time.monotonic() + seconds

        def alive() -> None:
            self._reporter.progress(step, "save")

        while not self._reporter.flush(min(SETTLE_SLICE, deadline - time.monotonic())):
            if self._reporter.fenced or time.monotonic() >= deadline:
                return "the agent could not store the last reports"
            alive()
        return self._capturer.settle(step, max(0.0, deadline - time.monotonic()), alive)


def _end(reporter: Reporter, code: int, error: BaseException) -> int:
    """Leave with a reason: into the log, and what was reported before it to the agent."""
    print(f"{type(error).__name__}: {error}", flush=True)
    reporter.close(2.0)
    return code


def _complain(error: BaseException) -> None:
    print(f"reporter: {type(error).__name__}: {error}", flush=True)
