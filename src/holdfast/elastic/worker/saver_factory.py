"""Makes a worker's saver for one generation: the mover's arena, the capturer, and the saver."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.checkpoint.capture.capturer import Capturer, SkippedCapture
from holdfast.checkpoint.capture.copy_plan import local_part
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.config.run import RunConfig
from holdfast.core.sharding.state_table import state_table
from holdfast.elastic.worker.checkpointer import (
    LateSaver,
    SnapshotSaver,
    make_with_fewer_slots,
    retry_until_mover_is_up,
)
from holdfast.elastic.worker.commands import GenerationHalts
from holdfast.elastic.worker.reporter import AgentReporter
from holdfast.events import WorkerReady
from holdfast.layout import Topology
from holdfast.train.state import LocalTensor
from holdfast.wire.secret import Secret

_MOVER_EXPECT_TIMEOUT_S = 20.0
"""Seconds that the mover gets to learn of a generation that its agent announces to all at once."""


class SaverListener(Protocol):
    """Learns of what a saver could not do."""

    def on_capture_skipped(self, skipped: SkippedCapture) -> None:
        """Note that a snapshot was not captured."""

    def on_setting_ignored(self, key: str, reason: str) -> None:
        """Note that a setting could not be followed."""


@dataclass(frozen=True)
class SaverFactory:
    """Makes the saver of one generation, which refers to the state.

    step: the state is that after this step.
    has_released_old_memory: an older generation's capturer of this process has been closed.
    """

    config: RunConfig
    mover_socket: str
    secret: Secret
    topology: Topology
    rank: int
    step: int
    reporter: AgentReporter
    halts: GenerationHalts
    listener: SaverListener
    has_released_old_memory: bool

    def make(
        self, state: Sequence[LocalTensor], begun_at: float, *, in_background: bool
    ) -> SnapshotSaver | LateSaver:
        """Make an arena for the state, and report the worker as ready then.

        in_background: make it while the first step computes, if the agent sends commands.
        """
        tensors = {local.name: local_part(local.tensor) for local in state}
        mover = MoverClient(
            self.mover_socket,
            self.secret,
            self.topology.generation,
            arena_wait_s=_MOVER_EXPECT_TIMEOUT_S * in_background,
        )
        table = state_table(self.config.model, self.config.train.precision)

        def make_capturer(slots: int) -> Capturer:
            return Capturer(
                mover,
                self.topology,
                table,
                self.rank,
                tensors,
                run=self.config.name,
                slots=slots,
                has_released_old_memory=self.has_released_old_memory,
            )

        def connect() -> Capturer:
            return make_with_fewer_slots(
                make_capturer, self.config.checkpoint, self.listener.on_setting_ignored
            )

        def equip() -> SnapshotSaver:
            first = (
                retry_until_mover_is_up(connect, self.halts.wait)
                if self.halts.takes_commands
                else connect()
            )
            capturer = ReconnectingCapturer(first, connect, self.listener.on_capture_skipped)
            saver = SnapshotSaver(capturer, self.reporter, self.rank, self.config, self.halts.check)
            ready = WorkerReady(self.rank, time.monotonic() - begun_at, step=self.step)
            self.reporter.emit(ready)
            return saver

        if in_background and self.halts.takes_commands:
            return LateSaver(
                equip, self.listener.on_capture_skipped, self.reporter, self.halts.check
            )
        return equip()
