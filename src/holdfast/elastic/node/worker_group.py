"""The workers of one generation on this node: their events, and the outcome of the generation.

The first cause sets the outcome, once. Its consequences are not reported as losses: peers that stop
because one was lost, workers that are killed. A worker that dies by itself while the other workers
stop is reported.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.config.cluster import ClusterConfig
from holdfast.elastic.event_log import Board, Say
from holdfast.elastic.node.children import last_lines
from holdfast.elastic.node.hang_monitor import Lookout, Watch
from holdfast.elastic.node.worker_status import Member, Members
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.generation_outcome import Failed, Finished, Left, Lost, Verdict
from holdfast.elastic.protocol.hung_worker import NOBODY, Blame
from holdfast.events import (
    Event,
    NonFinite,
    StepDone,
    WorkerHeld,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from holdfast.layout import Topology
from holdfast.policy.recovery.survivors import Held

_WORDS = 120
"""Most characters of a worker's reason. The rest, which may come from a library, is in its log."""
_CONSEQUENCES = (exit_codes.PEER_LOST, exit_codes.FENCED)
"""Exit codes of a worker that has only lost its peers."""


class Generation:
    """The workers of a generation, from the first start to the outcome. Lives in one event loop."""

    def __init__(
        self,
        topology: Topology,
        start_step: int,
        cluster: ClusterConfig,
        board: Board,
        say: Say,
        ready: Callable[[], None],
        voices: dict[str, int],
        node: str = "",
        watch: Watch | None = None,
    ) -> None:
        """Set up a generation without workers.

        Args:
            on_all_ready: called once, when every worker is about to compute its first step.
            node: if given, only this node's workers count; other nodes' agents have the rest.
            hang_hooks: the actions on a hung worker.
        """
        self._loop = asyncio.get_running_loop()
        self.number = topology.generation
        self._begun = start_step
        self.step = start_step  # the newest step that a worker reported done
        self.step_seconds = 0.0  # what the longest of its steps took
        here = [rank for rank, at in enumerate(topology.nodes) if node in ("", at)]
        self.ranks = tuple(here)
        self.members = Members(topology.generation, len(here), voices)
        self.verdict: asyncio.Future[Verdict] = self._loop.create_future()
        self.topology = topology
        self._cluster = cluster
        self._board = board
        self._say = say
        self._ready = ready
        self._watch = watch or Watch()
        self.lookout = Lookout(
            self.members, topology.world_size, self._watch.steps, cluster.progress_seconds,
            cluster.compare, compiles=self._watch.compiles,
        )  # fmt: skip
        self._non_finite: NonFinite | None = None

    @property
    def has_stepped(self) -> bool:
        """Return True if a worker here has completed a step of this generation."""
        return any(member.step > self._begun + 1 for member in self.members)

    # --- beginning and end ----------------------------------------------------------------
    def expect(self, processes: Mapping[int, int]) -> None:
        """Register the workers before any of them receives its begin command.

        pids: of the processes that stay, by rank.
        """
        for rank in self.ranks:
            self.members.expect(rank, self._loop.time(), processes.get(rank, 0))

    def decide(self, verdict: Verdict) -> None:
        """Set the outcome, unless it is set: the first counts."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)

    @property
    def ended(self) -> Verdict | None:
        """Return the outcome, if this node found it."""
        verdict = self.verdict
        return verdict.result() if verdict.done() and not verdict.cancelled() else None

    # --- news of processes ------------------------------------------------------------------
    def joined(self, rank: int, pid: int) -> None:
        self.members.joined(rank, pid)
        node = self.topology.nodes[rank]
        self._board.emit("agent", WorkerStarted(rank, pid, node, step=self.step))

    def exited(self, rank: int, pid: int, code: int, log: Path, why: str) -> None:
        """Handle a worker's exit; `kill_reason`, if the process manager gave the worker up."""
        member = self.members.exited(rank, pid, code)
        if member is None or member.lost:
            return
        if not self.verdict.done():
            self._judge(member, log)
        elif why:
            self._report_loss(member, why, "halt")
        elif member.outcome is None and code not in _CONSEQUENCES and self._lives_on:
            self._lose(member, log, "exit")  # a second fault

    @property
    def _lives_on(self) -> bool:
        """Return True if the survivors continue, so that only lost workers may exit."""
        elsewhere = self.verdict.cancelled()  # nobody waits for it any more: others ended it
        lost = elsewhere or isinstance(self.ended, Lost)
        return lost and self._cluster.recovery == "live"

    def held(self, rank: int, held: Held) -> None:
        """Record that a worker has stopped, by itself or on command, and waits."""
        member = self.members[rank]
        member.held = held
        why = (held.text or held.kind)[:_WORDS]
        event = WorkerHeld(rank, held.applied, held.whole, why, step=self.step)
        self._board.emit("agent", event)
        if not self.verdict.done():
            self._judge_held(member, held)

    def _judge_held(self, member: Member, held: Held) -> None:
        """Derive the outcome from a worker that has stopped by itself."""
        cause = f"worker {member.rank}: {held.text or held.kind}"
        beat = self._cluster.heartbeat_seconds
        match held.kind:
            case "non_finite" | "loss_jump":
                self.decide(Lost(held.kind, held.text))
            case "rotten":
                said = held.text or "it could not be read"
                self.decide(Lost("rot", f"worker {member.rank}: {said}", said))
            case "error":
                self.decide(Lost("error", cause, ranks=frozenset({member.rank})))
            case "paused":
                return  # it was asked to, with all the others
            case _:
                # The worker that really died is reported at the same moment. Only if none is, this
                # worker's report counts.
                verdict = Lost("peer_lost", cause, ranks=frozenset({member.rank}))
                self._loop.call_later(beat, self.decide, verdict)

    def _judge(self, member: Member, log: Path) -> None:
        """Derive the outcome from a worker that exited while its generation ran."""
        if member.outcome is not None:
            if not self.members.alive:
                self.decide(self._common_outcome())
            return
        match member.code:
            case exit_codes.USER:
                self.decide(
                    Failed(last_lines(log, 1) or "a worker refused to start", exit_codes.USER)
                )
            case exit_codes.NON_FINITE:
                self.decide(Failed(self._non_finite_sentence(member)))
            case exit_codes.ROTTEN:
                said = last_lines(log, 1).partition(": ")[2] or "it could not be read"
                self.decide(Lost("rot", f"worker {member.rank}: {said}", said))
            case exit_codes.PEER_LOST:
                # The worker that really died is reported at the same moment. Only if none is, this
                # worker's report counts.
                beat = self._cluster.heartbeat_seconds
                self._loop.call_later(beat, self._lose_unless_over, member, log)
            case _:
                self._lose(member, log, "exit")

    def _lose_unless_over(self, member: Member, log: Path) -> None:
        if not self.verdict.done():
            self._lose(member, log, "peer")

    def _lose(self, member: Member, log: Path, noticed_by: str) -> None:
        code = member.code if member.code is not None else -signal.SIGKILL
        cause = exit_codes.describe(code)
        if code in (exit_codes.CRASHED, exit_codes.DONE):
            cause = f"{cause}: {last_lines(log, 1) or 'it said nothing'}"
            self._say(f"worker {member.rank} ended; the last lines of {log}:")
            self._say(last_lines(log, 12))
        self._report_loss(member, cause, noticed_by)

    def _report_loss(
        self, member: Member, cause: str, noticed_by: str, reason: str = "worker_lost"
    ) -> None:
        member.lost = True
        node = self.topology.nodes[member.rank]
        event = WorkerLost(member.rank, member.pid, cause, noticed_by, node, step=self.step)
        self._board.emit("agent", event)
        self.decide(Lost(reason, f"worker {member.rank}: {cause}", ranks=frozenset({member.rank})))

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
        """Process a worker's report; return its new events. Raises KeyError, ValueError."""
        rank = int(body["rank"])
        now = self._loop.time()
        events = self.members.report(body, now)
        self.lookout.heard(self.members[rank])
        for event in events:
            match event:
                case StepDone():
                    self.step = max(self.step, event.step)  # it may be told once more
                    self.step_seconds = max(self.step_seconds, event.seconds)
                case NonFinite():
                    self._non_finite = event
                case WorkerReady():
                    if self.members.ready(rank):
                        self._ready()
            self._board.emit(f"rank{rank}", event)
        return events

    def answered(self, rank: int) -> None:
        """Note that a worker's report is answered."""
        self.members.answered(rank, self._loop.time())

    # --- hung workers ---------------------------------------------------------------------
    def watch_progress(self, now: float) -> None:
        """Check for hung workers; called at every tick. A hung worker ends the generation."""
        over = self.verdict.done()
        for blame in self.lookout.tick(now, self._cluster.heartbeat_seconds, over):
            self._give_up(blame)
        if self.ended is None and self.lookout.due(now):
            self._watch.tell()

    def still(self) -> dict[str, Any]:
        """Return the stall report for the coordinator; {} if no worker is stalled."""
        return {} if self.ended is not None else self.lookout.told(self._loop.time())

    def paces(self) -> list[list[Any]]:
        """Return what each worker here has computed since the last call.

        Each row has the process, its position, seconds and microbatches. Workers with equal
        positions do the same work. The first steps do not count.
        """
        if not self._cluster.compare or not self.has_stepped or self.verdict.done():
            return []
        rows = []
        for member in self.members.alive:
            (seconds, done), (before, passed) = member.pace, member.paced
            member.paced = member.pace
            if done > passed > 0:
                replica = self.topology.replica_of(member.rank)
                place = f"{replica.kind} {replica.ranks.index(member.rank)}"
                rows.append([member.pid, place, round(seconds - before, 6), done - passed])
        return rows

    def blame(self, blamed: Iterable[Blame]) -> None:
        """Give up workers that the coordinator declares hung, if they still are."""
        for one in blamed:
            if not self.verdict.done() and self.lookout.confirms(one):
                self._give_up(one)

    def _give_up(self, blame: Blame) -> None:
        """Report a worker, kill it, and end the generation. If the generation has ended, only kill
        it."""
        if blame.rank == NOBODY:
            several = self.topology.world_size > 1
            what = "all workers wait for one another" if several else "the worker makes no progress"
            self.decide(Lost("hang", f"{what} for {blame.seconds:.1f} s"))
            return
        member = self.members[blame.rank]
        cause = blame.cause(member.phase)
        if not self.verdict.done() and not member.lost:
            self._report_loss(member, cause, blame.sign, "hang")
        self._watch.kill(member.pid, cause)
