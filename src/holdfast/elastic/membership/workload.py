"""The node's work as the role loop (`role_loop`) sees it; `node_runner` implements it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import HungWorker, StallReport
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.protocol.worker_pace import WorkerPace
from holdfast.policy.membership.transitions import NodeStage


class Workload(Protocol):
    """This node's part in a generation. Every heartbeat reports `generation`, `stage` and
    `node_outcome`; `state_changed` is set whenever one of them has changed."""

    state_changed: asyncio.Event

    @property
    def generation(self) -> int: ...

    @property
    def stage(self) -> NodeStage: ...

    @property
    def node_outcome(self) -> NodeOutcome: ...

    @property
    def ready_workers(self) -> int | None:
        """Places with a process that works or could at once; None if not known."""
        ...

    def on_outside_generation(self) -> None:
        """Note that the other nodes work without this one; every heartbeat's answer repeats it."""
        ...

    def start_generation(
        self, generation: int, record: GenerationRecord, start_state: StartState
    ) -> None:
        """Take part in a newer generation, which begins from `start_state`. Returns at once, as
        `halt_generation` and `on_run_ended` do."""
        ...

    def halt_generation(self, generation: int, reason: str, *, at_step_end: bool) -> None: ...

    def on_run_ended(self, end_message: str) -> None: ...

    @property
    def stalled_workers(self) -> StallReport | None:
        """The hang monitor's report on the workers here without progress; None if there are
        none."""
        ...

    @property
    def worker_paces(self) -> tuple[WorkerPace, ...]:
        """Seconds that the workers here took for their microbatches (`WorkerGroup.take_paces`); ()
        if there is nothing to report now."""
        ...

    def handle_hung_workers(self, generation: int, hung_workers: Sequence[HungWorker]) -> None:
        """Take the coordinator's list of hung workers on this node."""
        ...
