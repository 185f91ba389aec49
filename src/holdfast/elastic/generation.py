"""One generation while it lives: its workers, their news, and the verdict that ends it.

Whatever ends a generation sets its verdict, once: what follows (peers that fail because one was
lost, workers that are killed) is only the consequence, and is not reported as a loss.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.config.cluster import ClusterConfig
from holdfast.elastic import exits
from holdfast.elastic.board import Board, Say
from holdfast.elastic.boot import WorkerBoot
from holdfast.elastic.children import Template, last_lines
from holdfast.elastic.members import Member, Members
from holdfast.elastic.opening import worker_log
from holdfast.elastic.verdict import Failed, Finished, Left, Lost, Verdict
from holdfast.events import Event, NonFinite, StepDone, WorkerLost, WorkerReady, WorkerStarted
from holdfast.layout import Topology
from holdfast.wire.secret import Secret

CLEAR_SECONDS = 20.0
"""How long the killed workers of a broken generation are waited for."""


class Generation:
    """A numbered membership, from its first fork to its verdict. Lives in one event loop."""

    def __init__(
        self,
        topology: Topology,
        start_step: int,
        cluster: ClusterConfig,
        folder: Path,
        board: Board,
        say: Say,
        ready: Callable[[], None],
    ) -> None:
        """`ready` is called once, when every worker is about to compute its first step."""
        self._loop = asyncio.get_running_loop()
        self.number = topology.generation
        self.step = start_step  # the newest step that a worker reported done
        self.members = Members(topology.generation, topology.world_size)
        self.verdict: asyncio.Future[Verdict] = self._loop.create_future()
        self.topology = topology
        self._cluster = cluster
        self._folder = folder
        self._board = board
        self._say = say
        self._ready = ready
        self._cleared = asyncio.Event()
        self._non_finite: NonFinite | None = None

    # --- beginning and end ----------------------------------------------------------------
    async def fork(self, template: Template, boots: Sequence[WorkerBoot], secret: Secret) -> None:
        for boot in boots:
            self.members.expect(boot.rank, self._loop.time())
            await template.fork(boot, secret)

    def decide(self, verdict: Verdict) -> None:
        """The first verdict counts."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)

    async def clear(self, template: Template | None) -> None:
        """Nobody of the generation is left when this returns."""
        if template is not None and template.alive:
            await template.kill()
            if self.members.alive:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._cleared.wait(), CLEAR_SECONDS)
        self.members.kill()  # what a dead template could not kill
        self.members.close()

    # --- news from the template -----------------------------------------------------------
    def told(self, message: dict[str, Any]) -> None:
        """The template has forked a worker, or one has ended."""
        rank, pid = int(message["rank"]), int(message["pid"])
        if message["event"] == "forked":
            self.members.forked(rank, pid)
            node = self.topology.nodes[rank]
            self._board.emit("agent", WorkerStarted(rank, pid, node, step=self.step))
            return
        member = self.members.exited(rank, pid, int(message["code"]))
        if member is None:
            return
        if not self.members.alive:
            self._cleared.set()
        if not self.verdict.done():
            self._judge(member)

    def _judge(self, member: Member) -> None:
        """A worker has ended while its generation lived."""
        if member.outcome is not None:
            if not self.members.alive:
                self.decide(self._common_outcome())
            return
        match member.code:
            case exits.USER:
                log = worker_log(self._folder, self.number, member.rank)
                self.decide(Failed(last_lines(log, 1) or "a worker refused to start", exits.USER))
            case exits.NON_FINITE:
                self.decide(Failed(self._non_finite_sentence(member)))
            case exits.ROTTEN:
                log = worker_log(self._folder, self.number, member.rank)
                said = last_lines(log, 1).partition(": ")[2] or "it could not be read"
                self.decide(Lost("rot", f"worker {member.rank}: {said}", said))
            case exits.PEER_LOST:
                # The one who really died is reported in the same moment; only if nobody is
                # does this worker's word stand.
                beat = self._cluster.heartbeat_seconds
                self._loop.call_later(beat, self._lose, member, "peer")
            case _:
                self._lose(member, "exit")

    def _lose(self, member: Member, noticed_by: str) -> None:
        if self.verdict.done():
            return
        code = member.code if member.code is not None else -signal.SIGKILL
        cause = exits.describe(code)
        log = worker_log(self._folder, self.number, member.rank)
        if code in (exits.CRASHED, exits.DONE):
            cause = f"{cause}: {last_lines(log, 1) or 'it said nothing'}"
            self._say(f"worker {member.rank} ended; the last lines of {log}:")
            self._say(last_lines(log, 12))
        self._report_loss(member, cause, noticed_by, "worker_lost")

    def _report_loss(self, member: Member, cause: str, noticed_by: str, reason: str) -> None:
        self._board.emit(
            "agent", WorkerLost(member.rank, member.pid, cause, noticed_by, step=self.step)
        )
        self.decide(Lost(reason, f"worker {member.rank}: {cause}"))

    def _common_outcome(self) -> Verdict:
        outcomes = {member.outcome for member in self.members}
        if len(outcomes) > 1:
            return Lost("worker_lost", f"the workers ended differently: {outcomes}")
        ((kind, step),) = (outcome for outcome in outcomes if outcome is not None)
        unsaved = next((m.unsaved for m in self.members if m.unsaved is not None), None)
        return Finished(step, unsaved) if kind == "finished" else Left(step, unsaved)

    def _non_finite_sentence(self, member: Member) -> str:
        found = self._non_finite
        if found is None:
            return f"a loss or gradient is not finite on rank {member.rank}"
        return (
            f"step {found.step}: {found.parameter} is not finite on rank {found.rank}; the state "
            f"before that step is unharmed: try a lower train.optimizer.learning_rate"
        )

    # --- news from the workers ------------------------------------------------------------
    def report(self, body: dict[str, Any]) -> list[Event]:
        """Take a worker's report; the events in it that are new. Raises KeyError, ValueError."""
        rank = int(body["rank"])
        events = self.members.report(body, self._loop.time())
        for event in events:
            match event:
                case StepDone():
                    self.step = event.step
                case NonFinite():
                    self._non_finite = event
                case WorkerReady():
                    if self.members.ready(rank):
                        self._ready()
            self._board.emit(f"rank{rank}", event)
        return events

    def watch_progress(self, now: float) -> None:
        """Called at every tick: one that hangs is named, and ends the generation."""
        limit = self._cluster.progress_seconds
        hung = None if self.verdict.done() else self.members.hung(now, limit)
        if hung is not None:
            cause = f"no progress for {limit:g} s in step {hung.step}, {hung.phase}"
            self._report_loss(hung, cause, "progress", "hang")
