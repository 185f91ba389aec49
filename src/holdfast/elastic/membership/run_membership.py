"""One agent's membership of the run: what the parts of its role loop share and change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.protocol.coordinator_messages import (
    Heartbeat,
    HeartbeatReply,
    JoinRequest,
    StartState,
    WorkerPace,
)
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.hung_worker import HungWorker, StallReport
from holdfast.policy.membership import election
from holdfast.policy.membership.election import AgentState, ElectionTimeouts, LackedMajority, Role
from holdfast.policy.membership.transitions import NodeCommand, NodeStage
from holdfast.wire.waiting import wait_event


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


logger = logging.getLogger(__name__)


class RunMembership:
    """One agent's membership of the run: its place in the election, its coordinator and its peers.

    Lives in one event loop.
    """

    def __init__(self, name: str, workload: Workload, timeouts: ElectionTimeouts) -> None:
        self.state = AgentState(name)
        self.workload, self.timeouts = workload, timeouts
        self.coordinator: Coordinator | None = None
        """The coordinator in this process, if this agent leads."""
        self.leave_within_s = 0.0
        """Seconds until this node leaves the run; 0: it stays."""
        self.aside_until = 0.0
        """Moment until which the run is to continue without this node's workers."""
        self.has_replacement = False
        """True if free places elsewhere can take this node's workers."""
        self.lacked_majority: LackedMajority | None = None
        """Set while this agent misses its coordinator and reaches no majority."""
        self.agent_addresses: Mapping[str, str] = {}
        """Of the newest generation: name -> address."""
        self.run_end: tuple[str, str] | None = None
        """Verdict and kind, once the coordinator has said that the run is over."""

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def set_state(self, state: AgentState) -> None:
        """Enter a state of the election, unless this agent has left the run."""
        if self.state.role is Role.SHUTDOWN:
            return
        if state.role is not self.state.role:
            logger.info("role %s in term %d", state.role.value, state.term)
        self.state = state

    def leave_run(self) -> None:
        """Leave the run: follow no coordinator any more."""
        self.state = election.shut_down(self.state)
        self.workload.state_changed.set()

    async def sleep_until_change(self, seconds: float) -> None:
        """Sleep until something changes on this node, for `seconds` at most."""
        await wait_event(self.workload.state_changed, seconds)

    async def ask_local_coordinator(self, request: JoinRequest | Heartbeat) -> HeartbeatReply:
        """Return the answer of the coordinator in this process to a request to join or a heartbeat;
        a refusal if there is none."""
        coordinator = self.coordinator
        if coordinator is None:
            return HeartbeatReply(self.state.term, NodeCommand.REFUSE.value)
        if isinstance(request, JoinRequest):
            return await coordinator.handle_join(0, request)
        return await coordinator.handle_heartbeat(0, request)
