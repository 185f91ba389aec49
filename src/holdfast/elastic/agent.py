"""The agent: starts and watches the others, and decides when a generation is over.

It holds no training state and imports no torch, so it answers within milliseconds, and a run that
loses a worker needs nothing from it but a fork. One event loop runs everything:

    control (HTTP)     /report events and progress of workers, /store rendezvous, /term who is there
    health (HTTP)      /healthz, /metrics
    template, mover    their messages and their ends
    tick               progress watch; term watch

Whatever ends a generation sets its verdict, once; the loop in `_run` acts on it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover_client import MoverGoneError
from holdfast.checkpoint.service import Settings
from holdfast.config.run import RunConfig
from holdfast.elastic import exits, health
from holdfast.elastic.board import Board, Observer, Say
from holdfast.elastic.boot import DEFAULT_ENTRY
from holdfast.elastic.children import ChildFailedError, Template, last_lines
from holdfast.elastic.members import Member, Members
from holdfast.elastic.mover_link import MoverLink
from holdfast.elastic.opening import boots, plan_topology, worker_log
from holdfast.elastic.rendezvous import Rendezvous
from holdfast.elastic.verdict import Failed, Finished, Left, Lost, Verdict
from holdfast.errors import FencedError, HoldfastError, UserError
from holdfast.events import (
    CheckpointCommitted,
    Event,
    GenerationStarted,
    NonFinite,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
    StopRequested,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from holdfast.layout import Topology
from holdfast.plan.hardware import usable_cores
from holdfast.policy.restart import Restarts, RunState, advance, give_up
from holdfast.wire import lifeline
from holdfast.wire.auth import Verifier
from holdfast.wire.runstore import RunStore
from holdfast.wire.secret import Secret
from holdfast.wire.server import Guard, Listener, bind
from holdfast.wire.term import QUESTION, Term, newest_generation, open_generation

TERM_SECONDS = 2.0
"""How often the run store is asked whether another trainer has taken over."""

CLEAR_SECONDS = 20.0
"""How long the killed workers of a broken generation are waited for."""

LEFT_AT_ONCE = 130
"""Exit code after a second Ctrl-C: 128 + SIGINT, as a shell would say."""


class Agent:
    """One run on one node, from opening to exit code."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        secret: Secret,
        term: Term,
        control: socket.socket,
        *,
        folder: Path,
        config_hash: str = "",
        dataset_version: str = "",
        observers: Sequence[Observer] = (),
        render_metrics: Callable[[], bytes] = lambda: b"",
        say: Say = print,
        resume: str = "holdfast train",
        entry: str = DEFAULT_ENTRY,
    ) -> None:
        """`control` is the bound socket whose address `term` names; `folder` is the run folder
        that `store` stands for; `say` prints one line to the person; `resume` is the command that
        takes the run up again; `entry` is a worker's main function."""
        self._config, self._store, self._secret, self._term = config, store, secret, term
        self._control, self._folder = control, folder
        self._config_hash, self._dataset_version = config_hash, dataset_version
        self._render_metrics, self._say = render_metrics, say
        self._resume, self._entry = resume, entry
        self._node = platform.node() or "localhost"
        self._board = Board(store, observers, say)
        self._state = RunState.OPENING
        self._generation = 0
        self._members = Members(0, 0)
        self._restarts = Restarts()
        self._committed = 0
        self._step = 0
        self._stop: str | None = None
        self._leave_now = False
        self._non_finite: NonFinite | None = None
        self._template: Template | None = None

    def run(self) -> int:
        """Train until finished, stopped or given up. The exit code: 0, 1, 130.

        Raises UserError for what the person can mend (no checkpoint can be trusted, an address
        that cannot be listened on, an error of that kind in a worker).
        """
        return asyncio.run(self._main())

    # --- the outer frame ------------------------------------------------------------------
    async def _main(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Verdict] = self._loop.create_future()
        self._cleared = asyncio.Event()
        self._rendezvous = Rendezvous()
        cluster = self._config.cluster
        metrics = bind(cluster.interface, cluster.metrics_port, "cluster.metrics_port")
        listeners = [
            Listener(self._guard().application, self._control),
            Listener(health.application(self._health, self._render_metrics), metrics),
        ]
        self._lifeline, lifeline_end = lifeline.pipe()
        settings = Settings(
            run=self._config.name, config_hash=self._config_hash,
            dataset_version=self._dataset_version, keep_last=self._config.checkpoint.keep_last,
            keep_every=self._config.checkpoint.keep_every,
            extent_bytes=self._config.checkpoint.extent_mb << 20,
        )  # fmt: skip
        self._mover = MoverLink(
            self._config, self._folder, self._secret, settings, self._take_from_mover
        )
        self._address = self._term.address
        tasks = [asyncio.create_task(listener.serve()) for listener in listeners]
        tasks += [asyncio.create_task(self._tick()), asyncio.create_task(self._watch_term())]
        run = asyncio.create_task(self._run())
        self._catch_signals(run)
        try:
            return await run
        except asyncio.CancelledError:
            if not self._leave_now:
                raise
            return LEFT_AT_ONCE
        finally:
            if self._leave_now:
                os.close(lifeline_end)  # ends every child
            await self._shut_down(listeners, tasks)
            if not self._leave_now:
                os.close(lifeline_end)
            os.close(self._lifeline)

    async def _shut_down(
        self, listeners: Sequence[Listener], tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        self._members.kill()
        if self._template is not None:
            await self._template.stop()
        await self._mover.stop()
        self._members.close()
        await self._board.flush(sync=True)
        for listener in listeners:
            listener.close()
        served = tasks[: len(listeners)]
        for task in tasks[len(listeners) :]:
            task.cancel()
        await asyncio.wait(served, timeout=5.0)

    def _guard(self) -> Guard:
        return Guard(
            {"/report": self._report, "/store": self._rendezvous.handle, QUESTION: self._who},
            self._secret,
            Verifier(self._secret, time.time),
            lambda: self._generation,
            outside=frozenset({QUESTION}),
        )

    # --- the run --------------------------------------------------------------------------
    async def _run(self) -> int:
        resumed = await asyncio.to_thread(newest_generation, self._store) > 0
        reason = "resume" if resumed else "start"
        first = True
        while True:
            try:
                await self._open(reason, resumed if first else None)
                verdict = await self._verdict
            except UserError as error:
                self._fail(str(error))
                raise
            except FencedError as error:
                verdict = Failed(str(error))
            except (MoverGoneError, ChildFailedError) as error:
                # A child that dies under a running generation is replaced; one that cannot
                # even start will not the next time.
                verdict = Lost("mover_lost", str(error)) if first is False else Failed(str(error))
            first = False
            await self._clear()
            code = await self._act(verdict)
            if code is not None:
                return code
            assert isinstance(verdict, Lost)
            reason = verdict.reason

    async def _act(self, verdict: Verdict) -> int | None:
        """The exit code, or None to open the next generation."""
        if isinstance(verdict, Finished | Left):
            await self._mover.drain(self._generation)
        if isinstance(verdict, Lost) and self._stop is None:
            return self._restart_or_give_up(verdict)
        match verdict:
            case Finished(step):
                self._become(RunState.FINISHED)
                self._board.emit("agent", RunFinished(step=step))
                return 0
            case Left(step):
                self._stopped(step, self._stop or "the workers left")
                return 0
            case Failed(sentence, code):
                self._fail(sentence)
                if code == exits.USER:
                    raise UserError(sentence)
                self._say(sentence)
                return code
            case Lost(_, cause):
                self._stopped(self._committed, f"{self._stop}, but while saving: {cause}")
                return 1

    def _restart_or_give_up(self, verdict: Lost) -> int | None:
        self._become(RunState.RECOVERING)
        self._restarts = self._restarts.after_loss(self._committed)
        limit = self._config.cluster.max_restarts_without_progress
        sentence = give_up(self._restarts, limit, verdict.cause)
        if sentence is None:
            return None
        self._fail(sentence)
        self._say(sentence)
        return 1

    def _stopped(self, step: int, reason: str) -> None:
        self._become(RunState.STOPPED)
        self._board.emit("agent", RunStopped(reason, step=step))
        self._say(f"stopped after step {step} ({reason}); resume with: {self._resume}")

    def _fail(self, sentence: str) -> None:
        self._become(RunState.FAILED)
        if self._generation:
            self._board.emit("agent", RunFailed(sentence, step=self._committed))

    def _become(self, state: RunState) -> None:
        self._state = advance(self._state, state)

    # --- a generation ---------------------------------------------------------------------
    async def _open(self, reason: str, resumed: bool | None) -> None:
        """Open the next generation and fork its workers; `resumed` is None but for the first."""
        if self._state is RunState.RECOVERING:
            self._become(RunState.OPENING)
        await self._ensure_children()
        await asyncio.to_thread(self._term.check)
        generation = await asyncio.to_thread(newest_generation, self._store) + 1
        topology = plan_topology(self._config, generation, self._node)
        value = {"topology": topology.to_json(), "term": self._term.number, "reason": reason}
        await asyncio.to_thread(open_generation, self._store, generation, value)
        await self._board.flush()
        self._board.begin(generation)
        self._generation = generation  # from here on, requests of older ones are refused
        self._rendezvous.begin(generation)
        self._verdict = self._loop.create_future()
        if resumed is not None:
            self._board.emit("agent", RunStarted(
                self._config.name, self._config_hash, self._dataset_version, resumed))  # fmt: skip
        newest = await self._mover.begin(topology)
        self._committed = self._step = newest.step
        self._board.emit("agent", GenerationStarted(
            topology.to_json(), reason, newest.key, step=newest.step))  # fmt: skip
        await self._board.flush()
        if newest.step >= self._config.train.steps:
            self._decide(Finished(newest.step))
            return
        await self._fork(topology, newest.key, newest.step)

    async def _fork(self, topology: Topology, restore_key: str | None, start_step: int) -> None:
        self._cleared.clear()
        self._members = Members(topology.generation, topology.world_size)
        assert self._template is not None
        for boot in boots(
            self._config, topology, folder=self._folder, agent=self._address,
            mover_socket=self._mover.socket_path, cores=usable_cores(),
            restore_key=restore_key, start_step=start_step,
        ):  # fmt: skip
            self._members.expect(boot.rank, self._loop.time())
            await self._template.fork(boot, self._secret)

    async def _ensure_children(self) -> None:
        """A mover and a template that are alive; both start at once."""
        starting = [self._mover.ensure(self._lifeline, self._mover_gone)]
        if self._template is None or not self._template.alive:
            if self._template is not None:
                await self._template.stop()
            log = self._folder / "logs" / "template.log"
            self._template = await Template.start(
                self._lifeline, self._entry, log, self._told, self._template_gone
            )
            starting.append(self._template.ready())
        await asyncio.gather(*starting)

    async def _clear(self) -> None:
        """Nobody of the generation is left when this returns."""
        template = self._template
        if template is not None and template.alive:
            for member in self._members.alive:
                if member.pid:
                    await template.kill(member.pid)
            if self._members.alive:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._cleared.wait(), CLEAR_SECONDS)
        self._members.kill()  # what a dead template could not kill
        self._members.close()
        self._members = Members(self._generation, 0)

    def _decide(self, verdict: Verdict) -> None:
        """The first verdict counts: what follows it is only its consequence."""
        if not self._verdict.done():
            self._verdict.set_result(verdict)

    # --- news -----------------------------------------------------------------------------
    def _told(self, message: dict[str, Any]) -> None:
        """The template has forked a worker, or one has ended."""
        rank, pid = int(message["rank"]), int(message["pid"])
        if message["event"] == "forked":
            self._members.forked(rank, pid)
            self._board.emit("agent", WorkerStarted(rank, pid, self._node, step=self._step))
            return
        member = self._members.exited(rank, pid, int(message["code"]))
        if member is None:
            return
        if not self._members.alive:
            self._cleared.set()
        if not self._verdict.done():
            self._judge(member)

    def _judge(self, member: Member) -> None:
        """A worker has ended while its generation lived."""
        assert member.code is not None
        if member.outcome is not None:
            if not self._members.alive:
                self._decide(self._common_outcome())
            return
        log = worker_log(self._folder, self._generation, member.rank)
        match member.code:
            case exits.USER:
                self._decide(Failed(last_lines(log, 1) or "a worker refused to start", exits.USER))
            case exits.NON_FINITE:
                self._decide(Failed(self._non_finite_sentence(member)))
            case exits.PEER_LOST:
                # The one who really died is reported in the same moment; only if nobody is
                # does this worker's word stand.
                self._loop.call_later(
                    self._config.cluster.heartbeat_seconds, self._lose, member, "peer"
                )
            case _:
                self._lose(member, "exit")

    def _lose(self, member: Member, noticed_by: str) -> None:
        if self._verdict.done() or self._members.generation != self._generation:
            return
        code = member.code if member.code is not None else -signal.SIGKILL
        cause = exits.describe(code)
        log = worker_log(self._folder, self._generation, member.rank)
        if code in (exits.CRASHED, exits.DONE):
            cause = f"{cause}: {last_lines(log, 1) or 'it said nothing'}"
            self._say(f"worker {member.rank} ended; the last lines of {log}:")
            self._say(last_lines(log, 12))
        self._report_loss(member, cause, noticed_by, "worker_lost")

    def _report_loss(self, member: Member, cause: str, noticed_by: str, reason: str) -> None:
        self._board.emit(
            "agent", WorkerLost(member.rank, member.pid, cause, noticed_by, step=self._step)
        )
        self._say(f"worker {member.rank} (process {member.pid}) is lost: {cause}")
        self._decide(Lost(reason, f"worker {member.rank}: {cause}"))

    def _common_outcome(self) -> Verdict:
        outcomes = {member.outcome for member in self._members}
        if len(outcomes) > 1 or None in outcomes:
            return Lost("worker_lost", f"the workers ended differently: {outcomes}")
        ((kind, step),) = [o for o in outcomes if o is not None]
        return Finished(step) if kind == "finished" else Left(step)

    def _non_finite_sentence(self, member: Member) -> str:
        found = self._non_finite
        if found is None:
            return f"a loss or gradient is not finite on rank {member.rank}"
        return (
            f"step {found.step}: {found.parameter} is not finite on rank {found.rank}; the state "
            f"before that step is unharmed: try a lower train.optimizer.learning_rate"
        )

    def _template_gone(self) -> None:
        self._say("the template ended; its workers are given up and a new one is started")
        self._decide(Lost("template_lost", "the template ended"))

    def _mover_gone(self) -> None:
        self._say("the mover ended, and its arenas with it; a new one is started")
        self._decide(Lost("mover_lost", "the mover ended"))

    def _take_from_mover(self, event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            self._committed = max(self._committed, event.step)
        self._board.emit("mover", event)

    # --- requests -------------------------------------------------------------------------
    async def _report(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        if self._members.generation != generation:
            raise FencedError(f"generation {generation} is over")
        writer = f"rank{int(body['rank'])}"
        events = self._members.report(body, self._loop.time())
        for event in events:
            self._note(int(body["rank"]), event)
            self._board.emit(writer, event)
        sync = bool(body["sync"])
        stored = await self._board.flush(writer, sync) if events or sync else True
        return {"stop": self._stop is not None, "generation": self._generation, "stored": stored}

    def _note(self, rank: int, event: Event) -> None:
        """What the agent itself wants to know of a worker's events."""
        match event:
            case StepDone():
                self._step = event.step
            case NonFinite():
                self._non_finite = event
            case WorkerReady():
                self._members.ready(rank)
                if self._members.all_ready and self._state is RunState.OPENING:
                    self._become(RunState.TRAINING)

    async def _who(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"term": self._term.number, "pid": os.getpid(), "node": self._node}

    def _health(self) -> dict[str, Any]:
        return {
            "state": str(self._state),
            "term": self._term.number,
            "generation": self._generation,
            "step": self._step,
            "committed": self._committed,
            "workers": len(self._members.alive),
        }

    # --- clocks and signals ---------------------------------------------------------------
    async def _tick(self) -> None:
        """The progress watch; it also stores what the last flush could not."""
        beat = self._config.cluster.heartbeat_seconds
        limit = self._config.cluster.progress_seconds
        last = self._loop.time()
        while True:
            await asyncio.sleep(beat)
            now = self._loop.time()
            if now - last > 5 * beat + 1.0:  # we were stopped ourselves (Ctrl-Z, a paused machine)
                self._members.forgive(now - last)
            last = now
            hung = None if self._verdict.done() else self._members.hung(now, limit)
            if hung is not None:
                cause = f"no progress for {limit:g} s in step {hung.step}, {hung.phase}"
                self._report_loss(hung, cause, "progress", "hang")
            await self._board.flush()

    async def _watch_term(self) -> None:
        while True:
            await asyncio.sleep(TERM_SECONDS)
            try:
                await asyncio.to_thread(self._term.check)
            except FencedError as error:
                self._decide(Failed(str(error)))
                return
            except HoldfastError:
                continue  # the run store is out of reach: that stops no training

    def _catch_signals(self, run: asyncio.Task[int]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Only a process's main thread may; elsewhere whoever started us has them.
            with suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._signalled, number.name, run)

    def _signalled(self, name: str, run: asyncio.Task[int]) -> None:
        if self._stop is None:
            self._stop = name
            self._say(f"{name}: saving and leaving at the next step (Ctrl-C again: at once)")
            if self._generation:
                self._board.emit("agent", StopRequested(name, step=self._step))
            if self._state in (RunState.OPENING, RunState.TRAINING):
                self._become(RunState.LEAVING)
        elif name == "SIGINT":
            self._leave_now = True
            run.cancel()
