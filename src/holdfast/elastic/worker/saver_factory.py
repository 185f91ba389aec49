"""Makes a worker's saver for one generation: the mover's arena, the capturer, and the saver."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from holdfast.checkpoint.capture.capturer import Capturer, SkippedCapture
from holdfast.checkpoint.capture.copy_plan import local_part
from holdfast.checkpoint.capture.no_room_capturer import NoRoomCapturer
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.config.run import RunConfig
from holdfast.core.sharding.run_table import run_state_table
from holdfast.elastic.worker.checkpointer import (
    SnapshotSaver,
    make_unless_no_room,
    make_with_fewer_slots,
    retry_until_mover_is_up,
    wait_until_announced,
)
from holdfast.elastic.worker.generation_connection import GenerationConnection
from holdfast.elastic.worker.held_session import HeldSession
from holdfast.events import CheckpointSkipped, SettingIgnored, WorkerReady
from holdfast.parallel.comm.devices import describe_processor, near_numa_node
from holdfast.wire.secret import Secret

_MOVER_EXPECT_TIMEOUT_S = 20.0
"""Seconds that the mover gets to learn of a generation that its agent announces to all at once."""


@dataclass(frozen=True)
class SaverFactory:
    """Makes the saver of one generation, which refers to the state.

    held_session: the session whose state is saved. connection: of the saver's generation. device:
    what the worker computes on, for the journal.
    has_released_old_memory: an older generation's capturer of this process has been closed.
    """

    config: RunConfig
    mover_socket: str
    secret: Secret
    connection: GenerationConnection
    held_session: HeldSession
    device: str
    has_released_old_memory: bool

    def make(self, begun_at: float, *, in_background: bool) -> SnapshotSaver:
        """Make an arena for the state, and report the worker as ready then.

        in_background: make it while the first step computes.
        """
        topology, rank = self.connection.topology, self.connection.rank
        reporter, halts = self.connection.reporter, self.connection.halts
        step, state = self.held_session.step, self.held_session.current.engine.state()
        tensors = {local.name: local_part(local.tensor) for local in state}
        mover = MoverClient(
            self.mover_socket,
            self.secret,
            topology.generation,
            arena_wait_s=_MOVER_EXPECT_TIMEOUT_S * in_background,
        )
        table, device = run_state_table(self.config), self.held_session.current.device

        def make_capturer(slots: int) -> Capturer:
            what = mover, topology, table, rank, tensors
            return Capturer(
                *what,
                run=self.config.name,
                slots=slots,
                has_released_old_memory=self.has_released_old_memory,
                numa_node=near_numa_node(device),
            )

        told: set[str] = set()  # settings whose loss has been reported

        def on_setting_ignored(key: str, reason: str) -> None:
            if key not in told:
                told.add(key)
                self._on_setting_ignored(key, reason)

        def connect() -> Capturer:
            return make_with_fewer_slots(make_capturer, self.config.checkpoint, on_setting_ignored)

        def connect_once_announced() -> Capturer | NoRoomCapturer:
            # A halt ends this wait, however long the mover's disk takes.
            if in_background:
                wait_until_announced(mover.status, topology.generation, halts.wait)
            return make_unless_no_room(connect, on_setting_ignored)

        def connect_first() -> Capturer | NoRoomCapturer:
            first = retry_until_mover_is_up(connect_once_announced, halts.wait)
            self._report_ready(time.monotonic() - begun_at, step)
            return first

        capturer = ReconnectingCapturer(
            connect_first, connect, self._on_capture_skipped, in_background=in_background
        )
        return SnapshotSaver(capturer, reporter, rank, self.config, halts.check)

    def _report_ready(self, seconds: float, step: int) -> None:
        """Note that this worker trains from now on, `seconds` after its fork."""
        device = self.held_session.current.device
        event = WorkerReady(
            *(self.connection.rank, seconds, self.device, describe_processor(device)),
            threads=torch.get_num_threads(),
            step=step,
        )
        self.connection.reporter.emit(event)

    def _on_capture_skipped(self, skipped: SkippedCapture) -> None:
        """Note that a snapshot was not captured."""
        event = CheckpointSkipped(self.connection.rank, skipped.reason, step=skipped.step)
        self.connection.reporter.emit(event)

    def _on_setting_ignored(self, key: str, reason: str) -> None:
        """Note that a setting could not be followed."""
        self.connection.reporter.emit(SettingIgnored(key, reason, step=self.held_session.step))
